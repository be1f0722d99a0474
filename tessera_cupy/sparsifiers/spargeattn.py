"""SpargeAttn: block means where a block's tokens are alike, and the whole block where not.

In blocks of 128 queries and 64 keys, with ``q[i]`` and ``k[j]`` the means over the tokens of blocks
``i`` and ``j``, a block is alike when the mean cosine similarity of its pairs of tokens exceeds
``similarity``; for keys this is measured after their mean over all tokens is taken away. Then

    p[i, :] = softmax over the alike j of  q[i] . k[j] / sqrt(d)

and each row keeps, by falling ``p``, as many blocks as their sum stays at most ``cdf``, and one at
least; or, with ``top_k``, that share of the blocks. Key blocks that are not alike are kept by all
rows, and the rows of query blocks that are not alike keep all.

On a GPU types wider than 16 bits are rounded to float16 where the likeness of keys is measured.

Source: SpargeAttn, arXiv 2502.18137, and its code: the cdf 0.98 with the similarity 0.6, or the
top-k 0.5 with -0.1. The paper puts tokens along a Hilbert curve, which makes blocks alike; the code
leaves them in raster order. Text is treated as all tokens are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np

from tessera_cupy.errors import wrong
from tessera_cupy.gpus import arch_of
from tessera_cupy.kernels import alike as kernels
from tessera_cupy.kernels import token_rows
from tessera_cupy.masks import BlockMask
from tessera_cupy.permute import TokenOrders
from tessera_cupy.sparsifiers import fixed
from tessera_cupy.sparsifiers.parameters import one_of, real, share
from tessera_cupy.sparsifiers.scoring import keep_mass, likeness, pool, scores
from tessera_cupy.sparsifiers.selection import Selection, checked_inputs, memory
from tessera_cupy.video import VideoGrid

BLOCK_SIZE = (128, 64)
ORDERS = ("hilbert", "raster")


def select(
    q: Any,
    k: Any,
    grid: VideoGrid,
    *,
    cdf: float = 0.98,
    top_k: float | None = None,
    similarity: float = 0.6,
    order: str = "hilbert",
) -> Selection:
    """Choose the blocks by their means, and keep those that a mean does not stand for.

    Args:
        q: (batch, heads, tokens, d) queries in raster order, any float dtype, NumPy or CuPy.
        k: (batch, heads, tokens, d) keys, likewise.
        grid: the video grid that the tokens lie on.
        cdf: share of a row's softmax that the kept blocks do not exceed, 0 to 1; 1 keeps all.
        top_k: in its place the share of the key blocks that each row keeps, 0 to 1.
        similarity: mean cosine similarity, -1 to 1, that the tokens of a block must exceed.
        order: ``"hilbert"``, which needs the extra ``video``, or ``"raster"``.

    Returns:
        A selection of uniform blocks, whose mask has a batch and head axis like ``q``'s.

    Raises:
        TypeError: as :func:`~tessera_cupy.sparsifiers.selection.checked_inputs` says.
        ValueError: likewise; an unknown order; shares outside 0 to 1, a similarity outside -1 to 1.
        MissingExtraError: numpy-hilbert-curve, for that order, is not installed.

    >>> q, k = np.random.default_rng(0).standard_normal((2, 1, 2, 4 * 16 * 16, 32))
    >>> select(
    ...     q, k, VideoGrid(4, 16, 16), top_k=0.5, similarity=-0.5, order="raster"
    ... ).mask.density()
    0.5
    """
    checked_inputs(q, k, grid)
    fix = "pass 0.5 for a half"
    cdf = share("cdf", cdf, fix)
    top_k = None if top_k is None else share("top_k", top_k, fix)
    similarity = _checked_similarity(similarity)
    orders = _orders(grid, one_of("order", order, ORDERS, "pick one"))
    bq, bkv = BLOCK_SIZE
    means = pool(q, bq, "mean", orders=orders), pool(k, bkv, "mean", orders=orders)
    centred = _centred(k, means[1])
    alike = likeness(q, bq, orders=orders), likeness(centred, bkv, orders=orders)
    score = scores(*means, scale=1 / math.sqrt(q.shape[3]))
    weights = _weights(alike[1], similarity)
    if top_k is not None:
        count = int(top_k * score.shape[3])
        kept = keep_mass(score, 0, weights=weights, least=count)
    else:
        kept = keep_mass(score, cdf, weights=weights, least=1)
    gives_up = top_k is None and cdf < 1
    _finish_rows(kept, score, alike, similarity, gives_up)
    mask = BlockMask.from_dense(kept, BLOCK_SIZE, (grid.tokens, grid.tokens))
    return Selection(mask, orders)


def _centred(k: Any, means: Any) -> Any:
    """Keys, in their own type, without their mean over all tokens; ``means`` are the blocks'."""
    tokens, block = k.shape[2], BLOCK_SIZE[1]
    if isinstance(k, np.ndarray):
        sizes = np.minimum(tokens - block * np.arange(means.shape[2]), block).astype(np.float32)
        mean = (means * sizes[:, None]).sum(axis=2, keepdims=True) / np.float32(tokens)
        return (k.astype(np.float32) - mean).astype(k.dtype)
    kept = memory()
    with _gpu_of(k) as arch:
        mean = kernels.head_mean(means, tokens, block, arch=arch, memory=kept)
        return kernels.centred(token_rows.packed(k, kept), mean, arch=arch, memory=kept)


def _weights(alike: Any, similarity: float) -> Any:
    """1 for blocks that are alike, 0 for others."""
    if isinstance(alike, np.ndarray):
        return (alike > np.float32(similarity)).astype(np.float32)
    with _gpu_of(alike) as arch:
        return kernels.weights(alike, similarity, arch=arch, memory=memory())


def _finish_rows(
    kept: Any, score: Any, alike: tuple[Any, Any], similarity: float, gives_up: bool
) -> None:
    """In place: take the block with which a row's sum passes the mass, add those not alike."""
    if not isinstance(kept, np.ndarray):
        with _gpu_of(kept) as arch:
            kernels.finish_rows(kept, score, alike, similarity, gives_up, arch=arch)
        return
    if gives_up:
        lowest = np.where(kept, score, np.float32(np.inf))
        # Of equals the last one, as ties are kept from the lower column on.
        last = kept.shape[3] - 1 - lowest[..., ::-1].argmin(axis=-1)[..., None]
        several = kept.sum(axis=-1, keepdims=True) > 1
        there = np.take_along_axis(kept, last, axis=-1)
        np.put_along_axis(kept, last, there & ~several, axis=-1)
    alike_q, alike_k = (found > np.float32(similarity) for found in alike)
    kept |= ~alike_q[:, :, :, None]
    kept |= ~alike_k[:, :, None, :]


@contextmanager
def _gpu_of(x: Any) -> Iterator[str]:
    """Make an array's GPU current, and name its architecture."""
    import cupy

    with cupy.cuda.Device(x.device.id):
        yield arch_of(int(x.device.id)).name


def _checked_similarity(similarity: Any) -> float:
    expected, fix = "a cosine similarity from -1 to 1", "pass 0.6, the published one"
    number = real("similarity", similarity, expected, fix)
    if not -1 <= number <= 1:
        raise ValueError(wrong("similarity", expected, similarity, fix))
    return number


@lru_cache(maxsize=16)
def _orders(grid: VideoGrid, order: str) -> TokenOrders:
    if order == "raster":
        return fixed.raster(grid.tokens)
    return TokenOrders(grid.curve_order(order).astype(np.int32))
