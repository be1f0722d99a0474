"""Video token grids, and the order that lays small 3-D tiles of a grid side by side.

A video diffusion model attends over ``t * h * w`` latent patches. In *raster* order the
token at frame ``t``, row ``y``, column ``x`` has index ``(t * h + y) * w + x``, so 64
neighbouring indices are a strip of one line. In *3-D-tile* order they are a small box in
time and space, whose tokens look alike: blocks of such a sequence are what block-sparse
masks switch on and off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.errors import wrong


class TileSize(NamedTuple):
    """Extent of a 3-D tile in frames, rows and columns."""

    t: int
    h: int
    w: int

    def __str__(self) -> str:
        return f"{self.t}x{self.h}x{self.w}"


@dataclass(frozen=True)
class VideoGrid:
    """A grid of ``t`` frames of ``h`` rows and ``w`` columns of tokens.

    >>> grid = VideoGrid(21, 30, 52)
    >>> grid.tokens
    32760
    >>> str(grid)
    '21x30x52'
    """

    t: int
    h: int
    w: int

    def __post_init__(self) -> None:
        for name, value in (("t", self.t), ("h", self.h), ("w", self.w)):
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise TypeError(
                    wrong(name, "an int of at least 1", repr(value), "pass whole numbers of tokens")
                )
            if value < 1:
                raise ValueError(
                    wrong(name, "an int of at least 1", value, "give each axis at least one token")
                )

    def __str__(self) -> str:
        return f"{self.t}x{self.h}x{self.w}"

    @property
    def tokens(self) -> int:
        """Number of tokens, ``t * h * w``."""
        return self.t * self.h * self.w

    def tile_order(self, tile: tuple[int, int, int]) -> NDArray[np.int64]:
        """The permutation from raster order to 3-D-tile order.

        Tiles follow each other in raster order, and so do the tokens inside a tile. Tiles
        that the grid's edge cuts hold fewer tokens; nothing is padded.

        Args:
            tile: extent of a tile as (frames, rows, columns), each at least 1.

        Returns:
            (tokens,) int64: the raster index of the token at each place of the new order,
            so that ``x[..., order, :]`` permutes and ``y[..., inverse(order), :]`` undoes it.

        Raises:
            ValueError: ``tile`` does not hold three positive extents.

        >>> VideoGrid(1, 2, 5).tile_order((1, 2, 2)).tolist()
        [0, 1, 5, 6, 2, 3, 7, 8, 4, 9]
        """
        if len(tile) != 3 or min(tile) < 1:
            raise ValueError(
                wrong("tile", "three extents of at least 1", tuple(tile), "pass (t, h, w)")
            )
        extents = (self.t, self.h, self.w)
        at = [np.arange(n) // size for n, size in zip(extents, tile, strict=True)]
        across = [-(-n // size) for n, size in zip(extents, tile, strict=True)]
        of_token = (at[0][:, None, None] * across[1] + at[1][:, None]) * across[2] + at[2]
        # Stable, so that raster order survives inside each tile.
        return np.argsort(of_token.ravel(), kind="stable").astype(np.int64)


def inverse(order: NDArray[np.int64]) -> NDArray[np.int64]:
    """The permutations that undo ``order``, along its last axis.

    Args:
        order: (..., n) permutations of ``0 .. n - 1``.

    Returns:
        (..., n) int64 with ``inverse(order)[order] == arange(n)`` for each permutation.

    >>> inverse(np.array([2, 0, 1])).tolist()
    [1, 2, 0]
    """
    undone = np.empty(order.shape, dtype=np.int64)
    places = np.broadcast_to(np.arange(order.shape[-1]), order.shape)
    np.put_along_axis(undone, order, places, axis=-1)
    return undone


class VideoModel(NamedTuple):
    """Self-attention of a published video model: heads, head dim, and its grid of video tokens."""

    heads: int
    head_dim: int
    grid: VideoGrid


#: Published models by name, frames and resolution.
MODELS: dict[str, VideoModel] = {
    "wan-14b-81f-480p": VideoModel(40, 128, VideoGrid(21, 30, 52)),
    "wan-14b-81f-720p": VideoModel(40, 128, VideoGrid(21, 45, 80)),
    "wan-14b-61f-720p": VideoModel(40, 128, VideoGrid(16, 45, 80)),
    "wan-1.3b-81f-480p": VideoModel(12, 128, VideoGrid(21, 30, 52)),
    "wan2.2-5b-121f-704p": VideoModel(24, 128, VideoGrid(31, 22, 40)),
    "hunyuan-129f-720p": VideoModel(24, 128, VideoGrid(33, 45, 80)),
    "hunyuan-125f-720p": VideoModel(24, 128, VideoGrid(32, 45, 80)),
    "hunyuan-117f-768p": VideoModel(24, 128, VideoGrid(30, 48, 80)),
    "hunyuan1.5-121f-720p": VideoModel(16, 128, VideoGrid(31, 45, 80)),
    "cogvideox-5b-49f-480p": VideoModel(48, 64, VideoGrid(13, 30, 45)),
    "cogvideox1.5-5b-81f-768p": VideoModel(48, 64, VideoGrid(11, 48, 85)),
    "longcat-93f-480p": VideoModel(32, 128, VideoGrid(24, 30, 52)),
}
