"""FlexAttention of torch on the same block mask, as a contestant.

The mask's blocks become Flex's *full* blocks, which run without any mask code: lists of key
blocks for each row of query blocks, with ``BLOCK_SIZE`` equal to the family's. Flex computes
in tiles that divide a block, so a block of 16 rows means tiles of 16 rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.bench import gpu
from tessera_cupy.masks import BlockMask

# Flex's own tile has at most so many rows and keys, up to a head dim of 128.
_WIDEST = 128
# Keys of its own tile for a head dim of 128 on Hopper and Ampere.
_KEYS = 64


def padded_lists(mask: BlockMask) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The active key blocks of each row, in the form that Flex reads.

    Args:
        mask: any mask of uniform blocks kept whole.

    Returns:
        Counts, (batch, heads, nq) int32, and columns, (batch, heads, nq, nk) int32, ascending
        and padded with 0. They are as wide as the mask, whatever its density, so that masks
        of one block size share a compiled kernel.

    >>> mask = BlockMask.from_dense([[0, 1, 1], [1, 0, 0]], (16, 16))
    >>> counts, columns = padded_lists(mask)
    >>> counts.tolist(), columns.tolist()
    ([[[2, 1]]], [[[[1, 2, 0], [0, 0, 0]]]])
    """
    counts = np.diff(mask.indptr)
    rows = np.repeat(np.arange(len(counts)), counts)
    columns = np.zeros((len(counts), mask.num_blocks[1]), np.int32)
    columns[rows, np.arange(mask.nnz) - mask.indptr[rows]] = mask.indices
    axes = (mask.batch, mask.heads, mask.num_blocks[0])
    return counts.astype(np.int32).reshape(axes), columns.reshape(*axes, -1)


def tile_options(block_size: tuple[int, int]) -> dict[str, int]:
    """Kernel options that let Flex take blocks of this size.

    Empty where its own tile divides the block: then it chooses for itself. Smaller blocks
    get tiles of their own size, and one warp for 16 rows: more would repeat each other's work.

    >>> tile_options((128, 128)), tile_options((32, 16))
    ({}, {'BLOCK_M': 32, 'BLOCK_N': 16, 'num_warps': 2})
    """
    bq, bkv = block_size
    if bq % _WIDEST == 0 and bkv % _WIDEST == 0:
        return {}
    rows = min(bq, _WIDEST)
    return {"BLOCK_M": rows, "BLOCK_N": min(bkv, _KEYS), "num_warps": rows // 16}


def torch_mask(mask: BlockMask, device: Any) -> Any:
    """The mask as torch's ``BlockMask``, without what only a backward pass needs.

    Args:
        mask: any mask of uniform blocks kept whole.
        device: torch device of the lists.
    """
    import torch
    from torch.nn.attention.flex_attention import BlockMask as FlexMask

    counts, columns = (torch.from_numpy(array).to(device) for array in padded_lists(mask))
    return FlexMask.from_kv_blocks(
        torch.zeros_like(counts),  # no block needs a mask inside
        torch.zeros_like(columns),
        counts,
        columns,
        BLOCK_SIZE=mask.block_size,
        seq_lengths=mask.shape,
        compute_q_blocks=False,
    )


def torch_mask_of_dense(blocks: Any, block_size: tuple[int, int], tokens: int) -> Any:
    """Torch's ``BlockMask`` from a map of blocks on the GPU, by the steps that torch itself takes.

    Args:
        blocks: (1, heads, nq, nk) bool torch tensor.
        block_size: (query, key) tokens of a block.
        tokens: query and key tokens.
    """
    import torch
    from torch.nn.attention.flex_attention import BlockMask as FlexMask

    counts, columns = torch_lists_of_dense(blocks)
    return FlexMask.from_kv_blocks(
        torch.zeros_like(counts),
        torch.zeros_like(columns),
        counts,
        columns,
        BLOCK_SIZE=block_size,
        seq_lengths=(tokens, tokens),
        compute_q_blocks=False,
    )


def torch_lists_of_dense(blocks: Any) -> tuple[Any, Any]:
    """Counts and columns as of :func:`padded_lists`, int32, of a bool torch tensor of blocks."""
    import torch

    counts = blocks.sum(dim=-1, dtype=torch.int32)
    columns = torch.argsort(blocks.to(torch.int8), dim=-1, descending=True, stable=True)
    return counts, columns.to(torch.int32)


class Flex:
    """Compiled FlexAttention over one q, k and v.

    Args:
        tensors: q, k and v, torch tensors (batch, heads, tokens, d) on one device.
        on_stream: makes the context in which torch shall work.
    """

    def __init__(self, tensors: tuple[Any, ...], on_stream: Callable[[], Any]) -> None:
        self._tensors = tensors
        self._on_stream = on_stream
        self._block_size: tuple[int, int] | None = None
        self._attention: Any = None

    def call(self, mask: BlockMask) -> Callable[[], Any]:
        """Attention under a mask; the first call compiles, for each new block size."""
        import torch
        from torch.nn.attention.flex_attention import flex_attention

        if mask.block_size != self._block_size:
            # Without this the ninth block size would meet the limit of compilations of one
            # function.
            torch.compiler.reset()
            self._attention = torch.compile(flex_attention, dynamic=False, fullgraph=True)
            self._block_size = mask.block_size
        attention, options = self._attention, tile_options(mask.block_size)
        blocks = torch_mask(mask, self._tensors[0].device)
        return lambda: self._attend(attention, blocks, options)

    def request(self, mask: BlockMask, dense: Any) -> Callable[[], Any]:
        """The same attention, with its mask made in each call.

        Args:
            mask: the mask, of which :meth:`call` was asked last.
            dense: (1, heads, nq, nk) bool CuPy array of its blocks.
        """
        attention, options = self._attention, tile_options(mask.block_size)
        blocks = gpu.torch_blocks(dense)

        def call() -> Any:
            with self._on_stream():
                made = torch_mask_of_dense(blocks, mask.block_size, mask.shape[0])
            return self._attend(attention, made, options)

        return call

    def _attend(self, attention: Any, blocks: Any, options: dict[str, int]) -> Any:
        import torch

        with torch.no_grad(), self._on_stream():  # else Flex writes the LSE too
            return attention(
                *self._tensors, block_mask=blocks, kernel_options=dict(options) or None
            )


def make_flex(q: Any, k: Any, v: Any) -> Flex:
    """FlexAttention over CuPy bfloat16 arrays (batch, heads, tokens, d), on the current stream."""
    return Flex(gpu.torch_tensors(q, k, v), gpu.torch_stream())
