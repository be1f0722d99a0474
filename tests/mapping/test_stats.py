"""Which parts of a tile compute a step, and what that costs: cases worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tessera_cupy.mapping import Mapping, issued_pairs, map_mask, useful_fraction
from tessera_cupy.mapping.stats import computed_parts
from tessera_cupy.masks import BlockMask

# Rows of a tile of 64 list blocks 0 2 3 6, 2, 7 and 1 2 4 7; steps hold 0 1 2 3 and 4 6 7.
MASK = BlockMask.from_dense(
    [
        [1, 0, 1, 1, 0, 0, 1, 0],
        [0, 0, 1, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 1],
        [0, 1, 1, 0, 1, 0, 0, 1],
        [0, 0, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0],
        [1, 0, 0, 0, 0, 0, 0, 0],
    ],
    (16, 16),
)


@pytest.mark.parametrize(
    ("part", "computed"),
    [
        (16, [[1, 1, 0, 1], [1, 0, 1, 1], [1, 0, 0, 0]]),
        (32, [[1, 1], [1, 1], [1, 0]]),
        (64, [[1], [1], [1]]),
    ],
)
def test_a_part_skips_the_steps_without_a_member_in_it(
    part: int, computed: list[list[int]]
) -> None:
    tiles = map_mask(MASK, Mapping("merge", "pack"), 64, 64)
    assert tiles.steps.tolist() == [2, 0, 1]
    assert computed_parts(tiles, part).tolist() == np.array(computed, bool).tolist()
    issued = int(np.sum(computed)) * part * 64
    assert issued_pairs(tiles, part) == issued
    assert useful_fraction(tiles, MASK, part) == 11 * 256 / issued


def test_a_tile_of_256_rows_has_a_bit_for_each_8() -> None:
    tiles = map_mask(MASK, Mapping("merge", "pack"), 256, 64)
    assert computed_parts(tiles, 256).tolist() == [[True], [True]]
    assert computed_parts(tiles, 128).tolist() == [[True, True], [True, False]]
    assert issued_pairs(tiles) == 2 * 256 * 64


def test_nothing_is_computed_of_an_empty_mask() -> None:
    mask = BlockMask.from_dense(np.zeros((4, 4), bool), (16, 16))
    tiles = map_mask(mask, Mapping("merge", "pack"), 32, 32)
    assert computed_parts(tiles, 16).shape == (0, 2)
    assert issued_pairs(tiles, 16) == 0
    assert useful_fraction(tiles, mask, 16) == 1.0
