"""What a plan is for every mask of a geometry that is over arrays of a GPU, whatever it holds."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from tessera_cupy import gpus
from tessera_cupy.choice import PlanChoice, choose
from tessera_cupy.kernels.builders import TileBuild
from tessera_cupy.kernels.catalog import KernelConfig
from tessera_cupy.masks import BlockMask
from tessera_cupy.masks.device_source import DeviceSource, RaggedLayout
from tessera_cupy.organization import DeviceModel
from tessera_cupy.regimes import PlanSpec
from tessera_cupy.request import Request

#: The request and the GPU, and the mask's block size, sizes of ragged blocks, whether it is of key
#: slices, batch and heads: all but its contents and the form of its arrays. The request is named by
#: its identity, which is quicker than its hash; what is known by a key keeps it.
Key: TypeAlias = tuple[int, int | None, tuple[int, int], RaggedLayout | None, bool, int, int]


class Known(NamedTuple):
    """What a plan is for a request: its kernel, the GPU, the choice where the caller named it.

    ``sizes_on`` is how each GPU makes it, as far as that has been asked.
    """

    request: Request
    spec: PlanSpec
    config: KernelConfig
    model: DeviceModel
    choice: PlanChoice
    sizes_on: dict[int, TileBuild | None]


_known: dict[tuple[int, Key], Known] = {}
_MOST_KNOWN = 256


def key_of(mask: BlockMask, source: DeviceSource, request: Request, device: int | None) -> Key:
    """What a plan's kernel and sizes follow from, besides the plan."""
    of, block = source.layout, mask.block_size
    return id(request), device, block, of.ragged, of.keys, mask.batch, mask.heads


def known_of(mask: BlockMask, request: Request, spec: PlanSpec, key: Key) -> Known:
    """What a plan is for the masks of a key.

    Raises:
        PlanNotEligibleError: it cannot serve them.
    """
    found = _known.get((id(spec), key))
    if found is None:
        _, config, choice = choose(mask, request, spec)
        model = gpus.model_of(config, request.arch, key[1])
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        found = _known[id(spec), key] = Known(request, spec, config, model, choice, {})
    return found
