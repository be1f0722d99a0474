"""What a command says: text for people or JSON for programs, and its errors."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

#: What ``ArgumentParser.add_subparsers`` returns.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

# Without a terminal there is no width to fit; the usual 80 columns would break paths in logs.
_LOG_WIDTH = 120


class Output:
    """Where a command writes.

    Attributes:
        json: whether stdout carries one JSON object in place of text.
        console: for text and progress; stdout, or stderr under ``--json``.
    """

    def __init__(self, json: bool) -> None:
        self.json = json
        self.console = Console(stderr=json, highlight=False)
        if not self.console.is_terminal:
            self.console.width = max(_LOG_WIDTH, self.console.width)

    def show(self, data: Mapping[str, Any], text: RenderableType | None) -> None:
        """Write a result: ``data`` under ``--json``, else ``text``, if any is left to say."""
        if self.json:
            print(json.dumps(plain(data), indent=2, ensure_ascii=False))
        elif text is not None:
            # Lines of text are the terminal's to wrap; in a log or a pipe they stay whole.
            self.console.print(text, markup=False, soft_wrap=isinstance(text, (str, Text)))

    def fail(self, error: BaseException) -> None:
        """Write an error, on stderr; under ``--json`` as an object on stdout too."""
        message = str(error)
        if isinstance(error, MemoryError):  # Python's own has no text
            message = f"There is not enough memory for this. {message}".rstrip()
        print(f"tessera-cupy: {message}", file=sys.stderr)
        if self.json:
            print(json.dumps({"error": {"type": type(error).__name__, "message": message}}))

    def warn(self, message: Warning | str, *_: object, **__: object) -> None:
        """Write a warning as one line; takes the place of ``warnings.showwarning``."""
        print(f"tessera-cupy: warning: {message}", file=sys.stderr)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Declare ``--json``, which every command takes."""
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object in place of text"
    )


def plain(value: Any) -> Any:
    """Return ``value`` in JSON's own types; a number that is not finite becomes null.

    Raises:
        TypeError: A type that has no such form.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (np.generic, np.ndarray)):
        return plain(value.tolist())
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int)):
        return value
    raise TypeError(f"{type(value).__name__} has no JSON form")


def facts(rows: Mapping[str, object]) -> Table:
    """A two-column table of names and values."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(Text(name), Text(str(value)))
    return table


def size(count: int) -> str:
    """A number of bytes in binary units.

    >>> size(1536)
    '1.5 KiB'
    """
    amount = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if amount < 1024:
            return f"{count} bytes" if unit == "bytes" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"
