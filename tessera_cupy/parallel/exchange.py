"""The exchanges of Ulysses, a turn at a time: what a rank sends, and where what it gets belongs.

A message is the rows of one head that lie together on both sides. It leaves from where it lies, and
arrives where attention reads it, (batch, heads, tokens, dim): nothing is packed or unpacked but the
rows of arrays whose heads do not lie apart, as those of ``"BSHD"``. What stays on its rank is
copied. Each message takes the host's time, about 20 microseconds at either end. So where they are
less than :data:`LEAST_MESSAGE`, all that go from one rank to another in a turn are packed to one.
Both ends count messages by the schedule alone, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

from tessera_cupy.parallel.arrays import (
    copy_all,
    copy_heads,
    empty,
    is_contiguous,
    namespace,
    of_heads,
    pieces,
    place_heads,
    rows,
)
from tessera_cupy.parallel.schedule import Schedule
from tessera_cupy.parallel.shards import Span, Spans, place, tokens_of

#: Arrays to copy to, and from.
Unpacked: TypeAlias = "list[tuple[Any, Any]]"

#: Bytes of a head's rows of a rank below which messages are packed: copies of 8 MB take a GPU as
#: long as the host takes to send and receive them.
LEAST_MESSAGE = 8e6


@dataclass(frozen=True)
class Move:
    """Arrays that begin to move while the rank computes, by the rank at their other end.

    A rank receives as many as the other one sends it, in the same order, each of the same size.
    """

    sends: dict[int, list[Any]]
    receives: dict[int, list[Any]]


@dataclass(frozen=True)
class Wait:
    """The end of a move."""

    begun: Any


@dataclass(frozen=True)
class Copy:
    """Rows of some heads that one array has together, and the other among all heads."""

    target: Any
    source: Any
    heads: Sequence[int]


@dataclass(frozen=True)
class Arrival:
    """The rows and keys of a turn's heads, complete once its move is and both methods were called.

    Attributes:
        move: what other ranks send.
        copies: what comes from the rank itself.
        unpacked: what comes packed from others: where it belongs, and where it arrives.
        q: (batch, heads, rows, dim), all rows of the rank's Ulysses group.
        own: k and v of the group; without the text where a ring sends them on.
        text: in that case k and v of the text, which is joined to these.
        text_first: whether it is before the others.
        joined: k and v with the text, where the rank has them together.
    """

    move: Move
    copies: list[Copy]
    unpacked: Unpacked
    q: Any
    own: tuple[Any, Any]
    text: tuple[Any, Any] | None = None
    text_first: bool = False
    joined: tuple[Any, Any] | None = None

    def keep_own(self, which: slice = slice(None)) -> None:
        """Copy what comes from the rank itself, or some of it."""
        for one in self.copies[which]:
            copy_heads(one.target, one.source, one.heads)

    def unpack(self) -> None:
        """Copy what came packed, after the move."""
        copy_all(self.unpacked)

    def keys(self) -> tuple[Any, Any]:
        """K and V, the text among them."""
        if self.text is None:
            return self.joined or self.own
        join = namespace(self.q).concatenate
        order = -1 if self.text_first else 1
        k, v = (join(pair[::order], axis=2) for pair in zip(self.own, self.text, strict=True))
        return k, v


@dataclass(frozen=True)
class Back:
    """A turn's outputs on their way, in their place once the move is complete and both are called.

    Attributes:
        move: outputs for other ranks, and theirs.
        copies: what stays on the rank.
        unpacked: what comes elsewhere first: where it belongs, and where it arrives.
    """

    move: Move
    copies: list[Copy]
    unpacked: Unpacked

    def keep_own(self) -> None:
        """Copy what stays on the rank."""
        for one in self.copies:
            place_heads(one.target, one.source, one.heads)

    def unpack(self) -> None:
        """Copy what came elsewhere, after the move."""
        copy_all(self.unpacked)


@dataclass(frozen=True)
class Shard:
    """What a rank is given: q, k and v with heads first, and the text that all ranks hold."""

    schedule: Schedule
    rank: int
    q: Any
    k: Any
    v: Any

    def stay(self) -> Arrival:
        """The rank's own rows and keys of all heads, where Ulysses moves nothing."""
        rank, shards = self.rank, (self.schedule.q, self.schedule.kv)
        if not shards[0].text and not shards[1].text:
            return Arrival(Move({}, {}), [], [], self.q, (self.k, self.v))
        held, kv_held = (of.keys(rank, rank + 1, text=True) for of in shards)
        spans = shards[0].rows(rank, rank + 1)
        parts = [self.q[:, :, :0], *(self.q[:, :, place(span, held)] for span in spans)]
        q = namespace(self.q).concatenate(parts, axis=2)
        video = place(shards[1].own(rank), kv_held)
        own = self.k[:, :, video], self.v[:, :, video]
        return Arrival(Move({}, {}), [], [], q, own, joined=(self.k, self.v))

    def arrive(self, turn: int) -> Arrival:
        """A turn's heads, from all ranks of the Ulysses group."""
        schedule, rank = self.schedule, self.rank
        group, here = schedule.place(rank)
        ring = schedule.degrees.ring_degree > 1
        heads = [(of[turn], *[schedule.deal.kv_of(of[turn])] * 2) for of in schedule.turns]
        mine = heads[here]
        q_held, kv_held = (
            shards.keys(rank, rank + 1, text=True) for shards in (schedule.q, schedule.kv)
        )
        all_keys = schedule.keys(group, text=not ring)
        sources = ((self.q, q_held), (self.k, kv_held), (self.v, kv_held))
        targets = [
            (empty(x, x.shape[0], len(chosen), tokens_of(spans), x.shape[3]), spans)
            for (x, _), chosen, spans in zip(
                sources, mine, (schedule.rows(group), all_keys, all_keys), strict=True
            )
        ]

        def tokens(of: int, text: bool) -> tuple[Spans, Spans, Spans]:
            keys = (schedule.kv.own(of), *([schedule.kv.text_span] if text else []))
            return schedule.q.rows(of, of + 1), keys, keys

        sends, receives, copies = {}, {}, []
        for other in schedule.members(group):
            theirs = heads[schedule.place(other)[1]]
            if other != rank:
                sends[other] = _messages(sources, tokens(rank, text=False), theirs)
                every = [range(len(chosen)) for chosen in mine]
                receives[other] = _messages(targets, tokens(other, text=False), every)
                continue
            stay = zip(sources, targets, tokens(rank, text=not ring), mine, strict=True)
            for (source, held), (target, spans), parts, chosen in stay:
                for part in filter(tokens_in, parts):
                    at, to = place(part, held), place(part, spans)
                    copies.append(Copy(target[:, :, to], source[:, :, at], chosen))
        own = targets[1][0], targets[2][0]
        text = None
        if ring and schedule.kv.text:
            at = place(schedule.kv.text_span, kv_held)
            text = of_heads(self.k[:, :, at], mine[1]), of_heads(self.v[:, :, at], mine[2])
        move, unpacked = self._move(sends, receives)
        first = schedule.kv.text_first
        return Arrival(move, copies, unpacked, targets[0][0], own, text, first)

    def go_back(self, turn: int, out: Any, view: Any) -> Back:
        """A turn's outputs to the ranks of their rows; those of the text go to all.

        Args:
            turn: which.
            out: (batch, heads, rows, dim), of the rank's heads of the turn.
            view: the rank's output, with heads first.
        """
        schedule, rank = self.schedule, self.rank
        group, _ = schedule.place(rank)
        held, rows_here = schedule.q.keys(rank, rank + 1, text=True), schedule.rows(group)
        every = range(out.shape[1])
        sends: dict[int, list[Any]] = {}
        receives: dict[int, list[Any]] = {}
        copies = []
        for other in range(schedule.degrees.ranks):
            its_group, at = schedule.place(other)
            heads = schedule.turns[at][turn]
            if other == rank:
                for span in self._rows_for(group, rank):
                    source, target = (
                        out[:, :, place(span, rows_here)],
                        view[:, :, place(span, held)],
                    )
                    copies.append(Copy(target, source, heads))
                continue
            sends[other] = _messages([(out, rows_here)], [self._rows_for(group, other)], [every])
            receives[other] = []
            for span in self._rows_for(its_group, rank):
                receives[other] += pieces(view[:, :, place(span, held)], heads)
        move, unpacked = self._move(sends, receives)
        return Back(move, copies, unpacked)

    def _move(
        self, sends: dict[int, list[Any]], receives: dict[int, list[Any]]
    ) -> tuple[Move, Unpacked]:
        """The move of all these, and what is then to be unpacked."""
        row_bytes = self.q.shape[3] * self.q.itemsize
        ranks = self.schedule.degrees.ranks
        if self.schedule.q.total * row_bytes >= ranks * LEAST_MESSAGE:
            found = {rank: _contiguous(arrays) for rank, arrays in receives.items()}
        else:
            sends, found = _as_one(sends, self.q), {}
            for rank, arrays in receives.items():
                flat = empty(self.q, sum(map(_length, arrays)), self.q.shape[3])
                found[rank] = [flat] if flat.shape[0] else [], _split(flat, arrays)
        unpacked = [
            (target, arrived)
            for rank, (_, arrives) in found.items()
            for target, arrived in zip(receives[rank], arrives, strict=True)
            if target is not arrived
        ]
        return Move(_packed(sends), {rank: whole for rank, (whole, _) in found.items()}), unpacked

    def _rows_for(self, group: int, rank: int) -> Spans:
        """Rows that each rank of a Ulysses group has computed for a rank."""
        shards, members = self.schedule.q, self.schedule.members(group)
        text = shards.text_parts(members.start, members.stop)
        own = [shards.own(rank)] if rank in members else []
        return tuple(filter(tokens_in, (text, *own)))


def tokens_in(span: Span) -> int:
    """How many there are."""
    return span.tokens


def _messages(
    arrays: Sequence[tuple[Any, Spans]], parts: Sequence[Spans], heads: Sequence[Sequence[int]]
) -> list[Any]:
    """Of each array, of each part of its tokens, the rows of some heads."""
    return [
        piece
        for (x, held), spans, chosen in zip(arrays, parts, heads, strict=True)
        for span in filter(tokens_in, spans)
        for piece in pieces(x[:, :, place(span, held)], chosen)
    ]


def _contiguous(arrays: list[Any]) -> tuple[list[Any], list[Any]]:
    """Where they can arrive: themselves, or others where a row does not follow the last; twice."""
    apart = [one for one in arrays if not is_contiguous(one)]
    if not apart:
        return arrays, arrays
    flat = empty(apart[0], sum(map(_length, apart)), apart[0].shape[1])
    others = iter(_split(flat, apart))
    found = [one if is_contiguous(one) else next(others) for one in arrays]
    return found, found


def _length(array: Any) -> int:
    """Rows of an array; torch takes longer for ``len``."""
    length: int = array.shape[0]
    return length


def _split(flat: Any, arrays: Sequence[Any]) -> list[Any]:
    """Rows as many as these have, one after the other."""
    ends = list(accumulate(map(_length, arrays), initial=0))
    return [flat[begin:end] for begin, end in pairwise(ends)]


def _as_one(sends: dict[int, list[Any]], like: Any) -> dict[int, list[Any]]:
    """The same in one array for each rank, all in one copy."""
    every = [one for arrays in sends.values() for one in arrays]
    flat = rows(every, like)
    ends = list(accumulate((sum(map(_length, arrays)) for arrays in sends.values()), initial=0))
    return {
        rank: [flat[begin:end]] if end > begin else []
        for rank, (begin, end) in zip(sends, pairwise(ends), strict=True)
    }


def _packed(sends: dict[int, list[Any]]) -> dict[int, list[Any]]:
    """The same, with a copy of what does not lie together: one for all of it."""
    apart = [one for arrays in sends.values() for one in arrays if not is_contiguous(one)]
    if not apart:
        return sends
    flat, done = rows(apart, apart[0]), 0
    packed: dict[int, list[Any]] = {}
    for rank, arrays in sends.items():
        packed[rank] = []
        for one in arrays:
            if not is_contiguous(one):
                one, done = flat[done : done + len(one)], done + len(one)
            packed[rank].append(one)
    return packed
