"""A profile table as a map: which plan each bucket of requests takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera_cupy.errors import wrong
from tessera_cupy.regimes import PlanSpec
from tessera_cupy.regimes.naming import key_name
from tessera_cupy.regimes.schema import AXES, Interval, Key
from tessera_cupy.regimes.table import Table
from tessera_cupy.viz import arguments, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NAMES = {
    "heads": "heads (batch x query heads)",
    "tokens": "keys (tokens)",
    "density": "density (kept fraction)",
    "run_coverage": "run coverage (fraction)",
    "rows": "rows (heads x tokens)",
    "kept_keys": "kept keys of a row (mean)",
}


def draw_table(
    ax: Axes,
    table: Table,
    *,
    key: int | str,
    x: str = "density",
    y: str = "tokens",
    at: Mapping[str, float] | None = None,
) -> None:
    """Draw the buckets of one key of a profile table, with the plan that each ranks first.

    Every bucket is drawn equally large, whatever its range; the numbers at the lines are the edges.
    Colour and hatching are the plan, which the legend names in full; thick lines are between
    buckets of different rankings. A bucket without a regime takes the table's base plans.

    Args:
        ax: where to draw.
        table: the table, of :func:`tessera_cupy.regimes.load_table` or ``load_for``.
        key: the key's number in the file, from 0, those of ``reasoned`` after those of ``keys``; or
            its name, such as ``q64k64 d<=128``, the first of that name.
        x: the axis across, one of "heads", "tokens", "density", "run_coverage", "rows" and
            "kept_keys".
        y: the axis up, another of them.
        at: a value of each other axis that the key has edges of.

    Raises:
        TypeError: an argument of another kind, ``ax`` that is no axes among them.
        ValueError: no such key or axis, or an axis without a value in ``at``.

    >>> from matplotlib.figure import Figure
    >>> from tessera_cupy.regimes import load_for
    >>> ax = Figure().subplots()
    >>> draw_table(ax, load_for("sm90"), key=0)
    >>> print(ax.get_title())
    sm90, q<=16 k<=16 uniform no-bits d<=64: first choice of each bucket (measured)
    """
    arguments.check_axes(ax)
    fix = 'pass tessera_cupy.regimes.load_for("sm90"), or load_table(path)'
    arguments.check_kind("table", table, (Table,), fix)
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch, Rectangle

    for name, axis in (("x", x), ("y", y)):
        if axis not in AXES:
            fix = "use one of these names"
            raise ValueError(wrong(name, "one of " + ", ".join(AXES), repr(axis), fix))
    if x == y:
        raise ValueError(wrong("y", f"another axis than x, which is {x}", repr(y), "swap one"))
    chosen = _find(table, key)
    rest = _rest(chosen, (x, y), at or {})
    edges = {axis: _intervals(chosen.edges[AXES.index(axis)]) for axis in (x, y)}
    rankings = [
        [_ranking(table, chosen, rest | {x: across, y: up}) for across in edges[x]]
        for up in edges[y]
    ]
    firsts = list(dict.fromkeys(ranking[0] for row in rankings for ranking in row))
    looks = {plan: style.KINDS[i % len(style.KINDS)] for i, plan in enumerate(firsts)}
    for up, row in enumerate(rankings):
        for across, ranking in enumerate(row):
            colour, hatch = looks[ranking[0]]
            box = Rectangle((across, up), 1, 1, facecolor=colour, hatch=hatch, edgecolor="#777777")
            box.set_linewidth(0.0)
            ax.add_patch(box)
            ax.text(
                across + 0.5,
                up + 0.5,
                _short(ranking[0]),
                ha="center",
                va="center",
                fontsize=8,
                bbox={"facecolor": style.PAPER, "alpha": 0.85, "linewidth": 0, "pad": 1.5},
            )
    _lines(ax, rankings)
    ax.set_xlim(0, len(edges[x]))
    ax.set_ylim(0, len(edges[y]))
    for drawn, name in ((ax.xaxis, x), (ax.yaxis, y)):
        values = [f"{interval.low:,g}" for interval in edges[name][1:]]
        drawn.set_ticks(range(1, len(values) + 1), values)
        drawn.set_label_text(_NAMES[name] + ("" if values else ": no edges"))
    fixed = ", ".join(f"{axis} {value:g}" for axis, value in (at or {}).items())
    ax.set_title(
        f"{table.document.arch}, {key_name(chosen.match)}{fixed and f', {fixed}'}: "
        f"first choice of each bucket ({table.document.provenance})",
        fontsize=10,
    )
    handles: list[Any] = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="#777777", label=plan.name)
        for plan, (colour, hatch) in looks.items()
    ]
    if len({ranking for row in rankings for ranking in row}) > 1:
        label = "rankings differ, in their first plan or a later one"
        handles.append(Line2D([], [], color=style.INK, linewidth=2.0, label=label))
    style.legend_below(ax, handles, columns=1)


def _find(table: Table, key: int | str) -> Key:
    keys = table.document.all_keys
    names = [key_name(known.match) for known in keys]
    if isinstance(key, str) and key in names:
        return keys[names.index(key)]
    if isinstance(key, int) and not isinstance(key, bool) and 0 <= key < len(keys):
        return keys[key]
    expected = f"a number from 0 to {len(keys) - 1}, or one of: {'; '.join(names)}"
    raise ValueError(wrong("key", expected, repr(key), "pick a key of the table"))


def _rest(key: Key, drawn: tuple[str, str], at: Mapping[str, float]) -> dict[str, Interval]:
    """The buckets of the axes that are not drawn."""
    for axis in at:
        if axis not in AXES or axis in drawn:
            others = ", ".join(axis for axis in AXES if axis not in drawn)
            raise ValueError(wrong("at", f"values of {others}", repr(axis), "leave it out"))
    found = {}
    for axis, edges in zip(AXES, key.edges, strict=True):
        if axis in drawn:
            continue
        if edges and axis not in at:
            listed = ", ".join(f"{edge:,g}" for edge in edges)
            expected = f"a value of {axis}, of which the key has edges ({listed})"
            raise ValueError(wrong("at", expected, "none", f'pass at={{"{axis}": ...}}'))
        value = at.get(axis, 0.0)
        if not isinstance(value, (int, float)) or math.isnan(value):
            raise ValueError(wrong("at", f"a number for {axis}", repr(value), "pass one"))
        inside = [each for each in _intervals(edges) if each.low <= value < each.high]
        found[axis] = inside[0]
    return found


def _intervals(edges: tuple[float, ...]) -> list[Interval]:
    bounds = [-np.inf, *edges, np.inf]
    return [Interval(low, high) for low, high in pairwise(bounds)]


def _ranking(table: Table, key: Key, bucket: Mapping[str, Interval]) -> tuple[PlanSpec, ...]:
    """The plans of a bucket; the base plans where no regime has it."""
    for regime in key.regimes:
        if all(
            when.low <= bucket[axis].low and bucket[axis].high <= when.high
            for axis, when in zip(AXES, regime.when, strict=True)
        ):
            return regime.plans
    return table.document.base


def _short(plan: PlanSpec) -> str:
    return f"{plan.mapping.name}\n{plan.tile_q} x {plan.tile_kv}"


def _lines(ax: Axes, rankings: list[list[tuple[PlanSpec, ...]]]) -> None:
    """Thin lines between buckets, thick ones where their rankings differ."""
    for up, row in enumerate(rankings):
        for across, ranking in enumerate(row):
            if across:
                wide = 2.0 if row[across - 1] != ranking else 0.6
                ax.plot([across, across], [up, up + 1], color=style.INK, linewidth=wide)
            if up:
                wide = 2.0 if rankings[up - 1][across] != ranking else 0.6
                ax.plot([across, across + 1], [up, up], color=style.INK, linewidth=wide)
