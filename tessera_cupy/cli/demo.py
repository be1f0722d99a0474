"""``tessera-cupy demo``: the main job on real video frames, with a picture."""

from __future__ import annotations

import argparse
from pathlib import Path

from tessera_cupy.bench.rules import RULES
from tessera_cupy.cli.output import Commands, Output, add_json


def add_to(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "demo",
        help="attention on real video frames under a real mask, checked, with a picture",
        description="Frames of a real clip become q, k and v; a published rule chooses the "
        "mask; the mask is planned, executed, checked against float64, and drawn.",
    )
    parser.add_argument(
        "--rule",
        choices=tuple(RULES),
        default="spade",
        metavar="NAME",
        help=f"of {', '.join(RULES)} (default: spade)",
    )
    parser.add_argument("--out", type=Path, default=Path("demo.png"), help="the picture to write")
    parser.add_argument(
        "--grid", type=int, nargs=3, metavar=("T", "H", "W"), help="frames, rows, columns of tokens"
    )
    parser.add_argument("--heads", type=int, metavar="N", help="attention heads")
    parser.add_argument(
        "--device",
        choices=("auto", "gpu", "cpu"),
        default="auto",
        help="auto takes a GPU where there is one",
    )
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace, output: Output) -> int:
    from tessera_cupy.bench.demo import run_demo

    report = run_demo(
        args.out,
        grid=tuple(args.grid) if args.grid else None,
        heads=args.heads,
        rule=args.rule,
        device=args.device,
        console=output.console,
    )
    output.show(report, None)  # the demo told its text as it went
    return 0 if report["passed"] else 1
