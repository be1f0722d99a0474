"""``tessera-cupy env`` reports whatever state the machine is in, and never fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tessera_cupy.cli import env, gpu, main
from tessera_cupy.errors import NoGpuError

ROOT = Path(__file__).resolve().parents[1]
H200 = gpu.Device(0, "NVIDIA H200", (9, 0), 132, 141 << 30)


def report_of(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["env", "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def text_of(capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["env"]) == 0
    return " ".join(capsys.readouterr().out.split())


def raising(error: Exception) -> Any:
    def probe(*_: object) -> NoReturn:
        raise error

    return probe


def test_report_has_every_section(capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(capsys)
    assert set(report) >= {"python", "packages", "gpus", "driver", "nvrtc", "cache", "advice"}
    assert report["packages"]["numpy"]
    assert Path(report["kernels_dir"], "attend_mma.cu").is_file()
    assert report["cache"]["folder"] == os.environ["TESSERA_CACHE_DIR"]
    assert report["environment"] == {"TESSERA_CACHE_DIR": os.environ["TESSERA_CACHE_DIR"]}


def test_text_names_packages_and_folders(capsys: pytest.CaptureFixture[str]) -> None:
    text = text_of(capsys)
    assert "Python" in text
    assert "numpy" in text
    assert "CUDA sources" in text
    assert "kernel cache" in text


@pytest.mark.parametrize(
    "probe",
    [
        "_installed",
        "_python",
        "_cupy",
        "_nvrtc",
        "_driver",
        "_gpus",
        "_arch",
        "_resource",
        "_cache",
        "_advice",
    ],
)
def test_any_probe_may_fail(
    probe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "devices", lambda: [H200])
    monkeypatch.setattr(env, probe, raising(RuntimeError("this is broken")))
    assert "RuntimeError: this is broken" in json.dumps(report_of(capsys))
    assert "this is broken" in text_of(capsys)


def test_broken_packages_are_reported(tmp_path: Path) -> None:
    (tmp_path / "cupy.py").write_text("raise RuntimeError('CuPy is broken')")
    (tmp_path / "cuda.py").write_text("raise OSError('bindings are broken')")
    # Start-up files of cuda-bindings import `cuda` before any path of ours counts.
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.modules.pop('cuda', None)\n"
        "from tessera_cupy.cli import main\n"
        "sys.exit(main(['env', '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert "CuPy is broken" in report["cupy"]["error"]
    assert "bindings are broken" in report["nvrtc"]["error"]
    assert any("cuda12" in line for line in report["advice"])
    assert report["kernels_dir"] == str(ROOT / "kernels_cu")


def test_gpu_and_the_kernels_that_serve_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = gpu.Device(1, "Tesla T4", (7, 5), 40, 15 << 30)
    monkeypatch.setattr(gpu, "devices", lambda: [H200, old])
    first, second = report_of(capsys)["gpus"]
    assert (first["name"], first["capability"], first["arch"]) == ("NVIDIA H200", "9.0", "sm_90a")
    assert "7.5" in second["arch"]["error"]
    text = text_of(capsys)
    assert "NVIDIA H200, 132 SMs, 141.0 GiB, compute capability 9.0, kernels of sm_90a" in text
    assert "not usable: GPU 'Tesla T4'" in text


@pytest.mark.parametrize(("cuda", "extra"), [((12, 4), "cuda12"), ((13, 1), "cuda13")])
def test_advice_for_a_gpu_without_cupy(
    cuda: tuple[int, int],
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(gpu, "devices", lambda: [H200])
    monkeypatch.setattr(gpu, "driver_cuda", lambda: cuda)
    monkeypatch.setattr(env, "_installed", lambda name: None)
    hint = f"pip install '.[{extra}]' in the project's folder"
    assert any(hint in line for line in report_of(capsys)["advice"])


def test_advice_against_two_cupys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(env, "_installed", lambda name: "14.2.0")
    advice = report_of(capsys)["advice"]
    assert any("cupy-cuda12x and cupy-cuda13x share one import name" in line for line in advice)


@pytest.mark.parametrize(
    ("there", "missing"),
    [
        ({"cupy-cuda12x", "nvidia-cuda-nvrtc-cu12"}, set()),
        ({"cupy", "nvidia-cuda-nvrtc"}, set()),
        (
            {"torch"},
            {"cupy", "cupy-cuda12x", "cupy-cuda13x"}
            | {"nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc"},
        ),
    ],
)
def test_what_another_distribution_stands_in_for_is_not_missing(
    there: set[str],
    missing: set[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(env, "_installed", lambda name: "1.0" if name in there else None)
    line = text_of(capsys).split(" not installed ")[1].split(" CuPy ")[0]
    named = set(line.split(", "))
    assert {name for name in named if "cupy" in name or "nvrtc" in name} == missing
    assert "jax" in named


class Driver:
    """As much of libcuda as is asked for: one GPU, or an error from one function."""

    def __init__(self, failing: str = "", count: int = 1) -> None:
        self.failing, self.count = failing, count

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name == self.failing:
                return 804
            answer = getattr(self, f"_{name}", None)
            if answer is not None:
                answer(*(getattr(argument, "_obj", argument) for argument in arguments))
            return 0

        if name.startswith("_"):
            raise AttributeError(name)
        return call

    def _cuDriverGetVersion(self, version: Any) -> None:
        version.value = 12090

    def _cuDeviceGetCount(self, count: Any) -> None:
        count.value = self.count

    def _cuDeviceGet(self, handle: Any, ordinal: Any) -> None:
        handle.value = 70 + ordinal.value

    def _cuDeviceGetName(self, name: Any, length: Any, handle: Any) -> None:
        name.value = f"GPU {handle.value}".encode()[: length.value]

    def _cuDeviceTotalMem_v2(self, memory: Any, handle: Any) -> None:
        memory.value = handle.value << 30

    def _cuDeviceGetAttribute(self, value: Any, attribute: Any, handle: Any) -> None:
        value.value = {75: 8, 76: 9, 16: 128}[attribute.value]

    def _cuGetErrorString(self, status: Any, text: Any) -> None:
        text.value = b"forward compatibility was attempted"


def test_devices_as_the_driver_tells_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_driver", lambda: Driver(count=2))
    assert gpu.driver_cuda() == (12, 9)
    assert gpu.devices() == [
        gpu.Device(0, "GPU 70", (8, 9), 128, 70 << 30),
        gpu.Device(1, "GPU 71", (8, 9), 128, 71 << 30),
    ]


def test_driver_errors_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_driver", lambda: Driver(failing="cuInit"))
    with pytest.raises(NoGpuError, match=r"cuInit: forward compatibility was attempted \(804\)"):
        gpu.devices()
    monkeypatch.setattr(gpu, "_driver", lambda: Driver(count=0))
    with pytest.raises(NoGpuError, match="no GPU"):
        gpu.devices()


def test_no_driver_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_LIBRARY", "libcuda-is-not-here.so.1")
    with pytest.raises(NoGpuError, match="libcuda-is-not-here"):
        gpu.devices()
    with pytest.raises(NoGpuError, match="no NVIDIA driver"):
        gpu.driver_cuda()


@pytest.mark.gpu
def test_driver_and_cupy_agree() -> None:
    import cupy

    (first, *_) = gpu.devices()
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    assert first.name == properties["name"].decode()
    assert first.capability == (properties["major"], properties["minor"])
    assert first.multiprocessors == properties["multiProcessorCount"]
    assert first.memory == properties["totalGlobalMem"]
