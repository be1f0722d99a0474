"""The README's Python blocks run as they stand; its links and commands exist."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
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


def test_links_lead_to_files() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert len(links) >= 2
    for link in links:
        assert (ROOT / link).exists(), link


def test_commands_are_known_to_the_program() -> None:
    shell = "\n".join(re.findall(r"```bash\n(.*?)```", README, re.DOTALL))
    commands = re.findall(
        r"^tessera-cupy (\w+(?: (?:build|attention|families|request))?)", shell, re.MULTILINE
    )
    assert {"env", "plan", "cache build", "bench attention", "bench families"} < set(commands)
    assert "bench request" in commands
    for command in commands:
        words = [sys.executable, "-m", "tessera_cupy", *command.split(), "--help"]
        assert subprocess.run(words, capture_output=True, cwd=ROOT, check=False).returncode == 0


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_targets_exist() -> None:
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        done = subprocess.run(["make", "-n", target], capture_output=True, cwd=ROOT, check=False)
        assert done.returncode == 0, target
