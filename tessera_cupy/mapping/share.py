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
    counts = np.diff(tiles.frag_offsets)
    tile = np.repeat(np.arange(len(tiles), dtype=np.int32), counts)

    # For each class its fragments, which ascend by tile, and how many each tile has.
    classes = (in_first & in_second, in_first & ~in_second, ~in_first)
    members = [np.flatnonzero(of_class) for of_class in classes]
    owners = [tile[found] for found in members]
    sizes = [np.bincount(owner, minlength=len(tiles)) for owner in owners]
    both, first, second = (-(-size // per_step) for size in sizes)
    offsets = np.concatenate(([0], np.cumsum(both + first + second) * per_step))

    targets = []
    for kind, (owner, size) in enumerate(zip(owners, sizes, strict=True)):
        rank = np.arange(len(owner)) - (np.cumsum(size) - size)[owner]
        step = rank // per_step
        place = offsets[:-1][owner] + rank + (both * per_step)[owner] * (kind > 0)
        # Steps of one half and of the other take turns while both last.
        if kind == 1:
            place += np.minimum(step, second[owner]) * per_step
        elif kind == 2:
            place += np.minimum(step + 1, first[owner]) * per_step
        targets.append(place)
    source, target = np.concatenate(members), np.concatenate(targets)

    def moved(values: NDArray[_Scalar], padding: int) -> NDArray[_Scalar]:
        result = np.full(offsets[-1], padding, values.dtype)
        result[target] = values[source]
        return result

    return replace(
        tiles,
        frag_offsets=offsets,
        frag_start=moved(tiles.frag_start, 0),
        frag_len=moved(tiles.frag_len, 0),
        frag_members=moved(tiles.frag_members, 0),
        frag_bits=(
            moved(tiles.frag_bits, -1)
            if len(tiles.bits)
            else np.full(offsets[-1], -1, tiles.frag_bits.dtype)
        ),
    )
