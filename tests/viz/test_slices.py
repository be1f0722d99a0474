"""Key slices: the map of keys, and where the columns of a tile come from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tessera_cupy import viz
from tessera_cupy.mapping import Mapping, map_mask
from tessera_cupy.mapping.gather import map_slices
from tessera_cupy.masks import KeySlices
from tessera_cupy.viz import slices as picture

pytest.importorskip("matplotlib")

# Both groups keep key 1, the first also 4 and 5, the second 3.
PAIR = KeySlices.from_groups([[0, 1, 0, 0, 1, 1], [0, 1, 0, 1, 0, 0]], 64, (100, 6))


@pytest.fixture
def ax() -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(8, 4)).subplots()


def test_a_column_a_key_and_a_line_a_group(ax: Any) -> None:
    from matplotlib.colors import to_rgb

    viz.draw_slices(ax, PAIR)
    (mesh,) = ax.collections  # the second group is short
    assert mesh.get_coordinates()[:, 0, 1].tolist() == [0, 64, 100]
    kept = np.all(np.isclose(mesh.get_array(), to_rgb("#0072B2")), axis=2)
    assert kept.tolist() == PAIR.to_dense()[0, 0].tolist()
    # (3 x 64 + 2 x 36) of 100 x 6 pairs.
    assert ax.get_title().endswith("2 groups of 64 queries by single keys, density 0.440")


def test_a_window_of_slices(ax: Any) -> None:
    whole = KeySlices.from_groups(np.eye(4, 8, dtype=bool), 16)
    viz.draw_slices(ax, whole, window=viz.Window(16, 48, 1, 4))
    (image,) = ax.images
    blue = np.asarray(image.get_array())[:, :, 0] < 0.5
    # 2 groups and 3 keys, each drawn often.
    assert blue.shape == (512, 513)
    assert blue[::256, ::171].tolist() == [[True, False, False], [False, True, False]]
    assert blue.mean() == pytest.approx(2 / 6)
    assert image.get_extent() == [1, 4, 48, 16]


def test_many_keys_and_groups_mix(ax: Any) -> None:
    dense = np.zeros((1100, 2048), bool)
    dense[:550, ::2] = True
    viz.draw_slices(ax, KeySlices.from_groups(dense, 16))
    (image,) = ax.images
    pixels = np.asarray(image.get_array())
    assert pixels.shape == (1024, 1024, 3)
    skipped, blue = (
        np.array([int(c[i : i + 2], 16) for i in (1, 3, 5)]) / 255 for c in ("#F2F2F2", "#0072B2")
    )
    assert pixels[0, 0] == pytest.approx((skipped + blue) / 2, abs=1e-4)
    assert pixels[-1, -1] == pytest.approx(skipped, abs=1e-4)


def test_columns_by_hand() -> None:
    tiles = map_slices(PAIR, "share", 128, 64)
    columns = viz.columns_of(tiles, 0)
    loaded = columns.kind >= 0
    found = zip(columns.key[loaded].tolist(), columns.kind[loaded].tolist(), strict=True)
    # A step of both, one of the first alone and one of the second alone.
    assert list(found) == [(1, 3), (4, 1), (5, 1), (3, 2)]
    assert len(columns.key) == 3 * 64
    assert columns.gathered[loaded].all()


def test_blocks_load_keys_that_nobody_keeps() -> None:
    mask = KeySlices.from_groups([[1] * 16 + [0, 1] * 8], 64).to_block_mask()
    columns = viz.columns_of(map_mask(mask, Mapping("retain", "pack"), 64, 32), 0)
    assert columns.kind.tolist() == [3] * 16 + [0, 3] * 8
    assert not columns.gathered.any()


def test_lines_lead_from_keys_to_columns(ax: Any) -> None:
    from matplotlib.collections import LineCollection

    tiles = map_slices(PAIR, "share", 128, 64)
    viz.draw_gather(ax, tiles, 0, steps=2)
    lines = next(c for c in ax.collections if isinstance(c, LineCollection))
    ends = [path.vertices.tolist() for path in lines.get_paths()]
    # 128 columns across the 6 keys: column 0 of step 0, columns 0 and 1 of step 1.
    wide = 6 / 128
    assert ends == [
        [[1.5, 1.0], [0.5 * wide, 0.0]],
        [[4.5, 1.0], [64.5 * wide, 0.0]],
        [[5.5, 1.0], [65.5 * wide, 0.0]],
    ]
    on_top, below, how = (np.asarray(image.get_array())[0].tolist() for image in ax.images)
    assert on_top == [0, 3, 0, 2, 1, 1]
    assert [below[0], below[1], below[64], below[65]] == [4, 0, 2, 2]
    assert [how[0], how[1]] == [2, 0]
    assert ax.get_title() == "tile 0: where the columns of 2 of its 3 steps come from"


def test_a_line_a_step(ax: Any) -> None:
    viz.draw_columns(ax, map_slices(PAIR, "share", 128, 64), 0)
    (image,) = ax.images
    values = np.asarray(image.get_array())
    assert values.shape == (3, 64)
    assert values[:, :3].tolist() == [[4, 0, 0], [2, 2, 0], [3, 0, 0]]
    assert ax.get_title() == "tile 0: 3 steps of 64 columns, 4 of 192 hold a kept key"
    words = [text.get_text() for text in ax.get_legend().get_texts()]
    assert words == [*picture._KINDS, "empty column"]


@pytest.mark.parametrize("name", ["draw_gather", "draw_columns"])
def test_a_tile_that_is_not_there_is_refused(ax: Any, name: str) -> None:
    tiles = map_slices(PAIR, "share", 128, 64)
    with pytest.raises(ValueError, match="`tile`: expected from 0 to 0, got 1"):
        getattr(viz, name)(ax, tiles, 1)


@pytest.mark.parametrize("steps", [0, 4])
def test_steps_that_a_tile_has_not_are_refused(ax: Any, steps: int) -> None:
    with pytest.raises(ValueError, match="`steps`: expected from 1 to 3, which tile 0 has"):
        viz.draw_gather(ax, map_slices(PAIR, "share", 128, 64), 0, steps=steps)


@pytest.mark.parametrize("given", [{"head": 1}, {"batch": -1}])
def test_a_head_that_is_not_there_is_refused(ax: Any, given: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"`{next(iter(given))}`: expected from 0 to 0"):
        viz.draw_slices(ax, PAIR, **given)


def test_a_window_beyond_the_slices_is_refused(ax: Any) -> None:
    with pytest.raises(ValueError, match="`window`: expected a part of 100 queries by 6 keys"):
        viz.draw_slices(ax, PAIR, window=viz.Window(0, 100, 0, 7))
