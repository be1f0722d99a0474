"""Mapping: how a mask's logical blocks become the physical tiles of a kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, get_args

import numpy as np

from tessera_cupy.errors import PlanNotEligibleError, wrong
from tessera_cupy.mapping import gather
from tessera_cupy.mapping.kv_side import KvSide, largest_kv_block, lay_out
from tessera_cupy.mapping.q_side import QSide, largest_q_block, makes_halves, tile_lists
from tessera_cupy.mapping.regroup import regroup, reordered, units
from tessera_cupy.mapping.share import share
from tessera_cupy.mapping.tiles import GROUP_ROWS, UNIT_ROWS, Tiles, TileShape

if TYPE_CHECKING:
    from tessera_cupy.masks.block_mask import BlockMask

#: Rows that a 32-bit membership word can describe.
MAX_TILE_Q = 32 * GROUP_ROWS

# Columns that ragged blocks of unknown sizes may take for one fragment if half a block has them, so
# that a step has few fragments to fetch.
_UNREAD_SLOT = 16

#: Fewest columns of a fragment: the 8 rows that one swizzle atom holds.
MIN_SLOT = 8


@dataclass(frozen=True)
class Mapping:
    """How each side of a logical block becomes part of a physical tile.

    Attributes:
        q: "retain" (a tile is a query block), "merge" (a tile joins neighbouring query
            blocks and takes the union of their lists; membership masks what is off),
            "share" (the same, with steps that both halves of the tile need apart from
            steps of one half, which the other skips; of two ragged blocks each is a half,
            wherever they begin), "regroup" (share, with tiles of the
            query blocks whose lists are most alike in place of neighbours) or "split" (a
            query block becomes several tiles).
        kv: "retain" (a step is a KV block), "merge" (a step covers an aligned group of
            neighbouring KV blocks, active or not), "split" (a KV block becomes several
            steps), "pack" (active blocks from anywhere in the list share a step) or "gather"
            (of key slices: runs of keys and single keys from anywhere share a step).

    Raises:
        ValueError: a side has another name.

    Example:
        >>> Mapping("merge", "pack").name
        'merge-pack'
    """

    q: QSide
    kv: KvSide

    def __post_init__(self) -> None:
        for side, got, names in (
            ("q", self.q, get_args(QSide)),
            ("kv", self.kv, get_args(KvSide)),
        ):
            if got not in names:
                expected = "one of " + ", ".join(names)
                raise ValueError(wrong(side, expected, repr(got), "use one of these names"))

    @property
    def name(self) -> str:
        """Both sides joined by a hyphen, as in "retain-pack"."""
        return f"{self.q}-{self.kv}"

    @classmethod
    def parse(cls, name: str) -> Mapping:
        """The mapping of a :attr:`name`.

        Raises:
            ValueError: the text is not two known names joined by a hyphen.
        """
        q, hyphen, kv = name.partition("-")
        if not hyphen:
            raise ValueError(
                wrong("name", "two names joined by a hyphen", repr(name), 'write "retain-pack"')
            )
        return cls(q, kv)  # type: ignore[arg-type]


def choose_slot(mask: BlockMask, tile_kv: int) -> int:
    """Columns of a fragment that suit the mask's KV blocks.

    Uniform KV blocks take the largest power of two, at least 8, that divides both the
    block and ``tile_kv``. Ragged blocks take the largest one that pads the blocks, all
    together, to at most 1/32 more columns than fragments of 8 would: fewer fragments
    cost less to fetch, and a few odd blocks at the edges do not force the smallest. That
    neighbours are cut as one, where the same rows attend to them, is not counted. Of
    ragged blocks whose sizes are in GPU memory only the nominal size is known: they take a
    quarter of it, or up to 16 columns of blocks of 32, rounded down to a power of two.

    Args:
        mask: the mask whose KV blocks are cut.
        tile_kv: physical KV columns of a step, a multiple of 8.

    Returns:
        A power of two from 8 to ``tile_kv`` that divides ``tile_kv``.

    Raises:
        ValueError: ``tile_kv`` is not a positive multiple of 8.

    Example:
        >>> from tessera_cupy.masks import BlockMask
        >>> choose_slot(BlockMask.from_dense([[1, 0], [1, 1]], (48, 48)), 64)
        16
    """
    slots = _slots(tile_kv, "tile_kv")
    if mask.unread_sides[1]:
        most = max(mask.block_size[1] // 4, min(_UNREAD_SLOT, mask.block_size[1] // 2), MIN_SLOT)
        return max(slot for slot in slots if slot <= most)
    sizes = mask.kv_block_sizes
    if sizes is None:
        return max(slot for slot in slots if mask.block_size[1] % slot == 0)
    wide = sizes.astype(np.int64)

    def columns(slot: int) -> int:
        return int((-(-wide // slot) * slot).sum())

    allowed = columns(MIN_SLOT) * 33 // 32
    return max(slot for slot in slots if columns(slot) <= allowed)


def gather_slot(tile_kv: int) -> int:
    """Columns of a fragment where single keys are gathered into steps of ``tile_kv`` columns.

    >>> gather_slot(192), gather_slot(32)
    (64, 32)
    """
    return max(slot for slot in _slots(tile_kv, "tile_kv") if slot <= gather.SLOT)


def can_regroup(block: int, q: int) -> bool:
    """Whether blocks of ``block`` query rows can be regrouped into tiles of ``q`` rows.

    A tile is filled by pairing blocks, then pairs, and so on; kernels take 16 rows from a place.
    """
    joined = q // block
    return q % block == 0 and block % UNIT_ROWS == 0 and joined > 1 and joined.bit_count() == 1


def _slots(kv: int, argument: str) -> list[int]:
    """Legal fragment sizes in a step of ``kv`` columns, ascending."""
    if kv < MIN_SLOT or kv % MIN_SLOT:
        expected = f"a positive multiple of {MIN_SLOT}"
        raise ValueError(wrong(argument, expected, kv, "use a catalog's tile size"))
    sizes = (MIN_SLOT << i for i in range(kv.bit_length()))
    return [slot for slot in sizes if kv % slot == 0]


def why_not(mapping: Mapping, mask: BlockMask, q: int, kv: int) -> str | None:
    """Why a mapping cannot serve a mask with tiles of ``q`` rows and ``kv`` columns.

    A ragged side is judged by its largest block, a uniform one by its nominal size.

    Args:
        mapping: the mapping.
        mask: the mask.
        q: physical query rows of a tile.
        kv: physical KV columns of a step.

    Returns:
        One sentence, or None when the mapping is eligible.
    """
    if mapping.kv == "gather":
        return gather.why_not(mask.slices, mapping.q, q)
    bq, bkv = largest_q_block(mask), largest_kv_block(mask)
    if mapping.q == "retain" and bq > q:
        return f"retain Q needs query blocks of at most {q} rows (the tile), got {bq}"
    if mapping.q == "split" and bq <= q:
        return f"split Q needs query blocks of more than {q} rows (the tile), got {bq}"
    if mapping.q in ("share", "regroup") and (mapping.kv != "pack" or q % (2 * GROUP_ROWS)):
        got = f"{mapping.kv} KV and {q} rows"
        return f"{mapping.q} Q needs pack KV and tiles of two halves, got {got}"
    if mapping.q == "regroup":
        if mask.ragged_sides[0]:
            return "regroup Q needs query blocks of one size, got ragged blocks"
        if not can_regroup(bq, q):
            return (
                f"regroup Q needs query blocks of a multiple of {UNIT_ROWS} rows, of which 2, 4, 8 "
                f"or another power of two fill a tile of {q} rows, got blocks of {bq}"
            )
    if mapping.q in ("merge", "share"):
        if 2 * bq > q:
            return f"{mapping.q} Q needs two query blocks in a tile of {q} rows, got blocks of {bq}"
        if makes_halves(mask, mapping.q, q):
            if mask.has_token_bits:
                return "share Q of ragged query blocks needs a mask without token bits"
        elif mask.unread_sides[0]:
            return f"{mapping.q} Q needs sizes of query blocks that the host knows"
        elif _starts_between_groups(mask):
            return f"{mapping.q} Q needs query blocks that begin at multiples of {GROUP_ROWS} rows"
    if mapping.kv == "retain" and bkv > kv:
        return f"retain KV needs KV blocks of at most {kv} rows (the tile), got {bkv}"
    if mapping.kv == "split" and bkv <= kv:
        return f"split KV needs KV blocks of more than {kv} rows (the tile), got {bkv}"
    if mapping.kv == "merge":
        if mask.ragged_sides[1]:
            return "merge KV needs KV blocks of one size, got ragged blocks"
        if 2 * bkv > kv:
            return f"merge KV needs two KV blocks in a tile of {kv} columns, got blocks of {bkv}"
    return None


def _starts_between_groups(mask: BlockMask) -> bool:
    """Whether some query block begins inside of a group of rows."""
    starts = mask.q_starts()
    return bool(((starts % GROUP_ROWS != 0) & (starts < mask.shape[0])).any())


def map_mask(mask: BlockMask, mapping: Mapping, q: int, kv: int, slot: int | None = None) -> Tiles:
    """Map a mask onto physical tiles.

    Every active (query, key) pair of the mask is in exactly one (tile, fragment), and no
    inactive pair is in any; every query row is in exactly one tile. Fragments of a tile
    ascend by KV row, with pack first those without token bits, with gather first those that are
    not gathered, with share and regroup inside each of their classes. Pack cuts neighbouring ragged
    blocks with the same members as one, and writes those of its fragments that are not whole
    behind the others, by falling KV row. Heads and batches that the
    mask broadcasts stay broadcast.

    Args:
        mask: the mask.
        mapping: how each side is mapped.
        q: physical query rows of a tile, a multiple of 8 up to 256.
        kv: physical KV columns of a step, a multiple of 8.
        slot: columns of a fragment, a power of two from 8 that divides ``kv``;
            when None :func:`choose_slot`, or with gather up to :data:`gather.SLOT`.

    Returns:
        Tiles sorted by mask head, then by first query row.

    Raises:
        ValueError: a tile size is not legal.
        PlanNotEligibleError: (a ValueError) :func:`why_not` has a reason.

    Example:
        >>> from tessera_cupy.masks import BlockMask
        >>> mask = BlockMask.from_dense([[1, 0], [1, 1]], (64, 48))
        >>> tiles = map_mask(mask, Mapping("retain", "pack"), 64, 64)
        >>> tiles.steps.tolist(), tiles.frag_start.tolist()
        ([1, 2], [0, 16, 32, 0, 16, 32, 48, 64, 80])
    """
    if q % GROUP_ROWS or not GROUP_ROWS <= q <= MAX_TILE_Q:
        expected = f"a multiple of {GROUP_ROWS} from {GROUP_ROWS} to {MAX_TILE_Q}"
        raise ValueError(wrong("q", expected, q, "use a catalog's tile size"))
    slots = _slots(kv, "kv")
    if slot is None and mapping.kv == "gather":
        slot = gather_slot(kv)
    elif slot is None:
        slot = choose_slot(mask, kv)
    elif slot not in slots:
        expected = f"one of {slots}, the powers of two from {MIN_SLOT} that divide kv = {kv}"
        raise ValueError(wrong("slot", expected, slot, "leave it out"))
    reason = why_not(mapping, mask, q, kv)
    if reason is not None:
        expected, fix = "one that can serve the mask", "choose another mapping or tile"
        raise PlanNotEligibleError(wrong("mapping", expected, f"{mapping.name}: {reason}", fix))
    if mask.slices is not None and mapping.kv == "gather":
        # As the GPU does, which cuts lists without a look at their runs.
        runs = mask.source is None
        return gather.map_slices(mask.slices, mapping.q, q, kv, slot, runs=runs)
    halves = makes_halves(mask, mapping.q, q)
    mask = mask.on_host()
    shape = TileShape(q, kv, slot)
    if mapping.q == "regroup":
        return share(_regrouped(mask, shape))
    lists = tile_lists(mask, mapping.q, q, halves=halves)
    tiles = lay_out(mask, lists, mapping.kv, shape)
    return share(tiles) if mapping.q == "share" else tiles


def _regrouped(mask: BlockMask, shape: TileShape) -> Tiles:
    """Merged and packed tiles of the query blocks whose lists are most alike."""
    order = regroup(mask, shape.q)
    rows = units(order, mask.block_size[0], shape.q, mask.shape[0])
    moved = reordered(mask, order)
    tiles = lay_out(moved, tile_lists(moved, "regroup", shape.q), "pack", shape)
    tile_q = np.stack([rows[:, 0], tiles.tile_q[:, 1]], axis=1)
    return replace(tiles, tile_q=tile_q, tile_units=rows)
