"""Decision trees over the cases of one key: where regimes end, and which plans they rank.

A tree is grown for what it is used for: each cut is the one that saves most regret if both sides
take the plan that is best for them on the whole, and it is made if it saves enough. How much is
enough is what leaves the least regret on sources that the tree did not see.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.regimes.measurements import Case
from tessera_cupy.regimes.plan_spec import PlanSpec
from tessera_cupy.regimes.regret import online_times
from tessera_cupy.regimes.schema import ANY, AXES, FRACTIONS, Interval

#: Fewest cases of a regime. Times that are made of several turns are right within a percent or
#: two, so that few cases tell plans apart; what few cases cannot tell, sources left out show.
MIN_CASES = 4
#: Edges in place of learned ones, for each axis.
PRESET_EDGES: dict[str, tuple[float, ...]] = {
    "heads": (4, 16),
    "tokens": (8192, 32768, 65536),
    "density": (0.05, 0.15, 0.3, 0.6, 0.9),
    "run_coverage": (0.3, 0.7),
    "rows": (16384, 65536, 262144),
    "kept_keys": (512, 2048, 8192),
}


# Sums of logarithmic regret that a cut may have to save; a percent of it on 100 cases is 1.
_LEAST_SAVED = (math.inf, 4.0, 2.0, 1.0, 0.5, 0.25, 0.12)
# Mean regret that a larger tree must save to be worth reading.
_WORTH = 0.0003
_MOST_FOLDS = 8
# What counts for a plan without a time, and the most that any counts, as a multiple of the best.
_SLOW = 2.0
_MOST_RANKED = 6


@dataclass(frozen=True)
class Costs:
    """Times of one key's cases.

    Attributes:
        plans: every plan that a table may rank for the key, by name.
        ratios: (cases, plans) times as multiples of the best of the case; NaN where there is none.
        axes: (cases, axes) what regimes are told apart by.
        sources: of each case.
    """

    plans: tuple[PlanSpec, ...]
    ratios: NDArray[np.float64]
    axes: NDArray[np.float64]
    sources: tuple[str, ...]

    @classmethod
    def of(cls, cases: Sequence[Case]) -> Costs:
        """The times of cases that have one; a plan that was wrong or failed on one is left out."""
        bad = {
            timing.plan
            for case in cases
            for timing in case.timings
            if timing.state in ("wrong output", "failed")
        }
        timed = [
            (case, {plan: ms for plan, ms in online_times(case).items() if plan not in bad})
            for case in cases
        ]
        times = [(case, of) for case, of in timed if of]
        names = {plan.name: plan for _, of in times for plan in of}
        plans = tuple(names[name] for name in sorted(names))
        ratios = [[of.get(plan, np.nan) / min(of.values()) for plan in plans] for _, of in times]
        axes = [[getattr(case.features, axis) for axis in AXES] for case, _ in times]
        sources = tuple(case.source for case, _ in times)
        return cls(plans, np.array(ratios), np.array(axes, float), sources)

    def __len__(self) -> int:
        return len(self.sources)

    def filled(self, rows: NDArray[Any] | slice = slice(None)) -> NDArray[np.float64]:
        """Logarithms of the ratios, bounded; a plan without a time counts as slow."""
        logs: NDArray[np.float64] = np.log(np.nan_to_num(self.ratios[rows], nan=_SLOW))
        return np.minimum(logs, math.log(_SLOW))

    def ranking(self, rows: NDArray[Any]) -> list[int]:
        """Plans from best to worst over some cases, by name where they are equal.

        A plan that serves fewer than half of the cases is not ranked; where it does not serve one,
        the next of the ranking does.
        """
        part = self.ratios[rows]
        served = np.isfinite(part)
        least = 0.5 if (served.mean(axis=0) >= 0.5).any() else 0.0
        # Rounded, so that the last bits of a logarithm on another machine change no order.
        scores = {
            i: round(float(np.log(part[served[:, i], i]).mean()), 6)
            for i in range(len(self.plans))
            if served[:, i].any() and served[:, i].mean() >= least
        }
        order = sorted(scores, key=lambda i: (scores[i], self.plans[i].name))
        bound = scores[order[0]] + math.log(_SLOW)
        return [i for i in order if scores[i] <= bound][:_MOST_RANKED]

    def regrets(self, ranking: Sequence[int], rows: NDArray[Any]) -> NDArray[np.float64]:
        """Ratio of the first plan of a ranking that serves it, for each of some cases."""
        part = self.ratios[rows][:, list(ranking)]
        place = np.isfinite(part).argmax(axis=1)
        chosen = part[np.arange(len(part)), place]
        return np.asarray(np.nan_to_num(chosen, nan=_SLOW))


class Leaf(NamedTuple):
    """A regime: its box, its cases, and plans from best to worst, both by number."""

    box: tuple[Interval, ...]
    rows: NDArray[np.intp]
    ranking: list[int]


def least_saved(
    costs: Costs, known: dict[str, tuple[float, ...]] | None
) -> tuple[float, float | None]:
    """What a cut must save, and the mean logarithm of the regret then, on sources left out.

    Of what leaves about the least regret, that with the fewest cuts. Without a second source, or
    cases for two regimes, nothing is cut.
    """
    sources = sorted(set(costs.sources), key=lambda name: (-costs.sources.count(name), name))
    if len(sources) < 2 or len(costs) < 2 * MIN_CASES:
        return math.inf, None
    fold = {name: i % min(_MOST_FOLDS, len(sources)) for i, name in enumerate(sources)}
    folds = np.array([fold[name] for name in costs.sources])
    regrets = []
    for saved in _LEAST_SAVED:
        logs = []
        for left_out in range(max(folds) + 1):
            test = np.flatnonzero(folds == left_out)
            for leaf in grow(costs, np.flatnonzero(folds != left_out), saved, known):
                inside = test[_inside(costs.axes[test], leaf.box)]
                logs.append(np.log(costs.regrets(leaf.ranking, inside)))
        regrets.append(round(float(np.concatenate(logs).mean()), 6))
    place = next(i for i, regret in enumerate(regrets) if regret <= min(regrets) + _WORTH)
    return _LEAST_SAVED[place], regrets[place]


def grow(
    costs: Costs,
    rows: NDArray[Any],
    saved: float,
    known: dict[str, tuple[float, ...]] | None,
) -> list[Leaf]:
    """Leaves of a tree over some cases, each with its box and ranking.

    Args:
        costs: the times.
        rows: numbers of the cases.
        saved: the sum of logarithmic regret that a cut must save.
        known: the only edges that a cut may be at, by axis; None means any.
    """
    logs = costs.filled()
    leaves: list[Leaf] = []

    def walk(inside: NDArray[Any], box: tuple[Interval, ...]) -> None:
        cut = _best_cut(costs.axes[inside], logs[inside], saved, known)
        if cut is None:
            leaves.append(Leaf(box, inside, costs.ranking(inside)))
            return
        axis, edge = cut
        below = costs.axes[inside, axis] < edge
        low, high = box[axis].low, box[axis].high
        walk(inside[below], _set(box, axis, Interval(low, edge)))
        walk(inside[~below], _set(box, axis, Interval(edge, high)))

    walk(np.asarray(rows), (ANY,) * len(AXES))
    return leaves


def _best_cut(
    axes: NDArray[np.float64],
    logs: NDArray[np.float64],
    saved: float,
    known: dict[str, tuple[float, ...]] | None,
) -> tuple[int, float] | None:
    """The axis and edge that save most regret, if that is enough; of equals the first."""
    found: tuple[int, float] | None = None
    if len(axes) < 2 * MIN_CASES or saved == math.inf:
        return None
    whole = logs.sum(axis=0)
    most = saved
    for axis, name in enumerate(AXES):
        order = np.argsort(axes[:, axis], kind="stable")
        values = axes[order, axis]
        below = np.cumsum(logs[order], axis=0)[:-1]
        saves = whole.min() - below.min(axis=1) - (whole - below).min(axis=1)
        counts = np.arange(1, len(order))
        possible = (counts >= MIN_CASES) & (len(order) - counts >= MIN_CASES)
        possible &= values[:-1] < values[1:]
        # Rounded, so that the last bits of a logarithm on another machine change no cut.
        saves = np.where(possible, saves.round(6), -1.0)
        for place in np.argsort(-saves, kind="stable"):
            if saves[place] <= most:
                break
            edge = _edge(float(values[place]), float(values[place + 1]), name, known)
            if edge is not None:
                most, found = float(saves[place]), (axis, edge)
                break
    return found


def _edge(
    below: float, above: float, axis: str, known: dict[str, tuple[float, ...]] | None
) -> float | None:
    """An edge between two neighbouring values; None where there is no known one."""
    if known is None:
        return _round_between(below, above, axis)
    return next((edge for edge in known[axis] if below < edge <= above), None)


def pruned(leaves: list[Leaf], costs: Costs) -> list[Leaf]:
    """Join neighbouring leaves that rank the same plan first, as long as their union is a box."""
    joined = list(leaves)
    i = 0
    while i < len(joined):
        for j in range(i + 1, len(joined)):
            box = _union(joined[i].box, joined[j].box)
            if box and joined[i].ranking[0] == joined[j].ranking[0]:
                rows = np.sort(np.concatenate([joined[i].rows, joined[j].rows]))
                both = Leaf(box, rows, costs.ranking(rows))
                if both.ranking[0] == joined[i].ranking[0]:
                    joined[i : j + 1] = [both, *joined[i + 1 : j]]
                    i = -1
                    break
        i += 1
    return joined


def _union(a: tuple[Interval, ...], b: tuple[Interval, ...]) -> tuple[Interval, ...] | None:
    """The box that two boxes make up, if they are neighbours along one axis and equal otherwise."""
    differ = [axis for axis in range(len(a)) if a[axis] != b[axis]]
    if len(differ) != 1:
        return None
    axis = differ[0]
    first, second = sorted((a[axis], b[axis]), key=lambda interval: interval.low)
    return _set(a, axis, Interval(first.low, second.high)) if first.high == second.low else None


def _set(box: tuple[Interval, ...], axis: int, interval: Interval) -> tuple[Interval, ...]:
    return (*box[:axis], interval, *box[axis + 1 :])


def _inside(axes: NDArray[np.float64], box: Sequence[Interval]) -> NDArray[np.bool_]:
    low = np.array([interval.low for interval in box])
    high = np.array([interval.high for interval in box])
    return np.asarray(((axes >= low) & (axes < high)).all(axis=1))


def _round_between(below: float, above: float, axis: str) -> float:
    """The number with the fewest digits that is more than ``below`` and at most ``above``.

    Of several, the one nearest to the middle of their logarithms.

    >>> _round_between(0.1213, 0.1577, "density"), _round_between(17550, 32760, "tokens")
    (0.14, 20000)
    """
    whole = axis not in FRACTIONS
    middle = math.sqrt(below * above) if below > 0 else above / 2
    for digits in range(1, 18):
        value = float(f"{middle:.{digits}g}")
        if below < value <= above and (not whole or value == int(value)):
            return int(value) if whole else value
    return above
