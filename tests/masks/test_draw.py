"""The drawing in a mask's repr."""

from __future__ import annotations

import numpy as np

from tessera_cupy.masks import BlockMask


def test_a_small_mask_is_drawn_block_by_block() -> None:
    blocks = [[1, 0, 0, 1, 1], [1, 1, 0, 0, 1], [0, 0, 1, 1, 0]]
    mask = BlockMask.from_dense(blocks, (64, 32), (150, 160))
    assert repr(mask) == (
        "BlockMask(batch 1, heads 1, 3x5 blocks of 64x32, 150x160 tokens,"
        " density 0.571, run coverage 0.75)\n"
        "│█▄ ▀█│\n"
        "│  ▀▀ │"
    )


def test_a_large_mask_is_shaded_by_bin() -> None:
    blocks = np.zeros((2, 32, 64), bool)
    blocks[0, :4, 0] = True  # 4 of the 8 blocks of the first bin
    blocks[0, 0, 2] = True  # 1 of 8: any active block leaves a trace
    blocks[0, 28:, 62:] = True
    blocks[0, 4:7, 4:6] = True  # 6 of 8
    blocks[1] = True  # only the first head is drawn
    header, *lines = repr(BlockMask.from_dense(blocks, (64, 64))).splitlines()
    assert header.startswith("BlockMask(batch 1, heads 2, 32x64 blocks of 64x64, 2048x4096 tokens")
    expected = [[" "] * 32 for _ in range(8)]
    expected[0][0] = "▒"
    expected[0][1] = "░"
    expected[1][2] = "▓"
    expected[7][31] = "█"
    assert lines == [f"│{''.join(line)}│" for line in expected]


def test_blocks_with_token_bits_are_shaded_by_their_pairs() -> None:
    tokens = np.zeros((160, 100), bool)
    tokens[:64, :64] = True
    tokens[0, 64:] = True  # 36 of the 64 x 36 pairs of a short block
    tokens[64:96, :64] = True  # half of them
    tokens[64:128, 64:91] = True  # 27 of 36 columns
    tokens[128:, :50] = True  # 50 of 64 columns, in a short block
    _, *lines = repr(BlockMask.from_tokens(tokens, (64, 64))).splitlines()
    assert lines == ["│█░│", "│▒▓│", "│█ │"]
    # A tenth of all pairs.
    sparse = np.tile(np.arange(640) % 10 == 0, (640, 1))
    _, *lines = repr(BlockMask.from_tokens(sparse, (64, 64))).splitlines()
    assert lines == ["│" + 10 * "░" + "│"] * 8
    full = np.ones_like(tokens)
    _, *lines = repr(BlockMask.from_tokens(np.stack([full, tokens]), (64, 64))).splitlines()
    assert lines == ["│██│"] * 3
    # Of heads the first, and what later ones hold does not matter.
    _, *lines = repr(BlockMask.from_tokens(np.stack([tokens, ~tokens]), (64, 64))).splitlines()
    assert lines == ["│█░│", "│▒▓│", "│█ │"]


def test_the_drawing_stays_small() -> None:
    for nq, nk in ((16, 32), (17, 5), (3, 33), (1000, 1), (900, 900)):
        lines = repr(BlockMask.from_dense(np.ones((nq, nk), bool), (64, 64))).splitlines()
        assert len(lines) <= 9
        assert len(set(map(len, lines[1:]))) == 1
        assert len(lines[1]) <= 34
        assert set("".join(lines[1:])) <= set("│█▀")


def test_the_header_names_what_is_special() -> None:
    tokens = np.tri(64, dtype=bool)
    assert "1 partial)" in repr(BlockMask.from_tokens(tokens, (64, 64)))
    ragged = BlockMask.from_dense([[1, 1]], (64, 9), kv_block_sizes=[3, 6])
    assert "1x2 blocks of 64x9 (ragged), 64x9 tokens, density 1, run" in repr(ragged)
