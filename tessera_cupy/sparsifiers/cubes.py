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
from tessera_cupy.video import VideoGrid


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

    def of_video(self, pooled: Any, xp: Any) -> Any:
        """The part of (batch, heads, n, d) that belongs to the video's blocks."""
        if self.tiles == len(self.sizes):
            return pooled
        return xp.ascontiguousarray(pooled[:, :, self.video])

    def mask(self, kept: Any, xp: Any) -> BlockMask:
        """The mask of a map over the video's blocks; text is kept whole.

        Args:
            kept: bool (batch, heads, tiles, tiles) of ``xp``, NumPy or CuPy.
            xp: that array module.
        """
        n = len(self.sizes)
        if self.tiles != n:
            video = kept
            kept = xp.ones((*video.shape[:2], n, n), bool)
            kept[:, :, self.video, self.video] = video
        tokens = int(self.sizes.sum())
        sizes = None if self.uniform else self.sizes
        return BlockMask.from_dense(
            kept,
            (self.volume, self.volume),
            (tokens, tokens),
            q_block_sizes=sizes,
            kv_block_sizes=sizes,
        )


def cut(grid: VideoGrid, tile: tuple[int, int, int]) -> Cubes:
    """The blocks of a grid for one tile shape; made once.

    Raises:
        TypeError, ValueError: as :meth:`~tessera_cupy.video.VideoGrid.tile_blocks`.
    """
    return _cut(grid, tuple(tile))


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
        ValueError: it is not from 1 to ``tiles``.
    """
    if not 1 <= count <= tiles:
        raise ValueError(
            wrong(
                name, f"1 to {tiles}, as the grid has {tiles} blocks of video", count, "pass that"
            )
        )
    return count


def share_kept(name: str, sparsity: float) -> float:
    """The share of blocks that a sparsity leaves.

    Raises:
        ValueError: it is not at least 0 and below 1.
    """
    if not 0 <= sparsity < 1:
        raise ValueError(
            wrong(name, "a fraction from 0 to below 1", sparsity, "pass 0.9 to keep a tenth")
        )
    return 1 - sparsity
