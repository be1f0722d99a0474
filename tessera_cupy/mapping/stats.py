"""How much of the tensor-core work of a set of tiles is useful."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.mapping.tiles import GROUP_ROWS, Tiles

if TYPE_CHECKING:
    from tessera_cupy.masks.block_mask import BlockMask


def computed_parts(tiles: Tiles, part: int) -> NDArray[np.bool_]:
    """Which parts of a tile's rows compute each step: those with a member in it.

    Kernels multiply the rows of a warp or a warpgroup together, and such a part of a tile skips
    a step that none of its rows attends to.

    Args:
        tiles: the tiles.
        part: rows of a part, a multiple of 8 that divides ``shape.q``.

    Returns:
        (steps of all tiles, ``shape.q / part``), steps in the order of the fragments.
    """
    steps = tiles.steps
    place = np.arange(steps.sum(dtype="int64")) - np.repeat(np.cumsum(steps) - steps, steps)
    first = np.repeat(tiles.frag_offsets[:-1], steps) + place * tiles.shape.fragments
    members = np.zeros(0, np.uint32)
    if len(first):
        members = np.bitwise_or.reduceat(tiles.frag_members, first)
    groups = part // GROUP_ROWS
    shifts = np.arange(0, tiles.shape.groups, groups, dtype=np.uint32)
    computed: NDArray[np.bool_] = (members[:, None] >> shifts & np.uint32((1 << groups) - 1)) != 0
    return computed


def issued_pairs(tiles: Tiles, part: int | None = None) -> int:
    """(Query, key) pairs that the tensor cores multiply over all mask heads.

    A step costs ``shape.kv`` columns for each row of the parts that compute it, as
    :func:`computed_parts` says, whatever is masked in them.

    Args:
        tiles: the tiles.
        part: rows that skip a step together; whole tiles when None.
    """
    part = part or tiles.shape.q
    return int(computed_parts(tiles, part).sum(dtype="int64")) * part * tiles.shape.kv


def useful_fraction(tiles: Tiles, mask: BlockMask, part: int | None = None) -> float:
    """Active pairs of the mask divided by :func:`issued_pairs`; 1.0 means no waste.

    Args:
        tiles: what :func:`~tessera_cupy.mapping.map_mask` made of ``mask``.
        mask: the mask.
        part: as in :func:`issued_pairs`.

    Returns:
        A fraction from 0 to 1; 1.0 when nothing is issued.
    """
    issued = issued_pairs(tiles, part)
    return mask.active_pairs() / issued if issued else 1.0
