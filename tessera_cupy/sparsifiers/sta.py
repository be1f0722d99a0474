"""STA, sliding tile attention: each tile of queries keeps a window of tiles around itself.

The grid is cut into 3-D tiles. Along an axis of ``n`` tiles a window of ``e`` tiles begins, for
the tile at ``p``, at

    clip(p - e // 2, 0, n - e)

so that at the borders it moves inwards instead of shrinking, and every row keeps ``e`` tiles. Heads
have windows of their own.

Source: STA, arXiv 2502.04507: tiles of 6x8x8 tokens, window 3x3x3 after fine-tuning. Without it,
heads of HunyuanVideo at 30x48x80 (5x6x10 tiles) take one of :data:`HUNYUAN_WINDOWS`; over its
layers and steps those keep 16.6% of the tiles. Text is kept whole, as rows and as columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from tessera_cupy.errors import wrong
from tessera_cupy.masks import BlockMask
from tessera_cupy.sparsifiers import cubes, fixed
from tessera_cupy.sparsifiers.cubes import Window
from tessera_cupy.sparsifiers.selection import Selection, check_grid, checked_inputs
from tessera_cupy.video import VideoGrid, checked_tile

#: Windows, in tiles along frames, rows and columns, that HunyuanVideo's heads take.
HUNYUAN_WINDOWS: tuple[Window, ...] = (
    (5, 3, 3),
    (1, 6, 10),
    (3, 3, 5),
    (5, 1, 10),
    (5, 6, 1),
)


def select(
    q: Any,
    k: Any,
    grid: VideoGrid,
    *,
    windows: Window | Sequence[Window] = (3, 3, 3),
    tile: tuple[int, int, int] = (6, 8, 8),
) -> Selection:
    """The windows of the heads; of ``q`` and ``k`` only the shapes count.

    Args:
        q: (batch, heads, tokens, d) queries in raster order, NumPy or CuPy.
        k: (batch, heads, tokens, d) keys, likewise.
        grid: the video grid that the tokens lie on.
        windows: extent of the window in tiles along (frames, rows, columns), one for all heads or
            one for each head. Along each axis it is odd, or the whole axis.
        tile: extent of a tile in tokens.

    Returns:
        A selection whose mask has one head for one window, and else a head for each of ``q``'s.

    Raises:
        TypeError: as :func:`~tessera_cupy.sparsifiers.selection.checked_inputs` says.
        ValueError: likewise; a window that does not fit the tiles; another number of windows than
            heads.

    >>> q = k = np.zeros((1, 2, 18 * 24 * 24, 8), np.float32)
    >>> chosen = select(q, k, VideoGrid(18, 24, 24), windows=[(1, 3, 3), (3, 1, 3)])
    >>> chosen.mask.heads, chosen.mask.density()
    (2, 0.3333333333333333)
    """
    checked_inputs(q, k, grid)
    wanted = _windows(windows)
    if len(wanted) not in (1, q.shape[1]):
        raise ValueError(
            wrong(
                "windows",
                f"one window, or one for each of the {q.shape[1]} heads",
                f"{len(wanted)} windows",
                "pass as many as q has heads",
            )
        )
    made = fixed.placed(q, mask, grid, windows=wanted, tile=tile)
    return Selection(made, cubes.cut(grid, tile).orders)


def mask(
    grid: VideoGrid,
    windows: Window | Sequence[Window] = (3, 3, 3),
    *,
    tile: tuple[int, int, int] = (6, 8, 8),
) -> BlockMask:
    """The mask of :func:`select`, on the host, without queries: over tokens in tile order.

    Example:
        >>> mask(VideoGrid(30, 48, 80), [(5, 3, 3), (5, 1, 10)]).row_counts().max(axis=-1)
        array([[45, 50]])
    """
    check_grid(grid)
    return _mask(grid, _windows(windows), checked_tile(tile))


@lru_cache(maxsize=64)
def _mask(grid: VideoGrid, windows: tuple[Window, ...], tile: Any) -> BlockMask:
    cut = cubes.cut(grid, tile)
    kept = np.stack([cubes.window_tiles(cut.across, window) for window in windows])
    return cut.mask(cut.with_text(kept)[None])


def _windows(windows: Window | Sequence[Window]) -> tuple[Window, ...]:
    try:
        array = np.asarray(windows)
    except ValueError:  # of lists that differ in length
        array = np.zeros(0)
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2) or array.shape[-1:] != (3,):
        raise ValueError(
            wrong("windows", "(t, h, w) tiles, or a list of such", windows, "pass whole tiles")
        )
    return tuple((int(t), int(h), int(w)) for t, h, w in array.reshape(-1, 3))
