"""``bench attention`` with NumPy in the place of the GPU."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tessera_cupy.bench import attention, gpu, machine
from tessera_cupy.bench.attention import Case
from tessera_cupy.bench.attention_table import attention_sheets
from tessera_cupy.plan import Plan


@pytest.fixture
def simulated(queue: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(plan: Plan, q: Any, k: Any, v: Any, *, out: Any) -> None:
        queue.launch("ours", host=0.01, work=2.0)

    monkeypatch.setattr(Plan, "run", run)
    monkeypatch.setattr(gpu, "has_torch", lambda: True)
    monkeypatch.setattr(machine, "versions", dict)
    monkeypatch.setattr(
        gpu, "dense_call", lambda *_: lambda: queue.launch("dense", host=0.01, work=8.0)
    )
    return queue


def test_rates_and_ratios(simulated: Any) -> None:
    seen: list[int] = []
    cases = (Case(64, 1.0), Case(64, 0.25))
    report = attention.run(256, 2, 16, cases, lambda: seen.append(1))
    assert len(seen) == len(cases) + len(attention.BACKENDS)
    dense = 4 * 16 * 256**2 * 2 / 8.0 / 1e9
    for title in ("FA2", "cuDNN"):
        assert report["dense"][title]["spread_ms"] == pytest.approx([8.0, 8.0])
        assert report["dense"][title]["tflops"] == pytest.approx(dense)
    full, sparse = report["rows"]
    assert (full["density"], sparse["density"]) == (1.0, 0.25)
    assert full["ratios"]["cuDNN"] == pytest.approx(4.0)
    assert sparse["ratios"]["FA2"] == pytest.approx(1.0)
    assert sparse["ms"] == pytest.approx(2.0)
    assert sparse["spread_ms"] == pytest.approx([2.0, 2.0])
    assert json.loads(json.dumps(report)) == report


def test_without_torch_there_are_no_ratios(simulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "has_torch", lambda: False)
    report = attention.run(128, 1, 16, (Case(64, 1.0),), lambda: None)
    assert report["dense"] == {}
    assert report["rows"][0]["ratios"] == {}
    assert report["rows"][0]["tflops"] > 0


def test_a_backend_that_fails_has_a_reason_and_the_others_go_on(
    simulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call_of(q: Any, k: Any, v: Any, backend: str) -> Any:
        def call() -> None:
            if backend == "CUDNN_ATTENTION":
                raise RuntimeError("No available kernel.")
            simulated.launch("dense", host=0.01, work=8.0)

        return call

    monkeypatch.setattr(gpu, "dense_call", call_of)
    report = attention.run(128, 1, 16, (Case(64, 1.0),), lambda: None)
    assert report["dense"]["cuDNN"] == {"reason": "RuntimeError: No available kernel."}
    assert report["rows"][0]["ratios"] == {"FA2": pytest.approx(4.0)}
    (sheet,) = attention_sheets({**report, "date": "2026-12-01", "l2": "warm"})
    assert sheet.columns[-2:] == ["TFLOP/s", "/FA2"]
    assert sheet.notes[-1] == "cuDNN was not measured: RuntimeError: No available kernel."


def test_a_cold_run(simulated: Any) -> None:
    report = attention.run(128, 1, 16, (Case(64, 1.0),), lambda: None, cold=True)
    assert report["rows"][0]["ms"] == pytest.approx(2.0)
    assert any(name.startswith("fill ") for name in simulated.log)
