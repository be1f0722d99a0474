"""Chipmunk's columns: groups of 192 query rows, each with the keys that most of it attends to.

With ``p`` the softmax of ``q k^T / sqrt(d)`` over all keys, the score of key ``j`` in group ``g``
is its column sum

    score[g, j] = sum over the queries i of group g of  p[i, j]

and each group keeps the ``top`` share of the keys by it, and each further key with the probability
``random``. Before, tokens are put in the order of voxels of 4x6x8 tokens, 192 each, which follow
each other in raster order; behind them come, in raster order each, the frames, then the rows, then
the columns that fill no voxel. Rows of groups with text keep all keys, and text is kept by all.

Source: Chipmunk, arXiv 2506.03275, and its published code: 5% of the keys and 1% at random for
video. There the column sums come from a dense step, normalised by the softmax of the step before;
here by their own. Its models keep a mask for up to ten steps, and compute the difference to an
earlier step's output under it; the mask alone is made here. The code rounds counts to whole tiles
of its kernel; here they are as they come.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.masks import KeySlices
from tessera_cupy.permute import TokenOrders
from tessera_cupy.sparsifiers import slices
from tessera_cupy.sparsifiers.parameters import share, whole
from tessera_cupy.sparsifiers.scoring import keep_top
from tessera_cupy.sparsifiers.selection import Selection, check_finite, checked_inputs
from tessera_cupy.video import VideoGrid

#: Query rows of a group, as many as a voxel has tokens.
GROUP = 192
VOXEL = (4, 6, 8)


def select(
    q: Any,
    k: Any,
    grid: VideoGrid,
    *,
    top: float = 0.05,
    random: float = 0.01,
    seed: int = 0,
) -> Selection:
    """Choose each group's keys by their column sums, and some at random.

    The scores are those of dense attention, computed in NumPy: arrays on a GPU are copied to the
    host, which waits.

    Args:
        q: (batch, heads, tokens, d) queries in raster order, any float dtype, NumPy or CuPy.
        k: (batch, heads, tokens, d) keys, likewise.
        grid: the video grid that the tokens lie on.
        top: share of the keys with the largest column sums, 0 to 1, rounded to a whole number.
        random: probability of each other key, 0 to 1.
        seed: of the random keys, from 0; the same seed draws the same ones.

    Returns:
        A selection whose mask is :class:`~tessera_cupy.masks.KeySlices`, with a batch and head axis
        like ``q``'s, in the order of voxels.

    Raises:
        TypeError: as :func:`~tessera_cupy.sparsifiers.selection.checked_inputs` says; ``top`` or
            ``random`` that is no number, ``seed`` that is no integer.
        ValueError: likewise, on a GPU at once; ``top`` or ``random`` outside 0 to 1, a negative
            ``seed``.

    >>> q, k = np.random.default_rng(0).standard_normal((2, 1, 2, 4 * 12 * 8, 32))
    >>> select(q, k, VideoGrid(4, 12, 8), top=0.25, random=0.0).mask.row_counts().tolist()
    [[[96, 96], [96, 96]]]
    """
    checked_inputs(q, k, grid)
    top, random = (
        share(name, number, "pass 0.05 for 5%")
        for name, number in (("top", top), ("random", random))
    )
    seed = whole("seed", seed, 0, None, "pass 0, or another number")
    queries, keys = (slices.on_host(x) for x in (q, k))
    check_finite("q", queries)
    check_finite("k", keys)
    order = _order(grid)
    always = slices.keep_text(grid, GROUP)
    count = round(top * grid.tokens)
    rng = np.random.default_rng(seed)
    kept = np.empty((*q.shape[:2], -(-grid.tokens // GROUP), grid.tokens), np.bool_)
    for head in np.ndindex(*q.shape[:2]):
        sums = _column_sums(queries[head], keys[head], order.of(0, 0))
        best = keep_top(sums[None, None], count, always=always)
        kept[head] = best[0, 0] | (rng.random(sums.shape, np.float32) < random)
    return Selection(KeySlices.from_groups(kept, GROUP, (grid.tokens, grid.tokens)), order)


def _column_sums(q: NDArray[Any], k: NDArray[Any], order: NDArray[np.int64]) -> NDArray[np.float32]:
    """(groups, tokens) float32 of one head, rows and keys in ``order``."""
    rows = q[order].astype(np.float32) / np.float32(math.sqrt(q.shape[1]))
    columns = k[order].astype(np.float32).T
    sums = np.empty((-(-len(rows) // GROUP), len(rows)), np.float32)
    for group, out in enumerate(sums):
        p = rows[group * GROUP : (group + 1) * GROUP] @ columns
        p -= p.max(axis=1, keepdims=True)
        np.exp(p, out=p)
        # The rows' sums divide, and the product adds the rows up.
        np.matmul(1 / p.sum(axis=1), p, out=out)
    return sums


@lru_cache(maxsize=16)
def _order(grid: VideoGrid) -> TokenOrders:
    """Whole voxels, then the frames, rows and columns that fill none; text keeps its place."""
    size = (grid.t, grid.h, grid.w)
    places = np.arange(grid.video_tokens).reshape(size) + grid.video_start
    t, h, w = (n // edge * edge for n, edge in zip(size, VOXEL, strict=True))
    inside = places[:t, :h, :w].reshape(
        *(x for n, edge in zip((t, h, w), VOXEL, strict=True) for x in (n // edge, edge))
    )
    parts = [
        inside.transpose(0, 2, 4, 1, 3, 5),
        places[t:],
        places[:t, h:],
        places[:t, :h, w:],
    ]
    video = np.concatenate([part.ravel() for part in parts])
    text = slices.text_of(grid)
    words = np.arange(text.start, text.stop)
    order = np.concatenate([words, video] if grid.text_first else [video, words])
    return TokenOrders(order.astype(np.int32)[None])
