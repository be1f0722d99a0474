"""GPU memory that other streams or CUDA graphs still read is not given to anyone else.

CuPy's pool hands freed memory to the next array of the stream that allocated it, at once. Work
of that stream is in order. That of another stream may still be waiting, and a graph uses its
memory again at each replay.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: cudaStreamPerThread: one address for a stream in each thread.
PER_THREAD = 2


class Uses:
    """What reads a set of arrays, besides the stream that allocated them.

    Attributes:
        events: the last work of each other stream, by the stream's address.
    """

    def __init__(self, stream: Any) -> None:
        """Take the stream (CuPy's) that was current when the arrays were allocated."""
        self._own = None if stream.ptr == PER_THREAD else stream.ptr
        self.events: dict[int, Any] = {}
        self._filled: Any = None
        self._kept: list[Any] = []
        self._lock = threading.Lock()

    def filled(self, stream: Any) -> None:
        """Note that the work launched so far on the stream that allocated the arrays fills them."""
        import cupy

        self._filled = cupy.cuda.Event(disable_timing=True)
        self._filled.record(stream)

    def wait(self, stream: Any) -> None:
        """Let a stream, which is not capturing, wait for what fills the arrays."""
        if self._filled is not None and stream.ptr != self._own:
            stream.wait_event(self._filled)

    def record(self, stream: Any) -> None:
        """Note the work that was just launched on a stream, which is not capturing."""
        if stream.ptr == self._own:
            return
        import cupy

        with self._lock:
            event = self.events.get(stream.ptr)
            if event is None:
                event = self.events[stream.ptr] = cupy.cuda.Event(disable_timing=True)
            else:
                # The address may have been another stream's; its work must stay covered.
                stream.wait_event(event)
            event.record(stream)

    def keep(self, *arrays: Any) -> None:
        """Keep what a captured launch uses for as long as the arrays themselves."""
        self._kept.append(arrays)

    def done(self) -> bool:
        """Whether all recorded work is complete."""
        return all(event.done for event in self.events.values())


# Arrays whose owner ended while other streams may have been reading them.
_retired: deque[tuple[Uses, Any]] = deque()


def release_with(owner: object, uses: Uses, arrays: Any) -> None:
    """Hold the arrays until their owner ends, and then until what is recorded in uses is done."""
    ref = weakref.ref(owner, _retire)
    _held[id(ref)] = (ref, uses, arrays)


# Arrays by the reference to their owner: a request makes one, and ``weakref.finalize`` takes long.
_held: dict[int, tuple[weakref.ref[Any], Uses, Any]] = {}


def keep_while(owner: object, kept: object) -> None:
    """Hold one object for as long as another one lives."""
    weakref.finalize(owner, _end, kept).atexit = False


def _end(kept: object) -> None: ...


def _retire(ref: weakref.ref[Any]) -> None:
    # May run at any moment, also within a capture or within collect(): no CUDA, no locks.
    _, uses, arrays = _held.pop(id(ref))
    if uses.events:
        _retired.append((uses, arrays))


def collect() -> None:
    """Give back what was retired and is no longer in use; not to be called during a capture."""
    for _ in range(len(_retired)):
        try:
            uses, arrays = _retired.popleft()
        except IndexError:  # another thread was quicker
            return
        if not uses.done():
            _retired.append((uses, arrays))


@contextmanager
def pool_may_grow() -> Iterator[None]:
    """Allow allocations while a stream of this thread captures, also in torch's captures."""
    from cuda.bindings import driver

    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    _, before = driver.cuThreadExchangeStreamCaptureMode(relaxed)
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(before)


def new(shape: tuple[int, ...], dtype: Any, memory: list[Any]) -> Any:
    """A CuPy array, which ``memory`` takes where a graph captures what will use it."""
    import cupy

    if not cupy.cuda.get_current_stream().is_capturing():
        return cupy.empty(shape, dtype)
    with pool_may_grow():
        memory.append(cupy.empty(shape, dtype))
    return memory[-1]
