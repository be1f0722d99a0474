"""SpargeAttn: block means where a block's tokens are alike, and the whole block where not.

In blocks of 128 queries and 64 keys, with ``q[i]`` and ``k[j]`` the means over the tokens of blocks
``i`` and ``j``, a block is alike when the mean cosine similarity of its pairs of tokens exceeds
``similarity``; for keys this is measured after their mean over all tokens is taken away. Then

    p[i, :] = softmax over the alike j of  q[i] . k[j] / sqrt(d)

and each row keeps, by falling ``p``, as many blocks as their sum stays at most ``cdf``, and one at
least; or, with ``top_k``, that share of the blocks. Key blocks that are not alike are kept by all
rows, and the rows of query blocks that are not alike keep all.

Source: SpargeAttn, arXiv 2502.18137, and its code: the cdf 0.98 with the similarity 0.6, or the
top-k 0.5 with -0.1. The code leaves tokens in raster order; the paper puts them along a Hilbert
curve too, which makes blocks more alike. Text is treated as all tokens are.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from tessera_cupy.errors import wrong
from tessera_cupy.masks import BlockMask
from tessera_cupy.permute import TokenOrders
from tessera_cupy.sparsifiers import fixed
from tessera_cupy.sparsifiers.scoring import keep_mass, keep_top, likeness, pool, scores
from tessera_cupy.sparsifiers.selection import Selection, checked_inputs
from tessera_cupy.video import VideoGrid

BLOCK_SIZE = (128, 64)
ORDERS = ("raster", "hilbert")

# A score without weight; finite, so that a row of nothing else has a softmax.
_NOTHING = np.float32(-1e30)


def select(
    q: Any,
    k: Any,
    grid: VideoGrid,
    *,
    cdf: float = 0.98,
    top_k: float | None = None,
    similarity: float = 0.6,
    order: str = "raster",
) -> Selection:
    """Choose the blocks by their means, and keep those that a mean does not stand for.

    Args:
        q: (batch, heads, tokens, d) queries in raster order, any float dtype, NumPy or CuPy.
        k: (batch, heads, tokens, d) keys, likewise.
        grid: the video grid that the tokens lie on.
        cdf: share of a row's softmax that the kept blocks do not exceed, 0 to 1; 1 keeps all.
        top_k: in its place the share of the key blocks that each row keeps, 0 to 1.
        similarity: mean cosine similarity, -1 to 1, that the tokens of a block must exceed.
        order: ``"raster"``, or ``"hilbert"``, which needs the extra ``video``.

    Returns:
        A selection of uniform blocks, whose mask has a batch and head axis like ``q``'s.

    Raises:
        TypeError: as :func:`~tessera_cupy.sparsifiers.selection.checked_inputs` says.
        ValueError: likewise; an unknown order; shares outside 0 to 1, a similarity outside -1 to 1.
        MissingExtraError: numpy-hilbert-curve, for that order, is not installed.

    >>> q, k = np.random.default_rng(0).standard_normal((2, 1, 2, 4 * 16 * 16, 32))
    >>> select(q, k, VideoGrid(4, 16, 16), top_k=0.5, similarity=-0.1).mask.density()
    0.5
    """
    xp = checked_inputs(q, k, grid)
    _check(cdf, top_k, similarity, order)
    orders = _orders(grid, order)
    bq, bkv = BLOCK_SIZE
    centred = k.astype(xp.float32) - pool(k, grid.tokens, "mean")
    alike_q = likeness(q, bq, orders=orders) > similarity
    alike_k = likeness(centred, bkv, orders=orders) > similarity
    means = pool(q, bq, "mean", orders=orders), pool(k, bkv, "mean", orders=orders)
    score = scores(*means, scale=1 / math.sqrt(q.shape[3]))
    score = xp.where(alike_k[:, :, None, :], score, _NOTHING)
    if top_k is not None:
        kept = keep_top(score, int(top_k * score.shape[3]))
    else:
        kept = _within(keep_mass(score, cdf), score, cdf, xp)
    kept |= ~alike_q[:, :, :, None]
    kept |= ~alike_k[:, :, None, :]
    mask = BlockMask.from_dense(kept, BLOCK_SIZE, (grid.tokens, grid.tokens))
    return Selection(mask, orders)


def _within(kept: Any, score: Any, mass: float, xp: Any) -> Any:
    """Rows without the block with which their sum passes the mass, where they keep another."""
    if mass == 1:
        return kept
    columns = kept.shape[3]
    lowest = xp.where(kept, score, xp.float32(np.inf))
    # The last of the lowest ones, as ties are kept from the lower column on.
    last = columns - 1 - lowest[..., ::-1].argmin(axis=-1)
    several = kept.sum(axis=-1) > 1
    passing = xp.arange(columns) == last[..., None]
    return kept & ~(passing & several[..., None])


def _check(cdf: float, top_k: float | None, similarity: float, order: str) -> None:
    for name, value in (("cdf", cdf), ("top_k", top_k)):
        if value is not None and not 0 <= value <= 1:
            raise ValueError(wrong(name, "a share from 0 to 1", value, "pass 0.5 for a half"))
    if not -1 <= similarity <= 1:
        expected = "a cosine similarity from -1 to 1"
        raise ValueError(wrong("similarity", expected, similarity, "pass 0.6, the published one"))
    if order not in ORDERS:
        raise ValueError(wrong("order", f"one of {', '.join(ORDERS)}", repr(order), "pick one"))


@lru_cache(maxsize=16)
def _orders(grid: VideoGrid, order: str) -> TokenOrders:
    if order == "raster":
        return fixed.raster(grid.tokens)
    return TokenOrders(grid.curve_order(order).astype(np.int32))
