import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tessera_cupy.regimes import PlanSpec, Table, load_for
from tessera_cupy.regimes.compiler import LEAST_CASES, compile_table
from tessera_cupy.regimes.regret import Regret
from tessera_cupy.regimes.schema import read_document
from tessera_cupy.regimes.tree import MIN_CASES
from tessera_cupy.regimes.writer import table_text, write_table

from .measured import GATHER, MERGE, REGROUP, RETAIN, SHARE, case, crossing, features, measured

PRIOR = read_document(Path(__file__).parent / "default" / "sm90.yaml")
PATH = Path("sm90.yaml")


def table(measurements, edges="tree"):
    return Table(compile_table(measurements, PRIOR, path=PATH, edges=edges))


def test_a_tree_finds_where_another_plan_wins():
    made = table(crossing(edge=0.3))
    [key] = made.document.keys
    assert key.cases == 128
    assert key.edges == ((), (), (0.3,), (), (), ())
    assert [regime.plans[0] for regime in key.regimes] == [SHARE, MERGE]
    assert sum(regime.cases for regime in key.regimes) == 128
    for density, plan in ((0.01, SHARE), (0.29, SHARE), (0.3, MERGE), (1.0, MERGE)):
        assert made.lookup(features(density=density)).ranking[0] == plan


def test_preset_edges_are_kept_to():
    made = table(crossing(edge=0.3), edges="preset")
    [key] = made.document.keys
    assert key.edges == ((), (), (0.3,), (), (), ())
    made = table(crossing(edge=0.4), edges="preset")
    assert made.document.keys[0].edges[2] in ((0.3,), (0.6,), (0.3, 0.6))


def test_plans_are_ranked_by_the_geometric_mean():
    # Means of 1, 2, 4: share 2.33 and merge 2.4; geometric means 2.0 and 2.34.
    times = [{SHARE: 1.0, MERGE: 2.0}, {SHARE: 2.0, MERGE: 2.0}, {SHARE: 4.0, MERGE: 3.2}]
    cases = [case(times[i % 3], i) for i in range(12)]
    key = table(measured(cases)).document.keys[0]
    assert key.regimes[0].plans == (SHARE, MERGE)


def test_plans_twice_as_slow_are_not_ranked_and_the_base_comes_last():
    cases = [case({SHARE: 1.0, MERGE: 1.99, RETAIN: 2.01}, i) for i in range(LEAST_CASES)]
    made = table(measured(cases))
    assert made.document.keys[0].regimes[0].plans == (SHARE, MERGE)
    rest = made.lookup(features()).ranking[2:]
    assert rest == Table(PRIOR).lookup(features()).ranking[1:]  # SHARE is the first there too
    assert rest[-len(PRIOR.base) :] == PRIOR.base


def test_one_plan_everywhere_is_one_regime():
    cases = [case({SHARE: 1.0, MERGE: 1.5}, i, density=i / 200) for i in range(200)]
    [key] = table(measured(cases)).document.keys
    assert len(key.regimes) == 1
    assert key.edges == ((),) * 6


def test_regimes_have_cases_enough():
    """A few cases at the end, in which another plan wins, make no regime of their own."""
    cases = list(crossing(edge=2.0).cases)
    few = MIN_CASES - 1
    last = [
        replace(one, timings=case({MERGE: 1.0, SHARE: 1.01, RETAIN: 3.0}).timings)
        for one in cases[-few:]
    ]
    [key] = table(measured([*cases[:-few], *last])).document.keys
    assert all(regime.cases >= MIN_CASES for regime in key.regimes)


def test_depth_is_judged_on_sources_left_out():
    """What one source alone shows is not learned: the others pay for it."""
    cases = []
    for number in range(160):
        source = number % 5
        fast = MERGE if source == 0 and number >= 80 else SHARE
        slow = SHARE if fast == MERGE else MERGE
        cases.append(
            case({fast: 1.0, slow: 1.4}, number, f"layer {source}", tokens=1000 + number * 10)
        )
    [key] = table(measured(cases)).document.keys
    assert [regime.plans[0] for regime in key.regimes] == [SHARE]


def test_plans_that_only_the_host_makes_are_ranked_only_where_it_plans_anyway():
    times = {REGROUP: 1.0, SHARE: 1.2}
    on_gpu = [case(times, i) for i in range(8)]
    on_host = [case(times, i, token_bits=True) for i in range(8)]
    made = table(measured([*on_gpu, *on_host]))
    assert made.lookup(features()).ranking[0] == SHARE
    assert made.lookup(features(token_bits=True)).ranking[0] == REGROUP


def test_a_plan_that_was_wrong_once_is_left_out_and_named():
    cases = [case({SHARE: 1.0, MERGE: 1.5}, i) for i in range(20)]
    cases.append(case({MERGE: 1.5}, 20, states={SHARE: "wrong output"}))
    document = table(measured(cases)).document
    assert document.keys[0].regimes[0].plans == (MERGE,)
    assert SHARE.name in document.reasons


def test_a_plan_that_does_not_serve_most_cases_is_not_ranked():
    cases = [case({SHARE: 1.0, MERGE: 1.5} if i < 4 else {MERGE: 1.5}, i) for i in range(12)]
    assert table(measured(cases)).document.keys[0].regimes[0].plans == (MERGE,)


def test_kinds_of_masks_are_keys_of_their_own():
    kinds = [
        {},
        {"head_dim": 64},
        {"ragged": True},
        {"token_bits": True},
        {"block_q": 128},
        {"block_kv": 128},
        {"slices": True, "token_bits": True, "block_kv": 16},
    ]
    cases = [
        case({GATHER if "slices" in kind else SHARE: 1.0}, 8 * n + i, **kind)
        for n, kind in enumerate(kinds)
        for i in range(8)
    ]
    # Narrow columns make the tiles of wide ones: one key with the first kind.
    cases += [case({SHARE: 1.0}, 500 + i, block_kv=16) for i in range(8)]
    cases += [case({MERGE: 1.0}, 1000, block_q=16)]  # too few
    made = table(measured(cases))
    assert len(made.document.keys) == len(kinds)
    assert sorted(key.cases for key in made.document.keys) == [8] * 6 + [16]
    columns = {(key.match.block_kv.low, key.match.block_kv.high) for key in made.document.keys}
    assert columns == {(-math.inf, 65), (33, 65), (65, math.inf), (-math.inf, math.inf)}
    assert "1 case" in made.document.reasons
    # What was not measured is reasoned.
    lookup = made.lookup(features(block_q=16))
    assert lookup.origin == "reasoned"
    assert lookup.ranking == Table(PRIOR).lookup(features(block_q=16)).ranking


def test_dtypes_are_one_key_unless_both_have_cases_enough():
    few = [case({SHARE: 1.0}, i, dtype="bfloat16") for i in range(40)]
    few += [case({MERGE: 1.0}, 40 + i, dtype="float16") for i in range(LEAST_CASES - 1)]
    assert len(table(measured(few)).document.keys) == 1
    enough = [*few, case({MERGE: 1.0}, 99, dtype="float16")]
    made = table(measured(enough))
    assert len(made.document.keys) == 2
    assert made.lookup(features(dtype="float16")).ranking[0] == MERGE
    assert made.lookup(features(dtype="bfloat16")).ranking[0] == SHARE


def test_the_same_measurements_give_the_same_file(tmp_path):
    texts = [table_text(compile_table(crossing(), PRIOR, path=PATH)) for _ in range(2)]
    assert texts[0] == texts[1]
    backwards = measured(reversed(crossing().cases))
    keys = compile_table(backwards, PRIOR, path=PATH).keys
    assert keys == compile_table(crossing(), PRIOR, path=PATH).keys


def test_a_table_is_written_and_read_again(tmp_path):
    document = compile_table(crossing(), PRIOR, path=tmp_path / "sm90.yaml")
    write_table(document)
    again = read_document(tmp_path / "sm90.yaml")
    assert again.raw_data == crossing().fingerprint
    assert (again.provenance, again.device, again.catalog) == ("measured", "A GPU", "0123456789ab")
    for before, after in ((document.keys, again.keys), (document.reasoned, again.reasoned)):
        assert [(k.match, k.edges, k.why, k.cases) for k in before] == [
            (k.match, k.edges, k.why, k.cases) for k in after
        ]
        assert [(r.when, r.plans, r.cases) for k in before for r in k.regimes] == [
            (r.when, r.plans, r.cases) for k in after for r in k.regimes
        ]
    assert again.base == PRIOR.base
    # A table that is compiled over this one keeps the reasoned keys and their reasons.
    twice = compile_table(crossing(edge=0.6), again, path=tmp_path / "sm90.yaml")
    assert [key.match for key in twice.reasoned] == [key.match for key in PRIOR.keys]
    last = PRIOR.reasons.split()[-6:]
    assert twice.reasons.split()[-6:] == last
    assert twice.reasons.count("Reasoned keys: ") == 1


@pytest.mark.parametrize("name", ["sm80", "sm89", "sm90", "sm100", "sm120"])
def test_shipped_tables_survive_being_written(name, tmp_path):
    before = load_for(name).document
    write_table(replace(before, path=tmp_path / f"{name}.yaml"))
    after = read_document(tmp_path / f"{name}.yaml")
    assert after.base == before.base
    for a, b in zip(before.all_keys, after.all_keys, strict=True):
        assert (a.match, a.why, a.edges, a.cases) == (b.match, b.why, b.edges, b.cases)
        assert [(r.when, r.plans) for r in a.regimes] == [(r.when, r.plans) for r in b.regimes]


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match=r"`edges`.*'forest'"):
        compile_table(crossing(), PRIOR, path=PATH, edges="forest")
    with pytest.raises(ValueError, match="`measurements`: expected at least one case"):
        compile_table(measured([]), PRIOR, path=PATH)
    with pytest.raises(ValueError, match="expected a table of sm80, got one of sm90"):
        compile_table(measured([case({SHARE: 1.0})], arch="sm80"), PRIOR, path=PATH)
    with pytest.raises(
        ValueError, match=f"{LEAST_CASES} cases or more, got 1 cases of 1 kinds, at most 1"
    ):
        compile_table(measured([case({SHARE: 1.0})]), PRIOR, path=PATH)


def test_regret_in_numbers():
    # Of 1 ... 1 (98 times), 1.1 and 4.4: the product is 4.84.
    regret = Regret.of([1.0] * 98 + [1.1, 4.4])
    assert regret.mean == pytest.approx(4.84 ** (1 / 100), abs=1e-6)
    assert regret.close == 0.98
    assert regret.cases == 100
    assert 1.1 <= regret.p99 <= 4.4
    assert regret.p95 == 1.0


def test_the_reason_says_how_the_first_plans_do():
    cases = [case({SHARE: 1.0, MERGE: 1.21}, i) for i in range(6)]
    cases += [case({SHARE: 1.21, MERGE: 1.0}, 6 + i) for i in range(2)]
    key = table(measured(cases)).document.keys[0]
    # Two of eight cases pay 1.21: 1.21 ** (1 / 4) = 1.0488.
    assert key.why.startswith("8 cases from 1 source; the first plans take 1.049 times")
    assert PlanSpec.parse(SHARE.name) == key.regimes[0].plans[0]


def test_what_was_measured_is_backed_by_what_is_reasoned():
    """A plan of the key that a request cannot take gives way to reasoned ones, not to the base."""
    base = PRIOR.base[0]  # it stays where it was measured to be
    times = {SHARE: 1.0, base: 1.4, MERGE: 1.5}
    made = table(measured([case(times, i) for i in range(8)]))
    reasoned = Table(PRIOR).lookup(features(block_q=64)).ranking
    found = made.lookup(features(block_q=64))
    assert found.ranking[:3] == (SHARE, base, MERGE)
    assert list(found.ranking[3:]) == [plan for plan in reasoned if plan not in times]
    assert found.ranking[3] not in PRIOR.base
    assert found.origin == "keys"
    assert made.lookup(features(block_q=64)) is found


def test_equal_cases_count_each():
    """Two cases alike in everything, names too, are two."""
    twice = [case({SHARE: 1.0, MERGE: 2.0}, density=0.1)] * 20
    [key] = table(measured(twice)).document.keys
    assert key.cases == 20
    assert key.regimes[0].plans[0] == SHARE


def test_cases_whose_plans_were_all_wrong_elsewhere_decide_nothing():
    cases = [case({SHARE: 1.0, MERGE: 2.0}, number, density=0.1) for number in range(10)]
    cases += [case({RETAIN: 1.0}, 10, density=0.1)]
    cases += [case({SHARE: 1.0}, 11, states={RETAIN: "wrong output"}, density=0.1)]
    [key] = table(measured(cases)).document.keys
    assert key.cases == 11
    assert key.regimes[0].plans == (SHARE, MERGE)
    alone = [case({RETAIN: 1.0}, number, density=0.1) for number in range(9)]
    alone += [case({}, 9, states={RETAIN: "failed"}, density=0.1)]
    with pytest.raises(ValueError, match="at most 0 of one"):
        table(measured(alone))


def test_characters_that_a_table_may_not_have_are_replaced(tmp_path):
    """A command line has the path that it was given, in which any character may be."""
    odd = replace(measured(crossing().cases), made=("By `profile a\xa0b\x1b\udcff.yaml`.",))
    document = replace(table(odd).document, path=tmp_path / "sm90.yaml", device="A\tGPU")
    write_table(document)
    again = read_document(tmp_path / "sm90.yaml")
    assert again.device == "A?GPU"
    assert again.reasons.startswith("By `profile a?b??.yaml`.")


def test_a_failed_write_leaves_the_table_that_was_there(tmp_path, monkeypatch):
    document = replace(table(crossing()).document, path=tmp_path / "sm90.yaml")
    write_table(document)
    before = document.path.read_bytes()

    def full(descriptor):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_table(replace(document, device="another"))
    assert document.path.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["sm90.yaml"]
