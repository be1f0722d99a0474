"""What fills in the site: help, notebooks, docstrings, pictures, and the search for the network."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).parents[1] / "docs" / "_tools"


def tool(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_help_of_every_command(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = tool("hooks")
    page = hooks.on_page_markdown("Before\n\n<!-- command-line -->\n")
    assert page.startswith("Before\n\n## tessera-cupy\n\n```text\nusage: tessera-cupy ")
    assert "\n### tessera-cupy plan\n" in page
    assert "\n#### tessera-cupy cache build\n" in page
    assert "needs no GPU" in page
    monkeypatch.setenv("COLUMNS", "200")  # of a terminal, which the page is not in
    assert hooks.on_page_markdown("Before\n\n<!-- command-line -->\n") == page


def test_a_notebook_as_a_page(tmp_path: Path) -> None:
    script = tmp_path / "n.py"
    script.write_text(
        "# ---\n# jupyter: 1\n# ---\n\n# %% [markdown]\n# # Title\n#\n# Some *text*.\n\n"
        "# %%\n# %matplotlib inline\nx = 1  # one\n\n# %% [markdown]\n# ## More\n"
    )
    assert tool("hooks").notebook(script) == (
        "# Title\n\nSome *text*.\n\n```python\nx = 1  # one\n```\n\n## More"
    )


def test_a_page_of_a_notebook_says_that_it_lacks_the_outputs() -> None:
    page = tool("hooks").on_page_markdown(
        "<!-- notebook: notebooks/01_masks_to_tiles.py -->\nHere in the site.\n\n## Run it\n\nSo.\n"
    )
    title, note, *_ = page.split("\n\n")
    assert title == "# From a mask to physical tiles"
    assert note.startswith("!!! note\n    This is a notebook.")
    assert "(#run-it)" in note
    assert page.endswith("\n\n## Run it\n\nSo.\n")


def test_every_notebook_has_a_page() -> None:
    root = TOOLS.parents[1]
    pages = "".join(path.read_text() for path in (root / "docs" / "tutorial").glob("*.md"))
    scripts = sorted(path.name for path in (root / "notebooks").glob("*.py"))
    assert scripts
    for name in scripts:
        assert f"<!-- notebook: notebooks/{name} -->" in pages


def test_a_docstring_as_markdown() -> None:
    pytest.importorskip("griffe")
    made = tool("docstrings").as_markdown(
        "See :func:`~tessera_cupy.Plan` and ``x``.\n\n>>> 1 + 1  # doctest: +SKIP\n2\n\n"
        "Example:\n    ::\n\n        y = 2\n\nAs follows::\n\n    z = 3\n"
    )
    assert made.splitlines() == [
        'See <autoref identifier="tessera_cupy.Plan" optional>`Plan`</autoref> and ``x``.',
        "",
        "```pycon",
        ">>> 1 + 1",
        "2",
        "```",
        "",
        "Example:",
        "    ```python",
        "    y = 2",
        "    ```",
        "",
        "As follows:",
        "",
        "```python",
        "z = 3",
        "```",
    ]


def test_a_shape_is_no_type_of_what_is_returned() -> None:
    griffe = pytest.importorskip("griffe")
    made = tool("docstrings").as_markdown("One.\n\nReturns:\n    (n,) int64: the order.\n")
    sections = griffe.Docstring(made).parse(
        "google", returns_named_value=False, returns_multiple_items=False, warnings=False
    )
    assert sections[1].value[0].description == "(n,) int64&#58; the order."


def test_a_simple_table_as_markdown() -> None:
    pytest.importorskip("griffe")
    made = tool("docstrings").as_markdown(
        "=====  ====\nmodel  kept\n=====  ====\nWan A  0.2\nB      0.35\n=====  ===="
    )
    assert made.splitlines() == [
        "| model | kept |",
        "|---|---|",
        "| Wan A | 0.2 |",
        "| B | 0.35 |",
    ]


@pytest.mark.parametrize(
    ("page", "found"),
    [
        ('<script src="https://a.example/x.js"></script>', 1),
        ('<link rel="stylesheet" href="//a.example/x.css">', 1),
        ('<link rel="preconnect" href="https://a.example">', 1),
        ('<img src="HTTPS://a.example/x.png">', 1),
        ('<p style="background: url(https://a.example/x.png)">', 1),
        ("<style>@import 'https://a.example/x.css';</style>", 1),
        ('<pre class="mermaid"></pre>', 1),
        ('<script src="assets/x.js"></script><img src="data:image/png;base64,AA">', 0),
        (
            '<a href="https://a.example">a link</a><link rel="canonical" href="https://b.example">',
            0,
        ),
    ],
)
def test_what_needs_the_network(
    tmp_path: Path, page: str, found: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "index.html").write_text(page)
    assert tool("check_site").main(str(tmp_path)) == found
    assert capsys.readouterr().err.count("needs the network: index.html") == found


def test_styles_and_pictures_of_a_site_are_looked_at(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("")
    (tmp_path / "a.css").write_text("@font-face { src: url('https://a.example/f.woff2') }")
    (tmp_path / "b.svg").write_text('<svg><image xlink:href="https://a.example/b.png"/></svg>')
    assert list(tool("check_site").from_elsewhere(tmp_path)) == [
        "a.css: https://a.example/f.woff2",
        "b.svg: https://a.example/b.png",
    ]


def test_no_site(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool("check_site").main(str(tmp_path)) == 1
    assert "holds no site" in capsys.readouterr().err


def test_every_picture_is_there_and_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pictures = tool("pictures")
    drawn = pictures.draw(tmp_path)
    assert {path.name for path in drawn} == {path.name for path in pictures.FOLDER.glob("*.svg")}
    # Lists of 5, 4, 4, 6, 4 and 4 blocks: 27 steps of one, or 14 of two, of which one is half full.
    assert "as steps of 64x64: 27, useful 1.00" in (tmp_path / "retain.svg").read_text()
    assert "as steps of 64x128: 14, useful 0.96" in (tmp_path / "pack.svg").read_text()
    # Lists of 5, 6 and 4 blocks: 15 steps of one, 5 + 4 + 4 aligned pairs, 3 + 3 + 2 of two.
    three = (tmp_path / "three-ways.svg").read_text()
    assert "retain: 15 steps, 50% of the work is useful" in three
    assert "merge: 13 steps, 58% of the work is useful" in three
    assert "pack: 8 steps, 94% of the work is useful" in three
