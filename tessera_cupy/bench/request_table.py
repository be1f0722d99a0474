"""The report of ``bench request`` as a table for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tessera_cupy.bench.families_table import short_plan, title
from tessera_cupy.bench.request_times import ALONE, AUTO, KERNEL

_NONE = "-"


def request_table(report: Mapping[str, Any]) -> RenderableType:
    """A row for each family, and below it what the rows cannot say.

    Args:
        report: of :func:`tessera_cupy.bench.request_times.measure_all`, with ``date``, ``masks``
            and ``grid`` added.
    """
    table = Table(title=title(report))
    columns = ["family", "density", "mapping", "attention ms"]
    columns += ["request ms", "+ms", "+%", "auto ms", "+%", "Flex ms", "+ms", "+%"]
    for name in columns:
        table.add_column(name, justify="left" if name in ("family", "mapping") else "right")
    for row in report["rows"]:
        table.add_row(*_cells(row))
    return Group(table, *_notes(report))


def _cells(row: Mapping[str, Any]) -> Iterator[str]:
    yield row["family"]
    yield f"{row['density']:.3f}"
    yield ", ".join(short_plan(plan) for plan in row["plans"])
    yield f"{row['ms'][KERNEL]:.3f}" if row["passed"] else "WRONG"
    for kind in ALONE:
        extra = row["preparation"].get(kind)
        yield f"{row['ms'][kind]:.3f}" if extra else _NONE
        if kind != AUTO:
            yield f"{extra['ms']:.3f}" if extra else _NONE
        yield f"{100 * extra['ratio']:.1f}" if extra else _NONE


def _notes(report: Mapping[str, Any]) -> Iterator[Text]:
    yield Text(
        "A request goes from a new mask of bools in GPU memory to O; + is what it takes beyond its "
        "attention alone. request: the plan is named; auto: the table chooses, and the host waits "
        "for the mask's numbers. Flex makes its lists in the request."
    )
    for row in report["rows"]:
        if not row["made_on_gpu"]:
            yield Text(f"{row['family']}: the host makes this plan")
        if row["flex_reason"]:
            yield Text(f"FlexAttention on {row['family']}: {row['flex_reason']}")
