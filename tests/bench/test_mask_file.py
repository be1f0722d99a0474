"""Masks in a file: what is there is read, what lacks is made and added, nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera_cupy.bench import mask_file
from tessera_cupy.bench.corpus import Source
from tessera_cupy.bench.families import Family
from tessera_cupy.bench.mask_file import cached_bits
from tessera_cupy.video import VideoGrid

GRID = VideoGrid(2, 8, 16)
ONE = Source("bikes", GRID, heads=2, head_dim=32)
OTHER = Source("carphone_pristine", GRID, heads=2, head_dim=32)
COARSE, FINE = Family("Q64K64", (64, 64), 0.5, 0.5), Family("Q32K32", (32, 32), 0.5, 0.5)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What had to be made, as (clip, family); the masks themselves are random."""
    log: list[tuple[str, str]] = []
    rng = np.random.default_rng(0)

    def spade_bits(source: Source, families: Any, on_mask: Any, to_device: Any) -> Any:
        for _ in range(len(families) * source.heads):
            on_mask()
        log.extend((source.clip, family.name) for family in families)
        return {f.name: rng.integers(0, 256, (source.heads, 4, 2), np.uint8) for f in families}

    monkeypatch.setattr(mask_file, "spade_bits", spade_bits)
    return log


def test_a_second_run_makes_nothing_and_reads_the_same(
    tmp_path: Path, made: list[tuple[str, str]]
) -> None:
    path = tmp_path / "new folder" / "masks.npz"
    ticks: list[int] = []
    first = cached_bits(path, [ONE, OTHER], [COARSE, FINE], lambda: ticks.append(1))
    assert len(ticks) == 8
    assert len(made) == 4
    written = path.stat().st_mtime_ns
    second = cached_bits(path, [ONE, OTHER], [COARSE, FINE], lambda: ticks.append(1))
    assert len(ticks) == 16
    assert len(made) == 4
    assert path.stat().st_mtime_ns == written
    assert list(path.parent.iterdir()) == [path]
    assert (
        set(first)
        == set(second)
        == {
            (clip, name) for clip in ("bikes", "carphone_pristine") for name in ("Q64K64", "Q32K32")
        }
    )
    for key, bits in first.items():
        assert (second[key] == bits).all()
    assert (first["bikes", "Q64K64"] != first["carphone_pristine", "Q64K64"]).any()


def test_only_what_lacks_is_made_and_the_rest_stays(
    tmp_path: Path, made: list[tuple[str, str]]
) -> None:
    path = tmp_path / "masks.npz"
    first = cached_bits(path, [ONE], [COARSE], lambda: None)
    ticks: list[int] = []
    both = cached_bits(path, [ONE, OTHER], [COARSE, FINE], lambda: ticks.append(1))
    assert len(ticks) == 8
    assert made[1:] == [
        ("bikes", "Q32K32"),
        ("carphone_pristine", "Q64K64"),
        ("carphone_pristine", "Q32K32"),
    ]
    assert (both["bikes", "Q64K64"] == first["bikes", "Q64K64"]).all()
    cached_bits(path, [ONE], [COARSE], lambda: None)
    assert len(made) == 4


@pytest.mark.parametrize(
    ("source", "family"),
    [
        (Source("bikes", GRID, heads=3, head_dim=32), COARSE),
        (Source("bikes", GRID, heads=2, head_dim=64), COARSE),
        (Source("bikes", VideoGrid(2, 16, 8), heads=2, head_dim=32), COARSE),
        (ONE, Family("Q64K64", (64, 64), 0.4, 0.5)),
    ],
    ids=["heads", "head dim", "grid", "keep"],
)
def test_a_mask_of_another_definition_is_made_anew(
    source: Source, family: Family, tmp_path: Path, made: list[tuple[str, str]]
) -> None:
    path = tmp_path / "masks.npz"
    cached_bits(path, [ONE], [COARSE], lambda: None)
    cached_bits(path, [source], [family], lambda: None)
    assert len(made) == 2


def test_without_a_file_masks_are_made_each_time(made: list[tuple[str, str]]) -> None:
    cached_bits(None, [ONE], [COARSE], lambda: None)
    cached_bits(None, [ONE], [COARSE], lambda: None)
    assert len(made) == 2


@pytest.mark.parametrize("kind", ["text", "empty", "array", "truncated", "flipped"])
def test_a_file_that_is_no_archive_is_named_and_left_alone(
    kind: str, tmp_path: Path, made: list[tuple[str, str]]
) -> None:
    path = tmp_path / "masks.npz"
    cached_bits(path, [ONE], [COARSE], lambda: None)
    content = bytearray(path.read_bytes())
    if kind == "text":
        content = bytearray(b"masks")
    elif kind == "empty":
        content = bytearray()
    elif kind == "truncated":
        content = content[:-40]
    elif kind == "flipped":
        content[len(content) // 3] ^= 255
    path.write_bytes(content)
    if kind == "array":
        with path.open("wb") as file:
            np.save(file, np.zeros(3))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"`mask_cache`: expected an archive.*masks\.npz"):
        cached_bits(path, [ONE], [COARSE], lambda: None)
    assert path.read_bytes() == before


def test_a_failed_write_leaves_the_old_file_and_no_other(
    tmp_path: Path, made: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "masks.npz"
    cached_bits(path, [ONE], [COARSE], lambda: None)
    before = path.read_bytes()

    def full(file: Any, **arrays: Any) -> None:
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(OSError, match="disk full"):
        cached_bits(path, [ONE], [FINE], lambda: None)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
