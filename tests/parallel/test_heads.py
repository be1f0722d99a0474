"""Heads on ranks: balance by hand, bounds, groups that share KV heads, what is kept."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tessera_cupy import BlockMask, KeySlices
from tessera_cupy.parallel.heads import Deal, deal, deal_again, even_deal, head_work


def test_longest_first_under_an_equal_number_of_heads() -> None:
    # 10 and 1 beside 6 and 5: 11 each. By count, 10 + 6 and 5 + 1.
    work = [10, 6, 5, 1]
    assert deal(work, 2).q == ((0, 3), (1, 2))
    assert deal(work, 2).loads(work).tolist() == [11, 11]
    assert even_deal(4, 2).balance(work) == pytest.approx(16 / 11)


def test_the_bound_holds_where_work_alone_would_say_otherwise() -> None:
    work = [100, 1, 1, 1]
    assert sorted(map(len, deal(work, 2).q)) == [2, 2]
    assert sorted(map(len, deal(work, 2, most_heads=3).q)) == [1, 3]


def test_swaps_mend_what_longest_first_gets_wrong() -> None:
    # Longest first: 5 + 3 = 8 beside 4 + 3 + 3 = 10; best is 5 + 4 beside 3 + 3 + 3.
    work = [5, 4, 3, 3, 3]
    best = min(
        max(sum(work[i] for i in chosen), sum(work) - sum(work[i] for i in chosen))
        for chosen in itertools.combinations(range(5), 3)
    )
    assert deal(work, 2).loads(work).max() == best == 9


def test_no_move_or_swap_would_help() -> None:
    rng = np.random.default_rng(0)
    work = rng.gamma(2, size=20)
    dealt = deal(work, 6)
    loads = dealt.loads(work)
    assert sorted(itertools.chain(*dealt.q)) == list(range(20))
    assert max(map(len, dealt.q)) <= 4
    busiest = int(loads.argmax())
    for rank, mine in enumerate(dealt.q):
        for given, taken in itertools.product(dealt.q[busiest], mine):
            if rank == busiest:
                continue
            moved = work[given] - work[taken]
            after = max(loads[busiest] - moved, loads[rank] + moved)
            assert moved <= 0 or after >= loads[busiest] - 1e-9


def test_more_ranks_than_heads_leave_some_without() -> None:
    assert deal([3, 2], 4).q == ((0,), (1,), (), ())


def test_kv_heads_stay_whole_where_that_is_even() -> None:
    # Four KV heads of two query heads each: 6, 4, 4, 2 in pairs.
    dealt = deal([3, 3, 2, 2, 1, 3, 1, 1], 2, shared=2)
    assert dealt.q == ((0, 1, 6, 7), (2, 3, 4, 5))
    assert dealt.kv == ((0, 3), (1, 2))


def test_query_heads_are_dealt_one_by_one_where_whole_groups_are_uneven() -> None:
    # Two KV heads: 8 and 2. One by one: 5 and 5, and both ranks read both.
    dealt = deal([4, 4, 1, 1], 2, shared=2)
    assert dealt.balance([4, 4, 1, 1]) == 1
    assert dealt.kv == ((0, 1), (0, 1))


def test_a_deal_is_kept_within_three_percent_of_the_best() -> None:
    old = Deal(((0, 1), (2, 3)))
    # 51 beside 49 is 1.02 times the mean, and the best is 50 beside 50.
    assert deal_again([26, 25, 25, 24], old) is old
    # 52 beside 48 is 1.04.
    new = deal_again([27, 25, 25, 23], old)
    assert new.loads([27, 25, 25, 23]).tolist() == [50, 50]
    # Where the best itself is uneven, the old one may be as uneven.
    assert deal_again([90, 2, 1, 1], old) is old


def test_work_is_pairs_of_tokens_with_short_and_ragged_blocks() -> None:
    keep = np.array([[[1, 0], [1, 1]], [[0, 0], [0, 1]]], bool)
    mask = BlockMask.from_dense(keep, (16, 32), (20, 40))
    # Rows of 16 and 4, columns of 32 and 8.
    assert head_work(mask, 2).tolist() == [16 * 32 + 4 * 40, 4 * 8]
    ragged = BlockMask.from_dense(
        keep, (16, 32), q_block_sizes=[[5, 9], [7, 7]], kv_block_sizes=[3, 30]
    )
    assert head_work(ragged, 2).tolist() == [5 * 3 + 9 * 33, 7 * 30]
    one = BlockMask.from_dense(keep[0], (16, 32), (20, 40))
    assert head_work(one, 3).tolist() == [672.0] * 3


@pytest.mark.parametrize(
    ("ranks", "most", "text"),
    [
        (0, None, "`ranks`: expected at least 1, got 0"),
        (2, 1, "`most_heads`: expected at least 2 heads, so that 2 ranks hold all 4, got 1"),
    ],
)
def test_bad_numbers_are_refused(ranks: int, most: int | None, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        deal([1, 1, 1, 1], ranks, most_heads=most)


def test_work_of_slices_is_that_of_their_keys() -> None:
    # Four keys in one block of 16, and four in four blocks: the same work for a plan that gathers.
    keep = np.zeros((2, 1, 64), bool)
    keep[0, 0, :4] = keep[1, 0, ::16] = True
    mask = KeySlices.from_groups(keep, 16, (10, 64)).to_block_mask()
    assert head_work(mask, 2).tolist() == [40.0, 40.0]
