"""Share, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tessera_cupy.mapping import Mapping, expand, map_mask, why_not
from tessera_cupy.masks import BlockMask

SHARE = Mapping("share", "pack")


def test_steps_of_both_come_first_and_those_of_one_alternate() -> None:
    # Two rows of 16-column blocks in a tile of two 16-row halves; a step holds two blocks.
    first = [1, 1, 0, 1, 0, 0, 1, 1, 1]
    second = [1, 0, 1, 1, 1, 0, 0, 0, 1]
    mask = BlockMask.from_dense(np.array([first, second], bool), (16, 16))
    tiles = map_mask(mask, SHARE, 32, 32)
    # Both want 0, 3, 8; only the first 1, 6, 7; only the second 2, 4.
    blocks = [0, 3, 8, None, 1, 6, 2, 4, 7, None]
    starts = [0 if b is None else 16 * b for b in blocks]
    lengths = [0 if b is None else 16 for b in blocks]
    assert tiles.frag_start.tolist() == starts
    assert tiles.frag_len.tolist() == lengths
    both, one, two = 0b1111, 0b0011, 0b1100
    assert tiles.frag_members.tolist() == [both, both, both, 0, one, one, two, two, one, 0]
    assert tiles.frag_offsets.tolist() == [0, 10]
    assert tiles.steps.tolist() == [5]


def test_a_step_of_the_second_half_may_come_first() -> None:
    mask = BlockMask.from_dense(np.array([[0, 0], [1, 1]], bool), (16, 16))
    tiles = map_mask(mask, SHARE, 32, 32)
    assert tiles.frag_start.tolist() == [0, 16]
    assert tiles.frag_members.tolist() == [0b1100, 0b1100]


def test_lists_of_several_tiles_keep_their_places() -> None:
    rng = np.random.default_rng(5)
    mask = BlockMask.from_dense(rng.random((1, 3, 13, 17)) < 0.4, (32, 24), (400, 401))
    shared = map_mask(mask, SHARE, 128, 64)
    merged = map_mask(mask, Mapping("merge", "pack"), 128, 64)
    np.testing.assert_array_equal(expand(shared, *mask.shape), expand(merged, *mask.shape))
    np.testing.assert_array_equal(shared.tile_q, merged.tile_q)
    assert (shared.steps >= merged.steps).all()
    assert shared.steps.sum() <= merged.steps.sum() + 2 * len(merged)


def test_lists_in_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of one tile give what a single chunk gives, with tiles that are empty between."""
    dense = np.random.default_rng(6).random((2, 14, 30)) < 0.3
    dense[0, :8] = dense[1, 6:] = False
    mask = BlockMask.from_dense(dense, (32, 16), (440, 475))
    whole = map_mask(mask, SHARE, 128, 64).arrays()
    monkeypatch.setattr("tessera_cupy.mapping.share._CHUNK", 1)
    monkeypatch.setattr("tessera_cupy.mapping.q_side._TAKEN", 1)
    for name, array in map_mask(mask, SHARE, 128, 64).arrays().items():
        np.testing.assert_array_equal(array, whole[name], name)


def test_an_empty_mask_has_tiles_without_steps() -> None:
    mask = BlockMask.from_dense(np.zeros((4, 4), bool), (32, 32))
    tiles = map_mask(mask, SHARE, 128, 64)
    assert tiles.steps.tolist() == [0]


def test_share_needs_pack_and_two_blocks_in_a_tile() -> None:
    mask = BlockMask.from_dense(np.ones((4, 4), bool), (32, 32))
    assert why_not(SHARE, mask, 64, 64) is None
    assert "share Q needs pack KV" in str(why_not(Mapping("share", "retain"), mask, 64, 64))
    assert "share Q needs two query blocks" in str(why_not(SHARE, mask, 32, 64))
