"""Tasks on slots, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tessera_cupy.cost import timeline


def placed(how: Any, lengths: list[float], slots: int) -> tuple[list[int], list[float]]:
    slot, start = how(np.array(lengths, np.float64), slots)
    return slot.tolist(), start.tolist()


def test_a_task_takes_the_slot_that_is_free_first() -> None:
    # Slots 0, 1: 5 and 1; the next three go to slot 1 at 1, 3 and 4; then both are free at 5.
    assert placed(timeline.first_free, [5, 1, 2, 1, 1, 1], 2) == (
        [0, 1, 1, 1, 1, 0],
        [0, 0, 1, 3, 4, 5],
    )


def test_tasks_in_turn_wait_for_their_own_slot() -> None:
    assert placed(timeline.in_turn, [5, 1, 2, 1, 1, 1], 2) == (
        [0, 1, 0, 1, 0, 1],
        [0, 0, 5, 1, 7, 2],
    )


@pytest.mark.parametrize("how", [timeline.first_free, timeline.in_turn])
def test_no_tasks(how: Any) -> None:
    assert placed(how, [], 3) == ([], [])


def test_many_tasks_are_placed_a_round_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "_ONE_BY_ONE", 2)
    # Rounds of two: 5 and 1; 2 where 1 was and 1 where 5 was; the last on slot 1, free at 3.
    assert placed(timeline.first_free, [5, 1, 2, 1, 1], 2) == ([0, 1, 1, 0, 1], [0, 0, 1, 5, 3])


def test_a_round_at_a_time_differs_little_where_lengths_do(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.sort(np.random.default_rng(0).uniform(1, 3, 20_000))[::-1]
    slot, start = timeline.first_free(lengths, 264)
    monkeypatch.setattr(timeline, "_ONE_BY_ONE", 1)
    rounds = timeline.first_free(lengths, 264)
    assert (rounds[1] + lengths).max() == pytest.approx((start + lengths).max(), rel=0.02)
    assert len(np.unique(slot)) == len(np.unique(rounds[0])) == 264
