"""Share, worked out by hand."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from tessera_cupy.mapping import Mapping, Tiles, expand, map_mask, why_not
from tessera_cupy.masks import BlockMask

SHARE = Mapping("share", "pack")


def map_rows(first: str, second: str, kv: int) -> Tiles:
    """Tiles of two rows of 16-column blocks, one a half of a tile of 32 rows."""
    rows = [[int(c) for c in row.replace(" ", "")] for row in (first, second)]
    return map_mask(BlockMask.from_dense(np.array(rows, bool), (16, 16)), SHARE, 32, kv)


def blocks_of(tiles: Tiles) -> list[str]:
    """Each step as its KV blocks with the halves that take them: b, 1 or 2; a dot is padding."""
    names = {0b1111: "b", 0b0011: "1", 0b1100: "2"}
    texts = [
        f"{start // 16}{names[members]}" if length else "."
        for start, length, members in zip(
            tiles.frag_start.tolist(),
            tiles.frag_len.tolist(),
            tiles.frag_members.tolist(),
            strict=True,
        )
    ]
    per_step = tiles.shape.fragments
    return [" ".join(texts[i : i + per_step]) for i in range(0, len(texts), per_step)]


def test_steps_of_both_come_first_and_those_of_one_alternate() -> None:
    # Both want 0, 3, 8 and 9; only the first 1, 6, 7; only the second 2, 4.
    tiles = map_rows("1101 0011 11", "1011 1000 11", 32)
    assert blocks_of(tiles) == ["0b 3b", "8b 9b", "11 61", "22 42", "71 ."]
    assert tiles.frag_offsets.tolist() == [0, 10]
    assert tiles.steps.tolist() == [5]


def test_the_rest_of_one_half_fills_the_last_step_of_both() -> None:
    # Both want 0, 3 and 8; only the first 1, 6, 7; only the second 2, 4.
    assert blocks_of(map_rows("1101 0011 1", "1011 1000 1", 32)) == [
        *("0b 3b", "8b 71"),
        *("11 61", "22 42"),
    ]


def test_rests_of_both_halves_fill_one_step() -> None:
    # A step of four: one of both leaves room for two of the first half and one of the second.
    assert blocks_of(map_rows("1110", "1001", 64)) == ["0b 11 21 32"]
    # No step of both, yet one step of three blocks is less than two.
    assert blocks_of(map_rows("110", "001", 64)) == ["01 11 22 ."]
    # Three and two do not fit in one step, and two steps of both would cost more.
    assert blocks_of(map_rows("11100", "00011", 64)) == ["01 11 21 .", "32 42 . ."]


def test_the_longer_half_is_spared_its_step() -> None:
    # The rest of either half fits beside the block of both, but not the two of them.
    short, long = "111000000", "100111111"
    assert blocks_of(map_rows(short, long, 64)) == ["0b 72 82 .", "11 21 . .", "32 42 52 62"]
    assert blocks_of(map_rows(long, short, 64)) == ["0b 71 81 .", "31 41 51 61", "12 22 . ."]


def fewest_steps(both: int, first: int, second: int, per_step: int) -> tuple[int, int]:
    """Steps of the two halves together and of the tile, over all ways to fill the steps of both."""
    ways = []
    for joined in product(range(first + 1), range(second + 1)):
        of_both = -(-(both + sum(joined)) // per_step)
        alone = -(-(first - joined[0]) // per_step) - (-(second - joined[1]) // per_step)
        ways.append((2 * of_both + alone, of_both + alone))
    return min(ways)


@pytest.mark.parametrize("per_step", [1, 2, 4, 8])
def test_no_other_way_to_fill_steps_is_cheaper(per_step: int) -> None:
    rng = np.random.default_rng(per_step)
    for both, first, second in rng.integers(0, 19, (60, 3)).tolist():
        kinds = rng.permutation([3] * both + [1] * first + [2] * second + [0] * 3)
        mask = BlockMask.from_dense(np.stack([kinds & 1, kinds >> 1]).astype(bool), (16, 16))
        tiles = map_mask(mask, SHARE, 32, 16 * per_step)
        members = np.zeros((int(tiles.steps.sum()), per_step), np.uint32)
        members.flat[: len(tiles.frag_members)] = tiles.frag_members
        halves = [(members & half != 0).any(axis=1) for half in (0b0011, 0b1100)]
        got = (np.count_nonzero(halves), len(members))
        assert got == fewest_steps(both, first, second, per_step), (both, first, second)


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
