"""Expand tiles back to token pairs, to check a mapping against its mask."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.mapping.tiles import GROUP_ROWS, Tiles

# Pairs of fragments that are laid out at a time.
_CHUNK_PAIRS = 1 << 22


def expand(tiles: Tiles, sq: int, skv: int) -> NDArray[np.int16]:
    """Count how often the tiles compute each (query, key) pair.

    This materialises the full score matrix of every mask head, so it is for sizes of tests.

    Args:
        tiles: the tiles.
        sq: query tokens.
        skv: key tokens.

    Returns:
        (tiles.heads, sq, skv) int16. For tiles of a mask it equals the mask's tokens:
        1 for each active pair, 0 for each other.

    Raises:
        IndexError: a fragment or a tile reaches past the tokens.
    """
    q, slot = tiles.shape.q, tiles.shape.slot
    counts = np.zeros((tiles.heads, sq, skv), np.int16)
    owner = np.repeat(np.arange(len(tiles)), np.diff(tiles.frag_offsets))
    row, column = np.arange(q), np.arange(slot)
    chunk = max(1, _CHUNK_PAIRS // (q * slot))
    for low in range(0, len(owner), chunk):
        part = slice(low, low + chunk)
        tile, index = owner[part], tiles.frag_bits[part]
        member = (tiles.frag_members[part, None] >> (row // GROUP_ROWS).astype(np.uint32)) & 1
        on = (member != 0)[:, :, None] & (column < tiles.frag_len[part, None])[:, None, :]
        refined = np.flatnonzero(index >= 0)
        words = tiles.bits[index[refined]]
        shifts = np.arange(32, dtype=np.uint32)
        flags = ((words[..., None] >> shifts) & 1).reshape(*words.shape[:2], 32 * words.shape[2])
        on[refined] &= flags[..., :slot] != 0
        fragment, r, c = np.nonzero(on)
        head = tiles.tile_head[tile[fragment]]
        query = tiles.query_rows(tile[fragment], r)
        # Rows of a group past those that the tile has are computed, but never stored.
        stored = tiles.exists(tile[fragment], r)
        key = tiles.key_rows(low + fragment, c)
        np.add.at(counts, (head[stored], query[stored], key[stored]), 1)
    return counts
