"""Shards, and what lies between the rows of one rank and the keys of another."""

from __future__ import annotations

import numpy as np
import pytest

from tessera_cupy import BlockMask
from tessera_cupy.parallel import Degrees, Shards, Span, make_schedule
from tessera_cupy.parallel.degrees import checked_scheme
from tessera_cupy.parallel.work import pair_work
from tests.parallel.cases import FOUR, TWO, Case


def test_text_is_shared_out_before_or_behind() -> None:
    behind = Shards((4, 0, 5), text=4)
    assert behind.total == 13
    assert [behind.text_part(rank) for rank in range(3)] == [(9, 10), (10, 11), (11, 13)]
    assert behind.rows(0, 2) == (Span(0, 4), Span(9, 11))
    assert behind.rows(2, 3) == (Span(4, 9), Span(11, 13))
    first = Shards((4, 0, 5), text=4, text_first=True)
    assert first.own(2) == (8, 13)
    assert first.keys(2, 3, text=True) == (Span(0, 4), Span(8, 13))
    assert first.keys(0, 3, text=True) == (Span(0, 13),)


@pytest.mark.parametrize("case", [*TWO, *FOUR], ids=lambda case: f"{case.name}, {case.lengths}")
def test_pairs_are_those_of_the_blocks(case: Case) -> None:
    mask = case.mask()
    if not isinstance(mask, BlockMask):
        mask = mask.to_block_mask()
    # Blocks as tokens: each active block whole.
    q, kv = (
        np.broadcast_to(starts, (mask.batch, mask.heads, starts.shape[2]))
        for starts in (mask.q_starts(), mask.kv_starts())
    )
    dense = np.zeros((mask.batch, mask.heads, *mask.shape))
    for b, h, i, j in np.argwhere(mask.to_dense()):
        dense[b, h, q[b, h, i] : q[b, h, i + 1], kv[b, h, j] : kv[b, h, j + 1]] = 1
    row_of, key_of = np.zeros(mask.shape[0], int), np.zeros(mask.shape[1], int)
    ranks = len(case.lengths)
    for rank in range(ranks):
        for of, shards in ((row_of, case.q), (key_of, case.kv)):
            of[slice(*shards.own(rank))] = rank
        row_of[slice(*case.q.text_part(rank))] = rank
    expected = np.zeros((mask.heads, ranks, ranks))
    text = np.zeros(mask.shape[1], bool)
    text[slice(*case.kv.text_span)] = True
    for row in range(ranks):
        of_row = dense[:, :, row_of == row].sum(axis=(0, 2))
        for key in range(ranks):
            expected[:, row, key] = of_row[:, (key_of == key) & ~text].sum(axis=1)
        expected[:, row, row] += of_row[:, text].sum(axis=1)
    np.testing.assert_allclose(pair_work(mask, case.q, case.kv), expected, atol=1e-6)


def test_a_ring_sends_only_what_is_needed() -> None:
    # Rows of a quarter need the keys of their own and of the one before.
    band = np.eye(4, dtype=bool) | np.eye(4, k=-1, dtype=bool)
    mask = BlockMask.from_dense(band, (16, 16))
    shards = Shards((16, 16, 16, 16))
    schedule = make_schedule(mask, Degrees(1, 4), shards, shards, q_heads=2, kv_heads=1)
    assert schedule.needs[0].tolist() == band.tolist()
    # K and V of one head and 16 tokens, to the rank behind; the last has none.
    assert schedule.sent.tolist() == [[0, 32], [0, 32], [0, 32], [0, 0]]
    assert schedule.loads().tolist() == [512, 1024, 1024, 1024]
    assert schedule.submask(0, 0, 1) is None
    assert schedule.submask(1, 0, 1) is not None


def test_ulysses_moves_heads_and_nothing_else() -> None:
    mask = BlockMask.from_dense(np.ones((2, 2), bool), (16, 16))
    shards = Shards((20, 12))
    schedule = make_schedule(mask, Degrees(2, 1), shards, shards, q_heads=4, kv_heads=2)
    # Rank 0: two heads of q, one of K and one of V of 20 tokens; two heads of o of 12.
    assert schedule.sent[:, 0].tolist() == [20 * 4 + 2 * 12, 12 * 4 + 2 * 20]


def test_shards_of_another_length_are_refused() -> None:
    mask = BlockMask.from_dense(np.ones((2, 2), bool), (16, 16))
    shards = Shards((20, 12))
    with pytest.raises(ValueError, match=r"`k`: expected shards with the mask's 32 tokens in all"):
        make_schedule(mask, Degrees(2, 1), shards, Shards((20, 13)), q_heads=1, kv_heads=1)


@pytest.mark.parametrize(
    ("scheme", "error", "text"),
    [
        ("star", ValueError, "`scheme`: expected 'ulysses', 'ring', 'auto', or degrees"),
        ((2, 3), ValueError, "degrees for a group of 4 ranks, got 2 x 3"),
        ((0, 4), ValueError, "degrees for a group of 4 ranks, got 0 x 4"),
        (3.5, TypeError, "or degrees"),
        ({"ulysses": 4}, TypeError, "or degrees"),
        ((2, 2, 1), TypeError, "or degrees"),
    ],
)
def test_other_schemes_are_refused(scheme: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        checked_scheme(scheme, 4)


def test_an_object_with_degrees_is_a_scheme() -> None:
    class Config:
        ulysses_degree = 2
        ring_degree = 2

    assert checked_scheme(Config(), 4) == (2, 2)
    assert checked_scheme("auto", 4) is None
