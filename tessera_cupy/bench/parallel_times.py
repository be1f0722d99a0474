"""Times of one request divided over ranks, beside the same request on one GPU, in one run.

All contestants take turns: attention on rank 0 alone, while the others wait, and each scheme on all
ranks. A turn begins when all ranks are there; a time is that of the rank that took longest. Then
each scheme runs a few more times with events between its parts. An exchange includes waiting for
the rank that comes last, so that its least time over the ranks is nearest to what the links take.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from tessera_cupy.bench.gpu import RUN_MS, Timing
from tessera_cupy.bench.parallel_request import Request
from tessera_cupy.bench.ranks import Ranks
from tessera_cupy.parallel.heads import balance, even_deal
from tessera_cupy.parallel.plan import ParallelPlan

#: Parts of a rank's time.
PARTS = ("attention", "exchange", "copies")
#: How heads are dealt, by the name in a row.
BY_WORK, BY_COUNT = "work", "count"

_WARM_UP, _RUNS, _MOST_CALLS = 1, 7, 20
# Largest difference over the largest number, in roundings of the dtype: each result is rounded, and
# a ring rounds the parts that it merges.
_ROUNDINGS = 2
# That of float32, whose sums differ in their order.
_LEAST_ALLOWED = 1e-5


@dataclass(frozen=True)
class Contestant:
    """A scheme to time.

    Attributes:
        plan: this rank's.
        split: :data:`BY_WORK` or :data:`BY_COUNT`; None where each rank has all heads.
    """

    plan: ParallelPlan
    split: str | None

    @property
    def name(self) -> str:
        """Scheme and split in words."""
        schedule = self.plan.schedule
        if self.split is None:
            return schedule.degrees.name
        return f"{schedule.degrees.name}, by {self.split}, {schedule.turn_count} turns"


def contestants(plans: Sequence[ParallelPlan], turns: Sequence[int] = ()) -> list[Contestant]:
    """Each plan, and beside those that deal heads the same with equal numbers.

    Args:
        plans: one for each scheme.
        turns: in how many turns pure Ulysses goes besides the planned number.
    """
    found = []
    for plan in plans:
        degree = plan.schedule.degrees.ulysses_degree
        if degree == 1:
            found.append(Contestant(plan, None))
            continue
        found.append(Contestant(plan, BY_WORK))
        if plan.schedule.degrees.ring_degree == 1:
            others = [count for count in turns if count != plan.schedule.turn_count]
            found += [Contestant(plan.with_turns(count), BY_WORK) for count in others]
        heads = sum(map(len, plan.schedule.deal.q))
        found.append(Contestant(plan.with_deal(even_deal(heads, degree)), BY_COUNT))
    return found


def now(ranks: Ranks) -> Any:
    """A moment: on the current stream of a GPU, else on the host's clock."""
    if not ranks.on_gpu:
        return time.perf_counter()
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(begin: Any, end: Any) -> float:
    """Milliseconds from one moment to another, which is waited for."""
    if isinstance(begin, float):
        return 1e3 * float(end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end))


def timings(
    ranks: Ranks, calls: Mapping[str, Callable[[], object] | None], on_run: Callable[[], None]
) -> dict[str, list[float]]:
    """Samples of each call, in turns, each the longest of the ranks.

    Args:
        ranks: who call.
        calls: by name, the same names on all ranks; None where this one only waits.
        on_run: called after each.

    Returns:
        By name, milliseconds of one call; the same on all ranks.
    """
    order, counts = list(calls), dict.fromkeys(calls, 1)
    samples: dict[str, list[float]] = {name: [] for name in order}
    for turn in range(_WARM_UP + _RUNS):
        for name in reversed(order) if turn % 2 else order:
            ranks.wait()
            mine = _run(ranks, calls[name], counts[name])
            longest = max(told["ms"] for told in ranks.tell({"ms": mine}))
            if turn < _WARM_UP:
                counts[name] = min(_MOST_CALLS, max(1, math.ceil(RUN_MS / max(longest, 1e-3))))
            else:
                samples[name].append(longest)
            on_run()
    return samples


def _run(ranks: Ranks, call: Callable[[], object] | None, count: int) -> float:
    if call is None:
        return 0.0
    call()  # untimed: the host is ahead of the GPU when the clock begins
    begin = now(ranks)
    for _ in range(count):
        call()
    return between(begin, now(ranks)) / count


def parts(ranks: Ranks, plan: ParallelPlan, arrays: tuple[Any, Any, Any]) -> dict[str, float]:
    """Milliseconds of each part of this rank's time, medians of several calls."""
    found: dict[str, list[float]] = {name: [] for name in PARTS}
    for _ in range(_RUNS):
        ranks.wait()
        plan.run(*arrays)
        moments = [("", now(ranks))]

        def mark(part: str, moments: list[tuple[str, Any]] = moments) -> None:
            moments.append((part, now(ranks)))

        plan.run_marked(*arrays, mark)
        spent = dict.fromkeys(PARTS, 0.0)
        for (_, begin), (part, end) in pairwise(moments):
            spent[part] += between(begin, end)
        for name, ms in spent.items():
            found[name].append(ms)
    return {name: float(np.median(times)) for name, times in found.items()}


def check(request: Request, out: Any, expected: Any) -> dict[str, Any]:
    """This rank's output beside its rows of what one GPU computes, (1, heads, tokens, d) all."""
    worst, largest, finite = 0.0, 0.0, True
    own = request.shards.own(request.ranks.rank)
    right = expected[:, :, own.begin : own.end]
    for head in range(request.heads if own.tokens else 0):
        got, exact = out[:, head].float(), right[:, head].float()
        finite = finite and bool(got.isfinite().all())
        worst = max(worst, float((got - exact).abs().max()))
        largest = max(largest, float(exact.abs().max()))
    told = request.ranks.tell({"worst": worst, "largest": largest, "finite": finite})
    error = max(its["worst"] for its in told) / max(*(its["largest"] for its in told), 1e-30)
    allowed = max(_ROUNDINGS * _epsilon(request.dtype), _LEAST_ALLOWED)
    right_everywhere = all(its["finite"] for its in told) and error <= allowed
    return {
        "rows": request.heads * request.shards.total,
        "error": error,
        "allowed": allowed,
        "passed": right_everywhere,
    }


def _epsilon(dtype: str) -> float:
    import torch

    return float(torch.finfo(getattr(torch, dtype)).eps)


def measure(
    request: Request,
    plans: Sequence[ParallelPlan],
    whole: Callable[[], Any] | None,
    on_run: Callable[[], None],
    turns: Sequence[int] = (),
) -> list[dict[str, Any]]:
    """Check and time every scheme; all ranks call it.

    Args:
        request: what is computed.
        plans: this rank's, one for each scheme.
        whole: attention on one GPU, on rank 0; None on the others.
        on_run: called after each run.
        turns: as of :func:`contestants`.

    Returns:
        JSON-able: a row for one GPU, and one for each scheme, split and number of turns.
    """
    import torch

    ranks, arrays = request.ranks, request.shard(request.ranks.rank)
    shape = (1, request.heads, request.shards.total, request.head_dim)
    dtype = getattr(torch, request.dtype)
    expected = torch.empty(shape, dtype=dtype, device=ranks.device)
    if whole is not None:
        expected.copy_(whole())
    ranks.wait()
    ranks.from_first(expected)
    racing = contestants(plans, turns)
    checks = [check(request, one.plan.run(*arrays), expected) for one in racing]
    del expected
    calls: dict[str, Callable[[], object] | None] = {"": whole}
    for one in racing:
        calls[one.name] = _calling(one.plan, arrays)
    samples = timings(ranks, calls, on_run)
    alone = Timing.of(samples[""])
    pairs = float(request.mask.active_pairs())
    rows = [
        {
            "scheme": "one GPU" if ranks.on_gpu else "one process",
            "ranks": 1,
            **_rate(alone, pairs, request.head_dim),
        }
    ]
    for one, checked in zip(racing, checks, strict=True):
        took = Timing.of(samples[one.name])
        row = {
            "scheme": one.plan.schedule.degrees.name,
            "ulysses_degree": one.plan.schedule.degrees.ulysses_degree,
            "ring_degree": one.plan.schedule.degrees.ring_degree,
            "split": one.split,
            "turns": one.plan.schedule.turn_count,
            "ranks": ranks.size,
            **_rate(took, pairs, request.head_dim),
            "speedup": alone.median / took.median,
            "efficiency": alone.median / (ranks.size * took.median),
            "work": balance(one.plan.schedule.loads()),
            "sent_bytes": _sent(request, one.plan),
            **_spread_of_parts(ranks.tell(parts(ranks, one.plan, arrays))),
            "check": checked,
        }
        rows.append(row)
    return rows


def _calling(plan: ParallelPlan, arrays: tuple[Any, Any, Any]) -> Callable[[], object]:
    return lambda: plan.run(*arrays)


def _rate(time: Timing, pairs: float, head_dim: int) -> dict[str, Any]:
    tflops = 4 * head_dim * pairs / time.median / 1e9
    return {"ms": time.median, "spread_ms": time.spread, "tflops": tflops}


def _sent(request: Request, plan: ParallelPlan) -> dict[str, int]:
    import torch

    row = request.head_dim * getattr(torch, request.dtype).itemsize
    sent = plan.schedule.sent.sum(axis=1) * row
    return {"total": int(sent.sum()), "most": int(sent.max())}


def _spread_of_parts(told: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Of each part the least, the mean and the most of the ranks, and how even the attention is."""
    found: dict[str, Any] = {}
    for name in PARTS:
        times = np.array([its[name] for its in told])
        found[f"{name}_ms"] = {
            "least": float(times.min()),
            "mean": float(times.mean()),
            "most": float(times.max()),
        }
    return found | {"balance": balance(np.array([its["attention"] for its in told]))}
