"""``tessera-cupy parallel``: what several GPUs would make of a mask, without GPUs or torch."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from tessera_cupy.cli.output import Commands, Output, add_json, facts, size
from tessera_cupy.cli.plan import load_mask, named_options, positive
from tessera_cupy.errors import wrong

if TYPE_CHECKING:
    from tessera_cupy.masks import BlockMask, KeySlices
    from tessera_cupy.parallel import Forecast

_OPTIONS = {
    "mask": "--mask",
    "block_size": "--block",
    "group": "--block",
    "shape": "--shape",
    "ranks": "--ranks",
    "gpu": "--gpu",
    "scheme": "--scheme",
    "q": "--head-dim",
    "k": "--heads-kv",
}


def add_to(commands: Commands) -> None:
    """Declare the command and its two actions."""
    parser = commands.add_parser(
        "parallel",
        help="how a mask would be divided over several GPUs: balance, bytes, predicted time",
    )
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    _add_plan(actions)
    _add_balance(actions)


def _add_plan(actions: Commands) -> None:
    from tessera_cupy.cost import GPUS
    from tessera_cupy.video import MODELS

    plan = actions.add_parser(
        "plan",
        help="predict every scheme for a mask on so many ranks, the fastest first",
        description="The mask is a file as of `tessera-cupy plan`. Times are predicted from public "
        "figures of the GPU and its links; nothing is measured.",
    )
    plan.add_argument("--mask", type=Path, required=True, metavar="FILE.npy")
    plan.add_argument(
        "--block",
        type=int,
        nargs=2,
        required=True,
        metavar=("BQ", "BKV"),
        help="tokens of one block: query rows, key rows (1 of key slices)",
    )
    plan.add_argument("--ranks", type=positive, required=True, metavar="N")
    plan.add_argument(
        "--model",
        choices=tuple(MODELS),
        metavar="NAME",
        help=f"heads, head dim and tokens of one of {', '.join(MODELS)}",
    )
    plan.add_argument(
        "--shape",
        type=int,
        nargs=2,
        metavar=("SQ", "SKV"),
        help="tokens of q and k (default: the model's, or whole blocks)",
    )
    plan.add_argument(
        "--heads-q", type=positive, metavar="N", help="query heads (default: the model's or mask's)"
    )
    plan.add_argument(
        "--heads-kv", type=positive, metavar="N", help="KV heads (default: as many as query heads)"
    )
    plan.add_argument("--head-dim", type=positive, metavar="D", help="default: the model's or 128")
    plan.add_argument(
        "--scheme",
        type=scheme,
        default="auto",
        metavar="SCHEME",
        help="auto (default: all of them), ulysses, ring, or UxR: Ulysses degree, ring degree",
    )
    plan.add_argument("--gpu", choices=tuple(GPUS), default="H200", metavar="NAME")
    plan.add_argument(
        "--per-host", type=positive, default=8, metavar="N", help="ranks on one host (default: 8)"
    )
    add_json(plan)
    plan.set_defaults(run=_plan)


def scheme(text: str) -> Any:
    """A scheme as on the command line: a name, or degrees as ``2x4``."""
    degrees = re.fullmatch(r"(\d+)x(\d+)", text)
    if degrees:
        return int(degrees[1]), int(degrees[2])
    return text


def _plan(args: argparse.Namespace, output: Output) -> int:
    from tessera_cupy.parallel import predict
    from tessera_cupy.request import ArraySpec
    from tessera_cupy.video import MODELS

    array = load_mask(args.mask)
    model = MODELS[args.model] if args.model else None
    shape = args.shape
    if shape is None and model is not None:
        shape = [model.grid.tokens] * 2
    with named_options(_OPTIONS):
        mask = _mask(array, args.block, shape)
        heads_q = args.heads_q or (model.heads if model else mask.heads)
        if mask.heads not in (1, heads_q):
            expected = f"a mask of 1 or {heads_q} heads"
            fix = "pass --heads-q, or another --model"
            raise ValueError(wrong("--mask", expected, f"{mask.heads}", fix))
        head_dim = args.head_dim or (model.head_dim if model else 128)
        q, k = (
            ArraySpec((mask.batch, heads, tokens, head_dim))
            for heads, tokens in zip((heads_q, args.heads_kv or heads_q), mask.shape, strict=True)
        )
        found = predict(
            mask, q, k, ranks=args.ranks, scheme=args.scheme, gpu=args.gpu, per_host=args.per_host
        )
    output.show(found.summary() if output.json else {}, _drawn(found))
    return 0


def _mask(array: Any, block: list[int], shape: list[int] | None) -> BlockMask | KeySlices:
    from tessera_cupy.masks import BlockMask, KeySlices

    if block[1] == 1:
        return KeySlices.from_groups(array, block[0], shape)
    return BlockMask.from_dense(array, block, shape)


def _drawn(found: Forecast) -> Group:
    data = found.summary()
    sq, skv = data["tokens"]
    links = data["links"]
    about = facts(
        {
            "request": f"{sq:,} x {skv:,} tokens, {data['heads']} heads, density "
            f"{data['density']:.3f}",
            "ranks": f"{data['ranks']} of {data['gpu']}, {links['ranks_per_host']} to a host; "
            f"{links['within']}, {links['between']} between hosts",
            "one GPU": f"{data['alone_ms']:.2f} ms predicted",
            "take": f"{data['best']}: {data['schemes'][0]['ms']:.2f} ms predicted",
        }
    )
    table = Table()
    table.add_column("scheme")
    for name in ("turns", "ms", "speed-up", "max / mean work", "computes, ms", "sends at most"):
        table.add_column(name, justify="right")
    for one in data["schemes"]:
        speed = data["alone_ms"] / one["ms"] if one["ms"] else 1.0
        table.add_row(
            one["scheme"],
            str(one["turns"]),
            f"{one['ms']:.2f}",
            f"{speed:.2f}",
            f"{one['balance']:.3f}",
            f"{one['compute_ms']['max']:.2f}",
            size(round(one["sent_bytes"]["max"])),
        )
    return Group(about, table, Text("Predicted from public figures, not measured."))


def _add_balance(actions: Commands) -> None:
    from tessera_cupy.bench.clips import CLIPS
    from tessera_cupy.bench.corpus import NAMES

    parser = actions.add_parser(
        "balance",
        help="how even heads lie on ranks, on masks of every family and rule",
        description="Masks regenerated from video frames, on small grids: the work of the busiest "
        "rank over the mean, with heads dealt by their work and in equal numbers. Counted; with "
        "--measure the time of each rank's attention, one rank after another on the GPU here, on "
        "a grid of 32,760 tokens.",
    )
    parser.add_argument(
        "--measure", action="store_true", help="time it on the GPU here in place of counting"
    )
    parser.add_argument("--heads", type=positive, nargs="+", default=[24, 40], metavar="N")
    parser.add_argument("--ranks", type=positive, nargs="+", default=[2, 4, 8], metavar="N")
    parser.add_argument("--clip", choices=CLIPS, default=CLIPS[0])
    parser.add_argument(
        "--name",
        action="append",
        choices=NAMES,
        metavar="NAME",
        help=f"of {', '.join(NAMES)}; may be repeated (default: all)",
    )
    parser.add_argument(
        "--into",
        type=Path,
        metavar="FILE.md",
        help="also write the table between <!-- bench:parallel-balance --> and its end in a "
        "Markdown file; with --measure, the place is parallel-balance-measured",
    )
    add_json(parser)
    parser.set_defaults(run=_balance)


def _balance(args: argparse.Namespace, output: Output) -> int:
    from tessera_cupy.bench import balance, balance_times, markers
    from tessera_cupy.bench.corpus import NAMES
    from tessera_cupy.bench.report import measured_by

    place = balance_times.NAME if args.measure else balance.NAME
    if args.into:
        markers.check(args.into, [place])
    names = args.name or NAMES
    run = balance_times.measure_balance if args.measure else balance.count_balance
    with Progress(console=output.console, transient=True) as progress:
        task = progress.add_task("masks", total=len(names))
        found = run(
            heads=args.heads,
            ranks=args.ranks,
            clip=args.clip,
            names=names,
            on_mask=lambda name: progress.advance(task),
        )
    sheet = balance_times.measured_sheet(found) if args.measure else balance.balance_sheet(found)
    output.show(found, sheet.drawn())
    for row in found["rows"]:
        if "reason" in row:
            output.warn(f"{row['mask']} was left out: {row['reason']}")
    if args.into:
        command = measured_by(shlex.join(["tessera-cupy", *sys.argv[1:]]))
        markers.replace(args.into, {place: sheet.markdown(command)})
        output.console.print(f"{args.into}: {place}", markup=False, soft_wrap=True)
    return 0
