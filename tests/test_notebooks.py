"""The notebooks: without outputs in the repository, like their scripts, and they run."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SECONDS = 60


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def test_there_are_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == [
        "01_masks_to_tiles",
        "02_grids_and_sparsifiers",
        "03_organization_and_balance",
        "04_regimes_and_profile_tables",
        "05_slices_and_gather",
        "06_measure_your_own_mask",
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
class TestNotebook:
    def test_outputs_are_stripped(self, path: Path) -> None:
        for cell in read(path).cells:
            assert not cell.get("outputs"), cell.source
            assert cell.get("execution_count") is None, cell.source

    def test_no_cell_is_empty(self, path: Path) -> None:
        assert all(cell.source.strip() for cell in read(path).cells)

    def test_it_is_its_script(self, path: Path) -> None:
        jupytext = pytest.importorskip("jupytext")
        script = jupytext.read(path.with_suffix(".py"))
        assert [(cell.cell_type, cell.source) for cell in read(path).cells] == [
            (cell.cell_type, cell.source) for cell in script.cells
        ], f"run: jupytext --sync notebooks/{path.name}"

    def test_it_is_installed_from_a_clone(self, path: Path) -> None:
        text = "\n".join(cell.source for cell in read(path).cells)
        assert "pip install '.[" in text
        assert "tessera-cupy[" not in text, "the package is on no index"

    def test_it_says_what_one_will_know_and_try(self, path: Path) -> None:
        first, *_, last = [cell.source for cell in read(path).cells if cell.cell_type == "markdown"]
        assert first.startswith("# ")
        assert "At the end you will know" in first
        assert "## Try next" in last

    def test_it_runs_without_a_gpu(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        outputs = run(path, monkeypatch)
        pictures = [o for o in outputs if "image/png" in o.get("data", {})]
        assert pictures, "no picture was drawn"
        streams = {o.name for o in outputs if o.output_type == "stream"}
        assert streams == {"stdout"}, "a cell wrote a warning"


def test_a_measuring_notebook_says_that_it_predicts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    text = said(run(FOLDER / "06_measure_your_own_mask.ipynb", monkeypatch))
    assert "All times below are PREDICTED for an H200" in text
    assert "measured" not in text.lower()


@pytest.mark.gpu
def test_a_measuring_notebook_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    text = said(run(FOLDER / "06_measure_your_own_mask.ipynb", monkeypatch))
    assert "Measuring on " in text
    assert "PREDICTED" not in text
    assert "largest error" in text


def run(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The outputs of a notebook's cells, none of which may take longer than ``SECONDS``."""
    nbclient = pytest.importorskip("nbclient")
    for module in ("ipykernel", "matplotlib", "av", "skvideo", "hilbert"):
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    # Threads of the small products wait for each other where tests run side by side.
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    notebook = read(path)
    nbclient.NotebookClient(
        notebook, timeout=SECONDS, resources={"metadata": {"path": str(FOLDER)}}
    ).execute()
    return [o for cell in notebook.cells for o in cell.get("outputs", [])]


def said(outputs: list[Any]) -> str:
    return "".join(o.text for o in outputs if o.output_type == "stream")
