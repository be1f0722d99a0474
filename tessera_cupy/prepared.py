"""What a plan has worked out: its kernel, tiles and tasks, and their arrays on each GPU."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from tessera_cupy import gpus
from tessera_cupy.choice import PlanChoice, choose
from tessera_cupy.kernels.catalog import KernelConfig
from tessera_cupy.mapping import Tiles, map_mask
from tessera_cupy.masks import BlockMask
from tessera_cupy.organization import DeviceModel, Tasks, organize
from tessera_cupy.regimes import PlanSpec, Table
from tessera_cupy.request import Request

if TYPE_CHECKING:
    from tessera_cupy.kernels.launch import DevicePlan


class Prepared:
    """A plan without its mask, so that a cache keyed by the mask ends with it.

    Attributes:
        request, spec, config, choice: as in :class:`tessera_cupy.Plan`.
        model: the GPU that the tasks are organized for.
    """

    def __init__(
        self,
        request: Request,
        spec: PlanSpec,
        config: KernelConfig,
        model: DeviceModel,
        choice: PlanChoice,
    ) -> None:
        self.request = request
        self.spec = spec
        self.config = config
        self.model = model
        self.choice = choice
        self._lock = threading.RLock()
        self._tiles: Tiles | None = None
        self._tasks: Tasks | None = None
        self._uploaded: dict[int, DevicePlan] = {}

    def tiles(self, mask: BlockMask) -> Tiles:
        """The physical tiles; mapped on the first call."""
        with self._lock:
            if self._tiles is None:
                spec = self.spec
                self._tiles = map_mask(mask, spec.mapping, spec.tile_q, spec.tile_kv)
            return self._tiles

    def tasks(self, mask: BlockMask) -> Tasks:
        """The tasks in launch order; organized on the first call."""
        with self._lock:
            if self._tasks is None:
                r = self.request
                self._tasks = organize(
                    self.tiles(mask),
                    self.spec.organization,
                    batch=r.batch,
                    q_heads=r.q_heads,
                    kv_heads=r.kv_heads,
                    mask_batch=mask.batch,
                    mask_heads=mask.heads,
                    kv_bytes_per_head=4 * r.skv * r.head_dim,
                    device=self.model,
                )
            return self._tasks

    def uploaded(self, mask: BlockMask, device: int) -> DevicePlan:
        """The arrays on a GPU, which is the current device; copied there on the first call."""
        from tessera_cupy.kernels import launch

        with self._lock:
            if device not in self._uploaded:
                self._uploaded[device] = launch.upload(
                    self.tiles(mask), self.tasks(mask), bits=self.config.bits
                )
            return self._uploaded[device]


def prepare(
    mask: BlockMask, request: Request, regime: str | PlanSpec | Table, device: int | None
) -> Prepared:
    """Choose the plan of a request; nothing is mapped yet.

    Args:
        mask: what to compute.
        request: sizes, dtype, layout and architecture.
        regime: as in :func:`tessera_cupy.make_plan`.
        device: ordinal of the GPU that will run it; None plans for its generation.

    Raises:
        PlanNotEligibleError, TypeError, ValueError: as :func:`tessera_cupy.choice.choose`.
    """
    spec, config, choice = choose(mask, request, regime)
    return Prepared(request, spec, config, gpus.model_of(config, request.arch, device), choice)
