"""SSTA, selective and sliding tile attention: a window of tiles, and the top-k of the others.

The grid is cut into 3-D tiles; ``q[i]`` and ``k[j]`` are the means over the tokens of tiles ``i``
and ``j``, scaled to length 1. A key tile counts for less, the more it is like all others:

    score[i, j] = balance * q[i] . k[j] - (1 - balance) * mean over m != j of k[m] . k[j]

Each row keeps its ``keep`` best tiles, and STA's window around itself.

Source: SSTA of HunyuanVideo-1.5, arXiv 2511.18870, and the defaults of its published code: tiles
of 6x8x8 tokens, window 3x3x3, balance 0.7, keep 64, but 32 where the video has at most 31 frames
of tokens. At 31x45x80 (360 tiles) rows keep 32 to 59 tiles, 8.9% to 16.4%. Text is kept whole, as
rows and as columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera_cupy.sparsifiers import cubes
from tessera_cupy.sparsifiers.cubes import Window
from tessera_cupy.sparsifiers.parameters import share
from tessera_cupy.sparsifiers.scoring import keep_top, pool, scores
from tessera_cupy.sparsifiers.selection import Selection, checked_inputs
from tessera_cupy.video import VideoGrid, checked_tile

_KEEP, _KEEP_SHORT, _SHORT_FRAMES = 64, 32, 31

# A mean shorter than this has no direction.
_LEAST_LENGTH = 1e-12


def select(
    q: Any,
    k: Any,
    grid: VideoGrid,
    *,
    keep: int | None = None,
    window: Window = (3, 3, 3),
    balance: float = 0.7,
    tile: tuple[int, int, int] = (6, 8, 8),
) -> Selection:
    """Choose the tiles that each tile of queries keeps.

    Args:
        q: (batch, heads, tokens, d) queries in raster order, any float dtype, NumPy or CuPy.
        k: (batch, heads, tokens, d) keys, likewise.
        grid: the video grid that the tokens lie on.
        keep: tiles that top-k keeps in each row; None is 64, or 32 at up to 31 frames, or all
            tiles where there are fewer.
        window: extent of the window in tiles, as for :func:`~tessera_cupy.sparsifiers.sta.select`.
        balance: weight of the likeness to the queries, from 0 to 1; the rest is that of the
            likeness to other keys.
        tile: extent of a tile in tokens; 64-token tiles were published too.

    Returns:
        A selection whose mask has a batch and head axis like ``q``'s, with ragged blocks where the
        tiles do not divide the grid.

    Raises:
        TypeError: as :func:`~tessera_cupy.sparsifiers.selection.checked_inputs` says.
        ValueError: likewise; ``keep`` above the number of tiles, a window that does not fit.

    >>> q, k = np.random.default_rng(0).standard_normal((2, 1, 3, 12 * 24 * 32, 32))
    >>> chosen = select(q, k, VideoGrid(12, 24, 32), keep=4, window=(1, 3, 3))
    >>> counts = chosen.mask.row_counts()
    >>> bool((counts >= 9).all()), bool((counts <= 13).all())
    (True, True)
    """
    checked_inputs(q, k, grid)
    balance = share("balance", balance, "pass 0.7", "a weight from 0 to 1")
    cut = cubes.cut(grid, tile)
    if keep is None:
        keep = min(_KEEP_SHORT if grid.t <= _SHORT_FRAMES else _KEEP, cut.tiles)
    count = cubes.kept_count("keep", keep, cut.tiles)
    near = cubes.always(cut, checked_tile(window, "window"))
    queries, keys = (pool(x, cut.blocks, "mean", orders=cut.orders) for x in (q, k))
    _into_directions(queries, keys, cut, balance)
    return Selection(cut.mask(keep_top(scores(queries, keys), count, always=near)), cut.orders)


def _into_directions(queries: Any, keys: Any, cut: cubes.Cubes, balance: float) -> None:
    """Turn pooled queries and keys, in place, into those whose products rank the tiles.

    With S the sum of all keys of length 1, the mean of a key's products with the others is
    (S . k[j] - 1) / (tiles - 1). So balance * q[i] - (1 - balance) * S / (tiles - 1) has the
    products with the keys that are asked for, but for a constant.
    """
    share = (1 - balance) / max(cut.tiles - 1, 1)
    if not isinstance(queries, np.ndarray):
        from tessera_cupy.kernels.directions import into_directions

        into_directions(queries, keys, cut.video, balance, share)
        return
    for x in (queries, keys):
        length = np.sqrt(np.einsum("bhnd,bhnd->bhn", x, x))
        x /= np.maximum(length, np.float32(_LEAST_LENGTH))[..., None]
    queries *= np.float32(balance)
    total = keys[:, :, cut.video].sum(axis=2, keepdims=True)
    queries -= np.float32(share) * total
    cut.hide_text(keys)
