"""All tiles of a large head at a glance: how much of each spot is active, and how much in vain.

Hundreds of thousands of fragments are not drawn one by one. Their areas are summed over the cells
of an image, exactly but for two kinds of fragments: token bits are spread evenly over the eight
rows of a membership group, gathered keys over the span from the first to the last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.mapping.stats import computed_parts
from tessera_cupy.mapping.tiles import GROUP_ROWS, Tiles
from tessera_cupy.viz import area, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: More fragments of a head than this are drawn as an image.
MOST_FRAGMENTS = 10_000

_ACTIVE, _IN_VAIN = style.KEPT, "#B5B5B5"


class _Bands(NamedTuple):
    """Rectangles of fragments: neighbouring rows in one state, (N,) each.

    ``fragment`` counts those of the head, ``y0`` and ``y1`` are rows, ``active`` is a fraction.
    """

    fragment: NDArray[np.intp]
    y0: NDArray[np.int64]
    y1: NDArray[np.int64]
    active: NDArray[np.float64]


def fragment_count(tiles: Tiles, head: int) -> int:
    """Fragments of a mask head."""
    return int(np.diff(tiles.frag_offsets)[tiles.tile_head == head].sum())


def draw_all_tiles(ax: Axes, tiles: Tiles, head: int, rows: int, keys: int, skips: bool) -> None:
    """Draw the fragments of a head where they lie in the mask, ``rows`` by ``keys`` tokens."""
    mine = np.flatnonzero(tiles.tile_head == head)
    row = np.arange(0, tiles.shape.q, GROUP_ROWS)
    tops = tiles.query_rows(mine[:, None], row).astype(np.int64)
    bands = _bands(tiles, mine, tops, skips)
    fragment = _fragments(tiles, mine)[bands.fragment]
    first, length = tiles.frag_start[fragment], tiles.frag_len[fragment]
    last = first + length
    if tiles.frag_gathered is not None and tiles.rows is not None and len(tiles.rows):
        listed = tiles.frag_gathered[fragment] & (length > 0)
        at = np.where(listed, first, 0)
        last = np.where(listed, tiles.rows[np.where(listed, last - 1, 0)] + 1, last)
        first = np.where(listed, tiles.rows[at], first)
    spread = length / np.maximum(last - first, 1)
    shape = len(area.cell_edges(rows)) - 1, len(area.cell_edges(keys)) - 1
    scale = shape[1] / keys, shape[0] / rows
    sums = [
        _coverage(first, last, bands.y0, bands.y1, spread * weight, shape, scale)
        for weight in (bands.active, 1 - bands.active)
    ]
    _show(ax, sums, (keys, rows))


def draw_all_steps(ax: Axes, tiles: Tiles, head: int, skips: bool) -> None:
    """Draw the steps of a head, a line a tile."""
    mine = np.flatnonzero(tiles.tile_head == head)
    q, kv = tiles.shape.q, tiles.shape.kv
    steps = tiles.steps[mine]
    tops = np.arange(len(mine))[:, None] * q + np.arange(0, q, GROUP_ROWS)
    bands = _bands(tiles, mine, tops, skips)
    fragment = _fragments(tiles, mine)
    counts = np.diff(tiles.frag_offsets)[mine]
    place = fragment - np.repeat(tiles.frag_offsets[mine], counts)
    left = (place * tiles.shape.slot)[bands.fragment]
    right = left + tiles.frag_len[fragment[bands.fragment]]
    high, wide = len(mine) * q, max(1, int(steps.max(initial=0))) * kv
    shape = len(area.cell_edges(high)) - 1, len(area.cell_edges(wide)) - 1
    scale = shape[1] / wide, shape[0] / high
    active = _coverage(left, right, bands.y0, bands.y1, bands.active, shape, scale)
    line, half = np.nonzero(_halves(tiles, mine, skips))
    of_step = np.repeat(np.arange(len(mine)), steps)[line]
    number = np.concatenate([np.arange(count) for count in steps] or [np.zeros(0, int)])[line]
    top = of_step * q + half * q // 2
    ones = np.ones(len(line))
    issued = _coverage(number * kv, number * kv + kv, top, top + q // 2, ones, shape, scale)
    _show(ax, [active, issued - active], (wide, high))


def _fragments(tiles: Tiles, mine: NDArray[np.intp]) -> NDArray[np.intp]:
    """The fragments of tiles, in their order."""
    counts = np.diff(tiles.frag_offsets)[mine]
    ahead = np.cumsum(counts) - counts
    first = np.repeat(tiles.frag_offsets[mine] - ahead, counts)
    fragments: NDArray[np.intp] = np.arange(int(counts.sum())) + first
    return fragments


def _halves(tiles: Tiles, mine: NDArray[np.intp], skips: bool) -> NDArray[np.bool_]:
    """(steps of these tiles, 2): which halves compute each step."""
    if not skips:
        return np.ones((int(tiles.steps[mine].sum()), 2), np.bool_)
    return computed_parts(tiles, tiles.shape.q // 2)[
        np.repeat(np.isin(np.arange(len(tiles)), mine), tiles.steps)
    ]


def _bands(tiles: Tiles, mine: NDArray[np.intp], tops: NDArray[np.int64], skips: bool) -> _Bands:
    """What tiles compute, given the row (tiles, groups) at which each group is drawn."""
    groups = tiles.shape.groups
    row = np.arange(tiles.shape.q)
    rows = tiles.exists(mine[:, None], row).reshape(len(mine), groups, GROUP_ROWS).sum(axis=2)
    counts = np.diff(tiles.frag_offsets)[mine]
    owner = np.repeat(np.arange(len(mine)), counts)
    fragment = _fragments(tiles, mine)
    steps = tiles.steps[mine]
    place = fragment - tiles.frag_offsets[mine][owner]
    step = (np.cumsum(steps) - steps)[owner] + place // tiles.shape.fragments
    half = 2 * np.arange(groups) // groups
    computed = _halves(tiles, mine, skips)[step][:, half] & (rows > 0)[owner]
    member = tiles.frag_members[fragment][:, None] >> np.arange(groups, dtype=np.uint32) & 1 == 1
    share = member.astype(np.float64)
    bits = tiles.frag_bits[fragment]
    refined = np.flatnonzero(bits >= 0)
    if len(refined):
        set_bits = np.bitwise_count(tiles.bits).sum(axis=2, dtype=np.int64)
        of_group = set_bits.reshape(-1, groups, GROUP_ROWS).sum(axis=2)[bits[refined]]
        size = rows[owner[refined]] * tiles.frag_len[fragment[refined]][:, None]
        share[refined] = of_group / np.maximum(size, 1)
    follows = np.zeros((len(mine), groups), np.bool_)
    follows[:, 1:] = tops[:, 1:] == tops[:, :-1] + rows[:, :-1]
    begins = np.ones(computed.shape, np.bool_)
    begins[:, 1:] = (
        (share[:, 1:] != share[:, :-1])
        | (computed[:, 1:] != computed[:, :-1])
        | ~follows[owner, 1:]
    )
    first = np.flatnonzero(begins)
    last = np.append(first[1:], begins.size)[computed.ravel()[first]] - 1
    first = first[computed.ravel()[first]]
    of, group = np.divmod(first, groups)
    end = last % groups
    return _Bands(
        of,
        tops[owner[of], group],
        tops[owner[of], end] + rows[owner[of], end],
        share.ravel()[first],
    )


def _coverage(
    x0: NDArray[np.integer],
    x1: NDArray[np.integer],
    y0: NDArray[np.integer],
    y1: NDArray[np.integer],
    weight: NDArray[np.float64],
    shape: tuple[int, int],
    scale: tuple[float, float],
) -> NDArray[np.float32]:
    """The sum of rectangles, each of a weight, over each cell as a fraction of the cell.

    A rectangle is four corners whose sum from the upper left it is; a corner inside a cell is
    spread over that and the next one.
    """
    high, wide = shape[0] + 2, shape[1] + 2
    total = np.zeros(high * wide)
    for x, sign_x in ((x0, 1), (x1, -1)):
        column, across = _split(x * scale[0])
        for y, sign_y in ((y0, 1), (y1, -1)):
            line, down = _split(y * scale[1])
            for dx, part_x in ((0, 1 - across), (1, across)):
                for dy, part_y in ((0, 1 - down), (1, down)):
                    parts = weight * part_x * part_y * (sign_x * sign_y)
                    at = (line + dy) * wide + column + dx
                    total += np.bincount(at, parts, minlength=high * wide)
    sums: NDArray[np.float64] = total.reshape(high, wide).cumsum(axis=0).cumsum(axis=1)
    return np.clip(sums[: shape[0], : shape[1]], 0, 1).astype(np.float32)


def _split(place: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    whole = np.floor(place + 1e-9).astype(np.int64)
    return whole, np.maximum(place - whole, 0)


def _show(ax: Axes, sums: list[NDArray[np.float32]], extent: tuple[int, int]) -> None:
    from matplotlib.patches import Patch

    image = area.mixed([style.PAPER, _ACTIVE, _IN_VAIN], sums)
    area.show(ax, image, (0, extent[0], extent[1], 0), "auto")
    handles = [
        Patch(facecolor=_ACTIVE, label="active entries"),
        Patch(facecolor=_IN_VAIN, label="work on inactive entries"),
        Patch(facecolor=style.PAPER, edgecolor=style.INK, label="no work"),
    ]
    style.legend_below(ax, handles, columns=3)
