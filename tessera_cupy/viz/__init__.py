"""Pictures of masks and of what becomes of them, drawn with matplotlib.

Everything is drawn from plain arrays, with no GPU; what is on one is copied. A function that fills
one set of axes takes ``ax`` first, one that needs several takes a ``figure`` (or a part of one,
``Figure.subfigures``), and a page of its own is returned. Colours are the Okabe-Ito set and tints of
it, told apart by colour-blind readers; hatches, line styles and numbers say the same in print.
"""

from tessera_cupy.viz.mask import draw_mask
from tessera_cupy.viz.page import mask_to_tiles
from tessera_cupy.viz.style import STEP_COLOURS
from tessera_cupy.viz.tiles import draw_steps, draw_tile_key, draw_tiles
from tessera_cupy.viz.ways import TiledMask, tile_each_way
from tessera_cupy.viz.window import Window, diagonal_window

__all__ = [
    "STEP_COLOURS",
    "TiledMask",
    "Window",
    "diagonal_window",
    "draw_mask",
    "draw_steps",
    "draw_tile_key",
    "draw_tiles",
    "mask_to_tiles",
    "tile_each_way",
]
