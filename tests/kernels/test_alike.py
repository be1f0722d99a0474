"""The kernels of SpargeAttn on the CPU, against loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tessera_cupy.kernels import alike
from tests.emulator.emulator import compiler
from tests.emulator.gpu import EmulatedGpu

pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++ to build the emulator with")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("tokens", "d", "channels"), [(300, 16, 16), (7, 24, 19), (5000, 32, 32)])
def test_centred(folder: Path, dtype: Any, tokens: int, d: int, channels: int) -> None:
    rng = np.random.default_rng(tokens)
    x = rng.standard_normal((2, 2, tokens, d)).astype(dtype)
    x[..., channels:] = 0
    x[0, 0, 0, :4] = np.array([6e-8, -3e-5, 0.0, 6e4], dtype)  # subnormal in float16, and large
    mean = rng.standard_normal((2, 2, 1, channels)).astype(np.float32)
    mean[0, 0, 0, :4] = 0
    gpu = EmulatedGpu(folder, d)
    with gpu.here():
        made = alike.centred(gpu.array(x), gpu.array(mean), arch="sm_90a", memory=[]).get()
    wide = np.pad(mean, ((0, 0),) * 3 + ((0, d - channels),))
    assert (made == (x.astype(np.float32) - wide).astype(dtype)).all()


@pytest.mark.parametrize(("tokens", "d"), [(1000, 37), (64, 256), (65, 8), (3, 128)])
def test_mean_of_a_head(folder: Path, tokens: int, d: int) -> None:
    x = np.random.default_rng(tokens).standard_normal((2, 3, tokens, d))
    means = np.stack([x[:, :, i : i + 64].mean(axis=2) for i in range(0, tokens, 64)], axis=2)
    gpu = EmulatedGpu(folder, tokens)
    with gpu.here():
        there = gpu.array(means.astype(np.float32))
        made = alike.head_mean(there, tokens, 64, arch="sm_90a", memory=[]).get()
    assert made == pytest.approx(x.mean(axis=2, keepdims=True), abs=1e-5)


def test_weights(folder: Path) -> None:
    found = np.random.default_rng(1).random((2, 3, 100)).astype(np.float32)
    found[0, 0, :2] = [0.5, np.nan]
    gpu = EmulatedGpu(folder, 1)
    with gpu.here():
        made = alike.weights(gpu.array(found), 0.5, arch="sm_90a", memory=[]).get()
    assert (made == (found > 0.5)).all()


@pytest.mark.parametrize("gives_up", [False, True])
@pytest.mark.parametrize("m", [1, 5, 33, 100])
def test_rows(folder: Path, m: int, gives_up: bool) -> None:
    rng = np.random.default_rng(m)
    shape = (2, 2, 9, m)
    score = rng.integers(0, 3, shape).astype(np.float32)  # ties in each row
    kept = rng.random(shape) < rng.choice([0.05, 0.3, 1.0], (2, 2, 9, 1))
    alike_q, alike_k = rng.random(shape[:3]) + 0.3, rng.random((2, 2, m)) + 0.4
    alike_q, alike_k = alike_q.astype(np.float32), alike_k.astype(np.float32)
    gpu = EmulatedGpu(folder, m)
    with gpu.here():
        made = gpu.array(kept, writable=True)
        there = gpu.array(alike_q), gpu.array(alike_k)
        alike.finish_rows(made, gpu.array(score), there, 0.5, gives_up, arch="sm_90a")
        got = made.get()
    for at in np.ndindex(2, 2, 9):
        row = [j for j in range(m) if kept[at][j]]
        if gives_up and len(row) > 1:
            row.remove(min(row, key=lambda j: (score[at][j], -j)))
        for j in range(m):
            other = alike_q[at] <= 0.5 or alike_k[at[:2]][j] <= 0.5
            assert got[at][j] == (other or j in row)
