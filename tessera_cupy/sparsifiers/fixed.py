"""What rules without scores share: one mask a geometry, kept where the queries are."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.masks import BlockMask
from tessera_cupy.permute import TokenOrders
from tessera_cupy.video import VideoGrid


def text_blocks(grid: VideoGrid, block: int) -> NDArray[np.bool_]:
    """Which blocks of a uniform cut of the sequence hold a text token: (blocks,) bool."""
    starts = np.arange(0, grid.tokens, block)
    ends = np.minimum(starts + block, grid.tokens)
    first = grid.video_start
    return (starts < first) | (ends > first + grid.video_tokens)


@lru_cache(maxsize=16)
def raster(tokens: int) -> TokenOrders:
    """Raster order, made once for each length."""
    return TokenOrders.raster(tokens)


def placed(q: Any, make: Callable[..., BlockMask], grid: VideoGrid, **rule: Any) -> BlockMask:
    """The host's mask ``make(grid, **rule)``, over a block map on ``q``'s GPU where it has one.

    The same geometry on the same GPU gets the same mask, so that a plan made for it serves again.
    Masks with token bits stay the host's, which serve every GPU.
    """
    made = make(grid, **rule)
    if isinstance(q, np.ndarray) or made.has_token_bits:
        return made
    return _mask_on(made, int(q.device.id))


@lru_cache(maxsize=16)
def _mask_on(mask: BlockMask, device: int) -> BlockMask:
    import cupy

    from tessera_cupy.kernels.launch import refuse_capture

    with cupy.cuda.Device(device):
        refuse_capture()
        blocks = cupy.asarray(mask.to_dense())
        # Later calls may come on other streams.
        cupy.cuda.get_current_stream().synchronize()
    return BlockMask.from_dense(
        blocks,
        mask.block_size,
        mask.shape,
        q_block_sizes=mask.q_block_sizes,
        kv_block_sizes=mask.kv_block_sizes,
    )
