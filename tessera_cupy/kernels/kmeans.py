"""Launching ``kmeans_assign.cu``, ``kmeans_order.cu``, ``kmeans_means.cu``, ``kmeans_line.cu``."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tessera_cupy.kernels import launch
from tessera_cupy.kernels.catalog import builder
from tessera_cupy.kernels.lifetime import new
from tessera_cupy.kernels.token_rows import CHUNK, ELEMENT_OF, PRODUCT_SMEM, PRODUCT_TILE

#: ``KmeansAssignParams`` in kmeans_assign.cu.
ASSIGN_PARAMS = np.dtype(
    [
        *[(name, np.uint64) for name in ("x", "centroids", "half_norms", "labels", "flag")],
        *[(name, np.int32) for name in ("x_tokens", "tokens", "chunks", "clusters", "tiles")],
    ],
    align=True,
)
#: ``KmeansOrderParams`` in kmeans_order.cu.
ORDER_PARAMS = np.dtype(
    [
        *[(name, np.uint64) for name in ("labels", "order", "sizes", "starts")],
        *[(name, np.int32) for name in ("tokens", "clusters", "label_bits")],
    ],
    align=True,
)
#: ``KmeansMeansParams`` in kmeans_means.cu.
MEANS_PARAMS = np.dtype(
    [
        *[(name, np.uint64) for name in ("x", "order", "sizes", "starts")],
        *[(name, np.uint64) for name in ("kept", "centroids", "rounded", "half_norms")],
        *[(name, np.int32) for name in ("tokens", "chunks", "clusters", "size_stride")],
        *[(name, np.int32) for name in ("spread", "spread_start")],
    ],
    align=True,
)
#: ``KmeansLineParams`` in kmeans_line.cu.
LINE_PARAMS = np.dtype(
    [
        *[(name, np.uint64) for name in ("centroids", "ordered")],
        *[(name, np.int32) for name in ("clusters", "channels")],
    ],
    align=True,
)

_SMEM = 48 * 1024
_ORDER_WARPS = 16
#: Labels that ``kmeans_order`` has room for: an int32, and 16 bits a warp, of each.
MOST_LABELS = (_SMEM - 4 * _ORDER_WARPS) // (4 + 2 * _ORDER_WARPS)
# Channels of each sum in ``kmeans_line``.
_LINE_CHANNELS = 256
#: Tokens of a head: each warp counts its part in 16 bits.
MOST_TOKENS = _ORDER_WARPS * (2**16 - 32)


class Sorted(NamedTuple):
    """Tokens by cluster.

    Attributes:
        order: (batch * heads, tokens) int32, the tokens of cluster 0 first; those of no cluster
            come last, under one more label.
        sizes: (batch, heads, labels) int32.
        centroids: (batch, heads, clusters, d) float32.
    """

    order: Any
    sizes: Any
    centroids: Any


def kmeans(
    x: Any,
    clusters: int,
    iterations: int,
    *,
    centroids: Any = None,
    start: int,
    tokens: int,
    arch: str,
    memory: list[Any],
    flag: int = 0,
) -> Sorted:
    """Lloyd's iterations on the GPU, on the current stream.

    Without centroids to begin with, the last iteration begins with those of the others in the order
    of a line.

    Args:
        x: (batch, heads, all tokens, d) CuPy array, as ``token_rows.packed`` gives it.
        clusters: how many.
        iterations: at least 1.
        centroids: (batch, heads, clusters, d) float32 CuPy array to begin with, C-contiguous; None
            for tokens at even distances.
        start: first token that belongs to clusters.
        tokens: how many do; others keep the label behind the last cluster's.
        arch: architecture of the device, which is current.
        memory: takes what a captured launch uses.
        flag: address of an int32 that is set where x holds NaN or infinities, or 0.
    """
    import cupy

    batch, heads, every, d = x.shape
    labels_count = clusters + (tokens < every)
    planes, chunks, element = batch * heads, d // CHUNK, ELEMENT_OF[x.dtype.name]
    shape = (batch, heads, clusters, d)
    moved, rounded = new(shape, np.float32, memory), new(shape, x.dtype, memory)
    half_norms = new(shape[:3], np.float32, memory)
    labels, order = (new((planes, every), np.int32, memory) for _ in range(2))
    sizes, starts = (new((batch, heads, labels_count), np.int32, memory) for _ in range(2))
    if tokens < every:
        labels.fill(clusters)
    tiles = -(-tokens // PRODUCT_TILE)
    assign: dict[str, Any] = {
        "x": x.data.ptr + start * d * x.dtype.itemsize,
        "centroids": rounded.data.ptr,
        "half_norms": half_norms.data.ptr,
        "labels": labels.data.ptr + 4 * start,
        "x_tokens": every,
        "tokens": tokens,
        "chunks": chunks,
        "clusters": clusters,
        "tiles": tiles,
    }
    sort: dict[str, Any] = {
        "labels": labels.data.ptr,
        "order": order.data.ptr,
        "sizes": sizes.data.ptr,
        "starts": starts.data.ptr,
        "tokens": every,
        "clusters": labels_count,
        "label_bits": (labels_count - 1).bit_length(),
    }
    mean: dict[str, Any] = {
        "x": x.data.ptr,
        "order": order.data.ptr,
        "sizes": sizes.data.ptr,
        "starts": starts.data.ptr,
        "kept": moved.data.ptr,
        "centroids": moved.data.ptr,
        "rounded": rounded.data.ptr,
        "half_norms": half_norms.data.ptr,
        "tokens": every,
        "chunks": chunks,
        "clusters": clusters,
        "size_stride": labels_count,
    }
    order_smem = 4 * _ORDER_WARPS + labels_count * (4 + 2 * _ORDER_WARPS)
    means_smem = 4 * CHUNK * 32 * builder(arch, f"kmeans_means_{element}").warps

    def run(name: str, dtype: np.dtype[Any], params: dict[str, Any], ctas: int, smem: int) -> None:
        config = builder(arch, name)
        packed = (launch.packed_struct(dtype, params),)
        launch.load(config, x.device.id)((ctas,), (32 * config.warps,), packed, shared_mem=smem)

    def average(params: dict[str, Any]) -> None:
        run(f"kmeans_means_{element}", MEANS_PARAMS, params, planes * clusters, means_smem)

    def begin_with(given: Any) -> None:
        # Of no tokens yet, so that these centroids stay, and are rounded.
        stream = cupy.cuda.get_current_stream()
        cupy.cuda.runtime.memsetAsync(sizes.data.ptr, 0, sizes.nbytes, stream.ptr)
        average(mean | {"kept": given.data.ptr})

    if centroids is None:
        average(mean | {"spread": tokens, "spread_start": start})
    else:
        begin_with(centroids)
    for i in range(iterations):
        if centroids is None and i == iterations - 1:
            begin_with(in_line(moved, arch=arch, memory=memory))
        found = assign | {"flag": 0 if i else flag}
        run(f"kmeans_assign_{element}", ASSIGN_PARAMS, found, planes * tiles, PRODUCT_SMEM)
        run("kmeans_order", ORDER_PARAMS, sort, planes, order_smem)
        average(mean)
    return Sorted(order, sizes, moved)


def in_line(centroids: Any, *, arch: str, memory: list[Any]) -> Any:
    """Centroids by rising projection on the direction in which they spread most.

    Args:
        centroids: (batch, heads, clusters, d) float32 CuPy array, C-contiguous; d is 256 at most.
        arch: architecture of the device, which is current.
        memory: takes what a captured launch uses.

    Returns:
        The same rows of each head in that order, in another array.
    """
    batch, heads, clusters, d = centroids.shape
    ordered = new(centroids.shape, np.float32, memory)
    params = {
        "centroids": centroids.data.ptr,
        "ordered": ordered.data.ptr,
        "clusters": clusters,
        "channels": d,
    }
    config = builder(arch, "kmeans_line")
    kernel = launch.load(config, centroids.device.id)
    packed = (launch.packed_struct(LINE_PARAMS, params),)
    smem = 4 * (_LINE_CHANNELS * (config.warps + 1) + clusters)
    kernel((batch * heads,), (32 * config.warps,), packed, shared_mem=smem)
    return ordered
