"""Queries and keys as the kernels that multiply tokens read them: 16-bit rows of 16-byte chunks."""

from __future__ import annotations

from typing import Any

import numpy as np

#: Elements of a 16-byte chunk.
CHUNK = 8
#: The catalog's names of the element types.
ELEMENT_OF = {"float16": "fp16", "bfloat16": "bf16"}
#: Rows of either side of a product, ``Product::kTile`` in common/product.cuh.
PRODUCT_TILE = 128
#: Bytes of shared memory of a product, ``Product::kSharedBytes``.
PRODUCT_SMEM = 48 * 1024


def packed(x: Any) -> Any:
    """A CuPy array of tokens in a form that the kernels read; itself where it has this form.

    Args:
        x: (batch, heads, tokens, d) CuPy array of any float dtype.

    Returns:
        C-contiguous, float16 or bfloat16, wider types rounded to float16; rows in whole 16 bytes,
        zeros behind ``d``; the address is a multiple of 16.
    """
    import cupy

    dtype = x.dtype if x.dtype.name in ELEMENT_OF else np.dtype(np.float16)
    *outer, d = x.shape
    if d % CHUNK == 0:
        made = cupy.ascontiguousarray(x, dtype=dtype)
        return made if made.data.ptr % 16 == 0 else made.copy()
    made = cupy.zeros((*outer, -(-d // CHUNK) * CHUNK), dtype)
    made[..., :d] = x
    return made
