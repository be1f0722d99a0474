"""Fixed patterns over raster order: sliding window, dilated window, global and local.

    keep[i, j] = (|i - j| <= reach * dilation  and  i - j is a multiple of dilation)
                 or i in A or j in A

``A`` holds the first ``anchors`` places of the video, and its text. Without dilation and anchors
that is a sliding window of ``2 * reach + 1`` places, with dilation one that reaches further at the
same cost, with anchors the pattern of global and local places. Places are tokens, exact to each
pair through token bits where a block is kept in part, or blocks.

Source: Longformer, arXiv 2004.05150: windows of 512 tokens, which are 256 to each side.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.errors import wrong
from tessera_cupy.masks import BlockMask
from tessera_cupy.masks import bits as token_bit
from tessera_cupy.masks.geometry import check_blocks, pair
from tessera_cupy.sparsifiers import fixed
from tessera_cupy.sparsifiers.parameters import one_of, whole
from tessera_cupy.sparsifiers.selection import Selection, check_grid, checked_inputs
from tessera_cupy.video import VideoGrid

Unit = Literal["tokens", "blocks"]

# Block pairs, and token pairs, looked at a time: they bound the temporaries.
_BLOCK_PAIRS = 1 << 20
_TOKEN_PAIRS = 1 << 22


def select(
    q: Any,
    k: Any,
    grid: VideoGrid,
    *,
    reach: int = 256,
    dilation: int = 1,
    anchors: int = 0,
    unit: Unit = "tokens",
    block_size: tuple[int, int] = (64, 64),
) -> Selection:
    """A fixed pattern; of ``q`` and ``k`` only the shapes count.

    Args:
        q: (batch, heads, tokens, d) queries in raster order, NumPy or CuPy.
        k: (batch, heads, tokens, d) keys, likewise.
        grid: the video grid that the tokens lie on. Text is kept whole, as rows and as columns;
            with ``unit="blocks"`` so are the blocks that hold some of it.
        reach: places kept to each side.
        dilation: distance from one kept place to the next.
        anchors: leading places of the video that keep all and are kept by all, such as
            ``grid.frame_tokens`` for the first frame.
        unit: what a place is: ``"tokens"`` or ``"blocks"``.
        block_size: (query, key) tokens of a block.

    Returns:
        A selection in raster order whose mask has one head.

    Raises:
        TypeError: as :func:`~tessera_cupy.sparsifiers.selection.checked_inputs` says.
        ValueError: likewise; a window or anchors beyond the sequence, unequal block sizes where
            places are blocks.

    >>> q = k = np.zeros((1, 2, 1024, 8), np.float32)
    >>> chosen = select(q, k, VideoGrid(4, 16, 16), reach=100)
    >>> chosen.mask.active_pairs() == 1024 * 201 - 2 * sum(range(1, 101))
    True
    """
    checked_inputs(q, k, grid)
    made = fixed.placed(
        q,
        mask,
        grid,
        reach=reach,
        dilation=dilation,
        anchors=anchors,
        unit=unit,
        block_size=block_size,
    )
    return Selection(made, fixed.raster(grid.tokens))


def mask(
    grid: VideoGrid,
    *,
    reach: int = 256,
    dilation: int = 1,
    anchors: int = 0,
    unit: Unit = "tokens",
    block_size: tuple[int, int] = (64, 64),
) -> BlockMask:
    """The mask of :func:`select`, on the host, without queries.

    Example:
        >>> mask(VideoGrid(4, 16, 16), reach=1, unit="blocks").nnz
        46
    """
    check_grid(grid)
    one_of("unit", unit, ("tokens", "blocks"), 'pass "tokens"')
    block = pair(block_size, "block_size")
    check_blocks(block, "choose such a block")
    if unit == "blocks" and block[0] != block[1]:
        raise ValueError(
            wrong("block_size", "square blocks, as places are blocks", block, 'take unit="tokens"')
        )
    size = 1 if unit == "tokens" else block[0]
    places, video = (-(-n // size) for n in (grid.tokens, grid.video_tokens))
    step = _checked("dilation", dilation, 1, places)
    furthest = step * _checked("reach", reach, 0, (places - 1) // step)
    rule = _Rule(furthest, step, _checked("anchors", anchors, 0, video))
    return _mask(grid, rule, unit, block)


def _checked(name: str, value: Any, least: int, most: int) -> int:
    count = whole(name, value, least, None, "pass a count", f"{least} to {most}")
    return whole(name, count, least, most, "the grid has no more places", f"{least} to {most}")


class _Rule(NamedTuple):
    """A pattern: the furthest distance, the step between kept ones, leading anchors."""

    furthest: int
    dilation: int
    anchors: int

    def near(self, apart: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether places that are so far apart keep each other."""
        near: NDArray[np.bool_] = (abs(apart) <= self.furthest) & (apart % self.dilation == 0)
        return near


@lru_cache(maxsize=16)
def _mask(grid: VideoGrid, rule: _Rule, unit: Unit, block: tuple[int, int]) -> BlockMask:
    if unit == "tokens":
        return _over_tokens(grid, rule, block)
    at = np.arange(-(-grid.tokens // block[0]))
    first = grid.video_start // block[0]
    whole = fixed.text_blocks(grid, block[0]) | ((at >= first) & (at < first + rule.anchors))
    kept = rule.near(at[:, None] - at) | whole[:, None] | whole
    return BlockMask.from_dense(kept, block, (grid.tokens, grid.tokens))


class _Side(NamedTuple):
    """The blocks of one side: (n,) int64 each."""

    first: NDArray[np.int64]
    last: NDArray[np.int64]
    anchors: NDArray[np.int64]  # how many of the block's tokens are in A

    @property
    def whole(self) -> NDArray[np.bool_]:
        whole: NDArray[np.bool_] = self.anchors == self.last - self.first + 1
        return whole

    @property
    def mixed(self) -> NDArray[np.bool_]:
        return (self.anchors > 0) & ~self.whole


def _over_tokens(grid: VideoGrid, rule: _Rule, block: tuple[int, int]) -> BlockMask:
    anchor = np.ones(grid.tokens, np.bool_)
    video = slice(grid.video_start + rule.anchors, grid.video_start + grid.video_tokens)
    anchor[video] = False
    queries, keys = (_side(anchor, size) for size in block)
    rows, columns, full = _touched(queries, keys, rule)
    partial, bits = _bits(queries, keys, rows, columns, full, rule, anchor, block)
    indptr = np.searchsorted(rows, np.arange(len(queries.first) + 1))
    return BlockMask.from_csr(
        indptr,
        columns,
        (len(queries.first), len(keys.first)),
        block,
        (grid.tokens, grid.tokens),
        partial=partial,
        token_bits=bits,
    )


def _side(anchor: NDArray[np.bool_], size: int) -> _Side:
    first = np.arange(0, len(anchor), size)
    last = np.minimum(first + size, len(anchor)) - 1
    return _Side(first, last, np.add.reduceat(anchor, first, dtype=np.int64))


def _touched(
    queries: _Side, keys: _Side, rule: _Rule
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Rows and columns of the blocks that keep any pair, by rows, and which of them keep all."""
    found: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]] = []
    step = max(1, _BLOCK_PAIRS // len(keys.first))
    for start in range(0, len(queries.first), step):
        part = slice(start, start + step)
        # i - j of a block's pairs runs from low to high.
        low = queries.first[part, None] - keys.last
        high = queries.last[part, None] - keys.first
        nearest = np.minimum(high, rule.furthest) // rule.dilation * rule.dilation
        some = nearest >= np.maximum(low, -rule.furthest)
        every = (low >= -rule.furthest) & (high <= rule.furthest) & (rule.dilation == 1)
        some |= (queries.anchors[part, None] > 0) | (keys.anchors > 0)
        every |= queries.whole[part, None] | keys.whole
        rows, columns = np.nonzero(some)
        found.append((rows + start, columns, every[rows, columns]))
    rows, columns, full = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return rows, columns, full


def _bits(
    queries: _Side,
    keys: _Side,
    rows: NDArray[np.int64],
    columns: NDArray[np.int64],
    full: NDArray[np.bool_],
    rule: _Rule,
    anchor: NDArray[np.bool_],
    block: tuple[int, int],
) -> tuple[NDArray[np.int32], NDArray[np.uint32]]:
    """Token bits of the blocks kept in part: the index of each entry, and the bits.

    Blocks that lie alike to the diagonal, and whose anchors do, have the same bits.
    """
    mixed = np.flatnonzero(~full)
    at_q, at_k = rows[mixed], columns[mixed]
    alike = np.stack(
        [
            queries.first[at_q] - keys.first[at_k],
            np.where(queries.mixed[at_q], at_q, -1),
            np.where(keys.mixed[at_k], at_k, -1),
        ]
    )
    _, shown, which = np.unique(alike, axis=1, return_index=True, return_inverse=True)
    partial = np.full(len(rows), -1, np.int32)
    partial[mixed] = which.ravel()
    padded = np.append(anchor, np.zeros(max(block), np.bool_))  # a short last block looks past it
    pieces = [np.zeros((0, block[0], token_bit.words(block[1])), np.uint32)]
    step = max(1, _TOKEN_PAIRS // (block[0] * block[1]))
    for start in range(0, len(shown), step):
        part = shown[start : start + step]
        i = queries.first[at_q[part], None] + np.arange(block[0])
        j = keys.first[at_k[part], None] + np.arange(block[1])
        kept = rule.near(i[:, :, None] - j[:, None, :])
        kept |= padded[i][:, :, None] | padded[j][:, None, :]
        pieces.append(token_bit.pack(kept))
    return partial, np.concatenate(pieces)
