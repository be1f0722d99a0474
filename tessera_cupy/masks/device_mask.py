"""A block mask over arrays in GPU memory, which the host reads only where it is asked to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.masks.block_mask import BlockMask
from tessera_cupy.masks.device_source import DeviceSource, RaggedLayout
from tessera_cupy.masks.entries import Entries
from tessera_cupy.masks.geometry import BlockGrid


class DeviceMask(BlockMask):
    """What ``BlockMask.from_*`` gives for arrays that the builder kernels read where they are.

    All that a :class:`BlockMask` knows of its contents is read from the GPU when it is first asked
    for, and kept until :meth:`refresh`. The checks that other masks get when they are built are
    made then, and by :meth:`check`.
    """

    _source: DeviceSource
    _version: int
    _read: Callable[[], BlockMask]
    _reading: threading.Lock
    _host: BlockMask | None

    def __init__(
        self, grid: BlockGrid, source: DeviceSource, read: Callable[[], BlockMask]
    ) -> None:
        """``read`` copies the arrays to the host and makes the same mask of them."""
        # All of the grid, with what it has worked out; the class is frozen.
        vars(self).update(
            vars(grid),
            device=source.layout.device,
            _source=source,
            _version=0,
            _read=read,
            _reading=threading.Lock(),
            _host=None,
        )

    def __reduce__(self) -> tuple[Callable[..., BlockMask], tuple[BlockMask]]:
        """Copies, and what is pickled, are snapshots."""
        return replace, (self.on_host(),)

    @property
    def source(self) -> DeviceSource:
        """The arrays."""
        return self._source

    @property
    def version(self) -> int:
        """How often the mask was refreshed."""
        return self._version

    def on_host(self) -> BlockMask:
        """A snapshot, read after the device is idle, and kept until the mask is refreshed."""
        with self._reading:
            if self._host is None:
                self._host = self._read()
            return self._host

    def refresh(self) -> None:
        """Drop what was read of the old contents."""
        with self._reading:
            self._host = None
            self._version += 1

    def check(self) -> None:
        """Read the arrays, which raises what is wrong with them."""
        self._read()

    @property
    def has_token_bits(self) -> bool:
        """Never: such a mask is a snapshot."""
        return False

    @property
    def indptr(self) -> NDArray[np.int64]:
        """Of the snapshot."""
        return self.on_host().indptr

    @property
    def indices(self) -> NDArray[np.int32]:
        """Of the snapshot."""
        return self.on_host().indices

    @property
    def partial(self) -> NDArray[np.int32]:
        """Of the snapshot."""
        return self.on_host().partial

    @property
    def token_bits(self) -> NDArray[np.uint32]:
        """Of the snapshot: none."""
        return self.on_host().token_bits

    @property
    def _entries(self) -> Entries:
        return self.on_host()._entries

    @property
    def _active_pairs(self) -> int:
        return self.on_host()._active_pairs

    @property
    def _run_coverage(self) -> float:
        return self.on_host()._run_coverage


class UnreadMask(DeviceMask):
    """A mask over GPU arrays whose blocks have sizes in GPU memory, on one side or both.

    Of those sides only the number of blocks and the nominal size are known without a wait.
    """

    @property
    def num_blocks(self) -> tuple[int, int]:
        """(nq, nk): blocks on each side."""
        return self._source.num_blocks

    @property
    def ragged_sides(self) -> tuple[bool, bool]:
        """Whether blocks have sizes of their own, of the query and of the key side."""
        q, kv = self._layout.sizes
        return q is not None, kv is not None

    @property
    def unread_sides(self) -> tuple[bool, bool]:
        """Sides whose sizes are in GPU memory."""
        return self._layout.unread

    @property
    def max_block(self) -> tuple[int, int]:
        """Rows and columns that a block has at most."""
        return self._layout.most

    @property
    def q_block_sizes(self) -> NDArray[np.int32] | None:
        """Of the snapshot, where they are in GPU memory."""
        return self._sizes(0, "q_block_sizes")

    @property
    def kv_block_sizes(self) -> NDArray[np.int32] | None:
        """Of the snapshot, where they are in GPU memory."""
        return self._sizes(1, "kv_block_sizes")

    def q_starts(self) -> NDArray[np.int64]:
        """Of the snapshot, where sizes are in GPU memory."""
        return self._start(0, self.q_block_sizes)

    def kv_starts(self) -> NDArray[np.int64]:
        """Of the snapshot, where sizes are in GPU memory."""
        return self._start(1, self.kv_block_sizes)

    def _sizes(self, side: int, name: str) -> NDArray[np.int32] | None:
        # What the grid has of a side that was not read stands in for it.
        known: NDArray[np.int32] | None = vars(self)[name]
        return getattr(self.on_host(), name) if self.unread_sides[side] else known

    @property
    def _layout(self) -> RaggedLayout:
        layout = self._source.layout.ragged
        assert layout is not None
        return layout
