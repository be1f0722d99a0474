"""Sparse VideoGen on a GPU: routes, outputs against the token masks, captures, torch."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tessera_cupy.sparsifiers import svg
from tessera_cupy.sparsifiers.svg_attention import svg_attention
from tessera_cupy.video import VideoGrid
from tests.sparsifiers.test_svg import GRIDS, kept

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu


def inputs(grid: VideoGrid, heads: int, dtype: Any, d: int = 64, batch: int = 1) -> list[Any]:
    """Even heads attend to their own frame, odd ones to their own place."""
    rng = np.random.default_rng(heads)
    token = np.clip(np.arange(grid.tokens) - grid.video_start, 0, grid.video_tokens - 1)
    frame, place = np.divmod(token, grid.frame_tokens)
    of = [rng.standard_normal((n, d)) for n in (grid.t, grid.frame_tokens)]
    q = np.stack([of[h % 2][(frame, place)[h % 2]] for h in range(heads)])
    q = np.stack([np.roll(q, b, axis=0) for b in range(batch)])
    return [x.astype(dtype) for x in (1.5 * q, q, rng.standard_normal(q.shape))]


def check_rows(grid: VideoGrid, out: Any, arrays: list[Any], routes: Any, reach: Any) -> None:
    """Against float64 on some rows of each head, by the definition of the masks."""
    rows = np.unique(np.linspace(0, grid.tokens - 1, 61).astype(int))
    q, k, v = (x.astype(np.float64) for x in arrays)
    eps = float(ml_dtypes.finfo(arrays[0].dtype).eps)
    for b, h in np.ndindex(*routes.shape):
        mask = kept(grid, routes[b, h], reach[routes[b, h]], rows)
        scores = q[b, h, rows] @ k[b, h].T / np.sqrt(q.shape[3])
        scores = np.where(mask, scores, -np.inf)
        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        expected = p @ v[b, h] / p.sum(axis=1, keepdims=True)
        error = abs(out[b, h, rows].astype(np.float64) - expected)
        assert error.max() < 6 * eps * max(1, abs(expected).max()), (b, h)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("grid", [*GRIDS[:3], VideoGrid(21, 30, 52)], ids=str)
def test_the_call_is_exact(grid: VideoGrid, dtype: Any) -> None:
    heads, batch = (3, 2) if grid.tokens < 1000 else (4, 1)
    host = inputs(grid, heads, dtype, batch=batch)
    arrays = [cupy.asarray(x) for x in host]
    reach = svg.windows(grid, 0.4)
    filler = cupy.empty(arrays[0].size * 4, np.uint16)
    filler.fill(0x7FFF)  # memory that the call may be given holds NaN
    del filler
    routes = svg.route(*arrays, grid, keep=0.4).get()
    assert {0, 1} == set(routes.ravel().tolist())
    if grid.tokens < 1000:  # the NumPy code takes minutes beyond
        assert (routes == svg.route(*[x.astype(np.float32) for x in host], grid, keep=0.4)).all()
    out = svg_attention(*arrays, grid, keep=0.4)
    check_rows(grid, cupy.asnumpy(out), host, routes, reach)
    again = svg_attention(*arrays, grid, keep=0.4)
    assert (again.view(np.uint16) == out.view(np.uint16)).all()
    if cupy.cuda.Device().compute_capability == "90":
        out = svg_attention(*arrays, grid, keep=0.4, in_place=True)
        check_rows(grid, cupy.asnumpy(out), host, routes, reach)


@pytest.mark.parametrize("taken", [0, 1])
def test_all_heads_on_one_route(taken: int) -> None:
    grid = GRIDS[1]
    host = inputs(grid, 3, np.float16)
    arrays = [cupy.asarray(x) for x in host]
    routes = np.full((1, 3), taken, np.int32)
    out = svg_attention(*arrays, grid, keep=0.4, routes=cupy.asarray(routes))
    check_rows(grid, cupy.asnumpy(out), host, routes, svg.windows(grid, 0.4))


def test_a_capture_routes_anew() -> None:
    grid = VideoGrid(5, 8, 16)
    first, second = (inputs(grid, 4, np.float16, batch=b)[0:3] for b in (1, 1))
    second = [x[:, ::-1].copy() for x in second]
    arrays = [cupy.asarray(x) for x in first]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        svg_attention(*arrays, grid)
        stream.synchronize()
        stream.begin_capture()
        out = svg_attention(*arrays, grid)
        graph = stream.end_capture()
        for host in (second, first):
            for array, values in zip(arrays, host, strict=True):
                array.set(values)
            graph.launch(stream)
            stream.synchronize()
            routes = svg.route(*arrays, grid).get()
            check_rows(grid, cupy.asnumpy(out), host, routes, svg.windows(grid, 0.3))


def test_a_graph_s_memory_is_its_own_until_the_result_ends() -> None:
    """Between capture and replay others take what memory there is, and the caches forget."""
    grid = VideoGrid(5, 8, 16)
    host = inputs(grid, 4, np.float16)
    arrays = [cupy.asarray(x) for x in host]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        expected = cupy.asnumpy(svg_attention(*arrays, grid))
        stream.begin_capture()
        out = svg_attention(*arrays, grid)
        graph = stream.end_capture()
        for seed in range(1, 12):
            svg_attention(*arrays, grid, seed=seed, keep=0.2 + seed / 20)
        for cached in (svg._samples, svg.orders, svg._copies):
            cached.cache_clear()
        others = [cupy.full(n, np.nan, np.float32) for n in (100, 5_000, 50_000, 200_000) * 20]
        out.fill(0)
        graph.launch(stream)
        stream.synchronize()
        assert (cupy.asnumpy(out).view(np.uint16) == expected.view(np.uint16)).all()
        assert all(bool(cupy.isnan(x).all()) for x in others)


def test_a_first_call_within_a_capture_is_refused() -> None:
    grid = VideoGrid(3, 8, 18)
    arrays = [cupy.asarray(x) for x in inputs(grid, 2, np.float16)]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        try:
            with pytest.raises(
                ValueError, match="`stream`: expected a stream that is not capturing"
            ):
                svg_attention(*arrays, grid)
        finally:
            stream.end_capture()


def test_torch_tensors_and_other_strides() -> None:
    torch = pytest.importorskip("torch")
    grid = VideoGrid(5, 8, 16)
    host = inputs(grid, 4, ml_dtypes.bfloat16)
    arrays = [cupy.asarray(x) for x in host]
    expected = cupy.asnumpy(svg_attention(*arrays, grid))
    # (batch, tokens, heads, d) in memory, as models hold them.
    tensors = [
        torch.from_numpy(x.astype(np.float32)).bfloat16().cuda().transpose(1, 2).contiguous()
        for x in host
    ]
    out = svg_attention(*(x.transpose(1, 2) for x in tensors), grid)
    assert isinstance(out, torch.Tensor)
    assert (out.float().cpu().numpy() == expected.astype(np.float32)).all()
