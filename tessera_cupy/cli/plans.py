"""``tessera-cupy plans``: show profile tables, check them, and tell two of them apart."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tessera_cupy._resources import plans_dir
from tessera_cupy.cli.output import Commands, Output, add_json, facts
from tessera_cupy.errors import TableError, TesseraError, wrong

if TYPE_CHECKING:
    from tessera_cupy.regimes import Table as ProfileTable
    from tessera_cupy.regimes.difference import Difference
    from tessera_cupy.regimes.schema import Interval, Key

_DEFAULT = "sm90"


def add_to(commands: Commands) -> None:
    """Declare the command and its three actions."""
    parser = commands.add_parser(
        "plans",
        help="show profile tables, check them, tell two of them apart",
        description="Profile tables rank the plans for each kind of request. TABLE is the name "
        "of one that is shipped, such as sm90, or a .yaml file.",
    )
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    show = actions.add_parser("show", help="keys, regimes and plans of a table, and why")
    show.add_argument(
        "table", nargs="?", default=_DEFAULT, metavar="TABLE", help=f"default: {_DEFAULT}"
    )
    show.add_argument(
        "--key", default="", metavar="TEXT", help="only keys with this text in their name"
    )
    add_json(show)
    show.set_defaults(run=_show)
    check = actions.add_parser(
        "check",
        help="find what is wrong in tables, and beside the kernels of this release",
        description="Status 1 if anything is wrong.",
    )
    check.add_argument(
        "tables", nargs="*", metavar="TABLE", help="default: every table that is shipped"
    )
    add_json(check)
    check.set_defaults(run=_check)
    diff = actions.add_parser(
        "diff",
        help="requests that get another first plan from one table than from another",
        description="Compares the first plans for published block sizes, head dims 64, 96, 128 and "
        "256, and every kind of mask. Status 0: none differ; 1: some do; 2: trouble.",
    )
    diff.add_argument("old", metavar="TABLE")
    diff.add_argument("new", metavar="TABLE")
    add_json(diff)
    diff.set_defaults(run=_diff)


def _show(args: argparse.Namespace, output: Output) -> int:
    table = _load(args.table)
    document = table.document
    lists = {"keys": document.keys, "reasoned": document.reasoned}
    shown = {name: [key for key in keys if args.key in _name(key)] for name, keys in lists.items()}
    if not any(shown.values()):
        known = "; ".join(dict.fromkeys(_name(key) for key in document.all_keys))
        expected = f"a part of a key's name, of {known}"
        raise ValueError(wrong("--key", expected, repr(args.key), "leave it out to see all"))
    report = _facts(table)
    report["base"] = [plan.name for plan in document.base]
    report |= {name: [_key(key) for key in keys] for name, keys in shown.items()}
    output.show(report, _text(report))
    return 0


def _facts(table: ProfileTable) -> dict[str, Any]:
    from tessera_cupy.kernels.arch import ARCHS
    from tessera_cupy.ranking import archs_of, is_current

    document = table.document
    archs = archs_of(document.arch)
    return {
        "table": document.arch,
        "file": str(document.path),
        "archs": [arch.name for arch in archs],
        "provenance": document.provenance,
        "device": document.device,
        "catalog": document.catalog,
        "current": is_current(document, archs or list(ARCHS.values())),
        "raw_data": document.raw_data,
        "reasons": document.reasons,
    }


def _name(key: Key) -> str:
    from tessera_cupy.regimes.naming import key_name

    return key_name(key.match)


def _key(key: Key) -> dict[str, Any]:
    from tessera_cupy.regimes.naming import bucket_name
    from tessera_cupy.regimes.schema import AXES

    return {
        "name": _name(key),
        "line": key.line,
        "why": key.why,
        "cases": key.cases,
        "edges": {a: list(edges) for a, edges in zip(AXES, key.edges, strict=True) if edges},
        "regimes": [
            {
                "name": bucket_name(regime.when),
                "when": _when(regime.when),
                "plans": [plan.name for plan in regime.plans],
                "cases": regime.cases,
            }
            for regime in key.regimes
        ],
    }


def _when(when: tuple[Interval, ...]) -> dict[str, list[float]]:
    """Ends of the bounded axes; an end that there is none of is infinite, null in JSON."""
    from tessera_cupy.regimes.schema import ANY, AXES

    bounded = zip(AXES, when, strict=True)
    return {axis: [ends.low, ends.high] for axis, ends in bounded if ends != ANY}


def _text(report: dict[str, Any]) -> Group:
    catalog = report["catalog"]
    if catalog and not report["current"]:
        catalog += ", not the kernels of this release"
    rows = {
        "table": f"{report['table']}, for {', '.join(report['archs']) or 'no GPU by itself'}",
        "file": report["file"],
        "provenance": report["provenance"],
        "device": report["device"],
        "catalog": catalog,
        "raw data": report["raw_data"],
        "reasons": report["reasons"],
        "base plans": "\n".join(report["base"]),
    }
    parts: list[Any] = [facts({name: value for name, value in rows.items() if value})]
    for name, title in (("keys", "keys"), ("reasoned", "reasoned keys, for what keys lack")):
        if report[name]:
            parts.append(Padding(_keys(report[name], title), (1, 0, 0, 0)))
    return Group(*parts)


def _keys(keys: list[dict[str, Any]], title: str) -> Table:
    """A line for each regime, with the key and its reason above those of one key."""
    counted = any(key["cases"] or regime["cases"] for key in keys for regime in key["regimes"])
    table = Table(title=title, title_justify="left")
    table.add_column("requests", overflow="fold")
    table.add_column("plans, from best to worst", overflow="fold")
    if counted:
        table.add_column("cases", justify="right")
    for key in keys:
        head: list[Text] = [Text(key["name"], style="bold"), Text(key["why"], style="italic")]
        table.add_row(*head, *([_count(key["cases"])] if counted else []))
        for regime in key["regimes"]:
            cells = [f"  {regime['name'] or 'all of them'}", "\n".join(regime["plans"])]
            cells += [_count(regime["cases"])] if counted else []
            table.add_row(*map(Text, cells))
        table.add_section()
    return table


def _count(cases: int | None) -> str:
    return "" if cases is None else f"{cases:,}"


def _check(args: argparse.Namespace, output: Output) -> int:
    from tessera_cupy.regimes.table import shipped
    from tessera_cupy.table_check import problems

    files = [_path(name) for name in args.tables or shipped()]
    tables = [{"file": str(path), "problems": problems(path)} for path in files]
    passed = not any(table["problems"] for table in tables)
    lines = [
        line for table in tables for line in table["problems"] or [f"{table['file']}: all is well"]
    ]
    output.show({"tables": tables, "passed": passed}, "\n".join(lines))
    return 0 if passed else 1


def _diff(args: argparse.Namespace, output: Output) -> int:
    from tessera_cupy.regimes.difference import differences

    try:
        found = differences(_load(args.old), _load(args.new))
    except (TesseraError, OSError) as error:
        output.fail(error)
        return 2
    report = {"old": args.old, "new": args.new, "differences": [_difference(d) for d in found]}
    output.show(report, _differences(found, args.old, args.new))
    return 1 if found else 0


def _difference(difference: Difference) -> dict[str, Any]:
    return {
        "requests": difference.name,
        "when": _when(difference.when),
        "old": difference.old.name,
        "new": difference.new.name,
    }


def _differences(found: list[Difference], old: str, new: str) -> Table | str:
    if not found:
        return f"{old} and {new} rank the same plans first."
    pairs = dict.fromkeys((difference.old.name, difference.new.name) for difference in found)
    table = Table(title=f"first plans: {old} -> {new}", title_justify="left")
    table.add_column("requests", overflow="fold")
    table.add_column("old -> new", overflow="fold")
    for pair in pairs:
        names = [d.name for d in found if (d.old.name, d.new.name) == pair]
        table.add_row(Text("\n".join(names)), Text(f"   {pair[0]}\n-> {pair[1]}"))
        table.add_section()
    return table


def _load(name: str) -> ProfileTable:
    from tessera_cupy.regimes import load_table

    return load_table(_path(name))


def _path(name: str) -> Path:
    """The file of a table's name, or the file itself.

    Raises:
        TableError: there is none.
    """
    from tessera_cupy.regimes.table import shipped

    known = shipped()
    if name in known:
        return plans_dir() / f"{name}.yaml"
    path = Path(name)
    if not path.is_file():
        expected = f"one of {', '.join(known)}, or the path of a .yaml file"
        got = f"{name!r}, {'a folder' if path.is_dir() else 'where there is no file'}"
        raise TableError(wrong("TABLE", expected, got, "check the name"))
    return path
