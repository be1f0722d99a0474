"""LongCat's rule, against the formula written as loops."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tessera_cupy.sparsifiers import longcat
from tessera_cupy.video import VideoGrid


def drawn(grid: VideoGrid) -> NDArray[np.float32]:
    # Small integers: sums are exact.
    rng = np.random.default_rng(grid.tokens)
    return rng.integers(-4, 5, (2, 1, 2, grid.tokens, 8)).astype(np.float32)


@pytest.mark.parametrize("text", [0, 50])
def test_the_formula(text: int) -> None:
    grid = VideoGrid(8, 8, 32, text_tokens=text)
    q, k = drawn(grid)
    chosen = longcat.select(q, k, grid, sparsity=0.7)
    dense = chosen.mask.to_dense()
    tiles = 16
    assert chosen.mask.q_block_sizes is None
    assert chosen.mask.block_size == (128, 128)
    for h in range(2):
        pooled = [
            x[0, h, : grid.video_tokens].reshape(2, 4, 2, 4, 4, 8, 8).mean(axis=(1, 3, 5))
            for x in (q, k)
        ]
        score = pooled[0].reshape(tiles, 8) @ pooled[1].reshape(tiles, 8).T
        for i in range(tiles):
            # int(0.3 * 16) = 4
            best = sorted(range(tiles), key=lambda j: (-score[i, j], j))[:4]
            assert np.flatnonzero(dense[0, h, i, :tiles]).tolist() == sorted(best)
        assert dense[0, h, tiles:].all()
        assert dense[0, h, :, tiles:].all()


def test_published_count() -> None:
    grid = VideoGrid(24, 30, 52)
    q, k = np.random.default_rng(0).standard_normal((2, 1, 1, grid.tokens, 4), np.float32)
    chosen = longcat.select(q, k, grid)
    assert chosen.mask.num_blocks == (336, 336)
    assert (chosen.mask.row_counts() == 42).all()  # 12.5%


def test_counts_are_rounded_down_to_one_at_least() -> None:
    grid = VideoGrid(4, 4, 80)
    # In binary (1 - 0.9) * 10 is below 1, which is no reason to keep one less.
    for sparsity, count in ((0.81, 1), (0.8, 2), (0.9, 1), (0.99, 1), (0.0, 10)):
        chosen = longcat.select(*drawn(grid), grid, sparsity=sparsity)
        assert (chosen.mask.row_counts() == count).all()


def test_wrong_sparsity() -> None:
    grid = VideoGrid(4, 8, 8)
    with pytest.raises(ValueError, match="`sparsity`: expected a fraction from 0 to below 1"):
        longcat.select(*drawn(grid), grid, sparsity=12.5)


@pytest.mark.gpu
def test_cupy_and_numpy_select_the_same() -> None:
    cupy = pytest.importorskip("cupy")
    grid = VideoGrid(8, 8, 32, text_tokens=50)
    q, k = drawn(grid)
    host = longcat.select(q, k, grid, sparsity=0.7)
    there = longcat.select(cupy.asarray(q), cupy.asarray(k), grid, sparsity=0.7)
    there.check()
    assert there.mask.source is not None
    assert (there.mask.to_dense() == host.mask.to_dense()).all()
