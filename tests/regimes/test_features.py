import numpy as np

from tessera_cupy.masks import BlockMask
from tessera_cupy.regimes import Features

REQUEST = {
    "batch": 2,
    "q_heads": 6,
    "dtype": "bfloat16",
    "head_dim": 96,
    "layout": "BSHD",
}


def test_features_of_a_uniform_mask():
    mask = BlockMask.from_dense([[1, 1, 0, 0], [0, 1, 0, 1]], (16, 32))
    assert Features.of(mask, **REQUEST) == Features(
        block_q=16,
        block_kv=32,
        ragged=False,
        token_bits=False,
        dtype="bfloat16",
        head_dim=96,
        layout="BSHD",
        heads=12,
        tokens=128,
        density=0.5,
        run_coverage=0.5,
    )


def test_a_ragged_side_counts_with_its_largest_block():
    mask = BlockMask.from_dense(np.ones((2, 3), bool), (64, 64), kv_block_sizes=[5, 90, 7])
    features = Features.of(mask, **REQUEST)
    assert (features.block_q, features.block_kv, features.ragged) == (64, 90, True)
    assert features.tokens == 102
    rows = BlockMask.from_dense(np.ones((2, 3), bool), (64, 64), q_block_sizes=[70, 7])
    features = Features.of(rows, **REQUEST)
    assert (features.block_q, features.block_kv, features.ragged) == (70, 64, True)


def test_partial_blocks_are_seen():
    tokens = np.ones((32, 32), bool)
    assert not Features.of(BlockMask.from_tokens(tokens, (16, 16)), **REQUEST).token_bits
    tokens[3, 4] = False
    assert Features.of(BlockMask.from_tokens(tokens, (16, 16)), **REQUEST).token_bits
