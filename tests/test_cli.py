"""The command line: exit codes, errors in one line, JSON, and what each command does."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tessera_cupy
from tessera_cupy.attention import make_plan
from tessera_cupy.bench.rules import RULES
from tessera_cupy.cli import cache as cache_command
from tessera_cupy.cli import gpu, main
from tessera_cupy.cli.output import plain, size
from tessera_cupy.errors import NoGpuError
from tessera_cupy.kernels import batch, toolchain
from tessera_cupy.kernels.arch import ARCHS
from tessera_cupy.kernels.catalog import catalog
from tessera_cupy.masks import BlockMask, KeySlices
from tessera_cupy.regimes import load_for
from tessera_cupy.request import ArraySpec

ROOT = Path(__file__).resolve().parents[1]
Capture = pytest.CaptureFixture[str]


def run_json(arguments: list[str], capsys: Capture, status: int = 0) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == status
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def one_line_error(arguments: list[str], capsys: Capture) -> str:
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("tessera-cupy: ")
    return line


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def devices() -> list[gpu.Device]:
        raise NoGpuError("no NVIDIA driver")

    monkeypatch.setattr(gpu, "devices", devices)


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty kernel cache of this test's own, and a catalog that compiles fast."""
    monkeypatch.setenv("TESSERA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(
        cache_command,
        "catalog",
        lambda arch: tuple(c for c in catalog(arch) if c.kernel == "merge_splits"),
    )
    return tmp_path / "cache"


@pytest.fixture
def mask_file(tmp_path: Path) -> Path:
    mask = np.tri(5, dtype=bool)[None].repeat(3, axis=0)
    mask[1] = True
    np.save(tmp_path / "mask.npy", mask)
    return tmp_path / "mask.npy"


# Usage


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["unknown"],
        ["cache"],
        ["plan", "--block", "64", "64"],
        ["cache", "build", "--arch", "sm_75"],
        ["cache", "build", "--dtype", "float32"],
        ["demo", "--grid", "1", "2"],
        ["plan", "--mask", "m.npy", "--block", "64", "64", "--heads-kv", "0"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: tessera-cupy" in capsys.readouterr().err


def test_version_is_the_packages(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"tessera-cupy {tessera_cupy.__version__}\n"


def test_unknown_arch_lists_those_that_exist(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["cache", "build", "--arch", "sm_90a,sm_75"])
    error = capsys.readouterr().err
    assert "sm_75" in error
    assert all(name in error for name in ARCHS)


@pytest.mark.parametrize("command", ["env", "demo", "plan", "cache build", "cache clear"])
def test_every_command_has_help_and_json(command: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command.split(), "--help"])
    assert caught.value.code == 0
    assert "--json" in capsys.readouterr().out


def test_module_is_the_same_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tessera_cupy", "cache", "status", "--json"],
        cwd=ROOT,
        env={**os.environ, "TESSERA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {"folder": str(tmp_path), "bytes": 0, "kernels": []}


def test_reader_that_goes_away_is_no_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tessera_cupy", "env", "--json"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()
    _, error = process.communicate()
    assert (process.returncode, error) == (0, "")


# Errors


def test_error_is_one_line(tmp_path: Path, capsys: Capture) -> None:
    missing = str(tmp_path / "none.npy")
    line = one_line_error(["plan", "--mask", missing, "--block", "64", "64"], capsys)
    assert "`--mask`: expected a .npy file" in line
    assert f"got {missing} (No such file or directory). Fix: " in line


def test_error_as_json(tmp_path: Path, capsys: Capture) -> None:
    missing = str(tmp_path / "none.npy")
    report = run_json(["plan", "--mask", missing, "--block", "64", "64"], capsys, status=1)
    assert report["error"]["type"] == "FileNotFoundError"
    assert missing in report["error"]["message"]


@pytest.mark.parametrize("detail", ["", "Unable to allocate 2.1 TiB"])
def test_too_little_memory_is_one_line(
    detail: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    from tessera_cupy.bench import demo

    def run_demo(*_: object, **__: object) -> None:
        raise MemoryError(detail)

    monkeypatch.setattr(demo, "run_demo", run_demo)
    assert f"not enough memory for this. {detail}".rstrip() in one_line_error(["demo"], capsys)


def test_traceback_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_DEBUG", "1")
    with pytest.raises(FileNotFoundError):
        main(["plan", "--mask", str(tmp_path / "none.npy"), "--block", "64", "64"])


# Plan


def test_plan_says_name_mapping_tiles_and_useful_fraction(mask_file: Path, capsys: Capture) -> None:
    arguments = ["plan", "--mask", str(mask_file), "--block", "64", "64", "--arch", "sm_80"]
    assert main(arguments) == 0
    name, mapping, tiles = capsys.readouterr().out.splitlines()
    assert name.startswith("plan          attend_mma/q")
    assert name.endswith(" for sm_80")
    assert mapping == "mapping       Q retain, KV pack"
    assert tiles.startswith("tiles         15 of 64 rows, ")
    assert "useful fraction 1.00" in tiles


def test_plan_explains(mask_file: Path, capsys: Capture) -> None:
    arguments = ["plan", "--mask", str(mask_file), "--block", "64", "64", "--arch", "sm_80"]
    assert main([*arguments, "--explain"]) == 0
    text = capsys.readouterr().out
    assert "attend_mma/q" in text
    assert len(text.splitlines()) > 5


def test_plan_as_json_is_its_summary(mask_file: Path, capsys: Capture) -> None:
    arguments = ["plan", "--mask", str(mask_file), "--block", "64", "64", "--shape", "300", "290"]
    options = ["--head-dim", "64", "--dtype", "float16", "--arch", "sm_90"]
    report = run_json([*arguments, *options], capsys)
    mask = BlockMask.from_dense(np.load(mask_file), (64, 64), (300, 290))
    plan = make_plan(mask, ArraySpec((1, 3, 300, 64), "float16"), arch="sm_90a")
    assert report == json.loads(json.dumps(plain(plan.summary())))


def test_plan_takes_key_slices(tmp_path: Path, capsys: Capture) -> None:
    kept = np.random.default_rng(0).random((3, 5, 290)) < 0.2
    np.save(tmp_path / "slices.npy", kept)
    arguments = ["plan", "--mask", str(tmp_path / "slices.npy"), "--block", "64", "1"]
    whole = [*arguments, "--shape", "300", "290", "--arch", "sm_90"]
    report = run_json(whole, capsys)
    slices = KeySlices.from_groups(kept, 64, (300, 290))
    plan = make_plan(
        slices, ArraySpec((1, 3, 300, 128)), ArraySpec((1, 3, 290, 128)), arch="sm_90a"
    )
    assert report == json.loads(json.dumps(plain(plan.summary())))
    assert plan.spec.mapping.kv == "gather"
    assert main([*whole, "--explain"]) == 0
    assert capsys.readouterr().out.startswith("KeySlices(batch 1, heads 3, 5 groups of 64 rows")
    arguments[-2] = "32"
    line = one_line_error([*arguments, "--arch", "sm_90"], capsys)
    assert line.startswith("tessera-cupy: `--block`: expected 16, 64, 128 or 192 query rows")


def test_plan_takes_a_pinned_regime_and_broadcasts_heads(tmp_path: Path, capsys: Capture) -> None:
    np.save(tmp_path / "mask.npy", np.ones((4, 4), np.uint8))
    arguments = ["plan", "--mask", str(tmp_path / "mask.npy"), "--block", "64", "64"]
    name = "attend_mma/q64k64/retain-pack/longest"
    report = run_json([*arguments, "--heads-q", "6", "--regime", name, "--arch", "sm_86"], capsys)
    mask = BlockMask.from_dense(np.load(tmp_path / "mask.npy"), (64, 64))
    plan = make_plan(mask, ArraySpec((1, 6, 256, 128)), arch="sm_86", regime=name)
    assert plan.spec.name == name
    assert report == json.loads(json.dumps(plain(plan.summary())))


def test_plan_takes_grouped_heads(mask_file: Path, capsys: Capture) -> None:
    arguments = ["plan", "--mask", str(mask_file), "--block", "64", "64", "--shape", "300", "290"]
    report = run_json([*arguments, "--heads-kv", "1", "--arch", "sm_80"], capsys)
    assert (report["request"]["q_heads"], report["request"]["kv_heads"]) == (3, 1)
    mask = BlockMask.from_dense(np.load(mask_file), (64, 64), (300, 290))
    k = ArraySpec((1, 1, 290, 128))
    plan = make_plan(mask, ArraySpec((1, 3, 300, 128)), k, arch="sm_80")
    assert report == json.loads(json.dumps(plain(plan.summary())))
    line = one_line_error([*arguments, "--heads-kv", "2", "--arch", "sm_80"], capsys)
    assert "`--heads-kv`: expected a number of heads that divides q's 3, got 2" in line


@pytest.mark.parametrize(
    ("regime", "part", "fix"),
    [
        ("foo", "expected kernel/q<rows>k<columns>/<q mapping>-<kv mapping>", "take auto, or name"),
        (
            "attend_mna/q64k64/retain-pack/rows",
            "`kernel`: expected one of attend_mma, ",
            "did you mean attend_mma/q64k64/retain-pack/rows?",
        ),
        (
            "attend_mma/q64k64/retian-pack/longest+split",
            "`q`: expected one of retain, merge, ",
            "did you mean attend_mma/q64k64/retain-pack/longest+split?",
        ),
        # The tile is no part to correct by itself: the nearest plan of the table.
        (
            "attend_mma/q60k64/retain-pack/longest+split",
            "`tile_q`: expected a multiple of 8",
            "did you mean attend_mma/q64k64/retain-pack/longest+split?",
        ),
        (
            "attend_mma/q64k64/retain-pack",
            "expected kernel/q<rows>k<columns>/<q mapping>-<kv mapping>",
            "did you mean attend_mma/q64k64/retain-pack/longest+split?",
        ),
    ],
)
def test_plan_names_the_nearest_plan_for_a_name_that_is_none(
    regime: str, part: str, fix: str, mask_file: Path, capsys: Capture
) -> None:
    assert "attend_mma/q64k64/retain-pack/longest+split" in {
        p.name for p in load_for("sm89").plans()
    }
    arguments = ["plan", "--mask", str(mask_file), "--block", "64", "64", "--arch", "sm_89"]
    line = one_line_error([*arguments, "--regime", regime], capsys)
    assert line.startswith("tessera-cupy: `--regime`: expected ")
    assert f"got '{regime}'" in line
    assert part in line
    advice = line.partition(". Fix: ")[2]
    assert advice.startswith(fix)
    assert advice.endswith(" `tessera-cupy plans show sm89` lists all.")
    assert "Fix: " not in advice
    assert len(line) < 350


@pytest.mark.parametrize(
    ("options", "start"),
    [
        (["--block", "60", "64"], "`--block`: expected multiples of 8"),
        (["--block", "64", "64", "--shape", "5", "5"], "`--shape`: expected 257 to 320 query"),
        (["--block", "64", "64", "--arch", "sm_1"], "`--arch`: expected one of sm_80"),
        (["--block", "64", "64", "--head-dim", "12"], "`--head-dim`: expected a head dim"),
        (["--block", "64", "64", "--heads-q", "2"], "`--mask`: expected a head axis of 1 or 2"),
        (
            ["--block", "64", "64", "--regime", "attend_mma/q64k64/split-pack/rows"],
            "`--regime`: expected a plan that can serve",
        ),
    ],
)
def test_plan_names_the_option_that_is_wrong(
    options: list[str], start: str, mask_file: Path, capsys: Capture
) -> None:
    line = one_line_error(["plan", "--mask", str(mask_file), *options], capsys)
    assert line.startswith(f"tessera-cupy: {start}")


def test_plan_takes_a_tables_name_for_its_architecture(mask_file: Path, capsys: Capture) -> None:
    asked = ["plan", "--mask", str(mask_file), "--block", "64", "64", "--arch", "sm90"]
    assert run_json(asked, capsys)["arch"] == "sm_90a"
    line = one_line_error([*asked[:-1], "h100"], capsys)
    assert "`--arch`: expected one of sm_80, " in line
    assert "got 'h100'" in line


def test_plan_without_a_gpu_or_arch(mask_file: Path, no_gpu: None, capsys: Capture) -> None:
    assert main(["plan", "--mask", str(mask_file), "--block", "64", "64"]) == 0
    assert " for sm_90a\n" in capsys.readouterr().out


def test_plan_says_what_it_is_for_without_a_gpu(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "(default: that of the GPU here, sm_90a without one)" in text


def test_plan_is_for_the_gpu_that_is_here(
    mask_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    device = gpu.Device(0, "RTX 4090", (8, 9), 128, 24 << 30)
    monkeypatch.setattr(gpu, "devices", lambda: [device])
    assert main(["plan", "--mask", str(mask_file), "--block", "64", "64"]) == 0
    assert " for sm_89\n" in capsys.readouterr().out


def test_plan_refuses_a_shape_that_does_not_fit(mask_file: Path, capsys: Capture) -> None:
    arguments = ["plan", "--mask", str(mask_file), "--block", "64", "64", "--shape", "256", "320"]
    line = one_line_error(arguments, capsys)
    assert "256" in line
    assert "5" in line


class Payload:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    "kind", ["object array", "pickle", "archive", "truncated", "empty", "text", "folder"]
)
def test_plan_refuses_files_that_are_no_array(kind: str, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "mask.npy"
    made = tmp_path / "made-by-the-payload"
    if kind == "object array":
        np.save(path, np.array([Payload(made)], dtype=object), allow_pickle=True)
    elif kind == "pickle":
        path.write_bytes(pickle.dumps(Payload(made)))
    elif kind == "archive":
        np.savez(tmp_path / "mask.npz", np.ones((2, 2), bool))
        (tmp_path / "mask.npz").rename(path)
    elif kind == "truncated":
        np.save(path, np.ones((64, 64), bool))
        path.write_bytes(path.read_bytes()[:-100])
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_text("hello\n" if kind == "text" else "")
    line = one_line_error(["plan", "--mask", str(path), "--block", "64", "64"], capsys)
    assert line.startswith("tessera-cupy: `--mask`: expected a .npy file with one array")
    assert f"got {path} (" in line
    assert "numpy.save" in line
    assert not made.exists()


@pytest.mark.parametrize(
    ("array", "got"),
    [
        (np.ones(5, bool), "shape (5,)"),
        (np.ones((1, 1, 1, 5, 5), bool), "shape (1, 1, 1, 5, 5)"),
        (np.ones((5, 5)), "dtype float64"),
    ],
)
def test_plan_refuses_arrays_that_are_no_mask(
    array: np.ndarray, got: str, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "mask.npy"
    np.save(path, array)
    line = one_line_error(["plan", "--mask", str(path), "--block", "64", "64"], capsys)
    assert line.startswith("tessera-cupy: `--mask`: expected a .npy file with one array, bool or")
    assert "axes (query blocks, key blocks)" in line
    assert f"got {got} in {path}. Fix: save" in line


# Demo


@pytest.mark.parametrize("passed", [True, False])
def test_demo_hands_on_its_arguments(
    passed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    from tessera_cupy.bench import demo

    seen: dict[str, Any] = {}

    def run_demo(out: Path, **options: Any) -> dict[str, Any]:
        options.pop("console").print("progress")
        seen.update(options, out=out)
        return {"passed": passed, "png": str(out), "error": np.float64("nan")}

    monkeypatch.setattr(demo, "run_demo", run_demo)
    out = tmp_path / "picture.png"
    arguments = ["demo", "--out", str(out), "--grid", "2", "8", "12", "--heads", "3"]
    report = run_json([*arguments, "--device", "cpu"], capsys, status=0 if passed else 1)
    expected = {"grid": (2, 8, 12), "heads": 3, "rule": "spade", "device": "cpu"}
    assert seen == {"out": out, **expected}
    assert report == {"passed": passed, "png": str(out), "error": None}


def test_demo_lists_the_rules_for_a_name_that_is_none(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["demo", "--rule", "spades"])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert "'spades'" in error
    assert all(name in error for name in RULES)


# Cache


def test_cache_from_build_to_clear(cache_dir: Path, capsys: Capture) -> None:
    build = ["cache", "build", "--arch", "sm_80", "--jobs", "1"]
    report = run_json(build, capsys)
    assert (report["built"], report["present"], report["failed"]) == (2, 0, 0)
    assert report["folder"] == str(cache_dir)
    paths = [Path(kernel["path"]) for kernel in report["kernels"]]
    assert all(path.is_file() and cache_dir in path.parents for path in paths)

    report = run_json(build, capsys)
    assert (report["built"], report["present"], report["failed"]) == (0, 2, 0)

    kernels = run_json(["cache", "status"], capsys)["kernels"]
    assert [(kernel["arch"], kernel["current"]) for kernel in kernels] == [("sm_80", True)] * 2
    assert main(["cache", "status"]) == 0
    text = capsys.readouterr().out
    assert "cache build" not in text
    (row,) = [line for line in text.splitlines() if line.startswith("sm_80 ")]
    assert row.split()[1:4] == ["2", "2", "0"]

    assert run_json(["cache", "verify"], capsys)["damaged"] == {}
    image = bytearray(paths[0].read_bytes())
    image[len(image) // 2] ^= 1
    paths[0].write_bytes(image)
    report = run_json(["cache", "verify"], capsys, status=1)
    assert list(report["damaged"]) == [str(paths[0].parent)]

    assert run_json(["cache", "clear", "--arch", "sm_90"], capsys)["removed"] == 0
    assert run_json(["cache", "clear"], capsys)["removed"] == 2
    assert run_json(["cache", "status"], capsys)["kernels"] == []


def test_build_shows_progress_and_ignores_no_jit(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("TESSERA_NO_JIT", "1")
    assert main(["cache", "build", "--arch", "sm_86", "--dtype", "bfloat16"]) == 0
    text = capsys.readouterr().out
    assert "Kernels for sm_86" in text
    assert "1/1" in text
    assert "1 compiled, 0 were there, 0 failed" in text


def test_build_without_gpu_asks_for_an_arch(no_gpu: None, capsys: Capture) -> None:
    line = one_line_error(["cache", "build"], capsys)
    assert "--arch" in line
    assert all(name in line for name in ARCHS)


def test_build_takes_the_gpu_that_is_here(
    monkeypatch: pytest.MonkeyPatch, cache_dir: Path, capsys: Capture
) -> None:
    device = gpu.Device(0, "A100", (8, 0), 108, 80 << 30)
    monkeypatch.setattr(gpu, "devices", lambda: [device, device])
    monkeypatch.setattr(batch, "build_all", lambda configs, *_: [outcome(c) for c in configs])
    report = run_json(["cache", "build"], capsys)
    assert {kernel["arch"] for kernel in report["kernels"]} == {"sm_80"}


def outcome(config: Any, error: str | None = None) -> batch.Outcome:
    return batch.Outcome(config, None, error is None, 0.1, error=error)


def test_failed_build_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, cache_dir: Path, capsys: Capture
) -> None:
    def build_all(configs: Any, jobs: Any, on_done: Any, cache: Any) -> list[batch.Outcome]:
        outcomes = [outcome(config, "line 7: no such thing [here]") for config in configs]
        for one in outcomes:
            on_done(one)
        return outcomes

    monkeypatch.setattr(batch, "build_all", build_all)
    assert main(["cache", "build", "--arch", "sm_80"]) == 1
    text = capsys.readouterr().out
    assert text.count("failed: line 7: no such thing [here]") == 2
    assert "0 compiled, 0 were there, 2 failed" in text


def test_build_refuses_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TESSERA_CACHE_DIR", str(tmp_path / "file"))
    line = one_line_error(["cache", "build", "--arch", "sm_80"], capsys)
    assert "TESSERA_CACHE_DIR" in line
    assert str(tmp_path / "file") in line


@pytest.mark.parametrize("action", ["status", "verify", "clear"])
@pytest.mark.parametrize("name", ["file", "x" * 300])
def test_a_cache_that_is_no_folder_is_one_error(
    action: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TESSERA_CACHE_DIR", str(tmp_path / name))
    line = one_line_error(["cache", action], capsys)
    assert line.startswith(f"tessera-cupy: The kernel cache {tmp_path / name} cannot be used: ")
    assert "Fix: let TESSERA_CACHE_DIR name a folder" in line


def test_build_without_nvrtc_is_one_error(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.setattr(toolchain, "load", toolchain.load.__wrapped__)
    line = one_line_error(["cache", "build", "--arch", "sm_80"], capsys)
    assert "pip install '.[cuda12]' in the project's folder" in line


def test_filters_keep_what_a_request_can_lead_to() -> None:
    kernels = catalog("sm_80")
    chosen = cache_command._selected(kernels, "bfloat16", 80)
    assert {config.dtype for config in chosen} == {"bfloat16", ""}
    assert {"merge_splits", "tile_scan"} < {config.kernel for config in chosen}
    attention = [config for config in chosen if config.attends]
    assert min(config.head_dim for config in attention) == 96
    tiles = [(config.tile_q, config.tile_kv, config.bits) for config in attention]
    assert len(tiles) == len(set(tiles))
    assert set(cache_command._selected(kernels, None, None)) == set(kernels)


@pytest.mark.parametrize("head_dim", [-8, 0, 4, 100, 264])
def test_head_dims_that_no_call_has_are_an_error(head_dim: int, capsys: Capture) -> None:
    arguments = ["cache", "build", "--arch", "sm_80", "--head-dim", str(head_dim)]
    line = one_line_error(arguments, capsys)
    assert "`--head-dim`: expected a multiple of 8 from 8 to 256" in line
    assert "kernels have 64, 96, 128, 256 and" in line
    assert f"got {head_dim}. Fix: " in line


def test_status_promises_only_what_it_looks_at(cache_dir: Path, capsys: Capture) -> None:
    assert main(["cache", "status"]) == 0
    text = capsys.readouterr().out
    (heading,) = [line for line in text.splitlines() if line.startswith("architecture ")]
    assert heading.split()[1] == "built"
    assert "usable" not in text
    assert "tessera-cupy cache verify" in text
    assert "None is built for this release: tessera-cupy cache build --arch " in text


# Output


def test_plain_gives_jsons_own_types() -> None:
    value = {1: [np.int32(2), np.float64("inf")], "path": Path("a"), "array": np.eye(2)}
    assert plain(value) == {"1": [2, None], "path": "a", "array": [[1.0, 0.0], [0.0, 1.0]]}
    with pytest.raises(TypeError, match="complex"):
        plain(1j)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (5 << 30, "5.0 GiB")],
)
def test_size_is_readable(count: int, text: str) -> None:
    assert size(count) == text
