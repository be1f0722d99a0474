"""Masks in GPU memory, on a GPU: planned there, on the call's stream, captured; flat in memory."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from tessera_cupy import BlockMask, PlanOverflowError, ahead, block_sparse_attention, make_plan
from tessera_cupy.kernels import device_build, kept, room
from tessera_cupy.kernels.launch import packed_fragments, packed_tasks

pytestmark = pytest.mark.gpu

MMA = "attend_mma/q64k64/retain-pack/longest+split"
HALVES = "attend_wgmma/q128k192/share-pack/longest+split"
PLANS = {
    "retain": (MMA, (64, 32)),
    "split": ("attend_mma/q64k64/split-pack/longest+split", (96, 48)),
    "merge": ("attend_mma/q128k64/merge-pack/longest+split", (32, 32)),
    "share": ("attend_mma/q128k64/share-pack/longest+split", (32, 24)),
    "auto": ("auto", (64, 64)),
    "auto, small blocks": ("auto", (16, 16)),
}


@dataclass
class Request:
    """A dense mask over a CuPy array that may change, and inputs."""

    gpu: Any
    make_case: Callable[..., Any]
    case: Any
    blocks: Any
    mask: BlockMask
    arrays: list[Any]

    def call(self, regime: str, **given: Any) -> Any:
        return block_sparse_attention(*self.arrays, self.mask, regime=regime, **given)

    def check(self, out: Any, label: str = "") -> None:
        self.case.check_kernel(self.gpu.cupy.asnumpy(out), label=label)

    def expect(self, blocks: Any) -> None:
        """From now on the right output is that of these blocks; the array is left as it is."""
        mask = BlockMask.from_dense(blocks, self.mask.block_size, self.mask.shape)
        self.case = type(self.case)(mask, *self.case.arrays, self.case.layout)


@pytest.fixture
def request_of(gpu: Any, case: Any, rng: Any) -> Callable[..., Request]:
    def make(block: tuple[int, int] = (64, 64), axes: tuple[int, int] = (1, 4)) -> Request:
        blocks = rng.random((*axes, 7, 31)) < rng.choice([0.1, 0.5, 0.95], (*axes, 7, 1))
        blocks[:, :, 2] = False
        shape = (7 * block[0] - 11, 31 * block[1] - 9)
        host = BlockMask.from_dense(blocks, block, shape)
        made = case(host, batch=2, kv_heads=2, shared=2, dtype="bfloat16", rng=rng)
        array = gpu.cupy.asarray(blocks)
        arrays = [gpu.cupy.asarray(x) for x in made.arrays]
        mask = BlockMask.from_dense(array, block, shape)
        gpu.cupy.cuda.Device().synchronize()
        return Request(gpu, case, made, array, mask, arrays)

    return make


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The plans that the GPU makes; none ahead, which depends on what was chosen before."""
    monkeypatch.setattr(ahead, "make", lambda *_: None)
    made: list[Any] = []
    build = device_build.build

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(build(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(device_build, "build", counted)
    return made


@pytest.mark.parametrize("axes", [(1, 4), (1, 1), (2, 1), (2, 4)])
@pytest.mark.parametrize("name", PLANS)
def test_plans_that_the_gpu_makes(
    request_of: Any, builds: list[Any], name: str, axes: tuple[int, int]
) -> None:
    regime, block = PLANS[name]
    made = request_of(block, axes)
    made.gpu.poison()
    out, lse = made.call(regime, return_lse=True)
    cupy = made.gpu.cupy
    made.case.check_kernel(cupy.asnumpy(out), cupy.asnumpy(lse), name)
    assert len(builds) == 1
    made.call(regime)
    assert len(builds) == 1
    plan = make_plan(made.mask, *made.arrays, regime=regime)
    plan.run(*made.arrays)
    plan.check()


def test_the_gpu_makes_the_host_s_arrays(request_of: Any, builds: list[Any]) -> None:
    for name, (regime, block) in PLANS.items():
        made = request_of(block)
        cupy = made.gpu.cupy
        plan = make_plan(made.mask, *made.arrays, regime=regime)
        plan.run(*made.arrays)
        cupy.cuda.Device().synchronize()
        tiles, tasks = plan.tiles(), plan.tasks()
        counts = cupy.ndarray((8,), np.int64, _memory(cupy, builds[-1].counts)).get()
        assert counts[:5].tolist() == [
            *(len(tiles.frag_start), len(tasks), len(tasks.merge_tile), tasks.slots, 0)
        ], name
        frags = cupy.ndarray((counts[0], 2), np.uint32, _memory(cupy, builds[-1].fragments)).get()
        np.testing.assert_array_equal(frags, packed_fragments(tiles), err_msg=name)
        packed = packed_tasks(tiles, tasks)
        raw = cupy.ndarray((packed.nbytes,), np.uint8, _memory(cupy, builds[-1].tasks)).get()
        assert raw.tobytes() == packed.tobytes(), name


#: Plan and rows of a block; cubes of 4 x 4 x 4 in 5 x 6 x 7 tokens, and text, or multiples of 8.
RAGGED = {
    "retain": (MMA, 64, [64, 48, 32, 24, 16, 12, 8, 6, 64, 64, 13]),
    "split": (PLANS["split"][0], 128, [128, 96, 0, 48, 1, 127, 65]),
    "share": (PLANS["share"][0], 32, [32, 24, 0, 16, 32, 8, 32, 20]),
    "merge": (PLANS["merge"][0], 64, [64, 32, 0, 16, 64, 8, 64, 20]),
    "retain, wgmma": ("attend_wgmma/q128k192/retain-pack/longest+split", 128, [128, 7, 0, 96]),
    "halves, wgmma": (HALVES, 64, [64, 41, 63, 0, 0, 0, 1, 64, 33]),
}


@pytest.mark.parametrize("where", ["host", "gpu"])
@pytest.mark.parametrize("name", RAGGED)
def test_ragged_blocks_are_planned_on_the_gpu(
    gpu: Any, case: Any, rng: Any, builds: list[Any], name: str, where: str
) -> None:
    regime, block, q = RAGGED[name]
    if "wgmma" in name and gpu.arch.name != "sm_90a":
        pytest.skip("attend_wgmma is a kernel of sm_90a")
    kv = np.array([rng.permutation(np.arange(300) % 65) for _ in range(4)])
    blocks = rng.random((1, 4, len(q), 300)) < rng.choice([0.1, 0.5, 0.95], (1, 4, len(q), 1))
    shape = (sum(q), int(kv[0].sum()))
    sizes = {"q_block_sizes": np.array(q), "kv_block_sizes": kv}
    host = BlockMask.from_dense(blocks, (block, 64), shape, **sizes)
    made = case(host, batch=2, kv_heads=2, shared=2, dtype="bfloat16", rng=rng)
    arrays = [gpu.cupy.asarray(x) for x in made.arrays]
    if where == "gpu":
        sizes["kv_block_sizes"] = gpu.cupy.asarray(kv)
        if name.split(",")[0] in ("retain", "split", "halves"):
            sizes["q_block_sizes"] = gpu.cupy.asarray(np.array(q, np.int32))
    mask = BlockMask.from_dense(gpu.cupy.asarray(blocks), (block, 64), shape, **sizes)
    gpu.poison()
    out, lse = block_sparse_attention(*arrays, mask, regime=regime, return_lse=True)
    made.check_kernel(gpu.cupy.asnumpy(out), gpu.cupy.asnumpy(lse), name)
    assert len(builds) == 1
    plan = make_plan(mask, *arrays, regime=regime)
    plan.run(*arrays)
    plan.check()
    counts = gpu.cupy.ndarray((8,), np.int64, _memory(gpu.cupy, builds[-1].counts)).get()
    tiles, tasks = plan.tiles(), plan.tasks()
    assert counts[:5].tolist() == [
        *(len(tiles.frag_start), len(tasks), len(tasks.merge_tile), tasks.slots, 0)
    ]
    frags = gpu.cupy.ndarray((counts[0], 2), np.uint32, _memory(gpu.cupy, builds[-1].fragments))
    np.testing.assert_array_equal(frags.get(), packed_fragments(tiles))


@pytest.mark.parametrize("regime", [MMA, HALVES, "auto"])
def test_replays_follow_sizes_in_gpu_memory(gpu: Any, case: Any, rng: Any, regime: str) -> None:
    if regime == HALVES and gpu.arch.name != "sm_90a":
        pytest.skip("attend_wgmma is a kernel of sm_90a")
    cupy = gpu.cupy
    q, kv = np.array([64, 13, 0, 40, 64]), rng.permutation(np.arange(130) % 65)
    shape, blocks = (int(q.sum()), int(kv.sum())), rng.random((1, 2, 5, 130)) < 0.4
    of_gpu = {"q_block_sizes": cupy.asarray(q), "kv_block_sizes": cupy.asarray(kv)}
    mask = BlockMask.from_dense(cupy.asarray(blocks), (64, 64), shape, **of_gpu)
    sizes = {"q_block_sizes": q, "kv_block_sizes": kv}
    made = case(BlockMask.from_dense(blocks, (64, 64), shape, **sizes), dtype="float16", rng=rng)
    arrays = [cupy.asarray(x) for x in made.arrays]
    out = cupy.empty_like(arrays[0])
    with cupy.cuda.Stream(non_blocking=True) as stream:
        block_sparse_attention(*arrays, mask, regime=regime, out=out)
        stream.synchronize()
        stream.begin_capture()
        block_sparse_attention(*arrays, mask, regime=regime, out=out)
        graph = stream.end_capture()
        for _ in range(3):
            for name, array in of_gpu.items():
                rng.shuffle(sizes[name])
                array.set(sizes[name], stream=stream)
            graph.launch(stream)
            stream.synchronize()
            host = BlockMask.from_dense(blocks, (64, 64), shape, **sizes)
            expected = type(made)(host, *made.arrays, made.layout)
            expected.check_kernel(cupy.asnumpy(out), label="a replay")


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("where", ["host", "gpu"])
def test_halves_of_random_sizes(
    gpu: Any, case: Any, rng: Any, builds: list[Any], dim: int, where: str
) -> None:
    """Two blocks a tile, per head; long lists are split, and twins take where lists are one."""
    if gpu.arch.name != "sm_90a":
        pytest.skip("attend_wgmma is a kernel of sm_90a")
    for nq, density, full in ((1, 1.0, 1.0), (40, 1.0, 0.9), (33, 0.3, 0.0), (150, 0.1, 0.5)):
        one = np.where(rng.random(nq) < full, 64, np.arange(nq) * 5 % 65)
        one[0] = 64
        q = np.array([rng.permutation(one) for _ in range(3)])
        kv = rng.permutation(np.arange(200) % 65)
        blocks = rng.random((1, 3, nq, 200)) < density
        blocks[0, 0, nq // 2] = False
        sizes = {"q_block_sizes": q, "kv_block_sizes": kv}
        shape = (int(q[0].sum()), int(kv.sum()))
        made = case(
            BlockMask.from_dense(blocks, (64, 64), shape, **sizes),
            dtype="bfloat16",
            dim=dim,
            rng=rng,
        )
        arrays = [gpu.cupy.asarray(x) for x in made.arrays]
        on_host = BlockMask.from_dense(blocks, (64, 64), shape, **sizes)
        if where == "gpu":
            sizes = {name: gpu.cupy.asarray(values) for name, values in sizes.items()}
        mask = BlockMask.from_dense(gpu.cupy.asarray(blocks), (64, 64), shape, **sizes)
        before = len(builds)
        for of in (mask, on_host):
            gpu.poison()
            out, lse = block_sparse_attention(*arrays, of, regime=HALVES, return_lse=True)
            made.check_kernel(gpu.cupy.asnumpy(out), gpu.cupy.asnumpy(lse), f"{nq} {density}")
        assert len(builds) > before


@pytest.mark.parametrize("sizes", [[64, 65, -1, 2], [1, 0, 0, 0], [2**40, -(2**40), 64, 64]])
@pytest.mark.parametrize("side", ["q", "kv"])
def test_bad_sizes_are_reported(gpu: Any, case: Any, rng: Any, side: str, sizes: Any) -> None:
    cupy, blocks = gpu.cupy, np.ones((1, 2, 4, 4), bool)
    shape = (130, 250) if side == "q" else (250, 130)
    given = {f"{side}_block_sizes": cupy.asarray(np.array(sizes))}
    mask = BlockMask.from_dense(cupy.asarray(blocks), (64, 64), shape, **given)
    host = BlockMask.from_dense(
        np.ones((1, 2, -(-shape[0] // 64), -(-shape[1] // 64)), bool), (64, 64), shape
    )
    made = case(host, dtype="float16", rng=rng)
    arrays = [cupy.asarray(x) for x in made.arrays]
    plan = make_plan(mask, *arrays, regime=MMA)
    plan.run(*arrays)
    with pytest.raises(ValueError, match="block size"):
        plan.check()
    with pytest.raises(ValueError, match=f"`{side}_block_sizes`"):
        mask.check()


def _memory(cupy: Any, part: Any) -> Any:
    owner = cupy.cuda.UnownedMemory(part.data.ptr, part.nbytes, None)
    return cupy.cuda.MemoryPointer(owner, 0)


@pytest.mark.parametrize("kind", ["bool", "uint8", "torch bool", "packed", "lists", "torch", "csr"])
def test_every_format(gpu: Any, request_of: Any, builds: list[Any], kind: str) -> None:
    made = request_of()
    cupy, mask = gpu.cupy, made.mask
    blocks = cupy.asnumpy(made.blocks)
    geometry = (mask.block_size, mask.shape)
    counts = blocks.sum(axis=-1)
    columns = np.argsort(~blocks, axis=-1, kind="stable")
    if kind.startswith("torch"):
        torch = pytest.importorskip("torch")
    if kind == "bool":
        wide = cupy.zeros((*blocks.shape[:3], blocks.shape[3] + 13), bool)
        wide[..., 3:-10] = made.blocks
        other = BlockMask.from_dense(wide[..., 3:-10], *geometry)
    elif kind == "uint8":
        other = BlockMask.from_dense(cupy.asarray(blocks.astype(np.uint8)), *geometry)
    elif kind == "torch bool":
        other = BlockMask.from_dense(torch.from_numpy(blocks).cuda(), *geometry)
    elif kind == "packed":
        bits = cupy.asarray(np.packbits(blocks, axis=-1, bitorder="little"))
        other = BlockMask.from_packed_bits(bits, blocks.shape[2:], *geometry)
    elif kind == "lists":
        arrays = cupy.asarray(columns.astype(np.int32)), cupy.asarray(counts.astype(np.int32))
        other = BlockMask.from_lists(*arrays, blocks.shape[3], *geometry)
    elif kind == "torch":  # int64 columns, as topk gives them
        arrays = torch.from_numpy(columns).cuda(), torch.from_numpy(counts).cuda()
        other = BlockMask.from_lists(*arrays, blocks.shape[3], *geometry)
    else:
        rows = blocks.reshape(-1, blocks.shape[3])
        indptr = np.concatenate([[0], np.cumsum(rows.sum(axis=1))])
        indices = np.concatenate([np.flatnonzero(row) for row in rows]).astype(np.int32)
        other = BlockMask.from_csr(
            *(cupy.asarray(x) for x in (indptr, indices)),
            blocks.shape[2:],
            *geometry,
            heads=blocks.shape[1],
        )
    assert other.source is not None
    made.mask = other
    made.check(made.call(MMA), kind)
    made.check(made.call("auto"), kind)
    assert len(builds) == 2
    other.check()
    np.testing.assert_array_equal(other.to_dense(), blocks)


def test_nothing_waits_with_a_named_plan(gpu: Any, request_of: Any) -> None:
    """Mask, q, k and v are written behind a slow kernel, on the call's stream."""
    made = request_of()
    cupy = gpu.cupy
    stream = cupy.cuda.Stream(non_blocking=True)
    final = cupy.asarray(made.blocks)
    out = cupy.empty_like(made.arrays[0])
    for turn in range(2):  # the first loads kernels and fills the pool of the stream
        blocks = cupy.zeros_like(final)
        cupy.cuda.Device().synchronize()
        with stream:
            gpu.stall(300 if turn else 1)
            blocks.data.copy_from_device_async(final.data, final.nbytes)
            made.mask = BlockMask.from_dense(blocks, made.mask.block_size, made.mask.shape)
            made.call(MMA, out=out)
            busy = not stream.done
        stream.synchronize()
        made.check(out, f"turn {turn}")
    assert busy, "the call waited for its stream"


@pytest.mark.parametrize("block", [(64, 64), (128, 128)])
def test_plans_that_are_made_while_the_host_waits(
    gpu: Any, request_of: Any, rng: Any, monkeypatch: pytest.MonkeyPatch, block: tuple[int, int]
) -> None:
    """With lists that are too short, and wrong guesses, in between."""
    monkeypatch.setattr(ahead, "LEAST_BYTES", 0)
    monkeypatch.setattr(ahead, "_guesses", {})
    made = request_of(block)
    kept_ahead = []
    settle = ahead.settle
    monkeypatch.setattr(
        ahead, "settle", lambda *given: kept_ahead.append(settle(*given)) or kept_ahead[-1]
    )
    # Where the same plan is chosen twice, the second mask keeps less, so that its lists have room.
    for density in (0.4, 0.3, 0.1, 0.99, 0.95, 0.9, 0.05, 0.05, 0.5, 0.3):
        blocks = rng.random(made.blocks.shape) < density
        there = gpu.cupy.asarray(blocks)
        made.mask = BlockMask.from_dense(there, made.mask.block_size, made.mask.shape)
        made.expect(blocks)
        gpu.poison()
        gpu.stall(5)
        made.check(made.call("auto"), f"{density}")
    assert any(plan is not None for plan in kept_ahead)
    assert any(plan is None for plan in kept_ahead)


@pytest.mark.parametrize("regime", [MMA, "auto"])
def test_another_stream_waits_for_the_plan(gpu: Any, request_of: Any, regime: str) -> None:
    made = request_of()
    cupy = gpu.cupy
    first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    for stream in (first, second):
        made.call(regime, stream=stream)
        stream.synchronize()
    final = made.blocks.copy()
    made.blocks[...] = False
    cupy.cuda.Device().synchronize()
    made.mask.refresh()
    with first:
        gpu.stall(100)
        made.blocks.data.copy_from_device_async(final.data, final.nbytes)
    made.call(regime, stream=first)
    out = made.call(regime, stream=second)  # the plan is the first's
    second.synchronize()
    made.check(out)


@pytest.mark.parametrize("regime", [MMA, "auto"])
def test_changes_in_place_are_seen_after_refresh(
    gpu: Any, request_of: Any, builds: list[Any], rng: Any, regime: str
) -> None:
    made = request_of()
    before = made.call(regime)
    changed = rng.random(made.blocks.shape) < 0.3
    made.blocks[...] = gpu.cupy.asarray(changed)
    assert (made.call(regime) == before).all()
    assert len(builds) == 1
    made.mask.refresh()
    made.expect(changed)
    made.check(made.call(regime))
    assert made.mask.nnz == changed.sum()
    assert len(builds) == 2


@pytest.mark.parametrize("kind", ["cupy", "torch"])
@pytest.mark.parametrize("regime", [MMA, "auto"])
def test_a_graph_follows_the_mask_s_contents(
    gpu: Any, request_of: Any, rng: Any, regime: str, kind: str
) -> None:
    made = request_of()
    cupy = gpu.cupy
    out = cupy.empty_like(made.arrays[0])
    if kind == "torch":
        torch = pytest.importorskip("torch")
        arrays = [torch.from_dlpack(x.view(cupy.int16)).view(torch.bfloat16) for x in made.arrays]
        target = torch.from_dlpack(out.view(cupy.int16)).view(torch.bfloat16)
    else:
        arrays, target = made.arrays, out
    run = partial(block_sparse_attention, *arrays, made.mask, regime=regime, out=target)
    run()
    cupy.cuda.Device().synchronize()
    gpu.pool.free_all_blocks()
    stream = cupy.cuda.Stream(non_blocking=True)
    if kind == "torch":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        replay = graph.replay
    else:
        with stream:
            stream.begin_capture()
            run()
            captured = stream.end_capture()
        replay = partial(captured.launch, stream)
    # Memory that the capture used must not be given to others, nor end with a refresh.
    made.mask.refresh()
    block_sparse_attention(*arrays, made.mask, regime=regime)
    gc.collect()
    others = [cupy.zeros(1 << size, np.uint8) for size in range(8, 24)]
    for turn in range(3):
        changed = rng.random(made.blocks.shape) < (0.1, 0.5, 0.9)[turn]
        made.blocks[...] = cupy.asarray(changed)
        out.view(cupy.uint16).fill(0x7FC0)
        cupy.cuda.Device().synchronize()
        replay()
        cupy.cuda.Device().synchronize()
        made.expect(changed)
        made.check(out, f"{regime} replay {turn}")
    assert not any(other.any() for other in others)


def test_memory_is_flat_over_ten_thousand_masks(gpu: Any, request_of: Any, rng: Any) -> None:
    made = request_of()
    cupy = gpu.cupy
    masks = [cupy.asarray(rng.random(made.blocks.shape) < p) for p in (0.05, 0.3, 0.6, 0.95)]
    out = cupy.empty_like(made.arrays[0])

    def request(turn: int) -> None:
        mask = BlockMask.from_dense(masks[turn % 4], made.mask.block_size, made.mask.shape)
        regime = "auto" if turn % 8 == 0 else MMA
        block_sparse_attention(*made.arrays, mask, regime=regime, out=out)

    for turn in range(200):
        request(turn)
    cupy.cuda.Device().synchronize()
    gc.collect()
    device, host = gpu.pool.total_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for turn in range(10_000):
        request(turn)
    cupy.cuda.Device().synchronize()
    assert gpu.pool.total_bytes() <= device
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - host < 32 << 10  # KiB


def test_kept_plans_are_bounded(
    gpu: Any, request_of: Any, builds: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = request_of()
    monkeypatch.setattr(kept, "KEPT_BYTES", 1)
    other = BlockMask.from_dense(made.blocks, made.mask.block_size, made.mask.shape)
    for _ in range(3):
        made.check(made.call(MMA))
        block_sparse_attention(*made.arrays, other, regime=MMA)
    assert len(builds) == 6


@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
def test_an_overflow_is_nan_and_then_has_room(
    gpu: Any, request_of: Any, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    monkeypatch.setattr(room, "LIST_BYTES", 240)
    monkeypatch.setattr(room, "_needs", room._Needs())
    made = request_of()
    arrays = made.arrays
    if layout == "BSHD":
        arrays = [gpu.cupy.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in arrays]
    plan = make_plan(made.mask, *arrays, regime=MMA, layout=layout)
    out, lse = plan.run(*arrays, return_lse=True)
    assert gpu.cupy.isnan(out.astype(np.float32)).all()
    assert gpu.cupy.isnan(lse).all()
    with pytest.raises(PlanOverflowError, match="NaN"):
        plan.check()
    out = plan.run(*arrays)
    plan.check()
    made.check(out if layout == "BHSD" else out.transpose(0, 2, 1, 3))


def test_bad_masks_are_reported(gpu: Any, request_of: Any) -> None:
    made = request_of((64, 64), (1, 1))
    cupy = gpu.cupy
    columns = cupy.zeros((7, 5), np.int64)
    columns[:, 1:] = cupy.asarray([3, 99, 2**40, -1])
    counts = cupy.full(7, 5, np.int32)
    counts[3] = 1000
    made.mask = BlockMask.from_lists(columns, counts, 31, (64, 64), made.mask.shape)
    plan = make_plan(made.mask, *made.arrays, regime=MMA)
    rest = np.zeros((7, 31), bool)
    rest[:, [0, 3]] = True
    made.expect(rest)
    made.check(plan.run(*made.arrays))
    with pytest.raises(ValueError, match=r"out of range.*count"):
        plan.check()
    with pytest.raises(ValueError, match=r"`mask`.*out of range.*count"):
        made.call("auto")
    with pytest.raises(ValueError, match="`counts`"):
        made.mask.check()


def test_a_mask_on_another_gpu_is_refused(gpu: Any, request_of: Any) -> None:
    cupy = gpu.cupy
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU")
    made = request_of()
    with cupy.cuda.Device(1):
        there = cupy.asarray(cupy.asnumpy(made.blocks))
    made.mask = BlockMask.from_dense(there, made.mask.block_size, made.mask.shape)
    for regime in (MMA, "auto"):
        with pytest.raises(ValueError, match=r"`mask`.*device 1"):
            made.call(regime)
    with cupy.cuda.Device(1):
        arrays = [cupy.asarray(x) for x in made.case.arrays]
    made.check(block_sparse_attention(*arrays, made.mask, regime=MMA))
    assert cupy.cuda.Device().id == 0


def test_a_profile_adds_up(request_of: Any) -> None:
    made = request_of()
    plan = make_plan(made.mask, *made.arrays, regime=MMA)
    found = plan.profile(*made.arrays)
    assert found.on_gpu
    for part in ("mask_state", "tiles", "tasks", "attention", "merge"):
        assert 0 < getattr(found, part) < 50, part
