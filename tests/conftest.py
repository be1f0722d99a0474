"""Set-up that every test shares: the GPU marker, hypothesis profiles, a cache of the run's own."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Before NumPy is loaded: the tests' products are small, and threads of several workers that wait
# for each other take many times longer than one.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from tessera_cupy import NoGpuError
from tessera_cupy.interop import import_cupy

_COUNT = pytest.StashKey[int]()
_REASON = pytest.StashKey[str]()

# A shared 2-core machine stalls at times, so no example has a deadline. CI draws the same
# examples each time: a push fails because of its own change or not at all.
settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("local"), derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@cache
def gpu_problem() -> str | None:
    """Why no GPU can be used, or None. One that is there but fails is for the tests to see."""
    try:
        import_cupy()
    except NoGpuError as error:
        return str(error)
    return None


@pytest.hookimpl(trylast=True)  # after -m and -k, so that only what they ask for is counted
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that need a GPU where there is none, and keep their count."""
    needing = [item for item in items if item.get_closest_marker("gpu")]
    reason = gpu_problem() if needing else None
    if reason is None:
        return
    config.hook.pytest_deselected(items=needing)
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    config.stash[_COUNT] = len(needing)
    config.stash[_REASON] = reason
    # Workers of pytest-xdist collect, and only the process that started them reports.
    if hasattr(config, "workeroutput"):
        config.workeroutput["tessera_gpu"] = (len(needing), reason)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Take over what a worker deselected; every worker deselects the same tests."""
    count, reason = getattr(node, "workeroutput", {}).get("tessera_gpu", (0, ""))
    if count:
        node.config.stash[_COUNT] = count
        node.config.stash[_REASON] = reason


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say how many tests the missing GPU cost, so that a green run cannot hide it."""
    count = config.stash.get(_COUNT, 0)
    if count:
        terminalreporter.write_line(f"{count} gpu tests not run. {config.stash[_REASON]}")


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kernel cache that all workers of this run share; the user's own is never touched."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    folder = root / "kernel-cache"
    folder.mkdir(mode=0o700, exist_ok=True)
    for name in [name for name in os.environ if name.startswith("TESSERA_")]:
        del os.environ[name]
    os.environ["TESSERA_CACHE_DIR"] = str(folder)
    return folder
