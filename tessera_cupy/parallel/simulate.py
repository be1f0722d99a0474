"""All ranks of a group, in turn, in one process: what a call does, without torch or a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tessera_cupy.parallel.arrays import is_contiguous
from tessera_cupy.parallel.exchange import Move, Wait
from tessera_cupy.parallel.local import Local
from tessera_cupy.parallel.program import attend
from tessera_cupy.parallel.schedule import Schedule


@dataclass
class Traffic:
    """What a simulated call moved.

    Attributes:
        elements: by (from, to), elements that went from one rank to another.
        moves: (from, to) of all that one rank sent another in one move, in order.
    """

    elements: dict[tuple[int, int], int] = field(default_factory=dict)
    moves: list[tuple[int, int]] = field(default_factory=list)

    def sent(self, rank: int) -> int:
        """Elements that a rank sent to others."""
        return sum(n for (source, _), n in self.elements.items() if source == rank)

    def add(self, source: int, target: int, count: int) -> None:
        """Count elements that move; what stays on its rank does not."""
        if source != target and count:
            self.elements[source, target] = self.elements.get((source, target), 0) + count


def simulate(
    schedule: Schedule,
    q: Sequence[Any],
    k: Sequence[Any],
    v: Sequence[Any],
    *,
    layout: str = "BHSD",
    sm_scale: float | None = None,
) -> tuple[list[Any], Traffic]:
    """Run all ranks' programs.

    Args:
        schedule: how the request is divided.
        q: each rank's shard, NumPy arrays or torch tensors in host memory.
        k: the same.
        v: the same.
        layout: their axes.
        sm_scale: factor on the scores; None means ``1 / sqrt(head_dim)``.

    Returns:
        Each rank's output, and what was moved.

    Example:
        >>> import numpy as np
        >>> from tessera_cupy import BlockMask
        >>> from tessera_cupy.parallel import Degrees, Shards, make_schedule
        >>> mask, shards = BlockMask.from_dense(np.tri(4, dtype=bool), (16, 16)), Shards((32, 32))
        >>> degrees = Degrees(ulysses_degree=1, ring_degree=2)
        >>> schedule = make_schedule(mask, degrees, shards, shards, q_heads=1, kv_heads=1)
        >>> parts = [np.ones((1, 1, n, 8), np.float32) for n in shards.lengths]
        >>> out, traffic = simulate(schedule, parts, parts, parts)
        >>> out[1].shape, traffic.moves  # rank 0 needs no keys of rank 1
        ((1, 1, 32, 8), [(0, 1)])
    """
    ranks = schedule.degrees.ranks
    traffic = Traffic()
    programs = []
    for rank in range(ranks):
        compute = partial(Local(schedule, rank).compute, sm_scale=sm_scale)
        programs.append(attend(schedule, rank, q[rank], k[rank], v[rank], layout, compute))
    answers: list[Any] = [None] * ranks
    while True:
        asked: list[Any] = []
        done: list[Any] = []
        for program, answer in zip(programs, answers, strict=True):
            try:
                asked.append(program.send(answer))
            except StopIteration as end:
                done.append(end.value)
        if done:
            if len(done) != ranks:
                raise AssertionError("some ranks ended before others")
            return done, traffic
        answers = _answer(asked, traffic)


def _answer(asked: list[Any], traffic: Traffic) -> list[Any]:
    """What each rank gets for its request; all are of one kind."""
    if all(isinstance(request, Move) for request in asked):
        for source, request in enumerate(asked):
            for target, arrays in request.sends.items():
                _moved(arrays, asked[target].receives[source])
                if arrays:
                    traffic.moves.append((source, target))
                traffic.add(source, target, sum(map(_elements, arrays)))
        for target, request in enumerate(asked):
            if any(
                source != target and arrays and not asked[source].sends.get(target)
                for source, arrays in request.receives.items()
            ):
                raise AssertionError(f"rank {target} waits for what nobody sends")
    elif not all(isinstance(request, Wait) for request in asked):
        raise AssertionError("ranks that ask for different things")
    return [None] * len(asked)


def _moved(sent: list[Any], received: list[Any]) -> None:
    """Copy what one rank sends to where another one receives it."""
    sizes = [[tuple(array.shape) for array in arrays] for arrays in (sent, received)]
    if sizes[0] != sizes[1]:
        raise AssertionError(f"sent as {sizes[0]}, received as {sizes[1]}")
    for source, target in zip(sent, received, strict=True):
        if not (is_contiguous(source) and is_contiguous(target)):
            raise AssertionError("a message whose elements do not follow each other")
        target[...] = source


def _elements(array: Any) -> int:
    count = 1
    for length in array.shape:
        count *= int(length)
    return count
