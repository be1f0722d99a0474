"""Key slices whose rows the kernel gathers: on the emulated GPU and on a real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera_cupy import KeySlices, block_sparse_attention, make_plan, reference
from tessera_cupy.gpus import arch_of
from tessera_cupy.kernels.catalog import find
from tessera_cupy.plan import _check_reach
from tests.emulator.emulator import Emulator, compiler
from tests.emulator.gpu import EmulatedGpu

HOPPER = ("attend_wgmma", 128, 192)
HOPPER_DEEP = ("attend_wgmma", 128, 128)
CASES = [
    # (kernel, rows and columns of a tile), group, (sq, skv), head dim, density, organization
    (HOPPER, 64, (319, 349), 64, 0.1, "longest+split"),
    (HOPPER, 64, (130, 65), 128, 0.5, "rows"),
    (HOPPER, 128, (389, 662), 128, 0.02, "longest+split"),
    (HOPPER, 128, (302, 665), 80, 0.05, "alternate"),
    (HOPPER, 128, (800, 230), 128, 0.2, "rows"),
    (HOPPER, 192, (410, 203), 128, 0.2, "rows"),
    (HOPPER, 192, (43, 571), 80, 0.1, "longest+split"),
    (HOPPER_DEEP, 64, (319, 549), 128, 0.1, "longest+split"),
    (HOPPER_DEEP, 64, (310, 305), 80, 0.3, "alternate"),
    (HOPPER_DEEP, 128, (389, 662), 64, 0.05, "alternate"),
    (HOPPER_DEEP, 192, (210, 571), 128, 0.1, "longest+split"),
    (("attend_mma", 64, 64), 64, (190, 349), 64, 0.1, "longest+split"),
    (("attend_mma", 64, 64), 64, (100, 260), 80, 0.3, "alternate"),
    (("attend_mma", 64, 64), 128, (203, 405), 128, 0.05, "runs+alternate"),
    (("attend_mma", 64, 64), 192, (203, 170), 80, 0.4, "rows"),
    (("attend_mma", 64, 32), 64, (130, 300), 256, 0.1, "longest+split"),
    (("attend_mma", 64, 32), 192, (100, 171), 256, 0.3, "alternate"),
    (("attend_mma", 128, 64), 64, (319, 230), 64, 0.3, "alternate"),
    (("attend_mma", 128, 64), 64, (130, 365), 128, 0.1, "longest+split"),
    (("attend_mma", 128, 64), 128, (302, 400), 80, 0.05, "alternate"),
    (("attend_mma", 128, 64), 192, (210, 203), 128, 0.2, "rows"),
    (("attend_mma", 128, 128), 128, (140, 365), 64, 0.2, "alternate"),
]
#: Shapes that other architectures have.
ELSEWHERE = [
    ("sm_80", ("attend_mma", 128, 64), 64, (140, 365), 128, 0.1, "alternate+split"),
    ("sm_86", ("attend_mma", 128, 32), 64, (140, 230), 128, 0.2, "longest"),
    ("sm_86", ("attend_mma", 128, 32), 192, (203, 365), 128, 0.1, "alternate+split"),
]
NAMES = ("tile", "group", "shape", "dim", "density", "organization")
Tile = tuple[str, int, int]


def drawn(group: int, shape: tuple[int, int], density: float, heads: int = 2) -> KeySlices:
    """Random keys, some runs of them, a group without any."""
    rng = np.random.default_rng([group, *shape])
    sq, skv = shape
    kept = rng.random((1, heads, -(-sq // group), skv)) < density
    for _ in range(8):
        head, of, first = (int(rng.integers(n)) for n in (heads, kept.shape[2], skv))
        kept[0, head, of, first : first + int(rng.integers(90))] = True
    kept[0, 0, 3:] &= kept.shape[2] <= 4
    kept[0, 0, -1] &= kept.shape[2] == 1
    return KeySlices.from_groups(kept, group, shape)


def inputs(shape: tuple[int, int], dim: int, dtype: Any, heads: int = 2) -> list[Any]:
    rng = np.random.default_rng(dim)
    sizes = (shape[0], shape[1], shape[1])
    return [rng.standard_normal((1, heads, n, dim), np.float32).astype(dtype) for n in sizes]


def plan_name(tile: Tile, group: int, organization: str) -> str:
    kernel, q, kv = tile
    side = "share" if 2 * group == q else "retain" if group <= q else "split"
    return f"{kernel}/q{q}k{kv}/{side}-gather/{organization}"


def check(out: Any, lse: Any, arrays: list[Any], slices: KeySlices) -> None:
    exact, exact_lse = reference.attention(*arrays, slices, return_lse=True)
    assert abs(out.astype(np.float64) - exact).max() < 4e-3
    empty = np.isneginf(exact_lse)
    assert (np.isneginf(lse) == empty).all()
    assert abs(np.where(empty, 0, lse - np.where(empty, 0, exact_lse))).max() < 1e-4


@pytest.mark.skipif(compiler() is None, reason="the emulator needs g++, which is not on the PATH")
@pytest.mark.parametrize(NAMES, CASES)
def test_the_kernel_gathers_what_the_slices_list(
    kernel_cache: Path,
    tile: Tile,
    group: int,
    shape: tuple[int, int],
    dim: int,
    density: float,
    organization: str,
) -> None:
    slices, arrays = drawn(group, shape, density), inputs(shape, dim, np.float16)
    with EmulatedGpu(kernel_cache.parent / "emulated-kernels", seed=group + dim).here() as gpu:
        given = [gpu.array(x) for x in arrays]
        regime = plan_name(tile, group, organization)
        out, lse = block_sparse_attention(*given, slices, regime=regime, return_lse=True)
        plan = make_plan(slices, *given, regime=regime)
        assert plan.config.gather
        assert plan.tiles().rows is not None
        check(out.get(), lse.get(), arrays, slices)


@pytest.mark.skipif(compiler() is None, reason="the emulator needs g++, which is not on the PATH")
@pytest.mark.parametrize("tile", [HOPPER, HOPPER_DEEP])
def test_tasks_are_taken_again_where_weights_overflow(kernel_cache: Path, tile: Tile) -> None:
    """The copying warps begin anew, too, with the first task's fragments and rows."""
    shape = (210, 749)
    slices, arrays = drawn(64, shape, 0.6), inputs(shape, 128, np.float16)
    arrays[0] *= 8
    arrays[1][..., 400:, :] *= 8  # scores far above those of a row's first step
    machine = Emulator(kernel_cache.parent / "emulated-kernels", seed=1, capacity=2)
    out, lse = machine.run(slices, *arrays, regime=plan_name(tile, 64, "rows"), arch="sm_90a")
    check(out, lse, arrays, slices)


@pytest.mark.skipif(compiler() is None, reason="the emulator needs g++, which is not on the PATH")
@pytest.mark.parametrize(("arch", *NAMES), ELSEWHERE)
def test_kernels_of_other_architectures(
    kernel_cache: Path,
    arch: str,
    tile: Tile,
    group: int,
    shape: tuple[int, int],
    dim: int,
    density: float,
    organization: str,
) -> None:
    slices, arrays = drawn(group, shape, density), inputs(shape, dim, np.float16)
    machine = Emulator(kernel_cache.parent / "emulated-kernels", seed=group + dim, capacity=3)
    regime = plan_name(tile, group, organization)
    out, lse = machine.run(slices, *arrays, regime=regime, arch=arch)
    assert machine.launched[0].endswith("_gather")
    check(out, lse, arrays, slices)


@pytest.mark.gpu
@pytest.mark.parametrize(NAMES, CASES)
@pytest.mark.parametrize("scale", [1, 7])
def test_on_a_gpu(
    tile: Tile,
    group: int,
    shape: tuple[int, int],
    dim: int,
    density: float,
    organization: str,
    scale: int,
) -> None:
    import cupy

    arch = arch_of(cupy.cuda.Device().id).name
    kernel, *sizes = tile
    if find(arch, kernel, "float16", dim, *sizes, bits=False, gather=True) is None:
        pytest.skip(f"{arch} has other tiles")
    shape = (scale * shape[0], scale * shape[1])
    slices, arrays = drawn(group, shape, density), inputs(shape, dim, np.float16)
    filler = cupy.empty(1 << 20, np.uint16)
    filler.fill(0x7FFF)  # memory that the call may be given holds NaN
    del filler
    out, lse = block_sparse_attention(
        *map(cupy.asarray, arrays),
        slices,
        regime=plan_name(tile, group, organization),
        return_lse=True,
    )
    check(cupy.asnumpy(out), cupy.asnumpy(lse), arrays, slices)


def test_rows_out_of_reach_are_refused() -> None:
    _check_reach("k", 1 << 20, 2047)
    with pytest.raises(ValueError, match=r"`k`: expected rows of a head within 4 GiB.*4096 bytes"):
        _check_reach("k", 1 << 20, 2048)
