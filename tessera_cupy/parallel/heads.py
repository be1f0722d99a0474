"""Which rank takes which heads: by their work, so that all ranks end at one time.

Heads go to ranks longest first, each to the rank with the least work so far that has room; then
single moves and swaps between the busiest rank and the others go on as long as they make it less
busy. No rank holds more than ``ceil(heads / ranks)`` heads, or more than a stated bound.

KV heads that several query heads share stay on one rank as long as that is even to 5%. Else query
heads are dealt one by one, and a KV head goes to every rank that has one of its query heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tessera_cupy.errors import wrong
from tessera_cupy.masks import BlockMask, KeySlices

#: A new mask keeps the old deal while its balance is within this factor of the best new one's.
KEEP_WITHIN = 1.03
#: Balance up to which whole groups of query heads are dealt rather than single heads.
WHOLE_GROUPS_WITHIN = 1.05


@dataclass(frozen=True)
class Deal:
    """Which heads each of N ranks has.

    Attributes:
        q: by rank, its query heads, ascending.
        shared: query heads of each KV head.
    """

    q: tuple[tuple[int, ...], ...]
    shared: int = 1

    @property
    def kv(self) -> tuple[tuple[int, ...], ...]:
        """By rank, the KV heads that its query heads read, ascending."""
        return tuple(map(self.kv_of, self.q))

    def kv_of(self, heads: Sequence[int]) -> tuple[int, ...]:
        """The KV heads that some query heads read, ascending."""
        return tuple(sorted({head // self.shared for head in heads}))

    def loads(self, work: ArrayLike) -> NDArray[np.float64]:
        """(N,) work of each rank, for the work of each head."""
        of_head = np.asarray(work, np.float64)
        return np.array([of_head[list(mine)].sum() for mine in self.q])

    def balance(self, work: ArrayLike) -> float:
        """The busiest rank's work over the mean of all; 1.0 is even, or no work.

        >>> Deal(((0,), (1, 2))).balance([3, 2, 2])
        1.1428571428571428
        """
        return balance(self.loads(work))


def balance(loads: NDArray[Any]) -> float:
    """Largest over mean; 1.0 without any work."""
    mean = float(loads.mean()) if loads.size else 0.0
    return float(loads.max()) / mean if mean else 1.0


def head_work(mask: BlockMask, heads: int) -> NDArray[np.float64]:
    """Pairs of tokens in the active blocks of each head, partial blocks counted whole.

    Of key slices their own pairs: plans that gather compute these, not the blocks around them.

    Args:
        mask: the mask, on the host.
        heads: query heads; a mask of one head stands for all.

    Returns:
        (heads,) float64, over the mask's batch.

    >>> mask = BlockMask.from_dense([[[1, 0]], [[1, 1]]], (16, 64), (10, 100))
    >>> head_work(mask, 2).tolist()
    [640.0, 1000.0]
    """
    if mask.slices is not None:
        of_slices = slices_work(mask.slices)
        return np.array(np.broadcast_to(of_slices, (heads,)))
    nq, nk = mask.num_blocks
    axes = (mask.batch * mask.heads, -1)
    q = np.diff(np.broadcast_to(mask.q_starts(), (mask.batch, mask.heads, nq + 1))).reshape(axes)
    kv = np.diff(np.broadcast_to(mask.kv_starts(), (mask.batch, mask.heads, nk + 1))).reshape(axes)
    work = np.zeros(mask.batch * mask.heads)
    for head in range(len(work)):
        ptr = mask.indptr[head * nq : (head + 1) * nq + 1]
        columns = kv[head][mask.indices[ptr[0] : ptr[-1]]]
        before = np.concatenate([[0], np.cumsum(columns)])
        work[head] = float(np.diff(before[ptr - ptr[0]]) @ q[head])
    summed: NDArray[np.float64] = work.reshape(mask.batch, mask.heads).sum(axis=0)
    return np.array(np.broadcast_to(summed, (heads,)))


def slices_work(slices: KeySlices) -> NDArray[np.float64]:
    """(heads,) pairs of tokens that key slices keep in each head, over their batch.

    >>> slices = KeySlices.from_groups([[[1, 0, 1]], [[0, 1, 0]]], 16, (10, 3))
    >>> slices_work(slices).tolist()
    [20.0, 10.0]
    """
    counts = np.diff(slices.indptr).reshape(slices.batch, slices.heads, -1)
    edges = np.minimum(np.arange(counts.shape[2] + 1) * slices.group, slices.shape[0])
    work: NDArray[np.float64] = (counts * np.diff(edges)).sum(axis=(0, 2)).astype(np.float64)
    return work


def deal(work: ArrayLike, ranks: int, *, shared: int = 1, most_heads: int | None = None) -> Deal:
    """Deal heads to ranks by their work.

    Args:
        work: (heads,) of each query head, in any unit.
        ranks: how many ranks there are.
        shared: query heads of each KV head.
        most_heads: query heads that a rank may hold; None means ``ceil(heads / ranks)``.

    Raises:
        ValueError: no ranks, or so small a bound that heads are left over.

    >>> deal([5, 1, 1, 3], 2).q
    ((0, 2), (1, 3))
    >>> deal([9, 1, 1, 3], 2, most_heads=3).q
    ((0,), (1, 2, 3))
    """
    of_head = np.asarray(work, np.float64)
    heads = len(of_head)
    if ranks < 1:
        raise ValueError(wrong("ranks", "at least 1", ranks, "count the processes of the group"))
    bound = -(-heads // ranks) if most_heads is None else most_heads
    if bound * ranks < heads:
        expected = f"at least {-(-heads // ranks)} heads, so that {ranks} ranks hold all {heads}"
        raise ValueError(wrong("most_heads", expected, bound, "leave it out"))
    if shared > 1:
        groups = _deal(of_head.reshape(-1, shared).sum(axis=1), ranks, bound // shared)
        if groups is not None:
            whole = Deal(
                tuple(
                    tuple(head for g in mine for head in range(g * shared, (g + 1) * shared))
                    for mine in groups
                ),
                shared,
            )
            if whole.balance(of_head) <= WHOLE_GROUPS_WITHIN:
                return whole
    dealt = _deal(of_head, ranks, bound)
    assert dealt is not None
    return Deal(dealt, shared)


def deal_again(work: ArrayLike, old: Deal, *, most_heads: int | None = None) -> Deal:
    """The old deal as long as it serves the new work, else a new one.

    It serves while its balance under the new work is at most :data:`KEEP_WITHIN` times that of
    the best new deal: what a rank holds then stays where it is from step to step.

    Args:
        work: (heads,) of each query head under the new mask.
        old: the deal so far.
        most_heads: as of :func:`deal`.

    >>> old = deal([4, 3, 2, 1], 2)
    >>> deal_again([4, 3, 2.1, 1], old) is old, deal_again([4, 3, 1, 4], old) is old
    (True, False)
    """
    new = deal(work, len(old.q), shared=old.shared, most_heads=most_heads)
    return old if old.balance(work) <= KEEP_WITHIN * new.balance(work) else new


def even_deal(heads: int, ranks: int) -> Deal:
    """Neighbouring heads in equal numbers, whatever their work: what is usual.

    >>> even_deal(5, 2).q
    ((0, 1, 2), (3, 4))
    """
    return Deal(tuple(tuple(map(int, mine)) for mine in np.array_split(np.arange(heads), ranks)))


def _deal(work: NDArray[np.float64], ranks: int, bound: int) -> tuple[tuple[int, ...], ...] | None:
    """Heads of each rank; None where the bound leaves some over."""
    return spread(work, ranks, bound) if bound * ranks >= len(work) else None


def spread(work: NDArray[np.float64], ranks: int, bound: int) -> tuple[tuple[int, ...], ...]:
    """By rank, the heads that it gets by their work, at most ``bound``, which has room for all."""
    mine: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for head in np.argsort(-work, kind="stable").tolist():
        free = [rank for rank in range(ranks) if len(mine[rank]) < bound]
        rank = min(free, key=lambda rank: (loads[rank], rank))
        mine[rank].append(head)
        loads[rank] += float(work[head])
    _improve(mine, loads, work, bound)
    return tuple(tuple(sorted(heads)) for heads in mine)


def _improve(
    mine: list[list[int]], loads: list[float], work: NDArray[np.float64], bound: int
) -> None:
    """Move and swap heads of the busiest rank while that lowers the larger of both loads."""
    least = 1e-12 * float(work.sum())
    for _ in range(len(work) * len(mine)):
        busiest = max(range(len(mine)), key=lambda rank: loads[rank])
        best = loads[busiest] - least
        change: tuple[int, int, int | None] | None = None
        for rank in range(len(mine)):
            if rank == busiest:
                continue
            gives: Sequence[int | None] = [*mine[rank]]
            if len(mine[rank]) < bound:
                gives = [*gives, None]
            for head in mine[busiest]:
                for back in gives:
                    moved = float(work[head]) - (0.0 if back is None else float(work[back]))
                    larger = max(loads[busiest] - moved, loads[rank] + moved)
                    if moved > 0 and larger < best:
                        best, change = larger, (head, rank, back)
        if change is None:
            return
        head, rank, back = change
        moved = float(work[head]) - (0.0 if back is None else float(work[back]))
        mine[busiest].remove(head)
        mine[rank].append(head)
        if back is not None:
            mine[rank].remove(back)
            mine[busiest].append(back)
        loads[busiest] -= moved
        loads[rank] += moved
