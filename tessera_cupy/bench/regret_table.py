"""The report of ``bench regret`` as tables for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tessera_cupy.bench.families_table import short_plan
from tessera_cupy.bench.sheet import Sheet

NAME = "regret"
_WORST = 5


def regret_sheets(report: Mapping[str, Any]) -> list[Sheet]:
    """A row for each kind of mask, one for each class of sizes, and one for all.

    Args:
        report: see :mod:`tessera_cupy.bench.report`.
    """
    how = "predicted by the cost model" if report["provenance"] == "model" else "measured"
    title = (
        f"{report['gpu']}, {report['date']}, {report['dtype']}, times {how}. Regret of the table "
        f"{report['table']} ({report['table_provenance']}): time of its plan by that of the best "
        f"plan, on masks of {report['clip']} that no profile has seen."
    )
    of_all = [{"kind": f"all, {name}", **row} for name, row in report["sizes"].items()]
    of_all.append({"kind": "all", **report["all"]})
    rows = [
        [
            row["kind"],
            str(row["cases"]),
            f"{row['mean']:.4f}",
            f"{row['p95']:.3f}",
            f"{row['p99']:.3f}",
            f"{100 * row['close']:.1f}%",
        ]
        for row in (*report["rows"], *of_all)
    ]
    columns = ["kind", "cases", "geometric mean", "P95", "P99", "within 3%"]
    return [Sheet(NAME, title, columns, rows, _notes(report), frozenset({"kind"}))]


def _notes(report: Mapping[str, Any]) -> list[str]:
    notes = []
    plain = report["plain"]
    if plain["mean"] != report["all"]["mean"]:
        notes.append(
            "The best plan is found in other turns than those that it is compared in. Compared "
            f"with the shortest time of all turns: {plain['mean']:.4f}, P99 {plain['p99']:.3f}, "
            f"{100 * plain['close']:.1f}% within 3%."
        )
    ablation = report["ablation"]
    if ablation:
        notes.append(
            "Over retained blocks in the order of rows, geometric means over block families "
            f"({ablation['cases']} masks) at their published density and up to "
            f"{ablation['tokens']:,} tokens: the best mapping {ablation['mapping']:.2f}, with "
            f"organization {ablation['full']:.2f}, the table's plans {ablation['table']:.2f}."
        )
    if report["slower_than_dense"]:
        notes.append(
            f"Slower than dense attention by over 3%: {report['slower_than_dense']} cases."
        )
    search = report["search"]
    if search:
        notes.append(
            f"To try every plan takes {search['cold']:.1f} times as long as a new mask's request "
            f"by the table, {search['warm']:.1f} times as long as a known mask's, and over "
            f"{search['passes']} calls of one mask {search['amortized']:.1f} times."
        )
    worst = [
        f"{one['case']} {one['ratio']:.3f} ({short_plan(one['chosen'])} in place of "
        f"{short_plan(one['best'])})"
        for one in report["worst"][:_WORST]
        if one["ratio"] > 1
    ]
    if worst:
        notes.append(f"Largest: {'; '.join(worst)}.")
    return notes
