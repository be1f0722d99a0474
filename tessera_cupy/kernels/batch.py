"""Building many kernels at once, in as many processes as asked for."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from tessera_cupy.errors import TesseraError, wrong
from tessera_cupy.kernels import entry
from tessera_cupy.kernels.cache import KernelCache, default_cache
from tessera_cupy.kernels.catalog import KernelConfig


@dataclass(frozen=True)
class Outcome:
    """What became of one kernel.

    Attributes:
        config: the catalog entry.
        path: its cubin, or None when it could not be built.
        built: False when it was in the cache already.
        seconds: time that this took.
        problems: spills, local memory and compiler warnings; see ``build.problems``.
        error: why it could not be built, with NVRTC's log, or None.
    """

    config: KernelConfig
    path: Path | None
    built: bool
    seconds: float
    problems: tuple[str, ...] = ()
    error: str | None = None


def build_all(
    configs: Iterable[KernelConfig],
    jobs: int | None = None,
    on_done: Callable[[Outcome], None] | None = None,
    cache: KernelCache | None = None,
) -> list[Outcome]:
    """Build every given kernel that is not in the cache, whatever ``TESSERA_NO_JIT`` says.

    The processes are spawned, never forked, so this also works after CUDA was initialised. A
    script that calls it with ``jobs`` above 1 needs the usual ``if __name__ == "__main__"``.

    Args:
        configs: catalog entries.
        jobs: processes; None means one for each CPU that this process may use. With 1, or
            one kernel to build, everything happens in this process.
        on_done: called in this process after each kernel, in the order in which they finish.
        cache: None means the user's.

    Returns:
        One outcome a kernel, in the order of ``configs``. A kernel that cannot be built gives
        an outcome with ``error``, and the others are still built.

    Raises:
        ValueError: ``jobs`` below 1.
    """
    cache = cache or default_cache()
    configs = list(configs)
    if jobs is not None and jobs < 1:
        raise ValueError(wrong("jobs", "at least 1", jobs, "leave it out for one per CPU"))
    outcomes: dict[KernelConfig, Outcome] = {}

    def done(outcome: Outcome) -> None:
        outcomes[outcome.config] = outcome
        if on_done is not None:
            on_done(outcome)

    missing = []
    for config in dict.fromkeys(configs):
        begin = time.perf_counter()
        path = cache.find(config)
        if path is None:
            missing.append(config)
        else:
            done(Outcome(config, path, False, time.perf_counter() - begin, _problems(path)))
    jobs = min(jobs or len(os.sched_getaffinity(0)), len(missing))
    if jobs > 1:
        _in_processes(cache, missing, jobs, done)
    else:
        for config in missing:
            done(_build(cache.build, config))
    return [outcomes[config] for config in configs]


def _in_processes(
    cache: KernelCache, missing: list[KernelConfig], jobs: int, done: Callable[[Outcome], None]
) -> None:
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        # Settled here, because a private folder must outlive the processes.
        waiting: dict[Future[Outcome], KernelConfig] = {
            pool.submit(_build_at, cache.usable_root(config.arch), cache.sources, config): config
            for config in missing
        }
        try:
            for future in as_completed(waiting):
                try:
                    done(future.result())
                except BrokenProcessPool:
                    error = "the compiling process died (out of memory, or killed)"
                    done(Outcome(waiting[future], None, False, 0.0, error=error))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _build_at(root: Path, sources: Path | None, config: KernelConfig) -> Outcome:
    cache = KernelCache(root, sources)
    # No private folder here: it would vanish with this process.
    return _build(partial(cache.build_in, root), config)


def _build(build: Callable[[KernelConfig], Path], config: KernelConfig) -> Outcome:
    begin = time.perf_counter()
    try:
        path = build(config)
    except (TesseraError, OSError) as error:
        return Outcome(config, None, False, time.perf_counter() - begin, error=str(error))
    return Outcome(config, path, True, time.perf_counter() - begin, _problems(path))


def _problems(cubin: Path) -> tuple[str, ...]:
    return tuple(json.loads(cubin.with_name(entry.META).read_bytes())["problems"])
