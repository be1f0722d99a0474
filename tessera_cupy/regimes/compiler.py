"""From times of plans on masks to a profile table.

Cases fall into keys by what a kernel is chosen for: block sizes, raggedness, token bits, dtype,
head dim, layout. Inside a key a decision tree over heads, tokens, their product (rows), density,
the keys that it leaves a row (kept_keys) and run coverage cuts cases into regimes; how far is
judged by the regret on sources that it did not see. A regime ranks plans by the geometric mean of
their times. Nothing is drawn at random: the same measurements give the same table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from tessera_cupy.errors import wrong
from tessera_cupy.regimes.features import Features
from tessera_cupy.regimes.measurements import Case, Measurements
from tessera_cupy.regimes.schema import ANY, AXES, Document, Interval, Key, Match, Regime
from tessera_cupy.regimes.tree import (
    MIN_CASES,
    PRESET_EDGES,
    Costs,
    Leaf,
    grow,
    least_saved,
    pruned,
)

#: Fewest cases that make a key at all; fewer leave its requests to the reasoned keys. Times taken
#: in turns are right within a percent or two, so that a few say more than a reason does.
LEAST_CASES = 3
# Ends (included) of the classes of block sizes and head dims: kernels' tiles and halves of them.
_Q_CLASSES = (16, 32, 64, 128, 192)
_KV_CLASSES = (16, 32, 64)
# Columns of up to so many make the same tiles: their cases are one key, for the columns they have.
_NARROW = 64
_DIM_CLASSES = (64, 128)
_REASONED = "Reasoned keys: "


def compile_table(
    measurements: Measurements, prior: Document, *, path: Path, edges: str = "tree"
) -> Document:
    """Compile a table.

    Args:
        measurements: the times.
        prior: a table of the same architecture, whose base plans and reasoned keys (all keys, where
            it is a default one) serve the requests that were not profiled.
        path: where the table will be.
        edges: "tree" learns them, "preset" takes :data:`PRESET_EDGES`.

    Returns:
        The table; :func:`tessera_cupy.regimes.writer.table_text` writes it.

    Raises:
        ValueError: no case, other edges, or a prior of another architecture.

    Example:
        ::

            measured = Measurements.read(Path("plans/sm90.npz"))
            table = compile_table(measured, load_for("sm90").document, path=Path("plans/sm90.yaml"))
    """
    if edges not in ("tree", "preset"):
        raise ValueError(wrong("edges", '"tree" or "preset"', repr(edges), "use one of them"))
    if not measurements.cases:
        raise ValueError(wrong("measurements", "at least one case", "none", "profile first"))
    if prior.arch != measurements.arch:
        expected = f"a table of {measurements.arch}"
        raise ValueError(wrong("prior", expected, f"one of {prior.arch}", "give that table"))
    kinds = [(match, Costs.of(cases)) for match, cases in _classes(measurements.cases)]
    keys = [_key(match, costs, edges) for match, costs in kinds if len(costs) >= LEAST_CASES]
    if not keys:
        most = max((len(costs) for _, costs in kinds), default=0)
        raise ValueError(
            wrong(
                "measurements",
                f"a kind of mask with {LEAST_CASES} cases or more",
                f"{len(measurements.cases)} cases of {len(kinds)} kinds, at most {most} of one",
                "profile on, longer or with fewer families; what was measured is kept",
            )
        )
    reasoned = prior.keys if prior.provenance == "default" else prior.reasoned
    return Document(
        path=path,
        arch=measurements.arch,
        provenance=measurements.provenance,
        device=measurements.device,
        catalog=measurements.catalog,
        raw_data=measurements.fingerprint,
        reasons=_reasons(measurements, keys, edges, prior),
        base=prior.base,
        keys=tuple(keys),
        reasoned=reasoned,
    )


def _classes(cases: Sequence[Case]) -> list[tuple[Match, list[Case]]]:
    """Cases by the key that they belong to, in a fixed order."""
    kinds: dict[Match, list[tuple[Interval, Case]]] = {}
    for case in cases:
        kind = kind_of(case.features)
        narrow = kind.block_kv.high <= _NARROW + 1
        alike = replace(kind, block_kv=Interval(high=_NARROW + 1)) if narrow else kind
        kinds.setdefault(alike, []).append((kind.block_kv, case))
    found: list[tuple[Match, list[Case]]] = []
    for alike, members in kinds.items():
        columns = [of_case for of_case, _ in members]
        low, high = min(c.low for c in columns), max(c.high for c in columns)
        match = replace(alike, block_kv=Interval(low, high))
        found += _by_value(match, [case for _, case in members])
    return sorted(found, key=lambda pair: _order(pair[0]))


def _by_value(match: Match, cases: list[Case]) -> list[tuple[Match, list[Case]]]:
    """One key for all dtypes and layouts, unless several of them have cases enough of their own."""
    parts: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        parts.setdefault((case.features.dtype, case.features.layout), []).append(case)
    enough = all(len(part) >= LEAST_CASES for part in parts.values())
    dtypes = {dtype for dtype, _ in parts}
    layouts = {layout for _, layout in parts}
    if not enough or len(parts) < len(dtypes) * len(layouts) or len(parts) == 1:
        return [(match, cases)]
    return [
        (
            replace(
                match,
                dtype=dtype if len(dtypes) > 1 else None,
                layout=layout if len(layouts) > 1 else None,
            ),
            part,
        )
        for (dtype, layout), part in parts.items()
    ]


def kind_of(f: Features) -> Match:
    """The key that a request belongs to, of any dtype and layout."""
    return Match(
        block_q=_class_of(f.block_q, _Q_CLASSES),
        block_kv=ANY if f.slices else _class_of(f.block_kv, _KV_CLASSES),
        ragged=f.ragged,
        token_bits=None if f.slices else f.token_bits,
        head_dim=_class_of(f.head_dim, _DIM_CLASSES),
        mask="slices" if f.slices else None,
    )


def _class_of(size: int, ends: Sequence[int]) -> Interval:
    """The class of a size, between two neighbouring ends."""
    place = sum(size > end for end in ends)
    low = ends[place - 1] + 1 if place else -math.inf
    return Interval(low, ends[place] + 1 if place < len(ends) else math.inf)


def _order(match: Match) -> tuple[object, ...]:
    return (
        match.mask or "",
        match.ragged,
        match.token_bits or False,
        match.head_dim.low,
        match.block_q.low,
        match.block_kv.low,
        match.dtype or "",
        match.layout or "",
    )


def _key(match: Match, costs: Costs, edges: str) -> Key:
    rows = np.arange(len(costs))
    known = PRESET_EDGES if edges == "preset" else None
    saved, regret = least_saved(costs, known)
    leaves = pruned(grow(costs, rows, saved, known), costs)
    used = tuple(
        tuple(
            sorted(
                {b for leaf in leaves for b in (leaf.box[a].low, leaf.box[a].high)}
                - {-math.inf, math.inf}
            )
        )
        for a in range(len(AXES))
    )
    return Key(
        match=match,
        why=_why(costs, leaves, regret),
        edges=used,
        regimes=tuple(
            Regime(
                when=leaf.box,
                plans=tuple(costs.plans[i] for i in leaf.ranking),
                line=0,
                cases=len(leaf.rows),
            )
            for leaf in leaves
        ),
        line=0,
        cases=len(costs),
    )


def _why(costs: Costs, leaves: Sequence[Leaf], regret: float | None) -> str:
    sources = len(set(costs.sources))
    chosen = np.concatenate([costs.regrets(leaf.ranking, leaf.rows) for leaf in leaves])
    text = (
        f"{len(costs.sources)} cases from {sources} source{'s' if sources > 1 else ''}; the first "
        f"plans take {float(np.exp(np.log(chosen).mean())):.3f} times as long as the best of each"
    )
    return text if regret is None else f"{text}, {math.exp(regret):.3f} on sources left out"


def _reasons(m: Measurements, keys: Sequence[Key], edges: str, prior: Document) -> str:
    """How the table came about, as the file says it."""
    learned = (
        f"Regimes are leaves of decision trees of at least {MIN_CASES} cases, cut where that saves "
        "regret, as far as it does on sources left out."
        if edges == "tree"
        else f"Regimes lie between preset edges and have at least {MIN_CASES} cases."
    )
    left = len(m.cases) - sum(key.cases or 0 for key in keys)
    lines = [
        *m.made,
        learned,
        "Plans are ranked by the geometric mean of their times; those that a GPU cannot plan by "
        "itself are ranked only where the host plans in any case.",
    ]
    if left:
        lines.append(
            f"{left} cases are of kinds with fewer than {LEAST_CASES}, and decide nothing."
        )
    bad = sorted({timing.plan.name for _, timing in m.wrong_outputs()})
    if bad:
        lines.append(f"Left out, since an output was wrong: {', '.join(bad)}.")
    lines.append("Requests that no key matches take the reasoned keys.")
    previous = prior.reasons
    if prior.provenance != "default":
        previous = previous.partition(_REASONED)[2]
    return "\n".join(lines) + f"\n{_REASONED}{previous.strip()}\n"
