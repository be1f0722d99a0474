"""FG-Attn's slices: groups of query rows, each with the single keys that may score high in it.

With ``qmax[g]`` and ``qmin[g]`` the largest and smallest value of each channel over the queries of
group ``g``, no query of the group scores more with key ``j`` than

    bound[g, j] = sum over channels c of  max(qmax[g, c] k[j, c], qmin[g, c] k[j, c]) / sqrt(d)
                = (qmax[g] . max(k[j], 0) + qmin[g] . min(k[j], 0)) / sqrt(d)

which is one product of matrices of twice the channels. A group keeps the keys whose bound is at
least a threshold, or its share of keys with the largest bounds. Groups are neighbours in raster
order. Rows of groups with text keep all keys, and text is kept by all.

Source: FG-Attn, arXiv 2509.16518, for slices of 64 queries (16 and up in its second version) by
one key, chosen by an upper bound; the bound by extremes of channels is that of Quest, arXiv
2406.10774, with queries and keys in each other's place. The default share, 0.3, is the density at
which FG-Attn gives its speed over other kernels; it is no setting of a model.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.errors import wrong
from tessera_cupy.masks import KeySlices
from tessera_cupy.permute import TokenOrders
from tessera_cupy.sparsifiers import slices
from tessera_cupy.sparsifiers.scoring import keep_top, pool_kinds, scores
from tessera_cupy.sparsifiers.selection import Selection, check_finite, checked_inputs
from tessera_cupy.video import VideoGrid

#: Share of the video's keys that a group keeps, unless a threshold says which.
BUDGET = 0.3


def select(
    q: Any,
    k: Any,
    grid: VideoGrid,
    *,
    group: int = 64,
    budget: float | None = None,
    threshold: float | None = None,
) -> Selection:
    """Choose each group's keys by the upper bound of their scores.

    On a GPU the products and what is kept are kernels; the slices are made on the host, which
    waits.

    Args:
        q: (batch, heads, tokens, d) queries in raster order, any float dtype, NumPy or CuPy.
        k: (batch, heads, tokens, d) keys, likewise.
        grid: the video grid that the tokens lie on.
        group: query rows of a group: 16, 64, 128 or 192.
        budget: share of the video's keys that a group keeps, above 0 to 1, rounded down, at least
            one key; None is :data:`BUDGET`, or nothing where ``threshold`` is given.
        threshold: keep the keys whose bound is at least this, in units of a score (with
            ``1 / sqrt(d)``); a group may then keep none.

    Returns:
        A selection whose mask is :class:`~tessera_cupy.masks.KeySlices`, with a batch and head axis
        like ``q``'s, in raster order.

    Raises:
        TypeError: as :func:`~tessera_cupy.sparsifiers.selection.checked_inputs` says.
        ValueError: likewise, and NaN or an infinity in ``k`` on a GPU; another group; a budget
            outside its range; both a budget and a threshold.

    >>> q, k = np.random.default_rng(0).standard_normal((2, 1, 2, 2 * 8 * 16, 32))
    >>> select(q, k, VideoGrid(2, 8, 16), budget=0.25).mask.row_counts().tolist()
    [[[64, 64, 64, 64], [64, 64, 64, 64]]]
    """
    xp = checked_inputs(q, k, grid)
    if budget is not None and threshold is not None:
        got = f"both, {budget} and {threshold}"
        raise ValueError(wrong("budget", "a budget or a threshold", got, "leave one out"))
    tokens = (grid.tokens, grid.tokens)
    always = slices.keep_text(grid, group)
    if threshold is not None and math.isnan(threshold):
        raise ValueError(wrong("threshold", "a number", threshold, "pass a score, or a budget"))
    if threshold is None:
        count = _budget(BUDGET if budget is None else budget, grid)
        kept = keep_top(_bounds(q, k, grid, group, xp), count, always=always)
    else:
        # NaN, of text, is at least nothing.
        kept = slices.on_host(_bounds(q, k, grid, group, xp)) >= np.float32(threshold)
        if always is not None:
            kept |= always
    return Selection(KeySlices.from_groups(kept, group, tokens), TokenOrders.raster(grid.tokens))


def _bounds(q: Any, k: Any, grid: VideoGrid, group: int, xp: Any) -> Any:
    """(batch, heads, groups, tokens) float32 where q is; NaN for the keys of text."""
    high, low = (slices.on_host(x) for x in pool_kinds(q, group, ("max", "min")))
    keys = slices.on_host(k).astype(np.float32)
    check_finite("k", keys)
    keys[:, :, slices.text_of(grid)] = np.nan
    # A key's row is read by the two products of its signs, which together have twice the channels.
    sides = np.concatenate([high, low], axis=3), _signs(keys)
    if xp is not np:
        with xp.cuda.Device(q.device.id):
            a, b = (xp.asarray(side) for side in sides)
            return scores(a, b, scale=1 / math.sqrt(q.shape[3]))
    return scores(*sides, scale=1 / math.sqrt(q.shape[3]))


def _signs(keys: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.concatenate([np.maximum(keys, 0), np.minimum(keys, 0)], axis=3)


def _budget(budget: float, grid: VideoGrid) -> int:
    if not 0 < budget <= 1:
        expected = "a share above 0 and up to 1"
        raise ValueError(wrong("budget", expected, budget, "pass 0.3 to keep three keys of ten"))
    return max(1, int(budget * grid.video_tokens))
