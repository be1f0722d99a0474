"""The report of ``bench request`` as a table for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tessera_cupy.bench.families_table import (
    TITLES,
    left_out,
    reasons_by_family,
    short_plan,
    title,
)
from tessera_cupy.bench.request_times import AUTO, KERNEL, NAMED
from tessera_cupy.bench.sheet import NONE, Sheet

NAME = "request"
_LEFT = frozenset({"family", "mapping"})


def request_sheets(report: Mapping[str, Any]) -> list[Sheet]:
    """A row for each family.

    Args:
        report: see :mod:`tessera_cupy.bench.report`.
    """
    columns = ["family", "density", "mapping", "attention ms", "request ms", "+ms", "+%"]
    columns += ["auto ms", "+%"]
    for peer in report["peers"]:
        columns += [f"{TITLES[peer]} ms", "+ms", "+%"]
    rows = [list(_cells(row, report["peers"])) for row in report["rows"]]
    return [Sheet(NAME, title(report), columns, rows, list(_notes(report)), _LEFT)]


def _cells(row: Mapping[str, Any], peers: Sequence[str]) -> Iterator[str]:
    yield row["family"]
    yield f"{row['density']:.3f}"
    yield ", ".join(short_plan(plan) for plan in row["plans"])
    yield f"{row['ms'][KERNEL]:.3f}" if row["passed"] else "WRONG"
    for kind in (NAMED, AUTO, *peers):
        extra = row["preparation"].get(kind)
        yield f"{row['ms'][kind]:.3f}" if extra else NONE
        if kind != AUTO:
            yield f"{extra['ms']:.3f}" if extra else NONE
        yield f"{100 * extra['ratio']:.1f}" if extra else NONE


def _notes(report: Mapping[str, Any]) -> Iterator[str]:
    yield (
        "A request goes from a new mask of bools in GPU memory to O; + is what it takes beyond its "
        "attention alone. request: the plan is named; auto: the table chooses, and the host waits "
        "for the mask's numbers. Peers make their lists or plans in the request."
    )
    for row in report["rows"]:
        if not row["made_on_gpu"]:
            yield f"{row['family']}: the host makes this plan"
    yield widest(
        (row["family"], row["ms"][kind], row["spread_ms"][kind])
        for row in report["rows"]
        for kind in row["ms"]
    )
    yield from reasons_by_family(
        (TITLES[name], row["family"], reason)
        for row in report["rows"]
        for name, reason in row["reasons"].items()
    )
    yield from left_out(report)


def widest(times: Iterator[tuple[str, float, Sequence[float]]]) -> str:
    """The largest spread of a table's times, in a sentence.

    Args:
        times: of each, the row, the median and the 10th and 90th percentile.

    >>> widest(iter([("A", 2.0, [1.9, 2.1]), ("B", 4.0, [3.9, 4.8])]))
    'From the 10th to the 90th percentile times spread by at most 22.5% of their median (B).'
    """
    width, row = max(((high - low) / ms, row) for row, ms, (low, high) in times)
    return (
        "From the 10th to the 90th percentile times spread by at most "
        f"{100 * width:.1f}% of their median ({row})."
    )
