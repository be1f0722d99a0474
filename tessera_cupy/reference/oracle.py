"""The oracle: softmax attention over a token mask, in float64.

    O_i = sum_j p_ij v_j,   p_ij = exp(s_ij - LSE_i),   LSE_i = ln sum_j exp(s_ij),
    s_ij = sm_scale * (q_i . k_j), and j runs over the keys that the mask keeps for row i.

A row that keeps no key has O = 0 and LSE = -inf. The work goes row chunk by row chunk, so
that the score matrix is never whole; a chunk only meets the keys that one of its rows keeps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.errors import wrong
from tessera_cupy.masks.block_mask import BlockMask
from tessera_cupy.masks.key_slices import KeySlices
from tessera_cupy.reference.inputs import default_scale, heads_first, request_layout

#: Scores that one chunk may hold at a time: 64 MiB in float64.
_CHUNK_SCORES = 1 << 23
#: Rows of a chunk where the mask does not say: enough to keep the matrix products busy.
_CHUNK_ROWS = 256

#: Rows ``[begin, end)``; the keys that one of them keeps; and which of these each row
#: keeps, (rows, keys), where not all of them.
_Chunk = tuple[int, int, "NDArray[np.int64]", "NDArray[np.bool_] | None"]


def attention(
    q: Any,
    k: Any,
    v: Any,
    mask: BlockMask | KeySlices | NDArray[np.bool_] | None,
    *,
    sm_scale: float | None = None,
    layout: str = "BHSD",
    return_lse: bool = False,
) -> Any:
    """Masked attention in float64.

    Args:
        q: (batch, q heads, sq, dim) in ``layout``, any float type that converts to NumPy.
        k: (batch, kv heads, skv, dim); query head ``h`` reads KV head ``h // (q / kv heads)``.
        v: (batch, kv heads, skv, dim of O).
        mask: a BlockMask or KeySlices; or (batch or 1, q heads or 1, sq, skv) bool, True means
            keep; or None, which keeps all.
        sm_scale: factor on the scores; None means 1 / sqrt(dim).
        layout: ``"BHSD"`` or ``"BSHD"``.
        return_lse: also return the log-sum-exp.

    Returns:
        O, float64 in ``layout``; with ``return_lse`` the pair of O and the natural LSE,
        (batch, q heads, sq) float64.

    Raises:
        ValueError: shapes or the mask do not fit each other.
        TypeError: a token mask that is not bool.

    Example:
        >>> import numpy as np
        >>> one = np.ones((1, 1, 1, 4))
        >>> o, lse = attention(one, one, one, None, return_lse=True)
        >>> o.ravel().tolist(), lse.item()
        ([1.0, 1.0, 1.0, 1.0], 2.0)
    """
    if isinstance(mask, KeySlices):
        mask = mask.to_block_mask()
    q, k, v = heads_first(q, k, v, layout, np.float64)
    scale = default_scale(sm_scale, q.shape[3])
    batch, heads, sq, _ = q.shape
    shared = heads // k.shape[1]
    _check_mask(mask, batch, heads, sq, k.shape[2])

    out = np.zeros((batch, heads, sq, v.shape[3]))
    lse = np.full((batch, heads, sq), -np.inf)
    for b in range(batch):
        for h in range(heads):
            keys, values = k[b, h // shared], v[b, h // shared]
            for begin, end, columns, keep in _chunks(mask, b, h, sq, k.shape[2]):
                whole = len(columns) == len(keys)
                some_keys = keys if whole else keys[columns]
                scores = (q[b, h, begin:end] * scale) @ some_keys.T
                if keep is not None:
                    scores[~keep] = -np.inf
                highest = scores.max(axis=1, initial=-np.inf)
                empty = highest == -np.inf
                highest[empty] = 0.0
                scores -= highest[:, None]
                weights = np.exp(scores, out=scores)
                total = weights.sum(axis=1)
                total[empty] = 1.0
                products = weights @ (values if whole else values[columns])
                out[b, h, begin:end] = products / total[:, None]
                lse[b, h, begin:end] = np.where(empty, -np.inf, highest + np.log(total))
    out = request_layout(out, layout)
    return (out, lse) if return_lse else out


def _check_mask(mask: BlockMask | NDArray[np.bool_] | None, batch: int, *full: int) -> None:
    """Refuse a mask that does not broadcast to (batch, heads, sq, skv)."""
    if mask is None:
        return
    if isinstance(mask, BlockMask):
        got: tuple[int, ...] = (mask.batch, mask.heads, *mask.shape)
    elif isinstance(mask, np.ndarray) and mask.dtype == np.bool_:
        got = mask.shape
    else:
        expected, kind = (
            "a BlockMask, KeySlices, a bool NumPy array or None",
            getattr(mask, "dtype", type(mask)),
        )
        raise TypeError(wrong("mask", expected, kind, "compare it with 0, as in mask != 0"))
    wanted = (batch, *full)
    fits = len(got) == 4 and got[2:] == wanted[2:]
    if not fits or got[0] not in (1, batch) or got[1] not in (1, wanted[1]):
        expected = f"(batch, heads, sq, skv) = {wanted}, where batch and heads may be 1"
        raise ValueError(wrong("mask", expected, got, "build it for this request"))


def _chunks(
    mask: BlockMask | NDArray[np.bool_] | None, b: int, h: int, sq: int, skv: int
) -> Iterator[_Chunk]:
    """All query rows of a head that keep a key, in chunks."""
    if isinstance(mask, BlockMask):
        yield from _block_chunks(mask, b % mask.batch, h % mask.heads)
        return
    rows = max(1, min(_CHUNK_ROWS, _CHUNK_SCORES // max(1, skv)))
    for begin in range(0, sq, rows):
        end = min(begin + rows, sq)
        if mask is None:
            yield begin, end, np.arange(skv), None
        else:
            keep = mask[b % mask.shape[0], h % mask.shape[1], begin:end]
            columns = np.flatnonzero(keep.any(axis=0))
            yield begin, end, columns, keep[:, columns]


def _block_chunks(mask: BlockMask, b: int, h: int) -> Iterator[_Chunk]:
    """The same, query block by query block; a block of many rows gives several chunks."""
    q_starts, kv_starts = mask.q_starts(), mask.kv_starts()
    q_start = q_starts[b % q_starts.shape[0], h % q_starts.shape[1]]
    kv_start = kv_starts[b % kv_starts.shape[0], h % kv_starts.shape[1]]
    blocks = len(q_start) - 1
    first = (b * mask.heads + h) * blocks
    for block in range(blocks):
        active = slice(mask.indptr[first + block], mask.indptr[first + block + 1])
        low, high = kv_start[mask.indices[active]], kv_start[mask.indices[active] + 1]
        columns = _ranges(low, high)
        rows = max(1, _CHUNK_SCORES // max(1, len(columns)))
        for begin in range(q_start[block], q_start[block + 1], rows):
            end = min(begin + rows, q_start[block + 1])
            inside = slice(begin - q_start[block], end - q_start[block])
            yield begin, end, columns, _keep(mask, active, high - low, inside)


def _keep(
    mask: BlockMask, active: slice, widths: NDArray[np.int64], rows: slice
) -> NDArray[np.bool_] | None:
    """What rows ``rows`` of a query block keep of its active blocks' keys; None for all."""
    partial = mask.partial[active]
    if (partial < 0).all():
        return None
    pieces = []
    for index, width in zip(partial, widths, strict=True):
        if index < 0:
            pieces.append(np.ones((rows.stop - rows.start, width), np.bool_))
        else:
            words = mask.token_bits[index, rows].astype("<u4")
            bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
            pieces.append(bits[:, :width].astype(np.bool_))
    return np.concatenate(pieces, axis=1)


def _ranges(low: NDArray[np.int64], high: NDArray[np.int64]) -> NDArray[np.int64]:
    """All integers from each low up to its high, one range after the other."""
    if not len(low):
        return np.empty(0, np.int64)
    return np.concatenate([np.arange(*ends) for ends in zip(low, high, strict=True)])
