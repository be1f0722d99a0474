"""SPADE's rule: per-head 3-D tiles, block-wise extremes for scores, top-k, sinks, diagonal.

For each head, tokens are put in the order of small 3-D tiles, of the shape under which the
queries inside a block are most alike (mean cosine similarity), and cut into blocks. With ``max``
and ``min`` taken per channel over the tokens of a block, query block ``i`` scores key block ``j``
with

    score[i, j] = max((Qmax[i] + Qmin[i]) . Kmax[j], (Qmax[i] + Qmin[i]) . Kmin[j])

Each row keeps its ``int(keep * key blocks)`` best, the first ``sinks`` key blocks, and the
key blocks within ``diagonal`` of its own place. Blocks that hold text tokens are kept in full, as
rows and as columns.

On a GPU everything stays there: the choice of tiles, the scores, and the mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.errors import wrong
from tessera_cupy.masks import BlockMask
from tessera_cupy.masks.geometry import check_blocks, pair
from tessera_cupy.permute import TokenOrders
from tessera_cupy.sparsifiers import scoring
from tessera_cupy.sparsifiers.parameters import real, share, whole
from tessera_cupy.sparsifiers.selection import Selection, checked_inputs
from tessera_cupy.video import TileSize, VideoGrid, checked_tile

#: Tile shapes (frames, rows, columns) that a head chooses from, for Wan's models.
WAN_TILES = (
    TileSize(1, 4, 16),
    TileSize(1, 8, 8),
    TileSize(16, 1, 4),
    TileSize(8, 1, 8),
    TileSize(4, 2, 8),
    TileSize(2, 4, 8),
)

#: The same for HunyuanVideo.
HUNYUAN_TILES = (*WAN_TILES, TileSize(1, 16, 4), TileSize(32, 1, 2))


def select(
    q: Any,
    k: Any,
    grid: VideoGrid,
    *,
    block_size: tuple[int, int] = (64, 64),
    keep: float = 0.17,
    sinks: int = 5,
    diagonal: float = 2,
    tiles: Sequence[tuple[int, int, int]] = WAN_TILES,
) -> Selection:
    """Choose each head's tile shape and the blocks that it keeps.

    Args:
        q: (batch, heads, tokens, d) queries in raster order, any float dtype, NumPy or CuPy.
        k: (batch, heads, tokens, d) keys, likewise.
        grid: the video grid that the tokens lie on; ``grid.tokens`` is ``tokens``.
        block_size: (query, key) tokens of a block; the last block may be shorter.
        keep: fraction of the key blocks that top-k keeps in each row, 0 to 1. The published
            values are 0.17 for Wan and 0.10 or 0.14 for HunyuanVideo.
        sinks: leading key blocks that every row keeps; 5 to 10 were published.
        diagonal: key blocks kept on both sides of a row's own place; below 1, a fraction of all
            key blocks. 2 and 0.015 were published.
        tiles: candidate tile shapes, as (frames, rows, columns).

    Returns:
        A selection whose mask has a batch and head axis like ``q``'s. :func:`tiles_of` says which
        tile each head took.

    Raises:
        TypeError: ``q`` or ``k`` is neither a NumPy nor a CuPy array, ``grid`` no VideoGrid, or a
            number or a tile none.
        ValueError: shapes that do not fit each other or the grid, NaN or infinities in NumPy
            arrays, ``keep`` outside 0 to 1, negative ``sinks`` or ``diagonal``, no tiles.

    >>> rng = np.random.default_rng(0)
    >>> q, k = rng.standard_normal((2, 1, 3, 600, 32))
    >>> chosen = select(q, k, VideoGrid(3, 10, 20))
    >>> chosen.mask.num_blocks, len(tiles_of(chosen))
    ((10, 10), 3)
    """
    checked_inputs(q, k, grid)
    bq, bkv = pair(block_size, "block_size")
    check_blocks((bq, bkv), "choose such a block")
    keep = share("keep", keep, "pass 0.17 for 17%", "a fraction from 0 to 1")
    sinks = min(whole("sinks", sinks, 0, None, "pass 5"), grid.tokens)
    diagonal = _diagonal(diagonal, grid)
    shapes = _shapes(tiles)
    orders = scoring.most_alike(q, bq, candidates(grid, shapes))
    always = _always(grid, (bq, bkv), sinks, diagonal)

    score = scoring.extreme_scores(q, k, (bq, bkv), orders=orders)
    kept = scoring.keep_top(score, int(keep * always.shape[1]), always=always)

    return Selection(
        mask=BlockMask.from_dense(kept, (bq, bkv), (grid.tokens, grid.tokens)),
        orders=orders,
        notes={"tiles": shapes},
    )


def tiles_of(chosen: Selection) -> tuple[TileSize, ...]:
    """The tile that each head of a selection took, in (batch, head) order; waits for the GPU."""
    choice = chosen.orders.choice
    places = choice if isinstance(choice, np.ndarray) else choice.get()
    return tuple(chosen.notes["tiles"][place] for place in places.ravel())


@lru_cache(maxsize=32)
def candidates(grid: VideoGrid, tiles: tuple[TileSize, ...]) -> TokenOrders:
    """The orders of a grid's tokens that a head chooses from; made, and copied to a GPU, once."""
    return TokenOrders(np.stack([grid.tile_order(tile) for tile in tiles]).astype(np.int32))


def _diagonal(diagonal: Any, grid: VideoGrid) -> float:
    expected, fix = "whole blocks, or a fraction below 1", "pass 2, or 0.015 for 1.5% of the blocks"
    width = real("diagonal", diagonal, expected, fix)
    if not width >= 0 or (width >= 1 and width % 1 != 0):
        raise ValueError(wrong("diagonal", expected, diagonal, fix))
    return min(width, float(grid.tokens))


def _shapes(tiles: Any) -> tuple[TileSize, ...]:
    fix = "pass WAN_TILES"
    try:
        given = list(tiles)
    except TypeError:
        expected = "tiles of (frames, rows, columns)"
        raise TypeError(wrong("tiles", expected, repr(tiles), fix)) from None
    if not given:
        raise ValueError(wrong("tiles", "at least one tile", "none", fix))
    return tuple(checked_tile(tile, "tiles") for tile in given)


@lru_cache(maxsize=32)
def _always(
    grid: VideoGrid, block_size: tuple[int, int], sinks: int, diagonal: float
) -> NDArray[np.bool_]:
    """(query blocks, key blocks): sinks, diagonal and text.

    With unequal blocks a row's place is every key block that it meets.
    """
    bq, bkv = block_size
    nq, nkv = -(-grid.tokens // bq), -(-grid.tokens // bkv)
    width = int(diagonal * nkv) if diagonal < 1 else int(diagonal)
    row, column = np.arange(nq)[:, None], np.arange(nkv)
    first, last = row * bq // bkv, ((row + 1) * bq - 1) // bkv
    kept: NDArray[np.bool_] = (column >= first - width) & (column <= last + width)
    kept |= column < sinks
    text = np.ones(grid.tokens, bool)
    text[grid.video_start : grid.video_start + grid.video_tokens] = False
    kept |= np.logical_or.reduceat(text, np.arange(0, grid.tokens, bq))[:, None]
    kept |= np.logical_or.reduceat(text, np.arange(0, grid.tokens, bkv))
    kept.setflags(write=False)
    return kept
