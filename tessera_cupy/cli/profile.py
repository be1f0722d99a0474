"""``tessera-cupy profile``: measure plans on the GPU here, and compile its profile table."""

from __future__ import annotations

import argparse
from pathlib import Path

from tessera_cupy.cli.measured import seconds
from tessera_cupy.cli.output import Commands, Output, add_json, facts
from tessera_cupy.errors import wrong
from tessera_cupy.kernels.arch import ARCHS


def add_to(commands: Commands) -> None:
    """Declare the command."""
    from tessera_cupy.bench.profile_cases import KINDS

    parser = commands.add_parser(
        "profile",
        help="time every plan on real masks, and compile the GPU's profile table",
        description="Masks are regenerated from video frames by rules, or drawn at random, in many "
        "sizes and densities; each output is checked. Measurements are kept beside the table, and "
        "a second run goes on where the first one stopped.",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="TABLE.yaml",
        help="named after the GPU's table: sm80, sm89, sm90, sm100 or sm120",
    )
    parser.add_argument(
        "--budget",
        type=seconds,
        default=600.0,
        metavar="TIME",
        help="for measuring, such as 90s, 10m or 1h (default: 10m)",
    )
    parser.add_argument(
        "--families",
        nargs="+",
        choices=KINDS,
        metavar="NAME",
        help=f"kinds of masks, of {', '.join(KINDS)} (default: all)",
    )
    parser.add_argument("--cases", type=int, metavar="N", help="end at this many masks")
    parser.add_argument("--most-tokens", type=int, metavar="N", help="of a mask (default: any)")
    parser.add_argument(
        "--edges",
        choices=("tree", "preset"),
        default="tree",
        help="where regimes end: learned, or given (default: tree)",
    )
    parser.add_argument(
        "--model",
        choices=tuple(ARCHS),
        metavar="ARCH",
        help="predict for this architecture with the cost model, without a GPU",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="throw measurements away that are there"
    )
    parser.add_argument(
        "--compile-only",
        action="store_true",
        help="compile the measurements that are there; needs no GPU",
    )
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace, output: Output) -> int:
    from tessera_cupy.bench.profile_job import run_profile

    if args.compile_only and (args.model or args.fresh):
        other = "--model" if args.model else "--fresh"
        fix = "leave one of the two out"
        raise ValueError(wrong("--compile-only", "to stand alone", f"{other} too", fix))
    report = run_profile(
        out=args.out,
        budget_s=args.budget,
        kinds=args.families,
        model=args.model,
        edges=args.edges,
        most_cases=args.cases,
        most_tokens=args.most_tokens,
        fresh=args.fresh,
        compile_only=args.compile_only,
        console=output.console,
    )
    output.show(report, facts({name: value for name, value in report.items() if name != "wrong"}))
    for one in report["wrong"]:
        output.warn(f"wrong output of {one['plan']} on {one['case']}: {one['note']}")
    return 1 if report["wrong"] else 0
