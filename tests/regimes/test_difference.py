"""Differences of two tables: every request is in the box that says what differs, or in none."""

import random

import pytest

from tessera_cupy.regimes import Features, load_for
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
    match, axes = difference.match, (f.heads, f.tokens, f.density, f.run_coverage)
    flags = ((match.ragged, f.ragged), (match.token_bits, f.token_bits), (match.dtype, f.dtype))
    return (
        (match.mask == "slices") == f.slices
        and f.block_q in match.block_q
        and f.block_kv in match.block_kv
        and f.head_dim in match.head_dim
        and all(given in (None, value) for given, value in (*flags, (match.layout, f.layout)))
        and all(value in bounds for value, bounds in zip(axes, difference.when, strict=True))
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
