"""column_sums on the CPU, through the package's own launches, against NumPy in float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from tessera_cupy.kernels import column_sums
from tessera_cupy.permute import TokenOrders
from tests.emulator.emulator import compiler
from tests.emulator.gpu import EmulatedGpu

pytestmark = pytest.mark.skipif(
    compiler() is None, reason="the emulator needs g++, which is not on the PATH"
)

DTYPES: list[Any] = [np.float16, ml_dtypes.bfloat16]


def expected(q: Any, k: Any, order: NDArray[np.int64], lse: Any) -> NDArray[np.float64]:
    """(batch, heads, groups, tokens) in the order."""
    rows, keys = (x[:, :, order].astype(np.float64) for x in (q, k))
    scores = rows @ keys.swapaxes(2, 3) / np.sqrt(q.shape[3])
    if lse is None:
        p = np.exp(scores - scores.max(axis=3, keepdims=True))
        p /= p.sum(axis=3, keepdims=True)
    else:
        p = np.exp(scores - lse[:, :, order, None])
    return np.add.reduceat(p, np.arange(0, len(order), 192), axis=2)


def run(
    gpu: EmulatedGpu, q: Any, k: Any, order: Any, lse: Any = None, flags: Any = (0, 0, 0)
) -> NDArray[np.float16]:
    given = None if lse is None else gpu.array(lse)
    made = column_sums.sums(gpu.array(q), gpu.array(k), TokenOrders(order), given, flags, [], [])
    assert made.shape[3] % 64 == 0
    result: NDArray[np.float16] = made[..., : len(order)].get()
    assert result.dtype == np.float16
    return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", [False, True], ids=["alone", "lse"])
@pytest.mark.parametrize(
    ("tokens", "d"),
    [
        (40, 8),  # a step, and a group, that are not whole
        (192, 64),
        (193, 72),  # a query, and a key, alone
        (450, 128),
        (250, 200),  # steps of 32 keys, queries in shared memory
        (384, 256),
    ],
)
def test_as_numpy(
    gpu: EmulatedGpu, rng: np.random.Generator, dtype: Any, given: bool, tokens: int, d: int
) -> None:
    q, k = (2 * rng.standard_normal((2, 1, 2, tokens, d))).astype(dtype)
    order = rng.permutation(tokens)
    lse = None
    if given:
        scores = q.astype(np.float64) @ k.astype(np.float64).swapaxes(2, 3) / np.sqrt(d)
        away = rng.uniform(-1, 1, (1, 2, tokens))
        lse = (np.log(np.exp(scores).sum(axis=3)) + away).astype(np.float32)
    exact = expected(q, k, order, lse)
    made = run(gpu, q, k, order, lse).astype(np.float64)
    # Of float16 half a last place is 2^-11 of a number, and 2^-25 of small ones.
    np.testing.assert_allclose(made, exact, rtol=2.0**-11 * 1.02, atol=2.0**-25 * 1.02)
    if not given:
        rows = np.minimum(192, tokens - np.arange(0, tokens, 192))
        np.testing.assert_allclose(
            made.sum(axis=3), np.broadcast_to(rows, made.shape[:3]), rtol=1e-3
        )


def test_launches(gpu: EmulatedGpu) -> None:
    x = np.zeros((1, 1, 64, 16), np.float16)
    made = run(gpu, x, x, np.arange(64))
    assert gpu.launched == ["column_sums_fp16"]
    assert (made == 1).all()


def test_the_same_bits_in_any_order_of_threads(gpu: EmulatedGpu, rng: np.random.Generator) -> None:
    q, k = rng.standard_normal((2, 1, 1, 300, 64)).astype(np.float16)
    first, again = (run(gpu, q, k, np.arange(300)) for _ in range(2))
    np.testing.assert_array_equal(first.view(np.uint16), again.view(np.uint16))


def test_large_scores_and_sums(gpu: EmulatedGpu) -> None:
    q = np.full((1, 1, 192, 16), 200, np.float16)
    k = np.zeros_like(q)
    k[0, 0, 7], k[0, 0, 8] = 200, -200
    # Scores of 160,000, of which exponentials are infinite, and of as much below 0.
    made = run(gpu, q, k, np.arange(192))[0, 0, 0]
    assert made[7] == 192
    assert not made[np.arange(192) != 7].any()
    low = np.full((1, 1, 192), -20, np.float32)
    assert run(gpu, np.zeros_like(q), k, np.arange(192), low).max() == 65504


@pytest.mark.parametrize("name", ["q", "k", "lse"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("d", [64, 136])
def test_what_is_no_number_is_told(
    gpu: EmulatedGpu, rng: np.random.Generator, name: str, bad: float, d: int
) -> None:
    tokens = 400
    q, k = rng.standard_normal((2, 1, 2, tokens, d)).astype(np.float16)
    lse = np.full((1, 2, tokens), 6, np.float32)
    order = rng.permutation(tokens)
    place = int(np.flatnonzero(order == 5)[0])
    arrays: dict[str, Any] = {"q": q, "k": k, "lse": lse}
    arrays[name][(0, 1, 5) if name == "lse" else (0, 1, 5, d - 1)] = bad
    flags = gpu.array(np.zeros(3, np.int32), writable=True)
    addresses = tuple(flags.data.ptr + 4 * i for i in range(3))
    made = run(gpu, q, k, order, lse, addresses)
    assert flags.get().tolist() == [int(name == other) for other in arrays]
    assert np.isnan(made[0, 1, place // 192]).all()
    assert np.isfinite(made[0, 0]).all()


def test_arguments(gpu: EmulatedGpu) -> None:
    q, wide = (gpu.array(np.zeros((1, 1, 64, d), np.float16)) for d in (16, 264))
    order = TokenOrders.raster(64)
    with pytest.raises(ValueError, match="`q`: expected at most 256 channels, got 264"):
        column_sums.sums(wide, wide, order, None, (0, 0, 0), [], [])
    k = gpu.array(np.zeros((1, 1, 64, 16), ml_dtypes.bfloat16))
    with pytest.raises(ValueError, match="`k`: expected q's dtype float16, got bfloat16"):
        column_sums.sums(q, k, order, None, (0, 0, 0), [], [])
