"""When the turns of Ulysses are through, and how many there are to be.

More turns hide more of the exchanges under attention: all but the first arrival and the last way
back. But each turn has an attention of its own, whose last round does not fill the GPU, and what
moves meanwhile holds multiprocessors. The number taken is the one of 1 to :data:`MOST_TURNS` that
is predicted to be through first, fewer ones where turns save less than :data:`WORTH`, as long as a
turn is :data:`LEAST_BYTES` for each other rank.

On 2 H200 four turns of 24 heads took 13% less than one, more than is predicted here; what other
numbers of ranks save is not measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.cost import Gpu
from tessera_cupy.cost.model import LAUNCH_MS
from tessera_cupy.parallel.network import LATENCY_MS, Link
from tessera_cupy.parallel.schedule import Schedule
from tessera_cupy.parallel.turns import most_turns

#: Most turns, bytes of q, k and v that a turn has for each other rank at least, and the share of
#: the time that more turns must save.
MOST_TURNS = 4
LEAST_BYTES = 4e6
WORTH = 0.005

#: Share of a transfer's time that attention loses to it: little, as on 2 H200 attention in four
#: turns took no longer than in one.
_HELD = 0.05
# What a turn's own launch, last round and copies cost, milliseconds.
_TURN_MS = 0.03
# Part of the GPU's matrix rate that attention reaches, for choosing alone.
_RATE = 0.5

_Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Pace:
    """What things take.

    Attributes:
        pair_ms: milliseconds of a pair of tokens of one head, of all batch entries.
        row_bytes: bytes of a row of one head, of all batch entries.
        link: between the ranks.
    """

    pair_ms: float
    row_bytes: float
    link: Link


class Through(NamedTuple):
    """How long the turns take.

    Attributes:
        ms: milliseconds until all ranks are through.
        compute_ms: (N,) milliseconds of each rank's attention.
    """

    ms: float
    compute_ms: _Floats


def usual_pace(
    gpu: Gpu, link: Link, *, batch: int, mask_batch: int, head_dim: int, dtype: str
) -> Pace:
    """The pace for choosing turns, from public figures.

    Args:
        gpu: of every rank.
        link: between them.
        batch: entries of q.
        mask_batch: of the mask, whose pairs are counted over them.
        head_dim: elements of a row.
        dtype: of q, k and v.
    """
    rate = _RATE * gpu.sms * gpu.matrix * gpu.clock_ghz * 1e6  # operations in a millisecond
    element = 4 if dtype == "float32" else 2
    pairs = batch // mask_batch
    return Pace(4 * head_dim * pairs / rate, batch * head_dim * element, link)


def through(schedule: Schedule, work: _Floats, pace: Pace) -> Through:
    """When all ranks of pure Ulysses have their outputs.

    Arrivals follow each other; a rank's attention of a turn begins when its arrival is complete for
    the slowest, and the way back when the slowest has computed, and the link is free.

    Args:
        schedule: whose turns.
        work: its :attr:`~tessera_cupy.parallel.schedule.Schedule.work`.
        pace: what things take.
    """
    pairs = np.array([[work[list(heads)].sum() for heads in of] for of in schedule.turns]).T
    count = schedule.turn_count
    sent = schedule.swapped.max(axis=1) * pace.row_bytes
    arriving, leaving = LATENCY_MS + pace.link.ms(1.0) * sent.T
    arrived, back = np.cumsum(arriving), 0.0
    ready = np.zeros(pairs.shape[1])
    spent = np.zeros_like(ready)
    for turn in range(count):
        took = pairs[turn] * pace.pair_ms + LAUNCH_MS * (pairs[turn] > 0)
        if count > 1:
            meanwhile = arrived[-1] - arrived[0] if turn == 0 else leaving[turn - 1]
            took = took + _TURN_MS + _HELD * np.minimum(meanwhile, took)
        ready = np.maximum(ready, arrived[turn]) + took
        spent += took
        back = max(back, arrived[-1], float(ready.max())) + leaving[turn]
    return Through(float(back), spent)


def with_turns(schedule: Schedule, pace: Pace) -> Schedule:
    """The schedule in as many turns as are predicted to be best.

    A ring, and Ulysses within one, keep the one that they have.
    """
    degrees = schedule.degrees
    if degrees.ulysses_degree == 1 or degrees.ring_degree > 1:
        return schedule
    best, ms = schedule, through(schedule, schedule.work, pace).ms
    arriving = schedule.swapped[:, :, 0].sum() * pace.row_bytes / degrees.ranks
    each = arriving / max(1, degrees.ranks - 1)
    for count in range(2, min(MOST_TURNS, most_turns(schedule.deal)) + 1):
        if each / count < LEAST_BYTES:
            break
        more = schedule.in_turns(count)
        found = through(more, schedule.work, pace).ms
        if found < (1 - WORTH) * ms:
            best, ms = more, found
    return best
