"""Token bits of partial blocks: packed, cut to the valid region, counted, unpacked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.masks.entries import Entries
from tessera_cupy.masks.geometry import BlockGrid

_POPCOUNT = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(1, dtype=np.uint8)
# Blocks refined, and tokens packed, at a time: they bound the temporaries.
_CHUNK = 4096
_PANEL = 1 << 24


def words(columns: int) -> int:
    """32-bit words that hold ``columns`` bits."""
    return -(-columns // 32)


def pack(tokens: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """Pack the last axis: bit ``c % 32`` of word ``c // 32`` is element ``c``."""
    columns = tokens.shape[-1]
    width = 32 * words(columns)
    if columns != width:
        padded = np.zeros((*tokens.shape[:-1], width), np.bool_)
        padded[..., :columns] = tokens
        tokens = padded
    packed = np.packbits(tokens, axis=-1, bitorder="little")
    return np.ascontiguousarray(packed).view(np.dtype("<u4"))


def unpack(bits: NDArray[np.uint32]) -> NDArray[np.bool_]:
    """Undo :func:`pack`; the last axis becomes 32 times as long."""
    octets = np.ascontiguousarray(bits, np.dtype("<u4")).view(np.uint8)
    return np.unpackbits(octets, axis=-1, bitorder="little").view(np.bool_)


def count(bits: NDArray[np.uint32]) -> int:
    """Bits that are set."""
    return int(_POPCOUNT[np.ascontiguousarray(bits).view(np.uint8)].sum(dtype=np.int64))


def counts(bits: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Bits that are set of each block of (P, rows, words)."""
    found = _POPCOUNT[np.ascontiguousarray(bits).view(np.uint8)].sum(axis=(1, 2), dtype=np.int64)
    return np.asarray(found)


def refine(entries: Entries, grid: BlockGrid) -> Entries:
    """Bring entries to their one form.

    Bits outside a block's valid rows and columns are cleared, blocks with all valid
    bits set become full, blocks without any active pair are dropped, and bits are
    renumbered in the order of their entries.
    """
    q_sizes, kv_sizes = entry_sizes(entries, grid) if grid.ragged else (None, None)
    if q_sizes is not None and kv_sizes is not None:
        entries = entries.keep((q_sizes > 0) & (kv_sizes > 0))
    rows, columns = grid.max_block
    empty_bits = np.zeros((0, rows, words(columns)), np.uint32)
    chosen = np.flatnonzero(entries.partial >= 0) if len(entries.bits) else np.zeros(0, np.int64)
    if not len(chosen):
        return replace(entries, bits=empty_bits)
    q_sizes, kv_sizes = entry_sizes(entries, grid, chosen)
    prefixes = pack(np.tri(columns + 1, columns, -1, dtype=np.bool_))
    state = np.empty(len(chosen), np.int8)  # 0 empty, 1 partial, 2 full
    pieces = [empty_bits]
    for first in range(0, len(chosen), _CHUNK):
        part = slice(first, first + _CHUNK)
        inside = np.arange(rows) < q_sizes[part, None]
        valid = np.where(inside[:, :, None], prefixes[kv_sizes[part]][:, None, :], np.uint32(0))
        bits = entries.bits[entries.partial[chosen[part]]] & valid
        some = bits.any(axis=(1, 2))
        full = (bits == valid).all(axis=(1, 2))
        state[part] = some.astype(np.int8) + (some & full)
        pieces.append(bits[state[part] == 1])
    partial = np.full(len(entries.partial), -1, np.int32)
    mixed = chosen[state == 1]
    partial[mixed] = np.arange(len(mixed), dtype=np.int32)
    kept = np.ones(len(partial), np.bool_)
    kept[chosen[state == 0]] = False
    return replace(entries, partial=partial, bits=np.concatenate(pieces)).keep(kept)


def entry_sizes(
    entries: Entries, grid: BlockGrid, chosen: NDArray[np.int64] | slice = slice(None)
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Valid rows and columns of the chosen entries' blocks."""
    nq, nk = grid.num_blocks
    heads, blocks = np.divmod(entries.rows()[chosen], max(nq, 1))
    axes = (grid.batch, grid.heads)
    q_sizes = np.broadcast_to(np.diff(grid.q_starts()), (*axes, nq))
    kv_sizes = np.broadcast_to(np.diff(grid.kv_starts()), (*axes, nk))
    batch, head = np.divmod(heads, grid.heads)
    return q_sizes[batch, head, blocks], kv_sizes[batch, head, entries.indices[chosen]]


def token_entries(tokens: NDArray[np.bool_], block_size: tuple[int, int]) -> Entries:
    """Entries of a (B, H, sq, skv) token mask; every active block still carries its bits."""
    batch, heads, sq, skv = tokens.shape
    bq, bkv = block_size
    nq, nk = -(-sq // bq), -(-skv // bkv)
    flat = tokens.reshape(batch * heads, sq, skv)
    counts = np.zeros((batch * heads, nq), np.int64)
    columns: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
    pieces: list[NDArray[np.uint32]] = [np.zeros((0, bq, words(bkv)), np.uint32)]
    step = max(1, _PANEL // max(1, bq * nk * bkv))
    for head in range(batch * heads):
        for first in range(0, nq if nk else 0, step):
            last = min(first + step, nq)
            panel = flat[head, first * bq : last * bq]
            wanted = ((last - first) * bq, nk * bkv)
            if panel.shape != wanted:
                padded = np.zeros(wanted, np.bool_)
                padded[: panel.shape[0], :skv] = panel
                panel = padded
            packed = pack(panel.reshape(last - first, bq, nk, bkv)).transpose(0, 2, 1, 3)
            active = packed.any(axis=(2, 3))
            counts[head, first:last] = active.sum(axis=1)
            columns.append(np.nonzero(active)[1])
            pieces.append(packed[active])
    indptr = np.zeros(counts.size + 1, np.int64)
    np.cumsum(counts.ravel(), out=indptr[1:])
    indices = np.concatenate(columns).astype(np.int32)
    partial = np.arange(len(indices), dtype=np.int32)
    return Entries(indptr, indices, partial, np.concatenate(pieces))


def pairs(entries: Entries, grid: BlockGrid) -> int:
    """Active token pairs, exact and without overflow."""
    nq, nk = grid.num_blocks
    if not len(entries.indices):
        return 0
    if grid.ragged:
        q_sizes, kv_sizes = entry_sizes(entries, grid)
        total = int((q_sizes * kv_sizes).sum())
    else:
        # Whole blocks less what the last, short column lacks: nothing as long as the list.
        ends = entries.indptr[1:]
        counts = np.diff(entries.indptr)
        last = (counts > 0) & (entries.indices[ends - 1] == nk - 1)
        columns = counts * grid.block_size[1] - last * (nk * grid.block_size[1] - grid.shape[1])
        total = int((columns.reshape(-1, nq) * np.diff(grid.q_starts()[0])).sum())
    if len(entries.bits):
        chosen = np.flatnonzero(entries.partial >= 0)
        q_sizes, kv_sizes = entry_sizes(entries, grid, chosen)
        total += count(entries.bits[entries.partial[chosen]]) - int((q_sizes * kv_sizes).sum())
    return total
