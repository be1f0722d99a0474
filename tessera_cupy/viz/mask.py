"""A mask as a map of blocks over query and key tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.errors import wrong
from tessera_cupy.masks import BlockMask, KeySlices
from tessera_cupy.masks import bits as token_bit
from tessera_cupy.masks.key_slices import block_mask
from tessera_cupy.viz import area, arguments, style
from tessera_cupy.viz.window import Window

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# More blocks on a side than this are drawn as an image, in which the colours of small ones mix.
_MOST_SHARP = 256
# Edges of blocks, and the bits of single tokens, where they are large enough to see.
_MOST_EDGED, _MOST_TOKENS = 64, 1024


def draw_mask(
    ax: Axes,
    mask: BlockMask | KeySlices,
    *,
    batch: int = 0,
    head: int = 0,
    window: Window | None = None,
) -> None:
    """Draw one head's mask, in tokens, with a legend.

    Blocks have the sizes that they have, ragged ones too, and those that carry token bits have a
    colour of their own; up to 1,024 tokens the bits themselves are drawn. With more than 256 blocks
    on a side, a spot of the picture has the mixed colours of the blocks in it.

    Args:
        ax: where to draw.
        mask: the mask; slices are drawn as the blocks of 16 keys that they run as,
            :func:`draw_slices` has them key by key.
        batch: entry of the mask's batch axis.
        head: entry of the mask's head axis.
        window: a part to frame.

    Raises:
        TypeError: an argument of another kind, ``ax`` that is no axes among them.
        ValueError: ``batch`` or ``head`` is not in the mask, or ``window`` reaches past it.

    >>> from matplotlib.figure import Figure
    >>> ax = Figure().subplots()
    >>> draw_mask(ax, BlockMask.from_dense([[1, 0], [1, 1]], (64, 64)))
    >>> print(ax.get_title())
    mask of head 0: 2 x 2 blocks of 64 x 64 tokens
    """
    arguments.check_axes(ax)
    arguments.check_mask(mask)
    from matplotlib.patches import Patch, Rectangle

    mask = block_mask(mask).on_host()
    row = mask_head(mask, batch, head)
    if window is not None:
        window.check_inside(mask.shape)
    nq, nk = mask.num_blocks
    kind = block_kinds(mask, row)
    edges = head_edges(mask.q_starts(), batch, head), head_edges(mask.kv_starts(), batch, head)
    sharp = max(nq, nk) <= _MOST_SHARP
    if not sharp:
        _draw_image(ax, kind, *edges)
    else:
        _draw_blocks(ax, kind, *edges)
        if (kind == 2).any() and max(mask.shape) <= _MOST_TOKENS:
            _draw_token_bits(ax, mask, row, *edges)
    ax.set_xlim(0, mask.shape[1])
    ax.set_ylim(mask.shape[0], 0)
    ax.set_aspect("equal")
    ax.set_xlabel("key (tokens)")
    ax.set_ylabel("query (tokens)")
    size = f"{mask.block_size[0]} x {mask.block_size[1]} tokens"
    kinds = f"ragged blocks, nominally {size}" if mask.ragged else f"blocks of {size}"
    ax.set_title(f"mask of {head_name(mask, batch, head)}: {nq:,} x {nk:,} {kinds}", fontsize=10)
    kept = "kept block" if sharp else "kept block; paler: some\nof the blocks there"
    handles: list[Any] = [
        Patch(facecolor=style.KEPT, label=kept),
        Patch(facecolor=style.SKIPPED, edgecolor="#BBBBBB", label="skipped block"),
    ]
    if (kind == 2).any():
        label = "partly kept block (token bits)"
        handles.insert(1, Patch(facecolor=style.PARTIAL, label=label))
    if window is not None:
        frame = Rectangle(
            (window.kv0, window.q0),
            window.kv1 - window.kv0,
            window.q1 - window.q0,
            fill=False,
            edgecolor=style.FRAME,
            linewidth=2.0,
            label="part drawn as tiles",
        )
        ax.add_patch(frame)
        handles.append(frame)
    style.legend_below(ax, handles, columns=2)


def head_name(mask: BlockMask | KeySlices, batch: int, head: int) -> str:
    """``head 3``, or ``batch 1, head 3`` where the mask has several of a batch."""
    return f"batch {batch}, head {head}" if mask.batch > 1 else f"head {head}"


def mask_head(mask: BlockMask | KeySlices, batch: int, head: int) -> int:
    """The mask head, as ``Tiles.tile_head`` counts them, of an entry of the batch and head axes.

    Raises:
        ValueError: there is no such entry.
    """
    for name, value, count in (("batch", batch, mask.batch), ("head", head, mask.heads)):
        if not 0 <= value < count:
            raise ValueError(wrong(name, f"from 0 to {count - 1}", value, "pick one of the mask's"))
    return batch * mask.heads + head


def block_kinds(mask: BlockMask, row: int) -> NDArray[np.uint8]:
    """0 skipped, 1 kept, 2 partly kept, for each block of one mask head."""
    nq, nk = mask.num_blocks
    kind = np.zeros((nq, nk), dtype=np.uint8)
    rows, mine = _entries(mask, row)
    kind[rows, mask.indices[mine]] = np.where(mask.partial[mine] < 0, 1, 2)
    return kind


def head_edges(starts: NDArray[np.int64], batch: int, head: int) -> NDArray[np.int64]:
    """Block edges of one head, of arrays whose axes of 1 broadcast."""
    edges: NDArray[np.int64] = starts[batch % len(starts), head % starts.shape[1]]
    return edges


def _entries(mask: BlockMask, row: int) -> tuple[NDArray[np.int64], slice]:
    """The block row of each listed block of a mask head, and where its blocks are listed."""
    nq = mask.num_blocks[0]
    offsets = mask.indptr[row * nq : (row + 1) * nq + 1]
    return np.repeat(np.arange(nq), np.diff(offsets)), slice(offsets[0], offsets[-1])


def _draw_blocks(
    ax: Axes, kind: NDArray[np.uint8], edges_q: NDArray[np.int64], edges_kv: NDArray[np.int64]
) -> None:
    from matplotlib.colors import ListedColormap

    edged = max(kind.shape) <= _MOST_EDGED
    ax.pcolormesh(
        edges_kv,
        edges_q,
        kind,
        cmap=ListedColormap([style.SKIPPED, style.KEPT, style.PARTIAL]),
        vmin=0,
        vmax=2,
        edgecolors=style.PAPER if edged else "none",
        linewidth=0.5 if edged else 0.0,
        rasterized=True,
    )


def _draw_image(
    ax: Axes, kind: NDArray[np.uint8], edges_q: NDArray[np.int64], edges_kv: NDArray[np.int64]
) -> None:
    cells_q, cells_kv = area.cell_edges(edges_q[-1]), area.cell_edges(edges_kv[-1])
    shares = []
    for which in (1, 2):
        tall = area.cell_means(kind == which, edges_q, cells_q)
        shares.append(area.cell_means(tall.T, edges_kv, cells_kv).T)
    image = area.mixed([style.SKIPPED, style.KEPT, style.PARTIAL], shares)
    area.show(ax, image, (0, edges_kv[-1], edges_q[-1], 0), "equal")


def _draw_token_bits(
    ax: Axes,
    mask: BlockMask,
    row: int,
    edges_q: NDArray[np.int64],
    edges_kv: NDArray[np.int64],
) -> None:
    """Whiten the tokens that partly kept blocks do not keep."""
    off = np.zeros(mask.shape, np.bool_)
    rows, mine = _entries(mask, row)
    for of, column, at in zip(rows, mask.indices[mine], mask.partial[mine], strict=True):
        if at >= 0:
            (top, bottom), (left, right) = edges_q[of : of + 2], edges_kv[column : column + 2]
            kept = token_bit.unpack(mask.token_bits[at])[: bottom - top, : right - left]
            off[top:bottom, left:right] = ~kept
    white = np.ones((*mask.shape, 4), np.float32)
    white[:, :, 3] = 0.85 * off
    extent = (0, mask.shape[1], mask.shape[0], 0)
    ax.imshow(white, extent=extent, interpolation="nearest", zorder=1.5)
