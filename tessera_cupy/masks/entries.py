"""Active blocks as sorted CSR rows: built from dense masks, sorted, checked, broadcast, thinned."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.errors import wrong

# Mask elements searched at a time: keeps the int64 positions in the cache.
_CHUNK = 1 << 20


@dataclass(frozen=True, eq=False)
class Entries:
    """Active blocks over R = batch * heads * nq rows.

    Attributes:
        indptr: (R + 1,) int64.
        indices: (nnz,) int32 block columns.
        partial: (nnz,) int32, index into ``bits`` or -1.
        bits: (P, rows, words) uint32 token bits.
    """

    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    partial: NDArray[np.int32]
    bits: NDArray[np.uint32]

    def rows(self) -> NDArray[np.int64]:
        """(nnz,) int64: the row of each entry."""
        return np.repeat(np.arange(len(self.indptr) - 1), np.diff(self.indptr))

    def keep(self, kept: NDArray[np.bool_]) -> Entries:
        """Drop the entries where ``kept`` is False; bits stay where they are."""
        before = np.zeros(len(kept) + 1, np.int64)
        np.cumsum(kept, out=before[1:])
        return replace(
            self,
            indptr=before[self.indptr],
            indices=self.indices[kept],
            partial=self.partial[kept],
        )

    def broadcast(self, old: tuple[int, int], new: tuple[int, int]) -> Entries:
        """Repeat heads from ``old`` (batch, heads) axes to ``new`` ones; bits are shared."""
        if old == new:
            return self
        source = np.broadcast_to(np.arange(old[0] * old[1]).reshape(old), new).ravel()
        counts = np.diff(self.indptr).reshape(old[0] * old[1], -1)[source]
        indptr = np.zeros(counts.size + 1, np.int64)
        np.cumsum(counts.ravel(), out=indptr[1:])
        ends = self.indptr[:: max(counts.shape[1], 1)] if counts.size else np.zeros(1, np.int64)
        spans = [slice(ends[s], ends[s + 1]) for s in source] if counts.size else [slice(0, 0)]
        return replace(
            self,
            indptr=indptr,
            indices=np.concatenate([self.indices[s] for s in spans]),
            partial=np.concatenate([self.partial[s] for s in spans]),
        )


def full_entries(indptr: NDArray[np.int64], indices: NDArray[np.int32]) -> Entries:
    """Entries that are all full blocks."""
    return Entries(
        indptr, indices, np.full(len(indices), -1, np.int32), np.zeros((0, 0, 0), np.uint32)
    )


def dense_entries(mask: NDArray[np.bool_]) -> Entries:
    """Entries of a (B, H, nq, nk) bool mask."""
    columns = mask.shape[3]
    flat = np.ascontiguousarray(mask).reshape(-1, columns) if mask.size else mask.reshape(-1)
    rows = mask.shape[0] * mask.shape[1] * mask.shape[2]
    indptr = np.zeros(rows + 1, np.int64)
    if not mask.size:
        return full_entries(indptr, np.zeros(0, np.int32))
    indices = np.empty(np.count_nonzero(flat), np.int32)
    step = max(1, _CHUNK // columns)
    edges = np.arange(step + 1, dtype=np.int64) * columns
    done = 0
    for first in range(0, rows, step):
        last = min(first + step, rows)
        found = np.flatnonzero(flat[first:last])
        ends = np.searchsorted(found, edges[: last - first + 1])
        indptr[first : last + 1] = done + ends
        offsets = np.repeat(edges[: last - first], np.diff(ends))
        np.subtract(found, offsets, out=indices[done : done + len(found)], casting="unsafe")
        done += len(found)
    return full_entries(indptr, indices)


def sort_entries(entries: Entries, num_blocks: tuple[int, int], heads: int) -> Entries:
    """Sort the columns of each row; the columns must be in range.

    Raises:
        ValueError: a column is listed twice in one row.
    """
    indices, starts = entries.indices, entries.indptr
    if len(indices) < 2:
        return entries
    ascending = indices[1:] > indices[:-1]
    inner = starts[(starts > 0) & (starts < len(indices))]
    ascending[inner - 1] = True
    if ascending.all():
        return entries
    counts = np.diff(starts)
    offsets = np.repeat(np.arange(len(counts)) * num_blocks[1], counts)
    keys = offsets + indices
    order = None
    if len(entries.bits):
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
    else:
        keys.sort()
    repeated = np.flatnonzero(keys[1:] == keys[:-1])
    if len(repeated):
        row, column = divmod(int(keys[repeated[0]]), num_blocks[1])
        raise ValueError(
            wrong(
                "indices",
                "each column at most once in a row",
                f"column {column} twice in {place(row, num_blocks[0], heads)}",
                "remove the duplicates",
            )
        )
    return replace(
        entries,
        indices=(keys - offsets).astype(np.int32),
        partial=entries.partial if order is None else entries.partial[order],
    )


def place(row: int, nq: int, heads: int) -> str:
    """Name a flat row for a message."""
    head, block = divmod(row, nq)
    return f"batch {head // heads}, head {head % heads}, row {block}"
