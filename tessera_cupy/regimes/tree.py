"""Decision trees over the cases of one key: where regimes end, and which plans they rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.errors import MissingExtraError, install
from tessera_cupy.regimes.measurements import Case
from tessera_cupy.regimes.plan_spec import PlanSpec
from tessera_cupy.regimes.regret import online_times
from tessera_cupy.regimes.schema import ANY, AXES, Interval

#: Fewest cases of a regime.
MIN_CASES = 32
#: Edges in place of learned ones, for each axis.
PRESET_EDGES: dict[str, tuple[float, ...]] = {
    "heads": (4, 16),
    "tokens": (8192, 32768, 65536),
    "density": (0.05, 0.15, 0.3, 0.6, 0.9),
    "run_coverage": (0.3, 0.7),
}


_MOST_DEPTH = 5
# Regret that a deeper tree must save to be worth reading.
_WORTH = 0.0005
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


def best_depth(
    costs: Costs, known: dict[str, tuple[float, ...]] | None
) -> tuple[int, float | None]:
    """The least depth with about the least regret on sources left out, and that regret's log."""
    groups = np.array(costs.sources)
    if len(set(costs.sources)) < 2 or len(groups) < 2 * MIN_CASES:
        return 0, None
    split = _sklearn().model_selection.GroupKFold(min(5, len(set(costs.sources))))
    folds = list(split.split(costs.axes, groups=groups))
    regrets = []
    for depth in range(_MOST_DEPTH + 1):
        logs = []
        for train, test in folds:
            # A fold has fewer cases, and so have its leaves.
            fewest = math.ceil(MIN_CASES * len(train) / len(groups))
            for leaf in grow(costs, train, depth, known, fewest):
                inside = test[_inside(costs.axes[test], leaf.box)]
                logs.append(np.log(costs.regrets(leaf.ranking, inside)))
        regrets.append(round(float(np.concatenate(logs).mean()), 6))
    least = min(regrets)
    depth = next(d for d, regret in enumerate(regrets) if regret <= least + _WORTH)
    return depth, regrets[depth]


def grow(
    costs: Costs,
    rows: NDArray[Any],
    depth: int,
    known: dict[str, tuple[float, ...]] | None,
    least: int = MIN_CASES,
) -> list[Leaf]:
    """Leaves of a tree over some cases, each with its box and ranking.

    Args:
        costs: the times.
        rows: numbers of the cases.
        depth: the most cuts in a row.
        known: the only edges that a cut may be at, by axis; None means any.
        least: fewest cases of a leaf.
    """
    everywhere = (ANY,) * len(AXES)
    if depth == 0 or len(rows) < 2 * least:
        return [Leaf(everywhere, rows, costs.ranking(rows))]
    axes = costs.axes[rows]
    seen = axes if known is None else _binned(axes, known)
    tree = _sklearn().tree.DecisionTreeRegressor(
        max_depth=depth, min_samples_leaf=least, random_state=0
    )
    fitted = tree.fit(seen, costs.filled(rows)).tree_
    leaves: list[Leaf] = []

    def walk(node: int, inside: NDArray[Any], box: tuple[Interval, ...]) -> None:
        if fitted.children_left[node] < 0:
            leaves.append(Leaf(box, rows[inside], costs.ranking(rows[inside])))
            return
        axis, bound = fitted.feature[node], fitted.threshold[node]
        below = seen[inside, axis] <= bound
        left, right = inside[below], inside[~below]
        if known is None:
            edge = _round_between(
                float(axes[left, axis].max()), float(axes[right, axis].min()), AXES[axis]
            )
        else:
            edge = known[AXES[axis]][math.floor(bound)]
        low, high = box[axis].low, box[axis].high
        walk(fitted.children_left[node], left, _set(box, axis, Interval(low, edge)))
        walk(fitted.children_right[node], right, _set(box, axis, Interval(edge, high)))

    walk(0, np.arange(len(rows)), everywhere)
    return leaves


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


def _binned(axes: NDArray[np.float64], known: dict[str, tuple[float, ...]]) -> NDArray[np.float64]:
    """Numbers of the buckets between preset edges."""
    columns = [
        np.searchsorted(known[axis], axes[:, i], side="right") for i, axis in enumerate(AXES)
    ]
    return np.stack(columns, axis=1).astype(np.float64)


def _round_between(below: float, above: float, axis: str) -> float:
    """The number with the fewest digits that is more than ``below`` and at most ``above``.

    >>> _round_between(0.1213, 0.1577, "density"), _round_between(17550, 32760, "tokens")
    (0.15, 20000)
    """
    whole = axis in ("heads", "tokens")
    for digits in range(1, 18):
        scale = 10.0 ** (digits - 1 - math.floor(math.log10(above)))
        # The largest number of so many digits that is not above.
        value = math.floor(above * scale * (1 + 1e-15)) / scale
        if below < value <= above and (not whole or value == int(value)):
            return int(value) if whole else float(f"{value:.{digits}g}")
    return above


def _sklearn() -> Any:
    try:
        import sklearn.model_selection
        import sklearn.tree
    except ImportError as error:
        raise MissingExtraError(
            "A profile table is compiled with scikit-learn, which learns where regimes end, and it "
            f"is not installed. Fix: {install('profile')}. Measurements are kept."
        ) from error
    return sklearn
