"""``tessera-cupy env``: what is installed and what can be used; it reports, and never fails."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib import metadata
from typing import Any

from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from tessera_cupy import __version__
from tessera_cupy.cli import gpu
from tessera_cupy.cli.output import Commands, Output, add_json, facts, size
from tessera_cupy.errors import TesseraError, install

#: Distributions whose versions matter to a report; only their metadata is read.
PACKAGES = (
    "numpy",
    "cupy",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "cuda-bindings",
    "nvidia-cuda-nvrtc-cu12",
    "nvidia-cuda-nvrtc",
    "ml_dtypes",
    "torch",
    "jax",
    "scipy",
    "matplotlib",
    "av",
    "scikit-video",
)
_CUPY = ("cupy", "cupy-cuda12x", "cupy-cuda13x")
_NVRTC = ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc")


def add_to(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "env",
        help="what is installed here: packages, GPU, NVRTC, kernel cache",
        description="What is installed here and what of it can be used; for a bug report, too.",
    )
    add_json(parser)
    parser.set_defaults(run=_run)


def collect() -> dict[str, Any]:
    """Every fact of the report; one that cannot be had is ``{"error": reason}`` in its place."""
    packages = {name: _guard(partial(_installed, name)) for name in PACKAGES}
    report: dict[str, Any] = {
        "tessera_cupy": __version__,
        "python": _guard(_python),
        "packages": packages,
        "cupy": _guard(_cupy),
        "nvrtc": _guard(_nvrtc),
        "driver": _guard(_driver),
        "gpus": _guard(_gpus),
        "kernels_dir": _guard(partial(_resource, "kernels_dir")),
        "plans_dir": _guard(partial(_resource, "plans_dir")),
        "cache": _guard(_cache),
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith("TESSERA_")
        },
    }
    report["advice"] = _guard(partial(_advice, report))
    return report


def _run(args: argparse.Namespace, output: Output) -> int:
    report = collect()
    output.show(report, _text(report))
    return 0


def _guard(probe: Callable[[], Any]) -> Any:
    """The probe's result, or its failure: a broken installation is what a report is for."""
    try:
        return probe()
    except TesseraError as error:
        return {"error": str(error)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _python() -> str:
    return f"{platform.python_version()} ({sys.executable}, {platform.platform()})"


def _cupy() -> dict[str, Any]:
    """Whether CuPy imports; this is the only probe that loads it."""
    cupy = importlib.import_module("cupy")
    runtime = cupy.cuda.runtime.runtimeGetVersion()
    return {"version": cupy.__version__, "cuda_runtime": _dotted(runtime)}


def _nvrtc() -> str:
    found: str = importlib.import_module("tessera_cupy.kernels.toolchain").version()
    return found


def _driver() -> dict[str, Any]:
    major, minor = gpu.driver_cuda()
    return {"cuda": f"{major}.{minor}"}


def _gpus() -> list[dict[str, Any]]:
    return [
        {
            "index": device.ordinal,
            "name": device.name,
            "capability": ".".join(map(str, device.capability)),
            "arch": _guard(partial(_arch, device)),
            "multiprocessors": device.multiprocessors,
            "memory_bytes": device.memory,
        }
        for device in gpu.devices()
    ]


def _arch(device: gpu.Device) -> str:
    arch = importlib.import_module("tessera_cupy.kernels.arch")
    name: str = arch.arch_for(device.capability, device.name).name
    return name


def _resource(name: str) -> str:
    return str(getattr(importlib.import_module("tessera_cupy._resources"), name)())


def _dotted(number: int) -> str:
    """CUDA's version number, 12090, as 12.9."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _cache() -> dict[str, Any]:
    cache = importlib.import_module("tessera_cupy.kernels.cache").default_cache()
    entries = cache.status()
    total = sum(entry.bytes for entry in entries)
    return {"folder": str(cache.root), "entries": len(entries), "bytes": total}


def _advice(report: Mapping[str, Any]) -> list[str]:
    """What to do about what was found, one sentence each."""
    advice = []
    installed = [name for name in _CUPY if report["packages"].get(name)]
    gpus, driver = report["gpus"], report["driver"]
    if len(installed) > 1:
        advice.append(
            f"{' and '.join(installed)} share one import name: uninstall all of them, "
            "then install the one for your driver."
        )
    if _failed(gpus):
        works = ["planning", "the NumPy executor"]
        if report["packages"].get("matplotlib"):
            works.append("drawing")
        if not _failed(report["nvrtc"]):
            works.append("compiling")
        advice.append(f"No GPU: {', '.join(works)} work, the kernels do not.")
    elif not installed:
        extra = "cuda12" if _failed(driver) or float(driver["cuda"]) < 13 else "cuda13"
        advice.append(f"To use the GPU: {install(extra)}.")
    if _failed(report["nvrtc"]):
        advice.append(f"To compile kernels: {install('cuda12')} (or cuda13).")
    return advice


def _failed(value: object) -> bool:
    return isinstance(value, Mapping) and set(value) == {"error"}


def _text(report: Mapping[str, Any]) -> Group:
    rows: dict[str, object] = {
        "tessera-cupy": report["tessera_cupy"],
        "Python": _say(report["python"]),
    }
    rows |= {name: _say(found) for name, found in report["packages"].items() if found}
    rows["not installed"] = ", ".join(_missing(report["packages"]))
    rows["CuPy"] = _say(report["cupy"], "{version}, CUDA runtime {cuda_runtime}")
    rows["NVRTC"] = _say(report["nvrtc"])
    rows["driver"] = _say(report["driver"], "up to CUDA {cuda}")
    gpus = report["gpus"]
    if _failed(gpus):
        rows["GPU"] = _say(gpus)
    else:
        rows |= {f"GPU {device['index']}": _gpu(device) for device in gpus}
    rows["CUDA sources"] = _say(report["kernels_dir"])
    rows["profile tables"] = _say(report["plans_dir"])
    cache = report["cache"]
    rows["kernel cache"] = _say(cache) if _failed(cache) else _cache_line(cache)
    rows |= report["environment"]
    advice = report["advice"]
    lines = [_say(advice)] if _failed(advice) else advice
    return Group(facts(rows), *(Padding(Text(line), (1, 0, 0, 0)) for line in lines))


def _missing(packages: Mapping[str, Any]) -> list[str]:
    """What is not installed, but for what another distribution of the same library stands in."""
    covered = [names for names in (_CUPY, _NVRTC) if any(packages[name] for name in names)]
    return [
        name
        for name, found in packages.items()
        if not found and not any(name in names for names in covered)
    ]


def _say(value: Any, form: str = "{}") -> str:
    if _failed(value):
        return f"not usable: {value['error']}"
    return form.format(**value) if isinstance(value, Mapping) else form.format(value)


def _gpu(device: Mapping[str, Any]) -> str:
    return (
        f"{device['name']}, {device['multiprocessors']} SMs, {size(device['memory_bytes'])}, "
        f"compute capability {device['capability']}, kernels of {_say(device['arch'])}"
    )


def _cache_line(cache: Mapping[str, Any]) -> str:
    return f"{cache['folder']}: {cache['entries']} kernels, {size(cache['bytes'])}"
