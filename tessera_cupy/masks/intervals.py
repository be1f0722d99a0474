"""Masks whose every query keeps a few intervals of keys, exactly: coordinates become token bits.

Windows in time and space, bands and sinks are such masks once tokens are in the right order. Where
all queries of a block keep all of a key block it is full and carries no token bits; only the blocks
that an interval's end crosses do.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tessera_cupy.errors import wrong
from tessera_cupy.masks.block_mask import BlockMask
from tessera_cupy.masks.geometry import check_blocks, pair

_Int = NDArray[np.int64]
# Query rows times key blocks that are worked on at a time.
_CHUNK = 1 << 25
# Keys of different queries are this far apart where all are searched together.
_FAR = 1 << 40


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
    bq, bkv = block_size = pair(block_size, "block_size")
    check_blocks(block_size, "choose such a block")
    first, last = _checked(start, end, keys)
    heads, queries, _ = first.shape
    nq, nk = -(-queries // bq), -(-keys // bkv)
    sizes = np.minimum(np.full(nk, bkv), keys - bkv * np.arange(nk))
    counts: list[_Int] = []
    columns: list[NDArray[np.int32]] = []
    partial: list[NDArray[np.int32]] = []
    bits: list[NDArray[np.uint32]] = []
    crossed = 0
    chunk = max(1, _CHUNK // (nk * bq)) * bq
    for head in range(heads):
        for low in range(0, queries, chunk):
            begin, finish = first[head, low : low + chunk], last[head, low : low + chunk]
            kept = _pairs(begin, finish, bq, bkv, nk)
            rows = np.minimum(np.full(len(kept), bq), len(begin) - bq * np.arange(len(kept)))
            block, column = np.nonzero(kept)
            part = kept[block, column] < rows[block] * sizes[column]
            numbers = np.full(len(column), -1, np.int32)
            numbers[part] = crossed + np.arange(np.count_nonzero(part))
            bits.append(_bits(begin, finish, block[part], column[part], bq, bkv))
            crossed += len(bits[-1])
            counts.append(np.count_nonzero(kept, axis=1))
            columns.append(column.astype(np.int32))
            partial.append(numbers)
    return BlockMask.from_csr(
        np.concatenate([[0], np.cumsum(np.concatenate(counts))]),
        np.concatenate(columns),
        (nq, nk),
        block_size,
        (queries, keys),
        heads=heads,
        partial=np.concatenate(partial) if crossed else None,
        token_bits=np.concatenate(bits) if crossed else None,
    )


def _checked(start: ArrayLike, end: ArrayLike, keys: int) -> tuple[_Int, _Int]:
    """Disjoint ascending intervals, (heads, queries, n) each."""
    try:
        keys = operator.index(keys)
    except TypeError:
        raise TypeError(wrong("keys", "an int", repr(keys), "pass the number of keys")) from None
    if keys < 1:
        raise ValueError(wrong("keys", "at least 1", keys, "pass the number of keys"))
    ends = []
    for name, given in (("start", start), ("end", end)):
        try:
            array = np.asarray(given)
        except ValueError:
            got = "lists of different lengths"
            raise ValueError(wrong(name, "one array", got, "pad them with empty ones")) from None
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
    first, last = (x[None] if x.ndim == 2 else x for x in (first, last))
    order = np.argsort(first, axis=-1, kind="stable")
    first, last = (np.take_along_axis(x, order, axis=-1) for x in (first, last))
    # Each begins where those before it have ended.
    reached = np.maximum.accumulate(last, axis=-1)
    first[..., 1:] = np.maximum(first[..., 1:], reached[..., :-1])
    return first, np.maximum(first, last)


def _pairs(begin: _Int, end: _Int, bq: int, bkv: int, nk: int) -> _Int:
    """(query blocks, key blocks) active pairs."""
    query, which = np.nonzero(end > begin)
    first, last = begin[query, which], end[query, which]
    low, high = first // bkv, (last - 1) // bkv
    block = query // bq
    rows = -(-len(begin) // bq)
    # Whole key blocks from the first to the last, by where they begin and end, less what is cut.
    change = np.zeros((rows, nk + 1), np.int64)
    cut = np.zeros((rows, nk), np.int64)
    np.add.at(change, (block, low), bkv)
    np.add.at(change, (block, high + 1), -bkv)
    np.add.at(cut, (block, low), first - low * bkv)
    np.add.at(cut, (block, high), (high + 1) * bkv - last)
    return np.cumsum(change[:, :-1], axis=1) - cut


def _bits(
    begin: _Int, end: _Int, block: _Int, column: _Int, bq: int, bkv: int
) -> NDArray[np.uint32]:
    """(entries, bq, words) token bits of the entries in these query and key blocks."""
    words = -(-bkv // 32)
    bits = np.zeros((len(block), bq, words), np.uint64)
    query = block[:, None] * bq + np.arange(bq)
    there = query < len(begin)
    query = np.minimum(query, len(begin) - 1)
    word = bkv * column[:, None, None] + 32 * np.arange(words)
    one = np.uint64(1)
    # The intervals of a query ascend: of those that end behind a block's first key, the next few.
    n = begin.shape[1]
    keys = np.arange(len(begin))[:, None] * _FAR + end
    at = np.searchsorted(keys.ravel(), query * _FAR + bkv * column[:, None], side="right")
    for further in range(n):
        i = at + further - query * n
        mine = there & (i < n)
        i = np.minimum(i, n - 1)
        low, high = begin[query, i], end[query, i]
        mine &= low < bkv * (column[:, None] + 1)
        if not mine.any():
            break
        low, high = (np.clip(x[..., None] - word, 0, 32).astype(np.uint64) for x in (low, high))
        bits |= np.where(mine[..., None], (one << high) - (one << low), np.uint64(0))
    # Columns past the block, in the last word, belong to the next one.
    if bkv % 32:
        bits[:, :, -1] &= (one << np.uint64(bkv % 32)) - one
    return bits.astype(np.uint32)
