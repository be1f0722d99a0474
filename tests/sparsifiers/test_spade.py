"""SPADE's rule, against grids worked out by hand and the formula written as loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tessera_cupy.sparsifiers import spade
from tessera_cupy.video import TileSize, VideoGrid


def by_the_formula(q: Any, k: Any, block: int, count: int) -> np.ndarray:
    """Score and top-k of permuted (tokens, d) as the rule states them, one block at a time."""
    blocks = -(-len(q) // block)
    kept = np.zeros((blocks, blocks), dtype=bool)
    for i in range(blocks):
        qi = q[i * block : (i + 1) * block]
        middle = qi.max(axis=0) + qi.min(axis=0)
        scores = []
        for j in range(blocks):
            kj = k[j * block : (j + 1) * block]
            scores.append(max(middle @ kj.max(axis=0), middle @ kj.min(axis=0)))
        kept[i, sorted(range(blocks), key=lambda j: -scores[j])[:count]] = True
    return kept


class TestByHand:
    """Four blocks of 16 tokens on a 1x4x16 grid; each line of the grid is one block.

    All tokens of a line share one key; queries are (1, 0), so Qmax + Qmin = (2, 0). Line 2's
    first token has the key (5, 0), so its Kmax is (5, 0) and its Kmin the line's own.
    """

    GRID = VideoGrid(1, 4, 16)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        q = np.zeros((1, 1, 64, 2), dtype=np.float32)
        q[..., 0] = 1
        k = np.zeros((1, 1, 64, 2), dtype=np.float32)
        k[0, 0, :, 0] = np.repeat([3, -1, -2, 4], 16)
        k[0, 0, 32, 0] = 5
        return q, k

    def select(self, **options: Any) -> np.ndarray:
        q, k = self.arrays()
        rule = {"sinks": 0, "diagonal": 0, "block_size": (16, 16), "tiles": [(1, 1, 16)]}
        return spade.select(q, k, self.GRID, **{**rule, **options}).mask.to_dense()[0, 0]

    def test_top_k_of_the_larger_extreme(self) -> None:
        # Scores of a row are 2 * (3, -1, 5, 4): line 2 is best through its maximum.
        best = self.select(keep=0.25)
        assert best.astype(int).tolist() == [[1, 0, 1, 0], [0, 1, 1, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
        two = self.select(keep=0.5)
        assert two.astype(int).tolist() == [[1, 0, 1, 1], [0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 1, 1]]

    def test_the_count_is_rounded_down(self) -> None:
        assert (self.select(keep=0.49) == self.select(keep=0.25)).all()
        assert (self.select(keep=0.24) == np.eye(4, dtype=bool)).all()

    def test_negative_queries_score_by_the_minimum(self) -> None:
        q, k = self.arrays()
        chosen = spade.select(
            -q,
            k,
            self.GRID,
            keep=0.25,
            sinks=0,
            diagonal=0,
            block_size=(16, 16),
            tiles=[(1, 1, 16)],
        )
        # Scores are -2 * the smaller extreme: (-3, 1, 2, -4); line 2 again, by its minimum.
        assert (
            chosen.mask.to_dense()[0, 0] == np.eye(4, dtype=bool) | np.eye(4, dtype=bool)[2]
        ).all()

    def test_sinks_and_diagonal(self) -> None:
        kept = self.select(keep=0, sinks=2, diagonal=1)
        assert kept.astype(int).tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1]]

    def test_ties_fall_to_the_lower_column(self) -> None:
        q, k = self.arrays()
        chosen = spade.select(
            q,
            0 * k,
            self.GRID,
            keep=0.5,
            sinks=0,
            diagonal=0,
            block_size=(16, 16),
            tiles=[(1, 1, 16)],
        )
        ties = np.zeros((4, 4), dtype=bool)
        ties[:, :2] = True
        assert (chosen.mask.to_dense()[0, 0] == ties | np.eye(4, dtype=bool)).all()

    def test_diagonal_of_unequal_blocks_is_every_key_block_that_the_row_meets(self) -> None:
        kept = self.select(keep=0, diagonal=0, block_size=(32, 16))
        assert kept.astype(int).tolist() == [[1, 1, 0, 0], [0, 0, 1, 1]]
        kept = self.select(keep=0, diagonal=0, block_size=(16, 32))
        assert kept.astype(int).tolist() == [[1, 0], [1, 0], [0, 1], [0, 1]]


def test_each_head_takes_the_tile_whose_queries_are_alike() -> None:
    grid = VideoGrid(8, 16, 16)
    t, y, x = np.indices((8, 16, 16))
    directions = np.random.default_rng(0).standard_normal((4096, 32)).astype(np.float32)
    # Queries are alike within (1, 8, 8) boxes in head 0 and within (4, 2, 8) boxes in head 1.
    box0 = (t * 16 + y // 8) * 16 + x // 8
    box1 = (t // 4 * 16 + y // 2) * 16 + x // 8
    q = np.stack([directions[box0.ravel()], directions[box1.ravel()]])[None]
    chosen = spade.select(q, q, grid)
    assert spade.tiles_of(chosen) == (TileSize(1, 8, 8), TileSize(4, 2, 8))
    assert (chosen.orders.of(0, 0) == grid.tile_order((1, 8, 8))).all()
    assert (chosen.orders.of(0, 1) == grid.tile_order((4, 2, 8))).all()
    assert [str(tile) for tile in spade.tiles_of(chosen)] == ["1x8x8", "4x2x8"]


@pytest.mark.parametrize("grid", [VideoGrid(5, 9, 13), VideoGrid(1, 8, 8), VideoGrid(3, 7, 3)])
def test_ragged_grids_follow_the_formula(grid: VideoGrid) -> None:
    rng = np.random.default_rng(1)
    q, k = rng.standard_normal((2, 2, 3, grid.tokens, 16)).astype(np.float32)
    blocks = -(-grid.tokens // 64)
    chosen = spade.select(q, k, grid, keep=0.3, sinks=1, diagonal=0)
    assert chosen.mask.shape == (grid.tokens, grid.tokens)
    assert chosen.mask.block_size == (64, 64)
    dense = chosen.mask.to_dense()
    assert dense.shape == (2, 3, blocks, blocks)
    always = np.eye(blocks, dtype=bool)
    always[:, :1] = True
    for b, h in np.ndindex(2, 3):
        order = chosen.orders.of(b, h)
        assert (np.sort(order) == np.arange(grid.tokens)).all()
        top = by_the_formula(q[b, h][order], k[b, h][order], 64, int(0.3 * blocks))
        assert (dense[b, h] == top | always).all()


@pytest.mark.parametrize(
    ("grid", "rows"),
    [
        # 64 tokens of video, then 20 of text: blocks of 16 from the fifth on.
        (VideoGrid(1, 4, 16, text_tokens=20), [4, 5]),
        # 20 tokens of text, then video: the second block holds both.
        (VideoGrid(1, 4, 16, text_tokens=20, text_first=True), [0, 1]),
        (VideoGrid(1, 4, 15, text_tokens=4), [3]),
    ],
)
def test_blocks_with_text_are_full(grid: VideoGrid, rows: list[int]) -> None:
    q = np.zeros((1, 1, grid.tokens, 4), dtype=np.float32)
    chosen = spade.select(
        q, q, grid, block_size=(16, 16), keep=0, sinks=0, diagonal=0, tiles=[(1, 1, 16)]
    )
    expected = np.eye(-(-grid.tokens // 16), dtype=bool)
    expected[rows] = True
    expected[:, rows] = True
    assert (chosen.mask.to_dense()[0, 0] == expected).all()


def test_a_diagonal_below_one_is_a_fraction_of_the_blocks() -> None:
    grid = VideoGrid(1, 20, 64)
    q = np.zeros((1, 1, grid.tokens, 4), dtype=np.float32)
    # 1.5% of 80 blocks is 1.2, so one on each side.
    options = {"block_size": (16, 16), "keep": 0, "sinks": 0, "tiles": [(1, 1, 16)]}
    kept = spade.select(q, q, grid, diagonal=0.015, **options).mask.to_dense()[0, 0]
    apart = np.abs(np.arange(80)[:, None] - np.arange(80))
    assert (kept == (apart <= 1)).all()


@pytest.mark.parametrize(("sinks", "diagonal"), [(5, 2), (10, 0.015)])
def test_rows_at_the_published_grid(sinks: int, diagonal: float) -> None:
    """Wan's 61 frames at 720p: 900 blocks, of which top-k keeps 153 in each row."""
    grid = VideoGrid(16, 45, 80)
    rng = np.random.default_rng(5)
    q, k = rng.standard_normal((2, 1, 1, grid.tokens, 8)).astype(np.float32)
    chosen = spade.select(q, k, grid, sinks=sinks, diagonal=diagonal)
    counts = chosen.mask.row_counts().ravel()
    width = 2 if diagonal == 2 else 13  # 1.5% of 900
    assert len(counts) == 900
    assert counts.min() >= 153
    assert counts.max() <= 153 + sinks + 2 * width + 1
    # As many of the others are among the best as chance has it: all but 17% of them are added.
    assert chosen.mask.density() == pytest.approx(
        (153 + 0.83 * (sinks + 2 * width + 1)) / 900, abs=0.003
    )


def test_permute_and_restore_move_rows_with_their_head() -> None:
    grid = VideoGrid(4, 6, 8)
    rng = np.random.default_rng(2)
    q = rng.standard_normal((2, 2, grid.tokens, 8)).astype(np.float32)
    chosen = spade.select(q, q, grid)
    x = rng.standard_normal((2, 2, grid.tokens, 5)).astype(np.float16)
    moved = chosen.permute(x)
    assert moved.dtype == np.float16
    assert moved.flags.c_contiguous
    for b, h in np.ndindex(2, 2):
        assert (moved[b, h] == x[b, h, chosen.orders.of(b, h)]).all()
    assert (chosen.restore(moved) == x).all()


class TestWrongInput:
    GRID = VideoGrid(2, 4, 8)

    def array(self, *shape: int) -> np.ndarray:
        return np.zeros(shape, dtype=np.float32)

    def test_a_grid_of_another_size(self) -> None:
        q = self.array(1, 1, 63, 8)
        with pytest.raises(ValueError, match=r"`q`: expected shape \(batch, heads, 64, d\)"):
            spade.select(q, q, self.GRID)

    def test_keys_of_another_shape(self) -> None:
        with pytest.raises(ValueError, match=r"`k`: expected q's shape"):
            spade.select(self.array(1, 2, 64, 8), self.array(1, 1, 64, 8), self.GRID)

    def test_keep_in_percent(self) -> None:
        q = self.array(1, 1, 64, 8)
        with pytest.raises(ValueError, match="`keep`: expected a fraction"):
            spade.select(q, q, self.GRID, keep=17)

    def test_an_array_of_another_kind(self) -> None:
        with pytest.raises(TypeError, match="`q`: expected a NumPy or CuPy array, got list"):
            spade.select([1.0], [1.0], self.GRID)

    def test_tensors_of_torch_are_told_a_way_that_serves_bfloat16(self) -> None:
        tensor = type("Tensor", (), {"__module__": "torch"})()
        words = r"got Tensor\. Fix: pass cupy\.from_dlpack\(q\).*q\.float\(\)\.numpy\(\)"
        with pytest.raises(TypeError, match=words):
            spade.select(tensor, tensor, self.GRID)

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("name", ["q", "k"])
    def test_what_is_no_number(self, name: str, bad: float) -> None:
        arrays = {"q": self.array(1, 2, 64, 8), "k": self.array(1, 2, 64, 8)}
        arrays[name][0, 1, 63, 7] = bad
        with pytest.raises(ValueError, match=f"`{name}`: expected finite numbers"):
            spade.select(**arrays, grid=self.GRID)

    @pytest.mark.parametrize(
        ("option", "value"),
        [("keep", -0.1), ("sinks", -1), ("diagonal", -1), ("diagonal", 1.5), ("tiles", [])],
    )
    def test_options_out_of_range(self, option: str, value: Any) -> None:
        q = self.array(1, 1, 64, 8)
        with pytest.raises(ValueError, match=f"`{option}`: expected"):
            spade.select(q, q, self.GRID, **{option: value})

    @pytest.mark.parametrize("grid", [(2, 4, 8), [2, 4, 8], 64, None])
    def test_a_grid_that_is_none(self, grid: Any) -> None:
        q = self.array(1, 1, 64, 8)
        with pytest.raises(TypeError, match=r"`grid`: expected a VideoGrid.*VideoGrid\(frames"):
            spade.select(q, q, grid)

    def test_permuting_another_shape(self) -> None:
        q = self.array(1, 2, 64, 8)
        chosen = spade.select(q, q, self.GRID)
        with pytest.raises(ValueError, match="`x`: expected"):
            chosen.permute(self.array(1, 1, 64, 8))
