"""Launching ``route_heads.cu`` and ``route_tasks.cu``: which of two masks a head takes, on the GPU.

All goes to CuPy's current stream, and nothing waits: the host never learns the routes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tessera_cupy.kernels import launch
from tessera_cupy.kernels.catalog import DTYPES, builder
from tessera_cupy.kernels.launch import TASK, DevicePlan, packed_struct

#: ``RouteHeadsParams`` in route_heads.cu.
ROUTE_HEADS_PARAMS = np.dtype(
    [
        *[(name, np.uint64) for name in ("o", "lse", "route", "errors")],
        *[(name, np.int32) for name in ("rows", "head_dim")],
    ],
    align=True,
)
#: ``RouteTasksParams`` in route_tasks.cu.
ROUTE_TASKS_PARAMS = np.dtype(
    [
        *[(name, np.uint64) for name in ("base", "route", "tasks", "counts")],
        *[(name, np.int32) for name in ("base_tasks", "heads", "taken")],
    ],
    align=True,
)
_COUNTS = 8


def choose_routes(o: Any, lse: Any, arch: str, out: Any) -> Any:
    """Choose between two patterns by their sampled rows.

    Args:
        o: (heads, 5, rows, head_dim) CuPy array of 16-bit floats, C-contiguous: the rows' attention
            over the keys of both patterns, of pattern 0 alone, of pattern 1 alone, and of neither,
            those in two parts.
        lse: (heads, 5, rows) float32 CuPy array, C-contiguous, -inf where there is no such key; of
            each row one of the first two is finite, and the first or the third.
        arch: architecture of the current device.
        out: (heads,) int32 CuPy array, C-contiguous; takes the pattern that comes closer to all
            keys, 0 where both are as close.

    Returns:
        (heads, 2) float32 sums of squared errors.
    """
    import cupy

    heads, _, rows, head_dim = o.shape
    errors = cupy.empty((heads, 2), np.float32)
    config = builder(arch, f"route_heads_{DTYPES[o.dtype.name]}")
    params = packed_struct(
        ROUTE_HEADS_PARAMS,
        {
            "o": o.data.ptr,
            "lse": lse.data.ptr,
            "route": out.data.ptr,
            "errors": errors.data.ptr,
            "rows": rows,
            "head_dim": head_dim,
        },
    )
    kernel = launch.load(config, o.device.id)
    kernel((heads,), (32 * config.warps,), (params,))
    return errors


def routed(base: DevicePlan, route: Any, taken: int, arch: str, device: int) -> DevicePlan:
    """The plan of all heads on one route, made on the GPU.

    Args:
        base: the uploaded plan of one head, without split parts; it must outlive the result.
        route: (heads,) int32 CuPy array, C-contiguous.
        taken: the route whose heads are computed.
        arch: architecture of the current device.
        device: its ordinal.

    Returns:
        A plan with as many tasks at most as all heads have; no other head's rows are written.
    """
    import cupy

    heads = route.size
    memory = cupy.empty(_COUNTS * 8 + heads * base.task_count * TASK.itemsize, np.uint8)
    counts, tasks = memory[: _COUNTS * 8], memory[_COUNTS * 8 :]
    config = builder(arch, "route_tasks")
    params = packed_struct(
        ROUTE_TASKS_PARAMS,
        {
            "base": base.tasks.data.ptr,
            "route": route.data.ptr,
            "tasks": tasks.data.ptr,
            "counts": counts.data.ptr,
            "base_tasks": base.task_count,
            "heads": heads,
            "taken": taken,
        },
    )
    kernel = launch.load(config, device)
    kernel((heads,), (32 * config.warps,), (params,))
    return replace(base, task_count=heads * base.task_count, tasks=tasks, counts=counts, structs={})
