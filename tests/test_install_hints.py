"""Advice to install an extra: it names one that there is, and asks no index for the package."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {path: path.read_text() for path in (ROOT / "tessera_cupy").rglob("*.py")}


def test_hints_name_extras_of_the_project() -> None:
    listed = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1]
    extras = set(re.findall(r"^(\w+) = \[", listed.partition("\n[")[0], re.MULTILINE))
    named = {name for text in SOURCES.values() for name in re.findall(r"install\('(\w+)'\)", text)}
    assert {"cuda12"} <= named <= extras


def test_no_hint_asks_an_index_for_the_package() -> None:
    found = [str(path) for path, text in SOURCES.items() if "install 'tessera-cupy" in text]
    assert found == []
