"""Plans made on a GPU that is played: what comes again at the same addresses, and what must not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tessera_cupy.interop import Operand
from tessera_cupy.kernels import device_build
from tessera_cupy.kernels.builders import (
    MASK_STATE_PARAMS,
    STATE_POINTERS,
    TILE_POINTERS,
    TILES_PARAMS,
    TileBuild,
)
from tessera_cupy.kernels.catalog import TILE_KERNELS
from tessera_cupy.kernels.launch import DevicePlan
from tessera_cupy.mapping import TileShape
from tessera_cupy.masks.device_source import DeviceSource, SourceLayout
from tessera_cupy.organization import DeviceModel

SIZES = TileBuild(
    "retain",
    TileShape(64, 64, 64),
    (64, 64),
    batch=1,
    q_heads=2,
    kv_heads=2,
    sq=500,
    skv=900,
    mask_batch=1,
    mask_heads=2,
    kv_bytes_per_head=900 * 256,
    device=DeviceModel(sms=4, ctas_per_sm=2, l2_bytes=1 << 20),
    frag_capacity=0,
)
VALUES = Operand(0, (1, 2, 8, 15), (240, 120, 15, 1), "bool", 0, None)
WRITTEN = TILE_POINTERS[len(STATE_POINTERS) :]
LAYOUT = SourceLayout("dense", (VALUES,), (1, 2), (8, 15), 16, 0)


class Launches:
    """What is launched, as (kernel, params), and the memory that it gets."""

    def __init__(self) -> None:
        self.base = 1 << 20
        self.asked: list[int] = []
        self.zeroed: list[tuple[int, int]] = []
        self.done: list[tuple[str, bytes]] = []

    def empty(self, nbytes: int, dtype: Any) -> Any:
        assert dtype is np.uint8
        self.asked.append(nbytes)
        return SimpleNamespace(data=SimpleNamespace(ptr=self.base), nbytes=nbytes)

    def memset(self, at: int, value: int, nbytes: int, stream: int) -> None:
        assert (value, stream) == (0, 8)
        self.zeroed.append((at, nbytes))

    def load(self, config: Any, device: int) -> Callable[..., None]:
        def kernel(grid: Any, block: Any, arguments: Any, *, shared_mem: int) -> None:
            self.done.append((config.kernel, bytes(arguments[0])))

        return kernel

    def build(self, *, mask: int = 4096, base: int = 1 << 20, capturing: bool = False) -> Any:
        """The plan, params of mask_state and those of the tile kernels."""
        self.base = base
        self.done.clear()
        source = DeviceSource(LAYOUT, ("an array",), (mask,))
        stream = SimpleNamespace(ptr=8)
        plan = device_build.build(source, SIZES, "sm_90a", stream, capturing=capturing)
        kernels, params = zip(*self.done, strict=True)
        assert kernels == ("mask_state", *TILE_KERNELS)
        assert len(set(params[1:])) == 1
        state = np.frombuffer(params[0], MASK_STATE_PARAMS)[0]
        return plan, state, np.frombuffer(params[1], TILES_PARAMS)[0]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    made = Launches()

    class Event:
        def __init__(self, *, disable_timing: bool) -> None: ...
        def record(self, stream: Any) -> None: ...

    runtime = SimpleNamespace(memsetAsync=made.memset)
    cuda = SimpleNamespace(Event=Event, runtime=runtime)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(empty=made.empty, cuda=cuda))
    monkeypatch.setattr(device_build, "load", made.load)
    monkeypatch.setattr(device_build, "pool_may_grow", nullcontext)
    return made


def test_a_plan_has_one_allocation_of_arrays_that_do_not_meet(launches: Launches) -> None:
    plan, state, tiles = launches.build()
    (nbytes,) = launches.asked
    made = device_build._build_launch(SIZES, SIZES.most_fragments, "sm_90a").layout.build
    sizes = {n: int(np.prod(shape)) * t.itemsize for n, (shape, t) in made.arrays().items()}
    places = [(int(tiles[name]), sizes[name]) for name in WRITTEN]
    places += [(int(state["bitmap"]), 16 * 4), (int(state["row_count"]), 16 * 4)]
    places += [(int(state["scalars"]), 64)]
    places.sort()
    assert places[0][0] == 1 << 20
    for (start, size), (following, _) in pairwise(places):
        assert start + size <= following
        assert following % 256 == 0
    assert sum(places[-1]) <= (1 << 20) + nbytes
    assert launches.zeroed == [(int(state["scalars"]), 64)]
    assert [tiles[name] for name in STATE_POINTERS] == [state["bitmap"], 0, 0]
    assert plan.scalars.ptr == state["scalars"]
    names = {"fragments": "frags"} | {
        name: name
        for name in ("tasks", "tile_q", "merge_head", "merge_tile", "merge_offsets", "counts")
    }
    for attribute, name in names.items():
        assert getattr(plan, attribute).ptr == tiles[name]
        assert getattr(plan, attribute).nbytes == sizes[name]
    numbers = (plan.task_count, plan.slot_log2, plan.slots)
    assert numbers == (made.task_capacity, 6, made.slot_capacity)
    assert 0 < plan.merge_count <= made.merge_capacity


def fields(struct: Any, *but: str) -> dict[str, Any]:
    return {name: struct[name].item() for name in struct.dtype.names if name not in but}


def test_every_address_is_followed(launches: Launches) -> None:
    first = launches.build()
    for mask, base in ((4096, 1 << 20), (8192, 1 << 20), (4096, 1 << 21), (4096, 1 << 20)):
        plan, state, tiles = launches.build(mask=mask, base=base)
        moved = base - (1 << 20)
        assert state["values"] == mask
        for name in ("bitmap", "row_count", "scalars"):
            assert state[name] == first[1][name] + moved
        for name in ("bitmap", *WRITTEN):
            assert tiles[name] == first[2][name] + moved
        assert plan.tasks.ptr == first[0].tasks.ptr + moved
        assert plan.scalars.ptr == first[0].scalars.ptr + moved
        assert fields(tiles, "stamp", *TILE_POINTERS) == fields(first[2], "stamp", *TILE_POINTERS)


def test_what_a_graph_captures_has_a_stamp_of_its_own(launches: Launches) -> None:
    """Else counts that an earlier plan left at its address would pass for those of a replay."""
    stamps = []
    for capturing in (False, True, True, False):
        plan, _, tiles = launches.build(capturing=capturing)
        assert plan.stamp == tiles["stamp"]
        stamps.append(plan.stamp)
    assert stamps[0] == stamps[3]
    assert len(set(stamps[:3])) == 3


def test_plans_at_one_address_share_their_structs_and_no_more(launches: Launches) -> None:
    first: DevicePlan = launches.build()[0]
    again: DevicePlan = launches.build()[0]
    assert first.structs is again.structs
    assert first.uses is not again.uses


def test_addresses_that_come_again_cost_few_calls(launches: Launches) -> None:
    """A plan of a geometry, at addresses that it had before, from ``build`` to the last launch."""
    calls = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_globals["__name__"].startswith("tessera_cupy")

    launches.build()
    sys.setprofile(count)
    try:
        launches.build()
    finally:
        sys.setprofile(None)
    assert 5 < calls <= 25
