"""What a profile table file may say, and the checks that need the file alone.

Intervals are half-open, ``low <= value < high``. In the file, block sizes and head dims
of a key run ``from`` a size ``to`` a size, both included; the bounds of a regime run
``from`` an edge and stay ``below`` an edge. A bound or a field that is left out means any. A key
with ``mask: slices`` is for key slices alone, and comes before those that say nothing of the mask.

A table that was measured or modelled may have a second list of keys, ``reasoned``, for requests
that no key of ``keys`` has an answer for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tessera_cupy.regimes import strict_yaml
from tessera_cupy.regimes.plan_spec import PlanSpec
from tessera_cupy.regimes.strict_yaml import Entry

SCHEMA = 1
PROVENANCES = ("default", "model", "measured")
DTYPES = ("float16", "bfloat16")
LAYOUTS = ("BHSD", "BSHD")
#: Kinds of masks that a key may be for.
MASKS = ("slices",)
#: Axes that a key buckets by edges, in the order of regime names.
AXES = ("heads", "tokens", "density", "run_coverage", "rows", "kept_keys")
#: Those of them that run from 0 to 1; the others are whole numbers.
FRACTIONS = ("density", "run_coverage")
_MAX_SIZE = 2**31 - 1


@dataclass(frozen=True)
class Interval:
    """Values with ``low <= value < high``."""

    low: float = -math.inf
    high: float = math.inf

    def __contains__(self, value: float) -> bool:
        return self.low <= value < self.high


ANY: Final = Interval()


@dataclass(frozen=True)
class Match:
    """Requests that a key is for; None and :data:`ANY` stand for every value."""

    block_q: Interval = ANY
    block_kv: Interval = ANY
    ragged: bool | None = None
    token_bits: bool | None = None
    dtype: str | None = None
    head_dim: Interval = ANY
    layout: str | None = None
    mask: str | None = None


@dataclass(frozen=True)
class Regime:
    """A box of buckets of one key, and the plans for it from best to worst.

    ``when`` has one interval for each of :data:`AXES`. ``line`` is the place in the file,
    ``cases`` the number of measured cases behind the ranking, where the file says it.
    """

    when: tuple[Interval, ...]
    plans: tuple[PlanSpec, ...]
    line: int
    cases: int | None = None


@dataclass(frozen=True)
class Key:
    """Regimes of one geometry, dtype, head dim and layout class.

    ``edges`` has the ascending bucket edges for each of :data:`AXES`; ``why`` is one line;
    ``cases`` is the number of measured cases behind the key, where the file says it.
    """

    match: Match
    why: str
    edges: tuple[tuple[float, ...], ...]
    regimes: tuple[Regime, ...]
    line: int
    cases: int | None = None


@dataclass(frozen=True)
class Document:
    """A profile table as it stands in its file.

    Attributes:
        path: the file.
        arch: name of the table, the file's name without its ending.
        provenance: "default" (reasoned), "model" (a cost model) or "measured".
        device: GPU that it was measured on or modelled for, or None.
        catalog: fingerprint of the kernel catalog that was measured, or None.
        raw_data: fingerprint of the raw measurements, or None.
        reasons: how the table came about.
        base: plans of last resort; for every block size at least one is eligible.
        keys: classes of requests; no two may match the same request.
        reasoned: more of them, not measured nor modelled, for requests that ``keys`` lacks; no
            two of these may match the same request. Empty where the provenance is "default".
    """

    path: Path
    arch: str
    provenance: str
    device: str | None
    catalog: str | None
    raw_data: str | None
    reasons: str
    base: tuple[PlanSpec, ...]
    keys: tuple[Key, ...]
    reasoned: tuple[Key, ...] = ()

    @property
    def all_keys(self) -> tuple[Key, ...]:
        """The keys of both lists, in the order of the file."""
        return self.keys + self.reasoned


def read_document(path: Path) -> Document:
    """Read and check one profile table file.

    Raises:
        TableError: anything that the schema does not allow, with file, line and field.
    """
    names = ("schema", "arch", "provenance", "device", "catalog", "raw_data", "reasons")
    fields = strict_yaml.read(path).mapping((*names, "base", "keys"), ("reasoned",))
    # First, since another version may give every other field another meaning.
    if fields["schema"].integer(0, _MAX_SIZE) != SCHEMA:
        got, fix = f"version {fields['schema'].node.value}", "use a table of this release"
        fields["schema"].fail(f"schema version {SCHEMA}", got, fix)
    arch = fields["arch"].text()
    if arch != path.stem:
        fields["arch"].fail(f"`{path.stem}`, as in the file's name", arch, "rename one of them")
    provenance = fields["provenance"].text(PROVENANCES)
    origin = {name: _origin(fields[name], provenance) for name in ("device", "catalog", "raw_data")}
    if "reasoned" in fields and provenance == "default":
        expected = "`keys` alone, since the provenance is default"
        fields["reasoned"].fail(expected, "a second list", "move its keys into `keys`")
    return Document(
        path=path,
        arch=arch,
        provenance=provenance,
        device=origin["device"],
        catalog=origin["catalog"],
        raw_data=origin["raw_data"],
        reasons=fields["reasons"].text(),
        base=_base(fields["base"]),
        keys=_keys(fields["keys"], counted=provenance != "default"),
        reasoned=_keys(fields["reasoned"], counted=False) if "reasoned" in fields else (),
    )


def _origin(entry: Entry, provenance: str) -> str | None:
    """Where a table comes from: all of it for measured ones, nothing for defaults."""
    if not entry.is_null:
        if provenance == "default":
            entry.fail("null, since the provenance is default", entry.text(), "write null")
        return entry.text()
    if provenance == "measured":
        entry.fail("a text, since the provenance is measured", "null", "name what was measured")
    return None


def _plans(entry: Entry) -> tuple[PlanSpec, ...]:
    plans: list[PlanSpec] = []
    for item in entry.items():
        name = item.text()
        try:
            plan = PlanSpec.parse(name)
        except ValueError as error:
            reason, _, fix = str(error).partition(". Fix: ")
            item.fail("a plan name", f"{name} ({reason})", fix.rstrip("."))
        if plan in plans:
            item.fail("each plan once", f"{plan.name} again", "remove the lower one")
        plans.append(plan)
    return tuple(plans)


def _base(entry: Entry) -> tuple[PlanSpec, ...]:
    """Base plans, one of which is eligible for every block size."""
    plans = _plans(entry)
    blocks = not_served(plans)
    if blocks is not None:
        fix = "list a retain-pack and a split-pack plan of one tile"
        entry.fail("an eligible plan for every block size", f"none for {blocks}", fix)
    return plans


def not_served(plans: Sequence[PlanSpec]) -> str | None:
    """Blocks for which none of some plans is eligible; None where every size has one.

    Eligibility changes only at a tile size and at half of it, so that the sizes at these
    points and just above stand for all sizes.

    >>> not_served([PlanSpec.parse("attend_mma/q64k64/retain-pack/rows")])
    'blocks of 65 x 32'
    """
    if not plans:
        return "blocks of any size"
    q_sizes = {s + d for p in plans for s in (p.tile_q // 2, p.tile_q) for d in (0, 1)}
    kv_sizes = {s + d for p in plans for s in (p.tile_kv // 2, p.tile_kv) for d in (0, 1)}
    for block_q in sorted(q_sizes):
        for block_kv in sorted(kv_sizes):
            for ragged in (False, True):
                if not any(p.serves(block_q, block_kv, ragged=ragged) for p in plans):
                    kind = "ragged blocks of at most" if ragged else "blocks of"
                    return f"{kind} {block_q} x {block_kv}"
    return None


def _keys(entry: Entry, *, counted: bool) -> tuple[Key, ...]:
    """A list of keys; only of those that were measured or modelled are cases counted."""
    return tuple(_key(item, counted) for item in entry.items())


def _key(entry: Entry, counted: bool) -> Key:
    fields = entry.mapping(("match", "why", "regimes"), ("edges", "cases"))
    why = fields["why"].text()
    if "\n" in why:
        fields["why"].fail("one line", "several", "shorten it")
    edges = _edges(fields["edges"]) if "edges" in fields else ((),) * len(AXES)
    return Key(
        match=_match(fields["match"]),
        why=why,
        edges=edges,
        regimes=tuple(_regime(item, edges, counted) for item in fields["regimes"].items()),
        line=entry.line,
        cases=_cases(fields["cases"], counted) if "cases" in fields else None,
    )


def _cases(entry: Entry, counted: bool) -> int:
    if not counted:
        fix = "remove it, or move the key into `keys` of a measured table"
        entry.fail("no cases, since the key is reasoned", "a number of them", fix)
    return entry.integer(1, _MAX_SIZE)


def _match(entry: Entry) -> Match:
    names = ("block_q", "block_kv", "ragged", "token_bits", "dtype", "head_dim", "layout", "mask")
    fields = entry.mapping((), names)
    flags = {n: fields[n].boolean() for n in ("ragged", "token_bits") if n in fields}
    sizes = {n: _sizes(fields[n]) for n in ("block_q", "block_kv", "head_dim") if n in fields}
    return Match(
        block_q=sizes.get("block_q", ANY),
        block_kv=sizes.get("block_kv", ANY),
        ragged=flags.get("ragged"),
        token_bits=flags.get("token_bits"),
        dtype=fields["dtype"].text(DTYPES) if "dtype" in fields else None,
        head_dim=sizes.get("head_dim", ANY),
        layout=fields["layout"].text(LAYOUTS) if "layout" in fields else None,
        mask=fields["mask"].text(MASKS) if "mask" in fields else None,
    )


def _sizes(entry: Entry) -> Interval:
    """``64``, or ``{from: 16, to: 48}`` with one of the two ends at least."""
    if not entry.is_mapping:
        size = entry.integer(1, _MAX_SIZE)
        return Interval(size, size + 1)
    ends = entry.mapping((), ("from", "to"))
    if not ends:
        entry.fail("`from`, `to` or both", "neither", "remove the field to mean any size")
    low = ends["from"].integer(1, _MAX_SIZE) if "from" in ends else -math.inf
    high = ends["to"].integer(1, _MAX_SIZE) + 1 if "to" in ends else math.inf
    if low >= high:
        entry.fail("`from` not above `to`", f"from {low} to {high - 1}", "swap them")
    return Interval(low, high)


def _edges(entry: Entry) -> tuple[tuple[float, ...], ...]:
    fields = entry.mapping((), AXES)
    edges: list[tuple[float, ...]] = []
    for axis in AXES:
        values: list[float] = []
        for item in fields[axis].items() if axis in fields else ():
            value = item.number(0, 1) if axis in FRACTIONS else item.integer(1, _MAX_SIZE)
            if values and value <= values[-1]:
                got = f"{value} after {values[-1]}"
                item.fail("ascending edges, each once", got, "sort the list")
            values.append(value)
        edges.append(tuple(values))
    return tuple(edges)


def _regime(entry: Entry, edges: tuple[tuple[float, ...], ...], counted: bool) -> Regime:
    fields = entry.mapping(("when", "plans"), ("cases",))
    bounds = fields["when"].mapping((), AXES)
    when = tuple(
        _bounds(bounds[axis], axis, known) if axis in bounds else ANY
        for axis, known in zip(AXES, edges, strict=True)
    )
    return Regime(
        when=when,
        plans=_plans(fields["plans"]),
        line=entry.line,
        cases=_cases(fields["cases"], counted) if "cases" in fields else None,
    )


def _bounds(entry: Entry, axis: str, edges: tuple[float, ...]) -> Interval:
    """``{from: 0.1, below: 0.3}`` with one of the two ends at least, both at edges of the key."""
    ends = entry.mapping((), ("from", "below"))
    if not ends:
        entry.fail("`from`, `below` or both", "neither", "remove the field to mean any value")
    values: dict[str, float] = {}
    for name, end in ends.items():
        value = end.number(0, 1) if axis in FRACTIONS else end.integer(1, _MAX_SIZE)
        if value not in edges:
            known = ", ".join(str(edge) for edge in edges) or "none"
            end.fail(f"one of the key's {axis} edges ({known})", str(value), "add it to `edges`")
        values[name] = value
    low, high = values.get("from", -math.inf), values.get("below", math.inf)
    if low >= high:
        entry.fail("`from` lower than `below`", f"from {low} below {high}", "swap them")
    return Interval(low, high)
