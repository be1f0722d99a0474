"""Fixed patterns, against their definition pair by pair."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tessera_cupy import BlockMask
from tessera_cupy.sparsifiers import static
from tessera_cupy.video import VideoGrid

GRIDS = (
    VideoGrid(4, 6, 7),
    VideoGrid(4, 4, 8),
    VideoGrid(3, 5, 9, text_tokens=21),
    VideoGrid(3, 5, 9, text_tokens=21, text_first=True),
)


def by_the_definition(
    places: int, reach: int, dilation: int, anchors: set[int]
) -> NDArray[np.bool_]:
    kept = np.zeros((places, places), np.bool_)
    for i in range(places):
        for j in range(places):
            near = abs(i - j) <= reach * dilation and (i - j) % dilation == 0
            kept[i, j] = near or i in anchors or j in anchors
    return kept


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize(
    ("reach", "dilation", "anchors"),
    [(0, 1, 0), (10, 1, 0), (40, 1, 16), (10, 3, 0), (7, 5, 37), (2, 40, 5), (3, 1, 120)],
)
def test_tokens(grid: VideoGrid, reach: int, dilation: int, anchors: int) -> None:
    first = grid.video_start
    text = set(range(grid.tokens)) - set(range(first, first + grid.video_tokens))
    places = text | set(range(first, first + anchors))
    expected = by_the_definition(grid.tokens, reach, dilation, places)
    for block_size in ((16, 16), (32, 16), (16, 64)):
        mask = static.mask(
            grid, reach=reach, dilation=dilation, anchors=anchors, block_size=block_size
        )
        assert (mask.to_tokens()[0, 0] == expected).all()
        # Nothing that a mask does not need: the same blocks and bits as from the token mask.
        exact = BlockMask.from_tokens(expected, block_size)
        for name in ("indptr", "indices", "partial", "token_bits"):
            assert np.array_equal(getattr(mask, name), getattr(exact, name)), name


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize(
    ("reach", "dilation", "anchors"), [(0, 1, 0), (1, 1, 0), (1, 1, 2), (2, 3, 1), (1, 1, 8)]
)
def test_blocks(grid: VideoGrid, reach: int, dilation: int, anchors: int) -> None:
    count = -(-grid.tokens // 16)
    first, end = grid.video_start, grid.video_start + grid.video_tokens
    ends = [min(16 * n + 16, grid.tokens) for n in range(count)]
    places = {n for n in range(count) if 16 * n < first or ends[n] > end}
    places |= set(range(first // 16, first // 16 + anchors))
    mask = static.mask(
        grid, reach=reach, dilation=dilation, anchors=anchors, unit="blocks", block_size=(16, 16)
    )
    expected = by_the_definition(count, reach, dilation, places)
    assert (mask.to_dense()[0, 0] == expected).all()
    assert not mask.has_token_bits


def test_a_long_window_is_exact() -> None:
    # Counted row by row: what lies behind the band, and before it without the first line.
    grid = VideoGrid(14, 16, 16)
    mask = static.mask(grid, reach=256, anchors=16)
    n = grid.tokens
    outside = [max(0, n - max(i + 257, 16)) + max(0, i - 256 - 16) for i in range(16, n)]
    assert mask.active_pairs() == n * n - sum(outside)


def test_published_window() -> None:
    grid = VideoGrid(33, 45, 80)
    n = grid.tokens
    assert static.mask(grid).active_pairs() == n * 513 - 256 * 257


def test_selections_are_in_raster_order_and_share_a_mask() -> None:
    grid = VideoGrid(4, 16, 16)
    q = np.zeros((2, 3, grid.tokens, 4), np.float16)
    first, second = (static.select(q, q, grid) for _ in range(2))
    assert first.mask is second.mask
    assert first.permute(q) is q
    assert (first.mask.batch, first.mask.heads) == (1, 1)


class TestWrongInput:
    GRID = VideoGrid(4, 8, 8)

    @pytest.mark.parametrize(
        ("rule", "words"),
        [
            ({"reach": 256}, "`reach`: expected 0 to 255, got 256"),
            ({"reach": -1}, "`reach`: expected 0 to 255"),
            ({"reach": 64, "dilation": 4}, "`reach`: expected 0 to 63"),
            ({"dilation": 0}, "`dilation`: expected 1 to 256"),
            ({"reach": 1, "anchors": 257}, "`anchors`: expected 0 to 256"),
            ({"reach": 4, "unit": "blocks"}, "`reach`: expected 0 to 3"),
            ({"reach": 1, "anchors": 5, "unit": "blocks"}, "`anchors`: expected 0 to 4"),
            ({"reach": 1, "unit": "frames"}, "`unit`: expected 'tokens' or 'blocks'"),
            ({"reach": 1, "block_size": (60, 64)}, "`block_size`: expected multiples of 8"),
            (
                {"reach": 1, "unit": "blocks", "block_size": (64, 32)},
                "`block_size`: expected square blocks",
            ),
        ],
    )
    def test_rules_that_do_not_fit(self, rule: dict[str, Any], words: str) -> None:
        with pytest.raises(ValueError, match=words):
            static.mask(self.GRID, **rule)

    def test_another_grid(self) -> None:
        q = np.zeros((1, 1, 255, 4), np.float32)
        with pytest.raises(ValueError, match=r"`q`: expected shape \(batch, heads, 256, d\)"):
            static.select(q, q, self.GRID, reach=1)


@pytest.mark.gpu
def test_a_gpu_gets_blocks_over_an_array_of_its_own_and_bits_from_the_host() -> None:
    cupy = pytest.importorskip("cupy")
    grid = VideoGrid(4, 16, 16)
    q = cupy.zeros((1, 2, grid.tokens, 4), "float16")
    blocks = static.select(q, q, grid, reach=1, unit="blocks").mask
    assert blocks.source is not None
    assert (blocks.to_dense() == static.mask(grid, reach=1, unit="blocks").to_dense()).all()
    assert static.select(q, q, grid).mask is static.mask(grid)
