"""One kernel on disk: a folder with its source, its cubin and what is known of them.

``<arch>/<name>.<digest>/`` holds ``kernel.cu``, ``kernel.cubin`` and ``meta.json``. The folder
is written under another name and renamed when it is complete, so a reader sees all of it or
nothing, and one that was damaged later is told by sizes and hashes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tessera_cupy.errors import TesseraError
from tessera_cupy.kernels.build import BuildResult, options, problems
from tessera_cupy.kernels.catalog import KernelConfig
from tessera_cupy.kernels.specialise import source

SOURCE, CUBIN, META = "kernel.cu", "kernel.cubin", "meta.json"
FORMAT = 1

_TEMPORARY = ".{}.tmp"


class Unusable(TesseraError):
    """An entry is there but must not be used; the text says why. The caller may rebuild it."""


class Foreign(Unusable):
    """An entry belongs to another user, who could have put anything into it."""


def digest(config: KernelConfig, sources: Mapping[str, bytes], nvrtc: str) -> str:
    """Key of one build: everything that its result depends on.

    Args:
        config: the catalog entry.
        sources: all CUDA sources by name. A change in any of them counts, wherever it is
            included, and whatever its modification time.
        nvrtc: version of NVRTC.
    """
    hashed = hashlib.sha256()
    parts = [str(FORMAT), nvrtc, config.arch, *options(config.arch), source(config)]
    for part in [part.encode() for part in parts] + [
        item for name, content in sources.items() for item in (name.encode(), content)
    ]:
        # The length in front keeps neighbouring parts apart.
        hashed.update(len(part).to_bytes(8, "little"))
        hashed.update(part)
    return hashed.hexdigest()[:16]


def read(folder: Path) -> dict[str, Any] | None:
    """Read what is known of an entry, and check its cubin against it.

    Returns:
        The contents of ``meta.json``, or None when there is no entry.

    Raises:
        Foreign: another user owns the folder or a file in it.
        Unusable: a file is missing, truncated or damaged.
    """
    try:
        _check_owner(folder)
    except FileNotFoundError:
        return None
    try:
        for name in (SOURCE, CUBIN, META):
            _check_owner(folder / name)
        meta = json.loads((folder / META).read_bytes())
        expected = meta["cubin"]
        cubin = (folder / CUBIN).read_bytes()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Unusable(f"{type(error).__name__}: {error}") from error
    if meta.get("format") != FORMAT or f"{meta.get('name')}.{meta.get('digest')}" != folder.name:
        raise Unusable(f"{META} belongs to another kernel")
    if len(cubin) != expected["bytes"]:
        raise Unusable(f"{CUBIN} has {len(cubin)} bytes in place of {expected['bytes']}")
    if hashlib.sha256(cubin).hexdigest() != expected["sha256"]:
        raise Unusable(f"{CUBIN} is damaged: its SHA-256 is not the one in {META}")
    assert isinstance(meta, dict)
    return meta


def write(
    folder: Path, config: KernelConfig, key: str, nvrtc: str, result: BuildResult, seconds: float
) -> None:
    """Publish an entry: all of it, or nothing. The caller holds the entry's lock.

    Raises:
        OSError: the folder cannot be written.
    """
    text = source(config)
    meta = {
        "format": FORMAT,
        "name": config.name,
        "digest": key,
        "arch": config.arch,
        "nvrtc": nvrtc,
        "options": options(config.arch),
        "config": asdict(config),
        "entry": config.entry,
        "smem_bytes": config.smem_bytes,
        "resources": asdict(result.resources) if result.resources else None,
        "problems": problems(result),
        "seconds": round(seconds, 3),
        "cubin": {
            "bytes": len(result.cubin),
            "sha256": hashlib.sha256(result.cubin).hexdigest(),
        },
    }
    temporary = _temporary(folder)
    # Under the lock, whatever bears this name was left behind by a process that was killed.
    _clear_away(temporary)
    temporary.mkdir(mode=0o700)
    try:
        _write(temporary / SOURCE, text.encode())
        _write(temporary / CUBIN, result.cubin)
        _write(temporary / META, json.dumps(meta, indent=1).encode())
        _sync(temporary)
        _clear_away(folder)  # a damaged entry
        temporary.rename(folder)
        _sync(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def remove(folder: Path) -> bool:
    """Remove an entry and what a killed process left of it. The caller holds the entry's lock.

    Returns:
        Whether there was an entry.

    Raises:
        OSError: it cannot be removed.
    """
    _clear_away(_temporary(folder))
    return _clear_away(folder)


def unfinished(folder: Path) -> list[Path]:
    """The entries of an architecture's folder that a process was killed while writing."""
    suffix = _TEMPORARY.format("")[1:]
    found = folder.glob(_TEMPORARY.format("*"))
    return [path.with_name(path.name[1:].removesuffix(suffix)) for path in found]


def _temporary(folder: Path) -> Path:
    """Where an entry is written before it is whole."""
    return folder.with_name(_TEMPORARY.format(folder.name))


def _clear_away(path: Path) -> bool:
    """Remove a folder, or a file or link in its place; whether there was anything."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
        return True
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def _check_owner(path: Path) -> None:
    owner = os.stat(path).st_uid
    if hasattr(os, "getuid") and owner != os.getuid():
        raise Foreign(f"{path} is owned by user {owner}, not by {os.getuid()}")


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
