"""Times of whole requests: a new mask in GPU memory to its attention, beside the attention alone.

A request builds a ``BlockMask`` over a (heads, nq, nk) bool array on the GPU and calls the front
door: with the plan's name, which never waits, and with ``auto``, which waits for a few numbers.
FlexAttention's request makes its lists from the same array. What is not attention is the
difference to the attention alone, timed in turns with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from tessera_cupy import interop
from tessera_cupy.attention import block_sparse_attention
from tessera_cupy.bench import contest, gpu
from tessera_cupy.bench.check import expect_rows
from tessera_cupy.bench.family_rates import Case, Request, report_body, report_head
from tessera_cupy.bench.flex import Flex, make_flex
from tessera_cupy.masks import BlockMask

_ROWS = 64
_WARM_UP, _RUNS = 2, 7
_BFLOAT16_NAN = 0x7FC0

#: What is timed, in the order of the report: attention alone, and requests with it.
KERNEL, NAMED, AUTO, FLEX_KERNEL, FLEX = "kernel", "named", "auto", "flex_kernel", "flex"
#: Of each kind of request, the attention alone that it is compared with.
ALONE = {NAMED: KERNEL, AUTO: KERNEL, FLEX: FLEX_KERNEL}


def measure(case: Case, request: Request, flex: Flex | None) -> dict[str, Any]:
    """Check one mask's request, then time it.

    Args:
        case: a mask on the host.
        request: q, k and v.
        flex: FlexAttention over them, or None to leave it out.

    Returns:
        JSON-able: the mask's figures, the plan, milliseconds of each of what is timed, the parts
        of :meth:`tessera_cupy.Plan.profile`, why FlexAttention has no times, and the check.
    """
    cupy = interop.import_cupy()
    mask, (q, k, v), out = case.mask, request.arrays, request.out
    dense = cupy.asarray(np.ascontiguousarray(mask.to_dense()))
    plan = request.plan(_over(dense, mask))

    def whole(regime: str) -> Any:
        return block_sparse_attention(q, k, v, _over(dense, mask), out=out, regime=regime)

    out.view(cupy.uint16).fill(_BFLOAT16_NAN)  # so that an element that is never written shows
    whole(plan.spec.name)
    expected = expect_rows(mask, *request.host, rows=_ROWS, dtype=out.dtype, on_head=lambda: None)
    check = expected.check(cupy.asnumpy(out))
    calls: dict[str, Callable[[], object]] = {
        KERNEL: partial(plan.run, q, k, v, out=out),
        NAMED: partial(whole, plan.spec.name),
        AUTO: partial(whole, "auto"),
    }
    reason = None
    if flex is not None:
        try:
            alone = flex.call(mask)
            built = flex.request(mask, dense)
            problem = contest.problem_of(built(), expected)
            alone()
        except Exception as error:  # a peer's own failure, of whatever type, is a result here
            problem = contest.one_line(error)
        if problem is None:
            calls |= {FLEX_KERNEL: alone, FLEX: built}
        reason = problem
    ms = gpu.medians_ms(calls, lambda: None, warm_up=_WARM_UP, runs=_RUNS)
    profile = plan.profile(q, k, v)
    return {
        "family": case.family.name,
        "clip": case.clip,
        "block": list(mask.block_size),
        "density": mask.density(),
        "plan": plan.spec.name,
        "ms": ms,
        "parts_ms": {name: value for name, value in vars(profile).items() if name != "on_gpu"},
        "made_on_gpu": profile.on_gpu,
        "flex_reason": reason,
        "check": {
            "rows": check.rows,
            "error": check.error,
            "allowed": check.allowed,
            "passed": check.passed,
        },
    }


def _over(dense: Any, mask: BlockMask) -> BlockMask:
    """A new mask over the blocks in GPU memory."""
    return BlockMask.from_dense(dense, mask.block_size, mask.shape)


def measure_all(
    cases: Iterable[Case],
    request: Request,
    *,
    with_flex: bool,
    on_case: Callable[[Mapping[str, Any]], None],
) -> dict[str, Any]:
    """Measure every case, and sum up by family.

    Args:
        cases: the masks, those of one family after each other.
        request: q, k and v.
        with_flex: whether FlexAttention takes part.
        on_case: called with each case's own figures.

    Returns:
        JSON-able: the GPU, the versions, the sizes, the cases as :func:`measure` gives them,
        the rows of :func:`sum_up`, and ``passed``, whether every output was right.
    """
    flex = make_flex(*request.arrays) if with_flex else None
    figures = []
    for case in cases:
        figures.append(measure(case, request, flex))
        on_case(figures[-1])
    return report_head(request) | report_body(sum_up(figures), figures)


def sum_up(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each family, in the order of the cases: means over its clips.

    Returns:
        Rows with ``ms`` of what all of the family's cases have, and for each kind of request
        ``preparation``: what it takes beyond its attention alone, in milliseconds and as a
        fraction of that.

    >>> times = {"kernel": 2.0, "named": 2.1, "auto": 2.2}
    >>> case = {"family": "Q64K64", "density": 0.1, "plan": "p", "ms": times, "flex_reason": None}
    >>> case |= {"check": {"passed": True}, "made_on_gpu": True}
    >>> round(sum_up([case])[0]["preparation"]["named"]["ratio"], 3)
    0.05
    """
    rows = []
    for name in dict.fromkeys(case["family"] for case in cases):
        of_family = [case for case in cases if case["family"] == name]
        kinds = [kind for kind in of_family[0]["ms"] if all(kind in c["ms"] for c in of_family)]
        ms = {kind: float(np.mean([c["ms"][kind] for c in of_family])) for kind in kinds}
        preparation = {
            kind: {"ms": ms[kind] - ms[alone], "ratio": ms[kind] / ms[alone] - 1}
            for kind, alone in ALONE.items()
            if kind in ms and alone in ms
        }
        reasons = [c["flex_reason"] for c in of_family if c["flex_reason"]]
        rows.append(
            {
                "family": name,
                "density": float(np.mean([c["density"] for c in of_family])),
                "plans": list(dict.fromkeys(c["plan"] for c in of_family)),
                "made_on_gpu": all(c["made_on_gpu"] for c in of_family),
                "ms": ms,
                "preparation": preparation,
                "flex_reason": reasons[0] if reasons else None,
                "passed": all(c["check"]["passed"] for c in of_family),
            }
        )
    return rows
