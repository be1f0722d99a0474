"""Orders and cuts of tasks, over made-up tiles: what they keep, and hand-worked cases."""

from __future__ import annotations

import itertools
import sys
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tessera_cupy.mapping import Mapping, map_mask
from tessera_cupy.mapping.tiles import Tiles, TileShape
from tessera_cupy.masks import BlockMask
from tessera_cupy.organization import DeviceModel, Organization, Tasks, organize
from tessera_cupy.reference import attention, execute_tiles

SHAPE = TileShape(q=64, kv=32, slot=8)
PLAIN = Organization()
SMALL = DeviceModel(sms=1, ctas_per_sm=1, l2_bytes=0)
ALL = [Organization(*flags) for flags in itertools.product([False, True], repeat=4)]


def make_tiles(heads: list[list[list[int]]]) -> Tiles:
    """Tiles of full eight-row fragments: per head and tile, the fragments' first rows."""
    lists = [starts for head in heads for starts in head]
    total = sum(map(len, lists))
    rows = np.concatenate([np.arange(len(head)) for head in heads] or [np.empty(0)])
    return Tiles(
        shape=SHAPE,
        heads=len(heads),
        tile_head=np.repeat(np.arange(len(heads)), [len(h) for h in heads]).astype(np.int32),
        tile_q=np.stack([rows * 64, np.full(len(rows), 64)], axis=1).astype(np.int32),
        frag_offsets=np.cumsum([0, *map(len, lists)]).astype(np.int64),
        frag_start=np.array([s for starts in lists for s in starts], np.int32),
        frag_len=np.full(total, 8, np.int32),
        frag_members=np.full(total, 255, np.uint32),
        frag_bits=np.full(total, -1, np.int32),
        bits=np.zeros((0, 64, 1), np.uint32),
    )


def of_steps(*heads: list[int]) -> Tiles:
    """Tiles of so many whole steps each."""
    return make_tiles([[list(range(0, 32 * steps, 8)) for steps in head] for head in heads])


def call(tiles: Tiles, organization: Organization = PLAIN, **arguments: Any) -> Tasks:
    """Organize for one batch entry whose query heads all have a mask and a KV head of their own."""
    heads = arguments.pop("q_heads", tiles.heads)
    given_all = {
        "batch": 1,
        "q_heads": heads,
        "kv_heads": heads,
        "mask_batch": 1,
        "mask_heads": tiles.heads,
        "kv_bytes_per_head": 1,
        "device": SMALL,
    }
    return organize(tiles, organization, **(given_all | arguments))


def pairs(tasks: Tasks) -> list[tuple[int, int]]:
    """(head, tile) of each task, in launch order."""
    return list(zip(tasks.task_head.tolist(), tasks.task_tile.tolist(), strict=True))


def without_last_cuts(tiles: Tiles, organization: Organization, **arguments: Any) -> Tasks:
    """The tasks if the last round stayed as it is."""
    with pytest.MonkeyPatch.context() as patch:
        # By module, since the package's `organize` is the function.
        patch.setattr(sys.modules[organize.__module__], "_LAST_ROUND_PARTS", ())
        return organize(tiles, organization, **arguments)


def last_cuts(
    tiles: Tiles, organization: Organization, tasks: Tasks, arguments: dict[str, Any]
) -> NDArray[np.bool_]:
    """Which tasks are parts of pairs that are whole without the cuts of the last round."""
    base = without_last_cuts(tiles, organization, **arguments)
    slots = zip(pairs(base), base.task_slot, strict=True)
    whole = {pair for pair, slot in slots if slot < 0}
    slots = zip(pairs(tasks), tasks.task_slot, strict=True)
    return np.array([pair in whole and slot >= 0 for pair, slot in slots], np.bool_)


def makespan(tasks: Tasks, capacity: int, first: int = 0) -> int:
    """Steps of the busiest CTA when CTA c takes tasks c, c + capacity, and so on.

    Tasks before ``first``, a multiple of the capacity, take no time.
    """
    length = (tasks.task_end - tasks.task_begin)[first:].astype(np.int64)
    length = np.pad(length, (0, -len(length) % capacity))
    return int(length.reshape(-1, capacity).sum(axis=0).max(initial=0))


@st.composite
def requests(draw: st.DrawFn) -> tuple[Tiles, dict[str, Any]]:
    """Tiles and the arguments of a request that broadcasts and groups heads in any way."""
    batch, kv_heads, shared = draw(st.tuples(*[st.integers(1, 3)] * 3))
    q_heads = kv_heads * shared
    mask_batch = draw(st.sampled_from([1, batch]))
    mask_heads = draw(st.sampled_from([1, q_heads]))
    # Heads differ in their number of tiles, as ragged masks make them.
    starts = st.lists(st.integers(0, 40), max_size=120).map(lambda s: [8 * i for i in sorted(s)])
    count = mask_batch * mask_heads
    heads = draw(st.lists(st.lists(starts, max_size=4), min_size=count, max_size=count))
    device = DeviceModel(*draw(st.tuples(st.integers(1, 9), st.integers(1, 3), st.integers(0, 9))))
    return make_tiles(heads), {
        "batch": batch,
        "q_heads": q_heads,
        "kv_heads": kv_heads,
        "mask_batch": mask_batch,
        "mask_heads": mask_heads,
        "kv_bytes_per_head": draw(st.integers(0, 4)),
        "device": device,
    }


def mask_head(head: int, arguments: dict[str, Any]) -> int:
    """The mask head that a query head of the request reads."""
    b, h = divmod(head, arguments["q_heads"])
    b = b if arguments["mask_batch"] > 1 else 0
    return b * arguments["mask_heads"] + (h if arguments["mask_heads"] > 1 else 0)


@given(requests(), st.sampled_from(ALL))
def test_every_step_of_every_head_is_in_one_task(
    request_: tuple[Tiles, dict[str, Any]], organization: Organization
) -> None:
    tiles, arguments = request_
    tasks = organize(tiles, organization, **arguments)
    steps = tiles.steps.tolist()
    seen: dict[tuple[int, int], list[int]] = {}
    for i, pair in enumerate(pairs(tasks)):
        seen.setdefault(pair, []).extend(range(tasks.task_begin[i], tasks.task_end[i]))
    expected = {
        (head, int(tile)): list(range(steps[tile]))
        for head in range(arguments["batch"] * arguments["q_heads"])
        for tile in np.flatnonzero(tiles.tile_head == mask_head(head, arguments))
    }
    # Keys too: a tile with no step still has its task.
    assert {pair: sorted(of) for pair, of in seen.items()} == expected


@given(requests(), st.sampled_from([o for o in ALL if o.split]))
def test_parts_take_consecutive_slots_in_the_order_of_their_steps(
    request_: tuple[Tiles, dict[str, Any]], organization: Organization
) -> None:
    tiles, arguments = request_
    tasks = organize(tiles, organization, **arguments)
    slots = tasks.task_slot[tasks.task_slot >= 0]
    assert sorted(slots.tolist()) == list(range(tasks.slots))
    task_of = {int(slot): i for i, slot in enumerate(tasks.task_slot) if slot >= 0}
    for i, pair in enumerate(zip(tasks.merge_head, tasks.merge_tile, strict=True)):
        parts = [task_of[s] for s in range(*tasks.merge_offsets[i : i + 2].tolist())]
        assert len(parts) > 1
        assert {pairs(tasks)[part] for part in parts} == {pair}
        edges = [int(tasks.task_begin[parts[0]]), *(int(tasks.task_end[part]) for part in parts)]
        assert edges[0] == 0
        assert edges[-1] == tiles.steps[pair[1]]
        assert [int(tasks.task_begin[part]) for part in parts] == edges[:-1]
        lengths = np.diff(edges)
        assert lengths.max() - lengths.min() <= 1
        assert lengths.min() > 0
    whole = [pair for pair, slot in zip(pairs(tasks), tasks.task_slot, strict=True) if slot < 0]
    assert len(whole) == len(set(whole))


@given(requests(), st.sampled_from(ALL))
def test_the_same_arguments_give_the_same_arrays(
    request_: tuple[Tiles, dict[str, Any]], organization: Organization
) -> None:
    tiles, arguments = request_
    first, second = (organize(tiles, organization, **arguments).arrays() for _ in range(2))
    for name, array in first.items():
        assert array.dtype == (np.bool_ if name == "task_reverse" else np.int32)
        assert array.flags.c_contiguous
        np.testing.assert_array_equal(array, second[name])


@given(requests(), st.sampled_from(ALL))
def test_groups_of_heads_that_fit_in_l2_run_one_after_the_other(
    request_: tuple[Tiles, dict[str, Any]], organization: Organization
) -> None:
    tiles, arguments = request_
    tasks = organize(tiles, organization, **arguments)
    shared = arguments["q_heads"] // arguments["kv_heads"]
    l2, one = arguments["device"].l2_bytes, arguments["kv_bytes_per_head"]
    at_once = max(1, l2 // max(1, one))
    group = tasks.task_head // shared // at_once
    assert (np.diff(group) >= 0).all()
    length = tasks.task_end - tasks.task_begin
    # Parts of the last round come after tiles that are too short to cut.
    same = (group[1:] == group[:-1]) & ~last_cuts(tiles, organization, tasks, arguments)[1:]
    if organization.longest:
        assert (length[1:] <= length[:-1] * 17 / 16 + 1)[same].all()


@given(requests(), st.sampled_from(ALL))
def test_cuts_of_the_last_round_move_nothing_else(
    request_: tuple[Tiles, dict[str, Any]], organization: Organization
) -> None:
    tiles, arguments = request_
    capacity = arguments["device"].capacity
    tasks = organize(tiles, organization, **arguments)
    base = without_last_cuts(tiles, organization, **arguments)
    mine = last_cuts(tiles, organization, tasks, arguments)
    if not organization.split or len(set(pairs(base))) <= capacity or not len(base) % capacity:
        assert not mine.any()
    # The parts come last. Of each pair, they are in the order of its steps.
    assert (np.diff(mine.astype(int)) >= 0).all()
    cut = list(
        dict.fromkeys(pair for pair, is_mine in zip(pairs(tasks), mine, strict=True) if is_mine)
    )
    first = len(tasks) - int(mine.sum())
    count = int(mine.sum()) // max(1, len(cut))
    assert pairs(tasks)[first:] == [pair for pair in cut for _ in range(count)]
    assert count in ({2, 3, 4} if cut else {0})
    assert (tasks.task_end - tasks.task_begin)[first:].min(initial=8) >= 8
    for i in range(first, len(tasks), max(1, count)):
        assert (np.diff(tasks.task_slot[i : i + count]) == 1).all()
    # The others are as they were, and the cut pairs were in the last round.
    kept = np.array([pair not in set(cut) for pair in pairs(base)], np.bool_)
    for name in ("task_head", "task_tile", "task_begin", "task_end"):
        np.testing.assert_array_equal(
            getattr(tasks, name)[:first], getattr(base, name)[kept], err_msg=name
        )
    assert [pair for pair, is_kept in zip(pairs(base), kept, strict=True) if not is_kept] == cut
    assert kept[: len(base) - len(base) % capacity].all()
    # The last round ends at least a tenth sooner, or stays.
    last = len(base) - len(base) % capacity
    before, now = makespan(base, capacity, last), makespan(tasks, capacity, last)
    assert 10 * now <= 9 * before if cut else now == before


def test_rows_is_the_order_of_heads_then_rows() -> None:
    tasks = call(of_steps([1, 3, 0], [2, 1, 5]), PLAIN)
    assert pairs(tasks) == [(0, 0), (0, 1), (0, 2), (1, 3), (1, 4), (1, 5)]
    assert not tasks.task_reverse.any()
    assert tasks.slots == 0


def test_longest_runs_first_within_each_group_of_heads() -> None:
    tiles = of_steps([1, 3], [2, 9], [4, 0])
    device = DeviceModel(sms=1, ctas_per_sm=1, l2_bytes=200)
    tasks = call(tiles, Organization(longest=True), kv_bytes_per_head=100, device=device)
    assert pairs(tasks) == [(1, 3), (0, 1), (1, 2), (0, 0), (2, 4), (2, 5)]
    one_head = call(tiles, Organization(longest=True), kv_bytes_per_head=101, device=device)
    assert pairs(one_head) == [(0, 1), (0, 0), (1, 3), (1, 2), (2, 4), (2, 5)]


def test_groups_count_kv_heads_over_the_batch() -> None:
    # Two KV heads fit: batch 0 has three, so the second group straddles the batch.
    arguments: dict[str, Any] = {"batch": 2, "q_heads": 6, "kv_heads": 3, "mask_heads": 1}
    device = DeviceModel(sms=1, ctas_per_sm=1, l2_bytes=2)
    tasks = call(of_steps([1, 2]), Organization(longest=True), device=device, **arguments)
    heads = tasks.task_head.reshape(3, -1)
    assert [sorted(set(group)) for group in heads.tolist()] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]
    assert tasks.task_tile.reshape(3, 2, 4)[:, 0].all()


def test_near_ties_of_length_keep_the_order_of_rows() -> None:
    # 98 and 102 steps share a bucket; 120 is a sixth longer and comes first.
    tasks = call(of_steps([98, 102, 120, 98]), Organization(longest=True))
    assert tasks.task_tile.tolist() == [2, 0, 1, 3]
    # Short lists have buckets of one step each.
    assert call(of_steps([1, 2, 3, 4]), Organization(longest=True)).task_tile.tolist() == [
        3,
        2,
        1,
        0,
    ]


def test_runs_orders_tiles_by_the_first_row_of_their_longest_run() -> None:
    tiles = make_tiles(
        [
            [
                [0, 80, 88, 96, 200],  # longest run begins at 80
                [8, 16, 120, 128],  # two of a length: the first, at 8
                [],  # nothing loaded: 0
                [40],
                [88],
            ]
        ]
    )
    tasks = call(tiles, Organization(runs=True))
    assert tasks.task_tile.tolist() == [2, 1, 3, 0, 4]


def test_padding_and_inactive_fragments_are_no_part_of_a_run() -> None:
    # The first tile's run begins at 16, since 8 has no members; the second's at 32, past padding.
    tiles = make_tiles([[[0, 8, 16, 24], [0, 32, 0, 40], [24], [8]]])
    tiles.frag_members[1] = 0
    tiles.frag_len[6] = 0
    tasks = call(tiles, Organization(runs=True))
    assert tasks.task_tile.tolist() == [3, 0, 2, 1]


def test_a_run_ends_with_its_tile() -> None:
    tasks = call(make_tiles([[[0, 8, 80], [88, 96]]]), Organization(runs=True))
    assert tasks.task_tile.tolist() == [0, 1]


def test_runs_keeps_kv_heads_together_and_brings_query_heads_side_by_side() -> None:
    tiles = make_tiles([[[80], [16]]])
    arguments: dict[str, Any] = {"q_heads": 4, "kv_heads": 2, "mask_heads": 1}
    device = DeviceModel(sms=1, ctas_per_sm=1, l2_bytes=2)
    tasks = call(tiles, Organization(runs=True), device=device, **arguments)
    expected = [(0, 1), (1, 1), (0, 0), (1, 0), (2, 1), (3, 1), (2, 0), (3, 0)]
    assert pairs(tasks) == expected


def test_length_comes_before_runs() -> None:
    tiles = make_tiles([[[0], [400], [240, 248, 256, 264, 272], [160, 168, 176, 184, 192]]])
    tasks = call(tiles, Organization(runs=True, longest=True))
    assert tasks.task_tile.tolist() == [3, 2, 0, 1]


def test_alternate_reverses_every_second_task() -> None:
    tasks = call(of_steps([1, 2, 3], [1, 2]), Organization(longest=True, alternate=True))
    assert tasks.task_reverse.tolist() == [False, True, False, True, False]


def test_split_cuts_what_would_hold_one_cta_too_long() -> None:
    # 500 steps over 10 CTAs: a share is 50, and only above 75 is a tile cut.
    device = DeviceModel(sms=5, ctas_per_sm=2, l2_bytes=0)
    none = [0] * 6  # tiles without steps, so that there are more than CTAs
    tasks = call(of_steps([75, 77, 0, 346, 2, *none]), Organization(split=True), device=device)
    lengths = (tasks.task_end - tasks.task_begin).tolist()
    assert tasks.task_tile.tolist() == [0, 1, 1, 2, *[3] * 7, *range(4, 11)]
    assert lengths == [75, 38, 39, 0, 49, 49, 50, 49, 50, 49, 50, 2, *none]
    assert tasks.task_slot.tolist() == [-1, 0, 1, -1, *range(2, 9), *[-1] * 7]
    assert tasks.merge_tile.tolist() == [1, 3]
    assert tasks.merge_head.tolist() == [0, 0]
    assert tasks.merge_offsets.tolist() == [0, 2, 9]
    # One step more is above half a share more.
    tasks = call(of_steps([76, 76, 0, 346, 2, *none]), Organization(split=True), device=device)
    assert np.bincount(tasks.task_tile).tolist() == [2, 2, 1, 7, *[1] * 7]


def test_split_leaves_what_a_merge_would_not_win_back() -> None:
    # 80 steps over 4 CTAs: a share is 20, and two of the shortest parts are 16.
    device = DeviceModel(sms=4, ctas_per_sm=1, l2_bytes=0)
    for longest, parts in ((35, 1), (36, 2)):
        tiles = of_steps([longest, 20, 80 - 20 - longest, 0, 0])
        tasks = call(tiles, Organization(longest=True, split=True), device=device)
        assert np.bincount(tasks.task_tile).tolist() == [parts, *[1] * 4]
        # In one round it is when all end that counts: 20 steps at best.
        tasks = call(of_steps([longest, 20, 20]), Organization(split=True), device=device)
        assert np.bincount(tasks.task_tile).tolist() == [parts, 1, 1]


@pytest.mark.parametrize(
    ("steps", "sms", "parts"),
    [
        # A share is 20, but parts of 20 would be 2 + 15, of which one finds no CTA.
        ([30, 290], 16, [2, 14]),
        # On a larger GPU a share is less than the shortest part.
        ([30, 290], 264, [4, 37]),
        # 4 CTAs are left, which cannot help 8 tiles; 4 of 8 they can.
        ([40] * 8, 12, [1] * 8),
        ([80] * 4 + [40] * 4, 12, [2] * 4 + [1] * 4),
        # Parts of 28 and 29 would be 4 + 2; of 30 they all find a CTA.
        ([90, 50], 5, [3, 2]),
        # 36 is not above 29 by a shortest part, so it stays, and makes room for a fourth of 96.
        ([96, 36], 5, [4, 1]),
        # Short tiles wait for a second round, which takes an eighth of a share of 22, ...
        ([240, *[2] * 10], 12, [11, *[1] * 10]),
        # ... a quarter of 13, ...
        ([120, *[3] * 10], 12, [10, *[1] * 10]),
        # ... a quarter of 28, rather than half of a share of 26, ...
        ([240, *[7] * 10], 12, [9, *[1] * 10]),
        # ... half of 29, ...
        ([240, *[10] * 10], 12, [9, *[1] * 10]),
        # ... or all of 75, which is still sooner than 240.
        ([240, *[60] * 11], 12, [4, *[1] * 11]),
    ],
)
def test_parts_of_one_round_end_soonest(steps: list[int], sms: int, parts: list[int]) -> None:
    device = DeviceModel(sms=sms, ctas_per_sm=1, l2_bytes=0)
    tasks = call(of_steps(steps), Organization(longest=True, split=True), device=device)
    assert np.bincount(tasks.task_tile).tolist() == parts


@pytest.mark.parametrize(("sms", "per_sm", "parts"), [(12, 1, 1), (6, 2, 2)])
def test_parts_of_a_share_keep_multiprocessors_of_several_ctas_busy(
    sms: int, per_sm: int, parts: int
) -> None:
    # Halves of 20 for 12 CTAs: two wait, so that no CTA would be through sooner.
    device = DeviceModel(sms=sms, ctas_per_sm=per_sm, l2_bytes=0)
    tasks = call(of_steps([40] * 7), Organization(longest=True, split=True), device=device)
    assert np.bincount(tasks.task_tile).tolist() == [parts] * 7


@given(
    st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=24), min_size=1, max_size=2),
    st.integers(0, 40),
)
def test_cuts_where_each_tile_has_a_cta_never_end_later(heads: list[list[int]], spare: int) -> None:
    tiles = of_steps(*heads)
    device = DeviceModel(sms=len(tiles) + spare, ctas_per_sm=1, l2_bytes=100)
    whole, cut = (
        call(tiles, Organization(longest=True, split=split), device=device)
        for split in (False, True)
    )
    before, after = makespan(whole, device.capacity), makespan(cut, device.capacity)
    assert before == max(map(max, heads))
    if cut.slots:
        assert after <= before - 16
    # Whoever could halve the longest tile, and have a CTA for each half, does as well at least.
    if spare and sum(map(len, heads)) == 1:
        assert after <= max(8, -(-before // 2)) + 16


def test_the_split_limit_grows_with_the_request() -> None:
    # More heads that share the tiles fill the GPU by themselves.
    device = DeviceModel(sms=16, ctas_per_sm=1, l2_bytes=0)
    assert call(of_steps([30, 290]), Organization(split=True), device=device).slots == 16
    busy = call(of_steps([30, 290]), Organization(split=True), device=device, q_heads=40)
    assert busy.slots == 0


def test_parts_of_a_split_tile_are_sorted_by_their_own_length() -> None:
    device = DeviceModel(sms=4, ctas_per_sm=1, l2_bytes=0)
    tasks = call(of_steps([13, 40]), Organization(longest=True, split=True), device=device)
    # Parts of 13, 13 and 14 steps: the last one is longer than the whole tile.
    assert tasks.task_tile.tolist() == [1, 0, 1, 1]
    assert tasks.task_slot.tolist() == [2, -1, 0, 1]


@pytest.mark.parametrize(
    ("tiles", "steps", "cut", "lengths"),
    [
        (13, 32, 1, [8] * 4),  # one round of quarters
        (14, 32, 2, [16] * 4),  # quarters would take two rounds: no sooner than one of halves
        (15, 32, 3, [8] * 12),  # halves and thirds gain nothing, three rounds of quarters do
        (16, 32, 0, []),  # the last round is full
        (13, 31, 1, [10, 10, 11]),  # quarters would be shorter than eight steps
        (13, 24, 1, [8] * 3),
        (13, 23, 1, [11, 12]),
        (13, 15, 0, []),
        (15, 31, 0, []),  # only quarters would gain
    ],
)
def test_split_cuts_the_tiles_of_the_last_round(
    tiles: int, steps: int, cut: int, lengths: list[int]
) -> None:
    device = DeviceModel(sms=2, ctas_per_sm=2, l2_bytes=0)
    tasks = call(of_steps([steps] * tiles), Organization(split=True), device=device)
    whole = tiles - cut
    parts = len(lengths) // max(1, cut)
    assert tasks.task_tile.tolist() == [*range(whole), *np.repeat(range(whole, tiles), parts)]
    assert (tasks.task_end - tasks.task_begin).tolist() == [steps] * whole + lengths
    assert tasks.task_slot.tolist() == [-1] * whole + list(range(cut * parts))
    assert tasks.merge_tile.tolist() == list(range(whole, tiles))
    assert tasks.merge_offsets.tolist() == list(range(0, cut * parts + 1, parts or 1))
    # Without split the last round stays.
    assert call(of_steps([steps] * tiles), PLAIN, device=device).slots == 0


def test_the_last_round_is_that_of_the_launch_order() -> None:
    # In order of length, tiles 0, 4, 2 are last; 2 is too short to cut and starts before the
    # parts. Slots and merges stay in the order of the rows.
    device = DeviceModel(sms=5, ctas_per_sm=1, l2_bytes=0)
    organization = Organization(longest=True, split=True)
    tasks = call(of_steps([24, 40, 7, 40, 16, *[40] * 13]), organization, device=device)
    assert tasks.task_tile.tolist() == [1, 3, *range(5, 18), 2, 0, 0, 4, 4]
    assert tasks.task_slot.tolist() == [-1] * 16 + [0, 1, 2, 3]
    tasks = call(of_steps([16, 40, 7, 40, 24, *[40] * 13]), organization, device=device)
    assert tasks.task_tile.tolist() == [1, 3, *range(5, 18), 2, 4, 4, 0, 0]
    assert tasks.task_slot.tolist() == [-1] * 16 + [2, 3, 0, 1]
    assert tasks.task_begin[16:].tolist() == [0, 12, 0, 8]
    assert tasks.task_end[16:].tolist() == [12, 24, 8, 16]
    assert tasks.merge_tile.tolist() == [0, 4]
    assert tasks.merge_offsets.tolist() == [0, 2, 4]


def test_a_last_round_is_cut_for_a_tenth_of_it() -> None:
    # Tiles of less than 16 steps stay whole and last as long as the round then does.
    device = DeviceModel(sms=4, ctas_per_sm=1, l2_bytes=0)
    organization = Organization(longest=True, split=True)
    assert call(of_steps([16] * 17 + [15]), organization, device=device).slots == 0
    assert call(of_steps([16] * 17 + [14]), organization, device=device).slots == 2


def test_only_the_last_group_of_heads_is_cut() -> None:
    # 18 tasks on 4 CTAs leave two; of the second group there is only one.
    device = DeviceModel(sms=4, ctas_per_sm=1, l2_bytes=1)
    organization = Organization(longest=True, split=True)
    tasks = call(of_steps([16] * 16 + [8], [16]), organization, device=device)
    assert pairs(tasks)[15:] == [(0, 15), (0, 16), (1, 17), (1, 17)]
    # A task of the first group that stays is as long: nothing would be gained.
    assert call(of_steps([16] * 17, [16]), organization, device=device).slots == 0
    # Both heads in one group: both are cut.
    device = DeviceModel(sms=4, ctas_per_sm=1, l2_bytes=2)
    assert call(of_steps([16] * 17, [16]), organization, device=device).slots == 4


def test_pairs_that_do_not_exceed_the_capacity_are_cut_by_length_only() -> None:
    # Limit 12: eleven tasks on twelve CTAs. Halves of the 16 steps would end sooner, so as the
    # last round they would be cut.
    device = DeviceModel(sms=12, ctas_per_sm=1, l2_bytes=0)
    tasks = call(of_steps([120, 16]), Organization(split=True), device=device)
    assert np.bincount(tasks.task_tile).tolist() == [10, 1]


def test_parts_of_long_tiles_are_not_cut_again() -> None:
    # Limit 51, so 80 steps are two parts; the second and a tile of 70 make the last round.
    device = DeviceModel(sms=3, ctas_per_sm=1, l2_bytes=0)
    tasks = call(of_steps([1, 1, 80, 70]), Organization(split=True), device=device)
    assert tasks.task_tile.tolist() == [0, 1, 2, 2, 3, 3]
    assert (tasks.task_end - tasks.task_begin).tolist() == [1, 1, 40, 40, 35, 35]
    assert tasks.task_slot.tolist() == [-1, -1, 0, 1, 2, 3]


@pytest.mark.parametrize("name", ["split", "longest+split", "runs+longest+split"])
@pytest.mark.parametrize(
    ("count", "steps", "sms", "per_sm", "gain"),
    [
        # 36 tasks of the 28th round in thirds: one third of a round.
        (450, 31, 132, 1, 0.022),
        (450, 450, 132, 1, 0.023),
        # 168 tasks of the 12th round in thirds: two thirds of a round.
        (384, 450, 132, 2, 0.027),
    ],
)
def test_a_last_round_in_parts_ends_sooner(
    name: str, count: int, steps: int, sms: int, per_sm: int, gain: float
) -> None:
    # Only the number of steps counts here: one fragment list that 8 heads share.
    tiles = of_steps([steps] * count)
    device = DeviceModel(sms=sms, ctas_per_sm=per_sm, l2_bytes=32 << 20)
    organization = Organization.parse(name)
    arguments = {"q_heads": 8, "kv_bytes_per_head": 29 << 20, "device": device}
    with_cuts = makespan(call(tiles, organization, **arguments), device.capacity)
    whole = makespan(
        call(tiles, Organization.parse(name.replace("split", "")[:-1] or "rows"), **arguments),
        device.capacity,
    )
    assert whole == -(-8 * count // device.capacity) * steps
    assert with_cuts <= (1 - gain) * whole
    # No order can end before all CTAs have the same share.
    assert with_cuts >= 8 * count * steps / device.capacity


@pytest.mark.parametrize("name", ["split", "runs+longest+alternate+split"])
def test_a_last_round_in_parts_computes_the_same(name: str) -> None:
    rng = np.random.default_rng(7)
    blocks = rng.random((1, 4, 10, 40)) < 0.97
    mask = BlockMask.from_dense(blocks, (16, 16), (155, 633))
    q = rng.standard_normal((1, 4, 155, 8))
    k, v = rng.standard_normal((2, 1, 2, 633, 8))
    tiles = map_mask(mask, Mapping("retain", "pack"), 16, 16)
    arguments: dict[str, Any] = {"q_heads": 4, "mask_batch": 1, "mask_heads": 4}
    device = DeviceModel(sms=7, ctas_per_sm=1, l2_bytes=1)
    organization = Organization.parse(name)
    of_request: dict[str, Any] = arguments | {
        "batch": 1,
        "kv_heads": 2,
        "kv_bytes_per_head": 1,
        "device": device,
    }
    # 40 tiles on seven CTAs leave five, and only they are cut.
    assert without_last_cuts(tiles, organization, **of_request).slots == 0
    tasks = organize(tiles, organization, **of_request)
    assert (len(tasks.merge_tile), tasks.slots) == (5, 20)
    got = execute_tiles(tiles, tasks, q, k, v, return_lse=True, dtype=np.float64, **arguments)
    expected = attention(q, k, v, mask, return_lse=True)
    for result, right in zip(got, expected, strict=True):
        np.testing.assert_allclose(result, right, rtol=1e-11, atol=1e-11)
    # Each part counts: with a step less the result is another.
    tasks.task_end[-1] -= 1
    short = execute_tiles(tiles, tasks, q, k, v, dtype=np.float64, **arguments)
    assert not np.allclose(short, expected[0], rtol=1e-6, atol=1e-6)


def test_batch_entries_and_heads_read_their_own_mask() -> None:
    tiles = of_steps([1], [2], [3], [4])
    arguments = {"batch": 2, "q_heads": 2, "kv_heads": 1, "mask_batch": 2, "mask_heads": 2}
    assert pairs(call(tiles, **arguments)) == [(0, 0), (1, 1), (2, 2), (3, 3)]
    tiles = of_steps([1], [2])
    assert pairs(call(tiles, **(arguments | {"mask_batch": 1}))) == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert pairs(call(tiles, **(arguments | {"mask_heads": 1}))) == [(0, 0), (1, 0), (2, 1), (3, 1)]


def test_a_mask_without_tiles_gives_no_tasks() -> None:
    for organization in ALL:
        tasks = call(make_tiles([[], []]), organization)
        assert len(tasks) == 0
        assert tasks.slots == 0


def test_only_empty_tiles() -> None:
    for organization in ALL:
        tasks = call(make_tiles([[[], []]]), organization)
        assert sorted(tasks.task_tile.tolist()) == [0, 1]
        assert (tasks.task_begin == tasks.task_end).all()


def test_names_round_trip() -> None:
    for organization in ALL:
        assert Organization.parse(organization.name) == organization
    assert PLAIN.name == "rows"
    assert Organization(True, True, True, True).name == "runs+longest+alternate+split"


@pytest.mark.parametrize(
    "name", ["", "row", "rows+split", "split+runs", "split+split", "split+", "Split", "runs split"]
)
def test_a_wrong_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="`organization`: expected"):
        Organization.parse(name)


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ({"q_heads": 10, "kv_heads": 4, "mask_heads": 1}, "q_heads"),
        ({"q_heads": 4, "kv_heads": 0, "mask_heads": 1}, "q_heads"),
        ({"q_heads": 4, "mask_heads": 2}, "mask_heads"),
        ({"batch": 3, "mask_batch": 2}, "mask_batch"),
        ({"q_heads": 3, "mask_heads": 3}, "tiles"),
        ({"batch": 2, "mask_batch": 2}, "tiles"),
    ],
)
def test_heads_that_do_not_fit_are_refused(arguments: dict[str, Any], argument: str) -> None:
    with pytest.raises(ValueError, match=f"`{argument}`: expected"):
        call(of_steps([1], [1]), **arguments)


@pytest.mark.parametrize("wrong", [{"sms": 0}, {"ctas_per_sm": 0}, {"l2_bytes": -1}])
def test_an_impossible_device_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"`{next(iter(wrong))}`: expected at least"):
        DeviceModel(**({"sms": 1, "ctas_per_sm": 1, "l2_bytes": 0} | wrong))


def many(heads: int, tiles: int, fragments: int) -> Tiles:
    """Tiles whose lists have 0 to ``fragments`` fragments anywhere."""
    rng = np.random.default_rng(0)
    counts = rng.integers(0, fragments + 1, heads * tiles)
    total = int(counts.sum())
    starts: NDArray[np.int32] = (rng.integers(0, 6700 * 8, total) * 8).astype(np.int32)
    rows = np.tile(np.arange(tiles), heads)
    return Tiles(
        shape=SHAPE,
        heads=heads,
        tile_head=np.repeat(np.arange(heads), tiles).astype(np.int32),
        tile_q=np.stack([rows * 64, np.full_like(rows, 64)], axis=1).astype(np.int32),
        frag_offsets=np.concatenate([[0], np.cumsum(counts)]),
        frag_start=starts,
        frag_len=np.full(total, 8, np.int32),
        frag_members=np.full(total, 255, np.uint32),
        frag_bits=np.full(total, -1, np.int32),
        bits=np.zeros((0, 64, 1), np.uint32),
    )


@pytest.mark.parametrize("shared", [False, True])
def test_many_heads_and_tiles_take_less_than_a_second(shared: bool) -> None:
    tiles = many(1 if shared else 48, 6700, 400 if shared else 12)
    organization = Organization(runs=True, longest=True, alternate=True, split=True)
    device = DeviceModel(sms=132, ctas_per_sm=2, l2_bytes=32 << 20)
    seconds = []
    for _ in range(3):
        begin = time.process_time()
        tasks = call(tiles, organization, q_heads=48, kv_bytes_per_head=16 << 20, device=device)
        seconds.append(time.process_time() - begin)
    assert len(tasks) >= 48 * 6700
    assert min(seconds) < 1.0


def test_a_usual_request_takes_milliseconds() -> None:
    tiles = of_steps(*[[31] * 900] * 8)
    organization = Organization(longest=True, split=True)
    device = DeviceModel(sms=132, ctas_per_sm=1, l2_bytes=32 << 20)
    seconds = []
    for _ in range(10):
        begin = time.process_time()
        tasks = call(tiles, organization, kv_bytes_per_head=29 << 20, device=device)
        seconds.append(time.process_time() - begin)
    assert tasks.slots > 0
    assert min(seconds) < 0.02


def test_counts_beyond_32_bits_do_not_wrap() -> None:
    # One list that 40,000 heads share: 2.4e9 steps in all.
    tiles = of_steps([60_000])
    device = DeviceModel(sms=1000, ctas_per_sm=1000, l2_bytes=0)
    tasks = call(tiles, Organization(split=True), q_heads=40_000, device=device)
    # Limit 2.4e9 / 1e6 = 2,400.
    assert tasks.slots == 40_000 * 25
    assert (tasks.task_end - tasks.task_begin == 2_400).all()
    # Steps times parts of one tile: 200,000 * 25,000.
    tasks = call(of_steps([200_000]), Organization(split=True), device=device)
    assert (tasks.task_begin == np.arange(0, 200_000, 8)).all()


@pytest.mark.parametrize(("tile", "mapping"), [((128, 192), "share"), ((64, 64), "retain")])
def test_few_long_rows_of_a_small_problem_are_cut_in_three_at_least(
    tile: tuple[int, int], mapping: str
) -> None:
    """4,096 tokens and 2 heads leave most CTAs of a large GPU idle, unless 8 long rows spread."""
    blocks = np.zeros((2, 64, 64), bool)
    blocks[:, :, 0] = True
    blocks[:, ::8] = True
    tiles = map_mask(BlockMask.from_dense(blocks, (64, 64)), Mapping(mapping, "pack"), *tile)
    gpu = DeviceModel(sms=132, ctas_per_sm=1, l2_bytes=32 << 20)
    whole, cut = (
        call(tiles, Organization(longest=True, split=split), kv_bytes_per_head=1 << 21, device=gpu)
        for split in (False, True)
    )
    longest = [int((t.task_end - t.task_begin).max()) for t in (whole, cut)]
    assert longest[0] >= 3 * longest[1]
    assert len(cut) - len(whole) <= gpu.capacity
