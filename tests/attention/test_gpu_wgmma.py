"""Hopper's kernel against the oracle: where copies, halves or the pipeline could go wrong."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from tessera_cupy import BlockMask
from tessera_cupy.kernels import launch
from tessera_cupy.kernels.catalog import KernelConfig, catalog
from tessera_cupy.mapping import Mapping, why_not
from tessera_cupy.regimes import PlanSpec

pytestmark = pytest.mark.gpu

SIDES = [
    Mapping(q, kv)
    for q, kv in product(
        ("retain", "merge", "share", "regroup", "split"), ("retain", "merge", "split", "pack")
    )
]
ORGANIZATIONS = ("rows", "longest+split", "runs+alternate")


@pytest.fixture(autouse=True)
def _hopper(gpu: Any) -> None:
    if gpu.arch.name != "sm_90a":
        pytest.skip(f"{gpu.arch.name} has no attend_wgmma")


def specs(mask: BlockMask, dim: int) -> list[str]:
    """Names of the plans that can serve a mask; organizations take turns."""
    shapes = sorted(
        {
            (config.tile_q, config.tile_kv)
            for config in catalog("sm_90a")
            if config.kernel == "attend_wgmma" and config.serves(dim) and not config.gather
        }
    )
    pairs = [
        (shape, side)
        for shape, side in product(shapes, SIDES)
        if why_not(side, mask, *shape) is None
    ]
    names = [
        f"attend_wgmma/q{q}k{kv}/{side.name}/{ORGANIZATIONS[i % len(ORGANIZATIONS)]}"
        for i, ((q, kv), side) in enumerate(pairs)
    ]
    assert all(PlanSpec.parse(name).name == name for name in names)
    return names


@pytest.mark.parametrize(
    "block", [(16, 16), (16, 64), (32, 16), (24, 40), (48, 56), (64, 64), (64, 32), (96, 24),
              (128, 64), (128, 128), (192, 96), (384, 384)]
)  # fmt: skip
def test_every_mapping_of_every_block_size(
    gpu: Any, case: Any, random_mask: Any, rng: Any, block: tuple[int, int]
) -> None:
    kinds = [("bfloat16", 128, "BHSD"), ("float16", 64, "BSHD"), ("bfloat16", 64, "BHSD"),
             ("float16", 128, "BSHD")]  # fmt: skip
    for shape, axes in (((391, 530), (2, 2)), ((256, 1024), (1, 4)), ((700, 77), (1, 2))):
        mask = random_mask(rng, block, shape, axes=axes, density=0.35)
        gpu.poison()
        for dtype, dim, layout in kinds:
            made = case(mask, shared=2, dim=dim, dtype=dtype, layout=layout, rng=rng)
            for name in specs(mask, dim):
                gpu.run(made, f"{name} {block} {shape} {dtype} {dim} {layout}", regime=name)


@pytest.mark.parametrize("dim", [8, 40, 72, 80, 96, 120])
def test_head_dims_between(gpu: Any, case: Any, random_mask: Any, rng: Any, dim: int) -> None:
    mask = random_mask(rng, (32, 64), (391, 530), axes=(2, 2))
    for layout, dtype in (("BHSD", "bfloat16"), ("BSHD", "float16")):
        made = case(mask, shared=2, dim=dim, dtype=dtype, layout=layout, rng=rng)
        for name in specs(mask, dim)[:4]:
            gpu.run(made, f"{name} {dtype} {dim} {layout}", regime=name)


def test_lists_of_length_one_single_fragments_and_empty_rows(gpu: Any, case: Any, rng: Any) -> None:
    blocks = np.zeros((1, 2, 8, 20), bool)
    blocks[0, 0, 1, 19] = blocks[0, 0, 2, 0] = True  # one half of the first tile has nothing
    blocks[0, 1, 5] = True
    mask = BlockMask.from_dense(blocks, (64, 16), (500, 317))
    for dim in (64, 128):
        made = case(mask, dim=dim, dtype="bfloat16", rng=rng)
        for name in specs(mask, dim):
            gpu.run(made, name, regime=name)


def test_ragged_blocks_start_anywhere(gpu: Any, case: Any, rng: Any) -> None:
    kv_sizes = np.array([1, 7, 33, 0, 129, 64, 5, 61])
    mask = BlockMask.from_dense(
        rng.random((1, 2, 5, 8)) < 0.6, (64, 64), (300, 300), kv_block_sizes=kv_sizes
    )
    for dim in (64, 128):
        made = case(mask, dim=dim, dtype="bfloat16", rng=rng)
        for name in specs(mask, dim):
            gpu.run(made, name, regime=name)


def test_sign_zero_and_size_of_the_scale(gpu: Any, case: Any, random_mask: Any, rng: Any) -> None:
    mask = random_mask(rng, (64, 64), (300, 640), axes=(1, 2))
    for scale in (-0.3, 0.0, 4.0):
        made = case(mask, dim=128, dtype="bfloat16", sm_scale=scale, rng=rng)
        gpu.run(made, f"scale {scale}", regime="attend_wgmma/q128k192/share-pack/longest")


@pytest.mark.parametrize(("dim", "dtype"), [(64, "float16"), (128, "bfloat16")])
def test_scores_far_above_the_first_ones(
    gpu: Any, case: Any, random_mask: Any, rng: Any, dim: int, dtype: str
) -> None:
    """They move the bounds, or are so far above that the tasks are taken a second time."""
    mask = random_mask(rng, (64, 64), (300, 1900), axes=(1, 2), density=0.7)
    for scale in (0.7, 2.0, 30.0):
        made = case(mask, dim=dim, dtype=dtype, sm_scale=scale, rng=rng)
        for name in specs(mask, dim):
            gpu.run(made, f"{name} scale {scale}", regime=name)


def test_token_bits(gpu: Any, case: Any, random_mask: Any, rng: Any) -> None:
    for block in ((16, 16), (32, 64), (64, 64), (128, 128), (64, 24)):
        blocks = random_mask(rng, block, (391, 600), axes=(1, 2), density=0.5)
        tokens = blocks.to_tokens() & (rng.random((1, 2, 391, 600)) < 0.8)
        tokens[..., :256, :256] = blocks.to_tokens()[..., :256, :256]  # these have no bits
        tokens[:, :, 300] = False
        mask = BlockMask.from_tokens(tokens, block)
        for dim, dtype in ((64, "float16"), (128, "bfloat16")):
            made = case(mask, dim=dim, dtype=dtype, rng=rng)
            for side in ("retain", "merge", "share", "regroup", "split"):
                if why_not(Mapping(side, "pack"), mask, 128, 192) is None:
                    name = f"attend_wgmma/q128k192/{side}-pack/longest+split"
                    gpu.run(made, f"{name} {block}", regime=name)


def test_token_bits_beside_lists_that_are_alike(gpu: Any, case: Any, rng: Any) -> None:
    tokens = np.ones((640, 640), bool)
    tokens[-100:] = np.tri(100, 640, 540, dtype=bool)
    mask = BlockMask.from_tokens(tokens, (64, 64))
    for regime in ("auto", "attend_wgmma/q128k192/share-pack/longest+split"):
        gpu.run(case(mask, dim=64, dtype="float16", rng=rng), regime, regime=regime)


@pytest.fixture
def launched(monkeypatch: Any) -> list[str]:
    """Names of the kernels that are launched."""
    names: list[str] = []
    load = launch.load

    def noted(config: KernelConfig, device: int) -> Any:
        names.append(config.name)
        return load(config, device)

    monkeypatch.setattr(launch, "load", noted)
    return names


@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_twins_load_for_each_other(
    gpu: Any, case: Any, rng: Any, launched: list[str], dim: int, dtype: str
) -> None:
    """All rows alike, all in pairs, and pairs among others, on tails and on shared KV heads."""
    rows = rng.random((1, 4, 5, 40)) < 0.4
    rows[..., 3] = True
    for blocks in (
        np.ones((1, 4, 45, 40), bool),
        rows.repeat(9, axis=2),
        np.concatenate([rows.repeat(5, axis=2), rng.random((1, 4, 20, 40)) < 0.5], axis=2),
    ):
        for block, shape in (((128, 64), (45 * 128, 2560)), ((64, 64), (45 * 64 - 9, 2531))):
            mask = BlockMask.from_dense(blocks, block, shape)
            made = case(mask, shared=2, dim=dim, dtype=dtype, layout="BSHD", rng=rng)
            side = "retain" if block[0] == 128 else "share"
            for organization in ("rows", "longest+split", "alternate"):
                name = f"attend_wgmma/q128k192/{side}-pack/{organization}"
                gpu.run(made, f"{name} {shape}", regime=name)
    assert any(name.endswith("_twins") for name in launched)
    assert not all(name.endswith("_twins") for name in launched)


def _mask_for(what: str, rng: Any) -> tuple[BlockMask, str]:
    """A mask, and a plan on which it runs the entry meant."""
    if what == "bits":
        tokens = rng.random((1, 2, 700, 1900)) < 0.3
        return BlockMask.from_tokens(tokens, (64, 64)), "q128k192/share-pack/longest+split"
    if what.startswith("twins"):
        mask = BlockMask.from_dense(np.ones((1, 3, 24, 40), bool), (64, 64), (1536, 2531))
        shape = "q192k128" if what == "twins, 192 rows" else "q128k192"
        return mask, f"{shape}/merge-pack/rows"
    blocks = rng.random((1, 3, 47, 94)) < 0.2
    mask = BlockMask.from_dense(blocks, (32, 32), (1500, 3001))
    if what == "192 rows":
        return mask, "q192k128/merge-pack/longest+split"
    return mask, f"q128k192/{what}-pack/longest+split"


@pytest.mark.parametrize(
    ("dim", "what"),
    [
        *product((64, 128), ("share", "regroup", "merge", "bits", "twins")),
        *product((64,), ("192 rows", "twins, 192 rows")),
    ],
)
def test_fifty_runs_are_bitwise_equal(gpu: Any, case: Any, rng: Any, dim: int, what: str) -> None:
    mask, plan = _mask_for(what, rng)
    made = case(mask, dim=dim, dtype="bfloat16", rng=rng)
    name = f"attend_wgmma/{plan}"
    first = gpu.run(made, name, regime=name)
    for _ in range(49):
        again = gpu.run(made, name, regime=name)
        for one, other in zip(first, again, strict=True):
            np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))


def test_views_are_read_in_place(gpu: Any, case: Any, random_mask: Any, rng: Any) -> None:
    mask = random_mask(rng, (64, 64), (320, 320), axes=(1, 4))
    made = case(mask, dim=128, dtype="bfloat16", rng=rng)
    wide = [gpu.cupy.asarray(np.concatenate([x, x], axis=2)) for x in made.arrays]
    views = [x[:, :, 320:] for x in wide]
    from tessera_cupy import block_sparse_attention

    out = block_sparse_attention(*views, mask, regime="attend_wgmma/q128k192/share-pack/longest")
    made.check_kernel(gpu.cupy.asnumpy(out), label="views")
