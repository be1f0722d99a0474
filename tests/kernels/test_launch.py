"""What launches hand to kernels, worked out by hand, on a GPU that is played."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tessera_cupy import ArraySpec, BlockMask, make_plan
from tessera_cupy.kernels import launch
from tessera_cupy.plan import Plan

# Query blocks 0 and 2 have one list, 1 and 3 another.
ALIKE = BlockMask.from_dense([[1, 0, 1], [0, 1, 0], [1, 0, 1], [0, 1, 0], [1, 0, 0]], (64, 64))
LONG = BlockMask.from_dense(np.ones((1, 64), bool), (64, 64))
BITS = BlockMask.from_tokens(np.tri(128, dtype=bool), (64, 64))


class Array(np.ndarray[Any, Any]):
    """A NumPy array that stands for one in GPU memory."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As much of CuPy as uploads and launches touch."""
    stream = SimpleNamespace(ptr=1, synchronize=lambda: None, is_capturing=lambda: False)
    fake = SimpleNamespace(
        asarray=lambda x: np.array(x).view(Array),
        empty=lambda shape, dtype: np.empty(shape, dtype).view(Array),
        cuda=SimpleNamespace(get_current_stream=lambda: stream),
    )
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return fake


def plan(mask: BlockMask, regime: str, *, heads: int = 1, arch: str = "sm_90a") -> Plan:
    q, k = (ArraySpec((1, heads, tokens, 128)) for tokens in mask.shape)
    return make_plan(mask, q, k, regime=regime, arch=arch)


# The packed arrays


def test_a_task_of_a_regrouped_plan_points_at_its_tiles_units() -> None:
    made = plan(ALIKE, "attend_wgmma/q128k192/regroup-pack/rows", heads=2)
    packed = launch.packed_tasks(made.tiles(), made.tasks())
    assert packed.dtype.itemsize == 48
    # Tiles of blocks 0 and 2, of 1 and 3, and of 4 alone; each has 8 units of 16 rows. Steps have
    # three fragments, and lists are padded to whole ones.
    assert packed["head"].tolist() == [0, 0, 0, 1, 1, 1]
    assert packed["first_row"].tolist() == [0, 64, 256] * 2
    assert packed["rows"].tolist() == [128, 128, 64] * 2
    assert packed["units"].tolist() == [0, 8, 16] * 2
    assert packed["frag_begin"].tolist() == [0, 3, 6] * 2
    assert packed["frag_count"].tolist() == [3, 3, 3] * 2
    assert packed["begin"].tolist() == [0] * 6
    assert packed["end"].tolist() == [1] * 6
    assert packed["slot"].tolist() == [-1] * 6
    assert packed["reverse"].tolist() == [0] * 6


def test_a_task_of_a_split_plan_has_its_steps_and_its_slot() -> None:
    made = plan(LONG, "attend_mma/q64k64/retain-pack/alternate+split", arch="sm_80")
    tasks = made.tasks()
    packed = launch.packed_tasks(made.tiles(), tasks)
    parts = len(packed)
    assert parts > 1
    order = np.argsort(packed["begin"])
    assert packed["begin"][order][0] == 0
    assert packed["end"][order][-1] == 64
    assert packed["begin"][order][1:].tolist() == packed["end"][order][:-1].tolist()
    assert packed["slot"][order].tolist() == list(range(parts))
    assert packed["reverse"].tolist() == tasks.task_reverse.astype(int).tolist()
    assert packed["reverse"].any()
    assert packed["units"].tolist() == [-1] * parts
    for name, value in (("first_row", 0), ("rows", 64), ("frag_begin", 0), ("frag_count", 64)):
        assert packed[name].tolist() == [value] * parts


@pytest.mark.parametrize(
    ("mask", "regime", "arch"),
    [
        (ALIKE, "attend_wgmma/q128k192/regroup-pack/longest", "sm_90a"),
        (ALIKE, "attend_wgmma/q128k192/share-pack/longest", "sm_90a"),
        (LONG, "attend_mma/q64k64/retain-pack/split", "sm_80"),
        (BITS, "attend_mma/q64k64/retain-pack/longest", "sm_80"),
    ],
    ids=["units", "plain", "split", "bits"],
)
def test_a_summary_has_the_bytes_that_are_uploaded(
    mask: BlockMask, regime: str, arch: str, cupy: Any
) -> None:
    made = plan(mask, regime, arch=arch)
    uploaded = launch.upload(made.tiles(), made.tasks(), bits=made.config.bits)
    assert uploaded.tasks.nbytes == 48 * len(made.tasks())
    assert uploaded.fragments.nbytes == 8 * len(made.tiles().frag_start)
    assert made.summary()["bytes"]["plan"] == uploaded.nbytes
