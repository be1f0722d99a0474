"""Sparse attention over several GPUs."""

from tessera_cupy.parallel.degrees import Degrees
from tessera_cupy.parallel.heads import Deal
from tessera_cupy.parallel.schedule import Schedule, make_schedule
from tessera_cupy.parallel.shards import Shards, Span, even_lengths
from tessera_cupy.parallel.simulate import simulate

__all__ = [
    "Deal",
    "Degrees",
    "Schedule",
    "Shards",
    "Span",
    "even_lengths",
    "make_schedule",
    "simulate",
]
