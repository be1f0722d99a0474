"""Launching the kernels of SpargeAttn: ``head_mean.cu``, ``centre_tokens.cu``, ``alike_*.cu``."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera_cupy.kernels import launch
from tessera_cupy.kernels.catalog import KernelConfig, builder
from tessera_cupy.kernels.lifetime import new
from tessera_cupy.kernels.token_rows import CHUNK, ELEMENT_OF

#: ``HeadMeanParams`` in head_mean.cu.
MEAN_PARAMS = np.dtype(
    [
        *[(name, np.uint64) for name in ("means", "out")],
        *[(name, np.int32) for name in ("tokens", "block", "blocks", "channels")],
    ],
    align=True,
)
#: ``CentreTokensParams`` in centre_tokens.cu.
CENTRE_PARAMS = np.dtype(
    [
        *[(name, np.uint64) for name in ("x", "mean", "out")],
        ("count", np.int64),
        *[(name, np.int32) for name in ("chunks", "channels")],
    ],
    align=True,
)
#: ``AlikeWeightsParams`` in alike_weights.cu.
WEIGHTS_PARAMS = np.dtype(
    [
        *[(name, np.uint64) for name in ("alike", "out")],
        ("count", np.int32),
        ("similarity", np.float32),
    ],
    align=True,
)
#: ``AlikeRowsParams`` in alike_rows.cu.
ROWS_PARAMS = np.dtype(
    [
        *[(name, np.uint64) for name in ("score", "alike_q", "alike_k", "kept")],
        *[(name, np.int32) for name in ("rows", "n", "m", "gives_up")],
        ("similarity", np.float32),
    ],
    align=True,
)

# CTAs of a head at most; with a few heads they fill a GPU.
_CENTRE_CTAS = 64


def head_mean(means: Any, tokens: int, block: int, *, arch: str, memory: list[Any]) -> Any:
    """The mean over all tokens, from those of blocks, on the current stream.

    Args:
        means: (batch, heads, blocks, d) float32, C-contiguous; d is at most 256.
        tokens: tokens of a head.
        block: tokens of all blocks but the last, which has the rest.
        arch: architecture of the device, which is current.
        memory: takes what a captured launch uses.

    Returns:
        (batch, heads, 1, d) float32.
    """
    batch, heads, blocks, channels = means.shape
    out = new((batch, heads, 1, channels), np.float32, memory)
    params: dict[str, Any] = {
        "means": means.data.ptr,
        "out": out.data.ptr,
        "tokens": tokens,
        "block": block,
        "blocks": blocks,
        "channels": channels,
    }
    config = builder(arch, "head_mean")
    _run(config, means, (batch * heads,), MEAN_PARAMS, params, 4 * config.warps * channels)
    return out


def centred(x: Any, mean: Any, *, arch: str, memory: list[Any]) -> Any:
    """Tokens without their head's mean, on the current stream.

    Args:
        x: (batch, heads, tokens, d) CuPy array, as ``token_rows.packed`` gives it.
        mean: (batch, heads, 1, d or less) float32, C-contiguous.
        arch: architecture of the device, which is current.
        memory: takes what a captured launch uses.

    Returns:
        An array like x.
    """
    batch, heads, tokens, d = x.shape
    out = new(x.shape, x.dtype, memory)
    count = tokens * d // CHUNK
    params: dict[str, Any] = {
        "x": x.data.ptr,
        "mean": mean.data.ptr,
        "out": out.data.ptr,
        "count": count,
        "chunks": d // CHUNK,
        "channels": mean.shape[3],
    }
    config = builder(arch, f"centre_tokens_{ELEMENT_OF[x.dtype.name]}")
    ctas = min(-(-count // (32 * config.warps)), _CENTRE_CTAS)
    _run(config, x, (ctas, batch * heads), CENTRE_PARAMS, params)
    return out


def weights(alike: Any, similarity: float, *, arch: str, memory: list[Any]) -> Any:
    """1 where a likeness exceeds the similarity, else 0: float32 of the likeness's shape."""
    out = new(alike.shape, np.float32, memory)
    params: dict[str, Any] = {
        "alike": alike.data.ptr,
        "out": out.data.ptr,
        "count": alike.size,
        "similarity": similarity,
    }
    config = builder(arch, "alike_weights")
    _run(config, alike, (-(-alike.size // (32 * config.warps)),), WEIGHTS_PARAMS, params)
    return out


def finish_rows(
    kept: Any, score: Any, alike: tuple[Any, Any], similarity: float, gives_up: bool, *, arch: str
) -> None:
    """Complete what rows keep, in place, on the current stream.

    Args:
        kept: (batch, heads, n, m) bool, C-contiguous.
        score: the same shape, float32.
        alike: likeness of the query blocks, (batch, heads, n), and of the key blocks,
            (batch, heads, m), float32.
        similarity: what it exceeds where a block is alike.
        gives_up: whether a row that keeps several blocks gives up the lowest one.
        arch: architecture of the device, which is current.
    """
    batch, heads, n, m = kept.shape
    rows = batch * heads * n
    params: dict[str, Any] = {
        "score": score.data.ptr,
        "alike_q": alike[0].data.ptr,
        "alike_k": alike[1].data.ptr,
        "kept": kept.data.ptr,
        "rows": rows,
        "n": n,
        "m": m,
        "gives_up": gives_up,
        "similarity": similarity,
    }
    config = builder(arch, "alike_rows")
    _run(config, kept, (-(-rows // config.warps),), ROWS_PARAMS, params)


def _run(
    config: KernelConfig,
    like: Any,
    grid: tuple[int, ...],
    dtype: np.dtype[Any],
    params: dict[str, Any],
    smem: int = 0,
) -> None:
    kernel = launch.load(config, like.device.id)
    packed = (launch.packed_struct(dtype, params),)
    kernel(grid, (32 * config.warps,), packed, shared_mem=smem)
