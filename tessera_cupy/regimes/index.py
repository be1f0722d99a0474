"""A list of keys, compiled to a dictionary and sorted edges, and the answers that it gives.

Sizes fall into classes between the bounds that any key of the list names. The dictionary leads from
the classes of a request to its key; the key's edges lead to a bucket and its ready-made answer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf, prod
from typing import Literal, TypeAlias

from tessera_cupy.errors import TableError
from tessera_cupy.regimes.features import Features
from tessera_cupy.regimes.naming import bucket_name, key_name
from tessera_cupy.regimes.plan_spec import PlanSpec
from tessera_cupy.regimes.schema import (
    AXES,
    DTYPES,
    LAYOUTS,
    Document,
    Interval,
    Key,
    Match,
    Regime,
)
from tessera_cupy.regimes.strict_yaml import table_error

#: The lists of keys that a table may have.
List: TypeAlias = Literal["keys", "reasoned"]

# A bound on the memory of one key, far above what learned edges come to.
_MAX_BUCKETS = 100_000


@dataclass(frozen=True)
class Choice:
    """What a table says about a request.

    Attributes:
        regime: readable name, such as ``sm90 q64 d<=128 tokens<32768 density<0.3``; ``reasoned``
            follows the table's name where the key is of its second list, ``rule`` where a rule of
            the caller's comes before what the table says.
        ranking: plans from best to worst, the base plans last; take the first that is
            eligible. For every block size at least one is.
        key: the part of the name that says which requests share the key, or ``base``
            where the table has no key.
        why: the key's reason.
        origin: ``"keys"`` or ``"reasoned"``, the list that the key is in; ``"base"`` where the
            table has no answer; ``"rule"`` where a rule of the caller's comes first.
        cases: number of measured cases behind the ranking, of the regime or else of the key;
            None where the table does not say.
        own: how many plans of the ranking come from the regime itself; the rest is behind them.
    """

    regime: str
    ranking: tuple[PlanSpec, ...]
    key: str
    why: str
    origin: Literal["keys", "reasoned", "base", "rule"]
    cases: int | None = None
    own: int = 0


@dataclass(frozen=True)
class _Buckets:
    """A key's answers, by bucket: row-major over the axes, in the order of AXES."""

    key: Key
    choices: tuple[Choice, ...]
    # Axes with edges: the edges, the number of buckets, the axis.
    axes: tuple[tuple[tuple[float, ...], int, str], ...]

    def at(self, f: Features) -> Choice:
        bucket = 0
        for edges, size, axis in self.axes:
            bucket = bucket * size + bisect_right(edges, getattr(f, axis))
        return self.choices[bucket]


class Index:
    """The keys of one list of a table, ready to be asked."""

    def __init__(self, document: Document, name: List) -> None:
        """Compile a list.

        Raises:
            TableError: two keys, or two regimes of a key, claim the same request.
        """
        keys: tuple[Key, ...] = getattr(document, name)
        matches = [key.match for key in keys]
        self._q = _class_bounds(match.block_q for match in matches)
        self._kv = _class_bounds(match.block_kv for match in matches)
        self._dim = _class_bounds(match.head_dim for match in matches)
        self._buckets: dict[tuple[object, ...], _Buckets] = {}
        owners: dict[tuple[object, ...], int] = {}
        for number, key in enumerate(keys):
            buckets = _buckets(document, key, name, number)
            for cell in self._cells(key.match):
                if cell in owners:
                    other = keys[owners[cell]]
                    got = f"a request that {name}[{owners[cell]}] (line {other.line}) has too"
                    raise _overlap(document, key.line, f"{name}[{number}].match", got)
                owners[cell] = number
                self._buckets[cell] = buckets

    def find(self, f: Features, *, slices: bool) -> Choice | None:
        """The answer for a request.

        Args:
            f: the request.
            slices: whether to ask the keys for slices alone, rather than those that say nothing
                of the mask.
        """
        buckets = self._of(f, slices)
        if buckets is None:
            return None
        return buckets.at(f)

    def key(self, f: Features, *, slices: bool) -> Key | None:
        """The key that is asked for a request, whether or not it has an answer."""
        buckets = self._of(f, slices)
        return None if buckets is None else buckets.key

    def _of(self, f: Features, slices: bool) -> _Buckets | None:
        return self._buckets.get(
            (
                slices,
                bisect_right(self._q, f.block_q),
                bisect_right(self._kv, f.block_kv),
                f.ragged,
                f.token_bits,
                f.dtype,
                bisect_right(self._dim, f.head_dim),
                f.layout,
            )
        )

    def _cells(self, match: Match) -> Iterator[tuple[object, ...]]:
        """Index entries of the requests that a key matches."""
        return product(
            (match.mask is not None,),
            _classes(self._q, match.block_q),
            _classes(self._kv, match.block_kv),
            (False, True) if match.ragged is None else (match.ragged,),
            (False, True) if match.token_bits is None else (match.token_bits,),
            DTYPES if match.dtype is None else (match.dtype,),
            _classes(self._dim, match.head_dim),
            LAYOUTS if match.layout is None else (match.layout,),
        )


def _class_bounds(intervals: Iterable[Interval]) -> tuple[float, ...]:
    """Values at which some interval begins or ends: classes lie between them."""
    bounds = {bound for interval in intervals for bound in (interval.low, interval.high)}
    return tuple(sorted(bounds - {-inf, inf}))


def _classes(bounds: Sequence[float], interval: Interval) -> range:
    """Classes, numbered as ``bisect_right`` numbers them, that make up an interval."""
    first = bisect_right(bounds, interval.low)
    return range(
        first, len(bounds) + 1 if interval.high == inf else bisect_right(bounds, interval.high)
    )


def _buckets(document: Document, key: Key, listed: List, number: int) -> _Buckets:
    shape = [len(edges) + 1 for edges in key.edges]
    field = f"{listed}[{number}]"
    if prod(shape) > _MAX_BUCKETS:
        got = f"{prod(shape)} (the product over the axes)"
        expected = f"at most {_MAX_BUCKETS} buckets"
        raise table_error(
            document.path, key.line, f"{field}.edges", expected, got, "use fewer edges"
        )
    name = f"{document.arch} {'reasoned ' if listed == 'reasoned' else ''}{key_name(key.match)}"
    why = "the key has no regime for this bucket"
    gap = Choice(f"{name} base (no regime)", document.base, key_name(key.match), why, "base")
    choices = [gap] * prod(shape)
    owners: dict[int, int] = {}
    for i, regime in enumerate(key.regimes):
        choice = _choice(document, name, key, regime, listed)
        ranges = [_classes(edges, when) for edges, when in zip(key.edges, regime.when, strict=True)]
        for place in product(*ranges):
            bucket = 0
            for axis, size in enumerate(shape):
                bucket = bucket * size + place[axis]
            if bucket in owners:
                first = key.regimes[owners[bucket]]
                got = f"a bucket that regimes[{owners[bucket]}] (line {first.line}) has too"
                raise _overlap(document, regime.line, f"{field}.regimes[{i}].when", got)
            owners[bucket] = i
            choices[bucket] = choice
    axes = [
        (edges, len(edges) + 1, axis) for axis, edges in zip(AXES, key.edges, strict=True) if edges
    ]
    return _Buckets(key, tuple(choices), tuple(axes))


def _choice(document: Document, name: str, key: Key, regime: Regime, listed: List) -> Choice:
    rest = tuple(plan for plan in document.base if plan not in regime.plans)
    return Choice(
        regime=f"{name} {bucket_name(regime.when)}".rstrip(),
        ranking=regime.plans + rest,
        own=len(regime.plans),
        key=key_name(key.match),
        why=key.why,
        origin=listed,
        cases=regime.cases or key.cases,
    )


def _overlap(document: Document, line: int, field: str, got: str) -> TableError:
    return table_error(
        document.path, line, field, "requests of its own", got, "narrow one of the two"
    )
