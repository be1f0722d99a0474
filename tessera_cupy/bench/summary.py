"""The demo's last word: what was run and seen, in one table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from rich.table import Table
from rich.text import Text


def summary_table(report: dict[str, Any]) -> Table:
    """The report of :func:`~tessera_cupy.bench.demo.run_demo` as a table."""
    table = Table(title="Summary", title_style="bold", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in _rows(report):
        table.add_row(name, Text(value))
    check = report["check"]
    verdict = (
        f"{'passed' if check['passed'] else 'FAILED'}: error {check['error']:.1e} of "
        f"{check['allowed']:.1e} allowed, {check['rows']:,} rows against float64"
    )
    table.add_row("check", Text(verdict, style="bold green" if check["passed"] else "bold red"))
    return table


def _rows_of(mask: dict[str, Any]) -> str:
    """What a row of the mask keeps, in words."""
    if "group" in mask:
        fewest, most = mask["keys_of_a_group"]
        return f"{fewest:,} to {most:,} single keys of a group of {mask['group']} queries"
    fewest, most = mask["blocks_in_a_row"]
    return f"run coverage {mask['run_coverage']:.2f}, {fewest} to {most} blocks in a row"


def _rows(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    mask = report["mask"]
    grid = "x".join(map(str, report["grid"]))
    yield "device", report["device"]
    yield (
        "input",
        f"{report['clip']}.mp4 on {grid} = {report['tokens']:,} tokens, {report['heads']} heads "
        f"of {report['head_dim']}, {report['dtype']}",
    )
    yield "mask", mask["rule"]
    yield (
        "",
        f"density {mask['density']:.3f}, {_rows_of(mask)}",
    )
    if mask["published_density"]:
        least, most = mask["published_density"]
        span = f"{least:.3f}" if least == most else f"{least:.3f} to {most:.3f}"
        yield "published", f"density {span} on the model's own grid and data"
    if "tiles" in mask:
        tiles = Counter(mask["tiles"]).most_common()
        yield "3-D tiles", ", ".join(f"{shape} in {n} of the heads" for shape, n in tiles)
    yield "plan", report["plan"]["name"]
    if "speed" in report:
        speed = report["speed"]
        yield (
            "this plan",
            f"{speed['sparse_ms']:.2f} ms, {speed['sparse_tflops']:.0f} TFLOP/s of active entries",
        )
        yield (
            "dense",
            f"{speed['dense_ms']:.2f} ms, {speed['dense_tflops']:.0f} TFLOP/s ({speed['dense']})",
        )
        yield "speed-up", f"{speed['speedup']:.2f}x"
    for way in report["mappings"]:
        q, kv = way["tile"]
        work = f"useful fraction {way['useful_fraction']:.2f}, {way['steps']:,} steps"
        yield f"{way['mapping']} {q}x{kv}", work
    yield "time", f"{sum(report['seconds'].values()):.1f} s in all"
    yield "picture", report["png"]
