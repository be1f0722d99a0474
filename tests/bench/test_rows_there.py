"""Rows of a mask as an emulated GPU knows them, beside those that the host reads."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera_cupy import BlockMask
from tessera_cupy.bench.rows_there import Counted, kept_rows
from tessera_cupy.bench.slices_mass import kept_of
from tessera_cupy.masks import KeySlices
from tests.emulator.emulator import compiler, drawn_seed
from tests.emulator.gpu import EmulatedGpu

pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++ to build the emulator with")

TOKENS = 300
ROWS = np.array([0, 15, 16, 63, 64, 130, 299])


@pytest.fixture
def gpu(kernel_cache: Path) -> Iterator[EmulatedGpu]:
    made = EmulatedGpu(kernel_cache.parent / "emulated-kernels", drawn_seed())
    with made.here():
        yield made


def dense(put: Callable[[Any], Any], heads: int) -> BlockMask:
    kept = np.random.default_rng(heads).random((heads, 5, 10)) < 0.4
    return BlockMask.from_dense(put(kept), (64, 32), (TOKENS, TOKENS))


def ragged(put: Callable[[Any], Any], heads: int) -> BlockMask:
    rng = np.random.default_rng(heads)
    kept = rng.random((heads, 7, 40)) < 0.4
    q = np.array([64, 0, 50, 64, 64, 30, 28], np.int32)
    kv = rng.permutation([10] * 20 + [5] * 20).astype(np.int32)
    return BlockMask.from_dense(
        put(kept), (64, 16), (TOKENS, TOKENS), q_block_sizes=put(q), kv_block_sizes=put(kv)
    )


def slices(put: Callable[[Any], Any], heads: int) -> KeySlices:
    kept = np.random.default_rng(heads).random((heads, 5, TOKENS)) < 0.3
    return KeySlices.from_groups(put(kept), 64, (TOKENS, TOKENS))


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("make", [dense, ragged, slices])
def test_rows_keep_what_the_host_says(gpu: EmulatedGpu, make: Any, heads: int) -> None:
    host, there = make(lambda x: x, heads), make(gpu.array, heads)
    counted = Counted(there, "sm_90a")
    gpu.copied = 0
    for head in range(3):  # of a mask of one head, any
        assert np.array_equal(counted.kept(head, ROWS), kept_of(host, head % heads, ROWS))
        assert np.array_equal(kept_rows(there, counted)(head, ROWS), counted.kept(head, ROWS))
    assert gpu.copied < 6 * (len(ROWS) * 40 + 200)  # rows, not masks
    assert counted.summary.nnz == host.nnz


def test_without_a_gpu_the_host_reads(gpu: EmulatedGpu) -> None:
    mask = dense(lambda x: x, 2)
    assert np.array_equal(kept_rows(mask, None)(1, ROWS), kept_of(mask, 1, ROWS))
