"""The second list of keys, for requests that nothing measured answers, and counts of cases."""

import copy
import pickle

import pytest

from tessera_cupy.errors import TableError
from tessera_cupy.regimes import Features, load_table
from tessera_cupy.regimes import table as table_module

HEAD = """\
schema: 1
arch: toy
provenance: measured
device: NVIDIA H200
catalog: 0a1b2c
raw_data: ffee01
reasons: for tests
base: [attend_mma/q64k64/retain-pack/rows, attend_mma/q64k64/split-pack/rows]
"""
KEYS = """\
keys:
  - match: {block_q: 64}
    why: as measured
    cases: 12
    edges: {density: [0.1, 0.3]}
    regimes:
      - {when: {density: {below: 0.1}}, plans: [attend_mma/q64k64/retain-pack/longest], cases: 5}
      - {when: {density: {from: 0.1, below: 0.3}}, plans: [attend_mma/q128k64/merge-pack/rows]}
"""
REASONED = """\
reasoned:
  - match: {block_q: {to: 128}}
    why: by thinking
    regimes:
      - {when: {}, plans: [attend_mma/q128k64/retain-pack/rows]}
"""
REQUEST = Features(
    block_q=64,
    block_kv=64,
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


def table_of(tmp_path, text):
    path = tmp_path / "toy.yaml"
    path.write_text(text)
    return load_table(path)


def ask(table, **changes):
    return table.lookup(REQUEST._replace(**changes))


def mapping(choice):
    return f"q{choice.ranking[0].tile_q} {choice.ranking[0].mapping.name}"


def test_measured_keys_come_first_then_reasoned_ones_then_the_base(tmp_path):
    table = table_of(tmp_path, HEAD + KEYS + REASONED)
    measured = ask(table, block_q=64)
    assert (mapping(measured), measured.origin) == ("q128 merge-pack", "keys")
    assert measured.regime == "toy q64 0.1<=density<0.3"
    assert measured.why == "as measured"
    reasoned = ask(table, block_q=32)
    assert (mapping(reasoned), reasoned.origin) == ("q128 retain-pack", "reasoned")
    assert (reasoned.regime, reasoned.key) == ("toy reasoned q<=128", "q<=128")
    assert reasoned.why == "by thinking"
    missed = ask(table, block_q=136)
    assert (mapping(missed), missed.origin, missed.key) == ("q64 retain-pack", "base", "base")


def test_a_bucket_without_a_measured_regime_is_reasoned_about(tmp_path):
    both = table_of(tmp_path, HEAD + KEYS + REASONED)
    assert ask(both, density=0.5).origin == "reasoned"
    alone = ask(table_of(tmp_path, HEAD + KEYS), density=0.5)
    assert (alone.origin, alone.regime) == ("base", "toy q64 base (no regime)")


def test_keys_of_slices_come_first_in_either_list(tmp_path):
    slices = """\
  - match: {mask: slices}
    why: single keys
    regimes: [{when: {}, plans: [attend_mma/q64k64/retain-gather/rows]}]
"""
    table = table_of(tmp_path, HEAD + KEYS + REASONED + slices)
    assert mapping(ask(table, slices=True)) == "q64 retain-gather"
    assert ask(table, slices=True).regime == "toy reasoned slices"
    assert ask(table).origin == "keys"


def test_cases_are_those_of_the_regime_or_else_of_the_key(tmp_path):
    table = table_of(tmp_path, HEAD + KEYS + REASONED)
    assert (table.document.keys[0].cases, table.document.reasoned[0].cases) == (12, None)
    assert [regime.cases for regime in table.document.keys[0].regimes] == [5, None]
    assert ask(table, density=0.05).cases == 5
    assert ask(table, density=0.2).cases == 12
    assert ask(table, block_q=32).cases is None
    assert ask(table, block_q=136).cases is None


def test_the_plans_of_both_lists_are_named(tmp_path):
    table = table_of(tmp_path, HEAD + KEYS + REASONED)
    assert [f"q{plan.tile_q} {plan.mapping.name}" for plan in table.plans()] == [
        "q64 retain-pack",
        "q64 split-pack",
        "q64 retain-pack",  # longest, and not rows
        "q128 merge-pack",
        "q128 retain-pack",
    ]
    assert repr(table) == "Table(toy, measured, 1 and 1 reasoned keys)"
    assert repr(table_of(tmp_path, HEAD + KEYS)) == "Table(toy, measured, 1 keys)"


def refused(tmp_path, text, marked, field, said):
    line = text[: text.index(marked)].count("\n") + 1
    with pytest.raises(TableError) as caught:
        table_of(tmp_path, text)
    message = str(caught.value)
    assert f"toy.yaml, line {line}, field `{field}`: expected " in message
    assert said in message


def test_keys_of_one_list_may_not_overlap_and_those_of_two_may(tmp_path):
    more = REASONED.partition("\n")[2].replace("{to: 128}", "32").replace("thinking", "guessing")
    refused(
        tmp_path,
        HEAD + KEYS + REASONED + more,
        "- match: {block_q: 32}",
        "reasoned[1].match",
        "a request that reasoned[0] (line 18) has too",
    )


DEFAULT = HEAD.replace("measured", "default")
for name in ("NVIDIA H200", "0a1b2c", "ffee01"):
    DEFAULT = DEFAULT.replace(name, "null")


@pytest.mark.parametrize(
    ("text", "marked", "field", "said"),
    [
        (HEAD + KEYS + "reasoned: []\n", "reasoned", "reasoned", "an empty list"),
        (HEAD + KEYS + "reasoned:\n", "reasoned", "reasoned", "nothing (null)"),
        (HEAD + REASONED, "schema", "keys", "got nothing"),
        (
            HEAD + KEYS + REASONED.replace("to: 128", "from: 8, to: 4"),
            "- match: {block_q: {from",
            "reasoned[0].match.block_q",
            "from 8 to 4",
        ),
        (
            HEAD + KEYS + REASONED + "    cases: 3\n",
            "cases: 3",
            "reasoned[0].cases",
            "no cases, since the key is reasoned",
        ),
        (HEAD + KEYS.replace("cases: 12", "cases: 0"), "cases: 0", "keys[0].cases", "from 1 to"),
        (HEAD + KEYS.replace("cases: 12", "cases: 1.5"), "cases: 1.5", "keys[0].cases", "got 1.5"),
        (
            HEAD + KEYS.replace("cases: 5", "cases: many"),
            "cases: many",
            "keys[0].regimes[0].cases",
            "got many",
        ),
        (
            DEFAULT + KEYS.replace(", cases: 5", ""),
            "cases: 12",
            "keys[0].cases",
            "since the key is reasoned",
        ),
        (
            DEFAULT + KEYS.replace("    cases: 12\n", ""),
            "- {when: {density: {below",
            "keys[0].regimes[0].cases",
            "since the key is reasoned",
        ),
    ],
    ids=range(10),
)
def test_wrong_lists_and_counts_are_named(tmp_path, text, marked, field, said):
    refused(tmp_path, text, marked, field, said)


def test_a_default_table_keeps_all_in_one_list(tmp_path):
    keys = KEYS.replace("    cases: 12\n", "").replace(", cases: 5", "")
    assert table_of(tmp_path, DEFAULT + keys).document.reasoned == ()
    text = DEFAULT + keys + REASONED
    with pytest.raises(TableError, match=r"field `reasoned`: .*provenance is default"):
        table_of(tmp_path, text)
    model = table_of(tmp_path, text.replace("provenance: default", "provenance: model"))
    assert ask(model, block_q=32).origin == "reasoned"


def test_a_copy_in_another_process_remembers_no_addresses(tmp_path):
    """Rankings are remembered by where their answers lie, where another table's may lie there."""
    table = table_of(tmp_path, HEAD + KEYS + REASONED)
    wanted = ask(table).ranking
    assert table._backings
    for copied in (pickle.loads(pickle.dumps(table)), copy.deepcopy(table)):
        assert not copied._backings
        assert ask(copied).ranking == wanted


def test_two_threads_that_ask_at_once_get_one_answer(tmp_path, monkeypatch):
    """Its address may be part of what another ranking is remembered by, so it has to live on."""
    table = table_of(tmp_path, HEAD + KEYS + REASONED)
    other = []
    replace = table_module.replace

    def meanwhile(*given, **changes):
        if not other:
            other.append(None)
            other[0] = ask(table)
        return replace(*given, **changes)

    monkeypatch.setattr(table_module, "replace", meanwhile)
    assert ask(table) is other[0]
