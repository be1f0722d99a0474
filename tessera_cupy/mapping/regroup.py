"""Regroup: query blocks whose lists are alike make a tile together, wherever they lie.

A tile of several query blocks computes the union of their lists, and each half of it skips what
only the other half lists. Neighbouring blocks need not be the most alike: the best partner of a
block may be the one above it in the picture, or the one a frame later. So blocks are paired, the
pairs are paired again to fill half a tile, and the last pairing puts two halves into one tile.

Pairs are chosen inside windows of neighbours, the pair with most KV blocks in common first. That
is the pairing that sorting all pairs would give, but it needs no sort: whoever are each other's
best partner become a pair, and the rest choose again. Counts are whole numbers and ties fall to
the lower index, so that any program that follows the rule finds the same tiles.

Blocks with equal lists are made neighbours first, however far apart: in masks of windows in space,
they are those of one place in all frames.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.mapping.q_side import exclusive_sum
from tessera_cupy.mapping.tiles import UNIT_ROWS

if TYPE_CHECKING:
    from tessera_cupy.masks.block_mask import BlockMask

#: Blocks, or groups of them, among which partners are looked for; an even number. Twice as many
#: cost twice the products, and save 0.5% of the work at blocks of 32 rows and 2 to 4% at 16 on
#: masks of SPADE's rule.
WINDOW = 64


def regroup(mask: BlockMask, q: int) -> NDArray[np.int32]:
    """Order the query blocks of each head so that blocks with alike lists make a tile.

    Args:
        mask: uniform query blocks; a power of two of them, at least two, fill a tile.
        q: rows of a tile.

    Returns:
        (mask heads, nq) int32 permutations of the query blocks: each run of ``q / block`` of
        them is a tile, and its first half the tile's first half. The first block of a tile is
        its lowest, and tiles ascend by it. Blocks that fill no tile, and a short last block,
        stay at the end.

    Example:
        >>> from tessera_cupy.masks import BlockMask
        >>> mask = BlockMask.from_dense([[1, 0], [0, 1], [1, 0], [0, 1]], (64, 64))
        >>> regroup(mask, 128).tolist()
        [[0, 2, 1, 3]]
    """
    joined = q // mask.block_size[0]
    nq, nk = mask.num_blocks
    whole = mask.shape[0] // mask.block_size[0] // joined * joined
    order = np.tile(np.arange(nq, dtype=np.int32), (mask.batch * mask.heads, 1))
    for head, groups in enumerate(order):
        rows = mask.indptr[head * nq : head * nq + whole + 1]
        listed = np.zeros((whole, -(-nk // 64) * 64), np.bool_)
        cells = np.repeat(np.arange(whole) * listed.shape[1], np.diff(rows))
        cells += mask.indices[rows[0] : rows[-1]]
        listed.reshape(-1)[cells] = True
        words = np.packbits(listed, axis=1).view(np.uint64)
        alike = _equal_together(words)
        groups[:whole] = _ascending(alike[_grouped(words[alike], joined)]).reshape(-1)
    return order


def reordered(mask: BlockMask, order: NDArray[np.int32]) -> BlockMask:
    """The mask with the query blocks of each head in another order; a short last one stays last.

    Args:
        mask: uniform query blocks.
        order: (mask heads, nq), the block at each place.
    """
    rows = (np.arange(len(order))[:, None] * order.shape[1] + order).reshape(-1)
    counts = np.diff(mask.indptr)[rows]
    indptr = exclusive_sum(counts)
    entries = np.repeat(mask.indptr[rows] - indptr[:-1], counts)
    entries += np.arange(len(entries))
    # Without token bits every entry of ``partial`` is -1, in any order.
    partial = mask.partial[entries] if len(mask.token_bits) else mask.partial
    return replace(mask, indptr=indptr, indices=mask.indices[entries], partial=partial)


def units(order: NDArray[np.int32], block: int, q: int, tokens: int) -> NDArray[np.int32]:
    """First query row of each 16-row unit of all tiles: ``Tiles.tile_units``.

    Args:
        order: as :func:`regroup` returns it.
        block: rows of a query block, a multiple of 16.
        q: rows of a tile, a multiple of ``block``.
        tokens: query rows of a head.

    Returns:
        (tiles, q / 16) int32; -1 where a tile has no rows.
    """
    of_block = np.arange(0, block, UNIT_ROWS, dtype=np.int32)
    of_head = (order[:, :, None] * np.int32(block) + of_block).reshape(len(order), -1)
    per_tile = q // UNIT_ROWS
    missing = -of_head.shape[1] % per_tile
    rows = np.pad(of_head, ((0, 0), (0, missing)), constant_values=-1).reshape(-1, per_tile)
    rows[rows >= tokens] = -1
    return rows


def _equal_together(listed: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The rows in an order in which equal lists follow each other, by the first of each."""
    if not listed.shape[1]:  # no KV blocks at all
        return np.arange(len(listed))
    whole = np.ascontiguousarray(listed).view(np.dtype((np.void, listed.shape[1] * 8)))[:, 0]
    _, first, of = np.unique(whole, return_index=True, return_inverse=True)
    return np.argsort(first[of], kind="stable")


def _ascending(groups: NDArray[np.int64]) -> NDArray[np.int64]:
    """Groups of groups, each and all ascending by the first of their rows."""
    count, size = groups.shape
    width = 1
    while width < size:
        pairs = groups.reshape(count, size // (2 * width), 2, width)
        swap = pairs[:, :, 0, 0] > pairs[:, :, 1, 0]
        pairs[swap] = pairs[swap][:, ::-1]
        width *= 2
    return groups[np.argsort(groups[:, 0], kind="stable")]


def _grouped(listed: NDArray[np.uint64], size: int) -> NDArray[np.int64]:
    """Groups of ``size`` rows each, (groups, size); ``listed`` has a bit for each listed block."""
    groups = np.arange(len(listed))[:, None]
    while groups.shape[1] < size:
        windows, rest = divmod(len(listed), WINDOW)
        whole = len(listed) - rest
        pairs = np.concatenate(
            [
                _pairs(listed[:whole].reshape(windows, WINDOW, listed.shape[1])),
                _pairs(listed[None, whole:]) + whole,
            ]
        )
        groups = groups[pairs].reshape(len(pairs), 2 * groups.shape[1])
        if groups.shape[1] < size:
            listed = listed[pairs[:, 0]] | listed[pairs[:, 1]]
    return groups


def _pairs(windows: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Partners inside each window of an even number of lists, (pairs, 2), ascending by the first.

    Args:
        windows: (windows, lists of one, words).
    """
    count, size, words = windows.shape
    # Blocks in common. Popcounts are as fast as products of matrices by one thread, and do not
    # suffer as BLAS does where its threads find the cores busy. One more, so that lists with
    # nothing in common still are partners, and 0 means taken.
    weight = np.zeros((count, size, size), np.int32)
    for i in range(words):
        of_lists = np.ascontiguousarray(windows[:, :, i])
        weight += np.bitwise_count(of_lists[:, :, None] & of_lists[:, None])
    weight += 1
    place = np.arange(size)
    weight[:, place, place] = 0
    partner = np.full((count, size), -1)
    while (partner < 0).any():
        best = weight.argmax(axis=2)
        mutual = (np.take_along_axis(best, best, axis=1) == place) & (partner < 0)
        partner[mutual] = best[mutual]
        weight *= (partner < 0)[:, None, :]
    of_pair, first = np.nonzero(partner > place)
    pairs: NDArray[np.int64] = np.stack([first, partner[of_pair, first]], axis=1)
    pairs += of_pair[:, None] * size
    return pairs
