"""FlashAttention-4 (``flash_attn.cute``), dense and with lists of blocks, as a contestant.

Written against ``flash_attn_func`` and ``BlockSparseTensorsTorch`` of flash-attn-4 4.0.0b36, from
their signatures and checks; not run here. It takes (batch, tokens, heads, d) tensors of any
strides, so views serve. The mask's blocks are its *full* blocks, which run without mask code; its
lists of partial blocks, which it asks for, are empty. ``block_size`` names the mask's blocks, from
which it chooses its own tile. The LSE, which is not asked for here, is the natural logarithm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tessera_cupy.bench import gpu
from tessera_cupy.bench.flex import padded_lists, torch_lists_of_dense
from tessera_cupy.bench.peers import UnsupportedError
from tessera_cupy.masks import BlockMask


def refusal(block_size: tuple[int, int], head_dim: int, capability: tuple[int, int]) -> str | None:
    """Why block sparsity of FA4 cannot take blocks of this size here; None where it can.

    On Hopper its tile has 64 or 128 rows (192 up to head dim 96), which must divide a query block,
    and as many keys as a key block, up to its usual 128 (up to 80 above head dim 192); on
    Blackwell's data centre GPUs two tiles of 128 rows must fit a query block, and 128 keys a key
    block. Elsewhere it has none.

    >>> refusal((64, 32), 128, (9, 0)) is None
    True
    >>> refusal((32, 32), 128, (9, 0))
    'FA4 takes query blocks of a multiple of 64 rows on this GPU, got 32'
    """
    rows, keys = block_size
    major = capability[0]
    if major not in (9, 10, 11):
        had = f"{capability[0]}.{capability[1]}"
        return f"FA4's block sparsity is for compute capability 9, 10 and 11, this GPU has {had}"
    if major == 9:
        unit, widest = 64, 128 if head_dim <= 128 else 112 if head_dim <= 192 else 80
        fits = keys == widest or (keys < widest and keys % 16 == 0)
        wanted = f"key blocks of {widest} keys, or of less in steps of 16,"
    else:
        unit, fits, wanted = 256, keys % 128 == 0, "key blocks of a multiple of 128 keys"
    if rows % unit:
        return f"FA4 takes query blocks of a multiple of {unit} rows on this GPU, got {rows}"
    return None if fits else f"FA4 takes {wanted} on this GPU, got {keys}"


class Fa4Sparse:
    """Block-sparse FA4 over one q, k and v.

    Args:
        tensors: q, k and v, torch bfloat16 tensors (1, heads, tokens, d) on one device.
        on_stream: makes the context in which torch shall work.
        capability: the GPU's compute capability.

    Raises:
        ImportError: FA4 is not installed, or does not load.
    """

    def __init__(
        self,
        tensors: tuple[Any, ...],
        on_stream: Callable[[], Any],
        capability: tuple[int, int],
    ) -> None:
        from flash_attn.cute import flash_attn_func
        from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

        self._attention, self._lists = flash_attn_func, BlockSparseTensorsTorch
        self._tensors = tuple(tensor.transpose(1, 2) for tensor in tensors)
        self._on_stream = on_stream
        self._capability = capability

    def call(self, mask: BlockMask) -> Callable[[], Any]:
        """See :meth:`tessera_cupy.bench.peers.Rival.call`."""
        import torch

        head_dim, device = self._tensors[0].shape[-1], self._tensors[0].device
        reason = refusal(mask.block_size, head_dim, self._capability)
        if reason:
            raise UnsupportedError(reason)
        counts, columns = (torch.from_numpy(x).to(device) for x in padded_lists(mask))
        blocks = self._full_blocks(counts, columns, mask.block_size)
        return lambda: self._attend(blocks)

    def request(self, mask: BlockMask, dense: Any) -> Callable[[], Any]:
        """See :meth:`tessera_cupy.bench.peers.Rival.request`; lists are made as Flex makes its."""
        kept = gpu.torch_blocks(dense)

        def call() -> Any:
            with self._on_stream():
                counts, columns = torch_lists_of_dense(kept)
                blocks = self._full_blocks(counts, columns, mask.block_size)
            return self._attend(blocks)

        return call

    def _full_blocks(self, counts: Any, columns: Any, block_size: tuple[int, int]) -> Any:
        import torch

        return self._lists(
            mask_block_cnt=torch.zeros_like(counts),
            mask_block_idx=torch.zeros_like(columns),
            full_block_cnt=counts,
            full_block_idx=columns,
            block_size=block_size,
        )

    def _attend(self, blocks: Any) -> Any:
        import torch

        with torch.no_grad(), self._on_stream():
            out = self._attention(*self._tensors, block_sparse_tensors=blocks)
        return _heads_first(out)


def make_fa4_sparse(q: Any, k: Any, v: Any) -> Fa4Sparse:
    """Block-sparse FA4 over CuPy bfloat16 arrays (1, heads, tokens, d), on the current stream."""
    return Fa4Sparse(gpu.torch_tensors(q, k, v), gpu.torch_stream(), gpu.capability())


def dense_fa4(q: Any, k: Any, v: Any) -> Callable[[], Any]:
    """FA4's dense attention over CuPy bfloat16 arrays (1, heads, tokens, d).

    Raises:
        ImportError: FA4 is not installed, or does not load.
    """
    import torch
    from flash_attn.cute import flash_attn_func

    on_stream = gpu.torch_stream()
    tensors = [tensor.transpose(1, 2) for tensor in gpu.torch_tensors(q, k, v)]

    def call() -> Any:
        with torch.no_grad(), on_stream():
            return _heads_first(flash_attn_func(*tensors))

    return call


def _heads_first(result: Any) -> Any:
    """O as (1, heads, tokens, d); FA4 returns it alone or with an LSE that may be None."""
    out = result[0] if isinstance(result, tuple) else result
    return out.transpose(1, 2)
