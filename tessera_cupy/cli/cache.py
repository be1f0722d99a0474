"""``tessera-cupy cache``: compile kernels ahead of time, and look after them."""

from __future__ import annotations

import argparse
import time
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from tessera_cupy.cli import gpu
from tessera_cupy.cli.output import Commands, Output, add_json, size
from tessera_cupy.errors import NoGpuError, TesseraError, wrong
from tessera_cupy.kernels import roots, toolchain
from tessera_cupy.kernels.arch import ARCHS, arch_for, get_arch
from tessera_cupy.kernels.cache import KernelCache, default_cache
from tessera_cupy.kernels.catalog import DTYPES, KernelConfig, catalog, find

if TYPE_CHECKING:
    from tessera_cupy.kernels.batch import Outcome


def add_to(commands: Commands) -> None:
    """Declare the command and its four actions."""
    parser = commands.add_parser(
        "cache",
        help="compile kernels ahead of time, and look after them",
        description="Kernels are compiled once and kept on disk, in $TESSERA_CACHE_DIR or the "
        "user's cache folder.",
    )
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")

    build = actions.add_parser("build", help="compile what is missing; needs no GPU")
    _add_arch(build, "default: that of the GPU here")
    build.add_argument("--dtype", choices=tuple(DTYPES), help="only kernels for this dtype")
    build.add_argument(
        "--head-dim", type=int, metavar="D", help="only kernels that serve this head dim"
    )
    build.add_argument("--jobs", type=int, metavar="N", help="processes (default: one per CPU)")
    build.set_defaults(run=_build)

    status = actions.add_parser("status", help="what is in the cache")
    status.set_defaults(run=_status)

    verify = actions.add_parser("verify", help="check every kernel against its recorded hash")
    verify.set_defaults(run=_verify)

    clear = actions.add_parser("clear", help="remove kernels")
    _add_arch(clear, "default: all")
    clear.set_defaults(run=_clear)

    for action in (build, status, verify, clear):
        add_json(action)


def _add_arch(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--arch", type=_archs, metavar="A,B", help=f"of {','.join(ARCHS)}; {default}"
    )


def _archs(text: str) -> list[str]:
    try:
        return list(dict.fromkeys(get_arch(name.strip()).name for name in text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _build(args: argparse.Namespace, output: Output) -> int:
    from tessera_cupy.kernels.batch import build_all

    archs = args.arch or _archs_here()
    configs = [c for arch in archs for c in _selected(catalog(arch), args.dtype, args.head_dim)]
    cache = default_cache()
    root = _writable(cache, archs)
    toolchain.load()  # without NVRTC, one error in place of one for each kernel
    begin = time.perf_counter()
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=output.console,
    ) as progress:
        task = progress.add_task(f"Kernels for {', '.join(archs)}", total=len(configs))

        def done(outcome: Outcome) -> None:
            progress.advance(task)
            if outcome.built or outcome.error:
                progress.console.print(_outcome_line(outcome))

        outcomes = build_all(configs, args.jobs, done, cache)
    failed = [outcome for outcome in outcomes if outcome.error]
    built = sum(outcome.built for outcome in outcomes)
    report = {
        "folder": str(root),
        "built": built,
        "present": len(outcomes) - built - len(failed),
        "failed": len(failed),
        "seconds": time.perf_counter() - begin,
        "kernels": [_outcome_facts(outcome) for outcome in outcomes],
    }
    text = Text(
        f"{built} compiled, {report['present']} were there, {len(failed)} failed, "
        f"in {report['seconds']:.1f} s: {root}"
    )
    output.show(report, text)
    return 1 if failed else 0


def _archs_here() -> list[str]:
    """Architectures of the GPUs of this machine."""
    try:
        return sorted({arch_for(device.capability, device.name).name for device in gpu.devices()})
    except NoGpuError as error:
        example = f"--arch {','.join(list(ARCHS)[2:4])}"
        raise NoGpuError(
            f"No GPU here to compile for: {error}. Fix: name the architectures, "
            f"such as {example} (there are {', '.join(ARCHS)})."
        ) from error


def _selected(
    configs: Iterable[KernelConfig], dtype: str | None, head_dim: int | None
) -> list[KernelConfig]:
    """Catalog entries that a request of this dtype and head dim can lead to."""
    chosen = [c for c in configs if dtype is None or c.dtype in (dtype, "")]
    if head_dim is None:
        return chosen
    attention = [c for c in chosen if c.attends]
    own = sorted({c.head_dim for c in attention})
    if head_dim not in range(8, own[-1] + 1, 8):
        raise ValueError(
            wrong(
                "--head-dim",
                f"a multiple of 8 from 8 to {own[-1]}, as calls take (kernels have "
                f"{', '.join(map(str, own))} and serve what is smaller)",
                head_dim,
                "take the head dim of your q",
            )
        )
    serving = [
        c
        for c in attention
        if c == find(c.arch, c.kernel, c.dtype, head_dim, c.tile_q, c.tile_kv, c.bits)
    ]
    return [*serving, *(c for c in chosen if not c.attends)]


def _writable(cache: KernelCache, archs: Iterable[str]) -> Path:
    """The cache's folder; a private one, gone when this process ends, would serve nobody."""
    root = cache.root
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the error says more
        usable = root is not None and all(cache.usable_root(arch) == root for arch in archs)
    if root is None or not usable:
        raise TesseraError(
            f"The kernel cache {root or '(no home folder)'} cannot be written. Fix: {roots.FIX}."
        )
    return root


def _outcome_line(outcome: Outcome) -> Text:
    line = Text(f"{outcome.config.arch}  {outcome.config.name}  {outcome.seconds:.1f} s")
    if outcome.error:
        line.append(f"  failed: {outcome.error}", style="red")
    for problem in outcome.problems:
        line.append(f"  {problem}", style="yellow")
    return line


def _outcome_facts(outcome: Outcome) -> dict[str, Any]:
    return {
        "arch": outcome.config.arch,
        "name": outcome.config.name,
        "path": outcome.path,
        "built": outcome.built,
        "seconds": outcome.seconds,
        "problems": outcome.problems,
        "error": outcome.error,
    }


def _status(args: argparse.Namespace, output: Output) -> int:
    cache = default_cache()
    entries = cache.status()
    kernels = [
        {
            "arch": entry.arch,
            "name": entry.name,
            "digest": entry.digest,
            "path": entry.path,
            "bytes": entry.bytes,
            "current": entry.current,
        }
        for entry in entries
    ]
    current = Counter(entry.arch for entry in entries if entry.current)
    total = sum(entry.bytes for entry in entries)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("architecture", "built", "in the catalog", "of other versions", "size"):
        table.add_column(heading, justify="left" if heading == "architecture" else "right")
    for arch in ARCHS:
        of_arch = [entry for entry in entries if entry.arch == arch]
        table.add_row(
            arch,
            str(current[arch]),
            str(len(catalog(arch))),
            str(len(of_arch) - current[arch]),
            size(sum(entry.bytes for entry in of_arch)),
        )
    title = Text(f"{cache.root}: {len(entries)} kernels, {size(total)}", style="italic")
    note = Text("Counted by name, not read: tessera-cupy cache verify checks the contents.")
    if not current:
        build = "tessera-cupy cache build --arch sm_90a, or another"
        note.append(f"\nNone is built for this release: {build}, compiles ahead of time.")
    text = Group(title, table, note)
    output.show({"folder": cache.root, "bytes": total, "kernels": kernels}, text)
    return 0


def _verify(args: argparse.Namespace, output: Output) -> int:
    cache = default_cache()
    count = len(cache.status())
    damaged = cache.verify()
    lines = [f"{path}: {reason}" for path, reason in damaged.items()]
    if damaged:
        lines.append("Damaged kernels are compiled anew when they are needed.")
    lines.append(f"{count} kernels in {cache.root}, {len(damaged)} of them damaged")
    report = {
        "folder": cache.root,
        "checked": count,
        "damaged": {str(path): reason for path, reason in damaged.items()},
    }
    output.show(report, Text("\n".join(lines)))
    return 1 if damaged else 0


def _clear(args: argparse.Namespace, output: Output) -> int:
    cache = default_cache()
    archs = args.arch or [None]
    removed = sum(cache.clear(arch) for arch in archs)
    text = Text(f"{removed} kernels removed from {cache.root}")
    output.show({"folder": cache.root, "removed": removed}, text)
    return 0
