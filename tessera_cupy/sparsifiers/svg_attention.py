"""Sparse VideoGen in one call: heads routed, temporal ones in their order, attention, and back.

On a GPU the host never waits: routes are chosen, tokens of temporal heads moved, and the tasks of
either mask listed for the heads that took it, by kernels that read the routes where they were
written. Each head's attention is exactly that of its mask.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from tessera_cupy import gpus, interop
from tessera_cupy.attention import block_sparse_attention
from tessera_cupy.errors import wrong
from tessera_cupy.kernels.lifetime import keep_while, pool_may_grow
from tessera_cupy.masks import BlockMask
from tessera_cupy.permute import move_chosen
from tessera_cupy.routed import RoutedPlan
from tessera_cupy.sparsifiers import svg
from tessera_cupy.sparsifiers.parameters import switch
from tessera_cupy.sparsifiers.selection import check_grid, checked_inputs
from tessera_cupy.video import VideoGrid

#: Denoising steps that stay dense, of 50: the published share of the first steps is a fifth.
WARM_UP_STEPS = 10


def svg_attention(
    q: Any,
    k: Any,
    v: Any,
    grid: VideoGrid,
    *,
    keep: float = 0.3,
    sample: float = svg.SAMPLE,
    seed: int = 0,
    routes: Any = None,
    step: int | None = None,
    warm_up_steps: int = WARM_UP_STEPS,
    in_place: bool = False,
    sm_scale: float | None = None,
    stream: Any = None,
) -> Any:
    """Attention under Sparse VideoGen's masks, in raster order in and out.

    Args:
        q: (batch, heads, tokens, d) in raster order: NumPy, CuPy, torch, JAX, or any array with
            DLPack; on a GPU float16 or bfloat16.
        k: likewise, with as many heads.
        v: likewise.
        grid: the grid of the tokens, text included.
        keep: kept fraction of the masks; 0.25 to 0.30 were published.
        sample: fraction of the video's query rows by which heads are routed.
        seed: draws other rows.
        routes: (batch, heads) int32 of :func:`tessera_cupy.sparsifiers.svg.route`, to use again;
            None routes the heads anew. On a GPU CuPy's, or any with DLPack, of which all but 1 is
            spatial.
        step: the denoising step, from 0; the first ``warm_up_steps`` are dense. None is no such
            step.
        warm_up_steps: dense steps.
        in_place: leave the tokens of temporal heads where they are: tiles gather the rows of the
            same places over time, and read keys in runs of each frame. Needs a GPU with
            ``attend_wgmma``, and no room for copies. Makes no difference on the host.
        sm_scale: factor on the scores; None means ``1 / sqrt(d)``.
        stream: stream to run on; None means the current one of q's framework.

    Returns:
        An array like q. On a GPU temporal heads need room for q, k and v once more. Keep it while
        a graph that captured the call may be replayed: what the graph uses lives as long.

    Raises:
        TypeError: arrays of other kinds or dtypes, a grid that is none, or ``in_place`` that is
            neither True nor False.
        ValueError: shapes or devices that do not fit, fractions that are none; a first call within
            a capture.
        NoGpuError, UnsupportedGpuError, KernelMissingError, KernelCompileError: see
            :mod:`tessera_cupy.errors`.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> q, k, v = rng.standard_normal((3, 1, 2, 480, 16), np.float32)
        >>> svg_attention(q, k, v, VideoGrid(6, 8, 10)).shape
        (1, 2, 480, 16)
    """
    check_grid(grid)
    dense_steps = _checked_step("warm_up_steps", warm_up_steps)
    if step is not None and _checked_step("step", step) < dense_steps:
        dense = _dense(grid.tokens)
        return block_sparse_attention(q, k, v, dense, sm_scale=sm_scale, stream=stream)
    in_place = switch("in_place", in_place)
    rule = _Rule(grid, svg.windows(grid, keep), sample, seed, in_place, sm_scale)
    if interop.on_host(q):
        host = [interop.host_array(x) for x in (q, k, v)]
        result = _on_host(_Inputs(*host), rule, routes)
        return interop.host_result(result, q, interop.dtype_name(q))
    for name, array in (("q", q), ("k", k), ("v", v)):
        interop.check_no_gradient(name, array)
    device = interop.device_of(q, "q")
    cupy = interop.import_cupy()
    with interop.on_stream(stream, (q, k, v), device):
        capturing = cupy.cuda.get_current_stream().is_capturing()
        kept: list[Any] = []
        with pool_may_grow() if capturing else nullcontext():
            inputs = _Inputs(*(_whole_rows(_of_cupy(x, cupy), cupy) for x in (q, k, v)))
            kept.append(inputs)
            checked_inputs(inputs.q, inputs.k, grid, watch=False)
            out = interop.empty(q, tuple(q.shape), interop.dtype_name(q))
            _on_gpu(inputs, _of_cupy(out, cupy), rule, routes, kept)
        if capturing:
            keep_while(out, kept)
        return interop.returned(out, q)


def _checked_step(name: str, number: Any) -> int:
    whole = isinstance(number, int | np.integer) and not isinstance(number, bool)
    if not (whole and number >= 0):
        raise ValueError(wrong(name, "an int from 0", repr(number), "count the denoising steps"))
    return int(number)


class _Inputs(NamedTuple):
    """NumPy or CuPy arrays, checked."""

    q: Any
    k: Any
    v: Any


class _Rule(NamedTuple):
    """What decides routes and masks."""

    grid: VideoGrid
    reach: svg.Windows
    sample: float
    seed: int
    in_place: bool
    sm_scale: float | None

    def route(self, inputs: _Inputs, kept: list[Any]) -> Any:
        return svg.route_checked(
            *inputs, self.grid, self.reach, self.sample, self.seed, self.sm_scale, kept
        )


def _of_cupy(array: Any, cupy: Any) -> Any:
    return array if interop.framework(array) == "cupy" else cupy.from_dlpack(array)


def _whole_rows(array: Any, cupy: Any) -> Any:
    """The array, or a copy where the elements of a row are no neighbours."""
    if array.strides and array.strides[-1] == array.dtype.itemsize:
        return array
    return cupy.ascontiguousarray(array)


def _on_host(inputs: _Inputs, rule: _Rule, routes: Any) -> Any:
    """The same by a mask of all heads and the NumPy executor."""
    checked_inputs(inputs.q, inputs.k, rule.grid)
    routes = rule.route(inputs, []) if routes is None else _as_array(routes)
    _check_routes(routes, inputs.q, "NumPy")
    if not np.isin(routes, (svg.SPATIAL, svg.TEMPORAL)).all():
        got = np.unique(routes).tolist()
        raise ValueError(wrong("routes", "0 or 1 for each head", got, "pass what svg.route gave"))
    chosen = svg.selection_of(rule.grid, rule.reach, routes)
    q, k, v = (chosen.permute(x) for x in inputs)
    return chosen.restore(block_sparse_attention(q, k, v, chosen.mask, sm_scale=rule.sm_scale))


def _on_gpu(inputs: _Inputs, out: Any, rule: _Rule, routes: Any, kept: list[Any]) -> None:
    """Write ``out``, on the current stream; ``kept`` takes what a replay uses again."""
    import cupy

    if routes is None:
        routes = rule.route(inputs, kept)
    else:
        routes = _of_cupy(routes, cupy)
        _check_routes(routes, inputs.q, "CuPy")
        # The host does not look at them; every head must be on one route.
        temporal_heads = routes == svg.TEMPORAL
        kept.append(temporal_heads)
        routes = temporal_heads.astype(np.int32)
    spatial, temporal = _plans(rule, inputs)
    kept += [routes, spatial, temporal]
    if rule.in_place:
        for taken, plan in ((svg.SPATIAL, spatial), (svg.TEMPORAL, temporal)):
            plan.run(*inputs, out, chosen=routes, taken=taken, sm_scale=rule.sm_scale)
        return
    chosen = svg.orders(rule.grid).choosing(routes)
    # Only temporal heads of these are ever written or read; q's place then takes their output.
    moved = _Inputs(*(cupy.empty(x.shape, x.dtype) for x in inputs))
    kept += [chosen, moved]
    scale = rule.sm_scale
    move_chosen(inputs, moved, chosen, only=svg.TEMPORAL)
    spatial.run(*inputs, out, chosen=routes, taken=svg.SPATIAL, sm_scale=scale)
    temporal.run(*moved, moved.q, chosen=routes, taken=svg.TEMPORAL, sm_scale=scale)
    move_chosen((moved.q,), (out,), chosen, only=svg.TEMPORAL, inverse=True)


def _as_array(routes: Any) -> Any:
    try:
        return np.asarray(routes)
    except ValueError:  # of lists that differ in length
        return np.asarray(routes, object)


def _check_routes(routes: Any, q: Any, library: str) -> None:
    if tuple(routes.shape) != q.shape[:2] or routes.dtype != np.int32:
        raise ValueError(
            wrong(
                "routes",
                f"int32 of shape {tuple(q.shape[:2])}, one for each head",
                f"{routes.dtype} of shape {tuple(routes.shape)}",
                f"pass what svg.route gave, as an array of {library}",
            )
        )


@lru_cache(maxsize=8)
def _dense(tokens: int) -> BlockMask:
    """The mask that keeps everything."""
    blocks = -(-tokens // 128)
    return BlockMask.from_dense(np.ones((blocks, blocks), bool), (128, 128), (tokens, tokens))


# The plan of temporal heads in raster order: blocks of the same places make a tile.
_IN_PLACE = "attend_wgmma/q128k192/regroup-pack/longest+split"
_MOST_PLANS = 16
_made: OrderedDict[Any, tuple[RoutedPlan, RoutedPlan]] = OrderedDict()
_making = threading.Lock()


def _plans(rule: _Rule, inputs: _Inputs) -> tuple[RoutedPlan, RoutedPlan]:
    """The plans of spatial and of temporal heads, made once for arrays of a shape."""
    q, grid, reach = inputs.q, rule.grid, rule.reach
    key = (grid, reach, rule.in_place, q.shape, q.dtype.name, gpus.arch_of(q.device.id).name)
    with _making:
        if key not in _made:
            spatial = RoutedPlan(svg.spatial_mask(grid, reach.frames), *inputs)
            if rule.in_place:
                mask = svg.raster_temporal_mask(grid, reach.places)
                temporal = RoutedPlan(mask, *inputs, regime=_IN_PLACE)
            else:
                temporal = RoutedPlan(svg.temporal_mask(grid, reach.places), *inputs)
            while len(_made) >= _MOST_PLANS:
                _made.popitem(last=False)
            _made[key] = spatial, temporal
        _made.move_to_end(key)
        return _made[key]
