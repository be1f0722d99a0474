"""The report of ``bench families`` as a table for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tessera_cupy.bench.peers import PEERS
from tessera_cupy.bench.sheet import NONE, Sheet

TITLES = {peer.name: peer.title for peer in PEERS}

NAME = "families"
_LEFT = frozenset({"family", "mapping"})


def families_sheets(report: Mapping[str, Any]) -> list[Sheet]:
    """A row for each family.

    Args:
        report: see :mod:`tessera_cupy.bench.report`.
    """
    clips = list(report["rows"][0]["by_clip"])
    beside = report["beside"]
    columns = ["family", "density", "runs", "mapping", "ms", "10-90%", "TFLOP/s", "/cuDNN"]
    columns += [" ".join(clip.split("_")[0] for clip in clips)] if len(clips) > 1 else []
    columns += [f"{q_side(beside)} (/cuDNN)"] if beside else []
    columns += [TITLES[name] for name in report["peers"]]
    rows = [list(_cells(row, report, len(clips) > 1)) for row in report["rows"]]
    return [Sheet(NAME, title(report), columns, rows, list(_notes(report)), _LEFT)]


def title(report: Mapping[str, Any]) -> str:
    """GPU, date, sizes, masks and timing of a report on families."""
    grid = f" ({report['grid']})" if report["grid"] else ""
    return (
        f"{report['gpu']}, {report['date']}: {report['tokens']:,} tokens{grid}, "
        f"{report['heads']} heads, head dim {report['head_dim']}, {report['dtype']}. "
        f"Masks: {report['masks']}. {timed(report)}"
    )


def timed(report: Mapping[str, Any]) -> str:
    """How a report's times were taken, as a sentence."""
    return f"Medians, {report['l2']} L2."


def _cells(row: Mapping[str, Any], report: Mapping[str, Any], several: bool) -> Iterator[str]:
    yield row["family"]
    yield f"{row['density']:.3f}"
    yield f"{row['run_coverage']:.2f}"
    yield ", ".join(short_plan(plan) for plan in row["plans"])
    yield f"{row['ms']:.3f}"
    yield spread(row["spread_ms"])
    yield f"{row['tflops']:.0f}" if row["passed"] else "WRONG"
    yield _times(row["ratio"])
    if several:
        yield " ".join(_times(ratio) for ratio in row["by_clip"].values())
    if report["beside"]:
        yield _second(row["beside"])
    for name in report["peers"]:
        peer = row["peers"][name]
        yield f"{peer['tflops']:.0f}" if "tflops" in peer else NONE


def spread(ends: Iterable[float]) -> str:
    """The 10th and the 90th percentile of a time, in milliseconds.

    >>> spread([2.5, 2.5625])
    '2.500-2.562'
    """
    return "-".join(f"{end:.3f}" for end in ends)


def short_plan(plan: str) -> str:
    """Kernel and mapping of a plan's name: the rest is in the report's ``plans``."""
    kernel, _, mapping, _ = plan.split("/")
    return f"{kernel.removeprefix('attend_')} {mapping}"


def q_side(plan: str) -> str:
    """How a plan maps query rows, which is what it is called by in a column's title."""
    return plan.split("/")[2].partition("-")[0]


def _second(result: Mapping[str, Any]) -> str:
    if "tflops" not in result:
        return NONE
    rate = f"{result['tflops']:.0f}"
    return rate if result["ratio"] is None else f"{rate} ({result['ratio']:.2f})"


def _times(ratio: float | None) -> str:
    return NONE if ratio is None else f"{ratio:.2f}"


def _notes(report: Mapping[str, Any]) -> Iterator[str]:
    taking = [peer for peer in PEERS if peer.name in report["peers"]]
    dense = " and ".join(peer.title for peer in taking if peer.dense)
    yield (
        f"TFLOP/s count active pairs; those of {dense} are dense attention's, timed in turns with "
        "each mask."
        if dense
        else "TFLOP/s count active pairs."
    )
    if report["beside"]:
        yield f"{q_side(report['beside'])}: TFLOP/s of {report['beside']}."
    used = max(row["error_of_allowed"] for row in report["rows"])
    rows = report["cases"][0]["check"]["rows"]
    yield (
        f"Checked against float64 on {rows} rows of each mask: the largest error is {used:.2f} of "
        "what the rule of twice a plain computation's error allows."
    )
    yield from reasons_by_family(
        (title, row["family"], result["reason"])
        for row in report["rows"]
        for title, result in _results(row)
        if "reason" in result
    )
    yield from left_out(report)


def _results(row: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if row["beside"]:
        yield "The plan beside", row["beside"]
    for name, peer in row["peers"].items():
        yield TITLES[name], peer


def reasons_by_family(found: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    """Why contestants have no figure: one sentence for the families with the same reason.

    Args:
        found: contestant, family and reason of each missing figure.

    >>> list(reasons_by_family([("VSA", "Q32K32", "no"), ("VSA", "Q16K16", "no")]))
    ['VSA on Q32K32, Q16K16: no']
    """
    families: dict[tuple[str, str], list[str]] = {}
    for who, family, reason in found:
        families.setdefault((who, reason), []).append(family)
    for (who, reason), names in families.items():
        yield f"{who} on {', '.join(names)}: {reason}"


def left_out(report: Mapping[str, Any]) -> Iterator[str]:
    """Which peers did not take part at all, by reason."""
    peers: dict[str, list[str]] = {}
    for name, reason in report["left_out"].items():
        peers.setdefault(reason, []).append(TITLES[name])
    for reason, titles in peers.items():
        yield f"Not measured: {', '.join(titles)}: {reason}"
