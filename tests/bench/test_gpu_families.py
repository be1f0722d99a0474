"""``bench families`` and ``bench request`` on a GPU: right outputs, FlexAttention beside them."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from tessera_cupy.bench import gpu
from tessera_cupy.bench.families import FAMILIES
from tessera_cupy.bench.families_run import run_families
from tessera_cupy.bench.request_run import run_request

pytestmark = pytest.mark.gpu


def run(**options: Any) -> dict[str, Any]:
    return run_families(
        **{
            "tokens": 1100,
            "grid": None,
            "heads": 2,
            "head_dim": 64,
            "families": None,
            "clips": None,
            "peers": None,
            "masks": "random",
            "mask_cache": None,
            "regime": "auto",
            "console": Console(file=io.StringIO()),
            **options,
        }
    )


def test_every_family_is_right_with_a_tail() -> None:
    report = run(peers=[])
    assert report["passed"], [case["check"] for case in report["cases"]]
    assert len(report["cases"]) == len(FAMILIES)
    assert all(case["ms"] > 0 for case in report["cases"])
    assert json.loads(json.dumps(report)) == report


def test_flex_computes_the_same_masks() -> None:
    if not gpu.has_torch():
        pytest.skip("torch cannot use a GPU here")
    report = run(families=["Q128K128", "Q64K64", "Q64K32"], tokens=1024)
    assert report["passed"]
    for row in report["rows"]:
        assert row["peers"]["flex"].get("tflops"), row["peers"]["flex"]
        assert row["ratio"] > 0


def test_requests_of_every_family_are_right_and_timed() -> None:
    report = run_request(
        tokens=1024,
        grid=None,
        heads=2,
        head_dim=64,
        families=None,
        clips=None,
        peers=None,
        masks="random",
        mask_cache=None,
        regime="auto",
        console=Console(file=io.StringIO()),
    )
    assert report["passed"], [case["check"] for case in report["cases"]]
    for row in report["rows"]:
        assert row["ms"]["named"] > 0
        assert row["ms"]["auto"] > 0
    if gpu.has_torch():
        q64 = next(row for row in report["rows"] if row["family"] == "Q64K64")
        assert "flex" not in q64["reasons"]
        assert q64["ms"]["flex"] > q64["ms"]["flex_kernel"] > 0


def test_the_timer_agrees_with_a_kernel_of_known_length() -> None:
    cupy = pytest.importorskip("cupy")
    spin = cupy.RawKernel(
        'extern "C" __global__ void spin(long long ns) {'
        "  long long begin, now;"
        '  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));'
        '  do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - begin < ns);'
        "}",
        "spin",
    )
    ms = gpu.median_ms(lambda: spin((1,), (1,), (5_000_000,)), lambda: None, warm_up=2, runs=3)
    assert ms == pytest.approx(5.0, rel=0.1)  # the timer of the kernel is coarse
