"""XAttention: blocks by the sums of their anti-diagonals, at the resolution of a stride.

With groups ``g`` and ``h`` of ``S = stride`` neighbouring tokens, tokens past the last being zeros,

    s[g, h] = sum_i q[S g + S - 1 - i] . k[S h + i] / (S sqrt(d)),   i = 0 .. S - 1
    P[i, j] = sum of softmax over h of s[g, h],   g in query block i, h in key block j

and each row of blocks of 128 tokens keeps the fewest, by falling ``P``, whose sum reaches
``threshold`` times the row's.

On a GPU the products run on tensor cores: wider types than 16 bits are rounded to float16 first.

Source: XAttention, arXiv 2503.16428, and its code: the stride 16 or 8, the threshold 0.9. Tokens
stay in raster order, and text is treated as all tokens are.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.errors import wrong
from tessera_cupy.gpus import arch_of
from tessera_cupy.masks import BlockMask
from tessera_cupy.sparsifiers import fixed
from tessera_cupy.sparsifiers.parameters import share, whole
from tessera_cupy.sparsifiers.scoring import keep_mass
from tessera_cupy.sparsifiers.selection import Selection, checked_inputs, flag_of, memory
from tessera_cupy.video import VideoGrid

BLOCK = 128
STRIDES = (8, 16)


def select(
    q: Any, k: Any, grid: VideoGrid, *, stride: int = 16, threshold: float = 0.9
) -> Selection:
    """Choose the blocks that hold most of the attention which anti-diagonals show.

    Args:
        q: (batch, heads, tokens, d) queries in raster order, any float dtype, NumPy or CuPy.
        k: (batch, heads, tokens, d) keys, likewise.
        grid: the video grid that the tokens lie on; only its number of tokens counts.
        stride: tokens of a group, 16 or 8.
        threshold: share of a row's sum that the kept blocks reach, 0 to 1.

    Returns:
        A selection of uniform blocks in raster order, whose mask has a batch and head axis like
        ``q``'s.

    Raises:
        TypeError: as :func:`~tessera_cupy.sparsifiers.selection.checked_inputs` says.
        ValueError: likewise; another stride; ``threshold`` outside 0 to 1.

    >>> q, k = np.random.default_rng(0).standard_normal((2, 1, 2, 4 * 16 * 16, 32))
    >>> select(q, k, VideoGrid(4, 16, 16)).mask.num_blocks
    (8, 8)
    """
    checked_inputs(q, k, grid)
    expected, fix = " or ".join(map(str, STRIDES)), "16 is the published one, 8 finer"
    stride = whole("stride", stride, min(STRIDES), max(STRIDES), fix, expected)
    if stride not in STRIDES:
        raise ValueError(wrong("stride", expected, stride, fix))
    threshold = share("threshold", threshold, "pass 0.9 for 90%")
    score = log_sums(q, k, stride)
    mask = BlockMask.from_dense(
        keep_mass(score, threshold), (BLOCK, BLOCK), (grid.tokens, grid.tokens)
    )
    return Selection(mask, fixed.raster(grid.tokens))


def log_sums(q: Any, k: Any, stride: int) -> Any:
    """The logarithm of ``P``, (batch, heads, n, n) float32, where ``q`` is; its softmax is ``P``.

    Args:
        q: (batch, heads, tokens, d), any float dtype, in raster order.
        k: (batch, heads, tokens, d), likewise.
        stride: tokens of a group, 8 or 16.
    """
    scale = 1 / (stride * math.sqrt(q.shape[3]))
    if not isinstance(q, np.ndarray):
        return _log_sums_on_gpu(q, k, stride, scale)
    batch, heads, tokens, _ = q.shape
    blocks = -(-tokens // BLOCK)
    out = np.empty((batch, heads, blocks, blocks), np.float32)
    firsts = np.arange(0, -(-tokens // stride), BLOCK // stride)
    for b, h in np.ndindex(batch, heads):
        s = _grouped(q[b, h], stride, reverse=True) @ _grouped(k[b, h], stride).T
        s *= np.float32(scale)
        s -= s.max(axis=1, keepdims=True)
        np.exp(s, out=s)
        s /= s.sum(axis=1, keepdims=True)
        sums = np.add.reduceat(np.add.reduceat(s, firsts, axis=1), firsts, axis=0)
        with np.errstate(divide="ignore"):  # what underflowed has no mass
            out[b, h] = np.log(sums)
    return out


def _log_sums_on_gpu(q: Any, k: Any, stride: int, scale: float) -> Any:
    import cupy

    from tessera_cupy.kernels import antidiagonal
    from tessera_cupy.kernels.token_rows import packed

    kept = memory()
    with cupy.cuda.Device(q.device.id):
        return antidiagonal.log_sums(
            packed(q, kept),
            packed(k, kept),
            stride=stride,
            block_groups=BLOCK // stride,
            scale=scale,
            arch=arch_of(int(q.device.id)).name,
            memory=kept,
            flags=(flag_of(q), flag_of(k)),
        )


def _grouped(x: NDArray[Any], stride: int, *, reverse: bool = False) -> NDArray[np.float32]:
    """(groups, stride * d): each group's tokens side by side, the last one first if reversed."""
    tokens, d = x.shape
    groups = -(-tokens // stride)
    padded = np.zeros((groups * stride, d), np.float32)
    padded[:tokens] = x
    shaped = padded.reshape(groups, stride, d)
    return np.ascontiguousarray(shaped[:, ::-1] if reverse else shaped).reshape(groups, -1)
