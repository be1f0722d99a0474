"""A mask as a few lines of text: the repr of BlockMask and KeySlices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tessera_cupy.masks.bits import counts, entry_sizes
from tessera_cupy.masks.entries import Entries

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tessera_cupy.masks.block_mask import BlockMask

_LINES, _COLUMNS = 8, 32
_HALVES = " ▀▄█"
_SHADES = " ░▒▓█"


def draw(mask: BlockMask) -> str:
    """One line of figures, then the first head's blocks.

    A small mask is drawn block by block, two rows to a line. A larger one is binned,
    and a character's shade is the fraction of its blocks that are active, so that a
    blank is a bin with none. One with token bits is shaded, too, whatever its size: a block
    counts by the fraction of its pairs that are active.
    """
    nq, nk = mask.num_blocks
    sides = f"{nq}x{nk} blocks of {mask.block_size[0]}x{mask.block_size[1]}"
    parts = [
        f"batch {mask.batch}, heads {mask.heads}",
        f"{sides} (ragged)" if mask.ragged else sides,
        f"{mask.shape[0]}x{mask.shape[1]} tokens",
        f"density {mask.density():.3g}",
        f"run coverage {mask.run_coverage():.2f}",
    ]
    if len(mask.token_bits):
        parts.append(f"{np.count_nonzero(mask.partial >= 0)} partial")
    shares = _shares(mask) if len(mask.token_bits) else None
    lines = picture(mask.num_blocks, mask.indptr, mask.indices, shares)
    return "\n".join([f"BlockMask({', '.join(parts)})", *lines])


def _shares(mask: BlockMask) -> NDArray[np.float64]:
    """Fraction of the pairs of each of the first head's entries that are active."""
    end = mask.indptr[mask.num_blocks[0]]
    shares = np.ones(end)
    some = np.flatnonzero(mask.partial[:end] >= 0)
    entries = Entries(mask.indptr, mask.indices, mask.partial, mask.token_bits)
    rows, columns = entry_sizes(entries, mask, some)
    shares[some] = counts(mask.token_bits[mask.partial[some]]) / (rows * columns)
    return shares


def picture(
    num_blocks: tuple[int, int],
    indptr: NDArray[np.int64],
    indices: NDArray[np.int32],
    shares: NDArray[np.float64] | None = None,
) -> list[str]:
    """The first head's rows of a CSR map, as lines of text.

    Args:
        num_blocks: (rows, columns) of a head.
        indptr: offsets of all heads' rows.
        indices: columns.
        shares: of the first head's entries, how much each counts, for shades; None is 1 each.
    """
    nq, nk = num_blocks
    if not nq or not nk:
        return []
    exact = nq <= 2 * _LINES and nk <= _COLUMNS and shares is None
    height, width = (nq, nk) if exact else (min(nq, _LINES), min(nk, _COLUMNS))
    counts = np.diff(indptr[: nq + 1])
    rows = np.repeat(np.arange(nq) * height // nq, counts)
    columns = indices[: indptr[nq]].astype(np.int64) * width // nk
    places = rows * width + columns
    hits = np.bincount(places, shares, minlength=height * width).reshape(height, width)
    cells = _halves(hits > 0) if exact else _shades(hits, nq, nk)
    return [f"│{line}│" for line in cells]


def _halves(active: NDArray[np.bool_]) -> list[str]:
    padded = np.zeros((len(active) + len(active) % 2, active.shape[1]), np.int64)
    padded[: len(active)] = active
    return _text(_HALVES, padded[::2] + 2 * padded[1::2])


def _shades(hits: NDArray[np.int64] | NDArray[np.float64], nq: int, nk: int) -> list[str]:
    height, width = hits.shape
    tall = np.bincount(np.arange(nq) * height // nq)
    wide = np.bincount(np.arange(nk) * width // nk)
    fraction = hits / (tall[:, None] * wide)
    return _text(_SHADES, np.ceil(fraction * (len(_SHADES) - 1)).astype(np.int64))


def _text(glyphs: str, levels: NDArray[np.int64]) -> list[str]:
    return ["".join(glyphs[level] for level in line) for line in levels.tolist()]
