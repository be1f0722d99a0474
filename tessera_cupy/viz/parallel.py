"""What each rank of a group is predicted to do over time: compute, send, wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.parallel.predict import Forecast, Scheme
from tessera_cupy.viz import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_Floats = NDArray[np.float64]


def draw_parallel(ax: Axes, forecast: Forecast, scheme: Scheme | None = None) -> None:
    """Draw what is predicted of one scheme: a line a rank, over milliseconds.

    A rank exchanges heads, computes, and exchanges them back when the others have computed; what of
    a ring's transfers does not fit behind computing is drawn after it. What is hatched in grey is
    idle, until the last rank is through. The dashed line is where computing would end if it were
    spread evenly.

    Args:
        ax: where to draw.
        forecast: of :func:`tessera_cupy.parallel.predict`.
        scheme: one of ``forecast.schemes``; None means the fastest.

    >>> from matplotlib.figure import Figure
    >>> from tessera_cupy import ArraySpec, BlockMask
    >>> from tessera_cupy.parallel import predict
    >>> mask = BlockMask.from_dense(np.ones((4, 8, 8), bool), (128, 128))
    >>> ax = Figure().subplots()
    >>> draw_parallel(ax, predict(mask, ArraySpec((1, 4, 1024, 128)), ranks=2, scheme="ulysses"))
    >>> print(ax.get_title().splitlines()[1].partition(",")[0])
    busiest / mean work 1.00
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    one = forecast.best if scheme is None else scheme
    ranks = len(one.loads)
    half = np.full(ranks, one.swap_ms / 2)
    computed = half + one.compute_ms
    ready, back = computed + one.wait_ms, one.rank_ms - half
    computes: dict[str, Any] = {"facecolor": style.STEP_COLOURS[1]}
    swaps: dict[str, Any] = {"facecolor": style.KINDS[0][0]}
    moves: dict[str, Any] = {"facecolor": style.KINDS[1][0], "hatch": style.KINDS[1][1]}
    for begin, end, look in (
        (np.zeros(ranks), half, swaps),
        (half, computed, computes),
        (computed, ready, moves),
        (back, one.rank_ms, swaps),
    ):
        _bars(ax, begin, end, edgecolor=style.INK, linewidth=0.0, **look)
    _bars(ax, ready, back, **style.WASTE)
    _bars(ax, one.rank_ms, np.full(ranks, one.ms), **style.WASTE)
    mean = one.swap_ms / 2 + float(one.compute_ms.mean())
    ax.axvline(mean, color=style.INK, linewidth=1.5, linestyle="--")
    ax.set_xlim(0, one.ms or 1.0)
    ax.set_ylim(ranks, 0)
    style.number_lines(ax, ranks)
    ax.set_xlabel("predicted time (ms)")
    ax.set_ylabel("rank")
    most = float(one.sent.max(initial=0)) / 1e6
    ax.set_title(
        f"{one.degrees.name} on {ranks} {forecast.gpu.name}: {one.ms:.3f} ms predicted\n"
        f"busiest / mean work {one.balance:.2f}, a rank sends {most:,.0f} MB at most",
        fontsize=10,
    )
    handles: list[Any] = [Patch(edgecolor=style.INK, label="computes", **computes)]
    if one.swap_ms:
        handles.append(Patch(edgecolor=style.INK, label="exchanges heads", **swaps))
    if one.wait_ms.max(initial=0) > 0:
        handles.append(Patch(edgecolor=style.INK, label="waits for keys", **moves))
    handles += [
        Patch(label="idle", **style.WASTE),
        Line2D([], [], color=style.INK, linestyle="--", label="an even spread"),
    ]
    style.legend_below(ax, handles, columns=len(handles))


def _bars(ax: Axes, starts: _Floats, ends: _Floats, **look: Any) -> None:
    """A bar on each rank's line, where it is longer than what sums were rounded by."""
    from matplotlib.collections import PolyCollection

    kept = np.flatnonzero(ends > starts * (1 + 1e-12))
    if not len(kept):
        return
    x0, x1, y = starts[kept], ends[kept], kept.astype(float)
    corners: Any = np.stack([x0, y, x1, y, x1, y + 1, x0, y + 1], axis=1).reshape(-1, 4, 2)
    ax.add_collection(PolyCollection(corners, **look))
