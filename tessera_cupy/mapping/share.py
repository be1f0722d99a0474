"""Share: the two halves of a tile take one KV stream and skip what only the other one needs.

A merged tile's list mixes fragments that both halves of its rows want with fragments of one
half. In the order of KV rows nearly every step has something for each half, so no half can skip.
Sorted by class, a step is for both halves or for one alone: data movement is shared, arithmetic
stays exact. Steps of one half and of the other alternate, so that neither waits long.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.mapping.q_side import exclusive_sum
from tessera_cupy.mapping.tiles import Tiles, TileShape

# Fragments that are reordered at a time, to keep the scratch in the cache.
_CHUNK = 1 << 16


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
    fragments = {
        "frag_start": (tiles.frag_start, 0),
        "frag_len": (tiles.frag_len, 0),
        "frag_members": (tiles.frag_members, 0),
        "frag_bits": (tiles.frag_bits, -1),
    }
    count, offsets = len(tiles.frag_members), np.zeros_like(tiles.frag_offsets)
    room = count + 3 * (tiles.shape.fragments - 1) * len(tiles)
    moved = {name: np.empty(room, values.dtype) for name, (values, _) in fragments.items()}
    cuts = np.searchsorted(tiles.frag_offsets, np.arange(0, count, _CHUNK))
    for low, high in pairwise([*np.unique(cuts), len(tiles)]):
        begin, end = tiles.frag_offsets[low], tiles.frag_offsets[high]
        source, ends = _by_class(
            tiles.frag_members[begin:end], tiles.frag_offsets[low : high + 1] - begin, tiles.shape
        )
        unused = np.flatnonzero(source < 0)
        place = slice(offsets[low], offsets[low] + len(source))
        for name, (values, padding) in fragments.items():
            target = moved[name][place]
            if values is tiles.frag_bits and not len(tiles.bits):
                target[:] = padding
            elif len(source):
                values[begin:end].take(source, out=target, mode="wrap")
                target[unused] = padding
        offsets[low + 1 : high + 1] = offsets[low] + ends
    return replace(
        tiles,
        frag_offsets=offsets,
        **{name: values[: offsets[-1]] for name, values in moved.items()},
    )


def _by_class(
    members: NDArray[np.uint32], offsets: NDArray[np.int64], shape: TileShape
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each slot of the reordered lists its fragment, or -1, and where each list ends."""
    per_step = shape.fragments
    first_half = np.uint32((1 << (shape.groups // 2)) - 1)
    in_first = (members & first_half) != 0
    in_second = members > first_half

    # For each class its fragments, which ascend by tile, and how many each tile has.
    found = [
        np.flatnonzero(of_class)
        for of_class in (in_first & in_second, in_first > in_second, ~in_first)
    ]
    counts = np.stack([np.diff(np.searchsorted(f, offsets)) for f in found])
    steps = -(-counts // per_step)

    # Slots of whole steps: first all tiles' steps of both, then those of each half.
    first_step = exclusive_sum(steps.ravel())
    source = np.full(first_step[-1] * per_step, -1)
    slots = _targets(counts.ravel(), first_step[:-1] * per_step)
    source[slots] = np.concatenate(found)

    last_step = np.cumsum(steps.sum(axis=0))
    order = _step_order(steps, last_step - steps.sum(axis=0))
    # NumPy is slow where the last axis is short, but not in a take of whole rows.
    return source.reshape(-1, per_step).take(order, axis=0).reshape(-1), last_step * per_step


def _step_order(steps: NDArray[np.int64], tile_step: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each step of all tiles its number among the steps ordered by class, then by tile.

    Args:
        steps: (3, T), steps of each tile for both halves, for the first and for the second.
        tile_step: (T,), first step of each tile.
    """
    both, first, second = steps
    order = np.empty(steps.sum(), np.int64)
    order[_targets(both, tile_step)] = np.arange(both.sum())
    # Steps of one half and of the other take turns while both last.
    single = tile_step + both
    for count, other, late, done in (
        (first, second, 0, both.sum()),
        (second, first, 1, both.sum() + first.sum()),
    ):
        rank = np.arange(count.sum()) - np.repeat(exclusive_sum(count)[:-1] - late, count)
        turns = np.minimum(rank, np.repeat(other, count))
        order[_targets(count, single) + turns] = np.arange(done, done + count.sum())
    return order


def _targets(counts: NDArray[np.int64], begin: NDArray[np.int64]) -> NDArray[np.int64]:
    """``begin[i], begin[i] + 1, ...`` of each run of ``counts[i]`` numbers in turn."""
    targets = np.repeat(begin - exclusive_sum(counts)[:-1], counts)
    targets += np.arange(len(targets))
    return targets
