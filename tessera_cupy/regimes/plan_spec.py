"""Plan names: kernel, physical tile, mapping and organization in one readable line."""

from __future__ import annotations

import difflib
import itertools
import re
from dataclasses import dataclass, fields
from typing import get_args

from tessera_cupy.errors import wrong
from tessera_cupy.mapping import GROUP_ROWS, Mapping, can_regroup
from tessera_cupy.mapping.kv_side import KvSide
from tessera_cupy.mapping.q_side import QSide
from tessera_cupy.organization import Organization

#: Attention kernels that a plan may name.
KERNELS = ("attend_mma", "attend_wgmma")

_EXAMPLE = "attend_mma/q64k64/retain-pack/longest+split"
_TILE = re.compile(r"q([1-9][0-9]*)k([1-9][0-9]*)")
_MAX_TILE = 32 * GROUP_ROWS  # a fragment has 32 membership bits


@dataclass(frozen=True)
class PlanSpec:
    """What to do with a request, apart from the request itself.

    Attributes:
        kernel: name of the attention kernel, one of :data:`KERNELS`.
        tile_q, tile_kv: query rows and KV columns of a physical tile, multiples of 8.
        mapping: how logical blocks become physical tiles, on each side.
        organization: how tiles become tasks.

    Raises:
        ValueError: an unknown kernel, or a tile size that no kernel can have.

    >>> PlanSpec.parse("attend_mma/q64k64/retain-pack/longest+split").mapping.kv
    'pack'
    """

    kernel: str
    tile_q: int
    tile_kv: int
    mapping: Mapping
    organization: Organization

    def __post_init__(self) -> None:
        if self.kernel not in KERNELS:
            expected, fix = f"one of {', '.join(KERNELS)}", "name a kernel that exists"
            raise ValueError(wrong("kernel", expected, repr(self.kernel), fix))
        for name, size in (("tile_q", self.tile_q), ("tile_kv", self.tile_kv)):
            if size % 8 or not 8 <= size <= _MAX_TILE:
                expected = f"a multiple of 8 from 8 to {_MAX_TILE}"
                raise ValueError(wrong(name, expected, size, "name a tile of the catalog"))

    @property
    def name(self) -> str:
        """The plan's name; :meth:`parse` reads it back."""
        tile = f"q{self.tile_q}k{self.tile_kv}"
        return f"{self.kernel}/{tile}/{self.mapping.name}/{self.organization.name}"

    @classmethod
    def parse(cls, name: str, *, argument: str = "plan") -> PlanSpec:
        """Read a plan name such as ``attend_mma/q64k64/retain-pack/longest+split``.

        Args:
            name: the plan's :attr:`name`.
            argument: what an error calls it.

        Raises:
            ValueError: the name is not the ``name`` of any plan.
        """
        parts = name.split("/")
        tile = _TILE.fullmatch(parts[1]) if len(parts) == 4 else None
        if tile is None:
            expected = "kernel/q<rows>k<columns>/<q mapping>-<kv mapping>/<organization>"
            raise ValueError(wrong(argument, expected, repr(name), _fix(name)))
        try:
            return cls(
                kernel=parts[0],
                tile_q=int(tile[1]),
                tile_kv=int(tile[2]),
                mapping=Mapping.parse(parts[2]),
                organization=Organization.parse(parts[3]),
            )
        except ValueError as error:
            # What is wrong in a part must not read as if it were another argument of the call.
            got = f"{name!r} ({str(error).partition('. Fix: ')[0]})"
            raise ValueError(wrong(argument, "a plan's name", got, _fix(name))) from error

    def serves(self, block_q: int, block_kv: int, *, ragged: bool) -> bool:
        """Whether the mapping is eligible for blocks of this size, whatever the mask's content.

        ``ragged`` sizes are those of the largest block. A merge of ragged blocks depends on
        where the blocks lie, a share on token bits, and gather is for key slices, so none of these
        is ever promised here.
        """
        if self.mapping.kv == "gather":
            return False
        if self.mapping.q in ("share", "regroup") and self.mapping.kv != "pack":
            return False
        return _serves(self.mapping.q, block_q, self.tile_q, ragged) and _serves(
            self.mapping.kv, block_kv, self.tile_kv, ragged
        )


def _serves(how: str, block: int, tile: int, ragged: bool) -> bool:
    if how == "retain":
        return block <= tile
    if how == "regroup":
        return can_regroup(block, tile) and not ragged
    if how in ("merge", "share"):
        return 2 * block <= tile and not ragged
    return how == "pack" or block > tile


def nearest(name: str) -> str | None:
    """The plan's name that a mistyped one is nearest to, part by part; None where none is near.

    >>> nearest("attend_mma/q64k64/retian-pack/longest+splti")
    'attend_mma/q64k64/retain-pack/longest+split'
    >>> nearest("fastest") is None
    True
    """
    parts = name.split("/")
    tile = _TILE.fullmatch(parts[1]) if len(parts) == 4 else None
    if tile is None:
        return None
    mappings = [f"{q}-{kv}" for q in get_args(QSide) for kv in get_args(KvSide)]
    flags = [field.name for field in fields(Organization)]
    organizations = ["rows"] + [
        "+".join(some)
        for count in range(1, len(flags) + 1)
        for some in itertools.combinations(flags, count)
    ]
    for place, known in ((0, KERNELS), (2, mappings), (3, organizations)):
        found = difflib.get_close_matches(parts[place], known, 1)
        if not found:
            return None
        parts[place] = found[0]
    mapping, organization = Mapping.parse(parts[2]), Organization.parse(parts[3])
    try:
        return PlanSpec(parts[0], int(tile[1]), int(tile[2]), mapping, organization).name
    except ValueError:  # a tile that no kernel can have
        return None


def _fix(name: str) -> str:
    near = nearest(name)
    if near is None:
        return f"write it like {_EXAMPLE}"
    return f"did you mean {near}? `tessera-cupy plans show` lists names"
