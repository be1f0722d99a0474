"""BlockMask: contents, sizes at the extremes, snapshots, and refusals that explain themselves."""

from __future__ import annotations

import pickle
import re
from typing import Any

import numpy as np
import pytest
import scipy.sparse

from tessera_cupy.masks import BlockMask

UNIFORM = (64, 64)


def test_a_small_mask_in_full() -> None:
    mask = BlockMask.from_dense([[1, 0, 1], [0, 1, 1]], (64, 32), shape=(100, 90))
    assert mask.block_size == (64, 32)
    assert mask.shape == (100, 90)
    assert (mask.batch, mask.heads) == (1, 1)
    assert mask.num_blocks == (2, 3)
    assert mask.nnz == 4
    assert mask.indptr.tolist() == [0, 2, 4]
    assert mask.indices.tolist() == [0, 2, 1, 2]
    assert mask.partial.tolist() == [-1] * 4
    assert mask.token_bits.shape == (0, 64, 1)
    assert mask.q_starts().tolist() == [[[0, 64, 100]]]
    assert mask.kv_starts().tolist() == [[[0, 32, 64, 90]]]
    assert mask.row_counts().tolist() == [[[2, 2]]]
    assert mask.active_pairs() == 64 * (32 + 26) + 36 * (32 + 26)
    assert mask.density() == mask.active_pairs() / 9000
    assert mask.run_coverage() == 0.5
    assert mask.nbytes == 3 * 8 + 4 * 4 + 4 * 4
    assert mask.device is None


def test_token_bits_have_the_documented_order() -> None:
    tokens = np.zeros((40, 50), bool)
    tokens[3, 41] = True
    mask = BlockMask.from_tokens(tokens, (40, 48))
    assert mask.token_bits.shape == (1, 40, 2)
    row, word = np.argwhere(mask.token_bits[0])[0]
    assert (row, word) == (3, 1)
    assert mask.token_bits[0, 3, 1] == 1 << (41 % 32)


def test_one_full_mask_for_all_heads_at_video_length_does_not_overflow() -> None:
    blocks = 6700
    mask = BlockMask.from_dense(np.broadcast_to(np.True_, (1, 1, blocks, blocks)), UNIFORM)
    assert mask.nnz == blocks**2
    assert mask.active_pairs() == (blocks * 64) ** 2  # 1.8e11
    assert mask.density() == 1.0
    assert mask.run_coverage() == 1.0


def test_many_full_heads_do_not_overflow() -> None:
    mask = BlockMask.from_dense(np.ones((48, 384, 384), bool), (128, 128), (49_152, 49_100))
    assert mask.active_pairs() == 48 * 49_152 * 49_100
    assert mask.density() == 1.0
    ragged = BlockMask.from_dense([[1]], (64, 64), kv_block_sizes=[70_000], q_block_sizes=[70_000])
    assert ragged.active_pairs() == 70_000**2


@pytest.mark.parametrize("shape", [(0, 0), (0, 130), (130, 0)])
def test_no_queries_or_no_keys(shape: tuple[int, int]) -> None:
    counts = tuple(-(-s // 64) for s in shape)
    masks = [
        BlockMask.from_dense(np.ones((2, *counts), bool), UNIFORM, shape),
        BlockMask.from_tokens(np.ones((2, *shape), bool), UNIFORM),
        BlockMask.from_csr(np.zeros(2 * counts[0] + 1, int), [], counts, UNIFORM, shape, heads=2),
        BlockMask.from_packed_bits(
            np.zeros((2, counts[0], -(-counts[1] // 8)), np.uint8), counts, UNIFORM, shape
        ),
        BlockMask.from_lists(
            np.zeros((2, counts[0], 0), int),
            np.zeros((2, counts[0]), int),
            counts[1],
            UNIFORM,
            shape,
        ),
    ]
    for mask in masks:
        assert mask.shape == shape
        assert mask.num_blocks == counts
        assert mask.nnz == mask.active_pairs() == 0
        assert mask.density() == mask.run_coverage() == 0.0
        assert mask.to_dense().shape == (1, 2, *counts)
        assert mask.to_tokens().shape == (1, 2, *shape)
        assert repr(mask)


def test_one_token() -> None:
    mask = BlockMask.from_dense([[1]], UNIFORM, (1, 1))
    assert mask.num_blocks == (1, 1)
    assert mask.active_pairs() == 1
    assert mask.density() == 1.0
    assert mask.to_tokens().tolist() == [[[[True]]]]
    exact = BlockMask.from_tokens([[True]], UNIFORM)
    assert exact.partial.tolist() == [-1]
    assert BlockMask.from_tokens([[False]], UNIFORM).nnz == 0


def test_an_empty_mask_has_no_runs_and_no_pairs() -> None:
    mask = BlockMask.from_dense(np.zeros((3, 4, 5), bool), UNIFORM)
    assert mask.run_coverage() == mask.density() == 0.0
    assert not mask.to_tokens().any()


def test_runs_end_with_their_row() -> None:
    assert BlockMask.from_dense([[0, 1], [1, 0]], UNIFORM).run_coverage() == 0.0
    # The last column of one row and the next row's second: neighbours only in memory.
    assert BlockMask.from_dense([[1, 0, 0], [0, 1, 0]], UNIFORM).run_coverage() == 0.0
    assert BlockMask.from_dense([[1, 1, 0, 1]], UNIFORM).run_coverage() == 2 / 3


def test_sizes_with_more_heads_expand_the_mask() -> None:
    sizes = np.array([[30, 0, 34], [10, 20, 34]])
    mask = BlockMask.from_dense([[1, 1, 0]], (64, 30), kv_block_sizes=sizes)
    assert (mask.batch, mask.heads) == (1, 2)
    assert mask.shape == (64, 64)
    # Head 0's second block has no keys, so it is not listed.
    assert mask.indptr.tolist() == [0, 1, 3]
    assert mask.indices.tolist() == [0, 0, 1]
    assert mask.kv_starts().tolist() == [[[0, 30, 30, 64], [0, 10, 30, 64]]]
    assert mask.q_starts().tolist() == [[[0, 64]]]
    assert mask.active_pairs() == 64 * (30 + 30)


def test_a_batch_of_masks_is_repeated_for_each_head_of_the_sizes() -> None:
    blocks = np.array([[[[1, 0]]], [[[1, 1]]]], bool)
    sizes = np.array([[2, 3], [1, 4], [4, 1]])
    mask = BlockMask.from_dense(blocks, (64, 5), kv_block_sizes=sizes)
    assert (mask.batch, mask.heads) == (2, 3)
    assert mask.row_counts()[..., 0].tolist() == [[1, 1, 1], [2, 2, 2]]
    assert mask.to_tokens()[0, :, 0].sum(-1).tolist() == [2, 1, 4]
    assert mask.to_tokens()[1].all()


def test_later_changes_to_the_source_are_not_seen() -> None:
    dense = np.eye(3, dtype=bool)
    tokens = np.zeros((64, 64), bool)
    tokens[5, 7] = True
    indptr, indices = np.array([0, 1, 1, 2]), np.array([1, 2], np.int32)
    partial, bits = np.array([0, -1], np.int32), np.full((1, 64, 2), 5, np.uint32)
    counts = np.array([1, 0, 2], np.int64)
    lists = np.array([[1, 0], [0, 0], [0, 2]], np.int32)
    sizes = np.array([[[64, 32, 96]]], np.int32)
    packed = np.packbits(dense, axis=-1, bitorder="little")
    bsr = scipy.sparse.bsr_array(tokens.astype(np.int8), blocksize=(64, 64))
    sources = [
        dense,
        tokens,
        indptr,
        indices,
        partial,
        bits,
        counts,
        lists,
        sizes,
        packed,
        bsr.data,
    ]

    masks = [
        BlockMask.from_dense(dense, UNIFORM),
        BlockMask.from_dense(dense.view(np.uint8), UNIFORM, q_block_sizes=sizes),
        BlockMask.from_tokens(tokens, UNIFORM),
        BlockMask.from_csr(indptr, indices, (3, 3), UNIFORM, partial=partial, token_bits=bits),
        BlockMask.from_csr(indptr, indices, (3, 3), UNIFORM),
        BlockMask.from_lists(lists, counts, 3, UNIFORM),
        BlockMask.from_packed_bits(packed, (3, 3), UNIFORM),
        BlockMask.from_bsr(bsr),
    ]
    before = [mask.to_tokens() for mask in masks]
    for source in sources:
        source[...] = 1 - source if source.dtype != bool else ~source
    for mask, tokens_before in zip(masks, before, strict=True):
        np.testing.assert_array_equal(mask.to_tokens(), tokens_before)


def test_the_arrays_are_read_only() -> None:
    mask = BlockMask.from_dense([[1, 0]], UNIFORM, kv_block_sizes=[3, 4], q_block_sizes=[9])
    for array in (
        mask.indptr,
        mask.indices,
        mask.partial,
        mask.token_bits,
        mask.q_block_sizes,
        mask.kv_block_sizes,
        mask.q_starts(),
        mask.kv_starts(),
    ):
        assert array is not None
        assert not array.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def test_masks_pickle() -> None:
    mask = BlockMask.from_tokens(np.tri(100, dtype=bool), (16, 32))
    mask.density()
    again = pickle.loads(pickle.dumps(mask))
    np.testing.assert_array_equal(again.to_tokens(), mask.to_tokens())
    assert again.density() == mask.density()


def test_non_contiguous_sources_are_read_by_their_strides() -> None:
    rng = np.random.default_rng(0)
    wide = rng.random((2, 8, 10, 12)) < 0.5
    view = wide[:, ::2, ::-1, 1::3]
    np.testing.assert_array_equal(BlockMask.from_dense(view, UNIFORM).to_dense(), view)
    turned = wide[0].transpose(0, 2, 1)
    np.testing.assert_array_equal(BlockMask.from_dense(turned, UNIFORM).to_dense()[0], turned)
    tokens = (rng.random((50, 70)) < 0.3).T
    np.testing.assert_array_equal(BlockMask.from_tokens(tokens, (16, 24)).to_tokens()[0, 0], tokens)


SQUARE = np.ones((20, 20), bool)


def refusals() -> dict[str, tuple[Any, list[str]]]:
    """Wrong calls by name, each with what its message must say."""
    dense, csr, lists = BlockMask.from_dense, BlockMask.from_csr, BlockMask.from_lists
    packed, bsr = BlockMask.from_packed_bits, BlockMask.from_bsr
    bits = np.zeros((1, 64, 2), np.uint32)
    matrix = scipy.sparse.bsr_array(np.eye(64), blocksize=(32, 32))
    other = scipy.sparse.bsr_array(np.eye(64), blocksize=(16, 16))
    one = [[0, 1], [0], (1, 1), UNIFORM]
    return {
        "another length": (
            lambda: dense(SQUARE, UNIFORM, (1200, 1280)),
            [
                "`shape`",
                "1217 to 1280 query",
                "20 blocks of 64",
                "1200 tokens",
                "19 blocks",
                "such as shape=(1280, 1280)",
            ],
        ),
        "another key length": (
            lambda: dense(SQUARE, UNIFORM, (1280, 1200)),
            ["`shape`", "1217 to 1280 key", "20 blocks of 64", "1200 tokens", "19 blocks"],
        ),
        "another length beside ragged keys": (
            lambda: dense([[1, 1]], UNIFORM, (100, 100), kv_block_sizes=[60, 40]),
            ["`shape`", "1 to 64 query", "such as shape=(64, 100)"],
        ),
        "64 declared as 128": (
            lambda: dense(SQUARE, (128, 128), (1280, 1280)),
            ["`shape`", "2433 to 2560 query", "20 blocks of 128", "1280 tokens", "10 blocks"],
        ),
        "empty mask for tokens": (
            lambda: dense(np.ones((0, 3), bool), UNIFORM, (10, 192)),
            ["`shape`", "expected 0 query tokens", "got 10 tokens"],
        ),
        "negative shape": (lambda: dense(SQUARE, UNIFORM, (-1, 5)), ["`shape`", "(-1, 5)"]),
        "shape of floats": (lambda: dense(SQUARE, UNIFORM, (1.5, 5)), ["`shape`", "(1.5, 5)"]),
        "one block size": (lambda: dense(SQUARE, 64), ["`block_size`", "two integers", "64"]),
        "odd block": (
            lambda: dense(SQUARE, (20, 64)),
            [
                "`block_size`",
                "multiples of 8 from 16 to 384",
                "20 on the query side",
                "ragged blocks one by one",
            ],
        ),
        "tiny block": (lambda: dense(SQUARE, (64, 8)), ["`block_size`", "8 on the key side"]),
        "huge block": (lambda: dense(SQUARE, (392, 64)), ["`block_size`", "392 on the query"]),
        "no block": (lambda: dense(SQUARE, (0, 64)), ["`block_size`", "0 on the query side"]),
        "token block": (lambda: BlockMask.from_tokens(SQUARE, (4, 64)), ["`block_size`", "4 on"]),
        "ragged nominal": (
            lambda: dense([[1]], (0, 64), q_block_sizes=[5]),
            ["`block_size`", "positive", "(0, 64)"],
        ),
        "too few sizes": (
            lambda: dense(SQUARE, UNIFORM, kv_block_sizes=[64] * 19),
            ["`kv_block_sizes`", "20 key blocks", "19 sizes"],
        ),
        "negative size": (
            lambda: dense([[1, 1]], UNIFORM, kv_block_sizes=[-1, 65]),
            ["`kv_block_sizes`", "values -1 to 65"],
        ),
        "sum of sizes": (
            lambda: dense([[1, 1]], UNIFORM, (64, 100), kv_block_sizes=[[60, 40], [60, 41]]),
            ["`kv_block_sizes`", "sum to 100 key tokens", "101 in batch 0, head 1"],
        ),
        "uneven sums": (
            lambda: dense([[1], [1]], UNIFORM, q_block_sizes=[[60, 40], [60, 41]]),
            ["`q_block_sizes`", "sum to 100 query tokens", "101 in batch 0, head 1"],
        ),
        "heads of sizes": (
            lambda: dense(np.ones((3, 1, 1), bool), UNIFORM, kv_block_sizes=[[64], [64]]),
            ["`kv_block_sizes`", "1 or 3 along heads", "got 2"],
        ),
        "column past the end": (
            lambda: csr([0, 1, 3], [0, 1, 3], (2, 3), UNIFORM),
            [
                "`indices`",
                "0 to 2",
                "column 3 in batch 0, head 0, row 1",
                "give num_blocks as (query, key) blocks",
            ],
        ),
        "negative column": (
            lambda: csr([0, 0, 1, 2, 2], [0, -1], (2, 3), UNIFORM, heads=2),
            ["`indices`", "column -1 in batch 0, head 1, row 0"],
        ),
        "column past int32": (
            lambda: csr([0, 1], np.array([2**32], np.int64), (1, 3), UNIFORM),
            ["`indices`", f"column {2**32} in batch 0, head 0, row 0"],
        ),
        "duplicate column": (
            lambda: csr(
                [0, 1, 1, 1, 1, 1, 1, 1, 4], [0, 2, 1, 2], (2, 3), UNIFORM, heads=2, batch=2
            ),
            ["`indices`", "at most once", "column 2 twice in batch 1, head 1, row 1"],
        ),
        "sorted duplicate": (
            lambda: csr([0, 2], [1, 1], (1, 3), UNIFORM),
            ["`indices`", "column 1 twice in batch 0, head 0, row 0"],
        ),
        "short indptr": (
            lambda: csr([0, 1], [0], (2, 3), UNIFORM, heads=2),
            ["`indptr`", "5 offsets", "1 x 2 heads of 2 rows", "shape (2,)"],
        ),
        "indptr starts late": (lambda: csr([1, 1], [0], (1, 3), UNIFORM), ["`indptr`", "first 1"]),
        "indptr ends early": (
            lambda: csr([0, 1], [0, 1], (1, 3), UNIFORM),
            ["`indptr`", "from 0 to 2", "last 1"],
        ),
        "indptr falls": (
            lambda: csr([0, 2, 1, 3], [0, 1, 2], (3, 3), UNIFORM),
            ["`indptr`", "rise", "falling in between"],
        ),
        "indices of two axes": (
            lambda: csr([0, 1], [[0]], (1, 1), UNIFORM),
            ["`indices`", "one axis", "shape (1, 1)"],
        ),
        "no heads": (
            lambda: csr([0], [], (1, 1), UNIFORM, heads=0),
            ["`batch, heads`", "at least one", "(1, 0)"],
        ),
        "partial alone": (lambda: csr(*one, partial=[0]), ["`token_bits`", "partial is given"]),
        "bits alone": (lambda: csr(*one, token_bits=bits), ["`partial`", "token_bits is given"]),
        "bits of bytes": (
            lambda: csr(*one, partial=[0], token_bits=bits.view(np.uint8)),
            ["`token_bits`", "uint32", "uint8"],
        ),
        "shape of bits": (
            lambda: csr(*one, partial=[0], token_bits=bits[:, :, :1]),
            ["`token_bits`", "(P, 64, 2)", "(1, 64, 1)"],
        ),
        "length of partial": (
            lambda: csr(*one, partial=[0, 0], token_bits=bits),
            ["`partial`", "shape (1,)", "shape (2,)"],
        ),
        "partial past the end": (
            lambda: csr(*one, partial=[1], token_bits=bits),
            ["`partial`", "-1 to 0", "values 1 to 1"],
        ),
        "partial below -1": (
            lambda: csr(*one, partial=[-2], token_bits=bits),
            ["`partial`", "-1 to 0", "values -2 to -2"],
        ),
        "negative count": (
            lambda: lists([[0, 1]], [-1], 3, UNIFORM),
            ["`counts`", "0 to 2", "values -1 to -1"],
        ),
        "count past the width": (
            lambda: lists([[0, 1]], [3], 3, UNIFORM),
            ["`counts`", "0 to 2", "values 3 to 3"],
        ),
        "shape of counts": (
            lambda: lists([[0, 1]], [1, 1], 3, UNIFORM),
            ["`counts`", "(1, 1, 1)", "(1, 1, 2)"],
        ),
        "listed column": (
            lambda: lists([[[0, 9], [9, 9]], [[0, 9], [1, 9]]], [[1, 0], [1, 2]], 3, UNIFORM),
            ["`indices`", "0 to 2", "column 9 in batch 0, head 1, row 1", "entries past counts"],
        ),
        "listed duplicate": (
            lambda: lists([[0, 1, 2], [2, 0, 2]], [3, 3], 3, UNIFORM),
            ["`indices`", "column 2 twice in batch 0, head 0, row 1"],
        ),
        "negative columns": (lambda: lists([[0]], [0], -1, UNIFORM), ["`num_kv_blocks`", "-1"]),
        "bits of int": (
            lambda: packed(np.zeros((1, 1), int), (1, 8), UNIFORM),
            ["`bits`", "uint8", "dtype int64"],
        ),
        "width of bits": (
            lambda: packed(np.zeros((2, 1), np.uint8), (2, 9), UNIFORM),
            ["`bits`", "2 rows of 2 bytes for 2 x 9 blocks", "(2, 1)"],
        ),
        "big-endian bits": (
            lambda: packed(np.packbits([[1, 0, 0]], axis=-1), (1, 3), UNIFORM),
            ["`bits`", "zeros past column 2", 'bitorder="little"'],
        ),
        "CSR matrix": (
            lambda: csr(scipy.sparse.csr_matrix(np.eye(64))),  # type: ignore[call-arg]
            ["`indptr`", "csr_matrix", "matrix.indptr, matrix.indices, matrix.shape", "from_bsr"],
        ),
        "CSR array with a block size": (
            lambda: csr(indptr=scipy.sparse.csr_array(np.eye(64)), block_size=UNIFORM),  # type: ignore[call-arg]
            ["`indptr`", "csr_array", "matrix.indptr, matrix.indices, matrix.shape", "from_bsr"],
        ),
        "sparse matrix as a mask": (
            lambda: dense(scipy.sparse.csr_array(np.eye(64)), UNIFORM),
            ["`mask`", "csr_array", ".toarray()", "from_bsr"],
        ),
        "no BSR": (
            lambda: bsr(scipy.sparse.csr_array(np.eye(32))),
            ["`bsr`", "bsr_array", "csr_array", "tobsr"],
        ),
        "unlike BSR": (lambda: bsr([matrix, other]), ["`bsr`", "(32, 32)", "(16, 16)"]),
        "no BSR at all": (lambda: bsr([]), ["`bsr`", "one matrix a head"]),
        "BSR length": (
            lambda: bsr(matrix, (30, 64)),
            ["`shape`", "33 to 64 query", "2 blocks of 32", "30 tokens"],
        ),
    }


@pytest.mark.parametrize("name", refusals())
def test_refusals_name_argument_expected_got_and_fix(name: str) -> None:
    call, words = refusals()[name]
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    message = str(caught.value)
    assert re.fullmatch(r"`[\w, ]+`: expected .+, got .+\. Fix: .+\.", message), message
    for word in words:
        assert word in message


def test_arrays_of_a_csr_matrix_of_blocks_are_what_the_message_says() -> None:
    blocks = scipy.sparse.csr_matrix(np.tri(4))
    mask = BlockMask.from_csr(blocks.indptr, blocks.indices, blocks.shape, UNIFORM)
    np.testing.assert_array_equal(mask.to_dense()[0, 0], np.tri(4, dtype=bool))


def test_advice_names_only_what_a_constructor_takes() -> None:
    small = scipy.sparse.bsr_array(np.eye(64), blocksize=(4, 64))
    for call in (
        lambda: BlockMask.from_tokens(SQUARE, (4, 64)),
        lambda: BlockMask.from_bsr(small),
    ):
        with pytest.raises(ValueError, match="4 on the query side") as caught:
            call()
        assert "ragged" not in str(caught.value)
    assert ".tobsr(blocksize=(64, 64))" in str(caught.value)
    with pytest.raises(ValueError, match="column 5") as caught:
        BlockMask.from_csr([0, 1], [5], (1, 3), UNIFORM)
    assert "counts" not in str(caught.value)


def test_duplicate_bsr_blocks_are_refused() -> None:
    matrix = scipy.sparse.bsr_array(
        (np.ones((2, 32, 32)), np.array([1, 1]), np.array([0, 2, 2])), shape=(64, 64)
    )
    with pytest.raises(ValueError, match="column 1 twice in batch 0, head 0, row 0"):
        BlockMask.from_bsr(matrix)
