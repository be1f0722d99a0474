"""Token grids and 3-D-tile order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
