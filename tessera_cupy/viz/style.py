"""Colours, hatches and legends that all pictures share, and arrays as the caller holds them.

Colours are the Okabe-Ito set and tints of it, which colour-blind readers tell apart. In print
without colour the kinds that lie side by side differ in lightness, in hatching or by a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.masks import formats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Steps of a tile take these in turn: yellow, green, light blue, purple. Neighbours differ in
#: lightness, so that they are apart in print without colour.
STEP_COLOURS = ("#F0E442", "#2FA882", "#A9DCF8", "#CC79A7")

#: What the mask keeps, keeps in part, and skips.
KEPT, PARTIAL, SKIPPED = "#0072B2", "#E69F00", "#F2F2F2"

INK, GREY, PAPER, FRAME = "#222222", "#8A8A8A", "#FFFFFF", "#D55E00"

#: What is computed, or waited for, in vain.
WASTE: dict[str, Any] = {
    "facecolor": PAPER,
    "edgecolor": GREY,
    "hatch": "//////",
    "linewidth": 0.0,
}

#: Kinds that are told apart by colour and by hatching, in this order; text is legible on each.
KINDS = (
    ("#A9DCF8", ""),
    ("#F7C66B", "////"),
    ("#7FCFB6", "...."),
    ("#E6BCD3", "\\\\\\\\"),
    ("#F0E442", "xxxx"),
    ("#D9D9D9", "----"),
    ("#F4A582", "++++"),
    ("#9DB7DD", "||||"),
)


def host(array: Any, name: str) -> NDArray[Any]:
    """An array as NumPy's: CuPy's and others from a GPU are copied.

    Raises:
        TypeError, ValueError: no array of numbers.
    """
    if not isinstance(array, np.ndarray) and callable(getattr(array, "get", None)):
        array = array.get()
    return formats.to_host(array, name)[0]


def legend_below(ax: Axes, handles: Sequence[Any], columns: int, drop: float = 36.0) -> None:
    """A legend under the axes' labels, ``drop`` points below the axes whatever their height."""
    from matplotlib.transforms import ScaledTranslation

    down = ScaledTranslation(0, -drop / 72, ax.get_figure(root=False).dpi_scale_trans)
    ax.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        bbox_transform=ax.transAxes + down,
        ncols=columns,
        frameon=False,
        borderpad=0,
        borderaxespad=0,
    )
