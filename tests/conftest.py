"""Set-up that every test shares: what is not here, hypothesis, a cache of the run's own."""

from __future__ import annotations

import importlib.util
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

#: By marker, how many tests were left out, and why.
_LEFT_OUT = pytest.StashKey[dict[str, tuple[int, str]]]()

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


def torch_problem() -> str | None:
    """Why torch.distributed cannot be used, or None."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed. Run `make test-parallel`, which has an environment with it."
    return None


#: What a marked test needs.
_PROBLEMS = {"gpu": gpu_problem, "parallel": torch_problem}


@pytest.hookimpl(trylast=True)  # after -m and -k, so that only what they ask for is counted
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that need what is not here, and keep their count."""
    left_out = config.stash.setdefault(_LEFT_OUT, {})
    for marker, problem in _PROBLEMS.items():
        needing = [item for item in items if item.get_closest_marker(marker)]
        reason = problem() if needing else None
        if reason is None:
            continue
        config.hook.pytest_deselected(items=needing)
        items[:] = [item for item in items if not item.get_closest_marker(marker)]
        left_out[marker] = len(needing), reason
    # Workers of pytest-xdist collect, and only the process that started them reports.
    if hasattr(config, "workeroutput"):
        config.workeroutput["tessera_left_out"] = left_out


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Take over what a worker deselected; every worker deselects the same tests."""
    left_out = getattr(node, "workeroutput", {}).get("tessera_left_out", {})
    node.config.stash.setdefault(_LEFT_OUT, {}).update(left_out)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say how many tests were left out, so that a green run cannot hide it."""
    for marker, (count, reason) in config.stash.get(_LEFT_OUT, {}).items():
        terminalreporter.write_line(f"{count} {marker} tests not run. {reason}")


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
