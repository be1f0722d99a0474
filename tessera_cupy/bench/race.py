"""Times of several contestants in turns, of which those far behind leave early.

The GPU's clock drifts, by a quarter within a run where kernels draw much power: only times of the
same turn compare. So all contestants of a turn run one after the other, in an order that is
reversed each time; what a turn has in common is taken out of its times; and a contestant leaves
where it is behind in the median of its turns so far by more than noise explains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

#: Calls of a run at most: enough of the shortest ones for the clock of events.
MOST_CALLS = 40
# A contestant that takes so many times as long as the fastest in one call runs no turn. Where that
# is less than so many milliseconds it gets a second call: the host may have been interrupted.
_HOPELESS, _SHORT_MS = 2.0, 0.5
# After so many turns those leave whose median is behind that of the fastest by more than this.
_LEAVE = {2: 1.3, 4: 1.15}

_Call = TypeVar("_Call")


@dataclass(frozen=True)
class Raced:
    """Times of one contestant, milliseconds of a call.

    Attributes:
        ms: the median over its turns, without what the turns have in common; of one that ran no
            turn, its first call, or the shorter one of two.
        rounds: of each of its turns, as it was; none of one that was hopeless.
        whole: whether it took part in all turns.
    """

    ms: float
    rounds: tuple[float, ...]
    whole: bool


def race(
    calls: Mapping[str, _Call],
    run: Callable[[_Call, int], float],
    *,
    rounds: int,
    run_ms: float,
) -> dict[str, Raced]:
    """Time contestants.

    Args:
        calls: by name.
        run: makes a call so many times, and gives the milliseconds of one.
        rounds: turns of those that stay.
        run_ms: least milliseconds of a run, unless that were more than :data:`MOST_CALLS` calls.

    Returns:
        By name, in the order of ``calls``.

    >>> found = race({"a": 1.0, "b": 1.1, "c": 5.0}, lambda ms, n: ms, rounds=2, run_ms=1)
    >>> [(one.ms, len(one.rounds), one.whole) for one in found.values()]
    [(1.0, 2, True), (1.1, 2, True), (5.0, 0, False)]
    """
    first = {name: run(call, 1) for name, call in calls.items()}
    fastest = min(first.values(), default=0.0)
    for name, call in calls.items():
        if _HOPELESS * fastest < first[name] < _SHORT_MS:
            first[name] = min(first[name], run(call, 1))
    staying = [name for name in calls if first[name] <= _HOPELESS * fastest]
    counts = {
        name: max(1, min(MOST_CALLS, math.ceil(run_ms / max(first[name], 1e-6)))) for name in calls
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        if turn in _LEAVE:
            medians = {name: float(np.median(times[name])) for name in staying}
            bound = _LEAVE[turn] * min(medians.values())
            staying = [name for name in staying if medians[name] <= bound]
        for name in reversed(staying) if turn % 2 else staying:
            times[name].append(run(calls[name], counts[name]))
    common = _common([times[name] for name in staying], rounds)
    return {
        name: Raced(_median(times[name], common), tuple(times[name]), len(times[name]) == rounds)
        if times[name]
        else Raced(first[name], (), False)
        for name in calls
    }


def _common(times: Sequence[Sequence[float]], rounds: int) -> NDArray[np.float64]:
    """Logarithms of what each turn has in common, around 0; of those that took part in all."""
    if not times or not rounds:
        return np.zeros(rounds)
    logs = np.log(np.array(times)).mean(axis=0)
    found: NDArray[np.float64] = logs - np.median(logs)
    return found


def _median(times: Sequence[float], common: NDArray[np.float64]) -> float:
    return float(np.exp(np.median(np.log(times) - common[: len(times)])))
