"""Which requests get another first plan from one profile table than from another.

Both tables are asked for each usual block size and head dim, every kind of mask, dtype and layout,
in every bucket of the common refinement of their edges. Neighbours that differ alike are joined.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import Any

from tessera_cupy.regimes.features import Features
from tessera_cupy.regimes.naming import bucket_name, key_name
from tessera_cupy.regimes.plan_spec import PlanSpec
from tessera_cupy.regimes.schema import ANY, AXES, DTYPES, FRACTIONS, LAYOUTS, Interval, Match
from tessera_cupy.regimes.table import Table

#: Block sizes of published masks, on either side.
BLOCK_SIZES = (16, 32, 64, 128, 192, 384)
#: Query rows of key slices that are gathered, and of those that are not.
SLICE_ROWS = (16, 32, 64, 128, 192)
#: A head dim for which there are kernels, in every class of these.
HEAD_DIMS = (64, 96, 128, 256)

#: Fields of a match in the order of a cell, and the values that each may take.
_BLOCKS: dict[str, tuple[Any, ...]] = {
    "mask": (None,),
    "block_q": BLOCK_SIZES,
    "block_kv": BLOCK_SIZES,
    "ragged": (False, True),
    "token_bits": (False, True),
    "dtype": DTYPES,
    "head_dim": HEAD_DIMS,
    "layout": LAYOUTS,
}
#: The same of key slices, which are blocks of 16 keys with token bits.
_SLICES: dict[str, tuple[Any, ...]] = {
    **_BLOCKS,
    "mask": ("slices",),
    "block_q": SLICE_ROWS,
    "block_kv": (16,),
    "ragged": (False,),
    "token_bits": (True,),
}

# For each field or axis the first place and the one behind the last.
_Box = tuple[tuple[int, int], ...]
_Pair = tuple[PlanSpec, PlanSpec]


@dataclass(frozen=True)
class Difference:
    """A box of requests, and the first plan that each table has for them.

    Attributes:
        match: which requests; of sizes, those of :data:`BLOCK_SIZES` and :data:`HEAD_DIMS`.
        when: an interval for each axis of buckets.
        old: the plan of the first table.
        new: that of the second one.
    """

    match: Match
    when: tuple[Interval, ...]
    old: PlanSpec
    new: PlanSpec

    @property
    def name(self) -> str:
        """The requests, named as a table's regime is."""
        return f"{key_name(self.match)} {bucket_name(self.when)}".rstrip()


def differences(old: Table, new: Table) -> list[Difference]:
    """Requests for which two tables rank another plan first.

    >>> from tessera_cupy.regimes import load_for
    >>> sm80 = load_for("sm80")
    >>> ruled = sm80.with_rule(
    ...     "attend_mma/q64k64/retain-pack/rows", block_q=64, block_kv=64, density=(0.95, None),
    ...     ragged=False, token_bits=False, head_dim=96,
    ... )  # fmt: skip
    >>> [difference.name for difference in differences(sm80, ruled)]
    ['q64k64 uniform no-bits d96 density>=0.95']
    """
    found = []
    for values in (_BLOCKS, _SLICES):
        cells: dict[tuple[tuple[Interval, ...], _Pair], list[_Box]] = {}
        known: dict[tuple[int, ...], list[tuple[tuple[Interval, ...], _Pair]]] = {}
        for place in product(*[range(len(choices)) for choices in values.values()]):
            f = _at(values, place)
            deciders = [table.deciders(f) for table in (old, new)]
            # Cells that the same keys and rules decide about are alike.
            alike = tuple(map(id, (*deciders[0], None, *deciders[1])))
            if alike not in known:
                edges = [decider.edges for some in deciders for decider in some]
                known[alike] = list(_in_cell(old, new, f, edges))
            for differs in known[alike]:
                cells.setdefault(differs, []).append(tuple((i, i + 1) for i in place))
        for (when, pair), boxes in cells.items():
            found += [Difference(_match(values, box), when, *pair) for box in _joined(boxes)]
    return found


def _at(values: dict[str, tuple[Any, ...]], place: Sequence[int]) -> Features:
    """A request of a cell, the least in numbers."""
    given = {name: choices[i] for (name, choices), i in zip(values.items(), place, strict=True)}
    given["slices"] = given.pop("mask") is not None
    return Features(**given, heads=1, tokens=1, density=0.0, run_coverage=0.0)


def _in_cell(
    old: Table, new: Table, f: Features, edges: Sequence[tuple[tuple[float, ...], ...]]
) -> Iterator[tuple[tuple[Interval, ...], _Pair]]:
    """The buckets of a cell in which the tables differ, joined; its edges by key or rule."""
    axes = [sorted({edge for of_key in edges for edge in of_key[i]}) for i in range(len(AXES))]
    # An edge is in the bucket that it begins; numbers begin at 1; shares, and the
    # keys that a row keeps, at 0.
    firsts = [0.0 if name in (*FRACTIONS, "kept_keys") else 1 for name in AXES]
    starts = [(first, *axis) for first, axis in zip(firsts, axes, strict=True)]
    boxes: dict[_Pair, list[_Box]] = {}
    for place in product(*[range(len(axis)) for axis in starts]):
        if not _possible(starts, place):
            continue
        numbers: dict[str, Any] = {
            name: axis[i] for name, axis, i in zip(AXES, starts, place, strict=True)
        }
        rows, kept = numbers.pop("rows"), numbers.pop("kept_keys")
        bucket = _Bucket(*f._replace(**numbers))
        bucket.rows, bucket.kept_keys = rows, kept
        pair = old.lookup(bucket).ranking[0], new.lookup(bucket).ranking[0]
        if pair[0] != pair[1]:
            boxes.setdefault(pair, []).append(tuple((i, i + 1) for i in place))
    for pair, of_pair in boxes.items():
        for box in _joined(of_pair):
            yield tuple(_interval(axis, *ends) for axis, ends in zip(axes, box, strict=True)), pair


class _Bucket(Features):
    """A request of a bucket by the least numbers of the bucket, whether or not they go together."""

    rows: int = 0
    kept_keys: int = 0


def _possible(starts: Sequence[tuple[float, ...]], place: Sequence[int]) -> bool:
    """Whether some numbers of a bucket give the rows and the kept keys of it."""

    def ends(name: str) -> tuple[float, float]:
        """The least number of an axis in the bucket, and the greatest."""
        axis, i = starts[AXES.index(name)], place[AXES.index(name)]
        if i + 1 == len(axis):
            return axis[i], 1.0 if name in FRACTIONS else inf
        return axis[i], axis[i + 1] - (name not in FRACTIONS)

    (heads, most_heads), (density, most_density) = ends("heads"), ends("density")
    (rows, most_rows), (kept, most_kept) = ends("rows"), ends("kept_keys")
    tokens, most_tokens = ends("tokens")
    # As many tokens as go with these heads and rows, and with these densities and kept keys.
    return max(tokens, _over(rows, most_heads), _over(kept - 0.5, most_density)) <= min(
        most_tokens, _over(most_rows, heads), _over(most_kept + 0.5, density)
    )


def _over(product: float, factor: float) -> float:
    """The other factor; what no factor gives is out of reach."""
    return product / factor if factor else inf if product > 0 else 0.0


def _interval(edges: Sequence[float], begin: int, end: int) -> Interval:
    return Interval(
        edges[begin - 1] if begin else -inf, edges[end - 1] if end <= len(edges) else inf
    )


def _match(values: dict[str, tuple[Any, ...]], box: _Box) -> Match:
    fields: dict[str, Any] = {}
    for (name, known), (begin, end) in zip(values.items(), box, strict=True):
        everything = end - begin == len(known)
        if name in ("block_q", "block_kv", "head_dim"):
            fields[name] = ANY if everything else Interval(known[begin], known[end - 1] + 1)
        else:
            fields[name] = None if everything and name != "mask" else known[begin]
    return Match(**fields)


def _joined(boxes: Iterable[_Box]) -> list[_Box]:
    """Disjoint boxes, joined along one direction after the other where they are neighbours."""
    joined = sorted(boxes)
    for axis in range(len(joined[0])):
        rows: dict[_Box, list[tuple[int, int]]] = {}
        for box in joined:
            rows.setdefault(box[:axis] + box[axis + 1 :], []).append(box[axis])
        joined = [
            (*rest[:axis], run, *rest[axis:])
            for rest, runs in rows.items()
            for run in _runs(sorted(runs))
        ]
    return sorted(joined)


def _runs(parts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    runs = [parts[0]]
    for begin, end in parts[1:]:
        if begin == runs[-1][1]:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((begin, end))
    return runs
