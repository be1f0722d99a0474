"""Tensor maps: how Hopper's copy engine sees a tensor, encoded by the driver and cached."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

#: A 128-byte map as one NumPy scalar, as kernels take it by value.
TENSOR_MAP = np.dtype("V128")

#: Columns of a box: 64 two-byte elements are the 128 bytes of the swizzle.
SLAB = 64


@lru_cache(maxsize=1024)
def encode(
    pointer: int, dtype: str, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> Any:
    """Encode a map in the 128-byte swizzle; what lies outside the tensor reads as zeros.

    Args:
        pointer: device address, a multiple of 16.
        dtype: ``"float16"`` or ``"bfloat16"``.
        sizes: elements along each axis, innermost first.
        strides: elements between neighbours along each axis but the innermost; multiples of 8.
        box: elements that one copy takes along each axis.

    Returns:
        A scalar of :data:`TENSOR_MAP`.

    Raises:
        RuntimeError: the driver refuses; the message has its arguments.
    """
    from cuda.bindings import driver

    types = driver.CUtensorMapDataType
    element = {
        "float16": types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        "bfloat16": types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    }[dtype]
    error, encoded = driver.cuTensorMapEncodeTiled(
        element,
        len(sizes),
        pointer,
        [driver.cuuint64_t(size) for size in sizes],
        [driver.cuuint64_t(2 * stride) for stride in strides],
        [driver.cuuint32_t(size) for size in box],
        [driver.cuuint32_t(1)] * len(sizes),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(error) != 0:
        raise RuntimeError(
            f"cuTensorMapEncodeTiled: {error} for address {pointer:#x}, {dtype}, sizes {sizes}, "
            f"strides {strides}, box {box}"
        )
    return np.array([int(word) for word in encoded.opaque], np.uint64).view(TENSOR_MAP)[0]


def rows_map(
    pointer: int,
    dtype: str,
    shape: tuple[int, int, int, int],
    strides: tuple[int, int, int],
    rows: int,
) -> Any:
    """A map of boxes of 64 columns and ``rows`` rows at any row of a head.

    Args:
        pointer: device address.
        dtype: element type.
        shape: (batch, heads, rows, head dim).
        strides: elements between batch entries, heads and rows.
        rows: rows of a box.
    """
    batch, heads, length, dim = shape
    steps = [_step(strides[2], length), _step(strides[1], heads), _step(strides[0], batch)]
    return encode(pointer, dtype, (dim, length, heads, batch), tuple(steps), (SLAB, rows, 1, 1))


def fragment_map(
    pointer: int,
    dtype: str,
    shape: tuple[int, int, int, int],
    strides: tuple[int, int, int],
    slot: int,
) -> Any | None:
    """A map whose box is a whole fragment, laid out as [8-row group][slab][8 rows][64 columns].

    Groups begin every 8 rows, and a box at row 0 to 7 of a group: groups overlap, as each has the
    8 rows of the next one too. So a fragment may begin at any row. The last rows of a head that
    fill no group of 8 are out of its reach; a fragment that ends before them never leaves the
    tensor.

    Args:
        pointer: device address.
        dtype: element type.
        shape: (batch, heads, rows, head dim), the head dim in whole slabs of 64.
        strides: elements between batch entries, heads and rows.
        slot: rows of a fragment, a multiple of 8.

    Returns:
        The map, or None where batch and heads are not one axis or there is no group.
    """
    batch, heads, length, dim = shape
    if length < slot or dim % SLAB or (batch > 1 and strides[0] != heads * strides[1]):
        return None
    sizes = (SLAB, 16, dim // SLAB, length // 8, batch * heads)
    row = strides[2]
    steps = (row, SLAB, 8 * row, _step(strides[1], batch * heads))
    return encode(pointer, dtype, sizes, steps, (SLAB, 8, dim // SLAB, slot // 8, 1))


def _step(stride: int, length: int) -> int:
    """The stride of an axis; one of length 1 may have any, which the driver need not see."""
    return stride if length > 1 else SLAB
