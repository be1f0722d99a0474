"""A video's token grid in an order: which tokens a block holds, and the path through the frames."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.errors import wrong
from tessera_cupy.video import VideoGrid, inverse
from tessera_cupy.viz import arguments, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

# Light, so that numbers and paths are read on each; from light to dark and back, for print.
_COLOURS = (
    "#F0E442",
    "#7FCFB6",
    "#C9E8F9",
    "#E0A3C6",
    "#F7C66B",
    "#8FB4DA",
    "#F2F2F2",
    "#D8936A",
    "#B9B9B9",
)
_MOST_FRAMES = 6
_ACROSS = 3
# Frames of more tokens have no path, and numbers only in blocks with room for them.
_MOST_PATH = 400
_SMALLEST, _LARGEST, _LEFT = 5.0, 9.0, 0.75


@dataclass(frozen=True)
class _Blocks:
    """The blocks of an ordered sequence: of each place its block, and tokens of each block."""

    of_place: NDArray[np.int64]
    sizes: NDArray[np.int64]

    @property
    def short(self) -> NDArray[np.bool_]:
        """(blocks,) those that hold fewer tokens than the largest."""
        shorter: NDArray[np.bool_] = self.sizes < self.sizes.max()
        return shorter


def draw_grid(
    figure: Figure | SubFigure,
    grid: VideoGrid,
    order: Any = None,
    *,
    block: int | Any = 64,
    frames: Sequence[int] | None = None,
) -> None:
    """Draw which tokens of each frame the blocks of an ordered sequence hold.

    A square is a token. Tokens of one block have one colour in all frames, and its number where
    there is room; blocks that touch, in a frame or from one to the next, differ in colour. Blocks
    that are shorter than others (ragged edges) are hatched. In frames of up to 400 tokens a line
    follows the order: solid to a neighbour, dashed over a jump, with a triangle where it goes on in
    another frame. Text has axes of its own, in rows as long as the frames'.

    Args:
        figure: where to draw, a set of axes a frame; ``layout="compressed"`` suits it.
        grid: the tokens.
        order: (tokens,) a permutation from raster order, as :meth:`VideoGrid.tile_order` and the
            like give; None for raster order.
        block: tokens of a block, or (blocks,) the tokens of each, as
            :attr:`tessera_cupy.video.TileBlocks.sizes` has them.
        frames: which frames; the first five and the last, or all of up to six, when None.

    Raises:
        TypeError: an order, block or frames that are no integers, ``figure`` that is no figure.
        ValueError: an order that is no permutation of the grid's tokens, sizes that do not sum to
            them, a frame that there is not.

    >>> from matplotlib.figure import Figure
    >>> grid = VideoGrid(2, 4, 6)
    >>> blocks = grid.tile_blocks((2, 2, 4))
    >>> figure = Figure()
    >>> draw_grid(figure, grid, blocks.order, block=blocks.sizes)
    >>> [ax.get_title() for ax in figure.axes]
    ['frame 0', 'frame 1']
    """
    arguments.check_figure(figure)
    arguments.check_kind("grid", grid, (VideoGrid,), "pass VideoGrid(frames, rows, columns)")
    places = inverse(_order(grid, order))
    blocks = _blocks(grid, block)
    shown = _frames(grid, frames)
    colour = _colours(grid, blocks.of_place[places], len(blocks.sizes))
    extra = 1 if grid.text_tokens else 0
    path = grid.frame_tokens <= _MOST_PATH
    across = min(_ACROSS, len(shown) + extra)
    down = -(-(len(shown) + extra) // across)
    axes = figure.subplots(down, across, squeeze=False).ravel()
    for ax in axes[len(shown) + extra :]:
        ax.remove()
    video = slice(grid.video_start, grid.video_start + grid.video_tokens)
    cube = places[video].reshape(grid.t, grid.h, grid.w)
    first = extra if grid.text_first else 0
    for ax, t in zip(axes[first:], shown, strict=False):
        _draw_frame(ax, cube[t], blocks, colour, path)
        ax.set_title(f"frame {t}", fontsize=10)
        ax.set_ylabel("row (tokens)")
        ax.set_xlabel("column (tokens)")
    if extra:
        ax = axes[0 if grid.text_first else len(shown)]
        text = np.delete(places, np.arange(video.start, video.stop))
        rows = -(-len(text) // grid.w)
        padded = np.full(rows * grid.w, -1)
        padded[: len(text)] = text
        _draw_frame(ax, padded.reshape(rows, grid.w), blocks, colour, path)
        ax.set_yticks([0, rows])
        ax.set_title(f"text, {'before' if grid.text_first else 'behind'} the video", fontsize=10)
        ax.set_xlabel(f"token, {grid.w} a line")
        ax.set_ylabel("line")
    _legend(figure, blocks, path=path)
    short = int(blocks.short.sum())
    edges = f", {short:,} of them short" if short else ""
    skipped = "" if len(shown) == grid.t else f"; {len(shown)} of {grid.t} frames"
    figure.suptitle(
        f"{grid} tokens in {len(blocks.sizes):,} blocks of up to {blocks.sizes.max():,}"
        f"{edges}{skipped}",
        fontsize=11,
    )


def _order(grid: VideoGrid, order: Any) -> NDArray[np.int64]:
    if order is None:
        return np.arange(grid.tokens)
    found = style.host(order, "order")
    if found.dtype.kind not in "iu":
        raise TypeError(wrong("order", "integers", f"dtype {found.dtype}", "cast to int64 first"))
    if found.shape != (grid.tokens,):
        expected = f"shape ({grid.tokens},), a place for each token of the grid {grid}"
        fix = "pass the order of one head, made for this grid"
        raise ValueError(wrong("order", expected, f"shape {found.shape}", fix))
    if not np.array_equal(np.sort(found), np.arange(grid.tokens)):
        expected = f"each of 0 to {grid.tokens - 1} once"
        raise ValueError(wrong("order", expected, "others", "pass a permutation"))
    return found.astype(np.int64)


def _blocks(grid: VideoGrid, block: Any) -> _Blocks:
    if isinstance(block, int | np.integer) and not isinstance(block, bool):
        if block < 1:
            raise ValueError(wrong("block", "at least 1 token", block, "pass 64, for example"))
        of_place = np.arange(grid.tokens) // int(block)
        return _Blocks(of_place, np.bincount(of_place))
    sizes = style.host(block, "block")
    if sizes.dtype.kind not in "iu" or sizes.ndim != 1:
        got = f"dtype {sizes.dtype}, shape {sizes.shape}"
        raise TypeError(wrong("block", "an int, or integers (blocks,)", got, "pass tokens"))
    if (sizes < 0).any() or sizes.sum() != grid.tokens:
        expected = f"sizes that sum to {grid.tokens} tokens, as the grid {grid} has"
        raise ValueError(wrong("block", expected, f"a sum of {sizes.sum()}", "correct the sizes"))
    return _Blocks(np.repeat(np.arange(len(sizes)), sizes), sizes.astype(np.int64))


def _frames(grid: VideoGrid, frames: Sequence[int] | None) -> list[int]:
    if frames is None:
        return list(dict.fromkeys([*range(min(grid.t, _MOST_FRAMES - 1)), grid.t - 1]))
    try:
        shown = [operator.index(t) for t in frames]
    except TypeError:
        fix = "pass a list such as [0, 3]"
        raise TypeError(wrong("frames", "integers", repr(frames), fix)) from None
    if not shown or min(shown) < 0 or max(shown) >= grid.t:
        expected = f"some of 0 to {grid.t - 1}"
        raise ValueError(wrong("frames", expected, shown, "pick frames of the grid"))
    return shown


def _colours(grid: VideoGrid, block: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """A colour of each block, given that of each token: no two that touch have the same.

    Blocks are coloured by number, each with a colour that none of those before it has that it
    touches; where all are taken, by number.
    """
    video = block[grid.video_start : grid.video_start + grid.video_tokens]
    cube = video.reshape(grid.t, grid.h, grid.w)
    text = np.delete(block, slice(grid.video_start, grid.video_start + grid.video_tokens))
    sides = [(cube[1:], cube[:-1]), (cube[:, 1:], cube[:, :-1]), (cube[:, :, 1:], cube[:, :, :-1])]
    sides += [(cube[:, 1:, 1:], cube[:, :-1, :-1]), (cube[:, 1:, :-1], cube[:, :-1, 1:])]
    sides += [(text[1:], text[:-1])]
    pairs = np.concatenate(
        [np.stack([a.ravel(), b.ravel()], axis=1)[(a != b).ravel()] for a, b in sides]
    )
    pairs = np.sort(pairs, axis=1)
    touching: list[list[int]] = [[] for _ in range(count)]
    for low, high in np.unique(pairs, axis=0).tolist():
        touching[high].append(low)
    colour = np.zeros(count, np.int64)
    for number, before in enumerate(touching):
        taken = {int(colour[other]) for other in before}
        free = [c for c in range(len(_COLOURS)) if c not in taken]
        colour[number] = free[number % min(4, len(free))] if free else number % len(_COLOURS)
    return colour


def _draw_frame(
    ax: Axes,
    places: NDArray[np.int64],
    blocks: _Blocks,
    colour: NDArray[np.int64],
    path: bool,
) -> None:
    """Draw the places of a frame's tokens; those of -1 are none."""
    from matplotlib.colors import to_rgb

    rows, columns = places.shape
    block = np.where(places < 0, -1, blocks.of_place[places])
    palette = np.array([*map(to_rgb, _COLOURS), to_rgb(style.PAPER)])
    shades = np.where(block < 0, len(_COLOURS), colour[block])
    extent = (0, columns, rows, 0)
    ax.imshow(palette[shades], extent=extent, interpolation="nearest")
    _hatch(ax, (block >= 0) & blocks.short[block])
    _outline(ax, block)
    if path:
        _follow(ax, places)
    _number(ax, block, blocks.short, path=path)
    ax.set_xlim(0, columns)
    ax.set_ylim(rows, 0)
    for axis in (ax.xaxis, ax.yaxis):
        style.whole_numbers(axis, 6)


def _hatch(ax: Axes, tokens: NDArray[np.bool_]) -> None:
    """Hatch tokens, a rectangle for each run of a row."""
    from matplotlib.collections import PolyCollection

    edges = np.diff(np.pad(tokens.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    (row, begin), (_, end) = (np.nonzero(edges == way) for way in (1, -1))
    if len(row):
        corners = [begin, row, end, row, end, row + 1, begin, row + 1]
        verts: Any = np.stack(corners, axis=1).reshape(-1, 4, 2)
        ax.add_collection(
            PolyCollection(
                verts, facecolor="none", edgecolor="#555555", hatch="////", linewidth=0.0
            )
        )


def _outline(ax: Axes, block: NDArray[np.int64]) -> None:
    """Draw the borders between blocks."""
    from matplotlib.collections import LineCollection

    row, column = np.nonzero(block[:, 1:] != block[:, :-1])
    upright = np.stack([column + 1, row, column + 1, row + 1], axis=1)
    row, column = np.nonzero(block[1:] != block[:-1])
    level = np.stack([column, row + 1, column + 1, row + 1], axis=1)
    lines: Any = np.concatenate([upright, level]).reshape(-1, 2, 2)
    ax.add_collection(LineCollection(lines, colors=style.INK, linewidths=0.9))


def _follow(ax: Axes, places: NDArray[np.int64]) -> None:
    """Draw the path of the order through a frame."""
    from matplotlib.collections import LineCollection

    row, column = np.nonzero(places >= 0)
    place = places[row, column]
    order = np.argsort(place)
    at = np.stack([column + 0.5, row + 0.5], axis=1)[order]
    place = place[order]
    stays = np.diff(place) == 1
    near = np.abs(np.diff(at, axis=0)).max(axis=1, initial=0) <= 1
    steps = np.stack([at[:-1], at[1:]], axis=1)
    for chosen, look in ((stays & near, "-"), (stays & ~near, (0, (2, 2)))):
        wide = 1.0 if look == "-" else 0.6
        lines = LineCollection(steps[chosen], colors=style.INK, linewidths=wide, linestyles=[look])
        ax.add_collection(lines)
    leaves = at[:-1][~stays]
    ax.plot(*leaves.T, marker=">", markersize=3.5, color=style.INK, linestyle="none")
    for marker, end in (("o", 0), ("s", -1)):
        ax.plot(*at[end], marker=marker, markersize=5, color=style.FRAME, linestyle="none")


def _number(ax: Axes, block: NDArray[np.int64], short: NDArray[np.bool_], *, path: bool) -> None:
    """Write the blocks' numbers, each once, in the middle of its widest run of a row."""
    rows, columns = block.shape
    page, place = ax.figure, ax.get_position()
    dots = min(place.width * page.bbox.width / columns, place.height * page.bbox.height / rows)
    # Labels and titles take some of the room that the axes have before they are laid out.
    token = _LEFT * 72 / page.dpi * dots
    row, begin = np.nonzero(np.diff(block, axis=1, prepend=-2))
    flat = np.append(row * columns + begin, rows * columns)
    length = np.minimum(np.diff(flat), columns - begin)
    number = block[row, begin]
    # The widest run of a block, in the middle of those that are as wide.
    best: dict[int, list[int]] = {}
    for run, of in enumerate(number.tolist()):
        if of >= 0:
            known = best.setdefault(of, [])
            if known and length[run] > length[known[0]]:
                known.clear()
            if not known or length[run] == length[known[0]]:
                known.append(run)
    for of, runs in best.items():
        run = runs[len(runs) // 2]
        size = min(_LARGEST, length[run] * token / len(str(of)) / 0.75, len(runs) * token * 0.9)
        if size < _SMALLEST:
            continue
        y = (row[runs[0]] + row[runs[-1]] + 1) / 2
        if row[runs[-1]] - row[runs[0]] != len(runs) - 1:
            y = row[run] + 0.5
        label = ax.text(
            begin[run] + length[run] / 2,
            y,
            str(of),
            ha="center",
            va="center",
            fontsize=size,
            clip_on=True,
            bbox={"facecolor": style.PAPER, "alpha": 0.75, "linewidth": 0, "pad": 0.6}
            if path or short[of]
            else None,
        )
        label.set_in_layout(False)


def _legend(figure: Figure | SubFigure, blocks: _Blocks, *, path: bool) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    some = tuple(Patch(facecolor=c, edgecolor=style.INK) for c in _COLOURS[:4])
    entries: dict[str, Any] = {"blocks, with their numbers": some}
    if blocks.short.any():
        entries["short block"] = Patch(
            facecolor=style.PAPER, edgecolor="#555555", hatch="////", linewidth=0.5
        )
    if path:
        line: dict[str, Any] = {"color": style.INK, "linewidth": 1.0}
        mark: dict[str, Any] = {"linestyle": "none", "color": style.FRAME}
        entries |= {
            "next token": Line2D([], [], **line),
            "a jump": Line2D([], [], linestyle=(0, (2, 2)), **line),
            "on in another frame": Line2D([], [], marker=">", linestyle="none", color=style.INK),
            "a frame's first token": Line2D([], [], marker="o", **mark),
            "its last": Line2D([], [], marker="s", **mark),
        }
    style.make_room(figure)
    figure.legend(
        list(entries.values()),
        list(entries),
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        loc="outside lower center",
        ncols=style.columns_that_fit(figure, list(entries), 4),
        frameon=False,
    )
