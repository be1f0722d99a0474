"""Docstrings as Markdown: roles become links, doctests and literal blocks become code.

The package's docstrings are for reading in an editor: ``:class:`~a.b.C``` names something, ``>>>``
shows an example anywhere, a paragraph that ends with ``::`` has code below it, and a comment of
``#:`` says what a constant is. Griffe reads Google's sections out of them; the rest is Markdown.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|attr|data|mod|exc|const):`(~?)([\w.]+)`")
_RETURNED = re.compile(r"^(Returns:\n +)(.*)$", re.MULTILINE)
_RULE = re.compile(r"^\s*=+(?:\s+=+)+\s*$")


class MarkdownDocstrings(griffe.Extension):
    """Rewrites each docstring of the package when Griffe has made its object."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Griffe calls this for every module, class, function and attribute."""
        if obj.docstring is None and obj.is_attribute:
            said = _comment_above(obj)
            obj.docstring = griffe.Docstring(said, parent=obj) if said else None
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value, obj)


def _comment_above(attribute: griffe.Object) -> str:
    """The lines of ``#:`` right above a constant, or nothing."""
    said: list[str] = []
    lines = attribute.lines_collection[attribute.filepath] if attribute.lineno else []
    for line in reversed(lines[: (attribute.lineno or 1) - 1]):
        if not line.strip().startswith("#:"):
            break
        said.insert(0, line.strip().removeprefix("#:").strip())
    return "\n".join(said)


def as_markdown(text: str, obj: griffe.Object | None = None) -> str:
    """A docstring's text with links, fenced code and Markdown's tables.

    Args:
        text: the docstring, without its indentation.
        obj: what it is of; short names are looked up from there.
    """
    text = _ROLE.sub(lambda found: _link(found[2], bool(found[1]), obj), text)
    # What stands before a colon is a shape here, which Griffe would take for a type.
    text = _RETURNED.sub(lambda found: found[1] + found[2].replace(": ", "&#58; "), text)
    return "\n".join(_fenced(_tabled(text.splitlines())))


def _link(name: str, short: bool, obj: griffe.Object | None) -> str:
    """A link that is one only if the name is in the reference."""
    shown = name.rpartition(".")[2] if short else name
    if obj is not None and not name.startswith("tessera_cupy"):
        first, dot, rest = name.partition(".")
        try:
            name = obj.resolve(first) + dot + rest
        except griffe.NameResolutionError:
            return f"`{shown}`"
    return f'<autoref identifier="{name}" optional>`{shown}`</autoref>'


def _tabled(lines: list[str]) -> list[str]:
    """Simple tables of reStructuredText, between three rules, as tables of Markdown."""
    rules = [number for number, line in enumerate(lines) if _RULE.match(line)]
    if len(rules) % 3:
        return lines
    made = list(lines)
    for first, under, last in reversed(list(zip(*[iter(rules)] * 3, strict=True))):
        starts = [found.start() for found in re.finditer("=+", lines[first])]
        cells = [
            [line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)]
            for line in (*lines[first + 1 : under], *lines[under + 1 : last])
        ]
        rows = ["| " + " | ".join(row) + " |" for row in cells]
        rows.insert(under - first - 1, "|" + "---|" * len(starts))
        made[first : last + 1] = rows
    return made


def _fenced(lines: list[str]) -> list[str]:
    made: list[str] = []
    at = 0
    while at < len(lines):
        line = lines[at]
        indent = line[: len(line) - len(line.lstrip())]
        end = at + 1
        if line.lstrip().startswith(">>> "):
            while end < len(lines) and lines[end].strip():
                end += 1
            body = [re.sub(r"\s*# doctest:.*", "", one) for one in lines[at:end]]
            made += [*_gap(made), *_block(body, "pycon", indent)]
        elif line.rstrip().endswith("::"):
            while end < len(lines) and _is_below(lines[end], indent):
                end += 1
            said = line.rstrip().removesuffix("::")
            made += [said + ":"] if said.strip() else []
            made += [*_gap(made), *_block(lines[at + 1 : end], "python", indent), ""]
        else:
            made.append(line)
        at = end
    return made


def _is_below(line: str, indent: str) -> bool:
    return not line.strip() or line.startswith(indent + " ")


def _gap(made: list[str]) -> list[str]:
    """A blank line before a block, but not under the title of a section, which would end it."""
    return [] if not made or made[-1].strip() in ("", "Example:") else [""]


def _block(body: list[str], language: str, indent: str) -> list[str]:
    code = textwrap.dedent("\n".join(body)).strip("\n")
    fenced = f"```{language}\n{code}\n```".splitlines()
    return [(indent + one).rstrip() for one in fenced]
