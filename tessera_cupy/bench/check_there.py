"""Float64 attention of a few rows where q, k and v are, to check outputs against.

The rule is that of :mod:`tessera_cupy.bench.check`; here nothing but the rows' keys and results
crosses between host and GPU. Arithmetic and sums alone are used, which CuPy has without a library
of matrix products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.bench.check import Expected, sample_rows

_EPS = 2.0**-7  # of bfloat16: from 1 to the next number


def expect_there(
    xp: Any,
    kept: Callable[[int, NDArray[np.int64]], NDArray[np.bool_]],
    q: Any,
    k: Any,
    v: Any,
    *,
    heads: int,
    rows: int,
) -> Expected:
    """Random rows of the first heads, the first and the last row among them.

    Args:
        xp: NumPy or CuPy, whose arrays q, k and v are.
        kept: of a head's number and rows, (n,) int64, which keys they keep: (n, tokens) bool.
        q: (1, heads, tokens, d) uint16, the bits of bfloat16 numbers.
        k: the same.
        v: the same.
        heads: how many heads.
        rows: rows of each.
    """
    tokens, d = q.shape[2:]
    at = [sample_rows(tokens, rows, np.random.default_rng(head)) for head in range(heads)]
    exact = np.zeros((heads, len(at[0]), d))
    allowed = np.zeros(heads)
    for head in range(heads):
        keys, values = (as_float32(xp, x[0, head]) for x in (k, v))
        wide = [x.astype(np.float64) for x in (keys, values)]
        error = 0.0
        for i, keep in enumerate(kept(head, at[head])):
            if not keep.any():
                continue
            there = xp.asarray(keep)
            query = as_float32(xp, q[0, head, int(at[head][i])])
            weights = _weights(xp, query.astype(np.float64), wide[0], there)
            right = (weights[:, None] * wide[1]).sum(axis=0) / weights.sum()
            plain = _weights(xp, query, keys, there)
            rounded = (_rounded(xp, plain)[:, None] * values).sum(axis=0) / plain.sum()
            exact[head, i] = xp.asnumpy(right)
            off = np.abs(xp.asnumpy(_rounded(xp, rounded)).astype(np.float64) - exact[head, i])
            error = max(error, float(off.max()))
        allowed[head] = 2 * error + _EPS * np.abs(exact[head]).max()
    return Expected(np.stack(at), exact, allowed)


def as_float32(xp: Any, bits: Any) -> Any:
    """Bfloat16 numbers as float32, of which their bits are the upper half."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _weights(xp: Any, query: Any, keys: Any, kept: Any) -> Any:
    """Softmax's weights of one row before they are divided by their sum."""
    scores = (keys * query).sum(axis=1) * keys.dtype.type(query.shape[0] ** -0.5)
    scores = xp.where(kept, scores, keys.dtype.type(-np.inf))
    return xp.exp(scores - scores.max())


def _rounded(xp: Any, x: Any) -> Any:
    """Float32 to the nearest bfloat16 number, the even one of two."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)
