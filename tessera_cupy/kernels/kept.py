"""Plans that GPUs made are kept for the next call, up to a bound; the oldest are made again."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tessera_cupy.kernels.launch import DevicePlan

#: Bytes of GPU memory, on each device, that kept plans may take; the last one is always kept.
KEPT_BYTES = 512 << 20


class _Ref(weakref.ref["DevicePlan"]):
    """A reference to a plan, and its key, which outlives it."""

    __slots__ = ("key",)
    key: int


class _Entry(NamedTuple):
    ref: _Ref
    nbytes: int
    forget: Callable[[], None]


class _Kept:
    """The plans of one device, from the longest unused, and the bytes that they take."""

    def __init__(self) -> None:
        self.plans: OrderedDict[int, _Entry] = OrderedDict()
        self.nbytes = 0
        # Plans may end at any moment, also while their thread holds the lock: counted later.
        self.ended: deque[_Ref] = deque()

    def add(self, plan: DevicePlan, nbytes: int, forget: Callable[[], None]) -> None:
        """Count a plan."""
        ref = _Ref(plan, self.ended.append)
        ref.key = id(plan)
        self.plans[ref.key] = _Entry(ref, nbytes, forget)
        self.nbytes += nbytes

    def drop_ended(self) -> None:
        """Count those that have ended no more."""
        while self.ended:
            ref = self.ended.popleft()
            entry = self.plans.get(ref.key)
            if entry is not None and entry.ref is ref:
                del self.plans[ref.key]
                self.nbytes -= entry.nbytes

    def drop_oldest(self) -> Callable[[], None]:
        """Count the longest unused one no more; returns what makes its owner forget it."""
        _, entry = self.plans.popitem(last=False)
        self.nbytes -= entry.nbytes
        return entry.forget


_lock = threading.Lock()
_plans: dict[int, _Kept] = {}


def keep(plan: DevicePlan, device: int, forget: Callable[[], None]) -> None:
    """Count a plan that its owner keeps; owners of the longest unused ones are told to forget.

    Args:
        plan: the plan, which the owner keeps alive.
        device: CUDA device ordinal.
        forget: drops the owner's reference; must hold no reference to the owner itself.
    """
    forgotten = []
    with _lock:
        kept = _plans.get(device)
        if kept is None:
            kept = _plans[device] = _Kept()
        kept.drop_ended()
        # Of its parts, the lists take nearly all.
        kept.add(plan, plan.fragments.nbytes + plan.tasks.nbytes, forget)
        while kept.nbytes > KEPT_BYTES and len(kept.plans) > 1:
            forgotten.append(kept.drop_oldest())
    for forget_it in forgotten:
        forget_it()


def used(plan: DevicePlan, device: int) -> None:
    """Note that a kept plan is used now."""
    with _lock:
        kept = _plans.get(device)
        if kept is not None and id(plan) in kept.plans:
            kept.plans.move_to_end(id(plan))
