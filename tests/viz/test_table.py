"""A profile table as a map of buckets."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tessera_cupy import viz
from tessera_cupy.regimes import Table, load_for, load_table
from tessera_cupy.regimes.schema import AXES

pytest.importorskip("matplotlib")

A, B, C = (
    f"attend_mma/{tile}/longest+split"
    for tile in ("q64k64/retain-pack", "q64k64/split-pack", "q128k64/retain-pack")
)
TEXT = f"""
schema: 1
arch: tiny
provenance: default
device: null
catalog: null
raw_data: null
reasons: for tests
base: [{A}, {B}]
keys:
  - match: {{block_q: 64, block_kv: 64}}
    why: four buckets, one of which nobody has
    edges: {{tokens: [4096], density: [0.1, 0.5]}}
    regimes:
      - when: {{density: {{below: 0.1}}}}
        plans: [{C}]
      - when: {{density: {{from: 0.1}}, tokens: {{from: 4096}}}}
        plans: [{B}, {C}]
  - match: {{block_q: 32, block_kv: 32}}
    why: edges of an axis that is not drawn
    edges: {{run_coverage: [0.5]}}
    regimes:
      - when: {{run_coverage: {{below: 0.5}}}}
        plans: [{B}]
      - when: {{run_coverage: {{from: 0.5}}}}
        plans: [{C}]
"""


@pytest.fixture
def table(tmp_path: Path) -> Table:
    path = tmp_path / "tiny.yaml"
    path.write_text(TEXT)
    return load_table(path)


@pytest.fixture
def ax() -> Any:
    from matplotlib.figure import Figure

    return Figure().subplots()


def names(ax: Any) -> dict[tuple[int, int], str]:
    """Which plan a bucket (column, row) takes, by the legend's colour and hatching."""
    looks = {
        (handle.get_facecolor(), handle.get_hatch()): handle.get_label()
        for handle in ax.get_legend().legend_handles
        if hasattr(handle, "get_hatch")
    }
    return {box.get_xy(): looks[box.get_facecolor(), box.get_hatch()] for box in ax.patches}


def test_each_bucket_has_its_first_plan_and_gaps_the_base(ax: Any, table: Table) -> None:
    viz.draw_table(ax, table, key=0)
    assert names(ax) == {
        (0, 0): C,
        (1, 0): A,
        (2, 0): A,
        (0, 1): C,
        (1, 1): B,
        (2, 1): B,
    }
    assert [text.get_text() for text in ax.get_xticklabels()] == ["0.1", "0.5"]
    assert [text.get_text() for text in ax.get_yticklabels()] == ["4,096"]
    assert (ax.get_xlim(), ax.get_ylim()) == ((0, 3), (0, 2))
    assert ax.get_title() == "tiny, q64k64: first choice of each bucket (default)"
    cells = {tuple(text.get_position()): text.get_text() for text in ax.texts}
    assert cells[0.5, 0.5] == "retain-pack\n128 x 64"


def test_thick_lines_are_between_rankings(ax: Any, table: Table) -> None:
    viz.draw_table(ax, table, key=0)
    lines = {
        (tuple(line.get_xdata()), tuple(line.get_ydata())): line.get_linewidth()
        for line in ax.lines
    }
    assert lines[(1, 1), (0, 1)] == 2.0
    assert lines[(2, 2), (0, 1)] < 1
    assert lines[(0, 1), (1, 1)] < 1
    assert lines[(1, 2), (1, 1)] == 2.0


def test_axes_may_be_swapped(ax: Any, table: Table) -> None:
    viz.draw_table(ax, table, key="q64k64", x="tokens", y="density")
    assert names(ax)[1, 2] == B
    assert ax.get_xlabel() == "keys (tokens)"


def test_another_axis_takes_a_value(ax: Any, table: Table) -> None:
    viz.draw_table(ax, table, key=1, at={"run_coverage": 0.5})
    assert names(ax) == {(0, 0): C}
    assert ax.get_title() == "tiny, q32k32, run_coverage 0.5: first choice of each bucket (default)"
    assert ax.get_xlabel() == "density (kept fraction): no edges"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"key": 2}, "`key`: expected a number from 0 to 1, or one of: q64k64; q32k32"),
        ({"key": "q64"}, "`key`: expected a number"),
        ({"key": 0, "x": "size"}, "`x`: expected one of heads, tokens, density, run_coverage"),
        ({"key": 0, "y": "density"}, "`y`: expected another axis than x"),
        ({"key": 1}, r"`at`: expected a value of run_coverage, .* edges \(0.5\)"),
        ({"key": 0, "at": {"tokens": 5}}, "`at`: expected values of heads, run_coverage"),
        ({"key": 1, "at": {"run_coverage": math.nan}}, "`at`: expected a number for run_coverage"),
        ({"key": 1, "at": {"run_coverage": "low"}}, "`at`: .* for run_coverage, got 'low'"),
    ],
)
def test_wrong_arguments(ax: Any, table: Table, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        viz.draw_table(ax, table, **given)


@pytest.mark.parametrize("arch", ["sm80", "sm89", "sm90", "sm100", "sm120"])
def test_every_key_of_the_shipped_tables_can_be_drawn(arch: str) -> None:
    from matplotlib.figure import Figure

    table = load_for(arch)
    for number, key in enumerate(table.document.all_keys):
        at = {
            axis: edges[0]
            for axis, edges in zip(AXES, key.edges, strict=True)
            if edges and axis not in ("density", "tokens")
        }
        viz.draw_table(Figure().subplots(), table, key=number, at=at)


def test_reasoned_keys_come_after_the_measured_ones(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    lines = TEXT.replace("provenance: default", "provenance: model").splitlines()
    at = next(i for i, line in enumerate(lines) if "block_q: 32" in line)
    path = tmp_path / "tiny.yaml"
    path.write_text("\n".join([*lines[:at], "reasoned:", *lines[at:]]))
    table = load_table(path)
    assert (len(table.document.keys), len(table.document.reasoned)) == (1, len(lines_of_keys()) - 1)
    ax = Figure().subplots()
    viz.draw_table(ax, table, key=1, at={"run_coverage": 0.2})
    assert "q32k32" in ax.get_title()


def lines_of_keys() -> list[str]:
    return [line for line in TEXT.splitlines() if line.startswith("  - match:")]
