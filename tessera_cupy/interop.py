"""Tensors of any framework: what the kernels need to know of them, and the way back.

CuPy and torch tensors are read in place; every other GPU array (JAX and whatever speaks
DLPack) is taken over by CuPy without a copy. Host arrays (NumPy, torch and JAX on the CPU)
become NumPy arrays for the executor. Results come back as the caller's kind.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tessera_cupy.errors import NoGpuError, install, wrong

#: Element types that the kernels compute in.
GPU_DTYPES = ("float16", "bfloat16")
#: Element types that the NumPy executor takes.
HOST_DTYPES = ("float16", "bfloat16", "float32")

# Device types of the DLPack standard: memory that the host reads, and that of CUDA GPUs.
_DLPACK_HOST = (1, 3)
_DLPACK_CUDA = (2, 13)
_INSUFFICIENT_DRIVER = 35  # cudaErrorInsufficientDriver, also where there is no driver


@dataclass(frozen=True)
class Operand:
    """A tensor in the memory of one GPU.

    Attributes:
        pointer: device address of the first element, byte offset included.
        shape, strides: both in elements.
        dtype: ``"float16"``, ``"bfloat16"``, ...
        device: CUDA device ordinal.
        owner: the object that keeps the memory alive.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: int
    owner: Any


def framework(array: Any) -> str:
    """``"numpy"``, ``"cupy"``, ``"torch"``, ``"jax"``, or ``"dlpack"`` for any other array.

    Raises:
        TypeError: for an object that is no array at all, or that JAX is tracing.
    """
    kind = type(array)
    if kind not in _libraries:
        _libraries[kind] = _library(kind)
    library = _libraries[kind]
    if library == _TRACED:
        raise TypeError(
            wrong(
                "q, k, v, out",
                "arrays with values",
                f"a {kind.__name__}, which stands for one while JAX traces a function",
                "make the call outside of jax.jit, jax.vmap and jax.grad",
            )
        )
    if library is not None:
        return library
    if hasattr(array, "__dlpack__"):
        return "dlpack"
    fix = "convert it, for example with cupy.asarray"
    if isinstance(array, (tuple, list)):
        fix += '; to plan from a shape alone, give make_plan an ArraySpec(shape, "bfloat16")'
    raise TypeError(
        wrong(
            "q, k, v, out",
            "CuPy, torch, JAX or NumPy arrays, or any array with DLPack",
            type(array).__name__,
            fix,
        )
    )


_TRACED = "traced by jax"

# What _library found; a request asks some thirty times.
_libraries: dict[type[Any], str | None] = {}


def _library(kind: type[Any]) -> str | None:
    """The library that an array type, or one that it derives from, belongs to."""
    for base in kind.__mro__:
        root = base.__module__.partition(".")[0]
        if root in ("jax", "jaxlib"):
            traced = any(parent.__name__ == "Tracer" for parent in kind.__mro__)
            return _TRACED if traced else "jax"
        if root in ("numpy", "cupy", "torch"):
            return root
    return None


def on_host(array: Any) -> bool:
    """Whether the array lies in host memory, rather than in that of a CUDA GPU.

    Raises:
        TypeError: it lies in neither.
    """
    kind = framework(array)
    if kind in ("numpy", "cupy"):
        return kind == "numpy"
    if kind == "torch":
        where = array.device.type
        host, gpu = bool(where == "cpu"), bool(where == "cuda")
    else:
        where = int(array.__dlpack_device__()[0])
        host, gpu = where in _DLPACK_HOST, where in _DLPACK_CUDA
        where = f"DLPack device type {where}"
    if not (host or gpu):
        raise TypeError(
            wrong(
                "q, k, v, out", "arrays in host memory or on a CUDA GPU", where, "copy them there"
            )
        )
    return host


def dtype_name(array: Any) -> str:
    """The element type by its NumPy name, without the framework's prefix."""
    return str(array.dtype).rpartition(".")[2]


def import_cupy() -> Any:
    """CuPy with at least one usable GPU.

    Raises:
        NoGpuError: CuPy is not installed, or no driver or GPU can be used.
    """
    try:
        import cupy
    except ImportError as error:
        raise NoGpuError(
            "CuPy is not installed, so nothing can run on a GPU. Install the extra that fits the "
            f"driver, cuda12 or cuda13: {install('cuda12')}."
        ) from error
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise NoGpuError(_no_gpu(cupy.cuda.runtime, error)) from error
    if count == 0:
        raise NoGpuError(_no_gpu(cupy.cuda.runtime, None))
    return cupy


def _no_gpu(runtime: Any, error: Exception | None) -> str:
    """Why CuPy finds no GPU, and what to do; its own words are the same for several causes."""
    driver, needed = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    if driver == 0:
        reason, fix = "there is no NVIDIA driver on this machine", "install the driver"
    elif getattr(error, "status", None) == _INSUFFICIENT_DRIVER:
        reason = (
            f"the NVIDIA driver is for CUDA {_dotted(driver)}, and the installed CuPy for CUDA "
            f"{_dotted(needed)}"
        )
        fix = "update the driver, or install the CuPy that fits it"
    else:
        reason = f"the NVIDIA driver shows no GPU ({error or 'no device'})"
        fix = "see what nvidia-smi lists, and what CUDA_VISIBLE_DEVICES hides"
    return f"No CUDA GPU can be used here: {reason}. Fix: {fix}."


def _dotted(version: int) -> str:
    """CUDA's version number, 12090, as 12.9."""
    return f"{version // 1000}.{version % 1000 // 10}"


def device_of(array: Any, name: str) -> int:
    """Ordinal of the GPU that an array is on.

    Raises:
        ValueError: the array is not in GPU memory.
    """
    if on_host(array):
        raise ValueError(
            wrong(name, "an array on q's GPU", "an array in host memory", "copy it to the GPU")
        )
    kind = framework(array)
    if kind == "cupy":
        return int(array.device.id)
    if kind == "torch":
        return int(array.device.index)
    return int(array.__dlpack_device__()[1])


def device_operand(array: Any, name: str) -> Operand:
    """A GPU array as an :class:`Operand`, without a copy.

    Arrays that are neither CuPy's nor torch's go through DLPack, which orders CuPy's current
    stream behind the work that produced them.

    Raises:
        ValueError: the array is not in GPU memory.
    """
    device, kind = device_of(array, name), framework(array)
    if kind == "torch":
        return Operand(
            array.data_ptr(),
            tuple(array.shape),
            tuple(array.stride()),
            dtype_name(array),
            device,
            array,
        )
    if kind != "cupy":
        array = import_cupy().from_dlpack(array)
    size = array.dtype.itemsize
    return Operand(
        array.data.ptr,
        array.shape,
        tuple(stride // size for stride in array.strides),
        array.dtype.name,
        device,
        array,
    )


def alike(array: Any) -> tuple[Any, ...] | None:
    """All that a call's checks ask of a CuPy array or torch tensor but its address.

    Returns:
        The same for arrays that the same checks allow; None where they must be made each time.
    """
    kind = _libraries.get(type(array))
    if kind == "cupy":
        at = array.data.ptr % 16
        return kind, array.shape, array.strides, array.dtype, array.device.id, at
    if kind == "torch" and array.device.type == "cuda" and not array.requires_grad:
        at = array.data_ptr() % 16
        return kind, array.shape, array.stride(), array.dtype, array.device.index, at
    return None


def address(array: Any) -> int | None:
    """Device address of a CuPy array or torch tensor; None for others."""
    kind = _libraries.get(type(array))
    if kind == "cupy":
        return int(array.data.ptr)
    return int(array.data_ptr()) if kind == "torch" else None


def is_aligned(operand: Operand) -> bool:
    """Whether the kernels' 16-byte copies can read it.

    That is: contiguous last axis, address and strides in whole 16 bytes, no negative stride, and
    rows less than 4 GiB apart. Zero strides, as of expanded heads, are right for what is only
    read: q, k and v.
    """
    *outer, last = operand.strides
    lengths = operand.shape[:-1]
    used = [stride for stride, length in zip(outer, lengths, strict=True) if length > 1]
    inside = [stride for stride, length in zip(outer[1:], lengths[1:], strict=True) if length > 1]
    return (
        (last == 1 or operand.shape[-1] == 1)
        and operand.pointer % 16 == 0
        and all(stride % 8 == 0 and stride >= 0 for stride in used)
        and all(stride < 2**31 for stride in inside)
    )


class _Layout:
    """An operand's addresses as NumPy sees them; nothing reads the memory behind them."""

    def __init__(self, operand: Operand) -> None:
        size = numpy_dtype(operand.dtype).itemsize
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"<u{size}",
            "data": (operand.pointer, True),
            "shape": operand.shape,
            "strides": tuple(size * stride for stride in operand.strides),
        }


def device_memory(operand: Operand) -> NDArray[Any]:
    """Where an operand lies, to compare with others; not to be read."""
    return np.asarray(_Layout(operand))


def host_memory(array: Any) -> NDArray[Any]:
    """The same of a host array: without a copy, and so not always of the array's dtype."""
    if framework(array) == "torch" and dtype_name(array) == "bfloat16":
        array = array.detach().view(sys.modules["torch"].int16)
    return host_array(array)


def aligned(operand: Operand) -> Operand:
    """The operand itself, or a contiguous copy where its rows cannot be read 16 bytes at a time."""
    return operand if is_aligned(operand) else contiguous(operand)


def contiguous(operand: Operand) -> Operand:
    """A C-contiguous copy, made on the current stream."""
    if framework(operand.owner) == "torch":
        # A view that starts off a 16-byte boundary may be contiguous already.
        copy = operand.owner.clone(memory_format=sys.modules["torch"].contiguous_format)
    else:
        copy = operand.owner.copy(order="C")
    return device_operand(copy, "copy")


def check_no_gradient(name: str, array: Any) -> None:
    """Refuse a torch tensor that autograd would have to follow: only the forward exists.

    Raises:
        ValueError: gradients are being recorded for the array.
    """
    if framework(array) != "torch":
        return
    if array.requires_grad and sys.modules["torch"].is_grad_enabled():
        raise ValueError(
            wrong(
                name,
                "a tensor that needs no gradient (there is no backward pass)",
                "requires_grad=True",
                "call it under torch.no_grad(), or pass a detached tensor",
            )
        )


def empty(like: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """An uninitialised GPU array of ``like``'s framework and device; CuPy's where there is none."""
    if framework(like) == "torch":
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)
    return import_cupy().empty(shape, dtype=numpy_dtype(dtype))


def returned(result: Any, like: Any) -> Any:
    """A CuPy, NumPy or torch result as an array of ``like``'s framework, without a copy.

    To be called where the stream that writes the result is current.
    """
    kind = framework(like)
    if kind == "jax":
        return importlib.import_module("jax.dlpack").from_dlpack(result)
    if kind == "dlpack" and hasattr(like, "__array_namespace__"):
        return like.__array_namespace__().from_dlpack(result)
    return result


class _Stream:
    """A CUDA stream by its address, in the form that CuPy takes over."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._pointer


def cupy_stream(stream: Any, like: Any, device: int) -> Any:
    """The stream to launch on, as CuPy's: ``stream`` when given, else the framework's current one.

    ``stream`` is a CuPy or torch stream, an object with ``__cuda_stream__``, or an address.

    Raises:
        TypeError: ``stream`` is none of these.
    """
    cupy = import_cupy()
    if stream is None:
        if framework(like) != "torch":
            return cupy.cuda.get_current_stream(device)
        stream = sys.modules["torch"].cuda.current_stream(device)
    if isinstance(stream, cupy.cuda.Stream):
        return stream
    if isinstance(stream, (int, np.integer)):
        stream = _Stream(int(stream))
    elif hasattr(stream, "cuda_stream"):
        stream = _Stream(int(stream.cuda_stream))
    if not hasattr(stream, "__cuda_stream__"):
        raise TypeError(
            wrong(
                "stream",
                "a CuPy or torch stream, an object with __cuda_stream__, or an address",
                type(stream).__name__,
                "pass cupy.cuda.get_current_stream(), for example",
            )
        )
    return cupy.cuda.Stream.from_external(stream)


@contextmanager
def on_stream(stream: Any, arrays: tuple[Any, ...], device: int) -> Iterator[None]:
    """Make the device and the stream to launch on current, for CuPy and for torch's tensors.

    Copies and new arrays are then ordered with the launch, and so is what DLPack exchanges.

    Args:
        stream: as in :func:`cupy_stream`.
        arrays: q, k and v; q's framework has the current stream.
        device: CUDA device ordinal.
    """
    of_cupy = stream is None and all(framework(array) == "cupy" for array in arrays)
    if of_cupy and sys.modules["cupy"].cuda.runtime.getDevice() == device:
        yield  # they go with its current stream, which is the device's already
        return
    chosen = cupy_stream(stream, arrays[0], device)
    with import_cupy().cuda.Device(device), chosen:
        if not any(framework(array) == "torch" for array in arrays):
            yield
            return
        cuda = sys.modules["torch"].cuda
        if cuda.current_stream(device).cuda_stream == chosen.ptr:
            yield
            return
        # torch takes address 0 for a stream of its own.
        external = cuda.ExternalStream(chosen.ptr, device=device) if chosen.ptr else None
        with cuda.stream(external or cuda.default_stream(device)):
            yield


def host_array(array: Any) -> NDArray[Any]:
    """A host array as NumPy; torch's bfloat16 becomes float32, which holds every value."""
    if framework(array) == "torch":
        tensor = array.detach()
        if dtype_name(tensor) == "bfloat16":
            tensor = tensor.float()
        result: NDArray[Any] = tensor.numpy()
        return result
    if not hasattr(array, "__array__"):
        return np.from_dlpack(array)
    return np.asarray(array)


def host_result(result: NDArray[np.float32], like: Any, dtype: str) -> Any:
    """The executor's float32 result in ``like``'s framework, as ``dtype``."""
    kind = framework(like)
    if kind == "torch":
        torch = sys.modules["torch"]
        return torch.from_numpy(np.ascontiguousarray(result)).to(getattr(torch, dtype))
    result = result.astype(numpy_dtype(dtype))
    if kind == "jax":
        return importlib.import_module("jax").device_put(result, like.sharding)
    return returned(result, like)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a name; bfloat16 is that of ml_dtypes, which CuPy and JAX share."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
