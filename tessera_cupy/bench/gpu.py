"""Times of work on a GPU, by CUDA events, and torch's dense attention to compare with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import numpy as np

from tessera_cupy.interop import import_cupy

#: Calls between two events.
CALLS = 5


def name() -> str:
    """The current GPU's name."""
    cupy = import_cupy()
    return str(cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode())


def median_ms(
    call: Callable[[], object], on_run: Callable[[], None], *, warm_up: int, runs: int
) -> float:
    """Median time of a call on the current CuPy stream, in milliseconds, by CUDA events.

    Each run is several calls back to back, so that the host's part of a call hides behind the
    GPU's part of the one before, as it does in a model.
    """
    cupy = import_cupy()
    times = []
    for run in range(warm_up + runs):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        for _ in range(CALLS):
            call()
        end.record()
        end.synchronize()
        if run >= warm_up:
            times.append(cupy.cuda.get_elapsed_time(begin, end) / CALLS)
        on_run()
    return float(np.median(times))


def torch_sdpa(q: Any, k: Any, v: Any, backend: str | None = None) -> Callable[[], object] | None:
    """Dense attention of torch on the current CuPy stream; None where torch has no GPU.

    Args:
        q: (batch, heads, tokens, d) CuPy bfloat16 array.
        k: the same.
        v: the same.
        backend: name in ``torch.nn.attention.SDPBackend``; None leaves the choice to torch.
    """
    if find_spec("torch") is None:
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    cupy = import_cupy()
    # Through int16, which every version of both libraries exchanges.
    shared = [torch.from_dlpack(x.view(cupy.int16)).view(torch.bfloat16) for x in (q, k, v)]
    pointer = cupy.cuda.get_current_stream().ptr
    # torch takes address 0 for a stream of its own.
    stream = torch.cuda.ExternalStream(pointer) if pointer else torch.cuda.default_stream()
    attention = torch.nn.attention

    def call() -> object:
        chosen = (
            nullcontext()
            if backend is None
            else attention.sdpa_kernel(getattr(attention.SDPBackend, backend))
        )
        with torch.cuda.stream(stream), chosen:
            return torch.nn.functional.scaled_dot_product_attention(*shared)

    return call
