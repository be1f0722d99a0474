"""The run behind ``bench request``: the masks of ``bench families``, whole requests, one report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tessera_cupy import interop
from tessera_cupy.bench import contest
from tessera_cupy.bench.families_run import draw
from tessera_cupy.bench.family_rates import Request
from tessera_cupy.bench.peers import SPARSE
from tessera_cupy.bench.request_times import measure_all
from tessera_cupy.bench.steps import Steps
from tessera_cupy.choice import checked_regime

if TYPE_CHECKING:
    from rich.console import Console


def run_request(
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
    cold: bool = False,
) -> dict[str, Any]:
    """Time whole requests of the block families on the GPU here.

    Args:
        peers: names of those that compute masks; None means all that can run here.
        tokens: this and all others as in :func:`tessera_cupy.bench.families_run.run_families`.
        grid: the same.
        heads: the same.
        head_dim: the same.
        families: the same.
        clips: the same.
        masks: the same.
        mask_cache: the same.
        regime: the same.
        console: the same.
        cold: the same.

    Returns:
        The report of :func:`~tessera_cupy.bench.request_times.measure_all`, and in it ``grid``,
        ``masks`` and ``left_out``, as of ``run_families``.

    Raises:
        NoGpuError, MissingExtraError, ValueError: as ``run_families``.
    """
    interop.import_cupy()
    chosen, left_out = contest.choose(peers, SPARSE)
    checked_regime(regime)
    steps = Steps(console, count=2 if masks == "random" else 3)
    drawn = draw(tokens, grid, heads, head_dim, families, clips, masks, mask_cache, steps)
    with steps.step("q, k, v") as step:
        request = Request(heads, drawn.tokens, head_dim, regime)
        step.done(f"{drawn.tokens:,} tokens, {heads} heads of {head_dim}, bfloat16, normal")
    with steps.step("Measure", drawn.count) as step:

        def on_case(figures: Mapping[str, Any]) -> None:
            step.advance()
            ms = figures["ms"]
            name = f"{figures['family']} {figures['clip']}"
            console.print(f"  {name}: request {ms['named']:.3f} ms, attention {ms['kernel']:.3f}")

        report = measure_all(drawn.cases, request, chosen, on_case, cold=cold)
        step.done(f"{drawn.count} masks beside {len(chosen)} peers")
    return report | {"grid": drawn.grid, "masks": drawn.what, "left_out": left_out}
