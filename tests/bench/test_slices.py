"""``bench slices``: equal mass against brute force, calls on the emulator, run, table, command."""

from __future__ import annotations

import io
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from rich.console import Console

from tessera_cupy import BlockMask, KeySlices, interop
from tessera_cupy.bench import gpu as timer
from tessera_cupy.bench import slices_cases, slices_mass, slices_run, slices_times
from tessera_cupy.bench.sheet import drawn as drawn_sheets
from tessera_cupy.bench.slices_cases import Case, Given, equal_mass_cases, random_cases
from tessera_cupy.bench.slices_run import run_slices
from tessera_cupy.bench.slices_table import slices_sheets
from tessera_cupy.bench.slices_times import measure, with_ratios, with_time_ratios
from tessera_cupy.cli import main
from tessera_cupy.errors import MissingExtraError
from tessera_cupy.permute import TokenOrders
from tessera_cupy.sparsifiers import fg_attn, scoring, spade
from tessera_cupy.video import VideoGrid
from tests.emulator.emulator import compiler
from tests.emulator.gpu import EmulatedGpu

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no g++ to build the emulator with")

GRID = VideoGrid(2, 10, 15)  # 300 tokens: the last group and the last block are short
DIM = 16


def drawn(heads: int = 2, dim: int = DIM) -> Any:
    rng = np.random.default_rng(1)
    return 2 * rng.standard_normal((3, 1, heads, GRID.tokens, dim), np.float32)


def softmax(q: Any, k: Any, head: int, row: int) -> Any:
    scores = [float(q[0, head, row].astype(float) @ key) * DIM**-0.5 for key in k[0, head]]
    exps = np.exp(np.array(scores) - max(scores))
    return exps / exps.sum()


def score_by_hand(name: str, q: Any, k: Any) -> tuple[Any, int, int]:
    """Scores of one head by loops over groups and columns, the rows and the keys of each."""
    rows = 128 if "128" in name else 64
    keys = 1 if name.startswith("slices") else rows
    groups = [q[first : first + rows] for first in range(0, len(q), rows)]
    columns = [k[first : first + keys] for first in range(0, len(k), keys)]
    scores = np.empty((len(groups), len(columns)))
    for g, group in enumerate(groups):
        for c, column in enumerate(columns):
            high, low = group.max(axis=0), group.min(axis=0)
            if keys == 1 and "norms" in name:
                size = rows // int(name.split()[-2]) if name.endswith("parts") else rows
                bounds = []
                for part in (group[first : first + size] for first in range(0, len(group), size)):
                    middle = part.mean(axis=0)
                    radius = max(np.linalg.norm(row - middle) for row in part)
                    bounds.append(middle @ column[0] + radius * np.linalg.norm(column[0]))
                scores[g, c] = max(bounds) * DIM**-0.5
            elif keys == 1:
                scores[g, c] = np.maximum(high * column[0], low * column[0]).sum() * DIM**-0.5
            elif name.endswith("means"):
                scores[g, c] = group.mean(axis=0) @ column.mean(axis=0)
            else:
                middle = high + low
                scores[g, c] = max(middle @ column.max(axis=0), middle @ column.min(axis=0))
    return scores, rows, keys


@pytest.mark.parametrize("chooser", slices_cases.CHOOSERS, ids=lambda one: one.name)
def test_the_fewest_columns_that_reach_a_mass_are_those_of_brute_force(
    chooser: slices_mass.Chooser,
) -> None:
    q, k, _ = drawn()
    rows = np.array([[0, 70, 299], [299, 5, 130]])
    sampled = slices_mass.sample(q, k, rows)
    scores = slices_mass.scores_of(chooser, q, k)
    masses = slices_mass.mass_by_count(chooser, scores, sampled)

    expected = np.zeros(scores.shape[3])
    for head in range(2):
        by_hand, tall, wide = score_by_hand(chooser.name, q[0, head], k[0, head])
        # Bounds are rounded to 11 bits, which makes ties.
        close = 1e-3 if wide == 1 else 1e-4
        np.testing.assert_allclose(scores[0, head], by_hand, rtol=close, atol=1e-4)
        if wide == 1:
            by_hand = scores[0, head]
        for row in rows[head]:
            weights = softmax(q, k, head, row)
            best = np.argsort(-by_hand[row // tall], kind="stable")
            for count in range(1, len(best) + 1):
                for column in best[:count]:
                    part = weights[column * wide : (column + 1) * wide]
                    expected[count - 1] += part.sum() / rows.size
    np.testing.assert_allclose(masses, expected, atol=1e-6)

    for mass in (0.3, 0.6, 0.9):
        (reach,) = np.nonzero(expected >= mass)
        count = slices_mass.fewest(masses, mass)
        assert count == reach[0] + 1
        mask = slices_mass.keep(chooser, scores, count, GRID.tokens)
        assert sampled.kept(mask) == pytest.approx(expected[count - 1], abs=1e-6)


def test_slices_are_those_of_the_rule() -> None:
    q, k, _ = drawn()
    for group, bound, parts in itertools.product((64, 128), fg_attn.BOUNDS, fg_attn.PARTS):
        chooser = slices_mass.slices_by_bound(group, bound, parts)
        ours = slices_mass.keep(chooser, slices_mass.scores_of(chooser, q, k), 90, GRID.tokens)
        rule = fg_attn.select(q, k, GRID, group=group, budget=0.3, bound=bound, parts=parts).mask
        assert isinstance(ours, KeySlices)
        np.testing.assert_array_equal(ours.to_dense(), rule.to_dense())


def test_kept_keys_of_slices_and_of_their_blocks_are_the_same() -> None:
    kept = np.random.default_rng(0).random((1, 2, 3, 150)) < 0.3
    slices = KeySlices.from_groups(kept, 64, (170, 150))
    rows = np.array([0, 63, 64, 169])
    for head in range(2):
        got = slices_mass.kept_of(slices, head, rows)
        np.testing.assert_array_equal(got, kept[0, head, rows // 64])
        np.testing.assert_array_equal(slices_mass.kept_of(slices.to_block_mask(), head, rows), got)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices_cases, "_SAMPLED", 40)
    monkeypatch.setattr(fg_attn, "BUDGET", 0.4)


def test_all_masks_keep_the_mass_that_the_rules_share_keeps(small: None) -> None:
    q, k, v = drawn()
    given, seen = Given((q, k, v), (q, k, v)), []
    mass, cases = equal_mass_cases(given, GRID, lambda: seen.append(1))
    assert len(seen) == len(cases) == 2 * len(slices_cases.CHOOSERS)
    assert len({case.name for case in cases}) == len(cases)
    first = cases[0]
    assert first.facts["count"] == 120
    assert first.facts["mass"] == pytest.approx(mass)
    rule = fg_attn.select(q, k, GRID, budget=0.4, bound="extremes")
    np.testing.assert_array_equal(first.mask.to_dense(), rule.mask.to_dense())
    names = {"slices of 64, extremes"} | {f"slices of {n}, norms" for n in (64, 128)}
    assert names < {case.name.rpartition(", ")[0] for case in cases}
    orders = scoring.most_alike(q, 64, spade.candidates(GRID, spade.WAN_TILES))
    for case in cases:
        assert case.facts["mass"] >= mass - 1e-9
        assert case.facts["sampled"] == 40
        moved = orders if case.facts["order"] == "tiles" else TokenOrders.raster(GRID.tokens)
        for x, had in zip(case.given.host, (q, k, v), strict=True):
            np.testing.assert_array_equal(x, moved.permute(had))
        # The mass again, of the same queries in the case's own order, from the mask alone.
        rng = np.random.default_rng(0)
        total = 0.0
        for head in range(2):
            place = {int(token): i for i, token in enumerate(moved.of(0, head))}
            for row in rng.choice(GRID.tokens, 40, replace=False):
                at = np.array([place[int(row)]])
                kept = slices_mass.kept_of(case.mask, head, at)[0]
                total += softmax(*case.given.host[:2], head, at[0])[kept].sum() / 80
        assert case.facts["mass"] == pytest.approx(total, abs=1e-6)


@pytest.mark.parametrize("as_blocks", [False, True])
def test_random_masks_have_the_density_in_each_row(as_blocks: bool) -> None:
    x = np.empty((1, 4, 1000, 1), np.float32)
    given = Given((None, None, None), (x, x, x))
    cases = {case.name: case for case in random_cases(given, 0.25, as_blocks=as_blocks)}
    names = ["blocks 128x128", "blocks 64x64"]
    for group in (128, 64, 192):
        names += [f"slices of {group}"] + [f"slices of {group}, as blocks"] * as_blocks
        slices = cases[f"slices of {group}"]
        assert (slices.mask.row_counts() == 250).all()
        assert slices.regime == slices_cases.GATHER[group]
        if as_blocks:
            case = cases[f"slices of {group}, as blocks"]
            assert isinstance(case.mask, BlockMask)
            assert case.mask.block_size == (group, 16)
            assert case.regime.startswith("attend_wgmma/q128k192/")
            assert case.regime.endswith("-pack/longest+split")
    assert list(cases) == names
    for name, count in (("blocks 128x128", 2), ("blocks 64x64", 4)):
        assert (cases[name].mask.to_dense().sum(axis=3) == count).all()
    assert all(case.mask.heads == 1 for case in cases.values())


@pytest.fixture
def emulated(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedGpu]:
    monkeypatch.setattr(timer, "RUN_MS", 1.0)
    monkeypatch.setattr(slices_times, "_WARM_UP", 1)
    monkeypatch.setattr(slices_times, "_RUNS", 1)
    made = EmulatedGpu(kernel_cache.parent / "emulated-kernels", 5)
    with made.here():
        yield made


def on_gpu(gpu: EmulatedGpu) -> Given:
    rounded = [x.astype(ml_dtypes.bfloat16) for x in drawn(dim=64)]
    q, k, v = (gpu.array(x) for x in rounded)
    return Given((q, k, v), tuple(x.astype(np.float32) for x in rounded))


@needs_compiler
def test_outputs_are_checked_and_timed(emulated: EmulatedGpu) -> None:
    given, seen = on_gpu(emulated), []
    figures, dense = measure(
        random_cases(given, 0.4, as_blocks=False), "random", lambda: seen.append(1)
    )
    assert dense is None
    assert len(seen) == len(figures) == 5
    assert json.loads(json.dumps(figures)) == figures
    for case in figures:
        assert case["check"]["passed"], case
        assert case["check"]["rows"] == 2 * 32
        assert case["ms"] > 0
        pairs = case["density"] * 2 * GRID.tokens**2
        assert case["tflops"] == pytest.approx(4 * 64 * pairs / case["ms"] / 1e9)
    with_ratios(figures, dense, slices_cases.RATIO_TO)
    report = report_of(rows=[]) | {"rows": figures}
    del report["clip"]["name"]  # without a mass there is no table of the clip
    (sheet,) = slices_sheets(report)
    assert [row[0] for row in sheet.rows] == [case["rule"] for case in figures]
    by_name = {case["rule"]: case for case in figures}
    for group in (128, 64, 192):
        case = by_name[f"slices of {group}"]
        assert case["plan"] == slices_cases.GATHER[group]
        assert case["mask"] == {"kind": "slices", "rows": group, "keys": 1, "heads": 1}
        assert case["density"] == pytest.approx(0.4)
    assert by_name["blocks 64x64"]["mask"]["kind"] == "blocks"


@needs_compiler
def test_slices_and_blocks_of_equal_mass_are_right_in_both_orders(
    emulated: EmulatedGpu, small: None
) -> None:
    _, cases = equal_mass_cases(on_gpu(emulated), GRID, lambda: None)
    figures, _ = measure(cases, "bikes", lambda: None)
    assert json.loads(json.dumps(figures)) == figures
    for case, figure in zip(cases, figures, strict=True):
        assert figure["check"]["passed"], figure
        assert figure["mask"]["heads"] == 2
        assert ("gather" in figure["plan"]) == isinstance(case.mask, KeySlices)
        assert {key: figure[key] for key in case.facts} == case.facts


@needs_compiler
def test_a_wrong_output_and_a_mask_without_a_plan_are_seen(emulated: EmulatedGpu) -> None:
    given = on_gpu(emulated)
    q, k, v = given.host
    swapped = Given(given.arrays, (q, v, k))
    right, other = random_cases(given, 0.4, as_blocks=False)[2:4]
    cases = [
        Case("wrong", right.mask, right.regime, swapped, {}),
        Case("none", other.mask, right.regime.replace("retain", "split"), given, {}),
        right,
    ]
    (wrong, none, fine), _ = measure(cases, "random", lambda: None)
    assert not wrong["check"]["passed"]
    assert fine["check"]["passed"]
    assert "split Q needs groups of more than 128 rows" in none["reason"]
    assert "ms" not in none


def test_ratios() -> None:
    cases: list[dict[str, Any]] = [
        {"rule": "blocks 128x128", "tflops": 400.0, "ms": 4.0, "mask": {"kind": "blocks"}},
        {"rule": "slices of 64", "tflops": 300.0, "ms": 3.0, "mask": {"kind": "slices"}},
        {"rule": "slices of 128", "reason": "none", "mask": {"kind": "slices"}},
        {"rule": "blocks 64x64", "tflops": 100.0, "ms": 6.0, "mask": {"kind": "blocks"}},
    ]
    with_ratios(cases, {"tflops": 500.0}, "blocks 128x128")
    assert [case.get("of_blocks") for case in cases] == [1.0, 0.75, None, 0.25]
    assert [case.get("of_dense") for case in cases] == [0.8, 0.6, None, 0.2]
    with_time_ratios(cases)
    assert [case.get("of_fastest_blocks") for case in cases] == [1.0, 0.75, None, 1.5]
    alone = [cases[1]]
    with_ratios(alone, {"reason": "no kernel"}, "blocks 128x128")
    with_time_ratios(alone)
    names = ("of_blocks", "of_dense", "of_fastest_blocks")
    assert [alone[0][name] for name in names] == [None, None, None]


CHECK = {"passed": True, "error": 1e-3, "allowed": 1e-2, "rows": 256}


def case(rule: str, clip: str, **changes: Any) -> dict[str, Any]:
    return {
        "rule": rule,
        "clip": clip,
        "mask": {"kind": rule.split()[0]},
        "density": 0.1,
        "plan": "attend_wgmma/q128k192/share-gather/longest+split",
        "ms": 2.5,
        "spread_ms": [2.4, 2.75],
        "tflops": 512.4,
        "check": CHECK,
        **changes,
    }


def report_of(**clip: Any) -> dict[str, Any]:
    sizes = {"tokens": 57600, "heads": 8, "head_dim": 128, "density": 0.1}
    drawn_cases = [
        case("blocks 128x128", "random", of_blocks=1.0, of_dense=0.9),
        case("slices of 64", "random", of_blocks=0.845, of_dense=None),
        {"rule": "slices of 192", "clip": "random", "reason": "needs [another GPU]"},
    ]
    part = {"tokens": 32760, "heads": 4, "head_dim": 128, "name": "bikes", "grid": "21x30x52"}
    part["sharpen"] = 1.95
    rows = [*drawn_cases, *clip.pop("rows", [])]
    dense = {"ms": 20.25, "spread_ms": [20.0, 21.0], "tflops": 650.3}
    return {
        "gpu": "NVIDIA H200",
        "date": "2026-12-01",
        "driver": {"version": None, "cuda": "12.8"},
        "versions": {},
        "l2": "warm",
        "dtype": "bfloat16",
        "random": {**sizes, "dense": dense},
        "clip": {**part, "dense": None, **clip},
        "rows": rows,
        "passed": all(one["check"]["passed"] for one in rows if "check" in one),
    }


def equal(rule: str, order: str, **changes: Any) -> dict[str, Any]:
    facts = {"order": order, "count": 9828, "mass": 0.4651, "sampled": 256}
    return case(f"{rule}, {order}", "bikes", **facts, of_fastest_blocks=0.7, **changes)


def shown(report: dict[str, Any]) -> tuple[list[list[str]], str]:
    console = Console(width=190, highlight=False)
    with console.capture() as capture:
        console.print(drawn_sheets(slices_sheets(report)), markup=False)
    lines = capture.get().splitlines()
    rows = [line.strip().strip("│").split("│") for line in lines if line.strip().startswith("│")]
    return [[cell.strip() for cell in row] for row in rows], " ".join(" ".join(lines).split())


def test_the_tables() -> None:
    wrong = {**CHECK, "passed": False, "error": 0.02}
    blocks = equal("blocks 64x64, means", "tiles", check=wrong)
    rows, text = shown(report_of(mass=0.46466, rows=[equal("slices of 64", "raster"), blocks]))
    plan = "wgmma share-gather"
    assert rows == [
        ["blocks 128x128", "0.100", plan, "2.500", "2.400-2.750", "512", "1.00", "0.90"],
        ["slices of 64", "0.100", plan, "2.500", "2.400-2.750", "512", "0.84", "-"],
        [
            "slices of 64",
            "raster",
            "9,828",
            "0.100",
            "0.465",
            plan,
            "2.500",
            "2.400-2.750",
            "512",
            "0.70",
        ],
        [
            "blocks 64x64, means",
            "tiles",
            "9,828",
            "0.100",
            "0.465",
            plan,
            "2.500",
            "2.400-2.750",
            "WRONG",
            "0.70",
        ],
    ]
    assert "NVIDIA H200, 2026-12-01: 57,600 tokens, 8 heads, head dim 128, bfloat16" in text
    assert "cuDNN's dense attention, 57,600 tokens, 8 heads, head dim 128: 20.250 ms, 650" in text
    assert "32,760 tokens, 4 heads, head dim 128 (21x30x52)" in text
    assert (
        "FG-Attn's 30% of the keys by extremes keep in groups of 64 in raster order, 0.465;" in text
    )
    assert "The clip's masks are on 32,760 tokens and 4 heads" in text
    assert "the largest error is 2.00 of" in text
    assert "slices of 192 was not measured: needs [another GPU]" in text


def test_without_a_clip_there_is_one_table() -> None:
    lacking = {"rule": "equal mass", "clip": "bikes", "reason": "no package"}
    rows, text = shown(report_of(rows=[lacking]))
    assert len(rows) == 2
    assert "equal mass was not measured: no package" in text


def test_dense_attention_that_failed_has_its_reason() -> None:
    report = report_of(rows=[])
    report["random"]["dense"] = {"reason": "RuntimeError: no kernel"}
    assert "attention was not measured: RuntimeError: no kernel" in shown(report)[1]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A run without a GPU: small masks, made-up times; what was asked for."""
    asked: dict[str, Any] = {}
    q, k, v = drawn()

    def request(heads: int, tokens: int, head_dim: int) -> Any:
        asked["random"] = (heads, tokens, head_dim)
        host = tuple(np.zeros((3, 1, heads, tokens, 1), np.float32))
        return SimpleNamespace(host=host, arrays=host)

    def clip(name: str, grid: VideoGrid, heads: int, head_dim: int, sharpen: float) -> Any:
        asked["clip"] = (name, str(grid), heads, head_dim, sharpen)
        return SimpleNamespace(arrays=(q, k, v), host=(q, k, v))

    def times(cases: Any, clip: str, on_case: Any, *, cold: bool) -> Any:
        kinds = ["slices" if isinstance(one.mask, KeySlices) else "blocks" for one in cases]
        figures = [
            {"rule": one.name, "clip": clip, "mask": {"kind": kind}, **one.facts, "check": CHECK}
            | {"ms": 2.0, "spread_ms": [2.0, 2.0], "tflops": 100.0}
            for one, kind in zip(cases, kinds, strict=True)
        ]
        return figures, {"ms": 10.0, "spread_ms": [9.0, 11.0], "tflops": 200.0}

    monkeypatch.setattr(interop, "import_cupy", lambda: None)
    facts = {"gpu": "a GPU", "versions": {"cupy": "1"}}
    monkeypatch.setattr(slices_run, "machine", lambda: facts)
    monkeypatch.setattr(slices_run, "GRID", GRID)
    monkeypatch.setattr(slices_run, "Request", request)
    monkeypatch.setattr(slices_run, "Input", clip)
    monkeypatch.setattr(slices_run, "measure", times)
    return asked


def run(**changes: Any) -> dict[str, Any]:
    given = {"tokens": 500, "heads": 2, "head_dim": DIM, "density": 0.2, "clip": "bikes"}
    screen = Console(file=io.StringIO())
    return run_slices(**{**given, "as_blocks": False, **changes}, console=screen)


def test_the_run(measured: dict[str, Any], small: None) -> None:
    report = run(heads=9)
    assert measured == {"random": (9, 500, DIM), "clip": ("bikes", "2x10x15", 8, DIM, 1.95)}
    assert report["clip"]["sharpen"] == 1.95
    assert json.loads(json.dumps(report)) == report
    assert (report["gpu"], report["versions"], report["passed"]) == ("a GPU", {"cupy": "1"}, True)
    names = ["blocks 128x128", "blocks 64x64"]
    names += [f"slices of {group}" for group in (128, 64, 192)]
    drawn, of_clip = report["rows"][:5], report["rows"][5:]
    assert [one["rule"] for one in drawn] == names
    assert {one["clip"] for one in drawn} == {"random"}
    assert drawn[2]["of_blocks"] == 1.0
    assert drawn[2]["of_dense"] == 0.5
    assert len(of_clip) == 2 * len(slices_cases.CHOOSERS)
    assert {one["clip"] for one in of_clip} == {"bikes"}
    assert of_clip[0]["of_fastest_blocks"] == 1.0
    assert report["clip"]["mass"] == pytest.approx(of_clip[0]["mass"])


def test_a_run_without_clips_says_so(
    measured: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacks(*_: Any) -> Any:
        raise MissingExtraError("needs a package")

    monkeypatch.setattr(slices_run, "Input", lacks)
    report = run()
    assert report["rows"][-1] == {
        "rule": "equal mass",
        "clip": "bikes",
        "reason": "needs a package",
    }
    assert report["passed"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 0}, "`tokens`: expected at least 1, got 0"),
        ({"heads": 0}, "`heads`: expected at least 1, got 0"),
        ({"density": 0.0}, "`density`: expected a share above 0 and up to 1, got 0.0"),
        ({"density": 1.5}, "`density`: expected a share above 0 and up to 1, got 1.5"),
        ({"sharpen": 0.0}, "`sharpen`: expected a number above 0, got 0.0"),
        ({"sharpen": math.nan}, "`sharpen`: expected a number above 0, got nan"),
    ],
)
def test_arguments_are_looked_at_before_the_gpu(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(**changes)


@pytest.mark.parametrize("passed", [True, False])
def test_the_command(
    passed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {}

    def run_it(**arguments: Any) -> dict[str, Any]:
        asked.update(arguments)
        check = {**CHECK, "passed": passed}
        return report_of(mass=0.4, rows=[equal("slices of 64", "raster", check=check)])

    monkeypatch.setattr(slices_run, "run_slices", run_it)
    arguments = ["--tokens", "4096", "--heads", "2", "--head-dim", "64", "--density", "0.3"]
    arguments += ["--clip", "carphone_pristine", "--as-blocks", "--sharpen", "2"]
    status = main(["bench", "slices", "--json", *arguments])
    captured = capsys.readouterr()
    assert status == (0 if passed else 1)
    report = json.loads(captured.out)
    assert report["rows"][3]["ms"] == 2.5
    assert "date" in report
    assert "command" in report
    del asked["console"]
    assert asked == {
        "tokens": 4096,
        "heads": 2,
        "head_dim": 64,
        "density": 0.3,
        "clip": "carphone_pristine",
        "as_blocks": True,
        "cold": False,
        "sharpen": 2.0,
    }
    assert ("wrong output on slices of 64, raster bikes" in captured.err) is not passed
    assert "slices of 192 random was not measured: needs [another GPU]" in captured.err
