"""The GPUs of this machine, asked of the driver itself.

CuPy would tell the same, but a report on a broken installation cannot depend on it, and
compiling for the GPU that is here does not need it.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from tessera_cupy.errors import NoGpuError

_LIBRARY = "libcuda.so.1"
_MULTIPROCESSORS, _MAJOR, _MINOR = 16, 75, 76  # CUdevice_attribute


class Device(NamedTuple):
    """One GPU; ``memory`` in bytes."""

    ordinal: int
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    memory: int


def driver_cuda() -> tuple[int, int]:
    """Newest CUDA version that the installed driver serves.

    Raises:
        NoGpuError: There is no driver.
    """
    version = ctypes.c_int()
    _call(_driver(), "cuDriverGetVersion", ctypes.byref(version))
    return version.value // 1000, version.value % 1000 // 10


def devices() -> list[Device]:
    """Every GPU that the process may use (``CUDA_VISIBLE_DEVICES`` counts).

    Raises:
        NoGpuError: There is no driver, or none that works, or no GPU.
    """
    driver = _driver()
    _call(driver, "cuInit", ctypes.c_uint(0))
    count = ctypes.c_int()
    _call(driver, "cuDeviceGetCount", ctypes.byref(count))
    if not count.value:
        raise NoGpuError("the NVIDIA driver shows no GPU to this process")
    return [_device(driver, index) for index in range(count.value)]


def _device(driver: ctypes.CDLL, index: int) -> Device:
    handle = ctypes.c_int()
    _call(driver, "cuDeviceGet", ctypes.byref(handle), ctypes.c_int(index))
    name = ctypes.create_string_buffer(256)
    _call(driver, "cuDeviceGetName", name, ctypes.c_int(len(name)), handle)
    memory = ctypes.c_size_t()
    _call(driver, "cuDeviceTotalMem_v2", ctypes.byref(memory), handle)
    attributes = []
    for attribute in (_MAJOR, _MINOR, _MULTIPROCESSORS):
        value = ctypes.c_int()
        _call(driver, "cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(attribute), handle)
        attributes.append(value.value)
    major, minor, multiprocessors = attributes
    text = name.value.decode(errors="replace")
    return Device(index, text, (major, minor), multiprocessors, memory.value)


def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError:
        raise NoGpuError(f"no NVIDIA driver on this machine ({_LIBRARY} is not there)") from None


def _call(driver: ctypes.CDLL, function: str, *arguments: object) -> None:
    status = getattr(driver, function)(*arguments)
    if not status:
        return
    text = ctypes.c_char_p()
    driver.cuGetErrorString(ctypes.c_int(status), ctypes.byref(text))
    reason = (text.value or b"unknown error").decode(errors="replace")
    raise NoGpuError(f"the NVIDIA driver refuses {function}: {reason} ({status})")
