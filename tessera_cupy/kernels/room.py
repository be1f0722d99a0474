"""How much room the lists of a plan get, where the GPU makes them of a mask nobody has counted.

Room for every mask of the geometry, where that is no more than :data:`LIST_BYTES`. Else that many
bytes, or half again what the geometry needed last, if that is more; of a map of single keys, whose
lists hold the keys themselves, room for half of the keys at least, twice the map's own bytes. Lists
of single keys bound what they need. A mask that needs more leaves a
plan without tasks, whose output is NaN; the next call of the plan or of the geometry that finds the
counts on the host warns of it, and has room.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from dataclasses import replace
from typing import Any

from tessera_cupy.kernels.builders import TILE_COUNTS, TileBuild
from tessera_cupy.kernels.fetch import Fetched, fetch

#: Bytes of lists that are given without knowing what a mask needs.
LIST_BYTES = 256 << 20
# Geometries that are remembered.
_MOST_GEOMETRIES = 256
# Sizes have four leading bits, so that masks much alike share a layout, and memory of the pool.
_LEADING_BITS = 4


class _Needs:
    """What the lists of each geometry needed, as far as the host has heard."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[TileBuild, int] = OrderedDict()
        self._coming: dict[TileBuild, Fetched] = {}

    def of(self, geometry: TileBuild) -> int:
        """Fragments that were needed last; 0 where nothing is known."""
        with self._lock:
            coming = self._coming.get(geometry)
        if coming is not None:
            self.overflowed(geometry, coming)
        with self._lock:
            return self._known.get(geometry, 0)

    def overflowed(self, geometry: TileBuild, coming: Fetched) -> bool:
        """Take up a build's need if it has come; whether it was more than the room."""
        if not coming.arrived():
            return False
        counts = dict(zip(TILE_COUNTS, coming.numbers.tolist(), strict=True))
        with self._lock:
            told = self._coming.get(geometry) is not coming
        self.note(geometry, counts["fragments"])
        if counts["errors"] and not told:
            warnings.warn(
                f"the lists of an earlier request needed {counts['fragments']} fragments, more "
                "than there was room for, and its output is NaN. Repeat it: there is room now. "
                "Plan.check() reports this at once",
                RuntimeWarning,
                stacklevel=2,
            )
        return bool(counts["errors"])

    def note(self, geometry: TileBuild, fragments: int) -> None:
        """Keep what was needed last."""
        with self._lock:
            self._coming.pop(geometry, None)
            self._known[geometry] = fragments
            self._known.move_to_end(geometry)
            if len(self._known) > _MOST_GEOMETRIES:
                self._known.popitem(last=False)

    def watch(self, geometry: TileBuild, counts: Any) -> Fetched:
        """Hear of a build's need, without waiting; of the builds of a geometry the last counts."""
        coming = fetch(counts, len(TILE_COUNTS))
        with self._lock:
            if len(self._coming) >= _MOST_GEOMETRIES:
                self._coming.clear()
            self._coming[geometry] = coming
        return coming


_needs = _Needs()


def lists_room(sizes: TileBuild, nnz: int | None) -> int:
    """Fragments to make room for.

    Args:
        sizes: the build.
        nnz: active blocks of the mask, or the most that there can be, where that is known; the room
            then suffices.
    """
    most = sizes.most_fragments
    if nnz is not None:
        return min(most, rounded(sizes.fragments_of(nnz)))
    free = max(LIST_BYTES, 2 * sizes.map_bytes) // sizes.fragment_bytes
    if most <= free:
        return most
    return min(most, max(free, rounded(_needs.of(_geometry(sizes)) * 3 // 2)))


def note(sizes: TileBuild, fragments: int) -> None:
    """Remember what a build needed."""
    _needs.note(_geometry(sizes), fragments)


def watch(sizes: TileBuild, counts: Any) -> Fetched:
    """Remember what a build needed, once its ``counts`` have come to the host."""
    return _needs.watch(_geometry(sizes), counts)


def overflowed(sizes: TileBuild, need: Fetched) -> bool:
    """Whether a build is known to have needed more than its room, which is remembered."""
    return _needs.overflowed(_geometry(sizes), need)


def _geometry(sizes: TileBuild) -> TileBuild:
    return replace(sizes, frag_capacity=0)


def rounded(count: int) -> int:
    """The next number of four leading bits.

    >>> rounded(1000), rounded(1024), rounded(1025)
    (1024, 1024, 1152)
    """
    step = 1 << max(0, (count - 1).bit_length() - _LEADING_BITS)
    return -(-count // step) * step
