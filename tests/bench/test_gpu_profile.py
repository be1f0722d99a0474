"""A profile on a GPU: small masks of every kind, all plans right, a table from their times."""

from itertools import islice
from pathlib import Path

import pytest

from tessera_cupy.bench.profile_cases import KINDS, recipes
from tessera_cupy.bench.profile_clock import GpuClock
from tessera_cupy.bench.profile_run import profile
from tessera_cupy.bench.regret import judge
from tessera_cupy.kernels import catalog
from tessera_cupy.regimes import Table, load_for
from tessera_cupy.regimes.compiler import compile_table
from tessera_cupy.regimes.measurements import Measurements
from tessera_cupy.regimes.regret import online_times

pytestmark = pytest.mark.gpu


def test_every_plan_of_every_kind_is_right_and_timed(tmp_path):
    clock = GpuClock()
    table, kernels = clock.arch.table, catalog.fingerprint(clock.arch.name)
    empty = Measurements(table, "measured", clock.device, kernels, ("A test.",), ())
    done = profile(
        islice(recipes(most_tokens=4096, most_active=3e5), 2 * len(KINDS)),
        clock,
        empty,
        path=tmp_path / f"{table}.npz",
        budget_s=150,
    )
    assert len(done.cases) == 2 * len(KINDS)
    bad = [
        (case.name, t.plan.name, t.state, t.note)
        for case in done.cases
        for t in case.timings
        if t.state in ("wrong output", "failed")
    ]
    assert bad == []
    assert all(len(case.times()) >= 2 for case in done.cases)
    repeated = done.with_cases(case for case in done.cases for _ in range(8))
    made = Table(compile_table(repeated, load_for(table).document, path=Path(f"{table}.yaml")))
    # How good the choice is, times of tests that run side by side do not tell.
    judged = judge(made, done)
    assert len(judged) == len(done.cases)
    for one in judged:
        times = online_times(one.case)
        ranked = [plan for plan in made.lookup(one.case.features).ranking if plan in times]
        assert one.chosen == ranked[0], one.case.name
