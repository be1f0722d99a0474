"""``tessera-cupy bench regret``: a profile table against the best plans, on masks it never saw."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tessera_cupy.cli.measured import add_places, seconds, show
from tessera_cupy.cli.output import Commands, Output, add_json
from tessera_cupy.kernels.arch import ARCHS


def add_to(kinds: Commands) -> None:
    """Declare the measurement."""
    from tessera_cupy.bench.profile_cases import KINDS

    regret = kinds.add_parser(
        "regret",
        help="how far a profile table's plans are from the best ones, on other masks",
        description="Masks from a clip and seeds that no profile uses: every plan is timed on "
        "each, and the table's plan is compared with the best; what mapping and organization add, "
        "and what searching at call time would cost.",
    )
    regret.add_argument(
        "--table",
        metavar="NAME|FILE.yaml",
        help="a shipped table such as sm90, or another (default: that of the GPU)",
    )
    regret.add_argument("--cases", type=int, default=140, help="masks (default: 140)")
    regret.add_argument(
        "--budget",
        type=seconds,
        default=180.0,
        metavar="TIME",
        help="for measuring: masks that it does not reach are left out (default: 3m); the "
        "ablation, which may take as long, and searches come on top",
    )
    regret.add_argument(
        "--families", nargs="+", choices=KINDS, metavar="NAME", help="kinds (default: all)"
    )
    regret.add_argument("--most-tokens", type=int, metavar="N", help="of a mask (default: any)")
    regret.add_argument(
        "--model", choices=tuple(ARCHS), metavar="ARCH", help="predict the times, without a GPU"
    )
    regret.add_argument(
        "--measurements",
        type=Path,
        metavar="FILE.npz",
        help="judge on these, that --keep wrote, in place of measuring",
    )
    regret.add_argument("--keep", type=Path, metavar="FILE.npz", help="write the measurements")
    add_places(regret)
    add_json(regret)
    regret.set_defaults(run=_run)


def _run(args: argparse.Namespace, output: Output) -> int:
    from tessera_cupy.bench import markers, report
    from tessera_cupy.bench.regret_run import run_regret

    if args.into:
        markers.check(args.into, report.places("regret", args.marker))
    found = run_regret(
        table=args.table,
        measurements=args.measurements,
        cases=args.cases,
        kinds=args.families,
        model=args.model,
        most_tokens=args.most_tokens,
        budget_s=args.budget,
        keep=args.keep,
        console=output.console,
    )
    return show(report.stamp(found, "regret", words=sys.argv[1:], cold=False), args, output)
