"""Plans that GPUs made are kept for the next call, up to a bound; the oldest are made again."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tessera_cupy.kernels.launch import DevicePlan

#: Bytes of GPU memory, on each device, that kept plans may take; the last one is always kept.
KEPT_BYTES = 512 << 20

_lock = threading.Lock()
# Of each device, from the longest unused: the plan, its bytes, and what makes its owner forget it.
_plans: dict[int, OrderedDict[int, tuple[weakref.ref[DevicePlan], int, Callable[[], None]]]] = {}


def keep(plan: DevicePlan, device: int, forget: Callable[[], None]) -> None:
    """Count a plan that its owner keeps; owners of the longest unused ones are told to forget.

    Args:
        plan: the plan, which the owner keeps alive.
        device: CUDA device ordinal.
        forget: drops the owner's reference; must hold no reference to the owner itself.
    """
    forgotten = []
    with _lock:
        plans = _plans.setdefault(device, OrderedDict())
        # Of its parts, the lists take nearly all.
        nbytes = int(plan.fragments.nbytes + plan.tasks.nbytes)
        plans[id(plan)] = (weakref.ref(plan), nbytes, forget)
        for key in [key for key, (alive, _, _) in plans.items() if alive() is None]:
            del plans[key]
        total = sum(nbytes for _, nbytes, _ in plans.values())
        while total > KEPT_BYTES and len(plans) > 1:
            _, (_, nbytes, forget_it) = plans.popitem(last=False)
            total -= nbytes
            forgotten.append(forget_it)
    for forget_it in forgotten:
        forget_it()


def used(plan: DevicePlan, device: int) -> None:
    """Note that a kept plan is used now."""
    with _lock:
        plans = _plans.get(device)
        if plans is not None and id(plan) in plans:
            plans.move_to_end(id(plan))
