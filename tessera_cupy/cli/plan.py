"""``tessera-cupy plan``: how a mask from a file would be computed, without q, k, v or a GPU."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.attention import HOST_ARCH
from tessera_cupy.cli import gpu
from tessera_cupy.cli.output import Commands, Output, add_json
from tessera_cupy.errors import NoGpuError, wrong
from tessera_cupy.kernels.arch import ARCHS, arch_for, get_arch

# Options that arguments of Python become; only the head dim of q and the heads of k can be wrong.
_OPTIONS = {
    "mask": "--mask",
    "block_size": "--block",
    "group": "--block",
    "shape": "--shape",
    "arch": "--arch",
    "regime": "--regime",
    "q": "--head-dim",
    "k": "--heads-kv",
}


def add_to(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "plan",
        help="how a mask would be computed: mapping, organization, kernel, and why",
        description="Plan a block mask that numpy.save wrote: bool or 0/1, with axes "
        "(query blocks, key blocks), (heads, ...) or (batch, heads, ...). With --block M 1 it is "
        "of key slices: groups of M query rows by single keys.",
    )
    parser.add_argument("--mask", type=Path, required=True, metavar="FILE.npy")
    parser.add_argument(
        "--block",
        type=int,
        nargs=2,
        required=True,
        metavar=("BQ", "BKV"),
        help="tokens of one block: query rows, key rows (1 of key slices)",
    )
    parser.add_argument(
        "--shape",
        type=int,
        nargs=2,
        metavar=("SQ", "SKV"),
        help="tokens of q and k (default: whole blocks)",
    )
    parser.add_argument(
        "--heads-q", type=positive, metavar="N", help="query heads (default: those of the mask)"
    )
    parser.add_argument(
        "--heads-kv", type=positive, metavar="N", help="KV heads (default: as many as query heads)"
    )
    parser.add_argument("--head-dim", type=int, default=128, metavar="D")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="bfloat16")
    parser.add_argument(
        "--arch",
        help=f"of {', '.join(ARCHS)}, or a table's name, as sm90 "
        f"(default: that of the GPU here, {HOST_ARCH} without one)",
    )
    parser.add_argument(
        "--regime",
        default="auto",
        metavar="PLAN",
        help="auto looks it up in the profile table; or a plan's name, of the table or not",
    )
    parser.add_argument(
        "--explain", action="store_true", help="say why, and what else was considered"
    )
    add_json(parser)
    parser.set_defaults(run=_run)


def positive(text: str) -> int:
    """A number of at least 1, as an option's type."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return int(text)


def _run(args: argparse.Namespace, output: Output) -> int:
    from tessera_cupy.attention import make_plan
    from tessera_cupy.explain import brief
    from tessera_cupy.masks import BlockMask, KeySlices
    from tessera_cupy.masks.key_slices import block_mask
    from tessera_cupy.request import ArraySpec

    array = load_mask(args.mask)
    with named_options(_OPTIONS):
        arch = get_arch(args.arch or _arch_here() or HOST_ARCH)
        given: BlockMask | KeySlices
        if args.block[1] == 1:
            given = KeySlices.from_groups(array, args.block[0], args.shape)
        else:
            given = BlockMask.from_dense(array, tuple(args.block), args.shape)
        mask = block_mask(given)
        heads_q = args.heads_q or mask.heads
        q, k = (
            ArraySpec((mask.batch, heads, tokens, args.head_dim), args.dtype)
            for heads, tokens in zip((heads_q, args.heads_kv or heads_q), mask.shape, strict=True)
        )
        _check_regime(args.regime, arch.table)
        plan = make_plan(mask, q, k, regime=args.regime, arch=arch.name)
    text = f"{given!r}\n\n{plan.explain()}" if args.explain else brief(plan)
    output.show(plan.summary() if output.json else {}, text)
    return 0


@contextmanager
def named_options(options: Mapping[str, str]) -> Iterator[None]:
    """Errors name the command's option in place of the argument of the Python call.

    Args:
        options: by the argument's name, the option.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        text = re.sub(r"^`(\w+)`", lambda m: f"`{options.get(m[1], m[1])}`", str(error))
        raise type(error)(text) from error


def _check_regime(name: str, table: str) -> None:
    """Refuse a name that no plan has: which part is wrong, and which plan's name is near."""
    from tessera_cupy.regimes import PlanSpec, load_for
    from tessera_cupy.regimes.plan_spec import nearest

    if name == "auto":
        return
    try:
        PlanSpec.parse(name, argument="regime")
    except ValueError as error:
        ranked = [plan.name for plan in load_for(table).plans()]
        near = nearest(name) or next(iter(difflib.get_close_matches(name, ranked, 1)), None)
        meant = f"did you mean {near}?" if near else "take auto, or name a plan:"
        fix = f"{meant} `tessera-cupy plans show {table}` lists all"
        raise ValueError(f"{str(error).partition('. Fix: ')[0]}. Fix: {fix}.") from error


def _arch_here() -> str | None:
    """Architecture of the first GPU; None, which means the planner's own, without one."""
    try:
        device = gpu.devices()[0]
    except NoGpuError:
        return None
    return arch_for(device.capability, device.name).name


def load_mask(path: Path) -> NDArray[Any]:
    """Read a mask; never a pickle, which could run code."""
    try:
        with path.open("rb") as file:
            array: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
    except OSError as error:
        raise type(error)(_wrong_file(f"{path} ({error.strerror})")) from error
    except ValueError as error:
        raise ValueError(_wrong_file(f"{path} ({error})")) from error
    if not 2 <= array.ndim <= 4:
        raise ValueError(_wrong_file(f"shape {array.shape} in {path}"))
    if array.dtype.kind not in "biu":
        raise TypeError(_wrong_file(f"dtype {array.dtype} in {path}"))
    return array


def _wrong_file(got: str) -> str:
    expected = (
        "a .npy file with one array, bool or 0/1 integers of axes (query blocks, key blocks), "
        "(heads, ...) or (batch, heads, ...)"
    )
    return wrong("--mask", expected, got, "save such an array with numpy.save(path, mask != 0)")
