"""Token grids in an order: colours of blocks, hatched edges, numbers, the path, text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tessera_cupy import viz
from tessera_cupy.video import VideoGrid
from tessera_cupy.viz import grid as grid_picture

pytest.importorskip("matplotlib")


class FakeCupy:
    """An array that only its own ``get`` brings to the host."""

    def __init__(self, values: Any) -> None:
        self._values = np.array(values)

    def get(self) -> Any:
        return self._values


def drawn(grid: VideoGrid, *args: Any, **kwargs: Any) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8))
    viz.draw_grid(figure, grid, *args, **kwargs)
    return figure


def pixels(ax: Any) -> Any:
    (image,) = ax.images
    return np.asarray(image.get_array())


def hatched(ax: Any) -> float:
    """Tokens under hatching."""
    from matplotlib.collections import PolyCollection

    found = [c for c in ax.collections if isinstance(c, PolyCollection) and c.get_hatch()]
    boxes = [path.get_extents().extents for c in found for path in c.get_paths()]
    return float(sum((x1 - x0) * (y1 - y0) for x0, y0, x1, y1 in boxes))


def numbers(ax: Any) -> list[str]:
    return sorted((text.get_text() for text in ax.texts), key=int)


def test_tiles_of_a_frame_with_ragged_edges() -> None:
    # 4 x 6 tokens in tiles of 4 x 4: the second has 4 x 2.
    grid = VideoGrid(1, 4, 6)
    blocks = grid.tile_blocks((1, 4, 4))
    figure = drawn(grid, blocks.order, block=blocks.sizes)
    (ax,) = figure.axes
    colour = pixels(ax)
    assert (colour[:, :4] == colour[0, 0]).all()
    assert (colour[:, 4:] == colour[0, 5]).all()
    assert (colour[0, 0] != colour[0, 5]).any()
    assert hatched(ax) == 4 * 2
    assert numbers(ax) == ["0", "1"]
    assert figure.get_suptitle() == "1x4x6 tokens in 2 blocks of up to 16, 1 of them short"


def test_a_block_has_one_colour_in_all_frames() -> None:
    grid = VideoGrid(4, 4, 4)
    blocks = grid.tile_blocks((2, 2, 2))
    frames = [pixels(ax) for ax in drawn(grid, blocks.order, block=blocks.sizes).axes]
    assert (frames[0] == frames[1]).all()
    assert (frames[2] == frames[3]).all()
    assert (frames[1] != frames[2]).any(axis=2).all()


@pytest.mark.parametrize("size", [3, 8, 16])
@pytest.mark.parametrize("name", ["raster", "tiles", "temporal", "hilbert"])
def test_blocks_that_touch_differ(name: str, size: int) -> None:
    grid = VideoGrid(3, 6, 7)
    order = {
        "raster": lambda: None,
        "tiles": lambda: grid.tile_order((2, 2, 4)),
        "temporal": grid.temporal_order,
        "hilbert": lambda: grid.curve_order() if pytest.importorskip("hilbert") else None,
    }[name]()
    places = np.argsort(np.arange(grid.tokens) if order is None else order)
    block = (places // size).reshape(3, 6, 7)
    colour = np.stack([pixels(ax) for ax in drawn(grid, order, block=size).axes])
    for axis in range(3):
        a, b = (np.moveaxis(block, axis, 0)[part] for part in (slice(1, None), slice(-1)))
        c, d = (np.moveaxis(colour, axis, 0)[part] for part in (slice(1, None), slice(-1)))
        assert ((a == b) == (c == d).all(axis=-1)).all()


def test_the_path_is_solid_to_neighbours_and_dashed_over_jumps() -> None:
    from matplotlib.collections import LineCollection

    (ax,) = drawn(VideoGrid(1, 2, 3), block=6).axes
    lines = [c for c in ax.collections if isinstance(c, LineCollection)][1:]
    near, far = ([path.vertices.tolist() for path in c.get_paths()] for c in lines)
    assert near == [
        [[0.5, 0.5], [1.5, 0.5]],
        [[1.5, 0.5], [2.5, 0.5]],
        [[0.5, 1.5], [1.5, 1.5]],
        [[1.5, 1.5], [2.5, 1.5]],
    ]
    assert far == [[[2.5, 0.5], [0.5, 1.5]]]
    marks = [(line.get_marker(), line.get_xydata().tolist()) for line in ax.lines]
    assert marks == [(">", []), ("o", [[0.5, 0.5]]), ("s", [[2.5, 1.5]])]


def test_temporal_tokens_go_on_in_another_frame() -> None:
    grid = VideoGrid(3, 1, 3)
    first, second, third = drawn(grid, grid.temporal_order(), block=3).axes
    leaving = [ax.lines[0].get_xydata().tolist() for ax in (first, second, third)]
    # Frame 0 is whole; in frame 1 each token is followed by that of frame 2, and there by the next
    # place. The last of a frame has a mark of its own.
    assert leaving == [[], [[0.5, 0.5], [1.5, 0.5]], [[0.5, 0.5], [1.5, 0.5]]]
    assert [ax.lines[2].get_xydata().tolist() for ax in (first, second)] == [[[2.5, 0.5]]] * 2


@pytest.mark.parametrize("first", [False, True])
def test_text_has_axes_of_its_own(first: bool) -> None:
    grid = VideoGrid(1, 2, 4, text_tokens=6, text_first=first)
    axes = drawn(grid, block=4).axes
    titles = [ax.get_title() for ax in axes]
    name = f"text, {'before' if first else 'behind'} the video"
    assert titles == ([name, "frame 0"] if first else ["frame 0", name])
    text = axes[titles.index(name)]
    # 6 tokens in lines of 4: the last two places are white.
    assert pixels(text).shape == (2, 4, 3)
    assert (pixels(text)[1, 2:] == 1).all()
    # The text's second block holds its last 2 tokens; before the video, also 2 of the video.
    assert hatched(text) == (0 if first else 2)


def test_many_frames_are_the_first_five_and_the_last() -> None:
    figure = drawn(VideoGrid(9, 2, 2), block=4)
    assert [ax.get_title() for ax in figure.axes] == [f"frame {t}" for t in (0, 1, 2, 3, 4, 8)]
    assert figure.get_suptitle().endswith("; 6 of 9 frames")
    chosen = drawn(VideoGrid(9, 2, 2), block=4, frames=[7, 2])
    assert [ax.get_title() for ax in chosen.axes] == ["frame 7", "frame 2"]


def test_large_frames_have_no_path() -> None:
    (ax,) = drawn(VideoGrid(1, 20, 21), block=64).axes
    assert not ax.lines
    words = [text.get_text() for text in ax.figure.legends[0].get_texts()]
    assert words == ["blocks, with their numbers", "short block"]


def test_the_order_may_be_on_a_gpu() -> None:
    grid = VideoGrid(1, 2, 4)
    figure = drawn(grid, FakeCupy(grid.tile_order((1, 2, 2))), block=FakeCupy([4, 4]))
    assert (pixels(figure.axes[0])[:, :2] == pixels(figure.axes[0])[0, 0]).all()


def test_more_blocks_than_colours_touch() -> None:
    """Where no colour is free a block still gets one."""
    grid = VideoGrid(1, 2, 30)
    order = np.random.default_rng(0).permutation(60)
    colours = grid_picture._colours(grid, np.argsort(order) // 3, 20)
    assert set(colours) <= set(range(len(grid_picture._COLOURS)))


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"order": np.arange(9)}, ValueError, r"`order`: expected shape \(8,\), .* grid 1x2x4"),
        ({"order": np.zeros(8, int)}, ValueError, "`order`: expected each of 0 to 7 once"),
        ({"order": np.zeros(8)}, TypeError, "`order`: expected integers"),
        ({"block": 0}, ValueError, "`block`: expected at least 1 token"),
        ({"block": [4, 5]}, ValueError, "`block`: expected sizes that sum to 8 tokens"),
        ({"block": [[4, 4]]}, TypeError, "`block`: expected an int"),
        ({"frames": [1]}, ValueError, "`frames`: expected some of 0 to 0"),
        ({"frames": []}, ValueError, "`frames`: expected some of 0 to 0"),
        ({"frames": [0.5]}, TypeError, "`frames`: expected integers"),
    ],
)
def test_wrong_arguments(given: dict[str, Any], error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        drawn(VideoGrid(1, 2, 4), **given)
