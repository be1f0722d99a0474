"""``tessera-cupy bench``: measurements on the GPU here, and tables of their reports."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.progress import Progress

from tessera_cupy.bench.clips import CLIPS
from tessera_cupy.bench.families import FAMILIES, MASKS
from tessera_cupy.bench.peers import PEERS, SPARSE
from tessera_cupy.bench.rules import RULES
from tessera_cupy.cli import bench_parallel, regret
from tessera_cupy.cli.measured import add_measurement, add_places, show
from tessera_cupy.cli.output import Commands, Output, add_json


def add_to(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser("bench", help="measure on the GPU here, and write tables of it")
    kinds = parser.add_subparsers(title="measurements", required=True, metavar="WHAT")
    _add_attention(kinds)
    _add_families(kinds)
    _add_request(kinds)
    _add_rules(kinds)
    _add_slices(kinds)
    bench_parallel.add_to(kinds)
    regret.add_to(kinds)
    _add_report(kinds)


def _add_attention(kinds: Commands) -> None:
    attention = kinds.add_parser(
        "attention",
        help="attention rates against torch's dense attention in the same run",
        description="Random masks with the same number of blocks in each row, bfloat16. Rates "
        "count active pairs only.",
    )
    attention.add_argument("--tokens", type=int, default=32768)
    attention.add_argument("--heads", type=int, default=12)
    attention.add_argument("--head-dim", type=int, default=128)
    attention.add_argument(
        "--kernel", help="measure this kernel, such as attend_mma, rather than the table's choice"
    )
    add_measurement(attention, "attention", _attention)


def _add_families(kinds: Commands) -> None:
    families = kinds.add_parser(
        "families",
        help="the block families on masks from real video frames, beside other attention",
        description="Masks regenerated from video frames by SPADE's rule, bfloat16. Each output "
        "is checked against float64 on sampled rows; a wrong one ends the command with status "
        "1. Rates count active pairs only; cuDNN's dense attention is timed in turns with each "
        "mask.",
    )
    _add_masks(families)
    families.add_argument(
        "--peers",
        nargs="*",
        choices=[peer.name for peer in PEERS],
        help="dense cuDNN, FlashAttention-2 and -4; FlexAttention, FA4, FlashInfer and VSA on the "
        "mask; with no name, none (default: all that are installed)",
    )
    families.add_argument(
        "--beside",
        metavar="PLAN",
        help="measure this plan too, in turns with the others, where it can serve the blocks",
    )
    families.add_argument(
        "--regime",
        default="auto",
        metavar="PLAN",
        help="measure this plan where it can serve the blocks (default: the table's choice)",
    )
    add_measurement(families, "families", _families)


def _add_masks(parser: argparse.ArgumentParser) -> None:
    """What the measurements on families of masks have in common."""
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--tokens",
        type=int,
        default=57600,
        help="of a known model's grid; any number, if masks are random (default: 57600)",
    )
    size.add_argument(
        "--grid", type=int, nargs=3, metavar=("T", "H", "W"), help="frames, rows, columns of tokens"
    )
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument(
        "--family",
        action="append",
        choices=[family.name for family in FAMILIES],
        metavar="NAME",
        help=f"of {', '.join(family.name for family in FAMILIES)}; may be repeated (default: all)",
    )
    parser.add_argument(
        "--clip", action="append", choices=CLIPS, help="may be repeated (default: both)"
    )
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
        help="take masks from this file, and add those that it lacks",
    )


def _add_request(kinds: Commands) -> None:
    request = kinds.add_parser(
        "request",
        help="whole requests, from a mask in GPU memory to the output, on the same families",
        description="A request takes a new mask of bools in GPU memory; what it takes beyond its "
        "attention alone is its preparation. A peer's request makes its lists or its plan of the "
        "same mask. Each output is checked against float64 on sampled rows; a wrong one ends the "
        "command with status 1.",
    )
    _add_masks(request)
    request.add_argument(
        "--peers",
        nargs="*",
        choices=[peer.name for peer in SPARSE],
        help="FlexAttention, FA4, FlashInfer, VSA; with no name, none (default: all that are "
        "installed)",
    )
    request.add_argument(
        "--regime",
        default="auto",
        metavar="PLAN",
        help="name this plan where it can serve the blocks (default: the table's choice)",
    )
    add_measurement(request, "request", _request)


def _add_rules(kinds: Commands) -> None:
    rules = kinds.add_parser(
        "rules",
        help="the complete call of each published rule, beside torch's dense attention",
        description="Each rule on the grid of its model, with q, k and v from real video frames: "
        "choosing the mask, moving tokens, attention, and back. Each output is checked against "
        "float64 on sampled rows; a wrong one ends the command with status 1.",
    )
    rules.add_argument(
        "--rule",
        action="append",
        choices=tuple(RULES),
        metavar="NAME",
        help=f"of {', '.join(RULES)}; may be repeated (default: all)",
    )
    rules.add_argument("--heads", type=int, default=8)
    rules.add_argument("--clip", choices=CLIPS, default=CLIPS[0], help=f"default: {CLIPS[0]}")
    add_measurement(rules, "rules", _rules)


def _add_slices(kinds: Commands) -> None:
    slices = kinds.add_parser(
        "slices",
        help="single keys for groups of query rows, beside blocks and torch's attention",
        description="Random slices beside random blocks of the same density and dense attention; "
        "then, with q and k from real video frames, slices beside blocks that keep the same "
        "attention mass, on a smaller grid. Each output is checked against float64 on sampled "
        "rows; a wrong one ends the command with status 1.",
    )
    slices.add_argument("--tokens", type=int, default=57600)
    slices.add_argument("--heads", type=int, default=8)
    slices.add_argument("--head-dim", type=int, default=128)
    slices.add_argument(
        "--density", type=float, default=0.1, help="of the random masks (default: 0.1)"
    )
    slices.add_argument("--clip", choices=CLIPS, default=CLIPS[0], help=f"default: {CLIPS[0]}")
    slices.add_argument(
        "--sharpen",
        type=float,
        metavar="FACTOR",
        help="on the clip's q: attention of fewer keys (default: 1.95, with which XAttention's "
        "rule keeps as much of clips as of models' q and k)",
    )
    slices.add_argument(
        "--as-blocks",
        action="store_true",
        help="also the random slices as blocks of 16 keys with token bits, which the host plans "
        "for half a minute more, in 5 GB",
    )
    add_measurement(slices, "slices", _slices)


def _add_report(kinds: Commands) -> None:
    report = kinds.add_parser(
        "report",
        help="the tables of a report that was measured before, or elsewhere; needs no GPU",
        description="Print the tables of what another bench command printed with --json, and "
        "with --into write them into a Markdown file.",
    )
    report.add_argument("file", type=Path, metavar="FILE.json")
    add_places(report)
    add_json(report)
    report.set_defaults(run=_report)


def _attention(args: argparse.Namespace, output: Output) -> dict[str, Any]:
    from tessera_cupy.bench.attention import BACKENDS, CASES, run

    with Progress(console=output.console, transient=True) as progress:
        bar = progress.add_task("measuring", total=len(CASES) + len(BACKENDS))
        return run(
            args.tokens,
            args.heads,
            args.head_dim,
            CASES,
            lambda: progress.advance(bar),
            args.kernel,
            cold=args.cold,
        )


def _families(args: argparse.Namespace, output: Output) -> dict[str, Any]:
    from tessera_cupy.bench.families_run import run_families

    return run_families(**_corpus(args), beside=args.beside, console=output.console)


def _request(args: argparse.Namespace, output: Output) -> dict[str, Any]:
    from tessera_cupy.bench.request_run import run_request

    return run_request(**_corpus(args), console=output.console)


def _rules(args: argparse.Namespace, output: Output) -> dict[str, Any]:
    from tessera_cupy.bench.rules_run import run_rules

    return run_rules(
        rules=args.rule,
        heads=args.heads,
        clip=args.clip,
        cold=args.cold,
        console=output.console,
    )


def _slices(args: argparse.Namespace, output: Output) -> dict[str, Any]:
    from tessera_cupy.bench.slices_run import run_slices

    return run_slices(
        tokens=args.tokens,
        heads=args.heads,
        head_dim=args.head_dim,
        density=args.density,
        clip=args.clip,
        as_blocks=args.as_blocks,
        cold=args.cold,
        sharpen=args.sharpen,
        console=output.console,
    )


def _report(args: argparse.Namespace, output: Output) -> int:
    from tessera_cupy.bench.report import read

    return show(read(args.file), args, output)


def _corpus(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments that say which masks are measured, with which plan, and beside whom."""
    return {
        "tokens": args.tokens,
        "grid": tuple(args.grid) if args.grid else None,
        "heads": args.heads,
        "head_dim": args.head_dim,
        "families": args.family,
        "clips": args.clip,
        "peers": args.peers,
        "masks": args.masks,
        "mask_cache": args.mask_cache,
        "regime": args.regime,
        "cold": args.cold,
    }
