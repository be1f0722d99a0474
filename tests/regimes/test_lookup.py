import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_cupy.errors import TableError
from tessera_cupy.regimes import Features, load_table

HEAD = """\
schema: 1
arch: toy
provenance: default
device: null
catalog: null
raw_data: null
reasons: for tests
base: [attend_mma/q64k64/retain-pack/rows, attend_mma/q64k64/split-pack/rows]
keys:
"""
BASE = ["q64k64/retain-pack", "q64k64/split-pack"]
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


def table_of(tmp_path, keys):
    path = tmp_path / "toy.yaml"
    path.write_text(HEAD + keys)
    return load_table(path)


def key(match, plan, when="", edges=""):
    """One key with one regime, in flow style, on a line of its own."""
    name = f"attend_mma/{plan}/longest"
    regimes = f"regimes: [{{when: {{{when}}}, plans: [{name}]}}]"
    return f"  - {{match: {{{match}}}, why: {plan}, edges: {{{edges}}}, {regimes}}}\n"


def ask(table, **changes):
    return table.lookup(REQUEST._replace(**changes))


def first(table, **changes):
    """Tile and mapping of the best plan."""
    return ask(table, **changes).ranking[0].name.removeprefix("attend_mma/").rsplit("/", 1)[0]


# For each field of a match: as the file has it, a request that matches, and ones that do not.
FIELDS = {
    "block_q": ("{from: 32, to: 64}", [32, 40, 64], [24, 72]),
    "block_kv": ("64", [64], [56, 72]),
    "ragged": ("false", [False], [True]),
    "token_bits": ("true", [True], [False]),
    "dtype": ("bfloat16", ["bfloat16"], ["float16", "float64"]),
    "head_dim": ("{from: 65}", [72, 128, 256], [8, 64]),
    "layout": ("BSHD", ["BSHD"], ["BHSD", "SBHD"]),
}


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_of_a_match_decides(tmp_path, field):
    written, inside, outside = FIELDS[field]
    table = table_of(tmp_path, key(f"{field}: {written}", "q128k64/merge-pack"))
    for value in inside:
        assert first(table, **{field: value}) == "q128k64/merge-pack", value
    for value in outside:
        choice = ask(table, **{field: value})
        assert [plan.mapping.q for plan in choice.ranking] == ["retain", "split"], value
        assert choice.key == "base"
        assert choice.regime.startswith("toy base (no key for q")


@pytest.mark.parametrize(
    ("one", "other", "changes"),
    [
        ("block_q: 64", "block_q: 32", {"block_q": 32}),
        ("block_kv: 64", "block_kv: 32", {"block_kv": 32}),
        ("ragged: false", "ragged: true", {"ragged": True}),
        ("token_bits: false", "token_bits: true", {"token_bits": True}),
        ("dtype: bfloat16", "dtype: float16", {"dtype": "float16"}),
        ("head_dim: 128", "head_dim: 64", {"head_dim": 64}),
        ("layout: BHSD", "layout: BSHD", {"layout": "BSHD"}),
    ],
)
def test_keys_that_differ_in_one_field_give_distinct_picks(tmp_path, one, other, changes):
    rows = key(one, "q64k64/retain-retain") + key(other, "q128k64/merge-pack")
    table = table_of(tmp_path, rows)
    assert first(table) == "q64k64/retain-retain"
    assert first(table, **changes) == "q128k64/merge-pack"
    picks = ask(table), ask(table, **changes)
    assert picks[0].regime != picks[1].regime
    assert (picks[0].why, picks[1].why) == ("q64k64/retain-retain", "q128k64/merge-pack")


@pytest.mark.parametrize(
    ("axis", "edge", "below", "above"),
    [
        ("heads", "12", 11, 12),
        ("tokens", "32768", 32767, 32768),
        ("density", "1e-1", 0.0999, 0.1),
        ("run_coverage", "0.5", 0.4999, 0.5),
    ],
)
def test_buckets_that_differ_in_one_axis_give_distinct_picks(tmp_path, axis, edge, below, above):
    rows = f"""\
  - match: {{}}
    why: an edge
    edges: {{{axis}: [{edge}]}}
    regimes:
      - {{when: {{{axis}: {{below: {edge}}}}}, plans: [attend_mma/q64k64/merge-pack/rows]}}
      - {{when: {{{axis}: {{from: {edge}}}}}, plans: [attend_mma/q128k64/merge-pack/rows]}}
"""
    table = table_of(tmp_path, rows)
    assert first(table, **{axis: below}) == "q64k64/merge-pack"
    assert first(table, **{axis: above}) == "q128k64/merge-pack"
    number = float(edge) if "." in edge or "e" in edge else int(edge)
    assert ask(table, **{axis: below}).regime == f"toy any {axis}<{number}"
    assert ask(table, **{axis: above}).regime == f"toy any {axis}>={number}"


def test_names_of_regimes(tmp_path):
    rows = key(
        "block_q: 64, block_kv: 64, head_dim: 128",
        "q64k64/retain-pack",
        "tokens: {below: 32768}, density: {from: 0.1, below: 0.3}",
        "tokens: [32768], density: [0.1, 0.3]",
    )
    rows += key(
        "block_q: {from: 72, to: 96}, block_kv: {from: 16}, ragged: true, token_bits: false,"
        "dtype: float16, head_dim: {to: 64}, layout: BSHD",
        "q64k64/split-pack",
    )
    table = table_of(tmp_path, rows)
    choice = ask(table)
    assert choice.regime == "toy q64k64 d128 tokens<32768 0.1<=density<0.3"
    assert choice.key == "q64k64 d128"
    choice = ask(
        table, block_q=80, ragged=True, dtype="float16", head_dim=64, layout="BSHD", heads=1
    )
    assert choice.regime == "toy q72-96 k>=16 ragged no-bits float16 d<=64 BSHD"
    missed = ask(table, block_q=48, block_kv=24)
    assert missed.regime == "toy base (no key for q48k24 d128 bfloat16 BHSD)"


def test_the_ranking_ends_with_the_base_plans_each_once(tmp_path):
    rows = """\
  - match: {block_q: 64}
    why: short
    regimes:
      - when: {}
        plans: [attend_mma/q128k64/merge-pack/rows, attend_mma/q64k64/split-pack/rows]
"""
    ranking = [plan.mapping.name for plan in ask(table_of(tmp_path, rows)).ranking]
    assert ranking == ["merge-pack", "split-pack", "retain-pack"]


def test_a_bucket_without_a_regime_takes_the_base_plans(tmp_path):
    rows = key("block_q: 64", "q64k64/merge-pack", "tokens: {below: 100}", "tokens: [100, 200]")
    table = table_of(tmp_path, rows)
    assert first(table, tokens=99) == "q64k64/merge-pack"
    for tokens in (100, 150, 200):
        choice = ask(table, tokens=tokens)
        assert [plan.mapping.q for plan in choice.ranking] == ["retain", "split"]
        assert (choice.regime, choice.key) == ("toy q64 base (no regime)", "q64")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("block_q: 64", "block_q: {from: 64, to: 128}"),
        ("block_q: {from: 16, to: 64}", "block_q: {from: 64}"),
        ("block_q: 64", "block_kv: 64"),
        ("block_q: 16, dtype: float16", "layout: BHSD, head_dim: {from: 64}"),
        (
            "block_kv: 64, head_dim: 8",
            "ragged: true, token_bits: true, dtype: float16, head_dim: 8",
        ),
        ("head_dim: 64", "head_dim: 64"),
    ],
)
def test_keys_that_claim_the_same_request_are_refused(tmp_path, one, other):
    apart = key("block_q: 8, block_kv: 8, head_dim: 16", "q64k64/merge-pack")
    line = HEAD.count("\n") + 2
    with pytest.raises(TableError) as caught:
        table_of(tmp_path, apart + key(one, "q64k64/merge-pack") + key(other, "q64k64/split-pack"))
    assert f"toy.yaml, line {line + 1}, field `keys[2].match`" in str(caught.value)
    assert f"keys[1] (line {line})" in str(caught.value)


def test_regimes_that_claim_the_same_bucket_are_refused(tmp_path):
    rows = """\
  - match: {}
    why: overlap
    edges: {tokens: [100, 200], density: [0.5]}
    regimes:
      - {when: {tokens: {below: 200}}, plans: [attend_mma/q64k64/merge-pack/rows]}
      - {when: {tokens: {from: 200}}, plans: [attend_mma/q64k64/merge-pack/rows]}
      - {when: {density: {from: 0.5}}, plans: [attend_mma/q64k64/retain-pack/rows]}
"""
    with pytest.raises(TableError) as caught:
        table_of(tmp_path, rows)
    assert "toy.yaml, line 16, field `keys[0].regimes[2].when`" in str(caught.value)
    assert "regimes[0] (line 14)" in str(caught.value)


def test_a_key_with_too_many_buckets_is_refused(tmp_path):
    many = ", ".join(map(str, range(1, 1001)))
    rows = key("", "q64k64/merge-pack", edges=f"tokens: [{many}], heads: [{many}]")
    with pytest.raises(TableError, match=r"line 10, field `keys\[0\]\.edges`.*1002001"):
        table_of(tmp_path, rows)


@st.composite
def boxes(draw):
    """A partition of a key's buckets into boxes, by cutting one in two again and again."""
    edges = {
        "heads": draw(st.lists(st.integers(1, 50), max_size=3, unique=True)),
        "tokens": draw(st.lists(st.integers(1, 50), max_size=3, unique=True)),
        "density": draw(st.lists(st.sampled_from([0.1, 0.2, 0.5, 1.0]), max_size=2, unique=True)),
    }
    edges = {axis: sorted(values) for axis, values in edges.items() if values}
    parts = [{axis: (0, len(values) + 1) for axis, values in edges.items()}]
    for _ in range(draw(st.integers(0, 5))):
        cut = [(i, a) for i, part in enumerate(parts) for a, (b, e) in part.items() if e - b > 1]
        if not cut:
            break
        i, axis = draw(st.sampled_from(cut))
        begin, end = parts[i][axis]
        middle = draw(st.integers(begin + 1, end - 1))
        parts.append({**parts[i], axis: (middle, end)})
        parts[i] = {**parts[i], axis: (begin, middle)}
    return edges, parts


@settings(max_examples=60, deadline=None)
@given(case=boxes(), data=st.data())
def test_any_partition_into_boxes_is_looked_up_as_written(tmp_path_factory, case, data):
    edges, parts = case
    tiles = [f"q{8 * (i + 1)}k64" for i in range(len(parts))]
    regimes = ""
    for part, tile in zip(parts, tiles, strict=True):
        when = []
        for axis, (begin, end) in part.items():
            ends = [f"from: {edges[axis][begin - 1]}"] if begin else []
            ends += [f"below: {edges[axis][end - 1]}"] if end <= len(edges[axis]) else []
            when += [f"{axis}: {{{', '.join(ends)}}}"] if ends else []
        plan = f"attend_mma/{tile}/merge-pack/rows"
        regimes += f"      - {{when: {{{', '.join(when)}}}, plans: [{plan}]}}\n"
    written = ", ".join(f"{axis}: {values}" for axis, values in edges.items())
    rows = f"  - match: {{}}\n    why: boxes\n    edges: {{{written}}}\n    regimes:\n{regimes}"
    table = table_of(tmp_path_factory.mktemp("boxes"), rows)

    request = {
        "heads": data.draw(st.integers(1, 60)),
        "tokens": data.draw(st.integers(1, 60)),
        "density": data.draw(st.sampled_from([0.0, 0.1, 0.15, 0.2, 0.4, 0.5, 0.9, 1.0])),
    }
    expected = []
    for part, tile in zip(parts, tiles, strict=True):
        bucket = {axis: sum(e <= request[axis] for e in values) for axis, values in edges.items()}
        if all(begin <= bucket[axis] < end for axis, (begin, end) in part.items()):
            expected.append(f"{tile}/merge-pack")
    assert [first(table, **request)] == expected


def test_lookups_are_fast_and_always_the_same(tmp_path):
    rows = ""
    for q, kv in itertools.product(range(16, 129, 16), range(16, 129, 16)):
        plan = f"q64k64/{'merge' if q <= 32 else 'retain'}-pack"
        rows += key(f"block_q: {q}, block_kv: {kv}", plan, edges="tokens: [1000, 100000]")
    table = table_of(tmp_path, rows)
    picks = {table.lookup(REQUEST) for _ in range(50)}
    assert len(picks) == 1
    assert table.lookup(REQUEST) is table.lookup(REQUEST._replace())
    assert load_table(tmp_path / "toy.yaml").lookup(REQUEST) in picks
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        for _ in range(100):
            table.lookup(REQUEST)
        times.append((time.perf_counter() - begin) / 100)
    # About 1.5 us; the bound leaves room for a slow and busy machine.
    assert min(times) < 20e-6


def test_keys_of_slices_come_before_those_of_all_masks(tmp_path):
    keys = key("block_q: {to: 64}", "q128k64/retain-pack")
    keys += key("mask: slices, block_q: 64", "q64k64/retain-gather")
    table = table_of(tmp_path, keys)
    assert first(table) == "q128k64/retain-pack"
    assert first(table, slices=True) == "q64k64/retain-gather"
    assert ask(table, slices=True).regime == "toy slices q64"
    assert first(table, slices=True, block_q=16) == "q128k64/retain-pack"
    assert first(table, slices=True, block_q=128) == BASE[0]
    assert ask(table, slices=True, block_q=128).key == "base"


def test_two_keys_of_slices_may_not_claim_one_request(tmp_path):
    keys = key("mask: slices", "q64k64/retain-gather")
    with pytest.raises(TableError, match=r"requests of its own"):
        table_of(tmp_path, keys + key("mask: slices, block_q: 64", "q64k64/split-gather"))
