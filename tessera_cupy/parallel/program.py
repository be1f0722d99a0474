"""What one rank does in a call: a generator that asks for transfers and computes in between.

:func:`attend` yields what it needs of other ranks and is sent the answer. Under torch.distributed
:mod:`tessera_cupy.parallel.transfers` answers; :mod:`tessera_cupy.parallel.simulate` runs all ranks
in turn in one process. All ranks yield the same kinds of requests in the same order:

==============  =============================================  ====================================
:class:`Move`   arrays to send, and to receive into            what :class:`Wait` is to wait for
:class:`Wait`   until the arrays of a ``Move`` are complete    nothing
==============  =============================================  ====================================

Ulysses goes in turns (:mod:`tessera_cupy.parallel.exchange`). First all turns begin to arrive, one
after the other; then each is waited for and computed, and its outputs begin to leave; those are
waited for at the end.

On a GPU, what moves has a stream of its own. A kernel of NCCL that comes when attention has taken
all multiprocessors waits for some of them. So a small copy is kept for the place between what NCCL
waits for and the attention under which it is to run: one of the first turn's own rows behind the
first wait, at which the next arrival begins, and the outputs that stay behind each attention, at
whose end the others begin to leave. That NCCL begins within such a copy is assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from tessera_cupy.parallel.arrays import cast, contiguous, empty, heads_first, namespace
from tessera_cupy.parallel.exchange import Arrival, Back, Move, Shard, Wait
from tessera_cupy.parallel.merge import merge
from tessera_cupy.parallel.schedule import Schedule
from tessera_cupy.parallel.shards import tokens_of

#: (q, k, v, turn, step, whether the LSE is wanted) to the output and its LSE, or None for no keys.
Compute = Callable[[Any, Any, Any, int, int, bool], "tuple[Any, Any] | None"]


def attend(
    schedule: Schedule, rank: int, q: Any, k: Any, v: Any, layout: str, compute: Compute
) -> Generator[Move | Wait, Any, Any]:
    """One rank's part of the attention.

    Args:
        schedule: what all ranks agreed on.
        rank: this one.
        q: this rank's shard in ``layout``, with the text that all ranks hold.
        k: the same.
        v: the same.
        layout: ``"BHSD"`` or ``"BSHD"``.
        compute: attention over the keys of one step of the ring, with heads first.

    Returns:
        The rank's output, like q.
    """
    like = q
    shard = Shard(schedule, rank, *(heads_first(x, layout) for x in (q, k, v)))
    moves = schedule.degrees.ulysses_degree > 1
    arrivals: list[tuple[Arrival, Any]] = []
    for turn in range(schedule.turn_count):
        arrival = shard.arrive(turn) if moves else shard.stay()
        begun = (yield arrival.move) if moves else None
        arrivals.append((arrival, begun))
    several = schedule.turn_count > 1
    for turn, (arrival, _) in enumerate(arrivals):
        arrival.keep_own(slice(-1) if several and turn == 0 else slice(None))
    result = view = None
    leaving: list[tuple[Back, Any]] = []
    for turn, (arrival, begun) in enumerate(arrivals):
        if moves:
            yield Wait(begun)
            arrival.unpack()
        if several and turn == 0:
            arrival.keep_own(slice(-1, None))
        out = yield from _ring(schedule, rank, turn, arrival, compute)
        if not moves and not schedule.q.text:
            return contiguous(heads_first(out, layout))
        if result is None:
            result = namespace(like).empty_like(like)
            view = heads_first(result, layout)
        back = shard.go_back(turn, out, view)
        leaving.append((back, (yield back.move)))
        back.keep_own()
    for back, begun in leaving:
        yield Wait(begun)
        back.unpack()
    return result


def _ring(
    schedule: Schedule, rank: int, turn: int, arrival: Arrival, compute: Compute
) -> Generator[Move | Wait, Any, Any]:
    """The rows against the keys of each group in turn; the next ones move meanwhile."""
    q = arrival.q
    u, steps = schedule.degrees
    k, v = arrival.keys()
    if steps == 1:
        found = compute(q, k, v, turn, 0, False)
        return namespace(q).zeros_like(q) if found is None else found[0]
    group, here = schedule.place(rank)
    needs = schedule.needs[here]
    out = lse = sent = None
    keys: tuple[Any, Any] | None = (k, v)
    for step in range(steps):
        begun, arriving = None, None
        if step + 1 < steps:
            target, source = schedule.to(group, step + 1), schedule.source(group, step + 1)
            sends, receives = {}, {}
            if needs[target, group] and arrival.own[0].shape[2]:
                sent = sent or tuple(map(contiguous, arrival.own))
                sends = {target * u + here: list(sent)}
            tokens = tokens_of(schedule.keys(source, text=False))
            if needs[group, source] and tokens:
                batch, heads, _, dim = arrival.own[0].shape
                arriving = (
                    empty(q, batch, heads, tokens, dim),
                    empty(q, batch, heads, tokens, dim),
                )
                receives = {source * u + here: list(arriving)}
            begun = yield Move(sends, receives)
        if keys is not None:
            found = compute(q, *keys, turn, step, True)
            if found is not None:
                out, lse = found if out is None else merge(out, lse, *found)
        if step + 1 < steps:
            yield Wait(begun)
        keys = arriving
    return namespace(q).zeros_like(q) if out is None else cast(out, q)
