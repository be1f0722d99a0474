"""Key slices: which single keys each group keeps, and where the columns of its tiles come from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.errors import wrong
from tessera_cupy.mapping.tiles import GROUP_ROWS, Tiles
from tessera_cupy.masks import KeySlices
from tessera_cupy.viz import area, arguments, style
from tessera_cupy.viz.mask import head_name, mask_head
from tessera_cupy.viz.window import Window

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Of a loaded key by which halves of the tile keep it: neither, the first, the second, both.
_KINDS = ("kept by neither half", "by the first alone", "by the second alone", "by both")
_COLOURS = ("#D9D9D9", style.PARTIAL, "#009E73", "#00456E")
_LISTED, _AS_BLOCK = "#F0E442", style.INK
_EMPTY = -1


class Columns(NamedTuple):
    """The columns of all steps of a tile, in the order of the steps: (steps * shape.kv,) each.

    Attributes:
        key: int64, the key that is loaded there.
        kind: int64, which halves of the tile keep it: 0 neither, 1 the first, 2 the second, 3
            both; -1 where the column is empty.
        gathered: bool, whether it is loaded as a single row.
    """

    key: NDArray[np.int64]
    kind: NDArray[np.int64]
    gathered: NDArray[np.bool_]


def columns_of(tiles: Tiles, tile: int) -> Columns:
    """What each column of a tile's steps holds, by the first row of each half of the tile.

    Args:
        tiles: the tiles of key slices, all rows of a group of which keep the same keys.
        tile: which of them.

    Raises:
        ValueError: there is no such tile.

    >>> from tessera_cupy.mapping.gather import map_slices
    >>> tiles = map_slices(KeySlices.from_groups([[1, 0, 1, 1]], 64), "retain", 64, 64)
    >>> columns_of(tiles, 0).key[:3].tolist(), columns_of(tiles, 0).kind[:4].tolist()
    ([0, 2, 3], [3, 3, 3, -1])
    """
    arguments.check_kind("tiles", tiles, (Tiles,), "pass plan.tiles(), or what map_mask returns")
    if not 0 <= tile < len(tiles):
        raise ValueError(wrong("tile", f"from 0 to {len(tiles) - 1}", tile, "pick one of them"))
    slot = tiles.shape.slot
    fragments = np.arange(*tiles.frag_offsets[tile : tile + 2])[:, None]
    column = np.arange(slot, dtype=np.uint32)
    bits = tiles.frag_bits[fragments]
    kind = np.zeros((len(fragments), slot), np.int64)
    for half in (0, 1):
        row = half * tiles.shape.q // 2
        kept = tiles.frag_members[fragments] >> np.uint32(row // GROUP_ROWS) & 1 == 1
        if len(tiles.bits):
            words = tiles.bits[bits, row, column // 32]
            kept = kept & ((bits < 0) | (words >> column % 32 & 1 == 1))
        kind += (kept & tiles.exists(tile, row)) << half
    kind[column >= tiles.frag_len[fragments]] = _EMPTY
    gathered = np.zeros_like(kind, np.bool_)
    if tiles.frag_gathered is not None:
        gathered |= tiles.frag_gathered[fragments]
    whole = tiles.steps[tile] * tiles.shape.kv
    lacking = whole - kind.size
    return Columns(
        np.pad(tiles.key_rows(fragments, column).astype(np.int64).ravel(), (0, lacking)),
        np.pad(kind.ravel(), (0, lacking), constant_values=_EMPTY),
        np.pad(gathered.ravel(), (0, lacking)),
    )


def draw_slices(
    ax: Axes, slices: KeySlices, *, batch: int = 0, head: int = 0, window: Window | None = None
) -> None:
    """Draw which keys each group of one head keeps: a line a group, a column a key.

    With more than 1,024 groups or keys a spot has the mixed colours of those in it.

    Args:
        ax: where to draw.
        slices: the slices.
        batch: entry of the batch axis.
        head: entry of the head axis.
        window: the part to draw; everything when None.

    Raises:
        TypeError: an argument of another kind, ``ax`` that is no axes among them.
        ValueError: ``batch`` or ``head`` is not in the slices, or ``window`` reaches past them.

    >>> from matplotlib.figure import Figure
    >>> ax = Figure().subplots()
    >>> draw_slices(ax, KeySlices.from_groups([[1, 0, 1], [0, 0, 1]], 16))
    >>> print(ax.get_title())
    key slices of head 0: 2 groups of 16 queries by single keys, density 0.500
    """
    arguments.check_axes(ax)
    fix = "make them with KeySlices.from_groups; draw_mask draws a BlockMask"
    arguments.check_kind("slices", slices, (KeySlices,), fix)
    from matplotlib.patches import Patch

    number = mask_head(slices, batch, head)
    sq, skv = slices.shape
    window = window or Window(0, max(1, sq), 0, max(1, skv))
    window.check_inside((max(1, sq), max(1, skv)))
    offsets = slices.indptr[number * slices.groups : (number + 1) * slices.groups + 1]
    group = np.repeat(np.arange(slices.groups), np.diff(offsets))
    key = slices.indices[offsets[0] : offsets[-1]].astype(np.int64)
    seen = (key >= window.kv0) & (key < window.kv1)
    wide = window.kv1 - window.kv0
    cells = area.cell_edges(wide).astype(np.int64)
    column = np.searchsorted(cells, key[seen] - window.kv0, side="right") - 1
    count = len(cells) - 1
    kept = np.bincount(group[seen] * count + column, minlength=slices.groups * count)
    shares = (kept.reshape(-1, count) / np.diff(cells)).astype(np.float32)
    edges = np.minimum(np.arange(slices.groups + 1) * slices.group, sq)
    rows = slice(window.q0 // slices.group, -(-window.q1 // slices.group))
    edges = np.clip(edges[rows.start : rows.stop + 1], window.q0, window.q1)
    lines = window.q0 + area.cell_edges(window.q1 - window.q0)
    if len(edges) <= area.MOST_CELLS:
        lines = np.unique(edges).astype(float)
    means = area.cell_means(shares[rows], edges, lines)
    image = area.mixed([style.SKIPPED, style.KEPT], [means])
    extent = (window.kv0, window.kv1, window.q1, window.q0)
    if np.ptp(np.diff(lines)) == 0:
        area.show(ax, image, extent, "auto")
    else:
        columns = np.linspace(window.kv0, window.kv1, count + 1)
        ax.pcolormesh(columns, lines, image, rasterized=True)
    ax.set_xlim(window.kv0, window.kv1)
    ax.set_ylim(window.q1, window.q0)
    ax.set_xlabel("key (tokens)")
    ax.set_ylabel("query (tokens)")
    pairs = int(
        (
            np.diff(offsets) * np.diff(np.minimum(np.arange(slices.groups + 1) * slices.group, sq))
        ).sum()
    )
    ax.set_title(
        f"key slices of {head_name(slices, batch, head)}: {slices.groups:,} groups of "
        f"{slices.group} queries by single keys, density {pairs / max(1, sq * skv):.3f}",
        fontsize=10,
    )
    handles = [
        Patch(facecolor=style.KEPT, label="kept key"),
        Patch(facecolor=style.SKIPPED, edgecolor="#BBBBBB", label="skipped key"),
    ]
    style.legend_below(ax, handles, columns=2)


def draw_gather(ax: Axes, tiles: Tiles, tile: int, *, steps: int = 2) -> None:
    """Draw from where in the sequence the columns of a tile's first steps are loaded.

    On top are the keys from 0 on, below the columns of the steps, and a line from each key to its
    column. The strip under the columns says whether a key is loaded in a block of neighbours or as
    a single row. :func:`draw_columns` has the same colours and the rest of the steps.

    Args:
        ax: where to draw.
        tiles: the tiles of key slices.
        tile: which of them.
        steps: how many steps.

    Raises:
        ValueError: there is no such tile, or it has not so many steps.

    >>> from matplotlib.figure import Figure
    >>> from tessera_cupy.mapping.gather import map_slices
    >>> tiles = map_slices(KeySlices.from_groups([[1, 0, 1, 1]], 64), "retain", 64, 64)
    >>> draw_gather(Figure().subplots(), tiles, 0, steps=1)
    """
    arguments.check_axes(ax)
    from matplotlib.collections import LineCollection

    columns = columns_of(tiles, tile)
    most = int(tiles.steps[tile])
    if not 1 <= steps <= most:
        got, fix = steps, "draw fewer steps, or another tile"
        raise ValueError(wrong("steps", f"from 1 to {most}, which tile {tile} has", got, fix))
    count = steps * tiles.shape.kv
    key, kind, gathered = (part[:count] for part in columns)
    loaded = kind != _EMPTY
    reach = int(key[loaded].max(initial=0)) + 1
    place = (np.arange(count) + 0.5) * reach / count
    on_top = np.zeros(reach, np.int64)
    inside = (columns.kind > 0) & (columns.key < reach)
    on_top[columns.key[inside]] = columns.kind[inside]
    _strip(ax, on_top, (0, reach, 1.0, 1.1), _COLOURS)
    _strip(ax, kind + 1, (0, reach, -0.1, 0.0), (style.PAPER, *_COLOURS))
    how = np.where(loaded, 1 + gathered, 0)
    _strip(ax, how, (0, reach, -0.18, -0.12), (style.PAPER, _AS_BLOCK, _LISTED))
    lines: Any = np.zeros((int(loaded.sum()), 2, 2))
    lines[:, 0, 0], lines[:, 0, 1] = key[loaded] + 0.5, 1.0
    lines[:, 1, 0] = place[loaded]
    colours = np.array(_COLOURS)[kind[loaded]].tolist()
    ax.add_collection(LineCollection(lines, colors=colours, linewidths=0.6))
    ax.vlines(
        np.arange(steps + 1) * reach / steps, -0.18, 0.0, colors=style.INK, linewidth=1.5, zorder=3
    )
    ax.set_xlim(0, reach)
    ax.set_ylim(-0.2, 1.12)
    ax.set_xticks((np.arange(steps) + 0.5) * reach / steps, [f"step {i}" for i in range(steps)])
    ax.set_yticks([1.05, -0.05, -0.15], ["keys", "columns", "loaded"])
    top = ax.secondary_xaxis("top")
    top.set_xlabel("key (tokens)")
    ax.set_title(f"tile {tile}: where the columns of {steps} of its {most} steps come from")
    ax.title.set_fontsize(10)
    handles, labels = _legend_entries(gathers=True)
    style.legend_below(ax, handles, columns=4, labels=labels)


def draw_columns(ax: Axes, tiles: Tiles, tile: int) -> None:
    """Draw what all steps of a tile hold, a line a step, a column a key.

    Args:
        ax: where to draw.
        tiles: the tiles of key slices.
        tile: which of them.

    Raises:
        ValueError: there is no such tile.

    >>> from matplotlib.figure import Figure
    >>> from tessera_cupy.mapping.gather import map_slices
    >>> tiles = map_slices(KeySlices.from_groups([[1, 0, 1, 1]], 64), "retain", 64, 64)
    >>> ax = Figure().subplots()
    >>> draw_columns(ax, tiles, 0)
    >>> print(ax.get_title())
    tile 0: 1 steps of 64 columns, 3 of 64 hold a kept key
    """
    arguments.check_axes(ax)
    columns = columns_of(tiles, tile)
    steps, wide = int(tiles.steps[tile]), tiles.shape.kv
    values = columns.kind.reshape(steps, wide) + 1
    extent = (0, wide, steps, 0)
    _strip(ax, values, extent, (style.PAPER, *_COLOURS))
    ax.set_xlim(0, wide)
    ax.set_ylim(max(1, steps), 0)
    style.number_lines(ax, steps)
    ax.set_xlabel("column of the step (keys)")
    ax.set_ylabel("step")
    kept = int((columns.kind > 0).sum())
    ax.set_title(
        f"tile {tile}: {steps} steps of {wide} columns, {kept:,} of {steps * wide:,} hold a kept "
        "key",
        fontsize=10,
    )
    handles, labels = _legend_entries(gathers=False)
    style.legend_below(ax, handles, columns=3, labels=labels)


def _strip(
    ax: Axes,
    values: NDArray[np.int64],
    extent: tuple[float, float, float, float],
    colours: tuple[str, ...],
) -> None:
    """Boxes of the colours that 0, 1, ... are."""
    from matplotlib.colors import ListedColormap

    if values.size:
        ax.imshow(
            np.atleast_2d(values),
            ListedColormap(colours),
            vmin=0,
            vmax=len(colours) - 1,
            extent=extent,
            aspect="auto",
            interpolation="nearest",
        )


def _legend_entries(*, gathers: bool) -> tuple[list[Any], list[str]]:
    from matplotlib.patches import Patch

    named = dict(zip(_KINDS, _COLOURS, strict=True)) | {"empty column": style.PAPER}
    if gathers:
        named |= {"loaded in a block": _AS_BLOCK, "loaded as a single row": _LISTED}
    handles = [Patch(facecolor=colour, edgecolor=style.INK) for colour in named.values()]
    return handles, list(named)
