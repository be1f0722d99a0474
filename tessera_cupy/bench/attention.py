"""Attention rates against torch's dense backends, in one run on one GPU.

Masks are random: each row of blocks keeps the same number of blocks, drawn without
replacement. Rates count active (query, key) pairs only, 4 * d floating-point operations each,
so a ratio of 1 means that skipping work costs nothing. Absolute rates move with the clock and
with who else uses the machine; the ratios of one run hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tessera_cupy import interop
from tessera_cupy.attention import make_plan
from tessera_cupy.bench import gpu
from tessera_cupy.bench.contest import one_line
from tessera_cupy.bench.corpus import random_mask
from tessera_cupy.bench.machine import machine
from tessera_cupy.errors import PlanNotEligibleError, wrong
from tessera_cupy.masks import BlockMask
from tessera_cupy.plan import Plan
from tessera_cupy.regimes import Features, load_for

#: torch backends of the table: column title and torch's name.
BACKENDS = (("FA2", "FLASH_ATTENTION"), ("cuDNN", "CUDNN_ATTENTION"))
WARM_UP, RUNS = 2, 9


@dataclass(frozen=True)
class Case:
    """One mask: square blocks of ``block`` tokens, ``density`` of them kept in each row."""

    block: int
    density: float


CASES = tuple(Case(block, density) for block in (128, 64, 32, 16) for density in (1.0, 0.1))


def plan_of_kernel(kernel: str, mask: BlockMask, q: Any, k: Any, v: Any) -> Plan:
    """The plan of one kernel that the profile table ranks highest.

    Raises:
        ValueError: no plan of that kernel can serve the request.
    """
    auto = make_plan(mask, q, k, v)
    r = auto.request
    features = Features.of(
        mask,
        batch=r.batch,
        q_heads=r.q_heads,
        dtype=r.kernel_dtype,
        head_dim=r.head_dim,
        layout=r.layout,
    )
    for spec in load_for(r.arch.table).lookup(features).ranking:
        if spec.kernel == kernel:
            try:
                return make_plan(mask, q, k, v, regime=spec)
            except PlanNotEligibleError:
                continue
    raise ValueError(
        wrong("kernel", "one that can run here", repr(kernel), f"use {auto.spec.kernel}")
    )


def run(
    tokens: int,
    heads: int,
    head_dim: int,
    cases: tuple[Case, ...],
    on_case: Callable[[], None],
    kernel: str | None = None,
    *,
    cold: bool = False,
) -> dict[str, Any]:
    """Time every case and torch's dense backends on bfloat16 random input.

    Args:
        tokens: query and key tokens.
        heads: heads of q, k and v.
        head_dim: elements of a row.
        cases: the masks.
        on_case: called after each case and backend.
        kernel: the kernel to measure; None leaves the choice to the profile table.
        cold: whether each call begins with a cold L2.

    Returns:
        JSON-able: the machine, the sizes, ``dense``, milliseconds and TFLOP/s of each of torch's
        backends or the ``reason`` why it has none (none without torch), and in ``rows`` for each
        case its plan, milliseconds, TFLOP/s of active pairs and the ratio to each backend.

    Raises:
        NoGpuError: there is none.
    """
    cupy = interop.import_cupy()
    rng = np.random.default_rng(0)
    shape = (1, heads, tokens, head_dim)
    dtype = interop.numpy_dtype("bfloat16")
    q, k, v = (cupy.asarray(rng.standard_normal(shape, np.float32).astype(dtype)) for _ in range(3))
    out = cupy.empty_like(q)

    def timed(call: Callable[[], object], pairs: int) -> dict[str, Any]:
        times = gpu.timings({"": call}, lambda: None, warm_up=WARM_UP, runs=RUNS, cold=cold)
        rate = 4 * head_dim * pairs / times[""].median / 1e9
        return {"ms": times[""].median, "spread_ms": times[""].spread, "tflops": rate}

    dense: dict[str, dict[str, Any]] = {}
    for title, backend in BACKENDS:
        if gpu.has_torch():
            try:
                dense[title] = timed(gpu.dense_call(q, k, v, backend), tokens**2 * heads)
            except Exception as error:  # a peer's own failure, of whatever type, is a result here
                dense[title] = {"reason": one_line(error)}
        on_case()
    rates = {title: one["tflops"] for title, one in dense.items() if "tflops" in one}
    rows = []
    for case in cases:
        mask = random_mask((case.block, case.block), case.density, heads, tokens, rng)
        plan = make_plan(mask, q, k, v) if kernel is None else plan_of_kernel(kernel, mask, q, k, v)
        result = timed(partial(plan.run, q, k, v, out=out), mask.active_pairs())
        rows.append(
            {
                "block": case.block,
                "density": mask.density(),
                "plan": plan.spec.name,
                **result,
                "ratios": {title: result["tflops"] / rate for title, rate in rates.items()},
            }
        )
        on_case()
    sizes = {"tokens": tokens, "heads": heads, "head_dim": head_dim, "dtype": "bfloat16"}
    return {**machine(), **sizes, "dense": dense, "rows": rows}
