"""The report of ``bench families`` as a table for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tessera_cupy.bench.peers import PEERS

_TITLES = {peer.name: peer.title for peer in PEERS}
_NONE = "-"


def families_table(report: Mapping[str, Any]) -> RenderableType:
    """A row for each family, and below it what the rows cannot say.

    Args:
        report: of :func:`tessera_cupy.bench.family_rates.measure_all`, with ``date``,
            ``masks`` (where they are from) and ``grid`` (None without one) added.
    """
    clips = list(report["rows"][0]["by_clip"])
    table = Table(title=title(report))
    columns = ["family", "density", "runs", "mapping", "ms", "TFLOP/s", "/cuDNN"]
    columns += [" ".join(clip.split("_")[0] for clip in clips)] if len(clips) > 1 else []
    columns += [_TITLES[name] for name in report["peers"]]
    for name in columns:
        table.add_column(name, justify="left" if name in ("family", "mapping") else "right")
    for row in report["rows"]:
        table.add_row(*_cells(row, several=len(clips) > 1))
    return Group(table, *_notes(report))


def title(report: Mapping[str, Any]) -> str:
    """GPU, date, sizes and masks of a report on families."""
    grid = f" ({report['grid']})" if report["grid"] else ""
    return (
        f"{report['gpu']}, {report['date']}: {report['tokens']:,} tokens{grid}, "
        f"{report['heads']} heads, head dim {report['head_dim']}, {report['dtype']}. "
        f"Masks: {report['masks']}"
    )


def _cells(row: Mapping[str, Any], *, several: bool) -> Iterator[str]:
    yield row["family"]
    yield f"{row['density']:.3f}"
    yield f"{row['run_coverage']:.2f}"
    yield ", ".join(short_plan(plan) for plan in row["plans"])
    yield f"{row['ms']:.3f}"
    yield f"{row['tflops']:.0f}" if row["passed"] else "WRONG"
    yield _times(row["ratio"])
    if several:
        yield " ".join(_times(ratio) for ratio in row["by_clip"].values())
    for peer in row["peers"].values():
        yield f"{peer['tflops']:.0f}" if "tflops" in peer else _NONE


def short_plan(plan: str) -> str:
    """Kernel and mapping of a plan's name: the rest is in the report's ``plans``."""
    kernel, _, mapping, _ = plan.split("/")
    return f"{kernel.removeprefix('attend_')} {mapping}"


def _times(ratio: float | None) -> str:
    return _NONE if ratio is None else f"{ratio:.2f}"


def _notes(report: Mapping[str, Any]) -> Iterator[Text]:
    dense = " and ".join(peer.title for peer in PEERS if peer.backend)
    yield Text(
        f"TFLOP/s count active pairs; those of {dense} are dense attention's, timed in turns with "
        "each mask."
    )
    used = max(row["error_of_allowed"] for row in report["rows"])
    rows = report["cases"][0]["check"]["rows"]
    yield Text(
        f"Checked against float64 on {rows} rows of each mask: the largest error is {used:.2f} of "
        "what the rule of twice a plain computation's error allows."
    )
    for row in report["rows"]:
        for name, peer in row["peers"].items():
            if "reason" in peer:
                yield Text(f"{_TITLES[name]} on {row['family']}: {peer['reason']}")
