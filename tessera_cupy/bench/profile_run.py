"""The run behind ``tessera-cupy profile``: masks made one at a time, every plan timed on each.

Measurements are written as they grow, so that a run that ends early, by its budget or by force,
goes on where it stopped. Only plans that a table may rank for a mask are timed. One that has been
far behind on all small or all large masks of a kind is dropped from the next ones like them, so
that the time goes to plans that could win.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from tessera_cupy.bench.profile_cases import SMALL_OPERATIONS, MaskMaker, Recipe
from tessera_cupy.bench.profile_clock import Clock, GpuLostError, one_line
from tessera_cupy.masks import BlockMask, KeySlices
from tessera_cupy.masks.key_slices import block_mask
from tessera_cupy.regimes import Features, PlanSpec, load_for
from tessera_cupy.regimes.candidates import candidates
from tessera_cupy.regimes.compiler import kind_of
from tessera_cupy.regimes.measurements import Case, Measurements, PlanTime
from tessera_cupy.regimes.regret import online_times, ranked

#: A plan is dropped after this many small or large masks of a kind, if on each it took
SEEN_BEFORE_DROPPED = 8
#: more than so many times as long as the best.
FAR_BEHIND = 1.5
#: Dense attention is timed beside masks that keep at least this much: it can be faster there.
DENSE_FROM = 0.3

# Seconds between two writings of the file, so that a run that is killed loses little.
_SAVE_EVERY = 5.0
# A profile ends after so many draws in a row that give no new mask: some kinds have few.
_MOST_REPEATS = 10_000


class Field:
    """Which plans are still worth timing on small and on large masks of a kind."""

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
        behind = self._behind.setdefault(_alike(case.features), {})
        for plan, ms in times.items():
            behind.setdefault(plan, []).append(ms / best)

    def dropped(self, features: Features) -> set[PlanSpec]:
        """Plans that a mask like this need not be timed with."""
        behind = self._behind.get(_alike(features), {})
        return {
            plan
            for plan, ratios in behind.items()
            if len(ratios) >= SEEN_BEFORE_DROPPED and min(ratios) > FAR_BEHIND
        }


def _alike(features: Features) -> object:
    """What masks have in common that one plan is far behind on: their kind, and how long they take.

    A plan that is slow on a long request may be the best for one that leaves multiprocessors idle.
    """
    f = features
    operations = 4 * f.head_dim * f.density * f.rows * f.tokens
    return kind_of(f), operations > SMALL_OPERATIONS


def features_of(mask: BlockMask | KeySlices, recipe: Recipe, clock: Clock) -> Features:
    """What a table sees of a recipe's mask, as in a request."""
    return Features.of(
        block_mask(mask),
        batch=1,
        q_heads=recipe.heads,
        dtype="bfloat16",
        head_dim=recipe.head_dim,
        layout="BHSD",
        summary=clock.summary(mask),
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
) -> Case:
    """Make one mask, and time the plans on it that a table may rank and that are not dropped.

    Raises:
        MemoryError: the GPU has no room for the mask, or for q, k and v.
        GpuLostError: the GPU failed.
    """
    mask = make(recipe)
    features = features_of(mask, recipe, clock)
    served, dropped = ranked(features, plans), field.dropped(features)
    timed: Sequence[PlanTime] = ()
    try:
        timed = clock.times(
            mask, recipe.heads, recipe.head_dim, [plan for plan in served if plan not in dropped]
        )
    except GpuLostError as lost:
        if lost.plan is not None:
            timed = (PlanTime(lost.plan, "failed", note=one_line(lost)),)
        lost.case = Case(recipe.name, recipe.source, features, tuple(timed))
        raise
    rest = (PlanTime(plan, "dropped") for plan in served if plan in dropped)
    timings = sorted((*timed, *rest), key=lambda timing: timing.plan.name)
    return Case(recipe.name, recipe.source, features, tuple(timings))


class Keeper:
    """Writes measurements every so often, and the last ones for certain.

    Example:
        ::

            with Keeper(path, empty, now) as keeper:
                keeper.add(case)
            print(len(keeper.measurements.cases))
    """

    def __init__(self, path: Path | None, begun: Measurements, now: Callable[[], float]) -> None:
        """``path`` of None keeps them in memory alone; ``begun`` may have cases already."""
        self._path, self._begun, self._now = path, begun, now
        self.cases = list(begun.cases)
        self._written, self._at = len(self.cases), now()

    def __enter__(self) -> Keeper:
        """Nothing is written yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """Write what is not written."""
        self._write()

    @property
    def measurements(self) -> Measurements:
        """All cases."""
        return self._begun.with_cases(self.cases)

    def add(self, case: Case) -> None:
        """Keep one more case."""
        self.cases.append(case)
        if self._now() - self._at >= _SAVE_EVERY:
            self._write()

    def _write(self) -> None:
        if self._path is not None and len(self.cases) > self._written:
            self.measurements.write(self._path)
            self._written = len(self.cases)
        self._at = self._now()


def profile(
    drawn: Iterator[Recipe],
    clock: Clock,
    done: Measurements,
    *,
    path: Path | None,
    budget_s: float,
    most_cases: int | None = None,
    on_case: Callable[[Case], None] = lambda case: None,
    now: Callable[[], float] = time.monotonic,
    measure: Callable[[Recipe, MaskMaker, Field], Case] | None = None,
) -> Measurements:
    """Measure cases until the budget is spent, or until there are no others.

    A mask for which the GPU has no room is passed over.

    Args:
        drawn: what to measure, without end.
        clock: gives plans their times.
        done: what was measured before; its cases are not measured again.
        path: where the measurements are written, every so often and at the end; None: nowhere.
        budget_s: seconds after which no case is begun.
        most_cases: end at this many, those measured before included.
        on_case: called after each case.
        now: a clock of seconds.
        measure: one case, in place of :func:`measure_case`.

    Returns:
        All cases, those measured before first.

    Raises:
        GpuLostError: the GPU failed; the case is among those that were written, without times, so
            that the next run goes on behind it.
    """
    begin = now()
    known = {(case.name, case.source) for case in done.cases}
    field = Field(done.cases)
    make = MaskMaker(clock.to_device)
    plans = candidates(clock.arch.name)
    repeats, most_repeats = 0, len(known) + _MOST_REPEATS  # those of earlier runs come first
    with Keeper(path, done, now) as keeper:
        for recipe in drawn:
            enough = most_cases is not None and len(keeper.cases) >= most_cases
            if enough or now() - begin >= budget_s:
                break
            if (recipe.name, recipe.source) in known:
                repeats += 1
                if repeats > most_repeats:
                    break
                continue
            repeats = 0
            known.add((recipe.name, recipe.source))
            try:
                if measure is None:
                    case = measure_case(recipe, make, clock, plans, field)
                else:
                    case = measure(recipe, make, field)
            except MemoryError:
                clock.free()
                continue
            except GpuLostError as lost:
                if lost.case is not None:
                    keeper.add(lost.case)
                raise
            field.add(case)
            keeper.add(case)
            on_case(case)
    return keeper.measurements
