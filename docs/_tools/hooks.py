"""What MkDocs fills in while it builds: the help of every command, and the notebooks as pages.

A page says with a comment on a line of its own where something belongs:

- ``<!-- command-line -->``: the help of ``tessera-cupy`` and of all its commands;
- ``<!-- notebook: notebooks/NAME.py -->``: a notebook, from its script in jupytext's percent
  format, with Markdown cells as text and the others as code, and a note that says where the
  pictures are. A line right below the comment, for readers of the repository, is left out.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[2]

_COMMAND_LINE = "<!-- command-line -->"
_NOTEBOOK = re.compile(r"^<!-- notebook: (\S+) -->(?:\n.+)?$", re.MULTILINE)
_NOTE = """!!! note
    This is a notebook. What it prints and draws is there once [you run it](#run-it)."""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in a page before it is rendered; MkDocs calls this."""
    if _COMMAND_LINE in markdown:
        markdown = markdown.replace(_COMMAND_LINE, "\n".join(command_line()))
    return _NOTEBOOK.sub(lambda found: _noted(notebook(ROOT / found[1])), markdown)


def command_line() -> Iterator[str]:
    """The Markdown lines of every command's help, from argparse."""
    from tessera_cupy import cli

    # The width of the page, whatever the terminal's.
    with mock.patch.dict(os.environ, {"COLUMNS": "80", "NO_COLOR": "1"}):
        for parser in _parsers(cli._parser()):
            level = "#" * min(4, 1 + len(parser.prog.split()))
            yield f"{level} {parser.prog}\n\n```text\n{parser.format_help().rstrip()}\n```\n"


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _parsers(below)


def _noted(page: str) -> str:
    """A notebook's page with the note below its title."""
    title, _, rest = page.partition("\n\n")
    return f"{title}\n\n{_NOTE}\n\n{rest}"


def notebook(path: Path) -> str:
    """A percent script as Markdown, without its header and its magic commands."""
    _, *cells = re.split(r"^# %%", path.read_text(), flags=re.MULTILINE)
    pages = []
    for cell in cells:
        kind, _, body = cell.partition("\n")
        if "[markdown]" in kind:
            text = re.sub(r"^# ?", "", body, flags=re.MULTILINE).strip()
        else:
            code = re.sub(r"^# %.*\n", "", body, flags=re.MULTILINE).strip()
            text = f"```python\n{code}\n```"
        pages.append(text)
    return "\n\n".join(pages)
