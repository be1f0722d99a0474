"""Arrays of other libraries, told apart and read by what they say of themselves."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tessera_cupy import BlockMask, NoGpuError, block_sparse_attention, interop, output
from tessera_cupy.interop import Operand

MASK = BlockMask.from_dense([[1, 0, 1], [0, 1, 1]], (64, 64), (100, 150))


def of(module: str, **attributes: Any) -> Any:
    """An object whose type claims to come from a module."""
    made = type("Array", (), {"__module__": module})()
    vars(made).update(attributes)
    return made


class Dlpack:
    """An array of a library that nobody knows: DLPack and its namespace are all it has."""

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array)
        self.shape, self.dtype = self.array.shape, self.array.dtype

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __array_namespace__(self) -> Any:
        return SimpleNamespace(from_dlpack=lambda x: Dlpack(np.from_dlpack(x)))


class TorchTensor:
    """The few methods of a host tensor of torch that are needed, over NumPy."""

    def __init__(self, array: Any, requires_grad: bool = False) -> None:
        self.array = array
        self.shape = array.shape
        self.dtype = f"torch.{array.dtype.name}"
        self.device = SimpleNamespace(type="cpu", index=None)
        self.requires_grad = requires_grad

    def detach(self) -> TorchTensor:
        return TorchTensor(self.array)

    def view(self, dtype: str) -> TorchTensor:
        return TorchTensor(self.array.view(dtype))

    def float(self) -> TorchTensor:
        return TorchTensor(self.array.astype(np.float32))

    def numpy(self) -> Any:
        if self.requires_grad or self.dtype == "torch.bfloat16":
            raise TypeError("as torch refuses")
        return self.array

    def to(self, dtype: str) -> TorchTensor:
        return TorchTensor(self.array.astype(interop.numpy_dtype(dtype)))

    def __setitem__(self, key: Any, value: TorchTensor) -> None:
        self.array[key] = value.array


TorchTensor.__module__ = "torch"


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for the module, whether torch is installed or not."""
    module = SimpleNamespace(
        from_numpy=TorchTensor,
        is_grad_enabled=lambda: module.grad,
        grad=True,
        int16="int16",
        **{name: name for name in interop.HOST_DTYPES},
    )
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


@pytest.mark.parametrize(
    ("array", "library"),
    [
        (np.zeros(1), "numpy"),
        (np.zeros(1).view(type("Mine", (np.ndarray,), {"__module__": "mine"})), "numpy"),
        (of("cupy"), "cupy"),
        (of("torch"), "torch"),
        (of("torch.nn.parameter"), "torch"),
        (type("Sub", (TorchTensor,), {"__module__": "mine"})(np.zeros(1)), "torch"),
        (of("jaxlib._jax"), "jax"),
        (of("jax._src.array"), "jax"),
        (Dlpack(np.zeros(1)), "dlpack"),
    ],
)
def test_libraries_are_told_apart(array: Any, library: str) -> None:
    assert interop.framework(array) == library


def test_what_jax_is_tracing_is_refused() -> None:
    tracer = type("Tracer", (), {"__module__": "jax._src.core"})
    traced = type("DynamicJaxprTracer", (tracer,), {"__module__": "jax._src.interpreters"})()
    array = np.zeros((1, 1, 100, 64), np.float32)
    for arrays in ((traced,) * 3, (array, traced, array)):
        with pytest.raises(TypeError, match=r"DynamicJaxprTracer.*outside of jax\.jit"):
            block_sparse_attention(*arrays, MASK)
    with pytest.raises(TypeError, match=r"outside of jax\.jit"):
        interop.framework(traced)  # also when its type is known already


@pytest.mark.parametrize("thing", [[0.0], 1.0, None, "q", object(), of("torchlike"), of("cupyx")])
def test_what_is_no_array_is_refused(thing: Any) -> None:
    with pytest.raises(TypeError, match="DLPack"):
        interop.framework(thing)


@pytest.mark.parametrize(
    ("kind", "host"), [((1, 0), True), ((3, 0), True), ((2, 1), False), ((13, 1), False)]
)
def test_dlpack_says_where_an_array_is(kind: tuple[int, int], host: bool) -> None:
    array = Dlpack(np.zeros(1))
    array.__dlpack_device__ = None  # type: ignore[assignment, method-assign]
    moved = type("Moved", (Dlpack,), {"__dlpack_device__": lambda self: kind})(np.zeros(1))
    assert interop.on_host(moved) == host
    if host:
        with pytest.raises(ValueError, match=r"`q`.*host memory"):
            interop.device_of(moved, "q")
    else:
        assert interop.device_of(moved, "q") == 1


def test_arrays_of_cupy_are_on_a_gpu() -> None:
    array = of("cupy", device=SimpleNamespace(id=1))
    assert not interop.on_host(array)
    assert interop.device_of(array, "q") == 1


@pytest.mark.parametrize(("kind", "part"), [((10, 0), "10"), ((8, 0), "8")], ids=["rocm", "metal"])
def test_other_devices_are_refused(kind: tuple[int, int], part: str) -> None:
    moved = type("Moved", (Dlpack,), {"__dlpack_device__": lambda self: kind})(np.zeros(1))
    with pytest.raises(TypeError, match=f"CUDA GPU.*{part}"):
        interop.on_host(moved)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(np.float16, "float16"), (ml_dtypes.bfloat16, "bfloat16"), (np.float64, "float64")],
)
def test_dtypes_by_name(dtype: Any, name: str) -> None:
    assert interop.dtype_name(np.zeros(1, dtype)) == name
    assert interop.dtype_name(of("torch", dtype=f"torch.{name}")) == name
    if name in interop.HOST_DTYPES:
        assert interop.numpy_dtype(name) == np.dtype(dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_host_tensors_of_torch(case: Any, torch: Any, dtype: str) -> None:
    case_ = case(MASK, kv_heads=2, dtype=dtype)
    tensors = [TorchTensor(x) for x in case_.arrays]
    out, lse = block_sparse_attention(*tensors, MASK, return_lse=True)
    assert isinstance(out, TorchTensor)
    assert isinstance(lse, TorchTensor)
    case_.check(out.array, lse.array)
    given = TorchTensor(np.full_like(case_.q, np.nan))
    assert block_sparse_attention(*tensors, MASK, out=given) is given
    np.testing.assert_array_equal(given.array, out.array)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_output_in_the_memory_of_other_host_tensors(case: Any, torch: Any, dtype: str) -> None:
    q, k, v = case(MASK, kv_heads=2, dtype=dtype).arrays
    square = BlockMask.from_dense([[1, 0], [0, 1]], (64, 64), (100, 100))
    tensors = {n: TorchTensor(x[:, :, :100]) for n, x in (("q", q), ("k", k), ("v", v))}
    for name in "kv":
        before = tensors[name].array.copy()
        with pytest.raises(ValueError, match=f"`out`.*memory that {name} uses"):
            block_sparse_attention(*tensors.values(), square, out=TorchTensor(tensors[name].array))
        np.testing.assert_array_equal(tensors[name].array, before)
    out = TorchTensor(tensors["q"].array)
    assert block_sparse_attention(*tensors.values(), square, out=out) is out
    expanded = TorchTensor(np.lib.stride_tricks.as_strided(q, out.shape, (0, 0, 64, 1)))
    with pytest.raises(ValueError, match=r"`out`.*elements that share"):
        block_sparse_attention(*tensors.values(), square, out=expanded)


def test_tensors_that_need_gradients_are_refused(case: Any, torch: Any) -> None:
    arrays = case(MASK, kv_heads=2).arrays
    for i, name in enumerate("qkv"):
        tensors = [TorchTensor(x, requires_grad=i == j) for j, x in enumerate(arrays)]
        with pytest.raises(ValueError, match=rf"`{name}`.*no backward.*torch.no_grad"):
            block_sparse_attention(*tensors, MASK)
        torch.grad = False
        block_sparse_attention(*tensors, MASK)
        torch.grad = True


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_host_arrays_of_an_unknown_library(case: Any, dtype: str) -> None:
    case_ = case(MASK, kv_heads=2, dtype=dtype)
    wrapped = [Dlpack(x) for x in case_.arrays]
    out, lse = block_sparse_attention(*wrapped, MASK, return_lse=True)
    assert isinstance(out, Dlpack)
    assert isinstance(lse, Dlpack)
    case_.check(out.array, lse.array)
    with pytest.raises(TypeError, match=r"`out`.*leave it out"):
        block_sparse_attention(*wrapped, MASK, out=Dlpack(np.zeros_like(case_.q)))


def test_dlpack_with_a_byte_offset(case: Any, offset_array: Any) -> None:
    case_ = case(MASK, kv_heads=2, dtype="float16")
    arrays = []
    for x in case_.arrays:
        buffer = np.full(x.size + 5, np.nan, np.float16)
        buffer[5:] = x.ravel()
        arrays.append(offset_array(buffer, buffer.ctypes.data, 10, x.shape, 1))
    case_.check(*block_sparse_attention(*arrays, MASK, return_lse=True))


def test_host_arrays_of_several_libraries(case: Any, torch: Any) -> None:
    case_ = case(MASK, kv_heads=2)
    q, k, v = case_.arrays
    out, lse = block_sparse_attention(q, TorchTensor(k), Dlpack(v), MASK, return_lse=True)
    assert type(out) is np.ndarray
    case_.check(out, lse)


def operand(
    pointer: int = 256,
    shape: tuple[int, ...] = (2, 3, 100, 64),
    strides: tuple[int, ...] = (19200, 6400, 64, 1),
) -> Operand:
    return Operand(pointer, shape, strides, "float16", 0, None)


@pytest.mark.parametrize(
    ("candidate", "aligned"),
    [
        (operand(), True),
        (operand(pointer=258), False),
        (operand(pointer=264), False),
        (operand(pointer=272), True),
        (operand(strides=(19200, 64, 192, 1)), True),  # heads inside rows
        (operand(strides=(0, 0, 64, 1)), True),  # expanded
        (operand(strides=(19200, 6400, 68, 1)), False),
        (operand(strides=(19204, 6400, 64, 1)), False),
        (operand(strides=(19200, 6400, -64, 1)), False),
        (operand(strides=(-19200, 6400, 64, 1)), False),
        (operand(strides=(19200, 6400, 1, 100)), False),
        (operand(strides=(38400, 12800, 128, 2)), False),
        (operand(strides=(1 << 40, 6400, 64, 1)), True),
        (operand(strides=(19200, 6400, 1 << 31, 1)), False),
        # Axes of one element have any stride.
        (operand(shape=(1, 1, 1, 64), strides=(3, 5, 7, 1)), True),
        (operand(shape=(1, 1, 100, 64), strides=(3, 5, 1 << 31, 1)), False),
        (operand(shape=(2, 3, 0, 64)), True),
    ],
)
def test_what_16_byte_copies_can_read(candidate: Operand, aligned: bool) -> None:
    assert interop.is_aligned(candidate) == aligned
    if aligned:
        assert interop.aligned(candidate) is candidate


def fake_cupy(devices: Any, driver: int = 12_090, status: int = 100) -> Any:
    """CuPy, built for CUDA 12.9, as far as finding a GPU and a stream goes."""

    class CUDARuntimeError(RuntimeError):
        def __init__(self, message: str) -> None:
            super().__init__(message)
            self.status = status

    class Stream:
        def __init__(self, pointer: int) -> None:
            self.ptr = pointer

        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, self.ptr

        def __enter__(self) -> Stream:
            return self

        def __exit__(self, *_: object) -> None: ...

        @classmethod
        def from_external(cls, other: Any) -> Stream:
            version, pointer = other.__cuda_stream__()
            assert version == 0
            return cls(pointer)

    def count() -> int:
        if isinstance(devices, str):
            raise CUDARuntimeError(devices)
        return int(devices)

    runtime = SimpleNamespace(
        getDeviceCount=count,
        driverGetVersion=lambda: driver,
        runtimeGetVersion=lambda: 12_090,
        CUDARuntimeError=CUDARuntimeError,
    )
    current = Stream(77)
    return SimpleNamespace(
        cuda=SimpleNamespace(
            runtime=runtime,
            Stream=Stream,
            Device=lambda ordinal: Stream(-1),
            get_current_stream=lambda device: current,
        )
    )


@pytest.mark.parametrize(
    ("cupy", "part"),
    [
        (None, r"not installed.*pip install '\.\[cuda12\]' in the project's folder"),
        (fake_cupy(0), r"shows no GPU \(no device\).*Fix: .*nvidia-smi.*CUDA_VISIBLE_DEVICES"),
        (fake_cupy("ErrorNoDevice"), r"shows no GPU \(ErrorNoDevice\).*Fix: .*nvidia-smi"),
        (
            fake_cupy("driver is insufficient", driver=0, status=35),
            r"here: there is no NVIDIA driver on this machine\. Fix: install the driver\.$",
        ),
        (
            fake_cupy("driver is insufficient", driver=11_080, status=35),
            r"here: the NVIDIA driver is for CUDA 11\.8, .*CuPy for CUDA 12\.9\. Fix: update",
        ),
    ],
    ids=["no CuPy", "no GPU", "no GPU, with an error", "no driver", "old driver"],
)
def test_without_a_gpu_there_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, cupy: Any, part: str
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with pytest.raises(NoGpuError, match=part):
        interop.import_cupy()
    tensor = of(
        "torch", shape=(1, 1, 100, 64), dtype="torch.float16", requires_grad=False,
        device=SimpleNamespace(type="cuda", index=99),
    )  # fmt: skip
    with pytest.raises(NoGpuError, match=part):
        block_sparse_attention(tensor, tensor, tensor, MASK)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = fake_cupy(1)
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


def test_streams_of_every_kind(cupy: Any) -> None:
    array = of("cupy")
    own = cupy.cuda.Stream(5)
    assert interop.cupy_stream(own, array, 0) is own
    for stream in (
        6,
        np.int64(6),
        of("torch", cuda_stream=6),
        type("Protocol", (), {"__cuda_stream__": lambda self: (0, 6)})(),
    ):
        found = interop.cupy_stream(stream, array, 0)
        assert isinstance(found, cupy.cuda.Stream)
        assert found.ptr == 6
    assert interop.cupy_stream(0, array, 0).ptr == 0


def test_the_current_stream_is_that_of_q(cupy: Any, torch: Any) -> None:
    torch.cuda = SimpleNamespace(current_stream=lambda device: of("torch", cuda_stream=10 + device))
    assert interop.cupy_stream(None, of("cupy"), 3).ptr == 77
    assert interop.cupy_stream(None, of("jaxlib"), 3).ptr == 77
    assert interop.cupy_stream(None, of("torch"), 3).ptr == 13


@pytest.mark.parametrize("stream", ["null", 1.5, object()])
def test_what_is_no_stream_is_refused(cupy: Any, stream: Any) -> None:
    with pytest.raises(TypeError, match=rf"`stream`.*{type(stream).__name__}"):
        interop.cupy_stream(stream, of("cupy"), 0)


def test_torch_follows_the_stream(cupy: Any, torch: Any) -> None:
    entered: list[Any] = []

    @contextmanager
    def switch(stream: Any) -> Iterator[None]:
        entered.append(stream)
        yield
        entered.pop()

    torch.cuda = SimpleNamespace(
        current_stream=lambda device: of("torch", cuda_stream=6),
        default_stream=lambda device: f"default of {device}",
        ExternalStream=lambda pointer, device: (pointer, device),
        stream=switch,
    )
    tensor, array = of("torch"), of("cupy")
    for stream, arrays, expected in (
        (None, (tensor,) * 3, []),
        (6, (tensor,) * 3, []),
        (7, (tensor,) * 3, [(7, 1)]),
        (7, (array, array, tensor), [(7, 1)]),
        (0, (tensor,) * 3, ["default of 1"]),
        (7, (array,) * 3, []),
    ):
        with interop.on_stream(stream, arrays, 1):
            assert entered == expected
        assert entered == []


def _flat(pointer: int, *shape: int) -> interop.Operand:
    strides = tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
    return interop.Operand(pointer, shape, strides, "float16", 0, None)


def apart(out: Operand, **inputs: Operand) -> bool:
    """Whether an output is taken beside these inputs."""
    try:
        output.check_apart(
            interop.device_memory(out), {n: interop.device_memory(x) for n, x in inputs.items()}
        )
    except ValueError:
        return False
    return True


def test_overlap_is_counted_in_bytes_to_the_last_element() -> None:
    k = _flat(1000, 1, 2, 4, 8)  # 64 elements, 128 bytes
    assert not apart(k, k=k)
    assert not apart(_flat(1126, 1, 1, 1, 8), k=k)
    assert apart(_flat(1128, 1, 1, 1, 8), k=k)
    assert not apart(_flat(986, 1, 1, 1, 8), k=k)
    assert apart(_flat(984, 1, 1, 1, 8), k=k)
    assert apart(_flat(1000, 1, 2, 0, 8), k=k)


def test_slices_of_one_packed_tensor_do_not_overlap() -> None:
    # (batch, sequence, 3, heads, dim): q, k and v lie between each other.
    strides = (100 * 3 * 32, 3 * 32, 8, 1)
    q, k, v = (
        Operand(4096 + 2 * 32 * part, (2, 100, 4, 8), strides, "float16", 0, None)
        for part in range(3)
    )
    assert apart(q, q=q, k=k, v=v)
    assert not apart(k, q=q, k=k, v=v)
    assert not apart(v, q=q, k=k, v=v)


def test_output_may_be_q_but_not_lie_elsewhere_in_it() -> None:
    q = _flat(4096, 1, 4, 4, 8)
    assert apart(q, q=q)
    assert apart(replace(q, pointer=q.pointer + 256), q=q)
    for moved in (-240, -64, 16, 64):  # other rows or columns of one buffer
        assert not apart(replace(q, pointer=q.pointer + moved), q=q)
    # The same elements, heads and rows exchanged.
    assert not apart(replace(q, strides=(128, 8, 32, 1)), q=q)
    # An axis of one element has any stride.
    assert apart(replace(q, strides=(0, 32, 8, 1)), q=q)


# What a call's checks depend on


def tensor(**changes: Any) -> Any:
    """A tensor of torch on a GPU, as far as calls look at it before a launch."""
    given = {
        "shape": (1, 2, 64, 32),
        "stride": lambda: (4096, 2048, 32, 1),
        "dtype": "torch.float16",
        "device": SimpleNamespace(type="cuda", index=0),
        "requires_grad": False,
        "data_ptr": lambda: 4096,
    }
    made = of("torch", **{**given, **changes})
    interop.framework(made)
    return made


def test_arrays_that_the_same_checks_allow_are_alike() -> None:
    first = interop.alike(tensor())
    assert first is not None
    assert hash(first) == hash(interop.alike(tensor(data_ptr=lambda: 8192)))
    assert interop.alike(tensor(data_ptr=lambda: 8192)) == first
    for changes in (
        {"shape": (1, 2, 32, 32)},
        {"stride": lambda: (4096, 32, 64, 1)},
        {"dtype": "torch.bfloat16"},
        {"device": SimpleNamespace(type="cuda", index=1)},
        {"data_ptr": lambda: 4098},
    ):
        assert interop.alike(tensor(**changes)) not in (None, first), changes
    # The rest is looked at each time: whether gradients are recorded may change.
    assert interop.alike(tensor(requires_grad=True)) is None
    assert interop.alike(tensor(device=SimpleNamespace(type="cpu", index=None))) is None
    assert interop.alike(np.zeros(3)) is None
    assert interop.address(tensor()) == 4096
    assert interop.address(np.zeros(3)) is None
