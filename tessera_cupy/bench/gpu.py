"""Times of work on a GPU, by CUDA events, and torch's dense attention to compare with."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from tessera_cupy.interop import import_cupy

#: Least time between the two events of a run, in milliseconds: what surrounds the calls is then
#: too little to see, and short calls are measured at the clock that they keep up.
RUN_MS = 20.0

_DRIVER = Path("/proc/driver/nvidia/version")


def name() -> str:
    """The current GPU's name."""
    cupy = import_cupy()
    return str(cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode())


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call, over the samples that count.

    Attributes:
        median: of all samples.
        low: their 10th percentile.
        high: their 90th percentile.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Sum up samples; between two of them percentiles are interpolated.

        >>> Timing.of([1.0, 2.0, 3.0, 4.0, 9.0])
        Timing(median=3.0, low=1.4, high=7.0)
        """
        low, median, high = (float(x) for x in np.percentile(samples, (10, 50, 90)))
        return cls(median, low, high)

    @property
    def spread(self) -> list[float]:
        """``[low, high]``, as reports have it."""
        return [self.low, self.high]


def driver() -> dict[str, str | None]:
    """The driver's ``version`` (None where Linux does not tell it) and newest ``cuda`` version."""
    number = import_cupy().cuda.runtime.driverGetVersion()
    try:
        told = re.search(r"\b\d+\.\d+(\.\d+)?\b", _DRIVER.read_text())
    except OSError:
        told = None
    return {"version": told and told[0], "cuda": f"{number // 1000}.{number % 1000 // 10}"}


def median_ms(
    call: Callable[[], object], on_run: Callable[[], None], *, warm_up: int, runs: int
) -> float:
    """Median time of a call on the current CuPy stream, in milliseconds, by CUDA events.

    The same as :func:`timings` with one contestant and a warm L2.
    """
    return timings({"": call}, on_run, warm_up=warm_up, runs=runs)[""].median


def timings(
    calls: Mapping[str, Callable[[], object]],
    on_run: Callable[[], None],
    *,
    warm_up: int,
    runs: int,
    cold: bool = False,
    run_ms: float | None = None,
) -> dict[str, Timing]:
    """Times of each contestant's call on the current CuPy stream, by CUDA events.

    Contestants take turns, one run each, so that a clock that drifts and a neighbour on the
    machine meet all of them alike; the order of a turn is reversed each time. A run is as many
    calls back to back as take :data:`RUN_MS`, so that the host's part of a call hides behind
    the GPU's part of the one before, as it does in a model; or ``run_ms`` where there is
    less time to spend.

    Warm, a run is timed as a whole, and what one call left in the L2 serves the next: a sample is
    the mean of a run's calls. Cold, a buffer of twice the L2 is written before each call, outside
    of the call's own two events, so that it finds nothing of its operands there: each call is a
    sample.

    Args:
        calls: by name, what to time.
        on_run: called after each run, ``len(calls) * (warm_up + runs)`` times in all.
        warm_up: turns that do not count, at least 1; they also find the number of calls.
        runs: turns that count.
        cold: whether each call begins with a cold L2.
        run_ms: least milliseconds of a run; None means :data:`RUN_MS`.

    Returns:
        By name, milliseconds of one call.
    """
    run = partial(_cold_run, _flusher()) if cold else _warm_run
    least = RUN_MS if run_ms is None else run_ms
    order = list(calls)
    counts = dict.fromkeys(order, 1)
    samples: dict[str, list[float]] = {name: [] for name in order}
    for turn in range(warm_up + runs):
        for name in reversed(order) if turn % 2 else order:
            times = run(calls[name], counts[name])
            if turn < warm_up:
                counts[name] = max(1, math.ceil(least / float(np.mean(times))))
            else:
                samples[name] += times
            on_run()
    return {name: Timing.of(times) for name, times in samples.items()}


def once_ms(call: Callable[[], object]) -> float:
    """Milliseconds of one call after another one, to tell what is worth timing."""
    return _warm_run(call, 1)[0]


def _warm_run(call: Callable[[], object], count: int) -> list[float]:
    cupy = import_cupy()
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    # One untimed call keeps the GPU busy while the host queues the event and the first timed
    # call. With the event on an idle GPU, the clock would run while the host is still on its
    # way to the first launch: 0.2 ms a run were seen, charged most to whoever is fastest.
    call()
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return [float(cupy.cuda.get_elapsed_time(begin, end)) / count]


def _cold_run(flush: Callable[[], object], call: Callable[[], object], count: int) -> list[float]:
    cupy = import_cupy()
    events = [(cupy.cuda.Event(), cupy.cuda.Event()) for _ in range(count)]
    call()  # untimed, for the same reason
    for begin, end in events:
        flush()
        begin.record()
        call()
        end.record()
    events[-1][1].synchronize()
    return [float(cupy.cuda.get_elapsed_time(begin, end)) for begin, end in events]


def _flusher() -> Callable[[], object]:
    """A call that writes twice as many bytes as the L2 holds."""
    cupy = import_cupy()
    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    buffer = cupy.empty(2 * properties["l2CacheSize"], np.uint8)
    return partial(buffer.fill, 0)


def has_torch() -> bool:
    """Whether torch is installed and can use a GPU."""
    if find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


def torch_tensors(*arrays: Any) -> tuple[Any, ...]:
    """Bfloat16 CuPy arrays as torch tensors over the same memory."""
    import torch

    cupy = import_cupy()
    # Through int16, which every version of both libraries exchanges.
    return tuple(torch.from_dlpack(x.view(cupy.int16)).view(torch.bfloat16) for x in arrays)


def torch_blocks(dense: Any) -> Any:
    """A bool CuPy array as a torch tensor over the same memory."""
    import torch

    return torch.from_dlpack(dense.view("uint8")).view(torch.bool)


def capability() -> tuple[int, int]:
    """Compute capability of torch's current GPU."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return int(major), int(minor)


def torch_stream() -> Callable[[], AbstractContextManager[Any]]:
    """Makes contexts in which torch works on the CuPy stream that is current now."""
    import torch

    pointer = import_cupy().cuda.get_current_stream().ptr
    # torch takes address 0 for a stream of its own.
    stream = torch.cuda.ExternalStream(pointer) if pointer else torch.cuda.default_stream()
    return lambda: torch.cuda.stream(stream)


def torch_sdpa(q: Any, k: Any, v: Any) -> Callable[[], object] | None:
    """Dense attention of torch, which chooses the backend; None where torch has no GPU.

    Arguments as in :func:`dense_call`.
    """
    return dense_call(q, k, v, None) if has_torch() else None


def dense_call(q: Any, k: Any, v: Any, backend: str | None) -> Callable[[], object]:
    """Dense attention of torch on the current CuPy stream.

    Args:
        q: (batch, heads, tokens, d) CuPy bfloat16 array.
        k: the same.
        v: the same.
        backend: name in ``torch.nn.attention.SDPBackend``; None leaves the choice to torch.
    """
    import torch

    shared, on_stream = torch_tensors(q, k, v), torch_stream()
    attention = torch.nn.attention

    def call() -> object:
        chosen = (
            nullcontext()
            if backend is None
            else attention.sdpa_kernel(getattr(attention.SDPBackend, backend))
        )
        with on_stream(), chosen:
            return torch.nn.functional.scaled_dot_product_attention(*shared)

    return call
