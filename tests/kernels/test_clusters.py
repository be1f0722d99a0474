"""``cluster_pieces.cu`` and ``expand_pieces.cu`` on the CPU, against loops over clusters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tessera_cupy.kernels import clusters
from tests.emulator.emulator import compiler
from tests.emulator.gpu import EmulatedGpu

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no g++ to build the emulator with")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


def cut(sizes: list[int], piece: int) -> list[tuple[int, int]]:
    """(label, tokens) of each piece."""
    found = []
    for label, size in enumerate(sizes):
        while size > 0:
            found.append((label, min(size, piece)))
            size -= piece
    return found


@needs_compiler
@pytest.mark.parametrize(("labels", "piece"), [(1, 16), (5, 16), (260, 32), (1000, 64)])
def test_pieces(folder: Path, labels: int, piece: int) -> None:
    rng = np.random.default_rng(labels)
    sizes = rng.integers(0, 3 * piece, (2, 3, labels)).astype(np.int32)
    sizes[rng.random(sizes.shape) < 0.3] = 0
    sizes[0, 0] = 0
    capacity = max(len(cut(of, piece)) for of in sizes.reshape(-1, labels).tolist()) + 3
    gpu = EmulatedGpu(folder, labels)
    with gpu.here():
        made = clusters.pieces(
            gpu.array(sizes), labels - 1, piece, capacity, arch="sm_90a", memory=[]
        )
        piece_sizes, piece_labels, weights = (array.get() for array in made)
    assert (weights == sizes[..., :-1]).all()
    for b, h in np.ndindex(2, 3):
        expected = cut(sizes[b, h].tolist(), piece)
        expected += [(-1, 0)] * (capacity - len(expected))
        got = zip(piece_labels[b, h].tolist(), piece_sizes[b, h].tolist(), strict=True)
        assert list(got) == expected


@needs_compiler
def test_expanded(folder: Path) -> None:
    rng = np.random.default_rng(1)
    kept = rng.random((2, 2, 7, 9)) < 0.4
    q_labels = rng.integers(-1, 8, (2, 2, 13)).astype(np.int32)
    k_labels = rng.integers(-1, 10, (2, 2, 1100)).astype(np.int32)
    gpu = EmulatedGpu(folder, 1)
    with gpu.here():
        made = clusters.expand(
            gpu.array(kept), gpu.array(q_labels), gpu.array(k_labels), arch="sm_90a", memory=[]
        ).get()
    for at in np.ndindex(2, 2, 13, 1100):
        q, k = q_labels[at[:3]], k_labels[(*at[:2], at[3])]
        if min(q, k) < 0:
            assert not made[at]
        elif q == 7 or k == 9:
            assert made[at], "text is kept whole"
        else:
            assert made[at] == kept[(*at[:2], q, k)]
