"""Kernels that keep time, on a GPU: every task once, where it ran; the output, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tessera_cupy import BlockMask, KeySlices, make_plan
from tessera_cupy.kernels import launch
from tessera_cupy.kernels.catalog import timed, twin_of

pytestmark = pytest.mark.gpu

#: Plans of blocks of 64, and whether only Hopper has them.
PLANS = {
    "mma": ("attend_mma/q64k64/retain-pack/longest+split", False),
    "mma, 128 rows": ("attend_mma/q128k64/share-pack/longest", False),
    "wgmma": ("attend_wgmma/q128k192/share-pack/longest+split", True),
    "wgmma, rows from anywhere": ("attend_wgmma/q128k192/regroup-pack/alternate", True),
    "wgmma, three warpgroups": ("attend_wgmma/q192k128/retain-pack/longest", True),
}


def ctas_per_sm(made: Any, gpu: Any) -> int:
    """What the driver says of the entry that keeps time."""
    config = made.config
    function = launch.load(timed(config), gpu.cupy.cuda.Device().id)
    occupancy = gpu.cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor
    return int(occupancy(function.kernel.ptr, 32 * config.warps, config.smem_bytes))


def check(made: Any, found: Any, records: Any, gpu: Any) -> None:
    """Every task of the plan once, on multiprocessors that there are, as many at a time as fit."""
    tiles, tasks = made.tiles(), made.tasks()
    assert len(found) == len(tasks)
    assert found.head.tolist() == tasks.task_head.tolist()
    assert found.steps.tolist() == (tasks.task_end - tasks.task_begin).tolist()
    assert found.first_row.tolist() == tiles.tile_q[tasks.task_tile, 0].tolist()
    assert found.is_part.tolist() == (tasks.task_slot >= 0).tolist()
    assert records.shape[1:] == (len(tasks), made.config.time_parts)
    assert (records["begin"] > 0).all()
    assert (records["end"] >= records["begin"]).all()
    # All of a task's parts ran on the multiprocessor of its CTA.
    assert (records["sm"] == records["sm"][..., :1]).all()
    properties = gpu.cupy.cuda.runtime.getDeviceProperties(gpu.cupy.cuda.Device().id)
    sms = properties["multiProcessorCount"]
    assert found.sms == sms
    assert found.slots <= sms * ctas_per_sm(made, gpu)
    assert found.slot.max() < found.slots
    assert 1 <= found.balance <= sms
    assert found.busy_us.sum() == pytest.approx((found.end_us - found.begin_us).sum())
    # A plan that the GPU makes has its merge launched whether it splits or not.
    assert found.merge_ms > 0 or not tasks.slots


@pytest.mark.parametrize("there", [False, True], ids=["from the host", "made there"])
@pytest.mark.parametrize("name", PLANS)
def test_every_task_is_timed_and_no_bit_changes(
    name: str, there: bool, gpu: Any, case: Any, rng: Any, outputs: list[Any], written: list[Any]
) -> None:
    regime, hopper = PLANS[name]
    if hopper and gpu.arch.name != "sm_90a":
        pytest.skip(f"{gpu.arch.name} has no attend_wgmma")
    blocks = rng.random((1, 8, 40, 40)) < rng.choice([0.1, 0.5, 0.95], (1, 8, 40, 1))
    blocks[:, :, 2] = False
    host = BlockMask.from_dense(blocks, (64, 64), (2551, 2543))
    drawn = case(host, rng=rng, dtype="bfloat16", dim=64)
    arrays = [gpu.cupy.asarray(x) for x in drawn.arrays]
    mask = host
    if there:
        mask = BlockMask.from_dense(gpu.cupy.asarray(blocks), (64, 64), host.shape)
    made = make_plan(mask, *arrays, regime=regime)
    plain = gpu.cupy.asnumpy(made.run(*arrays))
    gpu.poison()
    found = made.timeline(*arrays, runs=3)
    out = gpu.cupy.asnumpy(outputs[-1])
    drawn.check_kernel(out, label=name)
    assert (out.view(np.uint16) == plain.view(np.uint16)).all()
    check(made, found, written[-1], gpu)
    # The same again: a plan goes on as it was.
    again = gpu.cupy.asnumpy(made.run(*arrays))
    assert (again.view(np.uint16) == plain.view(np.uint16)).all()


def test_twins(gpu: Any, case: Any, rng: Any, outputs: list[Any], written: list[Any]) -> None:
    if gpu.arch.name != "sm_90a":
        pytest.skip(f"{gpu.arch.name} has no attend_wgmma")
    mask = BlockMask.from_dense(np.ones((40, 30), bool), (128, 64))
    drawn = case(mask, rng=rng, kv_heads=4, dtype="float16", dim=128)
    arrays = [gpu.cupy.asarray(x) for x in drawn.arrays]
    made = make_plan(mask, *arrays, regime="attend_wgmma/q128k192/retain-pack/longest")
    found = made.timeline(*arrays, runs=2)
    drawn.check_kernel(gpu.cupy.asnumpy(outputs[-1]))
    check(made, found, written[-1], gpu)
    twins = twin_of(made.config)
    assert twins is not None
    assert launch.is_loaded(timed(twins), gpu.cupy.cuda.Device().id)


@pytest.mark.parametrize("kernel", ["attend_mma/q64k64/retain", "attend_wgmma/q128k192/share"])
def test_gathered_keys(
    kernel: str, gpu: Any, case: Any, rng: Any, outputs: list[Any], written: list[Any]
) -> None:
    if "wgmma" in kernel and gpu.arch.name != "sm_90a":
        pytest.skip(f"{gpu.arch.name} has no attend_wgmma")
    kept = rng.random((1, 4, 20, 1700)) < 0.2
    host = KeySlices.from_groups(kept, 64, (1270, 1700))
    there = KeySlices.from_groups(gpu.cupy.asarray(kept), 64, (1270, 1700))
    drawn = case(host.to_block_mask(), rng=rng, dtype="bfloat16", dim=128)
    arrays = [gpu.cupy.asarray(x) for x in drawn.arrays]
    for slices in (host, there):
        made = make_plan(slices, *arrays, regime=f"{kernel}-gather/longest+split")
        found = made.timeline(*arrays, runs=2)
        drawn.check_kernel(gpu.cupy.asnumpy(outputs[-1]), label=kernel)
        check(made, found, written[-1], gpu)


def test_the_times_are_those_of_the_kernel(gpu: Any, case: Any, rng: Any) -> None:
    """As long as by events, and the timer ticks within a task."""
    mask = BlockMask.from_dense(rng.random((1, 16, 64, 64)) < 0.4, (128, 128))
    drawn = case(mask, rng=rng, dtype="bfloat16", dim=128)
    arrays = [gpu.cupy.asarray(x) for x in drawn.arrays]
    made = make_plan(mask, *arrays)
    found = made.timeline(*arrays)
    by_events = made.profile(*arrays).attention
    longest = (found.end_us - found.begin_us).max()
    print(
        f"{gpu.arch.name}: a tick of {found.tick_us} us, tasks of up to {longest:.1f} us, in all "
        f"{found.attend_ms:.4f} ms, by events {by_events:.4f} ms"
    )
    assert 0 < found.tick_us <= 1.1
    # A launch and its end are in the events, and notes of time in the timeline.
    assert 0.7 * by_events - 0.02 < found.attend_ms < 1.3 * by_events + 0.02
    assert found.tick_us < longest
