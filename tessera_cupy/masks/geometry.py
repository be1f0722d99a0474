"""Where blocks lie in tokens: block sizes, shapes, ragged sizes, and the checks on them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.errors import wrong
from tessera_cupy.masks.formats import as_integers, to_host, with_heads

#: Smallest and largest uniform block side, and the step between legal ones.
BLOCK_MIN, BLOCK_MAX, BLOCK_STEP = 16, 384, 8

#: Advice where a mask of tokens came in place of one of blocks.
TOKEN_MASK = "the mask has one entry for each token: use BlockMask.from_tokens"

_SIDES = ("query", "key")


@dataclass(frozen=True, eq=False)
class BlockGrid:
    """How the blocks of a mask tile its tokens.

    Attributes:
        block_size: (bq, bkv), tokens of a block; nominal on a ragged side.
        shape: (sq, skv), tokens.
        batch: batch axis of the mask; 1 broadcasts.
        heads: head axis of the mask; 1 broadcasts.
        q_block_sizes: None where query blocks are uniform (the last one may be short),
            else (batch, heads, nq) int32 tokens of each block, 0 allowed.
        kv_block_sizes: the same for keys, (batch, heads, nk).
    """

    block_size: tuple[int, int]
    shape: tuple[int, int]
    batch: int
    heads: int
    q_block_sizes: NDArray[np.int32] | None
    kv_block_sizes: NDArray[np.int32] | None

    @property
    def num_blocks(self) -> tuple[int, int]:
        """(nq, nk): blocks on each side."""
        return self._count(0, self.q_block_sizes), self._count(1, self.kv_block_sizes)

    @property
    def ragged(self) -> bool:
        """True when blocks of either side have sizes of their own."""
        return True in self.ragged_sides

    @property
    def ragged_sides(self) -> tuple[bool, bool]:
        """Whether blocks have sizes of their own, of the query and of the key side."""
        return self.q_block_sizes is not None, self.kv_block_sizes is not None

    @property
    def unread_sides(self) -> tuple[bool, bool]:
        """Ragged sides whose sizes are in GPU memory; of them only the nominal block is known."""
        return False, False

    @property
    def max_block(self) -> tuple[int, int]:
        """Rows and columns of the largest block; the nominal size on a uniform side."""
        return self._largest(0, self.q_block_sizes), self._largest(1, self.kv_block_sizes)

    def q_starts(self) -> NDArray[np.int64]:
        """First query token of each block, and the end: (batch or 1, heads or 1, nq + 1) int64."""
        return self._starts[0]

    def kv_starts(self) -> NDArray[np.int64]:
        """First key token of each block, and the end: (batch or 1, heads or 1, nk + 1) int64."""
        return self._starts[1]

    @cached_property
    def _starts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return self._start(0, self.q_block_sizes), self._start(1, self.kv_block_sizes)

    def _count(self, side: int, sizes: NDArray[np.int32] | None) -> int:
        if sizes is not None:
            return int(sizes.shape[-1])
        return -(-self.shape[side] // self.block_size[side])

    def _largest(self, side: int, sizes: NDArray[np.int32] | None) -> int:
        return self.block_size[side] if sizes is None else int(sizes.max(initial=0))

    def _start(self, side: int, sizes: NDArray[np.int32] | None) -> NDArray[np.int64]:
        if sizes is None:
            edges = np.arange(self.num_blocks[side] + 1, dtype=np.int64) * self.block_size[side]
            starts = np.minimum(edges, self.shape[side])[None, None]
        else:
            starts = np.zeros((*sizes.shape[:2], sizes.shape[2] + 1), np.int64)
            np.cumsum(sizes, axis=-1, out=starts[..., 1:])
        starts.setflags(write=False)
        return starts


def resolve_grid(
    num_blocks: tuple[int, int],
    batch: int,
    heads: int,
    block_size: Sequence[int],
    shape: Sequence[int] | None,
    q_block_sizes: Any,
    kv_block_sizes: Any,
) -> BlockGrid:
    """Check the geometry of a mask of ``num_blocks`` blocks and fill in what was left out.

    The batch and head axes of the result cover those of the mask and of the sizes.

    Raises:
        TypeError: block_size, shape or the sizes are not integers.
        ValueError: they disagree with the number of blocks or with each other.
    """
    given = (q_block_sizes, kv_block_sizes)
    names = ("q_block_sizes", "kv_block_sizes")
    block = pair(block_size, "block_size")
    tokens = None if shape is None else pair(shape, "shape")
    sizes: list[NDArray[np.int32] | None] = [None, None]
    length = [0, 0]
    for side in (0, 1):
        if given[side] is None:
            _check_block(
                block, side, "choose such a block, or give the sizes of ragged blocks one by one"
            )
            length[side] = _uniform_length(num_blocks, block, tokens, side, given)
        else:
            if block[side] < 1:
                raise ValueError(
                    wrong("block_size", "positive sizes", block, "give the largest block's size")
                )
            sizes[side] = _read_sizes(given[side], names[side], num_blocks[side], side)
            length[side] = _ragged_length(sizes[side], names[side], tokens, side)
    for side in (0, 1):
        array = sizes[side]
        if array is not None:
            batch = _broadcast(batch, array.shape[0], "batch", names[side])
            heads = _broadcast(heads, array.shape[1], "heads", names[side])
    for side in (0, 1):
        array = sizes[side]
        if array is not None:
            sizes[side] = np.array(np.broadcast_to(array, (batch, heads, array.shape[2])))
    return BlockGrid(block, (length[0], length[1]), batch, heads, sizes[0], sizes[1])


def uniform_grid(
    batch: int, heads: int, block_size: Sequence[int], shape: tuple[int, int]
) -> BlockGrid:
    """The grid of uniform blocks over ``shape`` tokens.

    Raises:
        TypeError: block_size is not two integers.
        ValueError: block_size is not legal.
    """
    block = pair(block_size, "block_size")
    check_blocks(block, "choose such a block")
    return BlockGrid(block, shape, batch, heads, None, None)


def pair(value: Sequence[int], name: str) -> tuple[int, int]:
    """Read two non-negative integers.

    Raises:
        TypeError: there are not two, or they are no integers.
        ValueError: one is negative.
    """
    try:
        first, second = (operator.index(v) for v in value)
        if any(isinstance(v, bool) for v in value):
            raise TypeError
    except (TypeError, ValueError):
        raise TypeError(
            wrong(name, "two integers, (query, key)", repr(value), "pass a tuple such as (64, 64)")
        ) from None
    if min(first, second) < 0:
        raise ValueError(wrong(name, "no negative number", (first, second), "pass a size"))
    return first, second


def check_blocks(block: tuple[int, int], fix: str) -> None:
    """Check the block size of a mask that is uniform on both sides.

    Raises:
        ValueError: block_size is not legal; ``fix`` is the advice.
    """
    for side in (0, 1):
        _check_block(block, side, fix)


def _check_block(block: tuple[int, int], side: int, fix: str) -> None:
    size = block[side]
    if size % BLOCK_STEP or not BLOCK_MIN <= size <= BLOCK_MAX:
        raise ValueError(
            wrong(
                "block_size",
                f"multiples of {BLOCK_STEP} from {BLOCK_MIN} to {BLOCK_MAX}",
                f"{size} on the {_SIDES[side]} side of {block}",
                fix,
            )
        )


def _uniform_length(
    num_blocks: tuple[int, int],
    block: tuple[int, int],
    shape: tuple[int, int] | None,
    side: int,
    ragged: tuple[Any, Any],
) -> int:
    count, size = num_blocks[side], block[side]
    if shape is None:
        return count * size
    needed = -(-shape[side] // size)
    if needed != count:
        whole = tuple(
            n * b if sizes is None else tokens
            for n, b, tokens, sizes in zip(num_blocks, block, shape, ragged, strict=True)
        )
        covers = f"{(count - 1) * size + 1} to {count * size}" if count else "0"
        fix = f"pass tokens, such as shape={whole} with whole blocks, or build the mask for these"
        if num_blocks == shape:
            fix = f"{TOKEN_MASK}(mask, {block})"
        raise ValueError(
            wrong(
                "shape",
                f"{covers} {_SIDES[side]} tokens, as the mask has {count} blocks of {size}",
                f"{shape[side]} tokens, which need {needed} blocks",
                fix,
            )
        )
    return shape[side]


def _read_sizes(sizes: Any, name: str, count: int, side: int) -> NDArray[np.int32]:
    array = with_heads(as_integers(to_host(sizes, name)[0], name), 1, name, "n")
    if array.shape[2] != count:
        raise ValueError(
            wrong(
                name,
                f"one size for each of the mask's {count} {_SIDES[side]} blocks",
                f"{array.shape[2]} sizes",
                "give a size for every block; 0 marks an absent one",
            )
        )
    if array.size and (array.min() < 0 or array.max() > np.iinfo(np.int32).max):
        raise ValueError(
            wrong(
                name,
                "sizes from 0 to 2**31 - 1",
                f"values {array.min()} to {array.max()}",
                "give tokens per block",
            )
        )
    return array.astype(np.int32)


def _ragged_length(
    sizes: NDArray[np.int32] | None, name: str, shape: tuple[int, int] | None, side: int
) -> int:
    assert sizes is not None
    sums = sizes.sum(axis=-1, dtype=np.int64)
    expected = int(sums.flat[0]) if shape is None else shape[side]
    if (sums != expected).any():
        b, h = np.argwhere(sums != expected)[0]
        raise ValueError(
            wrong(
                name,
                f"sizes that sum to {expected} {_SIDES[side]} tokens in every head",
                f"a sum of {sums[b, h]} in batch {b}, head {h}",
                "correct the sizes, or pass the shape that they were made for",
            )
        )
    return expected


def _broadcast(mask_axis: int, sizes_axis: int, axis: str, name: str) -> int:
    if 1 not in (mask_axis, sizes_axis) and mask_axis != sizes_axis:
        raise ValueError(
            wrong(
                name,
                f"1 or {mask_axis} along {axis}, as the mask has",
                sizes_axis,
                "give sizes for one head, or for each head of the mask",
            )
        )
    return max(mask_axis, sizes_axis)
