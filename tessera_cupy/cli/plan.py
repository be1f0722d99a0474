"""``tessera-cupy plan``: how a mask from a file would be computed, without q, k, v or a GPU."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.cli import gpu
from tessera_cupy.cli.output import Commands, Output, add_json
from tessera_cupy.errors import NoGpuError, wrong
from tessera_cupy.kernels.arch import ARCHS, arch_for


def add_to(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "plan",
        help="how a mask would be computed: mapping, organization, kernel, and why",
        description="Plan a block mask that numpy.save wrote: bool or 0/1, with axes "
        "(query blocks, key blocks), (heads, ...) or (batch, heads, ...).",
    )
    parser.add_argument("--mask", type=Path, required=True, metavar="FILE.npy")
    parser.add_argument(
        "--block",
        type=int,
        nargs=2,
        required=True,
        metavar=("BQ", "BKV"),
        help="tokens of one block: query rows, key rows",
    )
    parser.add_argument(
        "--shape",
        type=int,
        nargs=2,
        metavar=("SQ", "SKV"),
        help="tokens of q and k (default: whole blocks)",
    )
    parser.add_argument(
        "--heads-q", type=int, metavar="N", help="query heads (default: those of the mask)"
    )
    parser.add_argument("--head-dim", type=int, default=128, metavar="D")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="bfloat16")
    parser.add_argument("--arch", help=f"of {', '.join(ARCHS)} (default: that of the GPU here)")
    parser.add_argument(
        "--regime", default="auto", help="auto looks it up in the profile table; or a plan's name"
    )
    parser.add_argument(
        "--explain", action="store_true", help="say why, and what else was considered"
    )
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace, output: Output) -> int:
    from tessera_cupy.attention import make_plan
    from tessera_cupy.masks import BlockMask
    from tessera_cupy.request import ArraySpec

    shape = tuple(args.shape) if args.shape else None
    mask = BlockMask.from_dense(_load(args.mask), tuple(args.block), shape)
    heads = mask.heads if args.heads_q is None else args.heads_q
    spec = ArraySpec((mask.batch, heads, mask.shape[0], args.head_dim), args.dtype)
    plan = make_plan(mask, spec, regime=args.regime, arch=args.arch or _arch_here())
    text = (
        f"{mask!r}\n\n{plan.explain()}"
        if args.explain
        else f"{plan.spec.name} on {plan.request.arch.name}"
    )
    output.show(plan.summary() if output.json else {}, text)
    return 0


def _arch_here() -> str | None:
    """Architecture of the first GPU; None, which means the planner's own, without one."""
    try:
        device = gpu.devices()[0]
    except NoGpuError:
        return None
    return arch_for(device.capability, device.name).name


def _load(path: Path) -> NDArray[Any]:
    """Read an array; never a pickle, which could run code."""
    fix = "save the mask with numpy.save(path, mask)"
    try:
        loaded = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(wrong("--mask", "an array in a .npy file", error, fix)) from error
    if not isinstance(loaded, np.ndarray):
        raise ValueError(wrong("--mask", "a .npy file with one array", f"the archive {path}", fix))
    return loaded
