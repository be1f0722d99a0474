"""Key slices whose rows the kernel gathers: on the emulated GPU and on a real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera_cupy import KeySlices, block_sparse_attention, make_plan, reference
from tests.emulator.emulator import compiler
from tests.emulator.gpu import EmulatedGpu

#: How the query side of each group size becomes tiles of 128 rows.
SIDES = {64: "share", 128: "retain", 192: "split"}
CASES = [
    # group, (sq, skv), head dim, density, organization
    (64, (319, 349), 64, 0.1, "longest+split"),
    (64, (130, 65), 128, 0.5, "rows"),
    (128, (389, 662), 128, 0.02, "longest+split"),
    (128, (302, 665), 80, 0.05, "alternate"),
    (192, (410, 203), 128, 0.2, "rows"),
    (192, (43, 571), 80, 0.1, "longest+split"),
]


def drawn(group: int, shape: tuple[int, int], density: float, heads: int = 2) -> KeySlices:
    """Random keys, some runs of them, a group without any."""
    rng = np.random.default_rng([group, *shape])
    sq, skv = shape
    kept = rng.random((1, heads, -(-sq // group), skv)) < density
    for _ in range(8):
        head, of, first = (int(rng.integers(n)) for n in (heads, kept.shape[2], skv))
        kept[0, head, of, first : first + int(rng.integers(90))] = True
    kept[0, 0, -1] &= kept.shape[2] == 1
    return KeySlices.from_groups(kept, group, shape)


def inputs(shape: tuple[int, int], dim: int, dtype: Any, heads: int = 2) -> list[Any]:
    rng = np.random.default_rng(dim)
    sizes = (shape[0], shape[1], shape[1])
    return [rng.standard_normal((1, heads, n, dim), np.float32).astype(dtype) for n in sizes]


def plan_name(group: int, organization: str) -> str:
    return f"attend_wgmma/q128k192/{SIDES[group]}-gather/{organization}"


def check(out: Any, lse: Any, arrays: list[Any], slices: KeySlices) -> None:
    exact, exact_lse = reference.attention(*arrays, slices, return_lse=True)
    assert abs(out.astype(np.float64) - exact).max() < 4e-3
    empty = np.isneginf(exact_lse)
    assert (np.isneginf(lse) == empty).all()
    assert abs(np.where(empty, 0, lse - np.where(empty, 0, exact_lse))).max() < 1e-4


@pytest.mark.skipif(compiler() is None, reason="the emulator needs g++, which is not on the PATH")
@pytest.mark.parametrize(("group", "shape", "dim", "density", "organization"), CASES)
def test_the_kernel_gathers_what_the_slices_list(
    kernel_cache: Path,
    group: int,
    shape: tuple[int, int],
    dim: int,
    density: float,
    organization: str,
) -> None:
    slices, arrays = drawn(group, shape, density), inputs(shape, dim, np.float16)
    with EmulatedGpu(kernel_cache.parent / "emulated-kernels", seed=group + dim).here() as gpu:
        given = [gpu.array(x) for x in arrays]
        regime = plan_name(group, organization)
        out, lse = block_sparse_attention(*given, slices, regime=regime, return_lse=True)
        plan = make_plan(slices, *given, regime=regime)
        assert plan.config.gather
        assert plan.tiles().rows is not None
        check(out.get(), lse.get(), arrays, slices)


@pytest.mark.gpu
@pytest.mark.parametrize(("group", "shape", "dim", "density", "organization"), CASES)
@pytest.mark.parametrize("scale", [1, 7])
def test_on_a_gpu(
    group: int,
    shape: tuple[int, int],
    dim: int,
    density: float,
    organization: str,
    scale: int,
) -> None:
    import cupy

    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("rows are gathered on Hopper")
    shape = (scale * shape[0], scale * shape[1])
    slices, arrays = drawn(group, shape, density), inputs(shape, dim, np.float16)
    filler = cupy.empty(1 << 20, np.uint16)
    filler.fill(0x7FFF)  # memory that the call may be given holds NaN
    del filler
    out, lse = block_sparse_attention(
        *map(cupy.asarray, arrays), slices, regime=plan_name(group, organization), return_lse=True
    )
    check(cupy.asnumpy(out), cupy.asnumpy(lse), arrays, slices)
