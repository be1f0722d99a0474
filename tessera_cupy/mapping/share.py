"""Share: the two halves of a tile take one KV stream and skip what only the other one needs.

A merged tile's list mixes fragments that both halves of its rows want with fragments of one
half. In the order of KV rows nearly every step has something for each half, so no half can skip.
Sorted by class, a step is for both halves or for one alone: data movement is shared, arithmetic
stays exact. Steps of one half and of the other alternate, so that neither waits long.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.mapping.tiles import Tiles

_Scalar = TypeVar("_Scalar", bound=np.generic)
_CLASSES = 3  # both halves, only the first, only the second


def share(tiles: Tiles) -> Tiles:
    """Reorder packed lists so that a step belongs to both halves of the tile or to one.

    Fragments keep ascending KV rows inside a class; each class is padded to whole steps.

    Args:
        tiles: merged on the query side and packed on the KV side.

    Returns:
        The same tiles with the same fragments in another order, and padding.

    Example:
        >>> share(map_mask(mask, Mapping("merge", "pack"), 128, 128))  # doctest: +SKIP
    """
    per_step = tiles.shape.fragments
    first_half = np.uint32((1 << (tiles.shape.groups // 2)) - 1)
    in_first = (tiles.frag_members & first_half) != 0
    in_second = (tiles.frag_members & ~first_half) != 0
    kind = np.where(in_first & in_second, 0, np.where(in_first, 1, 2)).astype(np.int8)

    counts = np.diff(tiles.frag_offsets)
    tile = np.repeat(np.arange(len(tiles), dtype=np.int64), counts)
    size = np.empty((len(tiles), _CLASSES), np.int64)
    rank = np.empty(len(tile), np.int64)  # among the fragments of one class and tile
    for c in range(_CLASSES):
        member = kind == c
        before = np.concatenate(([0], np.cumsum(member)))
        size[:, c] = before[tiles.frag_offsets[1:]] - before[tiles.frag_offsets[:-1]]
        rank[member] = (before[:-1] - before[tiles.frag_offsets[:-1]][tile])[member]

    steps = -(-size // per_step)
    both, first, second = steps.T
    offsets = np.concatenate(([0], np.cumsum(steps.sum(axis=1)) * per_step))
    step = rank // per_step
    place = np.select(
        [kind == 0, kind == 1],
        [step, both[tile] + step + np.minimum(step, second[tile])],
        both[tile] + step + np.minimum(step + 1, first[tile]),
    )
    target = offsets[tile] + place * per_step + rank % per_step

    def moved(values: NDArray[_Scalar], padding: int) -> NDArray[_Scalar]:
        result = np.full(offsets[-1], padding, values.dtype)
        result[target] = values
        return result

    return replace(
        tiles,
        frag_offsets=offsets,
        frag_start=moved(tiles.frag_start, 0),
        frag_len=moved(tiles.frag_len, 0),
        frag_members=moved(tiles.frag_members, 0),
        frag_bits=moved(tiles.frag_bits, -1),
    )
