"""SSTA's rule, against the formula written as loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tessera_cupy.sparsifiers import ssta, sta
from tessera_cupy.video import VideoGrid


def drawn(grid: VideoGrid, heads: int = 2) -> NDArray[np.float32]:
    rng = np.random.default_rng(grid.tokens)
    return rng.standard_normal((2, 1, heads, grid.tokens, 8)).astype(np.float32)


def by_the_formula(
    q: NDArray[Any], k: NDArray[Any], sizes: list[int], keep: int, balance: float
) -> NDArray[np.bool_]:
    """Top-k of (tokens, d) in tile order, tile by tile."""
    cuts = np.cumsum(sizes)[:-1]
    means = [[part.mean(axis=0) for part in np.split(x.astype(float), cuts)] for x in (q, k)]
    queries, keys = ([mean / np.linalg.norm(mean) for mean in side] for side in means)
    n = len(sizes)
    kept = np.zeros((n, n), np.bool_)
    for i in range(n):
        scores = []
        for j in range(n):
            others = [keys[m] @ keys[j] for m in range(n) if m != j]
            redundancy = sum(others) / len(others)
            scores.append(balance * (queries[i] @ keys[j]) - (1 - balance) * redundancy)
        kept[i, sorted(range(n), key=lambda j: -scores[j])[:keep]] = True
    return kept


@pytest.mark.parametrize("balance", [1.0, 0.7, 0.2])
@pytest.mark.parametrize(
    "grid",
    [
        VideoGrid(2, 8, 24),
        VideoGrid(3, 7, 21),
        VideoGrid(2, 8, 24, text_tokens=40),
        VideoGrid(2, 8, 24, text_tokens=40, text_first=True),
    ],
    ids=str,
)
def test_the_formula(grid: VideoGrid, balance: float) -> None:
    tile, window = (2, 4, 4), (1, 1, 3)
    q, k = drawn(grid)
    # A direction that all keys share makes some much less new than others.
    k += np.linspace(0, 2, grid.tokens, dtype=np.float32)[:, None]
    chosen = ssta.select(q, k, grid, keep=3, window=window, balance=balance, tile=tile)
    blocks = grid.tile_blocks(tile)
    text = np.zeros(len(blocks.sizes), np.bool_)
    text[blocks.text] = True
    dense = chosen.mask.to_dense()
    near = sta.mask(VideoGrid(grid.t, grid.h, grid.w), window, tile=tile).to_dense()[0, 0]
    video = slice(grid.video_start, grid.video_start + grid.video_tokens)
    for h in range(2):
        order = chosen.orders.of(0, h)[video]
        sizes = blocks.sizes[~text].tolist()
        best = by_the_formula(q[0, h, order], k[0, h, order], sizes, 3, balance)
        assert (dense[0, h][np.ix_(~text, ~text)] == (best | near)).all()
        assert dense[0, h, text].all()
        assert dense[0, h][:, text].all()


@pytest.mark.parametrize(
    ("grid", "tiles", "least", "most"),
    [
        # 32 of the best and a window of 27; with 33 frames 64 and 27.
        (VideoGrid(31, 45, 80), 360, 32, 59),
        (VideoGrid(33, 45, 80), 360, 64, 91),
    ],
    ids=str,
)
def test_published_counts(grid: VideoGrid, tiles: int, least: int, most: int) -> None:
    q, k = np.random.default_rng(0).standard_normal((2, 1, 1, grid.tokens, 4), np.float32)
    chosen = ssta.select(q, k, grid)
    assert chosen.mask.num_blocks == (tiles, tiles)
    counts = chosen.mask.row_counts()
    assert least <= counts.min() <= counts.max() <= most
    if grid.t == 31:
        assert 0.089 - 0.02 <= chosen.mask.density() <= 0.164 + 0.02


def test_tiles_of_64_tokens() -> None:
    grid = VideoGrid(4, 16, 32)
    chosen = ssta.select(*drawn(grid), grid, keep=5, window=(1, 3, 3), tile=(4, 4, 4))
    assert chosen.mask.block_size == (64, 64)
    assert chosen.mask.num_blocks == (32, 32)


def test_few_tiles_are_all_kept_by_default() -> None:
    grid = VideoGrid(4, 8, 8)
    chosen = ssta.select(*drawn(grid), grid, window=(1, 1, 1), tile=(2, 4, 4))
    assert chosen.mask.density() == 1


def test_one_tile() -> None:
    grid = VideoGrid(2, 4, 4)
    chosen = ssta.select(*drawn(grid), grid, window=(1, 1, 1))
    assert chosen.mask.to_dense().tolist() == [[[[True]], [[True]]]]


class TestWrongInput:
    GRID = VideoGrid(4, 16, 32)  # 1x2x4 tiles

    @pytest.mark.parametrize("keep", [0, 9, -1])
    def test_keep(self, keep: int) -> None:
        with pytest.raises(ValueError, match="`keep`: expected 1 to 8, as the grid has 8 blocks"):
            ssta.select(*drawn(self.GRID), self.GRID, keep=keep, window=(1, 1, 1))

    def test_window(self) -> None:
        with pytest.raises(
            ValueError, match=r"`window`: expected all 1 tiles along frames, .*got 3"
        ):
            ssta.select(*drawn(self.GRID), self.GRID)

    @pytest.mark.parametrize("balance", [-0.1, 1.1, float("nan")])
    def test_balance(self, balance: float) -> None:
        with pytest.raises(ValueError, match="`balance`: expected a weight"):
            ssta.select(*drawn(self.GRID), self.GRID, balance=balance)


@pytest.mark.gpu
@pytest.mark.parametrize("text", [0, 40])
def test_cupy_and_numpy_select_the_same(text: int) -> None:
    cupy = pytest.importorskip("cupy")
    grid = VideoGrid(2, 8, 24, text_tokens=text)
    q, k = drawn(grid)
    rule: dict[str, Any] = {"keep": 3, "window": (1, 1, 3), "tile": (2, 4, 4)}
    host = ssta.select(q, k, grid, **rule)
    there = ssta.select(cupy.asarray(q), cupy.asarray(k), grid, **rule)
    there.check()
    assert there.mask.source is not None
    assert (there.mask.to_dense() == host.mask.to_dense()).all()
