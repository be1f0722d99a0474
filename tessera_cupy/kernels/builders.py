"""Structs and sizes of the kernels that build plans on the GPU; nothing here needs one.

The structs mirror those of the sources in ``kernels_cu/``; they travel by value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tessera_cupy.errors import wrong
from tessera_cupy.kernels.catalog import KernelConfig
from tessera_cupy.kernels.launch import TASK, packed_struct
from tessera_cupy.mapping import halves_fit
from tessera_cupy.mapping.tiles import GROUP_ROWS, TileShape
from tessera_cupy.organization.organize import min_part_steps

if TYPE_CHECKING:
    from tessera_cupy.organization import DeviceModel

_POINTER = np.uint64

#: ``MaskStateParams`` of mask_state.cu.
MASK_STATE_PARAMS = np.dtype(
    [
        *[(name, _POINTER) for name in ("values", "bounds")],
        *[(name, np.int64) for name in ("stride", "width")],
        *[(name, _POINTER) for name in ("bitmap", "row_count", "scalars")],
        *[(name, np.int32) for name in ("rows", "nk", "wide_values", "wide_bounds")],
    ],
    align=True,
)
#: The scalars that ``mask_state`` adds to, in order; all are zero before. ``present`` is of ragged
#: blocks: those that are not absent, on or off, counted by ``ragged_blocks``.
MASK_SCALARS = ("nnz", "in_runs", "present", "zero3", "errors", "zero5", "zero6", "zero7")
#: What the bits of ``errors`` mean, the lowest first.
MASK_ERRORS = (
    "column out of range",
    "column twice in a row",
    "capacity",
    "counts or offsets that do not fit their lists",
    "block size out of range",
    "block sizes that do not sum to the tokens",
)

#: ``RaggedBlocksParams`` of ragged_blocks.cu.
RAGGED_BLOCKS_PARAMS = np.dtype(
    [
        field
        for side in ("q", "kv")
        for field in (
            *[(f"{side}_{name}", _POINTER) for name in ("sizes", "starts")],
            *[(f"{side}_{name}", np.int64) for name in ("batch_stride", "head_stride", "stride")],
            *[(f"{side}_{name}", np.int32) for name in ("blocks", "most", "tokens", "wide")],
        )
    ]
    + [(name, _POINTER) for name in ("mask_bitmap", "mask_scalars", "bitmap", "scalars")]
    + [(name, np.int32) for name in ("batch", "heads", "mask_batch", "mask_heads")],
    align=True,
)
_ROWS_OF_WARP = 8


def ragged_blocks_grid(config: KernelConfig, heads: int, nq: int) -> int:
    """CTAs of ``ragged_blocks``: two a head for the starts, and a warp for each eight rows.

    Args:
        config: the entry.
        heads: mask heads, over the batch.
        nq: rows of one.
    """
    return 2 * heads - (-heads * -(-nq // _ROWS_OF_WARP) // config.warps)


#: ``CsrColumnsParams`` of csr_columns.cu.
CSR_COLUMNS_PARAMS = np.dtype(
    [
        *[(name, _POINTER) for name in ("bitmap", "offsets", "columns", "scalars")],
        ("capacity", np.int64),
        *[(name, np.int32) for name in ("rows", "nk")],
    ],
    align=True,
)


def mask_state_grid(config: KernelConfig, rows: int, sms: int) -> int:
    """CTAs of ``mask_state`` or ``csr_columns``: a warp a row as far as all fit together.

    Args:
        config: the entry.
        rows: rows of all heads of the mask.
        sms: multiprocessors of the GPU.

    Returns:
        At least 1.

    Example:
        >>> from tessera_cupy.kernels.catalog import builder
        >>> mask_state_grid(builder("sm_90a", "mask_state_dense"), 8 * 900, 132)
        450
    """
    return max(1, min(-(-rows // config.warps), config.min_ctas * sms))


_ARRAYS: dict[str, tuple[DTypeLike, int]] = {
    "classes": (np.int32, 4),
    "tile_q": (np.int32, 2),
    "tile_frags": (np.int32, 1),
    "tile_steps": (np.int32, 1),
    "frag_offsets": (np.int64, 1),
    "frags": (np.uint32, 2),
    "tasks": (TASK, 1),
    "turns": (np.int32, 2),
    "pair_slots": (np.int32, 1),
    "merge_head": (np.int32, 1),
    "merge_tile": (np.int32, 1),
    "merge_offsets": (np.int32, 1),
    "counts": (np.int64, 1),
    "rows": (np.int32, 1),
}
#: Bytes of a fragment.
FRAGMENT_BYTES = 8

#: What a mask's state has for the tile kernels; starts are 0 of sides with uniform blocks.
STATE_POINTERS = ("bitmap", "q_starts", "kv_starts")
#: The addresses that the tile kernels take, in the order of their struct.
TILE_POINTERS = (*STATE_POINTERS, *(name for name in _ARRAYS if name != "rows"))

#: Numbers of the params that the kernels divide by.
_DIVISORS = ("head_tiles", "q_heads", "parts", "slot", "per_step", "capacity")

#: ``TilesParams`` of common/tiles.cuh.
TILES_PARAMS = np.dtype(
    [
        *[(name, _POINTER) for name in TILE_POINTERS],
        *[(name, np.int64) for name in ("stamp", "frag_capacity")],
        *[(name, np.int32) for name in ("task_capacity", "merge_capacity")],
        *[(name, np.int32) for name in ("tiles", "head_tiles", "nq", "nk", "words", "sq", "skv")],
        *[(name, np.int32) for name in ("q_block", "kv_block", "joined", "parts", "tile_rows")],
        *[(name, np.int32) for name in ("slot", "per_step", "share", "pairs", "q_heads")],
        *[(name, np.int32) for name in ("mask_batch", "mask_heads", "group_pairs", "capacity")],
        *[(name, np.int32) for name in ("groups", "part_steps", "halves", "ctas_per_sm")],
        *[(f"by_{name}", np.uint64) for name in _DIVISORS],
        ("rows", _POINTER),
    ],
    align=True,
)
#: The counts that ``tile_scan`` writes, in order. ``fragments`` is what the lists need, also where
#: the output has no room for it; ``errors`` is 4 then, and there are no tasks. ``stamp`` is the
#: launch's own.
TILE_COUNTS = ("fragments", "tasks", "merges", "slots", "errors", "zero5", "zero6", "stamp")

#: How the tile kernels map query blocks.
TILE_Q_SIDES = ("retain", "split", "merge", "share")
#: Numbers of the params that are attributes of :class:`TileBuild`.
_NUMBERS = (
    *("frag_capacity", "task_capacity", "merge_capacity", "tiles", "head_tiles", "nq", "nk"),
    *("sq", "skv", "joined", "parts", "pairs", "q_heads", "mask_batch", "mask_heads"),
)
_MAX_TILE_Q = 24 * GROUP_ROWS
_MAX_CAPACITY = 4096
_MAX_PAIRS = 1 << 29
# Fragments have 32-bit places of their first keys.
_MAX_GATHERED = (1 << 31) - 1


@dataclass(frozen=True)
class TileBuild:
    """Sizes of a build by the tile kernels: of a geometry, whatever the mask holds.

    No token bits, KV side pack or, of single keys, gather; longest first and split.

    Attributes:
        q_side: "retain", "split", "merge" or "share".
        shape: the physical tile.
        block_size: (bq, bkv), tokens of a block; of the largest on a ragged side.
        batch, q_heads, kv_heads, sq, skv: of the request.
        mask_batch: 1, or ``batch``.
        mask_heads: 1, or ``q_heads``.
        kv_bytes_per_head: bytes of K and V of one KV head together.
        device: the GPU to organize for.
        frag_capacity: fragments that the output has room for; :attr:`most_fragments` always do.
        ragged: number of blocks of each side (query, key) whose blocks have sizes of their own;
            None of a uniform one.
        gather: whether the columns of the mask are single keys, which are gathered; the key side of
            ``block_size`` is 1 then.

    Raises:
        ValueError: a size that the kernels cannot serve.

    Example:
        >>> from tessera_cupy.organization import DeviceModel
        >>> build = TileBuild(
        ...     "retain",
        ...     TileShape(64, 64, 64),
        ...     (64, 64),
        ...     batch=1,
        ...     q_heads=8,
        ...     kv_heads=8,
        ...     sq=57600,
        ...     skv=57600,
        ...     mask_batch=1,
        ...     mask_heads=8,
        ...     kv_bytes_per_head=2 * 57600 * 128 * 2,
        ...     device=DeviceModel(sms=132, ctas_per_sm=3, l2_bytes=32 << 20),
        ...     frag_capacity=1 << 20,
        ... )
        >>> build.tiles, build.most_fragments, build.arrays()["frag_offsets"]
        (7200, 6480000, ((7201,), dtype('int64')))
    """

    q_side: str
    shape: TileShape
    block_size: tuple[int, int]
    batch: int
    q_heads: int
    kv_heads: int
    sq: int
    skv: int
    mask_batch: int
    mask_heads: int
    kv_bytes_per_head: int
    device: DeviceModel
    frag_capacity: int
    ragged: tuple[int | None, int | None] = (None, None)
    gather: bool = False

    def __post_init__(self) -> None:
        """Refuse what the kernels' numbers cannot hold."""
        for name, got, most, fix in (
            ("shape.q", self.shape.q, _MAX_TILE_Q, "use a catalog's tile size"),
            ("device.capacity", self.device.capacity, _MAX_CAPACITY, "describe a real GPU"),
            ("tiles of all query heads", self.pairs, _MAX_PAIRS, "organize on the host"),
            ("gathered keys", self.gathered, _MAX_GATHERED, "plan on the host"),
        ):
            if got > most:
                raise ValueError(wrong(name, f"at most {most}", got, fix))
        if self.q_side not in TILE_Q_SIDES:
            expected = "one of " + ", ".join(TILE_Q_SIDES)
            raise ValueError(wrong("q_side", expected, repr(self.q_side), "map on the host"))

    @property
    def nq(self) -> int:
        """Query blocks of a head."""
        blocks = self.ragged[0]
        return -(-self.sq // self.block_size[0]) if blocks is None else blocks

    @property
    def nk(self) -> int:
        """KV blocks of a head."""
        blocks = self.ragged[1]
        return -(-self.skv // self.block_size[1]) if blocks is None else blocks

    @property
    def joined(self) -> int:
        """Query blocks of a tile; 1 where a tile has one, or a part of one."""
        if self.q_side not in ("merge", "share"):
            return 1
        if self.halves:
            return 2
        return self.shape.q // max(self.block_size[0], GROUP_ROWS)

    @property
    def halves(self) -> bool:
        """Whether a tile's two ragged query blocks are its halves."""
        fit = halves_fit(self.block_size[0], self.shape.q)
        return self.q_side == "share" and self.ragged[0] is not None and fit

    @property
    def parts(self) -> int:
        """Tiles of a query block; 1 where a tile has one or several."""
        return -(-self.block_size[0] // self.shape.q) if self.joined == 1 else 1

    @property
    def head_tiles(self) -> int:
        """Tiles of a mask head; of ragged query blocks those without rows, too."""
        if self.joined > 1:
            return -(-self.nq // self.joined)
        if self.ragged[0] is not None:
            return self.nq * self.parts
        last = self.sq - (self.nq - 1) * self.block_size[0]
        return (self.nq - 1) * self.parts - (-last // self.shape.q)

    @property
    def tiles(self) -> int:
        """Tiles of all mask heads."""
        return self.mask_batch * self.mask_heads * self.head_tiles

    @property
    def pairs(self) -> int:
        """Tiles of all query heads."""
        return self.batch * self.q_heads * self.head_tiles

    @cached_property
    def most_fragments(self) -> int:
        """Fragments of the fullest mask there is, and the padding of the worst."""
        if self.gather:
            # Of a tile's classes all but the first leave less than one fragment unfilled.
            of_list = -(-self.skv // self.shape.slot) + self._classes - 1
        elif self.ragged[1] is None:
            last = self.skv - (self.nk - 1) * self.block_size[1]
            of_list = (self.nk - 1) * self._of_block - (-last // self.shape.slot)
        else:
            # Each block has less than one fragment more than its tokens fill.
            partly = (self.skv + self.nk * (self.shape.slot - 1)) // self.shape.slot
            of_list = min(self.nk * self._of_block, partly)
        return self.tiles * (of_list + self._padding)

    def fragments_of(self, nnz: int) -> int:
        """Fragments at most of masks with this many active blocks over all heads."""
        if self.gather:
            full = nnz * self.parts // self.shape.slot
            bound = full + self.tiles * (self._classes + self._padding)
        else:
            bound = nnz * self.parts * self._of_block + self.tiles * self._padding
        return min(bound, self.most_fragments)

    @property
    def fragment_bytes(self) -> int:
        """Bytes that a fragment takes, with its gathered keys."""
        return FRAGMENT_BYTES + (4 * self.shape.slot if self.gather else 0)

    @property
    def map_bytes(self) -> int:
        """Bytes of a map of single keys, once for each part of a group; 0 of blocks."""
        rows = self.mask_batch * self.mask_heads * self.nq
        return rows * self.nk * self.parts if self.gather else 0

    @property
    def gathered(self) -> int:
        """Keys that there is room for."""
        return self.frag_capacity * self.shape.slot if self.gather else 0

    @property
    def _classes(self) -> int:
        """Lists of a tile that are cut into fragments apart."""
        return 3 if self.q_side == "share" else 1

    @property
    def _of_block(self) -> int:
        """Fragments of a whole block."""
        return -(-self.block_size[1] // self.shape.slot)

    @property
    def _padding(self) -> int:
        """Fragments at most that fill the steps of a tile's three classes."""
        return 3 * (self.shape.fragments - 1) if self.q_side == "share" else 0

    @property
    def task_capacity(self) -> int:
        """Tasks at most.

        Cutting long tiles adds a task for each CTA that runs at a time, the last round 3.
        """
        return self.pairs + 4 * self.device.capacity

    @property
    def merge_capacity(self) -> int:
        """Tiles at most that are cut in parts.

        Long ones are over 1.5 shares of a CTA, and the last round has fewer than CTAs.
        """
        return min(self.pairs, 2 * self.device.capacity)

    @property
    def merge_ctas(self) -> int:
        """Tiles cut in parts that are merged at the same time; few masks have more."""
        return min(self.merge_capacity, self.device.capacity)

    @property
    def slot_capacity(self) -> int:
        """Workspace slots at most: the tasks that cutting adds, and the first part of each tile."""
        return 4 * self.device.capacity + self.merge_capacity

    def arrays(self) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Shape and dtype of each array that the kernels write, by its name in the params.

        ``classes``, ``turns`` and ``pair_slots`` are scratch, and there are no ``rows`` unless keys
        are gathered. None needs to be filled before.
        """
        lengths = {
            "frag_offsets": self.tiles + 1,
            "frags": self.frag_capacity,
            "rows": self.gathered,
            **dict.fromkeys(("tasks", "turns"), self.task_capacity),
            "pair_slots": self.pairs,
            **dict.fromkeys(("merge_head", "merge_tile"), self.merge_capacity),
            "merge_offsets": self.merge_capacity + 1,
            "counts": len(TILE_COUNTS),
        }
        made: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
        for name, (dtype, width) in _ARRAYS.items():
            if name == "rows" and not self.gather:
                continue
            length = lengths.get(name, self.tiles)
            made[name] = ((length, width) if width > 1 else (length,), np.dtype(dtype))
        return made

    def grid(self, config: KernelConfig) -> int:
        """CTAs of a launch of one of the tile kernels."""
        if config.kernel == "tile_scan":
            return 1
        of_tasks = 0
        if config.kernel in ("tile_fragments", "slice_fragments"):
            of_tasks = -(-self.task_capacity // (32 * config.warps))
        return max(1, of_tasks + -(-self.tiles // config.warps))

    def params(self, pointers: Mapping[str, int], stamp: int = 0) -> NDArray[Any]:
        """One struct of :data:`TILES_PARAMS`, ready to pass by value to each of the kernels.

        Args:
            stamp: comes with the counts.
            pointers: addresses of :data:`TILE_POINTERS`, multiples of 16; and of ``rows``, where
                keys are gathered.
        """
        heads_in_l2 = max(1, self.device.l2_bytes // max(1, self.kv_bytes_per_head))
        group = heads_in_l2 * (self.q_heads // self.kv_heads) * self.head_tiles
        group_pairs = max(1, min(group, self.pairs))
        values = {
            **{name: pointers[name] for name in TILE_POINTERS},
            "rows": pointers.get("rows", 0),
            **{name: getattr(self, name) for name in _NUMBERS},
            "stamp": stamp,
            "words": -(-self.nk // 32),
            "q_block": self.block_size[0],
            "kv_block": self.block_size[1],
            "tile_rows": self.shape.q,
            "slot": self.shape.slot,
            "per_step": self.shape.fragments,
            "share": self.q_side == "share",
            "halves": self.halves,
            "group_pairs": group_pairs,
            "capacity": self.device.capacity,
            "ctas_per_sm": self.device.ctas_per_sm,
            "groups": -(-self.pairs // group_pairs),
            "part_steps": min_part_steps(self.shape.kv),
        }
        values |= {f"by_{name}": divisor(int(values[name])) for name in _DIVISORS}
        return packed_struct(TILES_PARAMS, values)


def divisor(number: int) -> int:
    """``Divisor`` of common/tiles.cuh: the multiplier, and from bit 32 on the shift.

    Args:
        number: 1 to 2**31 - 1.

    Example:
        >>> shift, multiplier = divmod(divisor(7), 2**32)
        >>> (2**31 - 1) * multiplier >> (31 + shift) == (2**31 - 1) // 7
        True
    """
    shift = (number - 1).bit_length()
    multiplier = -(-(1 << (31 + shift)) // number)
    return shift << 32 | multiplier
