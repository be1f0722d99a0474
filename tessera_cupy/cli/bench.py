"""``tessera-cupy bench``: measurements on the GPU here."""

from __future__ import annotations

import argparse
from datetime import datetime, timezone
from typing import Any

from rich.progress import Progress
from rich.table import Table

from tessera_cupy.cli.output import Commands, Output, add_json


def add_to(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser("bench", help="measure on the GPU here")
    kinds = parser.add_subparsers(title="measurements", required=True, metavar="WHAT")
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
    report["date"] = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    output.show(report, _table(report))
    return 0


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
