"""The report of ``bench attention`` as a table for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tessera_cupy.bench.families_table import short_plan, spread, timed
from tessera_cupy.bench.sheet import Sheet

NAME = "attention"
_LEFT = frozenset({"blocks", "mapping"})


def attention_sheets(report: Mapping[str, Any]) -> list[Sheet]:
    """A row for each mask, with ratios to torch's dense backends.

    Args:
        report: see :mod:`tessera_cupy.bench.report`.
    """
    dense = {name: one for name, one in report["dense"].items() if "tflops" in one}
    rates = [f"{name} {one['tflops']:.0f}" for name, one in dense.items()]
    title = (
        f"{report['gpu']}, {report['date']}: {report['tokens']:,} tokens, {report['heads']} heads, "
        f"head dim {report['head_dim']}, {report['dtype']}. Masks: random, with the same number of "
        f"blocks in every row. Dense TFLOP/s: {', '.join(rates) or 'none'}. {timed(report)}"
    )
    columns = ["blocks", "density", "mapping", "ms", "10-90%", "TFLOP/s"]
    columns += [f"/{name}" for name in dense]
    rows = [
        [
            f"{row['block']}x{row['block']}",
            f"{row['density']:.2f}",
            short_plan(row["plan"]),
            f"{row['ms']:.3f}",
            spread(row["spread_ms"]),
            f"{row['tflops']:.0f}",
            *[f"{ratio:.2f}" for ratio in row["ratios"].values()],
        ]
        for row in report["rows"]
    ]
    notes = ["TFLOP/s count active pairs."]
    for name, one in report["dense"].items():
        if "reason" in one:
            notes.append(f"{name} was not measured: {one['reason']}")
    return [Sheet(NAME, title, columns, rows, notes, _LEFT)]
