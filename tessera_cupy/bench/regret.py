"""How good a profile table is: its plans against the best that were timed, on other masks.

Of many plans that are about as fast, the one with the shortest time is also the one whose time
happened to come out short, so that even a perfect choice looks slower than "the best". Where plans
took turns, the best is therefore found in every second turn and compared with in the others, and
the other way round. The ratio is the geometric mean of both, and 1 where that is less.

Everything here is arithmetic over measurements; :mod:`~tessera_cupy.bench.regret_run` takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tessera_cupy.regimes import PlanSpec, Table
from tessera_cupy.regimes.candidates import BASE_ORGANIZATION, retains
from tessera_cupy.regimes.measurements import Case, Measurements
from tessera_cupy.regimes.regret import Regret, online_times

#: Tokens of the smallest grid of a video model among the masks. Of smaller requests many have fewer
#: tiles than the GPU has multiprocessors, and what is best hangs on the lists of the mask at hand.
MODEL_TOKENS = 17_550


class Judged(NamedTuple):
    """A table's plan for one case.

    Attributes:
        case: the mask and its times.
        regime: where the table put it.
        chosen: the first plan of the ranking that was timed.
        best: the fastest plan that the table may rank.
        ratio: time of the chosen plan by that of the best, found and compared in turns apart.
        plain: the same by the times of all turns.
    """

    case: Case
    regime: str
    chosen: PlanSpec
    best: PlanSpec
    ratio: float
    plain: float


def judge(table: Table, measurements: Measurements) -> list[Judged]:
    """What a table chooses on each case, in order; cases of the ablation are left out.

    A case on which no plan of its ranking was timed is judged by the slowest that was: the table
    had nothing better to offer.
    """
    judged = []
    for case in measurements.cases:
        times = online_times(case)
        if not times or _rows(case):
            continue
        regime, chosen = _chosen(table, case)
        best = min(times, key=lambda plan: (times[plan], plan.name))
        plain = times[chosen] / times[best]
        ratio = _apart(case, list(times), chosen, plain)
        judged.append(Judged(case, regime, chosen, best, ratio, plain))
    return judged


def _chosen(table: Table, case: Case) -> tuple[str, PlanSpec]:
    """The regime of a case, and the plan; the slowest where the table has none that was timed."""
    times = online_times(case)
    choice = table.lookup(case.features)
    slowest = max(times, key=lambda plan: (times[plan], plan.name))
    return choice.regime, next((plan for plan in choice.ranking if plan in times), slowest)


def _rows(case: Case) -> dict[PlanSpec, float]:
    """Times of plans in the order of rows, which cases of the ablation have."""
    return {p: ms for p, ms in case.times().items() if p.organization == BASE_ORGANIZATION}


def _apart(case: Case, plans: Sequence[PlanSpec], chosen: PlanSpec, plain: float) -> float:
    """The ratio of a chosen plan where the best is found in some turns and timed in others."""
    turns = {t.plan: t.rounds for t in case.timings if t.plan in plans}
    most = max(map(len, turns.values()))
    whole = [plan for plan in plans if len(turns[plan]) == most]
    if most < 2 or chosen not in whole:
        return plain  # nothing to tell apart, or so slow that it left early
    logs = np.log([turns[plan] for plan in whole])
    common = logs.mean(axis=0)
    own = whole.index(chosen)
    ratios = []
    for found, timed in (
        (slice(0, None, 2), slice(1, None, 2)),
        (slice(1, None, 2), slice(0, None, 2)),
    ):
        best = np.median((logs - common)[:, found], axis=1).argmin()
        ratios.append(float(np.median((logs[own] - logs[best])[timed])))
    return max(1.0, float(np.exp(np.mean(ratios))))


def ablation(measurements: Measurements, table: Table) -> dict[str, float]:
    """What mapping, organization and the table add, as geometric means of speed-ups.

    Returns:
        By name, the speed-up over retaining blocks in the order of rows: ``mapping``, the best
        mapping in the order of rows; ``full``, the best plan that a table may rank; ``table``, the
        table's plan. And ``cases``, how many these are of, and ``tokens``, of the longest of them.
        Nothing where there is none.

    The published figure of this kind is 1.38 on an H100, for full over retain.
    """
    speedups: dict[str, list[float]] = {"mapping": [], "full": [], "table": []}
    tokens = []
    for case in measurements.cases:
        every, rows = case.times(), _rows(case)
        retained = [ms for plan, ms in rows.items() if retains(plan)]
        full = online_times(case)
        if not retained or not full:
            continue
        base = min(retained)
        tokens.append(case.features.tokens)
        speedups["mapping"].append(base / min(rows.values()))
        speedups["full"].append(base / min(full.values()))
        speedups["table"].append(base / every[_chosen(table, case)[1]])
    if not tokens:
        return {}
    means = {name: geometric_mean(values) for name, values in speedups.items()}
    return {**means, "cases": len(tokens), "tokens": max(tokens)}


def report(table: Table, measurements: Measurements, kind: Callable[[Case], str]) -> dict[str, Any]:
    """Regret overall, by size and by kind, the worst cases, and the ablation; JSON-able.

    Args:
        table: the table to judge.
        measurements: cases that it was not compiled from.
        kind: names the kind of a case.

    Raises:
        ValueError: no case was timed.
    """
    judged = judge(table, measurements)
    if not judged:
        raise ValueError("No case was timed, so there is no regret to report.")
    kinds = list(dict.fromkeys(kind(one.case) for one in judged))
    worst = sorted(judged, key=lambda one: (-one.ratio, one.case.name))[:10]
    return {
        "all": _numbers([one.ratio for one in judged]),
        "sizes": _by_size(judged),
        "plain": _numbers([one.plain for one in judged]),
        "rows": [
            {"kind": name, **_numbers([one.ratio for one in judged if kind(one.case) == name])}
            for name in kinds
        ],
        "slower_than_dense": sum(
            one.case.dense_ms is not None
            and one.case.times()[one.chosen] > 1.03 * one.case.dense_ms
            for one in judged
        ),
        "ablation": ablation(measurements, table),
        "worst": [
            {
                "case": one.case.name,
                "source": one.case.source,
                "regime": one.regime,
                "chosen": one.chosen.name,
                "best": one.best.name,
                "ratio": one.ratio,
            }
            for one in worst
        ],
    }


def _by_size(judged: Sequence[Judged]) -> dict[str, dict[str, float]]:
    """Regret of requests of models' sizes and of smaller ones, as far as there are any."""
    large = [one.ratio for one in judged if one.case.features.tokens >= MODEL_TOKENS]
    small = [one.ratio for one in judged if one.case.features.tokens < MODEL_TOKENS]
    named = {f"from {MODEL_TOKENS:,} tokens": large, "smaller": small}
    return {name: _numbers(ratios) for name, ratios in named.items() if ratios}


def _numbers(ratios: Sequence[float]) -> dict[str, float]:
    return Regret.of(ratios)._asdict()


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean of positive numbers.

    >>> geometric_mean([1.0, 4.0])
    2.0
    """
    return float(np.exp(np.log(np.asarray(values, np.float64)).mean()))
