"""The plans of an architecture: what a profile times, and what a table may rank.

The catalog has kernels; a plan adds a mapping for each side and an organization. All
combinations are here that some mask can use; which of them serve a given mask is up to
:func:`tessera_cupy.choice.eligible`.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import get_args

from tessera_cupy.kernels.builders import TILE_Q_SIDES
from tessera_cupy.kernels.catalog import catalog
from tessera_cupy.mapping import Mapping
from tessera_cupy.mapping.kv_side import KvSide
from tessera_cupy.mapping.q_side import QSide
from tessera_cupy.organization import Organization
from tessera_cupy.regimes.plan_spec import PlanSpec

#: Order of rows, nothing cut: what organization adds is measured against it.
BASE_ORGANIZATION = Organization()
#: The organization that a GPU makes by itself.
FULL_ORGANIZATION = Organization(longest=True, split=True)
#: Organizations that are timed for the best mappings only, in addition.
ORGANIZATIONS = (BASE_ORGANIZATION, Organization(runs=True, longest=True, split=True))

# KV sides that a GPU maps by itself from a mask in its memory, without the host.
_ON_GPU_KV: tuple[KvSide, ...] = ("pack", "gather")


@cache
def candidates(arch: str) -> tuple[PlanSpec, ...]:
    """Every mapping on every tile of an architecture's attention kernels, fully organized.

    Args:
        arch: architecture name, such as ``"sm_90a"``.

    Returns:
        Plans in a fixed order: kernels as the catalog has them, then mappings by name.

    Raises:
        ValueError: an unknown architecture.

    >>> len({plan.name for plan in candidates("sm_80")}) == len(candidates("sm_80"))
    True
    >>> any(plan.kernel == "attend_wgmma" for plan in candidates("sm_80"))
    False
    """
    tiles: dict[tuple[str, int, int], set[bool]] = {}
    for config in catalog(arch):
        if config.attends:
            tile = (config.kernel, config.tile_q, config.tile_kv)
            tiles.setdefault(tile, set()).add(config.gather)
    return tuple(
        PlanSpec(kernel, tile_q, tile_kv, Mapping(q, kv), FULL_ORGANIZATION)
        for (kernel, tile_q, tile_kv), gathers in tiles.items()
        for q, kv in product(get_args(QSide), get_args(KvSide))
        if (kv == "gather") in gathers
        and (kv != "gather" or q in ("retain", "share", "split"))
        and (q not in ("share", "regroup") or kv in ("pack", "gather"))
        and (q != "regroup" or kernel == "attend_wgmma")
    )


def made_on_gpu(plan: PlanSpec) -> bool:
    """Whether a GPU plans it by itself, so that a new mask costs no time of the host.

    >>> made_on_gpu(PlanSpec.parse("attend_mma/q64k64/retain-pack/longest+split"))
    True
    >>> made_on_gpu(PlanSpec.parse("attend_wgmma/q128k192/regroup-pack/longest+split"))
    False
    """
    return (
        plan.mapping.q in TILE_Q_SIDES
        and plan.mapping.kv in _ON_GPU_KV
        and plan.organization == FULL_ORGANIZATION
    )


def made_online(plan: PlanSpec, *, slices: bool) -> bool:
    """Whether a GPU plans it by itself for a mask in its memory, of blocks or of key slices.

    Slices that are not gathered run as blocks with token bits, which the host makes.

    >>> pack = PlanSpec.parse("attend_mma/q64k64/retain-pack/longest+split")
    >>> made_online(pack, slices=False), made_online(pack, slices=True)
    (True, False)
    """
    return made_on_gpu(plan) and (plan.mapping.kv == "gather") == slices


def retains(plan: PlanSpec) -> bool:
    """Whether tiles are the mask's blocks, or parts of one: nothing is joined.

    What mapping adds is measured against the best of these.

    >>> retains(PlanSpec.parse("attend_mma/q64k64/retain-split/rows"))
    True
    """
    return plan.mapping.q in ("retain", "split") and plan.mapping.kv in ("retain", "split")
