"""SPADE's rule: per-head 3-D tiles, block-wise extremes for scores, top-k, sinks, diagonal.

For each head, tokens are put in the order of small 3-D tiles, of the shape under which the
queries inside a block are most alike, and cut into blocks. With ``max`` and ``min`` taken
per channel over the tokens of a block, query block ``i`` scores key block ``j`` with

    score[i, j] = max((Qmax[i] + Qmin[i]) . Kmax[j], (Qmax[i] + Qmin[i]) . Kmin[j])

Each row keeps its ``int(keep * key blocks)`` best, the first ``sinks`` key blocks, and the
key blocks within ``diagonal`` of its own place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tessera_cupy.errors import wrong
from tessera_cupy.masks import BlockMask
from tessera_cupy.sparsifiers.selection import Selection, namespace
from tessera_cupy.video import TileSize, VideoGrid

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

# Rows of blocks whose products are in memory at a time: 32 x 900 blocks x 128 floats are 15 MB.
_PRODUCT_ROWS = 32


def select(
    q: Any,
    k: Any,
    grid: VideoGrid,
    *,
    block_size: tuple[int, int] = (64, 64),
    keep: float = 0.17,
    sinks: int = 5,
    diagonal: int = 2,
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
        diagonal: key blocks kept on both sides of a row's own place.
        tiles: candidate tile shapes, as (frames, rows, columns).

    Returns:
        A selection whose mask has a batch and head axis like ``q``'s.

    Raises:
        TypeError: ``q`` or ``k`` is neither a NumPy nor a CuPy array, or ``grid`` no VideoGrid.
        ValueError: shapes that do not fit each other or the grid, ``keep`` outside 0 to 1.

    >>> rng = np.random.default_rng(0)
    >>> q, k = rng.standard_normal((2, 1, 3, 600, 32))
    >>> chosen = select(q, k, VideoGrid(3, 10, 20))
    >>> chosen.mask.num_blocks, len(chosen.tiles)
    ((10, 10), 3)
    """
    xp = namespace(q, "q")
    _check(q, k, grid, keep, xp)
    batch, heads, tokens, _ = q.shape
    bq, bkv = block_size
    nq, nkv = -(-tokens // bq), -(-tokens // bkv)

    orders = [grid.tile_order(tile) for tile in tiles]
    places = [xp.asarray(order) for order in orders]
    always = xp.asarray(_always(nq, nkv, block_size, sinks, diagonal))
    kept = xp.empty((batch, heads, nq, nkv), dtype=bool)
    chosen = np.empty((batch, heads), dtype=np.int64)
    for b, h in np.ndindex(batch, heads):
        head_q = q[b, h].astype(xp.float32)
        head_k = k[b, h].astype(xp.float32)
        alike = xp.stack([_likeness(head_q[place], bq, xp) for place in places])
        chosen[b, h] = best = int(alike.argmax())
        score = _scores(head_q[places[best]], head_k[places[best]], block_size, xp)
        kept[b, h] = always | _top(score, int(keep * nkv), xp)

    return Selection(
        mask=BlockMask.from_dense(kept, block_size, (tokens, tokens)),
        order=np.stack(orders)[chosen],
        tiles=tuple(TileSize(*tiles[i]) for i in chosen.ravel()),
    )


def _check(q: Any, k: Any, grid: VideoGrid, keep: float, xp: Any) -> None:
    if namespace(k, "k") is not xp:
        raise TypeError(
            wrong("k", f"a {xp.__name__} array, as q", type(k).__name__, "keep q and k together")
        )
    if not isinstance(grid, VideoGrid):
        raise TypeError(
            wrong(
                "grid",
                "a VideoGrid",
                repr(grid),
                "pass tessera_cupy.video.VideoGrid(frames, rows, columns)",
            )
        )
    if q.ndim != 4 or q.shape[2] != grid.tokens:
        raise ValueError(
            wrong(
                "q",
                f"shape (batch, heads, {grid.tokens}, d) for a grid of {grid}",
                f"shape {tuple(q.shape)}",
                "pass the grid of the video tokens, without text tokens",
            )
        )
    if tuple(k.shape) != tuple(q.shape):
        raise ValueError(
            wrong(
                "k",
                f"q's shape {tuple(q.shape)}",
                f"shape {tuple(k.shape)}",
                "repeat the keys of grouped heads first",
            )
        )
    if not 0 <= keep <= 1:
        raise ValueError(wrong("keep", "a fraction from 0 to 1", keep, "pass 0.17 for 17%"))


def _over_blocks(x: Any, block: int, reduction: str, xp: Any) -> Any:
    """Reduce (tokens, d) to (blocks, d) over blocks of tokens, of which the last may be short."""
    whole = len(x) // block * block
    parts = [getattr(x[:whole].reshape(-1, block, x.shape[1]), reduction)(axis=1)]
    if whole < len(x):
        parts.append(getattr(x[whole:], reduction)(axis=0)[None])
    return xp.concatenate(parts)


def _likeness(x: Any, block: int, xp: Any) -> Any:
    """Mean cosine similarity of the pairs of tokens inside blocks of (tokens, d)."""
    unit = x / xp.maximum(xp.sqrt((x * x).sum(axis=1, keepdims=True)), 1e-12)
    # The mean over all pairs of a block is the squared length of the block's mean.
    return (_over_blocks(unit, block, "mean", xp) ** 2).sum(axis=1).mean()


def _scores(q: Any, k: Any, block_size: tuple[int, int], xp: Any) -> Any:
    bq, bkv = block_size
    middle = _over_blocks(q, bq, "max", xp) + _over_blocks(q, bq, "min", xp)
    high, low = _over_blocks(k, bkv, "max", xp), _over_blocks(k, bkv, "min", xp)
    return xp.maximum(_products(middle, high, xp), _products(middle, low, xp))


def _products(a: Any, b: Any, xp: Any) -> Any:
    """``a @ b.T``, on a GPU without cuBLAS, which is not among the package's requirements."""
    if xp is np:
        return a @ b.T
    starts = range(0, len(a), _PRODUCT_ROWS)
    parts = [(a[i : i + _PRODUCT_ROWS, None] * b).sum(axis=2) for i in starts]
    return xp.concatenate(parts)


def _top(score: Any, count: int, xp: Any) -> Any:
    # A stable sort, so that ties fall to the lower column with NumPy and with CuPy.
    columns = xp.argsort(-score, axis=1, kind="stable")[:, :count]
    kept = xp.zeros(score.shape, dtype=bool)
    kept[xp.arange(len(score))[:, None], columns] = True
    return kept


def _always(nq: int, nkv: int, block_size: tuple[int, int], sinks: int, diagonal: int) -> Any:
    """Sinks and diagonal; with unequal blocks a row's place is every key block that it meets."""
    bq, bkv = block_size
    row, column = np.arange(nq)[:, None], np.arange(nkv)
    first, last = row * bq // bkv, ((row + 1) * bq - 1) // bkv
    near = (column >= first - diagonal) & (column <= last + diagonal)
    return near | (column < sinks)
