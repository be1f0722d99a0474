"""Launching the kernels of k-means: ``kmeans_*.cu``."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tessera_cupy import gpus
from tessera_cupy.kernels import launch
from tessera_cupy.kernels.catalog import KernelConfig, builder, catalog
from tessera_cupy.kernels.lifetime import new
from tessera_cupy.kernels.tensor_maps import SLAB, TENSOR_MAP, rows_map
from tessera_cupy.kernels.token_rows import CHUNK, ELEMENT_OF, PRODUCT_SMEM, PRODUCT_TILE

#: ``KmeansAssignParams`` in kmeans_assign.cu.
ASSIGN_PARAMS = np.dtype(
    [
        *[(name, np.uint64) for name in ("x", "centroids", "half_norms", "labels", "flag")],
        *[(name, np.int32) for name in ("x_tokens", "tokens", "chunks", "clusters", "tiles")],
    ],
    align=True,
)
#: ``KmeansAssignWgmmaParams`` in kmeans_assign_wgmma.cu; tensor maps lie at multiples of 64 bytes.
ASSIGN_WGMMA_PARAMS = np.dtype(
    {
        "names": [
            *("x", "centroids", "half_norms", "labels", "flag"),
            *("x_tokens", "tokens", "clusters", "tiles", "items", "slabs"),
        ],
        "formats": [*[TENSOR_MAP] * 2, *[np.uint64] * 3, *[np.int32] * 6],
        "offsets": [0, 128, *range(256, 280, 8), *range(280, 304, 4)],
        "itemsize": 320,
    }
)
#: ``KmeansCountsParams`` in kmeans_counts.cu.
COUNTS_PARAMS = np.dtype(
    [
        *[(name, np.uint64) for name in ("labels", "counts")],
        *[(name, np.int32) for name in ("tokens", "clusters", "label_bits", "parts")],
    ],
    align=True,
)
#: ``KmeansOrderParams`` in kmeans_order.cu.
ORDER_PARAMS = np.dtype(
    [
        *[(name, np.uint64) for name in ("labels", "counts", "order", "sizes", "starts")],
        *[(name, np.int32) for name in ("tokens", "clusters", "label_bits", "parts")],
    ],
    align=True,
)
#: ``KmeansMeansParams`` in kmeans_means.cu.
MEANS_PARAMS = np.dtype(
    [
        *[(name, np.uint64) for name in ("x", "order", "sizes", "starts")],
        *[(name, np.uint64) for name in ("kept", "centroids", "rounded", "half_norms", "flag")],
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

# Tokens and centroids of a step, and the longest row, of kmeans_assign_wgmma.cu.
_WGMMA_ROWS, _WGMMA_COLUMNS, _WGMMA_DIM = 192, 128, 128
_SMEM = 48 * 1024
_ORDER_WARPS = 16
#: Labels that ``kmeans_order`` has room for: an int32, and 16 bits a warp, of each.
MOST_LABELS = (_SMEM - 4 * _ORDER_WARPS) // (4 + 2 * _ORDER_WARPS)
# Channels of each sum in ``kmeans_line``.
_LINE_CHANNELS = 256
# Tokens of a part, ``PartLabels::kTokens`` in common/labels.cuh.
_PART = 8 * 32 * _ORDER_WARPS


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
    centroids_flag: int = 0,
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
        centroids_flag: the same of the given centroids.
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
    parts = -(-every // _PART)
    counts = new((planes, parts, labels_count), np.uint16, memory)
    assign: dict[str, Any] = {
        "half_norms": half_norms.data.ptr,
        "labels": labels.data.ptr + 4 * start,
        "x_tokens": every,
        "tokens": tokens,
        "clusters": clusters,
    }
    first = x.data.ptr + start * d * x.dtype.itemsize
    assigning = _assigning(arch, element, d)
    if assigning.kernel == "kmeans_assign_wgmma":
        assign_params, assign_smem = ASSIGN_WGMMA_PARAMS, assigning.smem_bytes
        items = planes * -(-tokens // _WGMMA_ROWS)
        assign_ctas = min(items, gpus.multiprocessors(x.device.id))

        def rows(pointer: int, length: int, head: int, box: int) -> Any:
            strides = (planes * head, head, d)
            return rows_map(pointer, x.dtype.name, (1, planes, length, d), strides, box)

        assign |= {
            "x": rows(first, tokens, every * d, _WGMMA_ROWS),
            "centroids": rows(rounded.data.ptr, clusters, clusters * d, _WGMMA_COLUMNS),
            "tiles": items // planes,
            "items": items,
            "slabs": -(-d // SLAB),
        }
    else:
        assign_params, assign_smem = ASSIGN_PARAMS, PRODUCT_SMEM
        tiles = -(-tokens // PRODUCT_TILE)
        assign_ctas = planes * tiles
        assign |= {
            "x": first,
            "centroids": rounded.data.ptr,
            "chunks": chunks,
            "tiles": tiles,
        }
    count: dict[str, Any] = {
        "labels": labels.data.ptr,
        "counts": counts.data.ptr,
        "tokens": every,
        "clusters": labels_count,
        "label_bits": (labels_count - 1).bit_length(),
        "parts": parts,
    }
    sort = count | {
        "order": order.data.ptr,
        "sizes": sizes.data.ptr,
        "starts": starts.data.ptr,
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
    counts_smem = 2 * _ORDER_WARPS * labels_count
    order_smem = counts_smem + 4 * (_ORDER_WARPS + labels_count)
    means_threads = 32 * builder(arch, f"kmeans_means_{element}").warps
    means_smem = 4 * CHUNK * (means_threads + 2 * chunks)

    def run(name: str, dtype: np.dtype[Any], params: dict[str, Any], ctas: int, smem: int) -> None:
        config = builder(arch, name)
        packed = (launch.packed_struct(dtype, params),)
        launch.load(config, x.device.id)((ctas,), (32 * config.warps,), packed, shared_mem=smem)

    def average(params: dict[str, Any]) -> None:
        run(f"kmeans_means_{element}", MEANS_PARAMS, params, planes * clusters, means_smem)

    def begin_with(given: Any, flag: int = 0) -> None:
        # Of no tokens yet, so that these centroids stay, and are rounded.
        stream = cupy.cuda.get_current_stream()
        cupy.cuda.runtime.memsetAsync(sizes.data.ptr, 0, sizes.nbytes, stream.ptr)
        average(mean | {"kept": given.data.ptr, "flag": flag})

    if centroids is None:
        average(mean | {"spread": tokens, "spread_start": start})
    else:
        begin_with(centroids, centroids_flag)
    for i in range(iterations):
        if centroids is None and i == iterations - 1:
            begin_with(in_line(moved, arch=arch, memory=memory))
        found = assign | {"flag": 0 if i else flag}
        run(assigning.name, assign_params, found, assign_ctas, assign_smem)
        run("kmeans_counts", COUNTS_PARAMS, count, planes * parts, counts_smem)
        run("kmeans_order", ORDER_PARAMS, sort, planes * parts, order_smem)
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


def _assigning(arch: str, element: str, d: int) -> KernelConfig:
    """The entry that finds the nearest centroids of rows of ``d`` elements."""
    name = f"kmeans_assign_wgmma_{element}"
    if d <= _WGMMA_DIM and any(config.name == name for config in catalog(arch)):
        return builder(arch, name)
    return builder(arch, f"kmeans_assign_{element}")
