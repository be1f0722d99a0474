"""An emulated GPU; and tiny kernels in a folder of the test's own, compiled in milliseconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tessera_cupy.kernels.catalog import KernelConfig, catalog
from tests.emulator.emulator import drawn_seed
from tests.emulator.gpu import EmulatedGpu

DUMMY = """
#include "common/factor.cuh"
#define TESSERA_MERGE_SPLITS(T, WARPS) \\
  extern "C" __global__ void merge_splits(float* x) { x[threadIdx.x] *= kFactor * WARPS; }
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A folder of CUDA sources that stands in for the package's."""
    folder = tmp_path / "sources"
    (folder / "common").mkdir(parents=True)
    (folder / "merge_splits.cu").write_text(DUMMY)
    (folder / "common" / "factor.cuh").write_text("inline constexpr float kFactor = 2.0f;\n")
    return folder


@pytest.fixture
def config() -> KernelConfig:
    """An entry that the dummy sources can build."""
    return catalog("sm_80")[-1]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An empty cache."""
    return tmp_path / "cache"


@pytest.fixture
def seed() -> int:
    """What a test draws by; see :func:`drawn_seed`."""
    return drawn_seed()


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    """Numbers of that seed."""
    return np.random.default_rng(seed)


@pytest.fixture
def gpu(kernel_cache: Path, seed: int) -> Iterator[EmulatedGpu]:
    """A new emulated GPU in CuPy's place."""
    made = EmulatedGpu(kernel_cache.parent / "emulated-kernels", seed)
    with made.here():
        yield made
