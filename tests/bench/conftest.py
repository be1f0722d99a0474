"""A CuPy that needs no GPU: NumPy's arrays, and events on the clock of a simulated queue."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tessera_cupy import interop
from tessera_cupy.bench import gpu


class Queue:
    """A GPU behind a host: work is queued at the host's time and runs when the GPU is free.

    Attributes:
        host: the host's clock, in milliseconds.
        free: when the GPU will have done all that is queued.
    """

    def __init__(self) -> None:
        self.host = self.free = 0.0
        self.log: list[str] = []

    def launch(self, name: str, *, host: float, work: float) -> None:
        """The host spends ``host`` ms, then queues ``work`` ms."""
        self.log.append(name)
        self.host += host
        self.free = max(self.free, self.host) + work

    def event(self) -> Any:
        """An event with CuPy's methods."""
        simulated = self

        class Event(SimpleNamespace):
            @property
            def done(self) -> bool:
                return bool(self.at <= simulated.host)

        event = Event(at=0.0)

        def record() -> None:
            self.log.append("event")
            event.at = max(self.free, self.host)

        def synchronize() -> None:
            self.host = max(self.host, event.at)

        event.record, event.synchronize = record, synchronize
        return event


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    """The simulated queue behind a stand-in for CuPy, which all of the package gets."""
    simulated = Queue()
    properties = {"name": b"Simulated GPU", "l2CacheSize": 1 << 20}

    def empty(size: int, dtype: Any) -> Any:
        def fill(value: int) -> None:
            simulated.launch(f"fill {size}", host=0.001, work=0.7)

        return SimpleNamespace(fill=fill)

    cupy = SimpleNamespace(
        __version__="0",
        asarray=np.asarray,
        asnumpy=np.asarray,
        empty=empty,
        empty_like=np.empty_like,
        uint16=np.uint16,
        cuda=SimpleNamespace(
            Event=simulated.event,
            get_elapsed_time=lambda begin, end: end.at - begin.at,
            Device=lambda: SimpleNamespace(id=0),
            runtime=SimpleNamespace(
                getDeviceProperties=lambda device: properties, driverGetVersion=lambda: 12090
            ),
        ),
    )
    monkeypatch.setattr(interop, "import_cupy", lambda: cupy)
    monkeypatch.setattr(gpu, "import_cupy", lambda: cupy)
    return simulated
