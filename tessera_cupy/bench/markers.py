"""Tables between markers in a Markdown file, replaced without touching what is around them.

A table's place is between two comments, each alone on its line::

    <!-- bench:families -->
    <!-- /bench:families -->

The name is that of the table, or begins with it and a hyphen where a file has several of a kind,
such as ``families-d64``. The text in between belongs to the command that writes it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

from tessera_cupy.errors import wrong

_LINE = re.compile(r"^<!-- (/?)bench:([\w-]+) -->[ \t]*\r?$", re.MULTILINE)


def find(text: str) -> dict[str, tuple[int, int]]:
    r"""Where each named place is.

    Args:
        text: of a Markdown file.

    Returns:
        By name, the offsets between the end of the first marker's line and the start of the
        second one's.

    Raises:
        ValueError: a marker without its other half, places within each other, or one name twice.

    >>> find("# A\n<!-- bench:a -->\nold\n<!-- /bench:a -->\n")
    {'a': (21, 25)}
    """
    places: dict[str, tuple[int, int]] = {}
    opened: re.Match[str] | None = None
    for marker in _LINE.finditer(text):
        line = text.count("\n", 0, marker.start()) + 1
        closes, name = marker.groups()
        if closes and opened and opened[2] == name:
            places[name] = (opened.end() + 1, marker.start())
            opened = None
        elif closes or opened:
            missing = opened[2] if opened else name
            raise ValueError(_unpaired(missing, f"{marker[0].strip()} in line {line}"))
        elif name in places:
            raise ValueError(
                wrong("markers", "each name once", f"{name} again in line {line}", "remove one")
            )
        else:
            opened = marker
    if opened:
        raise ValueError(_unpaired(opened[2], "the end of the file"))
    return places


def _unpaired(name: str, got: str) -> str:
    pair = f"<!-- bench:{name} --> and <!-- /bench:{name} -->"
    return wrong("markers", f"{pair}, one after the other", got, "complete the pair")


def check(path: Path, names: Collection[str]) -> None:
    """See that a file has a place of each name, before anything is measured for it.

    Raises:
        OSError: it cannot be read.
        ValueError: it has no such place, or its markers are not paired.
    """
    _places(path, _text(path), names)


def replace(path: Path, tables: Mapping[str, str]) -> None:
    """Write tables into their places, all of them or none; a reader never sees half a file.

    Args:
        path: a Markdown file in UTF-8.
        tables: Markdown by name, without an end of line at its end.

    Raises:
        OSError: the file cannot be read or written.
        ValueError: as of :func:`check`.
    """
    path = path.resolve()  # the file that a link leads to, not the link
    text = _text(path)
    places = _places(path, text, tables)
    end = "\r\n" if "\r\n" in text else "\n"
    for name in sorted(tables, key=lambda name: places[name], reverse=True):
        begin, stop = places[name]
        text = text[:begin] + tables[name].replace("\n", end) + end + text[stop:]
    part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        part.write_bytes(text.encode())
        shutil.copymode(path, part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        got, fix = f"byte {error.object[error.start]:#04x} in {path}", "save the file as UTF-8"
        raise ValueError(wrong("--into", "UTF-8 text", got, fix)) from error


def _places(path: Path, text: str, names: Collection[str]) -> dict[str, tuple[int, int]]:
    try:
        places = find(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    for name in names:
        if name not in places:
            has = ", ".join(places) or "none"
            raise ValueError(
                wrong(
                    "--into",
                    f"a file with a place named {name}",
                    f"{path}, whose places are: {has}",
                    f"add the lines <!-- bench:{name} --> and <!-- /bench:{name} --> to it",
                )
            )
    return places
