"""The run behind ``bench parallel``: one request, on one GPU and divided over torchrun's ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tessera_cupy.attention import block_sparse_attention
from tessera_cupy.bench.machine import host_machine, machine
from tessera_cupy.bench.parallel_request import Request, make_request
from tessera_cupy.bench.parallel_times import measure
from tessera_cupy.bench.ranks import Ranks
from tessera_cupy.bench.steps import Steps
from tessera_cupy.cost import typical_gpu
from tessera_cupy.cost.model import LAUNCH_MS
from tessera_cupy.parallel import Forecast, make_plan, predict
from tessera_cupy.parallel.degrees import checked_scheme, every
from tessera_cupy.parallel.overlap import Pace, through
from tessera_cupy.request import ArraySpec
from tessera_cupy.video import VideoGrid

if TYPE_CHECKING:
    from rich.console import Console


def run_parallel(
    ranks: Ranks,
    *,
    grid: VideoGrid,
    heads: int,
    head_dim: int,
    schemes: Sequence[Any] | None,
    turns: Sequence[int],
    clip: str | None,
    mask_cache: Path | None,
    console: Console,
) -> dict[str, Any]:
    """Time one request by schemes of all ranks, and on rank 0 alone; every rank calls it.

    Args:
        ranks: who divide it.
        grid: of the tokens, with text behind.
        heads: of q, k and v.
        head_dim: elements of a row.
        schemes: as :func:`tessera_cupy.parallel.make_plan` takes them; None means all degrees of
            so many ranks.
        turns: in how many turns Ulysses goes, besides the number that the planner takes.
        clip: one of :data:`tessera_cupy.bench.clips.CLIPS`, whose frames the mask is made from;
            None means random blocks, as many in each row.
        mask_cache: file to take the mask from, and to add it to.
        console: where progress goes.

    Returns:
        The report's contents, the same on all ranks: the machine of this one, the sizes, what is
        predicted, ``rows`` as of :func:`~tessera_cupy.bench.parallel_times.measure`, and
        ``passed``, whether every output was that of one GPU.

    Raises:
        MissingExtraError, ValueError: as :func:`~tessera_cupy.bench.parallel_request.make_request`.
        RankError: a rank failed, or did not come in time.
    """
    wanted = every(ranks.size) if schemes is None else list(dict.fromkeys(schemes))
    for scheme in wanted:
        checked_scheme(scheme, ranks.size)
    steps = Steps(console, count=3)
    with steps.step("Mask", heads) as step:
        request = make_request(
            ranks,
            grid,
            heads,
            head_dim,
            clip=clip,
            mask_cache=mask_cache,
            on_head=step.advance,
        )
        tokens, density = request.shards.total, request.mask.density()
        step.done(f"{tokens:,} tokens, {heads} heads, density {density:.3f}")
    with steps.step("Plans", len(wanted) + 1) as step:
        found = forecast(request)
        step.advance()
        arrays = request.shard(ranks.rank)
        plans = []
        for scheme in wanted:
            mask = request.mask
            plans.append(make_plan(mask, *arrays, scheme=scheme, timeout=ranks.timeout))
            step.advance()
        del arrays
        step.done(f"the planner takes {found.best.degrees.name}")
    with steps.step("Measure") as step:
        whole: Callable[[], Any] | None = None
        if ranks.rank == 0:
            whole = partial(block_sparse_attention, *request.whole(), request.mask)
        rows = measure(request, plans, whole, step.advance, list(dict.fromkeys(turns)))
        step.done(f"{ranks.size} ranks beside one")
    for row in rows[1:]:
        row["predicted_ms"] = _predicted(found, row)
    about = machine() if ranks.on_gpu else host_machine()
    return {
        **about,
        "ranks": ranks.size,
        "tokens": tokens,
        "grid": str(grid),
        "heads": heads,
        "head_dim": head_dim,
        "dtype": request.dtype,
        "masks": "random" if clip is None else f"SPADE's rule, regenerated from {clip}",
        "density": density,
        "planner": {"takes": found.best.degrees.name, "alone_ms": found.alone_ms},
        "rows": rows,
        "passed": all(row["check"]["passed"] for row in rows[1:]),
    }


def _predicted(found: Forecast, row: Mapping[str, Any]) -> float:
    """What is predicted of a row's scheme and turns."""
    degrees = row["ulysses_degree"], row["ring_degree"]
    one = next(one for one in found.schemes if one.degrees == degrees)
    schedule = one.schedule
    if row["turns"] == schedule.turn_count:
        return one.ms
    pair_ms = (found.alone_ms - LAUNCH_MS) / max(1.0, float(schedule.work.sum()))
    row_bytes = float(one.sent.sum() / schedule.sent.sum())
    pace = Pace(pair_ms, row_bytes, found.network.link(schedule.degrees.ranks))
    return through(schedule.in_turns(row["turns"]), schedule.work, pace).ms


def forecast(request: Request) -> Forecast:
    """What is predicted of all schemes, for a GPU like the one here, else for the default one."""
    spec = ArraySpec(
        (1, request.heads, request.shards.total, request.head_dim),
        "bfloat16",
    )
    gpu = typical_gpu(_arch(request.ranks)).name
    return predict(request.mask, spec, shards=(request.shards, request.shards), gpu=gpu)


def _arch(ranks: Ranks) -> str:
    from tessera_cupy import gpus
    from tessera_cupy.call import HOST_ARCH

    return gpus.arch_of(ranks.device.index).name if ranks.on_gpu else HOST_ARCH
