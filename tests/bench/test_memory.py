"""What memory the system says is free, on Linux, in a container and elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera_cupy.bench import memory


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """What stands for the kernel's estimate, of 5,000 KiB, and for a container's limit."""
    meminfo, limit = tmp_path / "meminfo", tmp_path / "memory.max"
    meminfo.write_text("MemTotal:       9000 kB\nMemAvailable:   5000 kB\nCached: 1 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", meminfo)
    monkeypatch.setattr(memory, "_LIMIT", limit)
    return meminfo, limit


def test_the_kernels_estimate(files: tuple[Path, Path]) -> None:
    assert memory.available() == 5000 * 1024


@pytest.mark.parametrize(
    ("limit", "expected"), [("max\n", 5_120_000), ("1000000\n", 1_000_000), ("9000000", 5_120_000)]
)
def test_a_containers_limit_counts_where_it_is_lower(
    limit: str, expected: int, files: tuple[Path, Path]
) -> None:
    files[1].write_text(limit)
    assert memory.available() == expected


def test_elsewhere_the_memory_of_the_machine(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    files[0].unlink()
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}
    monkeypatch.setattr(memory.os, "sysconf", pages.__getitem__, raising=False)
    assert memory.available() == 4_096_000
    monkeypatch.delattr(memory.os, "sysconf")
    assert memory.available() is None
