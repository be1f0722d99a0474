"""What a GPU knows of a mask in its memory: the figures that a table sees, and single rows.

The host would copy and read all of a mask for either, which takes seconds for key slices.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy import gpus, interop
from tessera_cupy.bench.slices_mass import kept_of
from tessera_cupy.kernels import device_build
from tessera_cupy.masks import BlockMask, KeySlices
from tessera_cupy.masks.key_slices import block_mask
from tessera_cupy.masks.summary import MaskSummary

_DEVICE_TO_HOST = 2


class Counted:
    """A mask over GPU arrays, counted by ``mask_state`` on the current stream.

    Args:
        mask: blocks or slices of batch 1 over arrays of the current device.
        arch: architecture of the device.
    """

    def __init__(self, mask: BlockMask | KeySlices, arch: str) -> None:
        self._mask = block_mask(mask)
        assert self._mask.source is not None
        device = self._mask.source.layout.device
        sms = gpus.multiprocessors(device)
        self._state = device_build.mask_state(self._mask.source, arch, sms)

    @cached_property
    def summary(self) -> MaskSummary:
        """The figures; waits for the GPU."""
        return self._state.summary()

    def kept(self, head: int, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """The keys that rows of a head keep, (n, keys); arguments as of ``kept_of``."""
        layout = self._state.source.layout
        (nq, nk), tokens = layout.num_blocks, self._mask.shape[1]
        heads = layout.axes[1] if layout.ragged is None else layout.ragged.axes[1]
        head %= heads
        bitmap, q_starts, kv_starts = self._state.pointers
        block = self._mask.block_size
        blocks = rows // block[0]
        if q_starts:
            starts = self._read(q_starts, np.int32, head * (nq + 1), nq + 1)
            blocks = np.searchsorted(starts, rows, side="right") - 1
        sizes: Any = 1 if layout.keys else block[1]
        if kv_starts:
            sizes = np.diff(self._read(kv_starts, np.int32, head * (nk + 1), nk + 1))
        words = -(-nk // 32)
        kept = np.zeros((len(rows), tokens), np.bool_)
        for line, row in zip(kept, blocks.tolist(), strict=True):
            bits = self._read(bitmap, np.uint32, (head * nq + row) * words, words)
            columns = np.unpackbits(bits.view(np.uint8), bitorder="little")[:nk]
            line[:] = np.repeat(columns.astype(np.bool_), sizes)[:tokens]
        return kept

    def _read(self, pointer: int, dtype: Any, first: int, count: int) -> NDArray[Any]:
        """Some numbers of an array of the state."""
        cupy = interop.import_cupy()
        numbers: NDArray[Any] = np.empty(count, dtype)
        size, stream = numbers.itemsize, cupy.cuda.get_current_stream()
        cupy.cuda.runtime.memcpyAsync(
            numbers.ctypes.data, pointer + first * size, numbers.nbytes, _DEVICE_TO_HOST, stream.ptr
        )
        stream.synchronize()
        return numbers


def kept_rows(mask: BlockMask | KeySlices, counted: Counted | None) -> Any:
    """What tells which keys rows keep: the GPU where it counted the mask, else the host."""
    return partial(kept_of, mask) if counted is None else counted.kept
