"""The kernel of every generation against the oracle, over tiles, mappings, dtypes and layouts."""

from __future__ import annotations

from itertools import cycle, product
from typing import Any

import numpy as np
import pytest

from tessera_cupy import BlockMask
from tessera_cupy.kernels.catalog import catalog
from tessera_cupy.mapping import Mapping, why_not

pytestmark = pytest.mark.gpu

SIDES = [
    Mapping(q, kv)
    for q, kv in product(
        ("retain", "merge", "share", "split"), ("retain", "merge", "split", "pack")
    )
]
ORGANIZATIONS = cycle(("rows", "longest+split", "runs+alternate", "alternate+split"))
KINDS = cycle(product(("bfloat16", "float16"), ("BHSD", "BSHD")))


def tile_shapes(gpu: Any, dim: int) -> list[tuple[int, int]]:
    """Tiles of attend_mma for the smallest head dim of the catalog that serves ``dim``."""
    mma = [c for c in catalog(gpu.arch.name) if c.kernel == "attend_mma" and c.serves(dim)]
    served = min(c.head_dim for c in mma)
    return sorted({(c.tile_q, c.tile_kv) for c in mma if c.head_dim == served})


def plans(gpu: Any, mask: BlockMask, dim: int) -> list[str]:
    """A plan for each tile and mapping that can serve a mask; organizations take turns."""
    return [
        f"attend_mma/q{q}k{kv}/{side.name}/{next(ORGANIZATIONS)}"
        for (q, kv), side in product(tile_shapes(gpu, dim), SIDES)
        if why_not(side, mask, q, kv) is None
    ]


def check(gpu: Any, case: Any, rng: Any, mask: BlockMask, dim: int, **sizes: Any) -> None:
    names = plans(gpu, mask, dim)
    assert names
    drawn: dict[tuple[str, str], Any] = {}  # what a case must give is worked out once
    for name in names:
        dtype, layout = kind = next(KINDS)
        if kind not in drawn:
            drawn[kind] = case(mask, dim=dim, dtype=dtype, layout=layout, rng=rng, **sizes)
        gpu.run(
            drawn[kind], f"{name} {mask.block_size} d{dim} {dtype} {layout} {sizes}", regime=name
        )


@pytest.mark.parametrize("block", [16, 24, 32, 40, 64, 96, 128, 192, 384])
def test_every_mapping_of_every_block_size(
    gpu: Any, case: Any, random_mask: Any, rng: Any, block: int
) -> None:
    gpu.poison()
    for other in (16, 72, 128):
        for pair in {(block, other), (other, block)}:
            mask = random_mask(rng, pair, (331, 453), axes=(1, 4), density=0.4)
            check(gpu, case, rng, mask, 128, shared=2)


@pytest.mark.parametrize("dim", [8, 64, 72, 80, 96, 128, 224, 256])
def test_every_head_dim(gpu: Any, case: Any, random_mask: Any, rng: Any, dim: int) -> None:
    gpu.poison()
    for block in ((32, 32), (64, 64), (128, 64)):
        mask = random_mask(rng, block, (200, 260), axes=(2, 2))
        check(gpu, case, rng, mask, dim)


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_token_bits(gpu: Any, case: Any, rng: Any, dim: int) -> None:
    tokens = rng.random((1, 2, 170, 230)) < 0.5
    tokens[..., 64:128, :] = True
    tokens[..., 5, :] = False
    for block in ((16, 32), (64, 64), (128, 40)):
        check(gpu, case, rng, BlockMask.from_tokens(tokens, block), dim)


def test_ragged_blocks(gpu: Any, case: Any, rng: Any) -> None:
    sizes = rng.multinomial(400, rng.dirichlet(np.ones(9)), size=(1, 2))
    keep = rng.random((1, 2, 9, 9)) < 0.5
    for sides in ({"q_block_sizes": sizes}, {"kv_block_sizes": sizes}):
        both = sides | {"q_block_sizes": sizes, "kv_block_sizes": sizes}
        for given in (sides, both):
            shape = tuple(400 if f"{s}_block_sizes" in given else 9 * 48 for s in ("q", "kv"))
            mask = BlockMask.from_dense(keep, (48, 48), shape, **given)
            check(gpu, case, rng, mask, 64)


def test_masks_that_broadcast_over_batch_and_heads(
    gpu: Any, case: Any, random_mask: Any, rng: Any
) -> None:
    for axes in ((1, 1), (3, 1), (1, 4), (3, 4)):
        mask = random_mask(rng, (64, 64), (150, 290), axes=axes)
        check(gpu, case, rng, mask, 64, batch=3, kv_heads=2, shared=2)
