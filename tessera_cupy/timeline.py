"""When and where the tasks of a plan ran on a GPU, as kernels that keep time write it down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.cost.timeline import busiest_over_mean
from tessera_cupy.kernels import launch
from tessera_cupy.kernels.builders import TILE_COUNTS
from tessera_cupy.kernels.fetch import fetch
from tessera_cupy.kernels.launch import TASK, DevicePlan, Packed
from tessera_cupy.kernels.task_times import TASK_TIME
from tessera_cupy.profile import Stages


@dataclass(frozen=True, eq=False)
class Timeline:
    """What N tasks of an attention kernel did on a GPU, in launch order; measured.

    A task ends when all its rows are written. Where a CTA takes several tasks, some of its warps
    may be ahead with the next one by then; that one is taken to begin where this one ends.

    :func:`tessera_cupy.viz.draw_timeline` draws it, as it draws a
    :class:`tessera_cupy.cost.Prediction`.

    Attributes:
        gpu: the GPU's name.
        sms: its multiprocessors.
        sm: (N,) int64, the multiprocessor that each task ran on.
        begin_us: (N,) float64, microseconds after the first task began.
        end_us: (N,) float64, when it ended.
        steps: (N,) int32, the work of each: steps, of the tile's key columns.
        head: (N,) int32, query head ``b * q_heads + h``.
        first_row: (N,) int32, the first query row of its tile.
        is_part: (N,) bool, split-K parts, which are merged.
        merge_ms: milliseconds from the end of the attention kernel to that of the merge; 0 where
            none is launched. A plan that the GPU makes has one launched even if nothing is split.
        tick_us: what the times are multiples of, as far as they show: the GPU's timer counts
            nanoseconds, in steps of 0.032 us and up to 1 us. 0 where no two times differ.
    """

    gpu: str
    sms: int
    sm: NDArray[np.int64]
    begin_us: NDArray[np.float64]
    end_us: NDArray[np.float64]
    steps: NDArray[np.int32]
    head: NDArray[np.int32]
    first_row: NDArray[np.int32]
    is_part: NDArray[np.bool_]
    merge_ms: float
    tick_us: float

    def __len__(self) -> int:
        return len(self.sm)

    @property
    def attend_ms(self) -> float:
        """From the first task's begin to the last one's end, milliseconds."""
        return float(self.end_us.max(initial=0.0)) / 1e3

    @property
    def busy_us(self) -> NDArray[np.float64]:
        """(sms,) what the tasks on each multiprocessor took together, microseconds."""
        lengths = self.end_us - self.begin_us
        return np.bincount(self._place, lengths, minlength=self.sms).astype(np.float64)

    @property
    def balance(self) -> float:
        """The busiest multiprocessor's time over the mean of all; 1.0 is even, or no work."""
        return busiest_over_mean(self.busy_us)

    @property
    def slots(self) -> int:
        """Places for CTAs that the tasks show: multiprocessors, by the most that ran on one."""
        return self.sms * self._lanes[0]

    @property
    def slot(self) -> NDArray[np.int64]:
        """(N,) a place for each task, whose tasks follow each other.

        Place ``s`` is on multiprocessor ``s % sms``.
        """
        return self._lanes[1] * self.sms + self._place

    @property
    def start_ms(self) -> NDArray[np.float64]:
        """(N,) :attr:`begin_us` in milliseconds."""
        return self.begin_us / 1e3

    @property
    def end_ms(self) -> NDArray[np.float64]:
        """(N,) :attr:`end_us` in milliseconds."""
        return self.end_us / 1e3

    @cached_property
    def _place(self) -> NDArray[np.int64]:
        """Of each task its multiprocessor, below ``sms`` also where their numbers have gaps."""
        if self.sm.max(initial=0) < self.sms:
            return self.sm
        return np.unique(self.sm, return_inverse=True)[1].astype(np.int64)

    @cached_property
    def _lanes(self) -> tuple[int, NDArray[np.int64]]:
        """The most tasks at a time on a multiprocessor, and of each task its place among them."""
        order = np.lexsort((self.end_us, self.begin_us, self._place))
        lane, most = np.zeros(len(self), np.int64), 1
        for run in np.split(order, np.flatnonzero(np.diff(self._place[order])) + 1):
            free: list[float] = []  # since when
            times = self.begin_us[run].tolist(), self.end_us[run].tolist()
            for task, begin, end in zip(run.tolist(), *times, strict=True):
                # The one that became free last: that it did is why the task begins.
                known = [(since, -of) for of, since in enumerate(free) if since <= begin]
                lane[task] = of = -max(known)[1] if known else len(free)
                free[of : of + 1] = [end]
            most = max(most, len(free))
        return most, lane


def measure(
    packed: Packed,
    plan: DevicePlan,
    temporaries: Sequence[Any],
    *,
    runs: int,
    gpu: str,
    sms: int,
) -> Timeline:
    """Run a plan on the current stream by kernels that keep time, and wait.

    Args:
        packed: the operands.
        plan: the plan's arrays on the current device.
        temporaries: as for :func:`tessera_cupy.kernels.launch.attend`.
        runs: how many runs to choose the one of the median length from.
        gpu: the GPU's name.
        sms: its multiprocessors.
    """
    import cupy

    stream = cupy.cuda.get_current_stream()
    parts = packed.config.time_parts
    of_run = plan.task_count * parts * TASK_TIME.itemsize
    times = cupy.empty(max(1, runs * of_run), np.uint8)
    cupy.cuda.runtime.memsetAsync(times.data.ptr, 0, times.nbytes, stream.ptr)
    # Loads the kernels, and keeps the GPU busy while the host queues what is timed.
    launch.attend(packed, plan, 0, temporaries, times=times.data.ptr)
    stages = []
    for run in range(runs):
        stages.append(Stages(stream))
        at = times.data.ptr + run * of_run
        launch.attend(packed, plan, 0, temporaries, stages[-1].mark, at)
    count = plan.task_count
    if plan.counts is not None:
        count = int(fetch(plan.counts, len(TILE_COUNTS)).wait()[TILE_COUNTS.index("tasks")])
    records = _numbers(times, runs * of_run, TASK_TIME).reshape(runs, plan.task_count, parts)
    tasks = _numbers(plan.tasks, count * TASK.itemsize, TASK)
    merges = [stage.ms()["merge"] for stage in stages]
    return from_records(
        records[:, :count], tasks, merges, persistent=packed.persistent, gpu=gpu, sms=sms
    )


def _numbers(array: Any, nbytes: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Structs of whole 64-bit words from GPU memory, once they are there."""
    if not nbytes:
        return np.zeros(0, dtype)
    return fetch(array, nbytes // 8).wait().view(dtype)


def from_records(
    records: NDArray[Any],
    tasks: NDArray[Any],
    merges: Sequence[float],
    *,
    persistent: bool,
    gpu: str,
    sms: int,
) -> Timeline:
    """The timeline of the run of the median length.

    Args:
        records: (runs, N, parts) of :data:`TASK_TIME`, all written.
        tasks: (N,) of :data:`TASK`.
        merges: milliseconds of each run's merge.
        persistent: whether a CTA, alone on its multiprocessor, took one task after another.
        gpu: the GPU's name.
        sms: its multiprocessors.
    """
    assert (records["end"] >= records["begin"]).all()
    assert records["begin"].all(), "a task without a record"
    begins, ends = records["begin"].min(axis=2), records["end"].max(axis=2)
    zeros = begins.min(axis=1, initial=np.iinfo(np.uint64).max)
    lengths = ends.max(axis=1, initial=0) - zeros if len(tasks) else zeros
    chosen = int(np.argsort(lengths, kind="stable")[len(lengths) // 2])
    # Nanoseconds since 1970, or since the GPU's start, are too many for a float.
    begin, end = ((x[chosen] - zeros[chosen]).astype(np.int64) for x in (begins, ends))
    sm = records["sm"][chosen, :, 0].astype(np.int64)
    tick = np.gcd.reduce(np.concatenate([begin, end]))
    if persistent:
        begin = _after_each_other(sm, begin, end)
    return Timeline(
        gpu=gpu,
        sms=sms,
        sm=sm,
        begin_us=begin / 1e3,
        end_us=end / 1e3,
        steps=tasks["end"] - tasks["begin"],
        head=tasks["head"].copy(),
        first_row=tasks["first_row"].copy(),
        is_part=tasks["slot"] >= 0,
        merge_ms=float(merges[chosen]),
        tick_us=float(tick) / 1e3,
    )


def _after_each_other(
    sm: NDArray[np.int64], begin: NDArray[np.int64], end: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Begins that are not before the end of the multiprocessor's task before."""
    order = np.lexsort((begin, end, sm))
    before = np.concatenate([[0], np.where(np.diff(sm[order]) == 0, end[order][:-1], 0)])
    later = begin.copy()
    if len(order):
        later[order] = np.maximum(begin[order], before)
    return later
