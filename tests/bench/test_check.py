"""The demo's judge passes what rounding explains and nothing else."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tessera_cupy import reference
from tessera_cupy.bench.check import Check, check_rows
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
