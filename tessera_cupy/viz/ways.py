"""One mask under each kind of mapping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tessera_cupy.mapping import Mapping, map_mask, useful_fraction, why_not
from tessera_cupy.mapping.kv_side import largest_kv_block
from tessera_cupy.mapping.planner import MAX_TILE_Q
from tessera_cupy.mapping.q_side import largest_q_block
from tessera_cupy.mapping.tiles import GROUP_ROWS, Tiles
from tessera_cupy.masks import BlockMask, KeySlices
from tessera_cupy.masks.key_slices import block_mask
from tessera_cupy.viz.arguments import check_mask
from tessera_cupy.viz.pieces import skips_steps

if TYPE_CHECKING:
    from tessera_cupy.regimes import PlanSpec

# Columns of a step that gathers single keys.
_GATHERED = 64


@dataclass(frozen=True)
class TiledMask:
    """A mask under one mapping.

    Attributes:
        mapping: the mapping.
        gloss: what a step holds, in a few words.
        tiles: the physical tiles.
        useful: fraction of the tiles' work that is on active entries, over all heads, as
            :func:`~tessera_cupy.mapping.useful_fraction` counts it.
        chosen: whether it is what the given plan does.
    """

    mapping: Mapping
    gloss: str
    tiles: Tiles
    useful: float
    chosen: bool

    @property
    def skips(self) -> bool:
        """Whether each half of a tile is taken to skip the steps that it has no part in."""
        return skips_steps(self.mapping)


def tile_each_way(mask: BlockMask | KeySlices, plan: PlanSpec | None = None) -> list[TiledMask]:
    """Tile a mask under each kind of mapping that it allows.

    For blocks of (bq, bkv), the largest ones where they are ragged, the physical tiles are:
    the block itself (retain); tiles twice as wide, left half empty (retain), filled with a
    neighbour (merge) or with the next active block (pack); tiles twice as high and wide
    (merge, share or regroup, pack); and a quarter of the block (split). Key slices, as blocks of
    16 keys, are gathered too, into steps of 64 keys.

    Args:
        mask: the mask.
        plan: a plan for the mask, to mark its way; added last where it is none of these.

    >>> mask = BlockMask.from_dense([[i == j for j in range(4)] for i in range(4)], (64, 64))
    >>> [(way.mapping.name, way.useful) for way in tile_each_way(mask)][:3]
    [('retain-retain', 1.0), ('retain-retain', 0.5), ('retain-merge', 0.5)]
    """
    check_mask(mask)
    mask = block_mask(mask)
    largest = (largest_q_block(mask), largest_kv_block(mask))
    bq, bkv = (-(-size // GROUP_ROWS) * GROUP_ROWS for size in largest)
    wanted = [
        ("retain-retain", bq, bkv, "a step is a block"),
        ("retain-retain", bq, 2 * bkv, "a block in each step, the rest empty"),
        ("retain-merge", bq, 2 * bkv, "a step is two neighbours, wanted or not"),
        ("retain-pack", bq, 2 * bkv, "a step is the next two wanted blocks"),
        ("merge-pack", 2 * bq, 2 * bkv, "two rows of blocks have one list of steps"),
        ("share-pack", 2 * bq, 2 * bkv, "a half skips the other's steps"),
        ("regroup-pack", 2 * bq, 2 * bkv, "share, of alike rows from anywhere"),
        ("split-split", bq // 2, bkv // 2, "a block takes four small steps"),
        ("retain-gather", bq, _GATHERED, "a step is the next 64 wanted keys, one by one"),
        ("share-gather", 2 * bq, _GATHERED, "the same for two groups; a half skips steps"),
    ]
    own = plan and (plan.mapping.name, plan.tile_q, plan.tile_kv)
    if own and own not in [way[:3] for way in wanted]:
        wanted.append((*own, "the tiles of the plan's kernel"))
    made = []
    for name, q, kv, gloss in wanted:
        mapping = Mapping.parse(name)
        if q % GROUP_ROWS or kv % GROUP_ROWS or q > MAX_TILE_Q:
            continue
        if why_not(mapping, mask, q, kv) is not None:
            continue
        tiles = map_mask(mask, mapping, q, kv)
        useful = useful_fraction(tiles, mask, q // 2 if skips_steps(mapping) else None)
        made.append(TiledMask(mapping, gloss, tiles, useful, (name, q, kv) == own))
    return made
