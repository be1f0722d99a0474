"""Turns of Ulysses: how heads are cut, bitwise equal results, bytes, and what moves when."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tessera_cupy.masks.key_slices import block_mask
from tessera_cupy.parallel import Degrees, Schedule, Shards, exchange, make_schedule, simulate
from tessera_cupy.parallel.exchange import Move, Wait
from tessera_cupy.parallel.heads import Deal
from tessera_cupy.parallel.program import attend
from tessera_cupy.parallel.turns import in_turns, most_turns
from tests.parallel.cases import FOUR, TWO, Case, local


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages go as they are, however small."""
    monkeypatch.setattr(exchange, "LEAST_MESSAGE", 0.0)


CASES = [pytest.param(case, id=f"{case.name}, {len(case.lengths)}") for case in (*TWO, *FOUR)]


def schedule_of(case: Case) -> Schedule:
    return make_schedule(
        block_mask(case.mask()),
        Degrees(len(case.lengths), 1),
        case.q,
        case.kv,
        q_heads=case.heads,
        kv_heads=case.kv_heads,
    )


def parts_of(case: Case) -> list[list[Any]]:
    ranks = range(len(case.lengths))
    return [
        [local(x, shards, rank, case.layout) for rank in ranks]
        for x, shards in zip(case.arrays(), (case.q, case.kv, case.kv), strict=True)
    ]


def nothing(q: Any, *_: Any) -> Any:
    """The attention of keys that never came."""
    return np.zeros_like(q), None


def test_turns_have_equal_work() -> None:
    # 9 beside 5 + 4, the fewest heads first; 4 + 2 beside 3 + 3.
    deal = Deal(((0, 1, 2), (3, 4, 5, 6)))
    assert in_turns(deal, [9, 5, 4, 3, 4, 2, 3], 2) == (((0,), (1, 2)), ((3, 6), (4, 5)))


def test_fewer_heads_than_turns_leave_some_empty() -> None:
    deal = Deal(((0, 1, 2), (3,), ()))
    assert most_turns(deal) == 3
    turns = in_turns(deal, [1, 1, 1, 1], 3)
    assert turns == (((0,), (1,), (2,)), ((), (), (3,)), ((), (), ()))


def test_query_heads_of_a_kv_head_stay_in_one_turn() -> None:
    # Dealt one by one: the first rank has two of the three query heads of KV head 1.
    deal = Deal(((0, 1, 2, 3, 4), (5, 6, 7, 8)), shared=3)
    assert in_turns(deal, np.ones(9), 2) == (((3, 4), (0, 1, 2)), ((5,), (6, 7, 8)))
    assert most_turns(deal) == 2


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("case", CASES)
def test_packed_messages_give_the_same_bits_by_the_same_bytes(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule, parts = schedule_of(case).in_turns(2), parts_of(case)
    given = {"layout": case.layout, "sm_scale": case.scale}
    once, traffic = simulate(schedule, *parts, **given)
    monkeypatch.setattr(exchange, "LEAST_MESSAGE", 1e9)
    found, moved = simulate(schedule, *parts, **given)
    for one, other in zip(once, found, strict=True):
        np.testing.assert_array_equal(one, other)
    assert moved == traffic


@pytest.mark.parametrize("case", CASES)
def test_any_number_of_turns_gives_the_same_bits_by_the_same_bytes(case: Case) -> None:
    schedule, parts = schedule_of(case), parts_of(case)
    given = {"layout": case.layout, "sm_scale": case.scale}
    once, traffic = simulate(schedule, *parts, **given)
    for count in (2, 3, 4):
        turns = schedule.in_turns(count)
        assert turns.turn_count == count
        found, moved = simulate(turns, *parts, **given)
        for one, other in zip(once, found, strict=True):
            if case.kind == "ragged":  # a part of the heads may have another plan
                np.testing.assert_allclose(one, other, atol=1e-5)
            else:
                np.testing.assert_array_equal(one, other)
        assert moved.elements == traffic.elements
        assert turns.sent.tolist() == schedule.sent.tolist()
        assert turns.swapped.shape == (count, len(case.lengths), 2)


def test_all_ranks_ask_alike_and_arrivals_begin_before_attention() -> None:
    case = Case("uneven", (16, 9, 16, 16), heads=5, kv_heads=5)
    schedule, parts = schedule_of(case).in_turns(2), parts_of(case)
    assert {len(heads) for of in schedule.turns for heads in of} == {0, 1}
    # Five heads on four ranks: one has two, three have one, which is their last turn.
    asked: list[list[str]] = []
    for rank in range(4):
        order: list[str] = []
        asked.append(order)

        def compute(q: Any, *_: Any, order: list[str] = order) -> Any:
            order.append("attention")
            return nothing(q)

        program = attend(schedule, rank, *(x[rank] for x in parts), "BHSD", compute)
        answer = None
        while True:
            try:
                request = program.send(answer)
            except StopIteration:
                break
            assert isinstance(request, (Move, Wait))
            order.append(type(request).__name__)
            answer = "begun" if isinstance(request, Move) else None
    turn = ["Wait", "attention", "Move"]
    assert asked == [["Move", "Move", *turn, *turn, "Wait", "Wait"]] * 4


def test_small_messages_are_one_for_each_rank() -> None:
    case = Case("uneven", (16, 9, 16, 16), heads=8, kv_heads=8, layout="BSHD")
    schedule = schedule_of(case)
    q, k, v = (x[0] for x in parts_of(case))
    program = attend(schedule, 0, q, k, v, "BSHD", nothing)
    move = next(program)
    program.send(None)
    for one in (move, program.send(None)):
        assert [len(arrays) for arrays in one.sends.values()] == [1, 1, 1]
        assert [len(arrays) for arrays in one.receives.values()] == [1, 1, 1]
    # Two heads of q, k and v, of each rank's tokens.
    assert [len(arrays[0]) for arrays in move.receives.values()] == [6 * 9, 6 * 16, 6 * 16]


@pytest.mark.usefixtures("apart")
def test_nothing_is_packed_or_unpacked_where_heads_lie_apart() -> None:
    case = Case("even", (32, 32), heads=6, kv_heads=2)
    schedule = schedule_of(case).in_turns(1)
    q, k, v = (x[0] for x in parts_of(case))
    program = attend(schedule, 0, q, k, v, "BHSD", nothing)
    move = next(program)
    # Of the other rank's heads the rows, keys and values, straight from the shard.
    theirs, mine = schedule.turns[1][0], schedule.turns[0][0]
    keys = [2 * len(schedule.deal.kv_of(heads)) for heads in (theirs, mine)]
    assert len(move.sends[1]) == len(theirs) + keys[0]
    assert len(move.receives[1]) == len(mine) + keys[1]
    assert all(any(np.shares_memory(one, x) for x in (q, k, v)) for one in move.sends[1])
    program.send(None)
    back = program.send(None)
    # Straight to the rows of the result.
    assert len(back.receives[1]) == len(theirs)
    program.send("begun")
    with pytest.raises(StopIteration) as end:
        program.send(None)
    assert all(np.shares_memory(one, end.value.value) for one in back.receives[1])


@pytest.mark.usefixtures("apart")
def test_heads_of_bshd_are_packed_once() -> None:
    case = Case("even", (32, 32), layout="BSHD")
    schedule = schedule_of(case)
    q, k, v = (x[0] for x in parts_of(case))
    move = next(attend(schedule, 0, q, k, v, "BSHD", nothing))
    memory = {id(one.base) for one in move.sends[1]}
    assert len(memory) == 1  # of one copy
    assert sum(one.size for one in move.sends[1]) == move.sends[1][0].base.size


def test_a_ring_sends_its_keys_from_where_they_lie() -> None:
    case = Case("even", (32, 32))
    shards = Shards((32, 32))
    schedule = make_schedule(
        block_mask(case.mask()), Degrees(1, 2), shards, shards, q_heads=4, kv_heads=4
    )
    q, k, v = (x[0] for x in parts_of(case))
    move = next(attend(schedule, 0, q, k, v, "BHSD", nothing))
    assert [one is x for one, x in zip(move.sends[1], (k, v), strict=True)] == [True, True]
