"""VSA, video sparse attention: top-k of the scores of mean-pooled cubes.

The grid is cut into cubes, with fewer tokens where its edge cuts them; with ``q[i]`` and ``k[j]``
the means over the true tokens of cubes ``i`` and ``j``,

    score[i, j] = q[i] . k[j]

and each row keeps its ``ceil((1 - sparsity) * n)`` best of ``n`` cubes: 144 of 1,440 for Wan at
21x45x80 with the sparsity 0.9, 125 of 624 at 21x30x52 with 0.8.

Source: VSA, arXiv 2505.13389; sparsity 0.9 for Wan 2.1 14B and 0.8 for 1.3B, cubes of 4x4x4
tokens, and 4x4x8 or 4x8x8 on newer GPUs. Its models have no text in self-attention; where a grid
has text tokens, all rows keep them and they keep all.
"""

from __future__ import annotations

import math
from typing import Any

from tessera_cupy.sparsifiers import cubes
from tessera_cupy.sparsifiers.selection import Selection, checked_inputs
from tessera_cupy.video import VideoGrid


def select(
    q: Any,
    k: Any,
    grid: VideoGrid,
    *,
    sparsity: float = 0.9,
    cube: tuple[int, int, int] = (4, 4, 4),
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
    >>> q, k = np.random.default_rng(0).standard_normal((2, 1, 3, 8 * 8 * 8, 32))
    >>> chosen = select(q, k, VideoGrid(8, 8, 8), sparsity=0.8)
    >>> int(chosen.mask.row_counts().max())
    2
    """
    checked_inputs(q, k, grid)
    cut = cubes.cut(grid, cube, "cube")
    # 0.1 * 1,440 may come out a little above 144, which is no reason to keep one more.
    count = max(1, math.ceil(cubes.share_kept("sparsity", sparsity) * cut.tiles - 1e-9))
    return cubes.by_means(q, k, cut, count)
