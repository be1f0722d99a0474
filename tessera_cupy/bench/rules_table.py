"""The report of ``bench rules`` as a table for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tessera_cupy.bench.families_table import short_plan
from tessera_cupy.bench.rules_times import ANEW, ATTENTION, COMPLETE, DENSE, ORDERS, SELECT

_NONE = "-"
_LEFT = ("rule", "grid", "mapping")


def rules_table(report: Mapping[str, Any]) -> RenderableType:
    """A row for each rule, and below it what the rows cannot say.

    Args:
        report: of :func:`tessera_cupy.bench.rules_run.run_rules`, with ``date`` added.
    """
    table = Table(
        title=f"{report['gpu']}, {report['date']}: {report['heads']} heads, {report['dtype']}. "
        f"Masks: {report['masks']}"
    )
    columns = ["rule", "grid", "tokens", "density", "(published)", "mapping", "select ms"]
    columns += ["orders ms", "attention ms", "TFLOP/s", "complete ms", "cuDNN ms", "speed-up"]
    for name in columns:
        table.add_column(name, justify="left" if name in _LEFT else "right")
    for case in report["cases"]:
        if "reason" not in case:
            table.add_row(*_cells(case))
    return Group(table, *_notes(report))


def _cells(case: Mapping[str, Any]) -> Iterator[str]:
    ms = case["ms"]
    yield case["rule"]
    yield case["grid"]
    yield f"{case['tokens']:,}"
    yield f"{case['density']:.3f}"
    yield span(case["published_density"])
    yield short_plan(case["plan"]) if "/" in case["plan"] else case["plan"]
    yield f"once {case['once_ms']:.1f}" if case["once_ms"] is not None else _ms(ms, SELECT)
    yield _ms(ms, ORDERS)
    yield _ms(ms, ATTENTION)
    yield f"{case['tflops']:.0f}"
    yield _ms(ms, COMPLETE) if case["check"]["passed"] else "WRONG"
    yield _ms(ms, DENSE)
    yield _NONE if case["speedup"] is None else f"{case['speedup']:.2f}"


def span(density: list[float] | None) -> str:
    """A published density, or the least and the largest one.

    >>> span([0.25, 0.3]), span([0.1, 0.1]), span(None)
    ('0.250-0.300', '0.100', '-')
    """
    if density is None:
        return _NONE
    return "-".join(f"{end:.3f}" for end in dict.fromkeys(density))


def _ms(ms: Mapping[str, float], name: str) -> str:
    return f"{ms[name]:.3f}" if name in ms else _NONE


def _notes(report: Mapping[str, Any]) -> Iterator[Text]:
    measured = [case for case in report["cases"] if "reason" not in case]
    yield Text(
        "complete: choose, q, k and v into the heads' orders, attend, O back, in one call. cuDNN: "
        "torch's dense attention at the same size, timed in turns with each rule. TFLOP/s count "
        "active pairs of the attention alone. select is the GPU's time, as a graph. Published "
        "densities are those of models' q and k."
    )
    if any(case["once_ms"] is not None for case in measured):
        yield Text(
            "once: the mask depends on the grid alone; it is chosen and planned once, and calls "
            "take the plan again."
        )
    for case in measured:
        if ORDERS not in case["ms"]:
            yield Text(f"{case['rule']}: moves of tokens are in its attention")
        if ANEW in case["ms"]:
            yield Text(
                f"{case['rule']}: select begins from the step before; from nothing it takes "
                f"{case['ms'][ANEW]:.3f} ms"
            )
        if not case["made_on_gpu"]:
            yield Text(f"{case['rule']}: the host makes this plan")
    if measured:
        used = max(case["check"]["error"] / case["check"]["allowed"] for case in measured)
        rows = measured[0]["check"]["rows"]
        yield Text(
            f"Checked against float64 on {rows} rows of each call: the largest error is {used:.2f} "
            "of what the rule of twice a plain computation's error allows."
        )
    for case in report["cases"]:
        if "reason" in case:
            yield Text(f"{case['rule']} was not measured: {case['reason']}")
