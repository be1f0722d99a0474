"""Times of slices and blocks on one GPU, in turns, each output compared with float64 before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tessera_cupy import interop
from tessera_cupy.attention import make_plan
from tessera_cupy.bench import contest
from tessera_cupy.bench.check import expect
from tessera_cupy.bench.gpu import Timing
from tessera_cupy.bench.slices_cases import Case
from tessera_cupy.bench.slices_mass import kept_of
from tessera_cupy.errors import PlanNotEligibleError
from tessera_cupy.masks import KeySlices

#: The name of torch's dense attention among the contestants.
DENSE = "cudnn"

_ROWS = 32
_WARM_UP, _RUNS = 2, 7
_BFLOAT16_NAN = 0x7FC0


def measure(
    cases: Sequence[Case], clip: str, on_case: Callable[[], None], *, cold: bool = False
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Check each case's output, then time all of them in turns, and dense attention.

    Args:
        cases: masks over q, k and v of one size.
        clip: where q, k and v are from, for the report.
        on_case: called after each check.
        cold: as of :func:`tessera_cupy.bench.gpu.timings`.

    Returns:
        JSON-able: for each case its mask's figures, the plan, milliseconds and TFLOP/s of active
        pairs, and the check, or the ``reason`` why no plan serves it; milliseconds and TFLOP/s of
        dense attention or the ``reason`` why it has none, None without torch.
    """
    figures, calls = [], {}
    for case in cases:
        figure, call = _checked(case)
        figures.append({"rule": case.name, "clip": clip, **case.facts, **figure})
        if call is not None:
            calls[case.name] = call
        on_case()
    theirs = contest.cudnn(cases[0].given.arrays, DENSE)
    times, reasons = contest.timings(calls, theirs, warm_up=_WARM_UP, runs=_RUNS, cold=cold)

    heads, tokens, head_dim = cases[0].given.host[0].shape[1:]
    for case, figure in zip(cases, figures, strict=True):
        if case.name in times:
            pairs = case.mask.active_pairs() * (heads if case.mask.heads == 1 else 1)
            figure |= _rate(times[case.name], pairs, head_dim)
    dense: dict[str, Any] | None = None
    if DENSE in times:
        dense = _rate(times[DENSE], heads * tokens**2, head_dim)
    elif DENSE in reasons:
        dense = {"reason": reasons[DENSE]}
    return figures, dense


def _rate(time: Timing, pairs: int, head_dim: int) -> dict[str, Any]:
    tflops = 4 * head_dim * pairs / time.median / 1e9
    return {"ms": time.median, "spread_ms": time.spread, "tflops": tflops}


def _checked(case: Case) -> tuple[dict[str, Any], Callable[[], Any] | None]:
    cupy = interop.import_cupy()
    mask, arrays = case.mask, case.given.arrays
    figure: dict[str, Any] = {"mask": _shape_of(case), "density": mask.density()}
    try:
        plan = make_plan(mask, *arrays, regime=case.regime)
    except PlanNotEligibleError as error:
        return {**figure, "reason": str(error)}, None
    out = cupy.empty_like(arrays[0])
    out.view(cupy.uint16).fill(_BFLOAT16_NAN)  # so that an element that is never written shows
    call = partial(plan.run, *arrays, out=out)
    call()
    kept = partial(kept_of, mask)
    expected = expect(kept, *case.given.host, rows=_ROWS, dtype=out.dtype, on_head=lambda: None)
    check = expected.check(cupy.asnumpy(out))
    figure |= {
        "plan": plan.spec.name,
        "check": {
            "rows": check.rows,
            "error": check.error,
            "allowed": check.allowed,
            "passed": check.passed,
        },
    }
    return figure, call


def _shape_of(case: Case) -> dict[str, Any]:
    mask = case.mask
    if isinstance(mask, KeySlices):
        return {"kind": "slices", "rows": mask.group, "keys": 1, "heads": mask.heads}
    rows, keys = mask.block_size
    return {"kind": "blocks", "rows": rows, "keys": keys, "heads": mask.heads}


def with_ratios(
    figures: Sequence[dict[str, Any]], dense: Mapping[str, Any] | None, ratio_to: str
) -> None:
    """Add to each case its rate by that of the case ``ratio_to``, and by dense attention's.

    They are ``of_blocks`` and ``of_dense``, None where there is nothing to compare with.
    """
    rates = {case["rule"]: case["tflops"] for case in figures if "tflops" in case}
    for case in figures:
        if "tflops" in case:
            against = {"of_blocks": rates.get(ratio_to), "of_dense": (dense or {}).get("tflops")}
            case |= {key: rate and case["tflops"] / rate for key, rate in against.items()}


def with_time_ratios(figures: Sequence[dict[str, Any]]) -> None:
    """Add to each case ``of_fastest_blocks``, its time by that of the fastest blocks; or None."""
    times = [case["ms"] for case in figures if "ms" in case and case["mask"]["kind"] == "blocks"]
    for case in figures:
        if "ms" in case:
            case["of_fastest_blocks"] = case["ms"] / min(times) if times else None
