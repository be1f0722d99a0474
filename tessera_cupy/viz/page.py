"""A page: a mask beside its physical tiles under each mapping."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tessera_cupy.errors import wrong
from tessera_cupy.masks import BlockMask, KeySlices
from tessera_cupy.masks.key_slices import block_mask
from tessera_cupy.viz import arguments
from tessera_cupy.viz.mask import draw_mask, head_name, mask_head
from tessera_cupy.viz.pieces import runs_of, tiles_in
from tessera_cupy.viz.tiles import draw_steps, draw_tile_key, draw_tiles
from tessera_cupy.viz.ways import TiledMask, tile_each_way
from tessera_cupy.viz.window import Window, diagonal_window

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

    from tessera_cupy.mapping.tiles import Tiles
    from tessera_cupy.regimes import PlanSpec

_WAYS_ACROSS = 3
_CHOSEN = "#FFF1CC"
_MOST_ROW_LABELS = 24


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
        mask: the mask.
        batch: entry of the mask's batch axis.
        head: entry of the mask's head axis.
        window: the part that is drawn as tiles; some blocks on the diagonal when None.
        plan: a plan for the mask, whose way is marked.
        title: the page's title.

    Returns:
        A figure that is not tied to any display; ``figure.savefig(path)`` writes it. The
        useful fractions in it are of the whole mask, all heads.

    Raises:
        MissingExtraError: matplotlib is not installed.
        TypeError: ``mask`` that is no mask.
        ValueError: ``batch`` or ``head`` is not in the mask, ``window`` reaches past it, or no
            mapping can be drawn.

    >>> mask = BlockMask.from_dense([[1, 0, 1], [0, 1, 1]], (64, 64))
    >>> figure = mask_to_tiles(mask)
    >>> figure.get_suptitle()
    'From a mask to physical tiles'
    """
    arguments.need_matplotlib()
    arguments.check_mask(mask)
    from matplotlib.figure import Figure

    mask = block_mask(mask)
    row = mask_head(mask, batch, head)
    window = window or diagonal_window(mask)
    window.check_inside(mask.shape)
    ways = tile_each_way(mask, plan)
    if not ways:
        raise ValueError(
            wrong("mask", "blocks that tiles can hold", mask.block_size, "use blocks up to 128")
        )
    lines = -(-len(ways) // _WAYS_ACROSS)
    figure = Figure(figsize=(20, 1.0 + 5.2 * lines), layout="constrained")
    figure.suptitle(title, fontsize=16, fontweight="bold")
    halves: Any = figure.subfigures(1, 2, width_ratios=(1, 3.2), wspace=0.02)
    left, right = halves
    whole, key = left.subplots(2, 1, height_ratios=(1, max(0.4, lines - 1.3)))
    draw_mask(whole, mask, batch=batch, head=head, window=window)
    whole.set_title(
        f"the mask: {head_name(mask, batch, head)}, {mask.shape[0]:,} tokens,\n"
        f"blocks of {mask.block_size[0]} x {mask.block_size[1]}; all heads: density "
        f"{mask.density():.3f},\nrun coverage {mask.run_coverage():.2f}",
        fontsize=11,
    )
    cells: Any = right.subfigures(lines, _WAYS_ACROSS, squeeze=False)
    for i, way in enumerate(ways):
        _draw_way(cells[divmod(i, _WAYS_ACROSS)], way, row, window)
    draw_tile_key(key, skips=any(way.skips for way in ways))
    return figure


def _draw_way(cell: SubFigure, way: TiledMask, row: int, window: Window) -> None:
    shape = way.tiles.shape
    in_mask, as_steps = cell.subplots(2, 1)
    draw_tiles(in_mask, way.tiles, head=row, window=window, skips=way.skips)
    draw_steps(as_steps, way.tiles, head=row, window=window, skips=way.skips)
    if way.chosen:
        cell.set_facecolor(_CHOSEN)
    in_mask.set_title(
        f"{way.mapping.q} Q, {way.mapping.kv} KV \N{EN DASH} "
        f"tiles of {shape.q} x {shape.kv}\n"
        f"useful {way.useful:.2f}, {int(way.tiles.steps.sum()):,} steps"
        + ("; the plan's choice" if way.chosen else ""),
        fontsize=11,
        fontweight="bold",
        pad=20,
    )
    in_mask.text(
        0.5, 1.03, way.gloss, transform=in_mask.transAxes, ha="center", fontsize=10, style="italic"
    )
    as_steps.set_title("")
    as_steps.set_xlabel(f"steps side by side, {shape.kv} columns each", fontsize=8)
    in_mask.set_xlabel("key (tokens)", fontsize=8)
    in_mask.set_ylabel("in the mask: query (tokens)", fontsize=8)
    as_steps.set_ylabel("a tile a line: its first query", fontsize=8)
    in_mask.locator_params(nbins=5)
    in_mask.tick_params(labelsize=7)
    as_steps.tick_params(labelsize=7, length=0)
    as_steps.set_xticks([])
    as_steps.set_yticks([])
    _label_rows(in_mask, as_steps, way.tiles, row, window)


def _label_rows(in_mask: Axes, as_steps: Axes, tiles: Tiles, row: int, window: Window) -> None:
    """Say beside the tiles, where there is room, at which query token each run of rows begins."""
    chosen = tiles_in(tiles, row, window)
    here = [run for tile in chosen for run in runs_of(tiles, tile, window)]
    whole = [(line, run) for line, tile in enumerate(chosen) for run in runs_of(tiles, tile)]
    if len(whole) > _MOST_ROW_LABELS:
        return
    in_mask.set_yticks(sorted(max(run.q0, window.q0) for run in here))
    as_steps.set_yticks([line * tiles.shape.q + run.top + run.rows / 2 for line, run in whole])
    as_steps.set_yticklabels([str(run.q0) for _, run in whole])
