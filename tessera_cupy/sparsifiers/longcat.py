"""LongCat's block sparse attention: top-k of the scores of mean-pooled cubes of 128 tokens.

With ``q[i]`` and ``k[j]`` the means over the tokens of cubes ``i`` and ``j``,

    score[i, j] = q[i] . k[j]

and each row keeps its ``int((1 - sparsity) * n)`` best of ``n`` cubes, but at least one: 42 of 336
at 24x30x52.

Source: LongCat-Video, arXiv 2510.22200, and the defaults of its published code: cubes of 4x4x8
tokens, sparsity 0.875. There the cubes divide the grid; here the cubes at its edge hold the tokens
that are left. The model has no text in self-attention; where a grid has text tokens, all rows keep
them and they keep all.
"""

from __future__ import annotations

from typing import Any

from tessera_cupy.sparsifiers import cubes
from tessera_cupy.sparsifiers.selection import Selection, checked_inputs
from tessera_cupy.video import VideoGrid


def select(
    q: Any,
    k: Any,
    grid: VideoGrid,
    *,
    sparsity: float = 0.875,
    cube: tuple[int, int, int] = (4, 4, 8),
) -> Selection:
    """Choose the cubes that each cube of queries keeps.

    Args:
        q: (batch, heads, tokens, d) queries in raster order, any float dtype, NumPy or CuPy.
        k: (batch, heads, tokens, d) keys, likewise.
        grid: the video grid that the tokens lie on.
        sparsity: share of the cubes that each row drops, at least 0 and below 1.
        cube: extent of a cube as (frames, rows, columns).

    Returns:
        A selection whose mask has a batch and head axis like ``q``'s, with ragged blocks where the
        cubes do not divide the grid.

    Raises:
        TypeError: as :func:`~tessera_cupy.sparsifiers.selection.checked_inputs` says; a
            number or a cube that is none.
        ValueError: likewise, or ``sparsity`` or ``cube`` out of range.

    >>> import numpy as np
    >>> q, k = np.random.default_rng(0).standard_normal((2, 1, 3, 8 * 16 * 16, 32))
    >>> select(q, k, VideoGrid(8, 16, 16)).mask.density()
    0.125
    """
    checked_inputs(q, k, grid)
    cut = cubes.cut(grid, cube, "cube")
    # 0.1 * 1,440 may come out a little below 144, which is no reason to keep one less.
    count = max(1, int(cubes.share_kept("sparsity", sparsity) * cut.tiles + 1e-9))
    return cubes.by_means(q, k, cut, count)
