"""A few numbers from GPU memory to the host, without holding up the stream or the host."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_DEVICE_TO_HOST = 2


@dataclass(frozen=True, eq=False)
class Fetched:
    """Numbers on their way to the host.

    Attributes:
        numbers: int64, right once they have arrived.
        event: recorded behind the copy.
    """

    numbers: NDArray[np.int64]
    event: Any

    def wait(self) -> NDArray[np.int64]:
        """The numbers, once they are there."""
        self.event.synchronize()
        return self.numbers

    def arrived(self) -> bool:
        """Whether they are there."""
        return bool(self.event.done)


# Pinned memory must not go to another copy before its own has come, though nobody waits for that.
_coming: deque[Fetched] = deque()
_lock = threading.Lock()


def fetch(array: Any, count: int) -> Fetched:
    """Start to copy int64 numbers to pinned memory, on the current stream, which is not capturing.

    Args:
        array: what has an address as ``array.data.ptr``.
        count: how many numbers.
    """
    import cupy

    with _lock:
        while _coming and _coming[0].arrived():
            _coming.popleft()
    stream = cupy.cuda.get_current_stream()
    pinned = cupy.cuda.alloc_pinned_memory(8 * count)
    cupy.cuda.runtime.memcpyAsync(
        pinned.ptr, array.data.ptr, 8 * count, _DEVICE_TO_HOST, stream.ptr
    )
    event = cupy.cuda.Event(disable_timing=True)
    event.record(stream)
    made = Fetched(np.frombuffer(pinned, np.int64, count), event)
    _coming.append(made)
    return made
