"""Requests that mix everything at random, and every organization, against the oracle."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from tessera_cupy import ArraySpec, BlockMask, make_plan
from tessera_cupy.kernels.catalog import catalog
from tessera_cupy.mapping import Mapping, makes_halves, why_not
from tessera_cupy.organization import Organization

pytestmark = pytest.mark.gpu

SIDES = [
    Mapping(q, kv)
    for q, kv in product(
        ("retain", "merge", "share", "split"), ("retain", "merge", "split", "pack")
    )
]
ORGANIZATIONS = [Organization(*flags).name for flags in product((False, True), repeat=4)]
DIMS = (8, 16, 64, 72, 80, 96, 128, 128, 64, 224, 256)
DTYPES = ("float16", "bfloat16")
BLOCKS = (16, 24, 32, 40, 64, 96, 128, 192, 384)


def plans(gpu: Any, mask: BlockMask, dim: int) -> list[str]:
    """Every kernel, tile and mapping that can serve a mask."""
    bits = len(mask.token_bits) > 0
    kernels = {
        (c.kernel, c.tile_q, c.tile_kv)
        for c in catalog(gpu.arch.name)
        if c.attends and c.serves(dim) and c.bits == bits and not c.gather
    }
    return [
        f"{kernel}/q{q}k{kv}/{side.name}"
        for (kernel, q, kv), side in product(sorted(kernels), SIDES)
        if why_not(side, mask, q, kv) is None
        and ((kernel, q) == ("attend_wgmma", 128) or not makes_halves(mask, side.q, q))
    ]


def some_mask(rng: np.random.Generator, axes: tuple[int, int]) -> BlockMask:
    sq, skv = (int(n) for n in rng.integers(1, 420, 2))
    bq, bkv = (int(n) for n in rng.choice(BLOCKS, 2))
    density = float(rng.choice([0.0, 0.1, 0.5, 0.5, 0.9, 1.0]))
    kind = rng.choice(["uniform", "uniform", "tokens", "ragged"])
    if kind == "ragged":
        counts = [int(n) for n in rng.integers(1, 9, 2)]
        sizes = [
            rng.multinomial(tokens, rng.dirichlet(np.ones(n)), size=axes)
            for tokens, n in zip((sq, skv), counts, strict=True)
        ]
        return BlockMask.from_dense(
            rng.random((*axes, *counts)) < density,
            (bq, bkv),
            q_block_sizes=sizes[0],
            kv_block_sizes=sizes[1],
        )
    blocks = rng.random((*axes, -(-sq // bq), -(-skv // bkv))) < density
    if kind == "uniform":
        return BlockMask.from_dense(blocks, (bq, bkv), (sq, skv))
    tokens = blocks.repeat(bq, 2).repeat(bkv, 3)[..., :sq, :skv]
    holes = rng.random((*axes, 1, skv)) < rng.choice([0.05, 0.9])
    return BlockMask.from_tokens(tokens & ~(holes & (rng.random(tokens.shape) < 0.9)), (bq, bkv))


@pytest.mark.parametrize("turn", range(6))
def test_anything(gpu: Any, case: Any, rng: np.random.Generator, turn: int) -> None:
    gpu.poison()
    for number in range(30):
        batch, kv_heads, shared = (int(n) for n in rng.integers(1, (3, 3, 4)))
        axes = (int(rng.choice([1, batch])), int(rng.choice([1, kv_heads * shared])))
        mask = some_mask(rng, axes)
        dim = int(rng.choice(DIMS))
        scale = rng.choice([None, None, 0.3, -0.2])
        case_ = case(
            mask,
            batch=batch,
            kv_heads=kv_heads,
            shared=shared,
            dim=dim,
            dtype=str(rng.choice(DTYPES)),
            layout=str(rng.choice(["BHSD", "BSHD"])),
            sm_scale=scale,
            rng=rng,
        )
        regime = "auto"
        if rng.random() < 0.7:
            regime = f"{rng.choice(plans(gpu, mask, dim))}/{rng.choice(ORGANIZATIONS)}"
        label = (
            f"{number}: {regime} blocks {mask.block_size} shape {mask.shape} axes {axes} "
            f"ragged {mask.ragged} bits {len(mask.token_bits) > 0} {case_.q.shape} over "
            f"{kv_heads} KV heads {case_.layout} {case_.q.dtype} scale {scale}"
        )
        gpu.run(case_, label, regime=regime)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_every_organization(gpu: Any, case: Any, rng: np.random.Generator, dim: int) -> None:
    gpu.poison()
    blocks = rng.random((1, 4, 3, 188)) < 0.9  # enough keys to split the widest tile
    blocks[0, :, 2, 5:] = False  # one tile is short
    blocks[0, 3, 1] = False  # one is empty
    mask = BlockMask.from_dense(blocks, (64, 16), (170, 3001))
    cases = {dtype: case(mask, shared=2, dim=dim, dtype=dtype, rng=rng) for dtype in DTYPES}
    kernels = {
        (c.kernel, c.tile_q, c.tile_kv)
        for c in catalog(gpu.arch.name)
        if c.attends and c.serves(dim) and not c.gather  # a tile may have gathering entries alone
    }
    for kernel, q, kv in sorted(kernels):
        for i, organization in enumerate(ORGANIZATIONS):
            dtype = DTYPES[i % 2]
            plan = f"{kernel}/q{q}k{kv}/retain-pack/{organization}"
            spec = ArraySpec((1, 4, 170, dim), dtype)
            made = make_plan(mask, spec, regime=plan, arch=gpu.arch.name)
            assert (made.tasks().slots > 0) == ("split" in organization), plan
            gpu.run(cases[dtype], f"{plan} {dtype}", regime=plan)


def test_every_tail_gap_and_count(gpu: Any, case: Any, rng: np.random.Generator) -> None:
    gpu.poison()
    names: dict[int, list[str]] = {64: [], 128: [], 256: []}
    for q_tail, kv_tail in product(range(1, 17), repeat=2):
        dim = int(rng.choice(list(names)))
        count, gap = (int(n) for n in rng.integers(1, 10, 2))
        columns = np.arange(count) * gap
        blocks = np.zeros((int(rng.integers(1, 9)), columns[-1] + 1), bool)
        blocks[:, columns] = True
        shape = (16 * (len(blocks) - 1) + q_tail, int(16 * columns[-1] + kv_tail))
        mask = BlockMask.from_dense(blocks, (16, 16), shape)
        names[dim] = names[dim] or plans(gpu, mask, dim)
        plan = f"{names[dim].pop()}/rows"
        case_ = case(mask, kv_heads=2, dim=dim, dtype="bfloat16", rng=rng)
        gpu.run(case_, f"{plan} shape {shape} count {count} gap {gap}", regime=plan)
