"""Empty rows, tails, tiny inputs: what a loop that rounds down or divides by zero gets wrong."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from tessera_cupy import BlockMask, block_sparse_attention, make_plan, reference
from tessera_cupy.kernels.catalog import catalog
from tessera_cupy.mapping import Mapping

#: Every geometry of a physical tile on one architecture, with one plan each.
TILES = sorted({(c.tile_q, c.tile_kv) for c in catalog("sm_90a") if c.kernel == "attend_mma"})
PACKED = [f"attend_mma/q{q}k{kv}/retain-pack/longest+split" for q, kv in TILES]


@pytest.mark.parametrize("plan", PACKED)
def test_an_empty_row_of_blocks_gives_zeros(case: Any, random_mask: Any, plan: str) -> None:
    blocks = random_mask(np.random.default_rng(1), (64, 64), (256, 256)).to_dense()
    blocks[..., 2, :] = False
    case_ = case(BlockMask.from_dense(blocks, (64, 64)))
    out, lse = case_.run(regime=plan)
    assert (out[0, 0, 128:192] == 0).all()
    assert np.isneginf(lse[0, 0, 128:192]).all()
    assert np.isfinite(np.delete(lse, range(128, 192), axis=2)).all()


@pytest.mark.parametrize("tokens", [200, 137, 9, 1])
@pytest.mark.parametrize("block", [64, 128])
def test_tails(case: Any, random_mask: Any, tokens: int, block: int) -> None:
    case_ = case(random_mask(np.random.default_rng(tokens), (block, block), (tokens, tokens)))
    assert case_.mask.num_blocks == (-(-tokens // block),) * 2
    out, _ = case_.run()
    # Each of the last rows by itself: the largest error could hide one that is zero.
    assert np.abs(out[0, 0, -1] - case_.exact[0][0, 0, -1]).max() < 1e-4
    assert (out[0, 0] != 0).any(axis=1).all()


@pytest.mark.parametrize("plan", PACKED)
@pytest.mark.parametrize(
    ("sq", "skv", "block"), [(1001, 503, 64), (1, 512, 64), (192, 320, 128), (257, 130, 16)]
)
def test_lengths_that_no_block_divides(
    case: Any, random_mask: Any, sq: int, skv: int, block: int, plan: str
) -> None:
    if block == 128 and "/q64" in plan:
        plan = plan.replace("retain-", "split-")
    rng = np.random.default_rng(sq)
    case(random_mask(rng, (block, block), (sq, skv)), dim=16).run(regime=plan)


def test_one_key_gives_its_value(case: Any) -> None:
    case_ = case(BlockMask.from_dense([[True]], (64, 64), (1, 1)), dtype="float16")
    out, lse = case_.run()
    np.testing.assert_array_equal(out, case_.v)
    score = (case_.q.astype(np.float64) * case_.k).sum() / 8
    np.testing.assert_allclose(lse.item(), score, rtol=1e-5)


@pytest.mark.parametrize("plan", PACKED)
def test_a_first_tile_without_valid_keys(case: Any, plan: str) -> None:
    tokens = np.zeros((64, 256), bool)
    tokens[:32, :128] = True  # other rows keep the tile from being dropped
    tokens[32:, 192:] = True
    tokens[40:48] = False
    case_ = case(BlockMask.from_tokens(tokens, (64, 64)))
    assert len(case_.mask.token_bits)
    out, lse = case_.run(regime=plan)
    assert np.isneginf(lse[0, 0, 40:48]).all()
    assert np.isfinite(out).all()


@pytest.mark.parametrize("reverse", ["", "+alternate"])
def test_a_split_with_a_part_without_keys(case: Any, reverse: str) -> None:
    # The second half of the keys is kept by the first rows only, and split-K cuts there.
    skv = 64 * 64
    tokens = np.ones((64, skv), bool)
    tokens[16:, skv // 2 :] = False
    tokens[32:, :] = False
    tokens[48:, skv // 2 :] = True
    case_ = case(BlockMask.from_tokens(tokens, (64, 64)), dim=16)
    name = f"attend_mma/q64k64/retain-pack/longest{reverse}+split"
    plan = make_plan(case_.mask, *case_.arrays, regime=name)
    assert plan.tasks().slots >= 4
    out, lse = plan.run(*case_.arrays, return_lse=True)
    case_.check(out, lse)


@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
@pytest.mark.parametrize(
    ("shape", "blocks"),
    [
        ((100, 0), np.ones((2, 0), bool)),
        ((100, 70), np.zeros((2, 2), bool)),
        ((0, 70), np.ones((0, 2), bool)),
        ((0, 0), np.ones((0, 0), bool)),
    ],
    ids=["no keys", "all empty", "no queries", "nothing"],
)
def test_no_work_at_all(case: Any, shape: tuple[int, int], blocks: Any, layout: str) -> None:
    case_ = case(BlockMask.from_dense(blocks, (64, 64), shape), batch=2, kv_heads=3, layout=layout)
    out = np.full(case_.q.shape, np.nan, np.float32)
    result, lse = case_.run(out=out)
    assert (result == 0).all()
    assert lse.shape == (2, 3, shape[0])
    assert np.isneginf(lse).all()


def test_an_empty_batch(case: Any) -> None:
    mask = BlockMask.from_dense([[True]], (64, 64))
    q = np.zeros((0, 2, 64, 16), np.float16)
    out, lse = block_sparse_attention(q, q, q, mask, return_lse=True)
    assert (out.shape, lse.shape) == (q.shape, (0, 2, 64))


@pytest.mark.parametrize("bits", [False, True], ids=["blocks", "token bits"])
def test_every_element_of_out_is_written(case: Any, random_mask: Any, bits: bool) -> None:
    rng = np.random.default_rng(7)
    mask = random_mask(rng, (48, 24), (300, 200), axes=(2, 2), density=0.2)
    if bits:
        tokens = mask.to_tokens() & (rng.random((2, 2, 300, 200)) < 0.1)
        mask = BlockMask.from_tokens(tokens, (48, 24))
    case_ = case(mask, dtype="float16")
    case_.run(out=np.full(case_.q.shape, np.nan, np.float16))


def test_one_token_mask_in_blocks_of_every_size(case: Any) -> None:
    rng = np.random.default_rng(3)
    coarse = np.kron(rng.random((2, 2)) < 0.7, np.ones((128, 128), bool))[:250, :200]
    assert 0 < coarse.sum() < coarse.size
    q, k, v = case(BlockMask.from_tokens(coarse, (128, 128)), dtype="float16").arrays
    exact = reference.attention(q, k, v, coarse[None, None])
    for block in (32, 64, 128):
        mask = BlockMask.from_tokens(coarse, (block, block))
        assert mask.active_pairs() == coarse.sum()
        out = block_sparse_attention(q, k, v, mask)
        np.testing.assert_allclose(out, exact, atol=2e-3)


def test_every_query_block_on_the_first_kv_block(case: Any) -> None:
    blocks = np.zeros((6, 6), bool)
    blocks[:, 0] = True
    case_ = case(BlockMask.from_dense(blocks, (64, 64)))
    out, _ = case_.run()
    plan = make_plan(case_.mask, *case_.arrays, regime="attend_mma/q64k64/retain-pack/rows")
    assert plan.tiles().steps.tolist() == [1] * 6
    dense = reference.attention(*case_.arrays, None)
    assert np.abs(out - dense).max() > 0.1


def test_full_tiles_only(case: Any) -> None:
    blocks = np.eye(4, dtype=bool)
    case_ = case(BlockMask.from_dense(blocks, (64, 64)))
    out, _ = case_.run()
    plan = make_plan(case_.mask, *case_.arrays, regime="attend_mma/q64k64/retain-pack/rows")
    assert plan.tiles().steps.tolist() == [1] * 4
    assert np.abs(out - reference.attention(*case_.arrays, None)).max() > 0.1


def test_alternate_heads_empty(case: Any) -> None:
    blocks = np.ones((32, 1, 1), bool)
    blocks[::2] = False
    case_ = case(BlockMask.from_dense(blocks, (16, 16), (8, 8)))
    out, lse = case_.run()
    assert (out[0, ::2] == 0).all()
    assert np.isneginf(lse[0, ::2]).all()
    assert (out[0, 1::2] != 0).any(axis=(1, 2)).all()


@pytest.mark.parametrize("plan", PACKED)
def test_every_tail_gap_and_count(case: Any, plan: str) -> None:
    rng = np.random.default_rng(11)
    for q_tail, kv_tail in itertools.product((1, 7, 8, 9, 15, 16), repeat=2):
        count, gap = rng.integers(1, 4, 2)
        columns = np.arange(count) * gap
        blocks = np.zeros((2, columns[-1] + 1), bool)
        blocks[:, columns] = True
        shape = (16 + q_tail, 16 * columns[-1] + kv_tail)
        case(BlockMask.from_dense(blocks, (16, 16), (int(shape[0]), int(shape[1]))), dim=8).run(
            regime=plan
        )


@pytest.mark.parametrize("mapping", ["merge-merge", "merge-retain", "split-split", "retain-split"])
def test_tails_under_the_other_mappings(case: Any, random_mask: Any, mapping: str) -> None:
    side = Mapping.parse(mapping)
    bq = {"merge": 24, "split": 192, "retain": 40}[side.q]
    bkv = {"merge": 16, "split": 96, "retain": 40}[side.kv]
    rng = np.random.default_rng(13)
    mask = random_mask(rng, (bq, bkv), (bq * 3 + 5, bkv * 5 + 3))
    case(mask, dim=16).run(regime=f"attend_mma/q64k64/{mapping}/rows")
