"""The emulator as a GPU that CuPy sees: arrays, streams that capture, and the package's front door.

Work is done when it is launched, or recorded where the stream captures, to be done by each replay.
Memory that nobody holds any more may not be touched: a kernel that does is caught.
"""

from __future__ import annotations

import ctypes
import math
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tessera_cupy.kernels import launch, tensor_maps
from tessera_cupy.kernels.catalog import KernelConfig
from tests.emulator.emulator import _PROT_NONE, Array, EmulationError, Emulator, encode

#: No machine has as many: what the package remembers of this GPU is of no other.
ORDINAL = 900
SMS = 3


class _Lease:
    """What ends when the last array over some memory ends."""

    def __init__(self, memory: Array, freed: Callable[[Array], None]) -> None:
        self.memory = memory
        weakref.finalize(self, freed, memory)


class DeviceArray:
    """An array in the memory of the emulated GPU, as CuPy would have it."""

    def __init__(self, lease: _Lease, view: NDArray[Any], gpu: EmulatedGpu) -> None:
        self._lease, self._view, self._gpu = lease, view, gpu
        self.shape, self.strides, self.dtype = view.shape, view.strides, view.dtype
        self.nbytes, self.size = view.nbytes, view.size
        self.device = SimpleNamespace(id=ORDINAL)
        pointer = view.ctypes.data
        self.data = SimpleNamespace(ptr=pointer)
        self.__cuda_array_interface__ = {"version": 3}

    def __getitem__(self, key: Any) -> DeviceArray:
        return DeviceArray(self._lease, self._view[key], self._gpu)

    def transpose(self, *axes: int) -> DeviceArray:
        return DeviceArray(self._lease, self._view.transpose(*axes), self._gpu)

    def copy(self, order: str) -> DeviceArray:
        assert order == "C"
        made = self._gpu.empty(self.shape, self.dtype)
        self._gpu.do(lambda: np.copyto(made._view, self._view))
        return made

    def view(self, dtype: Any) -> DeviceArray:
        return DeviceArray(self._lease, self._view.view(dtype), self._gpu)

    def fill(self, value: Any) -> None:
        self._view[...] = value

    def set(self, values: Any) -> None:
        """New contents, on the spot."""
        self._view[...] = values

    def get(self) -> NDArray[Any]:
        return self._view.copy()


DeviceArray.__module__ = "cupy"


class Stream:
    """A stream; while it captures, what is launched is recorded."""

    current: Stream

    def __init__(self, ptr: int = 16, **_: Any) -> None:
        self.ptr = ptr
        self.recorded: list[Callable[[], Any]] | None = None
        self.waits: list[Event] = []

    def is_capturing(self) -> bool:
        return self.recorded is not None

    def begin_capture(self) -> None:
        self.recorded = []

    def end_capture(self) -> Callable[[], None]:
        """What replays."""
        recorded, self.recorded = self.recorded or [], None

        def replay() -> None:
            for work in recorded:
                EmulatedGpu.work += 1
                work()

        replay.launch = replay  # type: ignore[attr-defined]
        return replay

    def synchronize(self) -> None:
        assert not self.is_capturing()

    def wait_event(self, event: Event) -> None:
        assert not self.is_capturing()
        self.waits.append(event)

    def __enter__(self) -> Stream:
        self._outer, Stream.current = Stream.current, self
        return self

    def __exit__(self, *_: Any) -> None:
        Stream.current = self._outer


Stream.current = Stream(0)


class Event:
    """A moment, past as soon as it is recorded; ``held`` keeps all from passing."""

    held = False

    def __init__(self, **_: Any) -> None:
        self.stream: Stream | None = None
        self._waited = False

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or Stream.current
        assert not stream.is_capturing()
        self.stream = stream
        self.launched = EmulatedGpu.work

    def synchronize(self) -> None:
        assert not Stream.current.is_capturing()
        if not self._waited:
            EmulatedGpu.waits += 1
        self._waited = True

    @property
    def done(self) -> bool:
        return not Event.held


class Device:
    """The one device."""

    def __init__(self, ordinal: int = ORDINAL) -> None:
        assert ordinal == ORDINAL
        self.id = ordinal

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def synchronize(self) -> None:
        assert not Stream.current.is_capturing()
        EmulatedGpu.waits += 1


@dataclass
class EmulatedGpu(Emulator):
    """A GPU that the front door takes for one of CuPy's.

    Attributes:
        waits: how often the host waited for the GPU.
        work: launches and the like so far, which are the time between events.
        copied: bytes that came to the host.
    """

    waits = 0
    work = 0
    copied: int = 0
    _bad: list[str] = field(default_factory=list)

    def array(self, values: NDArray[Any], *, writable: bool = False) -> DeviceArray:
        """A copy in GPU memory, which no kernel may write unless it is told to be writable."""
        made = self.empty(values.shape, values.dtype)
        made.set(values)
        if not writable:
            made._lease.memory.seal()
        return made

    def empty(self, shape: Any, dtype: DTypeLike = np.float32) -> DeviceArray:
        lengths = (shape,) if isinstance(shape, int) else tuple(shape)
        dtype = np.dtype(dtype)
        memory = self._array("an array", math.prod(lengths) * dtype.itemsize)
        if dtype == np.uint8:
            # What others left there: unlike NaN, numbers that lead a kernel astray.
            rng = np.random.default_rng(self.seed + len(self._arrays))
            memory.bytes[:] = rng.integers(0, 256, memory.nbytes, np.uint8)
        view = memory.bytes.view(dtype).reshape(lengths)
        return DeviceArray(_Lease(memory, self._freed), view, self)

    def do(self, work: Callable[[], Any]) -> None:
        """Now, or by each replay."""
        EmulatedGpu.work += 1
        recorded = Stream.current.recorded
        if recorded is None:
            work()
        else:
            recorded.append(work)

    def check_beside(self) -> None:
        """That nothing was written beside any array so far."""
        self._bad += [array.name for array in self._arrays if array.alive and not array.clean()]
        assert not self._bad, f"seed {self.seed}: written beside {self._bad}"

    @contextmanager
    def here(self) -> Iterator[EmulatedGpu]:
        """In CuPy's place."""
        EmulatedGpu.waits = 0
        Stream.current = Stream(0)
        with self._in_place_of_the_gpu():
            yield self
            self.check_beside()

    def _array(self, name: str, nbytes: int) -> Array:
        array = super()._array(name, nbytes)
        array.alive = True
        return array

    def _freed(self, array: Array) -> None:
        if not array.clean():
            self._bad.append(array.name)
        array.alive = False
        array.name = f"{array.name} that was given back"
        array._protect(0, array._room + 2 * 4096, _PROT_NONE)

    def _function(self, config: KernelConfig) -> Callable[..., None]:
        function = super()._function(config)

        def queued(grid: Any, block: Any, arguments: Any, *, shared_mem: int = 0) -> None:
            self.do(lambda: function(grid, block, arguments, shared_mem=shared_mem))

        return queued

    def _copy(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        assert kind == 2
        assert stream == Stream.current.ptr
        assert not Stream.current.is_capturing()
        ctypes.memmove(target, source, nbytes)
        self.copied += nbytes

    def _host(self, array: DeviceArray) -> NDArray[Any]:
        assert not Stream.current.is_capturing()
        self.copied += array.nbytes
        return array.get()

    def _memset_2d(
        self, start: int, pitch: int, value: int, width: int, height: int, stream: int
    ) -> tuple[int]:
        assert stream == Stream.current.ptr
        assert pitch >= width

        def fill() -> None:
            for row in range(height):
                ctypes.memset(start + row * pitch, value, width)

        self.do(fill)
        return (0,)

    def _memset(self, start: int, value: int, nbytes: int, stream: int) -> tuple[int]:
        return self._memset_2d(start, nbytes, value, nbytes, 1, stream)

    @contextmanager
    def _in_place_of_the_gpu(self) -> Iterator[None]:
        from cuda.bindings import driver

        def asarray(x: Any) -> Any:
            return x if isinstance(x, DeviceArray) else self.array(np.asarray(x))

        class External(Stream):
            @classmethod
            def from_external(cls, stream: Any) -> Stream:
                return Stream(stream.__cuda_stream__()[1])

        def pinned(nbytes: int) -> Any:
            kind = type("Pinned", ((ctypes.c_char * nbytes),), {})
            memory = kind()
            memory.ptr = ctypes.addressof(memory)
            return memory

        properties = {
            **{"major": 9, "minor": 0, "name": b"an emulated GPU"},
            **{"multiProcessorCount": SMS, "l2CacheSize": 2 << 20},
        }
        cuda = SimpleNamespace(
            get_current_stream=lambda device=None: Stream.current,
            Stream=Stream,
            Event=Event,
            Device=Device,
            alloc_pinned_memory=pinned,
            get_elapsed_time=lambda begin, end: end.launched - begin.launched,
            runtime=SimpleNamespace(
                getDevice=lambda: ORDINAL,
                driverGetVersion=lambda: 0,
                getDeviceCount=lambda: 1,
                getDeviceProperties=lambda device: properties,
                memcpyAsync=self._copy,
                memsetAsync=self._memset,
                CUDARuntimeError=EmulationError,
            ),
        )
        cupy = SimpleNamespace(
            asarray=asarray,
            asnumpy=self._host,
            empty=self.empty,
            empty_like=lambda x: self.empty(x.shape, x.dtype),
            uint16=np.uint16,
            cuda=cuda,
            __version__="none",
        )
        functions: dict[str, Any] = {}

        def load(config: KernelConfig, device: int) -> Any:
            assert device == ORDINAL
            return functions.setdefault(config.name, self._function(config))

        with (
            mock.patch.dict(sys.modules, {"cupy": cupy}),
            mock.patch.object(launch, "load", load),
            mock.patch("tessera_cupy.kernels.device_build.load", load),
            mock.patch.object(launch, "is_loaded", lambda config, _: config.name in functions),
            mock.patch.object(launch, "pool_may_grow", _nothing),
            mock.patch("tessera_cupy.kernels.device_build.pool_may_grow", _nothing),
            mock.patch("tessera_cupy.kernels.lifetime.pool_may_grow", _nothing),
            mock.patch("tessera_cupy.sparsifiers.selection.pool_may_grow", _nothing),
            mock.patch.object(tensor_maps, "encode", encode),
            mock.patch.object(driver, "cuMemsetD2D8Async", self._memset_2d),
            mock.patch.object(driver, "cuMemsetD8Async", self._memset),
        ):
            yield


@contextmanager
def _nothing() -> Iterator[None]:
    yield
