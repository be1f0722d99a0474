"""Tiles of small masks, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tessera_cupy.mapping import Mapping, Tiles, expand, issued_pairs, map_mask, useful_fraction
from tessera_cupy.masks import BlockMask


def lists(tiles: Tiles) -> list[list[tuple[int, int, int]]]:
    """(start, length, members) of each fragment, tile by tile."""
    fragments = list(
        zip(
            tiles.frag_start.tolist(),
            tiles.frag_len.tolist(),
            tiles.frag_members.tolist(),
            strict=True,
        )
    )
    edges = tiles.frag_offsets.tolist()
    return [fragments[edges[t] : edges[t + 1]] for t in range(len(tiles))]


@pytest.fixture
def small() -> BlockMask:
    """Two query rows of blocks, three KV columns, 16 x 16, with tails on both sides.

    The second query block has 4 rows and the third KV block 8.
    """
    return BlockMask.from_dense([[1, 0, 1], [0, 1, 1]], (16, 16), shape=(20, 40))


def test_retain_pack(small):
    tiles = map_mask(small, Mapping("retain", "pack"), 16, 32)
    assert tiles.shape.slot == 16
    assert tiles.tile_head.tolist() == [0, 0]
    assert tiles.tile_q.tolist() == [[0, 16], [16, 4]]
    assert lists(tiles) == [[(0, 16, 3), (32, 8, 3)], [(16, 16, 1), (32, 8, 1)]]
    assert tiles.frag_bits.tolist() == [-1] * 4
    assert tiles.steps.tolist() == [1, 1]
    # 16 x 24 and 4 x 24 active pairs in two steps of 16 x 32.
    assert issued_pairs(tiles) == 1024
    assert useful_fraction(tiles, small) == 480 / 1024


def test_retain_retain_pads_all_but_the_last_step(small):
    tiles = map_mask(small, Mapping("retain", "retain"), 16, 32)
    assert lists(tiles) == [
        [(0, 16, 3), (0, 0, 0), (32, 8, 3)],
        [(16, 16, 1), (0, 0, 0), (32, 8, 1)],
    ]
    assert tiles.steps.tolist() == [2, 2]
    assert useful_fraction(tiles, small) == 480 / 2048


def test_retain_merge_keeps_inactive_neighbours(small):
    tiles = map_mask(small, Mapping("retain", "merge"), 16, 32)
    assert lists(tiles) == [
        [(0, 16, 3), (16, 16, 0), (32, 8, 3), (0, 0, 0)],
        [(0, 16, 0), (16, 16, 1), (32, 8, 1), (0, 0, 0)],
    ]
    assert useful_fraction(tiles, small) == 480 / 2048


def test_merge_pack_unites_lists(small):
    tiles = map_mask(small, Mapping("merge", "pack"), 32, 16)
    assert tiles.tile_q.tolist() == [[0, 20]]
    assert lists(tiles) == [[(0, 16, 0b011), (16, 16, 0b100), (32, 8, 0b111)]]
    assert useful_fraction(tiles, small) == 480 / (3 * 32 * 16)


def test_merge_leaves_the_remainder_to_a_smaller_tile():
    mask = BlockMask.from_dense(np.ones((2, 3, 1), bool), (24, 16))
    tiles = map_mask(mask, Mapping("merge", "pack"), 64, 16)
    assert tiles.tile_head.tolist() == [0, 0, 1, 1]
    assert tiles.tile_q.tolist() == [[0, 48], [48, 24]] * 2
    assert tiles.frag_members.tolist() == [0b111111, 0b111] * 2


def test_two_ragged_blocks_are_the_halves_of_a_tile():
    mask = BlockMask.from_dense(
        [[1, 0], [1, 1], [0, 0], [0, 0], [0, 0], [0, 1], [1, 0]],
        (16, 16),
        q_block_sizes=[9, 16, 0, 0, 0, 3, 10],
    )
    tiles = map_mask(mask, Mapping("share", "pack"), 32, 16)
    # Rows 0 to 8 of the first tile, and from row 16 on; blocks 2 and 3 are absent and have none.
    assert tiles.tile_q.tolist() == [[0, 25], [25, 3], [28, 10]]
    assert tiles.tile_halves.tolist() == [9, 0, 10]
    assert lists(tiles) == [
        [(0, 16, 0b1111), (16, 16, 0b1100)],
        [(16, 16, 0b0100)],
        [(0, 16, 0b0011)],
    ]
    assert tiles.query_rows(0, np.array([0, 8, 16, 31])).tolist() == [0, 8, 9, 24]
    assert tiles.query_rows(1, 18) == 27
    assert tiles.exists(0, np.array([8, 9, 15, 16, 31])).tolist() == [
        True,
        False,
        False,
        True,
        True,
    ]
    assert tiles.tile_rows(1).tolist() == [16, 17, 18]
    assert useful_fraction(tiles, mask, 16) == (9 + 16 * 2 + 3 + 10) / (16 * (3 + 1 + 1))


def test_split_pack_repeats_the_list():
    mask = BlockMask.from_dense([[1, 1], [0, 0]], (40, 16), shape=(72, 32))
    tiles = map_mask(mask, Mapping("split", "pack"), 32, 16)
    assert tiles.tile_q.tolist() == [[0, 32], [32, 8], [40, 32]]
    assert lists(tiles) == [[(0, 16, 15), (16, 16, 15)], [(0, 16, 1), (16, 16, 1)], []]
    # 40 x 32 active pairs; the second tile pays for 32 rows and has 8.
    assert useful_fraction(tiles, mask) == 1280 / (4 * 32 * 16)


def test_retain_split_pads_each_block():
    mask = BlockMask.from_dense([[1, 0, 1]], (16, 40), shape=(16, 100))
    tiles = map_mask(mask, Mapping("retain", "split"), 16, 32, slot=16)
    # 40 rows are fragments of 16, 16 and 8, in steps of two; the tail has 20 rows.
    assert lists(tiles) == [
        [(0, 16, 3), (16, 16, 3), (32, 8, 3), (0, 0, 0), (80, 16, 3), (96, 4, 3)]
    ]
    assert tiles.steps.tolist() == [3]


def test_pack_fills_steps_across_blocks():
    mask = BlockMask.from_dense([[1, 0, 1]], (16, 24))
    tiles = map_mask(mask, Mapping("retain", "pack"), 16, 32)
    assert lists(tiles) == [[(s, 8, 3) for s in (0, 8, 16, 48, 56, 64)]]
    assert tiles.steps.tolist() == [2]
    assert useful_fraction(tiles, mask) == 48 / 64


def test_a_full_grid_of_whole_tiles_wastes_nothing():
    mask = BlockMask.from_dense(np.ones((2, 4, 6), bool), (64, 64))
    for mapping, q, kv in (
        (Mapping("retain", "pack"), 64, 128),
        (Mapping("merge", "merge"), 128, 128),
        (Mapping("split", "split"), 32, 32),
    ):
        assert useful_fraction(map_mask(mask, mapping, q, kv), mask) == 1.0


@pytest.mark.parametrize("mapping", [Mapping("retain", "pack"), Mapping("merge", "merge")])
def test_an_empty_mask_has_tiles_with_empty_lists(mapping):
    mask = BlockMask.from_dense(np.zeros((2, 4, 4), bool), (16, 16))
    tiles = map_mask(mask, mapping, 32, 32)
    assert len(tiles.frag_start) == 0
    assert tiles.tile_q[:, 1].sum() == 2 * 64
    assert issued_pairs(tiles) == 0
    assert useful_fraction(tiles, mask) == 1.0
    assert expand(tiles, 64, 64).sum() == 0


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0)])
@pytest.mark.parametrize("side", ["retain", "merge"])
def test_no_tokens(shape, side):
    nq, nk = -(-shape[0] // 16), -(-shape[1] // 16)
    mask = BlockMask.from_dense(np.zeros((nq, nk), bool), (16, 16), shape)
    tiles = map_mask(mask, Mapping(side, "pack"), 32, 32)
    assert tiles.tile_q[:, 1].sum() == shape[0]
    assert tiles.frag_offsets.tolist() == [0] * (len(tiles) + 1)


def test_ragged_blocks_follow_each_head():
    mask = BlockMask.from_dense(
        np.ones((2, 2, 2), bool),
        (16, 16),
        q_block_sizes=[[16, 8], [0, 24]],
        kv_block_sizes=[[10, 20], [30, 0]],
    )
    tiles = map_mask(mask, Mapping("retain", "pack"), 24, 16, slot=16)
    assert tiles.tile_head.tolist() == [0, 0, 1]
    assert tiles.tile_q.tolist() == [[0, 16], [16, 8], [0, 24]]
    assert lists(tiles) == [
        [(0, 16, 3), (16, 14, 3)],
        [(0, 16, 1), (16, 14, 1)],
        [(0, 16, 7), (16, 14, 7)],
    ]
    # A step holds one fragment, so 24 x 16 pairs each; all 2 x 24 x 30 pairs are active.
    assert useful_fraction(tiles, mask) == 1440 / (6 * 24 * 16)
    # Retain keeps blocks apart.
    tiles = map_mask(mask, Mapping("retain", "split"), 24, 16, slot=16)
    assert lists(tiles)[0] == [(0, 10, 3), (10, 16, 3), (26, 4, 3)]


def test_neighbouring_ragged_blocks_are_cut_as_one_and_short_fragments_come_last():
    # Keys 0 to 29, then 35 to 74 beside an absent block that ends the run, then 80 to 89.
    mask = BlockMask.from_dense(
        [[1, 1, 0, 1, 1, 0, 1, 0, 1]], (16, 40), kv_block_sizes=[10, 20, 5, 30, 10, 0, 5, 0, 10]
    )
    assert lists(map_mask(mask, Mapping("retain", "pack"), 16, 32, slot=16)) == [
        [
            *[(0, 16, 3), (35, 16, 3), (51, 16, 3)],
            *[(80, 10, 3), (75, 5, 3), (67, 8, 3), (16, 14, 3)],
        ]
    ]


def test_a_run_has_the_same_members_all_along():
    # Keys 0 to 19 are of both query blocks, 20 to 29 of the first, 30 to 64 of the second, and the
    # others of both.
    mask = BlockMask.from_dense(
        [[1, 1, 1, 0, 0, 1], [1, 1, 0, 1, 1, 1]],
        (8, 20),
        q_block_sizes=[8, 8],
        kv_block_sizes=[12, 8, 10, 15, 20, 5],
    )
    merged = map_mask(mask, Mapping("merge", "pack"), 16, 32, slot=8)
    assert lists(merged) == [
        [
            *[(0, 8, 3), (8, 8, 3), (20, 8, 1), *[(s, 8, 2) for s in (30, 38, 46, 54)]],
            *[(65, 5, 3), (62, 3, 2), (28, 2, 1), (16, 4, 3)],
        ]
    ]
    # In steps of two: those of both, then those of a half in turns.
    shared = map_mask(mask, Mapping("share", "pack"), 16, 16, slot=8)
    assert lists(shared) == [
        [
            *[(0, 8, 3), (8, 8, 3)],
            *[(65, 5, 3), (16, 4, 3)],
            *[(20, 8, 1), (28, 2, 1)],
            *[(30, 8, 2), (38, 8, 2)],
            *[(46, 8, 2), (54, 8, 2)],
            *[(62, 3, 2), (0, 0, 0)],
        ]
    ]


def test_a_run_ends_with_each_32_blocks():
    # Keys 0 to 96, and from there on 3; as one run they would be 100 keys, the last 4 short.
    mask = BlockMask.from_dense(np.ones((1, 33), bool), (16, 16), kv_block_sizes=[4, *[3] * 32])
    tiles = map_mask(mask, Mapping("retain", "pack"), 16, 32, slot=16)
    assert lists(tiles) == [[*[(16 * i, 16, 3) for i in range(6)], (97, 3, 3), (96, 1, 3)]]


def test_a_block_with_token_bits_is_no_part_of_a_run():
    # Of the third block, keys 20 to 29, row 3 sees the key 22 alone.
    bits = np.zeros((1, 8, 1), np.uint32)
    bits[0, 3] = 1 << 2
    mask = BlockMask.from_csr(
        [0, 5],
        [0, 1, 2, 3, 4],
        (1, 5),
        (8, 16),
        q_block_sizes=[8],
        kv_block_sizes=[10, 10, 10, 4, 9],
        partial=[-1, -1, 0, -1, -1],
        token_bits=bits,
    )
    tiles = map_mask(mask, Mapping("retain", "pack"), 8, 16, slot=16)
    assert lists(tiles) == [[(0, 16, 1), (30, 13, 1), (16, 4, 1), (20, 10, 1)]]
    assert tiles.frag_bits.tolist() == [-1, -1, -1, 0]
    assert tiles.bits[0, :, 0].tolist() == [0, 0, 0, 4, 0, 0, 0, 0]


def test_ragged_merge_takes_as_many_blocks_as_fit_at_the_largest():
    mask = BlockMask.from_dense(
        np.eye(4, dtype=bool),
        (16, 16),
        q_block_sizes=[[16, 0, 8, 5]],
        kv_block_sizes=[[16, 0, 16, 16]],
    )
    tiles = map_mask(mask, Mapping("merge", "pack"), 32, 16)
    assert tiles.tile_q.tolist() == [[0, 16], [16, 13]]
    assert lists(tiles) == [[(0, 16, 0b11)], [(16, 16, 0b01), (32, 16, 0b10)]]


def one_block(rows: int, columns: int, *pairs: tuple[slice, slice]) -> BlockMask:
    """A single block of tokens with the given rectangles on."""
    tokens = np.zeros((rows, columns), bool)
    for rectangle in pairs:
        tokens[rectangle] = True
    return BlockMask.from_tokens(tokens, (rows, columns))


def test_token_bits_are_recut_to_fragments():
    # Row 3 sees keys 14 to 17, which lie in two fragments of 16.
    tiles = map_mask(
        one_block(16, 32, (slice(3, 4), slice(14, 18))), Mapping("retain", "pack"), 32, 32, 16
    )
    assert lists(tiles) == [[(0, 16, 1), (16, 16, 1)]]
    assert tiles.frag_bits.tolist() == [0, 1]
    assert tiles.bits.shape == (2, 32, 1)
    assert tiles.bits[:, 3, 0].tolist() == [0b11 << 14, 0b11]
    assert np.count_nonzero(tiles.bits) == 2


def test_token_bits_of_wide_fragments_take_whole_words():
    tiles = map_mask(
        one_block(16, 128, (slice(0, 1), slice(95, 97))), Mapping("retain", "pack"), 16, 64, 64
    )
    # The first fragment has no pair and is not there.
    assert lists(tiles) == [[(64, 64, 1)]]
    assert tiles.bits[0, 0].tolist() == [1 << 31, 1]


def test_token_bits_of_a_split_block_use_the_rows_of_the_part():
    tiles = map_mask(
        one_block(48, 16, (slice(33, 34), slice(2, 3))), Mapping("split", "pack"), 32, 16
    )
    assert lists(tiles) == [[], [(0, 16, 1)]]
    assert tiles.bits[0, :, 0].tolist() == [0, 4] + [0] * 30


def test_bits_that_say_no_more_than_members_are_dropped():
    # Rows 8 to 15 in full: membership alone can say it.
    tiles = map_mask(
        one_block(32, 32, (slice(8, 16), slice(None))), Mapping("retain", "pack"), 32, 32
    )
    assert lists(tiles) == [[(0, 32, 0b0010)]]
    assert tiles.frag_bits.tolist() == [-1]
    assert len(tiles.bits) == 0


def test_a_full_block_beside_a_partial_one_in_a_merged_tile():
    tokens = np.zeros((48, 16), bool)
    tokens[:16] = True
    tokens[20, 5] = True
    tiles = map_mask(BlockMask.from_tokens(tokens, (16, 16)), Mapping("merge", "pack"), 48, 16)
    assert lists(tiles) == [[(0, 16, 0b000111)]]
    assert tiles.bits[0, :, 0].tolist() == [0xFFFF] * 16 + [0] * 4 + [1 << 5] + [0] * 27


def test_a_block_cut_to_nothing_pads_or_keeps_its_place():
    # Only keys 16 to 31 of the first block have pairs, and all of the second.
    mask = one_block(16, 64, (slice(0, 1), slice(16, 64)))
    retained = map_mask(mask, Mapping("retain", "retain"), 16, 64, 16)
    assert lists(retained) == [[(16, 16, 1), (32, 16, 1), (48, 16, 1)]]
    tokens = np.zeros((16, 64), bool)
    tokens[0, 16:] = True
    merged = map_mask(
        BlockMask.from_tokens(tokens, (16, 32)), Mapping("retain", "merge"), 16, 64, 16
    )
    assert lists(merged) == [[(0, 16, 0), (16, 16, 1), (32, 16, 1), (48, 16, 1)]]


def test_expand_counts_double_coverage_and_stray_rows():
    mask = BlockMask.from_dense([[1]], (16, 16), shape=(12, 16))
    tiles = map_mask(mask, Mapping("retain", "pack"), 16, 16)
    twice = Tiles(
        shape=tiles.shape,
        heads=1,
        tile_head=tiles.tile_head,
        tile_q=tiles.tile_q,
        frag_offsets=np.array([0, 2]),
        frag_start=np.array([0, 8], np.int32),
        frag_len=np.array([16, 8], np.int32),
        frag_members=np.array([1, 3], np.uint32),
        frag_bits=np.array([-1, -1], np.int32),
        bits=tiles.bits,
    )
    expected = np.zeros((1, 12, 16), np.int16)
    expected[0, :8] = 1
    expected[0, :, 8:] += 1
    np.testing.assert_array_equal(expand(twice, 12, 16), expected)
    with pytest.raises(IndexError):
        expand(twice, 12, 15)
