"""Chipmunk's columns: groups of 192 query rows, each with the keys that most of it attends to.

With ``p`` the softmax of ``q k^T / sqrt(d)`` over all keys, the score of key ``j`` in group ``g``
is its column sum

    score[g, j] = sum over the queries i of group g of  p[i, j]

and each group keeps the ``top`` share of the keys by it, and each further key with the probability
``random``. Before, tokens are put in the order of voxels of 4x6x8 tokens, 192 each, which follow
each other in raster order; behind them come, in raster order each, the frames, then the rows, then
the columns that fill no voxel. Rows of groups with text keep all keys, and text is kept by all.

Sums are rounded to float16, to the nearest; ties fall to the lower key in the order of voxels.
Which keys are random follows from the seed, the head, the group and the key alone, by a counter
and Philox-4x32-10 (``sparsifiers/draws.py``): they are the same on a GPU.

The sums are half of dense attention's work, and a row's log-sum-exp is as much again unless it is
known. A model that makes a dense step now and then has it: ``block_sparse_attention`` gives it with
``return_lse=True``, :func:`column_sums` takes it, and :func:`select_by` makes a mask of the sums.

Source: Chipmunk, arXiv 2506.03275, and its published code: 5% of the keys and 1% at random for
video. There the column sums come from a dense step, normalised by the softmax of the step before;
here by their own, or by the ``lse`` that is given. Its models keep a mask for up to ten steps, and
compute the difference to an earlier step's output under it; the mask alone is made here. The code
rounds counts to whole tiles of its kernel; here they are as they come.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.errors import wrong
from tessera_cupy.kernels.lifetime import keep_while
from tessera_cupy.masks import KeySlices
from tessera_cupy.permute import TokenOrders
from tessera_cupy.sparsifiers import draws, slices
from tessera_cupy.sparsifiers.parameters import share, whole
from tessera_cupy.sparsifiers.scoring import keep_top
from tessera_cupy.sparsifiers.selection import (
    DTYPES,
    Selection,
    check_finite,
    check_grid,
    checked_inputs,
    flag_of,
    memory,
    namespace,
    watch_sums,
)
from tessera_cupy.video import VideoGrid

#: Query rows of a group, as many as a voxel has tokens.
GROUP = 192
VOXEL = (4, 6, 8)

# The largest float16.
_MOST = np.float32(65504)


def select(
    q: Any,
    k: Any,
    grid: VideoGrid,
    *,
    top: float = 0.05,
    random: float = 0.01,
    seed: int = 0,
    lse: Any = None,
) -> Selection:
    """Choose each group's keys by their column sums, and some at random.

    That is :func:`select_by` of :func:`column_sums`. On a GPU nothing comes to the host and nothing
    waits; a graph can capture it once the grid's order is there, after a first call.

    Args:
        q: (batch, heads, tokens, d) queries in raster order, any float dtype, NumPy or CuPy; on a
            GPU d is at most 256, and wider types are rounded to float16.
        k: (batch, heads, tokens, d) keys, likewise; on a GPU of q's dtype.
        grid: the video grid that the tokens lie on.
        top: share of the keys with the largest column sums, 0 to 1, rounded to a whole number.
        random: probability of each other key, 0 to 1.
        seed: of the random keys, 0 to 2^64 - 1; the same seed draws the same ones.
        lse: as of :func:`column_sums`.

    Returns:
        A selection whose mask is :class:`~tessera_cupy.masks.KeySlices`, with a batch and head axis
        like ``q``'s, in the order of voxels; of arrays on a GPU over a map that is there too.

    Raises:
        TypeError: as :func:`~tessera_cupy.sparsifiers.selection.checked_inputs` says; ``top`` or
            ``random`` that is no number, ``seed`` that is no integer, ``lse`` that is no array.
        ValueError: likewise; ``top``, ``random`` or ``seed`` outside its range; another shape of
            ``lse``; on a GPU a head dim above 256, or another dtype of k.

    >>> q, k = np.random.default_rng(0).standard_normal((2, 1, 2, 4 * 12 * 8, 32))
    >>> select(q, k, VideoGrid(4, 12, 8), top=0.25, random=0.0).mask.row_counts().tolist()
    [[[96, 96], [96, 96]]]
    """
    xp = checked_inputs(q, k, grid)
    top, random, seed = _checked(top, random, seed)
    _check_lse(lse, q, xp)
    if xp is np:
        return _chosen_here(_sums_here(q, k, grid, lse), grid, top, random, seed)
    used = memory()
    return _chosen_there(_sums_there(q, k, grid, lse, used, used), grid, top, random, seed, 0)


def column_sums(q: Any, k: Any, grid: VideoGrid, *, lse: Any = None) -> Any:
    """What each key gets of the attention of each group of queries, in the order of voxels.

    Args:
        q: as of :func:`select`.
        k: likewise.
        grid: likewise.
        lse: (batch, heads, tokens) natural log-sum-exp of each query's ``q k^T / sqrt(d)``, in
            raster order, any float dtype, where q is: such as dense attention gives, of this step
            or of another. None computes that of dense attention, for as much work again.

    Returns:
        (batch, heads, groups, tokens) float16, where q is; what is above the largest float16 is
        that. On a GPU nothing waits. There NaN or an infinity in q, k or ``lse`` makes NaN of all
        sums of at least one group of the head, and :func:`select_by` watches for that.

    Raises:
        TypeError: as :func:`select`.
        ValueError: likewise; NaN or an infinity in NumPy arrays.

    >>> q, k = np.random.default_rng(0).standard_normal((2, 1, 2, 4 * 12 * 8, 32))
    >>> sums = column_sums(q, k, VideoGrid(4, 12, 8))
    >>> sums.shape, sums.astype(float).sum(axis=3).round().tolist()
    ((1, 2, 2, 384), [[[192.0, 192.0], [192.0, 192.0]]])
    """
    xp = checked_inputs(q, k, grid, watch=False)
    _check_lse(lse, q, xp)
    if xp is np:
        return _sums_here(q, k, grid, lse)
    used: list[Any] = []
    # The sums are the caller's, and what makes them lives as long.
    made = _sums_there(q, k, grid, lse, used, [])
    keep_while(made, (_order(grid), used))
    return made[..., : grid.tokens]


def select_by(
    sums: Any,
    grid: VideoGrid,
    *,
    top: float = 0.05,
    random: float = 0.01,
    seed: int = 0,
) -> Selection:
    """Choose each group's keys by column sums that are given, and some at random.

    On a GPU nothing comes to the host and nothing waits. Float16 whose rows begin at multiples of
    16 bytes, such as :func:`column_sums` gives, are read in place.

    Args:
        sums: (batch, heads, groups, tokens) in the order of voxels, any float dtype, NumPy or CuPy.
        grid: the video grid of the tokens.
        top: as of :func:`select`.
        random: likewise.
        seed: likewise.

    Returns:
        As :func:`select`; :meth:`Selection.check <tessera_cupy.sparsifiers.Selection.check>` tells
        whether the sums were numbers alone.

    Raises:
        TypeError: sums that are no NumPy or CuPy array of floats; a number of another kind.
        ValueError: another shape; NaN or an infinity in NumPy arrays; a number out of range.

    >>> sums = np.arange(384, dtype=np.float32).reshape(1, 1, 1, 384).repeat(2, axis=2)
    >>> select_by(sums, VideoGrid(4, 12, 8), top=0.01, random=0.0).mask.indices.tolist()
    [380, 381, 382, 383, 380, 381, 382, 383]
    """
    xp = namespace(sums, "sums")
    check_grid(grid)
    if sums.dtype.name not in DTYPES:
        fix = "convert with astype"
        raise TypeError(wrong("sums", f"one of {', '.join(DTYPES)}", sums.dtype.name, fix))
    rows = (-(-grid.tokens // GROUP), grid.tokens)
    if len(sums.shape) != 4 or tuple(sums.shape[2:]) != rows or 0 in sums.shape:
        expected = f"shape (batch, heads, {rows[0]}, {rows[1]}) for a grid of {grid}"
        fix = "pass what column_sums gives for the grid"
        raise ValueError(wrong("sums", expected, f"shape {tuple(sums.shape)}", fix))
    top, random, seed = _checked(top, random, seed)
    flag = watch_sums(sums)
    if xp is np:
        return _chosen_here(_rounded(sums), grid, top, random, seed)
    return _chosen_there(sums, grid, top, random, seed, flag)


def _checked(top: Any, random: Any, seed: Any) -> tuple[float, float, int]:
    top, random = (
        share(name, number, "pass 0.05 for 5%")
        for name, number in (("top", top), ("random", random))
    )
    return top, random, whole("seed", seed, 0, 2**64 - 1, "pass 0, or another number")


def _check_lse(lse: Any, q: Any, xp: Any) -> None:
    if lse is None:
        return
    if namespace(lse, "lse") is not xp:
        expected = f"a {'NumPy' if xp is np else 'CuPy'} array, as q"
        raise TypeError(wrong("lse", expected, type(lse).__name__, "keep it with q and k"))
    if lse.dtype.name not in DTYPES:
        fix = "pass what block_sparse_attention gives with return_lse=True"
        raise TypeError(wrong("lse", f"one of {', '.join(DTYPES)}", lse.dtype.name, fix))
    if tuple(lse.shape) != tuple(q.shape[:3]):
        fix = "pass one number a query"
        expected = f"shape {tuple(q.shape[:3])}"
        raise ValueError(wrong("lse", expected, f"shape {tuple(lse.shape)}", fix))
    if xp is np:
        check_finite("lse", lse)
    elif lse.device.id != q.device.id:
        got = f"device {lse.device.id}"
        raise ValueError(wrong("lse", f"q's device {q.device.id}", got, "move it there"))


def _sums_here(q: Any, k: Any, grid: VideoGrid, lse: Any) -> NDArray[np.float16]:
    """The sums of NumPy arrays."""
    order = _order(grid).of(0, 0)
    sums = np.empty((*q.shape[:2], -(-grid.tokens // GROUP), grid.tokens), np.float16)
    for head in np.ndindex(*q.shape[:2]):
        rows = q[head][order].astype(np.float32) / np.float32(math.sqrt(q.shape[3]))
        columns = k[head][order].astype(np.float32).T
        given = None if lse is None else lse[head][order].astype(np.float32)[:, None]
        for group, out in enumerate(sums[head]):
            of_group = slice(group * GROUP, (group + 1) * GROUP)
            p = rows[of_group] @ columns
            with np.errstate(over="ignore"):
                p -= p.max(axis=1, keepdims=True) if given is None else given[of_group]
                np.exp(p, out=p)
                # The rows' sums divide, and the product adds the rows up.
                parts = 1 / p.sum(axis=1) if given is None else np.ones(len(p), np.float32)
                out[:] = _rounded(parts @ p)
    return sums


def _rounded(sums: NDArray[Any]) -> NDArray[np.float16]:
    """As float16, at most the largest one."""
    if sums.dtype == np.float16:
        return sums
    with np.errstate(over="ignore"):
        rounded: NDArray[np.float16] = np.minimum(sums.astype(np.float32), _MOST).astype(np.float16)
    return rounded


def _chosen_here(
    sums: NDArray[np.float16], grid: VideoGrid, top: float, random: float, seed: int
) -> Selection:
    """The selection of NumPy arrays."""
    always = slices.keep_text(grid, GROUP)
    count = round(top * grid.tokens)
    kept = np.empty(sums.shape, np.bool_)
    groups, keys = sums.shape[2:]
    for index, head in enumerate(np.ndindex(*sums.shape[:2])):
        best = keep_top(sums[head][None, None].astype(np.float32), count, always=always)
        kept[head] = best[0, 0] | draws.drawn(index, groups, keys, random, seed)
    mask = KeySlices.from_groups(kept, GROUP, (grid.tokens, grid.tokens))
    return Selection(mask, _order(grid))


def _sums_there(
    q: Any, k: Any, grid: VideoGrid, lse: Any, used: list[Any], results: list[Any]
) -> Any:
    """The sums of arrays on a GPU, in rows that may be longer."""
    from tessera_cupy.kernels import column_sums as kernel

    flags = (flag_of(q), flag_of(k), flag_of(q, "lse"))
    return kernel.sums(q, k, _order(grid), lse, flags, used, results)


def _chosen_there(
    sums: Any, grid: VideoGrid, top: float, random: float, seed: int, flag: int
) -> Selection:
    """The selection of sums on a GPU, in rows that may be longer than the tokens."""
    from tessera_cupy.kernels import key_bounds

    used = memory()
    batch, heads, groups, _ = sums.shape
    text = slices.text_of(grid)
    full = (text.start // GROUP, -(-text.stop // GROUP)) if grid.text_tokens else (0, 0)
    count, limit = round(top * grid.tokens), draws.threshold(random)
    if limit >= 2**32:
        full, limit = (0, groups), 0
    bits = key_bounds.keep(
        key_bounds.readable(sums, used),
        grid.tokens,
        (0, grid.tokens),
        full,
        count=count,
        level=np.float16(np.nan),
        memory=used,
        text=(text.start, text.stop),
        drawn=limit,
        seed=seed,
        flag=flag,
    )
    most = _most(batch * heads, groups, full[1] - full[0], count, random, grid)
    tokens = (grid.tokens, grid.tokens)
    return Selection(KeySlices.from_packed_bits(bits, GROUP, tokens, most=most), _order(grid))


def _most(
    planes: int, groups: int, whole_groups: int, count: int, random: float, grid: VideoGrid
) -> int:
    """Keys of all groups that are not exceeded, but for one seed in 10^20."""
    rows = planes * (groups - whole_groups)
    tried = rows * grid.tokens
    drawn = tried * random
    of_rows = rows * (count + grid.text_tokens) + drawn + 10 * math.sqrt(drawn) + 100
    return min(tried, math.ceil(of_rows)) + planes * whole_groups * grid.tokens


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
