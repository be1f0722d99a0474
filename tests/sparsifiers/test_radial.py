"""The radial rule, against frames worked out by hand and the definition token by token."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tessera_cupy.sparsifiers import radial
from tessera_cupy.video import VideoGrid


def band(distance: int, tokens: int, decay: float, block: int) -> NDArray[np.bool_]:
    """Token mask of two frames that are so far apart."""
    place = np.arange(tokens)
    apart = abs(place[:, None] - place)
    if distance <= 1:
        return np.ones((tokens, tokens), np.bool_)
    span = 2 ** len(f"{tokens:b}") / 2 ** len(f"{distance:b}")
    if span < block and distance % int(block / span):
        return np.zeros((tokens, tokens), np.bool_)
    return apart <= max(decay * span, block)


def by_the_definition(grid: VideoGrid, decay: float, sink: bool, block: int) -> NDArray[np.bool_]:
    """The block map, from the token mask of each pair of frames."""
    count = -(-grid.tokens // block)
    kept = np.zeros((count, count), np.bool_)
    padded = count * block
    frame = grid.frame_tokens
    for i in range(grid.t):
        for j in range(grid.t):
            tokens = np.zeros((padded, padded), np.bool_)
            rows, columns = (grid.video_start + n * frame for n in (i, j))
            pair = band(abs(i - j), frame, decay, block)
            if sink and j == 0:
                pair[:] = True
            tokens[rows : rows + frame, columns : columns + frame] = pair
            share = tokens.reshape(count, block, count, block).sum(axis=1) / block
            used, busy = (share > 0).sum(axis=-1), (share > 1 / 3).sum(axis=-1)
            kept |= busy > 0.6 * used
    # Blocks with text, and a short last one, are kept whole.
    for at in range(count):
        first, last = at * block, (at + 1) * block - 1
        end = grid.video_start + grid.video_tokens
        if first < grid.video_start or last >= end:
            kept[at] = kept[:, at] = True
    return kept


def test_frames_of_one_block_by_hand() -> None:
    # Frames of 16 tokens: 2**5 / 2**bits(d) is 8 at the distances 2 and 3, and 4 from 4 on, so
    # that a block of 16 keeps every second distance, then every fourth.
    mask = radial.mask(VideoGrid(9, 4, 4), block=16)
    row = mask.to_dense()[0, 0, 0].astype(int).tolist()
    assert row == [1, 1, 1, 0, 1, 0, 0, 0, 1]
    sink = radial.mask(VideoGrid(9, 4, 4), block=16, sink=True).to_dense()[0, 0].astype(int)
    assert sink[:, 0].tolist() == [1] * 9
    assert sink[0].tolist() == row
    assert sink[3].tolist() == [1, 1, 1, 1, 1, 1, 0, 1, 0]


def test_the_band_halves_with_the_distance() -> None:
    # Frames of 512 tokens are 32 blocks of 16. The band reaches 1024 / 4 to each side at the
    # distances 2 and 3, half of that from 4 on, and a quarter from 8 on.
    dense = radial.mask(VideoGrid(9, 16, 32), decay=1.0, block=16).to_dense()[0, 0]
    first = dense[0].reshape(9, 32).sum(axis=1)
    assert first[:2].tolist() == [32, 32]
    # Of the block that begins at the band's end, 11 of 16 columns still have 6 rows or more.
    assert first[2:].tolist() == [17, 17, 9, 9, 9, 9, 5]


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("decay", [0.2, 0.8, 1.0])
@pytest.mark.parametrize(
    ("grid", "block"),
    [
        (VideoGrid(6, 8, 8), 16),
        (VideoGrid(9, 5, 9), 16),
        (VideoGrid(7, 7, 11), 24),
        (VideoGrid(5, 5, 9, text_tokens=21), 16),
        (VideoGrid(5, 5, 9, text_tokens=21, text_first=True), 16),
        (VideoGrid(1, 5, 9), 40),
    ],
    ids=str,
)
def test_the_definition(grid: VideoGrid, block: int, decay: float, sink: bool) -> None:
    mask = radial.mask(grid, decay=decay, sink=sink, block=block)
    expected = by_the_definition(grid, decay, sink, block)
    assert (mask.to_dense()[0, 0] == expected).all()
    assert (mask.row_counts() > 0).all()


@pytest.mark.parametrize(
    ("grid", "rule", "density"),
    [
        (VideoGrid(30, 48, 80), {}, 0.275),
        (VideoGrid(18, 48, 80), {"decay": 0.2, "sink": True}, 0.287),
        (VideoGrid(20, 48, 80), {"decay": 0.8, "sink": True}, 0.353),
    ],
    ids=["HunyuanVideo", "Wan 2.1", "Wan 2.2"],
)
def test_published_densities(grid: VideoGrid, rule: dict[str, Any], density: float) -> None:
    mask = radial.mask(grid, **rule)
    assert mask.block_size == (128, 128)
    assert (mask.batch, mask.heads) == (1, 1)
    assert mask.density() == pytest.approx(density, abs=0.0006)


def test_a_long_sequence_takes_little_time() -> None:
    radial._mask.cache_clear()
    start = time.perf_counter()
    mask = radial.mask(VideoGrid(33, 45, 80, text_tokens=256))
    assert time.perf_counter() - start < 2
    assert mask.density() == pytest.approx(0.275, abs=0.02)


def test_selections_are_in_raster_order_and_share_a_mask() -> None:
    grid = VideoGrid(3, 16, 16)
    q = np.zeros((2, 3, grid.tokens, 4), np.float16)
    first, second = (radial.select(q, q, grid) for _ in range(2))
    assert first.mask is second.mask
    assert first.permute(q) is q


class TestWrongInput:
    GRID = VideoGrid(3, 8, 8)

    @pytest.mark.parametrize("decay", [0, -1, float("nan"), float("inf")])
    def test_decay(self, decay: float) -> None:
        with pytest.raises(ValueError, match="`decay`: expected a positive number"):
            radial.mask(self.GRID, decay=decay, block=64)

    @pytest.mark.parametrize("block", [0, 128])
    def test_blocks_beyond_a_frame(self, block: int) -> None:
        with pytest.raises(ValueError, match="`block`: expected a block within one frame of 64"):
            radial.mask(self.GRID, block=block)

    def test_blocks_that_no_mask_has(self) -> None:
        with pytest.raises(ValueError, match="`block_size`: expected multiples of 8"):
            radial.mask(self.GRID, block=36)


@pytest.mark.gpu
def test_a_gpu_gets_the_mask_over_an_array_of_its_own() -> None:
    cupy = pytest.importorskip("cupy")
    grid = VideoGrid(6, 16, 16)
    q = cupy.zeros((1, 2, grid.tokens, 4), "float16")
    first, second = (radial.select(q, q, grid) for _ in range(2))
    assert first.mask is second.mask
    assert first.mask.source is not None
    assert (first.mask.to_dense() == radial.mask(grid).to_dense()).all()
