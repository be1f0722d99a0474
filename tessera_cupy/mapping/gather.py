"""Gather: the lists of key slices become steps that mix runs of keys with single keys.

A step's columns cost most, and a fragment takes all of its slot's columns, however short it is;
gathering a key costs a little more. So cost decides: a run is a block fragment where its slot
costs no more than gathering its keys in full ones (:func:`shortest_block`). All other keys of a
tile, or of a class of it, are packed into gathered fragments, of which the last one alone is
short. The steps are then about as few as the keys allow, wherever these lie: on 7,800 tokens of
real video, in tiles of 128 x 192, FG-Attn's 30% of the keys for groups of 128 took 6,616 steps
with all runs of 8 and up as fragments, 4,038 with 16, 2,455 with 32, and 2,379 with 48 or whole
slots only.

Share puts two groups of query rows into the halves of a tile. Keys of both, of the first and of
the second are lists apart, so that a key that both list is loaded once; :func:`share` then
orders the steps.

Slices over arrays in GPU memory are planned there (``kernels_cu/slice_fragments.cu``), where all
keys are gathered, those of runs too: telling runs from single keys would take another pass over
the lists, and few keys lie in runs that are long enough. Of 10% and 30% of the keys of real video,
0.1 to 2% did in raster order, 5 to 21% in SPADE's tiles; at the costs below, blocks of them would
save at most 3% of the time of groups of 64 and 2% of that of 128. Their tiles here are the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.errors import PlanNotEligibleError, wrong
from tessera_cupy.mapping.bits import words_of
from tessera_cupy.mapping.q_side import QSide, consecutive, exclusive_sum, group_bits
from tessera_cupy.mapping.share import share
from tessera_cupy.mapping.tiles import Tiles, TileShape

if TYPE_CHECKING:
    from tessera_cupy.masks.key_slices import KeySlices

#: Columns of a fragment, unless a step has fewer. Wide ones are few, and waste next to nothing
#: where their rows are gathered.
SLOT = 64

#: What gathering a key costs beside computing its column, by Q side: on an H200 random keys took
#: 1.10 times as long as as many in blocks with a group a tile, and 1.27 with two groups a tile,
#: which read twice as many rows for the same products (kernels_cu/NOTES.md).
GATHERED_COST = {"retain": 0.10, "split": 0.10, "share": 0.27}

#: Fewest query rows of a group: those that skip a step together.
_LEAST_GROUP = 64

# ``frag_start`` counts gathered rows in 32-bit numbers.
_MOST_ROWS = (1 << 31) - 1

# Cells of the dense scratch arrays that find the keys of two groups.
_CELLS = 1 << 20


def why_not(slices: KeySlices | None, q_side: QSide, q: int) -> str | None:
    """Why slices cannot be gathered into tiles of ``q`` rows, in one sentence, or None."""
    if slices is None:
        return "gather KV needs key slices"
    group = slices.group
    if group < _LEAST_GROUP:
        return f"gather KV needs groups of {_LEAST_GROUP} query rows or more, got {group}"
    if q_side == "retain" and group > q:
        return f"retain Q needs groups of at most {q} rows (the tile), got {group}"
    if q_side == "split" and group <= q:
        return f"split Q needs groups of more than {q} rows (the tile), got {group}"
    if q_side == "share" and 2 * group != q:
        return f"share Q of key slices needs groups of half a tile of {q} rows, got {group}"
    if q_side not in ("retain", "split", "share"):
        return f"gather KV needs Q that is retained, split or shared, got {q_side}"
    return None


def shortest_block(q_side: QSide, slot: int) -> int:
    """Fewest keys of a run that become a block fragment of ``slot`` columns.

    A fragment costs its ``slot`` columns, ``n`` gathered keys in full fragments
    ``n (1 + cost of gathering)``.

    >>> shortest_block("retain", 64), shortest_block("share", 64)
    (59, 51)
    """
    return math.ceil(slot / (1 + GATHERED_COST[q_side]))


def map_slices(
    slices: KeySlices, q_side: QSide, q: int, kv: int, slot: int = SLOT, *, runs: bool = True
) -> Tiles:
    """Map key slices onto physical tiles without their blocks.

    Within a tile, and with share within each class of it, block fragments come first, then
    gathered ones, both ascending. A split group's tiles gather the same ``rows``.

    Args:
        slices: groups of query rows, each with its keys.
        q_side: "retain" (a tile is a group), "split" (a group becomes several tiles) or "share"
            (two groups are the halves of a tile).
        q: physical query rows of a tile.
        kv: physical KV columns of a step.
        slot: columns of a fragment, a power of two from 8 that divides ``kv``.
        runs: whether long runs become block fragments; else all keys are gathered.

    Returns:
        Tiles of the slices' heads, whose ``frag_gathered`` and ``rows`` are arrays.

    Raises:
        PlanNotEligibleError: (a ValueError) :func:`why_not` has a reason.
        ValueError: more keys than 32-bit numbers count.

    Example:
        >>> from tessera_cupy.masks import KeySlices
        >>> tiles = map_slices(KeySlices.from_groups([[1, 0, 1, 1]], 64), "retain", 64, 64)
        >>> tiles.frag_len.tolist(), tiles.rows.tolist()
        ([3], [0, 2, 3])
    """
    reason = why_not(slices, q_side, q)
    if reason is not None:
        expected, fix = "one that can serve the slices", "choose another mapping or tile"
        raise PlanNotEligibleError(wrong("q_side", expected, f"{q_side}: {reason}", fix))
    if slices.nnz > _MOST_ROWS:
        expected = f"at most {_MOST_ROWS:,} keys over all groups"
        raise ValueError(wrong("slices", expected, f"{slices.nnz:,}", "map fewer heads at a time"))
    heads = slices.batch * slices.heads
    table = _halves(slices, q) if q_side == "share" else _parts(slices, q)
    lists = table.lists.ravel()
    # Room for groups without a common key; pages that nothing is written to cost nothing.
    rows, used = np.empty(slices.nnz, np.int32), 0
    shortest = shortest_block(q_side, slot) if runs else None
    of_heads = []
    for head in range(heads):
        keys, offsets = (_classes if q_side == "share" else _groups)(slices, head)
        single, of_lists = _cut(keys, offsets, slot, used, shortest)
        rows[used : used + len(single)] = single
        used += len(single)
        counts = np.diff(of_lists.offsets)[lists]
        place = consecutive(counts, of_lists.offsets[lists])
        of_heads.append(
            (
                counts.reshape(table.lists.shape).sum(axis=1),
                of_lists.start[place],
                of_lists.length[place],
                np.repeat(table.members.ravel(), counts),
                of_lists.gathered[place],
            )
        )
    counts, start, length, members, gathered = map(np.concatenate, zip(*of_heads, strict=True))
    tiles = Tiles(
        shape=TileShape(q, kv, slot),
        heads=heads,
        tile_head=np.repeat(np.arange(heads, dtype=np.int32), len(table.tile_q)),
        tile_q=np.tile(table.tile_q, (heads, 1)),
        frag_offsets=exclusive_sum(counts),
        frag_start=start,
        frag_len=length,
        frag_members=members,
        frag_bits=np.full(len(start), -1, np.int32),
        bits=np.empty((0, q, words_of(slot)), np.uint32),
        frag_gathered=gathered,
        rows=rows[:used],
    )
    return share(tiles) if q_side == "share" else tiles


@dataclass(frozen=True, eq=False)
class _Table:
    """The T tiles of a head, alike in all heads: ``tile_q``, and the c lists of keys of each.

    Attributes:
        tile_q: (T, 2) int32, first query row and number of rows.
        lists: (T, c) index of the lists in a head's own.
        members: (T, c) uint32, the 8-row groups of the tile that a list is of.
    """

    tile_q: NDArray[np.int32]
    lists: NDArray[np.int64]
    members: NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class _Fragments:
    """Fragments of lists of keys; ``offsets`` is CSR over the lists."""

    offsets: NDArray[np.int64]
    start: NDArray[np.int32]
    length: NDArray[np.int32]
    gathered: NDArray[np.bool_]


def _parts(slices: KeySlices, q: int) -> _Table:
    """Retain and split: each group is one or several tiles with the group's list."""
    group, tokens = slices.group, slices.shape[0]
    lead = np.arange(0, group, q)
    first = (np.arange(slices.groups)[:, None] * group + lead).ravel()
    rows = np.minimum(np.tile(np.minimum(q, group - lead), slices.groups), tokens - first)
    first, rows = first[rows > 0], rows[rows > 0]
    return _Table(
        np.stack([first, rows], axis=1).astype(np.int32),
        (first // group)[:, None],
        group_bits(np.zeros_like(rows), rows)[:, None],
    )


def _halves(slices: KeySlices, q: int) -> _Table:
    """Share: two groups are a tile, with the lists of both, of the first and of the second."""
    first = np.arange(0, slices.shape[0], q)
    rows = np.minimum(q, slices.shape[0] - first)
    middle = np.full_like(rows, slices.group)
    upper = group_bits(np.zeros_like(rows), np.minimum(rows, middle))
    lower = group_bits(middle, rows)
    return _Table(
        np.stack([first, rows], axis=1).astype(np.int32),
        np.arange(3 * len(first)).reshape(-1, 3),
        np.stack([upper | lower, upper, lower], axis=1),
    )


def _groups(slices: KeySlices, head: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """The keys of a head's groups, ascending in each, and where each group's begin and end."""
    offsets = slices.indptr[head * slices.groups : (head + 1) * slices.groups + 1]
    return slices.indices[offsets[0] : offsets[-1]], offsets - offsets[0]


def _classes(slices: KeySlices, head: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """As :func:`_groups`, of three lists a tile: keys of both groups, the first, the second."""
    keys, offsets = _groups(slices, head)
    count, tokens = slices.groups, slices.shape[1]
    tiles = -(-count // 2)
    counts = np.zeros(3 * tiles, np.int64)
    found = [np.zeros(0, np.int32)]
    chunk = max(1, _CELLS // max(1, 3 * tokens))
    for low in range(0, tiles, chunk):
        high = min(tiles, low + chunk)
        edges = offsets[2 * low : min(2 * high, count) + 1]
        listed = np.zeros((high - low, 2, tokens), np.bool_)
        cells = np.repeat(np.arange(len(edges) - 1) * tokens, np.diff(edges))
        cells += keys[edges[0] : edges[-1]]
        listed.reshape(-1)[cells] = True
        first, second = listed[:, 0], listed[:, 1]
        at = np.flatnonzero(np.stack([first & second, first > second, first < second], axis=1))
        begin = np.arange(3 * (high - low) + 1) * tokens
        of_list = np.diff(np.searchsorted(at, begin))
        at -= np.repeat(begin[:-1], of_list)
        counts[3 * low : 3 * high] = of_list
        found.append(at.astype(np.int32))
    return np.concatenate(found), exclusive_sum(counts)


def _cut(
    keys: NDArray[np.int32],
    offsets: NDArray[np.int64],
    slot: int,
    used: int,
    shortest: int | None,
) -> tuple[NDArray[np.int32], _Fragments]:
    """Cut lists of ascending keys into block fragments and gathered ones.

    Args:
        keys: (n,) keys of all lists.
        offsets: CSR over the lists.
        slot: columns of a fragment.
        used: rows that are gathered before these.
        shortest: fewest keys of a block fragment; None gathers all.

    Returns:
        The keys that are gathered, and the fragments.
    """
    opens = np.ones(len(keys), np.bool_)
    np.not_equal(keys[1:] - keys[:-1], 1, out=opens[1:])
    opens[offsets[:-1][np.diff(offsets) > 0]] = True
    first = np.flatnonzero(opens)
    length = np.diff(first, append=len(keys))
    if shortest is None:
        shortest = len(keys) + 1
    long = np.flatnonzero(length >= shortest)
    first, length = first[long], length[long]

    rest = length % slot
    length -= np.where(rest < shortest, rest, 0)
    single = np.ones(len(keys), np.bool_)
    single[consecutive(length, first)] = False
    of_run = np.searchsorted(offsets, first, side="right") - 1
    in_blocks = np.zeros(len(offsets) - 1, np.int64)
    np.add.at(in_blocks, of_run, length)
    blocks = np.zeros_like(in_blocks)
    np.add.at(blocks, of_run, -(-length // slot))
    alone = np.diff(offsets) - in_blocks
    pieces = -(-alone // slot)

    begin = exclusive_sum(blocks + pieces)
    start, size = np.empty((2, begin[-1]), np.int32)
    gathered = np.zeros(begin[-1], np.bool_)
    place = consecutive(blocks, begin[:-1])
    start[place], size[place] = _pieces(keys[first], length, slot)
    place = consecutive(pieces, begin[:-1] + blocks)
    start[place], size[place] = _pieces(used + exclusive_sum(alone)[:-1], alone, slot)
    gathered[place] = True
    return keys[single], _Fragments(begin, start, size, gathered)


def _pieces(
    begin: NDArray[Any], length: NDArray[np.int64], slot: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Starts and lengths of the pieces of at most ``slot`` that runs are cut into, in turn."""
    counts = -(-length // slot)
    ahead = consecutive(counts, np.zeros_like(counts)) * slot
    return np.repeat(begin, counts) + ahead, np.minimum(np.repeat(length, counts) - ahead, slot)
