"""What a long measurement does before it begins and when it is told to end."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tessera_cupy.errors import KernelCompileError
from tessera_cupy.kernels.batch import build_all
from tessera_cupy.kernels.catalog import catalog


def build_kernels(arch: str, dtype: str) -> int:
    """Compile what is missing of an architecture's kernels for a dtype, on all cores.

    Otherwise each would be compiled in the middle of measuring, one after the other.

    Returns:
        How many were missing.

    Raises:
        KernelCompileError: one cannot be compiled.
    """
    wanted = [config for config in catalog(arch) if config.dtype in (dtype, "")]
    outcomes = build_all(wanted)
    failed = next((outcome for outcome in outcomes if outcome.error), None)
    if failed is not None:
        raise KernelCompileError(f"{failed.config.name} cannot be compiled: {failed.error}")
    return sum(outcome.built for outcome in outcomes)


@contextmanager
def ended_by_signal() -> Iterator[None]:
    """Let SIGTERM, as of ``timeout``, end the work as an exit does: what was measured is written.

    Outside of the main thread, which alone may, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: Any) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
