"""The run behind ``bench regret``: masks that no profile saw, and a table judged on them.

Every plan of a case is timed as a profile times it; those that were best are timed once more in the
order of rows, for the ablation. On a GPU a few requests are also served by searching: every plan is
made and tried, as software without a table does, beside the table's request.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tessera_cupy import __version__, interop
from tessera_cupy.attention import block_sparse_attention, make_plan
from tessera_cupy.bench.machine import machine as machine_here
from tessera_cupy.bench.profile_cases import (
    HELD_OUT_CLIP,
    HELD_OUT_LAYERS,
    KINDS,
    MaskMaker,
    Recipe,
    recipes,
)
from tessera_cupy.bench.profile_clock import Clock, GpuClock, ModelClock
from tessera_cupy.bench.profile_run import Dense, Field, measure_case
from tessera_cupy.bench.regret import geometric_mean, report
from tessera_cupy.bench.steps import Steps
from tessera_cupy.errors import PlanNotEligibleError, wrong
from tessera_cupy.kernels import catalog
from tessera_cupy.plan import Plan
from tessera_cupy.regimes import PlanSpec, Table, load_for, load_table
from tessera_cupy.regimes.candidates import (
    BASE_ORGANIZATION,
    candidates,
    made_on_gpu,
    retains,
)
from tessera_cupy.regimes.measurements import Case, Measurements
from tessera_cupy.regimes.regret import online_times

if TYPE_CHECKING:
    from rich.console import Console

# The best mappings that are timed in the order of rows too.
_IN_ROWS = 3
# A search times each plan so often after a first run.
_TRIES = 3
# Calls of the same mask over which a plan's cost is shared in the amortized figure.
_PASSES = 4
# Requests that are also searched for.
_SEARCHES = 14


def run_regret(
    *,
    table: str | None,
    measurements: Path | None,
    cases: int,
    kinds: Sequence[str] | None,
    model: str | None,
    most_tokens: int | None,
    keep: Path | None,
    console: Console,
) -> dict[str, Any]:
    """Judge a profile table.

    Args:
        table: name of a shipped table or path of another; None means that of the GPU.
        measurements: judge on these in place of measuring.
        cases: masks to measure.
        kinds: of masks; None means all.
        model: architecture whose times are predicted in place of measured.
        most_tokens: of a mask; None means any.
        keep: file to write the measurements to.
        console: where progress goes.

    Returns:
        JSON-able: what :func:`tessera_cupy.bench.regret.report` says, and ``search`` where a GPU
        measured.

    Raises:
        NoGpuError: there is none to measure on.
        TableError: a table or measurements that cannot be read.
        ValueError: other arguments that cannot be served.
    """
    if cases < 1:
        raise ValueError(wrong("cases", "at least 1", cases, "measure some"))
    if keep is not None and not keep.parent.is_dir():
        raise ValueError(wrong("keep", "a folder that exists", str(keep.parent), "make it first"))
    steps = Steps(console, count=1)
    search: list[dict[str, Any]] = []
    if measurements is not None:
        held = Measurements.read(measurements)
        judged = _table(table, held.arch)
    else:
        clock: Clock = ModelClock(model) if model else GpuClock()
        judged = _table(table, clock.arch.table)
        chosen = list(
            islice(
                recipes(
                    HELD_OUT_CLIP,
                    HELD_OUT_LAYERS,
                    KINDS if kinds is None else kinds,
                    seed=1,
                    most_tokens=most_tokens,
                    most_active=clock.most_active,
                ),
                cases,
            )
        )
        with steps.step(f"Measure on {clock.device}", cases) as step:
            held = _measure(chosen, clock, "model" if model else "measured", step.advance)
            if model is None:
                search = _searches(chosen[:_SEARCHES], clock)
            step.done(f"{cases} cases of {HELD_OUT_CLIP}, which no profile has seen")
        if keep is not None:
            held.write(keep)
    machine = machine_of(held) if measurements is not None or model else machine_here()
    return {
        **machine,
        "dtype": "bfloat16",
        "provenance": held.provenance,
        "clip": HELD_OUT_CLIP,
        "table": judged.document.path.name,
        "table_provenance": judged.document.provenance,
        **report(judged, held, kind_name),
        "search": _summed(search) if search else None,
    }


def machine_of(held: Measurements) -> dict[str, Any]:
    """What a report says of a GPU that is not here."""
    driver = {"version": None, "cuda": None}
    return {"gpu": held.device, "driver": driver, "versions": {"tessera_cupy": __version__}}


def kind_name(case: Case) -> str:
    """The kind of a case, which its name begins with."""
    return case.name.split()[0]


def _table(table: str | None, arch: str) -> Table:
    if table is None:
        return load_for(arch)
    return load_table(table) if table.endswith(".yaml") else load_for(table)


def _measure(chosen: Sequence[Recipe], clock: Clock, provenance: str, on_case: Any) -> Measurements:
    make = MaskMaker(clock.to_device)
    plans = candidates(clock.arch.name)
    field, dense = Field(), Dense(clock)
    cases = []
    for recipe in chosen:
        case = measure_case(recipe, make, clock, plans, field, dense)
        field.add(case)
        cases.append(_with_rows(case, recipe, make, clock))
        on_case()
    made = (f"Held out: {HELD_OUT_CLIP}, layers from {HELD_OUT_LAYERS.start}.",)
    kernels = catalog.fingerprint(clock.arch.name)
    return Measurements(clock.arch.table, provenance, clock.device, kernels, made, tuple(cases))


def _with_rows(case: Case, recipe: Recipe, make: MaskMaker, clock: Clock) -> Case:
    """Time the best plans, and those that retain blocks, in the order of rows as well."""
    times = online_times(case)
    best = sorted(times, key=lambda plan: (times[plan], plan.name))[:_IN_ROWS]
    kept = [timing.plan for timing in case.timings if retains(timing.plan)]
    rows = dict.fromkeys(replace(p, organization=BASE_ORGANIZATION) for p in (*best, *kept))
    more = clock.times(make(recipe), recipe.heads, recipe.head_dim, list(rows))
    timings = sorted((*case.timings, *more), key=lambda timing: timing.plan.name)
    return replace(case, timings=tuple(timings))


def _searches(chosen: Sequence[Recipe], clock: Clock) -> list[dict[str, Any]]:
    """Milliseconds on the host's clock: by the table and by searching, each of a new mask."""
    cupy = interop.import_cupy()
    make = MaskMaker(clock.to_device)
    found = []
    for recipe in chosen:
        shape = (1, recipe.heads, recipe.grid.tokens, recipe.head_dim)
        q, out = (
            cupy.zeros(shape, cupy.uint16).view(interop.numpy_dtype("bfloat16")) for _ in range(2)
        )
        _by_table(make(recipe), q, out)  # loads kernels
        plans = [plan for plan in candidates(clock.arch.name) if made_on_gpu(plan)]
        _by_search(make(recipe), q, out, plans)
        mask = make(recipe)
        cold = _by_table(mask, q, out)
        warm = _by_table(mask, q, out)
        search, served = _by_search(make(recipe), q, out, plans)
        found.append(
            {
                "case": recipe.name,
                "cold_ms": cold,
                "warm_ms": warm,
                "search_ms": search,
                "plans": served,
                "amortized": (search + (_PASSES - 1) * warm) / (cold + (_PASSES - 1) * warm),
            }
        )
    return found


def _by_table(mask: Any, q: Any, out: Any) -> float:
    cupy = interop.import_cupy()
    cupy.cuda.get_current_stream().synchronize()
    begin = time.perf_counter()
    block_sparse_attention(q, q, q, mask, out=out)
    cupy.cuda.get_current_stream().synchronize()
    return 1e3 * (time.perf_counter() - begin)


def _by_search(mask: Any, q: Any, out: Any, plans: Sequence[PlanSpec]) -> tuple[float, int]:
    """Make and try every plan, then run the best; milliseconds, and how many plans served."""
    cupy = interop.import_cupy()
    stream = cupy.cuda.get_current_stream()
    stream.synchronize()
    begin = time.perf_counter()
    tried: list[tuple[float, int, Plan]] = []
    for spec in plans:
        try:
            plan = make_plan(mask, q, regime=spec)
        except PlanNotEligibleError:
            continue
        plan.run(q, q, q, out=out)
        stream.synchronize()
        started = time.perf_counter()
        for _ in range(_TRIES):
            plan.run(q, q, q, out=out)
        stream.synchronize()
        tried.append((time.perf_counter() - started, len(tried), plan))
    min(tried)[2].run(q, q, q, out=out)
    stream.synchronize()
    return 1e3 * (time.perf_counter() - begin), len(tried)


def _summed(search: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Speed-ups of the table's request over a search, as geometric means, and the cases."""
    return {
        "cold": geometric_mean([one["search_ms"] / one["cold_ms"] for one in search]),
        "warm": geometric_mean([one["search_ms"] / one["warm_ms"] for one in search]),
        "amortized": geometric_mean([one["amortized"] for one in search]),
        "passes": _PASSES,
        "cases": list(search),
    }
