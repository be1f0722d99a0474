"""Where the time of a request goes, part after part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tessera_cupy.profile import Profile
from tessera_cupy.viz import arguments, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PARTS = ("mask_state", "tiles", "tasks", "select", "attention", "merge")


def draw_profile(ax: Axes, profile: Profile) -> None:
    """Draw the parts of a request one after another, over milliseconds.

    The title says how much of the request is preparation. Parts of the host are hatched: all that
    make the plan where the host makes it, else the choice of the plan alone.

    Args:
        ax: where to draw.
        profile: what :meth:`tessera_cupy.Plan.profile` measured on a GPU.

    Raises:
        TypeError: an argument of another kind, ``ax`` that is no axes among them.

    >>> from matplotlib.figure import Figure
    >>> ax = Figure().subplots()
    >>> draw_profile(ax, Profile(True, 0.02, 0.05, 0.03, 0.0, 0.9, 0.0))
    >>> print(ax.get_title())
    a request of 1.000 ms: preparation 0.100 ms, 10.0%
    """
    arguments.check_axes(ax)
    arguments.check_kind("profile", profile, (Profile,), "pass plan.profile(q, k, v)")
    from matplotlib.patches import Patch

    on_host = ("select",) if profile.on_gpu else ("tiles", "tasks", "select")
    total, begin = profile.total, 0.0
    for line, part in enumerate(_PARTS):
        ms = getattr(profile, part)
        ours = part in on_host
        ax.barh(
            line,
            ms,
            left=begin,
            height=0.7,
            facecolor=style.PARTIAL if ours else style.STEP_COLOURS[2],
            hatch="////" if ours else "",
            edgecolor=style.INK,
            linewidth=0.8,
        )
        share = ms / total if total else 0.0
        # To the right of the bar, or left of one that reaches the end.
        late = begin + ms > 0.7 * total
        inside = late and share > 0.3
        x = begin + (ms / 2 if inside else 0 if late else ms)
        ax.annotate(
            f"{ms:.4f} ms, {share:.1%}",
            (x, line),
            (0 if inside else -4 if late else 4, 0),
            textcoords="offset points",
            ha="center" if inside else "right" if late else "left",
            va="center",
            fontsize=9,
            bbox={"facecolor": style.PAPER, "linewidth": 0, "pad": 1.5} if inside else None,
        )
        begin += ms
    ax.set_yticks(range(len(_PARTS)), [part.replace("_", " ") for part in _PARTS])
    ax.set_ylim(len(_PARTS) - 0.5, -0.5)
    ax.set_xlim(0, total or 1.0)
    ax.set_xlabel("time (ms)")
    share = profile.preparation / total if total else 0.0
    ahead = f"preparation {profile.preparation:.3f} ms, {share:.1%}"
    ax.set_title(f"a request of {total:.3f} ms: {ahead}", fontsize=10)
    handles = [
        Patch(facecolor=style.STEP_COLOURS[2], edgecolor=style.INK, label="on the GPU"),
        Patch(facecolor=style.PARTIAL, edgecolor=style.INK, hatch="////", label="on the host"),
    ]
    style.legend_below(ax, handles, columns=2)
