"""Kernels that keep time, on the CPU's emulator: what they compute, and that no task is missing.

The emulated timer ticks at each reading, and CTA ``i`` runs on multiprocessor ``i % 3``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera_cupy import ArraySpec, BlockMask, KeySlices, make_plan
from tessera_cupy.errors import KernelMissingError
from tessera_cupy.kernels.cache import KernelCache
from tessera_cupy.kernels.catalog import catalog, find, timed
from tests.emulator.emulator import compiler, drawn_seed
from tests.emulator.gpu import SMS, EmulatedGpu, Stream

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no g++ to build the emulator with")

MMA = "attend_mma/q64k64/retain-pack/longest+split"
WGMMA = "attend_wgmma/q128k192/share-pack/longest+split"


@pytest.fixture
def gpu(kernel_cache: Path) -> Iterator[EmulatedGpu]:
    """A new emulated GPU in CuPy's place."""
    made = EmulatedGpu(kernel_cache.parent / "emulated-kernels", drawn_seed())
    with made.here():
        yield made


def blocks_of(rng: Any, shape: tuple[int, int] = (5, 37)) -> Any:
    """(1, 2, rows, columns), one row without keys, some long."""
    blocks = rng.random((1, 2, *shape)) < rng.choice([0.1, 0.5, 0.9], (1, 2, shape[0], 1))
    blocks[:, :, 1] = False
    return blocks


#: Plan and block size; who makes the plan.
CASES = {
    "retain, there": (MMA, (64, 32), True),
    "share, there": ("attend_mma/q128k64/share-pack/longest+split", (32, 24), True),
    "wgmma, there": (WGMMA, (64, 64), True),
    "three warpgroups": ("attend_wgmma/q192k128/share-pack/longest+split", (64, 32), True),
    "regroup": ("attend_wgmma/q128k192/regroup-pack/longest+split", (16, 16), False),
    "backwards": ("attend_wgmma/q128k192/share-pack/alternate", (64, 64), False),
    "backwards, mma": ("attend_mma/q64k64/retain-pack/alternate", (64, 64), False),
}


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_all_tasks_are_timed_and_nothing_else_changes(
    name: str, gpu: EmulatedGpu, case: Any, rng: Any, outputs: list[Any], written: list[Any]
) -> None:
    regime, block, there = CASES[name]
    rows = 320 // block[0] if block[0] < 64 else 5
    blocks = blocks_of(rng, (rows, 37))
    shape = (rows * block[0] - 11, 37 * block[1] - 9)
    host = BlockMask.from_dense(blocks, block, shape)
    mask = BlockMask.from_dense(gpu.array(blocks), block, shape) if there else host
    drawn = case(host, rng=rng, dtype="float16", dim=64)
    arrays = [gpu.array(x) for x in drawn.arrays]
    made = make_plan(mask, *arrays, regime=regime)
    plain = made.run(*arrays).get()
    found = made.timeline(*arrays, runs=2)
    out = outputs[-1].get()
    drawn.check_kernel(out, label=f"{name} seed {gpu.seed}")
    assert (out == plain).all()

    tiles, tasks = made.tiles(), made.tasks()
    assert len(found) == len(tasks) > SMS
    assert found.head.tolist() == tasks.task_head.tolist()
    assert found.steps.tolist() == (tasks.task_end - tasks.task_begin).tolist()
    assert found.first_row.tolist() == tiles.tile_q[tasks.task_tile, 0].tolist()
    assert found.is_part.tolist() == (tasks.task_slot >= 0).tolist()
    # A plan that the GPU makes has its merge launched whether it splits or not.
    assert found.merge_ms > 0 or not tasks.slots
    persistent = "wgmma" in regime
    cta = np.arange(len(tasks)) % made.model.capacity if persistent else np.arange(len(tasks))
    assert found.sm.tolist() == (cta % SMS).tolist()
    assert (found.gpu, found.sms, found.tick_us) == ("an emulated GPU", SMS, 0.032)
    assert found.begin_us.min() == 0
    assert (found.end_us >= found.begin_us).all()
    assert found.slots == SMS

    (records,) = written
    assert records.shape == (2, len(tasks), made.config.time_parts)
    # A reading is of one moment: none was written twice, by one thread or several.
    moments = np.concatenate([records["begin"].ravel(), records["end"].ravel()])
    assert len(np.unique(moments)) == len(moments)


@needs_compiler
@pytest.mark.parametrize(
    ("regime", "group"),
    [
        ("attend_wgmma/q128k192/share-gather/longest+split", 64),
        ("attend_mma/q64k64/retain-gather/longest+split", 64),
    ],
)
def test_gathered_keys(
    regime: str, group: int, gpu: EmulatedGpu, case: Any, rng: Any, outputs: list[Any]
) -> None:
    kept = rng.random((1, 2, 5, 350)) < 0.2
    host = KeySlices.from_groups(kept, group, (5 * group - 7, 350))
    there = KeySlices.from_groups(gpu.array(kept), group, (5 * group - 7, 350))
    drawn = case(host.to_block_mask(), rng=rng, dtype="float16", dim=64)
    arrays = [gpu.array(x) for x in drawn.arrays]
    made = make_plan(there, *arrays, regime=regime)
    found = made.timeline(*arrays, runs=1)
    drawn.check_kernel(outputs[-1].get(), label=f"{regime} seed {gpu.seed}")
    assert len(found) == len(made.tasks())
    assert gpu.launched[-2].endswith("_gather_timed")


@needs_compiler
def test_token_bits(gpu: EmulatedGpu, case: Any, rng: Any, outputs: list[Any]) -> None:
    tokens = rng.random((1, 2, 200, 310)) < 0.6
    mask = BlockMask.from_tokens(tokens, (64, 64))
    drawn = case(mask, rng=rng, dtype="bfloat16", dim=64)
    arrays = [gpu.array(x) for x in drawn.arrays]
    for regime in ("attend_wgmma/q128k192/share-pack/rows", "attend_mma/q64k64/retain-pack/rows"):
        made = make_plan(mask, *arrays, regime=regime)
        found = made.timeline(*arrays, runs=1)
        drawn.check_kernel(outputs[-1].get(), label=f"{regime} seed {gpu.seed}")
        assert len(found) == len(made.tasks())
        assert gpu.launched[-1].endswith("_bits_timed")


@needs_compiler
def test_a_mask_without_tasks(gpu: EmulatedGpu, case: Any, rng: Any) -> None:
    mask = BlockMask.from_dense(np.zeros((0, 3), bool), (64, 64))
    arrays = [gpu.array(x) for x in case(mask, rng=rng, dtype="float16").arrays]
    found = make_plan(mask, *arrays, regime=MMA).timeline(*arrays)
    assert (len(found), found.attend_ms, found.balance) == (0, 0, 1)


@needs_compiler
def test_timelines_are_of_a_gpu_of_runs_and_of_no_capture(
    gpu: EmulatedGpu, case: Any, rng: Any
) -> None:
    mask = BlockMask.from_dense(blocks_of(rng), (64, 64))
    drawn = case(mask, rng=rng, dtype="float16")
    arrays = [gpu.array(x) for x in drawn.arrays]
    made = make_plan(mask, *arrays, regime=MMA)
    with pytest.raises(ValueError, match=r"`q`: expected an array on a GPU, got one in host"):
        made.timeline(*drawn.arrays)
    with pytest.raises(ValueError, match=r"`runs`: expected at least 1, got 0"):
        made.timeline(*arrays, runs=0)
    with pytest.raises(ValueError, match=r"`q`: expected the plan's 2 heads, got 1 heads"):
        made.timeline(*[x[:, :1] for x in arrays])
    with Stream(32) as stream:
        stream.begin_capture()
        with pytest.raises(ValueError, match=r"`stream`.*CUDA graph"):
            made.timeline(*arrays)
        stream.end_capture()


def test_arrays_in_host_memory_are_refused_without_a_gpu() -> None:
    mask = BlockMask.from_dense(np.tri(3, dtype=bool), (64, 64))
    q = np.zeros((1, 1, 192, 64), np.float16)
    with pytest.raises(ValueError, match=r"`q`: expected an array on a GPU.*copy it to the GPU"):
        make_plan(mask, ArraySpec(q.shape, "float16"), arch="sm_90a").timeline(q, q, q)


# Entries


def test_no_catalog_lists_an_entry_that_keeps_time() -> None:
    assert not [c for c in catalog("sm_90a") if c.timed]
    config = find("sm_90a", "attend_wgmma", "float16", 64, 192, 128, bits=False)
    assert config is not None
    made = timed(config)
    assert timed(config) is made
    assert made.timed
    assert not config.timed
    assert made.name == f"{config.name}_timed"
    assert made.smem_bytes == config.smem_bytes
    assert (made.time_parts, timed(catalog("sm_80")[0]).time_parts) == (3, 1)


def test_without_compiling_there_is_advice_that_helps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TESSERA_NO_JIT", "1")
    with pytest.raises(KernelMissingError, match=r"_timed for sm_80.*Fix: unset TESSERA_NO_JIT"):
        KernelCache(tmp_path).get(timed(catalog("sm_80")[0]))


def test_a_cache_knows_the_entries_that_keep_time(kernel_cache: Path) -> None:
    config = timed(catalog("sm_80")[0])
    cache = KernelCache(kernel_cache)
    cache.get(config)
    (entry,) = [entry for entry in cache.status() if entry.name == config.name]
    assert entry.current
