"""Rectangles, each of one step of a tile, drawn in one go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera_cupy.viz import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Sizes of a step's number in points; what a digit takes across and down, of its size.
_SMALLEST_LABEL, _LARGEST_LABEL = 5.0, 10.0
_DIGIT_WIDE, _DIGIT_HIGH = 0.7, 1.1
# More numbers than this are not read, and take long to draw.
_MOST_LABELS = 4000
# More hatched ones are one path: the hatching of each takes a tenth of a millisecond and more.
_MOST_HATCHED = 1000


class Boxes:
    """Rectangles of steps; nothing is drawn before one of the methods is called with axes."""

    def __init__(self) -> None:
        self.corners: list[tuple[float, float, float, float]] = []
        self.steps: list[int] = []

    def add(self, x: float, y: float, wide: float, high: float, step: int) -> None:
        """One more rectangle, of the step."""
        self.corners.append((x, y, x + wide, y + high))
        self.steps.append(step)

    @property
    def right(self) -> float:
        """The right edge of all."""
        return max((x1 for _, _, x1, _ in self.corners), default=0)

    def fill(self, ax: Axes, *, edge: float = 0.4) -> None:
        """Fill each with its step's colour; ``edge`` is the width of its edge in points."""
        colours = np.array(style.STEP_COLOURS)[np.array(self.steps, int) % len(style.STEP_COLOURS)]
        self._draw(ax, facecolor=colours.tolist(), edgecolor=style.PAPER, linewidth=edge)

    def hatch(self, ax: Axes) -> None:
        """Hatch them as work in vain."""
        if len(self.corners) <= _MOST_HATCHED:
            self._draw(ax, **style.WASTE)
            return
        from matplotlib.patches import PathPatch
        from matplotlib.path import Path

        x0, y0, x1, y1 = np.array(self.corners, float).T
        verts = np.stack([x0, y0, x1, y0, x1, y1, x0, y1, x0, y0], axis=1).reshape(-1, 2)
        codes = [Path.MOVETO, *[Path.LINETO] * 3, Path.CLOSEPOLY] * len(self.corners)
        # Not a patch of the axes, whose limits are set by the caller and slow to find here.
        ax.add_artist(PathPatch(Path(verts, codes), **style.WASTE))

    def outline(self, ax: Axes) -> None:
        """Draw their edges."""
        self._draw(ax, facecolor="none", edgecolor=style.INK, linewidth=0.8)

    def number(
        self, ax: Axes, wide: float, high: float, labels: Sequence[str] | None = None
    ) -> None:
        """Write each one's step, or its label, in it where it is large enough to read it.

        Args:
            ax: axes that are ``wide`` and ``high`` in the units of the rectangles.
            wide: see there.
            high: see there.
            labels: a text for each.
        """
        if not self.corners or len(self.corners) > _MOST_LABELS:
            return
        x0, y0, x1, y1 = np.array(self.corners).T
        page, place = ax.figure, ax.get_position()
        points = 72 / page.dpi
        texts = [str(step) for step in self.steps] if labels is None else labels
        digits = np.array([len(text) for text in texts])
        across = (x1 - x0) * points * place.width * page.bbox.width / wide / digits / _DIGIT_WIDE
        down = (y1 - y0) * points * place.height * page.bbox.height / high / _DIGIT_HIGH
        fits = np.minimum(across, down)
        # Most have one size, and what is narrower a smaller one.
        sizes = np.minimum(min(_LARGEST_LABEL, float(np.median(fits))), fits)
        for i in np.flatnonzero(sizes >= _SMALLEST_LABEL).tolist():
            x, y, text = (x0[i] + x1[i]) / 2, (y0[i] + y1[i]) / 2, texts[i]
            label = ax.text(x, y, text, ha="center", va="center", fontsize=sizes[i], clip_on=True)
            # The layout engine would measure every label, and they are all inside the axes.
            label.set_in_layout(False)

    def _draw(self, ax: Axes, **look: Any) -> None:
        from matplotlib.collections import PolyCollection

        if self.corners:
            x0, y0, x1, y1 = np.array(self.corners, float).T
            verts: Any = np.stack([x0, y0, x1, y0, x1, y1, x0, y1], axis=1).reshape(-1, 4, 2)
            ax.add_collection(PolyCollection(verts, **look))
