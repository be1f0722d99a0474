"""Key slices at the front door: on the host, and by the kernels on the emulated GPU."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera_cupy import (
    ArraySpec,
    BlockMask,
    KeySlices,
    PlanNotEligibleError,
    block_sparse_attention,
    make_plan,
    reference,
)
from tessera_cupy.interop import numpy_dtype
from tests.emulator.emulator import compiler
from tests.emulator.gpu import EmulatedGpu

#: (group, shape): tails on both sides, and a single short group.
SHAPES = [
    (16, (45, 77)),
    (64, (150, 230)),
    (128, (300, 129)),
    (192, (410, 203)),
    (192, (100, 40)),
]


def drawn(
    group: int, shape: tuple[int, int], density: float, axes: tuple[int, int] = (1, 1)
) -> tuple[KeySlices, Any]:
    """Random slices with an empty group, and the token mask that they stand for."""
    rng = np.random.default_rng(group + shape[0])
    sq, skv = shape
    kept = rng.random((*axes, -(-sq // group), skv)) < density
    kept[..., -1, :] &= kept.shape[2] == 1
    tokens = np.stack([kept[:, :, row // group] for row in range(sq)], axis=2)
    return KeySlices.from_groups(kept, group, shape), tokens


def inputs(
    shape: tuple[int, int], heads: tuple[int, int, int], dim: int = 32, dtype: str = "float32"
) -> list[Any]:
    """q, k and v for (batch, query heads, KV heads)."""
    rng = np.random.default_rng(shape[1])
    batch, q_heads, kv_heads = heads
    sizes = [(q_heads, shape[0]), (kv_heads, shape[1]), (kv_heads, shape[1])]
    return [
        rng.standard_normal((batch, *size, dim), np.float32).astype(numpy_dtype(dtype))
        for size in sizes
    ]


@pytest.mark.parametrize("density", [0.0, 0.05, 0.5, 1.0])
@pytest.mark.parametrize(("group", "shape"), SHAPES)
def test_against_the_oracle_over_tokens(group: int, shape: tuple[int, int], density: float) -> None:
    slices, tokens = drawn(group, shape, density)
    q, k, v = inputs(shape, (1, 1, 1))
    out, lse = block_sparse_attention(q, k, v, slices, return_lse=True)
    exact, exact_lse = reference.attention(q, k, v, tokens, return_lse=True)
    np.testing.assert_allclose(out, exact, atol=1e-5)
    np.testing.assert_allclose(lse, exact_lse, atol=1e-4)
    assert (out[np.isneginf(exact_lse)] == 0).all()
    np.testing.assert_allclose(reference.attention(q, k, v, slices), exact, atol=1e-12)


@pytest.mark.parametrize("axes", [(1, 1), (1, 4), (2, 1), (2, 4)])
def test_broadcast_and_grouped_heads(axes: tuple[int, int]) -> None:
    slices, tokens = drawn(64, (150, 230), 0.2, axes)
    q, k, v = inputs((150, 230), (2, 4, 2))
    out = block_sparse_attention(q, k, v, slices)
    np.testing.assert_allclose(out, reference.attention(q, k, v, tokens), atol=1e-5)


def test_a_plan_takes_slices_and_new_ones() -> None:
    slices, _ = drawn(64, (150, 230), 0.2)
    q, k, v = inputs((150, 230), (1, 1, 1))
    plan = make_plan(slices, q, k, v)
    assert plan.mask is slices.to_block_mask()
    assert "slices of 64 rows by single keys" in plan.explain()
    text = "slices of 64 rows, run as blocks of"
    pack = make_plan(slices, q, k, v, regime="attend_mma/q64k64/retain-pack/rows")
    assert text in pack.explain()
    plain = BlockMask.from_dense([[1]], (64, 16))
    assert text not in make_plan(plain, ArraySpec((1, 1, 64, 32))).explain()
    kept = ~slices.to_dense()
    other = KeySlices.from_groups(kept, 64, slices.shape)
    again = plan.update(other)
    tokens = np.repeat(kept, 64, axis=2)[:, :, :150]
    np.testing.assert_allclose(again.run(q, k, v), reference.attention(q, k, v, tokens), atol=1e-5)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("group", [16, 64, 128, 192])
def test_a_plan_of_slices_that_fill_whole_blocks_takes_others(group: int, dim: int) -> None:
    """Whole blocks have no token bits, for which there are kernels of more shapes."""
    shape = (200, 96)
    kept = np.ones((-(-200 // group), 96), bool)
    whole = KeySlices.from_groups(kept, group, shape)
    assert not whole.to_block_mask().has_token_bits
    some = KeySlices.from_groups(kept & (np.arange(96) % 3 > 0), group, shape)
    arrays = inputs(shape, (1, 2, 1), dim)
    plan = make_plan(whole, *arrays, arch="sm_90a")
    for slices in (some, whole):
        made = plan.update(slices)
        assert made.spec is plan.spec
        exact = reference.attention(*arrays, slices)
        np.testing.assert_allclose(made.run(*arrays), exact, atol=1e-5)


def test_plans_that_read_no_token_bits_are_for_no_slices() -> None:
    regime = "attend_wgmma/q192k128/merge-pack/longest+split"
    q, k = (ArraySpec((1, 1, n, 64), "float16") for n in (200, 96))
    plain = BlockMask.from_dense(np.ones((13, 6), bool), (16, 16), (200, 96))
    plan = make_plan(plain, q, k, arch="sm_90a", regime=regime)
    whole = KeySlices.from_groups(np.ones((13, 96), bool), 16, (200, 96))
    with pytest.raises(PlanNotEligibleError, match=r"token bits .*, which slices need that run as"):
        make_plan(whole, q, k, arch="sm_90a", regime=regime)
    tokens = BlockMask.from_tokens(np.tri(200, 96, dtype=bool), (16, 16))
    for mask in (whole, tokens):
        with pytest.raises(PlanNotEligibleError, match=r"`mask`.*token bits.*make_plan"):
            plan.update(mask)


def test_slices_and_what_was_made_of_them_end_together() -> None:
    slices, _ = drawn(64, (150, 230), 0.2)
    arrays = inputs((150, 230), (1, 1, 1))
    block_sparse_attention(*arrays, slices)
    ends = [weakref.ref(slices), weakref.ref(slices.to_block_mask())]
    del slices
    gc.collect()
    assert [end() for end in ends] == [None, None]


def test_another_shape_is_refused() -> None:
    slices, _ = drawn(64, (150, 230), 0.2)
    for call in (make_plan, lambda m, q, k, v: block_sparse_attention(q, k, v, m)):
        with pytest.raises(ValueError, match="151 query and 230 key tokens"):
            call(slices, *inputs((151, 230), (1, 1, 1)))
    with pytest.raises(TypeError, match="a BlockMask or KeySlices, got list"):
        make_plan([[1]], *inputs((151, 230), (1, 1, 1)))


@pytest.mark.skipif(compiler() is None, reason="no g++ to build the emulator with")
@pytest.mark.parametrize(
    ("group", "shape", "plan", "kernel"),
    [
        (16, (45, 77), "attend_mma/q128k64/merge-pack/longest+split", "attend_mma"),
        (64, (150, 230), "attend_wgmma/q128k192/share-pack/longest+split", "attend_wgmma"),
        (192, (410, 203), "auto", "attend_wgmma"),
    ],
)
def test_the_kernels_on_the_emulated_gpu(
    kernel_cache: Path, group: int, shape: tuple[int, int], plan: str, kernel: str
) -> None:
    slices, tokens = drawn(group, shape, 0.2, (1, 2))
    q, k, v = inputs(shape, (1, 2, 1), 64, "float16")
    exact = reference.attention(q, k, v, tokens)
    whole = KeySlices.from_groups(np.ones_like(slices.to_dense()), group, shape)
    with EmulatedGpu(kernel_cache.parent / "emulated-kernels", 1).here() as gpu:
        arrays = [gpu.array(x) for x in (q, k, v)]
        out = block_sparse_attention(*arrays, slices, regime=plan).get().astype(np.float64)
        assert [name for name in gpu.launched if name.startswith(kernel)]
        # No token bits are there to be read.
        all_of = block_sparse_attention(*arrays, whole, regime=plan).get().astype(np.float64)
    np.testing.assert_allclose(all_of, reference.attention(q, k, v, whole), atol=4e-3)
    np.testing.assert_allclose(out, exact, atol=4e-3)
    assert (out[np.broadcast_to(~tokens.any(axis=3), out.shape[:3])] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("group", "shape"), SHAPES)
def test_on_a_gpu(gpu: Any, group: int, shape: tuple[int, int], dtype: str) -> None:
    q, k, v = inputs(shape, (2, 4, 2), 64, dtype)
    for axes in ((1, 1), (2, 4)):
        slices, tokens = drawn(group, shape, 0.3, axes)
        moved = KeySlices.from_groups(gpu.cupy.asarray(slices.to_dense()), group, shape)
        assert moved.device == gpu.cupy.cuda.Device().id
        exact = reference.attention(q, k, v, tokens)
        for given in (slices, moved):
            arrays = [gpu.cupy.asarray(x) for x in (q, k, v)]
            out = gpu.cupy.asnumpy(block_sparse_attention(*arrays, given)).astype(np.float64)
            np.testing.assert_allclose(out, exact, atol=0.02)
            assert (out[~tokens.any(axis=3) & np.ones((2, 4, 1), bool)] == 0).all()
