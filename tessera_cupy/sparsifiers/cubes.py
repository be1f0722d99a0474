"""Blocks that are 3-D tiles of the grid: their sizes, their order, and masks over them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.errors import wrong
from tessera_cupy.masks import BlockMask
from tessera_cupy.masks.geometry import BLOCK_MAX, BLOCK_MIN, BLOCK_STEP
from tessera_cupy.permute import TokenOrders
from tessera_cupy.sparsifiers.parameters import share, whole
from tessera_cupy.sparsifiers.scoring import keep_top, pool, scores
from tessera_cupy.sparsifiers.selection import Selection
from tessera_cupy.video import VideoGrid, checked_tile

Window = tuple[int, int, int]

_AXES = ("frames", "rows", "columns")


@dataclass(frozen=True, eq=False)
class Cubes:
    """A sequence as blocks of one 3-D tile each, and further blocks of text.

    Attributes:
        orders: the one order, of all heads, in which each block's tokens are neighbours.
        volume: tokens of a whole tile.
        sizes: (n,) int32, tokens of each block.
        across: tiles along frames, rows and columns.
        text: the text's blocks.
        uniform: whether all blocks but a shorter last one have ``volume`` tokens, in a number
            that uniform masks take.
    """

    orders: TokenOrders
    volume: int
    sizes: NDArray[np.int32]
    across: tuple[int, int, int]
    text: slice
    uniform: bool

    @property
    def tiles(self) -> int:
        """Blocks of video tokens."""
        return math.prod(self.across)

    @property
    def video(self) -> slice:
        """The video's blocks."""
        first = self.text.stop if self.text.start == 0 and self.text.stop else 0
        return slice(first, first + self.tiles)

    @property
    def blocks(self) -> int | NDArray[np.int32]:
        """The blocks, as pooling takes them: tokens of uniform ones, or all sizes."""
        return self.volume if self.uniform else self.sizes

    def hide_text(self, keys: Any) -> Any:
        """Pooled keys, (batch, heads, n, d) float32, with NaN in the text's blocks, in place.

        Scores of NaN count as minus infinity, so that no text takes a place among the best.
        """
        count = self.text.stop - self.text.start
        if not count:
            return keys
        if isinstance(keys, np.ndarray):
            keys[:, :, self.text] = np.nan
            return keys
        import cupy

        batch, heads, blocks, channels = keys.shape
        row = 4 * channels
        with cupy.cuda.Device(keys.device.id):
            stream = cupy.cuda.get_current_stream().ptr
            for head in range(batch * heads):
                first = keys.data.ptr + row * (head * blocks + self.text.start)
                # A float of ones alone is NaN.
                cupy.cuda.runtime.memsetAsync(first, 0xFF, row * count, stream)
        return keys

    def with_text(self, video: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """A map of all blocks, (..., n, n), for one of the video's; text is kept whole."""
        n = len(self.sizes)
        kept = np.ones((*video.shape[:-2], n, n), np.bool_)
        kept[..., self.video, self.video] = video
        return kept

    def mask(self, kept: Any) -> BlockMask:
        """The mask of a block map, (batch, heads, n, n) bool, NumPy or CuPy."""
        tokens = int(self.sizes.sum())
        sizes = None if self.uniform else self.sizes
        return BlockMask.from_dense(
            kept,
            (self.volume, self.volume),
            (tokens, tokens),
            q_block_sizes=sizes,
            kv_block_sizes=sizes,
        )


def cut(grid: VideoGrid, tile: tuple[int, int, int], argument: str = "tile") -> Cubes:
    """The blocks of a grid for one tile shape; made once.

    ``argument`` is what the caller calls the tile.

    Raises:
        TypeError, ValueError: as :meth:`~tessera_cupy.video.VideoGrid.tile_blocks`.
    """
    return _cut(grid, checked_tile(tile, argument))


@lru_cache(maxsize=32)
def _cut(grid: VideoGrid, tile: Any) -> Cubes:
    made = grid.tile_blocks(tile)
    volume = math.prod(tile)
    legal = volume % BLOCK_STEP == 0 and BLOCK_MIN <= volume <= BLOCK_MAX
    uniform = legal and bool((made.sizes[:-1] == volume).all())
    made.sizes.setflags(write=False)
    orders = TokenOrders(made.order.astype(np.int32)[None])
    return Cubes(orders, volume, made.sizes, made.across, made.text, uniform)


def kept_count(name: str, count: int, tiles: int) -> int:
    """A count of blocks to keep, checked.

    Raises:
        TypeError: it is no integer.
        ValueError: it is not from 1 to ``tiles``.
    """
    expected = f"1 to {tiles}, as the grid has {tiles} blocks of video"
    return whole(name, count, 1, tiles, "pass that", expected)


def share_kept(name: str, sparsity: float) -> float:
    """The share of blocks that a sparsity leaves.

    Raises:
        TypeError: it is no number.
        ValueError: it is not at least 0 and below 1.
    """
    expected, fix = "a fraction from 0 to below 1", "pass 0.9 to keep a tenth"
    dropped = share(name, sparsity, fix, expected)
    if dropped == 1:
        raise ValueError(wrong(name, expected, sparsity, fix))
    return 1 - dropped


def always_text(cut: Cubes) -> NDArray[np.bool_] | None:
    """The blocks that every head keeps for their text, (n, n); None without text."""
    return always(cut, None) if cut.tiles < len(cut.sizes) else None


@lru_cache(maxsize=32)
def always(cut: Cubes, window: Window | None) -> NDArray[np.bool_]:
    """The blocks that every head keeps: text, and a window of tiles around each tile.

    Args:
        cut: the blocks.
        window: as for :func:`window_tiles`; None for no window.

    Returns:
        (n, n), read-only and made once, so that a GPU's copy is found again.
    """
    if window is None:
        video = np.zeros((cut.tiles, cut.tiles), np.bool_)
    else:
        video = window_tiles(cut.across, window, "window")
    kept = cut.with_text(video)
    kept.setflags(write=False)
    return kept


def by_means(q: Any, k: Any, cut: Cubes, count: int) -> Selection:
    """Each cube of queries keeps the ``count`` cubes whose mean keys score highest, and text."""
    queries, keys = (pool(x, cut.blocks, "mean", orders=cut.orders) for x in (q, k))
    score = scores(queries, cut.hide_text(keys))
    return Selection(cut.mask(keep_top(score, count, always=always_text(cut))), cut.orders)


def window_tiles(
    across: tuple[int, int, int], window: Window, argument: str = "windows"
) -> NDArray[np.bool_]:
    """Which tiles each tile keeps: (tiles, tiles) bool, tiles in raster order.

    Args:
        across: tiles along frames, rows and columns.
        window: extent of the window in tiles.
        argument: what the caller calls it.

    Raises:
        ValueError: along an axis the window is larger than the grid, below 1, or even without
            being the whole axis.
    """
    for axis, n, extent in zip(_AXES, across, window, strict=True):
        if not (extent == n or (1 <= extent < n and extent % 2)):
            fits = tuple(
                m if e >= m else max(1, e - 1 + e % 2) for m, e in zip(across, window, strict=True)
            )
            raise ValueError(
                wrong(
                    argument,
                    f"{' or '.join(map(str, _extents(n)))} tiles along {axis}, where the grid has "
                    f"{n}",
                    f"{extent} in {window}",
                    f"take {fits}, which fits {across[0]}x{across[1]}x{across[2]} tiles",
                )
            )
    t, h, w = (_along(n, extent) for n, extent in zip(across, window, strict=True))
    tiles = across[0] * across[1] * across[2]
    kept = (
        t[:, None, None, :, None, None]
        & h[None, :, None, None, :, None]
        & w[None, None, :, None, None, :]
    )
    return kept.reshape(tiles, tiles)


def _extents(tiles: int) -> list[str]:
    """Extents that a window may have along an axis, for a message."""
    odd = [n for n in range(1, tiles) if n % 2]
    return (
        [str(n) for n in (odd if len(odd) < 4 else odd[:3])]
        + ([f"another odd number below {tiles}"] if len(odd) > 3 else [])
        + [f"all {tiles}"]
    )


def _along(n: int, extent: int) -> NDArray[np.bool_]:
    at = np.arange(n)
    start = np.clip(at - extent // 2, 0, n - extent)[:, None]
    return (at >= start) & (at < start + extent)
