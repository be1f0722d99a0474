"""``antidiagonal_scores.cu`` and ``antidiagonal_sums.cu`` on the CPU, against the formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tessera_cupy.kernels import antidiagonal
from tests.emulator.emulator import compiler
from tests.emulator.gpu import EmulatedGpu

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no g++ to build the emulator with")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


def by_the_formula(q: Any, k: Any, stride: int, block: int, scale: float) -> np.ndarray:
    """(n, n) sums for (tokens, d) arrays, one pair of tokens at a time."""
    tokens = len(q)
    groups = -(-tokens // stride)
    blocks = -(-tokens // block)
    score = np.zeros((groups, groups))
    for g in range(groups):
        for h in range(groups):
            for i in range(stride):
                at_q, at_k = stride * g + stride - 1 - i, stride * h + i
                if at_q < tokens and at_k < tokens:
                    score[g, h] += scale * float(q[at_q] @ k[at_k])
    p = np.exp(score - score.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    sums = np.zeros((blocks, blocks))
    for g in range(groups):
        for h in range(groups):
            sums[g * stride // block, h * stride // block] += p[g, h]
    return sums


@needs_compiler
@pytest.mark.parametrize(
    ("tokens", "stride", "d", "dtype"),
    [
        (600, 16, 16, np.float16),  # whole blocks, then a short one, whose last group is short
        (300, 8, 24, ml_dtypes.bfloat16),
        (128, 16, 8, np.float16),  # one block, and tokens of one chunk
        (2100, 16, 8, ml_dtypes.bfloat16),  # two tiles each way
        (1030, 8, 8, np.float16),  # the second tile has one group, of six tokens
    ],
)
def test_sums_of_blocks(folder: Path, tokens: int, stride: int, d: int, dtype: Any) -> None:
    rng = np.random.default_rng(tokens)
    q, k = (rng.standard_normal((2, 1, 2, tokens, d)) * 1.5).astype(dtype)
    scale = 1 / (d**0.5 * stride) * 4
    gpu = EmulatedGpu(folder, tokens)
    with gpu.here():
        logs = antidiagonal.log_sums(
            gpu.array(q), gpu.array(k), stride=stride, block_groups=128 // stride,
            scale=scale, arch="sm_90a", memory=[],
        ).get()  # fmt: skip
    made = np.exp(logs)
    for h in range(2):
        wide_q, wide_k = q[0, h].astype(np.float64), k[0, h].astype(np.float64)
        expected = by_the_formula(wide_q, wide_k, stride, 128, scale)
        assert made[0, h] == pytest.approx(expected, rel=2e-3, abs=1e-6)
        # Each group's softmax adds up to 1, whichever blocks it falls into.
        assert made[0, h].sum() == pytest.approx(-(-tokens // stride), rel=1e-4)


@needs_compiler
@pytest.mark.parametrize("where", ["q", "k", None])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_number_is_flagged(folder: Path, where: str | None, value: float) -> None:
    rng = np.random.default_rng(1)
    arrays = {name: rng.standard_normal((1, 1, 2100, 8)).astype(np.float16) for name in "qk"}
    if where:
        arrays[where][0, 0, 2099, 7] = value
    gpu = EmulatedGpu(folder, 3)
    with gpu.here():
        flags = gpu.array(np.zeros(2, np.int32), writable=True)
        at = flags.data.ptr
        antidiagonal.log_sums(
            gpu.array(arrays["q"]), gpu.array(arrays["k"]), stride=16, block_groups=8,
            scale=0.01, arch="sm_90a", memory=[], flags=(at, at + 4),
        )  # fmt: skip
        assert flags.get().tolist() == [int(where == "q"), int(where == "k")]


@needs_compiler
def test_scores_far_apart_do_not_overflow(folder: Path) -> None:
    q = np.full((1, 1, 256, 8), 60.0, np.float16)
    k = np.concatenate([np.full((1, 1, 128, 8), 60.0), np.full((1, 1, 128, 8), -60.0)], axis=2)
    gpu = EmulatedGpu(folder, 2)
    with gpu.here():
        logs = antidiagonal.log_sums(
            gpu.array(q), gpu.array(k.astype(np.float16)), stride=16, block_groups=8,
            scale=1.0, arch="sm_90a", memory=[],
        ).get()  # fmt: skip
    assert logs[0, 0, :, 0] == pytest.approx(np.log(8))
    assert (logs[0, 0, :, 1] == -np.inf).all()
