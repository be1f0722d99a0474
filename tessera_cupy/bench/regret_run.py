"""The run behind ``bench regret``: masks that no profile saw, and a table judged on them.

Every plan of a case that a table may rank is timed as a profile times it, in more and longer turns.
For the ablation, on one mask of each block family, at its published density and a model's size, the
best plans and those that retain blocks are timed in the order of rows too. On a GPU a few requests
are also served by searching: every plan is made and tried, as software without a table does, beside
the table's request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tessera_cupy import __version__, interop
from tessera_cupy.attention import block_sparse_attention, make_plan
from tessera_cupy.bench.families import FAMILIES
from tessera_cupy.bench.machine import machine as machine_here
from tessera_cupy.bench.profile_cases import (
    ABLATION_GRID,
    GRIDS,
    HELD_OUT_CLIP,
    HELD_OUT_LAYERS,
    KINDS,
    MaskMaker,
    Recipe,
    recipes,
)
from tessera_cupy.bench.profile_clock import Clock, GpuClock, ModelClock
from tessera_cupy.bench.profile_run import Dense, Field, measure_case, profile
from tessera_cupy.bench.ready import build_kernels, ended_by_signal
from tessera_cupy.bench.regret import geometric_mean, report
from tessera_cupy.bench.steps import Steps
from tessera_cupy.errors import PlanNotEligibleError, wrong
from tessera_cupy.kernels import catalog
from tessera_cupy.masks import BlockMask, KeySlices
from tessera_cupy.plan import Plan
from tessera_cupy.regimes import PlanSpec, Table, load_for, load_table
from tessera_cupy.regimes.candidates import (
    BASE_ORGANIZATION,
    candidates,
    made_online,
    retains,
)
from tessera_cupy.regimes.measurements import Case, Measurements, PlanTime
from tessera_cupy.regimes.regret import online_times

if TYPE_CHECKING:
    from rich.console import Console

# Turns of each plan, and milliseconds of one: more than a profile has, as each case counts alone.
_ROUNDS, _RUN_MS = 12, 6.0
# The best mappings that are timed in the order of rows too, and heads of these masks at most.
_IN_ROWS, _ROWS_HEADS = 3, 8
# A search times each plan so often after a first run.
_TRIES = 3
# Calls of the same mask over which a plan's cost is shared in the amortized figure.
_PASSES = 4
# Requests that are also searched for, and seconds after which no other one is.
_SEARCHES, _SEARCH_S = 14, 25.0


def run_regret(
    *,
    table: str | None,
    measurements: Path | None,
    cases: int,
    kinds: Sequence[str] | None,
    model: str | None,
    most_tokens: int | None,
    budget_s: float,
    keep: Path | None,
    console: Console,
) -> dict[str, Any]:
    """Judge a profile table.

    Args:
        table: name of a shipped table or path of another; None means that of the GPU.
        measurements: judge on these in place of measuring.
        cases: masks to measure, as far as the budget goes.
        kinds: of masks; None means all.
        model: architecture whose times are predicted in place of measured.
        most_tokens: of a mask; None means any.
        budget_s: seconds for measuring; the ablation, which may take as long, and searches come
            on top.
        keep: file to write the measurements to, as they are taken.
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
    steps = Steps(console, count=2 if model else 4)
    search: list[dict[str, Any]] = []
    if measurements is not None:
        held = Measurements.read(measurements)
        judged = _table(table, held.arch)
    else:
        clock = ModelClock(model) if model else GpuClock(_ROUNDS, _RUN_MS)
        judged = _table(table, clock.arch.table)
        drawn = partial(
            recipes,
            HELD_OUT_CLIP,
            HELD_OUT_LAYERS,
            KINDS if kinds is None else kinds,
            seed=1,
            most_tokens=most_tokens,
            most_active=clock.most_active,
        )
        if isinstance(clock, GpuClock):
            with steps.step("Compile kernels") as step:
                step.done(f"{build_kernels(clock.arch.name, 'bfloat16')} were missing")
        with ended_by_signal(), steps.step(f"Measure on {clock.device}", cases) as step:
            held = _measure(drawn(), clock, cases, budget_s, keep, step.advance)
            step.done(f"{len(held.cases)} cases of {HELD_OUT_CLIP}, which no profile has seen")
        apart = ablation_recipes(kinds, most_tokens, 4 * clock.most_active)
        with ended_by_signal(), steps.step("Ablation", len(apart)) as step:
            held = _measure_rows(apart, clock, held, budget_s, keep, step.advance)
            step.done("mapping and organization, each for itself")
        if isinstance(clock, GpuClock):
            with steps.step("Search") as step:
                search = _searches(islice(drawn(), min(cases, _SEARCHES)), clock, judged)
                step.done(f"{len(search)} requests served by trying every plan")
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


def _measure(
    drawn: Iterator[Recipe],
    clock: GpuClock | ModelClock,
    cases: int,
    budget_s: float,
    keep: Path | None,
    on_case: Callable[[], None],
) -> Measurements:
    provenance = "measured" if isinstance(clock, GpuClock) else "model"
    made = (f"Held out: {HELD_OUT_CLIP}, layers from {HELD_OUT_LAYERS.start}.",)
    kernels = catalog.fingerprint(clock.arch.name)
    empty = Measurements(clock.arch.table, provenance, clock.device, kernels, made, ())
    dense = Dense(clock)
    plans = candidates(clock.arch.name)

    def measure(recipe: Recipe, make: MaskMaker, _: Field) -> Case:
        # Every plan: none is left out for what it did on other masks.
        case = measure_case(recipe, make, clock, plans, Field())
        return replace(case, dense_ms=dense.ms(case.features))

    return profile(
        drawn,
        clock,
        empty,
        path=keep,
        budget_s=budget_s,
        most_cases=cases,
        on_case=lambda case: on_case(),
        measure=measure,
    )


def ablation_recipes(
    kinds: Sequence[str] | None, most_tokens: int | None, most_active: float
) -> list[Recipe]:
    """One mask of each of the nine block families, held out as those that regret is judged on.

    Args:
        kinds: of masks; families that are not of them are left out. None means all.
        most_tokens: of a mask; None means any.
        most_active: entries that a mask may keep over all heads, unless it has one head.

    >>> one = ablation_recipes(["Q16K16", "vsa"], None, 1e7)[0]
    >>> one.name
    'Q16K16 0.096 16x45x80 8x128'
    """
    fits = [grid for grid in GRIDS if most_tokens is None or grid.tokens <= most_tokens]
    grid = ABLATION_GRID if ABLATION_GRID in fits else fits[-1]
    made = []
    for family in FAMILIES:
        if family.keep == 1 or (kinds is not None and family.name not in kinds):
            continue
        entries = family.keep * (grid.tokens / family.block_size[0])
        entries *= grid.tokens / family.block_size[1]
        heads = int(min(_ROWS_HEADS, max(1, most_active // entries)))
        layer = HELD_OUT_LAYERS.start
        made.append(Recipe(family.name, HELD_OUT_CLIP, layer, grid, heads, 128, family.keep))
    return made


def _measure_rows(
    drawn: Sequence[Recipe],
    clock: GpuClock | ModelClock,
    held: Measurements,
    budget_s: float,
    keep: Path | None,
    on_case: Callable[[], None],
) -> Measurements:
    plans = candidates(clock.arch.name)

    def measure(recipe: Recipe, make: MaskMaker, _: Field) -> Case:
        case = measure_case(recipe, make, clock, plans, Field())
        return _with_rows(case, recipe, make(recipe), clock)

    return profile(
        iter(drawn),
        clock,
        held,
        path=keep,
        budget_s=budget_s,
        on_case=lambda case: on_case(),
        measure=measure,
    )


def _with_rows(case: Case, recipe: Recipe, mask: BlockMask | KeySlices, clock: Clock) -> Case:
    """Time the best plans, and those that retain blocks, in the order of rows as well.

    The best plan is timed among them, so that all compare although the clock may have changed.
    """
    times = online_times(case)
    best = sorted(times, key=lambda plan: (times[plan], plan.name))[:_IN_ROWS]
    kept = [plan for plan in candidates(clock.arch.name) if retains(plan)]
    rows = dict.fromkeys(replace(p, organization=BASE_ORGANIZATION) for p in (*best, *kept))
    again = clock.times(mask, recipe.heads, recipe.head_dim, [*best[:1], *rows])
    now = {timing.plan: timing.ms for timing in again if timing.ms is not None}
    if not best or best[0] not in now:
        return case
    more = [_scaled(t, times[best[0]] / now[best[0]]) for t in again if t.plan in rows]
    timings = sorted((*case.timings, *more), key=lambda timing: timing.plan.name)
    return replace(case, timings=tuple(timings))


def _scaled(timing: PlanTime, factor: float) -> PlanTime:
    """As it would have been beside the others; its turns were not theirs."""
    if timing.ms is None:
        return timing
    ms, low, high = (factor * (x or timing.ms) for x in (timing.ms, timing.low, timing.high))
    return replace(timing, ms=ms, low=low, high=high, rounds=())


def _searches(chosen: Iterable[Recipe], clock: GpuClock, table: Table) -> list[dict[str, Any]]:
    """Milliseconds on the host's clock: by the table and by searching, each of a new mask."""
    make = MaskMaker(clock.to_device)
    found: list[dict[str, Any]] = []
    begin = time.monotonic()
    for recipe in chosen:
        if time.monotonic() - begin > _SEARCH_S:
            break
        arrays = clock.arrays(recipe.heads, recipe.grid.tokens, recipe.head_dim)
        mask = make(recipe)
        slices = isinstance(mask, KeySlices)
        plans = [p for p in candidates(clock.arch.name) if made_online(p, slices=slices)]
        # The first request loads kernels. From then on a mask that was refreshed is a new one.
        _by_table(mask, arrays, table)
        _by_search(mask, arrays, plans)
        mask.refresh()
        cold = _by_table(mask, arrays, table)
        warm = _by_table(mask, arrays, table)
        mask.refresh()
        search, served = _by_search(mask, arrays, plans)
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


def _by_table(mask: BlockMask | KeySlices, arrays: Sequence[Any], table: Table) -> float:
    q, k, v, out = arrays
    stream = interop.import_cupy().cuda.get_current_stream()
    stream.synchronize()
    begin = time.perf_counter()
    block_sparse_attention(q, k, v, mask, out=out, regime=table)
    stream.synchronize()
    return 1e3 * (time.perf_counter() - begin)


def _by_search(
    mask: BlockMask | KeySlices, arrays: Sequence[Any], plans: Sequence[PlanSpec]
) -> tuple[float, int]:
    """Make and try every plan, then run the best; milliseconds, and how many plans served."""
    q, k, v, out = arrays
    stream = interop.import_cupy().cuda.get_current_stream()
    stream.synchronize()
    begin = time.perf_counter()
    tried: list[tuple[float, int, Plan]] = []
    for spec in plans:
        try:
            plan = make_plan(mask, q, k, v, regime=spec)
        except PlanNotEligibleError:
            continue
        plan.run(q, k, v, out=out)
        stream.synchronize()
        started = time.perf_counter()
        for _ in range(_TRIES):
            plan.run(q, k, v, out=out)
        stream.synchronize()
        tried.append((time.perf_counter() - started, len(tried), plan))
    min(tried)[2].run(q, k, v, out=out)
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
