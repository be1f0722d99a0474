"""The demo's judge passes what rounding explains and nothing else."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tessera_cupy import reference
from tessera_cupy.bench.check import Check, check_rows, expect_rows
from tessera_cupy.masks import BlockMask

RNG = np.random.default_rng(0)
DENSE = RNG.random((1, 3, 4, 4)) < 0.5
DENSE[..., 0] = True
MASK = BlockMask.from_dense(DENSE, (32, 32), (120, 120))
Q, K, V = RNG.standard_normal((3, 1, 3, 120, 16)).astype(np.float32)


def judge(out: np.ndarray, *arrays: np.ndarray, rows: int = 120) -> Check:
    seen = []
    check = check_rows(MASK, *(arrays or (Q, K, V)), out, rows=rows, on_head=lambda: seen.append(1))
    assert len(seen) == 3
    return check


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_the_exact_output_rounded_to_its_dtype_passes(dtype: type) -> None:
    arrays = [x.astype(dtype) for x in (Q, K, V)]
    check = judge(reference.attention(*arrays, MASK).astype(dtype), *arrays)
    assert check.passed
    assert check.rows == 3 * 120
    assert check.allowed < 0.1


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_one_block_too_many_in_one_row_of_blocks_fails(dtype: type) -> None:
    arrays = [x.astype(dtype) for x in (Q, K, V)]
    wrong = DENSE.copy()
    head, row, column = np.argwhere(~DENSE[0])[-1]
    wrong[0, head, row, column] = True
    out = reference.attention(*arrays, BlockMask.from_dense(wrong, (32, 32), (120, 120)))
    check = judge(out.astype(dtype), *arrays)
    assert not check.passed
    assert check.error > 2 * check.allowed


def test_the_last_row_is_always_among_the_sampled() -> None:
    out = reference.attention(Q, K, V, MASK).astype(np.float32)
    assert judge(out, rows=5).rows == 15
    out[0, 2, -1] += 0.01
    assert not judge(out, rows=5).passed
    out[0, 2, -1] -= 0.01
    out[0, 1, 0] += 0.01
    assert not judge(out, rows=5).passed


def test_a_row_that_was_never_written_fails_even_between_the_samples() -> None:
    out = reference.attention(Q, K, V, MASK).astype(np.float32)
    out[0, 0, 1] = np.nan
    check = judge(out, rows=2)
    assert not check.finite
    assert not check.passed
    # And where it was sampled, it is no number that the comparison could lose.
    assert not judge(out, rows=120).passed


@pytest.mark.parametrize("rows", [1, 2, 7, 120, 500])
def test_sampled_rows_are_those_of_the_whole_oracle(rows: int) -> None:
    expected = expect_rows(MASK, Q, K, V, rows=rows, dtype=np.float16, on_head=lambda: None)
    whole = reference.attention(Q, K, V, MASK)
    assert expected.rows.shape == (3, min(max(rows, 2), 120))
    for head, at in enumerate(expected.rows):
        assert (at[0], at[-1]) == (0, 119)
        assert (np.diff(at) > 0).all()
        np.testing.assert_allclose(expected.exact[head], whole[0, head, at], rtol=1e-12)
    assert (expected.allowed > 0).all()


def test_sampled_rows_are_random_but_the_same_each_time() -> None:
    def rows() -> np.ndarray:
        return expect_rows(MASK, Q, K, V, rows=20, dtype=np.float16, on_head=lambda: None).rows

    first = rows()
    assert (first == rows()).all()
    assert (first[0] != first[1]).any()
    assert len(set(np.diff(first[0]).tolist())) > 3


def test_one_expectation_serves_many_outputs() -> None:
    expected = expect_rows(MASK, Q, K, V, rows=120, dtype=np.float32, on_head=lambda: None)
    right = reference.attention(Q, K, V, MASK).astype(np.float32)
    assert expected.check(right).passed
    assert not expected.check(right[:, :, ::-1]).passed
    assert expected.check(right).passed


def test_inputs_widened_to_float32_give_the_same_verdict() -> None:
    narrow = [x.astype(ml_dtypes.bfloat16) for x in (Q, K, V)]
    options = {"rows": 30, "dtype": ml_dtypes.bfloat16, "on_head": lambda: None}
    one = expect_rows(MASK, *narrow, **options)
    other = expect_rows(MASK, *(x.astype(np.float32) for x in narrow), **options)
    assert (one.exact == other.exact).all()
    assert (one.allowed == other.allowed).all()


def test_what_is_allowed_is_twice_a_plain_computation_and_the_rounding_of_the_output() -> None:
    dtype = ml_dtypes.bfloat16
    arrays = [x.astype(dtype).astype(np.float32) for x in (Q, K, V)]
    expected = expect_rows(MASK, *arrays, rows=120, dtype=dtype, on_head=lambda: None)
    exact = reference.attention(*arrays, MASK)[0]
    keep = MASK.to_tokens()[0]
    for h, (q, k, v) in enumerate(zip(*(x[0] for x in arrays), strict=True)):
        scores = np.where(keep[h], q @ k.T / 4, np.float32(-np.inf))
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        plain = weights.astype(dtype).astype(np.float32) @ v / weights.sum(axis=1, keepdims=True)
        error = np.abs(plain.astype(dtype).astype(np.float64) - exact[h]).max()
        allowed = 2 * error + 2**-7 * np.abs(exact[h]).max()
        assert expected.allowed[h] == pytest.approx(allowed, rel=1e-3)
