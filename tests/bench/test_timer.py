"""The timer, against a simulated GPU whose times are known."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tessera_cupy.bench import gpu


def nothing() -> None:
    pass


@pytest.mark.parametrize("work", [0.06, 0.5, 3.0, 22.0])
def test_the_hosts_way_to_the_first_launch_is_not_counted(queue: Any, work: float) -> None:
    def call() -> None:
        queue.launch("call", host=min(0.2, 0.9 * work), work=work)

    assert gpu.median_ms(call, nothing, warm_up=2, runs=5) == pytest.approx(work, rel=1e-9)


def test_a_call_that_the_host_cannot_keep_up_with_takes_the_hosts_time(queue: Any) -> None:
    def call() -> None:
        queue.launch("call", host=0.3, work=0.1)

    assert gpu.median_ms(call, nothing, warm_up=2, runs=5) == pytest.approx(0.3, rel=0.01)


def test_a_run_is_one_untimed_call_and_as_many_as_take_20_ms(queue: Any) -> None:
    gpu.median_ms(lambda: queue.launch("call", host=0.01, work=3.0), nothing, warm_up=1, runs=2)
    warm = ["call", "event", "call", "event"]
    run = ["call", "event", *["call"] * 7, "event"]
    assert queue.log == [*warm, *run, *run]
    assert math.ceil(gpu.RUN_MS / 3.0) == 7


def test_a_first_call_that_compiles_does_not_shorten_the_runs(queue: Any) -> None:
    costs = iter([5000.0])

    def call() -> None:
        queue.launch("call", host=next(costs, 0.01), work=1.0)

    assert gpu.median_ms(call, nothing, warm_up=1, runs=1) == pytest.approx(1.0)
    assert queue.log.count("call") == 2 + 21


def test_contestants_take_turns_and_turns_are_reversed(queue: Any) -> None:
    seen = []
    calls = {
        name: lambda name=name, work=work: queue.launch(name, host=0.01, work=work)
        for name, work in (("a", 25.0), ("b", 30.0), ("c", 40.0))
    }
    times = gpu.medians_ms(calls, lambda: seen.append(queue.log[-2]), warm_up=1, runs=3)
    assert times == pytest.approx({"a": 25.0, "b": 30.0, "c": 40.0})
    assert "".join(seen) == "abccbaabccba"


def test_it_is_the_median_of_the_runs_that_count(queue: Any) -> None:
    # Two calls a run, of which the second is timed; the warm-up's 900 ms must not count.
    times = iter([0, 900, 0, 50, 0, 70, 0, 90])

    def call() -> None:
        queue.launch("call", host=0.0, work=float(next(times)))

    assert gpu.median_ms(call, nothing, warm_up=1, runs=3) == 70
