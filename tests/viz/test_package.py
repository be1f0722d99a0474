"""The package of pictures: what importing it costs, and its examples."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

from tessera_cupy import viz

MODULES = [module.name for module in pkgutil.iter_modules(viz.__path__)]


def test_importing_the_module_does_not_import_matplotlib() -> None:
    import subprocess
    import sys

    code = "import sys; import tessera_cupy.viz; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    pytest.importorskip("matplotlib")
    failed, _ = doctest.testmod(importlib.import_module(f"tessera_cupy.viz.{name}"))
    assert not failed


@pytest.mark.parametrize("name", [name for name in viz.__all__ if name.startswith("draw_")])
def test_every_picture_has_an_example(name: str) -> None:
    assert ">>> " in (getattr(viz, name).__doc__ or "")
