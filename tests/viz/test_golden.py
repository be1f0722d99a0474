"""Pictures beside those kept as files; ``python -m tests.viz.golden`` writes them anew."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.viz import golden

pytest.importorskip("matplotlib")


def pixels(path: Path) -> Any:
    from matplotlib.image import imread

    return 255.0 * imread(path)[:, :, :3]


def error(first: Any, second: Any) -> float:
    """Root of the mean square over pixels, of 255 levels, of what no pixel nearby has either.

    Versions of matplotlib differ by up to two pixels in where and how they blend borders of images.
    """
    return float(np.sqrt((np.maximum(_lacks(first, second), _lacks(second, first)) ** 2).mean()))


def _lacks(first: Any, second: Any) -> Any:
    """How far each pixel is from the most alike one at most two away."""
    high, wide = first.shape[:2]
    around = np.pad(second, ((2, 2), (2, 2), (0, 0)), mode="edge")
    shifts = [around[y : y + high, x : x + wide] for y in range(5) for x in range(5)]
    return np.min([np.sqrt(((first - shift) ** 2).mean(axis=2)) for shift in shifts], axis=0)


@pytest.mark.parametrize("name", golden.CASES)
def test_picture(name: str, tmp_path: Path) -> None:
    golden.draw(name, tmp_path / "drawn.png")
    drawn, kept = pixels(tmp_path / "drawn.png"), pixels(golden.FOLDER / f"{name}.png")
    assert drawn.shape == kept.shape
    assert error(drawn, kept) <= golden.TOLERANCE


def test_every_file_has_a_case() -> None:
    assert {path.stem for path in golden.FOLDER.iterdir()} == set(golden.CASES)


def test_the_tolerance_tells_pictures_apart() -> None:
    kept = {name: pixels(golden.FOLDER / f"{name}.png") for name in golden.CASES}
    for one, other in combinations([name for name in kept if name != "grid"], 2):
        assert error(kept[one], kept[other]) > golden.TOLERANCE, (one, other)


def test_one_block_more_is_seen() -> None:
    """The least that a fault would change: a block of twenty, white in place of blue."""
    kept = pixels(golden.FOLDER / "mask.png")
    changed = kept.copy()
    high, wide = kept.shape[0] // 5, kept.shape[1] // 6
    changed[:high, :wide] = 255 - changed[:high, :wide]
    assert error(kept, changed) > golden.TOLERANCE


def test_two_pixels_aside_are_no_error_and_five_are() -> None:
    kept = pixels(golden.FOLDER / "slices.png")
    assert error(kept, np.roll(kept, 2, axis=1)) < golden.TOLERANCE
    assert error(kept, np.roll(kept, 5, axis=1)) > golden.TOLERANCE
