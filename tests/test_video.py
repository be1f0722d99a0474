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
    ("name", "tokens"),
    [
        ("wan-14b-81f-480p", 32_760),
        ("wan-14b-81f-720p", 75_600),
        ("wan-14b-61f-720p", 57_600),
        ("wan-1.3b-81f-480p", 32_760),
        ("wan2.2-5b-121f-704p", 27_280),
        ("hunyuan-129f-720p", 118_800),
        ("hunyuan-125f-720p", 115_200),
        ("hunyuan-117f-768p", 115_200),
        ("hunyuan1.5-121f-720p", 111_600),
        ("cogvideox-5b-49f-480p", 17_550),
        ("cogvideox1.5-5b-81f-768p", 44_880),
        ("longcat-93f-480p", 37_440),
    ],
)
def test_models_have_their_published_token_counts(name: str, tokens: int) -> None:
    assert MODELS[name].grid.tokens == tokens


def test_every_model_is_checked_above() -> None:
    assert len(MODELS) == 12


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
