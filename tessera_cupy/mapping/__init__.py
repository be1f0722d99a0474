"""Mapping: a mask's logical blocks become the physical tiles that kernels compute."""

from __future__ import annotations

from tessera_cupy.mapping.check import expand
from tessera_cupy.mapping.planner import (
    Mapping,
    can_regroup,
    choose_slot,
    gather_slot,
    map_mask,
    why_not,
)
from tessera_cupy.mapping.q_side import halves_fit, makes_halves
from tessera_cupy.mapping.stats import issued_pairs, useful_fraction
from tessera_cupy.mapping.tiles import GROUP_ROWS, UNIT_ROWS, Tiles, TileShape

__all__ = [
    "GROUP_ROWS",
    "UNIT_ROWS",
    "Mapping",
    "TileShape",
    "Tiles",
    "can_regroup",
    "choose_slot",
    "expand",
    "gather_slot",
    "halves_fit",
    "issued_pairs",
    "makes_halves",
    "map_mask",
    "useful_fraction",
    "why_not",
]
