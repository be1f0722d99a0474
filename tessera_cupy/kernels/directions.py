"""Launching ``directions.cu``: pooled queries and keys into those that rank tiles for SSTA."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera_cupy import gpus
from tessera_cupy.kernels import launch
from tessera_cupy.kernels.catalog import builder

#: ``DirectionsParams`` in directions.cu.
DIRECTIONS_PARAMS = np.dtype(
    [
        *[(name, np.uint64) for name in ("queries", "keys")],
        *[(name, np.int32) for name in ("blocks", "channels", "first", "count")],
        *[(name, np.float32) for name in ("balance", "share")],
    ],
    align=True,
)


def into_directions(queries: Any, keys: Any, video: slice, balance: float, share: float) -> None:
    """Overwrite pooled queries and keys, on CuPy's current stream of their GPU.

    Args:
        queries: (batch, heads, blocks, d) float32 CuPy array, C-contiguous. It becomes ``balance *
            q / |q|`` less ``share`` times the sum of the video's keys of length 1.
        keys: likewise; the video's get length 1, others become NaN.
        video: the blocks of video tokens.
        balance: weight of the queries.
        share: weight of the sum.
    """
    import cupy

    batch, heads, blocks, channels = queries.shape
    device = int(queries.device.id)
    config = builder(gpus.arch_of(device).name, "directions")
    values = {
        "queries": queries.data.ptr,
        "keys": keys.data.ptr,
        "blocks": blocks,
        "channels": channels,
        "first": video.start,
        "count": video.stop - video.start,
        "balance": balance,
        "share": share,
    }
    with cupy.cuda.Device(device):
        launch.load(config, device)(
            (batch * heads,),
            (32 * config.warps,),
            (launch.packed_struct(DIRECTIONS_PARAMS, values),),
            shared_mem=4 * 32 * config.warps,
        )
