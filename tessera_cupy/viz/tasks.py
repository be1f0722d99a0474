"""Tasks on the SMs of a GPU over time, and how evenly they are spread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.cost import predict
from tessera_cupy.cost.timeline import busiest_over_mean
from tessera_cupy.errors import wrong
from tessera_cupy.plan import Plan
from tessera_cupy.timeline import Timeline
from tessera_cupy.viz import arguments, style
from tessera_cupy.viz.boxes import Boxes

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# Tasks that end and begin at one time may differ in the last digits.
_ROUNDING = 1e-6
_MOST_EDGED = 32
_MOST_NAMED = len(style.STEP_COLOURS)


class Placed(Protocol):
    """Where and when N tasks run: ``predict(plan)`` of ``cost``, or ``plan.timeline(q, k, v)``."""

    @property
    def slots(self) -> int:
        """How many CTAs run at a time."""

    @property
    def slot(self) -> NDArray[np.int64]:
        """(N,) the slot of each task, in launch order."""

    @property
    def start_ms(self) -> NDArray[np.float64]:
        """(N,) when each starts."""

    @property
    def end_ms(self) -> NDArray[np.float64]:
        """(N,) when each ends."""


def draw_timeline(ax: Axes, plan: Plan, placed: Placed | None = None) -> None:
    """Draw where and when a plan's tasks run, as :func:`draw_tasks` does: predicted or measured.

    The title says which. To compare them, draw both above each other over one scale of time.

    Args:
        ax: where to draw.
        plan: the plan.
        placed: the slot, start and end of each of its tasks, such as what
            :meth:`tessera_cupy.Plan.timeline` measured on a GPU; None asks
            :func:`tessera_cupy.cost.predict`.

    Raises:
        TypeError: an argument of another kind, ``ax`` that is no axes among them.
        ValueError: another number of tasks than the plan has, or as :func:`draw_tasks`.

    >>> from matplotlib.figure import Figure
    >>> from tessera_cupy import ArraySpec, BlockMask, make_plan
    >>> mask = BlockMask.from_dense(np.tri(8, dtype=bool), (64, 64))
    >>> plan = make_plan(mask, ArraySpec((1, 1, 512, 128)), arch="sm_90a")
    >>> draw_timeline(Figure().subplots(), plan)
    """
    arguments.check_axes(ax)
    arguments.check_kind("plan", plan, (Plan,), "pass make_plan(mask, q, k, v)")
    tasks = plan.tasks()
    if placed is None:
        placed = predict(plan)
    if len(placed.slot) != len(tasks):
        got, fix = f"{len(placed.slot)} tasks", "predict or measure this plan"
        raise ValueError(wrong("placed", f"the plan's {len(tasks)} tasks", got, fix))
    draw_tasks(
        ax,
        placed.slot,
        placed.start_ms,
        placed.end_ms,
        tile=tasks.task_tile,
        head=tasks.task_head,
        slots=placed.slots,
    )
    of = f"measured on {placed.gpu}," if isinstance(placed, Timeline) else "predicted for"
    ax.set_title(f"{of} {plan.spec.name}:\n{ax.get_title()}", fontsize=10)


def load_balance(slot: Any, start: Any, end: Any, *, slots: int | None = None) -> float:
    """The busy time of the busiest slot over the mean of all slots; 1.0 is even, or no work.

    Args:
        slot: (N,) integers, as :func:`draw_tasks` takes them.
        start: (N,) ms.
        end: (N,) ms.
        slots: the same.

    Raises:
        TypeError, ValueError: as :func:`draw_tasks`.

    >>> load_balance([0, 1, 1], [0, 0, 2], [2, 2, 4])
    1.3333333333333333
    """
    at, begins, ends, count = _checked(slot, start, end, slots)
    busy = _busy(at, begins, ends, count)
    return busiest_over_mean(busy)


def draw_tasks(
    ax: Axes,
    slot: Any,
    start: Any,
    end: Any,
    *,
    tile: Any = None,
    head: Any = None,
    slots: int | None = None,
) -> None:
    """Draw which task runs where and when: a line a slot, a box a task, over milliseconds.

    A slot is a place for one CTA, an SM or a part of one. What is hatched is idle, until the last
    task of all ends. The dashed line is where all would end if the work were spread evenly; the
    title has the busy time of the busiest slot over the mean, 1.00 where it is.

    Args:
        ax: where to draw.
        slot: (N,) integers from 0, the slot of each task.
        start: (N,) ms, when it begins.
        end: (N,) ms, when it ends; tasks of a slot follow each other.
        tile: (N,) integers, its tile, which is written where there is room.
        head: (N,) integers, its head, which gives the colour.
        slots: how many slots there are; by default no more than have tasks.

    Raises:
        TypeError: slots or heads that are no integers, ``ax`` that is no axes.
        ValueError: no tasks, arrays that differ in length, a slot out of range, a task that ends
            before it begins, or two at once in a slot.

    >>> from matplotlib.figure import Figure
    >>> ax = Figure().subplots()
    >>> draw_tasks(ax, [0, 1, 1], [0, 0, 2], [2, 2, 4], head=[0, 0, 1])
    >>> print(ax.get_title())
    3 tasks on 2 slots: 4.000 ms, busiest / mean 1.33
    """
    arguments.check_axes(ax)
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    at, begins, ends, count = _checked(slot, start, end, slots)
    heads = np.zeros(len(at), int) if head is None else _integers(head, "head", len(at))
    busy = _busy(at, begins, ends, count)
    last = float(ends.max())
    work, idle = Boxes(), Boxes()
    for of, begin, stop, colour in zip(at, begins, ends, heads, strict=True):
        work.add(begin, of, stop - begin, 1, int(colour))
    for of, begin, stop in _gaps(at, begins, ends, count, last):
        idle.add(begin, of, stop - begin, 1, 0)
    idle.hatch(ax)
    work.fill(ax, edge=0.0)
    _edge(ax, at, begins, count)
    if tile is not None:
        tiles = _integers(tile, "tile", len(at))
        work.number(ax, last or 1.0, count, [str(number) for number in tiles])
    mean = float(busy.mean())
    ax.axvline(mean, color=style.INK, linewidth=1.5, linestyle="--")
    ax.set_xlim(0, last or 1.0)
    ax.set_ylim(count, 0)
    style.number_lines(ax, count)
    ax.set_xlabel("time (ms)")
    ax.set_ylabel("SM slot")
    balance = busiest_over_mean(busy)
    ax.set_title(
        f"{len(at):,} tasks on {count:,} slots: {last:.3f} ms, busiest / mean {balance:.2f}",
        fontsize=10,
    )
    handles: list[Any] = []
    found = np.unique(heads)
    if head is None or len(found) > _MOST_NAMED:
        name = "tasks" if head is None else f"tasks; {len(found)} heads take these colours in turn"
        used = style.STEP_COLOURS[:1] if head is None else style.STEP_COLOURS
        handles.append(tuple(Patch(facecolor=colour, edgecolor=style.INK) for colour in used))
        labels = [name]
    else:
        colours = [style.STEP_COLOURS[number % len(style.STEP_COLOURS)] for number in found]
        handles += [Patch(facecolor=colour, edgecolor=style.INK) for colour in colours]
        labels = [f"head {number}" for number in found]
    handles += [Patch(**style.WASTE), Line2D([], [], color=style.INK, linestyle="--")]
    labels += ["idle", f"the end of an even spread, {mean:.3f} ms"]
    style.legend_below(ax, handles, columns=len(handles), labels=labels)


def _edge(ax: Axes, at: NDArray[Any], begins: NDArray[Any], count: int) -> None:
    """Lines where tasks begin, and between slots while there are few."""
    from matplotlib.collections import LineCollection

    ends: Any = np.stack([begins, at, begins, at + 1], axis=1).reshape(-1, 2, 2)
    ax.add_collection(LineCollection(ends, colors=style.INK, linewidths=0.5))
    if count <= _MOST_EDGED:
        ax.hlines(
            np.arange(1, count), 0, 1, style.INK, linewidth=0.5, transform=ax.get_yaxis_transform()
        )


def _checked(
    slot: Any, start: Any, end: Any, slots: int | None
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], int]:
    """Tasks by slot and time, and the count of slots; in the order in which they came."""
    at = _integers(slot, "slot", None)
    if not len(at):
        raise ValueError(wrong("slot", "at least one task", "none", "pass a plan's tasks"))
    times = [style.host(array, name) for array, name in ((start, "start"), (end, "end"))]
    for name, array in zip(("start", "end"), times, strict=True):
        if array.shape != at.shape:
            got, fix = f"shape {array.shape}", "pass a time for each task"
            raise ValueError(wrong(name, f"shape {at.shape}, as slot has", got, fix))
    begins, ends = (array.astype(float) for array in times)
    if not (np.isfinite(begins).all() and np.isfinite(ends).all() and (begins >= 0).all()):
        fix = "count from the launch, in ms"
        raise ValueError(wrong("start", "finite times from 0", "others", fix))
    if (ends < begins).any():
        task = int(np.flatnonzero(ends < begins)[0])
        got = f"{ends[task]:g} before {begins[task]:g} of task {task}"
        raise ValueError(wrong("end", "no task that ends before it begins", got, "swap the two"))
    count = int(at.max()) + 1 if slots is None else slots
    if at.min() < 0 or at.max() >= count:
        got = f"slots {at.min()} to {at.max()}"
        raise ValueError(wrong("slot", f"from 0 to {count - 1}", got, "count the slots from 0"))
    order = np.lexsort([ends, begins, at])
    same = at[order][1:] == at[order][:-1]
    early = begins[order][1:] < ends[order][:-1] - _ROUNDING * max(1.0, float(ends.max()))
    if (same & early).any():
        task = int(order[1:][same & early][0])
        got = f"task {task}, which begins at {begins[task]:g} ms in slot {at[task]} that is busy"
        fix = "give each place for a CTA a slot of its own"
        raise ValueError(wrong("start", "tasks of a slot one after another", got, fix))
    return at, begins, ends, count


def _integers(array: Any, name: str, length: int | None) -> NDArray[Any]:
    found = style.host(array, name)
    if found.dtype.kind not in "iu":
        raise TypeError(wrong(name, "integers", f"dtype {found.dtype}", "cast to int32 first"))
    if found.ndim != 1 or (length is not None and len(found) != length):
        expected = "shape (N,)" if length is None else f"shape ({length},), as slot has"
        raise ValueError(wrong(name, expected, f"shape {found.shape}", "pass one for each task"))
    return found.astype(np.int64)


def _busy(
    at: NDArray[Any], begins: NDArray[Any], ends: NDArray[Any], count: int
) -> NDArray[np.float64]:
    """(count,) ms that each slot works."""
    return np.bincount(at, ends - begins, minlength=count).astype(np.float64)


def _gaps(
    at: NDArray[Any], begins: NDArray[Any], ends: NDArray[Any], count: int, last: float
) -> list[tuple[int, float, float]]:
    """Slot, begin and end of each time that a slot is idle, from 0 to the last end of all."""
    order = np.lexsort([ends, begins, at])
    # A task of no length at the end of each slot closes its last gap.
    slots = np.concatenate([at[order], np.arange(count)])
    starts = np.concatenate([begins[order], np.full(count, last)])
    stops = np.concatenate([ends[order], np.full(count, last)])
    by_slot = np.argsort(slots, kind="stable")
    slots, starts, stops = slots[by_slot], starts[by_slot], stops[by_slot]
    before = np.concatenate([[0.0], stops[:-1]])
    before[np.concatenate([[True], slots[1:] != slots[:-1]])] = 0.0
    idle = np.flatnonzero(starts > before + _ROUNDING * last)
    return list(
        zip(slots[idle].tolist(), before[idle].tolist(), starts[idle].tolist(), strict=True)
    )
