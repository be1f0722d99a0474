"""What the ``bench`` commands have in common: their options, and where a report goes."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tessera_cupy.cli.output import Output, add_json

#: Measures what the arguments ask for.
Measure = Callable[[argparse.Namespace, Output], Mapping[str, Any]]


_UNITS = {"s": 1, "m": 60, "h": 3600}


def seconds(text: str) -> float:
    """A time with its unit, as an option takes it.

    >>> seconds("90s"), seconds("1.5m")
    (90.0, 90.0)
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smh])", text)
    if not found:
        raise argparse.ArgumentTypeError(f"expected a time such as 90s, 10m or 1h, got {text!r}")
    return float(found[1]) * _UNITS[found[2]]


def add_measurement(parser: argparse.ArgumentParser, bench: str, measure: Measure) -> None:
    """Declare the options of a measurement, and run it when its command is called.

    Args:
        parser: of the command.
        bench: its name in :data:`tessera_cupy.bench.report.KINDS`.
        measure: returns what the report shall have.
    """
    parser.add_argument(
        "--cold",
        action="store_true",
        help="write a buffer larger than the L2 before each call (default: warm, a call finds "
        "there what the one before left)",
    )
    add_places(parser)
    add_json(parser)

    def run(args: argparse.Namespace, output: Output) -> int:
        from tessera_cupy.bench import markers, report

        if args.into:
            markers.check(args.into, report.places(bench, args.marker))
        made = report.stamp(measure(args, output), bench, words=sys.argv[1:], cold=args.cold)
        return show(made, args, output)

    parser.set_defaults(run=run)


def add_places(parser: argparse.ArgumentParser) -> None:
    """Declare ``--into`` and ``--marker``."""
    parser.add_argument(
        "--into",
        type=Path,
        metavar="FILE.md",
        help="also write the table between <!-- bench:NAME --> and <!-- /bench:NAME --> of a "
        "Markdown file, in place of what is there",
    )
    parser.add_argument(
        "--marker",
        type=_suffix,
        metavar="SUFFIX",
        help="the markers are NAME-SUFFIX, where a file has several tables of one command",
    )


def _suffix(text: str) -> str:
    if not re.fullmatch(r"[\w-]+", text):
        raise argparse.ArgumentTypeError(f"expected letters, digits and hyphens, got {text!r}")
    return text


def show(report: Mapping[str, Any], args: argparse.Namespace, output: Output) -> int:
    """Print a report, write its tables where they are asked for, and warn of what went wrong.

    Returns:
        The exit status: 1 where an output was wrong.
    """
    from tessera_cupy.bench.report import sheets_of, warnings_of, write
    from tessera_cupy.bench.sheet import drawn

    output.show(report, drawn(sheets_of(report)))
    for warning in warnings_of(report):
        output.warn(warning)
    if not report.get("passed", True):
        if args.into:
            output.warn(f"{args.into} is as it was, since an output was wrong")
        return 1
    if args.into:
        names = write(report, args.into, args.marker)
        output.console.print(f"{args.into}: {', '.join(names)}", markup=False, soft_wrap=True)
    return 0
