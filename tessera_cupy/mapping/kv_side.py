"""The KV side of mapping: a tile's KV blocks, cut into fragments and laid out in steps.

Pack writes fragments one after another, those with token bits last. Neighbouring ragged blocks that
the same rows attend to are one run before pack cuts them, and short fragments come behind whole
ones, so that few steps have a column to mask. Retain and split pad each block's fragments to whole
steps. Merge gives neighbouring blocks fixed places in one step, whether
the tile needs them or not. Gather does not come here: it has no blocks
(:mod:`tessera_cupy.mapping.gather`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.mapping.bits import Refined, recut, words_of
from tessera_cupy.mapping.q_side import TileLists, consecutive, exclusive_sum, per_head
from tessera_cupy.mapping.tiles import Tiles, TileShape

if TYPE_CHECKING:
    from tessera_cupy.masks.block_mask import BlockMask

KvSide = Literal["retain", "merge", "split", "pack", "gather"]

#: Ragged blocks that a run may join: it ends where a word of a mask's bitmap does, so that on a GPU
#: each thread finds the runs of its own word.
RUN_BLOCKS = 32


@dataclass(frozen=True, eq=False)
class _Fragments:
    """Fragments of all list entries, in order; ``counts`` of each entry, one int if all agree."""

    counts: NDArray[np.int64] | int
    start: NDArray[np.int32]
    length: NDArray[np.int32]
    members: NDArray[np.uint32]
    bits: NDArray[np.int32]


def lay_out(mask: BlockMask, lists: TileLists, side: KvSide, shape: TileShape) -> Tiles:
    """Cut the blocks of the lists into fragments and place those in steps of ``shape``."""
    start, width = _extents(mask, lists)
    most = -(-largest_kv_block(mask) // shape.slot)
    refined = None
    if lists.token_blocks is not None:
        widths = width[lists.token_blocks.entry].astype(np.int64)
        refined = recut(mask, lists, widths, shape.q, shape.slot, most)
    if side == "merge":
        offsets, fragments = _merged(mask, lists, refined, shape, most)
    else:
        uniform = mask.kv_block_sizes is None
        if side == "pack" and not uniform:
            lists, start, width, refined = _joined(lists, start, width, refined)
        fragments = _cut(lists, start, width, refined, shape.slot, most, uniform)
        if side == "pack":
            offsets = _firsts(fragments.counts, lists.offsets)
            if refined is not None or not uniform:
                short = None if uniform else fragments.length < shape.slot
                fragments = _plain_first(fragments, offsets, short)
        else:
            offsets, fragments = _padded(fragments, lists.offsets, shape.fragments)
    bits = np.empty((0, shape.q, words_of(shape.slot)), np.uint32)
    return Tiles(
        shape=shape,
        heads=mask.batch * mask.heads,
        tile_head=lists.tile_head,
        tile_q=lists.tile_q,
        frag_offsets=offsets,
        frag_start=fragments.start,
        frag_len=fragments.length,
        frag_members=fragments.members,
        frag_bits=fragments.bits,
        bits=bits if refined is None else refined.bits,
        tile_halves=lists.tile_halves,
    )


def largest_kv_block(mask: BlockMask) -> int:
    """KV rows of the widest block: the nominal size, or the true one of a ragged mask."""
    return mask.max_block[1]


def _extents(mask: BlockMask, lists: TileLists) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """First KV row and number of rows of each entry's block."""
    nominal, keys = mask.block_size[1], mask.shape[1]
    if mask.kv_block_sizes is None:
        start = lists.columns * np.int32(nominal)
        width: NDArray[np.int32] = np.full(len(start), nominal, np.int32)
        tail = np.flatnonzero(start > keys - nominal)
        width[tail] = keys - start[tail]
        return start, width
    starts = per_head(mask.kv_starts(), mask)
    nk = mask.num_blocks[1]
    flat = np.repeat(lists.tile_head.astype(np.int64) * nk, np.diff(lists.offsets))
    flat += lists.columns
    start = starts[:, :-1].reshape(-1)[flat].astype(np.int32)
    width = np.diff(starts, axis=-1).reshape(-1)[flat].astype(np.int32)
    return start, width


def _joined(
    lists: TileLists,
    start: NDArray[np.int32],
    width: NDArray[np.int32],
    refined: Refined | None,
) -> tuple[TileLists, NDArray[np.int32], NDArray[np.int32], Refined | None]:
    """Runs of neighbouring blocks with the same members and no token bits, as entries."""
    columns, members = lists.columns, lists.members
    opens = np.ones(len(columns), bool)
    opens[1:] = (columns[1:] != columns[:-1] + 1) | (members[1:] != members[:-1])
    opens |= columns % RUN_BLOCKS == 0
    opens[lists.offsets[:-1][np.diff(lists.offsets) > 0]] = True
    if refined is not None:
        opens[refined.entry] = True
        behind = refined.entry + 1
        opens[behind[behind < len(opens)]] = True
    run = exclusive_sum(opens)
    first = np.flatnonzero(opens)
    last = np.append(first[1:], len(opens))[: len(first)] - 1
    if refined is not None:
        refined = replace(refined, entry=run[refined.entry])
    lists = replace(
        lists,
        offsets=run[lists.offsets],
        columns=columns[first],
        members=members[first],
        token_blocks=None,
    )
    return lists, start[first], start[last] + width[last] - start[first], refined


def _firsts(counts: NDArray[np.int64] | int, entry: NDArray[np.int64]) -> NDArray[np.int64]:
    """First fragment of each of the given entries."""
    return entry * counts if isinstance(counts, int) else exclusive_sum(counts)[entry]


def _cut(
    lists: TileLists,
    start: NDArray[np.int32],
    width: NDArray[np.int32],
    refined: Refined | None,
    slot: int,
    most: int,
    uniform: bool,
) -> _Fragments:
    """Fragments of every entry, without those that token bits leave empty."""
    counts: NDArray[np.int64] | int
    if not uniform:
        counts = -(-width.astype(np.int64) // slot)
        # start = block start + slot * (index - first index of the entry), in 32-bit numbers:
        # the parts may wrap around, the sum does not.
        first = exclusive_sum(counts)
        frag_start = np.repeat((start - first[:-1] * slot).astype(np.int32), counts)
        frag_start += np.arange(first[-1], dtype=np.int32) * np.int32(slot)
        length = np.repeat(start + width, counts) - frag_start
        np.minimum(length, np.int32(slot), out=length)
        members = np.repeat(lists.members, counts)
    elif most > 1:
        # All blocks but the tail are alike: a rectangle, and the tail's excess is dropped below.
        # Filled by columns, as NumPy is slow where the inner axis is short.
        counts = most
        table = np.empty((2, len(start), most), np.int32)
        for j in range(most):
            ahead = np.int32(j * slot)
            np.add(start, ahead, out=table[0, :, j])
            np.minimum(width - ahead, np.int32(slot), out=table[1, :, j])
        frag_start, length = table.reshape(2, -1)
        members = np.repeat(lists.members, most)
    else:
        counts, frag_start, length, members = 1, start, width, lists.members
    bits: NDArray[np.int32] = np.full(len(members), -1, np.int32)
    alive = length > 0
    if refined is not None:
        exists = np.arange(most) * slot < width[refined.entry, None]
        place = (_firsts(counts, refined.entry)[:, None] + np.arange(most))[exists]
        members = members.copy()
        members[place] = refined.members[exists]
        bits[place] = refined.index[exists]
        alive &= members != 0
    if not alive.all():
        entries = np.arange(len(start) + 1)
        counts = np.diff(exclusive_sum(alive)[_firsts(counts, entries)])
        frag_start, length = frag_start[alive], length[alive]
        members, bits = members[alive], bits[alive]
    return _Fragments(counts, frag_start, length, members, bits)


def _plain_first(
    fragments: _Fragments, offsets: NDArray[np.int64], short: NDArray[np.bool_] | None
) -> _Fragments:
    """Each list's fragments with token bits last and short ones before those, by falling KV row.

    So few steps apply bits or mask columns. On a GPU whole fragments rise from the first place of a
    list and short ones fall from the last.
    """
    with_bits = fragments.bits >= 0
    short = np.zeros_like(with_bits) if short is None else short & ~with_bits
    order = np.empty(len(with_bits), np.int64)
    begin = offsets[:-1]
    for of_kind in (~with_bits & ~short, short, with_bits):
        counts = np.diff(exclusive_sum(of_kind)[offsets])
        place = consecutive(counts, begin)
        if of_kind is short:
            place = np.repeat(2 * begin + counts - 1, counts) - place
        order[place] = np.flatnonzero(of_kind)
        begin = begin + counts
    return _Fragments(
        1,
        fragments.start[order],
        fragments.length[order],
        fragments.members[order],
        fragments.bits[order],
    )


def _padded(
    fragments: _Fragments, offsets: NDArray[np.int64], per_step: int
) -> tuple[NDArray[np.int64], _Fragments]:
    """Pad each entry to whole steps with empty fragments, but not at the end of a list."""
    counts = fragments.counts
    if isinstance(counts, int):
        if counts % per_step == 0:
            return offsets * counts, fragments
        counts = np.full(offsets[-1], counts, np.int64)
    used = np.flatnonzero(counts)
    if len(used) < len(counts):
        offsets = np.searchsorted(used, offsets)
        counts = counts[used]
    padded = -(-counts // per_step) * per_step
    last = offsets[1:][np.diff(offsets) > 0] - 1
    padded[last] = counts[last]
    first = exclusive_sum(padded)
    total = int(first[-1])
    place = np.repeat(first[:-1] - exclusive_sum(counts)[:-1], counts)
    place += np.arange(len(place))
    start = np.zeros(total, np.int32)
    length = np.zeros(total, np.int32)
    members = np.zeros(total, np.uint32)
    bits = np.full(total, -1, np.int32)
    start[place] = fragments.start
    length[place] = fragments.length
    members[place] = fragments.members
    bits[place] = fragments.bits
    return first[offsets], _Fragments(padded, start, length, members, bits)


def _merged(
    mask: BlockMask,
    lists: TileLists,
    refined: Refined | None,
    shape: TileShape,
    most: int,
) -> tuple[NDArray[np.int64], _Fragments]:
    """Aligned groups of neighbouring blocks share a step; what is off stays, with no members."""
    nominal, keys = mask.block_size[1], mask.shape[1]
    joined = shape.fragments // most
    columns, offsets, members = lists.columns, lists.offsets, lists.members
    members = np.repeat(members, most).reshape(-1, most) if most > 1 else members[:, None]
    bits = None
    if refined is not None:
        members = members.copy()
        members[refined.entry] = refined.members
        bits = np.full(members.shape, -1, np.int32)
        bits[refined.entry] = refined.index
        alive: NDArray[np.bool_] = (members != 0).any(axis=1)
        offsets = exclusive_sum(alive)[offsets]
        columns, members, bits = columns[alive], members[alive], bits[alive]

    group = columns // np.int32(joined)
    opens = np.ones(len(group), bool)
    np.not_equal(group[1:], group[:-1], out=opens[1:])
    opens[offsets[:-1][np.diff(offsets) > 0]] = True
    steps = exclusive_sum(opens)

    # The places of a step: the fragments of each block in turn, then some that stay unused.
    base = group[opens] * np.int32(joined * nominal)
    start = np.zeros((len(base), shape.fragments), np.int32)
    length = np.full_like(start, shape.slot)
    length[:, joined * most :] = 0
    for i in range(joined * most):
        block, within = i // most, i % most * shape.slot
        np.add(base, np.int32(block * nominal + within), out=start[:, i])
        if nominal - within < shape.slot:
            length[:, i] = nominal - within
    tail = np.flatnonzero(base > keys - joined * nominal)
    length[tail] = np.clip(keys - start[tail], 0, length[tail])
    start[tail] *= length[tail] > 0

    offsets = steps[offsets] * shape.fragments
    place = steps[1:]
    place -= 1
    place *= shape.fragments
    place += (columns - group * np.int32(joined)) * np.int32(most)
    step_members = np.zeros(start.size, np.uint32)
    step_bits = np.full(start.size, -1, np.int32)
    for j in range(most):
        step_members[place + j] = members[:, j]
        if bits is not None:
            step_bits[place + j] = bits[:, j]
    by_step = step_members.reshape(start.shape)
    by_step[tail] *= length[tail] > 0
    return offsets, _Fragments(
        shape.fragments, start.reshape(-1), length.reshape(-1), step_members, step_bits
    )
