"""Regret: how much slower the plans that a table picks are than the best ones that were timed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from tessera_cupy.regimes.candidates import made_online
from tessera_cupy.regimes.features import Features
from tessera_cupy.regimes.measurements import Case
from tessera_cupy.regimes.plan_spec import PlanSpec


class Regret(NamedTuple):
    """How much slower chosen plans are than the best ones, as ratios of times.

    Attributes:
        mean: geometric mean.
        p95, p99: percentiles.
        close: share of the cases within 3% of the best plan.
        cases: how many.
    """

    mean: float
    p95: float
    p99: float
    close: float
    cases: int

    @classmethod
    def of(cls, ratios: Iterable[float]) -> Regret:
        """Sum up ratios of at least one case.

        >>> Regret.of([1.0, 1.21]).mean
        1.1
        """
        values = np.array(list(ratios), np.float64)
        p95, p99 = np.percentile(values, [95, 99])
        return cls(
            mean=round(float(np.exp(np.log(values).mean())), 6),
            p95=float(p95),
            p99=float(p99),
            close=float((values <= 1.03).mean()),
            cases=len(values),
        )


def online_times(case: Case) -> dict[PlanSpec, float]:
    """Times of the plans that a table may rank for a request like this case.

    Those of :func:`ranked`.
    """
    times = case.times()
    served = ranked(case.features, times)
    return {plan: times[plan] for plan in served}


def ranked(features: Features, plans: Iterable[PlanSpec]) -> list[PlanSpec]:
    """The plans, of these, that a table may rank for a request.

    Those that a GPU makes by itself; where the host plans whatever is chosen, since blocks have
    token bits, all.
    """
    if features.token_bits and not features.slices:
        return list(plans)
    return [plan for plan in plans if made_online(plan, slices=features.slices)]
