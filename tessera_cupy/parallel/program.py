"""What one rank does in a call: a generator that asks for transfers and computes in between.

:func:`attend` yields what it needs of other ranks and is sent the answer. Under torch.distributed
:mod:`tessera_cupy.parallel.transfers` answers; :mod:`tessera_cupy.parallel.simulate` runs all ranks
in turn in one process. All ranks yield the same kinds of requests in the same order:

==============  =============================================  ====================================
:class:`Swap`   rows for every rank, all at once               rows from every rank
:class:`Move`   arrays to send, and to receive into            what :class:`Wait` is to wait for
:class:`Wait`   until the arrays of a ``Move`` are complete    nothing
==============  =============================================  ====================================
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from tessera_cupy.parallel.arrays import (
    cast,
    copy_heads,
    empty,
    float32,
    heads_first,
    namespace,
    of_heads,
    pieces,
    place_heads,
)
from tessera_cupy.parallel.merge import merge
from tessera_cupy.parallel.schedule import Schedule
from tessera_cupy.parallel.shards import place, tokens_of


@dataclass(frozen=True)
class Swap:
    """An all-to-all: rank ``r`` gets all rows of ``parts[r]``, and gives ``sizes[r]`` rows.

    Attributes:
        parts: by rank, arrays (rows, dim) that follow each other; none for the rank itself.
        sizes: by rank, rows.
        like: an array with their dtype, device and dim.
    """

    parts: list[list[Any]]
    sizes: list[int]
    like: Any


@dataclass(frozen=True)
class Move:
    """Arrays that begin to move while the rank computes, by the rank at their other end."""

    sends: dict[int, Any]
    receives: dict[int, Any]


@dataclass(frozen=True)
class Wait:
    """The end of a move."""

    begun: Any


#: (q, k, v, step, whether the LSE is wanted) to the output and its LSE, or None; None for no keys.
Compute = Callable[[Any, Any, Any, int, bool], "tuple[Any, Any] | None"]


def attend(
    schedule: Schedule, rank: int, q: Any, k: Any, v: Any, layout: str, compute: Compute
) -> Generator[Swap | Move | Wait, Any, Any]:
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
    q, k, v = (heads_first(x, layout) for x in (q, k, v))
    mine, own = yield from _gather(schedule, rank, q, k, v)
    present = _with_text(schedule, rank, own, k, v)
    out = yield from _ring(schedule, rank, mine, own, present, compute)
    result = yield from _scatter(schedule, rank, out, like, layout)
    return result


def _local_rows(schedule: Schedule, rank: int, q: Any) -> Any:
    """The query rows that this rank computes, in the order of the sequence."""
    shards = schedule.q
    if not shards.text:
        return q
    held = shards.keys(rank, rank + 1, text=True)
    parts = [q[:, :, place(span, held)] for span in shards.rows(rank, rank + 1)]
    return namespace(q).concatenate([q[:, :, :0], *parts], axis=2)


def _gather(
    schedule: Schedule, rank: int, q: Any, k: Any, v: Any
) -> Generator[Swap, list[Any], tuple[Any, Any]]:
    """From the rank's shard to its heads: all rows of its Ulysses group, and their own keys.

    Returns:
        q, (batch, heads, rows, dim), and k and v in one, (2, batch, KV heads, keys, dim).
    """
    group, here = schedule.place(rank)
    shards = schedule.kv
    held = shards.keys(rank, rank + 1, text=True)
    video = place(shards.own(rank), held)
    q, k, v = _local_rows(schedule, rank, q), k[:, :, video], v[:, :, video]
    if schedule.degrees.ulysses_degree == 1:
        return q, namespace(k).stack([k, v])
    heads, kv_heads = schedule.deal.q, schedule.deal.kv
    batch, dim = q.shape[0], q.shape[3]
    members = schedule.members(group)
    parts: list[list[Any]] = []
    sizes = []
    for other in range(schedule.degrees.ranks):
        if other not in members or other == rank:
            parts.append([])
            sizes.append(0)
            continue
        at = schedule.place(other)[1]
        theirs = [piece for x in (k, v) for piece in pieces(x, kv_heads[at])]
        parts.append([*pieces(q, heads[at]), *theirs])
        count = len(heads[here]) * tokens_of(schedule.q.rows(other, other + 1))
        count += 2 * len(kv_heads[here]) * shards.own(other).tokens
        sizes.append(batch * count)
    received = yield Swap(parts, sizes, q)

    all_rows, all_keys = schedule.rows(group), schedule.keys(group, text=False)
    mine = empty(q, batch, len(heads[here]), tokens_of(all_rows), dim)
    both = empty(q, 2, batch, len(kv_heads[here]), tokens_of(all_keys), dim)
    for other in members:
        flat = received[other]
        its_rows = schedule.q.rows(other, other + 1)
        tokens = tokens_of(its_rows)
        cut = batch * len(heads[here]) * tokens
        for part in its_rows:
            target, at_source = mine[:, :, place(part, all_rows)], place(part, its_rows)
            if other == rank:
                copy_heads(target, q[:, :, at_source], heads[here])
            else:
                piece = flat[:cut].reshape(batch, len(heads[here]), tokens, dim)
                target[...] = piece[:, :, at_source]
        span = shards.own(other)
        if not span.tokens:
            continue
        target = both[..., place(span, all_keys), :]
        if other == rank:
            copy_heads(target[0], k, kv_heads[here])
            copy_heads(target[1], v, kv_heads[here])
        else:
            shape = (2, batch, len(kv_heads[here]), span.tokens, dim)
            target[...] = flat[cut:].reshape(shape)
    return mine, both


def _with_text(schedule: Schedule, rank: int, own: Any, k: Any, v: Any) -> Any:
    """The keys of the Ulysses group, and those of the text, which the rank has itself."""
    shards = schedule.kv
    if not shards.text:
        return own
    here = schedule.place(rank)[1]
    at = place(shards.text_span, shards.keys(rank, rank + 1, text=True))
    chosen = schedule.deal.kv[here]
    xp = namespace(k)
    text = xp.stack([of_heads(x[:, :, at], chosen) for x in (k, v)])
    return xp.concatenate([text, own] if shards.text_first else [own, text], axis=3)


def _ring(
    schedule: Schedule, rank: int, q: Any, own: Any, present: Any, compute: Compute
) -> Generator[Move | Wait, Any, Any]:
    """The rows against the keys of each group in turn; the next ones move meanwhile."""
    group, here = schedule.place(rank)
    u, steps = schedule.degrees
    if steps == 1:
        found = compute(q, present[0], present[1], 0, False)
        return _zeros(q) if found is None else found[0]
    out = lse = None
    needs = schedule.needs[here]
    keys = present
    for step in range(steps):
        begun, arriving = None, None
        if step + 1 < steps:
            target, source = schedule.to(group, step + 1), schedule.source(group, step + 1)
            sends = {target * u + here: own} if needs[target, group] and own.shape[3] else {}
            receives = {}
            tokens = tokens_of(schedule.keys(source, text=False))
            if needs[group, source] and tokens:
                arriving = empty(own, *own.shape[:3], tokens, own.shape[4])
                receives = {source * u + here: arriving}
            begun = yield Move(sends, receives)
        if keys is not None:
            found = compute(q, keys[0], keys[1], step, True)
            if found is not None and out is None:
                out, lse = float32(found[0]), found[1]
            elif found is not None:
                out, lse = merge(out, lse, *found)
        if step + 1 < steps:
            yield Wait(begun)
        keys = arriving
    return _zeros(q) if out is None else cast(out, q)


def _zeros(q: Any) -> Any:
    return namespace(q).zeros_like(q)


def _scatter(
    schedule: Schedule, rank: int, out: Any, like: Any, layout: str
) -> Generator[Swap, list[Any], Any]:
    """From the rank's heads back to its shard; rows of the text go to all ranks."""
    u = schedule.degrees.ulysses_degree
    shards = schedule.q
    if u == 1 and not shards.text:
        result = heads_first(out, layout)
        return result.contiguous() if hasattr(result, "contiguous") else result
    group, here = schedule.place(rank)
    mine, batch, dim = schedule.rows(group), out.shape[0], out.shape[3]
    groups = map(schedule.members, range(schedule.degrees.ring_degree))
    text = [shards.text_parts(members.start, members.stop) for members in groups]
    parts: list[list[Any]] = []
    sizes = []
    for other in range(schedule.degrees.ranks):
        its_group, at = schedule.place(other)
        if other == rank:
            parts.append([])
            sizes.append(0)
            continue
        spans = [text[group], *([shards.own(other)] if its_group == group else [])]
        every = range(len(schedule.deal.q[here]))
        parts.append([x for span in spans for x in pieces(out[:, :, place(span, mine)], every)])
        tokens = text[its_group].tokens + (shards.own(rank).tokens if its_group == group else 0)
        sizes.append(batch * len(schedule.deal.q[at]) * tokens)
    received = yield Swap(parts, sizes, out)

    result = namespace(like).empty_like(like)
    view = heads_first(result, layout)
    held = shards.keys(rank, rank + 1, text=True)
    for other, flat in enumerate(received):
        its_group, at = schedule.place(other)
        heads = schedule.deal.q[at]
        spans = [text[its_group], *([shards.own(rank)] if its_group == group else [])]
        done = 0
        for span in spans:
            target = view[:, :, place(span, held)]
            if other == rank:
                place_heads(target, out[:, :, place(span, mine)], heads)
                continue
            count = batch * len(heads) * span.tokens
            piece = flat[done : done + count].reshape(batch, len(heads), span.tokens, dim)
            place_heads(target, piece, heads)
            done += count
    return result
