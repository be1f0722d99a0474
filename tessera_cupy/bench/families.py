"""The block families of the published evaluation, and the density that each has there.

A family is a block size and a share of the key blocks that SPADE's top-k keeps. The published
mean densities are over 2,315 masks of several models. ``keep`` is what gives these densities
here, at 57,600 tokens on the clips of :mod:`tessera_cupy.bench.clips`: sinks and diagonal add
the rest, up to two points of a hundred where blocks are large. "HD" and "DD" are about half
and one and a half times the density of Q64K64.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """One family of masks.

    Attributes:
        name: as published, such as ``Q64K32``: query rows and key columns of a block.
        block_size: (query, key) tokens of a block.
        keep: fraction of the key blocks that top-k keeps in each row.
        density: published mean density of its masks, a fraction.
    """

    name: str
    block_size: tuple[int, int]
    keep: float
    density: float


#: Every family, in the order of the published table; ``dense`` keeps every block.
FAMILIES = (
    Family("dense", (128, 128), 1.0, 1.0),
    Family("Q128K128", (128, 128), 0.085, 0.0991),
    Family("Q128K64", (128, 64), 0.092, 0.0991),
    Family("Q64K64-HD", (64, 64), 0.046, 0.0535),
    Family("Q64K64", (64, 64), 0.113, 0.1195),
    Family("Q64K64-DD", (64, 64), 0.176, 0.1820),
    Family("Q64K32", (64, 32), 0.097, 0.1007),
    Family("Q32K32", (32, 32), 0.095, 0.0976),
    Family("Q32K16", (32, 16), 0.097, 0.0989),
    Family("Q16K16", (16, 16), 0.096, 0.0979),
)

#: Where their masks may be from: SPADE's rule on video frames, or drawn at random.
MASKS = ("spade", "random")
