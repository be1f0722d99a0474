"""How much room the lists of a plan get, where the GPU makes them of a mask nobody has counted.

Room for every mask of the geometry, where that is no more than :data:`LIST_BYTES`. Else that many
bytes, or half again what the geometry needed last, if that is more. A mask that needs more leaves a
plan without tasks, whose output is NaN; the next build of the geometry warns of it, and has room.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from dataclasses import replace
from functools import lru_cache
from typing import Any

from tessera_cupy.kernels.builders import TILE_COUNTS, TileBuild
from tessera_cupy.kernels.fetch import Fetched, fetch

#: Bytes of lists that are given without knowing what a mask needs.
LIST_BYTES = 256 << 20
FRAGMENT_BYTES = 8
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
            if coming is None or not coming.arrived():
                return self._known.get(geometry, 0)
        counts = dict(zip(TILE_COUNTS, coming.numbers.tolist(), strict=True))
        self.note(geometry, counts["fragments"])
        if counts["errors"]:
            warnings.warn(
                f"the lists of an earlier request needed {counts['fragments']} fragments, more "
                "than there was room for, and its output is NaN. Repeat it: there is room now. "
                "Plan.check() reports this at once",
                RuntimeWarning,
                stacklevel=2,
            )
        return int(counts["fragments"])

    def note(self, geometry: TileBuild, fragments: int) -> None:
        """Keep what was needed last."""
        with self._lock:
            self._coming.pop(geometry, None)
            self._known[geometry] = fragments
            self._known.move_to_end(geometry)
            if len(self._known) > _MOST_GEOMETRIES:
                self._known.popitem(last=False)

    def watch(self, geometry: TileBuild, counts: Any) -> None:
        """Hear of a build's need, without waiting for it."""
        with self._lock:
            # One at a time: a need that nobody asks for again costs nothing.
            if geometry not in self._coming and len(self._coming) < _MOST_GEOMETRIES:
                self._coming[geometry] = fetch(counts, len(TILE_COUNTS))


_needs = _Needs()


def lists_room(sizes: TileBuild, nnz: int | None) -> int:
    """Fragments to make room for.

    Args:
        sizes: the build.
        nnz: active blocks of the mask, where they are known; the room then suffices.
    """
    most = _most(sizes)
    if nnz is not None:
        return min(most, rounded(sizes.fragments_of(nnz)))
    free = LIST_BYTES // FRAGMENT_BYTES
    if most <= free:
        return most
    return min(most, max(free, rounded(_needs.of(_geometry(sizes)) * 3 // 2)))


@lru_cache(maxsize=_MOST_GEOMETRIES)
def _most(sizes: TileBuild) -> int:
    return sizes.most_fragments


def note(sizes: TileBuild, fragments: int) -> None:
    """Remember what a build needed."""
    _needs.note(_geometry(sizes), fragments)


def watch(sizes: TileBuild, counts: Any) -> None:
    """Remember what a build needed, once its ``counts`` have come to the host."""
    _needs.watch(_geometry(sizes), counts)


def _geometry(sizes: TileBuild) -> TileBuild:
    return replace(sizes, frag_capacity=0)


def rounded(count: int) -> int:
    """The next number of four leading bits.

    >>> rounded(1000), rounded(1024), rounded(1025)
    (1024, 1024, 1152)
    """
    step = 1 << max(0, (count - 1).bit_length() - _LEADING_BITS)
    return -(-count // step) * step
