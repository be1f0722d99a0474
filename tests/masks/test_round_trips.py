"""Properties: every format gives the same mask, and every number agrees with the token mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_cupy.masks import BlockMask

SIDES = st.sampled_from([16, 24, 32, 40, 64])
LENGTHS = st.integers(0, 150)
AXES = st.integers(1, 3)
SEEDS = st.integers(0, 2**32 - 1)
DENSITIES = st.sampled_from([0.0, 0.02, 0.3, 0.7, 1.0])


def assert_same(left: BlockMask, right: BlockMask) -> None:
    for name in ("block_size", "shape", "batch", "heads", "num_blocks"):
        assert getattr(left, name) == getattr(right, name), name
    for name in (
        "indptr",
        "indices",
        "partial",
        "token_bits",
        "q_block_sizes",
        "kv_block_sizes",
    ):
        a, b = getattr(left, name), getattr(right, name)
        if a is None or b is None:
            assert a is b, name
            continue
        assert a.dtype == b.dtype, name
        np.testing.assert_array_equal(a, b, err_msg=name)


def assert_canonical(mask: BlockMask) -> None:
    nq, nk = mask.num_blocks
    assert mask.indptr.dtype == np.int64
    assert mask.indices.dtype == np.int32
    assert mask.partial.dtype == np.int32
    assert mask.token_bits.dtype == np.uint32
    assert mask.indptr.shape == (mask.batch * mask.heads * nq + 1,)
    assert mask.indptr[0] == 0
    assert mask.indptr[-1] == mask.nnz == len(mask.partial)
    for begin, end in zip(mask.indptr[:-1], mask.indptr[1:], strict=True):
        row = mask.indices[begin:end]
        assert (np.diff(row) > 0).all()
        assert ((row >= 0) & (row < nk)).all()
    used = mask.partial[mask.partial >= 0]
    np.testing.assert_array_equal(used, np.arange(len(mask.token_bits)))
    assert mask.token_bits.any(axis=(1, 2)).all()


def naive_tokens(
    blocks: np.ndarray, q_edges: np.ndarray, kv_edges: np.ndarray, sq: int, skv: int
) -> np.ndarray:
    tokens = np.zeros((*blocks.shape[:2], sq, skv), bool)
    for b, h, i, j in np.argwhere(blocks):
        q, k = q_edges[b, h], kv_edges[b, h]
        tokens[b, h, q[i] : q[i + 1], k[j] : k[j + 1]] = True
    return tokens


def naive_coverage(blocks: np.ndarray) -> float:
    padded = np.pad(blocks, ((0, 0), (0, 0), (0, 0), (1, 1)))
    inside = padded[..., 1:-1] & (padded[..., :-2] | padded[..., 2:])
    return float(inside.sum() / blocks.sum()) if blocks.any() else 0.0


@st.composite
def block_maps(draw: Any) -> tuple[np.ndarray, tuple[int, int], tuple[int, int], Any]:
    block = (draw(SIDES), draw(SIDES))
    shape = (draw(LENGTHS), draw(LENGTHS))
    rng = np.random.default_rng(draw(SEEDS))
    counts = [-(-s // b) for s, b in zip(shape, block, strict=True)]
    blocks = rng.random((draw(AXES), draw(AXES), *counts)) < draw(DENSITIES)
    return blocks, block, shape, rng


def shuffled_lists(blocks: np.ndarray, rng: Any) -> tuple[np.ndarray, np.ndarray]:
    """Columns of each row in random order, with columns that do not count behind them."""
    counts = blocks.sum(-1)
    width = int(counts.max(initial=0)) + 2
    lists = rng.integers(-9, 99, (*blocks.shape[:3], width))
    for place in np.ndindex(blocks.shape[:3]):
        lists[(*place, slice(counts[place]))] = rng.permutation(np.flatnonzero(blocks[place]))
    return lists, counts


@given(block_maps())
@settings(deadline=None)
def test_every_format_gives_the_same_mask(case: Any) -> None:
    blocks, block, shape, rng = case
    batch, heads, nq, nk = blocks.shape
    mask = BlockMask.from_dense(blocks, block, shape)
    assert_canonical(mask)
    np.testing.assert_array_equal(mask.to_dense(), blocks)

    for dtype in (np.uint8, np.int8, np.int64, np.uint32):
        assert_same(mask, BlockMask.from_dense(blocks.astype(dtype), block, shape))
    packed = np.packbits(blocks, axis=-1, bitorder="little")
    assert_same(mask, BlockMask.from_packed_bits(packed, (nq, nk), block, shape))

    lists, counts = shuffled_lists(blocks, rng)
    assert_same(mask, BlockMask.from_lists(lists, counts, nk, block, shape))
    flat = lists[np.arange(lists.shape[-1]) < counts[..., None]]
    indptr = np.concatenate([[0], np.cumsum(counts.ravel())])
    for dtype in (np.uint8, np.int32, np.int64):
        csr = BlockMask.from_csr(
            indptr.astype(np.int32),
            flat.astype(dtype),
            (nq, nk),
            block,
            shape,
            heads=heads,
            batch=batch,
        )
        assert_same(mask, csr)
    assert_same(mask, BlockMask.from_tokens(mask.to_tokens(), block))


@given(block_maps(), DENSITIES)
@settings(deadline=None)
def test_bsr_matrices_give_the_mask_of_their_tokens(case: Any, density: float) -> None:
    blocks, block, shape, rng = case
    if 0 in shape:
        return  # scipy has no BSR matrix without rows or columns
    blocks = blocks[0]
    whole = tuple(n * b for n, b in zip(blocks.shape[1:], block, strict=True))
    tokens = np.repeat(np.repeat(blocks, block[0], axis=1), block[1], axis=2)
    tokens &= rng.random(tokens.shape) < density
    for make in (scipy.sparse.bsr_matrix, scipy.sparse.bsr_array):
        matrices = [make(t.astype(np.float32), blocksize=block) for t in tokens]
        mask = BlockMask.from_bsr(matrices)
        assert_canonical(mask)
        assert_same(mask, BlockMask.from_tokens(tokens, block))
        assert mask.shape == whole
        cut = BlockMask.from_bsr(matrices, shape)
        assert_same(cut, BlockMask.from_tokens(tokens[:, : shape[0], : shape[1]], block))
    assert_same(
        BlockMask.from_bsr(make(tokens[0].astype(np.int8), blocksize=block)),
        BlockMask.from_tokens(tokens[0], block),
    )


@given(AXES, AXES, LENGTHS, LENGTHS, SIDES, SIDES, DENSITIES, DENSITIES, SEEDS)
@settings(deadline=None)
def test_token_masks_come_back_exactly(
    batch: int,
    heads: int,
    sq: int,
    skv: int,
    bq: int,
    bkv: int,
    blocks: float,
    density: float,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    nq, nk = -(-sq // bq), -(-skv // bkv)
    coarse = rng.random((batch, heads, nq, nk)) < blocks
    tokens = np.repeat(np.repeat(coarse, bq, axis=2), bkv, axis=3)[:, :, :sq, :skv]
    # Cut into half of the blocks only, so that full ones stay.
    mixed = rng.random(coarse.shape) < 0.5
    mixed = np.repeat(np.repeat(mixed, bq, axis=2), bkv, axis=3)[:, :, :sq, :skv]
    tokens = tokens & (~mixed | (rng.random(tokens.shape) < density))

    mask = BlockMask.from_tokens(tokens, (bq, bkv))
    assert_canonical(mask)
    np.testing.assert_array_equal(mask.to_tokens(), tokens)
    assert mask.active_pairs() == tokens.sum()
    assert mask.density() == (tokens.mean() if tokens.size else 0.0)
    assert mask.run_coverage() == naive_coverage(mask.to_dense())
    np.testing.assert_array_equal(mask.row_counts(), mask.to_dense().sum(-1))
    for place in np.ndindex(coarse.shape):
        b, h, i, j = place
        region = tokens[b, h, i * bq : (i + 1) * bq, j * bkv : (j + 1) * bkv]
        row = (b * heads + h) * nq + i
        span = slice(mask.indptr[row], mask.indptr[row + 1])
        found = np.flatnonzero(mask.indices[span] == j)
        assert len(found) == region.any()
        if len(found):
            assert (mask.partial[span][found[0]] < 0) == region.all()
    again = BlockMask.from_csr(
        mask.indptr,
        mask.indices,
        mask.num_blocks,
        mask.block_size,
        mask.shape,
        heads=heads,
        batch=batch,
        partial=mask.partial,
        token_bits=mask.token_bits,
    )
    assert_same(mask, again)


def cut(rng: Any, axes: tuple[int, int], blocks: int, tokens: int) -> np.ndarray:
    """Random sizes, zeros among them, that sum to ``tokens`` in each head."""
    edges = np.sort(rng.integers(0, tokens + 1, (*axes, blocks - 1)), axis=-1)
    ends = np.full((*axes, 1), tokens)
    return np.diff(np.concatenate([np.zeros_like(ends), edges, ends], axis=-1))


@st.composite
def ragged(draw: Any) -> dict[str, Any]:
    rng = np.random.default_rng(draw(SEEDS))
    batch, heads = draw(AXES), draw(AXES)
    axes = st.sampled_from([(1, 1), (1, heads), (batch, 1), (batch, heads)])
    sq, skv = draw(st.integers(0, 90)), draw(st.integers(0, 90))
    nq, nk = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    q_sizes = cut(rng, draw(axes), nq, sq) if draw(st.booleans()) else None
    kv_sizes = cut(rng, draw(axes), nk, skv)
    if q_sizes is None:
        nq = -(-sq // 16)
    blocks = rng.random((*draw(axes), nq, nk)) < draw(DENSITIES)
    return {
        "blocks": blocks,
        "q_sizes": q_sizes,
        "kv_sizes": kv_sizes,
        "block": (16, draw(st.integers(1, 20))),
        "shape": (sq, skv),
        "rng": rng,
        "density": draw(DENSITIES),
    }


@given(ragged())
@settings(max_examples=150, deadline=None)
def test_ragged_blocks_lie_where_their_sizes_say(case: dict[str, Any]) -> None:
    blocks, q_sizes, kv_sizes, shape = (
        case[name] for name in ("blocks", "q_sizes", "kv_sizes", "shape")
    )
    kwargs = {"q_block_sizes": q_sizes, "kv_block_sizes": kv_sizes}
    mask = BlockMask.from_dense(blocks, case["block"], shape, **kwargs)
    assert_canonical(mask)
    axes = np.broadcast_shapes(
        blocks.shape[:2],
        kv_sizes.shape[:2],
        (1, 1) if q_sizes is None else q_sizes.shape[:2],
    )
    assert (mask.batch, mask.heads) == axes
    nq, nk = blocks.shape[2:]
    assert mask.num_blocks == (nq, nk)
    assert mask.kv_block_sizes is not None
    assert mask.kv_block_sizes.shape == (*axes, nk)
    assert mask.kv_block_sizes.dtype == np.int32

    wide = np.broadcast_to(blocks, (*axes, nq, nk))
    q_edges = np.broadcast_to(mask.q_starts(), (*axes, nq + 1))
    kv_edges = np.broadcast_to(mask.kv_starts(), (*axes, nk + 1))
    np.testing.assert_array_equal(
        np.diff(kv_edges), np.broadcast_to(kv_sizes, (*axes, kv_sizes.shape[2]))
    )
    if q_sizes is not None:
        np.testing.assert_array_equal(np.diff(q_edges), np.broadcast_to(q_sizes, (*axes, nq)))
    tokens = naive_tokens(wide, q_edges, kv_edges, *shape)
    np.testing.assert_array_equal(mask.to_tokens(), tokens)
    assert mask.active_pairs() == tokens.sum()
    areas = np.diff(q_edges)[..., :, None] * np.diff(kv_edges)[..., None, :]
    np.testing.assert_array_equal(mask.to_dense(), wide & (areas > 0))

    lists, counts = shuffled_lists(blocks, case["rng"])
    assert_same(mask, BlockMask.from_lists(lists, counts, nk, case["block"], shape, **kwargs))
    packed = np.packbits(blocks, axis=-1, bitorder="little")
    assert_same(mask, BlockMask.from_packed_bits(packed, (nq, nk), case["block"], shape, **kwargs))


@given(ragged())
@settings(max_examples=150, deadline=None)
def test_ragged_blocks_keep_their_token_bits(case: dict[str, Any]) -> None:
    blocks, q_sizes, kv_sizes, rng = (
        case[name] for name in ("blocks", "q_sizes", "kv_sizes", "rng")
    )
    batch, heads, nq, nk = blocks.shape
    rows = 16 if q_sizes is None else int(q_sizes.max())
    columns = int(kv_sizes.max())
    width = -(-columns // 32)
    counts = blocks.sum(-1)
    flat = np.argwhere(blocks)[:, 3]
    cells = rng.random((len(flat) + 2, rows, 32 * width)) < case["density"]
    bits = np.packbits(cells, axis=-1, bitorder="little").view(np.uint32)
    # Any order, one pattern unused, some blocks full.
    partial = rng.permutation(len(bits))[: len(flat)]
    partial[rng.random(len(flat)) < 0.3] = -1
    mask = BlockMask.from_csr(
        np.concatenate([[0], np.cumsum(counts.ravel())]),
        flat,
        (nq, nk),
        case["block"],
        case["shape"],
        heads=heads,
        batch=batch,
        q_block_sizes=q_sizes,
        kv_block_sizes=kv_sizes,
        partial=partial,
        token_bits=bits,
    )
    assert_canonical(mask)
    tokens = np.zeros((mask.batch, mask.heads, *case["shape"]), bool)
    q_edges = np.broadcast_to(mask.q_starts(), (mask.batch, mask.heads, nq + 1))
    kv_edges = np.broadcast_to(mask.kv_starts(), (mask.batch, mask.heads, nk + 1))
    entry = np.cumsum(blocks.ravel()).reshape(blocks.shape) - 1
    wide = np.broadcast_to(blocks, (mask.batch, mask.heads, nq, nk))
    entry = np.broadcast_to(entry, wide.shape)
    for place in zip(*np.nonzero(wide), strict=True):
        b, h, i, j = place
        q0, q1 = q_edges[b, h, i : i + 2]
        k0, k1 = kv_edges[b, h, j : j + 2]
        which = partial[entry[place]]
        tokens[b, h, q0:q1, k0:k1] = True if which < 0 else cells[which, : q1 - q0, : k1 - k0]
    np.testing.assert_array_equal(mask.to_tokens(), tokens)
    assert mask.active_pairs() == tokens.sum()


@given(block_maps())
@settings(deadline=None)
def test_shuffled_columns_keep_their_bits(case: Any) -> None:
    blocks, block, shape, rng = case
    tokens = BlockMask.from_dense(blocks, block, shape).to_tokens()
    tokens &= rng.random(tokens.shape) < 0.5
    mask = BlockMask.from_tokens(tokens, block)
    order = np.concatenate(
        [np.zeros(0, int)]
        + [
            rng.permutation(np.arange(begin, end))
            for begin, end in zip(mask.indptr[:-1], mask.indptr[1:], strict=True)
        ]
    )
    shuffled = BlockMask.from_csr(
        mask.indptr,
        mask.indices[order],
        mask.num_blocks,
        block,
        shape,
        heads=mask.heads,
        batch=mask.batch,
        partial=mask.partial[order],
        token_bits=mask.token_bits,
    )
    assert_same(mask, shuffled)


def test_chunks_join_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    tokens = rng.random((2, 3, 400, 330)) < 0.01
    blocks = rng.random((2, 3, 25, 21)) < 0.4
    whole = BlockMask.from_tokens(tokens, (16, 16)), BlockMask.from_dense(blocks, (16, 16))
    for module in ("bits", "entries"):
        monkeypatch.setattr(f"tessera_cupy.masks.{module}._CHUNK", 50)
    monkeypatch.setattr("tessera_cupy.masks.bits._PANEL", 16 * 330 * 4)
    cut_up = BlockMask.from_tokens(tokens, (16, 16)), BlockMask.from_dense(blocks, (16, 16))
    for left, right in zip(whole, cut_up, strict=True):
        assert_same(left, right)
    np.testing.assert_array_equal(cut_up[0].to_tokens(), tokens)
    np.testing.assert_array_equal(cut_up[1].to_dense(), blocks)
