"""``permute_tokens.cu`` on the CPU, through the front's own launches, against NumPy's indexing."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from tessera_cupy.kernels.catalog import builder
from tessera_cupy.kernels.launch import packed_struct
from tessera_cupy.kernels.permute import PERMUTE_PARAMS
from tessera_cupy.permute import TokenOrders, permute_tokens
from tests.emulator.emulator import build, call, compiler
from tests.emulator.gpu import EmulatedGpu, Event, Stream

pytestmark = pytest.mark.skipif(
    compiler() is None, reason="the emulator needs g++, which is not on the PATH"
)

Shape = tuple[int, int, int, int]
DTYPES = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int16)


@pytest.fixture
def folder(kernel_cache: Path) -> Path:
    return kernel_cache.parent / "emulated-kernels"


def draw(rng: np.random.Generator, shape: Shape, dtype: Any) -> NDArray[Any]:
    """Any bits, so that nothing but a copy gives the same."""
    size = np.dtype(dtype).itemsize
    return rng.integers(0, 256, (*shape[:3], shape[3] * size), np.uint8).view(dtype)


def draw_orders(rng: np.random.Generator, count: int, tokens: int) -> NDArray[np.int64]:
    return np.stack([rng.permutation(tokens) for _ in range(count)])


def moved(x: NDArray[Any], orders: Any, choice: Any, inverse: bool) -> NDArray[Any]:
    """The definition, token by token."""
    y = np.empty_like(x)
    for b, h, i in np.ndindex(*x.shape[:3]):
        token = orders[0 if choice is None else choice[b, h]][i]
        if inverse:
            y[b, h, token] = x[b, h, i]
        else:
            y[b, h, i] = x[b, h, token]
    return y


def same(made: Any, expected: NDArray[Any]) -> None:
    """Equal to the last bit, NaN too."""
    got = made.get() if hasattr(made, "get") else made
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
# Rows of 2 to 1,024 bytes: in 16s for a part of a warp, a warp and several turns of one, in 4s,
# and in 2s; one chunk of tokens that is not full, exactly one, several, and more than CTAs.
@pytest.mark.parametrize(
    ("tokens", "d"),
    [(1, 1), (9, 31), (130, 64), (64, 128), (67, 72), (200, 33), (77, 256), (999, 128)],
)
def test_all_lengths_of_rows(
    gpu: EmulatedGpu, rng: Any, dtype: Any, tokens: int, d: int, inverse: bool
) -> None:
    x = draw(rng, (2, 3, tokens, d), dtype)
    orders = draw_orders(rng, 4, tokens)
    choice = rng.integers(0, 4, (2, 3), np.int32)
    out = gpu.array(np.zeros_like(x), writable=True)
    assert permute_tokens(gpu.array(x), orders, choice, inverse=inverse, out=out) is out
    same(out, moved(x, orders, choice, inverse))
    assert gpu.launched == ["permute_tokens"]


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("where", ["from", "to", "both"])
def test_strides(gpu: EmulatedGpu, rng: Any, dtype: Any, where: str, inverse: bool) -> None:
    """BSHD memory as a BHSD view, rows and heads apart, and rows from an odd address on."""
    for tokens, d, skip in ((70, 64, 0), (70, 64, 3), (20, 15, 1)):

        def view(values: NDArray[Any], skip: int = skip) -> Any:
            b, h, n, length = values.shape
            wide = np.zeros((b, n + 2, h + 1, length + 2 * skip), values.dtype)
            wide[:, 1:-1, 1:, skip : skip + length] = values.transpose(0, 2, 1, 3)
            made = gpu.array(wide, writable=True)
            return made[:, 1:-1, 1:, skip : skip + length].transpose(0, 2, 1, 3)

        x = draw(rng, (2, 3, tokens, d), dtype)
        orders = draw_orders(rng, 2, tokens)
        choice = np.array([[0, 1, 1], [1, 0, 1]])
        source = gpu.array(x) if where == "to" else view(x)
        target = view(np.zeros_like(x))
        if where == "from":
            target = gpu.array(np.zeros_like(x), writable=True)
        permute_tokens(source, orders, choice, inverse=inverse, out=target)
        same(target, moved(x, orders, choice, inverse))


def test_a_strided_last_axis_is_copied_first(gpu: EmulatedGpu, rng: Any) -> None:
    wide = draw(rng, (1, 2, 40, 32), np.float16)
    orders = draw_orders(rng, 1, 40)
    made = permute_tokens(gpu.array(wide)[..., ::2], orders)
    same(made, moved(wide[..., ::2], orders, None, False))


def test_an_expanded_head_can_be_read(gpu: EmulatedGpu, rng: Any) -> None:
    x = draw(rng, (1, 1, 50, 16), np.float16)
    orders, choice = draw_orders(rng, 3, 50), np.array([[0, 1, 2]])
    array = gpu.array(x)
    view = np.broadcast_to(array._view, (1, 3, 50, 16))
    expanded = type(array)(array._lease, view, gpu)
    same(permute_tokens(expanded, orders, choice), moved(view, orders, choice, False))


def test_several_tensors_in_one_launch(gpu: EmulatedGpu, rng: Any) -> None:
    """Each with its own strides and width of accesses."""
    arrays = [draw(rng, (2, 2, 80, 48), np.float16) for _ in range(3)]
    orders = TokenOrders(draw_orders(rng, 2, 80), np.array([[0, 1], [1, 0]]))
    wide = np.zeros((2, 2, 80, 49), np.float16)
    wide[..., 1:] = arrays[1]
    q, v = gpu.array(arrays[0]), gpu.array(arrays[2])
    made = permute_tokens((q, gpu.array(wide)[..., 1:], v), orders)
    assert isinstance(made, tuple)
    for got, x in zip(made, arrays, strict=True):
        same(got, moved(x, orders.orders, orders.choice, False))
    assert gpu.launched == ["permute_tokens"]
    for got, x in zip(orders.restore(made), arrays, strict=True):
        same(got, x)


def test_more_tensors_than_a_launch_takes(gpu: EmulatedGpu, rng: Any) -> None:
    arrays = tuple(draw(rng, (1, 1, 10, 8), np.float32) for _ in range(7))
    orders = draw_orders(rng, 1, 10)
    made = permute_tokens(tuple(gpu.array(x) for x in arrays), orders)
    for got, x in zip(made, arrays, strict=True):
        same(got, moved(x, orders, None, False))
    assert gpu.launched == ["permute_tokens"] * 3


def test_a_choice_on_the_gpu_is_never_read_by_the_host(gpu: EmulatedGpu, rng: Any) -> None:
    x = draw(rng, (2, 3, 40, 16), np.float16)
    orders = draw_orders(rng, 3, 40)
    choice = rng.integers(0, 3, (2, 3), np.int32)
    taken = TokenOrders(orders).choosing(gpu.array(choice))
    same(taken.permute(gpu.array(x)), moved(x, orders, choice, False))
    assert gpu.copied == 0
    assert EmulatedGpu.waits == 0
    assert (taken.host() == orders[choice]).all()
    assert (taken.of(1, 2) == orders[choice[1, 2]]).all()


def test_a_choice_that_is_no_contiguous_array_is_copied(gpu: EmulatedGpu, rng: Any) -> None:
    x = draw(rng, (2, 3, 20, 8), np.float16)
    orders = draw_orders(rng, 3, 20)
    choice = rng.integers(0, 3, (2, 6), np.int32)
    made = permute_tokens(gpu.array(x), orders, gpu.array(choice)[:, ::2])
    same(made, moved(x, orders, choice[:, ::2], False))


def test_a_choice_out_of_range_takes_the_nearest_order(gpu: EmulatedGpu, rng: Any) -> None:
    """Reading beyond the orders would be an access to a guarded page."""
    x = draw(rng, (1, 4, 30, 16), np.float16)
    orders = draw_orders(rng, 2, 30)
    wild = np.array([[-1, 2, 2**31 - 1, -(2**31)]], np.int32)
    nearest = np.array([[0, 1, 1, 0]])
    taken = TokenOrders(orders, gpu.array(wild))
    same(taken.permute(gpu.array(x)), moved(x, orders, nearest, False))
    assert (taken.host() == orders[nearest]).all()


@pytest.mark.parametrize("shape", [(0, 2, 5, 4), (2, 0, 5, 4), (2, 2, 0, 4), (2, 2, 5, 0)])
def test_nothing_to_move(gpu: EmulatedGpu, rng: Any, shape: Shape) -> None:
    orders = draw_orders(rng, 2, shape[2])
    choice = np.zeros(shape[:2], np.int32)
    x = np.zeros(shape, np.float16)
    assert permute_tokens(gpu.array(x), orders, choice).shape == shape
    assert gpu.launched == []


def test_more_heads_than_a_grid_s_second_axis_has(gpu: EmulatedGpu, rng: Any) -> None:
    x = draw(rng, (35_000, 2, 2, 2), np.float16)
    orders = np.array([[0, 1], [1, 0]])
    choice = rng.integers(0, 2, (35_000, 2), np.int32)
    made = permute_tokens(gpu.array(x), orders, choice)
    same(made, np.where(choice[:, :, None, None] == 0, x, x[:, :, ::-1]))


def test_offsets_above_32_bits(folder: Path, rng: Any) -> None:
    """Rows of memory that is reserved and hardly touched, 2^33 bytes apart, and heads too."""
    far, tokens, d = 2**33 + 32, 3, 16

    def rows() -> tuple[mmap.mmap, NDArray[np.float16]]:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
        memory = mmap.mmap(-1, 4 * far, flags=flags)
        flat = np.frombuffer(memory, np.float16)
        strides = (far // 2, far, 2)
        return memory, np.lib.stride_tricks.as_strided(flat, (2, tokens, d), strides)

    (_, source), (_, target) = rows(), rows()
    x = draw(rng, (1, 2, tokens, d), np.float16)
    source[:] = x[0]
    order = np.array([[2, 0, 1]], np.int32)
    for inverse in (False, True):
        params = packed_struct(
            PERMUTE_PARAMS,
            {
                **{"source0": source.ctypes.data, "target0": target.ctypes.data},
                **{f"{side}_stride0": (0, far // 2, far) for side in ("source", "target")},
                **{"width0": 16, "lanes_log20": 1, "orders": order.ctypes.data, "order_count": 1},
                **{"planes": 2, "heads": 2, "tokens": tokens, "row_bytes": 2 * d},
                "inverse": inverse,
            },
        )
        config = builder("sm_90a", "permute_tokens")
        error = call(build(config, folder), params, (2,), 32 * config.warps, 0, 1)
        assert error is None
        same(np.ascontiguousarray(target)[None], moved(x, order, None, inverse))


def test_orders_are_copied_to_the_gpu_once(gpu: EmulatedGpu, rng: Any) -> None:
    x = gpu.array(draw(rng, (1, 2, 30, 16), np.float16))
    orders = TokenOrders(draw_orders(rng, 2, 30))
    first = orders.device_orders()
    assert (first.get() == orders.orders).all()
    for chosen in ([[0, 1]], [[1, 0]]):
        made = orders.choosing(np.array(chosen))
        made.permute(x)
        made.restore(x)
        assert made.device_orders() is first


def test_a_graph_follows_the_choice(gpu: EmulatedGpu, rng: Any) -> None:
    values = draw(rng, (1, 2, 30, 16), np.float16)
    x = gpu.array(values)
    choice = gpu.array(np.array([[0, 1]], np.int32), writable=True)
    orders = TokenOrders(draw_orders(rng, 2, 30), choice)
    out = gpu.array(np.zeros_like(values), writable=True)
    stream = Stream(48)
    with stream:
        stream.begin_capture()
        with pytest.raises(ValueError, match="`stream`: expected a stream that is not capturing"):
            permute_tokens(x, orders, out=out)
        stream.end_capture()
        permute_tokens(x, orders, out=out)
        stream.begin_capture()
        permute_tokens(x, orders, out=out)
        replay = stream.end_capture()
    for chosen in ([[1, 0]], [[1, 1]]):
        choice.set(np.array(chosen, np.int32))
        replay()
        same(out, moved(values, orders.orders, np.array(chosen), False))


def test_copies_outlive_their_orders_where_another_stream_reads_them(
    gpu: EmulatedGpu, rng: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = gpu.array(draw(rng, (1, 1, 30, 16), np.float16))
    orders = TokenOrders(draw_orders(rng, 1, 30))
    orders.device_orders()
    with Stream(48):
        orders.permute(x)
    memory = orders.device_orders()._lease.memory
    monkeypatch.setattr(Event, "held", True)
    del orders
    assert memory.alive
    monkeypatch.setattr(Event, "held", False)
    TokenOrders(draw_orders(rng, 1, 30)).device_orders()  # which gives back what is not in use
    assert not memory.alive


def test_elements_of_one_byte_are_refused(gpu: EmulatedGpu) -> None:
    x = gpu.array(np.zeros((1, 1, 2, 8), np.uint8))
    with pytest.raises(TypeError, match="`x`: expected elements of 2, 4 or 8 bytes, got uint8"):
        permute_tokens(x, np.array([1, 0]))


def test_an_out_that_overlaps_is_refused(gpu: EmulatedGpu) -> None:
    wide = gpu.array(np.zeros((1, 1, 6, 8), np.float32), writable=True)
    order = np.array([1, 0, 3, 2])
    for out in (wide[:, :, :4], wide[:, :, 2:]):
        with pytest.raises(ValueError, match="`out`: expected memory of its own"):
            permute_tokens(wide[:, :, :4], order, out=out)
    with pytest.raises(ValueError, match="`out`: expected a contiguous last axis"):
        permute_tokens(
            gpu.array(np.zeros((1, 1, 4, 4), np.float32)), order, out=wide[:, :, :4, ::2]
        )


def test_a_choice_of_other_integers_on_the_gpu_is_refused(gpu: EmulatedGpu) -> None:
    with pytest.raises(TypeError, match="`choice`: expected int32"):
        TokenOrders([[1, 0]], gpu.array(np.zeros((1, 1), np.int64)))
