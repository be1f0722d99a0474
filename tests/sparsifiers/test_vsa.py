"""VSA's rule, against a grid worked out by hand and the formula written as loops."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tessera_cupy.sparsifiers import vsa
from tessera_cupy.sparsifiers.cubes import cut
from tessera_cupy.video import VideoGrid

Cube = tuple[int, int, int]


def cubes_of(grid: VideoGrid, cube: Cube) -> list[NDArray[np.int64]]:
    """The tokens of each cube of the video, place by place."""
    cubes: dict[tuple[int, ...], list[int]] = {}
    for t, y, x in product(range(grid.t), range(grid.h), range(grid.w)):
        token = grid.video_start + (t * grid.h + y) * grid.w + x
        cubes.setdefault((t // cube[0], y // cube[1], x // cube[2]), []).append(token)
    return [np.array(cubes[at]) for at in sorted(cubes)]


def by_the_formula(
    q: NDArray[Any], k: NDArray[Any], grid: VideoGrid, cube: Cube, count: int
) -> NDArray[np.bool_]:
    """Token mask of one head in raster order: the best cubes of each cube, and the text."""
    kept = np.ones((grid.tokens, grid.tokens), np.bool_)
    cubes = cubes_of(grid, cube)
    for i in cubes:
        scores = [float(q[i].mean(axis=0) @ k[j].mean(axis=0)) for j in cubes]
        best = sorted(range(len(cubes)), key=lambda j: (-scores[j], j))[:count]
        for number, j in enumerate(cubes):
            kept[np.ix_(i, j)] = number in best
    return kept


def raster(tokens: NDArray[np.bool_], order: NDArray[np.int64]) -> NDArray[np.bool_]:
    """A token mask over permuted tokens, in raster order."""
    back = np.empty_like(tokens)
    back[np.ix_(order, order)] = tokens
    return back


def drawn(grid: VideoGrid, batch: int = 1, heads: int = 2) -> NDArray[np.float32]:
    # Small integers: means of unequal cubes differ, and sums are exact.
    rng = np.random.default_rng(grid.tokens)
    return rng.integers(-4, 5, (2, batch, heads, grid.tokens, 8)).astype(np.float32)


def test_a_grid_by_hand() -> None:
    # Two cubes of 2x2x2 and, at the edge, two of 2x2x1; their keys are 3, 1, 2 and -1.
    grid = VideoGrid(2, 4, 3)
    k = np.zeros((1, 1, 24, 2), np.float32)
    for tokens, value in zip(cubes_of(grid, (2, 2, 2)), (3, 1, 2, -1), strict=True):
        k[0, 0, tokens, 0] = value
    q = np.ones_like(k)
    q[0, 0, cubes_of(grid, (2, 2, 2))[3]] = -1
    chosen = vsa.select(q, k, grid, sparsity=0.5, cube=(2, 2, 2))
    assert chosen.mask.to_dense()[0, 0].astype(int).tolist() == [
        [1, 0, 1, 0],
        [1, 0, 1, 0],
        [1, 0, 1, 0],
        [0, 1, 0, 1],
    ]
    assert chosen.mask.q_block_sizes is not None
    assert chosen.mask.q_block_sizes[0, 0].tolist() == [8, 4, 8, 4]


@pytest.mark.parametrize(
    "grid",
    [
        VideoGrid(5, 6, 9),
        VideoGrid(4, 8, 8),
        VideoGrid(4, 4, 6, text_tokens=70),
        VideoGrid(4, 4, 6, text_tokens=70, text_first=True),
        VideoGrid(4, 4, 8, text_tokens=64, text_first=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("cube", [(4, 4, 4), (2, 4, 4)], ids=str)
def test_the_formula(grid: VideoGrid, cube: Cube) -> None:
    q, k = drawn(grid, batch=2)
    chosen = vsa.select(q, k, grid, sparsity=0.6, cube=cube)
    count = math.ceil(0.4 * len(cubes_of(grid, cube)))
    tokens = chosen.mask.to_tokens()
    for b, h in np.ndindex(2, 2):
        found = raster(tokens[b, h], chosen.orders.of(b, h))
        assert (found == by_the_formula(q[b, h], k[b, h], grid, cube, count)).all()


def test_cubes_that_divide_the_grid_are_uniform_blocks() -> None:
    for grid in (VideoGrid(4, 8, 8), VideoGrid(4, 8, 8, text_tokens=100)):
        chosen = vsa.select(*drawn(grid), grid)
        assert chosen.mask.q_block_sizes is None
        assert chosen.mask.block_size == (64, 64)
        assert chosen.mask.shape == (grid.tokens, grid.tokens)


@pytest.mark.parametrize(
    ("grid", "sparsity", "cubes", "count"),
    [(VideoGrid(21, 45, 80), 0.9, 1440, 144), (VideoGrid(21, 30, 52), 0.8, 624, 125)],
    ids=str,
)
def test_published_counts(grid: VideoGrid, sparsity: float, cubes: int, count: int) -> None:
    q, k = np.random.default_rng(0).standard_normal((2, 1, 1, grid.tokens, 4), np.float32)
    chosen = vsa.select(q, k, grid, sparsity=sparsity)
    assert chosen.mask.num_blocks == (cubes, cubes)
    assert (chosen.mask.row_counts() == count).all()
    assert count / cubes == pytest.approx(1 - sparsity, abs=0.001)


@pytest.mark.parametrize(("cube", "tokens"), [((4, 4, 8), 128), ((4, 8, 8), 256)])
def test_larger_cubes(cube: Cube, tokens: int) -> None:
    grid = VideoGrid(8, 16, 16)
    chosen = vsa.select(*drawn(grid), grid, sparsity=0.5, cube=cube)
    assert chosen.mask.block_size == (tokens, tokens)
    assert (chosen.mask.row_counts() == grid.tokens // tokens // 2).all()


def test_a_count_is_not_raised_by_rounding() -> None:
    # In binary (1 - 0.7) * 10 is above 3, and (1 - 0.9) * 10 below 1.
    grid = VideoGrid(4, 4, 40)
    for sparsity, count in ((0.7, 3), (0.9, 1), (0.0, 10), (0.99, 1)):
        chosen = vsa.select(*drawn(grid), grid, sparsity=sparsity)
        assert (chosen.mask.row_counts() == count).all()


class TestWrongInput:
    GRID = VideoGrid(4, 8, 8)

    @pytest.mark.parametrize("sparsity", [1, 1.5, -0.1, float("nan"), 90])
    def test_sparsity(self, sparsity: float) -> None:
        with pytest.raises(ValueError, match="`sparsity`: expected a fraction from 0 to below 1"):
            vsa.select(*drawn(self.GRID), self.GRID, sparsity=sparsity)

    @pytest.mark.parametrize("cube", [(4, 4), (0, 4, 4), (4, 4, 4, 4)])
    def test_cube(self, cube: Any) -> None:
        with pytest.raises(ValueError, match="`cube`: expected three extents"):
            vsa.select(*drawn(self.GRID), self.GRID, cube=cube)

    def test_another_grid(self) -> None:
        with pytest.raises(ValueError, match=r"`q`: expected shape \(batch, heads, 257, d\)"):
            vsa.select(*drawn(self.GRID), VideoGrid(4, 8, 8, text_tokens=1))

    def test_nan(self) -> None:
        q, k = drawn(self.GRID)
        k[0, 1, 7, 3] = np.nan
        with pytest.raises(ValueError, match="`k`: expected finite numbers"):
            vsa.select(q, k, self.GRID)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "grid",
    [VideoGrid(4, 8, 8), VideoGrid(5, 6, 9), VideoGrid(4, 8, 8, text_tokens=100)],
    ids=str,
)
def test_cupy_and_numpy_select_the_same(grid: VideoGrid) -> None:
    cupy = pytest.importorskip("cupy")
    q, k = drawn(grid)
    host = vsa.select(q, k, grid, sparsity=0.5)
    there = vsa.select(cupy.asarray(q), cupy.asarray(k), grid, sparsity=0.5)
    there.check()
    if cut(grid, (4, 4, 4)).uniform:
        assert there.mask.source is not None
    assert (there.mask.to_dense() == host.mask.to_dense()).all()
