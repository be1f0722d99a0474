"""``tessera-cupy bench families``: its arguments, its table, its JSON, its exit status."""

from __future__ import annotations

import copy
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tessera_cupy import interop
from tessera_cupy.bench import families_run
from tessera_cupy.bench.families_table import families_sheets
from tessera_cupy.bench.sheet import drawn as draw
from tessera_cupy.cli import main
from tessera_cupy.errors import NoGpuError

Capture = pytest.CaptureFixture[str]


def result(family: str, clip: str, plan: str, passed: bool = True) -> dict[str, Any]:
    return {
        "family": family,
        "clip": clip,
        "block": [64, 64],
        "density": 0.1195,
        "run_coverage": 0.77,
        "plan": plan,
        "ms": 2.5,
        "spread_ms": [2.4, 2.6],
        "tflops": 600.0,
        "beside": None,
        "peers": {"cudnn": {"ms": 22.0, "spread_ms": [21.0, 23.0], "tflops": 618.0, "options": {}}},
        "check": {"rows": 512, "error": 4e-3, "allowed": 1e-2, "passed": passed},
    }


WGMMA = "attend_wgmma/q128k192/share-pack/longest+split"
REGROUP = "attend_wgmma/q128k192/regroup-pack/longest+split"
REPORT: dict[str, Any] = {
    "gpu": "NVIDIA H200",
    "driver": {"version": "570.86.15", "cuda": "12.8"},
    "versions": {"torch": "2.11.0", "cudnn": "91900"},
    "tokens": 57600,
    "heads": 8,
    "head_dim": 128,
    "dtype": "bfloat16",
    "grid": "16x45x80",
    "masks": "SPADE's rule, regenerated from bikes and carphone_pristine",
    "beside": None,
    "peers": ["cudnn", "fa2", "flex"],
    "left_out": {"fa4": "needs that", "vsa": "needs this", "fa4-sparse": "needs that"},
    "rows": [
        {
            "family": "Q64K64",
            "density": 0.1195,
            "run_coverage": 0.774,
            "ms": 2.512,
            "spread_ms": [2.4949, 2.5551],
            "beside": None,
            "plans": [WGMMA],
            "tflops": 600.4,
            "ratio": 0.971,
            "by_clip": {"bikes": 0.964, "carphone_pristine": 0.978},
            "peers": {
                "cudnn": {"tflops": 618.3},
                "fa2": {"tflops": 353.0},
                "flex": {"tflops": 273.2},
            },
            "passed": True,
            "error_of_allowed": 0.41,
        },
        {
            "family": "Q16K16",
            "density": 0.0979,
            "run_coverage": 0.86,
            "ms": 7.25,
            "spread_ms": [7.0, 8.0],
            "beside": None,
            "plans": [WGMMA, "attend_mma/q64k64/merge-pack/longest"],
            "tflops": 190.0,
            "ratio": 0.31,
            "by_clip": {"bikes": 0.30, "carphone_pristine": 0.32},
            "peers": {
                "cudnn": {"tflops": 617.0},
                "fa2": {"tflops": 352.0},
                "flex": {"reason": "ValueError: a block [too small]"},
            },
            "passed": True,
            "error_of_allowed": 0.39,
        },
    ],
    "cases": [
        result("Q64K64", "bikes", WGMMA),
        result("Q64K64", "carphone_pristine", WGMMA),
        result("Q16K16", "bikes", WGMMA),
        result("Q16K16", "carphone_pristine", "attend_mma/q64k64/merge-pack/longest"),
    ],
    "passed": True,
}


def wrong_report() -> dict[str, Any]:
    report = copy.deepcopy(REPORT)
    report["passed"] = report["rows"][1]["passed"] = report["cases"][2]["check"]["passed"] = False
    return report


def drawn(report: dict[str, Any]) -> list[str]:
    console = Console(width=150, highlight=False)
    with console.capture() as capture:
        stamped = {**report, "date": "2026-12-01", "l2": "warm"}
        console.print(draw(families_sheets(stamped)), markup=False)
    return [line.strip() for line in capture.get().splitlines()]


def cells(lines: list[str], family: str) -> list[str]:
    (line,) = [line for line in lines if line.startswith(f"│ {family} ")]
    return [cell.strip() for cell in line.strip("│").split("│")]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command asks for; it gets the canned report."""
    seen: dict[str, Any] = {"report": REPORT}

    def run_families(**options: Any) -> dict[str, Any]:
        options.pop("console").print("progress")
        seen["options"] = options
        return copy.deepcopy(seen["report"])

    monkeypatch.setattr(families_run, "run_families", run_families)
    return seen


# The table


def test_the_table_says_what_was_measured() -> None:
    lines = drawn(REPORT)
    text = " ".join(lines)
    assert "NVIDIA H200, 2026-12-01: 57,600 tokens (16x45x80), 8 heads, head dim 128" in text
    assert "SPADE's rule, regenerated from bikes and carphone_pristine. Medians, warm L2." in text
    (header,) = [line for line in lines if "family" in line]
    assert [name.strip() for name in header.strip("┃").split("┃")] == [
        *("family", "density", "runs", "mapping", "ms", "10-90%", "TFLOP/s", "/cuDNN"),
        *("bikes carphone", "cuDNN", "FA2", "Flex"),
    ]
    assert cells(lines, "Q64K64") == [
        *("Q64K64", "0.119", "0.77", "wgmma share-pack", "2.512", "2.495-2.555", "600", "0.97"),
        *("0.96 0.98", "618", "353", "273"),
    ]
    assert "on 512 rows of each mask: the largest error is 0.41 of" in text


def test_a_peer_that_did_not_run_has_its_reason_below_the_table() -> None:
    lines = drawn(REPORT)
    assert cells(lines, "Q16K16")[-3:] == ["617", "352", "-"]
    assert "Flex on Q16K16: ValueError: a block [too small]" in lines
    assert lines[-2:] == [
        "Not measured: FA4, FA4 sparse: needs that",
        "Not measured: VSA: needs this",
    ]


def test_cells_are_below_their_own_peer() -> None:
    report = copy.deepcopy(REPORT)
    for row in report["rows"]:
        row["peers"] = dict(sorted(row["peers"].items(), reverse=True))
    assert cells(drawn(report), "Q64K64")[-3:] == ["618", "353", "273"]


def test_a_wrong_output_has_no_rate() -> None:
    assert cells(drawn(wrong_report()), "Q16K16")[6] == "WRONG"


def test_one_kind_of_mask_without_peers_has_fewer_columns() -> None:
    report = {**copy.deepcopy(REPORT), "peers": [], "grid": None, "masks": "random"}
    for row in report["rows"]:
        row.update(peers={}, ratio=None, by_clip={"random": None})
    lines = drawn(report)
    assert "57,600 tokens, 8 heads" in " ".join(lines)
    assert cells(lines, "Q64K64")[-2:] == ["600", "-"]


def test_a_plan_beside_has_a_column() -> None:
    report = {**copy.deepcopy(REPORT), "beside": REGROUP}
    first, second = report["rows"]
    first["beside"] = {"ms": 2.4, "spread_ms": [2.3, 2.5], "tflops": 615.4, "ratio": 0.995}
    second["beside"] = {"reason": "serves no such block"}
    lines = drawn(report)
    assert "regroup (/cuDNN)" in " ".join(lines)
    assert cells(lines, "Q64K64")[-4:] == ["615 (0.99)", "618", "353", "273"]
    assert cells(lines, "Q16K16")[-4] == "-"
    assert f"regroup: TFLOP/s of {REGROUP}." in lines
    assert "The plan beside on Q16K16: serves no such block" in lines


def test_families_with_the_same_reason_share_a_line() -> None:
    report = copy.deepcopy(REPORT)
    for row in report["rows"]:
        row["peers"]["flex"] = {"reason": "no"}
    assert "Flex on Q64K64, Q16K16: no" in drawn(report)


# The command


def test_defaults(asked: dict[str, Any], capsys: Capture) -> None:
    assert main(["bench", "families"]) == 0
    assert asked["options"] == {
        "tokens": 57600,
        "grid": None,
        "heads": 8,
        "head_dim": 128,
        "families": None,
        "clips": None,
        "peers": None,
        "masks": "spade",
        "mask_cache": None,
        "regime": "auto",
        "beside": None,
        "cold": False,
    }
    assert "Q64K64" in capsys.readouterr().out


def test_arguments_are_handed_on(asked: dict[str, Any]) -> None:
    arguments = ["--grid", "4", "8", "16", "--heads", "2", "--head-dim", "64", "--clip", "bikes"]
    arguments += ["--family", "Q64K64", "--family", "dense", "--peers", "flex", "cudnn"]
    arguments += ["--mask-cache", "masks.npz", "--regime", WGMMA, "--beside", REGROUP, "--cold"]
    assert main(["bench", "families", *arguments]) == 0
    assert asked["options"] == {
        "tokens": 57600,
        "grid": (4, 8, 16),
        "heads": 2,
        "head_dim": 64,
        "families": ["Q64K64", "dense"],
        "clips": ["bikes"],
        "peers": ["flex", "cudnn"],
        "masks": "spade",
        "mask_cache": Path("masks.npz"),
        "regime": WGMMA,
        "beside": REGROUP,
        "cold": True,
    }
    assert main(["bench", "families", "--tokens", "1000", "--masks", "random", "--peers"]) == 0
    assert asked["options"]["tokens"] == 1000
    assert asked["options"]["masks"] == "random"
    assert asked["options"]["peers"] == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--family", "Q8K8"],
        ["--clip", "bunny"],
        ["--peers", "fa5"],
        ["--masks", "causal"],
        ["--tokens", "57600", "--grid", "1", "2", "3"],
        ["--grid", "1", "2"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "families", *arguments])
    assert caught.value.code == 2
    assert "usage: tessera-cupy bench families" in capsys.readouterr().err


def test_json_is_the_whole_report_with_date_and_command(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/tessera-cupy", "bench", "families", "--clip", "a b"])
    assert main(["bench", "families", "--json"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert "progress" in captured.err
    assert report.pop("command") == "tessera-cupy bench families --clip 'a b'"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", report.pop("date"))
    head = {"schema": 1, "bench": "families", "l2": "warm"}
    assert {key: report.pop(key) for key in head} == head
    assert report == REPORT


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_wrong_output_is_loud(more: list[str], asked: dict[str, Any], capsys: Capture) -> None:
    asked["report"] = wrong_report()
    assert main(["bench", "families", *more]) == 1
    captured = capsys.readouterr()
    assert "wrong output on Q16K16 bikes: error 4.0e-03, 1.0e-02 allowed" in captured.err
    if more:
        assert json.loads(captured.out)["passed"] is False


def test_a_wrong_output_of_the_plan_beside_is_loud(asked: dict[str, Any], capsys: Capture) -> None:
    report = copy.deepcopy(REPORT)
    report["passed"] = False
    check = {"rows": 8, "error": 0.5, "allowed": 0.25, "passed": False}
    report["cases"][1]["beside"] = {"plan": REGROUP, "check": check}
    asked["report"] = report
    assert main(["bench", "families"]) == 1
    assert (
        "wrong output on Q64K64 carphone_pristine by the plan beside: error 5.0e-01, 2.5e-01"
        in capsys.readouterr().err
    )


def test_without_a_gpu_it_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def no_gpu() -> None:
        raise NoGpuError("No CUDA GPU can be used here.")

    monkeypatch.setattr(interop, "import_cupy", no_gpu)
    assert main(["bench", "families"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "tessera-cupy: No CUDA GPU can be used here.\n"
