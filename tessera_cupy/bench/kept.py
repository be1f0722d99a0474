"""Which keys a few rows of queries keep, exactly, under masks too large to be written out."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.masks import BlockMask
from tessera_cupy.masks import bits as token_bit
from tessera_cupy.sparsifiers import Selection
from tessera_cupy.video import inverse


def kept_keys(mask: BlockMask, head: int, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    """The keys that rows of a head keep.

    Args:
        mask: a mask of batch 1 on the host; its one head serves all.
        head: the head's number.
        rows: (n,) tokens of queries.

    Returns:
        (n, keys) bool.

    >>> mask = BlockMask.from_dense([[1, 0], [1, 1]], (32, 32), (64, 64))
    >>> kept_keys(mask, 0, np.array([0, 40])).sum(axis=1).tolist()
    [32, 64]
    """
    head %= mask.heads
    (nq, nk), keys = mask.num_blocks, mask.shape[1]
    q_starts = _of_head(mask.q_starts(), head)
    kv_starts = _of_head(mask.kv_starts(), head)
    sizes = np.diff(kv_starts)
    blocks = np.searchsorted(q_starts, rows, side="right") - 1
    kept = np.zeros((len(rows), keys), np.bool_)
    for row, block, line in zip(rows, blocks, kept, strict=True):
        at = slice(*mask.indptr[head * nq + block : head * nq + block + 2])
        columns, partial = mask.indices[at], mask.partial[at]
        whole = np.zeros(nk, np.bool_)
        whole[columns[partial < 0]] = True
        line[:] = np.repeat(whole, sizes)
        cut = partial >= 0
        bits = token_bit.unpack(mask.token_bits[partial[cut], row - q_starts[block]])
        entry, key = np.nonzero(bits)
        line[kv_starts[columns[cut]][entry] + key] = True
    return kept


def kept_in_raster(
    chosen: Selection, mask: BlockMask, head: int, rows: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """The same of a selection, with rows and keys in raster order.

    Args:
        chosen: the selection, whose orders may lie on a GPU.
        mask: its mask, on the host.
        head: the head's number.
        rows: (n,) tokens of queries in raster order.
    """
    order = chosen.orders.of(0, head)
    kv_order = (chosen.kv_orders or chosen.orders).of(0, head)
    kept = np.empty((len(rows), mask.shape[1]), np.bool_)
    kept[:, kv_order] = kept_keys(mask, head, inverse(order)[rows])
    return kept


def _of_head(starts: NDArray[np.int64], head: int) -> NDArray[np.int64]:
    """First token of each block of a head, and the end."""
    of_head: NDArray[np.int64] = starts[0, head % starts.shape[1]]
    return of_head
