"""Profile tables: one file of an architecture, compiled to a dictionary and sorted edges.

Sizes fall into classes between the bounds that any key names. A dictionary leads from the
classes of a request to its key; the key's edges lead to a bucket and its ready-made answer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import inf, prod
from pathlib import Path

from tessera_cupy._resources import plans_dir
from tessera_cupy.errors import TableError, wrong
from tessera_cupy.regimes.features import Features
from tessera_cupy.regimes.naming import bucket_name, key_name
from tessera_cupy.regimes.plan_spec import PlanSpec
from tessera_cupy.regimes.schema import (
    DTYPES,
    LAYOUTS,
    Document,
    Interval,
    Key,
    Match,
    Regime,
    read_document,
)
from tessera_cupy.regimes.strict_yaml import table_error

# A bound on the memory of one key, far above what learned edges come to.
_MAX_BUCKETS = 100_000


@dataclass(frozen=True)
class Choice:
    """What a table says about a request.

    Attributes:
        regime: readable name, such as ``sm90 q64 d<=128 tokens<32768 density<0.3``.
        ranking: plans from best to worst, the base plans last; take the first that is
            eligible. For every block size at least one is.
        key: the part of the name that says which requests share the key, or ``base``
            where the table has no key.
        why: the key's reason.
    """

    regime: str
    ranking: tuple[PlanSpec, ...]
    key: str
    why: str


@dataclass(frozen=True)
class _Buckets:
    """A key's answers, by bucket: row-major over the axes, in the order of AXES."""

    edges: tuple[tuple[float, ...], ...]
    choices: tuple[Choice, ...]

    def at(self, heads: int, tokens: int, density: float, run_coverage: float) -> Choice:
        h, t, d, r = self.edges
        bucket = bisect_right(h, heads) * (len(t) + 1) + bisect_right(t, tokens)
        bucket = bucket * (len(d) + 1) + bisect_right(d, density)
        bucket = bucket * (len(r) + 1) + bisect_right(r, run_coverage)
        return self.choices[bucket]


class Table:
    """A loaded profile table.

    Attributes:
        document: the table as it stands in its file (provenance, reasons, keys).
    """

    def __init__(self, document: Document) -> None:
        """Compile a document.

        Raises:
            TableError: two keys, or two regimes of a key, claim the same request.
        """
        self.document = document
        matches = [key.match for key in document.keys]
        self._q = _class_bounds(match.block_q for match in matches)
        self._kv = _class_bounds(match.block_kv for match in matches)
        self._dim = _class_bounds(match.head_dim for match in matches)
        self._index: dict[tuple[object, ...], _Buckets] = {}
        owners: dict[tuple[object, ...], int] = {}
        for number, key in enumerate(document.keys):
            buckets = _buckets(document, number)
            for cell in self._cells(key.match):
                if cell in owners:
                    other = document.keys[owners[cell]]
                    got = f"a request that keys[{owners[cell]}] (line {other.line}) has too"
                    raise _overlap(document, key.line, f"keys[{number}].match", got)
                owners[cell] = number
                self._index[cell] = buckets

    def __repr__(self) -> str:
        document = self.document
        return f"Table({document.arch}, {document.provenance}, {len(document.keys)} keys)"

    def lookup(self, features: Features) -> Choice:
        """Rank the plans for a request; a request that the table lacks gets the base plans.

        >>> table = load_for("sm90")
        >>> choice = table.lookup(
        ...     Features(
        ...         block_q=64, block_kv=64, ragged=False, token_bits=False,
        ...         dtype="bfloat16", head_dim=128, layout="BHSD", heads=12,
        ...         tokens=32760, density=0.1, run_coverage=0.8,
        ...     )
        ... )  # fmt: skip
        >>> choice.ranking[0].mapping.q
        'share'
        """
        f = features
        cell: tuple[object, ...] = (
            bisect_right(self._q, f.block_q),
            bisect_right(self._kv, f.block_kv),
            f.ragged,
            f.token_bits,
            f.dtype,
            bisect_right(self._dim, f.head_dim),
            f.layout,
        )
        buckets = self._index.get((True, *cell)) if f.slices else None
        buckets = buckets or self._index.get((False, *cell))
        if buckets is None:
            return self._miss(f)
        return buckets.at(f.heads, f.tokens, f.density, f.run_coverage)

    def plans(self) -> tuple[PlanSpec, ...]:
        """Every plan that the table names, each once, in the order of the file."""
        rankings = [regime.plans for key in self.document.keys for regime in key.regimes]
        return tuple(
            dict.fromkeys(plan for plans in [self.document.base, *rankings] for plan in plans)
        )

    def _miss(self, f: Features) -> Choice:
        shape = f"q{f.block_q}k{f.block_kv} d{f.head_dim} {f.dtype} {f.layout}"
        regime = f"{self.document.arch} base (no key for {shape})"
        why = "the table has no key for this request"
        return Choice(regime=regime, ranking=self.document.base, key="base", why=why)

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


def load_table(path: str | Path) -> Table:
    """Load a profile table from a file; :func:`load_for` loads a shipped one by name.

    Raises:
        TableError: the file is missing, or it is wrong; then the message names file, line and
            field.
    """
    path = Path(path)
    if not path.is_file():
        got = f"{str(path)!r}, {'a folder' if path.is_dir() else 'where there is no file'}"
        fix = "check the path"
        if str(path) in _shipped():
            shipped = plans_dir() / f"{path}.yaml"
            fix = f'call tessera_cupy.regimes.load_for("{path}"), or give "{shipped}"'
        raise TableError(wrong("path", "the path of a profile table, a .yaml file", got, fix))
    return Table(read_document(path))


@cache
def load_for(name: str) -> Table:
    """The shipped table of a GPU generation: sm80, sm89, sm90, sm100 or sm120; loaded once.

    Raises:
        ValueError: there is no table of that name.
        TableError: the table is wrong.
    """
    known = _shipped()
    if name not in known:
        expected = f"one of {', '.join(known)}"
        raise ValueError(wrong("name", expected, repr(name), "name a table that is shipped"))
    return load_table(plans_dir() / f"{name}.yaml")


def _shipped() -> list[str]:
    return sorted(path.stem for path in plans_dir().glob("*.yaml"))


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


def _buckets(document: Document, number: int) -> _Buckets:
    key = document.keys[number]
    shape = [len(edges) + 1 for edges in key.edges]
    field = f"keys[{number}]"
    if prod(shape) > _MAX_BUCKETS:
        got = f"{prod(shape)} (the product over the axes)"
        expected = f"at most {_MAX_BUCKETS} buckets"
        raise table_error(
            document.path, key.line, f"{field}.edges", expected, got, "use fewer edges"
        )
    name = f"{document.arch} {key_name(key.match)}"
    why = "the key has no regime for this bucket"
    gap = Choice(f"{name} base (no regime)", document.base, key_name(key.match), why)
    choices = [gap] * prod(shape)
    owners: dict[int, int] = {}
    for i, regime in enumerate(key.regimes):
        choice = _choice(document, name, key, regime)
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
    return _Buckets(edges=key.edges, choices=tuple(choices))


def _choice(document: Document, name: str, key: Key, regime: Regime) -> Choice:
    rest = tuple(plan for plan in document.base if plan not in regime.plans)
    return Choice(
        regime=f"{name} {bucket_name(regime.when)}".rstrip(),
        ranking=regime.plans + rest,
        key=key_name(key.match),
        why=key.why,
    )


def _overlap(document: Document, line: int, field: str, got: str) -> TableError:
    return table_error(
        document.path, line, field, "requests of its own", got, "narrow one of the two"
    )
