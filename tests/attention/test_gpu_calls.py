"""Calls on a GPU: sizes past what 16 and 31 bits count, memory, many requests, the first call."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tessera_cupy
from tessera_cupy import BlockMask, block_sparse_attention
from tessera_cupy.kernels import launch

pytestmark = pytest.mark.gpu


@pytest.fixture
def made(case: Any, random_mask: Any, rng: Any) -> Any:
    mask = random_mask(rng, (64, 64), (300, 430), axes=(1, 4))
    return case(mask, shared=2, dim=128, dtype="bfloat16", rng=rng)


def test_batch_above_65535(gpu: Any, case: Any, rng: Any) -> None:
    mask = BlockMask.from_dense([[True]], (16, 16))
    part = case(mask, batch=41, dim=8, dtype="float16", rng=rng)
    arrays = [gpu.cupy.asarray(np.tile(x, (1600, 1, 1, 1))) for x in part.arrays]
    out = gpu.poisoned(arrays[0].shape, np.float16)
    block_sparse_attention(*arrays, mask, out=out)
    parts = gpu.cupy.asnumpy(out).reshape(1600, *part.q.shape)
    part.check_kernel(parts[0])
    assert (parts == parts[0]).all()


def test_outputs_above_two_to_the_31_elements(gpu: Any, rng: Any) -> None:
    cupy = gpu.cupy
    tokens, heads, dim = 262_144 + 64, 65, 128
    blocks = tokens // 64
    mask = BlockMask.from_csr(np.arange(blocks + 1), np.arange(blocks), (blocks, blocks), (64, 64))
    shape = (1, heads, tokens, dim)
    assert np.prod(shape) > 2**31
    q = cupy.zeros(shape, np.float16)
    v = cupy.zeros(shape, np.float16)
    last = rng.standard_normal((64, dim)).astype(np.float16)
    v[0, -1, -64:] = cupy.asarray(last)
    for regime in ("auto", "attend_mma/q64k64/retain-pack/rows"):
        out = gpu.poisoned(shape, np.float16)
        block_sparse_attention(q, q, v, mask, regime=regime, out=out)
        # Equal scores: the mean of the block's values.
        mean = last.astype(np.float64).mean(axis=0)
        np.testing.assert_allclose(
            cupy.asnumpy(out[0, -1, -64:]), np.tile(mean, (64, 1)), atol=1e-3
        )
        assert not cupy.isnan(out[0, ::16, ::4097]).any()
        del out
    gpu.pool.free_all_blocks()


def test_memory_stays_flat_over_many_masks(gpu: Any, random_mask: Any, rng: Any) -> None:
    cupy = gpu.cupy
    q = cupy.asarray(rng.standard_normal((1, 2, 512, 64)).astype(np.float16))
    used = []
    for turn in range(300):
        mask = random_mask(rng, (64, 64), (512, 512), axes=(1, 2))
        block_sparse_attention(q, q, q, mask)
        del mask
        if turn % 100 == 99:
            cupy.cuda.Device().synchronize()
            used.append(gpu.pool.used_bytes())
    assert used[-1] <= used[0]


def test_a_thousand_calls_load_one_module(
    gpu: Any, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cupy = gpu.cupy
    arrays = [cupy.asarray(x) for x in made.arrays]
    monkeypatch.setattr(launch, "_loaded", {})
    loads = []
    module = cupy.RawModule

    def counted(**arguments: Any) -> Any:
        loads.append(arguments)
        return module(**arguments)

    monkeypatch.setattr(cupy, "RawModule", counted)
    for _ in range(1000):
        block_sparse_attention(*arrays, made.mask)
    assert len(loads) == 1


def test_little_memory_beyond_the_tensors(gpu: Any, rng: Any) -> None:
    cupy = gpu.cupy
    tokens, heads = 57_600, 40
    blocks = tokens // 64
    keep = np.zeros((1, heads, blocks, blocks), bool)
    for head in range(heads):
        columns = rng.random((blocks, blocks), np.float32).argpartition(108, axis=-1)[:, :108]
        np.put_along_axis(keep[0, head], columns, True, axis=-1)
    mask = BlockMask.from_dense(keep, (64, 64))
    q = cupy.zeros((1, heads, tokens, 128), np.float16)
    out = cupy.empty_like(q)
    for regime in ("auto", "attend_mma/q64k64/retain-pack/longest+split"):
        gpu.pool.free_all_blocks()
        before = gpu.pool.total_bytes()
        block_sparse_attention(q, q, q, mask, regime=regime, out=out)
        cupy.cuda.Device().synchronize()
        extra = gpu.pool.total_bytes() - before
        print(f"{regime}: {extra / 1e6:.0f} MB")
        assert extra < 300e6


def test_the_first_call_is_quick_on_a_warm_cache(gpu: Any, tmp_path: Path) -> None:
    code = """
import time
import cupy
x = cupy.zeros((1, 2, 512, 128), "float16"); y = x + x; cupy.cuda.Device().synchronize()
start = time.perf_counter()
import numpy as np
import tessera_cupy
mask = tessera_cupy.BlockMask.from_dense(np.ones((8, 8), bool), (64, 64))
tessera_cupy.block_sparse_attention(x, x, x, mask)
cupy.cuda.Device().synchronize()
print(time.perf_counter() - start)
"""
    root = tessera_cupy.__path__[0].rpartition("/")[0]
    # With bytecode at hand, as an installed package has it: the first run writes it.
    env = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    took: list[float] = []
    while len(took) < 8 and min(took, default=1.0) >= 0.3:  # other tests may run beside it
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            cwd=root,
            env=env,
        )
        took.append(float(done.stdout))
    print(took)
    assert min(took) < 0.3
