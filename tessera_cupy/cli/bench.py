"""``tessera-cupy bench``: measurements on the GPU here."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.progress import Progress
from rich.table import Table

from tessera_cupy.bench.clips import CLIPS
from tessera_cupy.bench.families import FAMILIES, MASKS
from tessera_cupy.bench.peers import PEERS
from tessera_cupy.bench.rules import RULES
from tessera_cupy.cli.output import Commands, Output, add_json


def add_to(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser("bench", help="measure on the GPU here")
    kinds = parser.add_subparsers(title="measurements", required=True, metavar="WHAT")
    _add_attention(kinds)
    _add_families(kinds)
    _add_request(kinds)
    _add_rules(kinds)
    _add_slices(kinds)


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
    add_json(attention)
    attention.set_defaults(run=_attention)


def _add_families(kinds: Commands) -> None:
    families = kinds.add_parser(
        "families",
        help="the block families on masks from real video frames, beside torch's attention",
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
        help="dense cuDNN, dense FlashAttention-2, FlexAttention; with no name, none (default: "
        "all, where torch is installed)",
    )
    families.add_argument(
        "--regime",
        default="auto",
        metavar="PLAN",
        help="measure this plan where it can serve the blocks (default: the table's choice)",
    )
    add_json(families)
    families.set_defaults(run=_families)


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
        "attention alone is its preparation. FlexAttention's request makes its lists of the same "
        "mask. Each output is checked against float64 on sampled rows; a wrong one ends the "
        "command with status 1.",
    )
    _add_masks(request)
    request.add_argument(
        "--no-flex", action="store_true", help="leave FlexAttention out (default: where torch is)"
    )
    request.add_argument(
        "--regime",
        default="auto",
        metavar="PLAN",
        help="name this plan where it can serve the blocks (default: the table's choice)",
    )
    add_json(request)
    request.set_defaults(run=_request)


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
    add_json(rules)
    rules.set_defaults(run=_rules)


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
        "--as-blocks",
        action="store_true",
        help="also the random slices as blocks of 16 keys with token bits, which the host plans "
        "for half a minute more, in 5 GB",
    )
    add_json(slices)
    slices.set_defaults(run=_slices)


def _attention(args: argparse.Namespace, output: Output) -> int:
    from tessera_cupy.bench.attention import BACKENDS, CASES, run

    with Progress(console=output.console, transient=True) as progress:
        bar = progress.add_task("measuring", total=len(CASES) + len(BACKENDS))
        report = run(
            args.tokens,
            args.heads,
            args.head_dim,
            CASES,
            lambda: progress.advance(bar),
            args.kernel,
        )
    report["date"] = _today()
    output.show(report, _table(report))
    return 0


def _today() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%d")


def _table(report: dict[str, Any]) -> Table:
    dense = ", ".join(f"{name} {rate:.0f}" for name, rate in report["dense_tflops"].items())
    title = (
        f"{report['gpu']}, {report['date']}: {report['tokens']:,} tokens, {report['heads']} heads, "
        f"head dim {report['head_dim']}, {report['dtype']}. Dense TFLOP/s: {dense or 'no torch'}"
    )
    table = Table(title=title)
    for name in ("blocks", "density", "plan", "ms", "TFLOP/s", *report["dense_tflops"]):
        table.add_column(name, justify="left" if name in ("blocks", "plan") else "right")
    for case in report["cases"]:
        table.add_row(
            f"{case['block']}x{case['block']}",
            f"{case['density']:.2f}",
            case["plan"],
            f"{case['ms']:.3f}",
            f"{case['tflops']:.0f}",
            *[f"{ratio:.2f}x" for ratio in case["ratios"].values()],
        )
    return table


def _families(args: argparse.Namespace, output: Output) -> int:
    from tessera_cupy.bench.families_run import run_families
    from tessera_cupy.bench.families_table import families_table

    report = run_families(peers=args.peers, **_corpus(args), console=output.console)
    return _show(report, families_table, output)


def _request(args: argparse.Namespace, output: Output) -> int:
    from tessera_cupy.bench.request_run import run_request
    from tessera_cupy.bench.request_table import request_table

    report = run_request(flex=not args.no_flex, **_corpus(args), console=output.console)
    return _show(report, request_table, output)


def _rules(args: argparse.Namespace, output: Output) -> int:
    from tessera_cupy.bench.rules_run import run_rules
    from tessera_cupy.bench.rules_table import rules_table

    report = run_rules(rules=args.rule, heads=args.heads, clip=args.clip, console=output.console)
    return _show(report, rules_table, output)


def _slices(args: argparse.Namespace, output: Output) -> int:
    from tessera_cupy.bench.slices_run import run_slices
    from tessera_cupy.bench.slices_table import slices_table

    report = run_slices(
        tokens=args.tokens,
        heads=args.heads,
        head_dim=args.head_dim,
        density=args.density,
        clip=args.clip,
        as_blocks=args.as_blocks,
        console=output.console,
    )
    return _show(report, slices_table, output)


def _corpus(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments that say which masks are measured, and with which plan."""
    return {
        "tokens": args.tokens,
        "grid": tuple(args.grid) if args.grid else None,
        "heads": args.heads,
        "head_dim": args.head_dim,
        "families": args.family,
        "clips": args.clip,
        "masks": args.masks,
        "mask_cache": args.mask_cache,
        "regime": args.regime,
    }


def _show(
    report: dict[str, Any], table: Callable[[dict[str, Any]], RenderableType], output: Output
) -> int:
    """Print a report with its date and command; the exit status."""
    report["date"] = _today()
    report["command"] = shlex.join(["tessera-cupy", *sys.argv[1:]])
    output.show(report, table(report))
    for case in report["cases"]:
        name = f"{case.get('family') or case['rule']} {case['clip']}"
        if "reason" in case:
            output.warn(f"{name} was not measured: {case['reason']}")
            continue
        check = case["check"]
        if not check["passed"]:
            output.warn(
                f"wrong output on {name}: error {check['error']:.1e}, "
                f"{check['allowed']:.1e} allowed"
            )
    return 0 if report["passed"] else 1
