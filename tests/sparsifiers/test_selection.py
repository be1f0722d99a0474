"""What every rule asks of q and k, and what it returns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tessera_cupy import BlockMask
from tessera_cupy.permute import TokenOrders
from tessera_cupy.sparsifiers import Selection
from tessera_cupy.sparsifiers.selection import checked_inputs, flag_of
from tessera_cupy.video import VideoGrid

GRID = VideoGrid(2, 4, 8, text_tokens=3)
MASK = BlockMask.from_dense(np.ones((2, 2), bool), (64, 64), (67, 67))


def array(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape or (1, 2, 67, 8), dtype)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_floats_of_any_width(dtype: Any) -> None:
    assert checked_inputs(array(dtype=dtype), array(), GRID) is np


@pytest.mark.parametrize("dtype", [np.int8, np.bool_, np.complex64, object])
@pytest.mark.parametrize("name", ["q", "k"])
def test_other_elements(dtype: Any, name: str) -> None:
    arrays = {"q": array(), "k": array(), name: array(dtype=dtype)}
    words = f"`{name}`: expected one of float16, bfloat16, float32, float64, got "
    with pytest.raises(TypeError, match=words):
        checked_inputs(arrays["q"], arrays["k"], GRID)


@pytest.mark.parametrize(
    "shape", [(2, 67, 8), (1, 2, 64, 8), (1, 67, 2, 8), (1, 0, 67, 8), (0, 2, 67, 8), (1, 2, 67, 0)]
)
def test_shapes_that_do_not_fit_the_grid(shape: tuple[int, ...]) -> None:
    words = r"`q`: expected shape \(batch, heads, 67, d\) for a grid of 2x4x8\+3, got shape "
    with pytest.raises(ValueError, match=words):
        checked_inputs(array(*shape), array(*shape), GRID)


def test_keys_elsewhere() -> None:
    keys = type("ndarray", (), {"__module__": "cupy"})()
    with pytest.raises(TypeError, match="`k`: expected a numpy array, as q"):
        checked_inputs(array(), keys, GRID)


def test_keys_of_grouped_heads() -> None:
    with pytest.raises(
        ValueError, match=r"`k`: expected q's shape .* Fix: pass keys of the same tokens"
    ):
        checked_inputs(array(), array(1, 1, 67, 8), GRID)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("place", [(0, 0, 0, 0), (0, 1, 66, 7)])
def test_values_that_are_no_numbers(bad: float, place: tuple[int, ...]) -> None:
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32):
        x = array(dtype=dtype)
        x[place] = bad
        with pytest.raises(ValueError, match="`k`: expected finite numbers, got NaN or infinities"):
            checked_inputs(array(), x, GRID)


def test_a_selection_moves_tokens_and_tells_what_the_rule_did() -> None:
    order = np.random.default_rng(0).permutation(67)
    checked_inputs(array(), array(), GRID)
    chosen = Selection(MASK, TokenOrders(order), notes={"blocks": 3})
    assert chosen.notes == {"blocks": 3}
    assert Selection(MASK, TokenOrders.raster(67)).notes == {}
    x = np.random.default_rng(1).standard_normal((1, 2, 67, 8))
    assert (chosen.permute(x) == x[:, :, order]).all()
    assert (chosen.restore(chosen.permute(x)) == x).all()
    chosen.check()
    assert "_watch" not in repr(chosen)


def test_no_flag_is_raised_for_arrays_that_nobody_checked() -> None:
    checked_inputs(array(), array(), GRID)
    assert flag_of(SimpleNamespace(data=SimpleNamespace(ptr=4096))) == 0


def test_restore_takes_an_lse_too() -> None:
    mask = BlockMask.from_dense([[1, 1], [1, 1]], (64, 64))
    order = np.random.default_rng(0).permutation(128)
    lse = np.arange(128, dtype=np.float32).reshape(1, 1, 128)
    chosen = Selection(mask, TokenOrders(order))
    assert (chosen.restore(lse[:, :, order]) == lse).all()


@pytest.mark.parametrize(
    ("shape", "fix"),
    [((1, 64, 2, 16), r"q\.transpose\(0, 2, 1, 3\)"), ((2, 64, 16), r"q\[None\]")],
)
def test_other_layouts_are_told_what_to_do(shape: tuple[int, ...], fix: str) -> None:
    x = np.zeros(shape, np.float32)
    with pytest.raises(ValueError, match=fix):
        checked_inputs(x, x, VideoGrid(1, 8, 8))


def test_a_selection_draws_its_mask() -> None:
    mask = BlockMask.from_dense([[1, 0], [1, 1]], (64, 64))
    orders = TokenOrders(np.stack([np.arange(128), np.arange(128)[::-1]]), np.array([[0, 1]]))
    drawn = repr(Selection(mask, orders)).splitlines()
    assert drawn[0] == "Selection in 2 orders of 128 tokens"
    assert "\n".join(drawn[1:]) == repr(mask)
