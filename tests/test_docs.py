"""The documents: code runs and prints what they say, commands parse, links and anchors resolve."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import shlex
import subprocess
import sys
import unicodedata
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import tessera_cupy
from tessera_cupy import cli, parallel, reference, sparsifiers

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {
    str(path.relative_to(ROOT)): path
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md")))
}

_BLOCK = re.compile(
    r"(?:<!-- needs: (?P<needs>[a-z, ]+) -->\n)?```python\n(?P<code>.*?)```"
    r"(?:\n\nprints\n\n```text\n(?P<prints>.*?)```)?",
    re.DOTALL,
)
_SAID = re.compile(r"^\s*print\((?!plan\.explain\(\)).*?  # (.+)$", re.MULTILINE)
_SNIPPET = re.compile(r'^--8<-- "([^:"]+)(?::([\w-]+))?"$', re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A block of Python: what it needs, its code, and the lines that it says it prints."""

    needs: frozenset[str]
    code: str
    said: tuple[str, ...]

    def can_run(self, *, gpu: bool) -> bool:
        """Whether what it needs is here, taking the answer for a GPU."""
        packages = self.needs - {"gpu"}
        found = all(importlib.util.find_spec(name) is not None for name in packages)
        return found and (gpu or "gpu" not in self.needs)


@cache
def blocks(name: str) -> list[Block]:
    made = []
    for found in _BLOCK.finditer(PAGES[name].read_text()):
        prints = found["prints"]
        said = prints.splitlines() if prints is not None else _SAID.findall(found["code"])
        needs = frozenset((found["needs"] or "").replace(" ", "").split(",")) - {""}
        made.append(Block(needs, found["code"], tuple(said)))
    return made


def whole(path: Path) -> str:
    """A page with the parts of other files that it takes in."""

    def taken(found: re.Match[str]) -> str:
        text = (ROOT / found[1]).read_text()
        if found[2] is None:
            return text
        start, end = (f"<!-- --8<-- [{edge}:{found[2]}] -->" for edge in ("start", "end"))
        assert text.count(start) == text.count(end) == 1, found[0]
        return text.partition(start)[2].partition(end)[0]

    return _SNIPPET.sub(taken, path.read_text())


def run_in_order(chosen: list[Block]) -> None:
    """Blocks of one page may use the names of those before."""
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(block.code for block in chosen)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    said = [line for block in chosen for line in block.said]
    if any("plan.explain()" in block.code for block in chosen):
        assert "useful fraction" in done.stdout
        assert all(line in printed for line in said)
    elif any("gpu" in block.needs for block in chosen):  # figures differ from GPU to GPU
        assert all(line in printed for line in said)
    else:
        assert printed == said


# The README's blocks are run each for itself in test_readme.py.
WITH_CODE = [name for name in PAGES if name.startswith("docs") and blocks(name)]


@pytest.mark.parametrize("name", WITH_CODE)
def test_code_prints_what_the_page_says(name: str) -> None:
    if "scipy" in "".join(block.code for block in blocks(name)):
        pytest.importorskip("scipy")
    chosen = [block for block in blocks(name) if block.can_run(gpu=False)]
    if not chosen:
        pytest.skip("its code needs what is not here")
    run_in_order(chosen)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", [name for name in WITH_CODE if any("gpu" in b.needs for b in blocks(name))]
)
def test_code_that_needs_a_gpu_runs(name: str) -> None:
    run_in_order([block for block in blocks(name) if block.can_run(gpu=True)])


@pytest.mark.parametrize("name", [name for name in PAGES if blocks(name)])
def test_code_takes_from_the_package_what_is_in_it(name: str) -> None:
    for block in blocks(name):
        for node in ast.walk(ast.parse(block.code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tessera_cupy"):
                module = importlib.import_module(str(node.module))
                for alias in node.names:
                    submodule = f"{node.module}.{alias.name}"
                    found = hasattr(module, alias.name) or importlib.util.find_spec(submodule)
                    assert found, f"{submodule} in {name}"


def shell_lines(name: str) -> list[str]:
    found = re.findall(r"```bash\n(.*?)```", whole(PAGES[name]), re.DOTALL)
    return [line for text in found for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("name", [name for name in PAGES if shell_lines(name)])
def test_commands_are_known(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    for line in shell_lines(name):
        program, *words = shlex.split(line, comments=True)
        if program == "tessera-cupy":
            try:
                cli._parser().parse_args(words)
            except SystemExit:
                pytest.fail(f"{line}: {capsys.readouterr().err}")
        elif program == "make":
            assert re.search(rf"^{words[0]}:", makefile, re.MULTILINE), line
        elif program == "pip":
            extras = re.findall(r"\[(.*?)\]", line)
            for extra in (one for given in extras for one in given.split(",")):
                assert re.search(rf"^{extra} = \[", project, re.MULTILINE), line
        else:
            assert program in ("export", "torchrun"), line


def slugs(path: Path) -> set[str]:
    """The anchors of a page: its headings, and the objects that its reference is about."""
    text = re.sub(r"```.*?```", "", whole(path), flags=re.DOTALL)
    found = set(re.findall(r"^::: (\S+)", text, re.MULTILINE))
    for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = unicodedata.normalize("NFKD", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title))
        found.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower()))
    return found


@pytest.mark.parametrize("name", PAGES)
def test_links_and_anchors_resolve(name: str) -> None:
    page = PAGES[name]
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if DOCS in page.parents:
            assert DOCS in target.parents, f"{link}: the site has no other files"
        assert not anchor or anchor in slugs(target), link


def test_the_reference_has_all_that_is_public() -> None:
    pages = "".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    shown = set(re.findall(r"^::: (\S+)$", pages, re.MULTILINE))
    for package in (tessera_cupy, parallel, reference, sparsifiers):
        for name in package.__all__:
            home = getattr(getattr(package, name), "__module__", None)
            assert {f"{package.__name__}.{name}", home} & shown, name
    assert {"tessera_cupy.errors", "tessera_cupy.video.VideoGrid", "tessera_cupy.viz"} <= shown


def test_the_readme_s_links_lead_into_the_site() -> None:
    links = re.findall(r"\]\((docs/[^)]+)\)", PAGES["README.md"].read_text())
    assert len(links) >= 5
