"""The oracle against the definition written out in plain Python, and against numbers by hand."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera_cupy.masks import BlockMask
from tessera_cupy.reference import attention, oracle


def by_definition(q: Any, k: Any, v: Any, keep: Any, scale: float) -> tuple[Any, Any]:
    """O and LSE of (batch, heads, tokens, dim) arrays, one exponential at a time."""
    batch, heads, sq, _ = q.shape
    shared = heads // k.shape[1]
    out = np.zeros((batch, heads, sq, v.shape[3]))
    lse = np.full((batch, heads, sq), -math.inf)
    for b, h, i in np.ndindex(batch, heads, sq):
        keys = [j for j in range(k.shape[2]) if keep[b % len(keep), h % keep.shape[1], i, j]]
        logits = [scale * math.fsum(q[b, h, i] * k[b, h // shared, j]) for j in keys]
        if not logits:
            continue
        highest = max(logits)
        weights = [math.exp(x - highest) for x in logits]
        lse[b, h, i] = highest + math.log(math.fsum(weights))
        for d in range(v.shape[3]):
            values = [v[b, h // shared, j, d] for j in keys]
            products = [w * x for w, x in zip(weights, values, strict=True)]
            out[b, h, i, d] = math.fsum(products) / math.fsum(weights)
    return out, lse


def randoms(seed: int, *shapes: tuple[int, ...]) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in shapes]


@given(
    seed=st.integers(0, 2**32 - 1),
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 2),
    shared=st.integers(1, 3),
    sq=st.integers(0, 9),
    skv=st.integers(0, 9),
    dims=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    spread=st.booleans(),
    density=st.sampled_from([0.0, 0.3, 1.0]),
    scale=st.sampled_from([None, 0.7, -1.3]),
)
def test_the_oracle_is_the_definition(
    seed: int,
    batch: int,
    kv_heads: int,
    shared: int,
    sq: int,
    skv: int,
    dims: tuple[int, int],
    spread: bool,
    density: float,
    scale: float | None,
) -> None:
    heads = kv_heads * shared
    q, k, v = randoms(
        seed,
        (batch, heads, sq, dims[0]),
        (batch, kv_heads, skv, dims[0]),
        (batch, kv_heads, skv, dims[1]),
    )
    axes = (1, 1) if spread else (batch, heads)
    keep = np.random.default_rng(seed).random((*axes, sq, skv)) < density
    out, lse = attention(q, k, v, keep, sm_scale=scale, return_lse=True)
    expected = by_definition(q, k, v, keep, dims[0] ** -0.5 if scale is None else scale)
    np.testing.assert_allclose(out, expected[0], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-12, atol=1e-12)


def test_one_key_gives_its_value_and_its_scaled_logit() -> None:
    q, k = np.array([[[[2.0, 1.0]]]]), np.array([[[[3.0, -1.0]]]])
    v = np.array([[[[7.0, 8.0, 9.0]]]])
    out, lse = attention(q, k, v, None, sm_scale=0.5, return_lse=True)
    assert out.tolist() == v.tolist()
    assert lse.tolist() == [[[2.5]]]  # 0.5 * (6 - 1)


def test_equal_keys_give_the_mean_and_the_logit_plus_ln_n() -> None:
    q, k = np.full((1, 1, 1, 4), 3.0), np.full((1, 1, 5, 4), 2.0)
    v = np.arange(5.0).reshape(1, 1, 5, 1)
    out, lse = attention(q, k, v, None, return_lse=True)
    assert out.item() == pytest.approx(2.0)
    assert lse.item() == pytest.approx(12.0 + math.log(5))  # 24 / sqrt(4)


def test_weights_by_hand() -> None:
    # Logits 0, ln 2 and ln 5; the key with ln 5 is masked for the second row.
    q = np.ones((1, 1, 2, 1))
    k = np.log([1.0, 2.0, 5.0]).reshape(1, 1, 3, 1)
    v = np.array([8.0, 16.0, 24.0]).reshape(1, 1, 3, 1)
    keep = np.array([[True, True, True], [True, True, False]])[None, None]
    out, lse = attention(q, k, v, keep, sm_scale=1.0, return_lse=True)
    np.testing.assert_allclose(out.ravel(), [(8 + 32 + 120) / 8, (8 + 32) / 3], rtol=1e-14)
    np.testing.assert_allclose(lse.ravel(), [math.log(8), math.log(3)], rtol=1e-14)


def test_rows_without_keys_are_exactly_zero_and_minus_infinity() -> None:
    q, k, v = randoms(0, (1, 1, 4, 8), (1, 1, 6, 8), (1, 1, 6, 8))
    keep = np.ones((1, 1, 4, 6), np.bool_)
    keep[..., 2, :] = False
    out, lse = attention(q, k, v, keep, return_lse=True)
    assert (out[0, 0, 2] == 0).all()
    assert lse[0, 0, 2] == -math.inf
    assert np.isfinite(np.delete(lse, 2, axis=2)).all()


@pytest.mark.parametrize("mask", [None, np.ones((1, 1, 3, 0), np.bool_)])
def test_no_keys_at_all(mask: Any) -> None:
    out, lse = attention(
        *randoms(0, (1, 2, 3, 8), (1, 2, 0, 8), (1, 2, 0, 8)), mask, return_lse=True
    )
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def test_large_entries_stay_finite() -> None:
    q, k, v = (1e3 * x for x in randoms(0, *[(1, 1, 40, 64)] * 3))
    out, lse = attention(q, k, v, None, return_lse=True)
    expected = by_definition(q, k, v, np.ones((1, 1, 40, 40)), 1 / 8)
    np.testing.assert_allclose(out, expected[0], rtol=1e-6)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-12)


def test_a_row_of_very_negative_logits() -> None:
    q, k = np.full((1, 1, 1, 1), -1e6), np.array([1.0, 1.0, 1.5]).reshape(1, 1, 3, 1)
    v = np.array([2.0, 4.0, 9.0]).reshape(1, 1, 3, 1)
    out, lse = attention(q, k, v, None, return_lse=True)
    assert out.item() == 3.0
    assert lse.item() == pytest.approx(-1e6 + math.log(2))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
def test_narrow_types_are_widened_before_any_arithmetic(dtype: Any) -> None:
    q, k, v = (x.astype(dtype) for x in randoms(0, *[(1, 1, 5, 16)] * 3))
    out = attention(q, k, v, None)
    assert out.dtype == np.float64
    wide = attention(*(x.astype(np.float64) for x in (q, k, v)), None)
    np.testing.assert_array_equal(out, wide)


def test_layouts_agree_and_inputs_are_left_alone() -> None:
    q, k, v = randoms(0, (2, 6, 5, 8), (2, 3, 7, 8), (2, 3, 7, 4))
    copies = [x.copy() for x in (q, k, v)]
    out, lse = attention(q, k, v, None, return_lse=True)
    turned = [x.transpose(0, 2, 1, 3) for x in (q, k, v)]
    other, other_lse = attention(*turned, None, layout="BSHD", return_lse=True)
    np.testing.assert_array_equal(other, out.transpose(0, 2, 1, 3))
    np.testing.assert_array_equal(other_lse, lse)
    for x, copy in zip((q, k, v), copies, strict=True):
        np.testing.assert_array_equal(x, copy)


def block_masks() -> dict[str, BlockMask]:
    """Masks over 100 x 150 tokens, for 2 batch entries of 6 heads or broadcast."""
    rng = np.random.default_rng(0)
    q_sizes, kv_sizes = [10, 0, 37, 53], [0, 64, 31, 55]
    other_q_sizes = [50, 17, 33, 0]
    return {
        "uniform": BlockMask.from_dense(rng.random((2, 6, 7, 5)) < 0.4, (16, 32), (100, 150)),
        "broadcast": BlockMask.from_dense(rng.random((7, 5)) < 0.4, (16, 32), (100, 150)),
        "tokens": BlockMask.from_tokens(rng.random((6, 100, 150)) < 0.1, (64, 32)),
        "ragged": BlockMask.from_dense(
            rng.random((2, 6, 4, 4)) < 0.5,
            (64, 64),
            q_block_sizes=np.array([q_sizes, other_q_sizes] * 6).reshape(2, 6, 4),
            kv_block_sizes=kv_sizes,
        ),
        "empty": BlockMask.from_dense(np.zeros((7, 5), np.bool_), (16, 32), (100, 150)),
    }


@pytest.mark.parametrize("rows_at_a_time", [3, None])
@pytest.mark.parametrize("name", list(block_masks()))
def test_block_masks_mean_their_tokens(
    name: str, rows_at_a_time: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = block_masks()[name]
    q, k, v = randoms(1, (2, 6, 100, 8), (2, 3, 150, 8), (2, 3, 150, 8))
    expected = attention(q, k, v, mask.to_tokens(), return_lse=True)
    if rows_at_a_time is not None:
        monkeypatch.setattr(oracle, "_CHUNK_SCORES", 150 * rows_at_a_time)
    got = attention(q, k, v, mask, return_lse=True)
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-12)
    assert np.isfinite(got[1]).any() == (name != "empty")


@pytest.mark.parametrize("kind", ["block", "tokens", "none"])
def test_memory_is_bounded(kind: str) -> None:
    tokens = 6144  # the scores of one head would take 302 MB
    q, k, v = randoms(0, *[(1, 1, tokens, 2)] * 3)
    mask: Any = None
    if kind == "block":
        # One block of all rows and all columns.
        sizes = np.array([tokens])
        mask = BlockMask.from_dense(
            [[True]], (tokens, tokens), q_block_sizes=sizes, kv_block_sizes=sizes
        )
    elif kind == "tokens":
        mask = np.broadcast_to(np.arange(tokens) % 3 > 0, (1, 1, tokens, tokens))
    tracemalloc.start()
    attention(q, k, v, mask)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 150e6


def test_shapes_that_do_not_fit_are_refused() -> None:
    q, k, v = randoms(0, (2, 6, 5, 8), (2, 3, 7, 8), (2, 3, 7, 4))
    for name, arrays in {
        "k": (q, k[:1], v[:1]),
        "k`: expected batch 2 and head dim 8": (q, k[..., :4], v),
        "v": (q, k, v[:, :, :6]),
        "q": (q[:, :5], k, v),
        "q`: expected 4 axes": (q[0], k, v),
    }.items():
        with pytest.raises(ValueError, match=f"`{name}"):
            attention(*arrays, None)
    with pytest.raises(ValueError, match="`layout`: expected BHSD or BSHD"):
        attention(q, k, v, None, layout="SBHD")


def test_masks_that_do_not_fit_are_refused() -> None:
    q, k, v = randoms(0, (2, 6, 64, 8), (2, 3, 48, 8), (2, 3, 48, 8))
    for shape in [(2, 6, 64, 49), (2, 3, 64, 48), (3, 6, 64, 48), (64, 48), (2, 6, 48, 64)]:
        with pytest.raises(ValueError, match=r"\(2, 6, 64, 48\)"):
            attention(q, k, v, np.ones(shape, np.bool_))
    with pytest.raises(ValueError, match=r"got \(1, 1, 64, 64\)"):
        attention(q, k, v, BlockMask.from_dense([[True]], (64, 64)))
    with pytest.raises(TypeError, match="uint8"):
        attention(q, k, v, np.ones((1, 1, 64, 48), np.uint8))
    with pytest.raises(TypeError, match="`mask`: expected a BlockMask"):
        attention(q, k, v, [[True]])
