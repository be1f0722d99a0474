"""The report of ``bench slices`` as two tables for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from tessera_cupy.bench.families_table import short_plan, spread, timed
from tessera_cupy.bench.sheet import NONE, Sheet
from tessera_cupy.bench.slices_cases import RATIO_TO
from tessera_cupy.sparsifiers import fg_attn

RANDOM, CLIP = "slices-random", "slices-clip"
_LEFT = frozenset({"mask", "order", "mapping"})


def slices_sheets(report: Mapping[str, Any]) -> list[Sheet]:
    """Random masks, then masks of equal attention mass.

    Args:
        report: see :mod:`tessera_cupy.bench.report`.
    """
    drawn = [row for row in report["rows"] if row["clip"] == "random"]
    of_clip = [row for row in report["rows"] if row["clip"] != "random"]
    if "mass" in report["clip"]:
        return [_random(report, drawn), _clip(report, of_clip)]
    first = _random(report, drawn)
    return [replace(first, notes=[*first.notes, *_not_measured(of_clip)])]


def _random(report: Mapping[str, Any], rows: list[dict[str, Any]]) -> Sheet:
    part = report["random"]
    cells = [
        [
            row["rule"],
            f"{row['density']:.3f}",
            *_speed(row),
            _ratio(row["of_blocks"]),
            _ratio(row["of_dense"]),
        ]
        for row in _measured(rows)
    ]
    title = (
        f"{report['gpu']}, {report['date']}: {_sizes(part)}, {report['dtype']}. Masks: random, "
        f"one for all heads. {timed(report)}"
    )
    columns = ["mask", "density", "mapping", "ms", "10-90%", "TFLOP/s", f"/ {RATIO_TO}", "/ cuDNN"]
    return Sheet(RANDOM, title, columns, cells, list(_notes(part, rows)), _LEFT)


def _clip(report: Mapping[str, Any], rows: list[dict[str, Any]]) -> Sheet:
    part = report["clip"]
    cells = [
        [
            row["rule"].removesuffix(f", {row['order']}"),
            row["order"],
            f"{row['count']:,}",
            f"{row['density']:.3f}",
            f"{row['mass']:.3f}",
            *_speed(row),
            _ratio(row["of_fastest_blocks"]),
        ]
        for row in _measured(rows)
    ]
    title = (
        f"{report['gpu']}, {report['date']}: {_sizes(part)} ({part['grid']}), {report['dtype']}. "
        f"Masks: regenerated from {part['name']}.mp4, its q times {part['sharpen']:g}, of equal "
        f"attention mass. {timed(report)}"
    )
    columns = ["mask", "order", "columns", "density", "mass", "mapping", "ms", "10-90%", "TFLOP/s"]
    notes = [*_about_mass(part, rows), *_notes(part, rows)]
    return Sheet(CLIP, title, [*columns, "time / blocks"], cells, notes, _LEFT)


def _sizes(part: Mapping[str, Any]) -> str:
    return f"{part['tokens']:,} tokens, {part['heads']} heads, head dim {part['head_dim']}"


def _measured(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if "reason" not in row]


def _speed(row: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Cells of the mapping, the milliseconds, their spread and the rate."""
    rate = f"{row['tflops']:.0f}" if row["check"]["passed"] else "WRONG"
    return short_plan(row["plan"]), f"{row['ms']:.3f}", spread(row["spread_ms"]), rate


def _ratio(ratio: float | None) -> str:
    return NONE if ratio is None else f"{ratio:.2f}"


def _about_mass(part: Mapping[str, Any], rows: list[dict[str, Any]]) -> Iterator[str]:
    for first in _measured(rows)[:1]:
        yield (
            "mass: of a query's dense softmax what is kept, a mean over "
            f"{first['sampled']} queries a head in float64. It is what FG-Attn's "
            f"{fg_attn.BUDGET:.0%} of the keys by extremes keep in groups of 64 in raster order, "
            f"{part['mass']:.3f}; each mask has the fewest columns, as many in all rows, that "
            "reach it. Tiles: of each head, SPADE's. "
            "time / blocks: by that of the fastest blocks. Choosing is not timed."
        )
        yield (
            f"The clip's masks are on {part['tokens']:,} tokens and {part['heads']} heads, since "
            "the host makes them."
        )


def _notes(part: Mapping[str, Any], rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "TFLOP/s count active pairs. Masks of a table are timed in turns."
    dense = part["dense"] or {}
    if "reason" in dense:
        yield f"cuDNN's dense attention was not measured: {dense['reason']}"
    elif dense:
        yield (
            f"cuDNN's dense attention, {_sizes(part)}: {dense['ms']:.3f} ms, "
            f"{dense['tflops']:.0f} TFLOP/s."
        )
    checks = [row["check"] for row in _measured(rows)]
    if checks:
        used = max(check["error"] / check["allowed"] for check in checks)
        yield (
            f"Checked against float64 on sampled rows of each mask, {checks[0]['rows']} of the "
            f"first: the largest error is {used:.2f} of what the rule of twice a plain "
            "computation's error allows."
        )
    yield from _not_measured(rows)


def _not_measured(rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        if "reason" in row:
            yield f"{row['rule']} was not measured: {row['reason']}"
