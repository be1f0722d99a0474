"""Where kernels are kept: the user's cache folder, or a private one of this process."""

from __future__ import annotations

import atexit
import os
import shutil
import stat
import tempfile
import threading
from pathlib import Path

from platformdirs import user_cache_path

#: What to do about a root that cannot be used.
FIX = "let TESSERA_CACHE_DIR name a folder that you own and can write"

_private: tuple[int, Path] | None = None
_making = threading.Lock()


def user_root() -> Path | None:
    """``$TESSERA_CACHE_DIR``, or ``tessera-cupy`` in the user's cache folder.

    A ``~`` in front stands for the home folder, also where no shell has seen the variable.

    Returns:
        None when there is no home folder.
    """
    given = os.environ.get("TESSERA_CACHE_DIR")
    try:
        if given:
            return Path(given).expanduser().absolute()
        path = user_cache_path("tessera-cupy")
    except RuntimeError:
        return None
    # Older versions of platformdirs answer "~/.cache/..." without a home, which would be made
    # in the current folder.
    return path if path.is_absolute() else None


def check(root: Path) -> bool:
    """Whether the folder of the cache is there.

    Raises:
        OSError: something is there that is no folder, or nothing of that name can be.
    """
    try:
        if stat.S_ISDIR(root.stat().st_mode):
            return True
        reason = "it is no folder"
    except FileNotFoundError:
        return False
    except OSError as error:
        reason = error.strerror or str(error)
    raise OSError(f"The kernel cache {root} cannot be used: {reason}. Fix: {FIX}.")


def make(root: Path, arch: str) -> Path:
    """Make the folder of an architecture, and the root, readable by this user alone.

    Raises:
        OSError: one of them is not there and cannot be made.
    """
    folder = root / arch
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def private_root() -> Path:
    """A folder of this process alone, removed when it exits."""
    global _private
    with _making:
        found = private_root_if_made()
        if found is None:
            found = Path(tempfile.mkdtemp(prefix="tessera-cupy-"))  # mode 0700
            _private = (os.getpid(), found)
            atexit.register(_remove, os.getpid(), found)
        return found


def private_root_if_made() -> Path | None:
    """The private folder, if this process has one; a forked child starts without."""
    if _private is None or _private[0] != os.getpid():
        return None
    return _private[1]


def _remove(pid: int, folder: Path) -> None:
    if pid == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)
