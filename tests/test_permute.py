"""Token orders, and moving tokens on the host."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tessera_cupy.permute import TokenOrders, permute_tokens
from tessera_cupy.video import VideoGrid

ORDERS = np.array([[0, 1, 2, 3], [2, 0, 3, 1]])
CHOICE = np.array([[1, 0, 1]])


def draw(dtype: Any = np.float32, shape: tuple[int, ...] = (1, 3, 4, 5)) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def permuted(x: Any) -> Any:
    """By hand: heads 0 and 2 take tokens 2, 0, 3, 1, and head 1 stays."""
    y = x.copy()
    for head in (0, 2):
        y[0, head] = x[0, head][[2, 0, 3, 1]]
    return y


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int8])
def test_there_and_back(dtype: Any) -> None:
    x = draw(dtype)
    orders = TokenOrders(ORDERS, CHOICE)
    y = orders.permute(x)
    assert y.dtype == x.dtype
    assert (y == permuted(x)).all()
    assert (orders.restore(y) == x).all()


def test_without_a_choice_all_heads_take_order_0() -> None:
    x = draw()
    assert (permute_tokens(x, ORDERS[1]) == x[:, :, [2, 0, 3, 1]]).all()
    orders = TokenOrders(ORDERS[::-1])
    assert (orders.permute(x) == x[:, :, [2, 0, 3, 1]]).all()
    assert orders.host().tolist() == [[[2, 0, 3, 1]]]
    assert orders.of(0, 2).tolist() == [2, 0, 3, 1]


def test_the_order_of_each_head() -> None:
    orders = TokenOrders(ORDERS, CHOICE)
    assert orders.orders.dtype == np.int32
    assert orders.choice.dtype == np.int32
    assert orders.tokens == 4
    assert orders.of(0, 1).tolist() == [0, 1, 2, 3]
    assert orders.of(0, 2).dtype == np.int64
    assert orders.host().tolist() == [[[2, 0, 3, 1], [0, 1, 2, 3], [2, 0, 3, 1]]]
    other = orders.choosing(np.array([[0, 1, 0]]))
    assert other.host().tolist() == [[[0, 1, 2, 3], [2, 0, 3, 1], [0, 1, 2, 3]]]
    assert other.orders is orders.orders


def test_orders_are_snapshots() -> None:
    given, chosen = ORDERS.astype(np.int32), CHOICE.astype(np.int32)
    orders = TokenOrders(given, chosen)
    given[:], chosen[:] = 0, 0
    assert (orders.permute(draw()) == permuted(draw())).all()
    with pytest.raises(ValueError, match="read-only"):
        orders.orders[0, 0] = 1


def test_raster_order_moves_nothing() -> None:
    x = draw()
    orders = TokenOrders.raster(4)
    assert orders.permute(x) is x
    assert orders.restore(x) is x
    assert orders.of(0, 0).tolist() == [0, 1, 2, 3]
    out = np.zeros_like(x)
    assert permute_tokens(x, orders, out=out) is out
    assert (out == x).all()
    with pytest.raises(ValueError, match="`x`: expected shape"):
        orders.permute(draw(shape=(1, 1, 5, 2)))


def test_several_arrays_and_their_outs() -> None:
    q, k = draw(), -draw()
    made = permute_tokens((q, k), ORDERS, CHOICE)
    assert isinstance(made, tuple)
    assert (made[0] == permuted(q)).all()
    assert (made[1] == permuted(k)).all()
    outs = (np.zeros_like(q), np.zeros_like(q))
    back = permute_tokens(made, ORDERS, CHOICE, inverse=True, out=outs)
    assert back[0] is outs[0]
    assert (outs[0] == q).all()
    assert (outs[1] == k).all()


def test_strided_arrays() -> None:
    bshd = draw(shape=(1, 4, 3, 10))
    x = bshd[..., ::2].transpose(0, 2, 1, 3)
    assert (permute_tokens(x, ORDERS, CHOICE) == permuted(x)).all()
    out = np.zeros((1, 4, 3, 5), np.float32).transpose(0, 2, 1, 3)
    permute_tokens(x, ORDERS, CHOICE, out=out)
    assert (out == permuted(x)).all()


def test_a_video_s_tiles_become_neighbours() -> None:
    grid = VideoGrid(2, 2, 4, text_tokens=1)
    x = np.arange(17.0).reshape(1, 1, 17, 1)
    y = permute_tokens(x, grid.tile_order((2, 1, 2)))
    assert y.ravel().tolist() == [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15, 16]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_torch_on_the_host(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(draw()).to(getattr(torch, dtype))
    y = permute_tokens(x, ORDERS, CHOICE)
    assert isinstance(y, torch.Tensor)
    assert y.dtype == x.dtype
    assert (y.float().numpy() == permuted(x.float().numpy())).all()
    out = torch.empty_like(x)
    assert permute_tokens(y, ORDERS, CHOICE, inverse=True, out=out) is out
    assert torch.equal(out, x)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_jax_on_the_host(dtype: str) -> None:
    jax = pytest.importorskip("jax")
    x = jax.device_put(jax.numpy.asarray(draw(), dtype), jax.devices("cpu")[0])
    y = permute_tokens(x, ORDERS, CHOICE)
    assert isinstance(y, jax.Array)
    assert y.dtype == x.dtype
    assert (np.asarray(y) == permuted(np.asarray(x))).all()
    with pytest.raises(TypeError, match="`out`: expected an array of x's library"):
        permute_tokens(x, ORDERS, CHOICE, out=x)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([[0, 1, 1]], "another order 0, with 0 to 1 and 2 different ones"),
        ([[0, 1, 2], [0, 1, 3]], "permutations of 0 to 2, got another order 1, with 0 to 3"),
        ([[-1, 1, 0]], "permutations of 0 to 2"),
        ([[0, 2**32 + 1, 2]], "permutations of 0 to 2"),
        ([[[0, 1, 2]]], r"expected shape \(n, tokens\)"),
        (np.zeros((0, 3), np.int32), r"expected shape \(n, tokens\)"),
    ],
)
def test_what_is_no_permutation_is_refused(bad: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenOrders(bad)


def test_orders_of_other_numbers_are_refused() -> None:
    with pytest.raises(TypeError, match="`orders`: expected integers, got float64"):
        TokenOrders([[0.0, 1.0]])


@pytest.mark.parametrize("bad", [[[2]], [[-1]]])
def test_a_choice_of_no_order_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="`choice`: expected numbers of the 2 orders"):
        TokenOrders(ORDERS, np.array(bad))


def test_a_choice_of_another_kind_is_refused() -> None:
    with pytest.raises(TypeError, match="`choice`: expected int32"):
        TokenOrders(ORDERS, np.zeros((1, 3)))
    with pytest.raises(ValueError, match=r"`choice`: expected shape \(batch, heads\)"):
        TokenOrders(ORDERS, np.zeros(3, np.int32))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (draw(shape=(1, 3, 5, 2)), r"`x`: expected shape \(batch, heads, 4, d\)"),
        (draw(shape=(3, 4, 2)), r"`x`: expected shape \(batch, heads, 4, d\)"),
        (draw(shape=(1, 2, 4, 2)), r"`x`: expected \(batch, heads\) = \(1, 3\)"),
        ((), "`x`: expected an array, or a tuple of them"),
        ((draw(), draw(np.float64)), "`x`: expected arrays alike"),
        ((draw(), draw(shape=(1, 3, 4, 6))), "`x`: expected arrays alike"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(x: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        permute_tokens(x, ORDERS, CHOICE)


def _read_only(x: Any) -> Any:
    x.flags.writeable = False
    return x


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (draw(np.float64), "`out`: expected shape and dtype"),
        (draw(shape=(1, 3, 4, 6)), "`out`: expected shape and dtype"),
        (_read_only(draw()), "`out`: expected an array that can be written"),
        (np.broadcast_to(np.zeros(5, np.float32), (1, 3, 4, 5)), "`out`: expected an array that"),
    ],
)
def test_an_out_that_does_not_fit_is_refused(out: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        permute_tokens(draw(), ORDERS, CHOICE, out=out)


def test_an_out_in_memory_that_is_read_is_refused() -> None:
    x, y = draw(), draw()
    with pytest.raises(ValueError, match="`out`: expected memory of its own"):
        permute_tokens(x, ORDERS, CHOICE, out=x)
    with pytest.raises(ValueError, match="`out`: expected memory of its own"):
        permute_tokens((x, y), ORDERS, CHOICE, out=(np.empty_like(x), x))
    out = np.empty_like(x)
    with pytest.raises(ValueError, match="`out`: expected memory of its own"):
        permute_tokens((x, y), ORDERS, CHOICE, out=(out, out))
    with pytest.raises(ValueError, match="`out`: expected a tuple of 2 arrays"):
        permute_tokens((x, y), ORDERS, CHOICE, out=out)


def test_each_head_has_one_order() -> None:
    with pytest.raises(
        ValueError, match="`orders`: expected 3 orders, one a head, got shape \\(2, 2\\)"
    ):
        TokenOrders.of_heads([[0, 1], [1, 0]], (1, 3))
    for tokens in (2.5, -1):
        with pytest.raises(ValueError, match="`tokens`: expected an int from 0"):
            TokenOrders.raster(tokens)  # type: ignore[arg-type]
