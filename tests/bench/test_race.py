import numpy as np
import pytest

from tessera_cupy.bench.race import MOST_CALLS, race


class Track:
    """Runs of contestants with given times, on a clock that drifts."""

    def __init__(self, drift=lambda run: 1.0):
        self.runs, self._drift = [], drift

    def __call__(self, ms, count):
        self.runs.append((ms, count))
        return ms * self._drift(len(self.runs))


def test_who_is_far_behind_leaves_early():
    track = Track()
    found = race({"a": 1.0, "b": 1.2, "c": 1.4, "d": 2.1}, track, rounds=6, run_ms=1)
    assert [len(one.rounds) for one in found.values()] == [6, 4, 2, 0]
    assert [one.whole for one in found.values()] == [True, False, False, False]
    assert [one.ms for one in found.values()] == pytest.approx([1.0, 1.2, 1.4, 2.1])


def test_a_short_call_that_seems_hopeless_gets_another():
    """The second contestant is interrupted the first time, the third is slow."""
    track = Track(lambda run: 5.0 if run == 2 else 1.0)
    found = race({"a": 0.02, "b": 0.021, "c": 0.1}, track, rounds=4, run_ms=0.2)
    assert [len(one.rounds) for one in found.values()] == [4, 4, 0]
    assert found["b"].ms == pytest.approx(0.021)
    assert [ms for ms, count in track.runs if count == 1] == [0.02, 0.021, 0.1, 0.021, 0.1]


def test_turns_are_taken_in_an_order_that_is_reversed_each_time():
    track = Track()
    race({"a": 1.0, "b": 1.1}, track, rounds=3, run_ms=1)
    assert [ms for ms, _ in track.runs] == [1.0, 1.1, 1.0, 1.1, 1.1, 1.0, 1.0, 1.1]


def test_runs_are_as_long_as_asked_and_no_longer_than_many_calls():
    track = Track()
    race({"a": 0.5, "b": 0.8}, track, rounds=1, run_ms=2.0)
    assert track.runs[2:] == [(0.5, 4), (0.8, 3)]
    track = Track()
    race({"a": 0.001}, track, rounds=1, run_ms=2.0)
    assert track.runs[1:] == [(0.001, MOST_CALLS)]


def test_a_clock_that_drifts_changes_no_ratio():
    """Slower by a half from turn to turn, yet within a turn alike: medians alone would be off."""
    calls = {"a": 1.0, "b": 1.1, "c": 1.05}
    drift = Track(lambda run: 1.0 if run <= 3 else 1.5 ** ((run - 4) // 3 % 4))
    found = race(calls, drift, rounds=8, run_ms=1)
    assert found["b"].ms / found["a"].ms == pytest.approx(1.1)
    assert found["c"].ms / found["a"].ms == pytest.approx(1.05)
    assert max(found["a"].rounds) / min(found["a"].rounds) > 3


def test_times_of_noise_are_near_the_true_ones():
    rng = np.random.default_rng(0)
    noise = Track(lambda run: float(np.exp(0.02 * rng.standard_normal())))
    errors = []
    for _ in range(50):
        found = race({"a": 1.0, "b": 1.03}, noise, rounds=12, run_ms=1)
        errors.append(found["b"].ms / found["a"].ms / 1.03 - 1)
    assert np.abs(np.mean(errors)) < 0.005
    assert np.std(errors) < 0.015


def test_nobody_is_no_race():
    assert race({}, Track(), rounds=2, run_ms=1) == {}
