"""The picture of ranks: bars where the prediction has them."""

from __future__ import annotations

import numpy as np
import pytest

from tessera_cupy import ArraySpec, BlockMask
from tessera_cupy.parallel import predict
from tessera_cupy.viz import draw_parallel

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

SPEC = ArraySpec((1, 3, 2048, 128))
MASK = BlockMask.from_dense(np.ones((3, 16, 16), bool), (128, 128))


def bars(ax: object, index: int) -> list[list[float]]:
    """Left, right and line of each bar of a collection."""
    paths = ax.collections[index].get_paths()  # type: ignore[attr-defined]
    return [[*path.vertices[:2, 0], path.vertices[0, 1]] for path in paths]


def test_bars_are_the_prediction_s() -> None:
    found = predict(MASK, SPEC, ranks=2, scheme="ulysses")
    one = found.best
    ax = Figure().subplots()
    draw_parallel(ax, found)
    half = one.swap_ms / 2
    assert bars(ax, 0) == [[0, pytest.approx(half), rank] for rank in (0, 1)]
    for rank, (left, right, line) in enumerate(bars(ax, 1)):
        assert (left, right, line) == pytest.approx((half, half + one.compute_ms[rank], rank))
    assert bars(ax, 2) == [[pytest.approx(one.ms - half), pytest.approx(one.ms), r] for r in (0, 1)]
    # The rank with one head of three waits for the other.
    assert [line for _, _, line in bars(ax, 3)] == [1]
    assert ax.get_title().startswith("ulysses on 2 H200: ")
    assert "busiest / mean work 1.33" in ax.get_title()
    assert ax.get_xlim() == (0, one.ms)


def test_a_ring_says_where_it_waits() -> None:
    found = predict(MASK, SPEC, ranks=2, scheme="ring", per_host=1)
    ax = Figure().subplots()
    draw_parallel(ax, found)
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["computes", "waits for keys", "idle", "an even spread"]


def test_many_ranks_and_no_work_can_be_drawn() -> None:
    empty = BlockMask.from_dense(np.zeros((16, 16), bool), (128, 128))
    for mask, ranks in ((MASK, 256), (empty, 2)):
        figure = Figure()
        draw_parallel(figure.subplots(), predict(mask, SPEC, ranks=ranks, scheme="ring"))
        figure.canvas.draw()
