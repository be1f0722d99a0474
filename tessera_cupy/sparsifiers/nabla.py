"""NABLA, neighbourhood adaptive block-level attention: the mass of pooled scores, row by row.

Tokens are put in the order of tiles of 8x8 tokens of one frame, each a block of 64. With ``q[i]``
and ``k[j]`` the means over the tokens of blocks ``i`` and ``j``,

    p[i, :] = softmax over j of  q[i] . k[j] / sqrt(d)

and each row keeps the fewest blocks, by falling ``p``, whose sum reaches ``mass``. A window may be
kept too: the blocks at most ``window // 2`` tiles away along each axis, fewer at the borders.

Source: NABLA, arXiv 2507.13546, and Kandinsky 5, whose models keep the mass 0.9 and the window
11x3x3 in frames and tiles. They have no text in self-attention; where a grid has text tokens, all
rows keep them and they keep all.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.errors import wrong
from tessera_cupy.sparsifiers import cubes
from tessera_cupy.sparsifiers.cubes import Cubes, Window
from tessera_cupy.sparsifiers.parameters import share
from tessera_cupy.sparsifiers.scoring import keep_mass, pool, scores
from tessera_cupy.sparsifiers.selection import Selection, checked_inputs
from tessera_cupy.video import VideoGrid, checked_tile

#: The window, in frames and tiles, of Kandinsky 5.
KANDINSKY_WINDOW: Window = (11, 3, 3)

_TILE = (1, 8, 8)


def select(
    q: Any, k: Any, grid: VideoGrid, *, mass: float = 0.9, window: Window | None = None
) -> Selection:
    """Choose the blocks that hold most of each row's mass.

    Args:
        q: (batch, heads, tokens, d) queries in raster order, any float dtype, NumPy or CuPy.
        k: (batch, heads, tokens, d) keys, likewise.
        grid: the video grid that the tokens lie on.
        mass: share of a row's softmax that the kept blocks reach, 0 to 1.
        window: extent, in tiles along (frames, rows, columns), of what is kept around each tile
            whatever its mass, as :data:`KANDINSKY_WINDOW`; None for nothing.

    Returns:
        A selection whose mask has a batch and head axis like ``q``'s, with ragged blocks where the
        tiles do not divide the frame.

    Raises:
        TypeError: as :func:`~tessera_cupy.sparsifiers.selection.checked_inputs` says.
        ValueError: likewise; ``mass`` outside 0 to 1; a window larger than the grid.

    >>> q, k = np.random.default_rng(0).standard_normal((2, 1, 2, 2 * 24 * 24, 32))
    >>> select(q, k, VideoGrid(2, 24, 24), window=(1, 3, 3)).mask.num_blocks
    (18, 18)
    """
    checked_inputs(q, k, grid)
    mass = share("mass", mass, "pass 0.9 for 90%")
    cut = cubes.cut(grid, _TILE)
    always = _always(cut, None if window is None else _checked(window, cut.across))
    queries, keys = (pool(x, cut.blocks, "mean", orders=cut.orders) for x in (q, k))
    score = scores(queries, cut.hide_text(keys), scale=1 / math.sqrt(q.shape[3]))
    return Selection(cut.mask(keep_mass(score, mass, always=always)), cut.orders)


def _checked(window: Window, across: Window) -> Window:
    extents = checked_tile(window, "window")
    if not all(e <= n for e, n in zip(extents, across, strict=True)):
        expected = f"three extents from 1 to the grid's {across[0]}x{across[1]}x{across[2]} tiles"
        fix = f"take {tuple(map(min, extents, across))}"
        raise ValueError(wrong("window", expected, tuple(extents), fix))
    return extents


@lru_cache(maxsize=16)
def _always(cut: Cubes, window: Window | None) -> NDArray[np.bool_] | None:
    """(n, n) bool, what is kept whatever its mass, made once; None where that is nothing."""
    if window is None and cut.tiles == len(cut.sizes):
        return None
    video = np.zeros((cut.tiles, cut.tiles), np.bool_)
    if window is not None:
        video = near(cut.across, window)
    kept = cut.with_text(video)
    kept.setflags(write=False)
    return kept


def near(across: Window, window: Window) -> NDArray[np.bool_]:
    """Which tiles lie within half a window of each tile: (tiles, tiles) bool, in raster order."""
    at = np.indices(across).reshape(3, -1)
    apart = np.abs(at[:, :, None] - at[:, None, :])
    inside: NDArray[np.bool_] = (apart <= np.array(window)[:, None, None] // 2).all(axis=0)
    return inside
