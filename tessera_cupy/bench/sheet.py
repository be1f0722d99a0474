"""A table of a report, drawn on a terminal or written as Markdown, with the same cells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

#: A cell of what was not measured.
NONE = "-"


@dataclass(frozen=True)
class Sheet:
    """One table.

    Attributes:
        name: of its markers in a Markdown file; see :mod:`tessera_cupy.bench.markers`.
        title: GPU, date, sizes, where the masks are from, how it was timed.
        columns: titles.
        rows: cells, as many in each row as there are columns.
        notes: what the rows cannot say, in sentences.
        left: titles of the columns of words; the others hold numbers, to the right.
    """

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    left: frozenset[str] = field(default=frozenset())

    def markdown(self, command: str) -> str:
        r"""The table, then its title, the command and the notes as one paragraph.

        Args:
            command: what measured it.

        >>> rows, left = [["a|b", "1.5"]], frozenset({"mask"})
        >>> sheet = Sheet("t", "A GPU.", ["mask", "ms"], rows, ["Warm."], left)
        >>> print(sheet.markdown("tessera-cupy bench t"))
        | mask | ms |
        |---|---:|
        | a\|b | 1.5 |
        <BLANKLINE>
        A GPU. `tessera-cupy bench t`. Warm.
        """
        rules = ["---" if name in self.left else "---:" for name in self.columns]
        lines = [_line(self.columns), f"|{'|'.join(rules)}|", *map(_line, self.rows)]
        sentences = (_closed(_escaped(text)) for text in self.notes)
        caption = " ".join([_closed(_escaped(self.title)), f"`{command}`.", *sentences])
        return "\n".join([*lines, "", caption])

    def drawn(self) -> RenderableType:
        """The table for a terminal, and its notes below it."""
        table = Table(title=Text(self.title, style="table.title"))
        for name in self.columns:
            table.add_column(Text(name), justify="left" if name in self.left else "right")
        for row in self.rows:
            table.add_row(*map(Text, row))
        return Group(table, *map(Text, self.notes))


def drawn(sheets: Iterable[Sheet]) -> RenderableType:
    """Several tables, one below the other."""
    return Group(*(sheet.drawn() for sheet in sheets))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(_escaped(cell).replace('|', chr(92) + '|') for cell in cells)} |"


def _escaped(text: str) -> str:
    """Text on one line, whose angle brackets and brackets are not taken for Markdown's."""
    for character in "\\`*<[":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())


def _closed(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."
