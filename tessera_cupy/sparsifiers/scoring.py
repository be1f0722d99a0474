"""What rules are made of: pooling over blocks of tokens, scores of blocks, and which ones to keep.

NumPy and CuPy arrays alike, for all heads at once. The NumPy code defines what is right; on a GPU
the kernels of :mod:`tessera_cupy.kernels.scoring` do the same on CuPy's current stream, without
cuBLAS, and the host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.errors import wrong
from tessera_cupy.sparsifiers.selection import flag_of, memory, namespace

if TYPE_CHECKING:
    from tessera_cupy.permute import TokenOrders

#: Tokens of a block, the last of which may be short; or the true sizes of all blocks, in order.
Blocks = int | NDArray[np.int32]

KINDS = ("mean", "max", "min")

# A vector shorter than this has no direction.
_LEAST_LENGTH = 1e-12


def block_starts(blocks: Blocks, tokens: int) -> NDArray[np.int64]:
    """First token of each block, and behind the last one the number of tokens.

    Args:
        blocks: tokens of a block, or the sizes of all.
        tokens: tokens of the sequence.

    Returns:
        (blocks + 1,) int64.

    Raises:
        ValueError: no positive block, or sizes that do not add up to ``tokens``.

    >>> block_starts(4, 10).tolist()
    [0, 4, 8, 10]
    """
    if isinstance(blocks, int | np.integer):
        if blocks < 1:
            raise ValueError(wrong("blocks", "at least one token a block", blocks, "pass 64"))
        return np.append(np.arange(0, tokens, int(blocks)), tokens).astype(np.int64)
    sizes = np.asarray(blocks, np.int64)
    if sizes.ndim != 1 or not len(sizes) or sizes.min() < 1 or sizes.sum() != tokens:
        raise ValueError(
            wrong(
                "blocks",
                f"sizes of at least 1 that add up to {tokens} tokens",
                f"shape {sizes.shape} and sum {sizes.sum()}",
                "pass the true token count of each block",
            )
        )
    return np.append(0, np.cumsum(sizes))


def pool(x: Any, blocks: Blocks, kind: str, *, orders: TokenOrders | None = None) -> Any:
    """The mean, largest or smallest value of each channel over the tokens of each block.

    Args:
        x: (batch, heads, tokens, d), any float dtype, in raster order.
        blocks: tokens of a block, or the sizes of all.
        kind: ``"mean"``, ``"max"`` or ``"min"``.
        orders: the order in which the tokens are read; None is raster order.

    Returns:
        (batch, heads, blocks, d) float32, where ``x`` is.

    Raises:
        ValueError: an unknown kind, or blocks that do not fit the tokens.

    >>> x = np.arange(5, dtype=np.float32).reshape(1, 1, 5, 1)
    >>> pool(x, 2, "mean").ravel().tolist()
    [0.5, 2.5, 4.0]
    """
    return pool_kinds(x, blocks, (kind,), orders=orders)[0]


def pool_kinds(
    x: Any, blocks: Blocks, kinds: tuple[str, ...], *, orders: TokenOrders | None = None
) -> tuple[Any, ...]:
    """What :func:`pool` gives for several kinds, at one reading of ``x``."""
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(wrong("kind", f"one of {', '.join(KINDS)}", repr(kind), 'pass "mean"'))
    starts = block_starts(blocks, x.shape[2])
    if namespace(x, "x") is not np:
        from tessera_cupy.kernels import scoring

        return scoring.pool(x, _plain(blocks), kinds, orders, flag_of(x), memory())
    outs = tuple(np.empty((*x.shape[:2], len(starts) - 1, x.shape[3]), np.float32) for _ in kinds)
    for head, rows in _heads(x, orders):
        for out, kind in zip(outs, kinds, strict=True):
            out[head] = _pooled(rows, starts, kind)
    return outs


def likeness(x: Any, blocks: Blocks, *, orders: TokenOrders | None = None) -> Any:
    """Mean cosine similarity of the pairs of tokens, each with itself too, inside each block.

    That is the squared length of the mean of the tokens' unit vectors.

    Args:
        x: (batch, heads, tokens, d), any float dtype, in raster order.
        blocks: tokens of a block, or the sizes of all.
        orders: the order in which the tokens are read; None is raster order.

    Returns:
        (batch, heads, blocks) float32, where ``x`` is.

    >>> x = np.array([[2, 0], [3, 0], [1, 0], [0, 5]], np.float32).reshape(1, 1, 4, 2)
    >>> likeness(x, 2).ravel().tolist()
    [1.0, 0.5]
    """
    starts = block_starts(blocks, x.shape[2])
    if namespace(x, "x") is not np:
        from tessera_cupy.kernels import scoring

        return scoring.likeness(x, _plain(blocks), orders, flag_of(x), memory())
    out = np.empty((*x.shape[:2], len(starts) - 1), np.float32)
    for head, rows in _heads(x, orders):
        lengths = np.sqrt(np.einsum("td,td->t", rows, rows))
        unit = rows / np.maximum(lengths, np.float32(_LEAST_LENGTH))[:, None]
        mean = _pooled(unit, starts, "mean")
        out[head] = np.einsum("nd,nd->n", mean, mean)
    return out


def most_alike(x: Any, blocks: Blocks, orders: TokenOrders) -> TokenOrders:
    """For each head, that of some orders under which the tokens inside blocks are most alike.

    Args:
        x: (batch, heads, tokens, d), any float dtype, in raster order.
        blocks: tokens of a block, or the sizes of all.
        orders: the orders to choose from.

    Returns:
        The orders, with the choice of the largest mean :func:`likeness`; ties fall to the first.
        The choice is where ``x`` is.
    """
    if namespace(x, "x") is not np:
        from tessera_cupy.kernels import scoring

        block_starts(blocks, x.shape[2])
        plain = _plain(blocks)
        runs = _runs(orders, plain) if isinstance(plain, int) else None
        choice = scoring.choose_order(x, plain, orders, runs, flag_of(x), memory())
        return orders.choosing(choice)
    alike = [
        likeness(x, blocks, orders=orders.choosing(np.full(x.shape[:2], i, np.int32))).mean(axis=2)
        for i in range(len(orders.orders))
    ]
    return orders.choosing(np.argmax(alike, axis=0).astype(np.int32))


def scores(a: Any, b: Any, *, scale: float = 1.0) -> Any:
    """Products of blocks, ``scale * a @ b^T``.

    Args:
        a: (batch, heads, n, d) float32.
        b: (batch, heads, m, d) float32.
        scale: factor.

    Returns:
        (batch, heads, n, m) float32.

    >>> x = np.eye(2, dtype=np.float32)[None, None]
    >>> scores(x, x, scale=2.0)[0, 0].tolist()
    [[2.0, 0.0], [0.0, 2.0]]
    """
    if namespace(a, "a") is not np:
        from tessera_cupy.kernels import scoring

        return scoring.scores((a,), (b,), scale, memory())
    product: NDArray[np.float32] = np.matmul(a, b.swapaxes(-1, -2)).astype(np.float32, copy=False)
    if scale != 1.0:
        product *= np.float32(scale)
    return product


def extreme_scores(
    q: Any, k: Any, blocks: tuple[Blocks, Blocks], *, orders: TokenOrders | None = None
) -> Any:
    """Scores of blocks by the largest and smallest values of each channel over their tokens.

    With ``max`` and ``min`` as :func:`pool` has them, that is the larger one of
    ``(qmax + qmin) @ kmax^T`` and ``(qmax + qmin) @ kmin^T``.

    Args:
        q: (batch, heads, tokens, d), any float dtype, in raster order.
        k: (batch, heads, tokens, d), likewise.
        blocks: tokens of a block of q and of k, or the sizes of all.
        orders: the order in which the tokens are read; None is raster order.

    Returns:
        (batch, heads, n, m) float32, where ``q`` is.
    """
    if namespace(q, "q") is not np:
        from tessera_cupy.kernels import scoring

        for side in blocks:
            block_starts(side, q.shape[2])
        plain = (_plain(blocks[0]), _plain(blocks[1]))
        flags = (flag_of(q), flag_of(k))
        return scoring.extreme_scores(q, k, plain, orders, flags, memory())
    q_high, q_low = pool_kinds(q, blocks[0], ("max", "min"), orders=orders)
    k_high, k_low = pool_kinds(k, blocks[1], ("max", "min"), orders=orders)
    middle = q_high + q_low
    score = scores(middle, k_high)
    for head in np.ndindex(*score.shape[:2]):
        np.maximum(score[head], middle[head] @ k_low[head].T, out=score[head])
    return score


def keep_top(score: Any, count: int, *, always: Any = None) -> Any:
    """Keep the ``count`` highest scores of each row; ties fall to the lower column.

    Args:
        score: (batch, heads, n, m) float32; NaN counts as minus infinity.
        count: columns that each row keeps, 0 to m.
        always: (n, m) or (batch, heads, n, m) bool, kept too.

    Returns:
        (batch, heads, n, m) bool.

    Raises:
        ValueError: a count that the row does not hold, or another shape of ``always``.

    >>> keep_top(np.array([[[[1, 3, 3, 2]]]], np.float32), 1).ravel().astype(int).tolist()
    [0, 1, 0, 0]
    """
    columns = score.shape[-1]
    if not 0 <= count <= columns:
        raise ValueError(
            wrong(
                "count",
                f"0 to {columns} columns of a row",
                count,
                f"keep at most {columns}, or take smaller blocks",
            )
        )
    _check_always(always, score)
    if namespace(score, "score") is not np:
        from tessera_cupy.kernels import scoring

        return scoring.keep_top(score, int(count), always, memory())
    kept = np.zeros(score.shape, bool)
    for head in np.ndindex(*score.shape[:2]):
        kept[head] = _highest(_numbers(score[head]), np.full(score.shape[2], count))
        _add(kept[head], always, head)
    return kept


def keep_mass(
    score: Any,
    mass: float,
    *,
    weights: Any = None,
    least: int = 0,
    always: Any = None,
) -> Any:
    """Keep in each row the fewest columns whose softmax reaches a mass.

    With ``p`` the row's softmax, times ``weights`` and normalised again, columns are taken by
    falling ``p``, ties to the lower column, until their sum is at least ``mass``.

    Args:
        score: (batch, heads, n, m) float32; NaN counts as minus infinity.
        mass: 0 to 1; 1 keeps all columns.
        weights: (batch or 1, heads or 1, m) float32 of at least 0, such as sizes of blocks.
        least: columns that each row keeps at least, 0 to m.
        always: (n, m) or (batch, heads, n, m) bool, kept too.

    Returns:
        (batch, heads, n, m) bool.

    Raises:
        ValueError: a mass outside 0 to 1, ``least`` that the row does not hold, other shapes.

    >>> score = np.log(np.array([[[[0.1, 0.6, 0.3]]]], np.float32))
    >>> keep_mass(score, 0.8).ravel().astype(int).tolist()
    [0, 1, 1]
    """
    columns = score.shape[-1]
    if not 0 <= mass <= 1:
        raise ValueError(wrong("mass", "a fraction from 0 to 1", mass, "pass 0.9 for 90%"))
    if not 0 <= least <= columns:
        raise ValueError(wrong("least", f"0 to {columns} columns of a row", least, "keep fewer"))
    _check_always(always, score)
    if weights is not None:
        batch, heads = score.shape[:2]
        fits = len(weights.shape) == 3 and weights.shape[2] == columns
        if not fits or weights.shape[0] not in (1, batch) or weights.shape[1] not in (1, heads):
            expected = f"shape ({batch} or 1, {heads} or 1, {columns})"
            got = f"shape {tuple(weights.shape)}"
            raise ValueError(wrong("weights", expected, got, "give each column one weight"))
    if namespace(score, "score") is not np:
        from tessera_cupy.kernels import scoring

        return scoring.keep_mass(score, float(mass), weights, int(least), always, memory())
    if weights is not None:
        weights = np.broadcast_to(weights, (*score.shape[:2], columns))
    kept = np.zeros(score.shape, bool)
    for head in np.ndindex(*score.shape[:2]):
        p = _softmax(_numbers(score[head]), None if weights is None else weights[head])
        kept[head] = _highest(p, np.maximum(_fewest(p, mass), least))
        _add(kept[head], always, head)
    return kept


def _heads(
    x: NDArray[Any], orders: TokenOrders | None
) -> Iterator[tuple[tuple[int, int], NDArray[np.float32]]]:
    """Each (batch, head), and its rows as float32 in its order: one head in memory at a time."""
    places = None
    if orders is not None:
        choice = np.zeros(x.shape[:2], np.int32) if orders.choice is None else orders.choice
        places = choice if isinstance(choice, np.ndarray) else choice.get()
    for b, h in np.ndindex(*x.shape[:2]):
        rows = x[b, h]
        if orders is not None and places is not None:
            rows = rows[orders.orders[places[b, h]]]
        yield (b, h), rows.astype(np.float32, copy=False)


def _plain(blocks: Blocks) -> int | NDArray[np.int32]:
    return int(blocks) if isinstance(blocks, int | np.integer) else np.asarray(blocks, np.int32)


@lru_cache(maxsize=32)
def _runs(orders: TokenOrders, block: int) -> NDArray[np.int32] | None:
    """The orders as orders of runs of neighbouring tokens that all of them move together.

    Returns:
        (orders, runs) int32, for the longest runs of which a block holds a whole number; None
        where there are none.
    """
    count, tokens = orders.orders.shape
    for length in (16, 8, 4, 2):
        if tokens % length or block % length:
            continue
        runs = orders.orders.reshape(count, -1, length)
        first = runs[:, :, :1]
        if not (first % length).any() and (runs == first + np.arange(length)).all():
            found: NDArray[np.int32] = first[:, :, 0] // length
            found = np.array(found, np.int32)
            found.setflags(write=False)
            return found
    return None


def _pooled(rows: NDArray[np.float32], starts: NDArray[np.int64], kind: str) -> NDArray[np.float32]:
    reduce = {"mean": np.add, "max": np.maximum, "min": np.minimum}[kind]
    result: NDArray[np.float32] = reduce.reduceat(rows, starts[:-1], axis=0)
    return result / np.diff(starts).astype(np.float32)[:, None] if kind == "mean" else result


def _numbers(score: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.where(np.isnan(score), np.float32(-np.inf), score)


def _highest(values: NDArray[np.float32], counts: NDArray[np.int64]) -> NDArray[np.bool_]:
    """The ``counts[i]`` highest of row i of (n, m) values without NaN; ties to the lower column."""
    columns = values.shape[1]
    ranked = np.sort(values, axis=1)  # rising
    last = np.take_along_axis(ranked, np.minimum(columns - counts, columns - 1)[:, None], axis=1)
    above, level = values > last, values == last
    missing = counts - above.sum(axis=1)
    kept: NDArray[np.bool_] = above | (level & (np.cumsum(level, axis=1) <= missing[:, None]))
    kept[counts == 0] = False
    return kept


def _softmax(
    score: NDArray[np.float32], weights: NDArray[np.float32] | None
) -> NDArray[np.float32]:
    """(n, m) softmax times weights, up to a factor of each row."""
    top = score.max(axis=1, keepdims=True)
    # Also where both are infinite.
    apart = np.subtract(score, top, out=np.zeros_like(score), where=score != top)
    p: NDArray[np.float32] = np.exp(apart)
    return p if weights is None else p * weights.astype(np.float32)


def _fewest(p: NDArray[np.float32], mass: float) -> NDArray[np.int64]:
    """How many of each row's highest values it takes to reach a part of the row's sum."""
    columns = p.shape[1]
    if mass >= 1:
        return np.full(len(p), columns)
    reached = np.cumsum(-np.sort(-p, axis=1), axis=1, dtype=np.float64)
    below: NDArray[np.int64] = (reached < mass * reached[:, -1:]).sum(axis=1)
    return np.where(mass == 0, 0, below + 1)


def _check_always(always: Any, score: Any) -> None:
    if always is not None and tuple(always.shape) not in (score.shape[2:], score.shape):
        expected = f"shape {tuple(score.shape[2:])} or {tuple(score.shape)}"
        got = f"shape {tuple(always.shape)}"
        raise ValueError(wrong("always", expected, got, "give each score one bool"))


def _add(kept: NDArray[np.bool_], always: Any, head: tuple[int, ...]) -> None:
    if always is not None:
        kept |= always if always.ndim == 2 else always[head]
