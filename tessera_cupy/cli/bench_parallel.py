"""``tessera-cupy bench parallel``: one request on several ranks, which torchrun starts."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from tessera_cupy.bench.clips import CLIPS
from tessera_cupy.bench.families import MASKS
from tessera_cupy.cli.measured import add_places, show
from tessera_cupy.cli.output import Commands, Output, add_json
from tessera_cupy.cli.parallel import scheme
from tessera_cupy.cli.plan import positive
from tessera_cupy.video import MODELS, VideoGrid

_MODEL = "hunyuan-117f-768p"


def add_to(kinds: Commands) -> None:
    """Declare the measurement."""
    parser = kinds.add_parser(
        "parallel",
        help="one request divided over several GPUs, beside one of them; started by torchrun",
        description="Run it as `torchrun --nproc-per-node 2 -m tessera_cupy bench parallel`. A "
        "mask by SPADE's rule, q, k and v from a normal distribution. Each scheme is timed in "
        "turns with the same request on rank 0 alone, and its output compared with that; a wrong "
        "one ends the command with status 1. Without GPUs it runs over gloo on the CPU, in "
        "float32: use a small --grid.",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--model",
        choices=tuple(MODELS),
        default=_MODEL,
        metavar="NAME",
        help=f"whose tokens, text included: {', '.join(MODELS)} (default: {_MODEL})",
    )
    size.add_argument(
        "--grid", type=int, nargs=3, metavar=("T", "H", "W"), help="frames, rows, columns of tokens"
    )
    parser.add_argument("--heads", type=positive, help="default: the model's")
    parser.add_argument("--head-dim", type=positive, help="default: the model's")
    parser.add_argument(
        "--scheme",
        type=scheme,
        action="append",
        metavar="SCHEME",
        help="auto, ulysses, ring, or UxR: Ulysses degree, ring degree; may be repeated (default: "
        "all degrees of so many ranks)",
    )
    parser.add_argument(
        "--turns",
        type=positive,
        nargs="+",
        default=[],
        metavar="N",
        help="also in how many turns Ulysses exchanges heads, one while another is computed "
        "(default: what the planner takes)",
    )
    parser.add_argument("--clip", choices=CLIPS, default=CLIPS[0], help=f"default: {CLIPS[0]}")
    parser.add_argument(
        "--masks",
        choices=MASKS,
        default="spade",
        help="random ones keep as many blocks in each row (default: spade)",
    )
    parser.add_argument(
        "--mask-cache",
        type=Path,
        metavar="FILE.npz",
        help="take the mask from this file, and add it if it is lacking",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="how long ranks wait for each other (default: 120)",
    )
    add_places(parser)
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace, output: Output) -> int:
    from tessera_cupy.bench import markers, report
    from tessera_cupy.bench.parallel_run import run_parallel
    from tessera_cupy.bench.ranks import joined

    if args.into:
        markers.check(args.into, report.places("parallel", args.marker))
    model = MODELS[args.model]
    with joined(args.timeout) as ranks:
        first = ranks.rank == 0
        found = run_parallel(
            ranks,
            grid=VideoGrid(*args.grid) if args.grid else model.grid,
            heads=args.heads or model.heads,
            head_dim=args.head_dim or model.head_dim,
            schemes=args.scheme,
            turns=args.turns,
            clip=None if args.masks == "random" else args.clip,
            mask_cache=args.mask_cache,
            console=output.console if first else Console(quiet=True),
        )
    if not first:
        return 0
    made: dict[str, Any] = report.stamp(found, "parallel", words=sys.argv[1:], cold=False)
    return show(made | {"command": _command(sys.argv[1:])}, args, output)


def _command(words: list[str]) -> str:
    """The command line that started all ranks."""
    hosts = os.environ.get("GROUP_WORLD_SIZE", "1")
    start = ["torchrun", *(["--nnodes", hosts] if hosts != "1" else []), "--nproc-per-node"]
    local = os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])
    return shlex.join([*start, local, "-m", "tessera_cupy", *words])
