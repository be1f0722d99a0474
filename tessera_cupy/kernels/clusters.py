"""Launching ``cluster_pieces.cu`` and ``expand_pieces.cu``."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera_cupy.kernels import launch
from tessera_cupy.kernels.catalog import builder
from tessera_cupy.kernels.lifetime import new

#: ``ClusterPiecesParams`` in cluster_pieces.cu.
PIECES_PARAMS = np.dtype(
    [
        *[(name, np.uint64) for name in ("sizes", "piece_sizes", "piece_labels", "weights")],
        *[(name, np.int32) for name in ("labels", "clusters", "capacity", "piece")],
    ],
    align=True,
)
#: ``ExpandPiecesParams`` in expand_pieces.cu.
EXPAND_PARAMS = np.dtype(
    [
        *[(name, np.uint64) for name in ("kept", "q_labels", "k_labels", "out")],
        *[(name, np.int32) for name in ("q_clusters", "k_clusters", "q_pieces", "k_pieces")],
    ],
    align=True,
)


def pieces(
    sizes: Any, clusters: int, piece: int, capacity: int, *, arch: str, memory: list[Any]
) -> tuple[Any, Any, Any]:
    """Cut clusters into pieces, on the current stream.

    Args:
        sizes: (batch, heads, labels) int32 CuPy array, tokens of each label, C-contiguous.
        clusters: how many of the labels are clusters.
        piece: most tokens of a piece.
        capacity: pieces that there is room for, as many as the sizes can need.
        arch: architecture of the device, which is current.
        memory: takes what a captured launch uses.

    Returns:
        (batch, heads, capacity) int32 sizes of the pieces; the same of their labels, -1 for what is
        no piece; (batch, heads, clusters) float32 sizes of the clusters.
    """
    batch, heads, labels = sizes.shape
    piece_sizes = new((batch, heads, capacity), np.int32, memory)
    piece_labels = new((batch, heads, capacity), np.int32, memory)
    weights = new((batch, heads, clusters), np.float32, memory)
    params: dict[str, Any] = {
        "sizes": sizes.data.ptr,
        "piece_sizes": piece_sizes.data.ptr,
        "piece_labels": piece_labels.data.ptr,
        "weights": weights.data.ptr,
        "labels": labels,
        "clusters": clusters,
        "capacity": capacity,
        "piece": piece,
    }
    config = builder(arch, "cluster_pieces")
    kernel = launch.load(config, sizes.device.id)
    packed = (launch.packed_struct(PIECES_PARAMS, params),)
    smem = 4 * (labels + config.warps)
    kernel((batch * heads,), (32 * config.warps,), packed, shared_mem=smem)
    return piece_sizes, piece_labels, weights


def expand(kept: Any, q_labels: Any, k_labels: Any, *, arch: str, memory: list[Any]) -> Any:
    """A map of clusters as a map of their pieces, on the current stream.

    Args:
        kept: (batch, heads, q clusters, k clusters) bool CuPy array, C-contiguous.
        q_labels: (batch, heads, n) int32, the cluster of each piece of queries; -1 keeps nothing,
            and what is past the clusters all that is a piece.
        k_labels: (batch, heads, m) int32, likewise; m is a multiple of 4.
        arch: architecture of the device, which is current.
        memory: takes what a captured launch uses.

    Returns:
        (batch, heads, n, m) bool.
    """
    batch, heads, q_clusters, k_clusters = kept.shape
    n, m = q_labels.shape[2], k_labels.shape[2]
    out = new((batch, heads, n, m), np.bool_, memory)
    params: dict[str, Any] = {
        "kept": kept.data.ptr,
        "q_labels": q_labels.data.ptr,
        "k_labels": k_labels.data.ptr,
        "out": out.data.ptr,
        "q_clusters": q_clusters,
        "k_clusters": k_clusters,
        "q_pieces": n,
        "k_pieces": m,
    }
    config = builder(arch, "expand_pieces")
    kernel = launch.load(config, kept.device.id)
    packed = (launch.packed_struct(EXPAND_PARAMS, params),)
    kernel((batch * heads * n,), (32 * config.warps,), packed)
    return out
