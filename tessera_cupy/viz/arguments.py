"""What pictures are given, checked: where to draw, and what of this package."""

from __future__ import annotations

from importlib.util import find_spec

from tessera_cupy.errors import MissingExtraError, wrong
from tessera_cupy.masks import BlockMask, KeySlices

_SUBPLOTS = "make some with figure, ax = plt.subplots()"


def need_matplotlib() -> None:
    """Refuse to draw without matplotlib.

    Raises:
        MissingExtraError: it is not installed.
    """
    if find_spec("matplotlib") is None:
        raise MissingExtraError(
            "Pictures need matplotlib, which draws them, and it is not installed. "
            "Fix: pip install matplotlib (the extra `demo` has it)."
        )


def check_axes(ax: object) -> None:
    """Refuse what is no set of axes.

    Raises:
        MissingExtraError: matplotlib is not installed.
        TypeError: see above.
    """
    need_matplotlib()
    from matplotlib.axes import Axes

    if not isinstance(ax, Axes):
        fix = f"pass the axes first, then what is drawn; {_SUBPLOTS}"
        raise TypeError(wrong("ax", "matplotlib's Axes", type(ax).__name__, fix))


def check_figure(figure: object) -> None:
    """Refuse what is no figure, nor a part of one.

    Raises:
        MissingExtraError: matplotlib is not installed.
        TypeError: see above.
    """
    need_matplotlib()
    from matplotlib.figure import FigureBase

    if not isinstance(figure, FigureBase):
        fix = "pass the figure first, then what is drawn; make one with figure = plt.figure()"
        raise TypeError(
            wrong("figure", "matplotlib's Figure or SubFigure", type(figure).__name__, fix)
        )


def check_mask(mask: object) -> None:
    """Refuse what is no mask.

    Raises:
        TypeError: see above.
    """
    fix = "make one of an array of blocks with BlockMask.from_dense(keep, block_size)"
    check_kind("mask", mask, (BlockMask, KeySlices), fix)


def check_kind(name: str, value: object, kinds: tuple[type, ...], fix: str) -> None:
    """Refuse what is none of some classes.

    Raises:
        TypeError: see above.

    >>> check_kind("tiles", 3, (BlockMask,), "pass plan.tiles()")
    Traceback (most recent call last):
    TypeError: `tiles`: expected BlockMask, got int. Fix: pass plan.tiles().
    """
    if not isinstance(value, kinds):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(wrong(name, expected, type(value).__name__, fix))
