"""Masks in GPU memory as the kernels read them: addresses and strides of the caller's own arrays.

Nothing is copied and nothing waits. What the kernels cannot read (another dtype, a device that
CuPy cannot take over) is None here, and the host reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tessera_cupy import interop

_BYTES = ("bool", "uint8", "int8")
_COLUMNS = ("int32", "int64")


@dataclass(frozen=True, eq=False)
class DeviceSource:
    """A mask's arrays in the memory of one GPU.

    Attributes:
        form: ``"dense"``, ``"packed"``, ``"lists"`` or ``"csr"``.
        values: dense (B, H, nq, nk) bytes, of which those that are not 0 keep; packed
            (B, H, nq, ceil(nk / 8)) bytes; lists (B, H, nq, K) columns; csr (nnz,) columns.
        bounds: lists: (B, H, nq) counts; csr: (rows + 1,) offsets; else None.
        axes: (batch, heads) of the arrays.
        num_blocks: (nq, nk).
    """

    form: str
    values: interop.Operand
    bounds: interop.Operand | None
    axes: tuple[int, int]
    num_blocks: tuple[int, int]

    @property
    def device(self) -> int:
        """CUDA device ordinal."""
        return self.values.device

    @property
    def rows(self) -> int:
        """Rows of blocks over all heads."""
        return self.axes[0] * self.axes[1] * self.num_blocks[0]


def dense(mask: Any) -> DeviceSource | None:
    """A block map of bytes."""
    values = _array(mask, 2, _BYTES)
    if values is None:
        return None
    batch, heads, nq, nk = values.shape
    return DeviceSource("dense", values, None, (batch, heads), (nq, nk))


def packed(bits: Any, num_blocks: tuple[int, int]) -> DeviceSource | None:
    """A block map of eight columns a byte."""
    values = _array(bits, 2, ("uint8",))
    if values is None or values.shape[2:] != (num_blocks[0], -(-num_blocks[1] // 8)):
        return None
    return DeviceSource("packed", values, None, (values.shape[0], values.shape[1]), num_blocks)


def lists(indices: Any, counts: Any, num_kv_blocks: int) -> DeviceSource | None:
    """Padded lists of columns."""
    values, bounds = _array(indices, 2, _COLUMNS), _array(counts, 1, _COLUMNS)
    if values is None or bounds is None or num_kv_blocks < 0:
        return None
    if values.device != bounds.device or bounds.shape != values.shape[:3]:
        return None
    batch, heads, nq, _ = values.shape
    return DeviceSource("lists", values, bounds, (batch, heads), (nq, num_kv_blocks))


def csr(
    indptr: Any, indices: Any, axes: tuple[int, int], num_blocks: tuple[int, int]
) -> DeviceSource | None:
    """A flat CSR over all rows."""
    values, bounds = _array(indices, None, _COLUMNS), _array(indptr, None, _COLUMNS)
    if values is None or bounds is None or values.device != bounds.device:
        return None
    if len(values.shape) != 1 or bounds.shape != (axes[0] * axes[1] * num_blocks[0] + 1,):
        return None
    return DeviceSource("csr", values, bounds, axes, num_blocks)


def _array(array: Any, rank: int | None, dtypes: Sequence[str]) -> interop.Operand | None:
    """An array whose ``rank`` trailing axes have two before them, or None for the host to judge."""
    if isinstance(array, (np.ndarray, list, tuple)):
        return None
    try:
        try:
            if interop.on_host(array):
                return None
        except TypeError:  # no array that anybody knows, or one with CUDA's array interface alone
            if not hasattr(array, "__cuda_array_interface__"):
                return None
            array = interop.import_cupy().asarray(array)
        found = interop.device_operand(array, "mask")
    except (BufferError, RuntimeError, TypeError, ValueError):
        return None  # such as a DLPack that exports no bool
    if found.dtype not in dtypes:
        return None
    missing = 0 if rank is None else rank + 2 - len(found.shape)
    if not 0 <= missing <= 2:
        return None
    if missing:
        shape, strides = (1,) * missing + found.shape, (0,) * missing + found.strides
        found = replace(found, shape=shape, strides=strides)
    return None if rank is not None and 0 in found.shape[:2] else found
