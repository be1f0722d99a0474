"""Density and run coverage of each head of a mask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.masks import BlockMask, KeySlices
from tessera_cupy.masks import bits as token_bit
from tessera_cupy.masks.entries import Entries
from tessera_cupy.masks.geometry import BlockGrid
from tessera_cupy.masks.key_slices import block_mask
from tessera_cupy.viz import arguments, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure


class HeadFigures(NamedTuple):
    """Figures of each head, batch-major: (batch * heads,) float64 each.

    Attributes:
        density: kept fraction of the head's token pairs, 0 to 1.
        run_coverage: fraction of its active blocks, or of its slices, in runs of two or more
            neighbours of a row; 0 of an empty head.
    """

    density: NDArray[np.float64]
    run_coverage: NDArray[np.float64]


def head_figures(mask: BlockMask | KeySlices) -> HeadFigures:
    """Density and run coverage of each head, exact for tails, ragged blocks and token bits.

    >>> mask = BlockMask.from_dense([[[1, 1], [0, 0]], [[0, 1], [1, 0]]], (64, 64))
    >>> density, coverage = head_figures(mask)
    >>> density.tolist(), coverage.tolist()
    ([0.5, 0.5], [1.0, 0.0])
    """
    arguments.check_mask(mask)
    count = mask.batch * mask.heads
    coverage = np.array([_run_coverage(mask, head) for head in range(count)])
    blocks = block_mask(mask).on_host()
    pairs = blocks.shape[0] * blocks.shape[1]
    density = [_active_pairs(blocks, head) / pairs if pairs else 0.0 for head in range(count)]
    return HeadFigures(np.array(density), coverage)


def draw_heads(figure: Figure | SubFigure, mask: BlockMask | KeySlices) -> None:
    """Draw the density of each head as bars and its run coverage as dots, with their means.

    Args:
        figure: where to draw two axes above each other.
        mask: the mask; heads are numbered ``b * heads + h`` where it has several of a batch.

    Raises:
        TypeError: ``figure`` that is no figure, ``mask`` that is no mask.

    >>> from matplotlib.figure import Figure
    >>> figure = Figure()
    >>> draw_heads(figure, BlockMask.from_dense([[[1, 1], [0, 0]], [[0, 1], [1, 0]]], (64, 64)))
    >>> [ax.get_ylabel() for ax in figure.axes]
    ['density', 'run coverage']
    """
    arguments.check_figure(figure)
    density, coverage = head_figures(mask)
    axes: Any = figure.subplots(2, 1, sharex=True)
    upper, lower = axes
    head = np.arange(len(density))
    bars = upper.bar(
        head, density, width=0.8, color=style.STEP_COLOURS[2], edgecolor=style.INK, linewidth=0.6
    )
    dots = lower.scatter(head, coverage, s=30, color=style.KEPT, edgecolor=style.INK, zorder=3)
    lower.vlines(head, 0, coverage, color=style.GREY, linewidth=0.8)
    _finish(upper, density, bars, "density of a head", 1.15 * max(density.max(), 1e-9))
    _finish(lower, coverage, dots, "run coverage of a head", 1.05)
    upper.set_ylabel("density")
    lower.set_ylabel("run coverage")
    upper.set_title(
        f"{len(head)} heads: kept fraction of the token pairs,\nand fraction of the active "
        f"{'slices' if isinstance(mask, KeySlices) else 'blocks'} in runs",
        fontsize=10,
    )
    lower.set_xlabel("head" if mask.batch == 1 else f"head (batch entry x {mask.heads} + head)")
    lower.set_xlim(-0.7, len(head) - 0.3)
    style.whole_numbers(lower.xaxis)


def _finish(ax: Axes, values: NDArray[np.float64], drawn: Any, name: str, top: float) -> None:
    """The mean line, the axis from 0, and the legend."""
    mean = float(values.mean())
    line = ax.axhline(mean, color=style.FRAME, linewidth=1.5, linestyle="--", zorder=4)
    ax.set_ylim(0, min(top, 1.05))
    style.make_room(ax.figure)
    ax.legend(
        [drawn, line],
        [name, f"mean {mean:.3f}"],
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        frameon=False,
    )


def _run_coverage(mask: BlockMask | KeySlices, head: int) -> float:
    rows = (len(mask.indptr) - 1) // (mask.batch * mask.heads)
    offsets = mask.indptr[head * rows : (head + 1) * rows + 1]
    columns = mask.indices[offsets[0] : offsets[-1]]
    if not len(columns):
        return 0.0
    follows = np.zeros(len(columns) + 1, np.bool_)
    np.equal(columns[1:], columns[:-1] + 1, out=follows[1:-1])
    follows[offsets - offsets[0]] = False  # the first of a row follows none
    return int(np.count_nonzero(follows[1:] | follows[:-1])) / len(columns)


def _active_pairs(mask: BlockMask, head: int) -> int:
    rows = mask.num_blocks[0]
    offsets = mask.indptr[head * rows : (head + 1) * rows + 1]
    mine = slice(offsets[0], offsets[-1])
    entries = Entries(offsets - offsets[0], mask.indices[mine], mask.partial[mine], mask.token_bits)
    b, h = divmod(head, mask.heads)
    q, kv = (
        None if sizes is None else sizes[b : b + 1, h : h + 1]
        for sizes in (mask.q_block_sizes, mask.kv_block_sizes)
    )
    return token_bit.pairs(entries, BlockGrid(mask.block_size, mask.shape, 1, 1, q, kv))
