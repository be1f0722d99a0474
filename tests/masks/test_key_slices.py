"""Key slices against maps of bools: every way to build them, what they say, what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tessera_cupy import BlockMask, KeySlices
from tessera_cupy.masks.key_slices import BLOCK_KV, GROUPS, block_mask

#: (group, shape, axes): short last groups, one group, keys that no block size divides.
CASES = [
    (16, (37, 50), (1, 1)),
    (64, (130, 203), (2, 3)),
    (128, (256, 65), (1, 2)),
    (192, (400, 31), (2, 1)),
    (192, (60, 100), (1, 1)),
]
DENSITIES = [0.0, 0.1, 0.6, 1.0]


def groups_of(case: Any, density: float) -> Any:
    """A random map of groups and keys, and the token mask that it stands for, by loops."""
    group, (sq, skv), axes = case
    rng = np.random.default_rng(int(100 * density) + sq)
    kept = rng.random((*axes, -(-sq // group), skv)) < density
    kept[..., 0, :] = False  # an empty group
    tokens = np.zeros((*axes, sq, skv), bool)
    for row in range(sq):
        tokens[..., row, :] = kept[..., row // group, :]
    return kept, tokens


@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("case", CASES)
def test_every_constructor_gives_the_same_slices(case: Any, density: float) -> None:
    group, shape, axes = case
    kept, tokens = groups_of(case, density)
    made = KeySlices.from_groups(kept, group, shape)
    rng = np.random.default_rng(0)
    lists = [rng.permutation(np.flatnonzero(row)) for row in kept.reshape(-1, shape[1])]
    counts = np.array([len(keys) for keys in lists])
    padded = np.full((len(lists), shape[1]), -7)
    for row, keys in zip(padded, lists, strict=True):
        row[: len(keys)] = keys
    several = [
        made,
        KeySlices.from_tokens(tokens, group),
        KeySlices.from_packed_bits(
            np.packbits(kept, axis=-1, bitorder="little"), group, shape, most=int(kept.sum())
        ),
        KeySlices.from_lists(
            padded.reshape(*kept.shape), counts.reshape(kept.shape[:3]), group, shape
        ),
        KeySlices.from_csr(
            np.append(0, np.cumsum(counts)),
            np.concatenate(lists),
            group,
            shape,
            batch=axes[0],
            heads=axes[1],
        ),
    ]
    for slices in several:
        assert (slices.group, slices.shape, slices.batch, slices.heads) == (group, shape, *axes)
        assert (slices.indptr.dtype, slices.indices.dtype) == (np.int64, np.int32)
        np.testing.assert_array_equal(slices.indptr, np.append(0, np.cumsum(counts)))
        np.testing.assert_array_equal(slices.indices, np.nonzero(kept)[3])
        np.testing.assert_array_equal(slices.to_dense(), kept)
        np.testing.assert_array_equal(slices.row_counts(), kept.sum(axis=3))
        assert slices.nnz == kept.sum()
        assert slices.active_pairs() == tokens.sum()
        assert slices.density() == pytest.approx(tokens.mean())
        assert slices.nbytes == 8 * (len(lists) + 1) + 4 * kept.sum()
        assert slices.device is None


@pytest.mark.parametrize("block_kv", [16, 24, 32, 40, 64, 384])
@pytest.mark.parametrize("density", [*DENSITIES, 0.97])
@pytest.mark.parametrize("case", CASES)
def test_the_blocks_are_exact(case: Any, density: float, block_kv: int) -> None:
    group, shape, _ = case
    kept, tokens = groups_of(case, density)
    kept[..., -1, : 2 * block_kv + 1] = True  # whole blocks, and the first key of another one
    tokens[..., (kept.shape[2] - 1) * group :, : 2 * block_kv + 1] = True
    blocks = KeySlices.from_groups(kept, group, shape).to_block_mask(block_kv)
    assert blocks.block_size == (group, block_kv)
    np.testing.assert_array_equal(blocks.to_tokens(), tokens)
    expected = BlockMask.from_tokens(tokens, (group, block_kv))
    for name in ("indptr", "indices", "partial", "token_bits"):
        np.testing.assert_array_equal(getattr(blocks, name), getattr(expected, name))


def test_blocks_are_made_once() -> None:
    slices = KeySlices.from_groups(np.eye(3, 40, dtype=bool), 16)
    assert slices.to_block_mask() is slices.to_block_mask()
    assert block_mask(slices) is slices.to_block_mask()
    assert slices.to_block_mask().block_size == (16, BLOCK_KV)
    other = BlockMask.from_dense([[1]], (16, 16))
    assert block_mask(other) is other


def test_no_tokens() -> None:
    for shape in ((0, 5), (5, 0), (0, 0)):
        slices = KeySlices.from_groups(np.ones((-(-shape[0] // 16), shape[1]), bool), 16, shape)
        assert (slices.nnz, slices.active_pairs(), slices.density()) == (0, 0, 0)
        assert slices.to_block_mask().to_tokens().shape == (1, 1, *shape)


def test_arrays_cannot_be_written() -> None:
    slices = KeySlices.from_csr([0, 2], [1, 0], 16, (16, 2))
    assert slices.indices.tolist() == [0, 1]
    for array in (slices.indptr, slices.indices):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_later_changes_of_the_source_are_not_seen() -> None:
    indptr, indices = np.array([0, 1]), np.array([1], np.int32)
    slices = KeySlices.from_csr(indptr, indices, 16, (16, 2))
    indptr[1], indices[0] = 0, 0
    assert slices.to_dense().tolist() == [[[[False, True]]]]


def test_it_draws_itself() -> None:
    slices = KeySlices.from_groups([[1, 0, 1], [0, 1, 0]], 16, (20, 3))
    assert repr(slices) == (
        "KeySlices(batch 1, heads 1, 2 groups of 16 rows, 20x3 tokens, density 0.6)\n│▀▄▀│"
    )


class TestRefused:
    @pytest.mark.parametrize("group", [0, 8, 32, 96, 384, -64])
    def test_another_group(self, group: int) -> None:
        for make in (
            lambda: KeySlices.from_csr([0], [], group, (16, 16)),
            lambda: KeySlices.from_lists([[0]], [1], group, (16, 16)),
            lambda: KeySlices.from_groups([[1]], group),
            lambda: KeySlices.from_packed_bits(np.ones((1, 1), np.uint8), group, (16, 1)),
            lambda: KeySlices.from_tokens([[1]], group),
        ):
            with pytest.raises(ValueError, match=r"`group`: expected 16, 64, 128 or 192"):
                make()
        assert group not in GROUPS

    def test_duplicates(self) -> None:
        message = "key 3 twice in batch 1, head 1, group 0"
        with pytest.raises(ValueError, match=message):
            KeySlices.from_csr(
                [0, 1, 2, 3, 4, 5, 6, 9, 9], [0, 1, 2, 3, 4, 5, 3, 1, 3], 64, (100, 8),
                batch=2, heads=2,
            )  # fmt: skip
        lists = np.array([0, 1, 2, 3, 4, 3]).reshape(2, 1, 1, 3)
        with pytest.raises(ValueError, match="key 3 twice in batch 1, head 0, group 0"):
            KeySlices.from_lists(lists, [[[3]], [[3]]], 64, (64, 8))

    @pytest.mark.parametrize("key", [-1, 8, 2**31 + 1])
    def test_keys_out_of_range(self, key: int) -> None:
        message = f"keys from 0 to 7, got key {key} in batch 0, head 1, group 1"
        with pytest.raises(ValueError, match=message):
            KeySlices.from_csr([0, 1, 1, 2, 4], [0, 1, 2, key], 64, (100, 8), heads=2)
        listed = np.zeros((2, 2, 1), np.int64)
        listed[1, 1] = key
        with pytest.raises(ValueError, match=message):
            KeySlices.from_lists(listed, np.ones((2, 2), int), 64, (100, 8))

    @pytest.mark.parametrize(
        ("indptr", "message"),
        [
            ([0, 2], "3 offsets, for 1 x 1 heads of 2 groups"),
            ([0, 3, 2], "falling in between"),
            ([1, 1, 2], "first 1"),
            ([0, 1, 1], "last 1"),
        ],
    )
    def test_offsets_that_do_not_fit(self, indptr: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            KeySlices.from_csr(indptr, [0, 1], 64, (100, 8))

    def test_counts_that_do_not_fit(self) -> None:
        for counts, message in (
            ([1, 3], "0 to 2"),
            ([-1, 1], "0 to 2"),
            ([1], r"shape \(1, 1, 2\)"),
        ):
            with pytest.raises(ValueError, match=message):
                KeySlices.from_lists([[0, 1], [2, 3]], counts, 64, (100, 8))

    def test_numbers_of_groups_and_keys_that_do_not_fit(self) -> None:
        for make in (
            lambda: KeySlices.from_groups(np.ones((3, 8), bool), 64, (100, 8)),
            lambda: KeySlices.from_lists(np.zeros((3, 1), int), [1, 1, 1], 64, (100, 8)),
        ):
            with pytest.raises(ValueError, match="2 groups of 64 for 100 query tokens, got 3"):
                make()
        with pytest.raises(ValueError, match="8 keys, as in shape, got 9"):
            KeySlices.from_groups(np.ones((2, 9), bool), 64, (100, 8))
        with pytest.raises(ValueError, match="one axis"):
            KeySlices.from_csr([0, 1], [[0]], 64, (64, 8))
        with pytest.raises(ValueError, match="at least one batch and one head"):
            KeySlices.from_csr([0], [], 64, (64, 8), heads=0)

    def test_rows_of_a_group_that_differ(self) -> None:
        tokens = np.zeros((2, 2, 100, 30), bool)
        tokens[:, :, 64:, 3] = True
        KeySlices.from_tokens(tokens, 64)
        tokens[1, 0, 99, 29] = tokens[1, 1, 5, 0] = True
        with pytest.raises(ValueError, match=r"row 99 unlike row 64 in batch 1, head 0, group 1"):
            KeySlices.from_tokens(tokens, 64)

    def test_types(self) -> None:
        for make in (
            lambda: KeySlices.from_csr([0.0, 1.0], [0], 64, (64, 8)),
            lambda: KeySlices.from_csr([0, 1], [0.0], 64, (64, 8)),
            lambda: KeySlices.from_lists([[0.0]], [1], 64, (64, 8)),
            lambda: KeySlices.from_groups([[0.5]], 64),
            lambda: KeySlices.from_tokens([[0.5]], 64),
        ):
            with pytest.raises(TypeError, match="integers"):
                make()

    @pytest.mark.parametrize("group", [None, 64.0, True, "64", np.array([16, 64])])
    def test_groups_that_are_no_number(self, group: Any) -> None:
        with pytest.raises(ValueError, match="`group`: expected 16, 64, 128 or 192 query rows"):
            KeySlices.from_groups([[1]], group)

    def test_most_that_is_no_count(self) -> None:
        bits = np.array([[5], [0]], np.uint8)
        for most in (2.5, "3", True):
            with pytest.raises(TypeError, match="`most`: expected an int or None"):
                KeySlices.from_packed_bits(bits, 16, (20, 3), most=most)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="`most`: expected no negative number, got -1"):
            KeySlices.from_packed_bits(bits, 16, (20, 3), most=-1)
        assert KeySlices.from_packed_bits(bits, 16, (20, 3), most=2).nnz == 2

    @pytest.mark.parametrize("block_kv", [0, 8, 20, 392])
    def test_blocks_that_are_not_legal(self, block_kv: int) -> None:
        slices = KeySlices.from_groups([[1]], 64)
        with pytest.raises(ValueError, match="multiples of 8 from 16 to 384"):
            slices.to_block_mask(block_kv)
