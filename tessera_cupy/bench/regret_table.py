"""The report of ``bench regret`` as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_WORST = 5


def regret_table(report: Mapping[str, Any]) -> RenderableType:
    """Regret by kind, the worst cases, and what mapping, organization and searching come to."""
    title = (
        f"{report['table']} ({report['table_provenance']}), {report['device']}, {report['date']}"
    )
    kinds = Table(title=title)
    kinds.add_column("kind")
    for name in ("cases", "mean", "P95", "P99", "within 3%"):
        kinds.add_column(name, justify="right")
    for name, r in (*report["kinds"].items(), ("all", report["all"])):
        kinds.add_row(
            name,
            str(r["cases"]),
            f"{r['mean']:.4f}",
            f"{r['p95']:.3f}",
            f"{r['p99']:.3f}",
            f"{100 * r['close']:.1f}%",
        )
    worst = Table(title="Largest regrets")
    for name in ("mask", "chosen", "best"):
        worst.add_column(name, overflow="fold")
    worst.add_column("ratio", justify="right")
    for one in report["worst"][:_WORST]:
        worst.add_row(one["case"], one["chosen"], one["best"], f"{one['ratio']:.3f}")
    return Group(kinds, worst, Text("\n".join(_lines(report))))


def _lines(report: Mapping[str, Any]) -> list[str]:
    lines = []
    ablation = report["ablation"]
    if ablation:
        lines.append(
            "Over retained blocks in the order of rows (geometric means): best mapping "
            f"{ablation['mapping']:.2f}, with organization {ablation['full']:.2f}, the table "
            f"{ablation['table']:.2f}."
        )
    if report["slower_than_dense"]:
        lines.append(
            f"Slower than dense attention by over 3%: {report['slower_than_dense']} cases."
        )
    search = report["search"]
    if search:
        lines.append(
            f"Trying every plan takes {search['cold']:.1f} times as long as a new mask's request, "
            f"{search['warm']:.1f} times as long as a known mask's, and over "
            f"{search['passes']} calls of one mask {search['amortized']:.1f} times."
        )
    return lines
