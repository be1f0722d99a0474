"""Masks of several kinds that keep the same attention mass, from the scores that choose them.

The mass that a mask keeps is, of a query's dense softmax, the sum over the keys that it keeps, as
a mean over sampled queries. Slices are chosen by a bound of FG-Attn's (see
:mod:`tessera_cupy.sparsifiers.fg_attn`), blocks by the products of their mean rows or by SPADE's
extremes; each row of groups or blocks keeps the same number of its best columns. How the mass grows
with that number is one cumulative sum for each sampled query, so that the fewest columns for a mass
are found exactly, by bisection of the mean sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.bench.kept import kept_keys
from tessera_cupy.masks import BlockMask, KeySlices
from tessera_cupy.sparsifiers import fg_attn, scoring

# Heads at a time; each needs about 0.3 GB at 32,760 tokens.
_THREADS = 8

_Float = NDArray[np.float32]


@dataclass(frozen=True)
class Chooser:
    """How one kind of mask is chosen.

    Attributes:
        name: as in the table.
        rows: query rows that choose together.
        columns: keys of a column: 1 for slices.
        score: of q and k, (1, 1, tokens, d) each, the scores, (1, 1, groups, columns).
    """

    name: str
    rows: int
    columns: int
    score: Callable[[_Float, _Float], _Float]


def slices_by_bound(group: int, bound: str, parts: int = 1) -> Chooser:
    """Single keys by one of FG-Attn's bounds, as the rule rounds them.

    >>> slices_by_bound(128, "norms", parts=4).name
    'slices of 128, norms of 4 parts'
    """

    def score(q: _Float, k: _Float) -> _Float:
        return fg_attn.bounds(q, k, group, bound=bound, parts=parts).astype(np.float32)

    of_parts = f" of {parts} parts" if parts > 1 else ""
    return Chooser(f"slices of {group}, {bound}{of_parts}", group, 1, score)


def blocks_by_means(block: int) -> Chooser:
    """Square blocks by the products of their mean rows."""

    def score(q: _Float, k: _Float) -> _Float:
        products: _Float = scoring.scores(*(scoring.pool(x, block, "mean") for x in (q, k)))
        return products

    return Chooser(f"blocks {block}x{block}, means", block, block, score)


def blocks_by_extremes(block: int) -> Chooser:
    """Square blocks by SPADE's score; its sinks and its diagonal are left out."""

    def score(q: _Float, k: _Float) -> _Float:
        extremes: _Float = scoring.extreme_scores(q, k, (block, block))
        return extremes

    return Chooser(f"blocks {block}x{block}, extremes", block, block, score)


@dataclass(frozen=True, eq=False)
class Sampled:
    """The dense attention of some queries.

    Attributes:
        rows: (heads, n) int64, the queries of each head.
        weights: (heads, n, tokens) float64, their softmax over all keys.
    """

    rows: NDArray[np.int64]
    weights: NDArray[np.float64]

    def kept(self, mask: BlockMask | KeySlices) -> float:
        """The mass that a mask keeps.

        >>> sampled = Sampled(np.array([[0, 70]]), np.tile([0.75, 0.25], (1, 2, 1)))
        >>> sampled.kept(KeySlices.from_groups([[1, 0], [1, 1]], 64, (128, 2)))
        0.875
        """
        masses = [
            (weights * kept_of(mask, head, rows)).sum(axis=1).mean()
            for head, (rows, weights) in enumerate(zip(self.rows, self.weights, strict=True))
        ]
        return float(np.mean(masses))


def sample(q: _Float, k: _Float, rows: NDArray[np.int64]) -> Sampled:
    """The dense attention of some queries, in float64.

    Args:
        q: (1, heads, tokens, d).
        k: the same shape.
        rows: (heads, n), the queries of each head.
    """

    def of_head(head: int) -> NDArray[np.float64]:
        queries = q[0, head, rows[head]].astype(np.float64)
        weights: NDArray[np.float64] = queries @ k[0, head].astype(np.float64).T
        weights *= q.shape[3] ** -0.5
        weights -= weights.max(axis=1, keepdims=True)
        np.exp(weights, out=weights)
        weights /= weights.sum(axis=1, keepdims=True)
        return weights

    return Sampled(rows, np.stack(_by_head(of_head, q.shape[1])))


def kept_of(mask: BlockMask | KeySlices, head: int, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    """The keys that rows of a head keep, (n, keys); of slices from their own lists of keys.

    Args:
        mask: blocks or slices of batch 1 on the host; one head serves all.
        head: the head's number.
        rows: (n,) tokens of queries.

    >>> kept_of(KeySlices.from_groups([[1, 0], [1, 1]], 64), 0, np.array([70])).tolist()
    [[True, True]]
    """
    if isinstance(mask, BlockMask):
        return kept_keys(mask, head, rows)
    kept = np.zeros((len(rows), mask.shape[1]), np.bool_)
    groups = head % mask.heads * mask.groups + rows // mask.group
    for line, group in zip(kept, groups, strict=True):
        line[mask.indices[slice(*mask.indptr[group : group + 2])]] = True
    return kept


def scores_of(chooser: Chooser, q: _Float, k: _Float) -> _Float:
    """Scores of all heads, (1, heads, groups, columns), of (1, heads, tokens, d) each."""

    def of_head(head: int) -> _Float:
        return chooser.score(q[:, head : head + 1], k[:, head : head + 1])

    return np.concatenate(_by_head(of_head, q.shape[1]), axis=1)


def mass_by_count(chooser: Chooser, scores: _Float, sampled: Sampled) -> NDArray[np.float64]:
    """The mass that is kept with 1, 2, ... columns of each row: (columns,), rising to 1."""

    def of_head(head: int) -> NDArray[np.float64]:
        of_rows = scores[0, head, sampled.rows[head] // chooser.rows]
        weights = sampled.weights[head]
        if chooser.columns > 1:
            starts = np.arange(0, weights.shape[1], chooser.columns)
            weights = np.add.reduceat(weights, starts, axis=1)
        # Ties to the lower column, as in what keeps them.
        order = np.argsort(-of_rows, axis=1, kind="stable")
        masses: NDArray[np.float64] = np.take_along_axis(weights, order, axis=1).mean(axis=0)
        return np.cumsum(masses)

    curve: NDArray[np.float64] = np.mean(_by_head(of_head, len(sampled.rows)), axis=0)
    return curve


def fewest(masses: NDArray[np.float64], mass: float) -> int:
    """The fewest columns that keep a mass, or all of them.

    >>> [fewest(np.array([0.5, 0.75, 1.0]), mass) for mass in (0.2, 0.75, 0.76, 1.1)]
    [1, 2, 3, 3]
    """
    return min(int(np.searchsorted(masses, mass)) + 1, len(masses))


def keep(chooser: Chooser, scores: _Float, count: int, tokens: int) -> BlockMask | KeySlices:
    """The mask, over so many queries and keys, of the ``count`` best columns of each row."""

    def of_head(head: int) -> NDArray[np.bool_]:
        kept: NDArray[np.bool_] = scoring.keep_top(scores[:, head : head + 1], count)
        return kept

    kept = np.concatenate(_by_head(of_head, scores.shape[1]), axis=1)
    if chooser.columns == 1:
        return KeySlices.from_groups(kept, chooser.rows, (tokens, tokens))
    return BlockMask.from_dense(kept, (chooser.rows, chooser.columns), (tokens, tokens))


def _by_head(of_head: Callable[[int], Any], heads: int) -> list[Any]:
    with ThreadPoolExecutor(_THREADS) as pool:
        made: Iterable[Any] = pool.map(of_head, range(heads))
        return list(made)
