"""Rules over 3-D tiles, and rules without scores, on arrays of the emulated GPU, against NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tessera_cupy.sparsifiers import longcat, radial, ssta, sta, static, vsa
from tessera_cupy.video import VideoGrid
from tests.emulator.emulator import compiler
from tests.emulator.gpu import EmulatedGpu

pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++ to build the emulator with")

SCORED: list[tuple[ModuleType, dict[str, Any]]] = [
    (vsa, {"sparsity": 0.6, "cube": (2, 4, 4)}),
    (longcat, {"sparsity": 0.6, "cube": (2, 4, 4)}),
    (ssta, {"keep": 3, "window": (1, 1, 3), "tile": (2, 4, 4)}),
]
FIXED: list[tuple[ModuleType, dict[str, Any]]] = [
    (sta, {"windows": [(1, 1, 3), (1, 2, 1)], "tile": (2, 4, 4)}),
    (radial, {"block": 64}),
    (static, {"unit": "blocks", "reach": 1}),
]
GRIDS = [
    VideoGrid(2, 8, 24),
    VideoGrid(2, 8, 24, text_tokens=40),
    VideoGrid(2, 8, 24, text_tokens=40, text_first=True),
]
RAGGED = VideoGrid(2, 7, 22, text_tokens=40)


@pytest.fixture
def gpu(kernel_cache: Path) -> Iterator[EmulatedGpu]:
    made = EmulatedGpu(kernel_cache.parent / "emulated-kernels", 1)
    with made.here():
        yield made


def drawn(grid: VideoGrid) -> Any:
    # Small integers: sums are exact, whatever their order.
    rng = np.random.default_rng(grid.tokens)
    return rng.integers(-4, 5, (2, 2, 2, grid.tokens, 16)).astype(np.float16)


@pytest.mark.parametrize("grid", [*GRIDS, RAGGED], ids=str)
@pytest.mark.parametrize(("rule", "options"), SCORED, ids=lambda x: getattr(x, "__name__", ""))
def test_scored(
    gpu: EmulatedGpu, rule: ModuleType, options: dict[str, Any], grid: VideoGrid
) -> None:
    q, k = drawn(grid)
    host = rule.select(q, k, grid, **options)
    there = rule.select(gpu.array(q), gpu.array(k), grid, **options)
    if host.mask.q_block_sizes is None:
        assert there.mask.source is not None
        assert (gpu.waits, gpu.copied) == (0, 0)
    there.check()
    assert (there.mask.to_dense() == host.mask.to_dense()).all()


@pytest.mark.parametrize("name", ["q", "k"])
def test_what_is_no_number_is_told_by_the_check(gpu: EmulatedGpu, name: str) -> None:
    grid = GRIDS[1]
    arrays = dict(zip("qk", drawn(grid), strict=True))
    arrays[name][1, 0, 5, 3] = np.inf
    chosen = vsa.select(*map(gpu.array, arrays.values()), grid, cube=(2, 4, 4))
    with pytest.raises(ValueError, match=f"`{name}`: expected finite numbers"):
        chosen.check()


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize(("rule", "options"), FIXED, ids=lambda x: getattr(x, "__name__", ""))
def test_fixed(
    gpu: EmulatedGpu, rule: ModuleType, options: dict[str, Any], grid: VideoGrid
) -> None:
    q, k = map(gpu.array, drawn(grid))
    first, second = (rule.select(q, k, grid, **options) for _ in range(2))
    assert first.mask is second.mask
    host = rule.mask(grid, **options)
    if host.q_block_sizes is None:
        assert first.mask.source is not None
        assert (gpu.waits, gpu.copied) == (0, 0)
    assert (first.mask.to_dense() == host.to_dense()).all()
