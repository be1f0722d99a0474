"""Moving tokens on a GPU: equal to NumPy's indexing, and as quick as a copy."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tessera_cupy.permute import TokenOrders, permute_tokens
from tessera_cupy.video import VideoGrid

pytestmark = pytest.mark.gpu

#: Wan's 14B model at 720p, and the tiles that SPADE chooses from.
GRID, HEADS, DIM = VideoGrid(21, 45, 80), 40, 128
TILES = [(1, 4, 16), (1, 8, 8), (16, 1, 4), (8, 1, 8), (4, 2, 8), (2, 4, 8)]
#: The least share of a copy's rate.
RATE = 0.85
#: Calls between two events: the host's part of one would else be timed too.
CALLS = 5


@pytest.fixture
def cupy() -> Any:
    import cupy

    return cupy


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture(scope="module")
def tile_orders() -> TokenOrders:
    return TokenOrders(np.stack([GRID.tile_order(tile) for tile in TILES]))


def draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Any:
    """Any bits."""
    size = np.dtype(dtype).itemsize
    return rng.integers(0, 256, (*shape[:3], shape[3] * size), np.uint8).view(dtype)


def draw_orders(rng: np.random.Generator, count: int, tokens: int) -> Any:
    return np.stack([rng.permutation(tokens) for _ in range(count)])


def counted(cupy: Any, shape: tuple[int, ...]) -> Any:
    """16-bit numbers, a few GB, of which neighbours differ and so do rows."""
    number = cupy.arange(int(np.prod(shape)) // 2, dtype=np.uint32)
    number *= np.uint32(2654435761)
    return number.view(np.uint16).reshape(shape)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
@pytest.mark.parametrize(("tokens", "d"), [(1, 8), (1_000, 128), (777, 31), (500, 256)])
def test_equal_to_numpy(
    cupy: Any, rng: Any, dtype: Any, layout: str, tokens: int, d: int, inverse: bool
) -> None:
    x = draw(rng, (2, 3, tokens, d), dtype)
    orders = TokenOrders(draw_orders(rng, 4, tokens), rng.integers(0, 4, (2, 3)))
    expected = permute_tokens(x, orders, inverse=inverse)
    array = cupy.asarray(x)
    if layout == "BSHD":
        memory = cupy.empty((2, tokens, 3, d), array.dtype)
        memory[:] = array.transpose(0, 2, 1, 3)
        array = memory.transpose(0, 2, 1, 3)
    for given in (orders, orders.choosing(cupy.asarray(orders.choice))):
        made = permute_tokens((array, array), given, inverse=inverse)
        for got in made:
            assert isinstance(got, cupy.ndarray)
            assert got.dtype == array.dtype
            assert cupy.asnumpy(got).tobytes() == expected.tobytes()


def test_more_heads_than_a_grid_s_second_axis_has(cupy: Any, rng: Any) -> None:
    x = draw(rng, (70_000, 1, 16, 8), np.float16)
    orders = TokenOrders(draw_orders(rng, 3, 16), rng.integers(0, 3, (70_000, 1)))
    made = orders.permute(cupy.asarray(x))
    assert cupy.asnumpy(made).tobytes() == orders.permute(x).tobytes()
    assert cupy.asnumpy(orders.restore(made)).tobytes() == x.tobytes()


def test_more_than_2_31_elements(cupy: Any, tile_orders: TokenOrders) -> None:
    heads = 224
    x = counted(cupy, (1, heads, GRID.tokens, DIM))
    assert x.size > 2**31
    choice = np.arange(heads)[None] % len(TILES)
    orders = tile_orders.choosing(choice)
    made = orders.permute(x)
    for head in (0, 100, heads - 1):
        assert bool((made[0, head] == x[0, head][cupy.asarray(orders.of(0, head))]).all())
    back = orders.restore(made)
    assert bool((back == x).all())
    del x, made, back
    cupy.get_default_memory_pool().free_all_blocks()


@pytest.mark.parametrize("inverse", [False, True])
def test_as_quick_as_a_copy(cupy: Any, tile_orders: TokenOrders, inverse: bool) -> None:
    x = counted(cupy, (1, HEADS, GRID.tokens, DIM))
    out = cupy.empty_like(x)
    choice = cupy.asarray((np.arange(HEADS, dtype=np.int32) % len(TILES))[None])
    orders = tile_orders.choosing(choice)

    def milliseconds(work: Callable[[], Any]) -> float:
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        work()  # so that the GPU is busy while the host queues the rest
        begin.record()
        for _ in range(CALLS):
            work()
        end.record()
        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(begin, end)) / CALLS

    def copy() -> None:
        cupy.copyto(out, x)

    def move() -> None:
        permute_tokens(x, orders, inverse=inverse, out=out)

    # In turns, so that both meet the same clocks.
    times = [(milliseconds(copy), milliseconds(move)) for _ in range(12)][2:]
    copied, moved = (statistics.median(column) for column in zip(*times, strict=True))
    rate = 2 * x.nbytes / moved / 1e9
    print(f"copy {copied:.4f} ms, permuted {moved:.4f} ms, {rate:.2f} TB/s")
    assert copied / moved >= RATE, f"{copied / moved:.3f} of a copy's rate, {rate:.2f} TB/s"


def test_the_host_does_not_wait(cupy: Any, rng: Any) -> None:
    x = cupy.asarray(draw(rng, (1, 4, 100, 64), np.float16))
    choice = cupy.asarray(rng.integers(0, 3, (1, 4), np.int32))
    orders = TokenOrders(draw_orders(rng, 3, 100))
    late = cupy.empty_like(choice)
    spin = cupy.RawKernel(
        'extern "C" __global__ void spin(long long cycles) {'
        " const long long begin = clock64(); while (clock64() - begin < cycles) {} }",
        "spin",
    )
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        late.fill(0)
        spin((1,), (1,), (np.int64(1),))  # all that is loaded or allocated once
        late[:] = choice
        expected = cupy.asnumpy(orders.choosing(late).permute(x))
        late.fill(0)
        stream.synchronize()
        spin((1,), (1,), (np.int64(3_000_000_000),))
        late[:] = choice  # by the stream, once it gets there
        made = orders.choosing(late).permute(x)
        assert not stream.done
    stream.synchronize()
    assert cupy.asnumpy(made).tobytes() == expected.tobytes()


def test_a_graph_follows_the_choice(cupy: Any, rng: Any) -> None:
    x = cupy.asarray(draw(rng, (1, 3, 90, 32), np.float16))
    choice = cupy.zeros((1, 3), np.int32)
    orders = TokenOrders(draw_orders(rng, 3, 90), choice)
    out = cupy.empty_like(x)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        permute_tokens(x, orders, out=out)
        stream.begin_capture()
        permute_tokens(x, orders, out=out)
        graph = stream.end_capture()
        for chosen in ([[0, 1, 2]], [[2, 2, 0]]):
            choice.set(np.array(chosen, np.int32))
            graph.launch()
            expected = permute_tokens(cupy.asnumpy(x), orders.orders, np.array(chosen))
            assert cupy.asnumpy(out).tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_torch(rng: Any, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(draw(rng, (2, 3, 300, 64), np.int32).astype(np.float32))
    x = x.to("cuda", getattr(torch, dtype))
    orders = TokenOrders(draw_orders(rng, 2, 300), np.array([[0, 1, 1], [1, 0, 1]]))
    index = torch.from_numpy(orders.host()).cuda()[..., None].expand(x.shape)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = orders.permute(x.transpose(1, 2).contiguous().transpose(1, 2))
        back = orders.restore(y)
        assert torch.equal(y, x.gather(2, index))
    assert y.dtype == x.dtype
    assert y.device == x.device
    assert torch.equal(back, x)
    given = torch.empty_like(x)
    assert permute_tokens(y, orders, inverse=True, out=given) is given
    assert torch.equal(given, x)


def test_jax(rng: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
    values = draw(rng, (1, 2, 130, 64), np.int16).astype(ml_dtypes.bfloat16)
    x = jax.numpy.asarray(values)
    orders = TokenOrders(draw_orders(rng, 2, 130), np.array([[0, 1]]))
    y = orders.permute(x)
    assert isinstance(y, jax.Array)
    assert y.dtype == x.dtype
    assert np.asarray(y + 0).tobytes() == orders.permute(values).tobytes()
    assert np.asarray(orders.restore(y)).tobytes() == values.tobytes()
