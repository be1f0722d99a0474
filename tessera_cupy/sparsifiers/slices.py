"""What rules that keep single keys for groups of query rows have in common."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.masks.key_slices import group_count
from tessera_cupy.video import VideoGrid


def text_of(grid: VideoGrid) -> slice:
    """The tokens of text.

    >>> text_of(VideoGrid(2, 8, 8, text_tokens=10))
    slice(128, 138, None)
    """
    first = 0 if grid.text_first else grid.video_tokens
    return slice(first, first + grid.text_tokens)


def keep_text(grid: VideoGrid, group: int) -> NDArray[np.bool_] | None:
    """What every head keeps for its text: all keys for groups with text, text for all groups.

    Args:
        grid: the grid; its text keeps its place in the order of the groups.
        group: query rows of a group.

    Returns:
        (groups, tokens) bool, read-only and made once; None without text.

    Raises:
        ValueError: a group that slices do not come in.
    """
    groups = group_count(grid.tokens, group)
    return _keep_text(grid, int(group), groups) if grid.text_tokens else None


@lru_cache(maxsize=16)
def _keep_text(grid: VideoGrid, group: int, groups: int) -> NDArray[np.bool_]:
    text = text_of(grid)
    kept = np.zeros((groups, grid.tokens), np.bool_)
    kept[:, text] = True
    kept[text.start // group : -(-text.stop // group)] = True
    kept.setflags(write=False)
    return kept


def on_host(x: Any) -> NDArray[Any]:
    """A NumPy or CuPy array as a NumPy array; a CuPy array waits for its GPU."""
    if isinstance(x, np.ndarray):
        return x
    import cupy

    with cupy.cuda.Device(x.device.id):
        array: NDArray[Any] = cupy.asnumpy(x)
    return array
