from __future__ import annotations

import multiprocessing
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tessera_cupy.kernels import roots
from tessera_cupy.kernels.arch import ARCHS
from tessera_cupy.kernels.batch import Outcome, build_all
from tessera_cupy.kernels.cache import KernelCache
from tessera_cupy.kernels.catalog import KernelConfig, catalog

MERGES = [catalog(arch)[-1] for arch in ARCHS]


@pytest.mark.parametrize("jobs", [1, 2])
def test_everything_is_built_once(root: Path, sources: Path, jobs: int) -> None:
    cache = KernelCache(root, sources)
    there = cache.get(MERGES[1])
    seen: list[Outcome] = []
    outcomes = build_all(MERGES[:3], jobs, seen.append, cache)
    assert [outcome.config for outcome in outcomes] == MERGES[:3]
    assert [outcome.built for outcome in outcomes] == [True, False, True]
    assert [outcome.path for outcome in outcomes] == [cache.find(c) for c in MERGES[:3]]
    assert outcomes[1].path == there
    assert all(outcome.error is None and outcome.seconds > 0 for outcome in outcomes)
    assert sorted(map(id, seen)) == sorted(map(id, outcomes))
    again = build_all(MERGES[:3], jobs, cache=cache)
    assert not any(outcome.built for outcome in again)


@pytest.mark.parametrize("jobs", [1, 2])
def test_one_failure_does_not_stop_the_others(root: Path, sources: Path, jobs: int) -> None:
    text = (sources / "merge_splits.cu").read_text()
    (sources / "merge_splits.cu").write_text(
        text + "#if __CUDA_ARCH__ == 900\n#error not here\n#endif\n"
    )
    configs = [catalog("sm_80")[-1], catalog("sm_90a")[-1], catalog("sm_120a")[-1]]
    good, bad, other = build_all(configs, jobs, cache=KernelCache(root, sources))
    assert good.path is not None
    assert other.path is not None
    assert (bad.path, bad.built) == (None, False)
    assert bad.error is not None
    assert "not here" in bad.error
    assert "merge_splits.cu(" in bad.error


@pytest.mark.parametrize("jobs", [1, 2])
def test_problems_of_a_kernel_are_told_now_and_later(root: Path, sources: Path, jobs: int) -> None:
    text = (sources / "merge_splits.cu").read_text()
    (sources / "merge_splits.cu").write_text(text.replace("{ x[", "{ int unused; x["))
    for built in (True, False):
        outcomes = build_all(MERGES[:2], jobs, cache=KernelCache(root, sources))
        for outcome in outcomes:
            assert outcome.built is built
            assert len(outcome.problems) == 1
            assert "unused" in outcome.problems[0]


def test_no_jit_does_not_forbid_what_was_asked_for(
    root: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESSERA_NO_JIT", "1")
    for jobs, configs in ((1, MERGES[:1]), (2, MERGES[1:3])):
        for outcome in build_all(configs, jobs, cache=KernelCache(root, sources)):
            assert outcome.built


def test_unusable_root_gives_kernels_to_this_process(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    monkeypatch.setattr(roots, "_private", (os.getpid(), private))
    cache = KernelCache(Path("/proc/self/fdinfo"), sources)
    with pytest.warns(RuntimeWarning, match="cannot be used") as caught:
        outcomes = build_all(MERGES[:2], 2, cache=cache)
    assert len(caught) == 1
    for outcome in outcomes:
        assert outcome.path is not None
        assert outcome.path.is_relative_to(private)
        assert cache.get(outcome.config) == outcome.path


def test_process_that_dies_is_told(root: Path, sources: Path) -> None:
    cache = KernelCache(root, sources)
    configs = [replace(MERGES[0], warps=warps) for warps in range(1, 13)]

    def kill_them(_: Outcome) -> None:
        for child in multiprocessing.active_children():
            child.kill()

    outcomes = build_all(configs, 2, kill_them, cache)
    failed = [outcome for outcome in outcomes if outcome.error]
    assert failed
    assert all("process died" in str(outcome.error) for outcome in failed)
    assert all(outcome.path is None for outcome in failed)
    assert [o.error for o in build_all(configs, 1, cache=cache)] == [None] * len(configs)


def test_error_in_the_callback_is_not_swallowed(root: Path, sources: Path) -> None:
    def fail(_: Outcome) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        build_all(MERGES[:2], 2, fail, KernelCache(root, sources))


def test_nothing_to_do(root: Path, sources: Path) -> None:
    assert build_all([], cache=KernelCache(root, sources)) == []


def test_same_kernel_twice(root: Path, sources: Path) -> None:
    config: KernelConfig = MERGES[0]
    seen: list[Outcome] = []
    first, second = build_all([config, config], 2, seen.append, KernelCache(root, sources))
    assert first is second
    assert len(seen) == 1


@pytest.mark.parametrize("jobs", [0, -1])
def test_wrong_number_of_jobs(root: Path, sources: Path, jobs: int) -> None:
    with pytest.raises(ValueError, match="`jobs`: expected at least 1"):
        build_all(MERGES[:1], jobs, cache=KernelCache(root, sources))
