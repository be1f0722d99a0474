"""Plans that GPUs made are kept for the next call, up to a bound; the oldest are made again."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tessera_cupy.kernels.launch import DevicePlan

#: Bytes of GPU memory, on each device, that kept plans may take; the last one is always kept.
KEPT_BYTES = 512 << 20


class Owner(Protocol):
    """What keeps plans alive."""

    def forget(self, device: int) -> None:
        """Drop the plan on a device."""


class _Ref(weakref.ref["DevicePlan"]):
    """A reference to a plan, and what is known of it when it has ended."""

    __slots__ = ("key", "nbytes", "owner")
    key: int
    nbytes: int
    owner: weakref.ref[Owner]


class _Kept:
    """The plans of one device, from the longest unused, and the bytes that they take."""

    def __init__(self) -> None:
        self.plans: OrderedDict[int, _Ref] = OrderedDict()
        self.nbytes = 0
        # Plans may end at any moment, also while their thread holds the lock: counted later.
        self.ended: deque[_Ref] = deque()

    def drop_ended(self) -> None:
        """Count those that have ended no more."""
        while self.ended:
            ref = self.ended.popleft()
            if self.plans.get(ref.key) is ref:
                del self.plans[ref.key]
                self.nbytes -= ref.nbytes

    def drop_oldest(self) -> Owner | None:
        """Count the longest unused one no more; returns its owner."""
        _, ref = self.plans.popitem(last=False)
        self.nbytes -= ref.nbytes
        return ref.owner()


_lock = threading.Lock()
_plans: dict[int, _Kept] = {}


def keep(plan: DevicePlan, device: int, owner: Owner) -> None:
    """Count a plan that its owner keeps; owners of the longest unused ones are told to forget.

    Args:
        plan: the plan.
        device: CUDA device ordinal.
        owner: what keeps the plan alive; it may end before.
    """
    forgetting = []
    with _lock:
        kept = _plans.get(device)
        if kept is None:
            kept = _plans[device] = _Kept()
        if kept.ended:
            kept.drop_ended()
        ref = _Ref(plan, kept.ended.append)
        ref.key = id(plan)
        # Of its parts, the lists take nearly all.
        rows = 0 if plan.rows is None else plan.rows.nbytes
        ref.nbytes = plan.fragments.nbytes + plan.tasks.nbytes + rows
        ref.owner = weakref.ref(owner)
        kept.plans[ref.key] = ref
        kept.nbytes += ref.nbytes
        while kept.nbytes > KEPT_BYTES and len(kept.plans) > 1:
            forgetting.append(kept.drop_oldest())
    for told in forgetting:
        if told is not None:
            told.forget(device)


def used(plan: DevicePlan, device: int) -> None:
    """Note that a kept plan is used now."""
    with _lock:
        kept = _plans.get(device)
        if kept is not None and id(plan) in kept.plans:
            kept.plans.move_to_end(id(plan))
