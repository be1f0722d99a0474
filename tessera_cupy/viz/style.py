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

# Points from the axes to a legend below: tick labels and the axis label fit between.
_DROP = 36.0
# Points that a letter of a legend takes, and its handle with the space around it.
_LETTER, _HANDLE = 5.6, 44.0


def host(array: Any, name: str) -> NDArray[Any]:
    """An array as NumPy's: CuPy's and others from a GPU are copied.

    Raises:
        TypeError, ValueError: no array of numbers.
    """
    if not isinstance(array, np.ndarray) and callable(getattr(array, "get", None)):
        array = array.get()
    return formats.to_host(array, name)[0]


def number_lines(ax: Axes, count: int, most: int = 12) -> None:
    """Number the lines of axes, each one high from 0 down, in their middles."""
    step = -(-count // most)
    nice = next(n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500, step) if n >= step)
    lines = range(0, count, nice)
    ax.set_yticks([line + 0.5 for line in lines], [str(line) for line in lines])


def whole_numbers(axis: Any, most: int = 10) -> None:
    """Put an axis's ticks at whole numbers only, no more than ``most``."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(most, integer=True))


def make_room(figure: Any) -> None:
    """Lay a figure out so that legends beside its axes fit, unless the caller chose a layout.

    Axes that the caller placed by hand stay where they are.
    """
    whole = figure.figure
    placed = all(ax.get_subplotspec() is None for ax in whole.axes)
    if whole.get_layout_engine() is None and not placed:
        whole.set_layout_engine("constrained")


def columns_that_fit(figure: Any, labels: Sequence[str], most: int) -> int:
    """How many columns of a legend, ``most`` or fewer, a figure is wide enough for, about."""
    wide = [_HANDLE + _LETTER * max(map(len, label.split("\n"))) for label in labels]
    points = figure.bbox.width / figure.dpi * 72
    for columns in range(min(most, len(wide)), 1, -1):
        # As matplotlib fills them: one after another, the first ones longer by one.
        parts = np.array_split(np.array(wide), columns)
        if sum(part.max() for part in parts) <= points:
            return columns
    return 1


def legend_below(
    ax: Axes, handles: Sequence[Any], columns: int, *, labels: Sequence[str] | None = None
) -> None:
    """A legend under the axes' labels, at one distance from the axes whatever their height.

    A figure without a layout gets one in which it fits (:func:`make_room`).

    Args:
        ax: axes with tick labels and a label below.
        handles: what is explained; a tuple is drawn side by side.
        columns: columns of the legend; fewer where the figure is too narrow.
        labels: texts of the handles, where these have no labels of their own.
    """
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.transforms import ScaledTranslation

    page: Any = ax.figure
    make_room(page)
    texts = list(labels or [handle.get_label() for handle in handles])
    down = ScaledTranslation(0, -_DROP / 72, page.dpi_scale_trans)
    ax.legend(
        handles,
        texts,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        bbox_transform=ax.transAxes + down,
        ncols=columns_that_fit(page, texts, columns),
        frameon=False,
        borderpad=0,
        borderaxespad=0,
    )
