"""The query side of mapping: which rows make a tile, and the list of KV blocks it needs.

Retain and split cut single query blocks; merge, share and regroup join neighbouring ones and
take the union of their lists, with a membership word that says which rows want which block.
(Regroup has made neighbours of blocks that lie apart.)

Share lets each half of a tile skip what only the other one needs, so a ragged block must not reach
into both. Where two ragged blocks fill a tile, they are its halves: the second one begins in the
middle of the tile, wherever the first one ends.
The KV side sees only the result, :class:`TileLists`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.mapping.tiles import GROUP_ROWS

if TYPE_CHECKING:
    from tessera_cupy.masks.block_mask import BlockMask

QSide = Literal["retain", "merge", "split", "share", "regroup"]

#: In :attr:`TokenBlocks.blocks`: the query block does not list the KV block at all.
ABSENT = -2
#: In :attr:`TokenBlocks.blocks`: it lists it, and every pair of it is active.
FULL = -1

# Cells of the dense scratch array that the union of lists works on. One MiB stays in
# the L2 cache between the scatter and the scan.
_UNION_CELLS = 1 << 20

# Codes that are looked up at a time.
_TAKEN = 1 << 16


@dataclass(frozen=True, eq=False)
class TokenBlocks:
    """The list entries that carry token bits, n of them, with up to g query blocks each.

    Attributes:
        entry: (n,) int64, ascending index into the entries of the lists.
        blocks: (n, g) int32, for each query block of the tile its index into the
            mask's token bits, or :data:`FULL`, or :data:`ABSENT`.
        origin: (T, g) int64, the row of the tile where row 0 of each query block lies;
            negative in the later parts of a split block. Ascending along g.
    """

    entry: NDArray[np.int64]
    blocks: NDArray[np.int32]
    origin: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TileLists:
    """Tiles of query rows with the KV blocks that each of them attends to.

    Attributes:
        tile_head: (T,) int32, mask head of each tile; ascending.
        tile_q: (T, 2) int32, first query row and number of rows.
        offsets: (T + 1,) int64, CSR over tiles into the entries.
        columns: (E,) int32, KV block of each entry, ascending within a tile.
        members: (E,) uint32, the 8-row groups of the tile that list the block; never 0.
        token_blocks: the entries with token bits, or None when no block has any.
        tile_halves: as in :class:`~tessera_cupy.mapping.tiles.Tiles`.
    """

    tile_head: NDArray[np.int32]
    tile_q: NDArray[np.int32]
    offsets: NDArray[np.int64]
    columns: NDArray[np.int32]
    members: NDArray[np.uint32]
    token_blocks: TokenBlocks | None
    tile_halves: NDArray[np.int32] | None = None


def per_head(starts: NDArray[np.int64], mask: BlockMask) -> NDArray[np.int64]:
    """Broadcast block starts ``(batch or 1, heads or 1, n + 1)`` to ``(mask heads, n + 1)``."""
    n = starts.shape[-1]
    return np.broadcast_to(starts, (mask.batch, mask.heads, n)).reshape(-1, n)


def exclusive_sum(counts: NDArray[Any]) -> NDArray[np.int64]:
    """Offsets of consecutive runs: ``[0, c0, c0 + c1, ...]``, one longer than ``counts``."""
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def consecutive(counts: NDArray[np.int64], begin: NDArray[np.int64]) -> NDArray[np.int64]:
    """``begin[i], begin[i] + 1, ...`` of each run of ``counts[i]`` numbers in turn."""
    numbers = np.repeat(begin - exclusive_sum(counts)[:-1], counts)
    numbers += np.arange(len(numbers))
    return numbers


def group_bits(first: NDArray[Any], stop: NDArray[Any]) -> NDArray[np.uint32]:
    """Membership words with a bit for each 8-row group that rows ``[first, stop)`` touch.

    Both arrays count rows of a tile; ``first`` is a multiple of 8 unless the range is empty.
    """
    low = (first // GROUP_ROWS).astype(np.uint64)
    high = (-(-stop // GROUP_ROWS)).astype(np.uint64)
    one = np.uint64(1)
    bits = ((one << high) - one) & ~((one << low) - one)
    return np.where(stop > first, bits, np.uint64(0)).astype(np.uint32)


def tile_lists(mask: BlockMask, side: QSide, q: int, *, halves: bool = False) -> TileLists:
    """Cut or join the query blocks of a mask into tiles of at most ``q`` rows.

    With ``halves`` two blocks are joined, as :func:`makes_halves` says.
    """
    if side in ("retain", "split"):
        return _cut(mask, q)
    return _merged(mask, q, 2 if halves else blocks_in_tile(mask, q), halves)


def blocks_in_tile(mask: BlockMask, q: int) -> int:
    """How many neighbouring query blocks a merged tile of ``q`` rows holds.

    Ragged masks take as many as fit at the largest size, so that the rule needs no scan.
    """
    return max(1, q // max(largest_q_block(mask), GROUP_ROWS))


def makes_halves(mask: BlockMask, side: QSide, q: int) -> bool:
    """Whether tiles of ``q`` rows take two ragged query blocks, as ``Tiles.tile_halves`` says.

    Of a mask whose sizes are in GPU memory the nominal block decides, which its snapshot does not
    tell: ask before it is read.
    """
    return side == "share" and mask.ragged_sides[0] and halves_fit(largest_q_block(mask), q)


def halves_fit(block: int, q: int) -> bool:
    """Whether blocks of up to ``block`` rows fit into half a tile of ``q`` rows, not a quarter."""
    return q < 4 * block and 2 * block <= q


def largest_q_block(mask: BlockMask) -> int:
    """Rows of the largest query block: the nominal size, or the true one of a ragged mask."""
    return mask.max_block[0]


def _has_token_bits(mask: BlockMask) -> bool:
    return len(mask.token_bits) > 0


def _cut(mask: BlockMask, q: int) -> TileLists:
    """Retain and split: each block becomes ``ceil(size / q)`` tiles with the block's list."""
    starts = per_head(mask.q_starts(), mask)
    size = np.diff(starts, axis=-1).reshape(-1)
    blocks = len(size)
    parts = -(-size // q)
    tiles = int(parts.sum())
    source = np.repeat(np.arange(blocks), parts)
    lead = (np.arange(tiles) - np.repeat(exclusive_sum(parts)[:-1], parts)) * q
    rows = np.minimum(q, size[source] - lead)
    first = starts[:, :-1].reshape(-1)[source] + lead
    tile_q = np.stack([first, rows], axis=-1).astype(np.int32)
    tile_head = (source // max(1, mask.num_blocks[0])).astype(np.int32)

    counts = np.diff(mask.indptr)[source]
    offsets = exclusive_sum(counts)
    columns, partial = mask.indices, mask.partial
    if not np.array_equal(source, np.arange(blocks)):
        pick = np.arange(offsets[-1]) + np.repeat(mask.indptr[source] - offsets[:-1], counts)
        columns = columns[pick]
        partial = partial[pick] if _has_token_bits(mask) else partial
    members = np.repeat(group_bits(np.zeros_like(rows), rows), counts)

    token_blocks = None
    if _has_token_bits(mask):
        entry = np.flatnonzero(partial >= 0)
        token_blocks = TokenBlocks(entry, partial[entry][:, None], -lead[:, None])
    return TileLists(tile_head, tile_q, offsets, columns, members, token_blocks)


def _merged(mask: BlockMask, q: int, joined: int, halves: bool) -> TileLists:
    """Merge: ``joined`` neighbouring blocks share a tile; its list is the union of theirs."""
    starts = per_head(mask.q_starts(), mask)
    heads, nq = len(starts), mask.num_blocks[0]
    per = -(-nq // joined)
    # Starts of every tile's blocks, (heads, tiles of a head, joined + 1); the last tile
    # of a head repeats the end, which makes its missing blocks empty.
    place = np.minimum(np.arange(per)[:, None] * joined + np.arange(joined + 1), nq)
    bounds = starts[:, place].reshape(heads * per, joined + 1)
    first = bounds[:, 0]
    origin = bounds - first[:, None]
    rows = origin[:, -1]

    union = _union(mask, joined, per, heads)
    begin = np.array([0, q // 2]) if halves else origin[:, :-1]
    wanted = group_bits(begin, begin + np.diff(origin))
    members = _members(union, wanted)

    tile_head = np.repeat(np.arange(heads, dtype=np.int32), per)
    tile_q = np.stack([first, rows], axis=-1).astype(np.int32)
    token_blocks = None
    if _has_token_bits(mask):
        blocks = _partials(mask, union, joined, per)
        token_blocks = TokenBlocks(*blocks, origin[:, :-1])
    first_rows = origin[:, 1].astype(np.int32) if halves else None
    lists = TileLists(
        tile_head, tile_q, union.offsets, union.columns, members, token_blocks, first_rows
    )
    return lists if mask.q_block_sizes is None else _with_rows(lists)


@dataclass(frozen=True, eq=False)
class _Union:
    """Union of the lists of neighbouring query blocks.

    Columns ascend in each tile; bit ``s`` of ``code`` says that the tile's block ``s`` lists
    the column.
    """

    offsets: NDArray[np.int64]
    columns: NDArray[np.int32]
    code: NDArray[Any]


def _union(mask: BlockMask, joined: int, per: int, heads: int) -> _Union:
    """Scatter chunks of lists into a dense array and read it back in order: no sort needed."""
    nq, nk = mask.num_blocks
    tiles = heads * per
    word = np.dtype(np.uint8 if joined <= 8 else np.uint16 if joined <= 16 else np.uint32)
    offsets = np.zeros(tiles + 1, np.int64)
    # Room for lists without a common column; pages that nothing is written to cost nothing.
    columns = np.empty(mask.nnz, np.int32)
    codes = np.empty(mask.nnz, word)
    row_counts = np.diff(mask.indptr)
    head = np.arange(heads * nq) // max(1, nq)
    row_in_tiles = np.arange(heads * nq) + head * (per * joined - nq)
    chunk = max(1, _UNION_CELLS // max(1, joined * nk))
    for low in range(0, tiles, chunk):
        high = min(tiles, low + chunk)
        first, last = (t // per * nq + t % per * joined for t in (low, high))
        begin, end = mask.indptr[first], mask.indptr[last]
        base = (row_in_tiles[first:last] - low * joined) * nk
        cell = np.repeat(base, row_counts[first:last])
        cell += mask.indices[begin:end]
        dense = np.zeros((high - low) * joined * nk, np.uint8)
        dense[cell] = 1
        planes = dense.reshape(high - low, joined, nk)
        code = planes[:, 0].astype(word)
        for s in range(1, joined):
            code |= planes[:, s] * word.type(1 << s)
        at = np.flatnonzero(code.reshape(-1) != 0)
        edges = np.arange(high - low + 1) * nk
        ends = np.searchsorted(at, edges)
        offsets[low : high + 1] = offsets[low] + ends
        found = slice(offsets[low], offsets[high])
        codes[found] = code.reshape(-1)[at]
        at -= np.repeat(edges[:-1], np.diff(ends))
        columns[found] = at
    return _Union(offsets, columns[: offsets[-1]], codes[: offsets[-1]])


def _members(union: _Union, wanted: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Turn codes over a tile's blocks into words over its 8-row groups."""
    joined = wanted.shape[1]
    if len(wanted) == 0:
        return np.empty(0, np.uint32)
    if joined <= 16 and _same_blocks(wanted):
        # All tiles are cut alike but for rows missing at the end, so one table serves.
        table = np.zeros(1, np.uint32)
        for s in range(joined):
            table = np.concatenate([table, table | wanted[0, s]])
        words = np.empty(len(union.code), np.uint32)
        # In chunks, because NumPy widens all indices of one take to 64 bits first.
        for low in range(0, len(words), _TAKEN):
            part = slice(low, low + _TAKEN)
            table.take(union.code[part], out=words[part], mode="clip")
        present = np.bitwise_or.reduce(wanted, axis=1)
        for tile in np.flatnonzero(present != present[0]):
            words[union.offsets[tile] : union.offsets[tile + 1]] &= present[tile]
        return words
    words = np.zeros(len(union.code), np.uint32)
    counts = np.diff(union.offsets)
    for s in range(joined):
        bit = (union.code >> union.code.dtype.type(s)) & union.code.dtype.type(1)
        words |= np.repeat(wanted[:, s], counts) * bit.astype(np.uint32)
    return words


def _same_blocks(wanted: NDArray[np.uint32]) -> bool:
    return bool(((wanted & wanted[0]) == wanted).all())


def _partials(
    mask: BlockMask, union: _Union, joined: int, per: int
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Entries of the union that have a block with token bits, and all blocks of those."""
    nq, nk = mask.num_blocks
    source = np.flatnonzero(mask.partial >= 0)
    row = np.searchsorted(mask.indptr, source, side="right") - 1
    head, within = row // nq, row % nq
    tile, block = head * per + within // joined, within % joined
    tiles = np.arange(len(union.offsets) - 1)
    position = np.repeat(tiles * nk, np.diff(union.offsets)) + union.columns
    of = np.searchsorted(position, tile * nk + mask.indices[source])
    marked = np.zeros(len(position), bool)
    marked[of] = True
    entry = np.flatnonzero(marked)
    present = (union.code[entry][:, None] >> np.arange(joined, dtype=union.code.dtype)) & 1
    blocks = np.where(present != 0, FULL, ABSENT).astype(np.int32)
    blocks[np.searchsorted(entry, of), block] = mask.partial[source]
    return entry, blocks


def _with_rows(lists: TileLists) -> TileLists:
    """Drop the tiles that joined only blocks of zero size; no list is lost with them."""
    kept = lists.tile_q[:, 1] > 0
    blocks = lists.token_blocks
    if blocks is not None:
        blocks = replace(blocks, origin=blocks.origin[kept])
    return replace(
        lists,
        tile_head=lists.tile_head[kept],
        tile_q=lists.tile_q[kept],
        offsets=np.append(lists.offsets[:-1][kept], lists.offsets[-1]),
        token_blocks=blocks,
        tile_halves=None if lists.tile_halves is None else lists.tile_halves[kept],
    )
