"""Times of work on a GPU, by CUDA events, and torch's dense attention to compare with."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

from tessera_cupy.interop import import_cupy


def name() -> str:
    """The current GPU's name."""
    cupy = import_cupy()
    return str(cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode())


def median_ms(
    call: Callable[[], object], on_run: Callable[[], None], *, warm_up: int, runs: int
) -> float:
    """Median time of a call on the current CuPy stream, in milliseconds, by CUDA events."""
    cupy = import_cupy()
    times = []
    for run in range(warm_up + runs):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        call()
        end.record()
        end.synchronize()
        if run >= warm_up:
            times.append(cupy.cuda.get_elapsed_time(begin, end))
        on_run()
    return float(np.median(times))


def torch_sdpa(q: Any, k: Any, v: Any) -> Callable[[], object] | None:
    """Dense attention of torch on the current CuPy stream; None where torch has no GPU.

    Args:
        q: (batch, heads, tokens, d) CuPy bfloat16 array.
        k: the same.
        v: the same.
    """
    if find_spec("torch") is None:
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    cupy = import_cupy()
    # Through int16, which every version of both libraries exchanges.
    shared = [torch.from_dlpack(x.view(cupy.int16)).view(torch.bfloat16) for x in (q, k, v)]
    stream = torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr)

    def call() -> object:
        with torch.cuda.stream(stream):
            return torch.nn.functional.scaled_dot_product_attention(*shared)

    return call
