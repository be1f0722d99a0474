"""``tessera-cupy explore``: a page of HTML that shows how masks become tiles."""

from __future__ import annotations

import argparse
from pathlib import Path

from tessera_cupy.bench.rules import RULES
from tessera_cupy.cli.output import Commands, Output, add_json, size
from tessera_cupy.errors import wrong
from tessera_cupy.video import MODELS


def add_to(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "explore",
        help="write a page that shows in a browser how masks become tiles",
        description="Write one HTML page with masks of published rules on small grids of models, "
        "their tiles under every mapping, and predicted times on several GPUs. It opens from disk "
        "in a browser and loads nothing from elsewhere. Needs no GPU; with the extra `demo` the "
        "masks come from real video frames.",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("explore.html"), metavar="FILE", help="the page to write"
    )
    parser.add_argument(
        "--rule",
        choices=tuple(RULES),
        action="append",
        metavar="NAME",
        help=f"of {', '.join(RULES)}; may be repeated (default: five of them)",
    )
    parser.add_argument(
        "--model",
        choices=tuple(MODELS),
        action="append",
        metavar="NAME",
        help=f"whose grid is cut down, of {', '.join(MODELS)}; may be repeated (default: three)",
    )
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace, output: Output) -> int:
    from rich.progress import Progress

    from tessera_cupy.explore import page

    models, rules = args.model or page.MODELS, args.rule or page.RULES
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if args.out.is_dir():
        raise ValueError(wrong("--out", "a file to write", f"the folder {args.out}", "name a file"))
    with Progress(console=output.console, transient=True) as progress:
        bar = progress.add_task("Masks and their tiles", total=None)
        text = page.explorer_page(
            models=models,
            rules=rules,
            on_scene=lambda done, total: progress.update(bar, completed=done, total=total),
        )
    args.out.write_text(text, encoding="utf-8")
    report = {"out": args.out, "bytes": len(text.encode()), "models": models, "rules": rules}
    output.show(report, f"{args.out} ({size(report['bytes'])}): open it in a browser")
    return 0
