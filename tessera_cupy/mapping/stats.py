"""How much of the tensor-core work of a set of tiles is useful."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tessera_cupy.mapping.tiles import Tiles

if TYPE_CHECKING:
    from tessera_cupy.masks.block_mask import BlockMask


def issued_pairs(tiles: Tiles) -> int:
    """(Query, key) pairs that the tensor cores multiply over all mask heads.

    Each step costs a whole physical tile, ``shape.q`` x ``shape.kv``, whatever it masks.
    """
    return int(tiles.steps.sum(dtype="int64")) * tiles.shape.q * tiles.shape.kv


def useful_fraction(tiles: Tiles, mask: BlockMask) -> float:
    """Active pairs of the mask divided by :func:`issued_pairs`; 1.0 means no waste.

    Args:
        tiles: what :func:`~tessera_cupy.mapping.map_mask` made of ``mask``.
        mask: the mask.

    Returns:
        A fraction from 0 to 1; 1.0 when nothing is issued.
    """
    issued = issued_pairs(tiles)
    return mask.active_pairs() / issued if issued else 1.0
