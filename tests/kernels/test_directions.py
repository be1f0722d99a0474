"""``directions.cu`` on the CPU, through its own launch, against loops over rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tessera_cupy.kernels.directions import into_directions
from tests.emulator.emulator import compiler
from tests.emulator.gpu import EmulatedGpu

pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++ to build the emulator with")


@pytest.fixture
def folder(kernel_cache: Path) -> Path:
    return kernel_cache.parent / "emulated-kernels"


@pytest.mark.parametrize(
    ("blocks", "video", "channels"),
    [(7, slice(0, 7), 40), (21, slice(0, 19), 64), (21, slice(3, 21), 5), (1, slice(0, 1), 32)],
)
def test_rows(folder: Path, blocks: int, video: slice, channels: int) -> None:
    rng = np.random.default_rng(blocks + channels)
    queries, keys = rng.standard_normal((2, 2, 3, blocks, channels)).astype(np.float32)
    queries[0, 0, 0] = keys[1, 1, video.start] = 0  # no direction
    gpu = EmulatedGpu(folder, blocks)
    with gpu.here():
        q, k = (gpu.array(x, writable=True) for x in (queries, keys))
        into_directions(q, k, video, 0.7, 0.3)
        made_q, made_k = q.get(), k.get()
    for b, h in np.ndindex(2, 3):
        total = np.zeros(channels)
        for row in range(blocks):
            if video.start <= row < video.stop:
                unit = keys[b, h, row] / max(np.linalg.norm(keys[b, h, row]), 1e-12)
                assert made_k[b, h, row] == pytest.approx(unit, rel=1e-5, abs=1e-6)
                total += unit
            else:
                assert np.isnan(made_k[b, h, row]).all()
        for row in range(blocks):
            unit = queries[b, h, row] / max(np.linalg.norm(queries[b, h, row]), 1e-12)
            expected = 0.7 * unit - 0.3 * total
            assert made_q[b, h, row] == pytest.approx(expected, rel=1e-4, abs=1e-5)
