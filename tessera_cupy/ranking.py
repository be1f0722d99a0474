"""What a profile table said of a request, and what came of it: as plain data and as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tessera_cupy.choice import PlanChoice
from tessera_cupy.kernels.arch import ARCHS, Arch
from tessera_cupy.kernels.catalog import fingerprint
from tessera_cupy.regimes import Choice
from tessera_cupy.regimes.schema import Document

_ORIGINS = {
    "default": "reasoned, not measured",
    "model": "from a cost model",
    "measured": "measured",
}


def archs_of(table: str) -> list[Arch]:
    """The architectures whose plans come from a table.

    >>> [arch.name for arch in archs_of("sm89")]
    ['sm_86', 'sm_89']
    """
    return [arch for arch in ARCHS.values() if arch.table == table]


def is_current(table: Document, archs: Sequence[Arch]) -> bool:
    """Whether a table was measured on the attention kernels that one of the architectures has now.

    A table of several architectures was measured on one of them, so one is enough. A table that
    names no catalog does not depend on any.
    """
    return table.catalog is None or table.catalog in {fingerprint(arch.name) for arch in archs}


def ranking_summary(choice: PlanChoice, arch: Arch) -> dict[str, Any]:
    """The table and the complete ranking that a plan came from, ready for JSON.

    ``table`` is None, and ``ranking`` empty, for a plan that the caller named. ``current`` is
    whether the table was measured on the kernels of this release.
    """
    answer, table = choice.answer, choice.table
    if answer is None or table is None:
        return {"table": None, "ranking": [], "position": None}
    return {
        "table": {
            "name": table.arch,
            "file": str(table.path),
            "provenance": table.provenance,
            "device": table.device,
            "catalog": table.catalog,
            "current": is_current(table, [arch]),
            "origin": answer.origin,
            "cases": answer.cases,
        },
        "ranking": [plan.name for plan in answer.ranking],
        "position": len(choice.passed_over) + 1,
    }


def table_line(choice: PlanChoice, arch: Arch) -> str | None:
    """The table in a line: where it comes from, which GPUs it is for, and what is behind it."""
    answer, table = choice.answer, choice.table
    if answer is None or table is None:
        return None
    parts = [_source(table), _served(table.arch)]
    parts += filter(None, [_standing(answer, table), _strangeness(table, arch)])
    return f"{table.path.name}: {'; '.join(parts)}"


def ranking_lines(choice: PlanChoice) -> list[str]:
    """The ranking, a line a plan: those passed over with the reason, this plan, those behind it."""
    answer = choice.answer
    if answer is None:
        return []
    passed = [f": passed over, since {reason}" for _, reason in choice.passed_over]
    notes = [*passed, ": this plan", *[""] * len(answer.ranking)]
    return [
        f"{place}. {plan.name}{note}"
        for place, (plan, note) in enumerate(zip(answer.ranking, notes, strict=False), 1)
    ]


def _source(table: Document) -> str:
    device = f" on {table.device}" if table.provenance == "measured" else f" of {table.device}"
    return _ORIGINS[table.provenance] + (device if table.device else "")


def _served(name: str) -> str:
    pairs = [pair for arch in archs_of(name) for pair in arch.capabilities]
    if not pairs:
        return "for no GPU by itself"
    found = ", ".join(f"{major}.{minor}" for major, minor in sorted(pairs))
    return f"for every GPU of compute capability {found}"


def _standing(answer: Choice, table: Document) -> str:
    """What is behind the ranking, where it is not what is behind the table."""
    if answer.origin == "reasoned":
        return "this key is reasoned"
    if answer.cases is not None:
        return f"{answer.cases} cases behind this ranking"
    if answer.origin == "base" and table.provenance != "default":
        return "nothing behind the base plans"
    return ""


def _strangeness(table: Document, arch: Arch) -> str:
    """What speaks against a table here."""
    if arch.table != table.arch and archs_of(table.arch):
        return f"made for other GPUs than those of {arch.name}"
    if is_current(table, [arch]):
        return ""
    if is_current(table, archs_of(table.arch)):
        return f"its kernels differ from those of {arch.name}"
    return f"the kernels have changed since (catalog {table.catalog}, now {fingerprint(arch.name)})"
