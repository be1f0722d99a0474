"""Whether a built site needs the network: ``python docs/_tools/check_site.py site``.

Links that a reader may follow are no need. Scripts, styles, fonts, pictures and frames are, and so
is a diagram of Mermaid, for which the theme would load a script from elsewhere.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

#: What a browser loads by itself, and the attributes that say from where.
_LOADED = {
    "audio": ("src",),
    "embed": ("src",),
    "iframe": ("src",),
    "img": ("src", "srcset"),
    "input": ("src",),
    "link": ("href",),
    "object": ("data",),
    "script": ("src",),
    "source": ("src", "srcset"),
    "video": ("src", "poster"),
}
#: Of links in a page's head, those that only name a page.
_NAMES = {"alternate", "author", "canonical", "next", "prev"}
_AWAY = re.compile(r"^\s*(?:https?:)?//", re.IGNORECASE)
_IN_STYLE = re.compile(r"""(?:url\(\s*|@import\s+)['"]?((?:https?:)?//[^'")\s]+)""", re.IGNORECASE)


class _Page(HTMLParser):
    """Collects what a page loads from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Look at one element; the parser calls this."""
        given = {name: value or "" for name, value in attrs}
        if tag == "link" and set(given.get("rel", "").split()) <= _NAMES:
            return
        for name in _LOADED.get(tag, ()):
            if _AWAY.match(given.get(name, "")):
                self.found.append(f"<{tag} {name}={given[name]!r}>")
        if "mermaid" in given.get("class", "").split():
            self.found.append("a diagram of Mermaid")
        self.found += _IN_STYLE.findall(given.get("style", ""))


def from_elsewhere(site: Path) -> Iterator[str]:
    """Each file of a site with what it loads from elsewhere.

    Args:
        site: the folder that MkDocs wrote.
    """
    for path in sorted(site.rglob("*")):
        if path.suffix == ".html":
            page = _Page()
            text = path.read_text()
            page.feed(text)
            found = page.found + _IN_STYLE.findall("".join(re.findall(r"<style.*?</style>", text)))
        elif path.suffix == ".css":
            found = _IN_STYLE.findall(path.read_text())
        elif path.suffix == ".svg":
            found = re.findall(r"""(?:href|src)=["'](https?:[^"']+)""", path.read_text())
        else:
            continue
        yield from (f"{path.relative_to(site)}: {what}" for what in found)


def main(folder: str) -> int:
    """Print what is loaded from elsewhere; the exit status."""
    site = Path(folder)
    if not (site / "index.html").exists():
        print(f"{site} holds no site. Fix: build it first, with mkdocs build.", file=sys.stderr)
        return 1
    found = list(from_elsewhere(site))
    for line in found:
        print(f"needs the network: {line}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
