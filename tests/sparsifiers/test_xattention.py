"""XAttention's rule, against loops over pairs of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tessera_cupy.sparsifiers import xattention
from tessera_cupy.video import VideoGrid


def sums(q: Any, k: Any, stride: int) -> np.ndarray:
    """(n, n) attention that pairs of blocks get, for (tokens, d) arrays."""
    tokens, d = q.shape
    groups, blocks = -(-tokens // stride), -(-tokens // 128)
    score = np.zeros((groups, groups))
    for g in range(groups):
        for h in range(groups):
            for i in range(stride):
                # The pairs of an anti-diagonal: the query falls as the key rises.
                at_q, at_k = stride * (g + 1) - 1 - i, stride * h + i
                if at_q < tokens and at_k < tokens:
                    score[g, h] += q[at_q] @ k[at_k]
    p = np.exp(score / (stride * np.sqrt(d)))
    p /= p.sum(axis=1, keepdims=True)
    made = np.zeros((blocks, blocks))
    for g in range(groups):
        for h in range(groups):
            made[g * stride // 128, h * stride // 128] += p[g, h]
    return made


def kept_of(row: np.ndarray, threshold: float) -> list[bool]:
    chosen: list[int] = []
    for j in sorted(range(len(row)), key=lambda j: -row[j]):
        if row[chosen].sum() >= threshold * row.sum():
            break
        chosen.append(j)
    return [j in chosen for j in range(len(row))]


@pytest.mark.parametrize("stride", [8, 16])
@pytest.mark.parametrize("grid", [VideoGrid(4, 8, 16), VideoGrid(3, 9, 23, text_tokens=5)])
def test_the_formula(grid: VideoGrid, stride: int) -> None:
    rng = np.random.default_rng(grid.tokens + stride)
    q, k = rng.standard_normal((2, 2, 2, grid.tokens, 16)).astype(np.float32) * 3
    logs = xattention.log_sums(q, k, stride)
    chosen = {t: xattention.select(q, k, grid, stride=stride, threshold=t) for t in (0.4, 0.9)}
    for b, h in np.ndindex(2, 2):
        expected = sums(q[b, h].astype(np.float64), k[b, h].astype(np.float64), stride)
        assert np.exp(logs[b, h]) == pytest.approx(expected, rel=1e-4)
        for threshold, selection in chosen.items():
            made = selection.mask.to_dense()[b, h]
            assert made.tolist() == [kept_of(row, threshold) for row in expected]


def test_tokens_stay_in_raster_order() -> None:
    x = np.ones((1, 2, 300, 8), np.float32)
    chosen = xattention.select(x, x, VideoGrid(3, 10, 10))
    assert chosen.permute(x) is x
    assert chosen.mask.shape == (300, 300)
    assert chosen.mask.block_size == (128, 128)


def test_equal_keys_keep_what_the_threshold_says() -> None:
    """Ten equal blocks hold a tenth each: 0.75 takes eight of them."""
    x = np.ones((1, 1, 1280, 8), np.float32)
    mask = xattention.select(x, x, VideoGrid(5, 16, 16), threshold=0.75).mask
    assert mask.row_counts().tolist() == [[[8] * 10]]


def test_far_apart_scores_do_not_overflow() -> None:
    q = np.full((1, 1, 256, 8), 1e3, np.float32)
    k = q * np.repeat([1.0, -1.0], 128)[:, None]
    mask = xattention.select(q, k.astype(np.float32), VideoGrid(1, 16, 16)).mask
    assert mask.to_dense().astype(int).tolist() == [[[[1, 0], [1, 0]]]]


class TestBadInput:
    GRID = VideoGrid(3, 16, 16)
    X = np.ones((1, 1, 768, 8), np.float32)

    @pytest.mark.parametrize("stride", [0, 4, 12, 32])
    def test_a_stride(self, stride: int) -> None:
        with pytest.raises(ValueError, match="stride"):
            xattention.select(self.X, self.X, self.GRID, stride=stride)

    def test_a_threshold(self) -> None:
        with pytest.raises(ValueError, match=r"from 0 to 1.*-0\.1"):
            xattention.select(self.X, self.X, self.GRID, threshold=-0.1)

    def test_another_grid(self) -> None:
        with pytest.raises(ValueError, match="512"):
            xattention.select(self.X, self.X, VideoGrid(2, 16, 16))

    def test_infinity(self) -> None:
        x = self.X.copy()
        x[0, 0, 767, 7] = np.inf
        with pytest.raises(ValueError, match="finite"):
            xattention.select(self.X, x, self.GRID)
