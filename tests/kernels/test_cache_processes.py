"""The cache between processes: races, kills, and what a process leaves when it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tessera_cupy.kernels import toolchain
from tessera_cupy.kernels.cache import KernelCache
from tessera_cupy.kernels.catalog import KernelConfig

# A process that gets one kernel; what it compiles is appended to a file.
GET = """
import os, sys, time
from pathlib import Path
from tessera_cupy.kernels import cache, entry
from tessera_cupy.kernels.catalog import catalog

root, sources, log, mode = sys.argv[1:]
compile_cubin = cache.compile_cubin

def counted(*args):
    with open(log, "a") as file:
        file.write(f"{os.getpid()}\\n")
    if mode == "hang in the compiler":
        time.sleep(600)
    return compile_cubin(*args)

cache.compile_cubin = counted
if mode == "hang while writing":
    write = entry._write
    def slow(path, content):
        write(path, content[:20])
        if path.name == "kernel.cubin":
            with open(log, "a") as file:
                file.write("writing\\n")
            time.sleep(600)
    entry._write = slow
print(cache.KernelCache(Path(root), Path(sources)).get(catalog("sm_80")[-1]))
print(sorted(name for name in sys.modules if name.startswith(("cuda.", "cupy", "filelock"))))
"""


class Getter:
    """Starts such processes."""

    def __init__(self, root: Path, sources: Path, folder: Path) -> None:
        self.log = folder / "compiled"
        self._arguments = [str(root), str(sources), str(self.log)]

    def start(self, mode: str = "") -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", GET, *self._arguments, mode],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, process: subprocess.Popen[str]) -> list[str]:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert err == ""
        return out.splitlines()

    def logged(self) -> list[str]:
        return self.log.read_text().split() if self.log.exists() else []

    def wait_for(self, word: str) -> None:
        deadline = time.monotonic() + 120
        while word not in self.logged():
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.fixture
def getter(root: Path, sources: Path, tmp_path: Path) -> Getter:
    return Getter(root, sources, tmp_path)


def test_eight_processes_on_a_cold_cache_compile_once(getter: Getter) -> None:
    processes = [getter.start() for _ in range(8)]
    paths = {getter.finish(process)[0] for process in processes}
    assert len(paths) == 1
    assert Path(paths.pop()).is_file()
    assert len(getter.logged()) == 1


def test_second_process_hits_without_loading_nvrtc(
    getter: Getter, root: Path, sources: Path, config: KernelConfig
) -> None:
    path = KernelCache(root, sources).get(config)
    found, modules = getter.finish(getter.start())
    assert found == str(path)
    if toolchain.expected_version() is not None:
        assert modules == "[]"
    assert getter.logged() == []


@pytest.mark.parametrize(
    ("mode", "word"), [("hang in the compiler", None), ("hang while writing", "writing")]
)
def test_process_that_is_killed_leaves_nothing_in_the_way(
    getter: Getter,
    root: Path,
    sources: Path,
    config: KernelConfig,
    mode: str,
    word: str | None,
) -> None:
    process = getter.start(mode)
    getter.wait_for(word or str(process.pid))
    cache = KernelCache(root, sources)
    assert cache.find(config) is None
    waiting = getter.start()  # already there when the first one dies
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    path = Path(getter.finish(waiting)[0])
    assert path == cache.get(config)
    assert cache.verify() == {}
    leftovers = [n for n in os.listdir(path.parent.parent) if not n.endswith(".lock")]
    assert leftovers == [path.parent.name]


def test_private_folder_goes_away_with_its_process(sources: Path, tmp_path: Path) -> None:
    script = (
        "import os, sys, warnings\n"
        "from pathlib import Path\n"
        "from tessera_cupy.kernels.cache import KernelCache\n"
        "from tessera_cupy.kernels.catalog import catalog\n"
        "warnings.simplefilter('ignore')\n"
        "cache = KernelCache(Path('/proc/self/fdinfo'), Path(sys.argv[1]))\n"
        "path = cache.get(catalog('sm_80')[-1])\n"
        "assert path.is_file()\n"
        "if os.fork() == 0: sys.exit()\n"
        "os.wait()\n"
        "assert path.is_file()\n"
        "print(path)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(sources)],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    path = Path(done.stdout.strip())
    assert path.is_relative_to(tmp_path)
    assert not list(tmp_path.glob("tessera-cupy-*"))
