"""A rank's own attention in each turn and step: its part of the mask, through the front door."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from tessera_cupy import gpus, interop
from tessera_cupy.attention import block_sparse_attention, make_plan
from tessera_cupy.kernels.launch import sharing
from tessera_cupy.masks import BlockMask
from tessera_cupy.parallel.arrays import of_heads
from tessera_cupy.parallel.schedule import Schedule
from tessera_cupy.regimes import PlanSpec, Table
from tessera_cupy.request import ArraySpec


class Local:
    """The masks of one rank, made when they are needed, and kept with their plans.

    Attributes:
        schedule: what all ranks agreed on.
        rank: this one.
    """

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.schedule = schedule
        self.rank = rank
        self._masks: dict[tuple[int, int], BlockMask | None] = {}
        self._spec: PlanSpec | None = None

    def mask(self, turn: int, step: int) -> BlockMask | None:
        """The part of the mask that a turn and a step of the ring compute; None for nothing."""
        key = turn, step
        if key not in self._masks:
            self._masks[key] = self.schedule.submask(self.rank, turn, step)
        return self._masks[key]

    def compute(
        self,
        q: Any,
        k: Any,
        v: Any,
        turn: int,
        step: int,
        lse: bool,
        *,
        sm_scale: float | None = None,
        regime: str | PlanSpec | Table = "auto",
    ) -> tuple[Any, Any] | None:
        """Attention of a turn's heads over the keys of one step; None for nothing to compute."""
        if 0 in q.shape or 0 in k.shape:
            return None
        mask = self.mask(turn, step)
        if mask is None:
            return None
        k, v = self._per_query_head(k, turn), self._per_query_head(v, turn)
        if self.schedule.degrees.ring_degree == 1 and not mask.ragged:
            regime = self._of_whole(q, regime)
        with sharing() if self.schedule.overlaps else nullcontext():
            found = block_sparse_attention(
                q, k, v, mask, sm_scale=sm_scale, regime=regime, return_lse=lse
            )
        return found if lse else (found, None)

    def _of_whole(self, q: Any, regime: str | PlanSpec | Table) -> PlanSpec:
        """The plan that one GPU takes for the whole mask.

        So that a head has the same plan in any turn and on any rank. That of a part of the heads
        may be another, whose sums round otherwise; for ragged blocks, whose sizes decide what can
        serve them, it has to be.
        """
        if self._spec is None:
            mask, deal = self.schedule.mask, self.schedule.deal
            heads, dtype = sum(map(len, deal.q)), interop.dtype_name(q)
            on_gpu = not interop.on_host(q)
            shapes = [
                (q.shape[0], count, tokens, q.shape[3])
                for count, tokens in zip((heads, heads // deal.shared), mask.shape, strict=True)
            ]
            self._spec = make_plan(
                mask,
                *(ArraySpec(shape, dtype) for shape in shapes),
                regime=regime,
                arch=gpus.arch_of(interop.device_of(q, "q")).name if on_gpu else None,
            ).spec
        return self._spec

    def _per_query_head(self, keys: Any, turn: int) -> Any:
        """Keys as they are where all serve as many query heads, else one for each of these."""
        place = self.schedule.place(self.rank)[1]
        of_head = [head // self.schedule.deal.shared for head in self.schedule.turns[place][turn]]
        held = sorted(set(of_head))
        if len({of_head.count(head) for head in held}) == 1:
            return keys
        return of_heads(keys, [held.index(head) for head in of_head])
