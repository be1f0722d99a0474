"""``bench request``: requests on the CPU's emulator, sums, the table, the command."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tessera_cupy.bench import gpu as timer
from tessera_cupy.bench import request_run, request_times
from tessera_cupy.bench.report import sheets_of, stamp
from tessera_cupy.bench.request_run import run_request
from tessera_cupy.bench.request_table import request_sheets
from tessera_cupy.bench.request_times import sum_up
from tessera_cupy.bench.sheet import drawn
from tessera_cupy.cli import main
from tests.emulator.emulator import compiler
from tests.emulator.gpu import EmulatedGpu

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no g++ to build the emulator with")


@pytest.fixture
def emulated(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedGpu]:
    monkeypatch.setattr(timer, "RUN_MS", 1.0)
    monkeypatch.setattr(request_times, "_RUNS", 2)
    made = EmulatedGpu(kernel_cache.parent / "emulated-kernels", 5)
    with made.here():
        yield made


def run(**options: Any) -> dict[str, Any]:
    return run_request(
        **{
            "tokens": 300,
            "grid": None,
            "heads": 2,
            "head_dim": 64,
            "families": ["Q64K64", "Q32K32"],
            "clips": None,
            "peers": None,
            "masks": "random",
            "mask_cache": None,
            "regime": "attend_mma/q128k64/merge-pack/longest+split",
            "console": Console(file=io.StringIO()),
            **options,
        }
    )


@needs_compiler
def test_requests_are_timed_and_checked(emulated: EmulatedGpu) -> None:
    report = run()
    assert report["passed"]
    assert json.loads(json.dumps(report)) == report
    # An emulated launch, or memset, takes a millisecond: attention and merge, and before them four
    # kernels and a memset.
    for row in report["rows"]:
        assert row["plans"] == ["attend_mma/q128k64/merge-pack/longest+split"]
        assert row["made_on_gpu"]
        assert row["ms"]["kernel"] == 2
        assert row["ms"]["named"] == 7
        assert row["preparation"]["named"] == {"ms": 5, "ratio": 2.5}
        assert row["reasons"] == {}
        assert row["spread_ms"]["named"] == [7, 7]
    (sheet,) = sheets_of(stamp(report, "request", words=[], cold=False))
    assert sheet.rows[0][3:7] == ["2.000", "7.000", "5.000", "250.0"]
    parts = report["cases"][0]["parts_ms"]
    assert {name: parts[name] for name in ("mask_state", "tiles", "tasks", "attention")} == {
        "mask_state": 2,
        "tiles": 2,
        "tasks": 1,
        "attention": 1,
    }


@needs_compiler
def test_a_wrong_output_is_seen(emulated: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    right = request_times._over

    def other(dense: Any, mask: Any) -> Any:
        return right(emulated.array(~dense.get()), mask)

    monkeypatch.setattr(request_times, "_over", other)
    report = run(families=["Q64K64"])
    assert not report["passed"]
    assert not report["rows"][0]["passed"]


def case(family: str, clip: str, **changes: Any) -> dict[str, Any]:
    times = {"kernel": 2.0, "named": 2.1, "auto": 2.3, "flex_kernel": 4.0, "flex": 6.0}
    return {
        "family": family,
        "clip": clip,
        "density": 0.1,
        "plan": "attend_wgmma/q128k192/share-pack/longest+split",
        "ms": times,
        "spread_ms": {name: [ms, 1.1 * ms] for name, ms in changes.get("ms", times).items()},
        "made_on_gpu": True,
        "reasons": {},
        "check": {"passed": True, "error": 1e-3, "allowed": 1e-2},
        **changes,
    }


def test_families_are_summed_up_over_clips() -> None:
    second = {"kernel": 4.0, "named": 4.3, "auto": 4.4}
    rows = sum_up(
        [
            case("Q64K64", "bikes"),
            case("Q64K64", "carphone", ms=second, reasons={"flex": "no"}, density=0.2),
            case("Q16K16", "bikes", check={"passed": False}),
        ]
    )
    assert [row["family"] for row in rows] == ["Q64K64", "Q16K16"]
    first = rows[0]
    assert first["density"] == pytest.approx(0.15)
    assert first["ms"] == pytest.approx({"kernel": 3.0, "named": 3.2, "auto": 3.35})
    assert first["preparation"]["named"] == pytest.approx({"ms": 0.2, "ratio": 0.2 / 3})
    assert set(first["preparation"]) == {"named", "auto"}
    assert (first["reasons"], first["passed"]) == ({"flex": "no"}, True)
    assert first["spread_ms"]["named"] == pytest.approx([3.2, 3.52])
    assert rows[1]["preparation"]["flex"] == pytest.approx({"ms": 2.0, "ratio": 0.5})
    assert not rows[1]["passed"]


REPORT: dict[str, Any] = {
    "gpu": "NVIDIA H200",
    "driver": {"version": None, "cuda": "12.8"},
    "versions": {},
    "l2": "warm",
    "peers": ["flex"],
    "left_out": {},
    "tokens": 57600,
    "heads": 8,
    "head_dim": 128,
    "dtype": "bfloat16",
    "grid": "16x45x80",
    "masks": "SPADE's rule",
}


def report_of(*cases: dict[str, Any]) -> dict[str, Any]:
    passed = all(one["check"]["passed"] for one in cases)
    return {**REPORT, "rows": sum_up(list(cases)), "cases": list(cases), "passed": passed}


def test_the_table_has_a_row_for_each_family() -> None:
    without = {"kernel": 2.0, "named": 2.1, "auto": 2.3}
    report = report_of(
        case("Q64K64", "bikes"),
        case("Q16K16", "bikes", ms=without, reasons={"flex": "RuntimeError: no [such] tile"}),
        case("Q32K32", "bikes", made_on_gpu=False, check={"passed": False}),
    )
    console = Console(width=160, highlight=False)
    with console.capture() as capture:
        console.print(drawn(request_sheets({**report, "date": "2026-12-01"})), markup=False)
    lines = capture.get().splitlines()

    def cells(family: str) -> list[str]:
        (line,) = [line for line in lines if line.strip().startswith(f"│ {family} ")]
        return [cell.strip() for cell in line.strip().strip("│").split("│")]

    plan = "wgmma share-pack"
    times = ["2.100", "0.100", "5.0", "2.300", "15.0"]
    flex = ["6.000", "2.000", "50.0"]
    assert cells("Q64K64") == ["Q64K64", "0.100", plan, "2.000", *times, *flex]
    assert cells("Q16K16") == ["Q16K16", "0.100", plan, "2.000", *times, "-", "-", "-"]
    assert cells("Q32K32")[3] == "WRONG"
    text = " ".join(" ".join(lines).split())
    assert "Flex on Q16K16: RuntimeError: no [such] tile" in text
    assert "Q32K32: the host makes this plan" in text
    assert "Q64K64: the host" not in text


@pytest.mark.parametrize("passed", [True, False])
def test_the_command(
    passed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {}
    check = {"passed": passed, "error": 1.0, "allowed": 0.5}

    def run_it(**given: Any) -> dict[str, Any]:
        asked.update(given)
        return report_of(case("Q64K64", "bikes", check=check))

    monkeypatch.setattr(request_run, "run_request", run_it)
    arguments = ["--family", "Q64K64", "--peers", "--masks", "random", "--tokens", "4096"]
    status = main(["bench", "request", "--json", *arguments])
    captured = capsys.readouterr()
    assert status == (0 if passed else 1)
    assert json.loads(captured.out)["rows"][0]["ms"]["named"] == 2.1
    assert (asked["families"], asked["peers"], asked["masks"]) == (["Q64K64"], [], "random")
    assert (asked["tokens"], asked["regime"], asked["cold"]) == (4096, "auto", False)
    assert ("wrong output on Q64K64 bikes" in captured.err) is not passed
