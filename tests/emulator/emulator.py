"""Runs the kernels of ``kernels_cu/`` on the CPU, through the package's own launch code.

:func:`build` compiles a catalog entry with g++ against the headers of this folder, which stand in
for CUDA and for ``common/ptx*.cuh``. :class:`Emulator` takes the GPU's place: arrays between pages
that nothing may touch, inputs that nothing may write, tensor maps that the emulated copy engine
reads. The kernels then run as they are, and so does ``tessera_cupy.kernels.launch``.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import re
import secrets
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from filelock import FileLock
from numpy.typing import DTypeLike, NDArray

from tessera_cupy import ArraySpec, BlockMask, KeySlices, make_plan
from tessera_cupy._resources import kernels_dir
from tessera_cupy.kernels import launch, tensor_maps
from tessera_cupy.kernels.catalog import KernelConfig
from tessera_cupy.kernels.specialise import source

HERE = Path(__file__).parent
#: Names a folder of kernels to run in place of the package's.
KERNELS_VARIABLE = "EMULATOR_KERNELS"

_FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE")
_FLAGS += ("-w",)  # of the kernels, NVRTC is the judge
_MAP_MARK = 0x7465737365726121
_PAGE = mmap.PAGESIZE
_PROT_NONE = 0


def drawn_seed() -> int:
    """Another seed each time, except in CI, where a push fails because of its own change.

    It is printed; ``$EMULATOR_SEED`` gives it again.
    """
    given = os.environ.get("EMULATOR_SEED")
    seed = int(given) if given else 1 if os.environ.get("CI") else secrets.randbits(32)
    print(f"EMULATOR_SEED={seed}")
    return seed


class EmulationError(AssertionError):
    """A kernel did what no kernel may: the message says what, where, and the seed."""


def compiler() -> str | None:
    """The C++ compiler, or None."""
    return shutil.which("g++")


def build(config: KernelConfig, folder: Path, kernels: Path | None = None) -> Path:
    """Compile an entry; once for all processes that share the folder.

    Args:
        config: the entry.
        folder: where libraries are kept.
        kernels: folder of CUDA sources; None means ``$EMULATOR_KERNELS``, or the package's own.

    Returns:
        The shared library.

    Raises:
        RuntimeError: the sources do not compile; the message has the compiler's.
    """
    kernels = kernels or Path(os.environ.get(KERNELS_VARIABLE) or kernels_dir())
    return build_source(
        source(config), config.entry, folder / f"{config.arch}-{config.name}", kernels
    )


def build_source(text: str, entry: str, folder: Path, kernels: Path) -> Path:
    """Compile CUDA source whose kernel is called ``entry``, in a folder of its own."""
    library = folder / "kernel.so"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        if library.exists():
            return library
        # Quoted includes look beside the including file first, so the stand-ins go there.
        shutil.copytree(kernels, folder, dirs_exist_ok=True)
        shutil.copytree(HERE / "common", folder / "common", dirs_exist_ok=True)
        (folder / "entry.cu").write_text(text)
        partial = folder / "kernel.partial"
        command = [compiler() or "g++", *_FLAGS, f"-I{folder}", f"-I{HERE}"]
        command += [f'-DKERNEL="{folder}/entry.cu"', f"-DENTRY={entry}"]
        command += [str(HERE / "driver.cpp"), "-o", str(partial)]
        made = subprocess.run(command, capture_output=True, text=True)
        if made.returncode:
            raise RuntimeError(f"{folder.name} for the emulator: {made.stderr[:4000]}")
        partial.rename(library)
    return library


def call(
    library: Path, params: NDArray[Any], grid: tuple[int, ...], threads: int, shared: int, seed: int
) -> str | None:
    """Run a compiled kernel.

    Args:
        library: from :func:`build`.
        params: the kernel's one parameter, by value.
        grid: CTAs along x, and y.
        threads: threads of a CTA.
        shared: bytes of dynamic shared memory.
        seed: decides the order of what the hardware leaves open.

    Returns:
        None, or what the kernel did wrong.
    """
    emulate = ctypes.CDLL(str(library)).emulate
    emulate.restype = ctypes.c_char_p
    error = emulate(
        ctypes.c_void_p(params.ctypes.data),
        *(ctypes.c_uint(n) for n in (*grid, 1)[:2]),
        ctypes.c_uint(threads),
        ctypes.c_uint(shared),
        ctypes.c_ulong(seed),
    )
    return error.decode() if error else None


class Array:
    """Memory of the emulated GPU: bytes that end, or begin, at a page that nothing may touch."""

    def __init__(self, name: str, nbytes: int, *, at_end: bool) -> None:
        self.name = name
        self.nbytes = nbytes
        self._room = -(-nbytes // _PAGE) * _PAGE
        self._map = mmap.mmap(-1, self._room + 2 * _PAGE)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._start = _PAGE + (self._room - nbytes if at_end else 0)
        self.data = SimpleNamespace(ptr=self._base + self._start)
        self._all = np.frombuffer(self._map, np.uint8)
        self._all[:] = 0xFF  # NaN, and beside the array a mark
        self._protect(0, _PAGE, _PROT_NONE)
        self._protect(_PAGE + self._room, _PAGE, _PROT_NONE)

    @property
    def bytes(self) -> NDArray[np.uint8]:
        return self._all[self._start : self._start + self.nbytes]

    def seal(self) -> None:
        """Make it read-only."""
        self._protect(_PAGE, self._room, mmap.PROT_READ)

    def clean(self) -> bool:
        """Whether nothing was written beside it."""
        end = self._start + self.nbytes
        beside = (self._all[_PAGE : self._start], self._all[end : _PAGE + self._room])
        return all((part == 0xFF).all() for part in beside)

    def locate(self, address: int) -> str | None:
        """What an address in its pages is to the array."""
        at = address - self.data.ptr
        if not 0 <= address - self._base < self._room + 2 * _PAGE:
            return None
        if 0 <= at < self.nbytes:
            return f"a write to byte {at} of {self.name}, which is an input"
        where = f"{-at} bytes before" if at < 0 else f"{at - self.nbytes} bytes past the end of"
        return f"{where} {self.name}"

    def _protect(self, start: int, size: int, access: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        place = ctypes.c_void_p(self._base + start)
        if size and libc.mprotect(place, ctypes.c_size_t(size), access):
            raise OSError(ctypes.get_errno(), "mprotect")


@dataclass
class Emulator:
    """A GPU made of host code.

    Attributes:
        folder: where compiled entries are kept.
        seed: decides the order of what the hardware leaves open, and where arrays end.
        kernels: as in :func:`build`.
        capacity: CTAs at a time, for kernels that take several tasks each.
        launched: names of the kernels that ran.
    """

    folder: Path
    seed: int
    kernels: Path | None = None
    capacity: int = 3
    launched: list[str] = field(default_factory=list)
    _arrays: list[Array] = field(default_factory=list)

    def run(
        self,
        mask: BlockMask | KeySlices,
        q: NDArray[Any],
        k: NDArray[Any],
        v: NDArray[Any],
        *,
        regime: str,
        arch: str,
        layout: str = "BHSD",
        sm_scale: float | None = None,
    ) -> tuple[NDArray[Any], NDArray[np.float32]]:
        """O, like q, and the LSE of a plan's kernel and merge.

        Raises:
            EmulationError: a deadlock, an access out of bounds, a misuse of an instruction.
        """
        specs = [ArraySpec(x.shape, str(x.dtype)) for x in (q, k, v)]
        plan = make_plan(mask, *specs, layout=layout, regime=regime, arch=arch)
        r = plan.request
        q, k, v = (np.ascontiguousarray(x) for x in (q, k, v))
        self._arrays.clear()
        with self._in_place_of_the_gpu():
            q_, k_, v_ = (self._input(x, name) for x, name in ((q, "q"), (k, "k"), (v, "v")))
            out = self._array("o", q.nbytes)
            lse = self._array("lse", 4 * r.batch * r.q_heads * r.sq)
            uploaded = launch.upload(plan.tiles(), plan.tasks(), bits=plan.config.bits)
            for name, value in vars(uploaded).items():
                if isinstance(value, Array):
                    value.name = name

            def tensor(array: Array, x: NDArray[Any]) -> launch.Tensor:
                batch, *middle, _ = (s // x.itemsize for s in x.strides)
                head, row = middle if layout == "BHSD" else middle[::-1]
                return launch.Tensor(array.data.ptr, (batch, head, row))

            packed = launch.pack(
                plan.config,
                tensor(q_, q),
                tensor(k_, k),
                tensor(v_, v),
                tensor(out, q),
                launch.Geometry(
                    **{n: getattr(r, n) for n in ("batch", "q_heads", "kv_heads", "sq", "skv")},
                    head_dim=r.head_dim,
                    dtype=r.dtype,
                    sm_scale=1 / math.sqrt(r.head_dim) if sm_scale is None else sm_scale,
                    capacity=self.capacity,
                    device=0,
                ),
                uploaded.slot_log2,
            )
            launch.attend(packed, uploaded, lse.data.ptr)
            beside = [array.name for array in self._arrays if not array.clean()]
            if beside:
                raise EmulationError(f"seed {self.seed}: written beside {', '.join(beside)}")
        made = out.bytes.view(q.dtype).reshape(q.shape).copy()
        return made, lse.bytes.view(np.float32).reshape(r.batch, r.q_heads, r.sq).copy()

    def _array(self, name: str, nbytes: int) -> Array:
        array = Array(name, nbytes, at_end=bool((self.seed + len(self._arrays)) % 2))
        self._arrays.append(array)
        return array

    def _input(self, x: NDArray[Any], name: str = "an input") -> Array:
        array = self._array(name, x.nbytes)
        array.bytes[:] = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
        array.seal()
        return array

    @contextmanager
    def _in_place_of_the_gpu(self) -> Iterator[None]:
        def empty(length: int, dtype: DTypeLike) -> Array:
            return self._array("the workspace", length * np.dtype(dtype).itemsize)

        stream = SimpleNamespace(ptr=0, is_capturing=lambda: False, synchronize=lambda: None)
        cupy = SimpleNamespace(
            asarray=self._input,
            empty=empty,
            cuda=SimpleNamespace(get_current_stream=lambda: stream),
        )
        with (
            mock.patch.dict(sys.modules, {"cupy": cupy}),
            mock.patch.object(launch, "load", lambda config, device: self._function(config)),
            mock.patch.object(tensor_maps, "encode", encode),
        ):
            yield

    def _function(self, config: KernelConfig) -> Callable[..., None]:
        library = build(config, self.folder, self.kernels)

        def function(
            grid: tuple[int, ...], block: tuple[int], arguments: Any, *, shared_mem: int = 0
        ) -> None:
            self.launched.append(config.name)
            error = call(library, arguments[0], grid, block[0], shared_mem, self.seed)
            if error:
                found = re.search(r"address (0x[0-9a-f]+)", error)
                places = [a.locate(int(found[1], 16)) for a in self._arrays] if found else []
                where = "".join(f": {place}" for place in places if place)
                raise EmulationError(f"{config.name}, seed {self.seed}: {error}{where}")

        return function


def encode(
    pointer: int, dtype: str, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> Any:
    """A tensor map for the emulated copy engine (``MapContents``), with the driver's rules."""
    rules = {
        "an address and strides in whole 16 bytes": not (pointer | 2 * math.gcd(*strides)) % 16,
        "sides of 1 to 256 elements": all(1 <= n <= 256 for n in box),
        "an innermost side of at most the swizzle's 128 bytes": 2 * box[0] <= 128,
        "no empty axis": min(sizes) > 0,
        "as many strides as outer axes": len(sizes) == len(box) == len(strides) + 1,
    }
    broken = [rule for rule, kept in rules.items() if not kept]
    if broken:
        raise EmulationError(f"{broken}: address {pointer:#x}, {sizes}, {strides}, {box}")

    def padded(numbers: tuple[int, ...], count: int) -> tuple[int, ...]:
        return (*numbers, *[0] * (count - len(numbers)))

    packed = struct.pack(
        "<QQ4Q5I5II",
        *(_MAP_MARK, pointer),
        *padded(tuple(2 * stride for stride in strides), 4),
        *padded(sizes, 5),
        *padded(box, 5),
        len(sizes),
    )
    return np.frombuffer(packed.ljust(128, b"\0"), tensor_maps.TENSOR_MAP)[0]
