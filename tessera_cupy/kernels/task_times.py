"""What kernels that keep time are passed and write; the structs of ``common/task_times.cuh``."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: ``TaskTime``: begin and end in nanoseconds of the GPU's timer, and the multiprocessor. An array
#: of them is (tasks, parts of a CTA).
TASK_TIME = np.dtype([(name, np.uint64) for name in ("begin", "end", "sm")])
# What the by-value structs of each kernel are aligned to: tensor maps, or pointers.
_ALIGNMENT = {"attend_mma": 8, "attend_wgmma": 64}


def timed_params(params: NDArray[Any], kernel: str, times: int) -> NDArray[Any]:
    """The struct ``Timed``: the params of a launch, and where the times go.

    Args:
        params: one struct, as bytes.
        kernel: ``"attend_mma"`` or ``"attend_wgmma"``.
        times: address of the array of :data:`TASK_TIME`.

    >>> timed_params(np.zeros(1, "V896"), "attend_wgmma", 1).dtype.itemsize
    960
    """
    made = np.zeros(1, _timed(params.dtype.itemsize, _ALIGNMENT[kernel]))
    made["params"], made["times"] = params, times
    return made.view(f"V{made.dtype.itemsize}")


@cache
def _timed(itemsize: int, alignment: int) -> np.dtype[Any]:
    whole = -(-(itemsize + 8) // alignment) * alignment
    return np.dtype(
        {
            "names": ["params", "times"],
            "formats": [f"V{itemsize}", np.uint64],
            "offsets": [0, itemsize],
            "itemsize": whole,
        }
    )
