"""Physical tiles: the arrays that mapping hands to organization and to the kernels.

A *tile* is a set of query rows, neighbours unless they were regrouped, and the list of
KV *fragments* that they attend to. A fragment is a run of at most ``slot`` neighbouring KV
rows. One kernel *step* loads ``shape.fragments`` consecutive fragments of the list side by
side into a physical KV tile of ``shape.kv`` columns: fragment ``i`` of a step owns
columns ``[i * slot, (i + 1) * slot)``, and columns past its length are masked.
The rows of a *gathered* fragment are listed one by one and may lie anywhere.

Retain, merge, split, pack and gather differ only in which fragments share a step, so the
kernels and the executor know nothing of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Rows in one membership group. Both ``mma.m16n8k16`` and ``wgmma.m64`` give a
#: thread rows ``r`` and ``r + 8`` of its warp's 16 rows in separate registers, so
#: eight-row groups cost no more than sixteen-row ones, and they make block sizes
#: that are only multiples of 8 exact.
GROUP_ROWS = 8

#: Rows of one unit: what a tile with regrouped rows takes from one place. It is what one
#: warp holds in both ``mma.m16n8k16`` and ``wgmma.m64``.
UNIT_ROWS = 16


@dataclass(frozen=True, order=True)
class TileShape:
    """Geometry of a physical tile: query rows, KV columns a step, columns a fragment slot.

    ``q`` and ``kv`` are multiples of 8; ``slot`` is a power of two from 8 to ``kv``
    that divides ``kv``.
    """

    q: int
    kv: int
    slot: int

    @property
    def fragments(self) -> int:
        """Fragment slots in one step."""
        return self.kv // self.slot

    @property
    def groups(self) -> int:
        """Membership groups of :data:`GROUP_ROWS` query rows in one tile."""
        return self.q // GROUP_ROWS


@dataclass(frozen=True, eq=False)
class Tiles:
    """Struct of arrays over T tiles and F fragments; all C-contiguous, on the host.

    Attributes:
        shape: the geometry that the arrays were built for.
        heads: number of mask heads (mask batch x mask heads) that ``tile_head`` counts.
        tile_head: (T,) int32, mask head ``b * mask.heads + h`` of a tile; tiles are
            sorted by head, then by first row. Broadcast masks are not expanded.
        tile_q: (T, 2) int32, first query row and number of rows (1 to ``shape.q``).
            Every query row of a head is in exactly one tile, also when its list is empty.
            Rows ``0`` to ``rows - 1`` of the tile exist, unless it has halves.
        frag_offsets: (T + 1,) int64, CSR over tiles. A tile's list holds whole steps
            except that the last step may be short.
        frag_start: (F,) int32, first KV row; of a gathered fragment the index of its first entry
            in ``rows``.
        frag_len: (F,) int32, rows, 0 to ``shape.slot``; 0 pads a step.
        frag_members: (F,) uint32, bit ``g`` set when the rows of group ``g``
            (rows ``8 g`` to ``8 g + 7`` of the tile) attend to the fragment. Bits past
            the tile's rows are 0. A fragment with no members is loaded by nobody.
        frag_bits: (F,) int32, index into ``bits``, or -1 where membership says it all.
        bits: (P, shape.q, ceil(shape.slot / 32)) uint32 token bits in the tile's own
            coordinates: bit ``c % 32`` of word ``c // 32`` of row ``r`` is set when row
            ``r`` of the tile attends to column ``c`` of the fragment. They refine
            membership: a bit outside the members is 0.
        tile_units: (T, shape.q // 16) int32 where rows were regrouped: row ``r`` of tile ``t``
            is query row ``tile_units[t, r // 16] + r % 16``, and ``tile_units[t, 0]`` is
            ``tile_q[t, 0]``; -1 for units without rows. None where row ``r`` is query row
            ``tile_q[t, 0] + r``.
        tile_halves: (T,) int32 of tiles that join two ragged query blocks: rows of the first,
            0 to ``shape.q // 2``. It has the tile's rows from 0 on, and the second one, with the
            rest of ``tile_q[t, 1]``, those from ``shape.q // 2`` on: so both begin where a kernel's
            rows begin that skip steps together. Rows between do not exist. Otherwise None.
        frag_gathered: (F,) bool, whether a fragment is gathered: column ``c`` of fragment ``f``
            then is KV row ``rows[frag_start[f] + c]``. None where no fragment is.
        rows: (R,) int32, KV rows of the gathered fragments, ascending in each; fragments may have
            the same ones. None where no fragment is gathered.
    """

    shape: TileShape
    heads: int
    tile_head: NDArray[np.int32]
    tile_q: NDArray[np.int32]
    frag_offsets: NDArray[np.int64]
    frag_start: NDArray[np.int32]
    frag_len: NDArray[np.int32]
    frag_members: NDArray[np.uint32]
    frag_bits: NDArray[np.int32]
    bits: NDArray[np.uint32] = field(repr=False)
    tile_units: NDArray[np.int32] | None = None
    tile_halves: NDArray[np.int32] | None = None
    frag_gathered: NDArray[np.bool_] | None = None
    rows: NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self.tile_head)

    @property
    def steps(self) -> NDArray[np.int32]:
        """(T,) int32: kernel steps of each tile."""
        counts = np.diff(self.frag_offsets)
        return ((counts + self.shape.fragments - 1) // self.shape.fragments).astype(np.int32)

    def query_rows(self, tile: Any, row: Any) -> Any:
        """Query rows of the head that rows of tiles are; both integers or arrays that broadcast."""
        if self.tile_units is not None:
            return self.tile_units[tile, row // UNIT_ROWS] + row % UNIT_ROWS
        if self.tile_halves is not None:
            lacking = self.shape.q // 2 - self.tile_halves[tile]
            row = row - np.where(row < self.shape.q // 2, 0, lacking)
        return self.tile_q[tile, 0] + row

    def exists(self, tile: Any, row: Any) -> Any:
        """Whether tiles have rows; both integers or arrays that broadcast."""
        rows = self.tile_q[tile, 1]
        if self.tile_halves is None:
            return row < rows
        first, middle = self.tile_halves[tile], self.shape.q // 2
        return np.where(row < middle, row < first, row - middle < rows - first)

    def tile_rows(self, tile: int) -> NDArray[np.intp]:
        """The rows that a tile has, ascending."""
        return np.flatnonzero(self.exists(tile, np.arange(self.shape.q)))

    def key_rows(self, fragment: Any, column: Any) -> Any:
        """KV rows that columns of fragments are; both integers or arrays that broadcast.

        Of columns past a fragment's length it is some number.
        """
        row = self.frag_start[fragment] + column
        if self.rows is None or self.frag_gathered is None or not len(self.rows):
            return row
        listed = self.frag_gathered[fragment] & (column < self.frag_len[fragment])
        return np.where(listed, self.rows[np.where(listed, row, 0)], row)

    def keys_end(self) -> int:
        """One past the last KV row of any fragment; 0 without rows."""
        runs = self.frag_len > 0
        listed = 0
        if self.rows is not None and self.frag_gathered is not None:
            runs &= ~self.frag_gathered
            listed = 1 + int(self.rows.max(initial=-1))
        return max(listed, int((self.frag_start + self.frag_len)[runs].max(initial=0)))

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(a.nbytes for a in self.arrays().values())

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays by name, in the order of the class."""
        own: dict[str, NDArray[Any] | None] = {
            "tile_units": self.tile_units,
            "tile_halves": self.tile_halves,
            "frag_gathered": self.frag_gathered,
            "rows": self.rows,
        }
        return {
            "tile_head": self.tile_head,
            "tile_q": self.tile_q,
            "frag_offsets": self.frag_offsets,
            "frag_start": self.frag_start,
            "frag_len": self.frag_len,
            "frag_members": self.frag_members,
            "frag_bits": self.frag_bits,
            "bits": self.bits,
            **{name: array for name, array in own.items() if array is not None},
        }
