"""A caller's own rules: which requests they match, what they put first, and bad ones."""

import re

import numpy as np
import pytest

from tessera_cupy import ArraySpec, BlockMask, KeySlices, PlanSpec, load_table, make_plan
from tessera_cupy.regimes import Features, load_for

REQUEST = Features(
    block_q=64,
    block_kv=32,
    ragged=False,
    token_bits=False,
    dtype="bfloat16",
    head_dim=128,
    layout="BHSD",
    heads=12,
    tokens=32760,
    density=0.2,
    run_coverage=0.8,
)
WIDE = "attend_mma/q128k64/merge-pack/rows"
NARROW = "attend_mma/q64k64/retain-pack/rows"
TABLE = load_for("sm80")
USUAL = TABLE.lookup(REQUEST)


def first(table, **changes):
    return table.lookup(REQUEST._replace(**changes)).ranking[0].name


# Of each field: what a rule is given, values that match, and values that do not.
FIELDS = [
    ("block_q", 64, [64], [56, 72]),
    ("block_q", (48, 64), [48, 64], [40, 72]),
    ("block_kv", (None, 32), [8, 32], [40]),
    ("head_dim", (65, None), [72, 256], [64]),
    ("ragged", True, [True], [False]),
    ("ragged", False, [False], [True]),
    ("token_bits", True, [True], [False]),
    ("dtype", "float16", ["float16"], ["bfloat16"]),
    ("layout", "BSHD", ["BSHD"], ["BHSD"]),
    ("heads", (8, 13), [8, 12], [7, 13]),
    ("tokens", (None, 4096), [1, 4095], [4096]),
    ("density", (0.1, 0.3), [0.1, 0.2999], [0.0999, 0.3]),
    ("density", (1, None), [1.0], [0.999]),
    ("run_coverage", (None, 0.5), [0.0, 0.4999], [0.5]),
]


@pytest.mark.parametrize(("field", "given", "inside", "outside"), FIELDS)
def test_every_field_decides(field, given, inside, outside):
    table = TABLE.with_rule(WIDE, **{field: given})
    for value in inside:
        assert first(table, **{field: value}) == WIDE, value
    for value in outside:
        changed = REQUEST._replace(**{field: value})
        assert table.lookup(changed) == TABLE.lookup(changed), value


def test_a_rule_for_slices_is_for_slices_alone():
    table = TABLE.with_rule(WIDE, mask="slices")
    assert first(table, slices=True) == WIDE
    assert first(table) != WIDE


def test_all_that_is_given_must_match():
    table = TABLE.with_rule(WIDE, block_q=64, density=(None, 0.3))
    assert first(table) == WIDE
    assert first(table, block_q=32) != WIDE
    assert first(table, density=0.3) != WIDE


def test_the_rest_of_the_ranking_stays_behind():
    second = USUAL.ranking[1]
    choice = TABLE.with_rule([WIDE, second], block_q=64).lookup(REQUEST)
    assert [plan.name for plan in choice.ranking] == [
        WIDE,
        second.name,
        *[plan.name for plan in USUAL.ranking if plan != second],
    ]
    assert choice.regime == f"sm80 rule q64, before {USUAL.regime}"
    assert (choice.key, choice.why, choice.origin) == ("q64", "given by the caller", "rule")
    assert choice.cases is None


def test_later_rules_come_first_and_the_table_itself_does_not_change():
    one = TABLE.with_rule(WIDE, density=(None, 0.5), why="it was faster here")
    two = one.with_rule(PlanSpec.parse(NARROW), block_q=64)
    names = [plan.name for plan in two.lookup(REQUEST).ranking]
    assert names[:3] == [NARROW, WIDE, USUAL.ranking[0].name]
    assert first(two, block_q=32) == WIDE
    assert two.lookup(REQUEST._replace(block_q=32)).why == "it was faster here"
    assert first(one) == WIDE
    assert TABLE.lookup(REQUEST) is USUAL
    assert load_for("sm80").rules == ()
    assert [rule.name for rule in two.rules] == ["density<0.5", "q64"]
    assert repr(two).endswith(" keys, 2 rules)")
    assert two.plans()[-2:] == (PlanSpec.parse(WIDE), PlanSpec.parse(NARROW))


def test_a_rule_without_a_match_is_for_all():
    table = TABLE.with_rule(WIDE)
    assert first(table, block_q=8, head_dim=256, slices=True) == WIDE
    assert table.rules[0].name == "any"


def test_a_rule_on_a_request_that_the_table_lacks(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text(
        """\
schema: 1
arch: own
provenance: default
device: null
catalog: null
raw_data: null
reasons: of the user
base: [attend_mma/q64k64/retain-pack/rows, attend_mma/q64k64/split-pack/rows]
keys:
  - match: {block_q: 16}
    why: small
    regimes: [{when: {}, plans: [attend_mma/q64k64/merge-pack/rows]}]
"""
    )
    own = load_table(path).with_rule(WIDE, block_q=(33, 64))
    names = [plan.name for plan in own.lookup(REQUEST).ranking]
    assert names == [WIDE, NARROW, NARROW.replace("retain", "split")]


MASK = BlockMask.from_dense(np.tri(5, dtype=bool), (32, 32))
SPEC = ArraySpec((1, 2, 160, 64), "float16")


def test_calls_take_a_table_with_rules_and_say_so():
    table = load_for("sm80").with_rule(
        ["attend_mma/q192k64/retain-pack/rows", "attend_mma/q64k64/merge-pack/runs"],
        block_q=(16, 32),
        why="our own timing",
    )
    plan = make_plan(MASK, SPEC, regime=table, arch="sm_80")
    assert plan.spec.name == "attend_mma/q64k64/merge-pack/runs"
    assert [name for name, _ in plan.choice.passed_over] == ["attend_mma/q192k64/retain-pack/rows"]
    text = plan.explain()
    assert re.search(r"(?m)^regime +sm80 rule q16-32, before sm80 .*q17-32 k<=32 uniform", text)
    # The reason is the rule's, whatever the buckets of the key behind it.
    assert re.search(r"(?m)^why +our own timing$", text)
    assert "2. attend_mma/q64k64/merge-pack/runs: this plan\n" in text
    assert plan.summary()["table"]["origin"] == "rule"


def test_a_rule_that_cannot_serve_leaves_the_tables_choice():
    table = load_for("sm80").with_rule("attend_wgmma/q128k192/share-pack/rows")
    usual = make_plan(MASK, SPEC, arch="sm_80")
    ruled = make_plan(MASK, SPEC, regime=table, arch="sm_80")
    assert ruled.spec == usual.spec
    assert "no attend_wgmma kernel" in ruled.choice.passed_over[0][1]
    slices = KeySlices.from_groups(np.ones((2, 100), bool), 64)
    spec = ArraySpec((1, 1, 128, 64))
    usual = make_plan(slices, spec, arch="sm_80")
    assert make_plan(slices, spec, regime=table, arch="sm_80").spec == usual.spec


@pytest.mark.parametrize(
    ("plans", "match", "error", "said"),
    [
        ("attend_mma/q64k64/retain-pck/rows", {}, ValueError, "`plans`: expected a plan's name"),
        (7, {}, TypeError, "`plans`: expected a plan's name, a PlanSpec, or a list"),
        ([7], {}, TypeError, "got one that is 7"),
        ([], {}, ValueError, "`plans`: expected one plan at least, got none"),
        ([WIDE, WIDE], {}, ValueError, f"each plan once, got {WIDE} again"),
        (WIDE, {"why": ""}, ValueError, "`why`: expected one line of text"),
        (WIDE, {"why": "two\nlines"}, ValueError, "`why`: expected one line of text"),
        (WIDE, {"why": None}, ValueError, "`why`: expected one line of text, got None"),
        (WIDE, {"block_q": 0}, ValueError, "`block_q`: expected a whole number from 1"),
        (WIDE, {"block_q": 64.0}, ValueError, "`block_q`: expected a whole number from 1"),
        (WIDE, {"block_kv": True}, TypeError, "`block_kv`: expected a whole number from 1"),
        (WIDE, {"head_dim": "128"}, TypeError, "`head_dim`: expected a whole number from 1"),
        (WIDE, {"block_q": (64, 16)}, ValueError, "`from` not above `to`, got (64, 16)"),
        (WIDE, {"block_q": (None, None)}, TypeError, "got (None, None)"),
        (WIDE, {"block_q": (1, 2, 3)}, TypeError, "got (1, 2, 3)"),
        (WIDE, {"block_q": [16, 32]}, TypeError, "got [16, 32]"),
        (WIDE, {"ragged": 1}, TypeError, "`ragged`: expected True or False, got 1"),
        (WIDE, {"dtype": "float32"}, ValueError, "`dtype`: expected one of float16, bfloat16"),
        (WIDE, {"layout": "SBHD"}, ValueError, "`layout`: expected one of BHSD, BSHD"),
        (WIDE, {"mask": "blocks"}, ValueError, "`mask`: expected one of slices, got 'blocks'"),
        (WIDE, {"heads": 12}, TypeError, "`heads`: expected the pair (from, below) of whole"),
        (WIDE, {"tokens": (0, 5)}, ValueError, "`tokens`: expected the pair (from, below)"),
        (WIDE, {"tokens": (1e3, None)}, ValueError, "got (1000.0, None)"),
        (WIDE, {"density": 0.1}, TypeError, "pair (from, below) of numbers from 0 to 1"),
        (WIDE, {"density": (0.1, 1.5)}, ValueError, "got (0.1, 1.5)"),
        (WIDE, {"density": (float("nan"), None)}, ValueError, "got (nan, None)"),
        (WIDE, {"density": (0.3, 0.3)}, ValueError, "`from` lower than `below`"),
        (WIDE, {"run_coverage": ("0", None)}, TypeError, "`run_coverage`: expected the pair"),
        (WIDE, {"blocks": 64}, TypeError, "unexpected keyword argument 'blocks'"),
    ],
)
def test_bad_rules_are_refused(plans, match, error, said):
    with pytest.raises(error) as caught:
        TABLE.with_rule(plans, **match)
    assert said in str(caught.value)
    assert "blocks" in match or ". Fix: " in str(caught.value)
