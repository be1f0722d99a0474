"""Rates of the block families beside their peers, in one run on one GPU.

Every case is one mask. Its output is first compared with float64 on sampled rows; then all
contestants are timed in turns (:func:`tessera_cupy.bench.gpu.medians_ms`), cuDNN's dense
attention among them, so that a ratio never spans minutes in which the clock has moved. Rates
count active (query, key) pairs, 4 * d floating-point operations each; a dense peer's count
every pair. q, k and v are drawn from a normal distribution, whatever the mask was made from.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from tessera_cupy import __version__, interop
from tessera_cupy.attention import make_plan
from tessera_cupy.bench import contest, gpu
from tessera_cupy.bench.check import expect_rows
from tessera_cupy.bench.families import Family
from tessera_cupy.bench.peers import PEERS, Peer
from tessera_cupy.errors import PlanNotEligibleError
from tessera_cupy.masks import BlockMask
from tessera_cupy.plan import Plan

#: The name of this package's own call among the contestants.
OURS = "tessera"

_ROWS = 64
_WARM_UP, _RUNS = 2, 7
_BFLOAT16_NAN = 0x7FC0


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


def measure(case: Case, request: Request, rivals: contest.Contest) -> dict[str, Any]:
    """Check one mask's output, then time it beside the peers.

    Returns:
        JSON-able: the mask's figures, the plan, milliseconds and TFLOP/s of active pairs of
        this package; the same of each peer, or why it has none; and the check.
    """
    cupy = interop.import_cupy()
    mask, (q, k, v), out = case.mask, request.arrays, request.out
    heads, tokens, head_dim = q.shape[1:]
    plan = request.plan(mask)
    call = partial(plan.run, q, k, v, out=out)

    out.view(cupy.uint16).fill(_BFLOAT16_NAN)  # so that an element that is never written shows
    call()
    expected = expect_rows(mask, *request.host, rows=_ROWS, dtype=out.dtype, on_head=lambda: None)
    check = expected.check(cupy.asnumpy(out))
    calls, reasons = rivals.calls(mask, expected)
    ms = gpu.medians_ms({OURS: call, **calls}, lambda: None, warm_up=_WARM_UP, runs=_RUNS)

    every, active = heads * tokens**2, mask.active_pairs()
    shown: dict[str, Any] = {name: {"reason": reason} for name, reason in reasons.items()}
    for peer in PEERS:
        if peer.name in calls:
            pairs = active if peer.backend is None else every
            shown[peer.name] = _rate(ms[peer.name], pairs, head_dim)
            shown[peer.name]["options"] = contest.options(peer, mask.block_size)
    return {
        "family": case.family.name,
        "clip": case.clip,
        "block": list(mask.block_size),
        "density": mask.density(),
        "run_coverage": mask.run_coverage(),
        "plan": plan.spec.name,
        **_rate(ms[OURS], active, head_dim),
        "peers": shown,
        "check": {
            "rows": check.rows,
            "error": check.error,
            "allowed": check.allowed,
            "passed": check.passed,
        },
    }


def _rate(ms: float, pairs: int, head_dim: int) -> dict[str, Any]:
    return {"ms": ms, "tflops": 4 * head_dim * pairs / ms / 1e9}


def measure_all(
    cases: Iterable[Case],
    request: Request,
    chosen: Sequence[Peer],
    on_case: Callable[[Mapping[str, Any]], None],
) -> dict[str, Any]:
    """Measure every case, and sum up by family.

    Args:
        cases: the masks, those of one family after each other: a change of block size makes
            FlexAttention compile anew.
        request: q, k and v.
        chosen: the peers.
        on_case: called with each case's own figures.

    Returns:
        JSON-able: the GPU, the versions, the sizes, the cases as :func:`measure` gives them,
        the rows of :func:`sum_up`, and ``passed``, whether every output was right.
    """
    rivals = contest.Contest(chosen, request.arrays)
    figures = []
    for case in cases:
        figures.append(measure(case, request, rivals))
        on_case(figures[-1])
    peers = {"peers": [peer.name for peer in chosen]}
    return report_head(request) | peers | report_body(sum_up(figures), figures)


def report_head(request: Request) -> dict[str, Any]:
    """What a report says of the machine and of q, k and v."""
    _, heads, tokens, head_dim = request.out.shape
    return {
        "gpu": gpu.name(),
        "versions": versions(),
        "tokens": tokens,
        "heads": heads,
        "head_dim": head_dim,
        "dtype": "bfloat16",
    }


def report_body(rows: Sequence[Any], figures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A report's rows by family, its cases, and whether all of their outputs were right."""
    passed = all(one["check"]["passed"] for one in figures)
    return {"rows": rows, "cases": figures, "passed": passed}


def sum_up(cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each family: means over its clips.

    Args:
        cases: figures of :func:`measure`.

    Returns:
        Rows in the order of the cases. Milliseconds, density and run coverage are arithmetic
        means; rates are all operations by all time; ``ratio`` is the rate by that of cuDNN's
        dense attention beside the same masks, None without it, and ``by_clip`` has the ratio
        of each clip.
    """
    names = list(dict.fromkeys(case["family"] for case in cases))
    return [_row(name, [case for case in cases if case["family"] == name]) for name in names]


def _row(name: str, cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    mean = {key: _mean(cases, key) for key in ("density", "run_coverage", "ms")}
    shown: dict[str, Any] = {}
    for peer in cases[0]["peers"]:
        results = [case["peers"][peer] for case in cases]
        reasons = [result["reason"] for result in results if "reason" in result]
        shown[peer] = {"reason": reasons[0]} if reasons else {"tflops": _total_rate(results)}
    rate = _total_rate(cases)
    dense = shown.get("cudnn", {}).get("tflops")
    return {
        "family": name,
        **mean,
        "plans": list(dict.fromkeys(case["plan"] for case in cases)),
        "tflops": rate,
        "ratio": rate / dense if dense else None,
        "by_clip": {case["clip"]: _ratio(case) for case in cases},
        "peers": shown,
        "passed": all(case["check"]["passed"] for case in cases),
        "error_of_allowed": max(
            case["check"]["error"] / case["check"]["allowed"] for case in cases
        ),
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


def versions() -> dict[str, str]:
    """Versions of what the figures depend on, by name; what is not installed is left out."""
    cupy = interop.import_cupy()
    found = {
        "tessera_cupy": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cupy": cupy.__version__,
        "driver_cuda": str(cupy.cuda.runtime.driverGetVersion()),
    }
    if gpu.has_torch():
        import torch

        found["torch"] = torch.__version__
        found["cudnn"] = str(torch.backends.cudnn.version())
        with suppress(PackageNotFoundError):
            found["triton"] = version("triton")
    return found
