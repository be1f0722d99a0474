"""Queries and keys as the kernels that multiply tokens read them: 16-bit rows of 16-byte chunks."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera_cupy.kernels.lifetime import new

#: Elements of a 16-byte chunk.
CHUNK = 8
#: The catalog's names of the element types.
ELEMENT_OF = {"float16": "fp16", "bfloat16": "bf16"}
#: Rows of either side of a product, ``Product::kTile`` in common/product.cuh.
PRODUCT_TILE = 128
#: Bytes of shared memory of a product, ``Product::kSharedBytes``.
PRODUCT_SMEM = 48 * 1024


def packed(x: Any, memory: list[Any]) -> Any:
    """A CuPy array of tokens in a form that the kernels read; itself where it has this form.

    Args:
        x: (batch, heads, tokens, d) CuPy array of any float dtype.
        memory: takes what a captured launch uses.

    Returns:
        C-contiguous, float16 or bfloat16, wider types rounded to float16; rows in whole 16 bytes,
        zeros behind ``d``; the address is a multiple of 16.
    """
    dtype = x.dtype if x.dtype.name in ELEMENT_OF else np.dtype(np.float16)
    return padded(x, dtype, memory)


def padded(x: Any, dtype: Any, memory: list[Any]) -> Any:
    """The array in a dtype, C-contiguous, in rows of whole chunks: itself, or a copy."""
    *outer, d = x.shape
    width = -(-d // CHUNK) * CHUNK
    if width == d and x.dtype == dtype and contiguous(x) and x.data.ptr % 16 == 0:
        return x
    made = new((*outer, width), dtype, memory)
    if width > d:
        made[..., d:] = 0
    made[..., :d] = x
    return made


def contiguous(x: Any) -> bool:
    """Whether an array lies in C order without gaps."""
    step = x.dtype.itemsize
    for length, stride in zip(reversed(x.shape), reversed(x.strides), strict=True):
        if length > 1 and stride != step:
            return False
        step *= length
    return True
