"""Physical tiles: where their fragments lie in the mask, and side by side as steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tessera_cupy.errors import wrong
from tessera_cupy.mapping.tiles import Tiles
from tessera_cupy.viz import arguments, overview, style
from tessera_cupy.viz.boxes import Boxes
from tessera_cupy.viz.pieces import Piece, computing_halves, everything, pieces, runs_of, tiles_in
from tessera_cupy.viz.window import Window

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_tiles(
    ax: Axes,
    tiles: Tiles,
    *,
    head: int = 0,
    window: Window | None = None,
    skips: bool = False,
) -> None:
    """Draw where the fragments of each tile's steps lie in the mask.

    Colour and number give the step of its tile that computes a fragment. Rows and single tokens
    of a fragment that are computed for nothing are hatched. Lines are the edges of the tiles, or
    of each run of neighbouring rows where a tile's rows come from several places.
    :func:`draw_tile_key` is the legend. Without a window a head of more than 10,000 fragments is an
    image: how much of each spot is active, and how much of it in vain.

    Args:
        ax: where to draw.
        tiles: the tiles of a mapping or a plan.
        head: mask head, as ``tiles.tile_head`` counts them.
        window: the part to draw; everything when None.
        skips: whether each half of a tile skips the steps that it has no part in, as under
            share and regroup; what is skipped is not drawn.

    Raises:
        TypeError: an argument of another kind, ``ax`` that is no axes among them.
        ValueError: ``head`` is not in the tiles, or no query of them in ``window``.

    >>> from matplotlib.figure import Figure
    >>> from tessera_cupy.mapping import Mapping, map_mask
    >>> from tessera_cupy.masks import BlockMask
    >>> ax = Figure().subplots()
    >>> mask = BlockMask.from_dense([[1, 0], [1, 1]], (64, 64))
    >>> draw_tiles(ax, map_mask(mask, Mapping("retain", "pack"), 64, 128))
    """
    arguments.check_axes(ax)
    arguments.check_kind("tiles", tiles, (Tiles,), "pass plan.tiles(), or what map_mask returns")
    all_of_it = everything(tiles, head)
    ax.set_xlabel("key (tokens)")
    ax.set_ylabel("query (tokens)")
    ax.set_title("each fragment where it lies in the mask", fontsize=10)
    if window is None and overview.fragment_count(tiles, head) > overview.MOST_FRAGMENTS:
        overview.draw_all_tiles(ax, tiles, head, all_of_it.q1, all_of_it.kv1, skips)
        return
    window = window or all_of_it
    work, waste = Boxes(), Boxes()
    edges: set[int] = set()
    for tile in tiles_in(tiles, head, window):
        runs = list(runs_of(tiles, tile, window))
        edges.update(edge for run in runs for edge in (run.q0, run.q0 + run.rows))
        for piece in pieces(tiles, tile, computing_halves(tiles, tile, skips)):
            if piece.touches(window):
                for run in runs:
                    for top, bottom, member in run.of(piece.bands):
                        target = work if member else waste
                        target.add(piece.kv0, top, piece.length, bottom - top, piece.step)
    waste.hatch(ax)
    work.fill(ax)
    work.number(ax, window.kv1 - window.kv0, window.q1 - window.q0)
    for edge in sorted(edges):
        ax.axhline(edge, color=style.INK, linewidth=0.7)
    ax.set_xlim(window.kv0, window.kv1)
    ax.set_ylim(window.q1, window.q0)


def draw_steps(
    ax: Axes,
    tiles: Tiles,
    *,
    head: int = 0,
    window: Window | None = None,
    skips: bool = False,
    key_block: int | None = None,
) -> None:
    """Draw the physical tiles: a line for each tile, its steps side by side.

    A box is one step of ``tiles.shape.q`` by ``tiles.shape.kv``. Its coloured part is active
    entries; the hatched rest is work on inactive ones: rows and tokens that do not attend to a
    fragment, columns and rows that hold nothing. A large head without a window is an image, as in
    :func:`draw_tiles`.

    Args:
        ax: where to draw.
        tiles: the tiles of a mapping or a plan.
        head: mask head, as ``tiles.tile_head`` counts them.
        window: draw the steps that load keys of this part of the mask; all when None.
        skips: as in :func:`draw_tiles`; what is skipped stays white.
        key_block: keys of a block: active parts have the number of their key block written in
            them, as ``3``, or ``3-4`` over several, in place of their step's.

    Raises:
        TypeError: an argument of another kind, ``ax`` that is no axes among them.
        ValueError: ``head`` is not in the tiles, or no query of them in ``window``, or
            ``key_block`` below 1.

    >>> from matplotlib.figure import Figure
    >>> from tessera_cupy.mapping import Mapping, map_mask
    >>> from tessera_cupy.masks import BlockMask
    >>> ax = Figure().subplots()
    >>> mask = BlockMask.from_dense([[1, 0], [1, 1]], (64, 64))
    >>> draw_steps(ax, map_mask(mask, Mapping("retain", "pack"), 64, 128))
    """
    if key_block is not None and key_block < 1:
        raise ValueError(wrong("key_block", "at least 1 key", key_block, "pass mask.block_size[1]"))
    arguments.check_axes(ax)
    arguments.check_kind("tiles", tiles, (Tiles,), "pass plan.tiles(), or what map_mask returns")
    all_of_it = everything(tiles, head)
    shape = tiles.shape
    ax.set_xlabel(f"columns of the steps, {shape.kv} each (keys)")
    ax.set_ylabel(f"tiles, {shape.q} rows each (queries)")
    ax.set_title(f"tiles of {shape.q} x {shape.kv}, a line each, step after step", fontsize=10)
    if window is None and overview.fragment_count(tiles, head) > overview.MOST_FRAGMENTS:
        overview.draw_all_steps(ax, tiles, head, skips)
        return
    window = window or all_of_it
    steps, issued, work = Boxes(), Boxes(), Boxes()
    labels: list[str] = []
    chosen = tiles_in(tiles, head, window)
    for line, tile in enumerate(chosen):
        halves = computing_halves(tiles, tile, skips)
        all_pieces = list(pieces(tiles, tile, halves))
        drawn = sorted({piece.step for piece in all_pieces if piece.touches(window)})
        places = {step: place * shape.kv for place, step in enumerate(drawn)}
        above = line * shape.q
        for step, left in places.items():
            steps.add(left, above, shape.kv, shape.q, step)
            if halves[step].all():
                issued.add(left, above, shape.kv, shape.q, step)
            for half in np.flatnonzero(halves[step] & ~halves[step][::-1]):
                issued.add(left, above + half * shape.q / 2, shape.kv, shape.q / 2, step)
        for piece in all_pieces:
            if piece.step in places:
                left = places[piece.step] + piece.column
                for top, bottom, member in piece.bands:
                    if member:
                        work.add(left, above + top, piece.length, bottom - top, piece.step)
                        labels.append(_label(piece, key_block))
    high = max(len(chosen), 1) * shape.q
    wide = max(window.kv1 - window.kv0, steps.right)
    issued.hatch(ax)
    work.fill(ax)
    steps.outline(ax)
    work.number(ax, wide, high, labels)
    ax.set_xlim(0, wide)
    ax.set_ylim(high, 0)


def _label(piece: Piece, key_block: int | None) -> str:
    """A piece's step, or the key blocks that it is in."""
    if key_block is None:
        return str(piece.step)
    first, last = piece.kv0 // key_block, (piece.kv0 + piece.length - 1) // key_block
    return str(first) if first == last else f"{first}-{last}"


def draw_tile_key(ax: Axes, *, skips: bool = False) -> None:
    """The legend of :func:`draw_tiles` and :func:`draw_steps`, in axes of its own.

    Args:
        ax: where to draw; its axis lines are switched off.
        skips: whether halves of tiles that skip steps are in the pictures.

    >>> from matplotlib.figure import Figure
    >>> ax = Figure().subplots()
    >>> draw_tile_key(ax)
    >>> len(ax.get_legend().get_texts())
    2
    """
    arguments.check_axes(ax)
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    entries: dict[str, Any] = {
        "active entries; colour and number tell\nwhich step of its tile computes them": tuple(
            Patch(facecolor=colour, edgecolor=style.INK) for colour in style.STEP_COLOURS
        ),
        "work on inactive entries": Patch(**style.WASTE),
    }
    if skips:
        entries["half of a step that is skipped"] = Patch(
            facecolor=style.PAPER, edgecolor=style.INK
        )
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
