"""How masks become tiles, to be looked at interactively and without a GPU.

:func:`explore_data` is what there is to see, as plain data: a mask of one head on a small grid, its
tiles under a mapping, and what the plan is predicted to take on a GPU. :func:`explorer_page` puts
many of them into one page of HTML that opens from disk, and :func:`widget` shows one at a time in
Jupyter, with the same picture.
"""

from tessera_cupy.explore.data import explore_data, explore_mask
from tessera_cupy.explore.notebook import widget
from tessera_cupy.explore.page import explorer_page, view_page

__all__ = ["explore_data", "explore_mask", "explorer_page", "view_page", "widget"]
