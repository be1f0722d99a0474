"""FG-Attn's slices: groups of query rows, each with the single keys that may score high in it.

A group keeps the keys for which an upper bound of their scores ``q_i . k_j / sqrt(d)`` with all of
its queries is at least a threshold, or its share of keys with the largest bounds. There are two:

``"norms"``, by the ball that holds the group's queries: with ``m[g]`` their mean and ``r[g]`` the
largest ``|q_i - m[g]|`` of them,

    bound[g, j] = (m[g] . k[j] + r[g] |k[j]|) / sqrt(d)

``"extremes"``, by the largest and the smallest value of each channel, ``qmax[g]`` and ``qmin[g]``,

    bound[g, j] = sum over channels c of  max(qmax[g, c] k[j, c], qmin[g, c] k[j, c]) / sqrt(d)
                = (qmax[g] . max(k[j], 0) + qmin[g] . min(k[j], 0)) / sqrt(d)

which is one product of matrices of twice the channels. Of the two, norms rank keys better: on
queries and keys made from a real video (bikes, 21 x 30 x 52 tokens, eight heads, groups of 64, by
``bench slices --sharpen 1``), what it takes to keep 44% of the attention is 18% of the keys in
raster order and 12% in SPADE's tiles, by extremes 30% and 20%. Where keys are equally long their
order is that of the mean query's scores.

A group may be cut into ``parts``, 1, 2 or 4, whose largest bound is its own: a closer bound, for as
many times the products. There groups of 128 take 19%, 19% and 17% of the keys with one, two and
four parts in raster order, and 14%, 14% and 16% in tiles.

Bounds are rounded to float16, to the nearest, as is a threshold, so that no key is lost that is at
least the threshold; ties fall to the lower key. Means are first rounded to the type of q where that
has 16 bits, and radii are those about the rounded means.
Groups are neighbours in raster order. Rows of groups with text keep all keys, and text is kept by
all.

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
from tessera_cupy.masks.key_slices import group_count
from tessera_cupy.permute import TokenOrders
from tessera_cupy.sparsifiers import scoring, slices
from tessera_cupy.sparsifiers.parameters import one_of, real
from tessera_cupy.sparsifiers.selection import Selection, checked_inputs, flag_of, memory
from tessera_cupy.video import VideoGrid

#: Share of the video's keys that a group keeps, unless a threshold says which.
BUDGET = 0.3

#: How a group's queries are bounded, best first.
BOUNDS = ("norms", "extremes")

#: Into how many parts a group may be cut.
PARTS = (1, 2, 4)


def select(
    q: Any,
    k: Any,
    grid: VideoGrid,
    *,
    group: int = 64,
    budget: float | None = None,
    threshold: float | None = None,
    bound: str = "norms",
    parts: int = 1,
) -> Selection:
    """Choose each group's keys by the upper bound of their scores.

    On a GPU nothing comes to the host and nothing waits. There q and k are of one dtype, wider
    types are rounded to float16 first, and sums are made in another order than NumPy's.

    Args:
        q: (batch, heads, tokens, d) queries in raster order, any float dtype, NumPy or CuPy; d is
            at most 256 on a GPU.
        k: (batch, heads, tokens, d) keys, likewise.
        grid: the video grid that the tokens lie on.
        group: query rows of a group: 16, 64, 128 or 192.
        budget: share of the video's keys that a group keeps, above 0 to 1, rounded down, at least
            one key; None is :data:`BUDGET`, or nothing where ``threshold`` is given.
        threshold: keep the keys whose bound is at least this, both rounded, in units of a score
            (with ``1 / sqrt(d)``); a group may then keep none.
        bound: one of :data:`BOUNDS`.
        parts: equal parts of a group whose largest bound is the group's, one of :data:`PARTS`.

    Returns:
        A selection whose mask is :class:`~tessera_cupy.masks.KeySlices`, with a batch and head axis
        like ``q``'s, in raster order; of arrays on a GPU over a map that is there too.

    Raises:
        TypeError: as :func:`~tessera_cupy.sparsifiers.selection.checked_inputs` says; a budget or
            threshold that is no number.
        ValueError: likewise; another group, bound or number of parts; a budget outside its range;
            both a budget and a threshold.

    >>> q, k = np.random.default_rng(0).standard_normal((2, 1, 2, 2 * 8 * 16, 32))
    >>> select(q, k, VideoGrid(2, 8, 16), budget=0.25).mask.row_counts().tolist()
    [[[64, 64, 64, 64], [64, 64, 64, 64]]]
    """
    xp = checked_inputs(q, k, grid)
    if budget is not None and threshold is not None:
        got = f"both, {budget} and {threshold}"
        raise ValueError(wrong("budget", "a budget or a threshold", got, "leave one out"))
    budget, threshold = (
        None if number is None else real(name, number, "a number or None", "pass a Python float")
        for name, number in (("budget", budget), ("threshold", threshold))
    )
    if threshold is not None and math.isnan(threshold):
        raise ValueError(wrong("threshold", "a number", threshold, "pass a score, or a budget"))
    _check(bound, parts)
    count = 0 if threshold is not None else _budget(BUDGET if budget is None else budget, grid)
    level = np.float16(0) if threshold is None else _rounded(np.float64(threshold))
    always = slices.keep_text(grid, group)
    tokens = (grid.tokens, grid.tokens)
    order = TokenOrders.raster(grid.tokens)
    if xp is not np:
        return Selection(_there(q, k, grid, group, bound, parts, count, level), order)
    made = bounds(q, k, group, bound=bound, parts=parts)
    made[..., slices.text_of(grid)] = np.nan
    if threshold is None:
        kept = scoring.keep_top(made.astype(np.float32), count, always=always)
    else:
        # NaN, of text, is at least nothing.
        kept = made >= level
        if always is not None:
            kept |= always
    return Selection(KeySlices.from_groups(kept, group, tokens), order)


def bounds(
    q: NDArray[Any], k: NDArray[Any], group: int, *, bound: str = "norms", parts: int = 1
) -> NDArray[np.float16]:
    """Upper bounds of the scores of each key with the queries of each group.

    Args:
        q: (batch, heads, tokens, d) queries, any float dtype, NumPy.
        k: (batch, heads, keys, d) keys, likewise.
        group: as of :func:`select`.
        bound: likewise.
        parts: likewise.

    Returns:
        (batch, heads, groups, keys) float16; what is above the largest one is infinity.

    Raises:
        ValueError: another group, bound or number of parts.

    >>> q = np.array([[3, 0], [0, 4]], np.float32).repeat(8, axis=0)[None, None]
    >>> bounds(q, q[:, :, :1], 16, bound="extremes").ravel().tolist()  # 9 / sqrt(2)
    [6.36328125]
    """
    groups = group_count(q.shape[2], group)
    _check(bound, parts)
    scale = np.float32(1 / math.sqrt(q.shape[3]))
    size = group // parts
    made = np.empty((*q.shape[:2], groups, k.shape[2]), np.float16)
    starts = np.arange(0, -(-q.shape[2] // size), parts)
    for head in np.ndindex(*q.shape[:2]):
        one = tuple(slice(i, i + 1) for i in head)
        keys = k[head].astype(np.float32)
        if bound == "norms":
            score = _by_norms(q[one], keys, size)
        else:
            high, low = (x[0, 0] for x in scoring.pool_kinds(q[one], size, ("max", "min")))
            score = high @ np.maximum(keys, 0).T + low @ np.minimum(keys, 0).T
        score *= scale
        if parts > 1:
            score = np.maximum.reduceat(score, starts, axis=0)
        made[head] = _rounded(score)
    return made


def _by_norms(q: NDArray[Any], keys: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    """(balls, keys) of one head's (1, 1, tokens, d) queries, without the scale."""
    centres = scoring.pool(q, size, "mean")[0, 0]
    if q.dtype.itemsize == 2:
        centres = centres.astype(q.dtype).astype(np.float32)
    rows = q[0, 0].astype(np.float32)
    apart = rows - centres.repeat(size, axis=0)[: len(rows)]
    squares = np.einsum("td,td->t", apart, apart)
    radii = np.sqrt(np.maximum.reduceat(squares, np.arange(0, len(rows), size)))
    lengths = np.sqrt(np.einsum("td,td->t", keys, keys))
    score: NDArray[np.float32] = centres @ keys.T
    for row, radius in zip(score, radii, strict=True):
        row += radius * lengths
    return score


def _rounded(x: Any) -> Any:
    with np.errstate(over="ignore"):
        return x.astype(np.float16)


def _there(
    q: Any,
    k: Any,
    grid: VideoGrid,
    group: int,
    bound: str,
    parts: int,
    count: int,
    level: np.float16,
) -> KeySlices:
    """The slices of arrays on a GPU."""
    from tessera_cupy.kernels import key_bounds

    kept = memory()
    text = slices.text_of(grid)
    competing = (grid.video_start, grid.video_start + grid.video_tokens)
    full = (text.start // group, -(-text.stop // group)) if grid.text_tokens else (0, 0)
    flags = (flag_of(q), flag_of(k))
    norms = bound == "norms"
    made = key_bounds.bounds(q, k, group, parts, competing, flags, kept, norms=norms)
    bits = key_bounds.keep(
        made, grid.tokens, competing, full, count=count, level=level, memory=kept
    )
    most = None
    if count:
        whole = full[1] - full[0]
        keys = (made.shape[2] - whole) * (count + grid.text_tokens) + whole * grid.tokens
        most = made.shape[0] * made.shape[1] * keys
    return KeySlices.from_packed_bits(bits, group, (grid.tokens, grid.tokens), most=most)


def _check(bound: str, parts: int) -> None:
    one_of("bound", bound, BOUNDS, f"pass {BOUNDS[0]!r}")
    # 1.0 and True are in PARTS too.
    whole_number = isinstance(parts, int | np.integer) and not isinstance(parts, bool)
    if not whole_number or parts not in PARTS:
        expected = f"{', '.join(map(str, PARTS[:-1]))} or {PARTS[-1]}"
        raise ValueError(wrong("parts", expected, repr(parts), "pass 1"))


def _budget(budget: float, grid: VideoGrid) -> int:
    if not 0 < budget <= 1:
        expected = "a share above 0 and up to 1"
        raise ValueError(wrong("budget", expected, budget, "pass 0.3 to keep three keys of ten"))
    return max(1, int(budget * grid.video_tokens))
