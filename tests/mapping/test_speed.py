"""Mapping must stay a small part of a request: bounds on a mask of 57,600 tokens, 8 heads."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tessera_cupy.mapping import Mapping, map_mask
from tessera_cupy.masks import BlockMask

# The aim is 60 ms on one core; a shared machine may take three times that.
BOUND_SECONDS = 0.180

CASES = [
    ("retain-pack", 64, 64, 64),
    ("retain-retain", 64, 64, 64),
    ("share-pack", 64, 128, 128),
    ("share-pack", 32, 128, 128),
    ("share-pack", 16, 128, 128),
    ("regroup-pack", 64, 128, 128),
    ("regroup-pack", 16, 128, 128),
    ("merge-pack", 64, 128, 64),
    ("merge-pack", 32, 64, 64),
    ("merge-pack", 16, 64, 64),
    ("retain-merge", 64, 64, 128),
    ("merge-merge", 64, 128, 128),
    ("split-pack", 64, 32, 64),
    ("retain-split", 64, 64, 32),
    ("split-split", 64, 32, 32),
]


def fastest(call, repeats: int = 5) -> float:
    """Least CPU time of this thread, so that neighbours on the machine count for little."""
    best = float("inf")
    for _ in range(repeats):
        start = time.thread_time()
        call()
        best = min(best, time.thread_time() - start)
    return best


@pytest.fixture(scope="module", params=[0.05, 0.12, 0.2])
def blocks(request):
    return np.random.default_rng(0).random((8, 900, 900)) < request.param


@pytest.mark.parametrize(("name", "block", "q", "kv"), CASES)
def test_mapping_of_900_by_900_blocks(blocks, name, block, q, kv):
    mask = BlockMask.from_dense(blocks, (block, block), (900 * block - 5, 900 * block - 12))
    mapping = Mapping.parse(name)
    assert fastest(lambda: map_mask(mask, mapping, q, kv)) < BOUND_SECONDS


def test_token_bits():
    tokens = np.random.default_rng(1).random((1, 4096, 4096)) < 0.5
    mask = BlockMask.from_tokens(tokens, (64, 64))
    assert len(mask.token_bits) == 64 * 64
    assert fastest(lambda: map_mask(mask, Mapping("merge", "pack"), 128, 64)) < BOUND_SECONDS / 3
