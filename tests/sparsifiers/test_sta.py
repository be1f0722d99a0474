"""STA's rule, against windows worked out by hand and counted tile by tile."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tessera_cupy.sparsifiers import sta
from tessera_cupy.video import VideoGrid

#: Heads, layers and steps of HunyuanVideo that take each window, in the list that was published
#: with the rule's code: 35 sparse steps of 60 layers of 24 heads.
PUBLISHED = {
    (5, 3, 3): 20380,
    (1, 6, 10): 15916,
    (3, 3, 5): 7396,
    (5, 1, 10): 5244,
    (5, 6, 1): 1464,
}
HUNYUAN = VideoGrid(30, 48, 80)


def span(at: int, extent: int, n: int) -> range:
    """The window around a tile, moved inwards until it fits."""
    first = at - extent // 2
    while first < 0:
        first += 1
    while first + extent > n:
        first -= 1
    return range(first, first + extent)


def by_the_formula(across: tuple[int, int, int], window: tuple[int, int, int]) -> NDArray[np.bool_]:
    tiles = list(product(*map(range, across)))
    kept = np.zeros((len(tiles), len(tiles)), np.bool_)
    for (i, q), (j, k) in product(enumerate(tiles), enumerate(tiles)):
        axes = zip(q, k, window, across, strict=True)
        kept[i, j] = all(b in span(a, e, n) for a, b, e, n in axes)
    return kept


def test_a_window_by_hand() -> None:
    # Five tiles in a line; the window of three stops at the borders.
    mask = sta.mask(VideoGrid(1, 4, 20), (1, 1, 3), tile=(1, 4, 4))
    assert mask.block_size == (16, 16)
    assert mask.q_block_sizes is None
    assert mask.to_dense()[0, 0].astype(int).tolist() == [
        [1, 1, 1, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 1, 1, 1, 0],
        [0, 0, 1, 1, 1],
        [0, 0, 1, 1, 1],
    ]


@pytest.mark.parametrize("window", [(3, 3, 3), (1, 4, 5), (3, 1, 3), (3, 4, 1)])
def test_windows_of_three_axes(window: tuple[int, int, int]) -> None:
    # Tiles at the edges are cut: 3x4x5 of them.
    grid = VideoGrid(5, 7, 10)
    mask = sta.mask(grid, window, tile=(2, 2, 2))
    assert (mask.to_dense()[0, 0] == by_the_formula((3, 4, 5), window)).all()
    assert (mask.row_counts() == np.prod(window)).all()
    assert mask.shape == (grid.tokens, grid.tokens)


@pytest.mark.parametrize(
    ("window", "density"),
    [
        ((5, 3, 3), 45 / 300),
        ((1, 6, 10), 60 / 300),
        ((3, 3, 5), 45 / 300),
        ((5, 1, 10), 50 / 300),
        ((5, 6, 1), 30 / 300),
    ],
    ids=str,
)
def test_published_windows(window: tuple[int, int, int], density: float) -> None:
    mask = sta.mask(HUNYUAN, window)
    assert mask.num_blocks == (300, 300)
    assert mask.block_size == (384, 384)
    assert mask.density() == pytest.approx(density, abs=1e-12)


def test_published_mean_density() -> None:
    assert set(sta.HUNYUAN_WINDOWS) == set(PUBLISHED)
    densities = sta.mask(HUNYUAN, list(PUBLISHED)).row_counts().mean(axis=(0, 2)) / 300
    mean = np.average(densities, weights=list(PUBLISHED.values()))
    assert 0.165 <= mean <= 0.168


def test_a_window_of_each_head() -> None:
    q = np.zeros((2, 5, HUNYUAN.tokens, 1), np.float16)
    chosen = sta.select(q, q, HUNYUAN, windows=sta.HUNYUAN_WINDOWS)
    assert (chosen.mask.batch, chosen.mask.heads) == (1, 5)
    counts = [45, 60, 45, 50, 30]
    assert (chosen.mask.row_counts() == np.array(counts)[None, :, None]).all()
    assert (chosen.orders.of(1, 3) == HUNYUAN.tile_order((6, 8, 8))).all()


def test_the_same_call_gets_the_same_mask() -> None:
    grid = VideoGrid(6, 24, 24)
    q = np.zeros((1, 1, grid.tokens, 1), np.float16)
    first, second = (sta.select(q, q, grid, windows=[1, 3, 3]) for _ in range(2))
    assert first.mask is second.mask
    assert first.mask is sta.mask(grid, (1, 3, 3))


@pytest.mark.parametrize("first", [False, True])
def test_text_is_kept_whole(first: bool) -> None:
    grid = VideoGrid(1, 4, 20, text_tokens=21, text_first=first)
    tokens = sta.mask(grid, (1, 1, 3), tile=(1, 4, 4)).to_tokens()[0, 0]
    text = slice(0, 21) if first else slice(80, 101)
    video = slice(21, 101) if first else slice(0, 80)
    assert tokens[text].all()
    assert tokens[:, text].all()
    alone = sta.mask(VideoGrid(1, 4, 20), (1, 1, 3), tile=(1, 4, 4)).to_tokens()[0, 0]
    assert (tokens[video, video] == alone).all()


class TestWrongInput:
    # 5x6x10 tiles
    @pytest.mark.parametrize(
        ("window", "words"),
        [
            ((7, 3, 3), r"1 or 3 or all 5 tiles along frames, .* got 7.*take \(5, 3, 3\)"),
            ((3, 4, 3), r"1 or 3 or 5 or all 6 tiles along rows, .* got 4.*take \(3, 3, 3\)"),
            (
                (3, 3, 0),
                r"odd number below 10 or all 10 tiles along columns, .* got 0.*take \(3, 3, 1\)",
            ),
            ((3, 3, -3), r"along columns, .* got -3"),
        ],
    )
    def test_windows_that_do_not_fit(self, window: Any, words: str) -> None:
        with pytest.raises(ValueError, match=words):
            sta.mask(HUNYUAN, window)

    @pytest.mark.parametrize("windows", [(3, 3), [(3, 3), (1, 1)], (3.5, 3, 3), [], "333"])
    def test_no_windows(self, windows: Any) -> None:
        with pytest.raises(ValueError, match=r"`windows`: expected \(t, h, w\) tiles"):
            sta.mask(HUNYUAN, windows)

    def test_another_number_of_heads(self) -> None:
        grid = VideoGrid(6, 24, 24)
        q = np.zeros((1, 3, grid.tokens, 1), np.float16)
        with pytest.raises(ValueError, match="one for each of the 3 heads, got 2 windows"):
            sta.select(q, q, grid, windows=[(1, 3, 3), (1, 1, 3)])


@pytest.mark.gpu
def test_a_gpu_gets_the_mask_over_an_array_of_its_own() -> None:
    cupy = pytest.importorskip("cupy")
    grid = VideoGrid(6, 24, 24)
    q = cupy.zeros((1, 2, grid.tokens, 1), "float16")
    first, second = (sta.select(q, q, grid, windows=[(1, 3, 3), (1, 3, 1)]) for _ in range(2))
    assert first.mask is second.mask
    assert first.mask.source is not None
    host = sta.mask(grid, [(1, 3, 3), (1, 3, 1)])
    assert (first.mask.to_dense() == host.to_dense()).all()
