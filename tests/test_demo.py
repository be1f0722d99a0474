"""The demo, end to end on a small grid without a GPU, and its complaints."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tessera_cupy import interop, reference
from tessera_cupy.bench import clips, demo, extras, memory
from tessera_cupy.bench.rules import RULES
from tessera_cupy.errors import NoGpuError
from tessera_cupy.video import VideoGrid

GRID = (3, 9, 11)


def console() -> Console:
    return Console(file=io.StringIO(), width=120)


def needs_packages() -> None:
    for module in ("av", "matplotlib", "skvideo", "threadpoolctl"):
        if extras.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    needs_packages()
    out = tmp_path_factory.mktemp("demo") / "new folder" / "demo.png"
    screen = console()
    report = demo.run_demo(out, grid=GRID, heads=2, device="cpu", console=screen)
    return report, screen.file.getvalue(), out  # type: ignore[attr-defined]


def test_it_passes_and_says_what_it_ran(run: tuple[dict[str, Any], str, Path]) -> None:
    report, _, _ = run
    assert report["passed"] is True
    assert report["check"]["error"] < 1e-5
    assert report["check"]["rows"] == 2 * 200
    assert (report["grid"], report["tokens"], report["heads"]) == ([3, 9, 11], 297, 2)
    assert report["dtype"] == "float32"
    assert report["output"] == {"shape": [1, 2, 297, 128], "dtype": "float32"}
    assert report["mask"]["blocks_in_a_row"] == [5, 5]  # 297 tokens are 5 blocks, all near
    assert len(report["mask"]["tiles"]) == 2
    ways = [way["mapping"] for way in report["mappings"]]
    assert ways == [
        "retain-retain",
        "retain-retain",
        "retain-merge",
        "retain-pack",
        "merge-pack",
        "share-pack",
        "regroup-pack",
        "split-split",
        report["plan"]["name"].split("/")[2],  # with the tiles of the plan's kernel
    ]
    assert [way["chosen"] for way in report["mappings"]] == [False] * 8 + [True]
    assert all(0 < way["useful_fraction"] <= 1 for way in report["mappings"])
    assert "speed" not in report


def test_the_report_is_json(run: tuple[dict[str, Any], str, Path]) -> None:
    report, _, _ = run
    assert json.loads(json.dumps(report)) == report


def test_the_picture_is_written_in_a_new_folder(run: tuple[dict[str, Any], str, Path]) -> None:
    report, _, out = run
    assert report["png"] == str(out)
    assert out.read_bytes().startswith(b"\x89PNG")


def test_every_step_has_its_line(run: tuple[dict[str, Any], str, Path]) -> None:
    report, text, _ = run
    for number, name in enumerate(report["seconds"], start=1):
        assert f"{number}/7 {name}: " in text
    assert list(report["seconds"]) == [
        "Read video",
        "Make q, k, v",
        "Choose blocks",
        "Plan",
        "Attend",
        "Check",
        "Draw",
    ]
    assert "Summary" in text
    assert "passed: error" in text
    assert report["plan"]["name"] in text


def test_a_wrong_output_is_said_to_be_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_packages()
    right = reference.execute
    monkeypatch.setattr(reference, "execute", lambda *args, **kw: right(*args, **kw)[..., ::-1])
    screen = console()
    report = demo.run_demo(
        tmp_path / "demo.png", grid=(1, 8, 9), heads=1, device="cpu", console=screen
    )
    assert report["passed"] is False
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "WRONG" in text
    assert "FAILED" in text


def test_auto_takes_the_executor_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_gpu() -> None:
        raise NoGpuError("No CUDA GPU can be used here.")

    monkeypatch.setattr(interop, "import_cupy", no_gpu)
    assert demo._use_gpu("auto") is False
    assert demo._use_gpu("cpu") is False
    with pytest.raises(NoGpuError, match="No CUDA GPU"):
        demo.run_demo(Path("x.png"), grid=None, heads=None, device="gpu", console=console())


def test_its_own_grids_do_not_divide_into_blocks() -> None:
    assert demo.HOST_GRID.tokens % 64
    assert demo.GPU_GRID.tokens == 32_760
    assert demo.GPU_HEADS == 12


@pytest.mark.parametrize("module", ["matplotlib", "av", "skvideo", "threadpoolctl"])
def test_a_missing_package_is_named_with_its_extra(
    module: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    there = extras.find_spec
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == module else there(name))
    with pytest.raises(extras.MissingExtraError, match=r"pip install .* \(the extra `demo`"):
        demo.run_demo(tmp_path / "x.png", grid=GRID, heads=1, device="cpu", console=console())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"heads": 0}, "`heads`: expected at least 1"),
        ({"grid": (0, 4, 4)}, "`t`: expected an int of at least 1"),
        ({"device": "tpu"}, "`device`: expected auto, gpu or cpu"),
    ],
)
def test_wrong_arguments(wrong: dict[str, Any], message: str, tmp_path: Path) -> None:
    arguments = {"grid": GRID, "heads": 1, "device": "cpu", **wrong}
    with pytest.raises(ValueError, match=message):
        demo.run_demo(tmp_path / "x.png", console=console(), **arguments)


@pytest.mark.parametrize("rule", ["sta", "radial", "svg", "svg2", "chipmunk", "global-local"])
def test_any_rule_is_run_checked_and_drawn(rule: str, tmp_path: Path) -> None:
    needs_packages()
    screen = console()
    out = tmp_path / "demo.png"
    report = demo.run_demo(out, grid=GRID, heads=2, rule=rule, device="cpu", console=screen)
    assert report["passed"], report["check"]
    assert report["mask"]["name"] == rule
    # A first frame of 99 tokens and a window of 256 to each side are all of 297.
    assert (report["mask"]["density"] < 1) == (rule != "global-local")
    slices = rule == "chipmunk"
    assert report["mask"]["keys_of_a_group" if slices else "blocks_in_a_row"][0] > 0
    assert report["mask"]["ragged"] == (rule in ("sta", "svg2"))
    assert out.read_bytes().startswith(b"\x89PNG")
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    assert f"{RULES[rule].title}'s rule keeps" in text
    assert "3-D tiles" not in text
    assert ("slices of 192 queries by single keys" in text) == slices
    assert ("run coverage" in text) != slices
    assert ("published" in text) == (rule != "global-local")
    assert json.loads(json.dumps(report)) == report


def test_a_rule_that_there_is_not_lists_those_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`rule`: expected one of spade, .*svg2.*'svg3'"):
        demo.run_demo(
            tmp_path / "x.png", grid=None, heads=1, rule="svg3", device="cpu", console=console()
        )


def test_each_rule_has_a_grid_of_its_own() -> None:
    assert demo._own_size(RULES["spade"], False) == (VideoGrid(13, 20, 30), 4)
    assert demo._own_size(RULES["spade"], True) == (VideoGrid(21, 30, 52), 12)
    assert demo._own_size(RULES["sta"], False) == (VideoGrid(10, 24, 40), 4)
    assert demo._own_size(RULES["sta"], True) == (VideoGrid(30, 48, 80), 4)


def no_work(*_: object) -> None:
    raise AssertionError("the demo began to work")


@pytest.mark.parametrize("name", ["demo.foo", "demo", "demo.PNG.txt"])
def test_a_picture_that_nobody_can_write_is_refused_before_the_work(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_packages()
    monkeypatch.setattr(clips, "read_features", no_work)
    out = tmp_path / "folder" / name
    with pytest.raises(ValueError, match=rf"`out`: expected .*\.pdf, .*\.png, .*{name}'. Fix: "):
        demo.run_demo(out, grid=GRID, heads=1, device="cpu", console=console())
    assert not out.parent.exists()


def test_a_grid_that_does_not_fit_in_memory_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_packages()
    monkeypatch.setattr(clips, "read_features", no_work)
    out = tmp_path / "demo.png"
    words = r"`grid`: .*1000x1000x1000 = 1,000,000,000 tokens with 1 heads, .* GB\. Fix: ask for"
    with pytest.raises(ValueError, match=words):
        demo.run_demo(out, grid=(1000,) * 3, heads=1, device="cpu", console=console())
    monkeypatch.setattr(memory, "available", lambda: 300 << 20)
    demo._check_memory(demo.VideoGrid(*GRID), 1)
    with pytest.raises(ValueError, match=r"fit in 0\.3 GB .*, which take about 0\.5 GB"):
        demo._check_memory(demo.HOST_GRID, demo.HOST_HEADS)
    monkeypatch.setattr(memory, "available", lambda: None)
    demo._check_memory(demo.HOST_GRID, demo.HOST_HEADS)


@pytest.mark.gpu
@pytest.mark.parametrize("rule", ["spade", "svg", "svg2", "sta"])
def test_on_a_gpu(rule: str, tmp_path: Path) -> None:
    needs_packages()
    report = demo.run_demo(
        tmp_path / "demo.png", grid=(5, 18, 26), heads=2, rule=rule, device="gpu", console=console()
    )
    assert report["passed"], report["check"]
    assert report["dtype"] == "bfloat16"
    assert report["speed"]["sparse_ms"] > 0
    assert report["speed"]["dense_ms"] > 0
    assert json.loads(json.dumps(report)) == report
