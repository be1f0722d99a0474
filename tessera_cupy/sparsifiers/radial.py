"""Radial attention: a band around each token's own place, which narrows with frame distance.

With ``f`` tokens in a frame and ``d = |i - j|``, a query of frame ``i`` keeps those keys of frame
``j`` whose place in the frame differs from its own by at most

    width(d) = f                                           d <= 1
    width(d) = max(decay * span(d), block)                 else, with
    span(d)  = 2**bits(f) / 2**bits(d)                     bits(n): binary digits of n

so the band halves each time that the distance doubles. Where ``span(d)`` is shorter than a block
the band gets rarer instead of narrower: only distances that ``block // span(d)`` divides keep any.
With ``sink`` every query keeps frame 0 whole.

The rule is one over blocks: of the columns of a block that a pair of frames meets, more than 60%
must hold more than a third of a block's rows each. No block is kept for less, and blocks of
another size are not derived from these, so nothing widens.

Source: Radial Attention, arXiv 2506.19852, and the sizes, thresholds and decays of its published
code. One mask serves all heads, layers and steps. Published densities, at the grids of its scripts:

===========  =======  =====  ==========  =======
model        decay    sink   grid        density
===========  =======  =====  ==========  =======
HunyuanVideo 0.95     no     30x48x80    27.5%
Wan 2.1 14B  0.2      yes    18x48x80    28.7%
Wan 2.2 14B  0.8      yes    20x48x80    35.3%
===========  =======  =====  ==========  =======
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.errors import wrong
from tessera_cupy.masks import BlockMask
from tessera_cupy.sparsifiers import fixed
from tessera_cupy.sparsifiers.parameters import real, switch, whole
from tessera_cupy.sparsifiers.selection import Selection, check_grid, checked_inputs
from tessera_cupy.video import VideoGrid


def select(
    q: Any,
    k: Any,
    grid: VideoGrid,
    *,
    decay: float = 0.95,
    sink: bool = False,
    block: int = 128,
) -> Selection:
    """The radial mask of a grid; of ``q`` and ``k`` only the shapes count.

    Args:
        q: (batch, heads, tokens, d) queries in raster order, NumPy or CuPy.
        k: (batch, heads, tokens, d) keys, likewise.
        grid: the video grid. Blocks that hold text tokens are kept whole, as rows and as columns,
            and so is a last block that is shorter than the others.
        decay: factor of the band's width: 0.95 for HunyuanVideo, 0.2 for Wan 2.1, 0.8 for Wan 2.2.
        sink: whether all queries keep frame 0: no for HunyuanVideo, yes for Wan.
        block: tokens of a block; 128 and 64 were published.

    Returns:
        A selection in raster order whose mask has one head.

    Raises:
        TypeError: as :func:`~tessera_cupy.sparsifiers.selection.checked_inputs` says.
        ValueError: shapes that do not fit the grid, a frame shorter than a block, a ``decay`` that
            is no positive number.

    >>> q = k = np.zeros((1, 2, 6 * 512, 8), np.float32)
    >>> select(q, k, VideoGrid(6, 16, 32)).mask.num_blocks
    (24, 24)
    """
    checked_inputs(q, k, grid)
    made = fixed.placed(q, mask, grid, decay=decay, sink=sink, block=block)
    return Selection(made, fixed.raster(grid.tokens))


def mask(
    grid: VideoGrid, *, decay: float = 0.95, sink: bool = False, block: int = 128
) -> BlockMask:
    """The mask of :func:`select`, on the host, without queries.

    Example:
        >>> round(mask(VideoGrid(30, 48, 80)).density(), 3)
        0.275
    """
    check_grid(grid)
    fix = "pass 0.95 for HunyuanVideo, 0.2 for Wan 2.1, 0.8 for Wan 2.2"
    factor = real("decay", decay, "a positive number", fix)
    if not 0 < factor < math.inf:
        raise ValueError(wrong("decay", "a positive number", decay, fix))
    expected = f"a block within one frame of {grid.frame_tokens} tokens"
    fix = "pass a block of at most that many tokens, in multiples of 8 from 16"
    tokens = whole("block", block, 1, grid.frame_tokens, fix, expected)
    return _mask(grid, factor, switch("sink", sink), tokens)


@lru_cache(maxsize=16)
def _mask(grid: VideoGrid, decay: float, sink: bool, block: int) -> BlockMask:
    return BlockMask.from_dense(
        _kept(grid, decay, sink, block), (block, block), (grid.tokens, grid.tokens)
    )


class _Pieces(NamedTuple):
    """The cuts of the blocks by the frames, in order: (pieces,) int64 each."""

    block: NDArray[np.int64]
    frame: NDArray[np.int64]
    first: NDArray[np.int64]  # places in the frame
    last: NDArray[np.int64]


def _pieces(grid: VideoGrid, block: int) -> _Pieces:
    frames = grid.video_start + np.arange(grid.t + 1, dtype=np.int64) * grid.frame_tokens
    blocks = np.arange(frames[0] // block + 1, -(-frames[-1] // block), dtype=np.int64) * block
    edges = np.union1d(frames, blocks)
    starts, ends = edges[:-1], edges[1:]
    frame = (starts - frames[0]) // grid.frame_tokens
    origin = frames[frame]
    return _Pieces(starts // block, frame, starts - origin, ends - 1 - origin)


def _kept(grid: VideoGrid, decay: float, sink: bool, block: int) -> NDArray[np.bool_]:
    """The block map, (n, n)."""
    count = -(-grid.tokens // block)
    kept = np.zeros((count, count), np.bool_)
    widths = _widths(grid.t, grid.frame_tokens, decay, block)
    pieces = _pieces(grid, block)
    columns = np.flatnonzero(np.diff(pieces.block, prepend=-1))  # each block's first piece
    column_blocks = pieces.block[columns]
    for frame in range(grid.t):
        width = widths[abs(pieces.frame - frame)]
        if sink:
            width[pieces.frame == 0] = grid.frame_tokens
        rows = pieces.frame == frame
        busy = _columns(pieces, rows, width, block // 3 + 1)
        touched = _columns(pieces, rows, width, 1)
        dense = 5 * busy > 3 * touched
        # A block that two frames share is kept for either.
        kept[pieces.block[rows][:, None], column_blocks] |= np.logical_or.reduceat(
            dense, columns, axis=1
        )
    whole = fixed.text_blocks(grid, block)
    # So few rows or columns pass no test of how much of a block is needed.
    whole[-1] |= bool(grid.tokens % block)
    kept[whole] = True
    kept[:, whole] = True
    return kept


def _widths(frames: int, tokens: int, decay: float, block: int) -> NDArray[np.int64]:
    """Places that the band reaches to each side, by frame distance; negative without a band."""
    widths = np.full(frames, tokens, np.int64)
    for distance in range(2, frames):
        span = 2.0 ** (tokens.bit_length() - distance.bit_length())
        rare = span < block and distance % int(block / span)
        # So far below 0 that no row of a block reaches any column.
        widths[distance] = -block if rare else int(min(max(decay * span, block), tokens))
    return widths


def _columns(
    pieces: _Pieces, rows: NDArray[np.bool_], width: NDArray[np.int64], least: int
) -> NDArray[np.int64]:
    """Columns of each piece with at least ``least`` rows of each row piece: (rows, pieces)."""
    first, last = pieces.first[rows][:, None], pieces.last[rows][:, None]
    # A column c has the rows from max(first, c - width) to min(last, c + width).
    left = np.maximum(pieces.first, first + (least - 1) - width)
    right = np.minimum(pieces.last, last - (least - 1) + width)
    return np.where(last - first + 1 >= least, np.maximum(right - left + 1, 0), 0)
