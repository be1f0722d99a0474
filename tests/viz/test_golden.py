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
    """Root of the mean square over pixels and channels, of 255 levels."""
    return float(np.sqrt(((first - second) ** 2).mean()))


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
