"""A rank's own attention in each step: its part of the mask, through the front door."""

from __future__ import annotations

from typing import Any

from tessera_cupy.attention import block_sparse_attention
from tessera_cupy.masks import BlockMask
from tessera_cupy.parallel.arrays import of_heads
from tessera_cupy.parallel.schedule import Schedule
from tessera_cupy.regimes import PlanSpec, Table


class Local:
    """The masks of one rank, made when they are needed, and kept with their plans.

    Attributes:
        schedule: what all ranks agreed on.
        rank: this one.
    """

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.schedule = schedule
        self.rank = rank
        self._masks: dict[int, BlockMask | None] = {}

    def mask(self, step: int) -> BlockMask | None:
        """The part of the mask that a step of the ring computes; None for nothing."""
        if step not in self._masks:
            self._masks[step] = self.schedule.submask(self.rank, step)
        return self._masks[step]

    def compute(
        self,
        q: Any,
        k: Any,
        v: Any,
        step: int,
        lse: bool,
        *,
        sm_scale: float | None = None,
        regime: str | PlanSpec | Table = "auto",
    ) -> tuple[Any, Any] | None:
        """Attention over the keys of one step; None where there is nothing to compute."""
        if 0 in q.shape or 0 in k.shape:
            return None
        mask = self.mask(step)
        if mask is None:
            return None
        k, v = self._per_query_head(k), self._per_query_head(v)
        found = block_sparse_attention(
            q, k, v, mask, sm_scale=sm_scale, regime=regime, return_lse=lse
        )
        return found if lse else (found, None)

    def _per_query_head(self, keys: Any) -> Any:
        """Keys as they are where all serve as many query heads, else one for each of these."""
        dealt = self.schedule.deal
        mine = dealt.q[self.schedule.place(self.rank)[1]]
        of_head = [head // dealt.shared for head in mine]
        held = sorted(set(of_head))
        if len({of_head.count(head) for head in held}) == 1:
            return keys
        return of_heads(keys, [held.index(head) for head in of_head])
