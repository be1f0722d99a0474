"""The README's Python blocks run as they stand, each for itself; test_docs.py sees to the rest."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
MEASURED = (ROOT / "docs" / "measured.md").read_text()
BLOCKS = re.findall(r"(<!-- needs: [a-z, ]+ -->\n)?```python\n(.*?)```", README, re.DOTALL)


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_blocks_without_needs_run_and_print_what_they_say() -> None:
    codes = [code for needs, code in BLOCKS if not needs]
    assert codes
    for code in codes:
        said = re.findall(r"^print\(.*?#\s*(.+)$", code, re.MULTILINE)
        assert run(code).splitlines() == said


@pytest.mark.gpu
def test_blocks_that_need_a_gpu_run() -> None:
    pytest.importorskip("torch")
    codes = [code for needs, code in BLOCKS if needs]
    assert codes
    for code in codes:
        printed = run(code)
        said = re.findall(r"^print\((?!plan\.explain).*?#\s*(.+)$", code, re.MULTILINE)
        assert ("explain()" in code) == ("useful fraction" in printed)
        assert all(line in printed.splitlines() for line in said)


def test_its_figures_are_those_that_were_measured() -> None:
    ours, all_of_them = (rows(text) for text in (README, MEASURED))
    assert len(ours) == 10
    for family, figures in ours.items():
        assert figures.items() <= all_of_them[family].items(), family


def rows(text: str) -> dict[str, dict[str, str]]:
    """The first table of families: by name, each row's cells by their column's title."""
    table = re.search(r"^\| family \|.*\n(?:\|.*\n)+", text, re.MULTILINE)
    assert table is not None
    titles, _, *cells = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()
    )
    return {row[0]: dict(zip(titles, row, strict=True)) for row in cells}
