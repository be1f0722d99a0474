"""Exact block-sparse attention that maps any mask onto tiles that suit the GPU.

>>> import numpy as np
>>> from tessera_cupy import BlockMask, block_sparse_attention
>>> q = k = v = np.ones((1, 2, 256, 64), np.float32)
>>> mask = BlockMask.from_dense(np.tri(4, dtype=bool), (64, 64))
>>> block_sparse_attention(q, k, v, mask).shape
(1, 2, 256, 64)
"""

from tessera_cupy.attention import block_sparse_attention, make_plan
from tessera_cupy.errors import (
    KernelCompileError,
    KernelMissingError,
    NoGpuError,
    PlanNotEligibleError,
    PlanOverflowError,
    TableError,
    TesseraError,
    UnsupportedGpuError,
)
from tessera_cupy.masks import BlockMask, KeySlices
from tessera_cupy.plan import Plan
from tessera_cupy.regimes import PlanSpec, Table, load_table
from tessera_cupy.request import ArraySpec

__version__ = "0.1.0"

__all__ = [
    "ArraySpec",
    "BlockMask",
    "KernelCompileError",
    "KernelMissingError",
    "KeySlices",
    "NoGpuError",
    "Plan",
    "PlanNotEligibleError",
    "PlanOverflowError",
    "PlanSpec",
    "Table",
    "TableError",
    "TesseraError",
    "UnsupportedGpuError",
    "block_sparse_attention",
    "load_table",
    "make_plan",
]
