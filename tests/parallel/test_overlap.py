"""When turns are through, by hand, and how many are taken."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tessera_cupy import ArraySpec, BlockMask
from tessera_cupy.cost import find_gpu
from tessera_cupy.cost.model import LAUNCH_MS
from tessera_cupy.parallel import Degrees, Schedule, Shards, make_schedule, predict
from tessera_cupy.parallel.network import LATENCY_MS, Link, find_link
from tessera_cupy.parallel.overlap import _HELD, _TURN_MS, Pace, through, usual_pace, with_turns


def mask_of(tokens: int) -> BlockMask:
    """Every eighth block."""
    keep = np.zeros((1, tokens // 128, tokens // 128), bool)
    keep[..., ::8] = True
    return BlockMask.from_dense(keep, (128, 128))


def schedule_of(heads: int, ranks: int, tokens: int, scheme: Degrees | None = None) -> Schedule:
    mask = mask_of(tokens)
    shards = Shards((tokens // ranks,) * ranks)
    degrees = Degrees(ranks, 1) if scheme is None else scheme
    return make_schedule(mask, degrees, shards, shards, q_heads=heads, kv_heads=heads)


def test_one_turn_is_exchange_attention_exchange() -> None:
    schedule = schedule_of(4, 2, 1024)
    pace = Pace(1e-6, 256, Link("slow", 1))
    found = through(schedule, schedule.work, pace)
    # Two heads of 512 rows of q, k and v, and of o.
    arrives, leaves = (LATENCY_MS + n * 2 * 512 * 256 / 0.8e6 for n in (3, 1))
    computes = 2 * 1024 * 128 * 1e-6 + LAUNCH_MS
    assert found.compute_ms.tolist() == pytest.approx([computes] * 2)
    assert found.ms == pytest.approx(arrives + computes + leaves)


def test_two_turns_hide_all_but_the_first_and_the_last() -> None:
    schedule = schedule_of(4, 2, 1024).in_turns(2)
    pace = Pace(1e-5, 256, Link("quick", 10))
    arrives, leaves = (LATENCY_MS + n * 512 * 256 / 8e6 for n in (3, 1))
    turn = 1024 * 128 * 1e-5 + LAUNCH_MS + _TURN_MS
    # The second turn arrives under the first one's attention, whose outputs leave under its own.
    computes = 2 * turn + _HELD * (arrives + leaves)
    found = through(schedule, schedule.work, pace)
    assert found.compute_ms.tolist() == pytest.approx([computes] * 2)
    assert found.ms == pytest.approx(arrives + computes + leaves)


def test_attention_waits_for_slow_arrivals() -> None:
    schedule = schedule_of(4, 2, 1024).in_turns(2)
    pace = Pace(0, 256, Link("slow", 1))
    arrives, leaves = (LATENCY_MS + n * 512 * 256 / 0.8e6 for n in (3, 1))
    last = LAUNCH_MS + _TURN_MS + _HELD * min(leaves, LAUNCH_MS)
    # The outputs of the first turn wait for the link, which brings the second one.
    found = through(schedule, schedule.work, pace)
    assert found.ms == pytest.approx(2 * arrives + max(last, leaves) + leaves)


def pace_of(schedule: Schedule, link: str = "NVLink 4") -> Pace:
    return usual_pace(
        find_gpu("H200"), find_link(link), batch=1, mask_batch=1, head_dim=128, dtype="bfloat16"
    )


def test_turns_are_taken_where_they_pay() -> None:
    schedule = schedule_of(24, 8, 131072)
    taken = with_turns(schedule, pace_of(schedule))
    assert taken.turn_count > 1
    every = [through(schedule.in_turns(n), schedule.work, pace_of(schedule)).ms for n in (1, 2, 3)]
    assert every[taken.turn_count - 1] <= min(every) * 1.005


def test_small_messages_stay_together() -> None:
    # A head of 1,024 rows of q, k and v is 0.8 MB.
    schedule = schedule_of(24, 8, 8192)
    assert with_turns(schedule, pace_of(schedule, "InfiniBand HDR")).turn_count == 1


def test_one_head_a_rank_and_rings_have_one_turn() -> None:
    schedule = schedule_of(8, 8, 32768)
    assert with_turns(schedule, pace_of(schedule)).turn_count == 1
    ring = schedule_of(24, 8, 131072, Degrees(4, 2))
    assert with_turns(ring, pace_of(ring, "InfiniBand HDR")) is ring


def test_exchanges_that_take_no_time_need_no_turns() -> None:
    schedule = schedule_of(24, 8, 131072)
    fast = replace(pace_of(schedule), link=Link("free", 1e9))
    assert with_turns(schedule, fast).turn_count == 1


def test_the_forecast_has_its_turns() -> None:
    mask, spec = mask_of(131072), ArraySpec((1, 24, 131072, 128))
    one = predict(mask, spec, ranks=8, scheme="ulysses").best
    assert one.schedule.turn_count > 1
    alone = one.schedule.in_turns(1)
    assert one.sent.tolist() == (alone.sent.sum(axis=1) * 256).tolist()
    assert one.ms == pytest.approx(one.swap_ms + one.compute_ms.max())
    # Most of what moves is hidden.
    moved = alone.swapped.sum(axis=2).max() * 256 / (0.8 * 450e6)
    assert one.swap_ms < 0.75 * moved
