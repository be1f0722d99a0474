"""FastVideo's VSA kernel on the same mask, as a contestant.

Written against ``block_sparse_attn_from_indices`` and ``block_sparse_attn`` of fastvideo-kernel
0.3.5 and, where that is not installed, ``block_sparse_attn`` of its forerunner vsa 0.0.4, from
their signatures; not run here. Blocks of 64 x 64 only, head dims 64 and 128. On Hopper its kernel
is ThunderKittens', elsewhere Triton's. Tokens are padded with zeros to whole blocks, whose sizes it
is told. vsa takes a map of blocks and makes its lists in each call, so that its attention alone has
them too. Both return the LSE with O, whose base differs by kernel (Triton's is 2); it is not read.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.bench import gpu
from tessera_cupy.bench.flashinfer_peer import block_sizes
from tessera_cupy.bench.flex import padded_lists
from tessera_cupy.bench.peers import UnsupportedError
from tessera_cupy.masks import BlockMask

_BLOCK = 64
_HEAD_DIMS = (64, 128)


class Vsa:
    """VSA's block-sparse attention over one q, k and v.

    Args:
        tensors: q, k and v, torch bfloat16 tensors (1, heads, tokens, d) on one device.
        on_stream: makes the context in which torch shall work.

    Raises:
        ImportError: neither package is installed, or the one that is does not load.
        UnsupportedError: its kernels do not have the head dim.
    """

    def __init__(self, tensors: tuple[Any, ...], on_stream: Callable[[], Any]) -> None:
        import torch

        self._of_lists: Callable[..., Any] | None = None
        if find_spec("fastvideo_kernel") is not None:
            import fastvideo_kernel

            self._of_lists = fastvideo_kernel.block_sparse_attn_from_indices
            self._of_map = fastvideo_kernel.block_sparse_attn
        else:
            import vsa

            self._of_map = vsa.block_sparse_attn
        _, heads, tokens, head_dim = tensors[0].shape
        if head_dim not in _HEAD_DIMS:
            raise UnsupportedError(f"VSA takes head dims 64 and 128 only, got {head_dim}")
        with on_stream():
            self._padded = tuple(
                torch.nn.functional.pad(x, (0, 0, 0, -tokens % _BLOCK)) if tokens % _BLOCK else x
                for x in tensors
            )
        self._on_stream = on_stream
        self._heads, self._tokens, self._device = heads, tokens, tensors[0].device
        self._sizes = torch.from_numpy(block_sizes(tokens, _BLOCK)).to(self._device)

    def call(self, mask: BlockMask) -> Callable[[], Any]:
        """See :meth:`tessera_cupy.bench.peers.Rival.call`."""
        import torch

        if mask.block_size != (_BLOCK, _BLOCK):
            raise UnsupportedError("VSA takes blocks of 64 x 64 only")
        given: tuple[NDArray[Any], ...]
        if self._of_lists is None:
            attention, given = self._of_map, (mask.to_dense(),)
        else:
            attention, given = self._of_lists, padded_lists(mask)[::-1]
        blocks = tuple(torch.from_numpy(self._each_head(x)).to(self._device) for x in given)
        return lambda: self._attend(attention, *blocks)

    def request(self, mask: BlockMask, dense: Any) -> Callable[[], Any]:
        """See :meth:`tessera_cupy.bench.peers.Rival.request`; lists are made by its own kernel."""
        blocks = gpu.torch_blocks(dense).expand(1, self._heads, -1, -1)
        return lambda: self._attend(self._of_map, blocks)

    def _each_head(self, array: NDArray[Any]) -> NDArray[Any]:
        """(1, heads, ...) of an array that may have one head for all."""
        return np.ascontiguousarray(np.broadcast_to(array, (1, self._heads, *array.shape[2:])))

    def _attend(self, attention: Callable[..., Any], *blocks: Any) -> Any:
        import torch

        with torch.no_grad(), self._on_stream():
            out = attention(*self._padded, *blocks, self._sizes)[0]
        return out[:, :, : self._tokens]


def make_vsa(q: Any, k: Any, v: Any) -> Vsa:
    """VSA over CuPy bfloat16 arrays (1, heads, tokens, d), on the current stream."""
    return Vsa(gpu.torch_tensors(q, k, v), gpu.torch_stream())
