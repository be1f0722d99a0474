"""The part of a mask that one rank computes: some heads, rows and columns, as a mask of its own.

Blocks that an edge cuts become ragged blocks, and token bits move with them, so that the part says
of each pair of tokens what the whole mask says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.masks import BlockMask, KeySlices
from tessera_cupy.masks import bits as token_bit
from tessera_cupy.masks.key_slices import block_mask
from tessera_cupy.parallel.shards import Span, Spans, tokens_of

_Ints = NDArray[np.int64]
# Blocks whose bits are unpacked at a time.
_CHUNK = 4096


def cut(
    mask: BlockMask,
    *,
    heads: Sequence[int] | None = None,
    rows: Spans | None = None,
    columns: Spans | None = None,
) -> BlockMask:
    """A part of a mask, in tokens counted from the part's own start.

    Args:
        mask: the whole mask, on the host.
        heads: the heads to keep, in their new order; None for all. One head stands for all.
        rows: the query tokens to keep, at least one; None for all.
        columns: the key tokens to keep, at least one; None for all.

    Returns:
        The mask of what is kept. Key slices of which only heads are taken remain key slices.

    Example:
        >>> mask = BlockMask.from_dense(np.tri(3, dtype=bool), (64, 64), (192, 150))
        >>> part = cut(mask, rows=(Span(100, 192),))
        >>> part.shape, part.q_block_sizes.tolist(), part.to_dense()[0, 0].astype(int).tolist()
        ((92, 150), [[[28, 64]]], [[1, 1, 0], [1, 1, 1]])
    """
    if rows == (Span(0, mask.shape[0]),):
        rows = None
    if columns == (Span(0, mask.shape[1]),):
        columns = None
    if mask.heads == 1 or (heads is not None and list(heads) == list(range(mask.heads))):
        heads = None
    if heads is None and rows is None and columns is None:
        return mask
    if mask.slices is not None and rows is None and columns is None and heads is not None:
        return block_mask(_slices_of_heads(mask.slices, heads))
    chosen = np.arange(mask.heads) if heads is None else np.asarray(heads, np.int64)
    q = _cut_side(mask, 0, rows, chosen)
    kv = _cut_side(mask, 1, columns, chosen)

    nq = mask.num_blocks[0]
    of_head = np.arange(mask.batch)[:, None] * mask.heads + chosen
    old_rows = (of_head[:, :, None] * nq + q.source).ravel()
    counts = np.diff(mask.indptr)[old_rows]
    row = np.repeat(np.arange(len(old_rows)), counts)
    entry = np.repeat(mask.indptr[old_rows], counts)
    entry += np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    column, kept = _new_columns(mask.indices[entry], kv)
    row, entry = row[kept], entry[kept]
    order = np.lexsort((column, row))
    row, entry, column = row[order], entry[order], column[order]

    indptr = np.zeros(len(old_rows) + 1, np.int64)
    np.cumsum(np.bincount(row, minlength=len(old_rows)), out=indptr[1:])
    largest = tuple(
        mask.block_size[side] if cuts.sizes is None else int(cuts.sizes.max(initial=0))
        for side, cuts in enumerate((q, kv))
    )
    partial, bits = _moved_bits(mask, mask.partial[entry], row, column, q, kv, largest)
    return BlockMask.from_csr(
        indptr,
        column,
        (len(q.source), len(kv.source)),
        mask.block_size,
        (_tokens(mask, 0, rows), _tokens(mask, 1, columns)),
        heads=len(chosen),
        batch=mask.batch,
        q_block_sizes=q.sizes,
        kv_block_sizes=kv.sizes,
        partial=partial,
        token_bits=bits,
    )


def _tokens(mask: BlockMask, side: int, spans: Spans | None) -> int:
    return mask.shape[side] if spans is None else tokens_of(spans)


def _slices_of_heads(slices: KeySlices, heads: Sequence[int]) -> KeySlices:
    groups = (len(slices.indptr) - 1) // (slices.batch * slices.heads)
    of_head = np.arange(slices.batch)[:, None] * slices.heads + np.asarray(heads, np.int64)
    rows = (of_head[:, :, None] * groups + np.arange(groups)).ravel()
    counts = np.diff(slices.indptr)[rows]
    indptr = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(counts, out=indptr[1:])
    keys = np.repeat(slices.indptr[rows] - indptr[:-1], counts) + np.arange(indptr[-1])
    return KeySlices.from_csr(
        indptr,
        slices.indices[keys],
        slices.group,
        slices.shape,
        heads=len(heads),
        batch=slices.batch,
    )


class _Cut(NamedTuple):
    """One side of the part: N blocks, each a piece of one of the mask's.

    Attributes:
        source: (N,) the mask's block.
        skip: (batch, heads, N) tokens of it that are cut off in front.
        sizes: (batch, heads, N) tokens that are left; None where blocks are uniform.
        ranges: first block, last block and first piece of each span.
    """

    source: _Ints
    skip: _Ints
    sizes: _Ints | None
    ranges: tuple[tuple[int, int, int], ...]


def _cut_side(mask: BlockMask, side: int, spans: Spans | None, heads: _Ints) -> _Cut:
    starts = mask.q_starts() if side == 0 else mask.kv_starts()
    axes = (mask.batch, mask.heads, starts.shape[2])
    starts = np.broadcast_to(starts, axes)[:, heads]
    count = starts.shape[2] - 1
    given = mask.q_block_sizes if side == 0 else mask.kv_block_sizes
    if spans is None:
        skip = np.zeros((mask.batch, len(heads), count), np.int64)
        sizes = None if given is None else np.diff(starts)
        return _Cut(np.arange(count), skip, sizes, ((0, count, 0),))
    sources, skips, lengths, ranges = [], [], [], []
    pieces = 0
    for begin, end in spans:
        low, high = np.maximum(starts[..., :-1], begin), np.minimum(starts[..., 1:], end)
        touched = np.flatnonzero((low < high).any(axis=(0, 1)))
        first, last = int(touched[0]), int(touched[-1]) + 1
        these = slice(first, last)
        sources.append(np.arange(first, last))
        skips.append((low - starts[..., :-1])[..., these].clip(0))
        lengths.append((high - low)[..., these].clip(0))
        ranges.append((first, last, pieces))
        pieces += last - first
    source, skip = np.concatenate(sources), np.concatenate(skips, axis=-1)
    sizes = np.concatenate(lengths, axis=-1)
    block = mask.block_size[side]
    whole = given is None and not skip.any() and (sizes[..., :-1] == block).all()
    return _Cut(source, skip, None if whole else sizes, tuple(ranges))


def _new_columns(columns: NDArray[np.int32], kv: _Cut) -> tuple[_Ints, _Ints]:
    """The piece of each entry's column, and which entry each is of: one for every span it is in."""
    pieces, entries = [], []
    for first, last, offset in kv.ranges:
        found = np.flatnonzero((columns >= first) & (columns < last))
        pieces.append(columns[found].astype(np.int64) + (offset - first))
        entries.append(found)
    return np.concatenate(pieces), np.concatenate(entries)


def _moved_bits(
    mask: BlockMask,
    partial: NDArray[np.int32],
    row: _Ints,
    column: _Ints,
    q: _Cut,
    kv: _Cut,
    largest: tuple[int, ...],
) -> tuple[NDArray[np.int64] | None, NDArray[np.uint32] | None]:
    """For each entry the index of its bits, and bits that begin where the pieces do."""
    mixed = np.flatnonzero(partial >= 0)
    if not len(mixed):
        return None, None
    head = row[mixed] // len(q.source)
    down = q.skip.reshape(-1, len(q.source))[head, row[mixed] % len(q.source)]
    across = kv.skip.reshape(-1, len(kv.source))[head, column[mixed]]
    keys, index = np.unique(
        np.stack([partial[mixed], down, across], axis=1), axis=0, return_inverse=True
    )
    rows, words = largest[0], token_bit.words(largest[1])
    bits = np.zeros((len(keys), rows, words), np.uint32)
    for first in range(0, len(keys), _CHUNK):
        some = keys[first : first + _CHUNK]
        for by in np.unique(some[:, 1:], axis=0):
            these = np.flatnonzero((some[:, 1:] == by).all(axis=1))
            old = mask.token_bits[some[these, 0], by[0] : by[0] + rows]
            if by[1]:
                old = token_bit.pack(token_bit.unpack(old)[..., by[1] :])
            old = old[..., :words]
            bits[first + these, : old.shape[1], : old.shape[2]] = old
    chosen = np.full(len(partial), -1, np.int64)
    chosen[mixed] = index.reshape(-1)
    return chosen, bits
