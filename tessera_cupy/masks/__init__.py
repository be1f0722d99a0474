"""Logical masks: which query blocks attend to which KV blocks, in one canonical form."""

from __future__ import annotations

from tessera_cupy.masks.block_mask import BlockMask
from tessera_cupy.masks.intervals import interval_mask
from tessera_cupy.masks.key_slices import KeySlices

__all__ = ["BlockMask", "KeySlices", "interval_mask"]
