"""SVG2: clusters of queries against clusters of keys, tokens permuted so that both are blocks.

Queries and keys are clustered by k-means, for each head. With the centroids ``q[i]`` and ``k[j]``
and ``n[j]`` keys in cluster ``j``,

    p[i, j] = n[j] exp(q[i] . k[j] / sqrt(d)) / sum_j' n[j'] exp(q[i] . k[j'] / sqrt(d))

and each row keeps the fewest clusters, by falling ``p``, whose sum reaches ``top_p``, at least the
share ``min_kc_ratio`` of all. Blocks are the clusters, cut into pieces of a size that the kernels
take, so that on a GPU the sizes need not come to the host. A selection from scratch numbers the
clusters along a line (:mod:`tessera_cupy.sparsifiers.clusters`), so that a row keeps runs of them.

Source: SVG2, arXiv 2505.18875, and its code: 300 clusters of queries (100 to 400 are published)
and 1,000 of keys, top-p 0.9, at least 10%; 50 iterations from scratch, and 2 from the centroids of
the step before. It begins with random tokens, here they lie at even distances. Text is kept whole,
as rows and as columns.
"""

from __future__ import annotations

import math
from typing import Any

from tessera_cupy.errors import wrong
from tessera_cupy.masks import BlockMask
from tessera_cupy.masks.geometry import pair
from tessera_cupy.permute import TokenOrders
from tessera_cupy.sparsifiers.clusters import expand, kmeans, pieces, room
from tessera_cupy.sparsifiers.parameters import share
from tessera_cupy.sparsifiers.scoring import keep_mass, scores
from tessera_cupy.sparsifiers.selection import Selection, checked_inputs
from tessera_cupy.video import VideoGrid

FIRST_ITERATIONS = 50
NEXT_ITERATIONS = 2

#: Tokens of a piece of queries.
QUERY_PIECE = 64
#: Tokens of a piece of keys. Kept pieces that follow each other are cut as one, so a piece need not
#: be as small as a fragment; larger ones make fewer columns to plan. But of sizes in GPU memory the
#: fragment is a quarter of a piece, rounded down to a power of two, and fragments of 16 columns are
#: filled best: this is the largest multiple of 16 that takes them.
KEY_PIECE = 112


def select(
    q: Any,
    k: Any,
    grid: VideoGrid,
    *,
    q_clusters: int = 300,
    k_clusters: int = 1000,
    top_p: float = 0.9,
    min_kc_ratio: float = 0.1,
    iterations: int | None = None,
    centroids: tuple[Any, Any] | None = None,
    piece: tuple[int, int] | None = None,
) -> Selection:
    """Cluster the tokens, and choose the clusters of keys that each cluster of queries keeps.

    Args:
        q: (batch, heads, tokens, d) queries in raster order, any float dtype, NumPy or CuPy.
        k: (batch, heads, tokens, d) keys, likewise.
        grid: the video grid that the tokens lie on.
        q_clusters: clusters of queries.
        k_clusters: clusters of keys.
        top_p: share of a row's weighted softmax that the kept clusters reach, 0 to 1.
        min_kc_ratio: share of the clusters that each row keeps at least, 0 to 1.
        iterations: of k-means; None means 50, and 2 with ``centroids``.
        centroids: of the queries and the keys, (batch, heads, clusters, d) each, to begin with:
            ``notes["centroids"]`` of the selection of an earlier step.
        piece: most (queries, keys) of a block; None means 64 queries and 112 keys.

    Returns:
        A selection whose mask has a batch and head axis like ``q``'s and ragged blocks, and whose
        keys and values have orders of their own: permute them with ``permute_kv``. Blocks past the
        last piece have no tokens. ``notes`` has ``centroids`` and ``sizes``, of the clusters, as
        (queries', keys') pairs.

    Raises:
        TypeError: as :func:`~tessera_cupy.sparsifiers.selection.checked_inputs` says; numbers of
            clusters, iterations or tokens that are no integers, shares that are no numbers;
            centroids that are no pair, or not where q and k are.
        ValueError: likewise; more clusters than video tokens; shares outside 0 to 1; centroids of
            other shapes, or with NaN or infinities, which on a GPU :meth:`Selection.check` tells;
            pieces without tokens.

    >>> import numpy as np
    >>> q, k = np.random.default_rng(0).standard_normal((2, 1, 2, 4 * 16 * 16, 32))
    >>> chosen = select(q, k, VideoGrid(4, 16, 16), q_clusters=8, k_clusters=20, iterations=3)
    >>> int(chosen.mask.q_block_sizes[0, 0].sum())
    1024
    """
    checked_inputs(q, k, grid)
    top_p = share("top_p", top_p, "pass 0.9 for nine tenths")
    min_kc_ratio = share("min_kc_ratio", min_kc_ratio, "pass 0.1 for a tenth")
    q_piece, k_piece = (QUERY_PIECE, KEY_PIECE) if piece is None else pair(piece, "piece")
    if min(q_piece, k_piece) < 1:
        got = (q_piece, k_piece)
        raise ValueError(wrong("piece", "at least 1 token of each side", got, "leave it out"))
    if iterations is None:
        iterations = FIRST_ITERATIONS if centroids is None else NEXT_ITERATIONS
    if centroids is not None and not (isinstance(centroids, tuple | list) and len(centroids) == 2):
        got = type(centroids).__name__
        fix = 'pass notes["centroids"] of an earlier selection'
        raise TypeError(wrong("centroids", "a pair, of the queries and the keys", got, fix))
    q_begin, k_begin = centroids or (None, None)
    queries = kmeans(
        q, q_clusters, grid, iterations=iterations, centroids=q_begin, argument="q_clusters"
    )
    keys = kmeans(
        k, k_clusters, grid, iterations=iterations, centroids=k_begin, argument="k_clusters"
    )
    q_cut, k_cut = (
        pieces(
            found.sizes, clusters, most, room(grid.tokens, int(found.sizes.shape[2]), most)
        )
        for found, clusters, most in (
            (queries, q_clusters, q_piece),
            (keys, k_clusters, k_piece),
        )
    )  # fmt: skip
    score = scores(queries.centroids, keys.centroids, scale=1 / math.sqrt(q.shape[3]))
    least = int(min_kc_ratio * k_clusters)
    kept = keep_mass(score, top_p, weights=k_cut.weights, least=least)
    mask = BlockMask.from_dense(
        expand(kept, q_cut, k_cut),
        (q_piece, k_piece),
        (grid.tokens, grid.tokens),
        q_block_sizes=q_cut.sizes,
        kv_block_sizes=k_cut.sizes,
    )
    notes = {
        "centroids": (queries.centroids, keys.centroids),
        "sizes": (queries.sizes, keys.sizes),
    }
    heads = (q.shape[0], q.shape[1])
    q_orders, kv_orders = (TokenOrders.of_heads(found.order, heads) for found in (queries, keys))
    return Selection(mask, q_orders, notes, kv_orders)
