"""Empty rows, tails, tiny inputs and odd places in memory, on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tessera_cupy import BlockMask, block_sparse_attention, reference
from tessera_cupy.kernels.catalog import catalog

pytestmark = pytest.mark.gpu

DTYPES = ("float16", "bfloat16")


@pytest.fixture
def tiles(gpu: Any) -> list[str]:
    """Kernel and tile of plans that take head dim 64 and blocks of 64."""
    return sorted(
        {
            f"{c.kernel}/q{c.tile_q}k{c.tile_kv}"
            for c in catalog(gpu.arch.name)
            if c.attends and c.serves(64) and not c.gather
        }
    )


@pytest.fixture(autouse=True)
def _poisoned(gpu: Any) -> None:
    gpu.poison()


def test_empty_rows(gpu: Any, case: Any, random_mask: Any, rng: Any, tiles: list[str]) -> None:
    blocks = random_mask(rng, (64, 64), (256, 300), axes=(1, 2)).to_dense()
    blocks[0, 0, 2] = blocks[0, 1, 0] = False
    mask = BlockMask.from_dense(blocks, (64, 64), (256, 300))
    for dtype in DTYPES:
        case_ = case(mask, dtype=dtype, rng=rng)
        for tile in tiles:
            out, lse = gpu.run(case_, tile,
                               regime=f"{tile}/retain-pack/rows")  # fmt: skip
            for head, rows in ((0, slice(128, 192)), (1, slice(0, 64))):
                # Zeros of either sign would pass a comparison.
                assert not out[0, head, rows].view(np.uint16).any(), tile
                assert np.isneginf(lse[0, head, rows]).all(), tile


def test_no_work_at_all(gpu: Any, case: Any, rng: Any) -> None:
    shapes: list[tuple[tuple[int, int], Any]] = [
        ((100, 0), np.ones((2, 0), bool)),
        ((100, 70), np.zeros((2, 2), bool)),
        ((0, 70), np.ones((0, 2), bool)),
        ((0, 0), np.ones((0, 0), bool)),
    ]
    for layout in ("BHSD", "BSHD"):
        for shape, blocks in shapes:
            mask = BlockMask.from_dense(blocks, (64, 64), shape)
            case_ = case(mask, batch=2, kv_heads=3, dtype="float16", layout=layout, rng=rng)
            out, lse = gpu.run(case_, f"{shape} {layout}")
            assert not out.any()
            assert np.isneginf(lse).all()
    q = gpu.cupy.zeros((0, 2, 64, 64), np.float16)
    mask = BlockMask.from_dense([[True]], (64, 64))
    assert block_sparse_attention(q, q, q, mask).shape == q.shape


def test_small_and_odd_lengths(
    gpu: Any, case: Any, random_mask: Any, rng: Any, tiles: list[str]
) -> None:
    for sq, skv in (
        (1, 1), (9, 9), (1, 512), (200, 200), (1024, 64), (1001, 503), (65, 129), (129, 65),
    ):  # fmt: skip
        mask = random_mask(rng, (64, 64), (sq, skv), axes=(1, 2))
        for dtype in DTYPES:
            case_ = case(mask, dtype=dtype, rng=rng)
            for tile in tiles:
                gpu.run(case_, f"{tile} {sq}x{skv}", regime=f"{tile}/retain-pack/longest+split")


def test_rows_just_past_a_tile(gpu: Any, case: Any, random_mask: Any, rng: Any) -> None:
    for tokens, block in ((137, 128), (1024, 128), (321, 192), (385, 384)):
        mask = random_mask(rng, (block, block), (tokens, tokens))
        case_ = case(mask, dtype="float16", rng=rng)
        out, _ = gpu.run(case_, f"{tokens} {block}")
        # Row by row, so that one row of zeros is not lost in a long column.
        worst = np.abs(out.astype(np.float64) - case_.exact[0]).max(axis=(0, 1, 3))
        assert worst.max() < 0.01
        assert (out != 0).any(axis=3).all()


def test_a_first_tile_without_valid_keys(gpu: Any, case: Any, rng: Any) -> None:
    tokens = np.zeros((64, 1700), bool)
    tokens[:32, :800] = True
    tokens[32:, 1600:] = True
    tokens[40:48] = False
    mask = BlockMask.from_tokens(tokens, (64, 64))
    shapes = {
        (c.tile_q, c.tile_kv)
        for c in catalog(gpu.arch.name)
        if c.kernel == "attend_mma" and c.bits and c.serves(64)
    }
    for q, kv in sorted(shapes):
        # With split, whole parts of some rows have no key.
        for organization in ("rows", "alternate", "longest+split"):
            plan = f"attend_mma/q{q}k{kv}/retain-pack/{organization}"
            out, lse = gpu.run(case(mask, dtype="float16", rng=rng), plan, regime=plan)
            assert not out[0, 0, 40:48].any()
            assert np.isneginf(lse[0, 0, 40:48]).all()


def test_alternate_heads_empty(gpu: Any, case: Any, rng: Any) -> None:
    blocks = np.ones((32, 1, 1), bool)
    blocks[::2] = False
    mask = BlockMask.from_dense(blocks, (16, 16), (8, 8))
    out, _ = gpu.run(case(mask, dtype="bfloat16", rng=rng))
    assert not out[0, ::2].any()
    assert (out[0, 1::2] != 0).any(axis=(1, 2)).all()


def test_each_batch_entry_sees_its_own_block(gpu: Any, case: Any, rng: Any) -> None:
    blocks = np.zeros((3, 1, 3, 3), bool)
    for b in range(3):
        blocks[b, :, :, b] = True
    mask = BlockMask.from_dense(blocks, (64, 64), (170, 180))
    for layout in ("BHSD", "BSHD"):
        gpu.run(case(mask, kv_heads=2, dtype="float16", layout=layout, rng=rng), layout)


def test_one_token_mask_in_blocks_of_every_size(gpu: Any, case: Any, rng: Any) -> None:
    coarse = np.kron([[1, 0, 1], [0, 1, 1]], np.ones((128, 128), bool)).astype(bool)[:250, :370]
    inputs = case(BlockMask.from_tokens(coarse, (128, 128)), dtype="float16", rng=rng)
    exact = reference.attention(*inputs.arrays, coarse[None, None])
    for block in (16, 32, 64, 128):
        mask = BlockMask.from_tokens(coarse, (block, block))
        arrays = [gpu.cupy.asarray(x) for x in inputs.arrays]
        out = gpu.cupy.asnumpy(block_sparse_attention(*arrays, mask))
        np.testing.assert_allclose(out, exact, atol=4e-3, err_msg=str(block))


def test_sparse_is_not_dense(gpu: Any, case: Any, rng: Any) -> None:
    first = np.zeros((6, 6), bool)
    first[:, 0] = True
    for blocks in (first, np.eye(6, dtype=bool)):
        case_ = case(BlockMask.from_dense(blocks, (64, 64)), dtype="float16", rng=rng)
        out, _ = gpu.run(case_)
        assert np.abs(out - reference.attention(*case_.arrays, None)).max() > 0.1


def test_masks_used_in_turn(gpu: Any, case: Any, rng: Any) -> None:
    blocks = rng.random((1, 2, 4, 4)) < 0.5
    masks = [BlockMask.from_dense(b, (64, 64)) for b in (blocks, ~blocks)]
    blocks[:] = True  # neither sees it
    cases = [case(mask, dtype="bfloat16", rng=rng) for mask in masks]
    for _ in range(3):
        for case_ in cases:
            gpu.run(case_)


def test_views(gpu: Any, case: Any, random_mask: Any, rng: Any) -> None:
    cupy = gpu.cupy
    mask = random_mask(rng, (64, 32), (200, 260), axes=(1, 4))
    for layout in ("BHSD", "BSHD"):
        case_ = case(
            mask, batch=2, kv_heads=2, shared=2, dim=128, dtype="bfloat16", layout=layout, rng=rng
        )
        sequence = layout.index("S")

        def turned(x: Any, axis: int = sequence) -> Any:
            return cupy.ascontiguousarray(x.swapaxes(axis, 3)).swapaxes(axis, 3)

        def part(x: Any, axis: int = sequence) -> Any:
            shape = list(x.shape)
            shape[axis] += 8
            longer = gpu.poisoned(tuple(shape), x.dtype)
            inside = (slice(None),) * axis + (slice(5, 5 + x.shape[axis]),)
            longer[inside] = x
            return longer[inside]

        def wide(x: Any) -> Any:  # rows longer than the head dim, off a 16-byte boundary
            longer = gpu.poisoned((*x.shape[:3], 140), x.dtype)
            longer[..., 5:133] = x
            return longer[..., 5:133]

        def backwards(x: Any, axis: int = sequence) -> Any:
            return cupy.flip(cupy.flip(x, axis).copy(), axis)

        def misaligned(x: Any) -> Any:
            moved = gpu.poisoned((x.size + 1,), x.dtype)[1:].reshape(x.shape)
            moved[...] = x
            return moved

        q, k, v = (cupy.asarray(x) for x in case_.arrays)
        packed = cupy.stack([k, v], axis=2)
        for label, views in {
            "q and k transposed": (turned(q), turned(k), v),
            "v transposed": (q, k, turned(v)),
            "slices of longer buffers": (part(q), part(k), part(v)),
            "slices of wider rows": (wide(q), wide(k), wide(v)),
            "reversed": (backwards(q), backwards(k), backwards(v)),
            "off by one element": (misaligned(q), misaligned(k), misaligned(v)),
            "packed": (q, packed[:, :, 0], packed[:, :, 1]),
        }.items():
            for regime in ("auto", "attend_mma/q64k64/retain-pack/rows"):
                out = block_sparse_attention(*views, mask, layout=layout, regime=regime)
                case_.check_kernel(cupy.asnumpy(out), label=f"{label} {layout} {regime}")


def test_expanded_heads_and_batch(gpu: Any, case: Any, random_mask: Any, rng: Any) -> None:
    cupy = gpu.cupy
    mask = random_mask(rng, (64, 64), (200, 260), axes=(1, 4))
    one = case(mask, batch=1, shared=4, dim=128, dtype="bfloat16", rng=rng)
    q, k, v = (cupy.asarray(x) for x in one.arrays)
    for regime in ("auto", "attend_mma/q64k64/retain-pack/rows"):
        heads = [cupy.broadcast_to(x, (1, 4, *x.shape[2:])) for x in (k, v)]
        one.check_kernel(
            cupy.asnumpy(block_sparse_attention(q, *heads, mask, regime=regime)),
            label=f"heads {regime}",
        )
        entries = [cupy.broadcast_to(x, (3, *x.shape[1:])) for x in (q, k, v)]
        out = cupy.asnumpy(block_sparse_attention(*entries, mask, regime=regime))
        for entry in out:
            one.check_kernel(entry[None], label=f"batch {regime}")


def test_out_in_odd_places(gpu: Any, case: Any, random_mask: Any, rng: Any) -> None:
    cupy = gpu.cupy
    mask = random_mask(rng, (32, 64), (200, 1500), axes=(1, 2), density=0.9)
    case_ = case(mask, dim=128, dtype="float16", rng=rng)
    q, k, v = (cupy.asarray(x) for x in case_.arrays)
    for regime in ("auto", "attend_mma/q64k64/retain-pack/longest+split"):
        whole = gpu.poisoned((1, 2, 3, 208, 160), np.float16)
        out = whole[:, :, 1, :200, 16:144]
        before = cupy.asnumpy(whole.view(np.uint16))
        block_sparse_attention(q, k, v, mask, out=out, regime=regime)
        case_.check_kernel(cupy.asnumpy(out), label=regime)
        after = cupy.asnumpy(whole.view(np.uint16))
        after[:, :, 1, :200, 16:144] = before[:, :, 1, :200, 16:144]
        np.testing.assert_array_equal(after, before)
        in_place = q.copy()
        block_sparse_attention(in_place, k, v, mask, out=in_place, regime=regime)
        case_.check_kernel(cupy.asnumpy(in_place), label=f"out is q, {regime}")
