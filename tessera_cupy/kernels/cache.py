"""The kernel cache: cubins that outlive the process, built where they are missing.

The root is ``$TESSERA_CACHE_DIR``, or ``tessera-cupy`` in the user's cache folder. Where it
cannot be used, one warning is given and the process builds what it needs in a private
temporary folder that goes away with it. ``TESSERA_NO_JIT=1`` forbids compiling; 0, false, no
and off are as if it were not set.
"""

from __future__ import annotations

import os
import re
import shlex
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from tessera_cupy.errors import KernelCompileError, KernelMissingError
from tessera_cupy.kernels import entry, roots, toolchain
from tessera_cupy.kernels.arch import ARCHS, get_arch
from tessera_cupy.kernels.build import compile_cubin
from tessera_cupy.kernels.catalog import KernelConfig, catalog, timed
from tessera_cupy.kernels.specialise import read_sources, source

#: Longest wait for another process that compiles the same kernel, seconds.
LOCK_SECONDS = 300.0

_OFF = ("", "0", "false", "no", "off")
_FOLDER = re.compile(r"([a-z0-9_]+)\.([0-9a-f]{16})")


@dataclass(frozen=True)
class Entry:
    """A kernel in the cache.

    Attributes:
        arch, name, digest: what it is; the digest covers sources, options and NVRTC.
        path: its folder.
        bytes: size of its files.
        current: whether this version of the package, with this NVRTC, would use it.
    """

    arch: str
    name: str
    digest: str
    path: Path
    bytes: int
    current: bool


class KernelCache:
    """Finds the cubin of a catalog entry, and compiles it when it is not there.

    Safe for many threads and processes at a time: each kernel is compiled once. The CUDA
    sources are read once, so that an edit is seen by the next process.

    Args:
        root: folder of the cache; None means the user's (see the module).
        sources: folder of the CUDA sources; None means the package's.

    Example:
        >>> from tessera_cupy.kernels.catalog import catalog
        >>> KernelCache().get(catalog("sm_90a")[-1]).name
        'kernel.cubin'
    """

    def __init__(self, root: Path | None = None, sources: Path | None = None) -> None:
        self._given_root = root
        self.sources = sources
        self._warning = threading.Lock()
        self._warned = False

    @cached_property
    def root(self) -> Path | None:
        """Folder of the cache; None when there is no home folder to keep one in."""
        if self._given_root is None:
            return roots.user_root()
        return Path(self._given_root).absolute()

    def get(self, config: KernelConfig) -> Path:
        """The cubin of a catalog entry.

        One that is there is returned within a few milliseconds and without loading NVRTC; its
        hash is checked. One that is missing or damaged is compiled, which takes seconds.

        Raises:
            KernelMissingError: it would have to be compiled, and ``TESSERA_NO_JIT`` is set.
            KernelCompileError: NVRTC is missing or refuses the source.
        """
        path, reason = self._find(config)
        if path is not None:
            return path
        if os.environ.get("TESSERA_NO_JIT", "").strip().lower() not in _OFF:
            reason = reason or str(self.root or "there is no home folder")
            raise KernelMissingError(
                f"Kernel {config.name} for {config.arch} is not in the cache ({reason}), and "
                f"TESSERA_NO_JIT forbids compiling it. Fix: {self._fix(config)}"
            )
        return self.build(config)

    def find(self, config: KernelConfig) -> Path | None:
        """The cubin of a catalog entry if it is there and whole, else None; never compiles."""
        return self._find(config)[0]

    def build(self, config: KernelConfig) -> Path:
        """As :meth:`get`, whatever ``TESSERA_NO_JIT`` says.

        Raises:
            KernelCompileError: NVRTC is missing or refuses the source.
        """
        root = self.usable_root(config.arch)
        try:
            return self.build_in(root, config)
        # filelock raises NotImplementedError where a file system has no locks.
        except (OSError, NotImplementedError, entry.Foreign) as error:
            if root != self.root:
                raise
            self._warn(str(error))
            return self.build_in(roots.private_root(), config)

    def build_in(self, root: Path, config: KernelConfig) -> Path:
        """As :meth:`build`, under this root or not at all.

        Raises:
            KernelCompileError: NVRTC is missing or refuses the source.
            OSError: the root cannot be written.
            entry.Foreign: another user has put an entry there.
        """
        nvrtc = toolchain.version()
        key = self.digest(config, nvrtc)
        folder = roots.make(root, config.arch) / f"{config.name}.{key}"
        with _locked(folder):
            try:
                if entry.read(folder) is not None:  # another thread or process was faster
                    return folder / entry.CUBIN
            except entry.Foreign:
                raise
            except entry.Unusable:
                pass
            begin = time.perf_counter()
            # Not the name of the file that it includes.
            unit = f"{config.name}.entry.cu"
            result = compile_cubin(source(config), unit, config.arch, self._sources)
            seconds = time.perf_counter() - begin
            entry.write(folder, config, key, nvrtc, result, seconds)
        return folder / entry.CUBIN

    def usable_root(self, arch: str) -> Path:
        """The root if an architecture's kernels can be written there, else the private folder.

        Warns, once, when it is the latter.
        """
        if self.root is None:
            self._warn("there is no home folder, and TESSERA_CACHE_DIR names no other")
            return roots.private_root()
        try:
            folder = roots.make(self.root, arch)
            if not os.access(folder, os.W_OK):
                raise PermissionError(f"{folder} cannot be written")
        except OSError as error:
            self._warn(str(error))
            return roots.private_root()
        return self.root

    def digest(self, config: KernelConfig, nvrtc: str) -> str:
        """Key of a catalog entry when compiled by this version of NVRTC, 16 hex digits."""
        return entry.digest(config, self._sources, nvrtc)

    def status(self) -> list[Entry]:
        """Every kernel that is in the cache, of whatever version, by architecture and name.

        Only looks at names and sizes; :meth:`verify` reads the files.

        Raises:
            OSError: the root is no folder.
        """
        versions = list(_versions())
        found = []
        for folder, name, key in self._folders():
            arch = folder.parent.name
            current = any(
                config.name == name and self.digest(config, nvrtc) == key
                for config in _entries(arch)
                for nvrtc in versions
            )
            size = 0
            with suppress(OSError):  # another process may be clearing it
                size = sum(path.stat().st_size for path in folder.iterdir())
            found.append(Entry(arch, name, key, folder, size, current))
        return found

    def verify(self) -> dict[Path, str]:
        """Check every kernel in the cache against its recorded size and hash.

        Returns:
            What is wrong, by folder; empty when all is well. :meth:`get` would compile a
            damaged kernel anew, and leave another user's alone.

        Raises:
            OSError: the root is no folder.
        """
        found: dict[Path, str] = {}
        for folder, _, _ in self._folders():
            try:
                entry.read(folder)
            except (entry.Unusable, OSError) as error:
                found[folder] = str(error)
        return found

    def clear(self, arch: str | None = None) -> int:
        """Remove kernels from the cache.

        Args:
            arch: only those of this architecture.

        Returns:
            How many were removed.

        Raises:
            ValueError: an unknown architecture.
            OSError: the root is no folder, or a kernel cannot be removed; all others are.
        """
        only = None if arch is None else get_arch(arch).name
        folders = [folder for folder, _, _ in self._folders()]
        if self.root is not None:
            left = (path for arch in ARCHS for path in entry.unfinished(self.root / arch))
            folders += [path for path in left if _FOLDER.fullmatch(path.name)]
        removed, kept = 0, []
        for folder in folders:
            if only not in (None, folder.parent.name):
                continue
            try:
                with _locked(folder):
                    removed += entry.remove(folder)
            except OSError as error:
                kept.append(error)
        if kept:
            raise OSError(
                f"{removed} kernels were removed, {len(kept)} cannot be: {kept[0]}. Fix: remove "
                "what is there by hand."
            ) from kept[0]
        return removed

    @cached_property
    def _sources(self) -> dict[str, bytes]:
        return read_sources(self.sources)

    def _find(self, config: KernelConfig) -> tuple[Path | None, str]:
        """The cubin, or None and why an entry that is there cannot be used."""
        reason = ""
        for nvrtc in _versions():
            name = f"{config.name}.{self.digest(config, nvrtc)}"
            for root in (self.root, roots.private_root_if_made()):
                if root is None:
                    continue
                folder = root / config.arch / name
                try:
                    if entry.read(folder) is not None:
                        return folder / entry.CUBIN, ""
                except (entry.Unusable, OSError) as error:
                    reason = str(error)
        return None, reason

    def _folders(self) -> Iterator[tuple[Path, str, str]]:
        """Folder, name and digest of every entry; nothing else in the root is looked at."""
        if self.root is None or not roots.check(self.root):
            return
        for folder in sorted(self.root.glob("sm_*/*.*")):
            match = _FOLDER.fullmatch(folder.name)
            if match is not None and folder.is_dir():
                yield folder, match[1], match[2]

    def _fix(self, config: KernelConfig) -> str:
        if config.timed:
            return "unset TESSERA_NO_JIT; kernels that keep time are only built when asked for"
        command = f"tessera-cupy cache build --arch {config.arch}"
        if self._given_root is None:
            return command
        return f"TESSERA_CACHE_DIR={shlex.quote(str(self.root))} {command}"

    def _warn(self, reason: str) -> None:
        with self._warning:
            if self._warned:
                return
            self._warned = True
        warnings.warn(
            f"The kernel cache cannot be used: {reason}. Kernels are compiled for this process "
            f"only. Fix: {roots.FIX}.",
            RuntimeWarning,
            stacklevel=3,
        )


def default_cache() -> KernelCache:
    """The cache that launches use: one object a process for each ``TESSERA_CACHE_DIR``."""
    return _default(os.environ.get("TESSERA_CACHE_DIR"))


@cache
def _default(_folder: str | None) -> KernelCache:
    return KernelCache()


def _entries(arch: str) -> Iterator[KernelConfig]:
    """All that is used here; nothing of an architecture of another version of the package."""
    for config in catalog(arch) if arch in ARCHS else ():
        yield config
        if config.attends:
            yield timed(config)


def _versions() -> Iterator[str]:
    """Versions that kernels may have been compiled with; the likely one costs no loading."""
    expected = toolchain.expected_version()
    if expected is not None:
        yield expected
    with suppress(KernelCompileError):
        actual = toolchain.version()
        if actual != expected:
            yield actual


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of an entry; the system frees it when the holder dies.

    Raises:
        OSError: no lock file can be made, or another process kept it for too long.
    """
    from filelock import FileLock  # slow to import, and only needed where something is built

    # A lock object of one's own also keeps the threads of this process apart.
    with FileLock(folder.parent / f".{folder.name}.lock", timeout=LOCK_SECONDS):
        yield
