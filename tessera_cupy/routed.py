"""Attention of those heads whose mask is chosen on the GPU, call by call.

A model whose heads take one of a few static masks, by a rule that runs on the GPU, needs no new
plan a call: the tiles of each mask are made once, for one head, and a small kernel lists their
tasks for the heads that took it. The host neither waits nor learns which heads those are.
"""

from __future__ import annotations

from typing import Any

from tessera_cupy.attention import make_plan
from tessera_cupy.call import checked
from tessera_cupy.errors import wrong
from tessera_cupy.kernels import launch, route
from tessera_cupy.kernels.launch import DevicePlan
from tessera_cupy.masks import BlockMask
from tessera_cupy.organization import Organization, organize
from tessera_cupy.plan import checked_scale


class RoutedPlan:
    """The plan of one mask for whichever heads take it.

    Attributes:
        plan: of the mask for all heads, as :func:`tessera_cupy.make_plan` chooses it; its mapping
            and kernel are those that run.

    Example:
        ::

            plans = [RoutedPlan(mask, q, k, v) for mask in (mask_0, mask_1)]
            for i, plan in enumerate(plans):
                plan.run(q, k, v, out, chosen=routes, taken=i)
    """

    def __init__(self, mask: BlockMask, q: Any, k: Any, v: Any, *, regime: str = "auto") -> None:
        """Choose the plan for a mask of one head and arrays like these; nothing is computed yet.

        Args:
            mask: of one head, from the host.
            q: (batch, heads, tokens, head_dim) on a GPU.
            k: likewise.
            v: likewise.
            regime: as in :func:`tessera_cupy.make_plan`.

        Raises:
            ValueError: the mask has a batch or head axis, is over GPU arrays, or does not fit.
        """
        if mask.batch * mask.heads != 1 or mask.source is not None:
            raise ValueError(
                wrong(
                    "mask",
                    "a mask from the host, with one head for all",
                    repr(mask).splitlines()[0],
                    "pass the mask that all heads on this route share",
                )
            )
        self.plan = make_plan(mask, q, k, v, regime=regime)
        self._on_device: dict[int, DevicePlan] = {}

    def run(
        self,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        *,
        chosen: Any,
        taken: int,
        sm_scale: float | None = None,
    ) -> None:
        """Write the attention of the heads on one route; the rows of others are left as they are.

        Args:
            q: (batch, heads, tokens, head_dim) on the current GPU, of the plan's geometry.
            k: likewise.
            v: likewise.
            out: array like q to write; q itself, or memory apart from q, k and v.
            chosen: (batch, heads) int32 CuPy array, C-contiguous: the route of each head.
            taken: the route that this plan is for.
            sm_scale: factor on the scores; None means ``1 / sqrt(head_dim)``.

        Raises:
            ValueError: shapes or devices that do not fit; the first run within a capture.
        """
        plan = self.plan
        call = checked(plan.mask, q, k, v, out, layout="BHSD", arch=plan.request.arch)
        assert call.device is not None
        base = self._base(call.device)
        arch = plan.request.arch.name
        listed = route.routed(base, chosen, taken, arch, call.device)
        scale = checked_scale(sm_scale, plan.request.head_dim)
        packed, copies = plan.pack(q, k, v, out, scale, base.slot_log2, call, out)
        launch.attend(packed, listed, 0, (*copies, listed.tasks, chosen))

    def _base(self, device: int) -> DevicePlan:
        if device not in self._on_device:
            tiles, r = self.plan.tiles(), self.plan.request
            tasks = organize(
                tiles,
                # Split parts would need workspace for heads that nobody knows of.
                Organization(longest=True),
                batch=1,
                q_heads=1,
                kv_heads=1,
                mask_batch=1,
                mask_heads=1,
                kv_bytes_per_head=4 * r.skv * r.head_dim,
                device=self.plan.model,
            )
            config = self.plan.config
            self._on_device[device] = launch.upload(tiles, tasks, bits=config.bits)
        return self._on_device[device]
