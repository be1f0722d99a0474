"""Maps that have more entries than a page has dots, as means over cells of equal size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Cells of a side; more than a page has dots.
MOST_CELLS = 1024
_FEWEST = 512


def cell_edges(tokens: int) -> NDArray[np.float64]:
    """Edges of equal cells over tokens: one each, or :data:`MOST_CELLS`."""
    return np.linspace(0, tokens, min(tokens, MOST_CELLS) + 1)


def cell_means(
    values: NDArray[Any], edges: NDArray[Any], cells: NDArray[np.float64]
) -> NDArray[np.float32]:
    """Means over cells along the first axis, of values that are constant between edges.

    Args:
        values: (n, m), value ``i`` from ``edges[i]`` to ``edges[i + 1]``.
        edges: (n + 1,) ascending; equal ones hold nothing.
        cells: (c + 1,) ascending, from the first edge to the last.

    Returns:
        (c, m) float32.

    >>> cell_means(np.array([[1], [0]]), np.array([0, 3, 4]), np.array([0.0, 2.0, 4.0])).tolist()
    [[1.0], [0.5]]
    """
    area = np.zeros((len(values) + 1, values.shape[1]), np.float32)
    np.cumsum(values * np.diff(edges).astype(np.float32)[:, None], axis=0, out=area[1:])
    at = np.clip(np.searchsorted(edges, cells, side="right") - 1, 0, len(values) - 1)
    until = area[at] + values[at] * (cells - edges[at]).astype(np.float32)[:, None]
    means: NDArray[np.float32] = np.diff(until, axis=0) / np.diff(cells)[:, None].astype(np.float32)
    np.clip(means, 0, 1, out=means)  # sums of many are rounded
    return means


def show(
    ax: Axes, image: NDArray[np.float32], extent: tuple[float, float, float, float], aspect: Any
) -> None:
    """Draw an image of cells, which blends them where they are smaller than the page's dots.

    Blending is in both directions at once, so that few large cells would run into each other:
    they are repeated.
    """
    for axis in (0, 1):
        image = np.repeat(image, -(-_FEWEST // max(1, image.shape[axis])), axis=axis)
    ax.imshow(image, extent=extent, aspect=aspect)


def mixed(colours: list[str], shares: list[NDArray[np.float32]]) -> NDArray[np.float32]:
    """(rows, columns, 3): colours mixed by their shares; the first one takes what is left."""
    from matplotlib.colors import to_rgb

    ground, *others = (np.array(to_rgb(colour), np.float32) for colour in colours)
    image: NDArray[np.float32] = np.broadcast_to(ground, (*shares[0].shape, 3)).copy()
    for colour, share in zip(others, shares, strict=True):
        image += share[:, :, None] * (colour - ground)
    np.clip(image, 0, 1, out=image)
    return image
