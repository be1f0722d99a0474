"""Who computes what and sends what: all that the ranks of a group agree on before a call.

It follows from the mask, the shards and the degrees alone, which every rank knows, so that ranks
need not ask each other. Ulysses moves q, k and v from shards of the sequence to shards of heads
within a group of ``ulysses_degree`` ranks, and the output back, in one turn or several
(:mod:`tessera_cupy.parallel.turns`). The ring then has
``ring_degree`` steps: in step ``t`` a rank of group ``g`` computes its rows against the keys of
group ``g - t``, which their owner sends it directly, and only if a row needs one of them. A
shard that went from neighbour to neighbour would pass through ranks that do not need it; sent by
its owner it moves once for each rank that does, and as each step shifts by one distance, no rank
sends or receives more than one shard at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.errors import wrong
from tessera_cupy.masks import BlockMask
from tessera_cupy.parallel.degrees import Degrees
from tessera_cupy.parallel.heads import Deal, deal, deal_again, head_work
from tessera_cupy.parallel.shards import Shards, Spans, tokens_of
from tessera_cupy.parallel.submask import cut
from tessera_cupy.parallel.turns import Turns, in_turns, one_turn
from tessera_cupy.parallel.work import pair_work

#: Least work that is some: sums of whole numbers, with rounding.
_SOME = 0.5


@dataclass(frozen=True, eq=False)
class Schedule:
    """The division of one request over the ranks of a group.

    Attributes:
        mask: the whole mask, on the host.
        degrees: ranks of a Ulysses group, and rings of these.
        q: shards of the query tokens.
        kv: shards of the key tokens.
        deal: the heads of each place in a Ulysses group.
        pairs: (ulysses_degree, ring_degree, ring_degree) float64, pairs of tokens in active blocks
            between the rows of a Ulysses group and the keys of another, for the heads of each
            place.
        turns: by place, the heads of each turn; a ring has one turn.
    """

    mask: BlockMask
    degrees: Degrees
    q: Shards
    kv: Shards
    deal: Deal
    pairs: NDArray[np.float64] = field(repr=False)
    turns: Turns = ()

    def __post_init__(self) -> None:
        """One turn, unless they are given."""
        if not self.turns:
            object.__setattr__(self, "turns", one_turn(self.deal))

    @property
    def turn_count(self) -> int:
        """How many turns each place has."""
        return len(self.turns[0])

    @property
    def overlaps(self) -> bool:
        """Whether something moves while a rank computes."""
        return self.turn_count > 1 or self.degrees.ring_degree > 1

    def in_turns(self, count: int) -> Schedule:
        """The same with so many turns, of equal work.

        Args:
            count: at least 1; more than 1 in pure Ulysses alone.
        """
        return replace(self, turns=in_turns(self.deal, self.work, count))

    @cached_property
    def work(self) -> NDArray[np.float64]:
        """(heads,) pairs of tokens in the active blocks of each query head."""
        return head_work(self.mask, sum(map(len, self.deal.q)))

    @property
    def needs(self) -> NDArray[np.bool_]:
        """(ulysses_degree, ring_degree, ring_degree): whether rows need keys of another group."""
        return self.pairs > _SOME

    def loads(self) -> NDArray[np.float64]:
        """(N,) pairs of tokens that each rank computes."""
        loads: NDArray[np.float64] = self.pairs.sum(axis=2).T.ravel()
        return loads

    def place(self, rank: int) -> tuple[int, int]:
        """(its Ulysses group, its place there)."""
        return divmod(rank, self.degrees.ulysses_degree)

    def members(self, group: int) -> range:
        """The ranks of a Ulysses group."""
        u = self.degrees.ulysses_degree
        return range(group * u, (group + 1) * u)

    def rows(self, group: int) -> Spans:
        """Query tokens that the ranks of a Ulysses group compute."""
        ranks = self.members(group)
        return self.q.rows(ranks.start, ranks.stop)

    def keys(self, group: int, *, text: bool) -> Spans:
        """Key tokens of a Ulysses group, with the text that all hold or without."""
        ranks = self.members(group)
        return self.kv.keys(ranks.start, ranks.stop, text=text)

    def to(self, group: int, step: int) -> int:
        """The group whose rows the keys of ``group`` are for, in a step of the ring."""
        return (group + step) % self.degrees.ring_degree

    def source(self, group: int, step: int) -> int:
        """The group whose keys ``group`` computes with, in a step of the ring."""
        return (group - step) % self.degrees.ring_degree

    def submask(self, rank: int, turn: int, step: int) -> BlockMask | None:
        """What a rank computes in a turn and a step of the ring; None for nothing."""
        group, place = self.place(rank)
        source = self.source(group, step)
        heads = self.turns[place][turn]
        if not heads or not self.needs[place, group, source]:
            return None
        part = cut(
            self.mask,
            heads=heads,
            rows=self.rows(group),
            columns=self.keys(source, text=step == 0),
        )
        return part if part.nnz else None

    @property
    def sent(self) -> NDArray[np.float64]:
        """(N, 2) rows of one head that each rank sends: before and after, and in the ring.

        A row is the head dim's elements of one token, of q, k, v or the output. What stays on its
        rank is not counted.
        """
        return np.stack([self.swapped.sum(axis=(0, 2)), self._ringed()], axis=1)

    @cached_property
    def swapped(self) -> NDArray[np.float64]:
        """(turns, N, 2) rows of one head that each rank sends in each turn, before and after."""
        u, r = self.degrees
        swapped = np.zeros((self.turn_count, self.degrees.ranks, 2))
        for turn, group in np.ndindex(self.turn_count, r):
            heads = [of_place[turn] for of_place in self.turns]
            q_heads = np.array([len(mine) for mine in heads])
            kv_heads = np.array([len(self.deal.kv_of(mine)) for mine in heads])
            members = self.members(group)
            rows = [self.q.own(m).tokens + self.q.text_part(m).tokens for m in members]
            own = [self.q.own(m).tokens for m in members]
            text = self.q.text_parts(members.start, members.stop).tokens
            for place, rank in enumerate(members):
                others = np.arange(u) != place
                keys = 2 * self.kv.own(rank).tokens
                swapped[turn, rank, 0] = rows[place] * q_heads[others].sum()
                swapped[turn, rank, 0] += keys * kv_heads[others].sum()
                away = sum(own) - own[place] + text * (self.degrees.ranks - 1)
                swapped[turn, rank, 1] = q_heads[place] * away
        return swapped

    def _ringed(self) -> NDArray[np.float64]:
        """(N,) rows of one head that each rank sends in the ring."""
        r = self.degrees.ring_degree
        receivers = self.needs.sum(axis=1) - self.needs[:, np.arange(r), np.arange(r)]
        keys = np.array([tokens_of(self.keys(group, text=False)) for group in range(r)])
        kv_heads = np.array([len(mine) for mine in self.deal.kv])
        ringed: NDArray[np.float64] = 2.0 * kv_heads[:, None] * keys * receivers
        return ringed.T.ravel()


def make_schedule(
    mask: BlockMask,
    degrees: Degrees,
    q: Shards,
    kv: Shards,
    *,
    q_heads: int,
    kv_heads: int,
    old: Deal | None = None,
    most_heads: int | None = None,
) -> Schedule:
    """Divide a request.

    Args:
        mask: the whole mask, on the host; its heads are 1 or ``q_heads``.
        degrees: for as many ranks as there are shards.
        q: shards of the query tokens.
        kv: shards of the key tokens.
        q_heads: query heads.
        kv_heads: KV heads, which divide ``q_heads``.
        old: a deal of heads to keep while it serves; see
            :func:`tessera_cupy.parallel.heads.deal_again`.
        most_heads: query heads that a rank may hold; None means an equal number, rounded up.

    Raises:
        ValueError: the shards are not the mask's sequence, or too small a bound.
    """
    check_shards(mask, q, kv)
    work = head_work(mask, q_heads)
    shared = q_heads // kv_heads
    places = degrees.ulysses_degree
    if old is not None and (len(old.q), old.shared) == (places, shared):
        dealt = deal_again(work, old, most_heads=most_heads)
    else:
        dealt = deal(work, places, shared=shared, most_heads=most_heads)
    return Schedule(mask, degrees, q, kv, dealt, group_pairs(mask, degrees, q, kv, dealt))


def check_shards(mask: BlockMask, q: Shards, kv: Shards) -> None:
    """Refuse shards of other sequences than the mask's.

    Raises:
        ValueError: the message has the lengths.
    """
    for name, shards, tokens in (("q", q, mask.shape[0]), ("k", kv, mask.shape[1])):
        if shards.total != tokens:
            expected = f"shards with the mask's {tokens} tokens in all"
            got = f"{shards.total}: {_listed(shards.lengths)} and {shards.text} of text"
            raise ValueError(wrong(name, expected, got, "build the mask for the whole sequence"))


def group_pairs(
    mask: BlockMask, degrees: Degrees, q: Shards, kv: Shards, dealt: Deal
) -> NDArray[np.float64]:
    """:attr:`Schedule.pairs` of a mask."""
    u, r = degrees
    if r == 1:
        work = head_work(mask, sum(map(len, dealt.q)))
        return dealt.loads(work).reshape(u, 1, 1)
    return pairs_of_places(pair_work(mask, q, kv), degrees, dealt)


def pairs_of_places(
    of_ranks: NDArray[np.float64], degrees: Degrees, dealt: Deal
) -> NDArray[np.float64]:
    """:attr:`Schedule.pairs` from what :func:`tessera_cupy.parallel.work.pair_work` counts."""
    u, r = degrees
    of_groups = of_ranks.reshape(len(of_ranks), r, u, r, u).sum(axis=(2, 4))
    if len(of_groups) == 1:
        return np.stack([of_groups[0] * len(mine) for mine in dealt.q])
    return np.stack([of_groups[list(mine)].sum(axis=0) for mine in dealt.q])


def _listed(lengths: Sequence[int]) -> str:
    shown = ", ".join(map(str, lengths[:8]))
    return shown if len(lengths) <= 8 else f"{shown}, ... ({len(lengths)} shards)"
