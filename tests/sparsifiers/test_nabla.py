"""NABLA's rule, against loops over tiles and a tiny grid worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tessera_cupy.sparsifiers import nabla
from tessera_cupy.video import VideoGrid


def tiles_of(grid: VideoGrid) -> list[list[int]]:
    """Raster indices of each tile's tokens, then those of the text, 64 at a time."""
    tiles = []
    for t in range(grid.t):
        for y in range(0, grid.h, 8):
            for x in range(0, grid.w, 8):
                tiles.append(
                    [
                        grid.video_start + (t * grid.h + row) * grid.w + column
                        for row in range(y, min(y + 8, grid.h))
                        for column in range(x, min(x + 8, grid.w))
                    ]
                )
    first = 0 if grid.text_first else grid.video_tokens
    text = list(range(first, first + grid.text_tokens))
    parts = [text[i : i + 64] for i in range(0, len(text), 64)]
    return parts + tiles if grid.text_first else tiles + parts


def by_the_formula(q: Any, k: Any, grid: VideoGrid, mass: float, window: Any) -> np.ndarray:
    tiles = tiles_of(grid)
    text = [min(tile) < grid.video_start or max(tile) >= grid.video_start + grid.video_tokens
            for tile in tiles]  # fmt: skip
    down, right = -(-grid.h // 8), -(-grid.w // 8)
    places = [(t, y, x) for t in range(grid.t) for y in range(down) for x in range(right)]
    video = [i for i, is_text in enumerate(text) if not is_text]
    kept = np.zeros((len(tiles), len(tiles)), bool)
    for i, rows in enumerate(tiles):
        score = np.array([q[rows].mean(axis=0) @ k[tiles[j]].mean(axis=0) for j in video])
        p = np.exp((score - score.max()) / np.sqrt(q.shape[1]))
        p /= p.sum()
        total = 0.0
        for n in sorted(range(len(video)), key=lambda n: -p[n]):
            if total >= mass:
                break
            total += p[n]
            kept[i, video[n]] = True
        for j in range(len(tiles)):
            if text[i] or text[j]:
                kept[i, j] = True
            elif window:
                here, there = places[video.index(i)], places[video.index(j)]
                apart = [abs(a - b) for a, b in zip(here, there, strict=True)]
                kept[i, j] |= all(a <= e // 2 for a, e in zip(apart, window, strict=True))
    return kept


@pytest.mark.parametrize(
    ("grid", "window"),
    [
        (VideoGrid(3, 16, 24), None),
        (VideoGrid(3, 16, 24), (3, 1, 3)),
        (VideoGrid(2, 20, 12), (1, 2, 1)),  # tiles that the edge cuts
        (VideoGrid(2, 16, 16, text_tokens=70), None),
        (VideoGrid(2, 16, 16, text_tokens=9, text_first=True), (1, 1, 1)),
    ],
)
@pytest.mark.parametrize("mass", [0.3, 0.9])
def test_the_formula(grid: VideoGrid, window: Any, mass: float) -> None:
    rng = np.random.default_rng(grid.tokens)
    q, k = rng.standard_normal((2, 2, 2, grid.tokens, 16)).astype(np.float32) * 4
    chosen = nabla.select(q, k, grid, mass=mass, window=window)
    made = chosen.mask.to_dense()
    order = [token for tile in tiles_of(grid) for token in tile]
    assert chosen.orders.host().tolist() == [[order]]
    for b, h in np.ndindex(2, 2):
        expected = by_the_formula(
            q[b, h].astype(np.float64), k[b, h].astype(np.float64), grid, mass, window
        )
        assert (made[b, h] == expected).all()


def test_by_hand() -> None:
    """Four tiles side by side; q is 4 in one channel of 16, so that scores are the keys' values.

    With keys ln 5, ln 3, 0, 0 the softmax is 0.5, 0.3, 0.1, 0.1.
    """
    grid = VideoGrid(1, 8, 32)
    q, k = np.zeros((2, 1, 1, 256, 16), np.float32)
    q[..., 0] = 4
    k[0, 0, :, 0] = np.log(np.tile(np.repeat([5.0, 3, 1, 1], 8), 8))
    for mass, row in [(0.5, [1, 0, 0, 0]), (0.79, [1, 1, 0, 0]), (0.85, [1, 1, 1, 0])]:
        made = nabla.select(q, k, grid, mass=mass - 1e-4).mask.to_dense()
        assert made.astype(int).tolist() == [[[row] * 4]]
    windowed = nabla.select(q, k, grid, mass=0.45, window=(1, 1, 3)).mask.to_dense()
    assert windowed[0, 0].astype(int).tolist() == [
        [1, 1, 0, 0],
        [1, 1, 1, 0],
        [1, 1, 1, 1],
        [1, 0, 1, 1],
    ]


class TestBadInput:
    GRID = VideoGrid(3, 16, 16)

    def select(self, grid: VideoGrid = GRID, **options: Any) -> Any:
        x = options.pop("x", np.ones((1, 1, 768, 8), np.float32))
        return nabla.select(x, x, grid, **options)

    @pytest.mark.parametrize("window", [(5, 1, 1), (1, 3, 1), (0, 1, 1), (1, 1)])
    def test_a_window_that_does_not_fit(self, window: Any) -> None:
        beyond = len(window) == 3 and min(window) > 0
        expected = "3x2x2 tiles, got" if beyond else "three extents of at least 1"
        with pytest.raises(ValueError, match=f"`window`: expected .*{expected}"):
            self.select(window=window)

    def test_a_mass_that_is_none(self) -> None:
        with pytest.raises(ValueError, match="mass"):
            self.select(mass=1.5)

    def test_another_grid(self) -> None:
        with pytest.raises(ValueError, match="769"):
            self.select(VideoGrid(3, 16, 16, text_tokens=1))

    def test_nan(self) -> None:
        x = np.ones((1, 1, 768, 8), np.float32)
        x[0, 0, 5, 1] = np.nan
        with pytest.raises(ValueError, match="finite"):
            self.select(x=x)
