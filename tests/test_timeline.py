"""Timelines from records that are written down here: zero, order, places, balance, ticks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tessera_cupy import viz
from tessera_cupy.kernels.launch import TASK
from tessera_cupy.kernels.task_times import TASK_TIME
from tessera_cupy.timeline import Timeline, from_records

#: Far from 0, where floats are 256 apart.
ZERO = 1_700_000_000_000_000_000


def records(*runs: Any) -> Any:
    """Of (begin, end, sm) of each task, or of a list of these of its parts, in ns after ZERO."""
    parts = [[task if isinstance(task, list) else [task] for task in run] for run in runs]
    made = np.zeros(np.shape(parts)[:3], TASK_TIME)
    for i, name in enumerate(TASK_TIME.names or ()):
        made[name] = np.array(parts)[..., i]
    made["begin"] += np.uint64(ZERO)
    made["end"] += np.uint64(ZERO)
    return made


def tasks(count: int) -> Any:
    made = np.zeros(count, TASK)
    made["head"] = np.arange(count) % 2
    made["begin"], made["end"] = 3, np.arange(count) + 4
    made["first_row"] = 64 * np.arange(count)
    made["slot"] = -1
    return made


def timeline(*runs: Any, persistent: bool = False, sms: int = 3, **given: Any) -> Timeline:
    arguments = {"tasks": tasks(len(runs[0])), "merges": [0.0] * len(runs)} | given
    return from_records(records(*runs), **arguments, persistent=persistent, gpu="a GPU", sms=sms)


def test_times_count_from_the_first_begin() -> None:
    made = timeline([(5_000, 6_024, 2), (4_000, 4_064, 0), (6_048, 7_000, 2)])
    assert made.begin_us.tolist() == [1.0, 0.0, 2.048]
    assert made.end_us.tolist() == [2.024, 0.064, 3.0]
    assert made.attend_ms == 0.003
    assert made.sm.tolist() == [2, 0, 2]
    assert made.steps.tolist() == [1, 2, 3]
    assert made.head.tolist() == [0, 1, 0]
    assert made.first_row.tolist() == [0, 64, 128]
    assert not made.is_part.any()
    assert len(made) == 3
    # All are multiples of 8 ns, as 1,000, 2,024, 64, 2,048 and 3,000 are.
    assert made.tick_us == 0.008


def test_the_balance_is_over_all_multiprocessors() -> None:
    made = timeline([(0, 6_000, 0), (0, 1_000, 1), (1_000, 3_000, 1)])
    assert made.busy_us.tolist() == [6.0, 3.0, 0.0]
    assert made.balance == 2.0
    assert made.slots == 3
    assert made.slot.tolist() == [0, 1, 1]


def test_tasks_that_run_together_have_places_of_their_own() -> None:
    """Two at a time on multiprocessor 1; the third begins where the first one ends."""
    made = timeline([(0, 10, 1), (5, 30, 1), (10, 20, 1), (0, 9, 0)], sms=2)
    assert made.slots == 4
    assert made.slot.tolist() == [1, 3, 1, 0]
    assert (made.start_ms * 1e6).round().tolist() == [0, 5, 10, 0]
    assert (made.end_ms * 1e6).round().tolist() == [10, 30, 20, 9]


def test_a_task_takes_the_place_that_became_free_last() -> None:
    made = timeline([(0, 30, 0), (0, 10, 0), (0, 20, 0), (20, 50, 0), (20, 40, 0)], sms=1)
    assert made.slots == 3
    assert made.slot.tolist()[:3] == [2, 0, 1]  # by their ends
    # Of two that begin as one ends, the shorter one takes its place.
    assert (made.slot[4], made.slot[3]) == (made.slot[2], made.slot[1])


def test_tasks_shorter_than_a_tick_have_places_that_can_be_drawn() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    made = timeline([(10, 20, 0), (10, 10, 0), (0, 10, 0), (10, 10, 0), (0, 20, 1)], sms=2)
    assert made.slots == 2
    viz.draw_tasks(figure.subplots(), made.slot, made.start_ms, made.end_ms, slots=made.slots)
    made = timeline([(0, 30, 0), (10, 10, 0)], sms=1)
    assert (made.slots, made.slot.tolist()) == (2, [0, 1])


def test_parts_begin_with_the_first_and_end_with_the_last() -> None:
    made = timeline([[(100, 400, 0), (50, 300, 0)], [(0, 90, 1), (10, 500, 1)]])
    assert (made.begin_us * 1e3).round().tolist() == [50, 0]
    assert (made.end_us * 1e3).round().tolist() == [400, 500]


def test_a_cta_s_next_task_begins_where_the_last_one_ended() -> None:
    """Its first warpgroup was ahead by 20; task 1 is another multiprocessor's."""
    of_cta = [(0, 100, 0), (0, 150, 1), (80, 250, 0), (300, 400, 0)]
    made = timeline(of_cta, persistent=True)
    assert (made.begin_us * 1e3).round().tolist() == [0, 0, 100, 300]
    assert made.slots == 3
    assert made.busy_us.round(3).tolist() == [0.35, 0.15, 0.0]
    # Without that, both would be there at once.
    assert timeline(of_cta).slots == 6


def test_the_run_of_the_median_length_is_taken() -> None:
    runs = [[(0, 500, 0), (0, 400, 1)], [(9, 909, 0), (0, 10, 1)], [(0, 300, 0), (0, 20, 2)]]
    made = timeline(*runs, merges=[0.1, 0.2, 0.3])
    assert made.attend_ms == pytest.approx(500e-6)
    assert made.merge_ms == 0.1
    assert made.sm.tolist() == [0, 1]


def test_numbers_of_multiprocessors_with_gaps() -> None:
    made = timeline([(0, 30, 7), (0, 10, 131), (0, 20, 4)])
    assert made.sm.tolist() == [7, 131, 4]
    assert made.slot.tolist() == [1, 2, 0]
    assert (1e3 * made.busy_us).round().tolist() == [20, 30, 10]


def test_split_parts_are_said_to_be() -> None:
    of = tasks(2)
    of["slot"] = [4, -1]
    assert timeline([(0, 1, 0), (0, 1, 1)], tasks=of).is_part.tolist() == [True, False]


def test_no_tasks_take_no_time() -> None:
    made = from_records(
        np.zeros((2, 0, 2), TASK_TIME), tasks(0), [0.0, 0.0], persistent=True, gpu="a GPU", sms=4
    )
    assert (len(made), made.attend_ms, made.balance, made.tick_us) == (0, 0.0, 1.0, 0.0)
    assert (made.slots, made.slot.tolist()) == (4, [])
    assert made.busy_us.tolist() == [0.0] * 4
