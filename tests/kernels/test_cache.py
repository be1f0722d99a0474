from __future__ import annotations

import errno
import json
import os
import pwd
import shutil
import stat
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tessera_cupy.errors import KernelCompileError, KernelMissingError
from tessera_cupy.kernels import cache as cache_module
from tessera_cupy.kernels import entry, roots, toolchain
from tessera_cupy.kernels.cache import KernelCache, default_cache
from tessera_cupy.kernels.catalog import KernelConfig, catalog


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what is compiled from here on; the compiler stays the real one."""
    names: list[str] = []
    real = cache_module.compile_cubin

    def counted(source: str, name: str, arch: str, headers: Any) -> Any:
        names.append(name)
        return real(source, name, arch, headers)

    monkeypatch.setattr(cache_module, "compile_cubin", counted)
    return names


@pytest.fixture
def private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A private folder that no other test has used."""
    folder = tmp_path / "private"
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(roots, "_private", (os.getpid(), folder))
    return folder


# Building and finding


def test_entry_holds_source_cubin_and_what_is_known(
    root: Path, sources: Path, config: KernelConfig
) -> None:
    path = KernelCache(root, sources).get(config)
    folder = path.parent
    key = KernelCache(root, sources).digest(config, toolchain.version())
    assert folder == root / "sm_80" / f"merge_splits_bf16.{key}"
    assert sorted(os.listdir(folder)) == ["kernel.cu", "kernel.cubin", "meta.json"]
    assert path.read_bytes()[:4] == b"\x7fELF"
    assert '#include "merge_splits.cu"' in (folder / "kernel.cu").read_text()
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["nvrtc"] == toolchain.version()
    assert meta["cubin"]["bytes"] == path.stat().st_size
    assert meta["config"] == {**vars(config), "features": []}
    assert meta["entry"] == "merge_splits"
    assert meta["resources"]["registers"] > 0
    assert meta["problems"] == []
    assert "-arch=sm_80" in meta["options"]


def test_folders_are_closed_to_others_and_nothing_is_left_over(
    root: Path, sources: Path, config: KernelConfig
) -> None:
    path = KernelCache(root, sources).get(config)
    for folder in (root, path.parent.parent, path.parent):
        assert stat.S_IMODE(folder.stat().st_mode) & 0o077 == 0
    visible = [name for name in os.listdir(path.parent.parent) if not name.endswith(".lock")]
    assert visible == [path.parent.name]


def test_second_call_and_second_cache_find_it(
    root: Path, sources: Path, config: KernelConfig, compiled: list[str]
) -> None:
    cache = KernelCache(root, sources)
    assert cache.find(config) is None
    assert cache.find(config) is None
    assert compiled == []
    first = cache.get(config)
    assert cache.get(config) == cache.find(config) == cache.build(config) == first
    assert KernelCache(root, sources).get(config) == first
    assert compiled == ["merge_splits_bf16.entry.cu"]


def test_lookup_of_a_kernel_that_is_there_is_quick(
    root: Path, sources: Path, config: KernelConfig
) -> None:
    real = catalog("sm_80")[-1]  # of the package's own sources, which take longer to hash
    KernelCache(root).build(real)
    times = []
    for _ in range(10):
        begin = time.perf_counter()
        KernelCache(root).get(real)
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.005


def test_configurations_and_architectures_are_kept_apart(
    root: Path, sources: Path, compiled: list[str]
) -> None:
    cache = KernelCache(root, sources)
    bf16, fp16 = catalog("sm_80")[-1], catalog("sm_80")[-2]
    paths = {cache.get(c) for c in (bf16, fp16, catalog("sm_90a")[-1], replace(bf16, warps=4))}
    assert len(paths) == len(compiled) == 4


def test_a_changed_reason_does_not_rebuild(root: Path, sources: Path, config: KernelConfig) -> None:
    path = KernelCache(root, sources).get(config)
    assert KernelCache(root, sources).find(replace(config, why="better words")) == path


def test_source_that_changed_is_rebuilt_though_it_looks_older(
    root: Path, sources: Path, config: KernelConfig, compiled: list[str]
) -> None:
    first = KernelCache(root, sources).get(config)
    header = sources / "common" / "factor.cuh"
    header.write_text("inline constexpr float kFactor = 3.0f;\n")
    os.utime(header, (0, 0))
    second = KernelCache(root, sources).get(config)
    assert second != first
    assert second.read_bytes() != first.read_bytes()
    header.write_text("inline constexpr float kFactor = 2.0f;\n")  # and back again
    assert KernelCache(root, sources).get(config) == first
    assert len(compiled) == 2


def test_touched_source_is_not_rebuilt(
    root: Path, sources: Path, config: KernelConfig, compiled: list[str]
) -> None:
    first = KernelCache(root, sources).get(config)
    os.utime(sources / "merge_splits.cu", (2**31, 2**31))
    (sources / "notes.txt").write_text("not a source")
    assert KernelCache(root, sources).get(config) == first
    assert len(compiled) == 1


def test_renamed_or_shifted_contents_have_another_key(config: KernelConfig) -> None:
    keys = [
        entry.digest(config, contents, "12.9")
        for contents in (
            {"a.cu": b"xy", "b.cu": b""},
            {"a.cu": b"x", "b.cu": b"y"},
            {"a.cu": b"xy", "c.cu": b""},
            {"a.cux": b"y", "b.cu": b""},
        )
    ]
    assert len(set(keys)) == 4


def test_other_nvrtc_has_another_key(
    root: Path,
    sources: Path,
    config: KernelConfig,
    compiled: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = KernelCache(root, sources)
    first = cache.get(config)
    module = toolchain.load().module
    monkeypatch.setattr(toolchain, "expected_version", lambda: "12.9.999")
    monkeypatch.setattr(toolchain, "load", lambda: toolchain.Nvrtc(module, (12, 9)))
    second = cache.get(config)
    assert second != first
    assert json.loads((second.parent / "meta.json").read_text())["nvrtc"] == "12.9.999"
    assert cache.get(config) == second
    assert len(compiled) == 2


def test_a_library_that_is_not_the_wheels_has_its_own_key(
    root: Path,
    sources: Path,
    config: KernelConfig,
    compiled: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = toolchain.load().module
    monkeypatch.setattr(toolchain, "expected_version", lambda: "12.4.127")
    monkeypatch.setattr(toolchain, "load", lambda: toolchain.Nvrtc(module, (12, 9)))
    cache = KernelCache(root, sources)
    path = cache.get(config)
    assert json.loads((path.parent / "meta.json").read_text())["nvrtc"] == "12.9"
    monkeypatch.setenv("TESSERA_NO_JIT", "1")
    assert cache.get(config) == path
    assert [found.current for found in cache.status()] == [True]
    monkeypatch.setattr(toolchain, "load", lambda: toolchain.Nvrtc(module, (12, 8)))
    assert [found.current for found in cache.status()] == [False]
    assert len(compiled) == 1


def test_without_nvrtc_what_is_there_is_found_and_what_is_not_is_an_error(
    root: Path, sources: Path, config: KernelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = KernelCache(root, sources)
    path = cache.get(config)

    def missing() -> toolchain.Nvrtc:
        raise KernelCompileError("no NVRTC here")

    version = toolchain.version()
    monkeypatch.setattr(toolchain, "expected_version", lambda: version)
    monkeypatch.setattr(toolchain, "load", missing)
    assert cache.get(config) == path
    with pytest.raises(KernelCompileError, match="no NVRTC here"):
        cache.get(replace(config, warps=4))


def test_compile_error_has_file_and_line_and_leaves_nothing(
    root: Path, sources: Path, config: KernelConfig
) -> None:
    (sources / "common" / "factor.cuh").write_text("\n\nfloat kFactor = absent;\n")
    with pytest.raises(KernelCompileError, match=r"common/factor\.cuh\(3\): error"):
        KernelCache(root, sources).get(config)
    assert [name for name in os.listdir(root / "sm_80") if not name.endswith(".lock")] == []
    (sources / "common" / "factor.cuh").write_text("inline constexpr float kFactor = 2.0f;\n")
    assert KernelCache(root, sources).get(config).is_file()


# Threads


def test_sixteen_threads_compile_once(
    root: Path, sources: Path, config: KernelConfig, compiled: list[str]
) -> None:
    cache = KernelCache(root, sources)
    start = threading.Barrier(16)

    def get(_: int) -> Path:
        start.wait()
        return cache.get(config)

    with ThreadPoolExecutor(16) as pool:
        paths = set(pool.map(get, range(16)))
    assert len(paths) == 1
    assert compiled == ["merge_splits_bf16.entry.cu"]


# Damage

DAMAGE: dict[str, Callable[[Path], object]] = {
    "cubin cut short": lambda f: os.truncate(f / "kernel.cubin", 100),
    "cubin without its last byte": lambda f: os.truncate(
        f / "kernel.cubin", (f / "kernel.cubin").stat().st_size - 1
    ),
    "cubin empty": lambda f: os.truncate(f / "kernel.cubin", 0),
    "cubin longer": lambda f: (f / "kernel.cubin").write_bytes(
        (f / "kernel.cubin").read_bytes() + b"\0"
    ),
    "a byte of the cubin changed": lambda f: (f / "kernel.cubin").write_bytes(
        (f / "kernel.cubin").read_bytes()[:-1] + b"\xff"
    ),
    "cubin gone": lambda f: (f / "kernel.cubin").unlink(),
    "source gone": lambda f: (f / "kernel.cu").unlink(),
    "meta gone": lambda f: (f / "meta.json").unlink(),
    "meta empty": lambda f: (f / "meta.json").write_text(""),
    "meta cut short": lambda f: os.truncate(f / "meta.json", 60),
    "meta of another shape": lambda f: (f / "meta.json").write_text('["cubin"]'),
    "meta without the cubin": lambda f: (f / "meta.json").write_text("{}"),
    "meta of another format": lambda f: (f / "meta.json").write_text(
        (f / "meta.json").read_text().replace('"format": 1', '"format": 0')
    ),
    "meta of another kernel": lambda f: (f / "meta.json").write_text(
        (f / "meta.json").read_text().replace("bf16", "fp16")
    ),
    "folder empty": lambda f: (shutil.rmtree(f), f.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_entry_is_told_and_rebuilt(
    root: Path,
    sources: Path,
    config: KernelConfig,
    compiled: list[str],
    damage: Callable[[Path], object],
) -> None:
    cache = KernelCache(root, sources)
    path = cache.get(config)
    good = path.read_bytes()
    damage(path.parent)
    assert list(cache.verify()) == [path.parent]
    assert cache.find(config) is None
    assert cache.get(config) == path
    assert path.read_bytes() == good
    assert cache.verify() == {}
    assert len(compiled) == 2


def test_entry_of_another_kernel_is_not_taken(
    root: Path, sources: Path, config: KernelConfig
) -> None:
    cache = KernelCache(root, sources)
    mine, other = cache.get(config), cache.get(catalog("sm_80")[-2])
    shutil.rmtree(mine.parent)
    shutil.copytree(other.parent, mine.parent)
    assert cache.find(config) is None


def test_failure_while_writing_leaves_the_old_state(
    root: Path, sources: Path, config: KernelConfig, private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = entry._write

    def full(path: Path, content: bytes) -> None:
        if path.is_relative_to(root) and path.name == "kernel.cubin":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        real(path, content)

    monkeypatch.setattr(entry, "_write", full)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        path = KernelCache(root, sources).get(config)
    assert path.is_relative_to(private)
    assert [name for name in os.listdir(root / "sm_80") if not name.endswith(".lock")] == []


# Roots that cannot be used


def _one_warning(cache: KernelCache, words: str) -> list[Path]:
    """Get two kernels, each twice; they must come with one warning altogether."""
    configs = catalog("sm_80")[-2:]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        paths = [cache.get(config) for config in (*configs, *configs)]
    assert [w.category for w in caught] == [RuntimeWarning]
    message = str(caught[0].message)
    assert words in message
    assert "TESSERA_CACHE_DIR" in message
    assert paths[:2] == paths[2:]
    return paths


def test_root_that_nobody_can_write(sources: Path, compiled: list[str], private: Path) -> None:
    # Even the superuser can make nothing there.
    paths = _one_warning(KernelCache(Path("/proc/self/fdinfo"), sources), "/proc/self/fdinfo")
    assert all(path.is_relative_to(private) for path in paths)
    assert len(compiled) == 2


def test_root_that_is_a_file(sources: Path, root: Path, private: Path) -> None:
    root.write_text("")
    paths = _one_warning(KernelCache(root, sources), str(root))
    assert all(path.is_relative_to(private) for path in paths)


def test_read_only_root_serves_what_it_has(
    root: Path,
    sources: Path,
    compiled: list[str],
    private: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bf16, fp16 = catalog("sm_80")[-1], catalog("sm_80")[-2]
    there = KernelCache(root, sources).get(bf16)
    (root / "sm_80").chmod(0o500)
    if os.geteuid() == 0:  # who may write everywhere
        monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != root / "sm_80")
    cache = KernelCache(root, sources)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.get(bf16) == there
    with pytest.warns(RuntimeWarning, match="cannot be written"):
        path = cache.get(fp16)
    assert path.is_relative_to(private)
    assert cache.find(fp16) == cache.get(fp16) == path
    assert len(compiled) == 2
    (root / "sm_80").chmod(0o700)


@pytest.mark.parametrize("platformdirs", ["installed", "older"])
def test_no_home(
    sources: Path,
    private: Path,
    tmp_path: Path,
    platformdirs: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nobody(uid: int) -> Any:
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME", "TESSERA_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    if platformdirs == "older":
        monkeypatch.setattr(roots, "user_cache_path", lambda name: Path("~/.cache") / name)
    monkeypatch.chdir(tmp_path)
    cache = KernelCache(None, sources)
    assert cache.root is None
    paths = _one_warning(cache, "no home folder")
    assert all(path.is_relative_to(private) for path in paths)
    assert not (tmp_path / "~").exists()
    assert cache.status() == []
    assert cache.verify() == {}
    assert cache.clear() == 0


def test_entry_of_another_user(
    root: Path,
    sources: Path,
    config: KernelConfig,
    compiled: list[str],
    private: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    foreign = KernelCache(root, sources).get(config)
    before = foreign.stat()
    me = os.getuid()
    real = os.stat

    def as_if_theirs(path: Any, **kwargs: Any) -> Any:
        found = real(path, **kwargs)
        if Path(path).is_relative_to(root / "sm_80") and not str(path).endswith(".lock"):
            values = list(found)
            values[4] = me + 1
            return os.stat_result(values)
        return found

    monkeypatch.setattr(os, "stat", as_if_theirs)
    cache = KernelCache(root, sources)
    assert cache.find(config) is None
    with pytest.warns(RuntimeWarning, match=f"owned by user {me + 1}, not by {me}"):
        path = cache.get(config)
    assert path.is_relative_to(private)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.get(config) == path
    assert "owned by user" in cache.verify()[foreign.parent]
    assert len(compiled) == 2
    monkeypatch.undo()
    assert foreign.stat() == before


@pytest.mark.parametrize("name", ["kernel.cubin", "meta.json", "kernel.cu"])
def test_one_file_of_another_user_is_enough(
    root: Path, sources: Path, config: KernelConfig, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = KernelCache(root, sources).get(config)
    real = os.stat

    def as_if_theirs(path: Any, **kwargs: Any) -> Any:
        values = list(real(path, **kwargs))
        values[4] += Path(path).name == name
        return os.stat_result(values)

    monkeypatch.setattr(os, "stat", as_if_theirs)
    with pytest.raises(entry.Foreign):
        entry.read(path.parent)


def test_lock_that_is_never_freed(
    root: Path, sources: Path, config: KernelConfig, private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = KernelCache(root, sources)
    monkeypatch.setattr(cache_module, "LOCK_SECONDS", 0.1)
    folder = root / "sm_80" / f"{config.name}.{cache.digest(config, toolchain.version())}"
    folder.parent.mkdir(parents=True)
    with cache_module._locked(folder), pytest.warns(RuntimeWarning, match="lock"):
        path = cache.get(config)
    assert path.is_relative_to(private)


def test_private_folder_is_made_once_for_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roots, "_private", None)
    assert roots.private_root_if_made() is None
    with ThreadPoolExecutor(8) as pool:
        (folder,) = set(pool.map(lambda _: roots.private_root(), range(8)))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    roots._remove(os.getpid() + 1, folder)  # as a forked child would at its end
    assert folder.is_dir()
    roots._remove(os.getpid(), folder)
    assert not folder.exists()


# Without compiling


def test_no_jit_names_the_kernel_and_the_command(
    root: Path, sources: Path, config: KernelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESSERA_NO_JIT", "1")
    monkeypatch.setenv("TESSERA_CACHE_DIR", str(root))
    cache = KernelCache(None, sources)
    with pytest.raises(KernelMissingError) as error:
        cache.get(config)
    message = str(error.value)
    assert "merge_splits_bf16 for sm_80" in message
    assert str(root) in message
    assert message.endswith("Fix: tessera-cupy cache build --arch sm_80")
    assert not root.exists()
    path = cache.build(config)  # what that command does
    assert cache.get(config) == path


def test_no_jit_command_names_a_folder_that_only_the_caller_knows(
    tmp_path: Path, sources: Path, config: KernelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESSERA_NO_JIT", "1")
    folder = tmp_path / "my cache"
    with pytest.raises(
        KernelMissingError, match=r"Fix: TESSERA_CACHE_DIR='.*/my cache' tessera-cupy cache build"
    ):
        KernelCache(folder, sources).get(config)


def test_no_jit_says_that_an_entry_is_damaged(
    root: Path, sources: Path, config: KernelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = KernelCache(root, sources).get(config)
    os.truncate(path, 10)
    monkeypatch.setenv("TESSERA_NO_JIT", "1")
    with pytest.raises(KernelMissingError, match=r"kernel\.cubin has 10 bytes in place of"):
        KernelCache(root, sources).get(config)
    assert path.stat().st_size == 10


@pytest.mark.parametrize("value", ["", "0", "false", "No", "OFF", " 0 "])
def test_no_jit_can_be_switched_off(
    root: Path, sources: Path, config: KernelConfig, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESSERA_NO_JIT", value)
    assert KernelCache(root, sources).get(config).is_file()


# Looking after it


def test_status_tells_what_is_there_and_what_is_of_use(
    root: Path, sources: Path, config: KernelConfig
) -> None:
    KernelCache(root, sources).get(config)
    (sources / "common" / "factor.cuh").write_text("inline constexpr float kFactor = 3.0f;\n")
    cache = KernelCache(root, sources)
    path = cache.get(config)
    cache.get(catalog("sm_120a")[-2])
    shutil.copytree(path.parent, root / "sm_70" / path.parent.name)
    (root / "sm_80" / "somebody's folder").mkdir()
    found = {(e.arch, e.name, e.current) for e in cache.status()}
    assert found == {
        ("sm_80", "merge_splits_bf16", False),
        ("sm_80", "merge_splits_bf16", True),
        ("sm_120a", "merge_splits_fp16", True),
        ("sm_70", "merge_splits_bf16", False),
    }
    (mine,) = (e for e in cache.status() if e.path == path.parent)
    assert f"{mine.name}.{mine.digest}" == path.parent.name
    assert mine.bytes == sum(file.stat().st_size for file in path.parent.iterdir())


def test_status_of_a_cache_that_does_not_exist(root: Path) -> None:
    cache = KernelCache(root)
    assert cache.status() == []
    assert cache.verify() == {}
    assert cache.clear() == 0
    assert not root.exists()


def test_clear_removes_kernels_and_nothing_else(
    root: Path, sources: Path, config: KernelConfig
) -> None:
    cache = KernelCache(root, sources)
    path = cache.get(config)
    cache.get(catalog("sm_90a")[-1])
    other = root / "sm_80" / "somebody's folder"
    other.mkdir()
    leftover = path.parent.with_name(f".{path.parent.name}.tmp")
    leftover.mkdir()
    assert cache.clear("sm_90") == 1
    assert [e.arch for e in cache.status()] == ["sm_80"]
    assert leftover.exists()
    assert cache.clear() == 1
    assert cache.status() == []
    assert other.exists()
    assert not leftover.exists()
    with pytest.raises(ValueError, match="arch"):
        cache.clear("sm_1")


def test_clear_removes_what_a_killed_process_left(
    root: Path, sources: Path, config: KernelConfig
) -> None:
    leftover = root / "sm_80" / f".{config.name}.{'0' * 16}.tmp"
    leftover.mkdir(parents=True)
    assert KernelCache(root, sources).clear() == 0
    assert not leftover.exists()


def test_a_file_with_the_name_of_a_kernel_is_none(
    root: Path, sources: Path, config: KernelConfig
) -> None:
    cache = KernelCache(root, sources)
    path = cache.get(config)
    stray = root / "sm_80" / f"attend.{'0' * 16}"
    stray.write_text("mine")
    assert [found.path for found in cache.status()] == [path.parent]
    assert cache.verify() == {}
    assert cache.clear() == 1
    assert cache.status() == []
    assert stray.read_text() == "mine"


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_is_in_the_place_of_a_kernel_gives_way(
    root: Path, sources: Path, config: KernelConfig, kind: str, tmp_path: Path
) -> None:
    cache = KernelCache(root, sources)
    folder = root / "sm_80" / f"{config.name}.{cache.digest(config, toolchain.version())}"
    folder.parent.mkdir(parents=True)
    for place in (folder, folder.with_name(f".{folder.name}.tmp")):
        if kind == "file":
            place.write_text("")
        else:
            place.symlink_to(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.get(config).parent == folder
    assert not folder.is_symlink()
    assert sources.is_dir()
    assert cache.verify() == {}


def test_clear_goes_on_after_a_kernel_that_cannot_be_removed(
    root: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = KernelCache(root, sources)
    paths = sorted(cache.get(c).parent for c in (*catalog("sm_80")[-2:], catalog("sm_90a")[-1]))
    real = shutil.rmtree

    def refuses(path: Path, *args: Any, **kwargs: Any) -> None:
        if path == paths[0]:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        real(path, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", refuses)
    words = r"2 kernels were removed, 1 cannot be: .*Permission denied.*\. Fix: "
    with pytest.raises(OSError, match=words):
        cache.clear()
    assert [found.path for found in cache.status()] == paths[:1]


def test_clear_leaves_a_folder_beside_which_something_unfinished_lies(root: Path) -> None:
    mine = root / "sm_80" / "mine"
    mine.mkdir(parents=True)
    (root / "sm_80" / ".mine.tmp").mkdir()
    assert KernelCache(root).clear() == 0
    assert mine.is_dir()
    assert (root / "sm_80" / ".mine.tmp").is_dir()


@pytest.mark.parametrize("kind", ["long", "file", "below a file"])
def test_a_root_that_can_be_none_is_said_to_be_none(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").write_text("")
    name, reason = {
        "long": ("x" * 300, "File name too long"),
        "file": ("file", "it is no folder"),
        "below a file": ("file/cache", "Not a directory"),
    }[kind]
    cache = KernelCache(tmp_path / name)
    words = f"The kernel cache .*{name} cannot be used: {reason}. Fix: let TESSERA_CACHE_DIR"
    for look in (cache.status, cache.verify, cache.clear):
        with pytest.raises(OSError, match=words):
            look()


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TESSERA_CACHE_DIR", "~/kernels")
    assert KernelCache().root == tmp_path / "kernels"
    monkeypatch.setenv("TESSERA_CACHE_DIR", "~nobody-of-this-name/kernels")
    assert KernelCache().root is None


def test_folder_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_CACHE_DIR", str(tmp_path / "a"))
    first = default_cache()
    assert first.root == tmp_path / "a"
    assert default_cache() is first
    monkeypatch.setenv("TESSERA_CACHE_DIR", str(tmp_path / "b"))
    assert default_cache().root == tmp_path / "b"
    monkeypatch.setenv("TESSERA_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert KernelCache().root == tmp_path / "tessera-cupy"
    monkeypatch.delenv("TESSERA_CACHE_DIR")
    assert KernelCache().root == tmp_path / "tessera-cupy"
    monkeypatch.setenv("TESSERA_CACHE_DIR", "relative")
    monkeypatch.chdir(tmp_path)
    assert KernelCache().root == tmp_path / "relative"
