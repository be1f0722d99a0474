"""Differences of two tables: every request is in the box that says what differs, or in none."""

import random

import pytest

from tessera_cupy.regimes import Features, load_for, load_table
from tessera_cupy.regimes.difference import BLOCK_SIZES, HEAD_DIMS, differences

SM90 = load_for("sm90")
RULED = SM90.with_rule("attend_mma/q64k64/retain-pack/rows", heads=(4, 12), density=(0.2, 0.8))
RULED = RULED.with_rule(
    "attend_mma/q64k32/split-pack/rows", block_q=(32, 128), tokens=(None, 4096), mask="slices"
)
PAIRS = {
    "sm80 sm89": (load_for("sm80"), load_for("sm89")),
    "sm80 sm90": (load_for("sm80"), SM90),
    "rules": (SM90, RULED),
    "rules away": (RULED, SM90),
}


def drawn(rng):
    """A request with usual sizes, at and around the edges of the tables."""
    slices = rng.random() < 0.3
    return Features(
        block_q=rng.choice((16, 32, 64, 128, 192) if slices else BLOCK_SIZES),
        block_kv=16 if slices else rng.choice(BLOCK_SIZES),
        ragged=not slices and rng.random() < 0.5,
        token_bits=slices or rng.random() < 0.5,
        dtype=rng.choice(("float16", "bfloat16")),
        head_dim=rng.choice(HEAD_DIMS),
        layout=rng.choice(("BHSD", "BSHD")),
        heads=rng.choice((1, 3, 4, 11, 12, 40)),
        tokens=rng.choice((1, 4095, 4096, 100_000)),
        density=rng.choice((0.0, 0.1, 0.2, 0.5, 0.75, 0.79, 0.8, 0.98, 1.0)),
        run_coverage=rng.random(),
        slices=slices,
    )


def holds(difference, f):
    match = difference.match
    flags = ((match.ragged, f.ragged), (match.token_bits, f.token_bits), (match.dtype, f.dtype))
    return (
        (match.mask == "slices") == f.slices
        and f.block_q in match.block_q
        and f.block_kv in match.block_kv
        and f.head_dim in match.head_dim
        and all(given in (None, value) for given, value in (*flags, (match.layout, f.layout)))
        and all(value in bounds for value, bounds in zip(f.numbers, difference.when, strict=True))
    )


@pytest.mark.parametrize("pair", PAIRS)
def test_every_request_is_where_it_belongs(pair):
    old, new = PAIRS[pair]
    found = differences(old, new)
    rng = random.Random(7)
    counts = {True: 0, False: 0}
    for f in [drawn(rng) for _ in range(1500)]:
        plans = old.lookup(f).ranking[0], new.lookup(f).ranking[0]
        boxes = [difference for difference in found if holds(difference, f)]
        expected = [] if plans[0] == plans[1] else [plans]
        assert [(box.old, box.new) for box in boxes] == expected, f
        counts[bool(expected)] += 1
    assert min(counts.values()) > 50


def test_neighbours_that_differ_alike_are_one_box():
    # Wide blocks have another plan at head dim 64, at 96 and 128, and at 256.
    sm80 = load_for("sm80")
    ruled = sm80.with_rule("attend_mma/q64k64/split-pack/rows", block_q=(300, 400), ragged=False)
    names = [difference.name for difference in differences(sm80, ruled)]
    assert names == ["q384 uniform d64", "q384 uniform d96-128", "q384 uniform d256"]


def test_a_bucket_that_no_value_is_in_hides_nothing():
    ruled = SM90.with_rule(
        "attend_mma/q64k64/split-pack/rows", density=(0.0, None), heads=(1, None)
    )
    assert {difference.new.name for difference in differences(SM90, ruled)} == {
        "attend_mma/q64k64/split-pack/rows"
    }
    assert sum(
        holds(difference, drawn(random.Random(1))) for difference in differences(SM90, ruled)
    )


def test_a_table_does_not_differ_from_itself():
    assert differences(RULED, RULED) == []


def crossing(tmp_path, edges, axis, edge):
    """Two tables that rank another plan from an edge on, and a request of theirs."""
    path = tmp_path / "sm90.yaml"
    match = "{ragged: false, block_q: 64, block_kv: 64, head_dim: 128, dtype: bfloat16}"
    path.write_text(
        "schema: 1\narch: sm90\nprovenance: default\ndevice: null\ncatalog: null\nraw_data: null\n"
        "reasons: A test.\nbase:\n  - attend_mma/q64k64/retain-pack/rows\n"
        "  - attend_mma/q64k64/split-pack/rows\n  - attend_mma/q64k32/retain-pack/rows\n"
        f"keys:\n  - match: {match}\n    why: a test\n    edges: {edges}\n    regimes:\n"
        f"      - when: {{{axis}: {{below: {edge}}}}}\n"
        "        plans: [attend_mma/q128k64/merge-pack/rows]\n"
        f"      - when: {{{axis}: {{from: {edge}}}}}\n"
        "        plans: [attend_mma/q128k64/share-pack/rows]\n"
    )
    other = tmp_path / "other" / "sm90.yaml"
    other.parent.mkdir()
    other.write_text(path.read_text().replace("q128k64/share", "q64k64/share"))
    f = drawn(random.Random(0))._replace(
        block_q=64, block_kv=64, head_dim=128, ragged=False, token_bits=False, slices=False,
        dtype="bfloat16",
    )  # fmt: skip
    return load_table(path), load_table(other), f


def test_tables_may_differ_by_rows_alone(tmp_path):
    """Heads times tokens: buckets that no heads and tokens have are not among the differences."""
    edges = "{tokens: [1000], heads: [10], rows: [9000]}"
    table, other, f = crossing(tmp_path, edges, "rows", 9000)
    five = f._replace(heads=5)
    firsts = [table.lookup(five._replace(tokens=n)).ranking[0].mapping.q for n in (1799, 1800)]
    assert firsts == ["merge", "share"]
    found = differences(table, other)
    assert found
    for heads, tokens in ((1, 8999), (9, 999), (9, 1000), (10, 900), (10, 899), (3, 3000)):
        here = f._replace(heads=heads, tokens=tokens)
        assert any(holds(one, here) for one in found) == (heads * tokens >= 9000)
    below = [one for one in found if one.when[0].high == 10 and one.when[1].high == 1000]
    assert below == []  # 9 heads of 999 tokens are 8,991 rows


def test_tables_may_differ_by_kept_keys_alone(tmp_path):
    """Density times tokens, rounded: buckets that no such numbers have are not among them."""
    edges = "{tokens: [1000], density: [0.5], kept_keys: [600]}"
    table, other, f = crossing(tmp_path, edges, "kept_keys", 600)
    many = f._replace(tokens=2000)
    firsts = [
        table.lookup(many._replace(density=d)).ranking[0].mapping.q for d in (0.2997, 0.29975)
    ]
    assert firsts == ["merge", "share"]
    found = differences(table, other)
    for tokens, density in ((999, 0.5), (999, 0.7), (1000, 0.59), (1000, 0.6), (5000, 0.1)):
        here = f._replace(tokens=tokens, density=density)
        assert any(holds(one, here) for one in found) == (round(tokens * density) >= 600)
    # Below half of fewer than 1,000 keys are 499 at most.
    assert [one for one in found if one.when[1].high == 1000 and one.when[2].high == 0.5] == []
