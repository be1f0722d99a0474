"""Video token grids, and the orders that lay tokens which look alike side by side.

A video diffusion model attends over ``t * h * w`` latent patches. In *raster* order the
token at frame ``t``, row ``y``, column ``x`` has index ``(t * h + y) * w + x``, so 64
neighbouring indices are a strip of one line. In *3-D-tile* order they are a small box in
time and space, in *temporal* order one place over the frames. Blocks of such a sequence are
what block-sparse masks switch on and off. Some models attend over the tokens of the prompt
in the same sequence, before or behind the video's; no order moves those.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tessera_cupy.errors import MissingExtraError, wrong


class TileSize(NamedTuple):
    """Extent of a 3-D tile in frames, rows and columns."""

    t: int
    h: int
    w: int

    def __str__(self) -> str:
        return f"{self.t}x{self.h}x{self.w}"


class TileBlocks(NamedTuple):
    """A sequence cut into blocks that are 3-D tiles, and further blocks of text.

    Attributes:
        order: (tokens,) int64, the order in which each block's tokens are neighbours.
        sizes: (blocks,) int32, the true token counts, in the sequence's order; they sum to
            ``tokens``.
        across: tiles along frames, rows and columns; the video's blocks are in raster order.
        text: the numbers of the text's blocks; empty without text.
    """

    order: NDArray[np.int64]
    sizes: NDArray[np.int32]
    across: tuple[int, int, int]
    text: slice


@dataclass(frozen=True)
class VideoGrid:
    """A grid of ``t`` frames of ``h`` rows and ``w`` columns of tokens, and the prompt's tokens.

    Attributes:
        t: frames.
        h: rows of a frame.
        w: columns of a frame.
        text_tokens: tokens of the prompt in the same sequence.
        text_first: whether those come before the video's tokens, rather than behind.

    Raises:
        TypeError: a count that is no int, or ``text_first`` no bool.
        ValueError: an axis without tokens, or a negative number of text tokens.

    >>> grid = VideoGrid(21, 30, 52)
    >>> grid.tokens
    32760
    >>> str(grid)
    '21x30x52'
    >>> str(VideoGrid(13, 30, 45, text_tokens=226, text_first=True))
    '226+13x30x45'
    """

    t: int
    h: int
    w: int
    text_tokens: int = 0
    text_first: bool = False

    def __post_init__(self) -> None:
        for name, least in (("t", 1), ("h", 1), ("w", 1), ("text_tokens", 0)):
            value = getattr(self, name)
            expected = f"an int of at least {least}"
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise TypeError(wrong(name, expected, repr(value), "pass whole numbers of tokens"))
            if value < least:
                fix = "give each axis at least one token" if least else "pass 0 for no text"
                raise ValueError(wrong(name, expected, value, fix))
            # NumPy's would count in their own width.
            object.__setattr__(self, name, int(value))
        if not isinstance(self.text_first, bool | np.bool_):
            raise TypeError(
                wrong(
                    "text_first",
                    "True or False",
                    repr(self.text_first),
                    "pass True where the text comes before the video",
                )
            )

    def __str__(self) -> str:
        video = f"{self.t}x{self.h}x{self.w}"
        if not self.text_tokens:
            return video
        if self.text_first:
            return f"{self.text_tokens}+{video}"
        return f"{video}+{self.text_tokens}"

    @property
    def frame_tokens(self) -> int:
        """Tokens of a frame, ``h * w``."""
        return self.h * self.w

    @property
    def video_tokens(self) -> int:
        """Tokens of the video, ``t * h * w``."""
        return self.t * self.h * self.w

    @property
    def tokens(self) -> int:
        """Length of the sequence, ``video_tokens + text_tokens``."""
        return self.video_tokens + self.text_tokens

    @property
    def video_start(self) -> int:
        """Index of the video's first token: ``text_tokens`` with ``text_first``, else 0."""
        return self.text_tokens if self.text_first else 0

    def tile_order(self, tile: tuple[int, int, int]) -> NDArray[np.int64]:
        """The permutation from raster order to 3-D-tile order.

        Tiles follow each other in raster order, and so do the tokens inside a tile. Tiles
        that the grid's edge cuts hold fewer tokens; nothing is padded. Text keeps its place.

        Args:
            tile: extent of a tile as (frames, rows, columns), each at least 1.

        Returns:
            (tokens,) int64: the raster index of the token at each place of the new order,
            so that ``x[..., order, :]`` permutes and ``y[..., inverse(order), :]`` undoes it.

        Raises:
            TypeError: an extent is no int.
            ValueError: ``tile`` does not hold three positive extents.

        >>> VideoGrid(1, 2, 5).tile_order((1, 2, 2)).tolist()
        [0, 1, 5, 6, 2, 3, 7, 8, 4, 9]
        """
        return self._ordered(self._tile_of_tokens(tile))

    def tile_blocks(self, tile: tuple[int, int, int]) -> TileBlocks:
        """The sequence in 3-D-tile order as blocks: a tile each, and the text behind or before.

        The text is cut into blocks of as many tokens as a whole tile has; the last may be short.

        Args:
            tile: as in :meth:`tile_order`.

        Raises:
            TypeError, ValueError: as :meth:`tile_order`.

        >>> blocks = VideoGrid(1, 2, 5, text_tokens=6).tile_blocks((1, 2, 2))
        >>> blocks.sizes.tolist(), blocks.across, blocks.text
        ([4, 4, 2, 4, 2], (1, 1, 3), slice(3, 5, None))
        """
        tile = checked_tile(tile)
        of_token = self._tile_of_tokens(tile)
        across = self._tiles_across(tile)
        video = np.bincount(of_token, minlength=math.prod(across))
        whole, rest = divmod(self.text_tokens, math.prod(tile))
        text = [math.prod(tile)] * whole + [rest] * (rest > 0)
        parts: list[ArrayLike] = [text, video] if self.text_first else [video, text]
        first = 0 if self.text_first else len(video)
        return TileBlocks(
            self._ordered(of_token),
            np.concatenate(parts).astype(np.int32),
            across,
            slice(first, first + len(text)),
        )

    def temporal_order(self) -> NDArray[np.int64]:
        """The permutation from raster order to temporal-major order.

        Frame 0, which temporal patterns keep as a sink, comes first and in raster order. Then
        all other frames place by place, so that the tokens of one place over time are
        neighbours and a temporal pattern is a band. Text keeps its place.

        Returns:
            (tokens,) int64, as :meth:`tile_order`.

        >>> VideoGrid(3, 1, 3).temporal_order().tolist()
        [0, 1, 2, 3, 6, 4, 7, 5, 8]
        """
        raster = np.arange(self.video_tokens).reshape(self.t, self.frame_tokens)
        return self._with_text(np.concatenate([raster[0], raster[1:].T.ravel()]))

    def curve_order(self, curve: str = "hilbert") -> NDArray[np.int64]:
        """The permutation from raster order to the order along a space-filling curve.

        Neighbours on a Hilbert curve are neighbours in time and space, so blocks of any size hold
        compact regions. The curve fills the smallest cube of a power of two around the grid; its
        places outside of the grid are left out. Text keeps its place. Needs the extra ``video``.

        Args:
            curve: ``"hilbert"``, the one that there is.

        Returns:
            (tokens,) int64, as :meth:`tile_order`.

        Raises:
            ValueError: another curve.
            MissingExtraError: numpy-hilbert-curve is not installed.

        >>> VideoGrid(1, 2, 2).curve_order().tolist()
        [0, 1, 3, 2]
        """
        if curve != "hilbert":
            raise ValueError(wrong("curve", "'hilbert'", repr(curve), "leave it out"))
        try:
            from hilbert import encode
        except ImportError as error:
            raise MissingExtraError(
                "The order along a curve needs numpy-hilbert-curve, which computes Hilbert curves, "
                "and it is not installed. Fix: pip install numpy-hilbert-curve (the extra `video`)."
            ) from error
        bits = max(1, (max(self.t, self.h, self.w) - 1).bit_length())
        places = np.indices((self.t, self.h, self.w)).reshape(3, -1).T
        # The package wants neighbours in memory, and makes a single number of a single token.
        distance = encode(np.ascontiguousarray(places), 3, bits).reshape(-1)
        return self._ordered(distance)

    def explain(self, blocks: int | tuple[int, int, int] | None = None) -> str:
        """The grid in words: its tokens, and how blocks of them fit.

        Args:
            blocks: tokens of a block, for blocks that cut the sequence as it is; a tile's (frames,
                rows, columns), for :meth:`tile_blocks`; None for which of either fit exactly.

        Raises:
            TypeError, ValueError: no positive block size, or as :meth:`tile_order`.

        >>> print(VideoGrid(21, 30, 52).explain((4, 4, 4)))
        21x30x52: 32,760 tokens
          video   21 frames of 30 x 52 = 1,560 tokens, 32,760 in all
          text    none
        3-D tiles of 4x4x4 = 64 tokens
          blocks  624, of 6 x 8 x 13 tiles; 455 are whole
          edges   the last tile has 1 of 4 frames, 2 of 4 rows
          fill    52.5 of 64 tokens on average, the least 8
          waste   7,176 of 39,936 places hold no token, 18.0 %
        """
        lines = [f"{self}: {self.tokens:,} tokens", *_grid_lines(self)]
        if blocks is None:
            lines += _legal_lines(self)
        elif isinstance(blocks, int | np.integer) and not isinstance(blocks, bool):
            lines += _block_lines(self, int(blocks))
        elif isinstance(blocks, tuple):
            lines += _tile_lines(self, blocks)
        else:
            fix = "pass 64, (4, 4, 4) or nothing"
            raise TypeError(wrong("blocks", "an int or three", repr(blocks), fix))
        return "\n".join(lines)

    def _tiles_across(self, tile: tuple[int, int, int]) -> tuple[int, int, int]:
        """Tiles along each axis, those that the edge cuts included."""
        return -(-self.t // tile[0]), -(-self.h // tile[1]), -(-self.w // tile[2])

    def _tile_of_tokens(self, tile: tuple[int, int, int]) -> NDArray[np.int64]:
        """(video_tokens,) the number of each token's tile, in raster order."""
        tile = checked_tile(tile)
        extents = (self.t, self.h, self.w)
        at = [np.arange(n) // size for n, size in zip(extents, tile, strict=True)]
        _, rows, columns = self._tiles_across(tile)
        of_token: NDArray[np.int64] = (at[0][:, None, None] * rows + at[1][:, None]) * columns
        return (of_token + at[2]).ravel()

    def _ordered(self, key: NDArray[Any]) -> NDArray[np.int64]:
        """The order by a key of each video token; stable, so that raster order breaks ties."""
        return self._with_text(np.argsort(key, kind="stable"))

    def _with_text(self, video: NDArray[np.int64]) -> NDArray[np.int64]:
        """The order of the sequence for an order of the video's tokens."""
        order = np.arange(self.tokens)
        order[self.video_start : self.video_start + self.video_tokens] = self.video_start + video
        return order


def checked_tile(tile: Any, argument: str = "tile") -> TileSize:
    """Three positive extents as Python's ints.

    Args:
        tile: (frames, rows, columns).
        argument: what the caller calls it.

    Raises:
        TypeError: they are no ints.
        ValueError: there are not three, one is not positive, or they are beyond any grid.
    """
    fix = "pass (t, h, w)"
    try:
        if any(isinstance(n, bool) for n in tile):
            raise TypeError
        extents = [operator.index(n) for n in tile]
    except TypeError:
        raise TypeError(wrong(argument, "three ints", repr(tile), fix)) from None
    if len(extents) != 3 or min(extents) < 1:
        raise ValueError(wrong(argument, "three extents of at least 1", tuple(extents), fix))
    if math.prod(extents) > _MOST_PLACES:
        expected = f"a tile of at most {_MOST_PLACES:,} places"
        raise ValueError(wrong(argument, expected, tuple(extents), fix))
    return TileSize(*extents)


# Places of a tile are counted in 32-bit numbers.
_MOST_PLACES = (1 << 31) - 1

#: Tokens of a 3-D tile that published rules use.
_TILE_TOKENS = (64, 128, 384)
#: Block sizes that are named: whole rows of matrix products, up to the largest that rules use.
_ROWS, _MOST_ROWS = 16, 512
_MOST_SHAPES = 5


def _grid_lines(grid: VideoGrid) -> list[str]:
    place = "before" if grid.text_first else "behind"
    text = f"{grid.text_tokens:,} tokens {place} the video" if grid.text_tokens else "none"
    return [
        f"  video   {_counted(grid.t, 'frame')} of {grid.h} x {grid.w} = {grid.frame_tokens:,} "
        f"tokens, {grid.video_tokens:,} in all",
        f"  text    {text}",
    ]


def _block_lines(grid: VideoGrid, size: int) -> list[str]:
    """How blocks of one size cut the sequence."""
    if size < 1:
        raise ValueError(wrong("blocks", "at least 1 token", size, "pass 64, for example"))
    count = -(-grid.tokens // size)
    last = grid.tokens - (count - 1) * size
    lines = [
        f"Blocks of {_counted(size, 'token')}",
        f"  blocks  {count:,}",
        f"  last    {last:,} of {size:,} tokens, {_percent(last, size)}",
        f"  waste   {_waste(grid.tokens, count * size)}",
    ]
    border = grid.text_tokens if grid.text_first else grid.video_tokens
    if grid.text_tokens and border % size:
        lines.append(
            f"  mixed   block {border // size:,}, counted from 0, holds both video and text"
        )
    return lines


def _tile_lines(grid: VideoGrid, tile: tuple[int, int, int]) -> list[str]:
    """How 3-D tiles cut the grid."""
    blocks = grid.tile_blocks(tile)
    volume, count = math.prod(tile), math.prod(blocks.across)
    text = blocks.sizes[blocks.text]
    video = np.delete(blocks.sizes, blocks.text)
    whole = int((video == volume).sum())
    axes = zip((grid.t, grid.h, grid.w), tile, ("frames", "rows", "columns"), strict=True)
    edges = [f"{n % size} of {size} {name}" for n, size, name in axes if n % size]
    across = " x ".join(map(str, blocks.across))
    lines = [
        f"3-D tiles of {TileSize(*tile)} = {_counted(volume, 'token')}",
        f"  blocks  {count:,}, of {across} tiles; {'all' if whole == count else f'{whole:,}'} "
        f"are whole",
        f"  edges   {'the last tile has ' + ', '.join(edges) if edges else 'every axis fits'}",
        f"  fill    {grid.video_tokens / count:,.1f} of {volume:,} tokens on average, the least "
        f"{int(video.min()):,}",
        f"  waste   {_waste(grid.video_tokens, count * volume)}",
    ]
    if len(text):
        lines.append(
            f"  text    {_counted(len(text), 'further block')}, the last of "
            f"{_counted(int(text[-1]), 'token')}"
        )
    return lines


def _legal_lines(grid: VideoGrid) -> list[str]:
    """The tiles and block sizes that leave no block short."""
    lines = ["3-D tiles that divide the grid"]
    for volume in _TILE_TOKENS:
        tiles = sorted(_tiles_of(volume), key=lambda tile: (_padding(grid, tile), sum(tile)))
        exact = [tile for tile in tiles if _padding(grid, tile) == 0]
        if exact:
            more = len(exact) - _MOST_SHAPES
            said = ", ".join(map(str, exact[:_MOST_SHAPES]))
            said += f" and {more} more" if more > 0 else ""
        else:
            places = grid.video_tokens + _padding(grid, tiles[0])
            said = f"none; {tiles[0]} wastes least, {_percent(_padding(grid, tiles[0]), places)}"
        lines.append(f"  {f'{volume} tokens':<11} {said}")
    sizes = range(_ROWS, _MOST_ROWS + 1, _ROWS)
    dividing = [str(size) for size in sizes if grid.tokens % size == 0]
    return [
        *lines,
        f"Block sizes that divide the sequence, of multiples of {_ROWS} up to {_MOST_ROWS}",
        f"  {', '.join(dividing) or 'none, so that the last block is short'}",
    ]


def _tiles_of(volume: int) -> list[TileSize]:
    """All tiles of so many tokens."""
    factors = [n for n in range(1, volume + 1) if volume % n == 0]
    return [
        TileSize(t, h, volume // (t * h)) for t in factors for h in factors if volume % (t * h) == 0
    ]


def _padding(grid: VideoGrid, tile: TileSize) -> int:
    """Places of all tiles that hold no token."""
    axes = zip((grid.t, grid.h, grid.w), tile, strict=True)
    return math.prod(-(-n // size) * size for n, size in axes) - grid.video_tokens


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %"


def _waste(tokens: int, places: int) -> str:
    if tokens == places:
        return "none"
    empty = places - tokens
    return f"{empty:,} of {places:,} places hold no token, {_percent(empty, places)}"


def inverse(order: NDArray[np.int64]) -> NDArray[np.int64]:
    """The permutations that undo ``order``, along its last axis.

    Args:
        order: (..., n) permutations of ``0 .. n - 1``.

    Returns:
        (..., n) int64 with ``inverse(order)[order] == arange(n)`` for each permutation.

    >>> inverse(np.array([2, 0, 1])).tolist()
    [1, 2, 0]
    """
    order = np.asarray(order)
    undone = np.empty(order.shape, dtype=np.int64)
    places = np.broadcast_to(np.arange(order.shape[-1]), order.shape)
    np.put_along_axis(undone, order, places, axis=-1)
    return undone


class VideoModel(NamedTuple):
    """Self-attention of a published video model: heads, head dim, and its grid."""

    heads: int
    head_dim: int
    grid: VideoGrid


#: Published models by name, frames and resolution; text tokens as the model pads its prompts to.
MODELS: dict[str, VideoModel] = {
    "wan-14b-81f-480p": VideoModel(40, 128, VideoGrid(21, 30, 52)),
    "wan-14b-81f-720p": VideoModel(40, 128, VideoGrid(21, 45, 80)),
    "wan-14b-61f-720p": VideoModel(40, 128, VideoGrid(16, 45, 80)),
    "wan-1.3b-81f-480p": VideoModel(12, 128, VideoGrid(21, 30, 52)),
    "wan2.2-5b-121f-704p": VideoModel(24, 128, VideoGrid(31, 22, 40)),
    "hunyuan-129f-720p": VideoModel(24, 128, VideoGrid(33, 45, 80, text_tokens=256)),
    "hunyuan-125f-720p": VideoModel(24, 128, VideoGrid(32, 45, 80, text_tokens=256)),
    "hunyuan-117f-768p": VideoModel(24, 128, VideoGrid(30, 48, 80, text_tokens=256)),
    # About 1,000 tokens of the prompt, taken as 1,000, and 256 for text to be drawn.
    "hunyuan1.5-121f-720p": VideoModel(16, 128, VideoGrid(31, 45, 80, text_tokens=1_256)),
    "cogvideox-5b-49f-480p": VideoModel(48, 64, VideoGrid(13, 30, 45, 226, text_first=True)),
    "cogvideox1.5-5b-81f-768p": VideoModel(48, 64, VideoGrid(11, 48, 85, 226, text_first=True)),
    "longcat-93f-480p": VideoModel(32, 128, VideoGrid(24, 30, 52)),
}
