"""Token bits of the mask's blocks, recut into the coordinates of tiles and fragments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.mapping.q_side import FULL, TileLists
from tessera_cupy.mapping.tiles import GROUP_ROWS

if TYPE_CHECKING:
    from tessera_cupy.masks.block_mask import BlockMask

_ALL = np.uint32(0xFFFFFFFF)
# Rows times fragments that one chunk of entries may have, to keep the scratch in the cache.
_CHUNK_ROWS = 1 << 18


@dataclass(frozen=True, eq=False)
class Refined:
    """What token bits say about the up to k fragments of n list entries.

    Attributes:
        entry: (n,) int64, ascending entry of the tile lists.
        members: (n, k) uint32, the 8-row groups with at least one active pair.
        index: (n, k) int32, index into ``bits``, or -1 where the members say it all.
        bits: (P, tile rows, words of a fragment) uint32.
    """

    entry: NDArray[np.int64]
    members: NDArray[np.uint32]
    index: NDArray[np.int32]
    bits: NDArray[np.uint32]


def words_of(columns: int) -> int:
    """32-bit words that hold one bit for each of ``columns`` columns."""
    return -(-columns // 32)


def recut(
    mask: BlockMask, lists: TileLists, widths: NDArray[np.int64], q: int, slot: int, fragments: int
) -> Refined:
    """Recut the bits of every entry that has some.

    Args:
        mask: the mask; ``lists.token_blocks`` must not be None.
        lists: the tiles and their lists.
        widths: (n,) KV rows of the block of each entry in ``lists.token_blocks``.
        q: physical rows of a tile.
        slot: columns of a fragment.
        fragments: k, fragments of the widest block.
    """
    blocks = lists.token_blocks
    assert blocks is not None
    n = len(blocks.entry)
    tile = np.searchsorted(lists.offsets, blocks.entry, side="right") - 1
    rows = lists.tile_q[tile, 1]
    lengths = np.clip(widths[:, None] - np.arange(fragments) * slot, 0, slot)
    words = words_of(slot)
    members = np.zeros((n, fragments), np.uint32)
    index = np.full((n, fragments), -1, np.int32)
    kept: list[NDArray[np.uint32]] = [np.empty((0, q, words), np.uint32)]
    total = 0
    chunk = max(1, _CHUNK_ROWS // max(1, q * fragments))
    for low in range(0, n, chunk):
        part = slice(low, low + chunk)
        source = _Rows.of(mask, blocks.blocks[part], blocks.origin[tile[part]], rows[part])
        bits = np.zeros((len(source.first), fragments, q, words), np.uint32)
        for j in range(fragments):
            valid = _low_bits(lengths[part, j], words)
            members[part, j], full = source.cut(j * slot, valid, bits[:, j])
            index[part, j][(members[part, j] & ~full) != 0] = 0
        needed = index[part] == 0
        index[part][needed] = np.arange(total, total + np.count_nonzero(needed))
        kept.append(bits[needed])
        total += len(kept[-1])
    return Refined(blocks.entry, members, index, np.concatenate(kept))


@dataclass(frozen=True, eq=False)
class _Rows:
    """Where each row of m entries finds its bits. All (m, r) arrays; r holds all rows there are.

    Attributes:
        tokens: all token bits of the mask, flat.
        first: (m, r) int64, index into ``tokens`` of the row's first word.
        words: words of a row in ``tokens``.
        fill: (m, r) uint32, the value of every word of a row without token bits.
        filled: (m, r) bool, rows that take ``fill``; None when there are none.
        past: (m, r) bool, rows past the tile's end; None when there are none.
    """

    tokens: NDArray[np.uint32]
    first: NDArray[np.int64]
    words: int
    fill: NDArray[np.uint32]
    filled: NDArray[np.bool_] | None
    past: NDArray[np.bool_] | None

    @classmethod
    def of(
        cls,
        mask: BlockMask,
        blocks: NDArray[np.int32],
        origin: NDArray[np.int64],
        rows: NDArray[np.int32],
    ) -> _Rows:
        """Find the rows of entries with the given query blocks, which begin at ``origin``."""
        _, block_rows, words = mask.token_bits.shape
        m, joined = blocks.shape
        row = np.arange(-(-int(rows.max()) // GROUP_ROWS) * GROUP_ROWS)
        base = (blocks.astype(np.int64) * block_rows - origin) * words
        if joined == 1:
            block, first = blocks, base + row * words
        else:
            # The tile's block that a row lies in is the last one to begin at or before it;
            # blocks without rows begin where the next one does, and so are never chosen.
            which = np.repeat(np.arange(m)[:, None] * joined, len(row), axis=1)
            for s in range(1, joined):
                which += origin[:, s, None] <= row
            block = blocks.reshape(-1)[which]
            first = base.reshape(-1)[which]
            first += row * words
        past = rows[:, None] <= row
        filled = (block < 0) | past
        fill = np.where((block == FULL) & ~past, _ALL, np.uint32(0))
        first[np.broadcast_to(filled, first.shape)] = 0
        return cls(
            mask.token_bits.reshape(-1),
            first,
            words,
            fill,
            filled if filled.any() else None,
            past if past.any() else None,
        )

    def cut(
        self, column: int, valid: NDArray[np.uint32], out: NDArray[np.uint32]
    ) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """Write the bits of the columns from ``column`` on, and sum them up.

        Args:
            column: first column within the block, a multiple of the fragment's columns.
            valid: (m, w) uint32, the columns that the fragment has.
            out: (m, tile rows, w) uint32, zeros; takes the bits.

        Returns:
            The 8-row groups with any bit, and those with all, (m,) uint32 each.
        """
        m, r = self.first.shape
        groups = r // GROUP_ROWS
        some = np.zeros(m * groups, np.uint32)
        missing = np.zeros(m * groups, np.uint32)
        # A fragment may be wider than its block; the words past the block stay zero.
        for w in range(min(valid.shape[1], self.words - column // 32)):
            keep = valid[:, w, None]
            bits = self.tokens[self.first + (column // 32 + w)]
            if self.filled is not None:
                bits = np.where(self.filled, self.fill, bits)
            bits = (bits >> np.uint32(column % 32)) & keep
            out[:, :r, w] = bits
            off = bits ^ keep
            if self.past is not None:
                off[self.past] = 0
            for i in range(GROUP_ROWS):
                some |= bits.reshape(-1)[i::GROUP_ROWS]
                missing |= off.reshape(-1)[i::GROUP_ROWS]
        return _word(some.reshape(m, groups) != 0), _word(missing.reshape(m, groups) == 0)


def _low_bits(lengths: NDArray[np.int64], words: int) -> NDArray[np.uint32]:
    """(m, words): bits of the columns that a fragment of each length has."""
    count = np.clip(lengths[:, None] - np.arange(words) * 32, 0, 32).astype(np.uint64)
    bits: NDArray[np.uint64] = (np.uint64(1) << count) - np.uint64(1)
    return bits.astype(np.uint32)


def _word(groups: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """Pack (m, groups) flags into one word each, group 0 lowest."""
    word = np.zeros(len(groups), np.uint32)
    for g in range(groups.shape[1]):
        word |= groups[:, g].astype(np.uint32) << np.uint32(g)
    return word
