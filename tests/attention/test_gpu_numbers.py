"""Values on a GPU: repeats, logarithms, extreme inputs and scales."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tessera_cupy import BlockMask, block_sparse_attention

pytestmark = pytest.mark.gpu

#: The default, and plans of both kernels' tiles with and without split-K.
PLANS = (
    "auto",
    "attend_mma/q64k64/retain-pack/rows",
    "attend_mma/q64k64/retain-pack/longest+split",
    "attend_mma/q128k64/retain-pack/runs+alternate+split",
)


def test_fifty_runs_are_bitwise_equal(gpu: Any, case: Any, random_mask: Any, rng: Any) -> None:
    mask = random_mask(rng, (64, 64), (300, 1700), axes=(1, 3), density=0.9)
    case_ = case(mask, dim=128, dtype="bfloat16", rng=rng)
    arrays = [gpu.cupy.asarray(x) for x in case_.arrays]
    for plan in PLANS:
        first = gpu.run(case_, plan, regime=plan)
        for turn in range(50):
            if turn % 10 == 0:
                gpu.poison()
            again = block_sparse_attention(*arrays, mask, return_lse=True, regime=plan)
            for one, other in zip(first, again, strict=True):
                np.testing.assert_array_equal(
                    one.view(np.uint8), gpu.cupy.asnumpy(other).view(np.uint8), err_msg=plan
                )


def test_a_shuffled_list_is_the_same_mask(gpu: Any, case: Any, random_mask: Any, rng: Any) -> None:
    mask = random_mask(rng, (32, 32), (300, 500), axes=(2, 3))
    blocks = mask.to_dense()
    counts = blocks.sum(axis=-1)
    columns = np.full((*counts.shape, 16), 99)
    for at in np.ndindex(*counts.shape):
        columns[at][: counts[at]] = rng.permutation(np.flatnonzero(blocks[at]))
    case_ = case(mask, dim=128, dtype="float16", rng=rng)
    out, lse = gpu.run(case_)
    arrays = [gpu.cupy.asarray(x) for x in case_.arrays]
    for on_gpu in (False, True):
        lists = [gpu.cupy.asarray(x) if on_gpu else x for x in (columns, counts)]
        listed = BlockMask.from_lists(*lists, 16, (32, 32), (300, 500))
        other = block_sparse_attention(*arrays, listed, return_lse=True)
        np.testing.assert_array_equal(
            gpu.cupy.asnumpy(other[0]).view(np.uint16), out.view(np.uint16)
        )
        np.testing.assert_array_equal(gpu.cupy.asnumpy(other[1]), lse)


def test_the_lse_is_a_natural_logarithm(gpu: Any) -> None:
    cupy = gpu.cupy
    q = cupy.full((1, 6, 70, 64), 0.5, np.float16)
    k = cupy.full((1, 2, 1700, 64), 0.25, np.float16)
    blocks = np.ones((6, 2, 27), bool)
    blocks[3, 0, 1:] = False
    mask = BlockMask.from_dense(blocks, (64, 64), (70, 1700))
    expected = np.full((6, 70), 1 + math.log(1700))
    expected[3, :64] = 1 + math.log(64)
    for plan in PLANS:
        out, lse = block_sparse_attention(q, k, k, mask, return_lse=True, regime=plan)
        np.testing.assert_allclose(cupy.asnumpy(lse)[0], expected, rtol=2e-6, err_msg=plan)
        np.testing.assert_allclose(cupy.asnumpy(out), 0.25, rtol=2e-3, err_msg=plan)


def test_scales_of_every_sign(gpu: Any, case: Any, random_mask: Any, rng: Any) -> None:
    mask = random_mask(rng, (64, 64), (200, 1500), axes=(1, 2), density=0.8)
    for scale in (0.3, -0.3, 0.0, -0.0, 2.0, -1e-4):
        for dim in (64, 128):
            case_ = case(mask, dim=dim, dtype="float16", sm_scale=scale, rng=rng)
            for plan in PLANS:
                gpu.run(case_, f"{plan} {scale} {dim}", regime=plan)


def test_the_type_of_the_scale_does_not_matter(
    gpu: Any, case: Any, random_mask: Any, rng: Any
) -> None:
    mask = random_mask(rng, (64, 64), (200, 300))
    arrays = [gpu.cupy.asarray(x) for x in case(mask, dtype="float16", rng=rng).arrays]
    for scale in rng.uniform(0.01, 1, 20):
        results = [
            block_sparse_attention(*arrays, mask, sm_scale=kind(scale), return_lse=True)[1]
            for kind in (float, np.float32, np.float64)
        ]
        for lse in results[1:]:
            assert (lse == results[0]).all(), scale


def test_entries_up_to_a_thousand(gpu: Any, case: Any, random_mask: Any) -> None:
    # Not random: two keys that nearly tie would rightly give any weight between them.
    rng = np.random.default_rng(5)
    mask = random_mask(rng, (64, 64), (200, 1500), axes=(1, 2), density=0.9)
    for dtype in ("bfloat16", "float16"):
        case_ = case(mask, dtype=dtype, rng=rng)
        for x in (case_.q, case_.k):
            x[...] = rng.uniform(-1000, 1000, x.shape)
        arrays = [gpu.cupy.asarray(x) for x in case_.arrays]
        for plan in PLANS:
            out, lse = block_sparse_attention(*arrays, mask, return_lse=True, regime=plan)
            out, lse = gpu.cupy.asnumpy(out).astype(np.float64), gpu.cupy.asnumpy(lse)
            assert np.isfinite(out).all(), plan
            assert np.isfinite(lse).all(), plan
            np.testing.assert_allclose(out, case_.exact[0], atol=0.1, err_msg=plan)
            np.testing.assert_allclose(lse, case_.exact[1], rtol=1e-5, err_msg=plan)


def test_rows_of_extreme_scores(gpu: Any, case: Any, random_mask: Any, rng: Any) -> None:
    mask = random_mask(rng, (64, 64), (200, 1500), axes=(1, 2), density=0.9)
    for sign in (-1, 1):
        case_ = case(mask, dim=128, dtype="bfloat16", rng=rng)
        case_.k[...] = np.abs(case_.k)
        case_.q[:, :, 7] = sign * 40
        case_.q[:, :, 190] = sign * 1e-6
        for plan in PLANS:
            _, lse = gpu.run(case_, f"{plan} {sign}", regime=plan)
            assert sign * lse[0, 0, 7] > 150


def test_scores_that_grow_along_the_row(gpu: Any, case: Any, random_mask: Any, rng: Any) -> None:
    # Every step outgrows the ones before, or none does: both ways of rescaling.
    mask = random_mask(rng, (64, 64), (200, 1500), axes=(1, 2), density=0.9)
    for sign in (-1, 1):
        case_ = case(mask, dim=64, dtype="float16", rng=rng)
        ramp = np.linspace(-2, 2, 1500)[:, None]
        case_.k[...] = 0.05 * case_.k + ramp
        case_.q[...] = 0.1 * case_.q + sign * 3
        for plan in PLANS:
            gpu.run(case_, f"{plan} {sign}", regime=plan)


def test_weights_sum_to_one(gpu: Any, case: Any, random_mask: Any, rng: Any) -> None:
    mask = random_mask(rng, (40, 24), (333, 444), axes=(1, 2))
    for dtype in ("float16", "bfloat16"):
        case_ = case(mask, dim=128, dtype=dtype, rng=rng)
        case_.v[...] = 1
        out, _ = gpu.run(case_, dtype)
        np.testing.assert_allclose(out.astype(np.float64), 1, rtol=case_.eps)
