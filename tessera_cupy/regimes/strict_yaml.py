"""YAML read by what a field must be, so that nothing is guessed from how a value looks.

YAML 1.1 turns ``off`` into False, ``1:30`` into 90, ``010`` into 8 and leaves ``1e-1`` a text.
Here the reader asks each field for the type that it needs, and the text in the file either
is such a value or is an error that names file, line and field.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import yaml

from tessera_cupy.errors import TableError

_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_NUMBER = re.compile(r"-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_KEY = re.compile(r"[\s-]*([^\s:#]+)\s*:")
_TEXT_TAG = "tag:yaml.org,2002:str"
_BOOL_TAG = "tag:yaml.org,2002:bool"
_NULL_TAG = "tag:yaml.org,2002:null"
# libyaml's parser is about ten times faster; both give the same nodes.
_Loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def table_error(path: Path, line: int, field: str, expected: str, got: str, fix: str) -> TableError:
    """Word an error of a table: where it is, what was expected, what came, and what to do."""
    where = f"{path}, line {line}, field `{field or 'file'}`"
    return TableError(f"{where}: expected {expected}, got {got}. Fix: {fix}.")


@dataclass(frozen=True)
class Entry:
    """One value of a YAML file, with the path that leads to it (``keys[2].match.dtype``)."""

    path: Path
    field: str
    node: yaml.Node

    @property
    def line(self) -> int:
        """Line of the file, counted from 1."""
        return int(self.node.start_mark.line) + 1

    @property
    def is_mapping(self) -> bool:
        """Whether the value is fields with names."""
        return isinstance(self.node, yaml.MappingNode)

    @property
    def is_null(self) -> bool:
        """Whether the value is an explicit ``null``."""
        return self.node.tag == _NULL_TAG and self.node.value in ("null", "~")

    def fail(self, expected: str, got: str, fix: str) -> NoReturn:
        """Raise :class:`TableError` for this value."""
        raise table_error(self.path, self.line, self.field, expected, got, fix)

    def mapping(self, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Entry]:
        """Fields by name: all of ``required``, any of ``optional``, none twice and no others."""
        if not isinstance(self.node, yaml.MappingNode) or self.node.tag != "tag:yaml.org,2002:map":
            self.fail("fields with names", self._got(), "write `name: value` lines")
        known = [*required, *optional]
        found: dict[str, Entry] = {}
        for key, value in self.node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else "[...]"
            entry = Entry(self.path, f"{self.field}.{name}" if self.field else name, key)
            if name not in known:
                fix = "correct or remove the field"
                entry.fail(f"one of {', '.join(known)}", f"unknown field `{name}`", fix)
            if name in found:
                got = f"a second one, the first is at line {found[name].line}"
                entry.fail("the field once", got, "keep one of the two")
            found[name] = Entry(self.path, entry.field, value)
        for name in required:
            if name not in found:
                missing = Entry(
                    self.path, f"{self.field}.{name}" if self.field else name, self.node
                )
                missing.fail("the field to be there", "nothing", f"add `{name}: ...`")
        return found

    def items(self) -> list[Entry]:
        """Entries of a list that is not empty."""
        if not isinstance(self.node, yaml.SequenceNode) or self.node.tag != "tag:yaml.org,2002:seq":
            self.fail("a list", self._got(), "write [a, b] or lines that start with `- `")
        if not self.node.value:
            self.fail("a list with entries", "an empty list", "add an entry or remove the field")
        return [
            Entry(self.path, f"{self.field}[{i}]", node) for i, node in enumerate(self.node.value)
        ]

    def text(self, choices: Sequence[str] = ()) -> str:
        """A text that is not empty, one of ``choices`` when there are any."""
        expected = f"one of {', '.join(choices)}" if choices else "a text"
        if not isinstance(self.node, yaml.ScalarNode) or self.node.tag != _TEXT_TAG:
            fix = f"write one of {', '.join(choices)}" if choices else "put the text in quotes"
            self.fail(expected, self._got(), fix)
        value = str(self.node.value).strip()
        if not value or (choices and value not in choices):
            self.fail(expected, self._got(), "write one of them" if choices else "fill it in")
        return value

    def boolean(self) -> bool:
        """``true`` or ``false``; YAML 1.1's other words for them are errors."""
        if not self._plain() or self.node.value not in ("true", "false"):
            self.fail("true or false", self._got(), "write true or false, in lower case, unquoted")
        return bool(self.node.value == "true")

    def integer(self, low: int, high: int) -> int:
        """A whole decimal number from ``low`` to ``high``."""
        expected = f"a whole number from {low} to {high}"
        if not self._plain() or not _INTEGER.fullmatch(self.node.value):
            self.fail(expected, self._got(), "write decimal digits only, unquoted")
        # The length test keeps int() away from absurd inputs that it would refuse in its own words.
        if len(self.node.value) > 20 or not low <= int(self.node.value) <= high:
            self.fail(expected, self._got(), "choose a value in that range")
        return int(self.node.value)

    def number(self, low: float, high: float) -> float:
        """A finite decimal number from ``low`` to ``high``; ``1e-1`` is the number 0.1."""
        expected = f"a number from {low:g} to {high:g}"
        if not self._plain() or not _NUMBER.fullmatch(self.node.value):
            self.fail(expected, self._got(), "write it like 0.1 or 1e-1, unquoted")
        value = float(self.node.value)
        if not (math.isfinite(value) and low <= value <= high):
            self.fail(expected, self._got(), "choose a value in that range")
        return value

    def _plain(self) -> bool:
        """Whether the value is a scalar without quotes and without a tag of its own."""
        if not isinstance(self.node, yaml.ScalarNode) or self.node.style:
            return False
        return str(self.node.tag).startswith("tag:yaml.org,2002:")

    def _got(self) -> str:
        if isinstance(self.node, yaml.MappingNode):
            return "fields with names"
        if isinstance(self.node, yaml.SequenceNode):
            return "a list"
        if self.node.tag == _NULL_TAG:
            return "nothing (null)"
        quoted = isinstance(self.node, yaml.ScalarNode) and self.node.style
        shown = repr(self.node.value) if quoted else self.node.value
        truth = ", which YAML reads as a truth value" if self.node.tag == _BOOL_TAG else ""
        return f"{shown}{truth}"


def read(path: Path) -> Entry:
    """Read a YAML file and return its top-level value.

    Raises:
        TableError: the file cannot be read, is empty, is not UTF-8, has a tab or is not YAML.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        got = error.strerror or str(error)
        raise table_error(path, 1, "file", "a readable file", got, "check the path") from error
    except UnicodeDecodeError as error:
        before = error.object[: error.start].decode("utf-8").split("\n")
        got, fix = f"byte {error.object[error.start]:#04x}", "save the file as UTF-8"
        field = _field_on(before[-1])
        raise table_error(path, len(before), field, "UTF-8 text", got, fix) from error
    lines = text.split("\n")
    for number, content in enumerate(lines, 1):
        if not content.isprintable():
            odd = next(char for char in content if not char.isprintable())
            got = "a tab" if odd == "\t" else f"the character {odd!r}"
            fix = "replace it with spaces"
            raise table_error(path, number, _field_on(content), "printable text", got, fix)
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        # What is never closed is noticed past the last line; the line that opens it helps more.
        last = max(i for i, content in enumerate(lines) if content)
        marks = (error.problem_mark, error.context_mark)
        at = next((mark.line for mark in marks if mark and mark.line <= last), last)
        fix = "correct the YAML on that line or just above it"
        got = str(error.problem)
        raise table_error(path, at + 1, _field_on(lines[at]), "valid YAML", got, fix) from error
    except RecursionError as error:  # of the loader without libyaml, which has a bound of its own
        got, fix = "lists or fields too deep in one another", "start from another table"
        raise table_error(path, 1, "file", "a profile table", got, fix) from error
    if node is None or node.value == "":
        fix = "start from another table of the same folder"
        raise table_error(path, 1, "file", "a profile table", "an empty file", fix)
    return Entry(path, "", node)


def _field_on(line: str) -> str:
    """Name of the field that a line of YAML sets, for errors before there are nodes."""
    match = _KEY.match(line)
    return match.group(1) if match else "file"
