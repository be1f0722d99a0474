"""The report of ``bench slices`` as two tables for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tessera_cupy.bench.families_table import short_plan
from tessera_cupy.bench.slices_cases import RATIO_TO
from tessera_cupy.sparsifiers import fg_attn

_NONE = "-"
_LEFT = ("mask", "order", "mapping")


def slices_table(report: Mapping[str, Any]) -> RenderableType:
    """Random masks, then masks of equal attention mass, and below what the rows cannot say.

    Args:
        report: of :func:`tessera_cupy.bench.slices_run.run_slices`, with ``date`` added.
    """
    parts: list[RenderableType] = [_random(report)]
    if "mass" in report["clip"]:
        parts.append(_clip(report))
    return Group(*parts, *_notes(report))


def _random(report: Mapping[str, Any]) -> Table:
    part = report["random"]
    table = _table(
        f"{report['gpu']}, {report['date']}: {_sizes(part)}, {report['dtype']}. Masks: random, "
        "one for all heads",
        ["mask", "density", "mapping", "ms", "TFLOP/s", f"/ {RATIO_TO}", "/ cuDNN"],
    )
    for case in _measured(part):
        table.add_row(
            case["rule"],
            f"{case['density']:.3f}",
            *_speed(case),
            _ratio(case["of_blocks"]),
            _ratio(case["of_dense"]),
        )
    return table


def _clip(report: Mapping[str, Any]) -> Table:
    part = report["clip"]
    table = _table(
        f"{report['gpu']}, {report['date']}: {_sizes(part)} ({part['grid']}), {report['dtype']}. "
        f"Masks: regenerated from {part['name']}.mp4, of equal attention mass",
        [
            "mask",
            "order",
            "columns",
            "density",
            "mass",
            "mapping",
            "ms",
            "TFLOP/s",
            "time / blocks",
        ],
    )
    for case in _measured(part):
        table.add_row(
            case["rule"].removesuffix(f", {case['order']}"),
            case["order"],
            f"{case['count']:,}",
            f"{case['density']:.3f}",
            f"{case['mass']:.3f}",
            *_speed(case),
            _ratio(case["of_fastest_blocks"]),
        )
    return table


def _table(title: str, columns: list[str]) -> Table:
    table = Table(title=title)
    for name in columns:
        table.add_column(name, justify="left" if name in _LEFT else "right")
    return table


def _sizes(part: Mapping[str, Any]) -> str:
    return f"{part['tokens']:,} tokens, {part['heads']} heads, head dim {part['head_dim']}"


def _measured(part: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [case for case in part["cases"] if "reason" not in case]


def _speed(case: Mapping[str, Any]) -> tuple[str, str, str]:
    """Cells of the mapping, the milliseconds and the rate."""
    rate = f"{case['tflops']:.0f}" if case["check"]["passed"] else "WRONG"
    return short_plan(case["plan"]), f"{case['ms']:.3f}", rate


def _ratio(ratio: float | None) -> str:
    return _NONE if ratio is None else f"{ratio:.2f}"


def _notes(report: Mapping[str, Any]) -> Iterator[Text]:
    drawn, clip = report["random"], report["clip"]
    yield Text("TFLOP/s count active pairs. Masks of a table are timed in turns.")
    for part in (drawn, clip):
        if part["dense"]:
            yield Text(
                f"cuDNN's dense attention, {_sizes(part)}: {part['dense']['ms']:.3f} ms, "
                f"{part['dense']['tflops']:.0f} TFLOP/s"
            )
    measured = _measured(clip)
    if measured:
        yield Text(
            "mass: of a query's dense softmax what is kept, a mean over "
            f"{measured[0]['sampled']} queries a head in float64. It is what FG-Attn's "
            f"{fg_attn.BUDGET:.0%} of the keys by extremes keep in groups of 64 in raster order, "
            f"{clip['mass']:.3f}; each mask has the fewest columns, as many in all rows, that "
            "reach it. Tiles: of each head, SPADE's. "
            "time / blocks: by that of the fastest blocks. Choosing is not timed."
        )
        yield Text(
            f"The clip's masks are on {clip['tokens']:,} tokens and {clip['heads']} heads, since "
            "the host makes them."
        )
    checks = [case["check"] for part in (drawn, clip) for case in _measured(part)]
    if checks:
        used = max(check["error"] / check["allowed"] for check in checks)
        yield Text(
            f"Checked against float64 on sampled rows of each mask, {checks[0]['rows']} of the "
            f"first: the largest error is {used:.2f} of what the rule of twice a plain "
            "computation's error allows."
        )
    for part in (drawn, clip):
        for case in part["cases"]:
            if "reason" in case:
                yield Text(f"{case['rule']} was not measured: {case['reason']}")
