"""The executor against the oracle over random masks, mappings and organizations."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_cupy.mapping import Mapping, Tiles, TileShape, map_mask, why_not
from tessera_cupy.masks import BlockMask
from tessera_cupy.organization import DeviceModel, Organization, Tasks, organize
from tessera_cupy.reference import attention, execute, execute_tiles

MAPPINGS = [
    Mapping(q, kv)
    for q in ("retain", "merge", "split")
    for kv in ("retain", "merge", "split", "pack")
] + [Mapping("share", "pack"), Mapping("regroup", "pack")]
ORGANIZATIONS = [Organization(*flags) for flags in itertools.product([False, True], repeat=4)]
DEVICE = DeviceModel(sms=16, ctas_per_sm=1, l2_bytes=1 << 14)
SMALLEST = TileShape(8, 8, 8)


@dataclass
class Case:
    """One request with its inputs; Q, K and V are (batch, heads, tokens, dim)."""

    mask: BlockMask
    q: Any
    k: Any
    v: Any

    def tasks(self, tiles: Tiles, organization: Organization) -> Tasks:
        return organize(
            tiles,
            organization,
            batch=len(self.q),
            q_heads=self.q.shape[1],
            kv_heads=self.k.shape[1],
            mask_batch=self.mask.batch,
            mask_heads=self.mask.heads,
            kv_bytes_per_head=self.k[0, 0].size * 4,
            device=DEVICE,
        )

    def run(self, tiles: Tiles, tasks: Tasks, **arguments: Any) -> Any:
        arguments = {"return_lse": True, "q": self.q, "k": self.k, "v": self.v} | arguments
        return execute_tiles(
            tiles,
            tasks,
            q_heads=self.q.shape[1],
            mask_batch=self.mask.batch,
            mask_heads=self.mask.heads,
            **arguments,
        )

    def check(self, tiles: Tiles, tasks: Tasks, sm_scale: float | None = None) -> None:
        """Compare with the oracle: closely in float64, and in float32 as kernels compute."""
        expected = attention(self.q, self.k, self.v, self.mask, sm_scale=sm_scale, return_lse=True)
        for dtype, tolerance in ((np.float64, 1e-11), (np.float32, 2e-5)):
            out, lse = self.run(tiles, tasks, dtype=dtype, sm_scale=sm_scale)
            assert out.dtype == lse.dtype == dtype
            np.testing.assert_allclose(out, expected[0], rtol=tolerance, atol=tolerance)
            np.testing.assert_allclose(lse, expected[1], rtol=tolerance, atol=tolerance)
            empty = np.isneginf(expected[1])
            assert (out[empty] == 0).all()
            assert np.isneginf(lse[empty]).all()


def case(mask: BlockMask, batch: int = 1, kv_heads: int = 1, shared: int = 1, dim: int = 8) -> Case:
    rng = np.random.default_rng(mask.nnz)
    (sq, skv), heads = mask.shape, kv_heads * shared
    q = rng.standard_normal((batch, heads, sq, dim))
    k, v = (rng.standard_normal((batch, kv_heads, skv, dim)) for _ in range(2))
    return Case(mask, q, k, v)


def cut(rng: np.random.Generator, tokens: int, blocks: int) -> Any:
    """Sizes, some of them 0, of blocks that make up so many tokens."""
    edges = np.sort(rng.integers(0, tokens + 1, blocks - 1))
    return np.diff(np.concatenate([[0], edges, [tokens]]))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Requests of any kind: tails, broadcast axes, shared KV heads, token bits, ragged blocks."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    batch, kv_heads, shared = draw(
        st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 3))
    )
    axes = (draw(st.sampled_from([1, batch])), draw(st.sampled_from([1, kv_heads * shared])))
    sq, skv = draw(st.integers(1, 150)), draw(st.integers(1, 300))
    sizes = st.sampled_from([16, 24, 32, 48, 64, 128])
    bq, bkv = draw(st.tuples(sizes, sizes))
    density = draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    kind = draw(st.sampled_from(["uniform", "tokens", "ragged"]))
    if kind == "ragged":
        nq, nk = draw(st.tuples(st.integers(1, 6), st.integers(1, 8)))
        mask = BlockMask.from_dense(
            rng.random((*axes, nq, nk)) < density,
            (bq, bkv),
            q_block_sizes=[[cut(rng, sq, nq) for _ in range(axes[1])] for _ in range(axes[0])],
            kv_block_sizes=[[cut(rng, skv, nk) for _ in range(axes[1])] for _ in range(axes[0])],
        )
    elif kind == "tokens":
        # Sparse tokens in some blocks only, so that full, partial and dropped blocks all occur.
        blocks = rng.random((*axes, -(-sq // bq), -(-skv // bkv))) < density
        tokens = blocks.repeat(bq, 2).repeat(bkv, 3)[..., :sq, :skv]
        holes = rng.random((*axes, 1, skv)) < draw(st.sampled_from([0.0, 0.02, 0.9]))
        holes = holes & (rng.random(tokens.shape) < 0.9)
        mask = BlockMask.from_tokens(tokens & ~holes, (bq, bkv))
    else:
        blocks = rng.random((*axes, -(-sq // bq), -(-skv // bkv))) < density
        mask = BlockMask.from_dense(blocks, (bq, bkv), (sq, skv))
    return case(mask, batch, kv_heads, shared)


@settings(max_examples=150)
@given(
    case_=cases(),
    data=st.data(),
    organization=st.sampled_from(ORGANIZATIONS),
    sm_scale=st.sampled_from([None, 0.5, -0.3]),
)
def test_the_executor_computes_what_the_mask_says(
    case_: Case, data: st.DataObject, organization: Organization, sm_scale: float | None
) -> None:
    eligible = [
        (mapping, q, kv)
        for mapping in MAPPINGS
        for q, kv in itertools.product([16, 64, 128, 256], [8, 32, 64, 128])
        if why_not(mapping, case_.mask, q, kv) is None
    ]
    mapping, q, kv = data.draw(st.sampled_from(eligible))
    tiles = map_mask(case_.mask, mapping, q, kv)
    case_.check(tiles, case_.tasks(tiles, organization), sm_scale)


def some_mask(mapping: Mapping, tokens: bool) -> tuple[BlockMask, int, int]:
    """A mask with tails, an empty row, and tile sizes that this mapping can serve."""
    rng = np.random.default_rng(3)
    bq = {"retain": 64, "merge": 24, "share": 24, "regroup": 16, "split": 80}[mapping.q]
    bkv = {"retain": 32, "merge": 16, "split": 80, "pack": 48}[mapping.kv]
    sq, skv = 200, 330
    blocks = rng.random((2, -(-sq // bq), -(-skv // bkv))) < 0.5
    blocks[0, 1] = False
    if not tokens:
        return BlockMask.from_dense(blocks, (bq, bkv), (sq, skv)), 64, 32
    dense = blocks.repeat(bq, 1).repeat(bkv, 2)[:, :sq, :skv]
    return BlockMask.from_tokens(dense & (rng.random(dense.shape) < 0.7), (bq, bkv)), 64, 32


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("mapping", MAPPINGS, ids=lambda m: m.name)
def test_every_mapping(mapping: Mapping, tokens: bool) -> None:
    mask, q, kv = some_mask(mapping, tokens)
    assert why_not(mapping, mask, q, kv) is None
    case_ = case(mask, kv_heads=1, shared=2)
    tiles = map_mask(mask, mapping, q, kv)
    assert (tiles.frag_bits >= 0).any() == tokens
    case_.check(tiles, case_.tasks(tiles, Organization()))


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(1, 7), st.sampled_from(ORGANIZATIONS))
def test_halves_of_ragged_blocks(seed: int, nq: int, organization: Organization) -> None:
    rng = np.random.default_rng(seed)
    q = rng.integers(0, 17, nq)
    q[rng.integers(nq)] = 16
    mask = BlockMask.from_dense(
        rng.random((1, 2, nq, 40)) < rng.choice([0.1, 0.5, 1.0]),
        (16, 16),
        q_block_sizes=[[rng.permutation(q), rng.permutation(q)]],
        kv_block_sizes=rng.integers(1, 17, 40),
    )
    case_ = case(mask, kv_heads=2)
    tiles = map_mask(mask, Mapping("share", "pack"), 32, 32, 8)
    assert tiles.tile_halves is not None
    case_.check(tiles, case_.tasks(tiles, organization))
    with pytest.raises(ValueError, match="`q`: expected at least the tiles' "):
        case_.run(tiles, case_.tasks(tiles, organization), q=case_.q[:, :, 1:])


@pytest.mark.parametrize("q_side", ["merge", "regroup"])
@pytest.mark.parametrize("organization", ORGANIZATIONS, ids=lambda o: o.name)
def test_every_organization(organization: Organization, q_side: Any) -> None:
    rng = np.random.default_rng(5)
    blocks = rng.random((2, 4, 10, 80)) < 0.05
    blocks[:, :, 3] = True
    blocks[1, 2, 5] = False
    # One batch entry sees only half of what the other sees: offsets must be its own.
    blocks[0, :, :, 40:] = False
    mask = BlockMask.from_dense(blocks, (16, 16), (155, 1273))
    case_ = case(mask, batch=2, kv_heads=2, shared=2)
    tiles = map_mask(mask, Mapping(q_side, "pack"), 64, 16)
    tasks = case_.tasks(tiles, organization)
    assert (tasks.slots > 0) == organization.split
    case_.check(tiles, tasks)


@pytest.mark.parametrize("organization", [Organization(), Organization(split=True)])
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
def test_both_layouts(layout: str, organization: Organization) -> None:
    mask = BlockMask.from_dense(np.random.default_rng(0).random((4, 3, 30)) < 0.6, (64, 16))
    case_ = case(mask, batch=2, kv_heads=2, shared=2)
    tiles = map_mask(mask, Mapping("retain", "pack"), 64, 16)
    tasks = case_.tasks(tiles, organization)
    inputs = {"q": case_.q, "k": case_.k, "v": case_.v}
    expected = case_.run(tiles, tasks)
    if layout == "BSHD":
        inputs = {name: x.transpose(0, 2, 1, 3) for name, x in inputs.items()}
    out, lse = case_.run(tiles, tasks, layout=layout, **inputs)
    assert out.flags.c_contiguous
    np.testing.assert_array_equal(
        out, expected[0] if layout == "BHSD" else expected[0].swapaxes(1, 2)
    )
    np.testing.assert_array_equal(lse, expected[1])
    only = case_.run(tiles, tasks, layout=layout, return_lse=False, **inputs)
    np.testing.assert_array_equal(only, out)


def one_tile(starts: list[int], shape: TileShape = SMALLEST, rows: int = 8) -> Tiles:
    """One tile of full fragments that all rows attend to."""
    count = len(starts)
    return Tiles(
        shape=shape,
        heads=1,
        tile_head=np.zeros(1, np.int32),
        tile_q=np.array([[0, rows]], np.int32),
        frag_offsets=np.array([0, count], np.int64),
        frag_start=np.array(starts, np.int32),
        frag_len=np.full(count, shape.slot, np.int32),
        frag_members=np.full(count, (1 << -(-rows // 8)) - 1, np.uint32),
        frag_bits=np.full(count, -1, np.int32),
        bits=np.zeros((0, shape.q, 1), np.uint32),
    )


def tasks_of(*tasks: tuple[int, int, bool, int]) -> Tasks:
    """Tasks (begin, end, reverse, slot) of tile 0 for head 0."""
    begin, end, reverse, slot = (np.array(x) for x in zip(*tasks, strict=True))
    split = int((slot >= 0).any())
    return Tasks(
        task_head=np.zeros(len(tasks), np.int32),
        task_tile=np.zeros(len(tasks), np.int32),
        task_begin=begin.astype(np.int32),
        task_end=end.astype(np.int32),
        task_reverse=reverse.astype(np.bool_),
        task_slot=slot.astype(np.int32),
        merge_head=np.zeros(split, np.int32),
        merge_tile=np.zeros(split, np.int32),
        merge_offsets=np.array([0, len(tasks)] if split else [0], np.int32),
    )


def run_one(tiles: Tiles, tasks: Tasks, q: Any, k: Any, v: Any, **arguments: Any) -> Any:
    axes = {"q_heads": 1, "mask_batch": 1, "mask_heads": 1}
    q, k, v = (np.asarray(x, np.float64)[None, None] for x in (q, k, v))
    return execute_tiles(tiles, tasks, q, k, v, return_lse=True, **axes, **arguments)


def test_the_lse_is_a_natural_logarithm() -> None:
    tiles = one_tile([0, 8], rows=1)
    for tasks in (
        tasks_of((0, 2, False, -1)),
        tasks_of((0, 2, True, -1)),
        tasks_of((0, 1, False, 0), (1, 2, True, 1)),
    ):
        out, lse = run_one(tiles, tasks, [[3.0] * 4], [[2.0] * 4] * 16, np.arange(16.0)[:, None])
        assert out.item() == pytest.approx(7.5)
        assert lse.item() == pytest.approx(12 + math.log(16))  # 24 / sqrt(4)


def test_one_key_gives_its_value_and_its_scaled_logit() -> None:
    mask = BlockMask.from_dense([[True]], (16, 16), (1, 1))
    tiles = map_mask(mask, Mapping("retain", "retain"), 16, 16)
    tasks = tasks_of((0, 1, False, -1))
    out, lse = run_one(tiles, tasks, [[2.0, 1.0]], [[3.0, -1.0]], [[7.0, 8.0]], sm_scale=0.5)
    assert out.ravel().tolist() == [7.0, 8.0]
    assert lse.item() == 2.5


def test_steps_are_walked_in_the_order_of_the_task() -> None:
    # 2^24 + 1 is 2^24 in float32: the step of ones survives only where it comes last.
    big = 2.0**24
    v = np.repeat([1.0 / 8, big, -big], 8)[:, None]
    q, k = np.zeros((8, 1)), np.zeros((24, 1))
    forward = run_one(one_tile([0, 8, 16]), tasks_of((0, 3, False, -1)), q, k, v)[0]
    backward = run_one(one_tile([0, 8, 16]), tasks_of((0, 3, True, -1)), q, k, v)[0]
    assert (forward == 0).all()
    np.testing.assert_allclose(backward, 1 / 24, rtol=1e-6)


def test_slots_are_merged_in_their_order_whatever_the_order_of_the_tasks() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.standard_normal((8, 4)),
        rng.standard_normal((64, 4)),
        rng.standard_normal((64, 4)),
    )
    tiles = one_tile(list(range(0, 64, 8)))
    parts = [(i, i + 1, False, i) for i in range(8)]
    in_order = run_one(tiles, tasks_of(*parts), q, k, v)
    for seed in range(5):
        shuffled = np.random.default_rng(seed).permutation(8)
        other = run_one(tiles, tasks_of(*(parts[i] for i in shuffled)), q, k, v)
        np.testing.assert_array_equal(in_order[0], other[0])
        np.testing.assert_array_equal(in_order[1], other[1])


def test_slots_are_merged_from_the_first_to_the_last() -> None:
    # As above: ones survive beside 2^24 only where they are merged last.
    v = np.repeat([1.0 / 8, 2.0**24, -(2.0**24)], 8)[:, None]
    q, k = np.zeros((8, 1)), np.zeros((24, 1))
    tiles = one_tile([0, 8, 16])
    first = run_one(tiles, tasks_of(*((i, i + 1, False, i) for i in range(3))), q, k, v)[0]
    last = run_one(tiles, tasks_of(*((i, i + 1, False, 2 - i) for i in range(3))), q, k, v)[0]
    assert (first == 0).all()
    np.testing.assert_allclose(last, 1 / 24, rtol=1e-6)


def test_a_part_without_active_keys_adds_nothing() -> None:
    tiles = one_tile([0, 8, 16])
    tiles.frag_members[1] = 0
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.standard_normal((8, 4)),
        rng.standard_normal((24, 4)),
        rng.standard_normal((24, 4)),
    )
    got = run_one(tiles, tasks_of(*((i, i + 1, False, i) for i in range(3))), q, k, v)
    keep = np.arange(24) // 8 != 1
    expected = attention(
        q[None, None], k[None, None, keep], v[None, None, keep], None, return_lse=True
    )
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-5)


def test_all_parts_empty_gives_zero_and_minus_infinity() -> None:
    tiles = one_tile([0, 8])
    tiles.frag_members[:] = 0
    out, lse = run_one(
        tiles, tasks_of((0, 1, False, 0), (1, 2, False, 1)), *[np.ones((n, 4)) for n in (8, 16, 16)]
    )
    assert (out == 0).all()
    assert np.isneginf(lse).all()


def test_a_first_step_without_valid_keys() -> None:
    # Token bits leave the first listed block to row 8 alone; the other rows start at the second.
    tokens = np.zeros((16, 32), np.bool_)
    tokens[8, 3] = True
    tokens[:, 16:] = True
    mask = BlockMask.from_tokens(tokens, (16, 16))
    case_ = case(mask)
    tiles = map_mask(mask, Mapping("retain", "retain"), 16, 16)
    assert tiles.steps.tolist() == [2]
    case_.check(tiles, case_.tasks(tiles, Organization()))


def test_rows_that_no_step_loads_may_hold_anything() -> None:
    blocks = np.random.default_rng(0).random((12, 20)) < 0.3
    blocks[:, [0, 7]] = False
    mask = BlockMask.from_dense(blocks, (16, 16), (190, 310))
    case_ = case(mask)
    for start in (0, 7 * 16):
        case_.k[:, :, start : start + 16] = case_.v[:, :, start : start + 16] = np.nan
    for mapping in (
        Mapping("retain", "retain"),
        Mapping("merge", "pack"),
        Mapping("merge", "merge"),
    ):
        tiles = map_mask(mask, mapping, 64, 64)
        tasks = case_.tasks(tiles, Organization())
        assert np.isfinite(case_.run(tiles, tasks)[0]).all()


def test_members_are_groups_of_eight_rows() -> None:
    shape = TileShape(32, 16, 16)
    tiles = one_tile([0, 16, 32], shape, rows=29)
    tiles.frag_members[:] = [0b0101, 0b1000, 0b0100]
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((n, 4)) for n in (29, 48, 48))
    got = run_one(tiles, tasks_of((0, 3, False, -1)), q, k, v)
    keep = np.zeros((1, 1, 29, 48), np.bool_)
    keep[..., 0:8, 0:16] = keep[..., 16:24, 0:16] = True
    keep[..., 24:29, 16:32] = keep[..., 16:24, 32:48] = True
    expected = attention(q[None, None], k[None, None], v[None, None], keep, return_lse=True)
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-5)


def test_an_all_empty_mask_is_written_with_zeros() -> None:
    mask = BlockMask.from_dense(np.zeros((3, 4), np.bool_), (16, 16), (45, 60))
    for mapping, organization in itertools.product(
        [Mapping("retain", "pack"), Mapping("merge", "merge")], ORGANIZATIONS
    ):
        case_ = case(mask, batch=2, kv_heads=2)
        tiles = map_mask(mask, mapping, 64, 64)
        case_.check(tiles, case_.tasks(tiles, organization))


@pytest.mark.parametrize(("sq", "skv"), [(1, 1), (1, 512), (9, 9), (192, 320), (137, 137), (5, 0)])
def test_sizes_at_the_edges(sq: int, skv: int) -> None:
    blocks = np.ones((-(-sq // 128), -(-skv // 128)), np.bool_)
    mask = BlockMask.from_dense(blocks, (128, 128), (sq, skv))
    case_ = case(mask, kv_heads=2)
    for mapping, q, kv in [
        (Mapping("retain", "pack"), 128, 64),
        (Mapping("split", "split"), 64, 64),
    ]:
        tiles = map_mask(mask, mapping, q, kv)
        case_.check(tiles, case_.tasks(tiles, Organization(split=True)))


def test_large_entries_stay_finite_and_right() -> None:
    mask = BlockMask.from_dense(np.random.default_rng(1).random((3, 6)) < 0.6, (64, 32))
    case_ = case(mask, dim=64)
    rng = np.random.default_rng(0)
    shapes = [x.shape for x in (case_.q, case_.k, case_.v)]
    q, k, v = (rng.uniform(-1e3, 1e3, s).astype(ml_dtypes.bfloat16) for s in shapes)
    case_ = replace(case_, q=q, k=k, v=v)
    tiles = map_mask(mask, Mapping("retain", "pack"), 64, 64)
    out, lse = case_.run(tiles, case_.tasks(tiles, Organization()))
    expected = attention(q, k, v, mask, return_lse=True)
    # Logits reach 1e6, where float32 resolves 1/16; a row's first key leads by far more.
    np.testing.assert_allclose(out, expected[0], rtol=1e-5, atol=1e-2)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-5)


def test_a_row_of_very_negative_logits() -> None:
    k = np.repeat([1.0, 2.0], 8)[:, None]
    v = np.arange(16.0)[:, None]
    out, lse = run_one(one_tile([0, 8]), tasks_of((0, 2, False, -1)), np.full((8, 1), -1e6), k, v)
    np.testing.assert_allclose(out, 3.5)  # the mean of the first eight
    np.testing.assert_allclose(lse, -1e6 + math.log(8))


@pytest.mark.parametrize("split", [False, True])
def test_what_no_task_writes_is_nan(split: bool) -> None:
    mask = BlockMask.from_dense(np.ones((2, 30), np.bool_), (16, 16))
    case_ = case(mask)
    tiles = map_mask(mask, Mapping("retain", "pack"), 16, 16)
    tasks = case_.tasks(tiles, Organization(split=split))
    assert (tasks.slots > 2) == split
    for lost in range(len(tasks)):
        per_task = {n: a for n, a in tasks.arrays().items() if n.startswith("task_")}
        fewer = replace(tasks, **{n: np.delete(a, lost) for n, a in per_task.items()})
        out, lse = case_.run(tiles, fewer)
        tile = int(tasks.task_tile[lost])
        gone = np.arange(32) // 16 == tile
        assert np.isnan(out[0, 0, gone]).all()
        assert np.isnan(lse[0, 0, gone]).all()
        assert np.isfinite(out[0, 0, ~gone]).all()


def test_inputs_are_left_alone_and_progress_is_told() -> None:
    mask = BlockMask.from_dense(np.ones((2, 2), np.bool_), (16, 16))
    case_ = case(mask)
    tiles = map_mask(mask, Mapping("retain", "pack"), 16, 16)
    tasks = case_.tasks(tiles, Organization())
    inputs = [x.astype(np.float32) for x in (case_.q, case_.k, case_.v)]
    copies = [x.copy() for x in inputs]
    told: list[tuple[int, int]] = []
    q, k, v = inputs
    case_.run(tiles, tasks, q=q, k=k, v=v, on_task=lambda *both: told.append(both))
    assert told == [(1, 2), (2, 2)]
    for x, copy in zip(inputs, copies, strict=True):
        np.testing.assert_array_equal(x, copy)


def test_a_plan_is_executed() -> None:
    mask = BlockMask.from_dense(np.random.default_rng(0).random((2, 4, 3, 5)) < 0.5, (16, 16))
    case_ = case(mask, batch=2, kv_heads=2, shared=2)
    tiles = map_mask(mask, Mapping("retain", "pack"), 16, 16)
    tasks = case_.tasks(tiles, Organization(longest=True))
    request = SimpleNamespace(q_heads=4, layout="BSHD")
    plan = SimpleNamespace(request=request, mask=mask, tiles=lambda: tiles, tasks=lambda: tasks)
    turned = [x.swapaxes(1, 2) for x in (case_.q, case_.k, case_.v)]
    told: list[tuple[int, int]] = []
    out, lse = execute(
        plan, *turned, sm_scale=0.25, return_lse=True, on_task=lambda *both: told.append(both)
    )
    expected = attention(*turned, mask, sm_scale=0.25, layout="BSHD", return_lse=True)
    np.testing.assert_allclose(out, expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-5, atol=1e-6)
    assert len(told) == len(tasks)
    np.testing.assert_array_equal(execute(plan, *turned, sm_scale=0.25), out)


def test_tiles_of_another_request_are_refused() -> None:
    mask = BlockMask.from_dense(np.ones((2, 3, 3), np.bool_), (16, 16))
    case_ = case(mask, kv_heads=2)
    tiles = map_mask(mask, Mapping("retain", "pack"), 16, 16)
    tasks = case_.tasks(tiles, Organization())
    for name, inputs in {
        "q`: expected 2 heads": {"q": case_.q[:, :1], "k": case_.k[:, :1], "v": case_.v[:, :1]},
        "q`: expected at least the tiles' 48 rows, got 47": {"q": case_.q[:, :, 1:]},
        "k`: expected at least the tiles' 48 rows, got 40": {
            "k": case_.k[:, :, 8:],
            "v": case_.v[:, :, 8:],
        },
    }.items():
        with pytest.raises(ValueError, match=f"`{name}"):
            case_.run(tiles, tasks, **inputs)
    apart = replace(tiles, tile_units=np.tile(np.array([[0], [16], [33]], np.int32), (2, 1)))
    with pytest.raises(ValueError, match=r"`q`: expected at least the tiles' 49 rows, got 48"):
        case_.run(apart, tasks)
    with pytest.raises(ValueError, match="`tasks`: expected heads below"):
        case_.run(tiles, replace(tasks, task_head=tasks.task_head + 1))
    swapped = replace(tasks, task_head=tasks.task_head[::-1].copy())
    with pytest.raises(ValueError, match="`tasks`: expected a tile of query head 1's mask head"):
        case_.run(tiles, swapped)
