"""``tessera-cupy parallel``: what it says, as text and JSON, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tessera_cupy.cli import main


@pytest.fixture
def mask(tmp_path: Path) -> Path:
    keep = np.tri(16, dtype=bool)[None] & np.array([True, True, False, True])[:, None, None]
    np.save(tmp_path / "mask.npy", keep)
    return tmp_path / "mask.npy"


def test_json_has_every_scheme(mask: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["parallel", "plan", "--mask", str(mask), "--block", "128", "128", "--ranks", "4"]
    assert main([*words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {(one["ulysses_degree"], one["ring_degree"]) for one in data["schemes"]} == {
        (4, 1),
        (2, 2),
        (1, 4),
    }
    ulysses = next(one for one in data["schemes"] if one["scheme"] == "ulysses")
    assert ulysses["balance"] == pytest.approx(4 / 3)  # three heads have work, of four ranks
    # Rows of the last quarter: 13 to 16 of the 136 blocks of a head, 58 in all.
    ring = next(one for one in data["schemes"] if one["scheme"] == "ring")
    assert ring["balance"] == pytest.approx(58 / 34)


def test_text_says_what_to_take(mask: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["parallel", "plan", "--mask", str(mask), "--block", "128", "128", "--ranks", "4"]
    assert main([*words, "--scheme", "2x2", "--gpu", "B200"]) == 0
    text = capsys.readouterr().out
    assert "ulysses 2 x ring 2" in text
    assert "NVLink 5" in text
    assert "not measured" in text


def test_a_model_gives_heads_and_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = -(-32760 // 128)
    np.save(tmp_path / "mask.npy", np.eye(blocks, dtype=bool))
    words = ["parallel", "plan", "--mask", str(tmp_path / "mask.npy"), "--block", "128", "128"]
    assert main([*words, "--ranks", "8", "--model", "wan-1.3b-81f-480p", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["heads"], data["tokens"]) == (12, [32760, 32760])


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--ranks", "5000"], "`--ranks`: expected 1 to 4096"),
        (["--ranks", "4", "--scheme", "3x1"], "`--scheme`: expected degrees for a group of 4"),
        (["--ranks", "4", "--heads-q", "6"], "`--mask`: expected a mask of 1 or 6 heads, got 4"),
        (["--ranks", "4", "--heads-kv", "3"], "`--heads-kv`: expected a number of heads that"),
        (["--ranks", "4", "--model", "wan-1.3b-81f-480p"], "`--shape`: expected"),
    ],
)
def test_wrong_options_are_named(
    mask: Path, more: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["parallel", "plan", "--mask", str(mask), "--block", "128", "128"]
    assert main([*words, *more]) == 1
    assert text in capsys.readouterr().err


def test_balance_goes_into_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("av")
    page = tmp_path / "page.md"
    page.write_text("# Page\n<!-- bench:parallel-balance -->\n<!-- /bench:parallel-balance -->\n")
    words = ["parallel", "balance", "--heads", "4", "--ranks", "2", "--name", "radial"]
    assert main([*words, "--into", str(page), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    # All heads have one mask.
    assert data["rows"][0]["cases"] == [{"heads": 4, "ranks": 2, "dealt": 1.0, "even": 1.0}]
    assert "| radial | 0.4" in page.read_text()
    assert "1.000 (1.000) |" in page.read_text()


def test_a_page_without_a_place_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n")
    assert main(["parallel", "balance", "--into", str(page)]) == 1
    assert "a place named parallel-balance" in capsys.readouterr().err
