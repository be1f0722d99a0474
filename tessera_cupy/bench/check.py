"""Is an output right? Sampled rows against float64, by a rule that knows rounding.

With ``exact`` from the float64 oracle and ``plain`` the textbook computation in the output's
own precision (scores and sums in float32, weights and output rounded to the dtype), an
output passes when, for every head,

    max |out - exact|  <=  2 max |plain - exact| + eps max |exact|

so an order of summation of its own costs nothing, and a wrong block cannot pass.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy import reference
from tessera_cupy.bench.kept import kept_keys
from tessera_cupy.masks import BlockMask

# Heads computed at a time; each needs about 0.4 GB at 57,600 tokens of head dim 128.
_THREADS = 4


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


@dataclass(frozen=True)
class Expected:
    """What sampled rows should be; serves any number of outputs of the same request.

    Attributes:
        rows: (heads, n) int64, the rows of each head, ascending.
        exact: (heads, n, d) float64, from the oracle.
        allowed: (heads,) float64, the largest error that the rule allows.
    """

    rows: NDArray[np.int64]
    exact: NDArray[np.float64]
    allowed: NDArray[np.float64]

    def check(self, out: NDArray[Any]) -> Check:
        """Compare an output, (1, heads, tokens, d)."""
        sampled = np.stack([out[0, h, rows] for h, rows in enumerate(self.rows)])
        finite = bool(np.isfinite(out.astype(np.float32)).all())
        return replace(self.check_sampled(sampled), finite=finite)

    def check_sampled(self, sampled: NDArray[Any]) -> Check:
        """Compare the sampled rows of an output, (heads, n, d); only these are seen."""
        worst = Check(0, 0.0, 0.0, True)
        for h, (got, exact, allowed) in enumerate(
            zip(sampled, self.exact, self.allowed, strict=True)
        ):
            error = float(np.abs(got.astype(np.float64) - exact).max())
            if h == 0 or not error * worst.allowed <= worst.error * allowed:
                worst = Check(0, error, float(allowed), True)
        finite = bool(np.isfinite(sampled.astype(np.float32)).all())
        return Check(self.rows.size, worst.error, worst.allowed, finite)


def expect_rows(
    mask: BlockMask,
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    *,
    rows: int,
    dtype: Any,
    on_head: Callable[[], None],
) -> Expected:
    """Compute random rows of every head under a mask; the first and the last are among them.

    Args:
        mask: the mask, of batch 1, and one head or q's.
        q: as for :func:`expect`, in the order of the mask, and so are the others.
        k: the same.
        v: the same.
        rows: the same.
        dtype: the same.
        on_head: the same.
    """
    host = mask.on_host()
    kept = partial(kept_keys, host)
    return expect(kept, q, k, v, rows=rows, dtype=dtype, on_head=on_head)


def expect(
    kept: Callable[[int, NDArray[np.int64]], NDArray[np.bool_]],
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    *,
    rows: int,
    dtype: Any,
    on_head: Callable[[], None],
) -> Expected:
    """Compute random rows of every head; the first and the last are among them.

    Only these rows meet the oracle, so that the cost grows with ``rows * tokens``. The same
    arguments give the same rows.

    Args:
        kept: of a head's number and rows, (n,) int64, which keys they keep: (n, tokens) bool.
        q: (1, heads, tokens, d), as the kernel reads it, in any float type that holds it.
        k: the same shape.
        v: the same shape.
        rows: rows of each head, at most all.
        dtype: of the outputs to be compared, such as bfloat16: its rounding is allowed.
        on_head: called after each head.
    """
    heads, tokens = q.shape[1:3]
    precision = float(_finfo(np.dtype(dtype)).eps)

    def head(h: int) -> tuple[NDArray[np.int64], NDArray[np.float64], float]:
        at = sample_rows(tokens, rows, np.random.default_rng(h))
        keep = kept(h, at)
        rows_q, head_k, head_v = q[:, h : h + 1, at], k[:, h : h + 1], v[:, h : h + 1]
        exact = reference.attention(rows_q, head_k, head_v, keep[None, None])[0, 0]
        plain = _plain(rows_q[0, 0], head_k[0, 0], head_v[0, 0], keep, dtype)
        allowed = 2 * np.abs(plain - exact).max() + precision * np.abs(exact).max()
        return at, exact, float(allowed)

    made = []
    with _one_blas_thread(), ThreadPoolExecutor(_THREADS) as pool:
        for one in pool.map(head, range(heads)):
            made.append(one)
            on_head()
    sampled, exacts, allowed = zip(*made, strict=True)
    return Expected(np.stack(sampled), np.stack(exacts), np.array(allowed))


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
    """Compare random rows of every head of one output; arguments as in :func:`expect_rows`."""
    return expect_rows(mask, q, k, v, rows=rows, dtype=out.dtype, on_head=on_head).check(out)


def _one_blas_thread() -> AbstractContextManager[Any]:
    """Where it can be asked for: on busy cores BLAS's own threads wait for each other.

    That was seen to cost eight times the time.
    """
    if find_spec("threadpoolctl") is None:
        return nullcontext()
    from threadpoolctl import threadpool_limits

    limits: AbstractContextManager[Any] = threadpool_limits(1, user_api="blas")
    return limits


def sample_rows(tokens: int, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Rows to look at, ascending: the first, the last, and others that are drawn."""
    ends = np.unique([0, tokens - 1])
    inner = rng.choice(max(0, tokens - 2), max(0, min(count, tokens) - 2), replace=False) + 1
    return np.sort(np.concatenate([ends, inner])).astype(np.int64)


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
