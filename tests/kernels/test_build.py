from __future__ import annotations

import builtins
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tessera_cupy.errors import KernelCompileError
from tessera_cupy.kernels import build, toolchain
from tessera_cupy.kernels.arch import ARCHS
from tessera_cupy.kernels.build import BuildResult, Resources, compile_cubin

KERNEL = 'extern "C" __global__ void f(float* x) { x[threadIdx.x] *= 2.0f; }\n'

REPORT = """\
ptxas info    : 64 bytes gmem
ptxas info    : Compiling entry function 'attend' for 'sm_90a'
ptxas info    : Function properties for attend
ptxas         .     72 bytes stack frame, 104 bytes spill stores, 96 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 72 bytes cumulative stack size, 32 bytes smem
"""


@pytest.mark.parametrize("arch", ARCHS)
def test_cubin_is_a_whole_image_for_the_architecture(arch: str) -> None:
    result = compile_cubin(KERNEL, "f.cu", arch, {})
    assert result.cubin[:4] == b"\x7fELF"
    assert build.elf_size(result.cubin) == len(result.cubin)
    assert f"for '{arch}'" in result.log
    assert result.resources is not None
    assert 0 < result.resources.registers < 32
    assert build.problems(result) == []


def test_headers_come_from_memory_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "a.cuh").write_text("#error the file of the current folder")
    (tmp_path / "b.cuh").write_text("// the file of the current folder\n")
    monkeypatch.chdir(tmp_path)
    source = '#include "common/a.cuh"\n' + KERNEL
    headers = {"common/a.cuh": b'#pragma once\n#include "common/c.cuh"\n', "common/c.cuh": b"\n"}
    compile_cubin(source, "f.cu", "sm_80", headers)
    with pytest.raises(KernelCompileError, match=r"b\.cuh"):
        compile_cubin('#include "b.cuh"\n' + KERNEL, "f.cu", "sm_80", headers)


def test_error_has_the_log_with_file_and_line() -> None:
    headers = {"common/broken.cuh": b"\n\nint f() { return nowhere; }\n"}
    with pytest.raises(KernelCompileError) as error:
        compile_cubin(
            '#include "common/broken.cuh"\nint g() { return absent; }\n',
            "entry.cu",
            "sm_80",
            headers,
        )
    message = str(error.value)
    assert "cannot compile entry.cu for sm_80" in message
    assert 'common/broken.cuh(3): error: identifier "nowhere" is undefined' in message
    assert "entry.cu(2): error" in message
    assert "\0" not in message


def test_spills_and_local_memory_are_problems() -> None:
    source = (
        'extern "C" __global__ void __launch_bounds__(1024, 2) f(volatile float* x) {\n'
        "  float a[64];\n"
        "  for (int k = 0; k < 64; ++k) a[k] = x[k];\n"
        "  for (int k = 63; k >= 0; --k) x[k] = a[k];\n"
        "}\n"
    )
    result = compile_cubin(source, "f.cu", "sm_80", {})
    assert result.resources is not None
    assert min(result.resources.stack, result.resources.spill_stores) > 0
    spills, stack = build.problems(result)
    assert "spill" in spills
    assert "local memory" in stack


def test_compiler_warnings_are_problems() -> None:
    source = 'extern "C" __global__ void f() { int unused; }\n'
    found = build.problems(compile_cubin(source, "f.cu", "sm_80", {}))
    assert len(found) == 1
    assert "f.cu(1): warning" in found[0]


def test_report_is_read() -> None:
    assert build.parse_resources(REPORT) == Resources(168, 104, 96, 72, 32)


def test_worst_function_counts() -> None:
    other = (
        REPORT.replace("168", "200").replace("104", "8").replace("32 bytes smem", "64 bytes smem")
    )
    assert build.parse_resources(REPORT + other) == Resources(200, 104, 96, 72, 64)


def test_no_report_is_a_problem() -> None:
    assert build.parse_resources("") is None
    assert build.problems(BuildResult(b"", "", None)) == ["ptxas reported no resource use"]


@pytest.mark.parametrize(
    ("used", "words"),
    [
        (Resources(200, 0, 0, 0, 0), None),
        (Resources(200, 4, 0, 0, 0), "4 B stored"),
        (Resources(200, 0, 8, 0, 0), "8 B loaded"),
        (Resources(200, 0, 0, 16, 0), "stack frame of 16 B"),
    ],
)
def test_each_kind_of_waste_is_a_problem(used: Resources, words: str | None) -> None:
    found = build.problems(BuildResult(b"", "ptxas info : fine\n", used))
    assert found == [] if words is None else words in found[0]


@pytest.mark.parametrize(
    "line",
    [
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
        "serialized due to insufficient register resources",
        "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored",
        "ptxas warning : Value of threads per SM for entry attend is out of range",
    ],
)
def test_messages_of_ptxas_are_problems(line: str) -> None:
    result = BuildResult(b"", f"ptxas info : fine\n{line}\n", Resources(8, 0, 0, 0, 0))
    assert build.problems(result) == [line]


def test_size_of_an_image_is_told_by_its_headers() -> None:
    # Zeroed memory takes room on the device and none in the image.
    source = "__device__ int zeros[1 << 20];\n" + KERNEL.replace("2.0f", "zeros[threadIdx.x]")
    cubin = compile_cubin(source, "f.cu", "sm_90a", {}).cubin
    assert build.elf_size(cubin) == len(cubin) < 1 << 20
    assert build.elf_size(cubin[:-1]) > len(cubin) - 1
    assert build.elf_size(cubin[: len(cubin) // 2]) > len(cubin) // 2
    assert build.elf_size(b"") == build.elf_size(b"#!" + cubin[2:]) == 0


def test_an_image_without_its_last_byte_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    read = build._read

    def short(nvrtc: Any, program: Any, what: str) -> bytes:
        content = read(nvrtc, program, what)
        return content[:-1] if what == "CUBIN" else content

    monkeypatch.setattr(build, "_read", short)
    with pytest.raises(KernelCompileError, match=r"incomplete cubin of f\.cu"):
        compile_cubin(KERNEL, "f.cu", "sm_80", {})


def test_an_architecture_that_nvrtc_does_not_know() -> None:
    with pytest.raises(KernelCompileError, match=r"has no sm_999a; it knows .*sm_90.*upgrade"):
        compile_cubin(KERNEL, "f.cu", "sm_999a", {})


def test_without_cuda_bindings_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("cuda"):
            raise ModuleNotFoundError("No module named 'cuda'")
        return real(name, *args, **kwargs)

    toolchain.load.cache_clear()
    request.addfinalizer(toolchain.load.cache_clear)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(KernelCompileError, match=r"No module named 'cuda'.*install '\.\[cuda12\]'"):
        compile_cubin(KERNEL, "f.cu", "sm_80", {})
    assert build.nvrtc_version() is None


def test_version_is_that_of_the_library() -> None:
    version = build.nvrtc_version()
    assert version is not None
    assert version >= (12, 9)
    wheel = toolchain.expected_version()
    if wheel is not None:
        assert toolchain.version() == wheel


def _wheels(tmp_path: Path, *names: str) -> list[str]:
    for name in names:
        (tmp_path / f"{name}.dist-info").mkdir()
    return [str(tmp_path / "missing"), str(tmp_path)]


@pytest.mark.parametrize(
    ("wheels", "expected"),
    [
        (("cuda_bindings-12.9.4", "nvidia_cuda_nvrtc_cu12-12.9.86"), "12.9.86"),
        (("cuda_bindings-13.0.1", "nvidia_cuda_nvrtc-13.0.48"), "13.0.48"),
        (
            (
                "cuda_bindings-13.0.1",
                "nvidia_cuda_nvrtc-13.0.48",
                "nvidia_cuda_nvrtc_cu12-12.4.127",
            ),
            "13.0.48",
        ),
        (("cuda_bindings-12.9.4", "nvidia_cuda_nvrtc-13.0.48"), None),
        (("cuda_bindings-12.9.4",), None),
        (("nvidia_cuda_nvrtc_cu12-12.9.86",), None),
    ],
)
def test_expected_version_is_that_of_the_wheel_which_bindings_load(
    tmp_path: Path,
    wheels: tuple[str, ...],
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", _wheels(tmp_path, *wheels))
    assert toolchain.expected_version.__wrapped__() == expected


def test_a_library_of_another_version_than_the_wheel_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(toolchain, "expected_version", lambda: "12.9.86")
    for loaded, expected in [((12, 9), "12.9.86"), ((12, 4), "12.4"), ((13, 9), "13.9")]:
        monkeypatch.setattr(
            toolchain, "load", lambda v=loaded: toolchain.Nvrtc(SimpleNamespace(), v)
        )
        assert toolchain.version() == expected


def test_looking_around_loads_neither_nvrtc_nor_cupy() -> None:
    script = (
        "import sys\n"
        "from tessera_cupy.kernels import batch, build, cache, catalog, toolchain\n"
        "toolchain.expected_version(); catalog.catalog('sm_90a')\n"
        "print([m for m in sys.modules if m.startswith(('cuda.', 'cupy', 'torch', 'filelock'))])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
