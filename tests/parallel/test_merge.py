"""Merging parts of attention: by the formula, with rows that saw nothing, without overflow."""

from __future__ import annotations

import numpy as np
import pytest

from tessera_cupy.parallel.merge import merge

RNG = np.random.default_rng(0)


def test_parts_merge_to_attention_over_all_keys() -> None:
    scores = 5 * RNG.standard_normal((7, 30))
    values = RNG.standard_normal((30, 4))
    weights = np.exp(scores)
    whole = weights @ values / weights.sum(1, keepdims=True)
    parts = []
    for keys in (slice(0, 11), slice(11, 30)):
        some = weights[:, keys]
        out = some @ values[keys] / some.sum(1, keepdims=True)
        parts += [out.astype(np.float32), np.log(some.sum(1)).astype(np.float32)]
    out, lse = merge(*parts)
    np.testing.assert_allclose(out, whole, atol=1e-5)
    np.testing.assert_allclose(lse, np.log(weights.sum(1)), atol=1e-5)


def test_rows_without_keys_take_the_other_part() -> None:
    none = np.float32(-np.inf)
    lse = np.array([none, 2, none], np.float32)
    more_lse = np.array([3, none, none], np.float32)
    out = np.array([[0.0], [7.0], [0.0]], np.float32)
    more = np.array([[5.0], [0.0], [0.0]], np.float32)
    merged, total = merge(out, lse, more, more_lse)
    assert merged.ravel().tolist() == [5, 7, 0]
    assert total.tolist() == [3, 2, -np.inf]


@pytest.mark.parametrize("large", [1e4, -1e4, 3e38])
def test_large_sums_do_not_overflow(large: float) -> None:
    one = np.ones((1, 2), np.float32)
    lse = np.array([large], np.float32)
    out, total = merge(one, lse, 3 * one, lse)
    assert out.tolist() == [[2, 2]]
    assert total[0] == np.float32(large + np.log(2))
