from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from tessera_cupy.bench.families import FAMILIES
from tessera_cupy.bench.profile_cases import HELD_OUT_CLIP, HELD_OUT_LAYERS, recipes
from tessera_cupy.bench.regret import ablation, judge, report
from tessera_cupy.bench.regret_run import ablation_recipes
from tessera_cupy.regimes import PlanSpec, Table, load_for
from tessera_cupy.regimes.compiler import compile_table
from tessera_cupy.regimes.measurements import Case, Measurements, PlanTime

from ..regimes.measured import MERGE, REGROUP, RETAIN, SHARE, case, crossing, measured

ROWS_RETAIN = PlanSpec.parse("attend_wgmma/q128k192/retain-retain/rows")
ROWS_SHARE = PlanSpec.parse("attend_wgmma/q128k192/share-pack/rows")


@pytest.fixture(scope="module")
def table():
    """Share below a density of 0.3, merge from there on."""
    prior = load_for("sm90").document
    return Table(compile_table(crossing(edge=0.3), prior, path=Path("sm90.yaml")))


def test_regret_is_the_chosen_plan_s_time_by_the_best_one_s(table):
    held = measured(
        [
            case({SHARE: 1.0, MERGE: 3.0}, 0, density=0.1),
            case({SHARE: 1.5, MERGE: 1.2}, 1, density=0.1),
            case({SHARE: 1.0, MERGE: 2.0}, 2, density=0.9),
            # What only the host can plan does not count.
            case({SHARE: 1.0, REGROUP: 0.5}, 3, density=0.1),
        ]
    )
    assert [(one.chosen, one.ratio) for one in judge(table, held)] == [
        (SHARE, 1.0),
        (SHARE, 1.25),
        (MERGE, 2.0),
        (SHARE, 1.0),
    ]
    found = report(table, held, lambda one: one.name)
    assert found["all"]["mean"] == pytest.approx((1.25 * 2) ** (1 / 4), abs=1e-6)
    assert found["all"]["close"] == 0.5
    assert found["worst"][0]["case"] == "case 2"
    assert found["rows"][1]["kind"] == "case 1"
    assert found["rows"][1]["mean"] == 1.25


def test_requests_of_models_sizes_are_told_from_smaller_ones(table):
    held = measured(
        [
            case({SHARE: 1.0, MERGE: 3.0}, 0, density=0.1),
            case({SHARE: 1.5, MERGE: 1.2}, 1, density=0.1, tokens=4096),
        ]
    )
    sizes = report(table, held, lambda one: "all")["sizes"]
    assert {name: (row["mean"], row["cases"]) for name, row in sizes.items()} == {
        "from 17,550 tokens": (1.0, 1),
        "smaller": (1.25, 1),
    }
    of_large = measured(held.cases[:1])
    assert list(report(table, of_large, lambda one: "all")["sizes"]) == ["from 17,550 tokens"]


def test_a_plan_that_does_not_serve_gives_way_to_the_next(table):
    held = measured([case({MERGE: 2.0, RETAIN: 1.0}, density=0.1)])
    [one] = judge(table, held)
    assert (one.chosen, one.ratio) == (MERGE, 2.0)


def test_a_table_with_nothing_to_offer_is_charged_the_slowest(table):
    odd = PlanSpec.parse("attend_wgmma/q128k192/split-pack/longest+split")
    other = PlanSpec.parse("attend_mma/q128k64/split-pack/longest+split")
    [one] = judge(table, measured([case({odd: 1.0, other: 4.0}, density=0.1)]))
    assert (one.chosen, one.ratio) == (other, 4.0)


def test_the_ablation_by_hand(table):
    """Retain takes 4, share in rows 2, share organized 1 and merge 1.25."""
    times = {ROWS_RETAIN: 4.0, ROWS_SHARE: 2.0, SHARE: 1.0, MERGE: 1.25}
    held = measured([case(times, 0, density=0.1), case(times, 1, density=0.5)])
    found = ablation(held, table)
    assert found["mapping"] == pytest.approx(2.0)
    assert found["full"] == pytest.approx(4.0)
    assert found["table"] == pytest.approx((4 * 3.2) ** 0.5)
    # A case without the base is left out.
    more = measured([*held.cases, case({SHARE: 1.0}, 2, density=0.1)])
    assert ablation(more, table) == found
    assert (found["cases"], found["tokens"]) == (2, 32760)
    assert ablation(measured(more.cases[2:]), table) == {}
    # Regret is judged on the others alone.
    assert [one.case for one in judge(table, more)] == list(more.cases[2:])


def test_the_ablation_is_of_the_nine_families_at_a_model_s_size():
    made = ablation_recipes(None, None, 1.2e7)
    assert [one.kind for one in made] == [family.name for family in FAMILIES[1:]]
    assert {(one.grid.tokens, one.heads, one.clip) for one in made} == {
        (57600, 8, "carphone_pristine")
    }
    drawn = islice(recipes(HELD_OUT_CLIP, HELD_OUT_LAYERS, seed=1), 500)
    assert not {one.name for one in made} & {one.name for one in drawn}
    small = ablation_recipes(["Q16K16", "vsa"], 9000, 5e4)
    assert [(one.grid.tokens, one.heads) for one in small] == [(8100, 2)]


def test_plans_slower_than_dense_attention_are_counted(table):
    timings = (PlanTime(SHARE, "timed", 2.0, 2.0, 2.0),)
    base = case({SHARE: 2.0}, density=0.1)
    cases = [Case(f"{d}", "s", base.features, timings, d) for d in (1.9, 1.95, 4.0)]
    held = Measurements("sm90", "measured", "GPU", "0", (), (*cases, base))
    assert report(table, held, lambda one: "all")["slower_than_dense"] == 1


def test_nothing_timed_is_said(table):
    held = measured([case({}, states={SHARE: "failed"})])
    with pytest.raises(ValueError, match="No case was timed"):
        report(table, held, lambda one: "all")


def turns(times, noise, seed, count=12):
    """A case whose plans took turns, with noise and a common drift."""
    rng = np.random.default_rng(seed)
    drift = np.cumsum(0.02 * rng.standard_normal(count))
    timings = []
    for plan, ms in times.items():
        rounds = ms * np.exp(drift + noise * rng.standard_normal(count))
        middle = float(np.median(rounds))
        timings.append(PlanTime(plan, "timed", middle, middle, middle, "", tuple(rounds.tolist())))
    return Case(f"case {seed}", "s", case({}, density=0.1).features, tuple(timings))


def test_noise_alone_is_no_regret(table):
    """Eight plans as fast as each other: the shortest of their times is short by chance."""
    tiles, ways = ("q64k64", "q128k64", "q128k128"), ("retain", "merge")
    names = [f"attend_mma/{tile}/{how}-pack/longest+split" for tile in tiles for how in ways]
    alike = [PlanSpec.parse(name) for name in names]
    held = measured([turns(dict.fromkeys([SHARE, *alike], 1.0), 0.03, i) for i in range(60)])
    found = report(table, held, lambda one: "all")
    assert found["plain"]["mean"] > 1.01
    assert found["all"]["mean"] < found["plain"]["mean"] - 0.005
    assert found["all"]["close"] > found["plain"]["close"]


def test_a_slower_choice_is_found_through_noise(table):
    held = measured([turns({SHARE: 1.1, MERGE: 1.0, RETAIN: 1.02}, 0.02, i) for i in range(40)])
    found = report(table, held, lambda one: "all")
    assert found["all"]["mean"] == pytest.approx(1.1, abs=0.006)
    assert found["all"]["close"] == 0


def test_a_choice_that_left_early_is_judged_by_all_it_has(table):
    first = turns({SHARE: 1.4, MERGE: 1.0}, 0.0, 0)
    early = [replace(t, rounds=t.rounds[:2]) if t.plan == SHARE else t for t in first.timings]
    [one] = judge(table, measured([replace(first, timings=tuple(early))]))
    assert one.ratio == one.plain == pytest.approx(1.4)
