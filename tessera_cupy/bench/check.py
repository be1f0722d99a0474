"""Is an output right? Sampled rows against float64, by a rule that knows rounding.

With ``exact`` from the float64 oracle and ``plain`` the textbook computation in the output's
own precision (scores and sums in float32, weights and output rounded to the dtype), an
output passes when, for every head,

    max |out - exact|  <=  2 max |plain - exact| + eps max |exact|

so an order of summation of its own costs nothing, and a wrong block cannot pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy import reference
from tessera_cupy.masks import BlockMask


@dataclass(frozen=True)
class Check:
    """Errors of the head that used most of what it was allowed.

    Attributes:
        rows: rows that were compared, over all heads.
        error: largest absolute error.
        allowed: what the rule allows it.
        finite: every element of the whole output is finite.
    """

    rows: int
    error: float
    allowed: float
    finite: bool

    @property
    def passed(self) -> bool:
        """Whether every head keeps to the rule."""
        return self.finite and self.error <= self.allowed


def check_rows(
    mask: BlockMask,
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    out: NDArray[Any],
    *,
    rows: int,
    on_head: Callable[[], None],
) -> Check:
    """Compare evenly spaced rows of every head, the first and the last among them.

    Args:
        mask: the mask, of batch 1 and q's heads, with uniform blocks kept whole.
        q: (1, heads, tokens, d), as the kernel read it.
        k: the same shape.
        v: the same shape.
        out: the output, of q's shape and dtype.
        rows: rows to compare in each head, at most all.
        on_head: called after each head.
    """
    heads, tokens = q.shape[1:3]
    at = np.unique(np.linspace(0, tokens - 1, min(rows, tokens)).astype(np.int64))
    kept = mask.to_dense()
    precision = float(_finfo(out.dtype).eps)
    worst = Check(0, 0.0, 0.0, True)
    for h in range(heads):
        blocks = kept[0, h][at // mask.block_size[0]]
        keep = np.repeat(blocks, mask.block_size[1], axis=1)[:, :tokens]
        rows_q, head_k, head_v = q[:, h : h + 1, at], k[:, h : h + 1], v[:, h : h + 1]
        exact = reference.attention(rows_q, head_k, head_v, keep[None, None])[0, 0]
        plain = _plain(rows_q[0, 0], head_k[0, 0], head_v[0, 0], keep, out.dtype)
        error = float(np.abs(out[0, h, at].astype(np.float64) - exact).max())
        allowed = float(2 * np.abs(plain - exact).max() + precision * np.abs(exact).max())
        if h == 0 or error * worst.allowed > worst.error * allowed:
            worst = Check(0, error, allowed, True)
        on_head()
    finite = bool(np.isfinite(out.astype(np.float32)).all())
    return Check(heads * len(at), worst.error, worst.allowed, finite)


def _plain(
    q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], keep: NDArray[np.bool_], dtype: Any
) -> NDArray[np.float64]:
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    scores = np.where(keep, (q @ k.T) * np.float32(q.shape[1] ** -0.5), -np.inf)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    total = weights.sum(axis=1, keepdims=True)
    rounded = weights.astype(dtype).astype(np.float32)
    result: NDArray[np.float64] = ((rounded @ v) / total).astype(dtype).astype(np.float64)
    return result


def _finfo(dtype: Any) -> Any:
    if dtype.name != "bfloat16":
        return np.finfo(dtype)
    import ml_dtypes

    return ml_dtypes.finfo(dtype)
