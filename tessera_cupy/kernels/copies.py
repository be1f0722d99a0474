"""Arrays that kernels read beside their operands: the host's, copied to each GPU, or a caller's."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.kernels.launch import refuse_capture
from tessera_cupy.kernels.lifetime import Uses, collect, release_with


class DeviceCopies:
    """Numbers of the host, copied to each GPU where they are needed.

    Whoever launches work that reads a copy records it in the ``uses``, or keeps this object while a
    graph that captured it may be replayed.
    """

    def __init__(self, values: NDArray[np.int32]) -> None:
        self._values = values
        self._lock = threading.Lock()
        self._on: dict[int, tuple[Any, Uses]] = {}

    def here(self) -> tuple[Any, Uses]:
        """The copy on the current GPU, complete, and what reads it."""
        import cupy

        device = cupy.cuda.runtime.getDevice()
        with self._lock:
            if device not in self._on:
                refuse_capture()
                collect()
                stream = cupy.cuda.get_current_stream()
                copy, uses = cupy.asarray(self._values), Uses(stream)
                release_with(self, uses, copy)
                # Later calls may use other streams.
                stream.synchronize()
                self._on[device] = copy, uses
            return self._on[device]


class Given:
    """Orders that a caller has on a GPU, in the place of copies."""

    def __init__(self, orders: Any) -> None:
        import cupy

        self._orders = orders
        self._uses = Uses(cupy.cuda.get_current_stream())
        release_with(self, self._uses, orders)

    def here(self) -> tuple[Any, Uses]:
        """The orders, and what reads them."""
        return self._orders, self._uses
