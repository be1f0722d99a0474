"""Work waits for what its stream has queued, and for nothing else; threads, graphs, two GPUs.

The inputs of each call are NaN until a kernel that takes long has run. A call that waited on the
host would prove nothing, so each test checks that its stream was still busy afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tessera_cupy import BlockMask, block_sparse_attention, make_plan
from tessera_cupy.kernels import launch

pytestmark = pytest.mark.gpu

PLANS = ("auto", "attend_mma/q64k64/retain-pack/longest+split")


class Protocol:
    """A stream that only speaks the CUDA stream protocol."""

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer


class Late:
    """Inputs on the GPU that a stream fills only after it was busy for a while."""

    def __init__(self, gpu: Any, case: Any, *, misaligned: bool = False) -> None:
        self.gpu, self.case = gpu, case
        self.sources = [gpu.cupy.asarray(x) for x in case.arrays]
        self.arrays = []
        for x in case.arrays:
            flat = gpu.poisoned((x.size + 8,), x.dtype)
            start = 1 if misaligned else 8
            self.arrays.append(flat[start : start + x.size].reshape(x.shape))
        gpu.cupy.cuda.Device().synchronize()  # non-blocking streams do not wait for this one

    def fill(self, stream: Any) -> None:
        """NaN at once; the inputs once the stream was busy for a while."""
        with stream:
            for array in self.arrays:
                array.data.memset_async(0xFF, array.nbytes)
            self.gpu.stall()
            for array, source in zip(self.arrays, self.sources, strict=True):
                array.data.copy_from_device_async(source.data, source.nbytes)

    def check(self, stream: Any, call: Callable[[], Any], label: str) -> None:
        """``call`` right after the stream was given its work; its result is O and LSE."""
        # Once on zeros: memory that a first call allocates could make it wait.
        with stream:
            for array in self.arrays:
                array.data.memset_async(0, array.nbytes)
        call()
        stream.synchronize()
        self.fill(stream)
        out, lse = call()
        assert not stream.done, f"{label}: the call waited for its inputs"
        stream.synchronize()
        to_numpy = self.gpu.cupy.asnumpy if hasattr(out, "get") else lambda x: x.cpu().numpy()
        self.case.check_kernel(to_numpy(out), to_numpy(lse), label)


@pytest.fixture
def made(case: Any, random_mask: Any, rng: Any) -> Any:
    mask = random_mask(rng, (64, 64), (300, 3000), axes=(1, 4), density=0.9)
    return case(mask, shared=2, dim=128, dtype="float16", rng=rng)


@pytest.fixture
def warm(gpu: Any, made: Any) -> None:
    """Plans uploaded and kernels loaded, so that calls have no reason to wait."""
    arrays = [gpu.cupy.asarray(x) for x in made.arrays]
    for plan in PLANS:
        block_sparse_attention(*arrays, made.mask, regime=plan, return_lse=True)
        # What copies of misaligned arrays need.
        shifted = [Late(gpu, made, misaligned=True).arrays[0], *arrays[1:]]
        block_sparse_attention(*shifted, made.mask, regime=plan)
    gpu.stall(1)
    gpu.cupy.cuda.Device().synchronize()


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("misaligned", [False, True], ids=["in place", "copied"])
@pytest.mark.parametrize("plan", PLANS)
def test_cupy_arrays(gpu: Any, made: Any, plan: str, misaligned: bool) -> None:
    stream = gpu.cupy.cuda.Stream(non_blocking=True)
    late = Late(gpu, made, misaligned=misaligned)

    def call(**given: Any) -> Any:
        return block_sparse_attention(
            *late.arrays, made.mask, regime=plan, return_lse=True, **given
        )

    def on_current() -> Any:
        with stream:
            return call()

    late.check(stream, on_current, "the current stream")
    for given in (stream, stream.ptr, np.int64(stream.ptr), Protocol(stream.ptr)):
        late.check(stream, lambda given=given: call(stream=given), f"stream={given!r}")


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("misaligned", [False, True], ids=["in place", "copied"])
@pytest.mark.parametrize("plan", PLANS)
def test_torch_tensors(gpu: Any, made: Any, plan: str, misaligned: bool) -> None:
    torch = pytest.importorskip("torch")
    side = torch.cuda.Stream()
    stream = gpu.cupy.cuda.Stream.from_external(Protocol(side.cuda_stream))
    late = Late(gpu, made, misaligned=misaligned)
    tensors = [torch.from_dlpack(x) for x in late.arrays]
    assert [x.data_ptr() for x in tensors] == [x.data.ptr for x in late.arrays]

    def call(**given: Any) -> Any:
        return block_sparse_attention(*tensors, made.mask, regime=plan, return_lse=True, **given)

    def on_current() -> Any:
        with torch.cuda.stream(side):
            return call()

    call()
    torch.cuda.synchronize()
    late.check(stream, on_current, "torch's current stream")
    for given in (side, side.cuda_stream, stream, Protocol(side.cuda_stream)):
        late.check(stream, lambda given=given: call(stream=given), f"stream={given!r}")
        assert torch.cuda.current_stream() == torch.cuda.default_stream()


@pytest.mark.usefixtures("warm")
def test_the_null_stream_for_tensors_on_another(gpu: Any, made: Any) -> None:
    torch = pytest.importorskip("torch")
    null = gpu.cupy.cuda.Stream.null
    late = Late(gpu, made, misaligned=True)
    tensors = [torch.from_dlpack(x) for x in late.arrays]
    other = torch.cuda.Stream()

    def call() -> Any:
        with torch.cuda.stream(other):
            return block_sparse_attention(*tensors, made.mask, return_lse=True, stream=null)

    call()
    torch.cuda.synchronize()
    late.check(null, call, "stream=null")


def test_the_current_stream_and_device_are_unchanged(gpu: Any, made: Any) -> None:
    cuda = gpu.cupy.cuda
    arrays = [gpu.cupy.asarray(x) for x in made.arrays]
    before = cuda.get_current_stream().ptr, cuda.Device().id
    block_sparse_attention(*arrays, made.mask, stream=cuda.Stream(non_blocking=True))
    with pytest.raises(TypeError, match="`stream`"):
        block_sparse_attention(*arrays, made.mask, stream="fast")
    assert (cuda.get_current_stream().ptr, cuda.Device().id) == before


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_a_mask_that_is_still_being_written(gpu: Any, case: Any, rng: Any, library: str) -> None:
    final = rng.random((2, 5, 7)) < 0.5
    final[..., 0] = True
    stream = gpu.cupy.cuda.Stream(non_blocking=True)
    source, blocks = gpu.cupy.asarray(final), gpu.cupy.zeros(final.shape, bool)
    given = blocks
    if library == "torch":
        torch = pytest.importorskip("torch")
        given = torch.zeros(final.shape, dtype=torch.uint8, device="cuda")
        blocks = gpu.cupy.asarray(given).view(bool)
        given = given.view(torch.bool)
    gpu.stall(1)
    gpu.cupy.cuda.Device().synchronize()
    with stream:
        gpu.stall(200)
        blocks.data.copy_from_device_async(source.data, source.nbytes)
    assert not stream.done
    mask = BlockMask.from_dense(given, (64, 64), (300, 400))
    np.testing.assert_array_equal(mask.to_dense()[0], final)
    assert mask.device == gpu.cupy.cuda.Device().id
    gpu.run(case(mask, dtype="bfloat16", rng=rng))


@pytest.mark.parametrize("plan", PLANS)
def test_a_graph_replays_on_new_contents(gpu: Any, case: Any, made: Any, plan: str) -> None:
    cupy = gpu.cupy
    arrays = [cupy.asarray(x) for x in made.arrays]
    prepared = make_plan(made.mask, *arrays, regime=plan)
    out = gpu.poisoned(made.q.shape, made.q.dtype)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        prepared.run(*arrays, out=out)
        stream.synchronize()
        stream.begin_capture()
        prepared.run(*arrays, out=out)
        graph = stream.end_capture()
    for turn in range(3):
        fresh = case(made.mask, shared=2, dim=128, dtype="float16",
                     rng=np.random.default_rng(turn))  # fmt: skip
        with stream:
            for array, source in zip(arrays, fresh.arrays, strict=True):
                array.set(source)
            out.data.memset_async(0xFF, out.nbytes)
            graph.launch(stream)
            stream.synchronize()
        fresh.check_kernel(cupy.asnumpy(out), label=f"{plan}, replay {turn}")


@pytest.mark.parametrize("misaligned", [False, True], ids=["in place", "copied"])
def test_a_replay_leaves_the_memory_of_others_alone(gpu: Any, made: Any, misaligned: bool) -> None:
    cupy = gpu.cupy
    arrays = [cupy.asarray(x) for x in made.arrays]
    if misaligned:
        arrays[0] = gpu.poisoned((made.q.size + 1,), made.q.dtype)[1:].reshape(made.q.shape)
        arrays[0].set(made.q)
    prepared = make_plan(made.mask, *arrays, regime=PLANS[1])
    assert prepared.tasks().slots > 0
    out = gpu.poisoned(made.q.shape, made.q.dtype)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        prepared.run(*arrays, out=out)
        stream.synchronize()
        stream.begin_capture()
        prepared.run(*arrays, out=out)
        graph = stream.end_capture()
        # Whatever the captured run returned to the pool is given out again here.
        others = [cupy.zeros(size, np.uint8) for size in [1 << n for n in range(9, 23)] * 4]
        s = prepared.summary()["bytes"]["workspace"]
        others += [cupy.zeros(n, np.uint8) for n in (s - 2 * s // 130, s, made.q.nbytes)]
        graph.launch(stream)
        stream.synchronize()
    made.check_kernel(cupy.asnumpy(out), label="replay")
    assert not any(other.any() for other in others)


@pytest.mark.parametrize("plan", PLANS)
def test_a_graph_of_torch(gpu: Any, made: Any, plan: str) -> None:
    torch = pytest.importorskip("torch")
    tensors = [torch.from_numpy(x).cuda() for x in made.arrays]
    prepared = make_plan(made.mask, *tensors, regime=plan)
    out = torch.full_like(tensors[0], float("nan"))
    prepared.run(*tensors, out=out)
    torch.cuda.synchronize()
    gpu.pool.free_all_blocks()  # a workspace must come from the driver, in torch's strict capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepared.run(*tensors, out=out)
    for _ in range(2):
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        made.check_kernel(out.cpu().numpy(), label=plan)


def test_a_plan_may_end_before_its_work(gpu: Any, made: Any) -> None:
    cupy = gpu.cupy
    arrays = [cupy.asarray(x) for x in made.arrays]
    out = gpu.poisoned(made.q.shape, made.q.dtype)
    cupy.cuda.Device().synchronize()
    first, side = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    plan = make_plan(made.mask, *arrays, regime=PLANS[1])
    for stream in (first, side):  # the first gets the plan's arrays from its part of the pool
        plan.run(*arrays, out=out, stream=stream)
        stream.synchronize()
    uploaded = plan._prepared.on_device(plan.mask, cupy.cuda.Device().id)
    sizes = [x.nbytes for x in vars(uploaded).values() if hasattr(x, "nbytes")]
    with side:
        out.data.memset_async(0xFF, out.nbytes)
        gpu.stall()
    plan.run(*arrays, out=out, stream=side)
    del plan, uploaded
    with first:
        # What the plan gave back, if anything, is given out again here.
        others = [cupy.zeros(size, np.uint8) for size in sizes]
    first.synchronize()
    assert not side.done
    side.synchronize()
    made.check_kernel(cupy.asnumpy(out), label="a plan that ended")
    assert not any(other.any() for other in others)


def test_memory_of_plans_that_ran_on_two_streams_comes_back(gpu: Any, made: Any) -> None:
    cupy = gpu.cupy
    arrays = [cupy.asarray(x) for x in made.arrays]
    out = cupy.empty_like(arrays[0])
    side = cupy.cuda.Stream(non_blocking=True)
    used = []
    for _ in range(20):
        plan = make_plan(made.mask, *arrays, regime=PLANS[1])
        for given in ({}, {"stream": side}):
            plan.run(*arrays, out=out, **given)
        del plan
        side.synchronize()
        used.append(gpu.pool.used_bytes())
    assert used[-1] <= used[1]


def test_sixteen_threads_load_each_kernel_once(
    gpu: Any, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cupy = gpu.cupy
    arrays = [cupy.asarray(x) for x in made.arrays]
    monkeypatch.setattr(launch, "_loaded", {})
    loads, module = [], cupy.RawModule

    def counted(**arguments: Any) -> Any:
        loads.append(arguments["path"])
        return module(**arguments)

    monkeypatch.setattr(cupy, "RawModule", counted)
    mask = replace(made.mask)  # nothing is prepared for it
    cupy.cuda.Device().synchronize()
    barrier = threading.Barrier(16)
    results: list[Any] = []

    def call() -> None:
        with cupy.cuda.Stream(non_blocking=True) as stream:
            barrier.wait()
            result = block_sparse_attention(*arrays, mask, regime=PLANS[1])
            stream.synchronize()
            results.append(cupy.asnumpy(result))

    threads = [threading.Thread(target=call) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loads) == len(set(loads)) == 2  # attention and merge
    assert len(results) == 16
    for result in results:
        made.check_kernel(result, label="thread")


def test_the_second_gpu(gpu: Any, case: Any, made: Any) -> None:
    cupy = gpu.cupy
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU")
    here = [cupy.asarray(x) for x in made.arrays]
    with cupy.cuda.Device(1):
        there = [cupy.asarray(x) for x in made.arrays]
        mask_there = BlockMask.from_dense(cupy.asarray(made.mask.to_dense()), (64, 64), (300, 3000))
    out = block_sparse_attention(*there, made.mask)
    assert cupy.cuda.Device().id == 0
    assert out.device.id == 1
    made.check_kernel(cupy.asnumpy(out))
    made.check_kernel(cupy.asnumpy(block_sparse_attention(*here, made.mask)))
    made.check_kernel(cupy.asnumpy(block_sparse_attention(*there, mask_there)))
    with pytest.raises(ValueError, match=r"`k`.*device 0.*device 1"):
        block_sparse_attention(here[0], *there[1:], made.mask)
    with pytest.raises(ValueError, match=r"`mask`.*device 1"):
        block_sparse_attention(*here, mask_there)
