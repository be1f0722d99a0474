"""The turns of Ulysses: heads of a rank that are exchanged and computed together.

While the heads of one turn are computed, those of the next ones arrive and the outputs of the last
ones leave. Turns of a rank are cut for equal work, and query heads that share a KV head stay in one
turn, so that the same bytes move whatever their number.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from tessera_cupy.parallel.heads import Deal, spread

#: By place in a Ulysses group and turn, the heads, ascending. All places have as many turns; those
#: of a place with few heads may be empty.
Turns = tuple[tuple[tuple[int, ...], ...], ...]


def one_turn(deal: Deal) -> Turns:
    """All heads of each rank at once.

    >>> one_turn(Deal(((0, 2), (1,))))
    (((0, 2),), ((1,),))
    """
    return tuple((mine,) for mine in deal.q)


def most_turns(deal: Deal) -> int:
    """The most turns that have a head each on some rank; at least 1.

    >>> most_turns(Deal(((0, 1, 2), (3,)))), most_turns(Deal(((0, 1, 2, 3),), shared=2))
    (3, 2)
    """
    return max(1, *map(len, deal.kv))


def in_turns(deal: Deal, work: ArrayLike, count: int) -> Turns:
    """Cut each rank's heads in turns of equal work, those with the fewest heads first.

    The fewest first, as nothing is computed while the first turn arrives, and what arrives is three
    times what leaves.

    Args:
        deal: the heads of each rank.
        work: (heads,) of each query head.
        count: turns of every rank.

    >>> in_turns(Deal(((0, 1, 2), (3, 4))), [1, 4, 4, 2, 2], 2)
    (((2,), (0, 1)), ((3,), (4,)))
    """
    of_head = np.asarray(work, np.float64)
    turns = []
    for mine, held in zip(deal.q, deal.kv, strict=True):
        whole = [[head for head in mine if head // deal.shared == kv] for kv in held]
        weights = np.array([of_head[heads].sum() for heads in whole], np.float64)
        parts = spread(weights, count, len(whole))
        cut = [tuple(head for unit in part for head in whole[unit]) for part in parts]
        turns.append(tuple(sorted(cut, key=lambda heads: (len(heads), heads))))
    return tuple(turns)
