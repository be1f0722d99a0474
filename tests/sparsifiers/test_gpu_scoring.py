"""Scoring on a GPU: equal to NumPy, without a wait, and in a tenth of the attention's time."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tessera_cupy import block_sparse_attention
from tessera_cupy.permute import TokenOrders
from tessera_cupy.sparsifiers import scoring, spade
from tessera_cupy.video import VideoGrid

pytestmark = pytest.mark.gpu

DTYPES = (np.float16, ml_dtypes.bfloat16, np.float32)
#: Not a multiple of any tile or block, and long enough for hundreds of CTAs.
GRID = VideoGrid(9, 29, 44, text_tokens=77)


@pytest.fixture
def cupy() -> Any:
    import cupy

    return cupy


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


def whole(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> Any:
    """Small whole numbers: every sum is exact, whatever its order."""
    return rng.integers(-4, 5, shape).astype(dtype)


def equal(cupy: Any, made: Any, expected: np.ndarray) -> None:
    assert isinstance(made, cupy.ndarray)
    assert made.dtype == expected.dtype
    assert np.array_equal(cupy.asnumpy(made), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [64, 128, 37, 200])
def test_pooling(cupy: Any, rng: Any, dtype: Any, d: int) -> None:
    x = whole(rng, 2, 3, GRID.tokens, d, dtype=dtype)
    orders = spade.candidates(GRID, spade.WAN_TILES).choosing(rng.integers(0, 6, (2, 3)))
    memory = cupy.empty((2, GRID.tokens, 3, d), dtype)
    memory[:] = cupy.asarray(x).transpose(0, 2, 1, 3)
    for blocks in (64, 100, GRID.tile_blocks((4, 4, 4)).sizes):
        expected = scoring.pool_kinds(x, blocks, scoring.KINDS, orders=orders)
        for array in (cupy.asarray(x), memory.transpose(0, 2, 1, 3)):
            made = scoring.pool_kinds(array, blocks, scoring.KINDS, orders=orders)
            for one, other in zip(made, expected, strict=True):
                equal(cupy, one, other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_likeness(cupy: Any, rng: Any, dtype: Any) -> None:
    x = rng.standard_normal((1, 4, GRID.tokens, 128)).astype(dtype)
    orders = spade.candidates(GRID, spade.WAN_TILES)
    x[0, 0] = np.repeat(x[0, 0, ::64], 64, axis=0)[: GRID.tokens][np.argsort(orders.orders[3])]
    array = cupy.asarray(x)
    alike = scoring.likeness(array, 64, orders=orders)
    expected = scoring.likeness(x, 64, orders=orders)
    assert np.allclose(cupy.asnumpy(alike), expected, rtol=1e-4, atol=1e-6)
    choice = cupy.asnumpy(scoring.most_alike(array, 64, orders).choice)
    assert choice[0, 0] == 3
    means = [
        scoring.likeness(x, 64, orders=orders.choosing(np.full((1, 4), i))).mean(axis=2)
        for i in range(len(orders.orders))
    ]
    chosen = np.take_along_axis(np.array(means), choice[None], axis=0)[0]
    assert np.allclose(chosen, np.max(means, axis=0), rtol=1e-4)


@pytest.mark.parametrize(("n", "m", "d"), [(900, 900, 128), (450, 1201, 37), (33, 4000, 256)])
def test_scores(cupy: Any, rng: Any, n: int, m: int, d: int) -> None:
    a, b = whole(rng, 2, 2, n, d), whole(rng, 2, 2, m, d)
    made = scoring.scores(cupy.asarray(a), cupy.asarray(b), scale=0.5)
    equal(cupy, made, scoring.scores(a, b, scale=0.5))
    a, b = rng.standard_normal(a.shape, np.float32), rng.standard_normal(b.shape, np.float32)
    made = cupy.asnumpy(scoring.scores(cupy.asarray(a), cupy.asarray(b)))
    assert np.allclose(made, scoring.scores(a, b), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [64, 128, 37])
def test_extreme_scores(cupy: Any, rng: Any, dtype: Any, d: int) -> None:
    q, k = whole(rng, 2, 1, 3, GRID.tokens, d, dtype=dtype)
    blocks = (64, GRID.tile_blocks((4, 4, 4)).sizes)
    made = scoring.extreme_scores(cupy.asarray(q), cupy.asarray(k), blocks)
    equal(cupy, made, scoring.extreme_scores(q, k, blocks))


@pytest.mark.parametrize("columns", [31, 900, 1024, 1025, 3600, 9001])
def test_the_highest(cupy: Any, rng: Any, columns: int) -> None:
    score = rng.standard_normal((1, 2, 500, columns), np.float32)
    score[0, 1] = np.round(score[0, 1])
    score[0, :, ::7] = rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0], columns)
    always = rng.random((500, columns)) < 0.02
    for count in (0, 1, columns // 6, columns):
        made = scoring.keep_top(cupy.asarray(score), count, always=cupy.asarray(always))
        equal(cupy, made, scoring.keep_top(score, count, always=always))


@pytest.mark.parametrize("columns", [31, 900, 1025, 3600, 9001])
def test_the_fewest_that_reach_a_mass(cupy: Any, rng: Any, columns: int) -> None:
    score = 2 * rng.standard_normal((1, 2, 300, columns), np.float32)
    weights = rng.integers(1, 100, (1, 2, columns)).astype(np.float32)
    made = cupy.asnumpy(
        scoring.keep_mass(cupy.asarray(score), 0.9, weights=cupy.asarray(weights), least=2)
    )
    p = np.exp(score.astype(np.float64)) * weights[:, :, None]
    p /= p.sum(axis=-1, keepdims=True)
    least = np.where(made, p, np.inf).min(axis=-1)
    kept = np.where(made, p, 0).sum(axis=-1)
    few = made.sum(axis=-1) == 2
    assert (kept > 0.9 - 1e-5).all()
    assert (few | (kept - least < 0.9 + 1e-5)).all()
    assert (least >= np.where(made, 0, p).max(axis=-1) * (1 - 1e-5)).all()
    again = scoring.keep_mass(cupy.asarray(score), 0.9, weights=cupy.asarray(weights), least=2)
    assert (cupy.asnumpy(again) == made).all(), "sums have a fixed order"


@pytest.mark.parametrize("dtype", DTYPES)
def test_cupy_and_numpy_select_the_same(cupy: Any, rng: Any, dtype: Any) -> None:
    q, k = whole(rng, 2, 1, 4, GRID.tokens, 64, dtype=dtype)
    # One order, as likeness is no whole number.
    rule = {"tiles": [(4, 2, 8)], "sinks": 10, "diagonal": 0.015}
    host = spade.select(q, k, GRID, **rule)
    there = spade.select(cupy.asarray(q), cupy.asarray(k), GRID, **rule)
    equal(cupy, there.orders.choice, host.orders.choice)
    assert (there.mask.to_dense() == host.mask.to_dense()).all()
    there.check()
    moved = there.permute(cupy.asarray(q))
    assert cupy.asnumpy(moved).tobytes() == host.permute(q).tobytes()


@pytest.mark.parametrize("name", ["q", "k"])
def test_what_is_no_number(cupy: Any, rng: Any, name: str) -> None:
    arrays = {side: whole(rng, 1, 4, GRID.tokens, 64, dtype=np.float16) for side in "qk"}
    arrays[name][0, 3, 4321, 63] = np.inf
    chosen = spade.select(cupy.asarray(arrays["q"]), cupy.asarray(arrays["k"]), GRID)
    with pytest.raises(ValueError, match=f"`{name}`: expected finite numbers"):
        chosen.check()


def test_a_graph_selects_again(cupy: Any, rng: Any) -> None:
    before, after, k = whole(rng, 3, 1, 4, GRID.tokens, 64, dtype=np.float16)
    q, there = cupy.asarray(before), cupy.asarray(k)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        spade.select(q, there, GRID)
        stream.synchronize()
        stream.begin_capture()  # which a wait of the host would break
        chosen = spade.select(q, there, GRID)
        graph = stream.end_capture()
        q.set(after)
        # What the graph uses must not be given to others.
        others = [cupy.full((1 << 18,), np.nan, np.float32) for _ in range(64)]
        graph.launch()
        stream.synchronize()
        expected = spade.select(q, there, GRID)
        stream.synchronize()
    assert (chosen.orders.choice == expected.orders.choice).all()
    assert (chosen.mask.to_dense() == expected.mask.to_dense()).all()
    assert all(bool(cupy.isnan(other).all()) for other in others)


def test_a_mask_takes_a_tenth_of_its_attention(cupy: Any) -> None:
    grid, heads = VideoGrid(16, 45, 80), 8
    numbers = cupy.random.RandomState(3)
    q, k, v = (
        numbers.standard_normal((1, heads, grid.tokens, 128), np.float32).astype(ml_dtypes.bfloat16)
        for _ in range(3)
    )
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        chosen = spade.select(q, k, grid)
        moved = [chosen.permute(x) for x in (q, k, v)]
        block_sparse_attention(*moved, chosen.mask)
        stream.synchronize()
        stream.begin_capture()
        again = spade.select(q, k, grid)
        graph = stream.end_capture()

        def milliseconds(work: Callable[[], Any]) -> float:
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record(stream)
            work()
            end.record(stream)
            end.synchronize()
            return float(cupy.cuda.get_elapsed_time(begin, end))

        def attend() -> None:
            block_sparse_attention(*moved, chosen.mask)

        times = [(milliseconds(graph.launch), milliseconds(attend)) for _ in range(25)][5:]
    selected, attended = (statistics.median(column) for column in zip(*times, strict=True))
    print(f"mask {1e3 * selected:.0f} us, attention {1e3 * attended:.0f} us")
    assert again.mask.shape == chosen.mask.shape
    assert selected <= 0.1 * attended, f"{1e3 * selected:.0f} us of {1e3 * attended:.0f} us"


def test_the_host_waits_for_nothing(cupy: Any, rng: Any) -> None:
    q, k = map(cupy.asarray, whole(rng, 2, 1, 4, GRID.tokens, 64, dtype=np.float16))
    spin = cupy.RawKernel(
        'extern "C" __global__ void spin(long long cycles) {'
        " const long long begin = clock64(); while (clock64() - begin < cycles) {} }",
        "spin",
    )
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        expected = spade.select(q, k, GRID)
        stream.synchronize()
        spin((1,), (1,), (np.int64(400_000_000),))
        made = spade.select(q, k, GRID)
        assert not stream.done
    stream.synchronize()
    assert (made.mask.to_dense() == expected.mask.to_dense()).all()


def test_orders_of_whole_numbers_of_runs_only(cupy: Any, rng: Any) -> None:
    """Where tiles do not move runs of tokens together, each token is read for each order."""
    grid = VideoGrid(5, 20, 45)
    x = rng.standard_normal((1, 6, grid.tokens, 64)).astype(np.float16)
    orders = TokenOrders(spade.candidates(grid, spade.WAN_TILES).orders)
    for head, order in enumerate(orders.orders):
        x[0, head, order] = np.repeat(x[0, head, ::64], 64, axis=0)[: grid.tokens]
    made = scoring.most_alike(cupy.asarray(x), 64, orders)
    equal(cupy, made.choice, np.arange(6, dtype=np.int32)[None])
