"""The run behind ``bench families``: masks, input, measurements, one report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera_cupy import interop
from tessera_cupy.bench import contest
from tessera_cupy.bench.clips import CLIPS
from tessera_cupy.bench.corpus import Source, full_mask, mask_of_bits, random_mask
from tessera_cupy.bench.families import FAMILIES, Family
from tessera_cupy.bench.family_rates import Case, Request, measure_all
from tessera_cupy.bench.mask_file import cached_bits
from tessera_cupy.bench.steps import Steps
from tessera_cupy.choice import checked_regime
from tessera_cupy.errors import wrong
from tessera_cupy.regimes import PlanSpec
from tessera_cupy.video import MODELS, VideoGrid

if TYPE_CHECKING:
    from rich.console import Console


def run_families(
    *,
    tokens: int,
    grid: tuple[int, int, int] | None,
    heads: int,
    head_dim: int,
    families: Sequence[str] | None,
    clips: Sequence[str] | None,
    peers: Sequence[str] | None,
    masks: str,
    mask_cache: Path | None,
    regime: str,
    console: Console,
    beside: str | None = None,
    cold: bool = False,
) -> dict[str, Any]:
    """Measure the block families on the GPU here.

    Args:
        tokens: query and key tokens; for masks from video those of a known model's grid.
        grid: (frames, rows, columns) of tokens, which then count in place of ``tokens``.
        heads: heads of q, k and v, each with a mask of its own.
        head_dim: elements of a row.
        families: names; None means all.
        clips: names of clips; None means both.
        peers: names; None means all that can run here.
        masks: ``"spade"``; or ``"random"``, which keeps as many blocks in each row.
        mask_cache: file to take masks from, and to add those to that it lacks.
        regime: ``"auto"``, or the name of a plan for the masks that it can serve.
        console: where progress goes.
        beside: name of a second plan to measure in turns with the first where it can serve the
            masks, or None.
        cold: whether each call begins with a cold L2.

    Returns:
        The report of :func:`~tessera_cupy.bench.family_rates.measure_all`, and in it
        ``grid``, None for random masks without one, ``masks``, in words, and ``left_out``, by
        name why peers that were not named did not take part.

    Raises:
        NoGpuError: there is none.
        MissingExtraError: masks have to be made, and scikit-video or av is not installed.
        ValueError: an argument that cannot be served.
    """
    interop.import_cupy()
    chosen_peers, left_out = contest.choose(peers)
    checked_regime(regime)
    if beside is not None:
        PlanSpec.parse(beside, argument="beside")
    steps = Steps(console, count=2 if masks == "random" else 3)
    drawn = draw(tokens, grid, heads, head_dim, families, clips, masks, mask_cache, steps)

    with steps.step("q, k, v") as step:
        request = Request(heads, drawn.tokens, head_dim, regime)
        step.done(f"{drawn.tokens:,} tokens, {heads} heads of {head_dim}, bfloat16, normal")

    with steps.step("Measure", drawn.count) as step:

        def on_case(figures: Mapping[str, Any]) -> None:
            step.advance()
            name = f"{figures['family']} {figures['clip']}"
            console.print(f"  {name}: {figures['ms']:.3f} ms, {figures['tflops']:.0f} TFLOP/s")

        report = measure_all(drawn.cases, request, chosen_peers, on_case, beside=beside, cold=cold)
        step.done(f"{drawn.count} masks beside {len(chosen_peers)} peers")
    return report | {"grid": drawn.grid, "masks": drawn.what, "left_out": left_out}


@dataclass(frozen=True)
class Drawn:
    """Masks to measure.

    Attributes:
        cases: the masks, made while they are asked for.
        count: how many.
        tokens: of each.
        grid: of the tokens, in words; None without one.
        what: where the masks are from, in words.
    """

    cases: Iterable[Case]
    count: int
    tokens: int
    grid: str | None
    what: str


def draw(
    tokens: int,
    grid: tuple[int, int, int] | None,
    heads: int,
    head_dim: int,
    families: Sequence[str] | None,
    clips: Sequence[str] | None,
    masks: str,
    mask_cache: Path | None,
    steps: Steps,
) -> Drawn:
    """Choose or make the masks; arguments and errors are those of :func:`run_families`."""
    chosen = [family for family in FAMILIES if families is None or family.name in families]
    if heads < 1:
        raise ValueError(wrong("heads", "at least 1", heads, "pass 1 or more"))
    laid = None if grid is None else VideoGrid(*grid)
    cases: Iterable[Case]
    if masks == "random":
        _refuse_with_random(clip=clips, mask_cache=mask_cache)
        count = tokens if laid is None else laid.tokens
        cases, total = _random_cases(chosen, heads, count), len(chosen)
        what = "random, with the same number of blocks in every row"
    else:
        laid = laid or _model_grid(tokens)
        count = laid.tokens
        sparse = [family for family in chosen if family.keep < 1]
        sources = [Source(clip, laid, heads, head_dim) for clip in dict.fromkeys(clips or CLIPS)]
        what = f"SPADE's rule, regenerated from {' and '.join(s.clip for s in sources)}"
        with steps.step("Masks", len(sources) * len(sparse) * heads) as step:
            on_gpu = interop.import_cupy().asarray
            bits = cached_bits(mask_cache, sources, sparse, step.advance, on_gpu)
            step.done(f"{len(sparse)} families: {what}")
        cases, total = _video_cases(chosen, sources, bits), len(sources) * len(chosen)
    return Drawn(cases, total, count, None if laid is None else str(laid), what)


def _model_grid(tokens: int) -> VideoGrid:
    """The grid of the first known model with so many video tokens, without its text."""
    known = {
        model.grid.video_tokens: VideoGrid(model.grid.t, model.grid.h, model.grid.w)
        for model in reversed(MODELS.values())
    }
    if tokens not in known:
        raise ValueError(
            wrong(
                "tokens",
                f"those of a known model's grid: {', '.join(map(str, sorted(known)))}",
                tokens,
                "pass --grid T H W, or --masks random",
            )
        )
    return known[tokens]


def _refuse_with_random(**arguments: object) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(
                wrong(
                    name,
                    "nothing with random masks",
                    value,
                    "leave it out, or take masks from video",
                )
            )


def _video_cases(
    families: Sequence[Family], sources: Sequence[Source], bits: Mapping[tuple[str, str], Any]
) -> Iterator[Case]:
    for family in families:
        for source in sources:
            tokens = source.grid.tokens
            if family.keep < 1:
                mask = mask_of_bits(family, bits[source.clip, family.name], tokens)
            else:
                mask = full_mask(family, source.heads, tokens)
            yield Case(family, source.clip, mask)


def _random_cases(families: Sequence[Family], heads: int, tokens: int) -> Iterator[Case]:
    rng = np.random.default_rng(0)
    for family in families:
        mask = random_mask(family.block_size, family.density, heads, tokens, rng)
        yield Case(family, "random", mask)
