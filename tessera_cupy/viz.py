"""Pictures of masks and of the physical tiles that they become, drawn with matplotlib.

Everything is drawn at block resolution from the plain arrays, with no GPU. Colours are the
Okabe-Ito set, told apart by colour-blind readers, and each step also carries its number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.errors import wrong
from tessera_cupy.mapping import Mapping, map_mask, useful_fraction, why_not
from tessera_cupy.mapping.kv_side import largest_kv_block
from tessera_cupy.mapping.planner import MAX_TILE_Q
from tessera_cupy.mapping.q_side import largest_q_block
from tessera_cupy.mapping.stats import computed_parts
from tessera_cupy.mapping.tiles import GROUP_ROWS, UNIT_ROWS, Tiles
from tessera_cupy.masks import BlockMask, KeySlices
from tessera_cupy.masks.key_slices import block_mask

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

    from tessera_cupy.regimes import PlanSpec

#: Steps of a tile take these in turn: sky blue, orange, green, purple.
STEP_COLOURS = ("#56B4E9", "#E69F00", "#4DB892", "#CC79A7")

_KEPT, _PARTIAL, _SKIPPED = "#0072B2", "#E69F00", "#F2F2F2"
_INK = "#222222"
_WASTE: dict[str, Any] = {
    "facecolor": "#FFFFFF",
    "edgecolor": "#8A8A8A",
    "hatch": "//////",
    "linewidth": 0.0,
}
_WINDOW_BLOCKS = (8, 24)
_WAYS_ACROSS = 3
_CHOSEN = "#FFF1CC"
_SMALLEST_LABEL = 4.5
_MOST_ROW_LABELS = 24
_MOST_COLUMNS = 1200
# Shorter runs of keys, such as single ones, have no edges, which would hide them.
_LEAST_EDGED = 8


@dataclass(frozen=True)
class Window:
    """A part of a mask: query tokens ``[q0, q1)`` and key tokens ``[kv0, kv1)``."""

    q0: int
    q1: int
    kv0: int
    kv1: int


@dataclass(frozen=True)
class TiledMask:
    """A mask under one mapping.

    Attributes:
        mapping: the mapping.
        gloss: what a step holds, in a few words.
        tiles: the physical tiles.
        useful: fraction of the tiles' work that is on active entries, over all heads, as
            :func:`~tessera_cupy.mapping.useful_fraction` counts it.
        chosen: whether it is what the given plan does.
    """

    mapping: Mapping
    gloss: str
    tiles: Tiles
    useful: float
    chosen: bool

    @property
    def skips(self) -> bool:
        """Whether each half of a tile is taken to skip the steps that it has no part in."""
        return _skips(self.mapping)


def tile_each_way(mask: BlockMask | KeySlices, plan: PlanSpec | None = None) -> list[TiledMask]:
    """Tile a mask under each kind of mapping that it allows.

    For blocks of (bq, bkv), the largest ones where they are ragged, the physical tiles are:
    the block itself (retain); tiles twice as wide, left half empty (retain), filled with a
    neighbour (merge) or with the next active block (pack); tiles twice as high and wide
    (merge, share or regroup, pack); and a quarter of the block (split). Of key slices, whose
    blocks are a group by 16 keys with token bits, also tiles that are filled with the next wanted
    keys (gather).

    Args:
        mask: the mask, or key slices.
        plan: a plan for the mask, to mark its way; added last where it is none of these.

    >>> mask = BlockMask.from_dense(np.eye(4, dtype=bool), (64, 64))
    >>> [(way.mapping.name, way.useful) for way in tile_each_way(mask)][:3]
    [('retain-retain', 1.0), ('retain-retain', 0.5), ('retain-merge', 0.5)]
    """
    mask = block_mask(mask)
    largest = (largest_q_block(mask), largest_kv_block(mask))
    bq, bkv = (-(-size // GROUP_ROWS) * GROUP_ROWS for size in largest)
    wanted = [
        ("retain-retain", bq, bkv, "a step is a block"),
        ("retain-retain", bq, 2 * bkv, "a block in each step, the rest empty"),
        ("retain-merge", bq, 2 * bkv, "a step is two neighbours, wanted or not"),
        ("retain-pack", bq, 2 * bkv, "a step is the next two wanted blocks"),
        ("retain-gather", bq, 2 * bkv, "a step is the next wanted keys"),
        ("merge-pack", 2 * bq, 2 * bkv, "two rows of blocks have one list of steps"),
        ("share-pack", 2 * bq, 2 * bkv, "a half skips the other's steps"),
        (
            "regroup-pack",
            2 * bq,
            2 * bkv,
            "share, of alike rows from anywhere; first token at left",
        ),
        ("split-split", bq // 2, bkv // 2, "a block takes four small steps"),
    ]
    own = plan and (plan.mapping.name, plan.tile_q, plan.tile_kv)
    if own and own not in [way[:3] for way in wanted]:
        wanted.append((*own, "the tiles of the plan's kernel"))
    made = []
    for name, q, kv, gloss in wanted:
        mapping = Mapping.parse(name)
        if q % GROUP_ROWS or kv % GROUP_ROWS or q > MAX_TILE_Q:
            continue
        if why_not(mapping, mask, q, kv) is not None:
            continue
        tiles = map_mask(mask, mapping, q, kv)
        useful = useful_fraction(tiles, mask, q // 2 if _skips(mapping) else None)
        made.append(TiledMask(mapping, gloss, tiles, useful, (name, q, kv) == own))
    return made


def draw_mask(
    ax: Axes,
    mask: BlockMask | KeySlices,
    *,
    batch: int = 0,
    head: int = 0,
    window: Window | None = None,
) -> None:
    """Draw one head's mask, in tokens, with a legend: blocks, or of key slices single keys.

    Args:
        ax: where to draw.
        mask: the mask, or key slices.
        batch: entry of the mask's batch axis.
        head: entry of the mask's head axis.
        window: a part to frame.

    Raises:
        ValueError: ``batch`` or ``head`` is not in the mask.
    """
    from matplotlib.patches import Rectangle

    mask = block_mask(mask)
    row = _mask_head(mask, batch, head)
    drawn = _draw_blocks if mask.slices is None else _draw_keys
    handles = drawn(ax, mask, batch, head, row)
    ax.set_xlim(0, mask.shape[1])
    ax.set_ylim(mask.shape[0], 0)
    ax.set_aspect("equal")
    ax.set_xlabel("key tokens")
    ax.set_ylabel("query tokens")
    if window is not None:
        frame = Rectangle(
            (window.kv0, window.q0),
            window.kv1 - window.kv0,
            window.q1 - window.q0,
            fill=False,
            edgecolor="#D55E00",
            linewidth=2.0,
            label="part drawn as tiles",
        )
        ax.add_patch(frame)
        handles.append(frame)
    ax.legend(
        handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False
    )


def _draw_blocks(ax: Axes, mask: BlockMask, batch: int, head: int, row: int) -> list[Any]:
    """Draw a head's blocks; returns what the legend says of them."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    kind = _block_kinds(mask, row)
    ax.pcolormesh(
        _starts(mask.kv_starts(), batch, head),
        _starts(mask.q_starts(), batch, head),
        kind,
        cmap=ListedColormap([_SKIPPED, _KEPT, _PARTIAL]),
        vmin=0,
        vmax=2,
        rasterized=True,
    )
    handles = [
        Patch(facecolor=_KEPT, label="kept block"),
        Patch(facecolor=_SKIPPED, edgecolor="#BBBBBB", label="skipped block"),
    ]
    if (kind == 2).any():
        handles.insert(1, Patch(facecolor=_PARTIAL, label="partly kept block"))
    return handles


def _draw_keys(ax: Axes, mask: BlockMask, batch: int, head: int, row: int) -> list[Any]:
    """The same of the keys of slices, some neighbours together where there are very many."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Patch

    assert mask.slices is not None
    together = max(1, -(-mask.shape[1] // _MOST_COLUMNS))
    share = _kept_shares(mask.slices, row, together)
    high, wide = (
        n * size for n, size in zip(share.shape, (mask.slices.group, together), strict=True)
    )
    ax.imshow(
        share,
        cmap=LinearSegmentedColormap.from_list("kept", [_SKIPPED, _KEPT]),
        vmin=0,
        vmax=1,
        extent=(0, wide, high, 0),
    )
    kept = "kept key" if together == 1 else "kept keys (shade: share)"
    return [
        Patch(facecolor=_KEPT, label=kept),
        Patch(facecolor=_SKIPPED, edgecolor="#BBBBBB", label="skipped key"),
    ]


def draw_tiles(
    ax: Axes,
    tiles: Tiles,
    *,
    head: int = 0,
    window: Window | None = None,
    skips: bool = False,
) -> None:
    """Draw where the fragments of each tile's steps lie in the mask.

    Colour and number give the step of its tile that computes a fragment. Rows of a fragment
    that are computed for nothing are hatched. Lines are the edges of the tiles, or of each run
    of neighbouring rows where a tile's rows come from several places.

    Args:
        ax: where to draw.
        tiles: the tiles of a mapping or a plan.
        head: mask head, as ``tiles.tile_head`` counts them.
        window: the part to draw; everything when None.
        skips: whether each half of a tile skips the steps that it has no part in, as under
            share and regroup; what is skipped is not drawn.

    Raises:
        ValueError: ``head`` is not in the tiles.
    """
    window = window or _everything(tiles, head)
    work, waste = _Boxes(), _Boxes()
    chosen = _tiles_in(tiles, head, window)
    runs = [run for tile in chosen for run in _runs(tiles, tile, window)]
    for run in runs:
        for piece in _pieces(tiles, run.tile, _halves(tiles, run.tile, skips)):
            if not piece.touches(window):
                continue
            for top, bottom, member in run.of(piece.bands):
                target = work if member else waste
                target.add(piece.kv0, top, piece.length, bottom - top, piece.step)
    waste.hatch(ax)
    work.fill(ax)
    work.number(ax, window.kv1 - window.kv0, window.q1 - window.q0)
    for run in runs:
        for edge in (run.q0, run.q0 + run.rows):
            ax.axhline(edge, color=_INK, linewidth=0.7)
    ax.set_xlim(window.kv0, window.kv1)
    ax.set_ylim(window.q1, window.q0)


def draw_steps(
    ax: Axes,
    tiles: Tiles,
    *,
    head: int = 0,
    window: Window | None = None,
    skips: bool = False,
) -> None:
    """Draw the physical tiles: a line for each tile, its steps side by side.

    A box is one step of ``tiles.shape.q`` by ``tiles.shape.kv``. Its coloured part is active
    entries; the hatched rest is work on inactive ones: rows that do not attend to a fragment,
    columns and rows that hold nothing.

    Args:
        ax: where to draw.
        tiles: the tiles of a mapping or a plan.
        head: mask head, as ``tiles.tile_head`` counts them.
        window: draw the steps that load keys of this part of the mask; all when None.
        skips: as in :func:`draw_tiles`; what is skipped stays white.

    Raises:
        ValueError: ``head`` is not in the tiles.
    """
    window = window or _everything(tiles, head)
    shape = tiles.shape
    steps, issued, work = _Boxes(), _Boxes(), _Boxes()
    chosen = _tiles_in(tiles, head, window)
    for line, tile in enumerate(chosen):
        halves = _halves(tiles, tile, skips)
        pieces = list(_pieces(tiles, tile, halves))
        drawn = sorted({p.step for p in pieces if p.touches(window)})
        places = {step: place * shape.kv for place, step in enumerate(drawn)}
        above = line * shape.q
        for step, left in places.items():
            steps.add(left, above, shape.kv, shape.q, step)
            if halves[step].all():
                issued.add(left, above, shape.kv, shape.q, step)
            for half in np.flatnonzero(halves[step] & ~halves[step][::-1]):
                issued.add(left, above + half * shape.q / 2, shape.kv, shape.q / 2, step)
        for piece in pieces:
            if piece.step in places:
                left = places[piece.step] + piece.column
                for top, bottom, member in piece.bands:
                    if member:
                        work.add(left, above + top, piece.length, bottom - top, piece.step)
    high = max(len(chosen), 1) * shape.q
    wide = max(window.kv1 - window.kv0, steps.right)
    issued.hatch(ax)
    work.fill(ax)
    steps.outline(ax)
    work.number(ax, wide, high)
    ax.set_xlim(0, wide)
    ax.set_ylim(high, 0)


def mask_to_tiles(
    mask: BlockMask | KeySlices,
    *,
    batch: int = 0,
    head: int = 0,
    window: Window | None = None,
    plan: PlanSpec | None = None,
    title: str = "From a mask to physical tiles",
) -> Figure:
    """One page: a head's mask, and the same mask as physical tiles under each mapping.

    Args:
        mask: the mask, or key slices.
        batch: entry of the mask's batch axis.
        head: entry of the mask's head axis.
        window: the part that is drawn as tiles; some blocks on the diagonal when None.
        plan: a plan for the mask, whose way is marked.
        title: the page's title.

    Returns:
        A figure that is not tied to any display; ``figure.savefig(path)`` writes it. The
        useful fractions in it are of the whole mask, all heads.

    Raises:
        ValueError: ``batch`` or ``head`` is not in the mask, or no mapping can be drawn.
    """
    from matplotlib.figure import Figure

    mask = block_mask(mask)
    row = _mask_head(mask, batch, head)
    window = window or diagonal_window(mask)
    ways = tile_each_way(mask, plan)
    if not ways:
        raise ValueError(
            wrong("mask", "blocks that tiles can hold", mask.block_size, "use blocks up to 128")
        )
    lines = -(-len(ways) // _WAYS_ACROSS)
    figure = Figure(figsize=(20, 1.4 + 4.6 * lines), layout="constrained")
    figure.suptitle(title, fontsize=16, fontweight="bold")
    halves: Any = figure.subfigures(1, 2, width_ratios=(1, 3), wspace=0.02)
    left, right = halves
    whole, key = left.subplots(2, 1, height_ratios=(3.2, 1))
    draw_mask(whole, mask, batch=batch, head=head, window=window)
    whole.set_title(
        f"the mask: head {head}, {mask.shape[0]:,} tokens,\n{_blocks(mask)}",
        fontsize=11,
    )
    cells: Any = right.subfigures(lines, _WAYS_ACROSS, squeeze=False)
    for i, way in enumerate(ways):
        _draw_way(cells[divmod(i, _WAYS_ACROSS)], way, row, window)
    _legend(key, skips=any(way.skips for way in ways), partial=mask.has_token_bits)
    return figure


def _blocks(mask: BlockMask) -> str:
    """What a mask is made of, for a title."""
    density = f"density {mask.density():.3f}"
    if mask.slices is not None:
        return f"slices of {mask.slices.group} queries by single keys, {density}"
    size = f"{mask.block_size[0]}x{mask.block_size[1]}"
    return f"blocks of {size}, {density}, run coverage {mask.run_coverage():.2f}"


def diagonal_window(
    mask: BlockMask | KeySlices, blocks: tuple[int, int] = _WINDOW_BLOCKS
) -> Window:
    """A window of (query, key) blocks of nominal size in the middle of the diagonal.

    It starts at an even block, so that merged pairs of blocks lie whole in it.
    """
    mask = block_mask(mask)
    edges = []
    for total, size, count in zip(mask.shape, mask.block_size, blocks, strict=True):
        last = max(0, -(-total // size) - count)
        first = min(max(0, total // size // 2 - count // 2) // 2 * 2, last)
        edges += [first * size, min(total, (first + count) * size)]
    return Window(*edges)


def _draw_way(cell: SubFigure, way: TiledMask, row: int, window: Window) -> None:
    shape = way.tiles.shape
    in_mask, as_steps = cell.subplots(2, 1)
    draw_tiles(in_mask, way.tiles, head=row, window=window, skips=way.skips)
    draw_steps(as_steps, way.tiles, head=row, window=window, skips=way.skips)
    if way.chosen:
        cell.set_facecolor(_CHOSEN)
    in_mask.set_title(
        f"{way.mapping.q} Q, {way.mapping.kv} KV \N{EN DASH} "
        f"tiles of {shape.q}x{shape.kv}\n"
        f"useful {way.useful:.2f}, {int(way.tiles.steps.sum()):,} steps"
        + ("; the plan's choice" if way.chosen else ""),
        fontsize=11,
        fontweight="bold",
        pad=20,
    )
    in_mask.text(
        0.5, 1.03, way.gloss, transform=in_mask.transAxes, ha="center", fontsize=10, style="italic"
    )
    in_mask.set_ylabel("in the mask", fontsize=9)
    as_steps.set_ylabel("as steps", fontsize=9)
    for ax in (in_mask, as_steps):
        ax.set_xticks([])
        ax.set_yticks([])
    if way.tiles.tile_units is not None:
        _label_rows(in_mask, as_steps, way.tiles, row, window)


def _label_rows(in_mask: Axes, as_steps: Axes, tiles: Tiles, row: int, window: Window) -> None:
    """Say beside the tiles, where there is room, at which query token each run of rows begins."""
    chosen = _tiles_in(tiles, row, window)
    here = [run for tile in chosen for run in _runs(tiles, tile, window)]
    whole = [(line, run) for line, tile in enumerate(chosen) for run in _runs(tiles, tile)]
    if len(whole) > _MOST_ROW_LABELS:
        return
    in_mask.set_yticks([run.q0 + run.rows / 2 for run in here])
    as_steps.set_yticks([line * tiles.shape.q + run.top + run.rows / 2 for line, run in whole])
    in_mask.set_yticklabels([str(run.q0) for run in here], fontsize=6)
    as_steps.set_yticklabels([str(run.q0) for _, run in whole], fontsize=6)


def _legend(ax: Axes, *, skips: bool, partial: bool) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    steps = tuple(Patch(facecolor=colour, edgecolor=_INK) for colour in STEP_COLOURS)
    active = "active entries; colour and number tell\nwhich step of its tile computes them"
    if partial:
        active += "\n(of a partly kept block all entries)"
    entries: dict[str, Any] = {
        active: steps,
        "work on inactive entries": Patch(**_WASTE),
    }
    if skips:
        entries["half of a step that is skipped"] = Patch(facecolor="#FFFFFF", edgecolor=_INK)
    ax.axis("off")
    ax.legend(
        list(entries.values()),
        list(entries),
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        handlelength=5,
        handleheight=1.6,
        labelspacing=1,
        loc="upper center",
        frameon=False,
        fontsize=11,
    )


class _Run(NamedTuple):
    """Neighbouring query rows of a tile: rows of the tile from ``top``, of the head from ``q0``."""

    tile: int
    top: int
    q0: int
    rows: int

    def of(self, bands: list[tuple[int, int, bool]]) -> Iterator[tuple[int, int, bool]]:
        """What of a piece's bands is in these rows, in rows of the head."""
        drop = self.q0 - self.top
        for top, bottom, member in bands:
            first, last = max(top, self.top), min(bottom, self.top + self.rows)
            if first < last:
                yield first + drop, last + drop, member


class _Piece(NamedTuple):
    """A run of a fragment's keys in its tile: bands are rows of it, the column is in its step."""

    step: int
    column: int
    kv0: int
    length: int
    bands: list[tuple[int, int, bool]]

    def touches(self, window: Window) -> bool:
        """Whether it loads keys of the window; what only pads a step does not."""
        return self.length > 0 and self.kv0 < window.kv1 and self.kv0 + self.length > window.kv0


def _skips(mapping: Mapping) -> bool:
    return mapping.q in ("share", "regroup")


def _halves(tiles: Tiles, tile: int, skips: bool) -> NDArray[np.bool_]:
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


def _pieces(tiles: Tiles, tile: int, halves: NDArray[np.bool_]) -> Iterator[_Piece]:
    """The fragments of a tile; rows of a half that does not compute a step are left out."""
    first, last = tiles.frag_offsets[tile : tile + 2]
    row = np.arange(tiles.shape.q).reshape(-1, GROUP_ROWS)
    of_group = tiles.exists(tile, row).sum(axis=1).tolist()
    for place, at in enumerate(range(first, last)):
        step, slot = divmod(place, tiles.shape.fragments)
        members = int(tiles.frag_members[at])
        bands: list[tuple[int, int, bool]] = []
        for group, rows in enumerate(of_group):
            member = bool(members >> group & 1)
            top = group * GROUP_ROWS
            bottom = top + rows
            if not rows or not halves[step, 2 * group // tiles.shape.groups]:
                continue
            if bands and bands[-1][1:] == (top, member):
                bands[-1] = (bands[-1][0], bottom, member)
            else:
                bands.append((top, bottom, member))
        for column, kv0, length in _key_runs(tiles, at):
            yield _Piece(step, slot * tiles.shape.slot + column, kv0, length, bands)


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


class _Boxes:
    """Rectangles, each of one step, drawn in one go."""

    def __init__(self) -> None:
        self.corners: list[tuple[float, float, float, float]] = []
        self.steps: list[int] = []

    def add(self, x: float, y: float, wide: float, high: float, step: int) -> None:
        self.corners.append((x, y, x + wide, y + high))
        self.steps.append(step)

    @property
    def right(self) -> float:
        return max((x1 for _, _, x1, _ in self.corners), default=0)

    def fill(self, ax: Axes) -> None:
        colours = [STEP_COLOURS[step % len(STEP_COLOURS)] for step in self.steps]
        edges = [
            colour if x1 - x0 < _LEAST_EDGED else "#FFFFFF"
            for colour, (x0, _, x1, _) in zip(colours, self.corners, strict=True)
        ]
        self._draw(ax, facecolor=colours, edgecolor=edges, linewidth=0.4)

    def hatch(self, ax: Axes) -> None:
        self._draw(ax, **_WASTE)

    def outline(self, ax: Axes) -> None:
        self._draw(ax, facecolor="none", edgecolor=_INK, linewidth=0.8)

    def number(self, ax: Axes, wide: float, high: float) -> None:
        """Write each box's step in it, where the boxes are large enough to read it."""
        if not self.corners:
            return
        x0, y0, x1, y1 = np.array(self.corners).T
        page, place = ax.figure, ax.get_position()
        points = 72 / page.dpi
        per_x = points * place.width * page.bbox.width / wide
        per_y = points * place.height * page.bbox.height / high
        digits = len(str(max(self.steps)))
        fits_x = float(np.median(x1 - x0)) * per_x / digits
        fits_y = float(np.median(y1 - y0)) * per_y * 0.75
        size = min(9.0, fits_x, fits_y)
        if size < _SMALLEST_LABEL:
            return
        for x, y, step in zip((x0 + x1) / 2, (y0 + y1) / 2, self.steps, strict=True):
            label = ax.text(x, y, str(step), ha="center", va="center", fontsize=size, clip_on=True)
            # The layout engine would measure every label, and they are all inside the axes.
            label.set_in_layout(False)

    def _draw(self, ax: Axes, **style: Any) -> None:
        from matplotlib.collections import PolyCollection

        if self.corners:
            verts = [((a, b), (c, b), (c, d), (a, d)) for a, b, c, d in self.corners]
            ax.add_collection(PolyCollection(verts, **style))


def _units(tiles: Tiles) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """(tiles, units) each: the query rows ``[first, last)`` of each 16 rows of a tile."""
    tile = np.arange(len(tiles))[:, None]
    top = np.arange(0, tiles.shape.q, UNIT_ROWS, dtype=np.int32)
    first = tiles.query_rows(tile, top)
    exist = tiles.exists(tile[:, :, None], top[:, None] + np.arange(UNIT_ROWS))
    return first, first + exist.sum(axis=2, dtype=np.int32)


def _runs(tiles: Tiles, tile: int, window: Window | None = None) -> Iterator[_Run]:
    """The runs of neighbouring query rows of a tile, those in the window only if there is one."""
    rows = tiles.tile_rows(tile)
    first = tiles.query_rows(tile, rows)
    cuts = np.flatnonzero((np.diff(first) != 1) | (np.diff(rows) != 1)) + 1
    for begin, end in pairwise([0, *cuts.tolist(), len(rows)]):
        q0 = int(first[begin])
        if window is None or (q0 < window.q1 and q0 + end - begin > window.q0):
            yield _Run(tile, int(rows[begin]), q0, end - begin)


def _tiles_in(tiles: Tiles, head: int, window: Window) -> NDArray[np.intp]:
    first, last = _units(tiles)
    inside = ((first < window.q1) & (last > window.q0) & (last > first)).any(axis=1)
    return np.flatnonzero(inside & (tiles.tile_head == head))


def _everything(tiles: Tiles, head: int) -> Window:
    mine = tiles.tile_head == head
    if not mine.any():
        raise ValueError(
            wrong("head", f"a mask head from 0 to {tiles.heads - 1}", head, "pick one of them")
        )
    q1 = int(_units(tiles)[1][mine].max())
    return Window(0, q1, 0, max(1, tiles.keys_end()))


def _mask_head(mask: BlockMask, batch: int, head: int) -> int:
    for name, value, count in (("batch", batch, mask.batch), ("head", head, mask.heads)):
        if not 0 <= value < count:
            raise ValueError(wrong(name, f"from 0 to {count - 1}", value, "pick one of the mask's"))
    return batch * mask.heads + head


def _block_kinds(mask: BlockMask, row: int) -> NDArray[np.uint8]:
    """0 skipped, 1 kept, 2 partly kept, for each block of one head."""
    nq, nkv = mask.num_blocks
    kind = np.zeros((nq, nkv), dtype=np.uint8)
    offsets = mask.indptr[row * nq : (row + 1) * nq + 1]
    mine = slice(offsets[0], offsets[-1])
    rows = np.repeat(np.arange(nq), np.diff(offsets))
    kind[rows, mask.indices[mine]] = np.where(mask.partial[mine] < 0, 1, 2)
    return kind


def _kept_shares(slices: KeySlices, row: int, together: int) -> NDArray[np.float32]:
    """(groups, places) float32: the kept share of the neighbouring keys of each place."""
    ends = slices.indptr[row * slices.groups : (row + 1) * slices.groups + 1]
    places = -(-slices.shape[1] // together)
    of_group = np.repeat(np.arange(slices.groups), np.diff(ends))
    keys = slices.indices[ends[0] : ends[-1]]
    counts = np.bincount(of_group * places + keys // together, minlength=slices.groups * places)
    sizes = np.minimum(slices.shape[1] - together * np.arange(places), together)
    share: NDArray[np.float32] = (counts.reshape(-1, places) / sizes).astype(np.float32)
    return share


def _starts(starts: NDArray[np.int64], batch: int, head: int) -> NDArray[np.int64]:
    """Block edges of one head, of arrays whose axes of 1 broadcast."""
    edges: NDArray[np.int64] = starts[batch % len(starts), head % starts.shape[1]]
    return edges
