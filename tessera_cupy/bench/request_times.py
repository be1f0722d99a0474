"""Times of whole requests: a new mask in GPU memory to its attention, beside the attention alone.

A request builds a ``BlockMask`` over a (heads, nq, nk) bool array on the GPU and calls the front
door: with the plan's name, which never waits, and with ``auto``, which waits for a few numbers.
A peer's request makes what it needs of the mask, lists or a plan, from the same array. What is not
attention is the difference to the attention alone, timed in turns with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from tessera_cupy import interop
from tessera_cupy.attention import block_sparse_attention
from tessera_cupy.bench import contest
from tessera_cupy.bench.check import expect_rows
from tessera_cupy.bench.family_rates import BFLOAT16_NAN, Case, Request, report_body, report_head
from tessera_cupy.bench.peers import SPARSE, Peer, Rival
from tessera_cupy.masks import BlockMask

_ROWS = 64
_WARM_UP, _RUNS = 2, 7

#: What is timed: attention alone, and requests with it; of a peer its name is that of its request.
KERNEL, NAMED, AUTO = "kernel", "named", "auto"


def alone_of(peer: str) -> str:
    """What a peer's attention alone is called."""
    return f"{peer}_kernel"


#: Of each kind of request, the attention alone that it is compared with.
ALONE = {NAMED: KERNEL, AUTO: KERNEL} | {peer.name: alone_of(peer.name) for peer in SPARSE}


def measure(
    case: Case, request: Request, rivals: Mapping[str, Rival], *, cold: bool = False
) -> dict[str, Any]:
    """Check one mask's request, then time it.

    Args:
        case: a mask on the host.
        request: q, k and v.
        rivals: by name, peers over them.
        cold: as of :func:`tessera_cupy.bench.gpu.timings`.

    Returns:
        JSON-able: the mask's figures, the plan, milliseconds of each of what is timed, the parts
        of :meth:`tessera_cupy.Plan.profile`, by name why peers have no times, and the check.
    """
    cupy = interop.import_cupy()
    mask, (q, k, v), out = case.mask, request.arrays, request.out
    dense = cupy.asarray(np.ascontiguousarray(mask.to_dense()))
    plan = request.plan(_over(dense, mask))

    def whole(regime: str) -> Any:
        return block_sparse_attention(q, k, v, _over(dense, mask), out=out, regime=regime)

    out.view(cupy.uint16).fill(BFLOAT16_NAN)  # so that an element that is never written shows
    whole(plan.spec.name)
    expected = expect_rows(mask, *request.host, rows=_ROWS, dtype=out.dtype, on_head=lambda: None)
    check = expected.check(cupy.asnumpy(out))
    calls: dict[str, Callable[[], object]] = {
        KERNEL: partial(plan.run, q, k, v, out=out),
        NAMED: partial(whole, plan.spec.name),
        AUTO: partial(whole, "auto"),
    }
    reasons, theirs = {}, {}
    for name, rival in rivals.items():
        try:
            alone = rival.call(mask)
            built = rival.request(mask, dense)
            problem = contest.problem_of(built(), expected)
            alone()
        except Exception as error:  # a peer's own failure, of whatever type, is a result here
            problem = contest.reason_of(error)
        if problem is None:
            theirs[name] = {alone_of(name): alone, name: built}
        else:
            reasons[name] = problem
    times, failed = contest.timings(calls, theirs, warm_up=_WARM_UP, runs=_RUNS, cold=cold)
    profile = plan.profile(q, k, v)
    return {
        "family": case.family.name,
        "clip": case.clip,
        "block": list(mask.block_size),
        "density": mask.density(),
        "plan": plan.spec.name,
        "ms": {name: time.median for name, time in times.items()},
        "spread_ms": {name: time.spread for name, time in times.items()},
        "parts_ms": {name: value for name, value in vars(profile).items() if name != "on_gpu"},
        "made_on_gpu": profile.on_gpu,
        "reasons": reasons | failed,
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
    chosen: Sequence[Peer],
    on_case: Callable[[Mapping[str, Any]], None],
    *,
    cold: bool = False,
) -> dict[str, Any]:
    """Measure every case, and sum up by family.

    Args:
        cases: the masks, those of one family after each other.
        request: q, k and v.
        chosen: the peers, of those that compute masks.
        on_case: called with each case's own figures.
        cold: as of :func:`measure`.

    Returns:
        JSON-able: the machine, the sizes, ``peers``, the cases as :func:`measure` gives them,
        the rows of :func:`sum_up`, and ``passed``, whether every output was right.
    """
    rivals, failed = contest.rivals(chosen, request.arrays)
    figures = []
    for case in cases:
        figures.append(measure(case, request, rivals, cold=cold))
        figures[-1]["reasons"] |= failed
        on_case(figures[-1])
    who = {"peers": [peer.name for peer in chosen]}
    return report_head(request) | who | report_body(sum_up(figures), figures)


def sum_up(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each family, in the order of the cases: means over its clips.

    Returns:
        Rows with ``ms`` and ``spread_ms`` of what all of the family's cases have, and for each
        kind of request ``preparation``: what it takes beyond its attention alone, in milliseconds
        and as a fraction of that.

    >>> times = {"kernel": 2.0, "named": 2.1, "auto": 2.2}
    >>> case = {"family": "Q64K64", "density": 0.1, "plan": "p", "ms": times, "reasons": {}}
    >>> case |= {"spread_ms": {name: [ms, ms] for name, ms in times.items()}}
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
        spreads = {
            kind: np.mean([c["spread_ms"][kind] for c in of_family], axis=0).tolist()
            for kind in kinds
        }
        # Of several reasons that of the first clip.
        reasons = {name: why for c in reversed(of_family) for name, why in c["reasons"].items()}
        rows.append(
            {
                "family": name,
                "density": float(np.mean([c["density"] for c in of_family])),
                "plans": list(dict.fromkeys(c["plan"] for c in of_family)),
                "made_on_gpu": all(c["made_on_gpu"] for c in of_family),
                "ms": ms,
                "spread_ms": spreads,
                "preparation": preparation,
                "reasons": reasons,
                "passed": all(c["check"]["passed"] for c in of_family),
            }
        )
    return rows
