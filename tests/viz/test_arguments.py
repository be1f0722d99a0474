"""Pictures on plain figures: legends fit, and what is no axes or no mask is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tessera_cupy import ArraySpec, errors, make_plan, viz
from tessera_cupy.mapping.gather import map_slices
from tessera_cupy.masks import BlockMask, KeySlices
from tessera_cupy.regimes import load_for
from tessera_cupy.video import VideoGrid
from tessera_cupy.viz import arguments, style

pytest.importorskip("matplotlib")

MASK = BlockMask.from_dense(np.tri(16, dtype=bool)[None].repeat(12, axis=0), (64, 64))
PLAN = make_plan(MASK, ArraySpec((1, 12, 1024, 128)), arch="sm_90a")
SLICES = KeySlices.from_groups(np.arange(200)[None] % [[3], [5]] == 0, 64)
GATHERED = map_slices(SLICES, "retain", 64, 64)

ON_AXES: dict[str, Callable[[Any], None]] = {
    "mask": lambda ax: viz.draw_mask(ax, MASK, window=viz.diagonal_window(MASK)),
    "slices": lambda ax: viz.draw_slices(ax, SLICES),
    "gather": lambda ax: viz.draw_gather(ax, GATHERED, 0, steps=1),
    "columns": lambda ax: viz.draw_columns(ax, GATHERED, 0),
    "table": lambda ax: viz.draw_table(ax, load_for("sm90"), key=6),
    "timeline": lambda ax: viz.draw_timeline(ax, PLAN),
}
ON_FIGURES: dict[str, Callable[[Any], None]] = {
    "heads": lambda figure: viz.draw_heads(figure, MASK),
    "grid": lambda figure: viz.draw_grid(figure, VideoGrid(4, 6, 8)),
}


def figure() -> Any:
    """One as pyplot makes it by default."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(6.4, 4.8), dpi=100)
    FigureCanvasAgg(made)
    return made


def assert_legends_fit(drawn: Any) -> None:
    drawn.canvas.draw()
    legends = [*drawn.legends, *(ax.get_legend() for ax in drawn.axes if ax.get_legend())]
    assert legends
    for legend in legends:
        box = legend.get_window_extent()
        assert min(box.x0, box.y0) >= 0
        assert box.x1 <= drawn.bbox.width
        assert box.y1 <= drawn.bbox.height


@pytest.mark.parametrize("name", ON_AXES)
def test_legends_fit_a_plain_figure(name: str) -> None:
    drawn = figure()
    ON_AXES[name](drawn.subplots())
    assert_legends_fit(drawn)


@pytest.mark.parametrize("name", ON_FIGURES)
def test_legends_of_several_axes_fit(name: str) -> None:
    drawn = figure()
    ON_FIGURES[name](drawn)
    assert_legends_fit(drawn)


def test_a_layout_and_axes_of_the_caller_s_own_are_kept() -> None:
    tight, by_hand = figure(), figure()
    tight.set_layout_engine("tight")
    engine = tight.get_layout_engine()
    viz.draw_mask(tight.subplots(), MASK)
    viz.draw_mask(by_hand.add_axes((0.1, 0.3, 0.8, 0.6)), MASK)
    assert tight.get_layout_engine() is engine
    assert by_hand.get_layout_engine() is None


def test_a_narrow_figure_has_fewer_columns() -> None:
    made = figure()  # 461 points; a column of 20 letters takes 44 + 20 x 5.6 = 156
    assert style.columns_that_fit(made, ["x" * 20] * 4, 4) == 2
    assert style.columns_that_fit(made, ["x"] * 4, 4) == 4
    assert style.columns_that_fit(made, ["x" * 90] * 2, 4) == 1


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda ax: viz.draw_mask(MASK, ax), "`ax`: expected matplotlib's Axes, got BlockMask"),
        (lambda ax: viz.draw_mask(ax, np.ones((2, 2))), "`mask`: expected BlockMask or KeySlices"),
        (lambda ax: viz.draw_tiles(ax, PLAN), "`tiles`: expected Tiles, got Plan"),
        (lambda ax: viz.draw_steps(PLAN.tiles(), ax), "`ax`: .* got Tiles"),
        (lambda ax: viz.draw_tile_key(None), "`ax`: .* got NoneType"),
        (lambda ax: viz.draw_timeline(ax, MASK), "`plan`: expected Plan, got BlockMask"),
        (lambda ax: viz.draw_table(ax, "sm90", key=0), "`table`: expected Table, got str"),
        (lambda ax: viz.draw_slices(ax, MASK), "`slices`: expected KeySlices, got BlockMask"),
        (lambda ax: viz.draw_columns(ax, MASK, 0), "`tiles`: expected Tiles, got BlockMask"),
        (lambda ax: viz.draw_profile(ax, 3), "`profile`: expected Profile, got int"),
        (lambda ax: viz.draw_heads(ax, MASK), "`figure`: expected .*Figure or SubFigure, got Axes"),
        (lambda ax: viz.draw_heads(ax.figure, 3), "`mask`: .* got int"),
        (lambda ax: viz.draw_grid(ax.figure, (4, 6, 8)), "`grid`: expected VideoGrid, got tuple"),
        (lambda ax: viz.mask_to_tiles([[1]]), "`mask`: .* got list"),
        (lambda ax: viz.tile_each_way([[1]]), "`mask`: .* got list"),
    ],
)
def test_what_cannot_be_drawn_is_refused(call: Callable[[Any], object], said: str) -> None:
    with pytest.raises(TypeError, match=f"{said}.* Fix: "):
        call(figure().subplots())


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "find_spec", lambda name: None)
    for call in (lambda: viz.mask_to_tiles(MASK), lambda: viz.draw_mask(None, MASK)):  # type: ignore[arg-type]
        with pytest.raises(errors.MissingExtraError, match=r"matplotlib \(the extra `demo`"):
            call()
