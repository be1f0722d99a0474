"""What the pictures show: boxes, colours, hatching and words, on masks small enough to list."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera_cupy import viz
from tessera_cupy.mapping import Mapping, issued_pairs, map_mask, useful_fraction
from tessera_cupy.masks import BlockMask, KeySlices
from tessera_cupy.regimes import PlanSpec
from tessera_cupy.viz import overview

pytest.importorskip("matplotlib")

# Row 0 keeps blocks 0, 2 and 3; row 1 keeps 2.
MASK = BlockMask.from_dense([[1, 0, 1, 1], [0, 0, 1, 0]], (16, 16))

Box = tuple[float, float, float, float]


@pytest.fixture
def ax() -> Iterator[Any]:
    from matplotlib.figure import Figure

    return Figure(figsize=(8, 4)).subplots()


def boxes(ax: Any, *, hatched: bool) -> dict[Box, str]:
    """The drawn rectangles (x0, y0, x1, y1) with their face colours."""
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_hex

    found = {}
    for collection in ax.collections:
        faces = collection.get_facecolor()
        if (
            not isinstance(collection, PolyCollection)
            or bool(collection.get_hatch()) != hatched
            or not len(faces)
        ):
            continue
        for i, path in enumerate(collection.get_paths()):
            x, y = path.vertices.T
            box = (x.min(), y.min(), x.max(), y.max())
            found[tuple(map(float, box))] = to_hex(faces[i % len(faces)]).upper()
    return found


def labels(ax: Any) -> dict[tuple[float, float], str]:
    return {tuple(map(float, t.get_position())): t.get_text() for t in ax.texts}


def test_packed_tiles_in_the_mask(ax: Any) -> None:
    viz.draw_tiles(ax, map_mask(MASK, Mapping("retain", "pack"), 16, 32))
    first, second = viz.STEP_COLOURS[:2]
    assert boxes(ax, hatched=False) == {
        (0, 0, 16, 16): first,
        (32, 0, 48, 16): first,
        (48, 0, 64, 16): second,
        (32, 16, 48, 32): first,
    }
    assert boxes(ax, hatched=True) == {}
    assert labels(ax) == {(8, 8): "0", (40, 8): "0", (56, 8): "1", (40, 24): "0"}


def test_packed_tiles_as_steps(ax: Any) -> None:
    viz.draw_steps(ax, map_mask(MASK, Mapping("retain", "pack"), 16, 32))
    first, second = viz.STEP_COLOURS[:2]
    assert boxes(ax, hatched=False) == {
        (0, 0, 16, 16): first,
        (16, 0, 32, 16): first,
        (32, 0, 48, 16): second,
        (0, 16, 16, 32): first,
    }
    # Whole steps are hatched underneath: what no colour covers is work on nothing.
    assert set(boxes(ax, hatched=True)) == {(0, 0, 32, 16), (32, 0, 64, 16), (0, 16, 32, 32)}
    assert ax.get_ylim() == (32, 0)


def test_merged_neighbours_are_hatched_where_the_mask_is_off(ax: Any) -> None:
    viz.draw_tiles(ax, map_mask(MASK, Mapping("retain", "merge"), 16, 32))
    assert set(boxes(ax, hatched=True)) == {(16, 0, 32, 16), (48, 16, 64, 32)}
    assert set(boxes(ax, hatched=False)) == {
        (0, 0, 16, 16),
        (32, 0, 48, 16),
        (48, 0, 64, 16),
        (32, 16, 48, 32),
    }


def test_merged_rows_are_hatched_where_one_of_them_is_no_member(ax: Any) -> None:
    viz.draw_tiles(ax, map_mask(MASK, Mapping("merge", "pack"), 32, 32))
    first, second = viz.STEP_COLOURS[:2]
    assert set(boxes(ax, hatched=True)) == {(0, 16, 16, 32), (48, 16, 64, 32)}
    assert boxes(ax, hatched=False) == {
        (0, 0, 16, 16): first,
        (32, 0, 48, 32): first,
        (48, 0, 64, 16): second,
    }


def test_a_half_that_skips_a_step_is_left_white(ax: Any) -> None:
    tiles = map_mask(MASK, Mapping("share", "pack"), 32, 32)
    first, second = viz.STEP_COLOURS[:2]
    viz.draw_tiles(ax, tiles, skips=True)
    assert boxes(ax, hatched=True) == {}
    assert boxes(ax, hatched=False) == {
        (32, 0, 48, 32): first,
        (0, 0, 16, 16): second,
        (48, 0, 64, 16): second,
    }


def test_skipped_halves_as_steps(ax: Any) -> None:
    tiles = map_mask(MASK, Mapping("share", "pack"), 32, 32)
    viz.draw_steps(ax, tiles, skips=True)
    # Step 0 is for both rows, with an empty second column; step 1 for the first row alone.
    assert set(boxes(ax, hatched=True)) == {(0, 0, 32, 32), (32, 0, 64, 16)}
    assert set(boxes(ax, hatched=False)) == {(0, 0, 16, 32), (32, 0, 48, 16), (48, 0, 64, 16)}


def test_a_lower_half_alone_and_rows_inside_a_half(ax: Any) -> None:
    # Rows of 8: the first half of a tile of 32 is query blocks 0 and 1, of 16 tokens in all.
    sizes = [8, 8, 8, 8]
    mask = BlockMask.from_dense(
        [[0, 1], [0, 0], [1, 0], [1, 0]], (16, 16), q_block_sizes=sizes, kv_block_sizes=[16, 16]
    )
    tiles = map_mask(mask, Mapping("share", "pack"), 32, 16)
    viz.draw_tiles(ax, tiles, skips=True)
    assert set(boxes(ax, hatched=True)) == {(16, 8, 32, 16)}
    assert set(boxes(ax, hatched=False)) == {(16, 0, 32, 8), (0, 16, 16, 32)}


# Rows 0 and 2 have one list, 1 and 3 another, and row 4 makes a tile alone.
ALIKE = BlockMask.from_dense([[1, 0, 1], [0, 1, 0], [1, 0, 1], [0, 1, 0], [1, 0, 0]], (16, 16))


def test_regrouped_rows_are_drawn_where_they_are_in_the_mask(ax: Any) -> None:
    viz.draw_tiles(ax, map_mask(ALIKE, Mapping("regroup", "pack"), 32, 32), skips=True)
    assert set(boxes(ax, hatched=False)) == {
        (0, 0, 16, 16),
        (32, 0, 48, 16),
        (16, 16, 32, 32),
        (0, 32, 16, 48),
        (32, 32, 48, 48),
        (16, 48, 32, 64),
        (0, 64, 16, 80),
    }
    assert boxes(ax, hatched=True) == {}
    edges = {float(line.get_ydata()[0]) for line in ax.lines}
    assert edges == {0, 16, 32, 48, 64, 80}
    assert ax.get_ylim() == (80, 0)


def test_regrouped_rows_are_together_in_a_step(ax: Any) -> None:
    viz.draw_steps(ax, map_mask(ALIKE, Mapping("regroup", "pack"), 32, 32), skips=True)
    assert set(boxes(ax, hatched=False)) == {
        (0, 0, 16, 32),
        (16, 0, 32, 32),
        (0, 32, 16, 64),
        (0, 64, 16, 80),
    }
    assert set(boxes(ax, hatched=True)) == {(0, 0, 32, 32), (0, 32, 32, 64), (0, 64, 32, 80)}


def test_a_window_has_the_regrouped_tiles_with_a_row_in_it(ax: Any) -> None:
    tiles = map_mask(ALIKE, Mapping("regroup", "pack"), 32, 32)
    window = viz.Window(32, 48, 0, 48)
    viz.draw_steps(ax, tiles, window=window, skips=True)
    assert set(boxes(ax, hatched=False)) == {(0, 0, 16, 32), (16, 0, 32, 32)}
    other = ax.figure.add_subplot()
    viz.draw_tiles(other, tiles, window=window, skips=True)
    assert set(boxes(other, hatched=False)) == {(0, 32, 16, 48), (32, 32, 48, 48)}


def test_tiles_of_several_regrouped_rows_and_rows_of_two_units(ax: Any) -> None:
    # Rows of 32 tokens: 0 and 3 are alike, 1 and 2; the last has 20 tokens and a tile alone.
    mask = BlockMask.from_dense([[1, 0], [0, 1], [0, 1], [1, 0], [1, 1]], (32, 32), (148, 64))
    viz.draw_tiles(ax, map_mask(mask, Mapping("regroup", "pack"), 64, 32), skips=True)
    assert set(boxes(ax, hatched=False)) == {
        (0, 0, 32, 32),
        (32, 32, 64, 96),
        (0, 96, 32, 128),
        (0, 128, 32, 148),
        (32, 128, 64, 148),
    }
    assert boxes(ax, hatched=True) == {}
    assert ax.get_ylim() == (148, 0)


def test_a_page_says_where_the_rows_of_regrouped_tiles_begin() -> None:
    figure = viz.mask_to_tiles(ALIKE, window=viz.Window(0, 32, 0, 48))
    (at,) = [i for i, a in enumerate(figure.axes) if a.get_title().startswith("regroup Q")]
    in_mask, as_steps = figure.axes[at : at + 2]
    assert [text.get_text() for text in in_mask.get_yticklabels()] == ["0", "16"]
    assert [text.get_text() for text in as_steps.get_yticklabels()] == ["0", "32", "16", "48"]
    assert as_steps.get_yticks().tolist() == [8, 24, 40, 56]
    # Of tiles of neighbours only the first row of each is named.
    assert [text.get_text() for text in figure.axes[at - 1].get_yticklabels()] == ["0"]


def test_a_window_leaves_out_other_tiles_and_steps(ax: Any) -> None:
    tiles = map_mask(MASK, Mapping("retain", "retain"), 16, 16)
    window = viz.Window(0, 16, 32, 64)
    viz.draw_steps(ax, tiles, window=window)
    assert set(boxes(ax, hatched=False)) == {(0, 0, 16, 16), (16, 0, 32, 16)}
    assert sorted(labels(ax).values()) == ["1", "2"]


@pytest.mark.parametrize(("kv_side", "steps"), [("merge", 1), ("retain", 0)])
def test_a_step_belongs_to_a_window_by_what_it_loads(ax: Any, kv_side: str, steps: int) -> None:
    # Nothing of row 0 is active in block 1. Merge loads it with block 0; retain leaves the other
    # half of its step empty.
    viz.draw_steps(
        ax, map_mask(MASK, Mapping("retain", kv_side), 16, 32), window=viz.Window(0, 16, 16, 32)
    )
    assert len(boxes(ax, hatched=True)) == steps


def test_a_short_last_block_is_drawn_short(ax: Any) -> None:
    mask = BlockMask.from_dense(np.ones((2, 2), dtype=bool), (16, 16), (25, 20))
    viz.draw_tiles(ax, map_mask(mask, Mapping("retain", "retain"), 16, 16))
    assert set(boxes(ax, hatched=False)) == {
        (0, 0, 16, 16),
        (16, 0, 20, 16),
        (0, 16, 16, 25),
        (16, 16, 20, 25),
    }


def area(found: dict[Box, str]) -> float:
    return sum((x1 - x0) * (y1 - y0) for x0, y0, x1, y1 in found)


def diagonal(tokens: int, reach: int) -> BlockMask:
    """Queries and keys at most ``reach`` apart, so that blocks at the border are partly kept."""
    at = np.arange(tokens)
    return BlockMask.from_tokens(np.abs(at[:, None] - at) <= reach, (16, 16))


def test_token_bits_are_hatched_where_they_are_off(ax: Any) -> None:
    # Each query attends to itself and the next key, but the last, which has none.
    token = np.eye(16, dtype=bool) | np.eye(16, k=1, dtype=bool)
    mask = BlockMask.from_tokens(token, (16, 16))
    viz.draw_tiles(ax, map_mask(mask, Mapping("retain", "pack"), 16, 16))
    filled = set(boxes(ax, hatched=False))
    assert filled == {(0, 0, 1, 1), *((i, i - 1, i + 1, i + 1) for i in range(1, 16))}
    assert area(boxes(ax, hatched=True)) == 16 * 16 - 31


MASKS = {
    "full blocks": MASK,
    "token bits": diagonal(75, 21),
    "ragged": BlockMask.from_dense(
        [[1, 0, 1], [1, 1, 0], [0, 1, 1]],
        (16, 16),
        q_block_sizes=[10, 16, 14],
        kv_block_sizes=[7, 24, 12],
    ),
    "slices": KeySlices.from_groups(
        np.random.default_rng(2).random((3, 90)) < 0.4, 64, (150, 90)
    ).to_block_mask(),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_coloured_and_hatched_areas_are_those_of_the_work(mask: BlockMask) -> None:
    from matplotlib.figure import Figure

    for way in viz.tile_each_way(mask):
        in_mask, as_steps = Figure().subplots(2)
        viz.draw_tiles(in_mask, way.tiles, skips=way.skips)
        viz.draw_steps(as_steps, way.tiles, skips=way.skips)
        assert area(boxes(in_mask, hatched=False)) == mask.active_pairs(), way
        assert area(boxes(as_steps, hatched=False)) == mask.active_pairs(), way
        part = way.tiles.shape.q // 2 if way.skips else None
        # Steps are hatched whole underneath.
        assert area(boxes(as_steps, hatched=True)) == issued_pairs(way.tiles, part), way


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_an_image_of_all_tiles_has_the_same_areas(
    mask: BlockMask, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure

    monkeypatch.setattr(overview, "MOST_FRAGMENTS", 0)
    white, active, vain = map(np.array, map(to_rgb, ("#FFFFFF", overview._ACTIVE, "#B5B5B5")))
    basis = np.stack([active - white, vain - white], axis=1)
    for way in viz.tile_each_way(mask):
        in_mask, as_steps = Figure().subplots(2)
        viz.draw_tiles(in_mask, way.tiles, skips=way.skips)
        viz.draw_steps(as_steps, way.tiles, skips=way.skips)
        part = way.tiles.shape.q // 2 if way.skips else None
        wasted = issued_pairs(way.tiles, part) - mask.active_pairs()
        for ax in (in_mask, as_steps):
            (image,) = ax.images
            left, right, bottom, top = image.get_extent()
            pixels = np.asarray(image.get_array(), float)
            spot = (right - left) * (bottom - top) / pixels[:, :, 0].size
            shares, *_ = np.linalg.lstsq(basis, (pixels - white).reshape(-1, 3).T, rcond=None)
            found = shares.sum(axis=1) * spot
            assert found[0] == pytest.approx(mask.active_pairs(), rel=1e-3), way
            if ax is as_steps:
                assert found[1] == pytest.approx(wasted, rel=1e-3, abs=1), way
            words = [text.get_text() for text in ax.get_legend().get_texts()]
            assert words == ["active entries", "work on inactive entries", "no work"]


def test_a_head_of_many_fragments_is_an_image_unless_there_is_a_window(ax: Any) -> None:
    mask = BlockMask.from_dense(np.ones((101, 100), bool), (16, 16))
    tiles = map_mask(mask, Mapping("retain", "retain"), 16, 16)
    viz.draw_tiles(ax, tiles)
    assert len(ax.images) == 1
    assert not ax.collections
    viz.draw_tiles(ax.figure.add_subplot(), tiles, window=viz.Window(0, 32, 0, 32))
    assert len(ax.figure.axes[1].images) == 0


def test_slices_are_gathered_too() -> None:
    slices = KeySlices.from_groups(np.eye(4, 70, dtype=bool), 64)
    names = [way.mapping.name for way in viz.tile_each_way(slices)]
    assert names[-2:] == ["retain-gather", "share-gather"]
    figure = viz.mask_to_tiles(slices)
    assert any("share Q, gather KV" in ax.get_title() for ax in figure.axes)


def test_another_head_is_another_picture(ax: Any) -> None:
    both = np.zeros((2, 1, 3), dtype=bool)
    both[0, 0, 0] = both[1, 0, 2] = True
    mask = BlockMask.from_dense(both, (16, 16))
    viz.draw_tiles(ax, map_mask(mask, Mapping("retain", "retain"), 16, 16), head=1)
    assert set(boxes(ax, hatched=False)) == {(32, 0, 48, 16)}


def test_useful_fractions_of_each_way() -> None:
    ways = viz.tile_each_way(MASK)
    assert [(w.mapping.name, w.tiles.shape.q, w.tiles.shape.kv) for w in ways] == [
        ("retain-retain", 16, 16),
        ("retain-retain", 16, 32),
        ("retain-merge", 16, 32),
        ("retain-pack", 16, 32),
        ("merge-pack", 32, 32),
        ("share-pack", 32, 32),
        ("regroup-pack", 32, 32),
        ("split-split", 8, 8),
    ]
    # 4 active blocks; steps of one block: 4, of two blocks: 4, 3 and 3, of four blocks: 2; under
    # share and regroup three halves of 2 blocks.
    assert [w.useful for w in ways] == [1, 4 / 8, 4 / 6, 4 / 6, 4 / 8, 4 / 6, 4 / 6, 1]
    assert [w.skips for w in ways] == [False] * 5 + [True, True, False]


def test_the_plans_way_is_marked() -> None:
    share = PlanSpec.parse("attend_wgmma/q32k32/share-pack/longest")
    marked = [way.mapping.name for way in viz.tile_each_way(MASK, share) if way.chosen]
    assert marked == ["share-pack"]
    assert len(viz.tile_each_way(MASK, share)) == len(viz.tile_each_way(MASK))
    assert not any(way.chosen for way in viz.tile_each_way(MASK))


def test_a_plans_way_of_its_own_comes_last() -> None:
    other = PlanSpec.parse("attend_mma/q64k64/merge-pack/longest")
    *rest, own = viz.tile_each_way(MASK, other)
    assert (own.mapping.name, own.tiles.shape.q, own.tiles.shape.kv) == ("merge-pack", 64, 64)
    assert own.chosen
    assert not any(way.chosen for way in rest)


def test_ways_that_a_block_size_does_not_allow_are_left_out() -> None:
    mask = BlockMask.from_dense(np.eye(2, dtype=bool), (200, 24))
    names = [way.mapping.name for way in viz.tile_each_way(mask)]
    assert names == ["retain-retain", "retain-retain", "retain-merge", "retain-pack"]


def test_ragged_blocks_take_tiles_that_hold_the_largest() -> None:
    mask = BlockMask.from_dense(
        [[1, 0], [1, 1]], (16, 16), q_block_sizes=[20, 12], kv_block_sizes=[24, 8]
    )
    ways = viz.tile_each_way(mask)
    assert [(w.mapping.name, w.tiles.shape.q, w.tiles.shape.kv) for w in ways] == [
        ("retain-retain", 24, 24),
        ("retain-retain", 24, 48),
        ("retain-pack", 24, 48),
        ("share-pack", 48, 48),
    ]


def test_halves_of_ragged_blocks_lie_apart_in_the_tile(ax: Any) -> None:
    mask = BlockMask.from_dense([[1, 0], [1, 1]], (16, 16), q_block_sizes=[10, 16])
    tiles = map_mask(mask, Mapping("share", "pack"), 32, 32)
    viz.draw_tiles(ax, tiles, skips=True)
    # Both blocks attend to the first 16 keys, the second alone to the others.
    work = {(0, 0, 16, 10), (0, 10, 16, 26), (16, 10, 32, 26)}
    assert set(boxes(ax, hatched=False)) == work
    assert set(boxes(ax, hatched=True)) == {(16, 0, 32, 10)}
    assert useful_fraction(tiles, mask, 16) == mask.active_pairs() / (2 * 16 * 32)


def test_the_default_window_starts_at_even_blocks_and_stays_inside() -> None:
    mask = BlockMask.from_dense(np.eye(101, dtype=bool), (64, 64), (6410, 6410))
    window = viz.diagonal_window(mask)
    assert (window.q0 // 64 % 2, window.kv0 // 64 % 2) == (0, 0)
    assert (window.q1 - window.q0, window.kv1 - window.kv0) == (8 * 64, 16 * 64)
    assert window.q0 < 3205 < window.q1
    assert window.kv0 < 3205 < window.kv1
    small = BlockMask.from_dense(np.eye(3, dtype=bool), (64, 64), (150, 150))
    assert viz.diagonal_window(small) == viz.Window(0, 150, 0, 150)


def test_the_page_is_written_with_every_way_in_it(tmp_path: Path) -> None:
    dense = np.random.default_rng(0).random((1, 2, 6, 6)) < 0.4
    mask = BlockMask.from_dense(dense, (64, 64), (370, 370))
    plan = PlanSpec.parse("attend_wgmma/q128k192/share-pack/longest")
    figure = viz.mask_to_tiles(mask, head=1, plan=plan, title="A title")
    figure.savefig(tmp_path / "page.png", dpi=40)
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
    assert figure.get_suptitle() == "A title"
    titles = " ".join(a.get_title() for a in figure.axes)
    for way in viz.tile_each_way(mask):
        q, kv = way.tiles.shape.q, way.tiles.shape.kv
        assert f"{way.mapping.q} Q, {way.mapping.kv} KV" in titles
        assert f"{q} x {kv}\nuseful {way.useful:.2f}" in titles
    (chosen,) = [a.get_title() for a in figure.axes if "the plan's choice" in a.get_title()]
    assert "share Q, pack KV" in chosen
    legends = [
        text.get_text()
        for a in figure.axes
        if a.get_legend()
        for text in a.get_legend().get_texts()
    ]
    assert "work on inactive entries" in legends
    assert "half of a step that is skipped" in legends
    assert "part drawn as tiles" in legends
    # Nothing that is drawn sticks out of the page.
    page = figure.bbox
    for a in figure.axes:
        box = a.get_tightbbox()
        assert box is None or (page.x0 <= box.x0 and box.x1 <= page.x1 and box.y1 <= page.y1)


def test_tiles_of_a_head_that_is_not_there_are_refused(ax: Any) -> None:
    tiles = map_mask(MASK, Mapping("retain", "retain"), 16, 16)
    for draw in (viz.draw_tiles, viz.draw_steps):
        with pytest.raises(ValueError, match="`head`: expected a mask head from 0 to 0"):
            draw(ax, tiles, head=1)


def test_a_window_beyond_is_refused(ax: Any) -> None:
    tiles = map_mask(MASK, Mapping("retain", "retain"), 16, 16)
    for draw in (viz.draw_tiles, viz.draw_steps):
        with pytest.raises(ValueError, match="`window`: expected a window with some of the 32 q"):
            draw(ax, tiles, window=viz.Window(32, 48, 0, 16))
    with pytest.raises(ValueError, match="`window`: expected a part of 32 queries by 64 keys"):
        viz.mask_to_tiles(MASK, window=viz.Window(0, 16, 0, 65))


@pytest.mark.parametrize("edges", [(0, 0, 0, 1), (3, 2, 0, 1), (-1, 2, 0, 1), (0, 1, 5, 5)])
def test_a_window_holds_tokens(edges: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="`window`: expected tokens from 0 on"):
        viz.Window(*edges)


def test_steps_say_which_key_blocks_they_hold(ax: Any) -> None:
    mask = BlockMask.from_dense([[1, 0, 1, 1]], (16, 16))
    viz.draw_steps(ax, map_mask(mask, Mapping("retain", "pack"), 16, 32), key_block=16)
    assert sorted(text.get_text() for text in ax.texts) == ["0", "2", "3"]
    ax.clear()
    viz.draw_steps(ax, map_mask(mask, Mapping("retain", "pack"), 16, 32), key_block=8)
    assert sorted(text.get_text() for text in ax.texts) == ["0-1", "4-5", "6-7"]
    with pytest.raises(ValueError, match="`key_block`: expected at least 1 key, got 0"):
        viz.draw_steps(ax, map_mask(mask, Mapping("retain", "pack"), 16, 32), key_block=0)
