"""Key slices over arrays in GPU memory, which the host reads only where it is asked to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.masks import device_source
from tessera_cupy.masks.block_mask import BlockMask, grid_of
from tessera_cupy.masks.device_mask import DeviceMask
from tessera_cupy.masks.device_source import DeviceSource
from tessera_cupy.masks.key_slices import BLOCK_KV, KeySlices, SliceBlocks


class DeviceSliceBlocks(DeviceMask, SliceBlocks):
    """What key slices over GPU arrays are as a mask: rows of single keys, as plans gather them.

    Plans that gather nothing take the snapshot's blocks, which the host makes.
    """

    _read_slices: Callable[[], KeySlices]
    _host_slices: KeySlices | None

    def __init__(
        self,
        source: DeviceSource,
        group: int,
        shape: tuple[int, int],
        read: Callable[[], KeySlices],
    ) -> None:
        """``read`` copies the arrays to the host and makes the same slices of them."""
        blocks = (source.num_blocks[0], -(-shape[1] // BLOCK_KV))
        grid = grid_of(blocks, source.axes, (group, BLOCK_KV), shape)
        super().__init__(grid, device_source.of_keys(source), lambda: read().to_block_mask())
        vars(self).update(_read_slices=read, _host_slices=None)

    @property
    def slices(self) -> KeySlices:
        """The slices, whose contents are read when they are asked for."""
        return DeviceSlices(self)

    @property
    def of_slices(self) -> bool:
        """Always; the slices themselves are an object that is made when it is asked for."""
        return True

    @property
    def has_token_bits(self) -> bool:
        """Always, as far as is known without reading the lists."""
        return True

    def slices_on_host(self) -> KeySlices:
        """A snapshot, read after the device is idle, and kept until the mask is refreshed."""
        with self._reading:
            if self._host_slices is None:
                vars(self)["_host_slices"] = self._read_slices()
            assert self._host_slices is not None
            return self._host_slices

    def refresh(self) -> None:
        """Drop what was read of the old contents."""
        super().refresh()
        with self._reading:
            vars(self)["_host_slices"] = None

    def check(self) -> None:
        """Read the arrays, which raises what is wrong with them."""
        self._read_slices()


class DeviceSlices(KeySlices):
    """What ``KeySlices.from_*`` gives for arrays that the builder kernels read where they are.

    All that :class:`KeySlices` knows of its contents is read from the GPU when it is first asked
    for, and kept until :meth:`refresh`. The checks that other slices get when they are built are
    made then, and by :meth:`check`.
    """

    _mask: DeviceSliceBlocks

    def __init__(self, mask: DeviceSliceBlocks) -> None:
        """The slices that a mask is of."""
        # The class is frozen.
        vars(self).update(
            group=mask.block_size[0],
            shape=mask.shape,
            batch=mask.batch,
            heads=mask.heads,
            device=mask.device,
            _mask=mask,
        )

    def __reduce__(self) -> tuple[Callable[..., KeySlices], tuple[KeySlices]]:
        """Copies, and what is pickled, are snapshots."""
        return replace, (self._mask.slices_on_host(),)

    @property
    def indptr(self) -> NDArray[np.int64]:
        """Of the snapshot."""
        return self._mask.slices_on_host().indptr

    @property
    def indices(self) -> NDArray[np.int32]:
        """Of the snapshot."""
        return self._mask.slices_on_host().indices

    def to_block_mask(self, block_kv: int = BLOCK_KV) -> BlockMask:
        """As of other slices; with the default it is over the arrays too, and nothing is read."""
        if block_kv == BLOCK_KV:
            return self._mask
        return self._mask.slices_on_host().to_block_mask(block_kv)

    def refresh(self) -> None:
        """Drop what was read of the old contents, and plans' arrays."""
        self._mask.refresh()

    def check(self) -> None:
        """Read the arrays, which raises what is wrong with them."""
        self._mask.check()
