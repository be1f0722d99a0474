"""Tasks: the arrays that organization hands to the kernels, in launch order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Tasks:
    """Struct of arrays over N tasks; all C-contiguous, on the host.

    A task is one CTA's work: a range of steps of one tile, for one query head. Tiles
    of a broadcast mask appear once for each batch entry and head that shares them.

    Attributes:
        task_head: (N,) int32, query head ``b * q_heads + h`` of the request.
        task_tile: (N,) int32, index into ``Tiles``.
        task_begin, task_end: (N,) int32, steps ``[begin, end)`` of the tile; equal for
            a tile with an empty list, which still writes its zeros.
        task_reverse: (N,) bool, walk the steps from the last to the first.
        task_slot: (N,) int32, workspace slot of a split-K part, or -1.
        merge_head, merge_tile: (M,) int32, the split tiles.
        merge_offsets: (M + 1,) int32, CSR: slots ``[merge_offsets[i], merge_offsets[i + 1])``
            hold tile ``i``'s parts in the order of their steps; merging in slot order makes
            results bitwise repeatable.
    """

    task_head: NDArray[np.int32]
    task_tile: NDArray[np.int32]
    task_begin: NDArray[np.int32]
    task_end: NDArray[np.int32]
    task_reverse: NDArray[np.bool_]
    task_slot: NDArray[np.int32]
    merge_head: NDArray[np.int32]
    merge_tile: NDArray[np.int32]
    merge_offsets: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.task_tile)

    @property
    def slots(self) -> int:
        """Workspace slots that the split-K parts need."""
        return int(self.merge_offsets[-1])

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays by name, in the order of the class."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}
