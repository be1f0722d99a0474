"""Masks whose every query keeps a few intervals of keys, exactly: coordinates become token bits.

Windows in time and space, bands and sinks are such masks once tokens are in the right order. Where
all queries of a block keep all of a key block it is full and carries no token bits; only the blocks
that an interval's end crosses do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tessera_cupy.errors import wrong
from tessera_cupy.masks.block_mask import BlockMask

_Int = NDArray[np.int64]


def interval_mask(
    start: ArrayLike, end: ArrayLike, block_size: Sequence[int], keys: int
) -> BlockMask:
    """The mask in which each query keeps the keys of the intervals ``[start, end)``.

    Args:
        start: (heads, queries, n) or (queries, n) integers, the first key of each of the ``n``
            intervals of each query. Intervals may overlap.
        end: likewise, one past the last key; an interval with ``end <= start`` is empty.
        block_size: (bq, bkv) as in :meth:`BlockMask.from_dense`.
        keys: number of keys; intervals are cut to ``0 .. keys``.

    Returns:
        A mask of (queries, keys) tokens with a head axis of ``heads`` or 1.

    Raises:
        TypeError: ``start`` or ``end`` holds no integers.
        ValueError: shapes that do not fit each other, no key, or an illegal block size.

    Example:
        >>> place = np.arange(6)
        >>> band = interval_mask(place[:, None] - 1, place[:, None] + 2, (16, 16), 6)
        >>> band.active_pairs()
        16
    """
    first, last = _checked(start, end, keys)
    heads, queries, _ = first.shape
    bq, bkv = block_size
    nk = -(-keys // bkv)
    counts: list[_Int] = []
    columns: list[NDArray[np.int32]] = []
    partial: list[NDArray[np.int32]] = []
    bits: list[NDArray[np.uint32]] = []
    crossed = 0
    edges = np.minimum(np.arange(nk + 1) * bkv, keys)
    for head in range(heads):
        for low in range(0, queries, bq):
            begin, finish = first[head, low : low + bq], last[head, low : low + bq]
            kept = _pairs(begin, finish, edges)
            listed = np.flatnonzero(kept)
            part = kept[listed] < len(begin) * np.diff(edges)[listed]
            numbers = np.full(len(listed), -1, np.int32)
            numbers[part] = crossed + np.arange(np.count_nonzero(part))
            bits.append(_bits(begin, finish, listed[part] * bkv, bq, bkv))
            crossed += len(bits[-1])
            counts.append(np.asarray([len(listed)]))
            columns.append(listed.astype(np.int32))
            partial.append(numbers)
    return BlockMask.from_csr(
        np.concatenate([[0], np.cumsum(np.concatenate(counts))]),
        np.concatenate(columns),
        (-(-queries // bq), nk),
        block_size,
        (queries, keys),
        heads=heads,
        partial=np.concatenate(partial) if crossed else None,
        token_bits=np.concatenate(bits) if crossed else None,
    )


def _checked(start: ArrayLike, end: ArrayLike, keys: int) -> tuple[_Int, _Int]:
    """Disjoint ascending intervals, (heads, queries, n) each."""
    ends = []
    for name, given in (("start", start), ("end", end)):
        array = np.asarray(given)
        if not np.issubdtype(array.dtype, np.integer):
            raise TypeError(wrong(name, "integers", array.dtype, "pass indices of keys"))
        if array.ndim not in (2, 3) or 0 in array.shape:
            raise ValueError(
                wrong(
                    name,
                    "shape (heads, queries, n) or (queries, n), none of them 0",
                    f"shape {array.shape}",
                    "pass an interval of each query at least",
                )
            )
        ends.append(np.clip(array, 0, keys).astype(np.int64))
    first, last = ends
    if first.shape != last.shape:
        raise ValueError(
            wrong("end", f"start's shape {first.shape}", last.shape, "end each interval once")
        )
    if keys < 1:
        raise ValueError(wrong("keys", "at least 1", keys, "pass the number of keys"))
    first, last = (x[None] if x.ndim == 2 else x for x in (first, last))
    order = np.argsort(first, axis=-1, kind="stable")
    first, last = (np.take_along_axis(x, order, axis=-1) for x in (first, last))
    # Each begins where those before it have ended.
    reached = np.maximum.accumulate(last, axis=-1)
    first[..., 1:] = np.maximum(first[..., 1:], reached[..., :-1])
    return first, np.maximum(first, last)


def _pairs(begin: _Int, end: _Int, edges: _Int) -> _Int:
    """(key blocks,) active pairs of a block of queries with each block of keys."""
    # Neighbouring queries often keep the same keys: each kind is counted once.
    change = np.flatnonzero((begin[1:] != begin[:-1]).any(axis=1) | (end[1:] != end[:-1]).any(1))
    kinds = np.concatenate([[0], change + 1])
    queries = np.diff(np.concatenate([kinds, [len(begin)]]))
    below = np.zeros(len(edges), np.int64)
    for of_kind, weight in zip(kinds, queries, strict=True):
        upto = np.minimum(end[of_kind, :, None], edges) - np.minimum(begin[of_kind, :, None], edges)
        below += weight * upto.sum(axis=0)
    return np.diff(below)


def _bits(begin: _Int, end: _Int, firsts: _Int, bq: int, bkv: int) -> NDArray[np.uint32]:
    """(blocks, bq, words) token bits of the key blocks that begin at ``firsts``."""
    words = -(-bkv // 32)
    word = firsts[:, None] + 32 * np.arange(words)
    bits = np.zeros((len(firsts), bq, words), np.uint64)
    one = np.uint64(1)
    for i in range(begin.shape[1]):
        low, high = (
            np.clip(x[None, :, i, None] - word[:, None], 0, 32).astype(np.uint64)
            for x in (begin, end)
        )
        bits[:, : len(begin)] |= (one << high) - (one << low)
    # Columns past the block, in the last word, belong to the next one.
    if bkv % 32:
        bits[:, :, -1] &= (one << np.uint64(bkv % 32)) - one
    return bits.astype(np.uint32)
