"""FlashInfer's variable block-sparse attention on the same mask, as a contestant.

Written against ``flashinfer.VariableBlockSparseAttentionWrapper`` of flashinfer-python 0.7.4, from
its signatures and documentation; not run here. ``plan`` takes a map of blocks and the sizes of all
blocks, expands them to lists of single keys (pages of one token) and waits for the GPU; ``run``
attends. So the attention alone is ``run``, and a request is ``plan`` and ``run``. Any block size
serves. The backend ``auto`` takes FA3's kernels on Hopper where they are built and FA2's
elsewhere; it never takes ``cake``, whose kernels are for compute capability 9.0, head dim 128,
whole blocks of 64 x 64 and 1 to 64 of them in a row. The LSE, which is not asked for here, is to
base 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.bench import gpu
from tessera_cupy.bench.peers import UnsupportedError
from tessera_cupy.masks import BlockMask

_WORKSPACE = 128 << 20  # bytes, as its documentation recommends
_CAKE_BLOCK, _CAKE_MOST, _CAKE_DIM = (64, 64), 64, 128


class FlashInfer:
    """The wrapper over one q, k and v.

    Args:
        tensors: q, k and v, torch bfloat16 tensors (1, heads, tokens, d) on one device.
        on_stream: makes the context in which torch shall work.
        backend: ``"auto"`` or ``"cake"``.
        capability: the GPU's compute capability.

    Raises:
        ImportError: FlashInfer is not installed, or does not load.
    """

    def __init__(
        self,
        tensors: tuple[Any, ...],
        on_stream: Callable[[], Any],
        backend: str,
        capability: tuple[int, int],
    ) -> None:
        import flashinfer
        import torch

        self._tensors = tuple(tensor[0] for tensor in tensors)
        self._on_stream = on_stream
        self._backend = backend
        self._capability = capability
        workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=tensors[0].device)

        def wrapper() -> Any:
            return flashinfer.VariableBlockSparseAttentionWrapper(workspace, backend=backend)

        self._wrapper = wrapper

    def call(self, mask: BlockMask) -> Callable[[], Any]:
        """``run`` alone; see :meth:`tessera_cupy.bench.peers.Rival.call`."""
        import torch

        if self._backend == "cake":
            _check_cake(mask, self._tensors[0].shape[-1], self._capability)
        heads = self._tensors[0].shape[0]
        dense = np.ascontiguousarray(np.broadcast_to(mask.to_dense()[0], (heads, *mask.num_blocks)))
        blocks = torch.from_numpy(dense).to(self._tensors[0].device)
        wrapper = self._wrapper()
        with self._on_stream():
            self._plan(wrapper, blocks, self._sizes(mask))
        return lambda: self._run(wrapper)

    def request(self, mask: BlockMask, dense: Any) -> Callable[[], Any]:
        """``plan`` and ``run``; see :meth:`tessera_cupy.bench.peers.Rival.request`."""
        heads = self._tensors[0].shape[0]
        blocks = gpu.torch_blocks(dense)[0].expand(heads, -1, -1).contiguous()
        sizes, wrapper = self._sizes(mask), self._wrapper()

        def call() -> Any:
            with self._on_stream():
                self._plan(wrapper, blocks, sizes)
            return self._run(wrapper)

        return call

    def _sizes(self, mask: BlockMask) -> tuple[Any, Any]:
        """Tokens of each query block and of each key block, (heads, n) int32."""
        import torch

        heads, device = self._tensors[0].shape[0], self._tensors[0].device
        rows, columns = (
            torch.from_numpy(block_sizes(tokens, block)).to(device).expand(heads, -1).contiguous()
            for tokens, block in zip(mask.shape, mask.block_size, strict=True)
        )
        return rows, columns

    def _plan(self, wrapper: Any, blocks: Any, sizes: tuple[Any, Any]) -> None:
        heads, _, head_dim = self._tensors[0].shape
        wrapper.plan(blocks, *sizes, heads, heads, head_dim, q_data_type=self._tensors[0].dtype)

    def _run(self, wrapper: Any) -> Any:
        with self._on_stream():
            return wrapper.run(*self._tensors)[None]


def block_sizes(tokens: int, block: int) -> NDArray[np.int32]:
    """Tokens of each block: the last may be short.

    >>> block_sizes(100, 64).tolist()
    [64, 36]
    """
    sizes = np.full(-(-tokens // block), block, np.int32)
    sizes[-1] = tokens - block * (len(sizes) - 1)
    return sizes


def _check_cake(mask: BlockMask, head_dim: int, capability: tuple[int, int]) -> None:
    counts = np.diff(mask.indptr)
    if capability != (9, 0):
        had = f"compute capability {capability[0]}.{capability[1]}"
        raise UnsupportedError(f"cake's kernels are for compute capability 9.0, this GPU has {had}")
    if head_dim != _CAKE_DIM:
        raise UnsupportedError(f"cake's kernels take head dim 128 only, got {head_dim}")
    if mask.block_size != _CAKE_BLOCK:
        raise UnsupportedError("cake's kernels take blocks of 64 x 64 only")
    if any(tokens % 64 for tokens in mask.shape):
        raise UnsupportedError("cake's kernels take whole blocks of 64 tokens only")
    if counts.min(initial=1) < 1 or counts.max(initial=1) > _CAKE_MOST:
        raise UnsupportedError("cake's kernels take 1 to 64 blocks in a row only")


def make_flashinfer(q: Any, k: Any, v: Any, *, backend: str = "auto") -> FlashInfer:
    """FlashInfer over CuPy bfloat16 arrays (1, heads, tokens, d), on the current stream."""
    return FlashInfer(gpu.torch_tensors(q, k, v), gpu.torch_stream(), backend, gpu.capability())
