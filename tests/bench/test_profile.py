import math
from itertools import cycle, islice

import numpy as np
import pytest

from tessera_cupy.bench.profile_cases import (
    KINDS,
    SMALL_OPERATIONS,
    MaskMaker,
    _block,
    _blocks,
    recipes,
)
from tessera_cupy.bench.profile_clock import GpuLostError
from tessera_cupy.bench.profile_run import (
    DENSE_FROM,
    FAR_BEHIND,
    SEEN_BEFORE_DROPPED,
    Dense,
    Field,
    profile,
)
from tessera_cupy.kernels.arch import get_arch
from tessera_cupy.masks import KeySlices
from tessera_cupy.regimes.candidates import candidates, made_online
from tessera_cupy.regimes.measurements import Measurements, PlanTime
from tessera_cupy.regimes.tree import Costs

from ..regimes.measured import MERGE, SHARE, case, features

SMALL = {"most_tokens": 4096}
EMPTY = Measurements("sm80", "measured", "A made-up GPU", "0", (), ())


def draw(count, **changes):
    return list(islice(recipes(**{**SMALL, **changes}), count))


class FakeClock:
    """The first plan takes a millisecond, the others one more each."""

    arch = get_arch("sm_80")
    device = "A made-up GPU"
    most_active = 1e6
    to_device = staticmethod(np.asarray)

    def __init__(self):
        self.asked = []
        self.freed = 0

    def summary(self, mask):
        return None

    def free(self):
        self.freed += 1

    def times(self, mask, heads, head_dim, plans):
        self.asked.append(len(plans))
        return tuple(PlanTime(plan, "timed", 1.0 + i, 1.0, 2.0) for i, plan in enumerate(plans))


def test_recipes_are_the_same_for_the_same_seed():
    assert draw(30) == draw(30)
    assert draw(30) != draw(30, seed=1)
    assert draw(30) != draw(30, clip="carphone_pristine")


def test_any_beginning_has_all_kinds():
    for rounds in (1, 3):
        drawn = draw(rounds * len(KINDS))
        assert {recipe.kind for recipe in drawn} == set(KINDS)
        assert all(sum(recipe.kind == kind for recipe in drawn) == rounds for kind in KINDS)


def test_recipes_vary_in_all_that_regimes_tell_apart():
    drawn = list(islice(recipes(), 40 * len(KINDS)))
    assert {recipe.head_dim for recipe in drawn} == {64, 128}
    assert len({recipe.source for recipe in drawn}) == 8
    assert len({recipe.grid.tokens for recipe in drawn}) == 9
    assert {recipe.heads for recipe in drawn} >= {1, 2, 4, 8, 16, 24, 40}
    keeps = [recipe.keep for recipe in drawn if recipe.kind == "Q64K64"]
    assert min(keeps) < 0.05
    assert max(keeps) > 0.5
    share = np.mean([recipe.random for recipe in drawn if recipe.kind == "Q64K64"])
    assert 0.1 < share < 0.6


def test_small_requests_come_in_between_and_change_no_other_recipe():
    both = list(islice(recipes(small_too=True), 32 * len(KINDS)))
    rounds = [both[i : i + len(KINDS)] for i in range(0, len(both), len(KINDS))]
    others = [recipe for one in rounds[::2] for recipe in one]
    assert others == list(islice(recipes(), 16 * len(KINDS)))
    small = [recipe for one in rounds[1::2] for recipe in one]
    assert {recipe.source for recipe in small} == {recipe.source for recipe in others}
    assert {recipe.head_dim for recipe in small} == {64, 128}
    assert len({recipe.heads for recipe in small}) >= 6
    for r in small:
        work = 4 * r.head_dim * r.keep * r.heads * float(r.grid.tokens) ** 2
        assert work <= SMALL_OPERATIONS


def test_no_recipe_asks_for_more_than_a_gpu_has_time_for():
    for recipe in islice(recipes(), 500):
        work = 4 * recipe.head_dim * recipe.keep * recipe.heads * float(recipe.grid.tokens) ** 2
        assert work <= 6e12 or recipe.heads == 1


def test_masks_keep_no_more_entries_than_the_host_can_plan():
    for recipe in islice(recipes(most_active=1e5), 300):
        mask_entries = math.prod(_blocks(recipe.grid, _block(recipe.kind)))
        most = 1e6 if recipe.kind.startswith(("slices", "dense-")) else 1e5
        small = recipe.heads == 1 and recipe.grid.tokens == 4096
        assert small or recipe.heads * recipe.keep * mask_entries <= most


def test_smaller_blocks_that_are_all_kept_change_no_other_recipe():
    others = [kind for kind in KINDS if not kind.startswith("dense-")]
    drawn = [r for r in draw(5 * len(KINDS)) if r.kind in others]
    assert drawn == draw(5 * len(others), kinds=others)


def test_profiles_and_what_judges_them_share_no_source():
    held = draw(100, clip="carphone_pristine", layers=range(100, 104))
    assert not {r.source for r in draw(100)} & {r.source for r in held}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_made(kind):
    make = MaskMaker()
    drawn = [r for r in draw(40, kinds=[kind]) if r.heads <= 4]
    seen = set()
    for recipe in drawn:
        if (recipe.random, recipe.head_dim) in seen:
            continue
        seen.add((recipe.random, recipe.head_dim))
        mask = make(recipe)
        assert isinstance(mask, KeySlices) == kind.startswith("slices")
        assert (mask.batch, mask.shape) == (1, (4096, 4096))
        assert mask.heads == recipe.heads
        if recipe.random or kind.startswith("slices"):
            assert mask.density() == pytest.approx(recipe.keep, rel=0.2, abs=0.05)
    if kind.startswith("slices") or (kind.startswith("Q") and "K" in kind):
        assert {random for random, _ in seen} == {False, True}


def test_heads_of_a_random_mask_differ():
    recipe = next(r for r in draw(400, kinds=["Q64K64"]) if r.random and r.heads == 4)
    dense = MaskMaker()(recipe).to_dense()[0]
    assert len({head.tobytes() for head in dense}) == 4


def test_a_profile_goes_on_where_it_stopped(tmp_path):
    path = tmp_path / "sm80.npz"

    def run(done, most):
        return profile(
            recipes(kinds=["dense"], **SMALL),
            FakeClock(),
            done,
            path=path,
            budget_s=1e9,
            most_cases=most,
        )

    whole = run(EMPTY, 6)
    first = run(EMPTY, 4)
    assert Measurements.read(path).cases == first.cases
    again = run(Measurements.read(path), 6)
    assert [c.name for c in again.cases] == [c.name for c in whole.cases]
    assert len({(c.name, c.source) for c in again.cases}) == 6
    assert Measurements.read(path).cases == again.cases


def test_a_profile_ends_with_its_budget(tmp_path):
    clock = FakeClock()
    done = profile(
        recipes(kinds=["dense"], **SMALL),
        clock,
        EMPTY,
        path=tmp_path / "sm80.npz",
        budget_s=2.5,
        now=lambda: len(clock.asked),  # a case takes a second
    )
    assert len(done.cases) == 3


def test_what_is_measured_is_on_disk_every_few_seconds(tmp_path):
    clock, path, written = FakeClock(), tmp_path / "sm80.npz", []

    def on_case(case):
        written.append(len(Measurements.read(path).cases) if path.exists() else 0)

    profile(
        recipes(kinds=["dense"], **SMALL),
        clock,
        EMPTY,
        path=path,
        budget_s=1e9,
        most_cases=12,
        on_case=on_case,
        now=lambda: len(clock.asked),
    )
    assert written == [0] * 4 + [5] * 5 + [10] * 3
    assert len(Measurements.read(path).cases) == 12


def test_a_mask_without_room_is_passed_over(tmp_path):
    class Small(FakeClock):
        def times(self, mask, *given):
            if len(self.asked) == 2 and not self.freed:
                raise MemoryError("out of memory")
            return super().times(mask, *given)

    clock = Small()
    path = tmp_path / "sm80.npz"
    done = profile(
        recipes(kinds=["dense"], **SMALL), clock, EMPTY, path=path, budget_s=1e9, most_cases=4
    )
    every = [r.name for r in draw(5, kinds=["dense"])]
    assert [case.name for case in done.cases] == every[:2] + every[3:]
    assert clock.freed == 1


@pytest.mark.parametrize("told", [True, False])
def test_a_run_goes_on_behind_the_mask_at_which_a_gpu_was_lost(tmp_path, told):
    class Lost(FakeClock):
        def times(self, mask, heads, head_dim, plans):
            if len(self.asked) == 2:
                raise GpuLostError(RuntimeError("an illegal address"), plans[3] if told else None)
            return super().times(mask, heads, head_dim, plans)

    def run(clock, done):
        drawn = recipes(kinds=["dense"], **SMALL)
        return profile(drawn, clock, done, path=path, budget_s=1e9, most_cases=4)

    path = tmp_path / "sm80.npz"
    with pytest.raises(GpuLostError, match="illegal address"):
        run(Lost(), EMPTY)
    kept = Measurements.read(path)
    assert [t.state for t in kept.cases[2].timings] == ["failed"] * told
    assert kept.cases[2].times() == {}
    again = run(FakeClock(), kept)
    assert [case.name for case in again.cases] == [r.name for r in draw(4, kinds=["dense"])]
    ranked = Costs.of(again.cases).plans
    assert (kept.cases[2].timings[0].plan not in ranked) if told else len(ranked) > 3


def test_what_was_measured_is_kept_when_a_run_breaks(tmp_path):
    class Broken(FakeClock):
        def times(self, *given):
            if len(self.asked) == 2:
                raise RuntimeError("the GPU has fallen off the bus")
            return super().times(*given)

    path = tmp_path / "sm80.npz"
    with pytest.raises(RuntimeError, match="off the bus"):
        profile(recipes(kinds=["dense"], **SMALL), Broken(), EMPTY, path=path, budget_s=1e9)
    assert len(Measurements.read(path).cases) == 2


def test_plans_far_behind_are_dropped_after_enough_masks():
    field = Field()
    for number in range(SEEN_BEFORE_DROPPED):
        assert field.dropped(features()) == set()
        field.add(case({SHARE: 1.0, MERGE: FAR_BEHIND + 0.01}, number))
    assert field.dropped(features()) == {MERGE}
    assert field.dropped(features(head_dim=64)) == set()
    # Nor on requests that are over sooner.
    assert field.dropped(features(heads=1, tokens=8192)) == set()


def test_dense_attention_is_timed_once_a_size_and_only_where_it_can_matter():
    clock = FakeClock()
    dense = Dense(clock)
    assert dense.ms(features(density=DENSE_FROM - 0.01)) is None
    assert clock.asked == []
    for density in (DENSE_FROM, 0.9):
        assert dense.ms(features(density=density, tokens=1000)) == 1.0
    assert clock.asked == [1]
    dense.ms(features(density=0.9, tokens=1000, heads=3))
    assert clock.asked == [1, 1]


def test_a_plan_that_was_near_once_is_not_dropped():
    cases = [case({SHARE: 1.0, MERGE: 9.0}, i) for i in range(20)]
    field = Field([*cases, case({SHARE: 1.0, MERGE: 1.4}, 20)])
    assert field.dropped(features()) == set()


def test_dropped_plans_are_not_timed_and_are_said(tmp_path):
    clock = FakeClock()
    done = profile(
        recipes(kinds=["dense"], **SMALL),
        clock,
        EMPTY,
        path=tmp_path / "sm80.npz",
        budget_s=1e9,
        most_cases=60,
    )
    # Of blocks over GPU arrays: what the GPU packs by itself.
    every = sum(made_online(plan, slices=False) for plan in candidates("sm_80"))
    assert clock.asked[0] == every < len(candidates("sm_80"))
    assert min(clock.asked) < every
    assert all(len(c.timings) == every for c in done.cases)
    assert any(t.state == "dropped" for t in done.cases[-1].timings)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"clip": "cats"}, "`clip`: expected one of bikes, carphone_pristine, got 'cats'"),
        ({"kinds": ["Q65K65"]}, "`kinds`: expected of dense, .*got 'Q65K65'"),
        ({"most_tokens": 100}, "`most_tokens`: expected at least 4096, got 100"),
    ],
)
def test_bad_input_is_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        recipes(**changes)


def test_measured_cases_are_named_apart():
    drawn = [(r.name, r.source) for r in islice(recipes(kinds=["Q64K64", "slices-64"]), 1000)]
    assert len(set(drawn)) > 0.98 * len(drawn)


def test_a_profile_ends_when_there_are_no_other_masks(tmp_path):
    """Of 40 recipes that come again and again, of which 30 were measured before."""
    few = draw(40, kinds=["Q128K128"])
    path = tmp_path / "sm80.npz"
    before = profile(iter(few[:30]), FakeClock(), EMPTY, path=path, budget_s=60)
    found = profile(cycle(few), FakeClock(), before, path=path, budget_s=60)
    assert len(found.cases) == len({(recipe.name, recipe.source) for recipe in few})
