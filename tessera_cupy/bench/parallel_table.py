"""The report of ``bench parallel`` as a table for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tessera_cupy.bench.families_table import timed
from tessera_cupy.bench.sheet import NONE, Sheet

NAME = "parallel"
_COLUMNS = (
    "scheme",
    "heads by",
    "turns",
    "ms",
    "speed-up",
    "efficiency",
    "work",
    "time",
    "attention",
    "exchange",
    "copies",
    "MB",
    "predicted",
)
_LEFT = frozenset(_COLUMNS[:2])


def parallel_sheets(report: Mapping[str, Any]) -> list[Sheet]:
    """A row for one GPU, and one for each scheme and split of the heads.

    Args:
        report: see :mod:`tessera_cupy.bench.report`.
    """
    rows = [list(_cells(row)) for row in report["rows"]]
    return [Sheet(NAME, _title(report), _COLUMNS, rows, list(_notes(report)), _LEFT)]


def _title(report: Mapping[str, Any]) -> str:
    return (
        f"{report['ranks']} x {report['gpu']}, {report['date']}: {report['tokens']:,} tokens "
        f"({report['grid']}), {report['heads']} heads, head dim {report['head_dim']}, "
        f"{report['dtype']}, density {report['density']:.3f}. Mask: {report['masks']}. "
        f"{timed(report)}"
    )


def _cells(row: Mapping[str, Any]) -> Iterator[str]:
    yield row["scheme"]
    yield row.get("split") or NONE
    yield str(row["turns"]) if "turns" in row else NONE
    yield f"{row['ms']:.3f}"
    if "check" not in row:
        yield from [NONE] * 9
        return
    yield f"{row['speedup']:.2f}"
    yield f"{row['efficiency']:.3f}" if row["check"]["passed"] else "WRONG"
    yield f"{row['work']:.3f}"
    yield f"{row['balance']:.3f}"
    yield f"{row['attention_ms']['most']:.3f}"
    yield f"{row['exchange_ms']['least']:.3f}"
    yield f"{row['copies_ms']['most']:.3f}"
    yield f"{row['sent_bytes']['total'] / 1e6:.1f}"
    yield f"{row['predicted_ms']:.3f}"


def _notes(report: Mapping[str, Any]) -> Iterator[str]:
    yield (
        "Efficiency: the time on one, over that of all ranks times their number. Work and time: of "
        "the attention, the busiest rank's over the mean, pairs of tokens and milliseconds. "
        "Attention and copies: milliseconds of the rank that takes longest; exchange: of the one "
        "that waits least. MB: sent by all ranks in one call."
    )
    error = max(row["check"]["error"] for row in report["rows"][1:])
    allowed = report["rows"][1]["check"]["allowed"]
    yield (
        f"All outputs were compared with that of one: the largest difference is {error:.1e} of "
        f"the largest number, {allowed:.1e} allowed."
    )
    planner = report["planner"]
    yield (
        f"The planner takes {planner['takes']}; predicted from public figures of GPUs, "
        f"{planner['alone_ms']:.3f} ms on one."
    )
