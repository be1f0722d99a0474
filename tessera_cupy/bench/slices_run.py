"""The run behind ``bench slices``: random slices, then slices and blocks of equal mass."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tessera_cupy import interop
from tessera_cupy.bench.family_rates import Request
from tessera_cupy.bench.machine import machine
from tessera_cupy.bench.rules import RULES
from tessera_cupy.bench.rules_times import Input
from tessera_cupy.bench.slices_cases import (
    BLOCKS,
    CHOOSERS,
    GATHER,
    RATIO_TO,
    Given,
    equal_mass_cases,
    random_cases,
)
from tessera_cupy.bench.slices_times import measure, with_ratios, with_time_ratios
from tessera_cupy.bench.steps import Steps
from tessera_cupy.errors import MissingExtraError, wrong
from tessera_cupy.video import VideoGrid

if TYPE_CHECKING:
    from rich.console import Console

#: The clip's grid and its heads at most: scores of single keys are many, and made on the host.
GRID = VideoGrid(21, 30, 52)
CLIP_HEADS = 8
#: Factor on the clip's q. Without it, attention is spread over more keys than models' is: with it,
#: XAttention's rule keeps as much as its paper says.
SHARPEN = RULES["xattention"].sharpen


def run_slices(
    *,
    tokens: int,
    heads: int,
    head_dim: int,
    density: float,
    clip: str,
    as_blocks: bool,
    console: Console,
    cold: bool = False,
    sharpen: float | None = None,
) -> dict[str, Any]:
    """Time key slices on the GPU here, beside blocks and torch's dense attention.

    Args:
        tokens: query and key tokens of the random masks, which are one for all heads.
        heads: heads of q, k and v; of the clip's at most :data:`CLIP_HEADS`.
        head_dim: elements of a row.
        density: kept share of the random masks.
        clip: one of :data:`tessera_cupy.bench.clips.CLIPS`, for q and k on :data:`GRID`.
        as_blocks: also measure random slices as blocks with token bits.
        console: where progress goes.
        cold: whether each call begins with a cold L2.
        sharpen: factor on the clip's q; None is :data:`SHARPEN`.

    Returns:
        JSON-able: the machine; ``random`` and ``clip``, the sizes of either kind of masks and the
        rate of dense attention beside them (of the clip also ``mass``, unless it was left out);
        ``rows``, one for each mask as :func:`~tessera_cupy.bench.slices_times.measure` gives it,
        whose ``clip`` is ``random`` or the clip's name, the last with a ``reason`` where the clip
        was left out; and ``passed``, whether every output was right.

    Raises:
        NoGpuError: there is none.
        ValueError: an argument that cannot be served.
    """
    for name, value in (("tokens", tokens), ("heads", heads)):
        if value < 1:
            raise ValueError(wrong(name, "at least 1", value, "pass 1 or more"))
    if not 0 < density <= 1:
        raise ValueError(wrong("density", "a share above 0 and up to 1", density, "pass 0.1"))
    sharpen = SHARPEN if sharpen is None else sharpen
    if not (math.isfinite(sharpen) and sharpen > 0):
        raise ValueError(wrong("sharpen", "a number above 0", sharpen, "pass 1"))
    interop.import_cupy()
    steps = Steps(console, count=4)
    sizes = {"tokens": tokens, "heads": heads, "head_dim": head_dim}
    drawn, rows = _random(sizes, density, steps, as_blocks=as_blocks, cold=cold)
    sizes = {"tokens": GRID.tokens, "heads": min(heads, CLIP_HEADS), "head_dim": head_dim}
    try:
        from_clip, more = _from_clip(sizes, clip, sharpen, steps, cold=cold)
    except MissingExtraError as error:
        from_clip = {**sizes, "name": clip, "grid": str(GRID), "dense": None}
        more = [{"rule": "equal mass", "clip": clip, "reason": str(error)}]
    rows += more
    return {
        **machine(),
        "dtype": "bfloat16",
        "random": drawn,
        "clip": from_clip,
        "rows": rows,
        "passed": all(row["check"]["passed"] for row in rows if "check" in row),
    }


def _random(
    sizes: dict[str, int], density: float, steps: Steps, *, as_blocks: bool, cold: bool
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    with steps.step("Random masks") as step:
        request = Request(sizes["heads"], sizes["tokens"], sizes["head_dim"])
        q, k, v = request.host
        cases = random_cases(Given(request.arrays, (q, k, v)), density, as_blocks=as_blocks)
        step.done(f"{len(cases)} masks of density {density:g}, one for all heads")
    with steps.step("Check and time them", len(cases)) as step:
        figures, dense = measure(cases, "random", step.advance, cold=cold)
        with_ratios(figures, dense, RATIO_TO)
        step.done(
            f"blocks of {' and '.join(map(str, BLOCKS))}, groups of {', '.join(map(str, GATHER))}"
        )
    return {**sizes, "density": density, "dense": dense}, figures


def _from_clip(
    sizes: dict[str, int], clip: str, sharpen: float, steps: Steps, *, cold: bool
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    with steps.step(f"Masks of {clip}.mp4", 2 * len(CHOOSERS)) as step:
        given = Input(clip, GRID, sizes["heads"], sizes["head_dim"], sharpen)
        mass, cases = equal_mass_cases(Given(given.arrays, given.host), GRID, step.advance)
        step.done(f"{len(cases)} masks that keep {mass:.3f} of the attention")
    with steps.step("Check and time them", len(cases)) as step:
        figures, dense = measure(cases, clip, step.advance, cold=cold)
        with_time_ratios(figures)
        step.done("slices and blocks, in raster order and in tiles")
    facts = {"name": clip, "grid": str(GRID), "sharpen": sharpen}
    facts |= {"mass": mass, "dense": dense}
    return sizes | facts, figures
