"""Which NVRTC compiles the kernels: its version without loading it, and the library itself."""

from __future__ import annotations

import os
import re
import sys
from functools import cache
from types import ModuleType
from typing import NamedTuple

from tessera_cupy.errors import KernelCompileError, install

INSTALL = f"{install('cuda12')} (or cuda13, as the driver)"

_WHEEL = re.compile(r"(cuda_bindings|nvidia_cuda_nvrtc(?:_cu\d+)?)-([0-9.]+)\.dist-info")


class Nvrtc(NamedTuple):
    """The loaded compiler: cuda-bindings' module and the version of the library behind it."""

    module: ModuleType
    version: tuple[int, int]


@cache
def expected_version() -> str | None:
    """Version of the NVRTC wheel that cuda-bindings is going to load, such as ``"12.9.86"``.

    Reads folder names only: loading the library, or parsing the wheels' metadata, takes
    longer than finding a kernel in the cache may.

    Returns:
        None when there is no such wheel; NVRTC may still come with a CUDA toolkit.
    """
    found: dict[str, str] = {}
    for folder in sys.path:
        try:
            names = os.listdir(folder or os.curdir)
        except OSError:
            continue
        for match in filter(None, map(_WHEEL.fullmatch, names)):
            found.setdefault(match[1], match[2])  # the first on the path is the one imported
    major = found.get("cuda_bindings", "").partition(".")[0]
    # The wheel for CUDA 12 has a suffix; since CUDA 13 it has none.
    for name in ("nvidia_cuda_nvrtc_cu12", "nvidia_cuda_nvrtc"):
        version = found.get(name)
        if version is not None and version.partition(".")[0] == major:
            return version
    return None


@cache
def load() -> Nvrtc:
    """Load NVRTC through cuda-bindings; takes a few tenths of a second once a process.

    Raises:
        KernelCompileError: cuda-bindings or NVRTC is missing or unusable.
    """
    try:
        from cuda.bindings import nvrtc

        status, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError, OSError) as error:
        raise KernelCompileError(
            f"Kernels cannot be compiled here, because NVRTC cannot be loaded: {error}. "
            f"Fix: {INSTALL}."
        ) from error
    if int(status) != 0:
        raise KernelCompileError(f"NVRTC does not tell its version: {status}. Fix: {INSTALL}.")
    return Nvrtc(nvrtc, (int(major), int(minor)))


def version() -> str:
    """Version of the NVRTC that compiles: the wheel's, unless another library was loaded.

    A CUDA toolkit, or a package imported earlier, may have put another NVRTC in the process
    than the installed wheel. Only major and minor are known of that one.

    Raises:
        KernelCompileError: as for :func:`load`.
    """
    major, minor = load().version
    wheel = expected_version()
    if wheel is not None and wheel.split(".")[:2] == [str(major), str(minor)]:
        return wheel
    return f"{major}.{minor}"
