"""Which CTA runs a task, and when: tasks in launch order on the slots that a GPU has for CTAs."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Tasks up to which the first free slot is looked for task by task.
_ONE_BY_ONE = 100_000

#: Slot and start of each task.
Placed = tuple[NDArray[np.int64], NDArray[np.float64]]


def busiest_over_mean(busy: NDArray[Any]) -> float:
    """How much longer than all on average the busiest works; 1.0 is even, or no work.

    >>> busiest_over_mean(np.array([3.0, 1.0, 2.0]))
    1.5
    """
    return float(busy.max() / busy.mean()) if busy.any() else 1.0


def first_free(lengths: NDArray[np.float64], slots: int) -> Placed:
    """Each task on the slot that is free first, as the hardware starts CTAs.

    Of more than 100,000 tasks, as many at a time as there are slots, in the order in which these
    become free.

    Args:
        lengths: (N,) how long each task takes, in any unit.
        slots: how many run at a time.

    Returns:
        (N,) the slot of each task and (N,) its start.

    >>> slot, start = first_free(np.array([3.0, 1.0, 1.0, 1.0]), 2)
    >>> slot.tolist(), start.tolist()
    ([0, 1, 1, 1], [0.0, 0.0, 1.0, 2.0])
    """
    slot = np.zeros(len(lengths), np.int64)
    start = np.zeros(len(lengths))
    if len(lengths) > _ONE_BY_ONE:
        free = np.zeros(slots)
        for first in range(0, len(lengths), slots):
            these = slice(first, min(first + slots, len(lengths)))
            order = np.argsort(free, kind="stable")[: these.stop - first]
            slot[these], start[these] = order, free[order]
            free[order] += lengths[these]
        return slot, start
    heap = [(0.0, i) for i in range(slots)]
    for i, length in enumerate(lengths.tolist()):
        at, of = heap[0]
        slot[i], start[i] = of, at
        heapq.heapreplace(heap, (at + length, of))
    return slot, start


def in_turn(lengths: NDArray[np.float64], slots: int) -> Placed:
    """Tasks dealt to the slots in turn, as a persistent kernel takes them.

    Args and returns as of :func:`first_free`.

    >>> slot, start = in_turn(np.array([3.0, 1.0, 1.0, 1.0]), 2)
    >>> slot.tolist(), start.tolist()
    ([0, 1, 0, 1], [0.0, 0.0, 3.0, 1.0])
    """
    rounds = -(-len(lengths) // slots)
    table = np.zeros((rounds, slots))
    table.flat[: len(lengths)] = lengths
    start = np.cumsum(table, axis=0) - table
    return np.arange(len(lengths)) % slots, start.ravel()[: len(lengths)]
