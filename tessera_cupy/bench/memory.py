"""How much memory this process can have, to refuse work that cannot fit before it starts."""

from __future__ import annotations

import os
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_LIMIT = Path("/sys/fs/cgroup/memory.max")


def available() -> int | None:
    """Bytes that a process can still take without swapping; None where the system does not say.

    On Linux what the kernel estimates, and no more than a container's limit; elsewhere the
    memory of the machine.
    """
    free = _meminfo()
    if free is None:
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (AttributeError, ValueError, OSError):
            return None
    try:
        return min(free, int(_LIMIT.read_text()))
    except (OSError, ValueError):  # not in a container, or one without a limit ("max")
        return free


def _meminfo() -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return 1024 * int(found[0]) if found else None
