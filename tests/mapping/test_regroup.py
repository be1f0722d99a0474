"""Regroup: which query blocks share a tile, against the rule written out plainly."""

from __future__ import annotations

import doctest
from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from tessera_cupy.mapping import Mapping, map_mask
from tessera_cupy.mapping import regroup as module
from tessera_cupy.mapping.regroup import WINDOW, regroup, reordered
from tessera_cupy.masks import BlockMask

REGROUP = Mapping("regroup", "pack")


def plain_pairs(lists: list[set[int]]) -> list[tuple[int, int]]:
    """Sort all pairs of each window, most in common first, and take those whose ends are free."""
    pairs = []
    for low in range(0, len(lists), WINDOW):
        inside = range(low, min(low + WINDOW, len(lists)))
        free = set(inside)
        for i, j in sorted(
            combinations(inside, 2), key=lambda ij: (-len(lists[ij[0]] & lists[ij[1]]), ij)
        ):
            if {i, j} <= free:
                free -= {i, j}
                pairs.append((i, j))
    return sorted(pairs)


def plain_order(dense: NDArray[np.bool_], joined: int, whole: int) -> list[int]:
    """The order of one head's blocks, of which the first ``whole`` are regrouped."""
    every = [set(np.flatnonzero(row).tolist()) for row in dense[:whole]]
    # Equal lists side by side, each where the first of them is.
    groups = [[i] for i in sorted(range(whole), key=lambda i: every.index(every[i]))]
    lists = [every[i] for [i] in groups]
    while groups and len(groups[0]) < joined:
        pairs = plain_pairs(lists)
        joint = [sorted((groups[i], groups[j])) for i, j in pairs]
        groups = [low + high for low, high in joint]
        lists = [lists[i] | lists[j] for i, j in pairs]
    return [block for group in sorted(groups) for block in group] + list(range(whole, len(dense)))


# The last rows: counts that leave blocks over, one window and several, a short last block.
@pytest.mark.parametrize(
    ("nq", "block", "tokens"),
    [
        (2, 64, 128),
        (7, 64, 448),
        (9, 32, 288),
        (150, 64, 150 * 64 - 5),
        (128, 32, 4096),
        (137, 32, 4384),
        (403, 16, 403 * 16 - 15),
        (3, 16, 40),
    ],
)
@pytest.mark.parametrize("density", [0.0, 0.1, 0.6, 1.0])
def test_the_order_is_the_plain_rules(nq: int, block: int, tokens: int, density: float) -> None:
    # Few columns, so that many pairs tie.
    dense = np.random.default_rng(nq).random((2, nq, 12)) < density
    mask = BlockMask.from_dense(dense, (block, 32), (tokens, 12 * 32))
    joined = 128 // block
    whole = tokens // block // joined * joined
    order = regroup(mask, 128)
    assert order.dtype == np.int32
    assert order.tolist() == [plain_order(head, joined, whole) for head in dense]


def test_windows_bound_the_search() -> None:
    # Block 63 has its twin at 64, in the next window.
    dense = np.eye(2 * WINDOW, dtype=bool)
    dense[[0, WINDOW - 1], [-1, -2]] = True
    dense[WINDOW - 1, WINDOW] = dense[WINDOW, WINDOW - 1] = True
    order = regroup(BlockMask.from_dense(dense, (64, 64)), 128)[0].reshape(-1, 2)
    assert (order // WINDOW == order[:, :1] // WINDOW).all()


def test_equal_lists_find_each_other_beyond_a_window() -> None:
    # Each list three times, 100 blocks apart.
    dense = np.tile(np.eye(100, dtype=bool), (3, 1))
    order = regroup(BlockMask.from_dense(dense, (64, 64)), 128)[0].reshape(-1, 2)
    assert (order[:, 0] % 100 == order[:, 1] % 100).sum() == 100
    assert (order[:, 0] < order[:, 1]).all()
    assert (np.diff(order[:, 0]) > 0).all()


def test_reordered_rows_are_the_masks_own() -> None:
    rng = np.random.default_rng(7)
    tokens = rng.random((2, 90, 70)) < 0.4
    tokens[:, :40, :32] = True
    mask = BlockMask.from_tokens(tokens, (16, 16))
    order = np.stack([[*rng.permutation(5), 5] for _ in range(2)]).astype(np.int32)
    moved = reordered(mask, order)
    expected = mask.to_tokens()[0, :, :80].reshape(2, 5, 16, 70)
    expected = np.take_along_axis(expected, order[:, :5, None, None], axis=1)
    np.testing.assert_array_equal(moved.to_tokens()[0, :, :80].reshape(2, 5, 16, 70), expected)
    np.testing.assert_array_equal(moved.to_tokens()[0, :, 80:], tokens[:, 80:])


def test_twins_that_lie_apart_share_a_half_and_a_tile() -> None:
    # Eight kinds of lists; blocks of 32 rows, so a half takes two blocks and a tile four.
    kinds = np.kron(np.eye(8, dtype=bool), np.ones((1, 4), bool))
    mask = BlockMask.from_dense(np.tile(kinds, (4, 1)), (32, 32))
    tiles = map_mask(mask, REGROUP, 128, 128)
    assert tiles.tile_q.tolist() == [[32 * i, 128] for i in range(8)]
    blocks = [[i, i + 8, i + 16, i + 24] for i in range(8)]
    assert tiles.tile_units is not None
    assert tiles.tile_units.tolist() == [
        [row for block in tile for row in (32 * block, 32 * block + 16)] for tile in blocks
    ]
    assert tiles.frag_members.tolist() == [0xFFFF] * 32
    # Neighbours would all list different blocks.
    assert map_mask(mask, Mapping("share", "pack"), 128, 128).steps.sum() == 4 * tiles.steps.sum()


def test_rows_of_a_tile_that_is_not_full() -> None:
    # Three blocks of 16 in tiles of 32 rows: the first two make one, the third has 5 rows.
    mask = BlockMask.from_dense(np.ones((3, 1), bool), (16, 16), (37, 16))
    tiles = map_mask(mask, REGROUP, 32, 32)
    assert tiles.tile_units is not None
    assert tiles.tile_units.tolist() == [[0, 16], [32, -1]]
    assert tiles.tile_q.tolist() == [[0, 32], [32, 5]]
    assert tiles.query_rows(np.array([0, 1]), np.array([17, 4])).tolist() == [17, 36]
    assert tiles.arrays()["tile_units"] is tiles.tile_units


def test_examples_in_docstrings() -> None:
    result = doctest.testmod(module)
    assert result.attempted >= 3
    assert result.failed == 0
