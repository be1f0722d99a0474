"""Which row of which head of which batch entry: offsets, strides, shared KV heads, big counts."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import numpy as np
import pytest

from tessera_cupy import ArraySpec, BlockMask, block_sparse_attention, make_plan, reference
from tessera_cupy.kernels.arch import ARCHS


@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
def test_each_batch_entry_sees_its_own_block(case: Any, layout: str) -> None:
    blocks = np.zeros((3, 2, 3, 3), bool)
    for b in range(3):
        blocks[b, :, :, b] = True
    case_ = case(BlockMask.from_dense(blocks, (64, 64), (170, 180)), layout=layout)
    out, _ = case_.run()
    swap = (0, 1, 2, 3) if layout == "BHSD" else (0, 2, 1, 3)
    out, q, k, v = (x.transpose(swap) for x in (out, *case_.arrays))
    for b in range(3):
        keys = slice(64 * b, 64 * b + 64)
        alone = reference.attention(q[[b]], k[[b], :, keys], v[[b], :, keys], None)
        np.testing.assert_allclose(out[[b]], alone, atol=1e-5)


@pytest.mark.parametrize("axes", [(1, 1), (2, 1), (1, 6), (2, 6)])
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
def test_masks_broadcast_over_batch_and_heads(
    case: Any, random_mask: Any, axes: tuple[int, int], layout: str
) -> None:
    mask = random_mask(np.random.default_rng(2), (32, 64), (150, 200), axes=axes)
    case(mask, batch=2, kv_heads=3, shared=2, layout=layout).run()


@pytest.mark.parametrize("organization", ["rows", "runs+longest+split"])
def test_shared_kv_heads_are_those_repeated(case: Any, random_mask: Any, organization: str) -> None:
    # Query heads of one group have masks of their own.
    mask = random_mask(np.random.default_rng(4), (64, 64), (128, 1100), axes=(1, 12), density=0.8)
    case_ = case(mask, shared=6, dim=16)
    assert case_.k.shape[1] == 2
    plan = f"attend_mma/q64k64/retain-pack/{organization}"
    out, lse = case_.run(regime=plan)
    q, k, v = case_.arrays
    repeated = block_sparse_attention(
        q, k.repeat(6, 1), v.repeat(6, 1), mask, return_lse=True, regime=plan
    )
    np.testing.assert_array_equal(out, repeated[0])
    np.testing.assert_array_equal(lse, repeated[1])


@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_views_are_read_by_their_strides(
    case: Any, random_mask: Any, layout: str, dtype: str
) -> None:
    mask = random_mask(np.random.default_rng(5), (48, 64), (130, 200), axes=(1, 4))
    case_ = case(mask, batch=2, kv_heads=2, shared=2, dim=24, dtype=dtype, layout=layout)
    expected = case_.run()[0]
    sequence = layout.index("S")

    def turned(x: Any) -> Any:  # the head dim is not contiguous
        return np.ascontiguousarray(x.swapaxes(sequence, 3)).swapaxes(sequence, 3)

    def part(x: Any) -> Any:  # from the fifth row of a longer buffer
        pad = [(0, 0)] * 4
        pad[sequence] = (5, 3)
        inside = (slice(None),) * sequence + (slice(5, 5 + x.shape[sequence]),)
        return np.pad(x, pad, constant_values=9)[inside]

    def skipping(x: Any) -> Any:  # every second element, from the back
        return np.repeat(x, 2, axis=3)[..., ::2][..., ::-1].copy()[..., ::-1]

    def backwards(x: Any) -> Any:
        return np.flip(np.flip(x, sequence).copy(), sequence)

    q, k, v = case_.arrays
    for views in (
        (turned(q), turned(k), v),
        (q, k, turned(v)),
        (part(q), part(k), part(v)),
        (skipping(q), k, skipping(v)),
        (backwards(q), backwards(k), backwards(v)),
    ):
        assert not all(x.flags.c_contiguous for x in views)
        result = block_sparse_attention(*views, mask, layout=layout)
        np.testing.assert_array_equal(result, expected)


def test_packed_qkv(case: Any, random_mask: Any) -> None:
    mask = random_mask(np.random.default_rng(6), (32, 32), (100, 100), axes=(1, 3))
    case_ = case(mask, batch=2, dim=16, layout="BSHD")
    packed = np.stack(case_.arrays, axis=2)
    q, k, v = (packed[:, :, i] for i in range(3))
    expected, _ = case_.run()
    np.testing.assert_array_equal(block_sparse_attention(q, k, v, mask, layout="BSHD"), expected)


def test_expanded_kv_heads(case: Any, random_mask: Any) -> None:
    mask = random_mask(np.random.default_rng(8), (32, 32), (100, 100), axes=(1, 4))
    case_ = case(mask, batch=2, shared=4, dim=16)
    q, k, v = case_.arrays
    wide = [np.broadcast_to(x, (2, 4, 100, 16)) for x in (k, v)]
    assert wide[0].strides[1] == 0
    np.testing.assert_array_equal(block_sparse_attention(q, *wide, mask), case_.run()[0])


@pytest.mark.parametrize("dim", [8, 16, 64, 72, 80, 96, 120, 128, 224, 256])
@pytest.mark.parametrize("bits", [False, True], ids=["blocks", "token bits"])
def test_every_head_dim(case: Any, random_mask: Any, dim: int, bits: bool) -> None:
    rng = np.random.default_rng(dim)
    mask = random_mask(rng, (64, 64), (150, 190), axes=(1, 2))
    if bits:
        mask = BlockMask.from_tokens(mask.to_tokens() & (rng.random((150, 190)) < 0.5), (64, 64))
    case(mask, dim=dim).run()


def test_every_head_dim_has_a_kernel_that_fits_on_every_architecture() -> None:
    token = np.tri(128, dtype=bool)
    masks = [
        BlockMask.from_dense([[1, 0], [1, 1]], (64, 64)),
        BlockMask.from_tokens(token, (64, 64)),
    ]
    for arch in ARCHS.values():
        for dim in range(8, 257, 8):
            for mask in masks:
                for dtype in ("float16", "bfloat16"):
                    plan = make_plan(mask, ArraySpec((1, 2, 128, dim), dtype), arch=arch.name)
                    config = plan.config
                    assert config.smem_bytes <= arch.smem_block
                    assert config.head_dim >= dim
                    assert (config.arch, config.dtype) == (arch.name, dtype)
                    assert config.bits == (mask is masks[1])
                    assert (config.tile_q, config.tile_kv) == (plan.spec.tile_q, plan.spec.tile_kv)


def test_many_blocks_of_a_broadcast_mask() -> None:
    rng = np.random.default_rng(9)
    blocks = rng.random((6700, 6700), np.float32) < 0.01
    tokens = 6700 * 64
    mask = BlockMask.from_dense(blocks, (64, 64))
    tracemalloc.start()
    begin = time.perf_counter()
    plan = make_plan(mask, ArraySpec((1, 48, tokens, 128)), arch="sm_80")
    tiles, tasks = plan.tiles(), plan.tasks()
    seconds = time.perf_counter() - begin
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # One head's tiles, whatever the number of heads.
    assert len(tiles) == 6700
    assert int(tiles.frag_len.sum(dtype=np.int64)) == 64 * int(blocks.sum())
    assert int((tasks.task_end - tasks.task_begin).sum(dtype=np.int64)) == 48 * int(
        tiles.steps.sum(dtype=np.int64)
    )
    assert (tasks.task_head.min(), tasks.task_head.max()) == (0, 47)
    assert peak < 500 << 20
    assert seconds < 30


@pytest.mark.parametrize(
    ("heads", "blocks", "block", "density"), [(32, 384, 128, 1.0), (48, 768, 16, 0.02)]
)
def test_counts_that_outgrow_small_buffers(
    heads: int, blocks: int, block: int, density: float
) -> None:
    rng = np.random.default_rng(10)
    shape = (1 if density == 1 else heads, blocks, blocks)
    mask = BlockMask.from_dense(rng.random(shape, np.float32) < density, (block, block))
    plan = make_plan(mask, ArraySpec((1, heads, blocks * block, 128)))
    tiles, tasks = plan.tiles(), plan.tasks()
    rows = np.zeros((heads, blocks * block), np.int32)
    first, count = tiles.tile_q[tasks.task_tile].T
    whole = tasks.task_slot < 0
    for head, row, rows_of in zip(tasks.task_head[whole], first[whole], count[whole], strict=True):
        rows[head, row : row + rows_of] += 1
    for head, tile in zip(tasks.merge_head, tasks.merge_tile, strict=True):
        row, rows_of = tiles.tile_q[tile]
        rows[head, row : row + rows_of] += 1
    assert (rows == 1).all()
    per_head = tiles.steps.sum(dtype=np.int64) * (heads // mask.heads)
    assert (tasks.task_end - tasks.task_begin).sum(dtype=np.int64) == per_head
