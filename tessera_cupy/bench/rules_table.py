"""The report of ``bench rules`` as a table for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tessera_cupy.bench.families_table import short_plan, timed
from tessera_cupy.bench.request_table import widest
from tessera_cupy.bench.rules_times import ANEW, ATTENTION, COMPLETE, DENSE, ORDERS, SELECT
from tessera_cupy.bench.sheet import NONE, Sheet

NAME = "rules"
_LEFT = frozenset({"rule", "grid", "mapping"})


def rules_sheets(report: Mapping[str, Any]) -> list[Sheet]:
    """A row for each rule.

    Args:
        report: see :mod:`tessera_cupy.bench.report`.
    """
    title = (
        f"{report['gpu']}, {report['date']}: {report['heads']} heads, {report['dtype']}. "
        f"Masks: {report['masks']}. {timed(report)}"
    )
    columns = ["rule", "grid", "tokens", "density", "(published)", "mapping", "select ms"]
    columns += ["orders ms", "attention ms", "TFLOP/s", "complete ms", "cuDNN ms", "speed-up"]
    rows = [list(_cells(case)) for case in report["rows"] if "reason" not in case]
    return [Sheet(NAME, title, columns, rows, list(_notes(report)), _LEFT)]


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
    yield NONE if case["speedup"] is None else f"{case['speedup']:.2f}"


def span(density: list[float] | None) -> str:
    """A published density, or the least and the largest one.

    >>> span([0.25, 0.3]), span([0.1, 0.1]), span(None)
    ('0.250-0.300', '0.100', '-')
    """
    if density is None:
        return NONE
    return "-".join(f"{end:.3f}" for end in dict.fromkeys(density))


def _ms(ms: Mapping[str, float], name: str) -> str:
    return f"{ms[name]:.3f}" if name in ms else NONE


def _notes(report: Mapping[str, Any]) -> Iterator[str]:
    measured = [case for case in report["rows"] if "reason" not in case]
    yield (
        "complete: choose, q, k and v into the heads' orders, attend, O back, in one call. cuDNN: "
        "torch's dense attention at the same size, timed in turns with each rule. TFLOP/s count "
        "active pairs of the attention alone. select is the GPU's time, as a graph. Published "
        "densities are those of models' q and k."
    )
    if any(case["once_ms"] is not None for case in measured):
        yield (
            "once: the mask depends on the grid alone; it is chosen and planned once, and calls "
            "take the plan again."
        )
    for case in measured:
        if ORDERS not in case["ms"]:
            yield (f"{case['rule']}: moves of tokens are in its attention")
        if ANEW in case["ms"]:
            yield (
                f"{case['rule']}: select begins from the step before; from nothing it takes "
                f"{case['ms'][ANEW]:.3f} ms"
            )
        if case["dense_reason"]:
            yield f"cuDNN beside {case['rule']}: {case['dense_reason']}"
        if not case["made_on_gpu"]:
            yield (f"{case['rule']}: the host makes this plan")
    if measured:
        yield widest(
            (case["rule"], ms, case["spread_ms"][name])
            for case in measured
            for name, ms in case["ms"].items()
        )
        used = max(case["check"]["error"] / case["check"]["allowed"] for case in measured)
        rows = measured[0]["check"]["rows"]
        yield (
            f"Checked against float64 on {rows} rows of each call: the largest error is {used:.2f} "
            "of what the rule of twice a plain computation's error allows."
        )
    for case in report["rows"]:
        if "reason" in case:
            yield (f"{case['rule']} was not measured: {case['reason']}")
