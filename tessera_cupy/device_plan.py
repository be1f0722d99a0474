"""Which plans a GPU makes itself, from a mask in its memory, and with what sizes."""

from __future__ import annotations

from typing import Any

from tessera_cupy.kernels.builders import TileBuild
from tessera_cupy.mapping import TileShape, choose_slot, gather_slot
from tessera_cupy.masks import BlockMask
from tessera_cupy.organization import DeviceModel
from tessera_cupy.regimes import PlanSpec
from tessera_cupy.regimes.candidates import made_on_gpu
from tessera_cupy.request import Request


def tile_build(
    mask: BlockMask, request: Request, spec: PlanSpec, model: DeviceModel, device: int | None
) -> TileBuild | None:
    """The sizes of a plan that the GPU makes, or None where the host makes it.

    The GPU does where the mask is over arrays in its memory (so without token bits), the plan packs
    KV or, of key slices, gathers them, retains, splits, merges or shares Q, and is organized by
    longest and split.

    Args:
        mask: the mask; none of its contents is read.
        request: what is computed.
        spec: an eligible plan.
        model: the GPU.
        device: its ordinal; None plans for a GPU that is not here.
    """
    source = mask.source
    if source is None or device is None or source.layout.device != device:
        return None
    keys = source.layout.keys
    if not source.layout.rows or not source.num_blocks[1]:
        return None
    if min(mask.shape) == 0:
        return None
    ragged = source.layout.ragged
    key = (request, spec, mask.block_size, ragged, keys, mask.batch, mask.heads, model)
    if key not in _known:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[key] = _sizes(mask, request, spec, model, keys)
    return _known[key]


# All of a geometry have one object, for which launches are prepared.
_known: dict[Any, TileBuild | None] = {}
_MOST_KNOWN = 256


def _sizes(
    mask: BlockMask, request: Request, spec: PlanSpec, model: DeviceModel, keys: bool
) -> TileBuild | None:
    if not made_on_gpu(spec) or (spec.mapping.kv == "gather") != keys:
        return None
    r = request
    slot = gather_slot(spec.tile_kv) if keys else choose_slot(mask, spec.tile_kv)
    ragged = [
        blocks if own else None
        for blocks, own in zip(mask.num_blocks, mask.ragged_sides, strict=True)
    ]
    try:
        return TileBuild(
            spec.mapping.q,
            TileShape(spec.tile_q, spec.tile_kv, slot),
            (mask.max_block[0], 1) if keys else mask.max_block,
            batch=r.batch,
            q_heads=r.q_heads,
            kv_heads=r.kv_heads,
            sq=r.sq,
            skv=r.skv,
            mask_batch=mask.batch,
            mask_heads=mask.heads,
            kv_bytes_per_head=4 * r.skv * r.head_dim,
            device=model,
            frag_capacity=0,
            ragged=(ragged[0], ragged[1]),
            gather=keys,
        )
    except ValueError:
        return None  # sizes beyond the kernels' numbers
