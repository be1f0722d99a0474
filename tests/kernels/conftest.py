"""Tiny kernels in a folder of the test's own, so that real compiling takes milliseconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera_cupy.kernels.catalog import KernelConfig, catalog

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
