"""From a mask in GPU memory to its attention, without the host: kernels on the CPU's emulator.

Each kernel does what its source says, through the front door. What the host reads, and how often it
waits, is counted; memory that was given back may not be touched again.
"""

from __future__ import annotations

import copy
import gc
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tessera_cupy import (
    BlockMask,
    PlanOverflowError,
    attention,
    block_sparse_attention,
    call,
    make_plan,
)
from tessera_cupy.kernels import device_build, fetch, kept, launch, lifetime, room
from tests.emulator.emulator import compiler, drawn_seed
from tests.emulator.gpu import ORDINAL, SMS, EmulatedGpu, Event, Stream

pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++ to build the emulator with")

Blocks = NDArray[np.bool_]
RETAIN = "attend_mma/q64k64/retain-pack/longest+split"
SHARE = "attend_mma/q128k128/share-pack/longest+split"
#: Q side: plan and block size; shapes below leave the last block short.
SIDES = {
    "retain": (RETAIN, (64, 32)),
    "split": ("attend_mma/q64k64/split-pack/longest+split", (96, 48)),
    "merge": ("attend_mma/q128k64/merge-pack/longest+split", (32, 32)),
    "share": (SHARE, (32, 24)),
    "share, wgmma": ("attend_wgmma/q128k192/share-pack/longest+split", (64, 64)),
    "share, three warpgroups": ("attend_wgmma/q192k128/share-pack/longest+split", (64, 32)),
    "retain, wgmma": ("attend_wgmma/q128k192/retain-pack/longest+split", (128, 64)),
}
WGMMA = SIDES["share, wgmma"][0]
BUILDERS = ["tile_counts", "tile_scan", "tile_fragments"]


@pytest.fixture
def gpu(kernel_cache: Path) -> Iterator[EmulatedGpu]:
    """A new emulated GPU in CuPy's place."""
    made = EmulatedGpu(kernel_cache.parent / "emulated-kernels", drawn_seed())
    with made.here():
        yield made


# A mask's arrays, as each constructor takes them: (constructor, arrays, what follows them).


def dense(gpu: EmulatedGpu, blocks: Blocks, rng: Any) -> Any:
    """Rows apart by more than their length, that begin at any byte."""
    wide = np.zeros((*blocks.shape[:3], blocks.shape[3] + 9), bool)
    wide[..., 5:-4] = blocks
    return BlockMask.from_dense, [gpu.array(wide)[..., 5:-4]], ()


def bytes_(gpu: EmulatedGpu, blocks: Blocks, rng: Any) -> Any:
    return BlockMask.from_dense, [gpu.array(blocks * np.uint8(rng.integers(1, 256)))], ()


def packed(gpu: EmulatedGpu, blocks: Blocks, rng: Any) -> Any:
    bits = np.packbits(blocks, axis=-1, bitorder="little")
    return BlockMask.from_packed_bits, [gpu.array(bits)], (blocks.shape[2:],)


def lists(gpu: EmulatedGpu, blocks: Blocks, rng: Any) -> Any:
    counts = blocks.sum(axis=-1)
    # Columns that are on come first, in any order.
    order = np.argsort(~blocks + 0.9 * rng.random(blocks.shape), axis=-1)
    columns = order[..., : counts.max() + 1].astype(rng.choice([np.int32, np.int64]))
    arrays = [gpu.array(columns), gpu.array(counts.astype(np.int32))]
    return BlockMask.from_lists, arrays, (blocks.shape[3],)


def csr(gpu: EmulatedGpu, blocks: Blocks, rng: Any) -> Any:
    rows = blocks.reshape(-1, blocks.shape[3])
    indptr = np.concatenate([[0], np.cumsum(rows.sum(axis=1))])
    columns = np.concatenate([rng.permutation(np.flatnonzero(row)) for row in rows])
    kinds = rng.choice([np.int32, np.int64], 2)
    arrays = [gpu.array(indptr.astype(kinds[0])), gpu.array(columns.astype(kinds[1]))]
    return BlockMask.from_csr, arrays, (blocks.shape[2:],)


FORMS = {"dense": dense, "bytes": bytes_, "packed": packed, "lists": lists, "csr": csr}


@dataclass
class Request:
    """A mask on both sides, and inputs."""

    gpu: EmulatedGpu
    mask: BlockMask
    case: Any
    arrays: list[Any]

    def expect(self, blocks: Blocks) -> None:
        """From now on the right output is that of these blocks of 64 x 64."""
        mask, made = BlockMask.from_dense(blocks, (64, 64)), self.case
        self.case = type(made)(mask, *made.arrays, made.layout, made.sm_scale)

    def check(self, regime: str, mask: BlockMask | None = None, **given: Any) -> list[str]:
        """Run the front door and compare; the kernels that ran."""
        before = len(self.gpu.launched)
        out, lse = block_sparse_attention(
            *self.arrays,
            mask or self.mask,
            regime=regime,
            layout=self.case.layout,
            return_lse=True,
            **given,
        )
        self.case.check_kernel(out.get(), lse.get(), f"{regime} seed {self.gpu.seed}")
        return self.gpu.launched[before:]


@pytest.fixture
def request_of(gpu: EmulatedGpu, case: Any, rng: Any) -> Callable[..., Request]:
    """A request with a random mask in GPU memory."""

    def make(
        block: tuple[int, int] = (64, 32),
        form: str = "dense",
        *,
        axes: tuple[int, int] = (1, 2),
        blocks: Blocks | None = None,
        short: tuple[int, int] = (11, 9),
        **given: Any,
    ) -> Request:
        if blocks is None:
            blocks = rng.random((*axes, 5, 37)) < rng.choice([0.1, 0.5, 0.9], (*axes, 5, 1))
            blocks[:, :, 1] = False  # a row without keys
        shape = [n * b - s for n, b, s in zip(blocks.shape[2:], block, short, strict=True)]
        build, arrays, then = FORMS[form](gpu, blocks, rng)
        heads = dict(zip(("batch", "heads"), blocks.shape, strict=False)) if form == "csr" else {}
        mask = build(*arrays, *then, block, shape, **heads)
        host = BlockMask.from_dense(blocks, block, shape)
        made = case(host, rng=rng, **({"dtype": "float16", "dim": 64} | given))
        return Request(gpu, mask, made, [gpu.array(x) for x in made.arrays])

    return make


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("side", SIDES)
def test_every_format_and_mapping(request_of: Any, side: str, form: str) -> None:
    regime, block = SIDES[side]
    made = request_of(block, form)
    ran = made.check(regime)
    family = "dense" if form == "bytes" else form
    assert ran[:4] == [f"mask_state_{family}", *BUILDERS]
    assert [name.split("_")[0] for name in ran[4:]] == ["attend", "merge"]
    assert made.gpu.copied == 0
    assert EmulatedGpu.waits == 0


@pytest.mark.parametrize("axes", [(1, 1), (2, 1), (1, 4), (2, 4)])
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
def test_masks_that_broadcast_are_not_expanded(
    request_of: Any, axes: tuple[int, int], layout: str
) -> None:
    made = request_of(axes=axes, batch=2, kv_heads=2, shared=2, layout=layout)
    made.check(RETAIN)
    assert made.gpu.copied == 0


def test_auto_waits_once_for_64_bytes(request_of: Any) -> None:
    made = request_of((64, 64))
    ran = made.check("auto")
    assert ran[0] == "mask_state_dense"
    assert ran.count("mask_state_dense") == 1
    assert (made.gpu.copied, EmulatedGpu.waits) == (64, 1)
    assert made.check("auto") == ran[4:]  # the plan is kept
    assert (made.gpu.copied, EmulatedGpu.waits) == (64, 1)


def test_long_tiles_are_split_and_merged(request_of: Any, rng: Any) -> None:
    blocks = rng.random((1, 2, 3, 150)) < 0.03
    blocks[0, 1, 0] = rng.random(150) < 0.9
    blocks[0, 0, 2] = False
    for regime in (RETAIN, SIDES["share, wgmma"][0]):
        made = request_of((64, 32), blocks=blocks)
        assert make_plan(made.mask, *made.arrays, regime=regime).tasks().slots > 0
        made.check(regime)


@pytest.mark.parametrize(
    ("steps", "heads"),
    [
        ([60, 60, 9, 0], 1),  # one round: the shortest parts that find a CTA
        ([60, 30], 1),
        ([60, 20, 20], 2),  # heads that share their tiles
        ([60, 1, 1, 1, 1, 1, 1, 1], 1),  # a second round of an eighth, ...
        ([70, 2, 2, 2, 2, 2, 2, 2, 2], 1),  # ... a quarter, ...
        ([70, 4, 4, 4, 4, 4, 4, 4], 1),  # ... half, ...
        ([75, 20, 20, 20, 20, 20, 20, 20, 20], 1),  # ... all of a part
        ([40, 36, 36, 36, 36, 36, 36], 1),  # what no cut would gain
        ([3, 0, 3], 1),
    ],
)
def test_tiles_that_have_a_cta_each(
    request_of: Any, rng: Any, steps: list[int], heads: int
) -> None:
    # Nine CTAs; steps are of two blocks.
    blocks = rng.permuted(np.arange(160) < 2 * np.array(steps)[:, None], axis=1)
    made = request_of((64, 32), blocks=blocks[None, None], kv_heads=heads)
    made.check(RETAIN)


def test_more_split_tiles_than_are_merged_at_a_time(request_of: Any, rng: Any) -> None:
    # Of 538 steps, a share is 60: four tiles are cut in nine parts, a round, the rest in thirds.
    steps = rng.permutation([91, 91, 91, 121, *[24] * 6])
    blocks = rng.permuted(np.arange(242) < 2 * steps[:, None], axis=1)
    made = request_of((64, 32), blocks=blocks[None, None])
    tasks = make_plan(made.mask, *made.arrays, regime=RETAIN).tasks()
    assert len(tasks.merge_tile) == len(steps) > 3 * SMS
    made.check(RETAIN)


@pytest.mark.parametrize("kind", ["empty", "full", "last block"])
def test_masks_at_the_limits(request_of: Any, kind: str) -> None:
    blocks = np.full((1, 2, 3, 5), kind == "full")
    if kind == "last block":
        blocks[..., -1, -1] = True
    made = request_of((32, 32), blocks=blocks)
    for regime in (SIDES["merge"][0], "auto"):
        made.check(regime)


def test_rows_that_are_not_one_stride_apart_are_copied_at_each_build(
    gpu: EmulatedGpu, request_of: Any, case: Any, rng: Any
) -> None:
    blocks = rng.random((2, 4, 3, 9)) < 0.5
    every = gpu.array(blocks, writable=True)
    mask = BlockMask.from_dense(every[:, ::2], (64, 64))
    made = case(BlockMask.from_dense(blocks[:, ::2], (64, 64)), dtype="float16", rng=rng)
    request = Request(gpu, mask, made, [gpu.array(x) for x in made.arrays])
    request.check(RETAIN)
    every.set(~blocks)
    mask.refresh()
    request.case = case(BlockMask.from_dense(~blocks[:, ::2], (64, 64)), dtype="float16", rng=rng)
    request.arrays = [gpu.array(x) for x in request.case.arrays]
    request.check(RETAIN)
    assert gpu.copied == 0


# Contents that change


@dataclass
class Changing:
    """A dense mask whose array changes."""

    request: Request
    array: Any
    case: Any
    rng: Any

    def change(self) -> None:
        """Other blocks, and the inputs' new result; nobody is told."""
        blocks = self.rng.random(self.array.shape) < 0.5
        self.array.set(blocks)
        self.request.expect(blocks)


@pytest.fixture
def changing(gpu: EmulatedGpu, case: Any, rng: Any) -> Changing:
    blocks = rng.random((1, 2, 3, 6)) < 0.5
    array = gpu.array(blocks, writable=True)
    made = case(BlockMask.from_dense(blocks, (64, 64)), dtype="bfloat16", rng=rng)
    mask = BlockMask.from_dense(array, (64, 64))
    return Changing(Request(gpu, mask, made, [gpu.array(x) for x in made.arrays]), array, case, rng)


@pytest.mark.parametrize("regime", [RETAIN, "auto"])
def test_changed_contents_are_seen_after_refresh(changing: Changing, regime: str) -> None:
    made = changing.request
    first = made.check(regime)
    assert made.check(regime) == first[4:]
    changing.change()
    with pytest.raises(AssertionError, match="error"):
        made.check(regime)
    assert made.mask.nnz == made.case.mask.nnz  # the host had not looked before
    made.mask.refresh()
    assert made.check(regime) == first


def test_a_refresh_chooses_again(changing: Changing) -> None:
    made, gpu = changing.request, changing.request.gpu
    for turn in range(1, 4):
        for _ in range(2):
            made.check("auto")
            assert gpu.copied == 64 * turn
        changing.change()
        made.mask.refresh()


def test_a_plan_follows_its_mask_s_refreshes(changing: Changing) -> None:
    made = changing.request
    plan = make_plan(made.mask, *made.arrays, regime=RETAIN)
    for _ in range(3):
        made.case.check_kernel(plan.run(*made.arrays).get())
        assert plan.tiles() is plan.tiles()
        assert len(plan.tiles().frag_start) == made.case.mask.nnz
        plan.check()
        changing.change()
        made.mask.refresh()
    assert made.mask.density() == made.case.mask.density()


def test_a_plan_is_updated_to_another_mask_on_the_gpu(
    gpu: EmulatedGpu, changing: Changing, rng: Any
) -> None:
    made = changing.request
    plan = make_plan(made.mask, *made.arrays, regime=RETAIN)
    blocks = rng.random(changing.array.shape) < 0.5
    other = plan.update(BlockMask.from_dense(gpu.array(blocks), (64, 64)))
    made.case.check_kernel(plan.run(*made.arrays).get())
    made.expect(blocks)
    made.case.check_kernel(other.run(*made.arrays).get())
    assert (gpu.copied, EmulatedGpu.waits) == (0, 0)


def test_what_the_host_reads_is_kept_until_refresh(changing: Changing) -> None:
    made, gpu = changing.request, changing.request.gpu
    mask = made.mask
    assert gpu.copied == 0
    np.testing.assert_array_equal(mask.to_dense(), made.case.mask.to_dense())
    copied = gpu.copied
    assert copied == changing.array.nbytes
    assert repr(mask) == repr(made.case.mask)
    assert mask.run_coverage() == made.case.mask.run_coverage()
    assert gpu.copied == copied
    before = made.case.mask
    changing.change()
    assert mask.density() == before.density()
    mask.refresh()
    np.testing.assert_array_equal(mask.indices, made.case.mask.indices)
    assert mask.density() == made.case.mask.density()


def test_copies_are_snapshots(changing: Changing) -> None:
    mask = changing.request.mask
    for made in (copy.copy(mask), copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert made.source is None
        assert (made.block_size, made.shape) == (mask.block_size, mask.shape)
        np.testing.assert_array_equal(made.to_dense(), changing.request.case.mask.to_dense())


def test_a_snapshot_refuses_to_refresh() -> None:
    with pytest.raises(ValueError, match=r"`mask`.*over an array in GPU memory.*snapshot"):
        BlockMask.from_dense(np.ones((2, 2), bool), (64, 64)).refresh()


# Graphs


@pytest.mark.parametrize("regime", [RETAIN, SIDES["share, wgmma"][0], "auto"])
@pytest.mark.parametrize("call", ["front door", "plan"])
def test_replays_follow_the_mask(changing: Changing, regime: str, call: str) -> None:
    made, gpu = changing.request, changing.request.gpu
    out = gpu.empty(made.case.q.shape, made.case.q.dtype)
    if call == "plan":
        plan = make_plan(made.mask, *made.arrays, regime=regime)
        run = partial(plan.run, *made.arrays, out=out)
    else:
        run = partial(block_sparse_attention, *made.arrays, made.mask, regime=regime, out=out)
    with Stream(32) as stream:
        run()
        stream.begin_capture()
        run()
        replay = stream.end_capture()
    if call == "plan":
        plan.check()  # of a graph that has not run there is nothing to say
        del plan
    # Neither a refresh nor the end of the plan ends what replays use.
    del run
    made.mask.refresh()
    block_sparse_attention(*made.arrays, made.mask, regime=regime)
    gc.collect()
    for _ in range(3):
        changing.change()
        out.set(np.nan)
        copied = gpu.copied
        replay()
        assert gpu.copied == copied
        made.case.check_kernel(out.get())


@pytest.mark.parametrize("regime", [RETAIN, "auto"])
def test_a_capture_before_the_first_run_is_refused(changing: Changing, regime: str) -> None:
    made = changing.request
    with Stream(32) as stream:
        stream.begin_capture()
        with pytest.raises(ValueError, match=r"`stream`.*run the plan once before capturing"):
            block_sparse_attention(*made.arrays, made.mask, regime=regime)
        assert stream.recorded == []
        stream.end_capture()
    made.check(regime)


def test_a_host_made_plan_of_a_gpu_mask_is_not_read_in_a_capture(changing: Changing) -> None:
    made = changing.request
    regime = "attend_mma/q64k64/retain-pack/longest"
    with Stream(32) as stream:
        stream.begin_capture()
        with pytest.raises(ValueError, match=r"`stream`.*run the plan once before capturing"):
            block_sparse_attention(*made.arrays, made.mask, regime=regime)
        stream.end_capture()
    assert made.gpu.copied == 0


# Streams and memory


def test_another_stream_waits_for_the_plan(changing: Changing) -> None:
    made = changing.request
    with Stream(32) as first:
        made.check(RETAIN)
        made.check(RETAIN)
    with Stream(48) as second:
        made.check(RETAIN)
    assert first.waits == []
    assert [event.stream for event in second.waits] == [first]


def test_a_plan_counted_on_one_stream_is_made_on_another(changing: Changing) -> None:
    made = changing.request
    with Stream(32):
        plan = make_plan(made.mask, *made.arrays)
    with Stream(48):
        made.case.check_kernel(plan.run(*made.arrays).get())
    assert made.gpu.launched.count("mask_state_dense") == 2


def alive(gpu: EmulatedGpu) -> int:
    gc.collect()
    return sum(array.nbytes for array in gpu._arrays if array.alive)


@pytest.mark.parametrize("regime", [RETAIN, "auto"])
def test_memory_is_flat_over_requests(request_of: Any, rng: Any, regime: str) -> None:
    made = request_of((64, 64))
    gpu = made.gpu
    used = []
    for density in (0.9, 0.1, 0.5, 0.9, 0.2):
        blocks = gpu.array(rng.random((1, 2, 5, 37)) < density)
        mask = BlockMask.from_dense(blocks, (64, 64), made.mask.shape)
        block_sparse_attention(*made.arrays, mask, regime=regime)
        del mask, blocks
        used.append(alive(gpu))
    assert len(set(used)) == 1


def test_kept_plans_are_bounded(request_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [request_of((64, 64)) for _ in range(3)]
    requests[0].check(RETAIN)
    one = kept._plans[ORDINAL]
    nbytes = max(ref.nbytes for ref in one.plans.values())
    monkeypatch.setattr(kept, "KEPT_BYTES", 2 * nbytes)
    assert requests[1].check(RETAIN)[0] == "mask_state_dense"
    assert requests[0].check(RETAIN)[0].startswith("attend")
    assert requests[2].check(RETAIN)[0] == "mask_state_dense"  # in place of the second's
    assert requests[0].check(RETAIN)[0].startswith("attend")
    assert requests[1].check(RETAIN)[0] == "mask_state_dense"


def test_what_is_kept_of_ended_plans_is_not_counted(request_of: Any) -> None:
    made = request_of((64, 64))
    made.check(RETAIN)
    one = kept._plans[ORDINAL].nbytes
    for _ in range(3):
        del made
        gc.collect()
        made = request_of((64, 64))
        made.check(RETAIN)
        assert (kept._plans[ORDINAL].nbytes, len(kept._plans[ORDINAL].plans)) == (one, 1)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_remembered_of_a_mask_keeps_no_memory(
    gpu: EmulatedGpu, request_of: Any, form: str
) -> None:
    gc.collect()
    before = set(attention._plans), set(lifetime._held)  # of other tests' masks
    made = request_of((64, 64), form)
    made.check(RETAIN)
    assert id(made.mask) in attention._plans
    assert set(lifetime._held) > before[1]
    del made
    assert alive(gpu) == 0
    assert (set(attention._plans), set(lifetime._held)) == before


# The host's work


def package_calls(work: Callable[[], Any]) -> int:
    """Calls of the package's own functions."""
    calls = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_globals["__name__"].startswith("tessera_cupy")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def test_a_request_is_few_calls_on_the_host(
    request_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes about a quarter of a microsecond; what is known of a geometry is not made again.

    A few calls more are no harm. Twenty are, such as another check of arrays like earlier ones, a
    choice that is made again, hashes of nested dataclasses. Memory comes from a pool, so that a
    request finds it at the addresses of the one before.
    """
    made = request_of((64, 64))
    monkeypatch.setattr(sys.modules["cupy"], "empty", cache(made.gpu.empty))
    for module in (launch, device_build):  # the emulator calls the package too
        monkeypatch.setattr(module, "load", lambda config, device: lambda *_, **__: None)
    (blocks,) = made.mask.source.arrays
    out = made.gpu.empty(made.case.q.shape, made.case.q.dtype)
    built, cold, warm = 0, 0, 0
    for _ in range(2):
        masks: list[BlockMask] = []
        build = partial(BlockMask.from_dense, blocks, (64, 64), made.mask.shape)
        built = package_calls(lambda build=build, masks=masks: masks.append(build()))
        run = partial(block_sparse_attention, *made.arrays, *masks, regime=WGMMA, out=out)
        cold = package_calls(run)
        warm = package_calls(run)
    assert 5 < built <= 27
    assert 20 < cold <= 70
    assert 10 < warm <= 35


# Calls that are alike


def test_arrays_that_are_alike_are_checked_once(
    changing: Changing, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, gpu = changing.request, changing.request.gpu
    made.check(RETAIN)
    for function in ("make_request", "check_out"):
        monkeypatch.setattr(call, function, None)
    made.check(RETAIN)
    made.arrays = [gpu.array(x) for x in made.case.arrays]
    made.check(RETAIN)
    monkeypatch.undo()
    shorter = made.arrays[1][:, :, 8:]
    with pytest.raises(ValueError, match=r"`v`.*k's shape"):
        block_sparse_attention(made.arrays[0], shorter, made.arrays[2], made.mask, regime=RETAIN)


@pytest.mark.parametrize("turn", range(2))
def test_an_output_in_the_inputs_is_refused_at_every_address(changing: Changing, turn: int) -> None:
    made, gpu = changing.request, changing.request.gpu
    rows = made.case.q.shape[2]
    both = gpu.array(np.concatenate([made.case.q, made.case.q], axis=2), writable=True)
    first, second = both[:, :, :rows], both[:, :, rows:]
    out = block_sparse_attention(first, *made.arrays[1:], made.mask, regime=RETAIN, out=second)
    made.case.check_kernel(out.get())
    overlap = both[:, :, 16 * (turn + 1) : rows + 16 * (turn + 1)]
    with pytest.raises(ValueError, match=r"`out`.*memory that q uses"):
        block_sparse_attention(first, *made.arrays[1:], made.mask, regime=RETAIN, out=overlap)
    out = block_sparse_attention(first, *made.arrays[1:], made.mask, regime=RETAIN, out=first)
    made.case.check_kernel(out.get())


# Profiles


@pytest.mark.parametrize("regime", [RETAIN, "auto"])
def test_a_profile_has_each_part_s_launches(changing: Changing, regime: str) -> None:
    """An emulated launch, or memset, takes a millisecond."""
    made = changing.request
    plan = make_plan(made.mask, *made.arrays, regime=regime)
    found = plan.profile(*made.arrays, runs=3)
    assert found.on_gpu
    assert (found.mask_state, found.tiles, found.tasks) == (2, 2, 1)
    assert (found.attention, found.merge) == (1, 1)
    assert (found.select > 0) == (found.select < 1000)
    assert found.total == pytest.approx(7 + found.select)
    assert found.preparation == pytest.approx(5 + found.select)
    lines = str(found).splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        *("mask state", "tiles", "tasks", "select", "attention", "merge")
    ]
    made.check(regime)


def test_a_profile_of_a_host_made_plan(changing: Changing) -> None:
    made = changing.request
    plan = make_plan(made.mask, *made.arrays, regime="attend_mma/q64k64/retain-pack/longest")
    found = plan.profile(*made.arrays)
    assert not found.on_gpu
    assert (found.mask_state, found.attention, found.merge) == (0, 1, 0)
    assert found.tiles > 0
    assert found.tasks > 0


def test_profiles_are_of_a_gpu_and_of_no_capture(changing: Changing) -> None:
    made = changing.request
    plan = make_plan(made.mask, *made.arrays, regime=RETAIN)
    with pytest.raises(ValueError, match=r"`q`.*on a GPU"):
        plan.profile(*made.case.arrays)
    with Stream(32) as stream:
        stream.begin_capture()
        with pytest.raises(ValueError, match=r"`stream`.*CUDA graph"):
            plan.profile(*made.arrays)
        stream.end_capture()


# Lists that are too small


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for 30 fragments, where nothing is known."""
    monkeypatch.setattr(room, "LIST_BYTES", 240)
    monkeypatch.setattr(room, "_needs", room._Needs())


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
def test_an_overflow_is_nan_and_reported_and_then_has_room(request_of: Any, layout: str) -> None:
    blocks = np.ones((1, 2, 2, 20), bool)
    made = request_of((64, 64), blocks=blocks, layout=layout)
    plan = make_plan(made.mask, *made.arrays, regime=RETAIN, layout=layout)
    out, lse = plan.run(*made.arrays, return_lse=True)
    assert np.isnan(out.get().astype(float)).all()
    assert np.isnan(lse.get()).all()
    with pytest.raises(PlanOverflowError, match=r"needs 80 fragments and had room for 30.*NaN"):
        plan.check()
    made.case.check_kernel(plan.run(*made.arrays).get())
    plan.check()


@pytest.mark.usefixtures("tight")
def test_an_overflow_that_nobody_asks_for_is_warned_of(request_of: Any) -> None:
    blocks = np.ones((1, 2, 2, 20), bool)
    made = request_of((64, 64), blocks=blocks)
    out = block_sparse_attention(*made.arrays, made.mask, regime=RETAIN)
    assert np.isnan(out.get().astype(float)).all()
    assert EmulatedGpu.waits == 0
    again = request_of((64, 64), blocks=blocks)
    with pytest.warns(RuntimeWarning, match="an earlier request needed 80 fragments"):
        again.check(RETAIN)
    # Half again what was needed holds every mask of the geometry.
    request_of((64, 64), blocks=blocks).check(RETAIN)


@pytest.mark.usefixtures("tight")
def test_a_plan_without_room_is_not_used_again(
    request_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = request_of((64, 64), blocks=np.ones((1, 2, 2, 20), bool))
    monkeypatch.setattr(Event, "held", True)
    for _ in range(2):
        out = block_sparse_attention(*made.arrays, made.mask, regime=RETAIN)
        assert np.isnan(out.get().astype(float)).all()
    monkeypatch.setattr(Event, "held", False)
    with pytest.warns(RuntimeWarning, match="needed 80 fragments"):
        assert made.check(RETAIN)[0] == "mask_state_dense"
    assert made.check(RETAIN)[0].startswith("attend")
    assert EmulatedGpu.waits == 0


@pytest.mark.usefixtures("tight")
def test_a_need_that_has_not_come_is_not_waited_for(
    request_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = np.ones((1, 2, 2, 20), bool)
    monkeypatch.setattr(Event, "held", True)
    for _ in range(3):
        made = request_of((64, 64), blocks=blocks)
        out = block_sparse_attention(*made.arrays, made.mask, regime=RETAIN)
        assert np.isnan(out.get().astype(float)).all()
    assert EmulatedGpu.waits == 0


@pytest.mark.usefixtures("tight")
def test_a_counted_mask_has_room_at_once(request_of: Any) -> None:
    request_of((64, 64), blocks=np.ones((1, 2, 2, 20), bool)).check("auto")


@pytest.mark.usefixtures("tight")
def test_a_replay_may_overflow(
    gpu: EmulatedGpu, changing: Changing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "LIST_BYTES", 8 * 20)
    made = changing.request
    few = np.zeros(changing.array.shape, bool)
    few[..., 0] = True
    changing.array.set(few)
    plan = make_plan(made.mask, *made.arrays, regime=RETAIN)
    out = gpu.empty(made.case.q.shape, made.case.q.dtype)
    with Stream(32) as stream:
        plan.run(*made.arrays, out=out)
        stream.begin_capture()
        plan.run(*made.arrays, out=out)
        replay = stream.end_capture()
    replay()
    assert np.isfinite(out.get().astype(float)).all()
    plan.check()
    changing.array.set(~few)
    replay()
    assert np.isnan(out.get().astype(float)).all()
    with pytest.raises(PlanOverflowError, match="needs 30 fragments and had room for 20"):
        plan.check()
    changing.array.set(few)
    replay()
    plan.check()
    assert np.isfinite(out.get().astype(float)).all()


def test_numbers_that_nobody_waits_for_keep_their_memory_until_they_come(
    gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "_coming", type(fetch._coming)())
    array = gpu.array(np.arange(8))
    monkeypatch.setattr(Event, "held", True)
    for _ in range(3):
        fetch.fetch(array, 8)
    assert len(fetch._coming) == 3
    monkeypatch.setattr(Event, "held", False)
    assert fetch.fetch(array, 8).wait().tolist() == list(range(8))
    assert len(fetch._coming) == 1


# Masks that are none


def bad_lists(gpu: EmulatedGpu) -> tuple[Any, BlockMask, str]:
    columns = np.array([[0, 9, 3], [2, 2, 1]], np.int64)
    kept_blocks = np.zeros((2, 5), bool)
    kept_blocks[0, [0, 3]] = kept_blocks[1, [2, 1]] = True
    arrays = [gpu.array(columns), gpu.array(np.array([3, 3], np.int32))]
    mask = BlockMask.from_lists(*arrays, 5, (64, 64))
    return mask, BlockMask.from_dense(kept_blocks, (64, 64)), "column out of range; column twice"


def bad_counts(gpu: EmulatedGpu) -> tuple[Any, BlockMask, str]:
    arrays = [gpu.array(np.array([[1, 2], [0, 4]], np.int32)), gpu.array(np.array([7, -1]))]
    mask = BlockMask.from_lists(*arrays, 5, (64, 64))
    kept_blocks = np.zeros((2, 5), bool)
    kept_blocks[0, [1, 2]] = True
    return mask, BlockMask.from_dense(kept_blocks, (64, 64)), "counts or offsets that do not fit"


def bad_csr(gpu: EmulatedGpu) -> tuple[Any, BlockMask, str]:
    arrays = [gpu.array(np.array([0, 2**40, 3])), gpu.array(np.array([1, 4, -8], np.int32))]
    mask = BlockMask.from_csr(*arrays, (2, 5), (64, 64))
    kept_blocks = np.zeros((2, 5), bool)
    kept_blocks[0, [1, 4]] = True
    return (
        mask,
        BlockMask.from_dense(kept_blocks, (64, 64)),
        "column out of range; counts or offsets",
    )


def bad_bits(gpu: EmulatedGpu) -> tuple[Any, BlockMask, str]:
    mask = BlockMask.from_packed_bits(gpu.array(np.array([[3], [40]], np.uint8)), (2, 5), (64, 64))
    kept_blocks = np.zeros((2, 5), bool)
    kept_blocks[0, :2] = kept_blocks[1, 3] = True
    return mask, BlockMask.from_dense(kept_blocks, (64, 64)), "column out of range"


@pytest.mark.parametrize("bad", [bad_lists, bad_counts, bad_csr, bad_bits])
def test_a_bad_mask_is_reported_and_never_out_of_bounds(
    gpu: EmulatedGpu, case: Any, bad: Any
) -> None:
    mask, rest, words = bad(gpu)
    made = case(rest, dtype="float16")
    arrays = [gpu.array(x) for x in made.arrays]
    plan = make_plan(mask, *arrays, regime=RETAIN)
    made.check_kernel(plan.run(*arrays).get())
    with pytest.raises(ValueError, match=f"`mask`.*{words}"):
        plan.check()
    with pytest.raises(ValueError, match=f"`mask`.*{words}"):
        block_sparse_attention(*arrays, mask)
    with pytest.raises(ValueError, match="Fix"):
        mask.check()
    with pytest.raises(ValueError, match="Fix"):
        mask.density()


def test_checks_of_a_right_mask_find_nothing(changing: Changing) -> None:
    made = changing.request
    made.mask.check()
    plan = make_plan(made.mask, *made.arrays, regime=RETAIN)
    plan.check()
    plan.run(*made.arrays)
    plan.check()
    case_mask = made.case.mask
    case_mask.check()


# What the host makes as before


@pytest.mark.parametrize(
    "regime",
    [
        "attend_mma/q64k64/retain-pack/longest",
        "attend_mma/q64k64/retain-pack/alternate+split",
        "attend_mma/q64k64/retain-retain/longest+split",
        "attend_wgmma/q128k192/regroup-pack/longest+split",
    ],
)
def test_other_plans_are_the_host_s(changing: Changing, regime: str) -> None:
    made = changing.request
    ran = made.check(regime)
    assert not set(ran) & set(BUILDERS)
    assert made.gpu.copied == changing.array.nbytes
    changing.change()
    made.mask.refresh()
    made.check(regime)


def test_other_masks_are_snapshots(gpu: EmulatedGpu, case: Any, rng: Any) -> None:
    blocks = rng.random((1, 2, 3, 4)) < 0.6
    sizes = np.array([10, 65, 0, 30])  # one is above the nominal size
    tokens = rng.random((1, 2, 100, 120)) < 0.5
    indptr = np.concatenate([[0], np.cumsum(blocks.sum(-1).ravel())])
    columns = np.nonzero(blocks)[3]
    for mask, host in (
        (BlockMask.from_dense(gpu.array(blocks.astype(np.int32)), (64, 64)), blocks),
        (BlockMask.from_dense(gpu.array(blocks), (64, 64), kv_block_sizes=sizes), blocks),
        (BlockMask.from_tokens(gpu.array(tokens), (64, 64)), None),
        (
            BlockMask.from_csr(
                gpu.array(indptr),
                gpu.array(columns.astype(np.int16)),
                (3, 4),
                (64, 64),
                heads=2,
            ),
            blocks,
        ),
    ):
        assert mask.source is None
        assert mask.device == ORDINAL
        made = case(mask, dtype="float16", rng=rng)
        arrays = [gpu.array(x) for x in made.arrays]
        before = len(gpu.launched)
        made.check_kernel(block_sparse_attention(*arrays, mask).get())
        assert not set(gpu.launched[before:]) & set(BUILDERS)
        if host is not None and not mask.ragged:
            np.testing.assert_array_equal(mask.to_dense(), host)


def test_a_mask_on_the_host_is_planned_there(gpu: EmulatedGpu, case: Any) -> None:
    made = case(BlockMask.from_dense(np.eye(4, dtype=bool), (64, 64)), dtype="float16")
    arrays = [gpu.array(x) for x in made.arrays]
    made.check_kernel(block_sparse_attention(*arrays, made.mask).get())
    assert not set(gpu.launched) & set(BUILDERS)


def test_arrays_on_the_host_with_a_mask_on_a_gpu(changing: Changing) -> None:
    made = changing.request
    out, lse = block_sparse_attention(*made.case.arrays, made.mask, return_lse=True)
    made.case.check(out, lse)
