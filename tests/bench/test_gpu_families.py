"""``bench families`` and ``bench request`` on a GPU: right outputs, FlexAttention beside them."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tessera_cupy.bench import contest, gpu
from tessera_cupy.bench.families import FAMILIES
from tessera_cupy.bench.families_run import run_families
from tessera_cupy.bench.peers import SPARSE, Peer
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


def requests(**options: Any) -> dict[str, Any]:
    return run_request(
        **{
            "tokens": 1024,
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


@pytest.mark.parametrize("peer", SPARSE, ids=lambda peer: peer.name)
def test_peers_that_are_installed_compute_the_same_masks(peer: Peer) -> None:
    _, left_out = contest.choose(None, [peer])
    if left_out:
        pytest.skip(left_out[peer.name])
    if peer.name in ("fa4-sparse", "flashinfer-cake") and gpu.capability() != (9, 0):
        pytest.skip("takes blocks of 64 x 64 on Hopper only")
    size = {"families": ["Q64K64"], "tokens": 1024, "head_dim": 128, "peers": [peer.name]}
    (row,) = run(**size)["rows"]
    assert row["peers"][peer.name].get("tflops"), row["peers"][peer.name]
    (row,) = requests(**size)["rows"]
    assert row["reasons"] == {}
    assert row["ms"][peer.name] > 0


def test_requests_of_every_family_are_right_and_timed() -> None:
    report = requests()
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


def test_a_cold_l2_is_felt_by_a_chain_of_loads() -> None:
    cupy = pytest.importorskip("cupy")
    chase = cupy.RawKernel(
        'extern "C" __global__ void chase(const unsigned* next, unsigned steps, unsigned* out) {'
        "  unsigned at = 0;"
        "  for (unsigned i = 0; i < steps; ++i)"
        '    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(at) : "l"(next + at));'
        "  *out = at;"
        "}",
        "chase",
    )
    lines, words = 1 << 15, 32  # 4 MiB, a word of each line of 128 bytes
    order = np.random.default_rng(0).permutation(lines)
    after = np.zeros((lines, words), np.uint32)
    after[order, 0] = np.roll(order, -1) * words
    memory, out = cupy.asarray(after), cupy.empty(1, np.uint32)

    def call() -> None:
        chase((1,), (1,), (memory, np.uint32(lines), out))

    warm, cold = (
        gpu.timings({"": call}, lambda: None, warm_up=1, runs=3, cold=cold)[""].median
        for cold in (False, True)
    )
    assert cold > 1.3 * warm
