"""What every report says of the machine: its GPU, its driver, and the versions of what ran."""

from __future__ import annotations

import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from tessera_cupy import __version__, interop
from tessera_cupy.bench import gpu
from tessera_cupy.bench.peers import PACKAGES


def machine() -> dict[str, Any]:
    """JSON-able: ``gpu``, ``driver`` and ``versions``, as :mod:`tessera_cupy.bench.report` says.

    Raises:
        NoGpuError: there is no GPU.
    """
    return {"gpu": gpu.name(), "driver": gpu.driver(), "versions": versions()}


def host_machine() -> dict[str, Any]:
    """The same of a machine whose CPU computes, with what runs there."""
    return {"gpu": "CPU process", "driver": None, "versions": _own_versions()}


def versions() -> dict[str, str]:
    """Versions of what the figures depend on, by name; what is not installed is left out."""
    found = {**_own_versions(), "cupy": interop.import_cupy().__version__}
    if gpu.has_torch():
        import torch

        for package in ("triton", *PACKAGES.values()):
            with suppress(PackageNotFoundError):
                found[package] = version(package)
        found["torch"] = torch.__version__  # with the CUDA that it was built for
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found


def _own_versions() -> dict[str, str]:
    return {
        "tessera_cupy": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
