"""Reports of measurements: one schema for every ``bench`` command, and the tables made of them.

A report is one JSON object, which ``--json`` prints and ``tessera-cupy bench report`` reads. All
have:

==============  =================================================================================
``schema``      1; it rises when a key changes its meaning or goes
``bench``       the command's name: ``attention``, ``families``, ``request``, ``rules``, ``slices``,
                ``regret``, ``parallel``
``date``        the day that it ended, UTC, as ``2026-12-01``
``command``     the command line
``gpu``         the GPU's name
``driver``      ``version`` (null where the system does not tell) and ``cuda``, the newest CUDA
                version that it serves
``versions``    by package, of what the figures depend on
``l2``          ``warm``, or ``cold``: what each call finds in the L2
``dtype``       of q, k and v
``rows``        one for each line of the tables, in their order
==============  =================================================================================

A row that was measured has ``ms``, the median of its samples in milliseconds, and ``spread_ms``,
their 10th and 90th percentile: a number and ``[low, high]``, or by name of what was timed one of
each (``request`` and ``rules``). One that was not has the ``reason`` instead. Wherever else ``ms``
stands for a measured time, of a peer or of dense attention, ``spread_ms`` stands beside it.
``tflops`` counts 4 * d operations for each active pair of a query and a key, of dense attention
for every pair.

``regret`` has ratios of times in place of times, in a row for each kind of mask: ``all`` and the
rows compare with the best plan of other turns, ``plain`` with the shortest time of all turns;
``sizes`` has what ``all`` has for requests of models' sizes and for smaller ones. ``ablation`` has
speed-ups, the number of ``cases`` that they are of and the most ``tokens`` of one. The ``clip`` of
``slices`` says the factor on q, ``sharpen``.
``parallel`` has a row for one GPU, and one for each scheme, with a ``check`` against the former,
whose ``error`` is relative to the largest number; ``driver`` is null where the ranks are CPU
processes.

All but ``attention`` check outputs and have ``passed``, whether all were right, with a ``check``
for each mask. ``families`` and ``request`` have ``cases``, the figures of each mask, of which the
rows are means over clips (of ``spread_ms`` of its ends), ``peers``, who took part, and
``left_out``, by name why others did not. Numbers that are not finite are null.

>>> sorted(KINDS)
['attention', 'families', 'parallel', 'regret', 'request', 'rules', 'slices']
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from tessera_cupy.bench import (
    attention_table,
    families_table,
    markers,
    parallel_table,
    regret_table,
    request_table,
    rules_table,
    slices_table,
)
from tessera_cupy.bench.sheet import Sheet
from tessera_cupy.errors import wrong

SCHEMA = 1


class Kind(NamedTuple):
    """A kind of report.

    Attributes:
        sheets: makes its tables.
        places: their names, of which a report may lack the last ones.
    """

    sheets: Callable[[Mapping[str, Any]], list[Sheet]]
    places: tuple[str, ...]


#: Every kind, by the name of its command.
KINDS = {
    "attention": Kind(attention_table.attention_sheets, (attention_table.NAME,)),
    "families": Kind(families_table.families_sheets, (families_table.NAME,)),
    "parallel": Kind(parallel_table.parallel_sheets, (parallel_table.NAME,)),
    "regret": Kind(regret_table.regret_sheets, (regret_table.NAME,)),
    "request": Kind(request_table.request_sheets, (request_table.NAME,)),
    "rules": Kind(rules_table.rules_sheets, (rules_table.NAME,)),
    "slices": Kind(slices_table.slices_sheets, (slices_table.RANDOM, slices_table.CLIP)),
}

_HEAD = ("date", "command", "gpu", "driver", "versions", "l2", "dtype", "rows")
# Options of the command line that say where a report goes, and how many words follow them.
_WHERE = {"--json": 0, "--into": 1, "--marker": 1}


def stamp(
    measured: Mapping[str, Any], bench: str, *, words: Sequence[str], cold: bool
) -> dict[str, Any]:
    """A report of what a command measured.

    Args:
        measured: what the run behind the command returns.
        bench: the command's name.
        words: the command line after ``tessera-cupy``.
        cold: whether the L2 was cold.
    """
    return {
        "schema": SCHEMA,
        "bench": bench,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "command": shlex.join(["tessera-cupy", *words]),
        "l2": "cold" if cold else "warm",
        **measured,
    }


def read(path: Path) -> dict[str, Any]:
    """A report from a file of JSON.

    Raises:
        OSError: it cannot be read.
        ValueError: it has no such report.
    """
    try:
        report = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(_wrong_file(f"{path} ({error})")) from error
    if not isinstance(report, dict) or report.get("schema") != SCHEMA:
        raise ValueError(_wrong_file(f"{path}, which is none of schema {SCHEMA}"))
    bench = report.get("bench")
    if not isinstance(bench, str) or bench not in KINDS:
        raise ValueError(_wrong_file(f"{path}, of {bench!r}"))
    lacking = [key for key in _HEAD if key not in report]
    if lacking:
        raise ValueError(_wrong_file(f"{path}, which lacks {', '.join(lacking)}"))
    try:
        command = measured_by(report["command"])
        for sheet in sheets_of(report):
            sheet.markdown(command)
        list(warnings_of(report))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        got = f"{path}, whose {bench} has {type(error).__name__}: {error}"
        raise ValueError(_wrong_file(got)) from error
    return report


def _wrong_file(got: str) -> str:
    expected = "a report that `tessera-cupy bench COMMAND --json` printed"
    return wrong("report", expected, got, "measure again, with this version")


def sheets_of(report: Mapping[str, Any]) -> list[Sheet]:
    """The tables of a report."""
    return KINDS[report["bench"]].sheets(report)


def warnings_of(report: Mapping[str, Any]) -> Iterator[str]:
    """What was not measured, and what was wrong, in a line each."""
    for case in report.get("cases", report["rows"]):
        name = _name(case)
        if "reason" in case:
            yield f"{name} was not measured: {case['reason']}"
        beside = case.get("beside") or {}
        for what, check in (("", case.get("check")), (" by the plan beside", beside.get("check"))):
            if check and not check["passed"]:
                yield (
                    f"wrong output on {name}{what}: error {check['error']:.1e}, "
                    f"{check['allowed']:.1e} allowed"
                )


def _name(case: Mapping[str, Any]) -> str:
    if "scheme" in case:
        return (
            f"{case['scheme']}, heads by {case['split']}" if case.get("split") else case["scheme"]
        )
    return f"{case.get('family') or case.get('rule')} {case.get('clip')}"


def places(bench: str, suffix: str | None) -> list[str]:
    """Names of the places that a command's tables go to.

    Args:
        bench: the command's name.
        suffix: tells several reports of one command apart; None where there is one.

    >>> places("slices", None), places("families", "d64")
    (['slices-random', 'slices-clip'], ['families-d64'])
    """
    return [_place(name, suffix) for name in KINDS[bench].places]


def is_place(name: str) -> bool:
    """Whether a table of some command may go to a place of this name.

    >>> is_place("families"), is_place("families-d64"), is_place("family")
    (True, True, False)
    """
    known = [place for kind in KINDS.values() for place in kind.places]
    return any(name == place or name.startswith(f"{place}-") for place in known)


def _place(name: str, suffix: str | None) -> str:
    return name if suffix is None else f"{name}-{suffix}"


def write(report: Mapping[str, Any], path: Path, suffix: str | None = None) -> list[str]:
    """Put a report's tables into a Markdown file.

    Args:
        report: the report.
        path: a file with a place for each of its tables; see :mod:`tessera_cupy.bench.markers`.
        suffix: as of :func:`places`.

    Returns:
        The names of the places.

    Raises:
        OSError: the file cannot be read or written.
        ValueError: it lacks a place; or an output was wrong, whose figures mean nothing.
    """
    if not report.get("passed", True):
        raise ValueError(
            wrong("--into", "a report whose outputs were right", "a wrong output", "see its cause")
        )
    command = measured_by(report["command"])
    tables = {_place(one.name, suffix): one.markdown(command) for one in sheets_of(report)}
    markers.replace(path, tables)
    return list(tables)


def measured_by(command: str) -> str:
    """A command line without what only says where its report goes.

    >>> measured_by("tessera-cupy bench rules --json --into 'my file.md' --rule vsa")
    'tessera-cupy bench rules --rule vsa'
    """
    kept: list[str] = []
    words = iter(shlex.split(command))
    for word in words:
        option, equals, _ = word.partition("=")
        if option not in _WHERE:
            kept.append(word)
        elif not equals:
            for _ in range(_WHERE[option]):
                next(words, None)
    return shlex.join(kept)
