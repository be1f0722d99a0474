"""Pictures of masks and of what becomes of them, drawn with matplotlib.

Everything is drawn from plain arrays, with no GPU; what is on one is copied. A function that
fills one set of axes takes ``ax`` first, one that needs several takes a ``figure`` (or a part of
one, of ``Figure.subfigures``), and a page of its own is returned. A figure without a layout gets
matplotlib's constrained one, so that legends fit; axes that are placed by hand stay where they are.
Colours are the Okabe-Ito set and tints of it, told apart by colour-blind readers; hatches, line
styles and numbers say the same in print.
"""

from tessera_cupy.viz.grid import draw_grid
from tessera_cupy.viz.heads import HeadFigures, draw_heads, head_figures
from tessera_cupy.viz.mask import draw_mask
from tessera_cupy.viz.page import mask_to_tiles
from tessera_cupy.viz.parallel import draw_parallel
from tessera_cupy.viz.profile import draw_profile
from tessera_cupy.viz.slices import Columns, columns_of, draw_columns, draw_gather, draw_slices
from tessera_cupy.viz.style import STEP_COLOURS
from tessera_cupy.viz.table import draw_table
from tessera_cupy.viz.tasks import Placed, draw_tasks, draw_timeline, load_balance
from tessera_cupy.viz.tiles import draw_steps, draw_tile_key, draw_tiles
from tessera_cupy.viz.ways import TiledMask, tile_each_way
from tessera_cupy.viz.window import Window, diagonal_window

__all__ = [
    "STEP_COLOURS",
    "Columns",
    "HeadFigures",
    "Placed",
    "TiledMask",
    "Window",
    "columns_of",
    "diagonal_window",
    "draw_columns",
    "draw_gather",
    "draw_grid",
    "draw_heads",
    "draw_mask",
    "draw_parallel",
    "draw_profile",
    "draw_slices",
    "draw_steps",
    "draw_table",
    "draw_tasks",
    "draw_tile_key",
    "draw_tiles",
    "draw_timeline",
    "head_figures",
    "load_balance",
    "mask_to_tiles",
    "tile_each_way",
]
