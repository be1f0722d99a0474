"""One schema for every report; its tables as text and Markdown; ``bench report``."""

from __future__ import annotations

import copy
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tessera_cupy.bench import attention, families_run, markers, report, request_run, rules_run
from tessera_cupy.bench import slices_run as slices
from tessera_cupy.bench.request_times import sum_up
from tessera_cupy.bench.sheet import Sheet
from tessera_cupy.cli import main

Capture = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[2]
PLAN = "attend_wgmma/q128k192/share-pack/longest+split"
CHECK = {"rows": 512, "error": 4e-3, "allowed": 1e-2, "passed": True}
RATE = {"ms": 2.0, "spread_ms": [1.9, 2.2], "tflops": 600.0}
MACHINE = {
    "gpu": "NVIDIA H200",
    "driver": {"version": "570.86.15", "cuda": "12.8"},
    "versions": {"cupy": "14.2"},
    "dtype": "bfloat16",
}
SIZES = {"tokens": 57600, "heads": 8, "head_dim": 128}
MASKS = {"grid": "16x45x80", "masks": "SPADE's rule", "left_out": {"vsa": "needs vsa"}}


def measured_attention() -> dict[str, Any]:
    row = {"block": 64, "density": 0.1, "plan": PLAN, **RATE, "ratios": {"FA2": 1.5}}
    return {**MACHINE, **SIZES, "dense": {"FA2": {**RATE, "tflops": 400.0}}, "rows": [row]}


def measured_families() -> dict[str, Any]:
    row = {"family": "Q64K64", "density": 0.12, "run_coverage": 0.8, "plans": [PLAN], **RATE}
    row |= {"ratio": 0.9, "by_clip": {"bikes": 0.9}, "beside": None, "passed": True}
    row |= {"peers": {"cudnn": RATE, "flex": {"reason": "a | b"}}, "error_of_allowed": 0.4}
    case = {"family": "Q64K64", "clip": "bikes", "plan": PLAN, **RATE, "check": CHECK}
    facts = {"beside": None, "peers": ["cudnn", "flex"], "passed": True}
    return {**MACHINE, **SIZES, **MASKS, **facts, "rows": [row], "cases": [case]}


def measured_request() -> dict[str, Any]:
    times = {"kernel": 2.0, "named": 2.1, "auto": 2.5}
    case = {"family": "Q64K64", "clip": "bikes", "density": 0.1, "plan": PLAN, "check": CHECK}
    case |= {"ms": times, "spread_ms": {name: [ms, ms * 1.5] for name, ms in times.items()}}
    case |= {"made_on_gpu": True, "reasons": {}}
    facts = {"peers": [], "passed": True}
    return {**MACHINE, **SIZES, **MASKS, **facts, "rows": sum_up([case]), "cases": [case]}


def measured_rules() -> dict[str, Any]:
    times = {"select": 0.3, "orders": 0.4, "attention": 2.0, "complete": 2.5}
    row = {"rule": "vsa", "clip": "bikes", "grid": "21x45x80", "tokens": 75600, "density": 0.1}
    row |= {"published_density": [0.1, 0.1], "plan": PLAN, "made_on_gpu": True, "once_ms": None}
    row |= {"ms": times, "spread_ms": {name: [ms, ms] for name, ms in times.items()}}
    row |= {"tflops": 500.0, "speedup": None, "dense_reason": None, "check": CHECK}
    lacking = {"rule": "spargeattn", "clip": "bikes", "reason": "no package"}
    facts = {"heads": 8, "masks": "regenerated from bikes.mp4", "passed": True}
    return {**MACHINE, **facts, "rows": [row, lacking]}


def measured_slices() -> dict[str, Any]:
    drawn = {"rule": "blocks 64x64", "clip": "random", "density": 0.1, "plan": PLAN, **RATE}
    drawn |= {"of_blocks": 1.0, "of_dense": None, "check": CHECK}
    facts = {"order": "tiles", "count": 900, "mass": 0.43, "sampled": 256, "of_fastest_blocks": 1}
    equal = {**drawn, "rule": "slices of 64, norms, tiles", "clip": "bikes", **facts}
    part = {**SIZES, "dense": RATE}
    clip = {**SIZES, "dense": None, "name": "bikes", "grid": "21x30x52", "mass": 0.43}
    clip["sharpen"] = 1.95
    rows = [drawn, equal]
    return {**MACHINE, "random": part, "clip": clip, "rows": rows, "passed": True}


MEASURED = {
    "attention": (attention, "run", measured_attention),
    "families": (families_run, "run_families", measured_families),
    "request": (request_run, "run_request", measured_request),
    "rules": (rules_run, "run_rules", measured_rules),
    "slices": (slices, "run_slices", measured_slices),
}
PLACES = {
    **{name: [name] for name in ("attention", "families", "request", "rules")},
    "slices": ["slices-random", "slices-clip"],
}


def changed(bench: str, **changes: Any) -> dict[str, Any]:
    return {**MEASURED[bench][2](), **changes}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which measurements were run, without a GPU."""
    log: list[str] = []

    def stand_in(bench: str, made: Any) -> Any:
        def run(*_: Any, **__: Any) -> Any:
            log.append(bench)
            return made()

        return run

    for bench, (module, name, made) in MEASURED.items():
        monkeypatch.setattr(module, name, stand_in(bench, made))
    return log


def page_for(path: Path, bench: str, suffix: str = "") -> Path:
    places = [name + suffix for name in PLACES[bench]]
    path.write_text("\n".join(f"<!-- bench:{name} -->\n<!-- /bench:{name} -->" for name in places))
    return path


def tables(path: Path) -> dict[str, list[list[str]]]:
    """The cells of each place's table, its title first."""
    text = path.read_text()
    return {name: cells_of(text[slice(*place)]) for name, place in markers.find(text).items()}


def cells_of(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    assert len({len(row) for row in rows}) == 1, "rows of one length"
    assert len(rows) > 2
    assert all(re.fullmatch("-{3,}:?", cell) for cell in rows[1])
    return [rows[0], *rows[2:]]


def times_in(value: Any) -> list[tuple[Any, Any]]:
    """Every ``ms`` that stands for measured times, with its ``spread_ms``."""
    if isinstance(value, dict):
        own = [(value["ms"], value.get("spread_ms"))] if "ms" in value else []
        parts = [part for key, part in value.items() if key != "preparation"]
        return own + [pair for part in parts for pair in times_in(part)]
    return [pair for part in value for pair in times_in(part)] if isinstance(value, list) else []


@pytest.mark.parametrize("bench", MEASURED)
def test_every_command_prints_the_schema(
    bench: str, ran: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(sys, "argv", ["tessera-cupy", "bench", bench, "--json", "--cold"])
    assert main(["bench", bench, "--json", "--cold"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["schema"], made["bench"], made["l2"]) == (1, bench, "cold")
    assert made["command"] == f"tessera-cupy bench {bench} --json --cold"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", made["date"])
    documented = re.findall(r"^``(\w+)``  ", report.__doc__ or "", re.MULTILINE)
    assert {"gpu", "driver", "date", "command", "versions", "rows"} < set(documented)
    assert set(documented) <= set(made)
    assert set(made["driver"]) == {"version", "cuda"}
    found = times_in(made)
    assert found
    for ms, spread in found:
        if isinstance(ms, dict):
            assert set(ms) == set(spread)
        pairs = (
            zip(ms.values(), spread.values(), strict=True)
            if isinstance(ms, dict)
            else [(ms, spread)]
        )
        assert all(low <= median <= high for median, (low, high) in pairs)


@pytest.mark.parametrize("bench", MEASURED)
def test_a_report_becomes_the_same_tables_elsewhere(
    bench: str, ran: list[str], tmp_path: Path, capsys: Capture
) -> None:
    here = page_for(tmp_path / "here.md", bench)
    assert main(["bench", bench, "--json", "--into", str(here)]) == 0
    file = tmp_path / "report.json"
    file.write_text(capsys.readouterr().out)
    ran.clear()
    there = page_for(tmp_path / "there.md", bench)
    assert main(["bench", "report", str(file), "--into", str(there)]) == 0
    assert ran == []
    assert there.read_text() == here.read_text()
    assert list(tables(here)) == PLACES[bench]
    shown = capsys.readouterr().out
    assert "NVIDIA H200" in shown
    assert f"{there}: {', '.join(PLACES[bench])}" in shown


def test_a_table_says_where_when_how_and_by_which_command(
    ran: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = page_for(tmp_path / "page.md", "families", "-d64")
    words = ["bench", "families", "--clip", "bikes", "--into", str(page), "--marker", "d64"]
    monkeypatch.setattr(sys, "argv", ["tessera-cupy", *words, "--cold"])
    assert main([*words, "--cold"]) == 0
    text = page.read_text()
    assert re.search(r"NVIDIA H200, \d{4}-\d\d-\d\d: 57,600 tokens \(16x45x80\), 8 heads", text)
    assert "Medians, cold L2. `tessera-cupy bench families --clip bikes --cold`. TFLOP/s" in text
    assert "Flex on Q64K64: a | b." in text  # a bar is nothing special outside of a table
    titles, row = tables(page)["families-d64"]
    assert titles == [
        *("family", "density", "runs", "mapping", "ms", "10-90%", "TFLOP/s", "/cuDNN"),
        *("cuDNN", "Flex"),
    ]
    assert row == [
        *("Q64K64", "0.120", "0.80", "wgmma share-pack", "2.000", "1.900-2.200", "600", "0.90"),
        *("600", "-"),
    ]


def test_a_file_without_the_place_is_refused_before_anything_is_measured(
    ran: list[str], tmp_path: Path, capsys: Capture
) -> None:
    page = page_for(tmp_path / "page.md", "rules")
    before = page.read_text()
    assert main(["bench", "slices", "--into", str(page)]) == 1
    assert ran == []
    assert "a file with a place named slices-random" in capsys.readouterr().err
    assert main(["bench", "rules", "--into", str(page), "--marker", "two"]) == 1
    assert ran == []
    assert "<!-- bench:rules-two -->" in capsys.readouterr().err
    assert page.read_text() == before


@pytest.mark.parametrize("suffix", ["", "a b", "-->"])
def test_a_suffix_that_no_marker_can_have_is_wrong_usage(suffix: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "rules", f"--marker={suffix}"])
    assert caught.value.code == 2
    assert "expected letters, digits and hyphens" in capsys.readouterr().err


def test_figures_of_wrong_outputs_are_not_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    wrong = changed("families", passed=False)
    wrong["cases"][0]["check"] = {**CHECK, "passed": False}
    monkeypatch.setattr(families_run, "run_families", lambda **_: wrong)
    page = page_for(tmp_path / "page.md", "families")
    before = page.read_text()
    assert main(["bench", "families", "--into", str(page)]) == 1
    assert page.read_text() == before
    error = capsys.readouterr().err
    assert "wrong output on Q64K64 bikes" in error
    assert "page.md is as it was" in error
    stamped = report.stamp(wrong, "families", words=[], cold=False)
    with pytest.raises(ValueError, match="a report whose outputs were right"):
        report.write(stamped, page)


def test_a_report_without_the_clip_writes_the_table_that_it_has(tmp_path: Path) -> None:
    made = changed("slices")
    del made["clip"]["mass"]
    made["rows"][1] = {"rule": "equal mass", "clip": "bikes", "reason": "no package"}
    page = page_for(tmp_path / "page.md", "slices")
    stamped = report.stamp(made, "slices", words=["bench", "slices"], cold=False)
    assert report.write(stamped, page) == ["slices-random"]
    assert "equal mass was not measured: no package." in page.read_text()


def broken(**changes: Any) -> Any:
    made = report.stamp(measured_rules(), "rules", words=[], cold=False) | changes
    return {key: value for key, value in made.items() if value is not ...}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"file.json \(Expecting property name"),
        ("\xff", r"file.json \("),
        ("[]", "which is none of schema 1"),
        (broken(schema=2), "which is none of schema 1"),
        (broken(schema=...), "which is none of schema 1"),
        (broken(bench="plans"), "of 'plans'"),
        (broken(bench=[]), r"of \[\]"),
        (broken(driver=..., l2=...), "which lacks driver, l2"),
        (broken(rows=[{"rule": "vsa"}]), "whose rules has KeyError"),
        (broken(rows=None), "whose rules has TypeError"),
        (broken(rows=[{**measured_rules()["rows"][0], "rule": 1}]), "whose rules has Attribute"),
        (broken(rows=[{**measured_rules()["rows"][0], "check": {"a": 1}}]), "has KeyError"),
        (broken(command=1), "whose rules has AttributeError"),
        (broken(command="a 'b"), "whose rules has ValueError: No closing quotation"),
        (broken(cases="none"), "whose rules has AttributeError"),
        pytest.param("[" * 100_000, "recursion depth", id="deep"),
    ],
)
def test_a_file_that_is_no_report_is_an_error(
    content: Any, message: str, tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "file.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content), "latin-1")
    assert main(["bench", "report", str(file)]) == 1
    error = capsys.readouterr().err
    expected = r"`report`: expected a report that `tessera-cupy bench COMMAND --json` printed"
    assert re.search(f"{expected}, got .*{message}.*Fix: measure again", error), error
    with pytest.raises(FileNotFoundError):
        report.read(tmp_path / "none.json")


def test_what_a_terminal_takes_for_markup_is_shown_as_it_is() -> None:
    sheet = Sheet("t", "A [/gpu]", ["[b]a"], [["[red]1"]], ["[i]Why?"], frozenset({"[b]a"}))
    console = Console(width=40, file=io.StringIO())
    console.print(sheet.drawn())
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(text in shown for text in ("A [/gpu]", "[b]a", "[red]1", "[i]Why?")), shown


def test_markdown_keeps_what_it_would_take_for_its_own() -> None:
    sheet = Sheet("t", "A [GPU] <b>", ["a", "b|c"], [["*1*", "`x`\ny"]], ["Why?", "no"])
    assert sheet.markdown("tessera-cupy bench t").splitlines() == [
        r"| a | b\|c |",
        "|---:|---:|",
        r"| \*1\* | \`x\` y |",
        "",
        r"A \[GPU] \<b>. `tessera-cupy bench t`. Why? no.",
    ]


def test_the_places_of_measured_tables_are_pairs_of_known_names_around_tables() -> None:
    text = (ROOT / "docs" / "measured.md").read_text()
    places = markers.find(text)
    assert {"families", "request", "rules", "slices-random", "slices-clip"} <= set(places)
    for name, (begin, end) in places.items():
        assert report.is_place(name), name
        assert cells_of(text[begin:end]), name
    # No marker is written in a way that is not found.
    assert len(re.findall("bench:[a-z]", text)) == 2 * len(places)


def test_a_report_of_every_kind_fits_its_place(ran: list[str], tmp_path: Path) -> None:
    text = (ROOT / "docs" / "measured.md").read_text()
    page = tmp_path / "measured.md"
    page.write_text(text)
    for bench in ("families", "request", "rules", "slices"):
        made = report.stamp(changed(bench), bench, words=["bench", bench], cold=False)
        report.write(copy.deepcopy(made), page)
    outside = re.compile(r"(<!-- bench:[\w-]+ -->\n).*?(<!-- /bench)", re.DOTALL)
    assert outside.sub(r"\1\2", page.read_text()) == outside.sub(r"\1\2", text)
    assert page.read_text() != text
