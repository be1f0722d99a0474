"""Twins: tasks with equal lists, side by side in launch order, so that two CTAs can share loads.

Masks whose neighbouring rows are alike have many: dense ones, windows over tiles of tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.mapping.tiles import Tiles
from tessera_cupy.organization.tasks import Tasks


def find_twins(tiles: Tiles, tasks: Tasks) -> NDArray[np.bool_]:
    """Which tasks are twins: those of an even place and of the next one, if they are alike.

    Alike are tasks of one head over whole tiles with equal lists, which take the same steps of
    them in the same direction. A tile of halves is whole where both are full.

    Returns:
        (N,), in launch order; true for both or for neither of a pair.

    Example:
        >>> find_twins(tiles, tasks).all()  # of a dense mask  # doctest: +SKIP
        True
    """
    twins = np.zeros(len(tasks), np.bool_)
    pairs = len(tasks) // 2
    even, odd = (tasks.task_tile[i : 2 * pairs : 2] for i in (0, 1))
    alike = (tiles.tile_q[even, 1] == tiles.shape.q) & (tiles.tile_q[odd, 1] == tiles.shape.q)
    for values in (tasks.task_head, tasks.task_begin, tasks.task_end, tasks.task_reverse):
        alike &= values[0 : 2 * pairs : 2] == values[1 : 2 * pairs : 2]
    first, counts = tiles.frag_offsets[:-1], np.diff(tiles.frag_offsets)
    alike &= (counts[even] == counts[odd]) & (counts[even] > 0)
    for at in (0, 1):  # few lists that differ have the same ends
        places = [first[side[alike]] + at * (counts[side[alike]] - 1) for side in (even, odd)]
        alike[alike] = tiles.frag_start[places[0]] == tiles.frag_start[places[1]]
    lists = (tiles.frag_start, tiles.frag_len, tiles.frag_members, tiles.frag_bits)
    for pair in np.flatnonzero(alike):
        count = counts[even[pair]]
        a, b = (slice(first[t], first[t] + count) for t in (even[pair], odd[pair]))
        twins[2 * pair : 2 * pair + 2] = all(np.array_equal(x[a], x[b]) for x in lists)
    return twins
