"""Measured balance: parts of masks, and the table; on a GPU the times."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tessera_cupy import BlockMask, KeySlices
from tessera_cupy.bench.balance_times import joined, measure_balance, measured_sheet
from tessera_cupy.cli import main
from tessera_cupy.masks.key_slices import block_mask
from tessera_cupy.video import VideoGrid


def heads_of(kind: str) -> list[BlockMask | KeySlices]:
    """Masks of three heads that differ."""
    rng = np.random.default_rng(0)
    made: list[BlockMask | KeySlices] = []
    for density in (0.2, 0.0, 0.7):
        if kind == "slices":
            made.append(KeySlices.from_groups(rng.random((3, 50)) < density, 16, (40, 50)))
        elif kind == "tokens":
            made.append(BlockMask.from_tokens(rng.random((40, 50)) < density, (16, 24)))
        elif kind == "ragged":
            keep = rng.random((3, 2)) < density
            cut = int(rng.integers(1, 50))
            sizes: dict[str, Any] = {
                "q_block_sizes": [10, 10, 20],
                "kv_block_sizes": [cut, 50 - cut],
            }
            made.append(BlockMask.from_dense(keep, (64, 64), (40, 50), **sizes))
        else:
            made.append(BlockMask.from_dense(rng.random((3, 4)) < density, (16, 16), (40, 50)))
    return made


@pytest.mark.parametrize("kind", ["blocks", "ragged", "tokens", "slices"])
def test_a_part_has_the_masks_of_its_heads(kind: str) -> None:
    masks = heads_of(kind)
    part = joined([masks[2], masks[0], masks[1], masks[2]])
    assert isinstance(part, KeySlices) == (kind == "slices")
    found = block_mask(part).to_tokens()[0]
    for head, mask in zip(found, (masks[2], masks[0], masks[1], masks[2]), strict=True):
        np.testing.assert_array_equal(head, block_mask(mask).to_tokens()[0, 0])


def measured() -> dict[str, Any]:
    split = {"work": 1.0, "ms": [1.0, 1.0], "time": 1.01}
    case = {"heads": 24, "ranks": 2, "dealt": split, "even": {**split, "time": 1.2}}
    row = {"mask": "svg2", "density": 0.2, "cases": [case]}
    about = {"gpu": "NVIDIA H200", "date": "2026-12-01", "clip": "bikes", "tokens": 32760}
    rows = [row, {"mask": "sta", "reason": "no package"}]
    return {**about, "grid": "21x30x52", "heads": [24], "ranks": [2], "rows": rows}


def test_the_table_has_both_deals_and_names_the_least_even() -> None:
    text = measured_sheet(measured()).markdown("tessera-cupy parallel balance --measure")
    assert "| svg2 | 0.200 | 1.010 (1.200) |" in text
    assert "| sta | - | - |" in text
    assert "Least even: 1.010, of svg2, 24 heads on 2 ranks; split by count up to 1.200." in text


def test_the_command_measures_where_it_is_told_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {}

    def stand_in(**given: Any) -> dict[str, Any]:
        asked.update(given)
        return measured()

    monkeypatch.setattr("tessera_cupy.bench.balance_times.measure_balance", stand_in)
    assert main(["parallel", "balance", "--measure", "--heads", "24", "--ranks", "2"]) == 0
    assert (asked["heads"], asked["ranks"]) == ([24], [2])
    assert "Least even" in capsys.readouterr().out


@pytest.mark.gpu
def test_ranks_of_unequal_work_take_unequal_times() -> None:
    pytest.importorskip("av")
    names = ["svg2", "chipmunk", "svg", "Q64K64"]  # ragged, slices, token bits, blocks
    found = measure_balance(
        heads=[8], ranks=[2, 8], clip="bikes", names=names, grid=VideoGrid(12, 20, 32)
    )
    assert [row["mask"] for row in found["rows"]] == names
    for row in found["rows"]:
        for case in row["cases"]:
            assert len(case["dealt"]["ms"]) == case["ranks"]
            assert min(case["dealt"]["ms"]) > 0
            assert case["dealt"]["work"] <= case["even"]["work"] + 1e-9
