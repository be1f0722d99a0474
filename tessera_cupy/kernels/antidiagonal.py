"""Launching ``antidiagonal_scores.cu`` and ``antidiagonal_sums.cu``."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera_cupy.kernels import launch
from tessera_cupy.kernels.catalog import builder
from tessera_cupy.kernels.lifetime import new
from tessera_cupy.kernels.token_rows import CHUNK, ELEMENT_OF, PRODUCT_SMEM, PRODUCT_TILE

#: ``AntidiagonalScoresParams`` in antidiagonal_scores.cu.
SCORES_PARAMS = np.dtype(
    [
        *[(name, np.uint64) for name in ("q", "k", "out", "q_flag", "k_flag")],
        *[(name, np.int32) for name in ("tokens", "chunks", "stride", "groups")],
        *[(name, np.int32) for name in ("blocks", "block_groups", "tiles")],
        ("scale_log2", np.float32),
    ],
    align=True,
)
#: ``AntidiagonalSumsParams`` in antidiagonal_sums.cu.
SUMS_PARAMS = np.dtype(
    [
        *[(name, np.uint64) for name in ("logs", "out")],
        *[(name, np.int32) for name in ("groups", "blocks", "block_groups")],
    ],
    align=True,
)


def log_sums(
    q: Any,
    k: Any,
    *,
    stride: int,
    block_groups: int,
    scale: float,
    arch: str,
    memory: list[Any],
    flags: tuple[int, int] = (0, 0),
) -> Any:
    """How much each pair of blocks gets of the softmax over groups' anti-diagonal scores.

    Args:
        q: (batch, heads, tokens, d) CuPy array, as ``token_rows.packed`` gives it.
        k: the same of the keys.
        stride: tokens of a group; 8, or a multiple of it.
        block_groups: groups of a block, 8 or 16.
        scale: factor of the scores.
        arch: architecture of the device, which is current.
        memory: takes what a captured launch uses.
        flags: addresses of int32 that are set where q, and k, hold NaN or infinities, or 0.

    Returns:
        (batch, heads, n, n) float32: the natural logarithm of the sum over all pairs of a group of
        the query block and one of the key block.
    """
    batch, heads, tokens, d = q.shape
    groups = -(-tokens // stride)
    blocks = -(-groups // block_groups)
    tiles = -(-groups // PRODUCT_TILE)
    device = q.device.id
    logs = new((batch, heads, groups, blocks), np.float32, memory)
    out = new((batch, heads, blocks, blocks), np.float32, memory)
    params: dict[str, Any] = {
        "q": q.data.ptr,
        "k": k.data.ptr,
        "out": logs.data.ptr,
        "q_flag": flags[0],
        "k_flag": flags[1],
        "tokens": tokens,
        "chunks": d // CHUNK,
        "stride": stride,
        "groups": groups,
        "blocks": blocks,
        "block_groups": block_groups,
        "tiles": tiles,
        "scale_log2": scale * np.log2(np.e),
    }
    config = builder(arch, f"antidiagonal_scores_{ELEMENT_OF[q.dtype.name]}")
    kernel = launch.load(config, device)
    packed = (launch.packed_struct(SCORES_PARAMS, params),)
    grid = (batch * heads * tiles * tiles,)
    kernel(grid, (32 * config.warps,), packed, shared_mem=PRODUCT_SMEM)

    config = builder(arch, "antidiagonal_sums")
    params = {
        "logs": logs.data.ptr,
        "out": out.data.ptr,
        "groups": groups,
        "blocks": blocks,
        "block_groups": block_groups,
    }
    kernel = launch.load(config, device)
    packed = (launch.packed_struct(SUMS_PARAMS, params),)
    grid = (batch * heads * blocks,)
    kernel(grid, (32 * config.warps,), packed, shared_mem=4 * block_groups)
    return out
