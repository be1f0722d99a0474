"""The run behind ``bench slices``: random slices, then slices and blocks of equal mass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tessera_cupy import interop
from tessera_cupy.bench import gpu
from tessera_cupy.bench.family_rates import Request, versions
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
CLIP_HEADS = 4


def run_slices(
    *,
    tokens: int,
    heads: int,
    head_dim: int,
    density: float,
    clip: str,
    as_blocks: bool,
    console: Console,
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

    Returns:
        JSON-able: the GPU, the versions, the sizes, ``random`` and ``clip`` as
        :func:`~tessera_cupy.bench.slices_times.measure` gives their cases, with their sizes and the
        rate of dense attention (of the clip also ``mass``, or the ``reason`` why it was left
        out); all of them in ``cases`` too, and ``passed``, whether every output was right.

    Raises:
        NoGpuError: there is none.
        ValueError: an argument that cannot be served.
    """
    for name, value in (("tokens", tokens), ("heads", heads)):
        if value < 1:
            raise ValueError(wrong(name, "at least 1", value, "pass 1 or more"))
    if not 0 < density <= 1:
        raise ValueError(wrong("density", "a share above 0 and up to 1", density, "pass 0.1"))
    interop.import_cupy()
    steps = Steps(console, count=4)
    sizes = {"tokens": tokens, "heads": heads, "head_dim": head_dim}
    drawn = _random(sizes, density, steps, as_blocks=as_blocks)
    sizes = {"tokens": GRID.tokens, "heads": min(heads, CLIP_HEADS), "head_dim": head_dim}
    try:
        from_clip = _from_clip(sizes, clip, steps)
    except MissingExtraError as error:
        reason = {"rule": "equal mass", "clip": clip, "reason": str(error)}
        from_clip = {**sizes, "name": clip, "grid": str(GRID), "cases": [reason], "dense": None}
    cases = [*drawn["cases"], *from_clip["cases"]]
    return {
        "gpu": gpu.name(),
        "versions": versions(),
        "dtype": "bfloat16",
        "random": drawn,
        "clip": from_clip,
        "cases": cases,
        "passed": all(case["check"]["passed"] for case in cases if "check" in case),
    }


def _random(
    sizes: dict[str, int], density: float, steps: Steps, *, as_blocks: bool
) -> dict[str, Any]:
    with steps.step("Random masks") as step:
        request = Request(sizes["heads"], sizes["tokens"], sizes["head_dim"])
        q, k, v = request.host
        cases = random_cases(Given(request.arrays, (q, k, v)), density, as_blocks=as_blocks)
        step.done(f"{len(cases)} masks of density {density:g}, one for all heads")
    with steps.step("Check and time them", len(cases)) as step:
        figures, dense = measure(cases, "random", step.advance)
        with_ratios(figures, dense, RATIO_TO)
        step.done(
            f"blocks of {' and '.join(map(str, BLOCKS))}, groups of {', '.join(map(str, GATHER))}"
        )
    return {**sizes, "density": density, "cases": figures, "dense": dense}


def _from_clip(sizes: dict[str, int], clip: str, steps: Steps) -> dict[str, Any]:
    with steps.step(f"Masks of {clip}.mp4", 2 * len(CHOOSERS)) as step:
        given = Input(clip, GRID, sizes["heads"], sizes["head_dim"])
        mass, cases = equal_mass_cases(Given(given.arrays, given.host), GRID, step.advance)
        step.done(f"{len(cases)} masks that keep {mass:.3f} of the attention")
    with steps.step("Check and time them", len(cases)) as step:
        figures, dense = measure(cases, clip, step.advance)
        with_time_ratios(figures)
        step.done("slices and blocks, in raster order and in tiles")
    return {
        **sizes,
        "name": clip,
        "grid": str(GRID),
        "mass": mass,
        "cases": figures,
        "dense": dense,
    }
