"""From key slices in GPU memory to their attention, without the host: emulated, and on a GPU."""

from __future__ import annotations

import copy
import ctypes
import gc
import pickle
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tessera_cupy import (
    BlockMask,
    KeySlices,
    PlanOverflowError,
    block_sparse_attention,
    make_plan,
    reference,
)
from tessera_cupy.gpus import arch_of
from tessera_cupy.kernels import room
from tessera_cupy.kernels.catalog import find
from tessera_cupy.kernels.launch import packed_fragments, packed_tasks, tile_words
from tests.attention.test_gather import HOPPER, Tile, check, inputs, plan_name
from tests.emulator.emulator import compiler, drawn_seed
from tests.emulator.gpu import EmulatedGpu, Stream

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no g++ to build the emulator with")

Kept = NDArray[np.bool_]
NARROW, WIDE = ("attend_mma", 64, 64), ("attend_mma", 128, 64)
BUILDERS = ["slice_counts", "tile_scan", "slice_fragments"]
#: Tile, group, (sq, skv): short last groups and halves, an odd number of groups, keys past a word.
SIDES: list[tuple[Tile, int, tuple[int, int]]] = [
    (HOPPER, 128, (389, 662)),
    (HOPPER, 64, (319, 349)),
    (HOPPER, 64, (130, 65)),
    (HOPPER, 192, (410, 203)),
    (HOPPER, 192, (100, 96)),
    (NARROW, 64, (150, 333)),
    (NARROW, 192, (203, 170)),
    (NARROW, 128, (130, 31)),
    (WIDE, 64, (319, 230)),
    (WIDE, 128, (302, 400)),
]
RETAIN = plan_name(NARROW, 64, "longest+split")


@pytest.fixture
def gpu(request: Any) -> Iterator[Any]:
    """A new emulated GPU in CuPy's place, or where a test is marked for one, a real GPU."""
    if request.node.get_closest_marker("gpu"):
        import cupy

        class Real:
            array = staticmethod(cupy.asarray)
            get = staticmethod(cupy.asnumpy)

        yield Real()
        return
    kernel_cache = request.getfixturevalue("kernel_cache")
    with EmulatedGpu(Path(kernel_cache).parent / "emulated-kernels", drawn_seed()).here() as made:
        yield made


def drawn(group: int, shape: tuple[int, int], density: float, axes: tuple[int, int]) -> Kept:
    """(batch, heads, groups, skv): random keys, a group without any where there are several."""
    rng = np.random.default_rng([group, *shape])
    kept = rng.random((*axes, -(-shape[0] // group), shape[1])) < density
    kept[0, 0, -1] &= kept.shape[2] == 1
    return kept


def listed(kept: Kept, dtype: Any, rng: Any = None, width: int = 3) -> list[NDArray[Any]]:
    """Padded lists and their counts; ascending, or in any order."""
    counts = kept.sum(axis=-1)
    within = 0 if rng is None else 0.9 * rng.random(kept.shape)
    order = np.argsort(~kept + within, axis=-1, kind="stable")
    keys = order[..., : min(kept.shape[3], counts.max(initial=0) + width)].astype(dtype)
    keys[np.arange(keys.shape[3]) >= counts[..., None]] = -7  # of padding nothing is asked
    return [keys, counts.astype(dtype)]


def slices_of(
    gpu: Any, kept: Kept, form: str, group: int, shape: tuple[int, int], dtype: Any = np.int32
) -> KeySlices:
    """Over arrays of the GPU."""
    rng = np.random.default_rng(7)
    if form == "map":
        return KeySlices.from_groups(gpu.array(kept), group, shape)
    if form == "packed":
        octets = np.packbits(kept, axis=-1, bitorder="little")
        width = octets.shape[3]
        # Rows that begin at whole words, as kernels write them.
        wide = np.pad(octets, [(0, 0)] * 3 + [(0, -width % 16)])
        there = gpu.array(wide)[..., :width]
        return KeySlices.from_packed_bits(there, group, shape, most=int(kept.sum()))
    if form == "csr":
        rows = kept.reshape(-1, kept.shape[3])
        ends = np.append(0, np.cumsum(rows.sum(axis=1))).astype(dtype)
        keys = np.concatenate([rng.permutation(np.flatnonzero(row)) for row in rows])
        axes = {"batch": kept.shape[0], "heads": kept.shape[1]}
        arrays = (gpu.array(ends), gpu.array(keys.astype(dtype)))
        return KeySlices.from_csr(*arrays, group, shape, **axes)
    keys, counts = listed(kept, dtype, rng if form == "lists in any order" else None)
    return KeySlices.from_lists(gpu.array(keys), gpu.array(counts), group, shape)


FORMS = ("lists", "lists in any order", "csr", "map", "packed")


@needs_compiler
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("tile", "group", "shape"), SIDES)
def test_every_format_and_mapping(
    gpu: Any, tile: Tile, group: int, shape: tuple[int, int], form: str
) -> None:
    kept = drawn(group, shape, 0.2, (1, 2))
    arrays = inputs(shape, 64, np.float16)
    slices = slices_of(gpu, kept, form, group, shape, np.int64 if group == 64 else np.int32)
    given = [gpu.array(x) for x in arrays]
    regime = plan_name(tile, group, "longest+split")
    out, lse = block_sparse_attention(*given, slices, regime=regime, return_lse=True)
    family = form.split()[0].replace("map", "dense")
    assert gpu.launched[:4] == [f"mask_state_{family}", *BUILDERS]
    assert gpu.launched[4].endswith("_gather")
    # A CSR may list more than there is, and a map keep more than is said, so that their counts come
    # to the host; nobody waits for them.
    assert gpu.copied <= (64 if form in ("csr", "packed") else 0)
    assert EmulatedGpu.waits == 0
    check(out.get(), lse.get(), arrays, KeySlices.from_groups(kept, group, shape))


@needs_compiler
@pytest.mark.parametrize("density", [0.0, 0.02, 0.6, 1.0])
@pytest.mark.parametrize(("tile", "group", "shape"), SIDES[1:4:2] + SIDES[5:7])
def test_from_empty_to_full(
    gpu: Any, tile: Tile, group: int, shape: tuple[int, int], density: float
) -> None:
    kept = drawn(group, shape, density, (1, 2))
    arrays = inputs(shape, 64, np.float16)
    slices = slices_of(gpu, kept, "lists", group, shape)
    given = [gpu.array(x) for x in arrays]
    regime = plan_name(tile, group, "longest+split")
    out, lse = block_sparse_attention(*given, slices, regime=regime, return_lse=True)
    check(out.get(), lse.get(), arrays, KeySlices.from_groups(kept, group, shape))


@needs_compiler
@pytest.mark.parametrize("tile", [HOPPER, WIDE])
def test_a_group_of_half_a_tile_alone_in_it(gpu: Any, tile: Tile) -> None:
    shape = (319, 349)
    kept = drawn(64, shape, 0.3, (1, 2))
    arrays = inputs(shape, 64, np.float16)
    slices = slices_of(gpu, kept, "lists", 64, shape)
    given = [gpu.array(x) for x in arrays]
    kernel, q, kv = tile
    regime = f"{kernel}/q{q}k{kv}/retain-gather/longest+split"
    out, lse = block_sparse_attention(*given, slices, regime=regime, return_lse=True)
    check(out.get(), lse.get(), arrays, KeySlices.from_groups(kept, 64, shape))
    assert gpu.copied == 0


@needs_compiler
def test_other_organizations_are_planned_on_the_host(gpu: Any) -> None:
    shape = (150, 230)
    kept = drawn(64, shape, 0.3, (1, 2))
    arrays = inputs(shape, 64, np.float16)
    slices = slices_of(gpu, kept, "csr", 64, shape)
    given = [gpu.array(x) for x in arrays]
    regime = plan_name(HOPPER, 64, "alternate")
    out, lse = block_sparse_attention(*given, slices, regime=regime, return_lse=True)
    check(out.get(), lse.get(), arrays, KeySlices.from_groups(kept, 64, shape))
    assert not set(gpu.launched) & set(BUILDERS)
    assert gpu.copied > 0


@needs_compiler
@pytest.mark.parametrize("even", [True, False])
def test_halves_of_which_one_alone_has_keys(gpu: Any, even: bool) -> None:
    """More keys of a class than ten bits count, in 32 words of the bitmap."""
    shape = (320, 1100)
    kept = np.zeros((1, 2, 5, 1100), bool)
    kept[:, :, (0 if even else 1) :: 2] = True
    arrays = inputs(shape, 64, np.float16)
    slices = slices_of(gpu, kept, "map", 64, shape)
    given = [gpu.array(x) for x in arrays]
    regime = plan_name(HOPPER, 64, "longest+split")
    out, lse = block_sparse_attention(*given, slices, regime=regime, return_lse=True)
    check(out.get(), lse.get(), arrays, KeySlices.from_groups(kept, 64, shape))


@needs_compiler
@pytest.mark.parametrize("skv", [8193, 65_600])
@pytest.mark.parametrize("form", ["lists in any order", "csr"])
def test_rows_that_are_longer_than_one_pass(gpu: Any, form: str, skv: int) -> None:
    """Of 8,192 columns there is another entry, which itself takes 65,536."""
    shape = (100, skv)
    kept = drawn(64, shape, 0.01, (1, 1))
    kept[..., 0, [0, skv - 1]] = True
    arrays = inputs(shape, 32, np.float16, heads=1)
    slices = slices_of(gpu, kept, form, 64, shape)
    given = [gpu.array(x) for x in arrays]
    out, lse = block_sparse_attention(*given, slices, regime=RETAIN, return_lse=True)
    assert gpu.launched[0] == f"mask_state_{form.split()[0]}_long"
    check(out.get(), lse.get(), arrays, KeySlices.from_groups(kept, 64, shape))


@needs_compiler
@pytest.mark.parametrize("axes", [(1, 1), (2, 1), (1, 4), (2, 4)])
def test_heads_that_broadcast_are_not_expanded(gpu: Any, axes: tuple[int, int]) -> None:
    shape, rng = (150, 230), np.random.default_rng(0)
    kept = drawn(64, shape, 0.2, axes)
    sizes = [(2, 4, 150, 64), (2, 2, 230, 64), (2, 2, 230, 64)]
    arrays = [rng.standard_normal(size, np.float32).astype(np.float16) for size in sizes]
    given = [gpu.array(x) for x in arrays]
    slices = slices_of(gpu, kept, "lists", 64, shape)
    regime = plan_name(HOPPER, 64, "longest+split")
    out, lse = block_sparse_attention(*given, slices, regime=regime, return_lse=True)
    check(out.get(), lse.get(), arrays, KeySlices.from_groups(kept, 64, shape))
    assert gpu.copied == 0


def read(part: Any, dtype: Any) -> NDArray[Any]:
    """What lies in the emulated GPU's memory."""
    return np.frombuffer(ctypes.string_at(part.ptr, part.nbytes), dtype)


@needs_compiler
@pytest.mark.parametrize(("tile", "group", "shape"), SIDES)
@pytest.mark.parametrize("density", [0.05, 0.5, 1.0])
def test_the_gpu_makes_what_the_planner_defines(
    gpu: Any, tile: Tile, group: int, shape: tuple[int, int], density: float
) -> None:
    kept = drawn(group, shape, density, (1, 2))
    slices = slices_of(gpu, kept, "lists", group, shape)
    given = [gpu.array(x) for x in inputs(shape, 64, np.float16)]
    plan = make_plan(slices, *given, regime=plan_name(tile, group, "longest+split"))
    plan.run(*given)
    plan.check()
    made = plan._prepared.on_device(plan.mask, gpu.array(np.zeros(1)).device.id)
    tiles, tasks = plan.tiles(), plan.tasks()
    count = len(tiles.frag_start)
    found = read(made.fragments, np.uint32).reshape(-1, 2)[:count]
    np.testing.assert_array_equal(found[:, 1], packed_fragments(tiles)[:, 1])
    assert tiles.frag_gathered is not None
    assert tiles.frag_gathered[tiles.frag_len > 0].all()
    rows = read(made.rows, np.int32)
    assert tiles.rows is not None
    for i in np.flatnonzero(tiles.frag_len):
        length = tiles.frag_len[i]
        wanted = tiles.rows[tiles.frag_start[i] :][:length]
        np.testing.assert_array_equal(rows[found[i, 0] :][:length], wanted)
    np.testing.assert_array_equal(read(made.tile_q, np.int32), tile_words(tiles).ravel())
    records = read(made.tasks, packed_tasks(tiles, tasks).dtype)[: len(tasks)]
    assert records.tolist() == packed_tasks(tiles, tasks).tolist()


@needs_compiler
@pytest.mark.parametrize("side", [(HOPPER, 64), (HOPPER, 128), (NARROW, 192)])
def test_an_order_does_not_change_a_bit(gpu: Any, side: tuple[Tile, int]) -> None:
    tile, group = side
    shape = (389, 349)
    kept = drawn(group, shape, 0.3, (1, 2))
    given = [gpu.array(x) for x in inputs(shape, 64, np.float16)]
    regime = plan_name(tile, group, "longest+split")
    outs = [
        block_sparse_attention(*given, slices_of(gpu, kept, form, group, shape), regime=regime)
        for form in FORMS
    ]
    for out in outs[1:]:
        np.testing.assert_array_equal(out.get().view(np.uint16), outs[0].get().view(np.uint16))


@dataclass
class Bad:
    """Lists with something wrong, what is left of them, and what is said."""

    keys: list[int]
    count: int
    left: list[int]
    text: str
    where: str


BAD = {
    "twice": Bad([3, 9, 3, 70], 4, [3, 9, 70], "twice in a row", "key 3 twice in"),
    "past the end": Bad([3, 230, 9], 3, [3, 9], "out of range", "key 230 in"),
    "negative": Bad([-1, 5], 2, [5], "out of range", "key -1 in"),
    "count": Bad([3, 9], 200, [3, 9], "counts or offsets that do not fit", "0 to"),
    "negative count": Bad([3, 9], -4, [], "counts or offsets that do not fit", "0 to"),
}


@needs_compiler
@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("side", [(NARROW, 64), (HOPPER, 64)])
def test_bad_keys_are_left_out_and_told_of(gpu: Any, side: tuple[Tile, int], kind: str) -> None:
    bad, (tile, group) = BAD[kind], side
    shape = (130, 230)
    width = len(bad.keys)
    keys = np.tile(np.arange(width, dtype=np.int32), (1, 1, 3, 1))
    counts = np.full((1, 1, 3), width, np.int32)
    keys[0, 0, 1], counts[0, 0, 1] = bad.keys, bad.count
    kept = np.zeros((1, 1, 3, 230), bool)
    kept[..., :width] = True
    kept[0, 0, 1] = False
    kept[0, 0, 1, bad.left] = True
    arrays = inputs(shape, 64, np.float16, heads=1)
    given = [gpu.array(x) for x in arrays]
    slices = KeySlices.from_lists(gpu.array(keys), gpu.array(counts), group, shape)
    plan = make_plan(slices, *given, regime=plan_name(tile, group, "longest+split"))
    out, lse = plan.run(*given, return_lse=True)
    check(out.get(), lse.get(), arrays, KeySlices.from_groups(kept, group, shape))
    with pytest.raises(ValueError, match=bad.text):
        plan.check()
    with pytest.raises(ValueError, match=bad.where):
        slices.check()
    with pytest.raises(ValueError, match=bad.text):
        block_sparse_attention(*given, slices)  # auto counts, and so sees it


@needs_compiler
@pytest.mark.parametrize("kind", ["near", "far", "past the end", "negative", "none"])
def test_bad_keys_of_long_rows(gpu: Any, kind: str) -> None:
    """A batch is 512 keys: one that comes again within it, and in a later one."""
    shape = (64, 9000)
    keys = np.random.default_rng(1).permutation(9000)[:1300].astype(np.int64)
    kept = np.zeros((1, 1, 1, 9000), bool)
    bad = {"near": (40, keys[8]), "far": (1299, keys[0]), "past the end": (700, 9000)}
    bad["negative"] = (1299, -(1 << 40))
    if kind in bad:
        keys[bad[kind][0]] = bad[kind][1]
    kept[..., keys[(keys >= 0) & (keys < 9000)]] = True
    counts = np.array([[[1300]]], np.int64)
    arrays = inputs(shape, 32, np.float16, heads=1)
    given = [gpu.array(x) for x in arrays]
    slices = KeySlices.from_lists(
        gpu.array(keys.reshape(1, 1, 1, -1)), gpu.array(counts), 64, shape
    )
    plan = make_plan(slices, *given, regime=RETAIN)
    out, lse = plan.run(*given, return_lse=True)
    check(out.get(), lse.get(), arrays, KeySlices.from_groups(kept, 64, shape))
    if kind == "none":
        plan.check()
        return
    with pytest.raises(ValueError, match="in a row" if kind in ("near", "far") else "of range"):
        plan.check()


@needs_compiler
def test_offsets_that_are_none_give_no_garbage(gpu: Any) -> None:
    """Rows that overlap list more than there is: the output is NaN, and it is said why."""
    ends, keys = np.array([0, 200, 0, 200], np.int32), np.arange(200, dtype=np.int32)
    slices = KeySlices.from_csr(gpu.array(ends), gpu.array(keys), 64, (150, 230))
    given = [gpu.array(x) for x in inputs((150, 230), 64, np.float16, heads=1)]
    plan = make_plan(slices, *given, regime=RETAIN)
    assert np.isnan(plan.run(*given).get()).all()
    with pytest.raises(ValueError, match="counts or offsets that do not fit"):
        plan.check()


@needs_compiler
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(
    ("ends", "kept"),
    [
        ([0, 3, 5, 6], [range(3), range(3, 5), [5]]),
        ([0, 3, 3, 3], [range(3), [], []]),
        ([0, 3, 2, 9], [range(3), [], range(2, 9)]),
        ([0, 3, 9, 7], [range(3), range(3, 9), []]),
        ([2, 3, 5, 9], [[2], range(3, 5), range(5, 9)]),
    ],
)
def test_offsets_that_end_early_or_fall_are_found(
    gpu: Any, ends: list[int], kept: list[Any], dtype: Any
) -> None:
    """Of nine keys, each its own place in the list."""
    keys = gpu.array(np.arange(9, dtype=dtype))
    slices = KeySlices.from_csr(gpu.array(np.array(ends, dtype)), keys, 64, (150, 230))
    arrays = inputs((150, 230), 64, np.float16, heads=1)
    given = [gpu.array(x) for x in arrays]
    plan = make_plan(slices, *given, regime=RETAIN)
    rows = np.zeros((3, 230), bool)
    for row, listed_keys in zip(rows, kept, strict=True):
        row[list(listed_keys)] = True
    out, lse = plan.run(*given, return_lse=True)
    check(out.get(), lse.get(), arrays, KeySlices.from_groups(rows, 64, (150, 230)))
    with pytest.raises(ValueError, match="counts or offsets that do not fit"):
        plan.check()
    with pytest.raises(ValueError, match="`indptr`: expected offsets that rise from 0 to 9"):
        slices.check()


@needs_compiler
@pytest.mark.parametrize(
    ("group", "dim", "expected", "regime", "why"),
    [
        # What is measured may change with the next profile.
        (64, 64, "-gather", "slices q33-64 ", " cases from "),
        (128, 128, "-gather", "slices q65-128 ", " cases from "),
        (
            192,
            80,
            "attend_wgmma/q128k192/split-gather",
            "reasoned slices q192 ",
            "single keys are gathered",
        ),
        (
            128,
            256,
            "attend_mma/q64k32/split-gather",
            "reasoned slices q128-192 ",
            "single keys are gathered",
        ),
    ],
)
def test_auto_gathers_and_waits_once_for_64_bytes(
    gpu: Any, group: int, dim: int, expected: str, regime: str, why: str
) -> None:
    shape = (300, 210)
    kept = drawn(group, shape, 0.2, (1, 2))
    arrays = inputs(shape, dim, np.float16)
    given = [gpu.array(x) for x in arrays]
    slices = slices_of(gpu, kept, "lists", group, shape)
    for _ in range(2):
        out, lse = block_sparse_attention(*given, slices, return_lse=True)
        assert gpu.launched.count("mask_state_lists") == 1
        assert (gpu.copied, EmulatedGpu.waits) == (64, 1)
        check(out.get(), lse.get(), arrays, KeySlices.from_groups(kept, group, shape))
    plan = make_plan(slices, *given)
    assert plan.spec.name.endswith(f"{expected}/longest+split")
    text = plan.explain()
    assert f"slices of {group} rows by single keys" in text
    assert plan.choice.regime.startswith(f"sm90 {regime}")
    assert plan.choice.regime in text
    assert why in plan.choice.why
    assert plan.choice.why in text


@needs_compiler
def test_groups_of_16_rows_run_as_blocks_that_the_host_makes(gpu: Any) -> None:
    shape = (45, 77)
    kept = drawn(16, shape, 0.3, (1, 2))
    arrays = inputs(shape, 64, np.float16)
    given = [gpu.array(x) for x in arrays]
    slices = slices_of(gpu, kept, "lists", 16, shape)
    out, lse = block_sparse_attention(*given, slices, return_lse=True)
    check(out.get(), lse.get(), arrays, KeySlices.from_groups(kept, 16, shape))
    assert not [name for name in gpu.launched if name.endswith("_gather")]


@needs_compiler
def test_a_mask_of_such_blocks_is_no_slices(gpu: Any) -> None:
    """Blocks of a group by 16 keys, over arrays too: what is kept of one serves no other."""
    shape = (150, 240)
    kept = drawn(64, shape, 0.3, (1, 2))
    blocks = kept[..., :15]
    arrays = inputs(shape, 64, np.float16)
    given = [gpu.array(x) for x in arrays]
    mask = BlockMask.from_dense(gpu.array(blocks), (64, 16), shape)
    slices = slices_of(gpu, kept, "map", 64, shape)
    pack = RETAIN.replace("gather", "pack")
    for _ in range(2):
        out = block_sparse_attention(*given, mask, regime=pack).get()
        exact = reference.attention(*arrays, BlockMask.from_dense(blocks, (64, 16), shape))
        assert abs(out.astype(np.float64) - exact).max() < 4e-3
        for regime in (pack, RETAIN):
            out, lse = block_sparse_attention(*given, slices, regime=regime, return_lse=True)
            check(out.get(), lse.get(), arrays, KeySlices.from_groups(kept, 64, shape))
    with pytest.raises(ValueError, match="gather KV needs key slices"):
        block_sparse_attention(*given, mask, regime=RETAIN)


@needs_compiler
@pytest.mark.parametrize("side", [(NARROW, 64), (HOPPER, 64), (HOPPER, 192)])
@pytest.mark.parametrize("call", ["front door", "plan"])
def test_replays_follow_the_lists(gpu: Any, side: tuple[Tile, int], call: str) -> None:
    tile, group = side
    shape = (260, 230)
    arrays = inputs(shape, 64, np.float16)
    given = [gpu.array(x) for x in arrays]
    several = [drawn(group, shape, density, (1, 2)) for density in (0.3, 0.9, 0.0, 0.1)]
    lists = [listed(kept, np.int32, width=230) for kept in several]
    keys, counts = (gpu.empty(x.shape, x.dtype) for x in lists[0])
    keys.set(lists[0][0])
    counts.set(lists[0][1])
    slices = KeySlices.from_lists(keys, counts, group, shape)
    regime = plan_name(tile, group, "longest+split")
    out = gpu.empty(arrays[0].shape, np.float16)
    if call == "plan":
        run = partial(make_plan(slices, *given, regime=regime).run, *given, out=out)
    else:
        run = partial(block_sparse_attention, *given, slices, regime=regime, out=out)
    with Stream(32) as stream:
        run()
        stream.begin_capture()
        run()
        replay = stream.end_capture()
    del run
    slices.refresh()
    block_sparse_attention(*given, slices, regime=regime)
    gc.collect()
    for kept, (new_keys, new_counts) in zip(several, lists, strict=True):
        keys.set(new_keys)
        counts.set(new_counts)
        out.set(np.nan)
        replay()
        exact = reference.attention(*arrays, KeySlices.from_groups(kept, group, shape))
        assert abs(out.get().astype(np.float64) - exact).max() < 4e-3
    assert (gpu.copied, EmulatedGpu.waits) == (0, 0)


@needs_compiler
def test_a_capture_before_the_first_run_is_refused(gpu: Any) -> None:
    kept = drawn(64, (150, 230), 0.2, (1, 2))
    slices = slices_of(gpu, kept, "lists", 64, (150, 230))
    given = [gpu.array(x) for x in inputs((150, 230), 64, np.float16)]
    with Stream(32) as stream:
        stream.begin_capture()
        with pytest.raises(ValueError, match=r"`stream`.*run the plan once before capturing"):
            block_sparse_attention(*given, slices, regime=RETAIN)
        stream.end_capture()


@needs_compiler
@pytest.mark.parametrize("regime", [RETAIN, "auto"])
def test_changes_are_seen_after_a_refresh_and_updates_take_others(gpu: Any, regime: str) -> None:
    shape = (150, 230)
    first, second = drawn(64, shape, 0.2, (1, 2)), drawn(64, shape, 0.7, (1, 2))
    arrays = inputs(shape, 64, np.float16)
    given = [gpu.array(x) for x in arrays]
    array = gpu.array(first, writable=True)
    slices = KeySlices.from_groups(array, 64, shape)
    plan = make_plan(slices, *given, regime=regime)
    assert plan.mask is slices.to_block_mask()
    for kept in (first, second):
        array.set(kept)
        slices.refresh()
        host = KeySlices.from_groups(kept, 64, shape)
        for run in (plan.run, partial(block_sparse_attention, mask=slices, regime=regime)):
            out, lse = run(*given, return_lse=True)
            check(out.get(), lse.get(), arrays, host)
        plan.check()
        assert slices.nnz == kept.sum()
        assert slices.density() == host.density()
        np.testing.assert_array_equal(slices.to_dense(), kept)
        np.testing.assert_array_equal(
            slices.to_block_mask(32).to_tokens(), host.to_block_mask(32).to_tokens()
        )
    other = plan.update(slices_of(gpu, first, "lists", 64, shape))
    out, lse = other.run(*given, return_lse=True)
    check(out.get(), lse.get(), arrays, KeySlices.from_groups(first, 64, shape))


@needs_compiler
def test_a_profile_has_the_parts(gpu: Any) -> None:
    kept = drawn(64, (150, 230), 0.2, (1, 2))
    given = [gpu.array(x) for x in inputs((150, 230), 64, np.float16)]
    plan = make_plan(slices_of(gpu, kept, "lists", 64, (150, 230)), *given, regime=RETAIN)
    found = plan.profile(*given, runs=2)
    assert found.on_gpu
    # Time is counted in launches and the like: two of tiles, one of all else.
    assert (found.tiles, found.tasks, found.attention, found.merge) == (2, 1, 1, 1)


@needs_compiler
def test_copies_are_snapshots_and_a_repr_draws(gpu: Any) -> None:
    kept = drawn(64, (150, 230), 0.2, (1, 2))
    slices = slices_of(gpu, kept, "lists", 64, (150, 230))
    assert gpu.copied == 0
    host = KeySlices.from_groups(kept, 64, (150, 230))
    for made in (copy.copy(slices), copy.deepcopy(slices), pickle.loads(pickle.dumps(slices))):
        assert type(made) is KeySlices
        np.testing.assert_array_equal(made.to_dense(), kept)
    assert repr(slices) == repr(host)
    with pytest.raises(ValueError, match=r"`slices`.*over arrays in GPU memory.*snapshot"):
        host.refresh()


@needs_compiler
def test_slices_and_what_was_made_of_them_end_together(gpu: Any) -> None:
    kept = drawn(64, (150, 230), 0.2, (1, 2))
    slices = slices_of(gpu, kept, "lists", 64, (150, 230))
    given = [gpu.array(x) for x in inputs((150, 230), 64, np.float16)]
    block_sparse_attention(*given, slices, regime=RETAIN)
    assert slices.nnz == kept.sum()
    ends = [weakref.ref(slices), weakref.ref(slices.to_block_mask())]
    gc.disable()
    try:
        del slices
        assert [end() for end in ends] == [None, None]
    finally:
        gc.enable()


@needs_compiler
def test_a_map_of_more_keys_than_there_is_room_for(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "LIST_BYTES", 0)
    shape = (150, 331)
    kept = drawn(64, shape, 0.9, (1, 2))
    arrays = inputs(shape, 64, np.float16)
    given = [gpu.array(x) for x in arrays]
    plan = make_plan(slices_of(gpu, kept, "map", 64, shape), *given, regime=RETAIN)
    # Twice the 2 x 3 x 331 bytes of the map, of 264 a fragment.
    assert np.isnan(plan.run(*given).get()).all()
    with pytest.raises(PlanOverflowError, match="fragments and had room for 15"):
        plan.check()
    out, lse = plan.run(*given, return_lse=True)
    check(out.get(), lse.get(), arrays, KeySlices.from_groups(kept, 64, shape))
    # Lists say how many keys there are at most, so that there is room; so may whoever made a map.
    for form, tile in (("lists", WIDE), ("packed", HOPPER)):
        out = block_sparse_attention(
            *given,
            slices_of(gpu, kept, form, 64, shape),
            regime=plan_name(tile, 64, "longest+split"),
        )
        assert np.isfinite(out.get()).all()


@needs_compiler
@pytest.mark.parametrize(
    ("keys", "counts", "text"),
    [
        ((1, 2, 4, 9), (1, 2, 4), "3 groups of 64"),
        ((1, 2, 3, 9), (1, 2, 2), "shape \\(1, 2, 3\\)"),
    ],
)
def test_arrays_of_other_shapes_are_refused(gpu: Any, keys: Any, counts: Any, text: str) -> None:
    arrays = [gpu.array(np.zeros(shape, np.int32)) for shape in (keys, counts)]
    with pytest.raises(ValueError, match=text):
        KeySlices.from_lists(*arrays, 64, (150, 230))
    with pytest.raises(ValueError, match="`group`"):
        KeySlices.from_lists(*arrays, 48, (150, 230))


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("density", [0.0, 0.05, 0.6])
@pytest.mark.parametrize(("tile", "group", "shape"), SIDES)
def test_on_a_gpu(
    gpu: Any, tile: Tile, group: int, shape: tuple[int, int], density: float, form: str
) -> None:
    import cupy

    arch = arch_of(cupy.cuda.Device().id).name
    kernel, *sizes = tile
    if find(arch, kernel, "float16", 128, *sizes, bits=False, gather=True) is None:
        pytest.skip(f"{arch} has other tiles")
    shape = (7 * shape[0], 30 * shape[1])
    kept = drawn(group, shape, density, (1, 2))
    arrays = inputs(shape, 128, np.float16)
    slices = slices_of(gpu, kept, form, group, shape)
    given = [gpu.array(x) for x in arrays]
    host = KeySlices.from_groups(kept, group, shape)
    for regime in (plan_name(tile, group, "longest+split"), "auto"):
        out, lse = block_sparse_attention(*given, slices, regime=regime, return_lse=True)
        check(gpu.get(out), gpu.get(lse), arrays, host)
    make_plan(slices, *given).check()


@pytest.mark.gpu
def test_replays_on_a_gpu(gpu: Any) -> None:
    import cupy

    shape = (640, 5000)
    arrays = inputs(shape, 128, np.float16)
    given = [gpu.array(x) for x in arrays]
    several = [drawn(64, shape, density, (1, 2)) for density in (0.3, 0.9, 0.1)]
    lists = [listed(kept, np.int32, width=5000) for kept in several]
    keys, counts = map(cupy.asarray, lists[0])
    slices = KeySlices.from_lists(keys, counts, 64, shape)
    out = cupy.empty(arrays[0].shape, np.float16)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        run = partial(block_sparse_attention, *given, slices, regime=RETAIN, out=out)
        run()
        stream.begin_capture()
        run()
        graph = stream.end_capture()
        for kept, (new_keys, new_counts) in zip(several, lists, strict=True):
            keys.set(new_keys)
            counts.set(new_counts)
            graph.launch()
            stream.synchronize()
            exact = reference.attention(*arrays, KeySlices.from_groups(kept, 64, shape))
            assert abs(cupy.asnumpy(out).astype(np.float64) - exact).max() < 4e-3
