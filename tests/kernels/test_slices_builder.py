"""Sizes of plans of key slices that the GPU makes, and their kernels through NVRTC.

What the kernels write is checked in ``tests/attention/test_slices_request_path.py``.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from tessera_cupy import KeySlices
from tessera_cupy.kernels import room
from tessera_cupy.kernels.builders import TileBuild
from tessera_cupy.kernels.cache import default_cache
from tessera_cupy.kernels.catalog import builder
from tessera_cupy.mapping import TileShape
from tessera_cupy.mapping.gather import map_slices
from tessera_cupy.organization import DeviceModel

SIDES = [("retain", 128, 128), ("retain", 64, 128), ("share", 64, 128), ("split", 192, 128)]


def build(side: str, group: int, q: int, shape: tuple[int, int], heads: int = 1) -> TileBuild:
    return TileBuild(
        side,
        TileShape(q, 192, 64),
        (group, 1),
        batch=1,
        q_heads=heads,
        kv_heads=heads,
        sq=shape[0],
        skv=shape[1],
        mask_batch=1,
        mask_heads=heads,
        kv_bytes_per_head=512 * shape[1],
        device=DeviceModel(sms=132, ctas_per_sm=1, l2_bytes=32 << 20),
        frag_capacity=0,
        gather=True,
    )


@pytest.mark.parametrize(("side", "group", "q"), SIDES)
@pytest.mark.parametrize("skv", [1, 63, 64, 65, 191, 700])
def test_room_for_any_slices_suffices(side: str, group: int, q: int, skv: int) -> None:
    shape, rng = (5 * group - 7, skv), np.random.default_rng(skv)
    made = build(side, group, q, shape)
    for density in (0.0, 0.02, 0.5, 0.98, 1.0):
        slices = KeySlices.from_groups(rng.random((5, skv)) < density, group, shape)
        tiles = map_slices(slices, side, q, 192, runs=False)  # type: ignore[arg-type]
        assert made.tiles == len(tiles)
        needed = len(tiles.frag_start)
        assert needed <= made.fragments_of(slices.nnz) <= made.most_fragments
        # Of a tile at most a fragment a list, and what fills its steps; keys of both halves twice.
        spare = len(tiles)
        if side == "share":
            assert tiles.rows is not None
            spare = 3 * (1 + 2) * len(tiles) + -(-(slices.nnz - len(tiles.rows)) // 64)
        assert made.fragments_of(slices.nnz) <= needed + spare


def test_keys_take_room_beside_their_fragments() -> None:
    made = build("retain", 128, 128, (57_600, 57_600), heads=8)
    assert made.fragment_bytes == 8 + 4 * 64
    assert made.most_fragments == 8 * 450 * 900
    # The map has 207 MB; half of its keys take twice as many bytes, more than is given anyhow.
    assert room.lists_room(made, None) == 2 * 8 * 450 * 57_600 // made.fragment_bytes
    few = build("retain", 128, 128, (57_600, 57_600), heads=5)
    assert room.lists_room(few, None) == room.LIST_BYTES // few.fragment_bytes
    counted = replace(made, frag_capacity=1000)
    assert counted.arrays()["rows"] == ((64_000,), np.dtype(np.int32))
    assert "rows" not in replace(counted, gather=False).arrays()
    with pytest.raises(ValueError, match="gathered keys"):
        replace(made, frag_capacity=1 << 25)


@pytest.mark.parametrize(
    "kernel", ["slice_counts", "slice_fragments", "mask_state_lists_long", "mask_state_csr_long"]
)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_kernels_compile_without_spills(arch: str, kernel: str) -> None:
    path = default_cache().build(builder(arch, kernel))
    assert json.loads(path.with_name("meta.json").read_text())["problems"] == []
