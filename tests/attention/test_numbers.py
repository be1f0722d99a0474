"""Values: logarithms, repeats, extreme inputs, and every sign of the scale."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tessera_cupy import BlockMask, block_sparse_attention, make_plan, reference

SPLIT = "attend_mma/q64k64/retain-pack/longest+split"


@pytest.mark.parametrize("plan", ["auto", SPLIT, "attend_mma/q128k128/merge-merge/rows"])
def test_the_lse_is_a_natural_logarithm(plan: str) -> None:
    # All scores equal: the LSE is that score plus the logarithm of the number of keys.
    q, k = np.full((1, 6, 70, 64), 0.5, np.float32), np.full((1, 2, 1500, 64), 0.25, np.float32)
    v = np.ones_like(k)
    blocks = np.ones((6, 2, 24), bool)
    blocks[3, 0, 1:] = False
    mask = BlockMask.from_dense(blocks, (64, 64), (70, 1500))
    made = make_plan(mask, q, k, v, regime=plan)
    if plan == SPLIT:
        assert made.tasks().slots > 0
    out, lse = made.run(q, k, v, return_lse=True)
    np.testing.assert_allclose(out, 1, rtol=1e-6)
    expected = np.full((6, 70), 64 * 0.125 / 8 + math.log(1500))
    expected[3, :64] = 1 + math.log(64)
    np.testing.assert_allclose(lse[0], expected, rtol=1e-6)


@pytest.mark.parametrize("scale", [0.3, -0.3, 0.0, -0.0, 2.0, 1e-4])
@pytest.mark.parametrize("plan", ["auto", SPLIT])
def test_scales_of_every_sign(case: Any, random_mask: Any, scale: float, plan: str) -> None:
    mask = random_mask(np.random.default_rng(1), (64, 64), (100, 1000), density=0.8)
    case(mask, dim=16, sm_scale=scale).run(regime=plan)


def test_the_default_scale_is_one_over_the_root_of_the_head_dim(case: Any) -> None:
    case_ = case(BlockMask.from_dense(np.tri(3, dtype=bool), (64, 64)), dim=72)
    np.testing.assert_array_equal(case_.run()[0], case_.run(sm_scale=1 / math.sqrt(72))[0])


@pytest.mark.parametrize("scale", [0.1, 1 / 3, 0.088])
def test_the_type_of_the_scale_does_not_matter(case: Any, scale: float) -> None:
    case_ = case(BlockMask.from_dense(np.tri(3, dtype=bool), (64, 64)), dtype="float16")
    args = (*case_.arrays, case_.mask)
    results = [
        block_sparse_attention(*args, sm_scale=kind(scale), return_lse=True)
        for kind in (float, np.float32, np.float64, np.array)
    ]
    for out, lse in results[1:]:
        np.testing.assert_array_equal(out, results[0][0])
        np.testing.assert_array_equal(lse, results[0][1])
    whole = block_sparse_attention(*args, sm_scale=2)
    np.testing.assert_array_equal(whole, block_sparse_attention(*args, sm_scale=2.0))


def test_what_reaches_the_kernel_is_a_float32(monkeypatch: pytest.MonkeyPatch, case: Any) -> None:
    seen = []
    real = reference.execute

    def spy(*args: Any, sm_scale: float, **kwargs: Any) -> Any:
        seen.append(sm_scale)
        return real(*args, sm_scale=sm_scale, **kwargs)

    monkeypatch.setattr(reference, "execute", spy)
    case_ = case(BlockMask.from_dense([[True]], (64, 64)))
    for kind in (float, np.float32):
        block_sparse_attention(*case_.arrays, case_.mask, sm_scale=kind(0.1))
    assert seen == [float(np.float32(0.1))] * 2


@pytest.mark.parametrize("plan", ["auto", SPLIT])
def test_repeats_are_bitwise_equal(case: Any, random_mask: Any, plan: str) -> None:
    mask = random_mask(np.random.default_rng(2), (32, 32), (100, 900), axes=(1, 2), density=0.9)
    case_ = case(mask, dim=16, dtype="bfloat16")
    out, lse = case_.run(regime=plan)
    for _ in range(5):
        again = block_sparse_attention(*case_.arrays, mask, return_lse=True, regime=plan)
        np.testing.assert_array_equal(again[0].view(np.uint16), out.view(np.uint16))
        np.testing.assert_array_equal(again[1], lse)


def test_a_shuffled_list_is_the_same_mask(case: Any, random_mask: Any) -> None:
    rng = np.random.default_rng(3)
    mask = random_mask(rng, (32, 32), (300, 500), axes=(2, 3))
    blocks = mask.to_dense()
    counts = blocks.sum(axis=-1)
    columns = np.full((*counts.shape, 16), 99)
    for at in np.ndindex(*counts.shape):
        columns[at][: counts[at]] = rng.permutation(np.flatnonzero(blocks[at]))
    listed = BlockMask.from_lists(columns, counts, 16, (32, 32), (300, 500))
    case_ = case(mask, dim=16, dtype="float16")
    out, lse = case_.run()
    other = block_sparse_attention(*case_.arrays, listed, return_lse=True)
    np.testing.assert_array_equal(other[0], out)
    np.testing.assert_array_equal(other[1], lse)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("plan", ["auto", SPLIT])
def test_entries_up_to_a_thousand(case: Any, random_mask: Any, dtype: str, plan: str) -> None:
    mask = random_mask(np.random.default_rng(4), (64, 64), (100, 900), density=0.9)
    case_ = case(mask, dtype=dtype)
    rng = np.random.default_rng(5)
    for x in (case_.q, case_.k):
        x[...] = rng.uniform(-1000, 1000, x.shape)
    out, lse = block_sparse_attention(*case_.arrays, mask, return_lse=True, regime=plan)
    assert np.isfinite(out).all()
    assert np.isfinite(lse).all()
    # Scores near 1e7 leave one key with all the weight, and float32 a whole unit of rounding.
    np.testing.assert_allclose(out, case_.exact[0], atol=0.05)
    np.testing.assert_allclose(lse, case_.exact[1], rtol=1e-5)


@pytest.mark.parametrize("plan", ["auto", SPLIT])
@pytest.mark.parametrize("sign", [-1, 1])
def test_rows_of_extreme_scores(case: Any, random_mask: Any, plan: str, sign: int) -> None:
    mask = random_mask(np.random.default_rng(6), (64, 64), (100, 900), density=0.9)
    case_ = case(mask)
    case_.k[...] = np.abs(case_.k)
    case_.q[:, :, 7] = sign * 40
    case_.q[:, :, 90] = sign * 1e-6
    _, lse = case_.run(regime=plan)
    assert sign * lse[0, 0, 7] > 150  # its exponential is no float32 number


def test_weights_sum_to_one(case: Any, random_mask: Any) -> None:
    mask = random_mask(np.random.default_rng(7), (40, 24), (333, 444), axes=(1, 2))
    case_ = case(mask)
    case_.v[...] = 1
    out, _ = case_.run()
    np.testing.assert_allclose(out, 1, rtol=1e-6)
