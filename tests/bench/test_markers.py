"""Places of tables in a Markdown file: found, refused, replaced."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tessera_cupy.bench import markers

TEXT = """# Figures

Before.

<!-- bench:rules -->
| old |
|---|
| 1 |
<!-- /bench:rules -->

Between `<!-- bench:in-text -->`.

<!-- bench:families-d64 -->
<!-- /bench:families-d64 -->
After.
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.md"
    path.write_text(TEXT)
    return path


def test_only_what_is_between_markers_changes(page: Path) -> None:
    page.chmod(0o640)
    markers.replace(page, {"families-d64": "| new |", "rules": "| a |\n|---|\n\nWords."})
    assert page.read_text() == TEXT.replace(
        "| old |\n|---|\n| 1 |\n", "| a |\n|---|\n\nWords.\n"
    ).replace("-d64 -->\n<!-- /", "-d64 -->\n| new |\n<!-- /")
    assert page.stat().st_mode & 0o777 == 0o640
    assert os.listdir(page.parent) == ["page.md"]
    again = page.read_text()
    markers.replace(page, {"families-d64": "| new |"})
    assert page.read_text() == again


def test_ends_of_lines_stay_as_they_are(page: Path) -> None:
    page.write_bytes(TEXT.replace("\n", "\r\n").encode())
    markers.replace(page, {"rules": "| a |\n| b |"})
    expected = TEXT.replace("| old |\n|---|\n| 1 |", "| a |\n| b |").replace("\n", "\r\n")
    assert page.read_bytes() == expected.encode()


def test_a_link_stays_a_link(page: Path) -> None:
    link = page.with_name("link.md")
    link.symlink_to(page.name)
    markers.replace(link, {"rules": "| a |"})
    assert link.is_symlink()
    assert "| a |" in page.read_text()


def test_a_file_without_the_place_is_refused_and_left_alone(page: Path) -> None:
    message = (
        r"`--into`: expected a file with a place named request, got .*page.md, whose places are: "
        r"rules, families-d64. Fix: add the lines <!-- bench:request --> and "
        r"<!-- /bench:request -->"
    )
    for call in (
        lambda: markers.replace(page, {"rules": "| a |", "request": "| b |"}),
        lambda: markers.check(page, ["rules", "request"]),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert page.read_text() == TEXT
    markers.check(page, ["rules", "families-d64"])
    with pytest.raises(FileNotFoundError):
        markers.check(page.with_name("none.md"), ["rules"])


def test_what_cannot_be_written_leaves_nothing_behind(
    page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        markers.replace(page, {"rules": "| a |"})
    assert os.listdir(page.parent) == ["page.md"]
    assert page.read_text() == TEXT


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- bench:a -->\n", "<!-- bench:a --> and <!-- /bench:a -->.*got the end of the file"),
        ("<!-- /bench:a -->\n", "got <!-- /bench:a --> in line 1"),
        ("<!-- bench:a -->\n<!-- bench:b -->\n<!-- /bench:b -->\n", "got <!-- bench:b --> in line"),
        ("<!-- bench:a -->\n<!-- /bench:b -->\n", "bench:a -->.*got <!-- /bench:b --> in line 2"),
        ("<!-- bench:a -->\n<!-- /bench:a -->\n" * 2, "each name once, got a again in line 3"),
    ],
)
def test_markers_that_are_no_pairs_are_errors(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        markers.find(text)
    path = tmp_path / "page.md"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"page\.md: `markers`"):
        markers.check(path, [])


def test_a_file_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_bytes(b"caf\xe9\n<!-- bench:a -->\n<!-- /bench:a -->\n")
    for call in (lambda: markers.check(path, ["a"]), lambda: markers.replace(path, {"a": "x"})):
        with pytest.raises(ValueError, match=r"UTF-8 text, got byte 0xe9 in .*page\.md"):
            call()
