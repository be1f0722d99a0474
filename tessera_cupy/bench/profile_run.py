"""The run behind ``tessera-cupy profile``: masks made one at a time, every plan timed on each.

Measurements are written as they grow, so that a run that ends early, by its budget or by force,
goes on where it stopped. A plan that has been far behind on all masks of a kind is dropped from the
next ones of that kind, so that the time goes to plans that could win.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from tessera_cupy.bench.profile_cases import MaskMaker, Recipe
from tessera_cupy.bench.profile_clock import Clock
from tessera_cupy.masks import BlockMask, KeySlices
from tessera_cupy.masks.key_slices import block_mask
from tessera_cupy.regimes import Features, PlanSpec, load_for
from tessera_cupy.regimes.candidates import candidates, made_on_gpu
from tessera_cupy.regimes.compiler import kind_of
from tessera_cupy.regimes.measurements import Case, Measurements, PlanTime
from tessera_cupy.regimes.regret import online_times

#: A plan is dropped after this many masks of a kind, if on each it took
SEEN_BEFORE_DROPPED = 8
#: more than so many times as long as the best.
FAR_BEHIND = 1.5
#: Plans that only the host makes are not timed on masks with more entries: they take it seconds.
HOST_MOST = 3e6
#: Dense attention is timed beside masks that keep at least this much: it can be faster there.
DENSE_FROM = 0.3

_SAVE_EVERY = 20
# A profile ends after so many draws in a row that give no new mask: some kinds have few.
_MOST_REPEATS = 10_000


class Field:
    """Which plans are still worth timing on a kind of mask."""

    def __init__(self, cases: Sequence[Case] = ()) -> None:
        self._behind: dict[object, dict[PlanSpec, list[float]]] = {}
        for case in cases:
            self.add(case)

    def add(self, case: Case) -> None:
        """Learn from a case."""
        times = case.times()
        if not times:
            return
        best = min((online_times(case) or times).values())
        behind = self._behind.setdefault(kind_of(case.features), {})
        for plan, ms in times.items():
            behind.setdefault(plan, []).append(ms / best)

    def dropped(self, features: Features) -> set[PlanSpec]:
        """Plans that a mask like this need not be timed with."""
        behind = self._behind.get(kind_of(features), {})
        return {
            plan
            for plan, ratios in behind.items()
            if len(ratios) >= SEEN_BEFORE_DROPPED and min(ratios) > FAR_BEHIND
        }


def features_of(mask: BlockMask | KeySlices, recipe: Recipe) -> Features:
    """What a table sees of a recipe's mask."""
    return Features.of(
        block_mask(mask),
        batch=1,
        q_heads=recipe.heads,
        dtype="bfloat16",
        head_dim=recipe.head_dim,
        layout="BHSD",
    )


class Dense:
    """Times of dense attention by this package's kernels, each size once."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: dict[tuple[int, int, int], float | None] = {}

    def ms(self, features: Features) -> float | None:
        """Milliseconds at the size of a request that keeps enough for it to matter, else None."""
        if features.density < DENSE_FROM:
            return None
        key = (features.heads, features.tokens, features.head_dim)
        if key not in self._known:
            self._known[key] = self._measured(features)
        return self._known[key]

    def _measured(self, features: Features) -> float | None:
        tokens, block = features.tokens, 128
        blocks = -(-tokens // block)
        every = np.ones((blocks, blocks), bool)
        mask = BlockMask.from_dense(self._clock.to_device(every), (block, block), (tokens, tokens))
        full = features._replace(
            block_q=block,
            block_kv=block,
            ragged=False,
            token_bits=False,
            slices=False,
            density=1.0,
            run_coverage=1.0,
        )
        first = load_for(self._clock.arch.table).lookup(full).ranking[0]
        [timing] = self._clock.times(mask, features.heads, features.head_dim, [first])
        return timing.ms


def measure_case(
    recipe: Recipe,
    make: MaskMaker,
    clock: Clock,
    plans: Sequence[PlanSpec],
    field: Field,
    dense: Dense,
) -> Case:
    """Make one mask, and time the plans that are not dropped on it."""
    mask = make(recipe)
    features = features_of(mask, recipe)
    dropped = field.dropped(features)
    if mask.nnz > HOST_MOST:
        dropped |= {plan for plan in plans if not made_on_gpu(plan)}
    timed = clock.times(
        mask, recipe.heads, recipe.head_dim, [plan for plan in plans if plan not in dropped]
    )
    rest = (PlanTime(plan, "dropped") for plan in plans if plan in dropped)
    timings = sorted((*timed, *rest), key=lambda timing: timing.plan.name)
    return Case(recipe.name, recipe.source, features, tuple(timings), dense.ms(features))


def profile(
    drawn: Iterator[Recipe],
    clock: Clock,
    done: Measurements,
    *,
    path: Path,
    budget_s: float,
    most_cases: int | None = None,
    on_case: Callable[[Case], None] = lambda case: None,
    now: Callable[[], float] = time.monotonic,
) -> Measurements:
    """Measure cases until the budget is spent, or until there are no others.

    Args:
        drawn: what to measure, without end.
        clock: gives plans their times.
        done: what was measured before; its cases are not measured again.
        path: where the measurements are written, every so often and at the end.
        budget_s: seconds after which no case is begun.
        most_cases: end at this many, those measured before included.
        on_case: called after each case.
        now: a clock of seconds.

    Returns:
        All cases, those measured before first.
    """
    begin = now()
    cases = list(done.cases)
    known = {(case.name, case.source) for case in cases}
    field, dense = Field(cases), Dense(clock)
    make = MaskMaker(clock.to_device)
    plans = candidates(clock.arch.name)
    written = len(cases)
    repeats, most_repeats = 0, len(known) + _MOST_REPEATS  # those of earlier runs come first
    try:
        for recipe in drawn:
            if now() - begin >= budget_s or (most_cases is not None and len(cases) >= most_cases):
                break
            if (recipe.name, recipe.source) in known:
                repeats += 1
                if repeats > most_repeats:
                    break
                continue
            repeats = 0
            case = measure_case(recipe, make, clock, plans, field, dense)
            known.add((recipe.name, recipe.source))
            field.add(case)
            cases.append(case)
            on_case(case)
            if len(cases) - written >= _SAVE_EVERY:
                done.with_cases(cases).write(path)
                written = len(cases)
    finally:
        if len(cases) > written:
            done.with_cases(cases).write(path)
    return done.with_cases(cases)
