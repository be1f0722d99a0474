"""The timer, against a simulated GPU whose times are known."""

from __future__ import annotations

import math
from pathlib import Path
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
    times = gpu.timings(calls, lambda: seen.append(queue.log[-2]), warm_up=1, runs=3)
    medians = {name: time.median for name, time in times.items()}
    assert medians == pytest.approx({"a": 25.0, "b": 30.0, "c": 40.0})
    assert "".join(seen) == "abccbaabccba"


def test_it_is_the_median_of_the_runs_that_count(queue: Any) -> None:
    # Two calls a run, of which the second is timed; the warm-up's 900 ms must not count.
    times = iter([0, 900, 0, 50, 0, 70, 0, 90])

    def call() -> None:
        queue.launch("call", host=0.0, work=float(next(times)))

    assert gpu.median_ms(call, nothing, warm_up=1, runs=3) == 70


def test_the_spread_is_that_of_the_runs(queue: Any) -> None:
    # Two calls a run, of which the second is timed: 60, 50, 70, 90, 80.
    times = iter([0, 900, 0, 60, 0, 50, 0, 70, 0, 90, 0, 80])

    def call() -> None:
        queue.launch("call", host=0.0, work=float(next(times)))

    (timing,) = gpu.timings({"": call}, nothing, warm_up=1, runs=5).values()
    assert timing.median == 70
    # The 10th percentile of five lies 0.4 of the way from the first to the second.
    assert timing.spread == pytest.approx([54, 86])


def test_a_cold_call_is_timed_alone_after_a_flush_of_twice_the_l2(queue: Any) -> None:
    def call() -> None:
        queue.launch("call", host=0.01, work=4.0)

    (timing,) = gpu.timings({"": call}, nothing, warm_up=1, runs=2, cold=True).values()
    assert [timing.median, *timing.spread] == pytest.approx([4.0, 4.0, 4.0])
    timed = [f"fill {2 << 20}", "event", "call", "event"]
    assert queue.log == ["call", *timed, *(["call"] + 5 * timed) * 2]


def test_each_cold_call_is_a_sample(queue: Any) -> None:
    # The warm-up's two, then an untimed one before each run of two.
    times = iter([0, 12, 0, 10, 11, 0, 12, 14])

    def call() -> None:
        queue.launch("call", host=0.0, work=float(next(times)))

    (timing,) = gpu.timings({"": call}, nothing, warm_up=1, runs=2, cold=True).values()
    assert timing.median == pytest.approx(11.5)
    assert timing.spread == pytest.approx([10.3, 13.4])


def test_contestants_take_turns_when_cold_too(queue: Any) -> None:
    calls = {
        name: lambda name=name: queue.launch(name, host=0.01, work=25.0) for name in ("a", "b")
    }
    seen: list[str] = []
    gpu.timings(calls, lambda: seen.append(queue.log[-2]), warm_up=1, runs=2, cold=True)
    assert "".join(seen) == "abbaab"


def test_a_cold_l2_needs_no_part_of_the_call(queue: Any) -> None:
    """What the host takes before a call hides behind the flush that is queued before it."""

    def call() -> None:
        queue.launch("call", host=0.5, work=0.05)  # less than the flush's 0.7

    (timing,) = gpu.timings({"": call}, nothing, warm_up=1, runs=1, cold=True).values()
    assert timing.median == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("told", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23", "570.86.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65  Release", "580.65"),
        ("nothing of the kind", None),
    ],
)
def test_the_driver_is_told(
    told: str, version: str | None, queue: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "version"
    path.write_text(f"{told} 2025\nGCC version: 13.2.0\n")
    monkeypatch.setattr(gpu, "_DRIVER", path)
    if version is None:
        path.unlink()
    assert gpu.driver() == {"version": version, "cuda": "12.9"}
