"""The masks of ``bench slices``: random slices and blocks, and ones of equal attention mass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.bench import slices_mass
from tessera_cupy.masks import BlockMask, KeySlices
from tessera_cupy.permute import TokenOrders
from tessera_cupy.sparsifiers import fg_attn, scoring, spade
from tessera_cupy.video import VideoGrid, inverse

#: Plan of slices, by the rows of a group: each group is a tile, half a tile, or several tiles.
GATHER = {
    128: "attend_wgmma/q128k192/retain-gather/longest+split",
    64: "attend_wgmma/q128k128/share-gather/longest+split",
    192: "attend_wgmma/q128k192/split-gather/longest+split",
}

#: The blocks that random slices are compared with, and that they are a ratio to.
BLOCKS = (128, 64)
RATIO_TO = "blocks 128x128"

#: Slices of the mask that says which mass all others keep too: FG-Attn's groups and share of keys,
#: by extremes.
STANDARD = slices_mass.slices_by_bound(64, "extremes")

CHOOSERS = (
    STANDARD,
    slices_mass.slices_by_bound(64, "norms"),
    *(slices_mass.slices_by_bound(128, "norms", parts) for parts in fg_attn.PARTS),
    slices_mass.blocks_by_means(64),
    slices_mass.blocks_by_extremes(64),
)

_BLOCK = 64
_SAMPLED = 256


class Given(NamedTuple):
    """q, k and v of a case.

    Attributes:
        arrays: (1, heads, tokens, d) bfloat16 on the GPU.
        host: the same values in float32, in host memory.
    """

    arrays: tuple[Any, Any, Any]
    host: tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]


@dataclass(frozen=True, eq=False)
class Case:
    """A mask to measure.

    Attributes:
        name: as in the table, unlike that of any other case.
        mask: slices or blocks; its one head serves all, or it has as many as q.
        regime: as in :func:`tessera_cupy.make_plan`.
        given: q, k and v.
        facts: what else the report says of it, JSON-able.
    """

    name: str
    mask: BlockMask | KeySlices
    regime: str
    given: Given
    facts: dict[str, Any]


def random_slices(tokens: int, group: int, density: float, rng: np.random.Generator) -> KeySlices:
    """Slices of one head, whose groups keep as many keys each, drawn uniformly."""
    kept = _random(-(-tokens // group), tokens, density, rng)
    count = kept.shape[1]
    offsets = np.arange(len(kept) + 1) * count
    return KeySlices.from_csr(offsets, kept.ravel(), group, (tokens, tokens))


def random_blocks(tokens: int, block: int, density: float, rng: np.random.Generator) -> BlockMask:
    """Square blocks of one head, as many in each row, drawn uniformly."""
    across = -(-tokens // block)
    columns = _random(across, across, density, rng)
    kept = np.zeros((across, across), np.bool_)
    np.put_along_axis(kept, columns, True, axis=1)
    return BlockMask.from_dense(kept, (block, block), (tokens, tokens))


def _random(rows: int, columns: int, density: float, rng: np.random.Generator) -> NDArray[np.int32]:
    """(rows, n) columns, none twice in a row: the density of them, and at least one."""
    count = max(1, round(density * columns))
    kept = np.empty((rows, count), np.int32)
    for row in kept:
        row[:] = rng.choice(columns, count, replace=False, shuffle=False)
    return kept


def random_cases(given: Given, density: float, *, as_blocks: bool) -> list[Case]:
    """Random slices in groups of each size, and random blocks.

    Args:
        given: q, k and v.
        density: kept share of the keys, or of the blocks, of each row.
        as_blocks: also the same slices as blocks of keys with token bits.
    """
    rng = np.random.default_rng(0)
    tokens = given.host[0].shape[2]
    cases = [
        Case(f"blocks {size}x{size}", random_blocks(tokens, size, density, rng), "auto", given, {})
        for size in BLOCKS
    ]
    for group, regime in GATHER.items():
        slices = random_slices(tokens, group, density, rng)
        cases.append(Case(f"slices of {group}", slices, regime, given, {}))
        if as_blocks:
            name = f"slices of {group}, as blocks"
            packed = regime.replace("gather", "pack").replace("k128", "k192")
            cases.append(Case(name, slices.to_block_mask(), packed, given, {}))
    return cases


def equal_mass_cases(
    given: Given, grid: VideoGrid, on_chooser: Callable[[], None]
) -> tuple[float, list[Case]]:
    """Slices and blocks, in raster order and in SPADE's tiles, that keep the same attention mass.

    That mass is what FG-Attn's share of keys by extremes keeps, in its groups and in raster order.
    The tiles of
    each head are those, of SPADE's candidates, in whose blocks of 64 queries are most alike.

    Args:
        given: q, k and v in raster order.
        grid: the grid of the tokens.
        on_chooser: called after each mask.

    Returns:
        The mass, and the cases. Their facts: ``order``, ``count`` (columns of each row), ``mass``
        (what the mask keeps of the sampled queries) and ``sampled`` (queries of each head).
    """
    q = given.host[0]
    heads, tokens = q.shape[1:3]
    rng = np.random.default_rng(0)
    count = min(_SAMPLED, tokens)
    rows = np.stack([rng.choice(tokens, count, replace=False) for _ in range(heads)])
    tiles = scoring.most_alike(q, _BLOCK, spade.candidates(grid, spade.WAN_TILES))

    cases: list[Case] = []
    mass = 0.0
    for title, orders in (("raster", TokenOrders.raster(tokens)), ("tiles", tiles)):
        moved = Given(_each(orders.permute, given.arrays), _each(orders.permute, given.host))
        places = [inverse(orders.of(0, head))[rows[head]] for head in range(heads)]
        sampled = slices_mass.sample(*moved.host[:2], np.stack(places))
        for chooser in CHOOSERS:
            scores = slices_mass.scores_of(chooser, *moved.host[:2])
            masses = slices_mass.mass_by_count(chooser, scores, sampled)
            if not cases:
                mass = float(masses[max(1, int(fg_attn.BUDGET * tokens)) - 1])
            kept = slices_mass.fewest(masses, mass)
            mask = slices_mass.keep(chooser, scores, kept, tokens)
            facts = {"order": title, "count": kept, "mass": sampled.kept(mask), "sampled": count}
            regime = GATHER[chooser.rows] if chooser.columns == 1 else "auto"
            cases.append(Case(f"{chooser.name}, {title}", mask, regime, moved, facts))
            on_chooser()
    return mass, cases


def _each(permute: Callable[[Any], Any], arrays: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    q, k, v = map(permute, arrays)
    return q, k, v
