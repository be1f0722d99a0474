"""Which tokens of a sequence each rank holds: contiguous shards of any length, and shared text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple


class Span(NamedTuple):
    """Tokens ``begin`` to ``end - 1`` of a sequence."""

    begin: int
    end: int

    @property
    def tokens(self) -> int:
        """How many there are."""
        return self.end - self.begin


#: Spans that ascend and do not touch; what a rank or some ranks hold, in the order of the sequence.
Spans = tuple[Span, ...]


@dataclass(frozen=True)
class Shards:
    """A sequence, cut into one contiguous shard for each rank, in the order of the ranks.

    Text that every rank holds complete lies before or behind all shards. Its keys are nobody's to
    send; of its query rows each rank computes an even part.

    Attributes:
        lengths: tokens of each rank's shard; 0 is allowed.
        text: tokens of the text that every rank holds.
        text_first: whether the text is before the shards, rather than behind them.

    >>> shards = Shards((4, 2), text=3)
    >>> shards.total, shards.own(1), shards.text_part(0)
    (9, Span(begin=4, end=6), Span(begin=6, end=7))
    """

    lengths: tuple[int, ...]
    text: int = 0
    text_first: bool = False

    @property
    def ranks(self) -> int:
        """How many shards there are."""
        return len(self.lengths)

    @property
    def total(self) -> int:
        """Tokens of the sequence."""
        return self._edges[-1] + (0 if self.text_first else self.text)

    @property
    def text_span(self) -> Span:
        """Where the text is; empty without any."""
        begin = 0 if self.text_first else self._edges[-1]
        return Span(begin, begin + self.text)

    @cached_property
    def _edges(self) -> tuple[int, ...]:
        first = self.text if self.text_first else 0
        return tuple(accumulate(self.lengths, initial=first))

    def own(self, rank: int) -> Span:
        """The rank's shard."""
        return Span(self._edges[rank], self._edges[rank + 1])

    def text_part(self, rank: int) -> Span:
        """The part of the text whose query rows the rank computes."""
        return self.text_parts(rank, rank + 1)

    def text_parts(self, first: int, last: int) -> Span:
        """The parts of ranks ``first`` to ``last - 1``, which follow each other."""
        begin = self.text_span.begin
        return Span(begin + self.text * first // self.ranks, begin + self.text * last // self.ranks)

    def keys(self, first: int, last: int, *, text: bool) -> Spans:
        """The shards of ranks ``first`` to ``last - 1``, with or without the text."""
        shards = Span(self._edges[first], self._edges[last])
        return union((shards, self.text_span) if text else (shards,))

    def rows(self, first: int, last: int) -> Spans:
        """The query rows that ranks ``first`` to ``last - 1`` compute: shards and text parts."""
        return union((Span(self._edges[first], self._edges[last]), self.text_parts(first, last)))


def even_lengths(tokens: int, ranks: int) -> tuple[int, ...]:
    """Shards of ``ceil(tokens / ranks)`` tokens, of which the last ones are short or empty.

    >>> even_lengths(10, 4)
    (3, 3, 3, 1)
    """
    most = -(-tokens // ranks)
    return tuple(min(most, max(0, tokens - rank * most)) for rank in range(ranks))


def union(spans: Iterable[Span]) -> Spans:
    """Spans in the order of the sequence, without empty ones; neighbours that touch are one.

    >>> union([Span(4, 6), Span(0, 2), Span(2, 3), Span(9, 9)])
    (Span(begin=0, end=3), Span(begin=4, end=6))
    """
    joined: list[Span] = []
    for span in sorted(span for span in spans if span.tokens):
        if joined and joined[-1].end == span.begin:
            span = Span(joined.pop().begin, span.end)
        joined.append(span)
    return tuple(joined)


def tokens_of(spans: Sequence[Span]) -> int:
    """Tokens of all spans."""
    return sum(span.tokens for span in spans)


def place(span: Span, spans: Spans) -> slice:
    """Where the tokens of ``span``, which lies within one of ``spans``, are among all of these.

    >>> place(Span(5, 6), (Span(0, 2), Span(4, 8)))
    slice(3, 4, None)
    """
    before = 0
    for one in spans:
        if one.begin <= span.begin and span.end <= one.end:
            begin = before + span.begin - one.begin
            return slice(begin, begin + span.tokens)
        before += one.tokens
    return slice(0, 0)
