"""How much of a mask lies between the rows of one rank and the keys of another."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.masks import BlockMask
from tessera_cupy.parallel.shards import Shards

_Floats = NDArray[np.float64]


def pair_work(mask: BlockMask, q: Shards, kv: Shards) -> _Floats:
    """Pairs of tokens in active blocks, by head, by the rank of the row and of the key.

    Partial blocks are counted whole. Rows of text count for the rank that computes them, and keys
    of text, which all ranks hold, for that of the row.

    Args:
        mask: the mask, on the host.
        q: the shards of the query tokens.
        kv: the shards of the key tokens, of as many ranks.

    Returns:
        (heads of the mask, N, N) float64, over the mask's batch.

    >>> mask = BlockMask.from_dense([[1, 0], [1, 1]], (64, 64))
    >>> pair_work(mask, Shards((96, 32)), Shards((64, 64)))[0].astype(int).tolist()
    [[6144, 2048], [2048, 2048]]
    """
    ranks = q.ranks
    nq, nk = mask.num_blocks
    q_starts = np.broadcast_to(mask.q_starts(), (mask.batch, mask.heads, nq + 1))
    kv_starts = np.broadcast_to(mask.kv_starts(), (mask.batch, mask.heads, nk + 1))
    own_rows, text_rows = _edges(q), _text_edges(q)
    own_keys = _edges(kv)
    text_keys = np.array(kv.text_span)
    work = np.zeros((mask.heads, ranks, ranks))
    itself = np.arange(ranks)
    for batch in range(mask.batch):
        for head in range(mask.heads):
            first = (batch * mask.heads + head) * nq
            ptr = mask.indptr[first : first + nq + 1]
            blocks = np.zeros((nq, nk))
            row = np.repeat(np.arange(nq), np.diff(ptr))
            blocks[row, mask.indices[ptr[0] : ptr[-1]]] = 1
            starts = kv_starts[batch, head]
            of_keys = _between(blocks.T, starts, own_keys)
            of_rows = _by_rows(of_keys.T, q_starts[batch, head], own_rows, text_rows)
            work[head] += of_rows
            if kv.text:
                of_text = _between(blocks.T, starts, text_keys).T
                mine = _by_rows(of_text, q_starts[batch, head], own_rows, text_rows)
                work[head, itself, itself] += mine[:, 0]
    return work


def _edges(shards: Shards) -> NDArray[np.int64]:
    return np.array([shards.own(0).begin, *(shards.own(r).end for r in range(shards.ranks))])


def _text_edges(shards: Shards) -> NDArray[np.int64]:
    parts = [shards.text_part(rank) for rank in range(shards.ranks)]
    return np.array([parts[0].begin, *(part.end for part in parts)])


def _by_rows(
    of_blocks: _Floats, starts: NDArray[np.int64], own: NDArray[np.int64], text: NDArray[np.int64]
) -> _Floats:
    summed = _between(of_blocks, starts, own)
    if text[-1] > text[0]:
        summed += _between(of_blocks, starts, text)
    return summed


def _between(of_blocks: _Floats, starts: NDArray[np.int64], edges: NDArray[np.int64]) -> _Floats:
    """Sums over the tokens between edges of what (n, ...) blocks have in each of their tokens."""
    sizes = np.diff(starts)
    before = np.zeros((len(sizes) + 1, *of_blocks.shape[1:]))
    np.cumsum(of_blocks * sizes[:, None], axis=0, out=before[1:])
    block = np.searchsorted(starts, edges, side="right") - 1
    block = np.minimum(block, len(sizes) - 1)
    at = before[block] + of_blocks[block] * (edges - starts[block])[:, None]
    summed: _Floats = np.diff(at, axis=0)
    return summed
