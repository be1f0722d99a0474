"""Arrays as callers hold them, read into NumPy: hosts, GPUs, DLPack, lists; bools and integers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.errors import NoGpuError, install, wrong

# Device types of the DLPack standard whose memory the host can read as it is.
_DLPACK_HOST = (1, 3)
_DLPACK_CUDA = (2, 13)

_COMPARE_FLOATS = (
    "compare first: mask > 0 for floats of 0 and 1, mask == 0 for an additive mask (0 keeps, "
    "-inf drops)"
)


def to_host(array: Any, name: str) -> tuple[NDArray[Any], int | None]:
    """Bring an array to the host, and say which GPU it was on.

    Takes NumPy, CuPy and torch arrays, anything with ``__cuda_array_interface__``,
    DLPack or ``__array__``, and nested lists. A GPU array is copied after its
    device has been synchronised, so that work still pending on any stream is in
    the copy. A host array is returned without a copy where that is possible.

    Args:
        array: the array.
        name: argument name for error messages.

    Returns:
        The NumPy array, and the ordinal of its GPU or None.

    Raises:
        TypeError: the object is no array of bools or numbers.
        ValueError: a nested list is uneven.
        NoGpuError: the array is on a GPU and CuPy cannot be imported.

    Example:
        >>> to_host([[1, 0], [0, 1]], "mask")[0].shape
        (2, 2)
    """
    if isinstance(array, np.ndarray):
        return _checked(array, name), None
    if is_sparse(array):
        raise TypeError(
            wrong(
                name,
                "an array",
                f"a sparse {type(array).__name__}",
                "pass .toarray(), or a matrix of tokens to BlockMask.from_bsr",
            )
        )
    if _on_gpu(array):
        host, device = _from_gpu(array, name)
        return _checked(host, name), device
    if hasattr(array, "__dlpack__"):
        try:
            return _checked(np.from_dlpack(array), name), None
        except (BufferError, RuntimeError, TypeError, ValueError):
            # Old producers export no bool and no read-only data; __array__ serves them.
            pass
    try:
        host = np.asarray(_detached(array, name))
    except ValueError as error:
        raise ValueError(
            wrong(name, "an even array", f"an uneven list ({error})", "pad the rows to one length")
        ) from error
    if host.size == 0 and isinstance(array, (list, tuple)):
        host = host.astype(np.int32)  # an empty list says nothing of its type
    return _checked(host, name), None


def as_bools(array: NDArray[Any], name: str) -> NDArray[np.bool_]:
    """Read a bool or 0/1 integer array as bool (uint8 and int8 without a copy).

    Raises:
        TypeError: the dtype is neither bool nor integer.
        ValueError: an integer is neither 0 nor 1.
    """
    if array.dtype == np.bool_:
        return array
    if array.dtype.kind not in "iu":
        raise TypeError(
            wrong(
                name,
                "bool, or integers that are 0 or 1",
                f"dtype {array.dtype}",
                _COMPARE_FLOATS,
            )
        )
    if array.size and (array.min() < 0 or array.max() > 1):
        compare = "mask == 0 if 0 keeps and less drops" if array.min() < 0 else "mask != 0"
        raise ValueError(
            wrong(
                name,
                "only 0 and 1",
                f"values {array.min()} to {array.max()}",
                f"compare first, as in {compare}; packed bits go to from_packed_bits",
            )
        )
    return array.view(np.bool_) if array.dtype.itemsize == 1 else array.astype(np.bool_)


def as_integers(array: NDArray[Any], name: str) -> NDArray[Any]:
    """Check that an array holds integers, of any integer dtype.

    Raises:
        TypeError: the dtype is not an integer one.
    """
    if array.dtype.kind not in "iu":
        raise TypeError(wrong(name, "integers", f"dtype {array.dtype}", "cast to int32 first"))
    return array


def with_heads(array: NDArray[Any], rank: int, name: str, axes: str) -> NDArray[Any]:
    """Give an array its batch and head axes: ``rank`` trailing axes, up to two more before them.

    Raises:
        ValueError: too few or too many axes, or an empty batch or head axis.
    """
    if not rank <= array.ndim <= rank + 2:
        raise ValueError(
            wrong(
                name,
                f"shape ({axes}), (H, {axes}) or (B, H, {axes})",
                f"shape {array.shape}",
                "add axes, as in array[None], or drop some, as in array[0]",
            )
        )
    array = array.reshape((1,) * (rank + 2 - array.ndim) + array.shape)
    if 0 in array.shape[:2]:
        raise ValueError(
            wrong(
                name,
                "at least one batch and one head",
                f"shape {array.shape}",
                "use an axis of 1, which broadcasts",
            )
        )
    return array


def is_sparse(array: Any) -> bool:
    """Whether it is a sparse matrix or array, of SciPy or CuPy."""
    return hasattr(array, "tocsr")


def _checked(array: NDArray[Any], name: str) -> NDArray[Any]:
    if array.dtype.kind not in "biufc":
        raise _no_bools(name, array.dtype)
    return array


def _no_bools(name: str, dtype: Any) -> TypeError:
    expected = "an array of bools or integers (in a mask, 0 or 1)"
    fix = _COMPARE_FLOATS if "mask" in name else "convert it to integers, such as int32"
    return TypeError(wrong(name, expected, f"dtype {dtype}", fix))


def _on_gpu(array: Any) -> bool:
    if hasattr(array, "__cuda_array_interface__"):
        return True
    return hasattr(array, "__dlpack_device__") and int(array.__dlpack_device__()[0]) in _DLPACK_CUDA


def _from_gpu(array: Any, name: str) -> tuple[NDArray[Any], int]:
    try:
        import cupy
    except ImportError as error:
        raise NoGpuError(
            wrong(
                name,
                "CuPy, to read an array that is on a GPU",
                f"no CuPy ({error})",
                f"{install('cuda12')} (or cuda13), or copy the array to the host first",
            )
        ) from error
    try:
        if hasattr(array, "__cuda_array_interface__"):
            on_gpu = cupy.asarray(array)
        else:
            on_gpu = cupy.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError, ValueError):
        # Some frameworks' versions export no bool; their own copy to the host does.
        if not (hasattr(array, "detach") and hasattr(array, "cpu")):
            raise
        ordinal = int(array.__dlpack_device__()[1])
        cupy.cuda.Device(ordinal).synchronize()
        return np.asarray(_detached(array, name)), ordinal
    with cupy.cuda.Device(on_gpu.device.id) as device:
        device.synchronize()
        return cupy.asnumpy(on_gpu), int(device.id)


def _detached(array: Any, name: str) -> Any:
    if not (hasattr(array, "detach") and hasattr(array, "cpu")):
        return array
    try:
        return array.detach().cpu().numpy()
    except TypeError as error:  # NumPy has no bfloat16
        raise _no_bools(name, array.dtype) from error
