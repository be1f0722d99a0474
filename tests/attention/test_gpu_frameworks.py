"""CuPy, torch, JAX and DLPack: the caller's kind of array in and out, without a copy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tessera_cupy import BlockMask, block_sparse_attention, make_plan

pytestmark = pytest.mark.gpu

DTYPES = ("float16", "bfloat16")
LAYOUTS = ("BHSD", "BSHD")


@pytest.fixture
def draw(case: Any, random_mask: Any, rng: Any) -> Any:
    mask = random_mask(rng, (64, 64), (200, 330), axes=(1, 4))

    def draw(dtype: str, layout: str = "BHSD") -> Any:
        return case(
            mask, batch=2, kv_heads=2, shared=2, dim=128, dtype=dtype, layout=layout, rng=rng
        )

    return draw


def to_torch(case: Any, device: str = "cuda") -> list[Any]:
    """The inputs of a case as tensors of torch."""
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, case.q.dtype.name)
    return [torch.from_numpy(x.astype(np.float32)).to(device, dtype) for x in case.arrays]


def numpy_of(tensor: Any) -> Any:
    """A tensor of torch as a NumPy array of its dtype."""
    if str(tensor.dtype) == "torch.bfloat16":
        return tensor.cpu().float().numpy().astype(ml_dtypes.bfloat16)
    return tensor.cpu().numpy()


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture
def jax(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
    return jax


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_cupy(gpu: Any, draw: Any, dtype: str, layout: str) -> None:
    case = draw(dtype, layout)
    arrays = [gpu.cupy.asarray(x) for x in case.arrays]
    out, lse = block_sparse_attention(*arrays, case.mask, layout=layout, return_lse=True)
    for result, like in ((out, np.dtype(case.q.dtype)), (lse, np.dtype(np.float32))):
        assert isinstance(result, gpu.cupy.ndarray)
        assert result.dtype == like
        assert result.flags.c_contiguous
    case.check_kernel(gpu.cupy.asnumpy(out), gpu.cupy.asnumpy(lse))
    only = block_sparse_attention(*arrays, case.mask, layout=layout)
    np.testing.assert_array_equal(gpu.cupy.asnumpy(only), gpu.cupy.asnumpy(out))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch(gpu: Any, draw: Any, torch: Any, dtype: str, layout: str) -> None:
    case = draw(dtype, layout)
    tensors = to_torch(case)
    out, lse = block_sparse_attention(*tensors, case.mask, layout=layout, return_lse=True)
    assert (out.dtype, lse.dtype) == (tensors[0].dtype, torch.float32)
    assert out.device == lse.device == tensors[0].device
    assert not out.requires_grad
    case.check_kernel(numpy_of(out), numpy_of(lse))
    # CuPy and torch launch the same work on the same bytes.
    arrays = [gpu.cupy.asarray(x) for x in case.arrays]
    same = block_sparse_attention(*arrays, case.mask, layout=layout)
    np.testing.assert_array_equal(
        numpy_of(out).view(np.uint16), gpu.cupy.asnumpy(same).view(np.uint16)
    )
    given = torch.full_like(tensors[0], float("nan"))
    assert block_sparse_attention(*tensors, case.mask, layout=layout, out=given) is given
    assert torch.equal(given, out)


def test_torch_views(gpu: Any, draw: Any, torch: Any) -> None:
    case = draw("bfloat16")
    q, k, v = to_torch(case)

    def turned(x: Any) -> Any:
        return x.transpose(2, 3).contiguous().transpose(2, 3)

    def misaligned(x: Any) -> Any:
        moved = torch.full((x.numel() + 1,), float("nan"), dtype=x.dtype, device=x.device)
        return moved[1:].view(x.shape).copy_(x)

    def part(x: Any) -> Any:
        rows = x.shape[2]
        longer = torch.full((2, x.shape[1], rows + 9, 128), float("nan"), dtype=x.dtype)
        return longer.to(x.device)[:, :, 3 : 3 + rows].copy_(x)

    bshd = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    for label, views in {
        "transposed": (turned(q), turned(k), v),
        "v transposed": (q, k, turned(v)),
        "misaligned": (misaligned(q), misaligned(k), misaligned(v)),
        "parts": (part(q), part(k), part(v)),
        "the other layout's memory": bshd,
    }.items():
        out = block_sparse_attention(*views, case.mask)
        case.check_kernel(numpy_of(out), label=label)
    wide = [x[:, :1].expand(2, 2, -1, -1) for x in (k, v)]
    copied = [x.contiguous() for x in wide]
    assert torch.equal(
        block_sparse_attention(q, *wide, case.mask), block_sparse_attention(q, *copied, case.mask)
    )


def test_torch_gradients(draw: Any, torch: Any) -> None:
    case = draw("float16")
    q, k, v = to_torch(case)
    parameter = torch.nn.Parameter(q)
    with pytest.raises(ValueError, match=r"`q`.*torch\.no_grad"):
        block_sparse_attention(parameter, k, v, case.mask)
    with torch.no_grad():
        out = block_sparse_attention(parameter, k, v, case.mask)
    case.check_kernel(numpy_of(out))
    assert type(out) is torch.Tensor


def test_torch_stream_ordered_memory(draw: Any, torch: Any) -> None:
    # Temporaries die while their kernels still wait; what takes their memory must wait too.
    case = draw("float16")
    tensors = to_torch(case)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        results = []
        for _ in range(20):
            torch.cuda._sleep(2_000_000)
            late = [x.clone() for x in tensors]
            results.append(block_sparse_attention(*late, case.mask))
            del late
            torch.full_like(tensors[0], float("nan"))
    side.synchronize()
    for result in results:
        assert torch.equal(result, results[0])
    case.check_kernel(numpy_of(results[0]))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_jax(gpu: Any, draw: Any, jax: Any, dtype: str, layout: str) -> None:
    case = draw(dtype, layout)
    arrays = [jax.numpy.asarray(x) for x in case.arrays]
    out, lse = block_sparse_attention(*arrays, case.mask, layout=layout, return_lse=True)
    assert isinstance(out, jax.Array)
    assert isinstance(lse, jax.Array)
    assert (out.dtype, lse.dtype) == (arrays[0].dtype, np.float32)
    assert out.devices() == arrays[0].devices()
    case.check_kernel(np.asarray(out), np.asarray(lse))
    # A result of JAX can be computed with.
    np.testing.assert_array_equal(np.asarray(out + 0), np.asarray(out))
    with pytest.raises(TypeError, match="`out`"):
        block_sparse_attention(*arrays, case.mask, layout=layout, out=arrays[0])


@pytest.mark.parametrize("given", [False, True], ids=["current stream", "stream="])
def test_jax_waits_and_is_waited_for(gpu: Any, draw: Any, jax: Any, given: bool) -> None:
    case = draw("float16")
    arrays = [jax.numpy.asarray(x) for x in case.arrays]
    big = jax.numpy.ones((4096, 4096), np.float32) / 4096

    @jax.jit
    def late(x: Any, big: Any) -> Any:
        for _ in range(20):
            big = big @ big
        return x + (big[0, 0] > 2).astype(x.dtype)

    stream = gpu.cupy.cuda.Stream(non_blocking=True)
    arguments = {"stream": stream} if given else {}
    for _ in range(2):  # the second time nothing is compiled or uploaded
        q, k, v = (late(x, big) for x in arrays)
        out = block_sparse_attention(q, k, v, case.mask, **arguments)
        doubled = out + out
        case.check_kernel(np.asarray(out))
        np.testing.assert_array_equal(np.asarray(doubled), np.asarray(out) * np.float16(2))


def test_any_array_with_dlpack(gpu: Any, draw: Any, offset_array: Any) -> None:
    case = draw("float16")
    buffers, arrays = [], []
    for x, offset in zip(case.arrays, (2, 16, 160), strict=True):
        buffer = gpu.poisoned((x.size + 128,), x.dtype)
        buffer[offset // 2 : offset // 2 + x.size] = gpu.cupy.asarray(x).ravel()
        buffers.append(buffer)
        arrays.append(offset_array(buffer, buffer.data.ptr, offset, x.shape, 2))
    gpu.cupy.cuda.Device().synchronize()
    out, lse = block_sparse_attention(*arrays, case.mask, return_lse=True)
    assert isinstance(out, gpu.cupy.ndarray)
    case.check_kernel(gpu.cupy.asnumpy(out), gpu.cupy.asnumpy(lse))


@pytest.mark.usefixtures("torch")
@pytest.mark.parametrize("dtype", [*DTYPES, "float32"])
def test_host_tensors_of_torch_stay_on_the_host(draw: Any, dtype: str) -> None:
    case = draw(dtype)
    tensors = to_torch(case, "cpu")
    out, lse = block_sparse_attention(*tensors, case.mask, return_lse=True)
    assert out.device.type == lse.device.type == "cpu"
    assert out.dtype == tensors[0].dtype
    case.check(numpy_of(out), numpy_of(lse))


@pytest.mark.parametrize("dtype", [*DTYPES, "float32"])
def test_host_arrays_of_jax_stay_on_the_host(draw: Any, jax: Any, dtype: str) -> None:
    case = draw(dtype)
    cpu = jax.devices("cpu")[0]
    arrays = [jax.device_put(x, cpu) for x in case.arrays]
    out, lse = block_sparse_attention(*arrays, case.mask, return_lse=True)
    assert out.devices() == lse.devices() == {cpu}
    assert out.dtype == arrays[0].dtype
    case.check(np.asarray(out), np.asarray(lse))


def test_arrays_in_two_places(gpu: Any, draw: Any) -> None:
    case = draw("float16")
    q, k, v = case.arrays
    on_gpu = [gpu.cupy.asarray(x) for x in case.arrays]
    for arrays in ((q, on_gpu[1], v), (q, k, on_gpu[2]), (on_gpu[0], k, on_gpu[2])):
        with pytest.raises(ValueError, match="memory"):
            block_sparse_attention(*arrays, case.mask)
    with pytest.raises((TypeError, ValueError), match="`out`"):
        block_sparse_attention(*on_gpu, case.mask, out=q)
    wide = [x.astype(np.float32) for x in on_gpu]
    with pytest.raises(TypeError, match="float16 or bfloat16"):
        block_sparse_attention(*wide, case.mask)


@pytest.mark.parametrize("library", ["cupy", "cupy uint8", "torch", "torch on the host", "jax"])
def test_masks_from_every_library(
    gpu: Any, draw: Any, library: str, request: pytest.FixtureRequest
) -> None:
    case = draw("bfloat16")
    blocks = case.mask.to_dense()
    arrays = [gpu.cupy.asarray(x) for x in case.arrays]
    # Short last blocks: the host counts their tokens, a GPU blocks, so that the table may differ.
    plan = "attend_mma/q64k64/retain-pack/longest+split"
    expected = block_sparse_attention(*arrays, case.mask, regime=plan)
    expected = gpu.cupy.asnumpy(expected).view(np.uint16)
    if library == "jax":
        given = request.getfixturevalue("jax").numpy.asarray(blocks)
    elif library.startswith("torch"):
        given = request.getfixturevalue("torch").from_numpy(blocks)
        given = given if library == "torch on the host" else given.cuda()
    else:
        given = gpu.cupy.asarray(blocks.astype(np.uint8) if library == "cupy uint8" else blocks)
    mask = BlockMask.from_dense(given, (64, 64), case.mask.shape)
    host = library == "torch on the host"
    assert mask.device == (None if host else gpu.cupy.cuda.Device().id)
    out = gpu.cupy.asnumpy(block_sparse_attention(*arrays, mask, regime=plan))
    np.testing.assert_array_equal(out.view(np.uint16), expected)


@pytest.mark.parametrize("library", ["cupy", "torch", "jax", "numpy"])
def test_a_plan_runs_arrays_of_any_library(
    gpu: Any, draw: Any, library: str, request: pytest.FixtureRequest
) -> None:
    case = draw("bfloat16")
    arrays = [gpu.cupy.asarray(x) for x in case.arrays]
    plan = make_plan(case.mask, *arrays)
    assert plan.request.arch == gpu.arch
    if library == "cupy":
        case.check_kernel(gpu.cupy.asnumpy(plan.run(*arrays)))
    elif library == "torch":
        case.check_kernel(numpy_of(plan.run(*to_torch(case))))
    elif library == "jax":
        jax = request.getfixturevalue("jax")
        case.check_kernel(np.asarray(plan.run(*(jax.numpy.asarray(x) for x in case.arrays))))
    else:
        case.check(*plan.run(*case.arrays, return_lse=True))


def test_a_plan_for_another_gpu_is_refused(gpu: Any, draw: Any) -> None:
    case = draw("bfloat16")
    arrays = [gpu.cupy.asarray(x) for x in case.arrays]
    other = "sm_80" if gpu.arch.name != "sm_80" else "sm_89"
    with pytest.raises(ValueError, match=f"GPU of {other}"):
        make_plan(case.mask, *arrays, arch=other).run(*arrays)
