"""CITATION.cff: what the format asks for, and the work that is credited."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import tessera_cupy

PATH = Path(__file__).parents[1] / "CITATION.cff"


@pytest.fixture(scope="module")
def cited() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(PATH.read_text())
    return loaded


def test_what_the_format_requires(cited: dict[str, Any]) -> None:
    # https://github.com/citation-file-format/citation-file-format, schema 1.2.0
    assert cited["cff-version"] == "1.2.0"
    assert cited["message"]
    assert cited["title"] == "tessera_cupy"
    assert cited["authors"] == [{"name": "The tessera_cupy developers"}]
    for work in cited["references"]:
        assert work["type"] == "article"
        assert work["title"]
        assert work["authors"]
        for author in work["authors"]:
            assert set(author) in ({"name"}, {"given-names", "family-names"})


def test_it_is_of_this_version_and_licence(cited: dict[str, Any]) -> None:
    assert cited["version"] == tessera_cupy.__version__
    assert cited["license"] == "Apache-2.0"


def test_the_three_systems_are_credited(cited: dict[str, Any]) -> None:
    numbers = ["2609.25869", "2502.01776", "2505.18875", "2509.16518"]
    assert [work["url"].rpartition("/")[2] for work in cited["references"]] == numbers
    assert [work["identifiers"][0]["value"] for work in cited["references"]] == [
        f"arXiv:{number}" for number in numbers
    ]
