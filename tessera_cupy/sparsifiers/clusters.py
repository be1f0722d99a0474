"""K-means clusters of tokens, and clusters cut into pieces that blocks can hold.

Lloyd's iterations from given centroids, or from tokens at even distances. A token belongs to the
centroid ``c`` with the largest ``x . c - |c|^2 / 2``, which is the nearest one, ties to the lower;
a centroid then becomes the mean of its tokens, and stays where it has none. For the products
centroids are rounded to the tokens' type where that has 16 bits.

Clusters from scratch are numbered along a line (:func:`line_order`), so that neighbours are alike:
what keeps one often keeps the next, whose tokens are then a run with its own. The last iteration
begins with the centroids in that order. Clusters that go on from given centroids keep their
numbers.

On a GPU the kernels of :mod:`tessera_cupy.kernels.kmeans` do the same, wider tokens rounded to
float16 first, and the line in float32; the same input gives the same bits each time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.errors import wrong
from tessera_cupy.gpus import arch_of
from tessera_cupy.kernels.kmeans import MOST_LABELS
from tessera_cupy.sparsifiers.selection import DTYPES, check_finite, flag_of, memory, namespace
from tessera_cupy.video import VideoGrid

#: Clusters at most; a GPU has room for their labels and the text's.
MOST_CLUSTERS = MOST_LABELS - 1

# Turns of the power iteration. More turns make no longer runs: any direction will do in which
# centroids spread much.
_TURNS = 8

# Rows whose products with all centroids are in memory at a time.
_ROWS = 8192


class Clusters(NamedTuple):
    """Tokens by cluster, where the tokens are.

    Attributes:
        order: (batch * heads, tokens) int32: the tokens of cluster 0 in raster order, then those of
            cluster 1, ...; text comes last.
        sizes: (batch, heads, labels) int32: tokens of each cluster, and of the text where there is
            some.
        centroids: (batch, heads, clusters, d) float32.
    """

    order: Any
    sizes: Any
    centroids: Any


class Pieces(NamedTuple):
    """Clusters as pieces.

    Attributes:
        sizes: (batch, heads, capacity) int32, tokens of each piece; 0 for what is none.
        labels: the same shape, the cluster of each piece; -1 for what is none.
        weights: (batch, heads, clusters) float32, the sizes of the clusters.
    """

    sizes: Any
    labels: Any
    weights: Any


def kmeans(
    x: Any,
    clusters: int,
    grid: VideoGrid,
    *,
    iterations: int,
    centroids: Any = None,
    argument: str = "clusters",
) -> Clusters:
    """Cluster the video's tokens of each head.

    Args:
        x: (batch, heads, tokens, d) in raster order, any float dtype, NumPy or CuPy.
        clusters: how many, at most :data:`MOST_CLUSTERS`.
        grid: the video grid that the tokens lie on.
        iterations: at least 1.
        centroids: (batch, heads, clusters, d) to begin with, where ``x`` is; None for tokens at
            even distances, and clusters in the order of a line.
        argument: what the caller calls ``clusters``.

    Raises:
        TypeError: no integers; centroids that are no floats, or not where ``x`` is.
        ValueError: no iterations; more clusters than tokens; other shapes of centroids, or on the
            host no finite ones.

    >>> x = np.array([0, 9, 1, 10], np.float32).reshape(1, 1, 4, 1)
    >>> found = kmeans(x, 2, VideoGrid(1, 1, 4), iterations=2)
    >>> found.order.ravel().tolist(), found.centroids.ravel().tolist()
    ([0, 2, 1, 3], [0.5, 9.5])
    """
    for name, number in (("iterations", iterations), (argument, clusters)):
        if isinstance(number, bool) or not isinstance(number, int | np.integer):
            raise TypeError(wrong(name, "an int", repr(number), "pass a whole number"))
    if iterations < 1:
        raise ValueError(wrong("iterations", "at least 1", iterations, "2 are enough to go on"))
    most = min(MOST_CLUSTERS, grid.video_tokens)
    if not 1 <= clusters <= most:
        expected = f"1 to {most} clusters of {grid.video_tokens} video tokens"
        raise ValueError(wrong(argument, expected, clusters, f"take {most} at most, 1 at least"))
    shape = (*x.shape[:2], clusters, x.shape[3])
    if centroids is not None and namespace(centroids, "centroids") is not namespace(x, "x"):
        got, fix = type(centroids).__module__, "keep them where q and k are"
        raise TypeError(wrong("centroids", "arrays of q's and k's library", got, fix))
    if centroids is not None and tuple(centroids.shape) != shape:
        got = f"shape {tuple(centroids.shape)}"
        raise ValueError(
            wrong("centroids", f"shape {shape}", got, "pass those of a selection of this geometry")
        )
    if centroids is not None and centroids.dtype.name not in DTYPES:
        got, fix = centroids.dtype.name, "convert with astype"
        raise TypeError(wrong("centroids", f"one of {', '.join(DTYPES)}", got, fix))
    if not isinstance(x, np.ndarray):
        return _kmeans_on_gpu(x, clusters, grid, iterations, centroids)
    if centroids is not None:
        check_finite("centroids", centroids)
    video = slice(grid.video_start, grid.video_start + grid.video_tokens)
    text = np.setdiff1d(np.arange(grid.tokens), np.arange(grid.tokens)[video])
    order = np.empty(x.shape[:3], np.int32)
    sizes = np.full((*x.shape[:2], clusters + (len(text) > 0)), len(text), np.int32)
    made = np.empty(shape, np.float32)
    chosen = np.arange(clusters) * grid.video_tokens // clusters
    for head in np.ndindex(*x.shape[:2]):
        tokens = x[head][video]
        made[head] = tokens[chosen] if centroids is None else centroids[head]
        for i in range(iterations):
            if centroids is None and i == iterations - 1:
                made[head] = made[head][line_order(made[head])]
            labels = _nearest(tokens, made[head])
            by_label = np.argsort(labels, kind="stable")
            counts = np.bincount(labels, minlength=clusters)
            there = np.flatnonzero(counts)
            starts = np.cumsum(counts) - counts
            ordered = tokens[by_label].astype(np.float32)
            sums = np.add.reduceat(ordered, starts[there], axis=0)
            made[head][there] = sums / counts[there, None].astype(np.float32)
        order[head] = np.concatenate([by_label + grid.video_start, text])
        sizes[head][:clusters] = counts
    return Clusters(order.reshape(-1, grid.tokens), sizes, made)


def line_order(centroids: NDArray[np.float32]) -> NDArray[np.int64]:
    """Numbers of centroids by rising projection on the direction in which they spread most.

    Eight turns of a power iteration from a fixed start find the direction. Equals come by their
    number, and so do all where no direction is found.

    Args:
        centroids: (clusters, d).

    >>> line_order(np.array([[3, 1], [0, 0], [6, 2], [3, 1]], np.float32)).tolist()
    [1, 0, 3, 2]
    """
    wide = centroids.astype(np.float64)
    wide -= wide.mean(axis=0)
    # Steps of the golden ratio in 32 bits, of which float32 holds 24: alike to no direction that
    # data have.
    steps = np.arange(1, wide.shape[1] + 1, dtype=np.uint64) * 2654435769 % 2**32 >> 8
    direction = steps * 2.0**-23 - 1
    for _ in range(_TURNS):
        direction = (wide @ direction) @ wide
        direction /= np.abs(direction).max() or 1
    return np.argsort(wide @ direction, kind="stable")


def pieces(sizes: Any, clusters: int, piece: int, capacity: int) -> Pieces:
    """Cut each cluster into pieces of ``piece`` tokens, the last of which has what is left.

    Args:
        sizes: (batch, heads, labels) int32, tokens of each label, NumPy or CuPy.
        clusters: how many of the labels are clusters.
        piece: most tokens of a piece.
        capacity: pieces that there is room for, at least :func:`room`.

    >>> cut = pieces(np.array([[[5, 0, 3]]], np.int32), 3, 4, 4)
    >>> cut.sizes.ravel().tolist(), cut.labels.ravel().tolist()
    ([4, 1, 3, 0], [0, 0, 2, -1])
    """
    if not isinstance(sizes, np.ndarray):
        import cupy

        from tessera_cupy.kernels.clusters import pieces as cut_on_gpu

        device = int(sizes.device.id)
        with cupy.cuda.Device(device):
            return Pieces(
                *cut_on_gpu(
                    sizes, clusters, piece, capacity, arch=arch_of(device).name, memory=memory()
                )
            )
    cut = np.zeros((*sizes.shape[:2], capacity), np.int32)
    labels = np.full(cut.shape, -1, np.int32)
    for head in np.ndindex(*sizes.shape[:2]):
        counts = -(-sizes[head] // piece)
        of = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
        labels[head][: len(of)] = of
        cut[head][: len(of)] = np.minimum(sizes[head][of] - number * piece, piece)
    return Pieces(cut, labels, sizes[..., :clusters].astype(np.float32))


def room(tokens: int, labels: int, piece: int) -> int:
    """Pieces that clusters of whatever sizes need at most, rounded up to a multiple of 4.

    >>> room(57_600, 300, 64)
    1196
    """
    return -(-((tokens + labels * (piece - 1)) // piece) // 4) * 4


def expand(kept: Any, queries: Pieces, keys: Pieces) -> Any:
    """A map of clusters, (batch, heads, q clusters, k clusters), as one of pieces.

    Text attends to all and is attended by all; what is no piece keeps nothing.
    """
    if not isinstance(kept, np.ndarray):
        import cupy

        from tessera_cupy.kernels.clusters import expand as expand_on_gpu

        device = int(kept.device.id)
        with cupy.cuda.Device(device):
            arch = arch_of(device).name
            return expand_on_gpu(kept, queries.labels, keys.labels, arch=arch, memory=memory())
    # One row and column more for the text, and one, which the label -1 means, for no piece.
    wide = np.pad(kept, ((0, 0), (0, 0), (0, 2), (0, 2)), constant_values=True)
    wide[:, :, -1, :] = wide[:, :, :, -1] = False
    made = np.empty((*kept.shape[:2], queries.labels.shape[2], keys.labels.shape[2]), np.bool_)
    for head in np.ndindex(*kept.shape[:2]):
        made[head] = wide[head][np.ix_(queries.labels[head], keys.labels[head])]
    return made


def _nearest(tokens: NDArray[Any], centroids: NDArray[np.float32]) -> NDArray[np.int64]:
    rounded = centroids
    if tokens.dtype.itemsize == 2:
        rounded = centroids.astype(tokens.dtype).astype(np.float32)
    half_norms = np.einsum("cd,cd->c", rounded, rounded) / 2
    labels = np.empty(len(tokens), np.int64)
    for first in range(0, len(tokens), _ROWS):
        rows = slice(first, first + _ROWS)
        labels[rows] = (tokens[rows].astype(np.float32) @ rounded.T - half_norms).argmax(axis=1)
    return labels


def _kmeans_on_gpu(
    x: Any, clusters: int, grid: VideoGrid, iterations: int, centroids: Any
) -> Clusters:
    import cupy

    from tessera_cupy.kernels import kmeans as kernels
    from tessera_cupy.kernels.token_rows import packed, padded

    device, kept = int(x.device.id), memory()
    with cupy.cuda.Device(device):
        found = kernels.kmeans(
            packed(x, kept),
            clusters,
            iterations,
            centroids=None if centroids is None else padded(centroids, np.float32, kept),
            start=grid.video_start,
            tokens=grid.video_tokens,
            arch=arch_of(device).name,
            memory=kept,
            flag=flag_of(x),
            centroids_flag=flag_of(x, "centroids"),
        )
    return Clusters(found.order, found.sizes, found.centroids[..., : x.shape[3]])
