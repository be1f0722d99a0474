"""Importing the package, or any module of it, touches no GPU and loads no optional package."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

HEAVY = ("av", "cuda", "cupy", "jax", "matplotlib", "scipy", "torch")

EVERYTHING = """
import importlib, pkgutil
names = [m.name for m in pkgutil.walk_packages(tessera_cupy.__path__, "tessera_cupy.")]
for name in names:
    importlib.import_module(name)
"""


def loaded_by(code: str) -> list[str]:
    """Modules that ``code`` loads in a new process, beyond those of the interpreter's start."""
    # Some packages load parts of themselves at start-up, through .pth files.
    code = (
        f"import sys; before = set(sys.modules)\n{code}\n"
        "import json; print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    names: list[str] = json.loads(done.stdout.splitlines()[-1])
    return names


@pytest.mark.parametrize("rest", ["", EVERYTHING], ids=["package", "every module"])
def test_import_loads_nothing_heavy(rest: str) -> None:
    names = loaded_by(f"import tessera_cupy\n{rest}")
    assert not [name for name in names if name.partition(".")[0] in HEAVY]
    if rest:
        assert {"tessera_cupy.cli", "tessera_cupy.masks", "tessera_cupy.__main__"} <= set(names)


def test_public_names_are_all_there() -> None:
    code = "import tessera_cupy\nfor name in tessera_cupy.__all__: getattr(tessera_cupy, name)"
    names = loaded_by(code)
    assert not [name for name in names if name.partition(".")[0] in HEAVY]


def test_heavy_modules_would_be_seen() -> None:
    assert "scipy" in loaded_by("import scipy")
