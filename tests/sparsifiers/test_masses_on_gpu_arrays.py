"""Rules that keep a mass of their rows on arrays of the emulated GPU, against NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tessera_cupy.sparsifiers import nabla, spargeattn, svg2, xattention
from tessera_cupy.video import VideoGrid
from tests.emulator.emulator import compiler
from tests.emulator.gpu import EmulatedGpu, Stream

pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++ to build the emulator with")


RULES: dict[Any, dict[str, Any]] = {
    nabla: {},
    xattention: {},
    spargeattn: {"order": "raster"},
    svg2: {"q_clusters": 3, "k_clusters": 5, "iterations": 2},
}


@pytest.fixture
def gpu(kernel_cache: Path) -> Iterator[EmulatedGpu]:
    made = EmulatedGpu(kernel_cache.parent / "emulated-kernels", 1)
    with made.here():
        yield made


def drawn(grid: VideoGrid, dtype: Any = np.float16) -> Any:
    # Small integers: their products are exact, whatever the order of the sums.
    rng = np.random.default_rng(grid.tokens)
    return rng.integers(-3, 4, (2, 1, 2, grid.tokens, 16)).astype(dtype)


def never_waited(gpu: EmulatedGpu, chosen: Any) -> None:
    assert chosen.mask.source is not None
    assert (gpu.waits, gpu.copied) == (0, 0)
    chosen.check()


@pytest.mark.parametrize("grid", [VideoGrid(2, 16, 16), VideoGrid(2, 16, 16, 64)], ids=str)
@pytest.mark.parametrize("window", [None, (1, 1, 2)])
def test_nabla(gpu: EmulatedGpu, grid: VideoGrid, window: Any) -> None:
    q, k = drawn(grid)
    host = nabla.select(q, k, grid, window=window)
    there = nabla.select(gpu.array(q), gpu.array(k), grid, window=window)
    never_waited(gpu, there)
    assert (there.mask.to_dense() == host.mask.to_dense()).all()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("stride", [8, 16])
def test_xattention(gpu: EmulatedGpu, stride: int, dtype: Any) -> None:
    grid = VideoGrid(3, 9, 23)
    q, k = drawn(grid, dtype)
    host = xattention.select(q, k, grid, stride=stride)
    there = xattention.select(gpu.array(q), gpu.array(k), grid, stride=stride)
    never_waited(gpu, there)
    assert (there.mask.to_dense() == host.mask.to_dense()).all()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    "options",
    [{"cdf": 0.9}, {"cdf": 1.0}, {"cdf": 0.0}, {"top_k": 0.4}, {"similarity": 1.0}],
    ids=str,
)
def test_spargeattn(gpu: EmulatedGpu, options: dict[str, Any], dtype: Any) -> None:
    grid = VideoGrid(3, 9, 23)
    q, k = drawn(grid, dtype)
    # Some blocks of each side are of one direction, and so alike.
    q[:, :, :256] += 5
    k[:, :, 100:400, ::2] += 4
    rule = {"similarity": 0.3, "order": "raster", **options}
    host = spargeattn.select(q, k, grid, **rule)
    there = spargeattn.select(gpu.array(q), gpu.array(k), grid, **rule)
    never_waited(gpu, there)
    assert (there.mask.to_dense() == host.mask.to_dense()).all()


@pytest.mark.parametrize(
    "grid", [VideoGrid(2, 9, 11), VideoGrid(2, 9, 11, 13), VideoGrid(2, 9, 11, 13, True)], ids=str
)
def test_svg2(gpu: EmulatedGpu, grid: VideoGrid) -> None:
    q, k = drawn(grid)
    rule: dict[str, Any] = {"q_clusters": 4, "k_clusters": 9}
    begun = [x[:, :, 20 : 20 + n].astype(np.float32) for x, n in ((q, 4), (k, 9))]
    host = svg2.select(q, k, grid, **rule, iterations=2)
    there = svg2.select(gpu.array(q), gpu.array(k), grid, **rule, iterations=2)
    never_waited(gpu, there)
    compare(there, host)
    host = svg2.select(q, k, grid, **rule, centroids=(begun[0], begun[1]))
    q_begun, k_begun = map(gpu.array, begun)
    there = svg2.select(gpu.array(q), gpu.array(k), grid, **rule, centroids=(q_begun, k_begun))
    compare(there, host)


def compare(there: Any, host: Any) -> None:
    """Masks, orders and notes of an emulated GPU with NumPy's."""
    for a, b in ((there.orders, host.orders), (there.kv_orders, host.kv_orders)):
        assert (a.host() == b.host()).all()
    for a, b in zip(there.notes["centroids"], host.notes["centroids"], strict=True):
        assert a.get() == pytest.approx(b, rel=1e-5, abs=1e-5)
    for a, b in zip(there.notes["sizes"], host.notes["sizes"], strict=True):
        assert (a.get() == b).all()
    assert (there.mask.to_dense() == host.mask.to_dense()).all()
    for side in ("q_block_sizes", "kv_block_sizes"):
        assert (getattr(there.mask, side) == getattr(host.mask, side)).all()


@pytest.mark.parametrize("name", ["q", "k"])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_what_is_no_number_is_told_by_the_check(gpu: EmulatedGpu, name: str, rule: Any) -> None:
    grid = VideoGrid(2, 16, 16)
    arrays = dict(zip("qk", drawn(grid), strict=True))
    arrays[name][0, 1, 300, 3] = np.inf
    chosen = rule.select(*map(gpu.array, arrays.values()), grid, **RULES[rule])
    with pytest.raises(ValueError, match=f"`{name}`: expected finite numbers"):
        chosen.check()


@pytest.mark.parametrize(("side", "bad"), [(0, np.nan), (1, np.nan), (1, -np.inf)])
def test_centroids_that_are_no_numbers_are_told_by_the_check(
    gpu: EmulatedGpu, side: int, bad: float
) -> None:
    grid = VideoGrid(2, 9, 11)
    q, k = drawn(grid)
    begun = [x[:, :, 20 : 20 + n].astype(np.float32) for x, n in ((q, 4), (k, 9))]
    given = map(gpu.array, (q, k))
    rule: dict[str, Any] = {"q_clusters": 4, "k_clusters": 9}
    good = (gpu.array(begun[0]), gpu.array(begun[1]))
    svg2.select(*given, grid, **rule, centroids=good).check()
    begun[side][0, 1, 2, 15] = bad
    there = (gpu.array(begun[0]), gpu.array(begun[1]))
    chosen = svg2.select(*map(gpu.array, (q, k)), grid, **rule, centroids=there)
    with pytest.raises(ValueError, match="`centroids`: expected finite numbers"):
        chosen.check()
    with pytest.raises(ValueError, match="`centroids`: expected finite numbers"):
        svg2.select(q, k, grid, **rule, centroids=(begun[0], begun[1]))


def test_tokens_move_into_orders_that_only_the_gpu_knows(gpu: EmulatedGpu) -> None:
    grid = VideoGrid(2, 9, 11)
    q, k = drawn(grid)
    rule: dict[str, Any] = {"q_clusters": 4, "k_clusters": 9, "iterations": 1}
    host = svg2.select(q, k, grid, **rule)
    there = svg2.select(gpu.array(q), gpu.array(k), grid, **rule)
    moved = there.permute(gpu.array(q))
    assert (moved.get() == host.permute(q)).all()
    assert (there.permute_kv(gpu.array(k)).get() == host.permute_kv(k)).all()
    assert (there.restore(moved).get() == q).all()
    assert (there.permute_kv(k) == host.permute_kv(k)).all(), "arrays of the host, too"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_graph_captures_the_rule_and_follows_q_and_k(gpu: EmulatedGpu, rule: Any) -> None:
    grid = VideoGrid(2, 16, 16)
    first, second = drawn(grid), -drawn(grid)[:, :, :, ::-1]
    q, k = (gpu.array(x, writable=True) for x in first)
    rule.select(q, k, grid, **RULES[rule])  # constants are copied once
    with Stream() as stream:
        stream.begin_capture()
        there = rule.select(q, k, grid, **RULES[rule])
        replay = stream.end_capture()
    for arrays in (first, second):
        q.set(arrays[0])
        k.set(arrays[1])
        replay()
        host = rule.select(*arrays, grid, **RULES[rule])
        there.mask.refresh()
        assert (there.mask.to_dense() == host.mask.to_dense()).all()
        assert (there.orders.host() == host.orders.host()).all()
