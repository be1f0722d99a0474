"""One CUDA source to a cubin, with NVRTC alone; needs neither a GPU nor a CUDA toolkit."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tessera_cupy.errors import KernelCompileError
from tessera_cupy.kernels import toolchain

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Options of every kernel; :func:`options` adds the architecture.
OPTIONS = (
    "--std=c++17",
    "-default-device",
    "--no-source-include",  # else NVRTC also looks for headers in the current folder
    "--use_fast_math",
    "-lineinfo",
    "--ptxas-options=-v",
)

_REGISTERS = re.compile(r"Used (\d+) registers")
_SMEM = re.compile(r"(\d+) bytes smem")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
# C75xx: serialised wgmma, setmaxnreg that is ignored, and the like.
_TROUBLE = re.compile(r"\(C75\d\d\)|\bwarning( #.*)?\s*:", re.IGNORECASE)


@dataclass(frozen=True)
class Resources:
    """What ptxas reports of a kernel: registers a thread, and bytes a thread or, smem, a CTA."""

    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    smem: int


@dataclass(frozen=True)
class BuildResult:
    """A compiled kernel.

    Attributes:
        cubin: the ELF image, whole.
        log: NVRTC's log, ptxas' report included.
        resources: None when the log has no report.
    """

    cubin: bytes
    log: str
    resources: Resources | None


def nvrtc_version() -> tuple[int, int] | None:
    """(major, minor) of the NVRTC that compiles, or None where none can be loaded."""
    try:
        return toolchain.load().version
    except KernelCompileError:
        return None


def options(arch: str) -> tuple[str, ...]:
    """NVRTC's options for an architecture."""
    return (f"-arch={arch}", *OPTIONS)


def compile_cubin(source: str, name: str, arch: str, headers: Mapping[str, bytes]) -> BuildResult:
    """Compile one source for one architecture. Thread-safe.

    Args:
        source: CUDA C++.
        name: what error messages call it.
        arch: NVRTC's name of the architecture, such as ``"sm_90a"``.
        headers: contents of what may be included, by the name in the ``#include``. No folder
            is searched, so what is compiled is what was hashed.

    Raises:
        KernelCompileError: NVRTC is missing, does not know the architecture, or refuses the
            source; the message has its log with file and line.

    Example:
        >>> result = compile_cubin('extern "C" __global__ void f() {}', "f.cu", "sm_80", {})
        >>> result.resources.spill_stores
        0
    """
    nvrtc, version = toolchain.load()
    _require(arch, _call(nvrtc.nvrtcGetSupportedArchs()), version)
    with _program(nvrtc, source, name, headers) as program:
        flags = [option.encode() for option in options(arch)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
        log = _read(nvrtc, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        if int(status) != 0:
            raise KernelCompileError(
                f"NVRTC {version[0]}.{version[1]} cannot compile {name} for {arch} "
                f"({status.name}):\n{log.strip()}"
            )
        cubin = _read(nvrtc, program, "CUBIN")
    if not 0 < elf_size(cubin) <= len(cubin):
        raise KernelCompileError(
            f"NVRTC {version[0]}.{version[1]} returned an incomplete cubin of {name} for {arch}: "
            f"{len(cubin)} bytes, its headers tell {elf_size(cubin)}."
        )
    return BuildResult(cubin, log, parse_resources(log))


def parse_resources(log: str) -> Resources | None:
    """Read ptxas' ``-v`` report; the worst of all functions, should there be several."""
    registers = _REGISTERS.findall(log)
    if not registers:
        return None
    stacks = [tuple(map(int, found)) for found in _STACK.findall(log)] or [(0, 0, 0)]
    stack, stores, loads = (max(column) for column in zip(*stacks, strict=True))
    return Resources(
        registers=max(map(int, registers)),
        spill_stores=stores,
        spill_loads=loads,
        stack=stack,
        smem=max(map(int, _SMEM.findall(log)), default=0),
    )


def problems(result: BuildResult) -> list[str]:
    """What keeps a compiled kernel from being fast, one line each; empty when all is well."""
    found = [line.strip() for line in result.log.splitlines() if _TROUBLE.search(line)]
    if result.resources is None:
        return [*found, "ptxas reported no resource use"]
    used = result.resources
    if used.spill_stores or used.spill_loads:
        found.append(f"registers spill: {used.spill_stores} B stored, {used.spill_loads} B loaded")
    if used.stack:
        found.append(f"local memory: a stack frame of {used.stack} B")
    return found


def elf_size(image: bytes) -> int:
    """Bytes that a 64-bit ELF image must have by its own headers; 0 when it is no such image.

    >>> elf_size(b"not an ELF image")
    0
    """
    if len(image) < 64 or image[:6] != b"\x7fELF\x02\x01":
        return 0
    program_at, section_at = struct.unpack_from("<QQ", image, 32)
    program_size, programs, section_size, sections = struct.unpack_from("<4H", image, 54)
    sections_end: int = section_at + section_size * sections
    end: int = max(64, program_at + program_size * programs, sections_end)
    if section_size < 64 or sections_end > len(image):
        return end
    for header in range(section_at, sections_end, section_size):
        (kind,) = struct.unpack_from("<I", image, header + 4)
        offset, size = struct.unpack_from("<QQ", image, header + 24)
        if kind != 8:  # SHT_NOBITS takes no room in the file
            end = max(end, offset + size)
    return end


def _require(arch: str, supported: Any, version: tuple[int, int]) -> None:
    number = int("".join(filter(str.isdigit, arch)))
    if number not in supported:
        known = ", ".join(f"sm_{known}" for known in supported)
        raise KernelCompileError(
            f"NVRTC {version[0]}.{version[1]} has no {arch}; it knows {known}. "
            f"Fix: upgrade it, {toolchain.INSTALL}."
        )


@contextmanager
def _program(
    nvrtc: ModuleType, source: str, name: str, headers: Mapping[str, bytes]
) -> Iterator[Any]:
    program = _call(
        nvrtc.nvrtcCreateProgram(
            source.encode(),
            name.encode(),
            len(headers),
            list(headers.values()),
            [header.encode() for header in headers],
        )
    )
    try:
        yield program
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _read(nvrtc: ModuleType, program: Any, what: str) -> bytes:
    """Fetch the log or the image, in a buffer of the exact size that NVRTC tells."""
    size = _call(getattr(nvrtc, f"nvrtcGet{what}Size")(program))
    # NVRTC writes into the buffer, so it must not be a bytes object, which Python may share.
    buffer = bytearray(size)
    _call(getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
    return bytes(buffer)


def _call(answer: tuple[Any, ...]) -> Any:
    status, *values = answer
    if int(status) != 0:
        raise KernelCompileError(f"NVRTC failed: {status.name}.")
    return values[0] if values else None
