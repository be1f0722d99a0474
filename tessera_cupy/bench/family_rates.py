"""Rates of the block families beside their peers, in one run on one GPU.

Every case is one mask. Its output is first compared with float64 on sampled rows; then all
contestants are timed in turns (:func:`tessera_cupy.bench.gpu.timings`), cuDNN's dense
attention among them, so that a ratio never spans minutes in which the clock has moved. Rates
count active (query, key) pairs, 4 * d floating-point operations each; a dense peer's count
every pair. q, k and v are drawn from a normal distribution, whatever the mask was made from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tessera_cupy import interop
from tessera_cupy.attention import make_plan
from tessera_cupy.bench import contest
from tessera_cupy.bench.check import Expected, expect_rows
from tessera_cupy.bench.families import Family
from tessera_cupy.bench.gpu import Timing
from tessera_cupy.bench.machine import machine
from tessera_cupy.bench.peers import PEERS, Peer
from tessera_cupy.errors import PlanNotEligibleError
from tessera_cupy.masks import BlockMask
from tessera_cupy.plan import Plan

#: The names of this package's own calls among the contestants: the plan, and one beside it.
OURS, BESIDE = "tessera", "beside"

#: Bits that an output is filled with before it is computed.
BFLOAT16_NAN = 0x7FC0

_ROWS = 64
_WARM_UP, _RUNS = 2, 7


@dataclass(frozen=True)
class Case:
    """A mask to measure; ``clip`` is where it is from, or ``random``."""

    family: Family
    clip: str
    mask: BlockMask


class Request:
    """Random q, k and v on the GPU, and on the host as the kernels read them.

    Args:
        heads: heads of q, k and v.
        tokens: query and key tokens.
        head_dim: elements of a row.
        regime: as in :func:`tessera_cupy.make_plan`; what a plan cannot serve takes "auto".

    Raises:
        NoGpuError: there is none.
    """

    def __init__(self, heads: int, tokens: int, head_dim: int, regime: str = "auto") -> None:
        cupy = interop.import_cupy()
        rng = np.random.default_rng(0)
        dtype = interop.numpy_dtype("bfloat16")
        shape = (1, heads, tokens, head_dim)
        rounded = [rng.standard_normal(shape, np.float32).astype(dtype) for _ in range(3)]
        self.arrays = tuple(cupy.asarray(array) for array in rounded)
        # In float32, which the oracle converts several times as fast as bfloat16.
        self.host = tuple(array.astype(np.float32) for array in rounded)
        self.out = cupy.empty_like(self.arrays[0])
        self.regime = regime

    def plan(self, mask: BlockMask) -> Plan:
        """The regime's plan for a mask."""
        try:
            return make_plan(mask, *self.arrays, regime=self.regime)
        except PlanNotEligibleError:
            return make_plan(mask, *self.arrays)

    def run(self, plan: Plan) -> Any:
        """Attention by a plan into :attr:`out`."""
        return plan.run(*self.arrays, out=self.out)

    def check(self, plan: Plan, expected: Expected) -> dict[str, Any]:
        """Run a plan and compare its output; JSON-able."""
        cupy = interop.import_cupy()
        # So that an element that is never written shows.
        self.out.view(cupy.uint16).fill(BFLOAT16_NAN)
        self.run(plan)
        check = expected.check(cupy.asnumpy(self.out))
        return {
            "rows": check.rows,
            "error": check.error,
            "allowed": check.allowed,
            "passed": check.passed,
        }


def measure(
    case: Case,
    request: Request,
    rivals: contest.Contest,
    *,
    beside: str | None = None,
    cold: bool = False,
) -> dict[str, Any]:
    """Check one mask's output, then time it beside the peers.

    Args:
        case: the mask.
        request: q, k and v.
        rivals: the peers.
        beside: name of a second plan to measure in turns with the first, or None.
        cold: as of :func:`tessera_cupy.bench.gpu.timings`.

    Returns:
        JSON-able: the mask's figures, the plan, milliseconds and TFLOP/s of active pairs of
        this package; the same of each peer and of the plan beside, or why it has none; and the
        check.
    """
    mask, out = case.mask, request.out
    heads, tokens, head_dim = out.shape[1:]
    plan = request.plan(mask)
    expected = expect_rows(mask, *request.host, rows=_ROWS, dtype=out.dtype, on_head=lambda: None)
    check = request.check(plan, expected)
    ours: dict[str, Callable[[], Any]] = {OURS: partial(request.run, plan)}
    second: dict[str, Any] | None = None
    if beside is not None:
        second = {"plan": beside}
        try:
            other = make_plan(mask, *request.arrays, regime=beside)
        except PlanNotEligibleError as error:
            second["reason"] = str(error)
        else:
            second["check"] = request.check(other, expected)
            ours[BESIDE] = partial(request.run, other)
    calls, reasons = rivals.calls(mask, expected)
    times, failed = contest.timings(
        ours,
        {name: {name: rival} for name, rival in calls.items()},
        warm_up=_WARM_UP,
        runs=_RUNS,
        cold=cold,
    )

    every, active = heads * tokens**2, mask.active_pairs()
    if second is not None and BESIDE in times:
        second |= _rate(times[BESIDE], active, head_dim)
    reasons |= failed
    shown: dict[str, Any] = {}
    for peer in PEERS:
        if peer.name in times:
            shown[peer.name] = _rate(times[peer.name], every if peer.dense else active, head_dim)
            shown[peer.name]["options"] = contest.options(peer, mask.block_size)
        elif peer.name in reasons:
            shown[peer.name] = {"reason": reasons[peer.name]}
    return {
        "family": case.family.name,
        "clip": case.clip,
        "block": list(mask.block_size),
        "density": mask.density(),
        "run_coverage": mask.run_coverage(),
        "plan": plan.spec.name,
        **_rate(times[OURS], active, head_dim),
        "beside": second,
        "peers": shown,
        "check": check,
    }


def _rate(time: Timing, pairs: int, head_dim: int) -> dict[str, Any]:
    tflops = 4 * head_dim * pairs / time.median / 1e9
    return {"ms": time.median, "spread_ms": time.spread, "tflops": tflops}


def measure_all(
    cases: Iterable[Case],
    request: Request,
    chosen: Sequence[Peer],
    on_case: Callable[[Mapping[str, Any]], None],
    *,
    beside: str | None = None,
    cold: bool = False,
) -> dict[str, Any]:
    """Measure every case, and sum up by family.

    Args:
        cases: the masks, those of one family after each other: a change of block size makes
            FlexAttention compile anew.
        request: q, k and v.
        chosen: the peers.
        on_case: called with each case's own figures.
        beside: as of :func:`measure`.
        cold: the same.

    Returns:
        JSON-able: the machine, the sizes, ``beside``, the cases as :func:`measure` gives them,
        the rows of :func:`sum_up`, and ``passed``, whether every output was right.
    """
    rivals = contest.Contest(chosen, request.arrays)
    figures = []
    for case in cases:
        figures.append(measure(case, request, rivals, beside=beside, cold=cold))
        on_case(figures[-1])
    who = {"beside": beside, "peers": [peer.name for peer in chosen]}
    return report_head(request) | who | report_body(sum_up(figures), figures)


def report_head(request: Request) -> dict[str, Any]:
    """What a report says of the machine and of q, k and v."""
    _, heads, tokens, head_dim = request.out.shape
    return {
        **machine(),
        "tokens": tokens,
        "heads": heads,
        "head_dim": head_dim,
        "dtype": "bfloat16",
    }


def report_body(rows: Sequence[Any], figures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A report's rows by family, its cases, and whether all of their outputs were right."""
    passed = all(map(right, figures))
    return {"rows": rows, "cases": figures, "passed": passed}


def right(case: Mapping[str, Any]) -> bool:
    """Whether a case's output was right, and that of the plan beside it."""
    checks = [case["check"], (case.get("beside") or {}).get("check")]
    return all(check["passed"] for check in checks if check)


def sum_up(cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each family: means over its clips.

    Args:
        cases: figures of :func:`measure`.

    Returns:
        Rows in the order of the cases. Milliseconds and the ends of their spread, density and
        run coverage are arithmetic means; rates are all operations by all time; ``ratio`` is the
        rate by that of cuDNN's dense attention beside the same masks, None without it, and
        ``by_clip`` has the ratio of each clip.
    """
    names = list(dict.fromkeys(case["family"] for case in cases))
    return [_row(name, [case for case in cases if case["family"] == name]) for name in names]


def _row(name: str, cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    rate = _sum(cases)
    shown = {peer: _sum([case["peers"][peer] for case in cases]) for peer in cases[0]["peers"]}
    dense = shown.get("cudnn", {}).get("tflops")
    second = None
    if cases[0].get("beside"):
        second = _sum([case["beside"] for case in cases])
        second["ratio"] = second["tflops"] / dense if dense and "tflops" in second else None
    return {
        "family": name,
        "density": _mean(cases, "density"),
        "run_coverage": _mean(cases, "run_coverage"),
        "plans": list(dict.fromkeys(case["plan"] for case in cases)),
        **rate,
        "ratio": rate["tflops"] / dense if dense else None,
        "by_clip": {case["clip"]: _ratio(case) for case in cases},
        "beside": second,
        "peers": shown,
        "passed": all(map(right, cases)),
        "error_of_allowed": max(
            case["check"]["error"] / case["check"]["allowed"] for case in cases
        ),
    }


def _sum(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means of times and the rate of all of them; the first ``reason`` where one has none."""
    reasons = [result["reason"] for result in results if "reason" in result]
    if reasons:
        return {"reason": reasons[0]}
    return {
        "ms": _mean(results, "ms"),
        "spread_ms": np.mean([result["spread_ms"] for result in results], axis=0).tolist(),
        "tflops": _total_rate(results),
    }


def _mean(cases: Sequence[Mapping[str, Any]], key: str) -> float:
    return float(np.mean([case[key] for case in cases]))


def _total_rate(results: Sequence[Mapping[str, Any]]) -> float:
    """All operations by all time, of results with ``ms`` and ``tflops``."""
    times = [result["ms"] for result in results]
    return float(np.average([result["tflops"] for result in results], weights=times))


def _ratio(case: Mapping[str, Any]) -> float | None:
    dense: float | None = case["peers"].get("cudnn", {}).get("tflops")
    return case["tflops"] / dense if dense else None
