"""A few numbers of a mask's contents, as a GPU counts them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MaskSummary:
    """What a GPU found in a mask.

    Attributes:
        blocks: blocks of all heads, on or off, without absent ones.
        nnz: blocks that are on.
        in_runs: of those, the ones in horizontal runs of two or more.

    >>> MaskSummary(blocks=100, nnz=10, in_runs=5).run_coverage
    0.5
    """

    blocks: int
    nnz: int
    in_runs: int

    @property
    def density(self) -> float:
        """Kept fraction of the blocks; 0 without any."""
        return self.nnz / self.blocks if self.blocks else 0.0

    @property
    def run_coverage(self) -> float:
        """Fraction of active blocks in runs; 0 for an empty mask."""
        return self.in_runs / self.nnz if self.nnz else 0.0
