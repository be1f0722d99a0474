"""Launching ``column_sums.cu``: what each key gets of the attention of groups of queries.

The launch goes to CuPy's current stream of the arrays' GPU, and nothing waits. What it computes,
:mod:`tessera_cupy.sparsifiers.chipmunk` defines in NumPy.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tessera_cupy import gpus
from tessera_cupy.errors import wrong
from tessera_cupy.kernels import launch
from tessera_cupy.kernels.catalog import MAX_HEAD_DIM, builder
from tessera_cupy.kernels.lifetime import new
from tessera_cupy.kernels.token_rows import CHUNK, ELEMENT_OF, contiguous, packed

#: Query rows of a group, ``ColumnSumsStorage::kRows``.
GROUP = 192
#: ``ColumnSumsParams`` in column_sums.cu.
PARAMS = np.dtype(
    [
        *[(name, np.uint64) for name in ("q", "k", "order", "lse", "out")],
        *[(name, np.uint64) for name in ("q_flag", "k_flag", "lse_flag")],
        *[(name, np.int32) for name in ("tokens", "groups", "pitch", "chunks")],
        ("scale_log2", np.float32),
    ],
    align=True,
)

# Keys of a step, of which a row has whole ones.
_STEP = 64
# Rows up to this have all of their channels in registers; shared memory of queries is last.
_HELD_DIM = 128
_QUERIES_SMEM = 48 * 1024


def sums(
    q: Any,
    k: Any,
    order: Any,
    lse: Any,
    flags: tuple[int, int, int],
    memory: list[Any],
    results: list[Any],
) -> Any:
    """``chipmunk.column_sums``.

    Args:
        q: (batch, heads, tokens, d) queries in raster order; wider types than 16 bits are rounded
            to float16.
        k: the same shape and dtype.
        order: TokenOrders, whose first order is that of the groups and of the keys.
        lse: (batch, heads, tokens) natural log-sum-exp of each query in raster order, any float
            dtype, or None for that of dense attention.
        flags: addresses of int32 that are set where q, k and lse hold no numbers, or 0.
        memory: takes what a captured launch uses besides its result.
        results: takes the result of a captured launch.

    Returns:
        (batch, heads, groups, pitch) float16 in the order, the pitch a multiple of 64 that holds
        all tokens; what is behind them says nothing. Of groups whose q or lse hold NaN or an
        infinity, or k at the group's own places, all are NaN.

    Raises:
        ValueError: a head dim above 256; another dtype of k.
    """
    if q.shape[3] > MAX_HEAD_DIM:
        fix = "pass NumPy arrays, or fewer channels"
        raise ValueError(wrong("q", f"at most {MAX_HEAD_DIM} channels", q.shape[3], fix))
    if k.dtype != q.dtype:
        fix = f"pass k.astype({q.dtype.name!r})"
        raise ValueError(wrong("k", f"q's dtype {q.dtype.name}", k.dtype.name, fix))
    import cupy

    device = int(q.device.id)
    scale = math.log2(math.e) / math.sqrt(q.shape[3])
    with cupy.cuda.Device(device):
        q, k = packed(q, memory), packed(k, memory)
        batch, heads, tokens, d = q.shape
        if lse is not None and (lse.dtype != np.float32 or not contiguous(lse)):
            given, lse = lse, new(lse.shape, np.float32, memory)
            lse[...] = given
        groups, pitch = -(-tokens // GROUP), -(-tokens // _STEP) * _STEP
        made = new((batch, heads, groups, pitch), np.float16, results)
        params = {
            **{"q": q.data.ptr, "k": k.data.ptr, "order": order.device_orders().data.ptr},
            **{"lse": 0 if lse is None else lse.data.ptr, "out": made.data.ptr},
            **dict(zip(("q_flag", "k_flag", "lse_flag"), flags, strict=True)),
            **{"tokens": tokens, "groups": groups, "pitch": pitch, "chunks": d // CHUNK},
            "scale_log2": scale,
        }
        config = builder(gpus.arch_of(device).name, f"column_sums_{ELEMENT_OF[q.dtype.name]}")
        smem = config.smem_bytes - (_QUERIES_SMEM if d <= _HELD_DIM else 0)
        kernel = launch.load(config, device)
        struct = launch.packed_struct(PARAMS, params)
        kernel((batch * heads * groups,), (32 * config.warps,), (struct,), shared_mem=smem)
        return made
