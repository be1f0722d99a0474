"""NABLA, XAttention, SpargeAttn, SVG2, FG-Attn on a GPU: as NumPy, without a wait, how long."""

from __future__ import annotations

import statistics
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tessera_cupy import block_sparse_attention, reference
from tessera_cupy.sparsifiers import clusters, fg_attn, nabla, spargeattn, svg2, xattention
from tessera_cupy.video import VideoGrid

pytestmark = pytest.mark.gpu

DTYPES = (np.float16, ml_dtypes.bfloat16)
GRID = VideoGrid(9, 29, 44, text_tokens=77)
RULES: dict[Any, dict[str, Any]] = {
    nabla: {"window": (3, 3, 3)},
    xattention: {},
    spargeattn: {"order": "raster", "similarity": 0.1},
    svg2: {"q_clusters": 70, "k_clusters": 200, "iterations": 3},
    fg_attn: {"group": 128, "parts": 4},
}
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)


@pytest.fixture
def cupy() -> Any:
    import cupy

    return cupy


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(12)


def whole(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> Any:
    """Small whole numbers: every product and sum of a few is exact, whatever its order."""
    return rng.integers(-4, 5, shape).astype(dtype)


def runs(rng: np.random.Generator) -> np.ndarray:
    """(1, 4, tokens, 64), stretches of tokens that are alike."""
    directions = np.repeat(rng.standard_normal((1, 4, 12, 64)), GRID.tokens // 12 + 1, axis=2)
    noise = rng.standard_normal((1, 4, GRID.tokens, 64))
    made: np.ndarray = 1.5 * directions[:, :, : GRID.tokens] + noise
    return made


@pytest.mark.parametrize("dtype", [*DTYPES, np.float32])
@pytest.mark.parametrize("d", [64, 128, 37])
def test_antidiagonal_sums(cupy: Any, rng: Any, dtype: Any, d: int) -> None:
    q, k = whole(rng, 2, 1, 3, GRID.tokens, d, dtype=dtype)
    for stride in (8, 16):
        made = xattention.log_sums(cupy.asarray(q), cupy.asarray(k), stride)
        expected = xattention.log_sums(q, k, stride)
        assert np.allclose(cupy.asnumpy(made), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rule", [nabla, xattention, spargeattn, fg_attn], ids=lambda rule: rule.__name__
)
def test_masks(cupy: Any, rng: Any, rule: Any, dtype: Any) -> None:
    q, k = runs(rng).astype(dtype), runs(rng).astype(dtype)
    host = rule.select(q, k, GRID, **RULES[rule]).mask.to_dense()
    chosen = rule.select(cupy.asarray(q), cupy.asarray(k), GRID, **RULES[rule])
    chosen.check()
    made = chosen.mask.to_dense()
    # Sums in another order may put a block at the edge of the mass on the other side.
    assert (made != host).mean() < 2e-3
    assert 0.02 < host.mean() < 0.98


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text_first", [False, True])
def test_clusters(cupy: Any, rng: Any, dtype: Any, text_first: bool) -> None:
    """Of whole numbers, so that the nearest centroid does not depend on rounding."""
    grid = VideoGrid(9, 29, 44, 77, text_first)
    x = whole(rng, 1, 3, grid.tokens, 128, dtype=dtype)
    begun = whole(rng, 1, 3, 300, 128)
    host = clusters.kmeans(x, 300, grid, iterations=1, centroids=begun)
    there = clusters.kmeans(cupy.asarray(x), 300, grid, iterations=1, centroids=cupy.asarray(begun))
    assert (cupy.asnumpy(there.order) == host.order).all()
    assert (cupy.asnumpy(there.sizes) == host.sizes).all()
    assert np.allclose(cupy.asnumpy(there.centroids), host.centroids, rtol=1e-5, atol=1e-5)
    for piece in (64, 16):
        room = clusters.room(grid.tokens, host.sizes.shape[2], piece)
        expected = clusters.pieces(host.sizes, 300, piece, room)
        for a, b in zip(clusters.pieces(there.sizes, 300, piece, room), expected, strict=True):
            assert (cupy.asnumpy(a) == b).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_iterations_end_alike_each_time(cupy: Any, rng: Any, dtype: Any) -> None:
    x = cupy.asarray(rng.standard_normal((2, 2, GRID.tokens, 64)).astype(dtype))
    first, second = (clusters.kmeans(x, 200, GRID, iterations=10) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert cupy.asnumpy(a).tobytes() == cupy.asnumpy(b).tobytes()
    # Each token's own centroid is as near as any, but for the rounding of products.
    labels = np.repeat(np.arange(200), cupy.asnumpy(first.sizes)[0, 0, :200])
    order = cupy.asnumpy(first.order)[0, : len(labels)]
    tokens = cupy.asnumpy(x)[0, 0, order].astype(np.float32)
    centroids = cupy.asnumpy(first.centroids)[0, 0]
    apart = ((tokens - centroids[labels]) ** 2).sum(axis=1)
    spread = ((tokens - tokens.mean(axis=0)) ** 2).sum(axis=1)
    assert apart.mean() < 0.99 * spread.mean()


@pytest.mark.parametrize("dtype", DTYPES)
def test_svg2_attends_to_what_its_clusters_keep(cupy: Any, rng: Any, dtype: Any) -> None:
    grid = VideoGrid(4, 20, 21, text_tokens=19)
    centres = 2 * rng.standard_normal((2, 40, 64))
    x = centres[:, rng.integers(0, 40, grid.tokens)] + rng.standard_normal((3, 2, grid.tokens, 64))
    q, k, v = (cupy.asarray(y[None].astype(dtype)) for y in x)
    chosen = svg2.select(q, k, grid, q_clusters=30, k_clusters=60, iterations=5)
    moved = chosen.permute(q), chosen.permute_kv(k), chosen.permute_kv(v)
    out = chosen.restore(block_sparse_attention(*moved, chosen.mask))
    chosen.check()
    there = [cupy.asnumpy(x) for x in moved]
    expected = reference.attention(there[0], there[1], there[2], chosen.mask)
    restored = chosen.restore(np.asarray(expected, np.float32))
    assert np.allclose(cupy.asnumpy(out).astype(np.float32), restored, rtol=2e-2, atol=2e-2)
    assert 0.1 < chosen.mask.active_pairs() / (2 * grid.tokens**2) < 0.9


@every_rule
def test_the_host_waits_for_nothing(cupy: Any, rng: Any, rule: Any) -> None:
    q, k = map(cupy.asarray, whole(rng, 2, 1, 4, GRID.tokens, 64, dtype=np.float16))
    spin = cupy.RawKernel(
        'extern "C" __global__ void spin(long long cycles) {'
        " const long long begin = clock64(); while (clock64() - begin < cycles) {} }",
        "spin",
    )
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        expected = rule.select(q, k, GRID, **RULES[rule])
        stream.synchronize()
        spin((1,), (1,), (np.int64(400_000_000),))
        made = rule.select(q, k, GRID, **RULES[rule])
        assert not stream.done
    stream.synchronize()
    assert (made.mask.to_dense() == expected.mask.to_dense()).all()


@every_rule
def test_a_graph_captures_the_rule(cupy: Any, rng: Any, rule: Any) -> None:
    q, k, other = map(cupy.asarray, whole(rng, 3, 1, 4, GRID.tokens, 64, dtype=np.float16))
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        rule.select(q, k, GRID, **RULES[rule])
        stream.synchronize()
        stream.begin_capture()
        chosen = rule.select(q, k, GRID, **RULES[rule])
        graph = stream.end_capture()
        k[:] = other
        graph.launch()
        expected = rule.select(q, k, GRID, **RULES[rule])
        stream.synchronize()
    assert (chosen.mask.to_dense() == expected.mask.to_dense()).all()


@every_rule
@pytest.mark.parametrize("name", ["q", "k"])
def test_nan_is_told_by_the_check(cupy: Any, rng: Any, rule: Any, name: str) -> None:
    arrays = dict(zip("qk", whole(rng, 2, 1, 2, GRID.tokens, 64, dtype=np.float16), strict=True))
    arrays[name][0, 1, 4000, 9] = np.nan
    chosen = rule.select(*map(cupy.asarray, arrays.values()), GRID, **RULES[rule])
    with pytest.raises(ValueError, match=f"`{name}`: expected finite numbers"):
        chosen.check()


@every_rule
def test_how_long_a_mask_takes(cupy: Any, rule: Any) -> None:
    """Of 57,600 tokens and 8 heads, beside the dense attention's products at 600 TFLOP/s."""
    grid, heads = VideoGrid(16, 45, 80), 8
    numbers = cupy.random.RandomState(3)
    q, k = (
        numbers.standard_normal((1, heads, grid.tokens, 128), np.float32).astype(ml_dtypes.bfloat16)
        for _ in range(2)
    )
    options = {nabla: {}, fg_attn: {}, svg2: {"iterations": 2}}.get(rule, {"order": "raster"})
    if rule is xattention:
        options = {}
    stream = cupy.cuda.Stream(non_blocking=True)
    times = []
    with stream:
        rule.select(q, k, grid, **options)
        stream.synchronize()
        stream.begin_capture()
        chosen = rule.select(q, k, grid, **options)
        graph = stream.end_capture()
        for _ in range(15):
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record(stream)
            graph.launch()
            end.record(stream)
            end.synchronize()
            times.append(float(cupy.cuda.get_elapsed_time(begin, end)))
    took = statistics.median(times[5:])
    dense = 4 * heads * grid.tokens**2 * 128 / 600e12 * 1e3
    print(f"{rule.__name__}: {took:.2f} ms, dense attention {dense:.1f} ms")
    assert chosen.mask.shape == (grid.tokens, grid.tokens)
    limit: dict[Any, float] = {
        nabla: 0.05,
        spargeattn: 0.1,
        xattention: 0.15,
        svg2: 0.25,
        fg_attn: 0.1,
    }
    assert took < limit[rule] * dense
