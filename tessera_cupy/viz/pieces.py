"""What physical tiles are made of, as rectangles in the mask and in the steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.errors import wrong
from tessera_cupy.mapping import Mapping
from tessera_cupy.mapping.stats import computed_parts
from tessera_cupy.mapping.tiles import GROUP_ROWS, UNIT_ROWS, Tiles
from tessera_cupy.masks import bits as token_bit
from tessera_cupy.viz.window import Window

Bands = list[tuple[int, int, bool]]


class Run(NamedTuple):
    """Neighbouring query rows of a tile: rows of the tile from ``top``, of the head from ``q0``."""

    tile: int
    top: int
    q0: int
    rows: int

    def of(self, bands: Bands) -> Iterator[tuple[int, int, bool]]:
        """What of a piece's bands is in these rows, in rows of the head."""
        drop = self.q0 - self.top
        for top, bottom, member in bands:
            first, last = max(top, self.top), min(bottom, self.top + self.rows)
            if first < last:
                yield first + drop, last + drop, member


class Piece(NamedTuple):
    """A run of a fragment's keys in its tile: bands are rows of it, the column is in its step.

    Each of the bands is (first row, one past the last, whether it attends to the keys).
    """

    step: int
    column: int
    kv0: int
    length: int
    bands: Bands

    def touches(self, window: Window) -> bool:
        """Whether it loads keys of the window; what only pads a step does not."""
        return self.length > 0 and self.kv0 < window.kv1 and self.kv0 + self.length > window.kv0


def skips_steps(mapping: Mapping) -> bool:
    """Whether halves of a tile skip steps that they have no part in, under this mapping."""
    return mapping.q in ("share", "regroup")


def computing_halves(tiles: Tiles, tile: int, skips: bool) -> NDArray[np.bool_]:
    """(steps, 2): which halves of a tile's rows compute each of its steps."""
    if not skips:
        return np.ones((tiles.steps[tile], 2), np.bool_)
    first, last = tiles.frag_offsets[tile : tile + 2]
    alone = replace(
        tiles,
        frag_offsets=np.array([0, last - first]),
        frag_members=tiles.frag_members[first:last],
    )
    return computed_parts(alone, tiles.shape.q // 2)


def pieces(tiles: Tiles, tile: int, parts: NDArray[np.bool_]) -> Iterator[Piece]:
    """The fragments of a tile; rows of a part that does not compute a step are left out.

    ``parts`` is (steps, n): which of the n equal parts of the tile's rows compute each of its
    steps, two of them as :func:`computing_halves` says. Of a fragment with token bits a piece is
    neighbouring keys that the same rows attend to.
    """
    first, last = tiles.frag_offsets[tile : tile + 2]
    exists = tiles.exists(tile, np.arange(tiles.shape.q))
    part_of_row = parts.shape[1] * np.arange(tiles.shape.q) // tiles.shape.q
    group_of_row = np.arange(tiles.shape.q) // GROUP_ROWS
    made: dict[tuple[int | bytes, bytes], Bands] = {}
    for place, at in enumerate(range(first, last)):
        step, slot = divmod(place, tiles.shape.fragments)
        members = int(tiles.frag_members[at])
        computed = exists & parts[step][part_of_row]
        column = slot * tiles.shape.slot
        if tiles.frag_bits[at] >= 0:
            kept = token_bit.unpack(tiles.bits[tiles.frag_bits[at]])
            for begin, kv0, length in _key_runs(tiles, at):
                some = kept[:, begin : begin + length]
                cuts = np.flatnonzero((some[:, 1:] != some[:, :-1])[computed].any(axis=0)) + 1
                for low, high in pairwise([0, *cuts.tolist(), length]):
                    of_keys = (some[:, low].tobytes(), parts[step].tobytes())
                    if of_keys not in made:
                        made[of_keys] = _bands(computed, some[:, low])
                    yield Piece(step, column + begin + low, kv0 + low, high - low, made[of_keys])
            continue
        key = (members, parts[step].tobytes())
        if key not in made:
            member = (members >> group_of_row & 1).astype(np.bool_)
            made[key] = _bands(computed, member)
        for begin, kv0, length in _key_runs(tiles, at):
            yield Piece(step, column + begin, kv0, length, made[key])


def runs_of(tiles: Tiles, tile: int, window: Window | None = None) -> Iterator[Run]:
    """The runs of neighbouring query rows of a tile, those in the window only if there is one."""
    rows = tiles.tile_rows(tile)
    first = tiles.query_rows(tile, rows)
    cuts = np.flatnonzero((np.diff(first) != 1) | (np.diff(rows) != 1)) + 1
    for begin, end in pairwise([0, *cuts.tolist(), len(rows)]):
        q0 = int(first[begin])
        if window is None or (q0 < window.q1 and q0 + end - begin > window.q0):
            yield Run(tile, int(rows[begin]), q0, end - begin)


def tiles_in(tiles: Tiles, head: int, window: Window) -> NDArray[np.intp]:
    """The tiles of a mask head with a query row in the window.

    Raises:
        ValueError: there are none.
    """
    first, last = _units(tiles)
    inside = ((first < window.q1) & (last > window.q0) & (last > first)).any(axis=1)
    chosen = np.flatnonzero(inside & (tiles.tile_head == head))
    if not len(chosen):
        end = everything(tiles, head).q1
        got = f"queries {window.q0} to {window.q1}"
        expected = f"a window with some of the {end} queries"
        raise ValueError(wrong("window", expected, got, "begin it inside, or leave it out"))
    return chosen


def everything(tiles: Tiles, head: int) -> Window:
    """The window of all queries of a mask head, and of all keys that any head loads.

    Raises:
        ValueError: ``head`` is not in the tiles.
    """
    mine = tiles.tile_head == head
    if not mine.any():
        raise ValueError(
            wrong("head", f"a mask head from 0 to {tiles.heads - 1}", head, "pick one of them")
        )
    q1 = int(_units(tiles)[1][mine].max())
    return Window(0, q1, 0, max(1, tiles.keys_end()))


def _bands(computed: NDArray[np.bool_], member: NDArray[np.bool_]) -> Bands:
    """Runs of computed rows that are all members, or all none."""
    state = np.where(computed, 1 + member, 0)
    cuts = np.flatnonzero(np.diff(state)) + 1
    return [
        (low, high, bool(state[low] == 2))
        for low, high in pairwise([0, *cuts.tolist(), len(state)])
        if state[low]
    ]


def _key_runs(tiles: Tiles, fragment: int) -> Iterator[tuple[int, int, int]]:
    """Runs of neighbouring keys of a fragment: first column, first KV row, length."""
    length = int(tiles.frag_len[fragment])
    if tiles.frag_gathered is None or not tiles.frag_gathered[fragment]:
        yield 0, int(tiles.frag_start[fragment]), length
        return
    keys = tiles.key_rows(fragment, np.arange(length))
    cuts = np.flatnonzero(np.diff(keys) != 1) + 1
    for begin, end in pairwise([0, *cuts.tolist(), length]):
        yield begin, int(keys[begin]), end - begin


def _units(tiles: Tiles) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """(tiles, units) each: the query rows ``[first, last)`` of each 16 rows of a tile."""
    tile = np.arange(len(tiles))[:, None]
    top = np.arange(0, tiles.shape.q, UNIT_ROWS, dtype=np.int32)
    first = tiles.query_rows(tile, top)
    exist = tiles.exists(tile[:, :, None], top[:, None] + np.arange(UNIT_ROWS))
    return first, first + exist.sum(axis=2, dtype=np.int32)
