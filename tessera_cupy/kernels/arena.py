"""Several arrays in one allocation of GPU memory, and the params that point into it."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.kernels.builders import (
    MASK_SCALARS,
    STATE_POINTERS,
    TILE_POINTERS,
    TILES_PARAMS,
    TileBuild,
)

#: Alignment of each array, bytes.
ALIGNMENT = 256


class Part(NamedTuple):
    """An array inside an allocation, where a launch needs no more than its address.

    Attributes:
        ptr: device address.
        nbytes: its size.
    """

    ptr: int
    nbytes: int

    @property
    def data(self) -> Part:
        """Itself, so that ``array.data.ptr`` is an address as of CuPy's arrays."""
        return self


@dataclass(frozen=True)
class Arena:
    """Where arrays lie in an allocation.

    Attributes:
        places: (offset, bytes) of each array.
        nbytes: of the allocation, whole alignments and at least one.

    >>> Arena.of({"a": 10, "b": 4}).places
    {'a': (0, 10), 'b': (256, 4)}
    """

    places: dict[str, tuple[int, int]]
    nbytes: int

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> Arena:
        """Lay arrays of these bytes out one behind the other."""
        places, end = {}, 0
        for name, size in sizes.items():
            places[name] = (end, size)
            end += -(-size // ALIGNMENT) * ALIGNMENT
        return cls(places, max(ALIGNMENT, end))

    def part(self, name: str, base: int) -> Part:
        """An array of the allocation at ``base``."""
        offset, size = self.places[name]
        return Part(base + offset, size)


class BuildLayout:
    """The memory of one :class:`TileBuild`, with the params that point into it.

    Attributes:
        build: the sizes.
        arena: where its arrays lie.
    """

    def __init__(self, build: TileBuild) -> None:
        self.build = build
        sizes = {
            name: int(np.prod(shape)) * dtype.itemsize
            for name, (shape, dtype) in build.arrays().items()
        }
        self.arena = Arena.of(sizes)
        self._params = bytes(build.params(dict.fromkeys(TILE_POINTERS, 0)))
        self._dtype = np.dtype(f"V{TILES_PARAMS.itemsize}")
        # The stamp follows the pointers.
        self._pointers = struct.Struct(f"={len(TILE_POINTERS)}Qq")
        written = TILE_POINTERS[len(STATE_POINTERS) :]
        self._offsets = [self.arena.places[name][0] for name in written]
        assert TILES_PARAMS.fields is not None
        self._rows_at = TILES_PARAMS.fields["rows"][1]

    def parts(self, base: int) -> dict[str, Part]:
        """The arrays of an allocation, at an address."""
        return {name: Part(base + at, size) for name, (at, size) in self.arena.places.items()}

    def params(self, state: Sequence[int], base: int, stamp: int) -> NDArray[Any]:
        """The struct of all three tile kernels, for :data:`STATE_POINTERS` and an allocation."""
        params = bytearray(self._params)
        pointers = [base + offset for offset in self._offsets]
        self._pointers.pack_into(params, 0, *state, *pointers, stamp)
        if self.build.gather:
            rows = base + self.arena.places["rows"][0]
            struct.pack_into("=Q", params, self._rows_at, rows)
        return np.frombuffer(params, self._dtype)


@lru_cache(maxsize=128)
def state_arena(rows: int, nk: int) -> Arena:
    """What ``mask_state`` writes, for so many rows."""
    return Arena.of(_state_sizes(rows, nk))


@lru_cache(maxsize=128)
def ragged_arena(rows: int, nk: int, heads: tuple[int, int], starts: tuple[int, int]) -> Arena:
    """What ``mask_state`` writes for so many rows, and ``ragged_blocks`` then.

    Args:
        rows: of the mask alone.
        nk: columns.
        heads: (heads over the batch, rows of one) of mask and sizes together.
        starts: of one head's query and KV blocks; 0 of a uniform side.
    """
    count, nq = heads
    return Arena.of(
        {
            # Both are zeroed together.
            "scalars": 2 * 8 * len(MASK_SCALARS),
            "mask_bitmap": _state_sizes(rows, nk)["bitmap"],
            "row_count": _state_sizes(rows, nk)["row_count"],
            "bitmap": _state_sizes(count * nq, nk)["bitmap"],
            "q_starts": 4 * count * starts[0],
            "kv_starts": 4 * count * starts[1],
        }
    )


def _state_sizes(rows: int, nk: int) -> dict[str, int]:
    words = -(-nk // 32)
    return {
        "scalars": 8 * len(MASK_SCALARS),
        "bitmap": 4 * rows * words,
        "row_count": 4 * rows,
    }
