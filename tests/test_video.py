"""Token grids and 3-D-tile order."""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tessera_cupy.errors import MissingExtraError
from tessera_cupy.video import MODELS, VideoGrid, inverse

sides = st.integers(1, 9)


def tile_order_by_loops(grid: VideoGrid, tile: tuple[int, int, int]) -> list[int]:
    """The definition, written out: tiles in raster order, tokens in raster order inside."""
    order = []
    for t0 in range(0, grid.t, tile[0]):
        for h0 in range(0, grid.h, tile[1]):
            for w0 in range(0, grid.w, tile[2]):
                for t in range(t0, min(t0 + tile[0], grid.t)):
                    for h in range(h0, min(h0 + tile[1], grid.h)):
                        for w in range(w0, min(w0 + tile[2], grid.w)):
                            order.append((t * grid.h + h) * grid.w + w)
    return order


def test_two_frames_by_hand() -> None:
    # Frame 0 holds tokens 0..5 in two rows of three, frame 1 holds 6..11.
    # A 2x1x2 tile takes two columns of one row from both frames; the third column is an edge.
    order = VideoGrid(2, 2, 3).tile_order((2, 1, 2))
    assert order.tolist() == [0, 1, 6, 7, 2, 8, 3, 4, 9, 10, 5, 11]
    assert order.dtype == np.int64


@given(sides, sides, sides, st.tuples(sides, sides, sides))
def test_order_is_the_definition_and_its_inverse_undoes_it(
    t: int, h: int, w: int, tile: tuple[int, int, int]
) -> None:
    grid = VideoGrid(t, h, w)
    order = grid.tile_order(tile)
    assert order.tolist() == tile_order_by_loops(grid, tile)
    tokens = np.arange(grid.tokens)
    assert (tokens[order][inverse(order)] == tokens).all()


def test_inverse_works_along_the_last_axis() -> None:
    rng = np.random.default_rng(0)
    orders = np.stack([[rng.permutation(20) for _ in range(3)] for _ in range(2)])
    undone = inverse(orders)
    assert undone.shape == (2, 3, 20)
    assert (np.take_along_axis(orders, undone, axis=-1) == np.arange(20)).all()


def test_raster_order_of_a_whole_grid_tile() -> None:
    grid = VideoGrid(3, 4, 5)
    assert grid.tile_order((3, 4, 5)).tolist() == list(range(60))
    assert grid.tile_order((99, 99, 99)).tolist() == list(range(60))


@pytest.mark.parametrize(
    ("name", "tokens", "text"),
    [
        ("wan-14b-81f-480p", 32_760, 0),
        ("wan-14b-81f-720p", 75_600, 0),
        ("wan-14b-61f-720p", 57_600, 0),
        ("wan-1.3b-81f-480p", 32_760, 0),
        ("wan2.2-5b-121f-704p", 27_280, 0),
        ("hunyuan-129f-720p", 118_800, 256),
        ("hunyuan-125f-720p", 115_200, 256),
        ("hunyuan-117f-768p", 115_200, 256),
        ("hunyuan1.5-121f-720p", 111_600, 1_256),
        ("cogvideox-5b-49f-480p", 17_550, 226),
        ("cogvideox1.5-5b-81f-768p", 44_880, 226),
        ("longcat-93f-480p", 37_440, 0),
    ],
)
def test_models_have_their_published_token_counts(name: str, tokens: int, text: int) -> None:
    grid = MODELS[name].grid
    assert (grid.video_tokens, grid.text_tokens, grid.tokens) == (tokens, text, tokens + text)
    assert grid.text_first == name.startswith("cogvideox")


def test_every_model_is_checked_above() -> None:
    assert len(MODELS) == 12


texts = st.tuples(st.integers(0, 20), st.booleans())


@given(sides, sides, sides, st.tuples(sides, sides, sides), texts)
def test_text_keeps_its_place(
    t: int, h: int, w: int, tile: tuple[int, int, int], text: tuple[int, bool]
) -> None:
    plain, grid = VideoGrid(t, h, w), VideoGrid(t, h, w, *text)
    tokens, first = text
    for order, of_video in (
        (grid.tile_order(tile), plain.tile_order(tile)),
        (grid.temporal_order(), plain.temporal_order()),
    ):
        before = list(range(tokens)) if first else []
        behind = [] if first else list(range(t * h * w, t * h * w + tokens))
        assert order.tolist() == [*before, *(of_video + len(before)), *behind]
        assert order.dtype == np.int64


@given(sides, sides, sides, st.tuples(sides, sides, sides), texts)
def test_each_block_is_one_tile(
    t: int, h: int, w: int, tile: tuple[int, int, int], text: tuple[int, bool]
) -> None:
    grid = VideoGrid(t, h, w, *text)
    blocks = grid.tile_blocks(tile)
    assert (blocks.order == grid.tile_order(tile)).all()
    assert blocks.sizes.dtype == np.int32
    assert blocks.sizes.sum() == grid.tokens
    volume = tile[0] * tile[1] * tile[2]
    assert blocks.sizes.min() >= 1
    assert blocks.sizes.max() <= volume

    starts = np.cumsum(blocks.sizes) - blocks.sizes
    where = [
        {
            ((i := int(token) - grid.video_start) // (h * w) // tile[0])
            * blocks.across[1]
            * blocks.across[2]
            + (i // w % h // tile[1]) * blocks.across[2]
            + i % w // tile[2]
            for token in blocks.order[start : start + size]
        }
        for start, size in zip(starts, blocks.sizes, strict=True)
    ]
    video = where[blocks.text.stop :] if text[1] else where[: blocks.text.start]
    assert video == [{tile_number} for tile_number in range(len(video))]
    assert len(video) == blocks.across[0] * blocks.across[1] * blocks.across[2]
    sizes = blocks.sizes[blocks.text].tolist()
    whole, rest = divmod(text[0], volume)
    assert sizes == [volume] * whole + [rest] * (rest > 0)


def test_tile_blocks_by_hand() -> None:
    # Two rows of five columns in tiles of 2x2: 4, 4 and, at the edge, 2 tokens.
    behind = VideoGrid(1, 2, 5, text_tokens=6).tile_blocks((1, 2, 2))
    assert behind.order.tolist() == [0, 1, 5, 6, 2, 3, 7, 8, 4, 9, 10, 11, 12, 13, 14, 15]
    assert behind.sizes.tolist() == [4, 4, 2, 4, 2]
    assert (behind.across, behind.text) == ((1, 1, 3), slice(3, 5))
    before = VideoGrid(1, 2, 5, text_tokens=6, text_first=True).tile_blocks((1, 2, 2))
    assert before.order.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 11, 12, 8, 9, 13, 14, 10, 15]
    assert before.sizes.tolist() == [4, 2, 4, 4, 2]
    assert (before.across, before.text) == ((1, 1, 3), slice(0, 2))


def test_tile_blocks_of_published_grids() -> None:
    # VSA's cubes at Wan's 720p: ceil(21/4) * ceil(45/4) * (80/4) blocks, one frame, one row left.
    blocks = VideoGrid(21, 45, 80).tile_blocks((4, 4, 4))
    assert (len(blocks.sizes), blocks.across) == (1_440, (6, 12, 20))
    assert sorted(set(blocks.sizes.tolist())) == [4, 16, 64]
    assert len(VideoGrid(21, 30, 52).tile_blocks((4, 4, 4)).sizes) == 624


def test_temporal_order_by_hand() -> None:
    # Frame 0 in raster order, then place by place: place 0 is token 4 of frame 1, 8 of frame 2.
    order = VideoGrid(3, 2, 2).temporal_order()
    assert order.tolist() == [0, 1, 2, 3, 4, 8, 5, 9, 6, 10, 7, 11]
    assert VideoGrid(1, 2, 2).temporal_order().tolist() == [0, 1, 2, 3]


def test_where_the_video_starts() -> None:
    behind = VideoGrid(2, 3, 4, text_tokens=5)
    before = VideoGrid(2, 3, 4, text_tokens=5, text_first=True)
    assert (behind.video_start, before.video_start) == (0, 5)
    assert (behind.tokens, behind.video_tokens, behind.frame_tokens) == (29, 24, 12)
    assert (str(behind), str(before)) == ("2x3x4+5", "5+2x3x4")


def test_wrong_text_is_refused() -> None:
    with pytest.raises(ValueError, match="`text_tokens`: expected an int of at least 0, got -1"):
        VideoGrid(1, 1, 1, text_tokens=-1)
    with pytest.raises(TypeError, match=r"`text_tokens`: expected an int of at least 0, got 1\.5"):
        VideoGrid(1, 1, 1, text_tokens=1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`text_first`: expected True or False, got 226"):
        VideoGrid(1, 1, 1, 226, 226)  # type: ignore[arg-type]


def test_a_tile_of_no_ints_is_refused() -> None:
    with pytest.raises(TypeError, match="`tile`: expected three ints"):
        VideoGrid(4, 4, 4).tile_order((1, 2.0, 4))  # type: ignore[arg-type]


def far(grid: VideoGrid, order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Steps on the grid from each video token to the next of an order."""
    video = order[(order >= grid.video_start) & (order < grid.video_start + grid.video_tokens)]
    places = np.array(np.unravel_index(video - grid.video_start, (grid.t, grid.h, grid.w)))
    return np.abs(np.diff(places, axis=1)).sum(axis=0)


@pytest.mark.parametrize("side", [2, 4, 8])
def test_a_hilbert_curve_walks_from_neighbour_to_neighbour(side: int) -> None:
    grid = VideoGrid(side, side, side, text_tokens=3, text_first=True)
    order = grid.curve_order("hilbert")
    assert order.dtype == np.int64
    assert sorted(order) == list(range(side**3 + 3))
    assert order[:4].tolist() == [0, 1, 2, 3]
    assert (far(grid, order) == 1).all()
    # Each octant is walked through before the next: the first eighth lies in one.
    places = np.unravel_index(order[3 : 3 + side**3 // 8] - 3, (side, side, side))
    assert all(axis.max() < side // 2 for axis in places)


@given(sides, sides, sides, texts)
def test_a_hilbert_curve_through_any_grid(t: int, h: int, w: int, text: tuple[int, bool]) -> None:
    """The order on the enclosing cube, whose side is a power of two, less what is outside."""
    grid = VideoGrid(t, h, w, *text)
    side = 1 << (max(t, h, w) - 1).bit_length()
    cube = VideoGrid(side, side, side).curve_order() if side > 1 else np.zeros(1, np.int64)
    places = np.array(np.unravel_index(cube, (side, side, side)))
    inside = (places < [[t], [h], [w]]).all(axis=0)
    expected = np.ravel_multi_index(tuple(places[:, inside]), (t, h, w)) + grid.video_start
    order = grid.curve_order()
    video = order[grid.video_start : grid.video_start + grid.video_tokens]
    assert (video == expected).all()
    assert sorted(order) == list(range(grid.tokens))


def test_a_curve_through_a_whole_video_takes_less_than_a_second() -> None:
    grid = VideoGrid(21, 45, 80)
    begin = time.perf_counter()
    order = grid.curve_order()
    taken = time.perf_counter() - begin
    assert len(order) == 75_600
    assert far(grid, order).mean() < 1.1
    assert taken < 1


def test_another_curve_is_refused() -> None:
    with pytest.raises(ValueError, match="`curve`: expected 'hilbert', got 'morton'"):
        VideoGrid(1, 2, 3).curve_order("morton")


def test_the_curve_needs_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hilbert", None)
    with pytest.raises(MissingExtraError, match=r"pip install numpy-hilbert-curve"):
        VideoGrid(1, 2, 3).curve_order()


def test_which_blocks_fit() -> None:
    # The extents of a tile divide 4, 2 and 16; the nearest to a cube come first.
    assert VideoGrid(4, 2, 16).explain().splitlines() == [
        "4x2x16: 128 tokens",
        "  video   4 frames of 2 x 16 = 32 tokens, 128 in all",
        "  text    none",
        "3-D tiles that divide the grid",
        "  64 tokens   4x2x8, 2x2x16, 4x1x16",
        "  128 tokens  4x2x16",
        "  384 tokens  none; 4x6x16 wastes least, 66.7 %",
        "Block sizes that divide the sequence, of multiples of 16 up to 512",
        "  16, 32, 64, 128",
    ]


def test_many_tiles_that_fit_are_counted() -> None:
    text = VideoGrid(64, 64, 64).explain()
    # Of 2^6 as three factors there are 28, and of 2^7 as three up to 2^6 there are 33.
    assert "\n  64 tokens   4x4x4, 2x4x8, 2x8x4, 4x2x8, 4x8x2 and 23 more\n" in text
    assert "and 28 more" in text
    assert VideoGrid(1, 1, 7).explain().endswith("\n  none, so that the last block is short")


def test_blocks_of_one_size_in_words() -> None:
    # 40 tokens of video in 16s: the third block has 8 of them and 8 of text, the last 15 - 8.
    assert VideoGrid(2, 4, 5, text_tokens=15).explain(16).splitlines() == [
        "2x4x5+15: 55 tokens",
        "  video   2 frames of 4 x 5 = 20 tokens, 40 in all",
        "  text    15 tokens behind the video",
        "Blocks of 16 tokens",
        "  blocks  4",
        "  last    7 of 16 tokens, 43.8 %",
        "  waste   9 of 64 places hold no token, 14.1 %",
        "  mixed   block 2, counted from 0, holds both video and text",
    ]
    before = VideoGrid(1, 4, 10, text_tokens=24, text_first=True).explain(8).splitlines()
    assert before[1:3] == [
        "  video   1 frame of 4 x 10 = 40 tokens, 40 in all",
        "  text    24 tokens before the video",
    ]
    assert before[4:] == ["  blocks  8", "  last    8 of 8 tokens, 100.0 %", "  waste   none"]


def test_tiles_in_words() -> None:
    # Columns 0 to 3 and column 4: tiles of 2 * 2 * 4 and of 2 * 2 * 1 tokens.
    assert VideoGrid(2, 4, 5, text_tokens=20).explain((2, 2, 4)).splitlines()[3:] == [
        "3-D tiles of 2x2x4 = 16 tokens",
        "  blocks  4, of 1 x 2 x 2 tiles; 2 are whole",
        "  edges   the last tile has 1 of 4 columns",
        "  fill    10.0 of 16 tokens on average, the least 4",
        "  waste   24 of 64 places hold no token, 37.5 %",
        "  text    2 further blocks, the last of 4 tokens",
    ]
    whole = VideoGrid(30, 48, 80).explain((6, 8, 8))
    assert "blocks  300, of 5 x 6 x 10 tiles; all are whole" in whole
    assert "edges   every axis fits" in whole
    assert whole.endswith("waste   none")


@pytest.mark.parametrize("bad", ["64", True, 6.5])
def test_no_blocks_to_explain(bad: object) -> None:
    with pytest.raises(TypeError, match="`blocks`: expected an int or three"):
        VideoGrid(1, 2, 3).explain(bad)  # type: ignore[arg-type]


def test_blocks_without_tokens_to_explain() -> None:
    with pytest.raises(ValueError, match="`blocks`: expected at least 1 token, got 0"):
        VideoGrid(1, 2, 3).explain(0)
    with pytest.raises(ValueError, match="`tile`: expected three extents"):
        VideoGrid(1, 2, 3).explain((4, 4))  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [0, -1])
def test_an_axis_without_tokens_is_refused(bad: int) -> None:
    with pytest.raises(ValueError, match="`h`: expected an int of at least 1"):
        VideoGrid(1, bad, 1)


@pytest.mark.parametrize("bad", [1.0, "3", True])
def test_an_axis_that_is_no_int_is_refused(bad: object) -> None:
    with pytest.raises(TypeError, match="`w`: expected an int of at least 1"):
        VideoGrid(1, 1, bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("tile", [(1, 2), (0, 4, 4), (4, -1, 4)])
def test_a_tile_without_three_extents_is_refused(tile: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="`tile`: expected three extents"):
        VideoGrid(4, 4, 4).tile_order(tile)  # type: ignore[arg-type]


def test_numpy_s_integers_count_like_python_s() -> None:
    grid = VideoGrid(*np.array([21, 45, 80], np.int16), text_tokens=np.uint8(200))
    assert grid == VideoGrid(21, 45, 80, 200)
    assert type(grid.t) is int
    assert grid.tokens == 75_800
    tile = tuple(np.uint8(n) for n in (4, 4, 4))
    for extents in (tile, np.array([4, 4, 4])):
        blocks = grid.tile_blocks(extents)
        assert blocks.sizes.tolist() == grid.tile_blocks((4, 4, 4)).sizes.tolist()


@pytest.mark.parametrize("tile", [8, None, (4, 4.0, 4), (True, 4, 4)])
def test_tiles_that_are_none(tile: Any) -> None:
    with pytest.raises(TypeError, match="`tile`: expected three ints"):
        VideoGrid(4, 4, 4).tile_order(tile)
