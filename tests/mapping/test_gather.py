"""Gather: key slices worked out by hand, and what must hold for any of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tessera_cupy import ArraySpec, KeySlices, make_plan, reference, viz
from tessera_cupy.errors import PlanNotEligibleError
from tessera_cupy.mapping import Mapping, Tiles, expand, map_mask, why_not
from tessera_cupy.mapping.gather import GATHERED_COST, map_slices
from tessera_cupy.masks import BlockMask
from tessera_cupy.organization import DeviceModel, Organization, organize
from tessera_cupy.reference.executor import execute_tiles

#: Query side, rows of a group, rows of a tile.
WAYS = (
    *(("retain", 64, 64), ("retain", 64, 128), ("retain", 128, 128), ("retain", 192, 192)),
    *(("split", 192, 128), ("split", 192, 64), ("split", 128, 64), ("share", 64, 128)),
)


def slices_of(*lists: list[int], group: int, shape: tuple[int, int]) -> KeySlices:
    """One head, a list of keys for each group."""
    offsets = np.cumsum([0, *map(len, lists)])
    keys = np.array([key for keys in lists for key in keys], np.int64)
    return KeySlices.from_csr(offsets, keys, group, shape)


def fragments_of(tiles: Tiles) -> list[list[tuple[str, list[int], int]]]:
    """Each tile's fragments: "run", "rows" or "pad", the KV rows, and the members."""
    listed = []
    for tile in range(len(tiles)):
        mine = []
        for f in range(tiles.frag_offsets[tile], tiles.frag_offsets[tile + 1]):
            start, length = int(tiles.frag_start[f]), int(tiles.frag_len[f])
            assert tiles.rows is not None
            assert tiles.frag_gathered is not None
            if tiles.frag_gathered[f]:
                kind, keys = "rows", tiles.rows[start : start + length].tolist()
                assert len(keys) == length > 0
            else:
                kind, keys = "run" if length else "pad", list(range(start, start + length))
            mine.append((kind, keys, int(tiles.frag_members[f])))
        listed.append(mine)
    return listed


def test_runs_first_then_the_gathered_rows() -> None:
    # Slots of 8: the first group has a run of 8, one of 7 and two keys alone; the second one, of
    # 36 rows, a run of 17.
    first = [1, 3, *range(8, 16), *range(20, 27)]
    tiles = map_slices(
        slices_of(first, [*range(30, 47)], group=64, shape=(100, 60)), "retain", 64, 16, slot=8
    )
    assert tiles.tile_q.tolist() == [[0, 64], [64, 36]]
    assert tiles.frag_start.tolist() == [8, 0, 8, 30, 38, 9]
    assert tiles.frag_len.tolist() == [8, 8, 1, 8, 8, 1]
    assert tiles.frag_gathered is not None
    assert tiles.frag_gathered.tolist() == [False, True, True, False, False, True]
    assert tiles.rows is not None
    assert tiles.rows.tolist() == [1, 3, *range(20, 27), 46]
    assert tiles.rows.dtype == tiles.frag_start.dtype == np.int32
    assert tiles.frag_members.tolist() == [0xFF] * 3 + [0x1F] * 3
    assert tiles.frag_bits.tolist() == [-1] * 6
    assert tiles.frag_offsets.tolist() == [0, 3, 6]
    assert tiles.steps.tolist() == [2, 2]
    assert tiles.nbytes == sum(array.nbytes for array in tiles.arrays().values())
    assert list(tiles.arrays())[-2:] == ["frag_gathered", "rows"]
    assert tiles.keys_end() == 47
    assert tiles.key_rows(1, np.arange(8)).tolist() == [1, 3, *range(20, 26)]
    assert tiles.key_rows(4, 2) == 40


@pytest.mark.parametrize(
    ("run", "runs", "gathered"),
    [
        (7, [], [7]),
        (8, [], [8]),
        # A slot costs 64, gathering 58 keys 1.1 * 58 = 63.8, and 59 keys 64.9.
        (58, [], [58]),
        (59, [59], []),
        (63, [63], []),
        (64, [64], []),
        (65, [64], [1]),
        (122, [64], [58]),
        (123, [64, 59], []),
        (128, [64, 64], []),
    ],
)
def test_what_a_run_is_cut_into(run: int, runs: list[int], gathered: list[int]) -> None:
    assert GATHERED_COST["retain"] == 0.10
    keys = list(range(5, 5 + run))
    (mine,) = fragments_of(
        map_slices(slices_of(keys, group=64, shape=(64, 200)), "retain", 64, 192)
    )
    assert [len(found) for kind, found, _ in mine if kind == "run"] == runs
    assert [len(found) for kind, found, _ in mine if kind == "rows"] == gathered
    assert [key for _, found, _ in mine for key in found] == keys


@pytest.mark.parametrize(("run", "kind"), [(50, "rows"), (51, "run")])
def test_two_groups_a_tile_gather_less(run: int, kind: str) -> None:
    # 1.27 * 50 = 63.5 is less than the slot's 64, 1.27 * 51 = 64.8 is not.
    assert GATHERED_COST["share"] == 0.27
    keys = list(range(3, 3 + run))
    slices = slices_of(keys, keys, group=64, shape=(128, 200))
    (mine,) = fragments_of(map_slices(slices, "share", 128, 192))
    # The rest of the step is padding.
    assert mine[0][:2] == (kind, keys)
    assert {found for found, _, _ in mine[1:]} == {"pad"}


def test_a_run_ends_with_its_group() -> None:
    # Keys 0 to 39 and 40 to 79 would be a run of 80, were they of one group.
    first, second = list(range(40)), list(range(40, 80))
    slices = slices_of(first, second, group=64, shape=(128, 80))
    assert fragments_of(map_slices(slices, "retain", 64, 64)) == [
        [("rows", first, 0xFF)],
        [("rows", second, 0xFF)],
    ]


def test_what_longer_runs_have_over_is_gathered_with_the_rest() -> None:
    keys = [0, 2, *range(10, 75), 99]
    (mine,) = fragments_of(map_slices(slices_of(keys, group=64, shape=(64, 100)), "retain", 64, 64))
    assert mine == [("run", list(range(10, 74)), 0xFF), ("rows", [0, 2, 74, 99], 0xFF)]


def test_share_loads_once_what_both_groups_list() -> None:
    # Both list 16 to 23, 2 and 5; only the first 0, only the second 40. Of the steps of two
    # fragments one is full with those of both, and one has place for the rest of each half.
    both = [2, 5, *range(16, 24)]
    slices = slices_of([0, *both], [*both, 40], group=64, shape=(128, 60))
    tiles = map_slices(slices, "share", 128, 16, slot=8)
    assert fragments_of(tiles) == [
        [
            ("run", list(range(16, 24)), 0xFFFF),
            ("rows", [2, 5], 0xFFFF),
            ("rows", [0], 0x00FF),
            ("rows", [40], 0xFF00),
        ]
    ]
    assert tiles.tile_halves is None


def test_share_orders_steps_by_class() -> None:
    # Steps of two: both have one fragment, the first half three, the second half two. The last of
    # the first half joins the step of both, and what is left takes whole steps in turn.
    first = [*range(0, 8), *range(16, 24), *range(32, 40), *range(48, 56)]
    second = [*range(0, 8), *range(8, 16), 60]
    slices = slices_of(first, second, group=64, shape=(116, 61))
    (mine,) = fragments_of(map_slices(slices, "share", 128, 16, slot=8))
    assert mine == [
        ("run", list(range(0, 8)), 0x7FFF),
        ("run", list(range(48, 56)), 0x00FF),
        ("run", list(range(16, 24)), 0x00FF),
        ("run", list(range(32, 40)), 0x00FF),
        ("run", list(range(8, 16)), 0x7F00),
        ("rows", [60], 0x7F00),
    ]


def test_share_of_an_odd_number_of_groups() -> None:
    slices = slices_of([3], [], [1, 2], group=64, shape=(150, 5))
    tiles = map_slices(slices, "share", 128, 64)
    assert tiles.tile_q.tolist() == [[0, 128], [128, 22]]
    assert fragments_of(tiles) == [[("rows", [3], 0xFF)], [("rows", [1, 2], 0b111)]]


def test_split_gathers_a_groups_rows_once() -> None:
    slices = slices_of([7, 9], [1], group=192, shape=(212, 10))
    tiles = map_slices(slices, "split", 128, 64)
    assert tiles.tile_q.tolist() == [[0, 128], [128, 64], [192, 20]]
    assert fragments_of(tiles) == [
        [("rows", [7, 9], 0xFFFF)],
        [("rows", [7, 9], 0x00FF)],
        [("rows", [1], 0b111)],
    ]
    assert tiles.rows is not None
    assert tiles.rows.tolist() == [7, 9, 1]


@st.composite
def drawn(draw: Any) -> tuple[KeySlices, NDArray[np.bool_], tuple[str, int, int]]:
    """Slices with runs of all lengths and keys alone, their tokens, and a way to map them."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    side, group, q = draw(st.sampled_from(WAYS))
    sq, skv = draw(st.integers(0, 400)), draw(st.integers(0, 300))
    batch, heads = draw(st.sampled_from(((1, 1), (1, 3), (2, 2))))
    groups = -(-sq // group)
    kept = rng.random((batch, heads, groups, skv)) < draw(st.sampled_from((0.0, 0.1, 0.6, 1.0)))
    for _ in range(draw(st.integers(0, 6))):
        begin, length = rng.integers(0, skv + 1), rng.integers(1, 150)
        some = rng.random((batch, heads, groups)) < 0.7
        kept[some, begin : begin + length] = rng.random() < 0.8
    tokens = np.repeat(kept, group, axis=2)[:, :, :sq]
    return KeySlices.from_groups(kept, group, (sq, skv)), tokens, (side, group, q)


@settings(max_examples=150, deadline=None)
@given(drawn(), st.sampled_from(((64, 64), (192, 64), (128, 16), (64, 8))))
def test_each_active_pair_once_and_no_other(
    made: tuple[KeySlices, NDArray[np.bool_], tuple[str, int, int]], step: tuple[int, int]
) -> None:
    slices, tokens, (side, _, q) = made
    kv, slot = step
    mapping = Mapping(side, "gather")  # type: ignore[arg-type]
    tiles = map_mask(slices.to_block_mask(), mapping, q, kv, slot)
    sq, skv = slices.shape
    counts = expand(tiles, sq, skv)
    assert np.array_equal(counts, tokens.reshape(counts.shape))

    # What kernels rely on: whole steps but the last; fragments within their slot; rows in range.
    assert tiles.heads == slices.batch * slices.heads
    assert ((tiles.frag_len > 0) == (tiles.frag_members > 0)).all()
    assert (tiles.frag_len <= slot).all()
    assert tiles.frag_gathered is not None
    assert tiles.rows is not None
    last = (tiles.frag_start + tiles.frag_len)[tiles.frag_gathered]
    assert last.max(initial=0) == len(tiles.rows) <= slices.nnz
    steps = fragments_of(tiles)
    for tile, mine in enumerate(steps):
        for members in {found for _, _, found in mine}:
            of_class = [(kind, keys) for kind, keys, found in mine if found == members]
            kinds = [kind for kind, _ in of_class]
            if side != "share":
                assert kinds == sorted(kinds, reverse=True)
            for kind in ("run", "rows"):
                keys = [len(keys) for name, keys in of_class if name == kind]
                assert sum(n < slot for n in keys) <= 1 or kind == "run"
        if side == "share":
            loaded = sum(len(keys) for _, keys, _ in mine)
            rows = slice(tiles.tile_q[tile, 0], tiles.tile_q[tile].sum())
            head = divmod(int(tiles.tile_head[tile]), slices.heads)
            assert loaded == tokens[head][rows].any(axis=0).sum()


@pytest.mark.parametrize(("side", "group", "q"), WAYS)
@pytest.mark.parametrize("split", [False, True])
def test_the_executor_against_the_oracle(side: str, group: int, q: int, split: bool) -> None:
    rng = np.random.default_rng(group + q)
    sq, skv, heads, dim = 300, 2000, 2, 16
    kept = rng.random((1, heads, -(-sq // group), skv)) < 0.2
    kept[:, :, 0, 100:1900] = True
    kept[:, 1, -1] = False
    slices = KeySlices.from_groups(kept, group, (sq, skv))
    mask = slices.to_block_mask()
    tiles = map_mask(mask, Mapping(side, "gather"), q, 64)  # type: ignore[arg-type]
    tasks = organize(
        tiles,
        Organization(runs=True, longest=True, alternate=True, split=split),
        batch=2,
        q_heads=heads,
        kv_heads=1,
        mask_batch=1,
        mask_heads=heads,
        kv_bytes_per_head=skv * dim * 8,
        device=DeviceModel(sms=64, ctas_per_sm=1, l2_bytes=1 << 20),
    )
    assert (len(tasks.merge_tile) > 0) == split
    queries = rng.standard_normal((2, heads, sq, dim))
    keys, values = rng.standard_normal((2, 2, 1, skv, dim))
    expected = reference.attention(queries, keys, values, slices, return_lse=True)
    got = execute_tiles(
        tiles,
        tasks,
        queries,
        keys,
        values,
        q_heads=heads,
        mask_batch=1,
        mask_heads=heads,
        return_lse=True,
        dtype=np.float64,
    )
    for mine, oracle in zip(got, expected, strict=True):
        np.testing.assert_allclose(mine, oracle, rtol=1e-11, atol=1e-11)
    with pytest.raises(ValueError, match="at least the tiles'"):
        execute_tiles(
            tiles,
            tasks,
            queries,
            keys[:, :, :800],
            values[:, :, :800],
            q_heads=heads,
            mask_batch=1,
            mask_heads=heads,
        )


@pytest.mark.parametrize(
    ("q_side", "group", "q", "reason"),
    [
        ("retain", 16, 64, "gather KV needs groups of 64 query rows or more, got 16"),
        ("retain", 192, 128, "retain Q needs groups of at most 128 rows (the tile), got 192"),
        ("split", 64, 64, "split Q needs groups of more than 64 rows (the tile), got 64"),
        ("share", 64, 192, "share Q of key slices needs groups of half a tile of 192 rows, got 64"),
        ("merge", 64, 128, "gather KV needs Q that is retained, split or shared, got merge"),
        ("regroup", 64, 128, "gather KV needs Q that is retained, split or shared, got regroup"),
    ],
)
def test_what_it_cannot_serve(q_side: Any, group: int, q: int, reason: str) -> None:
    slices = slices_of([0], group=group, shape=(group, 8))
    mapping = Mapping(q_side, "gather")
    assert why_not(mapping, slices.to_block_mask(), q, 64) == reason
    for call in (
        lambda: map_mask(slices.to_block_mask(), mapping, q, 64),
        lambda: map_slices(slices, q_side, q, 64),
    ):
        with pytest.raises(PlanNotEligibleError, match="one that can serve"):
            call()


def test_blocks_are_no_slices() -> None:
    mask = BlockMask.from_dense([[1]], (64, 16))
    assert mask.slices is None
    assert why_not(Mapping("retain", "gather"), mask, 64, 64) == "gather KV needs key slices"


def test_more_keys_than_numbers_of_32_bits_are_refused() -> None:
    many = np.broadcast_to(np.zeros(1, np.int32), (1 << 31,))
    slices = KeySlices(64, (64, 1 << 31), 1, 1, np.array([0, 1 << 31]), many)
    with pytest.raises(ValueError, match="at most 2,147,483,647 keys over all groups"):
        map_slices(slices, "retain", 64, 64)


def test_the_blocks_of_slices_remember_them() -> None:
    slices = slices_of([0, 5], group=64, shape=(64, 8))
    for mask in (slices.to_block_mask(), slices.to_block_mask(32)):
        assert mask.slices is not None
        assert mask.slices.group == 64
        assert mask.slices.indices is slices.indices
        assert mask.slices.indptr is slices.indptr


def test_fragments_take_64_columns_or_as_many_as_a_step_allows() -> None:
    mask = slices_of([0], group=64, shape=(64, 8)).to_block_mask()
    got = {kv: map_mask(mask, Mapping("retain", "gather"), 64, kv).shape.slot for kv in (32, 192)}
    assert got == {32: 32, 192: 64}


def named_plan() -> Any:
    """A plan over two groups, by name: 3 keys and a run of 64 in one, the run in the other."""
    run = list(range(100, 164))
    slices = slices_of([0, 2, 3, *run], run, group=128, shape=(256, 200))
    name = "attend_wgmma/q128k192/retain-gather/longest+split"
    spec = ArraySpec((1, 1, 256, 128), "float16")
    keys = ArraySpec((1, 1, 200, 128), "float16")
    return make_plan(slices, spec, keys, arch="sm_90a", regime=name)


def test_a_plan_says_what_it_gathers() -> None:
    plan = named_plan()
    text = plan.explain()
    assert "3 gathered, 128 in runs, over all tiles" in text
    assert "slices of 128 rows by single keys, density 0.3" in text
    assert "run coverage" not in text  # which would be that of blocks
    assert "KV gather: a step is filled with runs of keys and single keys" in text
    facts = plan.summary()
    assert (facts["gathered_rows"], facts["rows_in_runs"]) == (3, 128)
    assert facts["useful_fraction"] == (128 * 67 + 128 * 64) / (2 * 128 * 192)
    assert facts["bytes"]["kv_loaded"] == 2 * 131 * 128 * 2
    assert plan.config.gather
    assert not plan.config.bits


def test_a_plan_that_gathers_runs_on_the_host_and_takes_other_slices() -> None:
    plan = named_plan()
    rng = np.random.default_rng(3)
    q = rng.standard_normal((1, 1, 256, 128)).astype(np.float16)
    k, v = rng.standard_normal((2, 1, 1, 200, 128)).astype(np.float16)
    other = slices_of([1, 199], [], group=128, shape=(256, 200))
    for made, mask in ((plan, plan.mask), (plan.update(other), other)):
        expected = reference.attention(q, k, v, mask)
        np.testing.assert_allclose(made.run(q, k, v), expected, atol=2e-3)
    with pytest.raises(PlanNotEligibleError, match="gather KV needs key slices"):
        plan.update(BlockMask.from_dense(np.ones((2, 13), bool), (128, 16), (256, 200)))


def test_slices_alone_are_gathered() -> None:
    plan = named_plan()
    spec = ArraySpec((1, 1, 256, 128), "float16")
    keys = ArraySpec((1, 1, 200, 128), "float16")
    chosen = make_plan(plan.mask, spec, keys, arch="sm_90a")
    assert chosen.spec.mapping.kv == "gather"
    blocks = BlockMask.from_dense(np.ones((2, 13), bool), (128, 16), (256, 200))
    chosen = make_plan(blocks, spec, keys, arch="sm_90a")
    assert chosen.spec.mapping.kv == "pack"
    assert not plan.spec.serves(128, 16, ragged=False)


def test_without_runs_all_keys_are_gathered() -> None:
    slices = slices_of([*range(70), 80], [1], group=64, shape=(100, 90))
    tiles = map_slices(slices, "share", 128, 128, runs=False)
    # A step has two fragments. Key 1 is of both groups; the first alone has 70 others, in a step.
    assert tiles.frag_len.tolist() == [1, 0, 64, 6]
    assert tiles.frag_gathered is not None
    assert tiles.frag_gathered.tolist() == [True, False, True, True]
    assert tiles.rows is not None
    assert sorted(tiles.rows.tolist()) == [*range(70), 80]


def test_gathered_rows_are_drawn_where_they_lie() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    tiles = map_slices(slices_of([0, 2, 3, 9], group=64, shape=(64, 20)), "retain", 64, 64)
    in_mask, as_steps = Figure().subplots(2)
    viz.draw_tiles(in_mask, tiles)
    viz.draw_steps(as_steps, tiles)
    found = [
        sorted(tuple(path.get_extents().extents) for path in collection.get_paths())
        for ax in (in_mask, as_steps)
        for collection in ax.collections
        if not collection.get_hatch() and len(collection.get_facecolor())
    ]
    assert found == [
        [(0, 0, 1, 64), (2, 0, 4, 64), (9, 0, 10, 64)],
        [(0, 0, 1, 64), (1, 0, 3, 64), (3, 0, 4, 64)],
    ]
    assert in_mask.get_xlim() == (0, 10)
    plan = named_plan()
    assert viz.tile_each_way(plan.mask, plan.spec)[-1].chosen
