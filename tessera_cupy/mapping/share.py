"""Share: the two halves of a tile take one KV stream and skip what only the other one needs.

A merged tile's list mixes fragments that both halves of its rows want with fragments of one
half. In the order of KV rows nearly every step has something for each half, so no half can skip.
Sorted by class, a step is for both halves or for one alone: data movement is shared, arithmetic
stays exact. Steps of one half and of the other alternate, so that neither waits long.

A class rarely fills its last step. What is left of one half's class then goes into the unused
places of the last step of both, which costs nothing there and saves a step.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.mapping.q_side import consecutive, exclusive_sum
from tessera_cupy.mapping.tiles import Tiles, TileShape

# Fragments that are reordered at a time, to keep the scratch in the cache.
_CHUNK = 1 << 16


def share(tiles: Tiles) -> Tiles:
    """Reorder packed lists so that a step belongs to both halves of the tile or to one.

    Fragments keep their order inside a class, but for the last ones of a half that fill the steps
    of both; each class is padded to whole steps.

    Args:
        tiles: merged on the query side and packed on the KV side.

    Returns:
        The same tiles with the same fragments in another order, and padding.

    Example:
        >>> share(map_mask(mask, Mapping("merge", "pack"), 128, 128))  # doctest: +SKIP
    """
    fragments: dict[str, tuple[NDArray[Any], int]] = {
        "frag_start": (tiles.frag_start, 0),
        "frag_len": (tiles.frag_len, 0),
        "frag_members": (tiles.frag_members, 0),
        "frag_bits": (tiles.frag_bits, -1),
    }
    if tiles.frag_gathered is not None:
        fragments["frag_gathered"] = (tiles.frag_gathered, 0)
    count, offsets = len(tiles.frag_members), np.zeros_like(tiles.frag_offsets)
    room = count + 3 * (tiles.shape.fragments - 1) * len(tiles)
    moved: dict[str, Any] = {
        name: np.empty(room, values.dtype) for name, (values, _) in fragments.items()
    }
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
    both, first, second = (np.diff(np.searchsorted(f, offsets)) for f in found)
    of_first, of_second = _fillers(both, first, second, per_step)
    first, second = first - of_first, second - of_second
    steps = -(-np.stack([both + of_first + of_second, first, second]) // per_step)

    # Slots of whole steps: first all tiles' steps of both, then those of each half.
    first_step = exclusive_sum(steps.ravel())
    slot, first_slot, second_slot = (first_step[:-1] * per_step).reshape(3, -1)
    runs = (
        (both, slot),
        _alternating((first, first_slot), (of_first, slot + both)),
        _alternating((second, second_slot), (of_second, slot + both + of_first)),
    )
    source = np.full(first_step[-1] * per_step, -1)
    source[np.concatenate([consecutive(*run) for run in runs])] = np.concatenate(found)

    last_step = np.cumsum(steps.sum(axis=0))
    order = _step_order(steps, last_step - steps.sum(axis=0))
    # NumPy is slow where the last axis is short, but not in a take of whole rows.
    return source.reshape(-1, per_step).take(order, axis=0).reshape(-1), last_step * per_step


def _fillers(
    both: NDArray[np.int64], first: NDArray[np.int64], second: NDArray[np.int64], per_step: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How many fragments of each half's class join the steps of both, for each tile.

    What each half's class leaves over from whole steps joins as a whole or not at all, as a part
    of it saves no step. Of the four choices this takes the one with the fewest steps summed over
    the halves, then the fewest steps of the tile; then the longer half is spared its step.
    """
    room = -both % per_step
    first_rest, second_rest = first % per_step, second % per_step
    none = np.zeros_like(both)
    choices, costs = [], []
    for of_first, of_second, shorter in (
        (none, none, none),
        (first_rest, none, first < second),
        (none, second_rest, first >= second),
        (first_rest, second_rest, none),
    ):
        more = -(-np.maximum(of_first + of_second - room, 0) // per_step)
        alone = more + (of_first < first_rest) + (of_second < second_rest)
        # Steps of a tile are 3 at most, so 8 keeps the three criteria apart.
        costs.append(8 * (more + alone) + 2 * alone + shorter)
        choices.append((of_first, of_second))
    best = np.argmin(costs, axis=0)
    of_first, of_second = np.array(choices)[best, :, np.arange(len(both))].T
    return of_first, of_second


def _step_order(steps: NDArray[np.int64], tile_step: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each step of all tiles its number among the steps ordered by class, then by tile.

    Args:
        steps: (3, T), steps of each tile for both halves, for the first and for the second.
        tile_step: (T,), first step of each tile.
    """
    both, first, second = steps
    order = np.empty(steps.sum(), np.int64)
    order[consecutive(both, tile_step)] = np.arange(both.sum())
    # Steps of one half and of the other take turns while both last.
    single = tile_step + both
    for count, other, late, done in (
        (first, second, 0, both.sum()),
        (second, first, 1, both.sum() + first.sum()),
    ):
        rank = np.arange(count.sum()) - np.repeat(exclusive_sum(count)[:-1] - late, count)
        turns = np.minimum(rank, np.repeat(other, count))
        order[consecutive(count, single) + turns] = np.arange(done, done + count.sum())
    return order


def _alternating(
    one: tuple[NDArray[np.int64], NDArray[np.int64]],
    other: tuple[NDArray[np.int64], NDArray[np.int64]],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Runs, as counts and begins, of which each of ``one`` is followed by its ``other``."""
    counts, begins = (np.stack(pair, axis=1).ravel() for pair in zip(one, other, strict=True))
    return counts, begins
