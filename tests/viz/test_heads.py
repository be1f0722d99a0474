"""Density and run coverage of single heads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tessera_cupy import viz
from tessera_cupy.masks import BlockMask, KeySlices

pytest.importorskip("matplotlib")

# Head 0 keeps 3 of 4 blocks, 2 of them in a run; head 1 none; the last key block is short.
MASK = BlockMask.from_dense([[[1, 1], [0, 1]], [[0, 0], [0, 0]]], (16, 16), (32, 24))


def test_figures_by_hand() -> None:
    density, coverage = viz.head_figures(MASK)
    # 16 x 24 and 16 x 8 of 32 x 24 pairs.
    assert density.tolist() == [(16 * 24 + 16 * 8) / (32 * 24), 0.0]
    assert coverage.tolist() == [2 / 3, 0.0]


def test_a_run_ends_with_its_row() -> None:
    mask = BlockMask.from_dense([[[1, 0], [0, 1]], [[0, 1], [1, 1]]], (16, 16))
    assert viz.head_figures(mask).run_coverage.tolist() == [0, 2 / 3]


@pytest.mark.parametrize("seed", range(3))
def test_means_are_those_of_the_mask(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.random((2, 3, 50, 70)) < rng.random((2, 3, 1, 1))
    tokens[:, :, :32, :48] = True
    mask = BlockMask.from_tokens(tokens, (16, 16))
    density, coverage = viz.head_figures(mask)
    assert density == pytest.approx(tokens.mean(axis=(2, 3)).ravel())
    active = mask.row_counts().sum(axis=2).ravel()
    assert (coverage * active).sum() / active.sum() == pytest.approx(mask.run_coverage())


def test_ragged_heads_have_their_own_sizes() -> None:
    sizes = [[[4, 28], [20, 12]]]
    mask = BlockMask.from_dense([[1, 0], [0, 0]], (32, 16), q_block_sizes=sizes)
    assert viz.head_figures(mask).density.tolist() == [4 * 16 / (32 * 32), 20 * 16 / (32 * 32)]


def test_slices_count_runs_of_keys() -> None:
    slices = KeySlices.from_groups([[1, 1, 0, 1, 0]], 16)
    density, coverage = viz.head_figures(slices)
    assert (density.tolist(), coverage.tolist()) == ([3 / 5], [2 / 3])


def test_bars_dots_and_means() -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    viz.draw_heads(figure, MASK)
    upper, lower = figure.axes
    assert [bar.get_height() for bar in upper.patches] == [2 / 3, 0]
    assert lower.collections[0].get_offsets().tolist() == [[0, 2 / 3], [1, 0]]
    assert [float(line.get_ydata()[0]) for ax in (upper, lower) for line in ax.lines] == [1 / 3] * 2
    assert all(line.get_linestyle() == "--" for ax in (upper, lower) for line in ax.lines)
    words: list[Any] = [text.get_text() for text in lower.get_legend().get_texts()]
    assert words == ["run coverage of a head", "mean 0.333"]
    assert (upper.get_ylim()[0], lower.get_ylim()) == (0, (0, 1.05))
    assert lower.get_xlabel() == "head"


def test_parts_of_a_figure_take_it_too() -> None:
    from matplotlib.figure import Figure

    page = Figure()
    left, _ = page.subfigures(1, 2)
    viz.draw_heads(left, MASK)
    assert len(left.axes) == 2
