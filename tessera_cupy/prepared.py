"""What a plan has worked out: its kernel, tiles and tasks, and their arrays on each GPU."""

from __future__ import annotations

import threading
from time import perf_counter
from typing import Any, NamedTuple

from tessera_cupy import gpus
from tessera_cupy.choice import PlanChoice, checked_regime, choose
from tessera_cupy.device_plan import tile_build
from tessera_cupy.errors import PlanOverflowError
from tessera_cupy.kernels import device_build, kept, launch
from tessera_cupy.kernels.builders import TileBuild
from tessera_cupy.kernels.catalog import KernelConfig, merge_for, twin_of
from tessera_cupy.kernels.device_build import MaskState
from tessera_cupy.kernels.launch import DevicePlan, Mark
from tessera_cupy.kernels.lifetime import keep_while
from tessera_cupy.kernels.room import overflowed
from tessera_cupy.mapping import Tiles, map_mask
from tessera_cupy.masks import BlockMask
from tessera_cupy.masks.device_source import DeviceSource
from tessera_cupy.organization import DeviceModel, Tasks, organize
from tessera_cupy.regimes import PlanSpec, Table
from tessera_cupy.request import Request


class Prepared:
    """A plan without its mask, so that a cache keyed by the mask ends with it.

    What it has worked out is of one version of the mask, and is worked out again for the next.

    Attributes:
        request, spec, config, choice: as in :class:`tessera_cupy.Plan`.
        model: the GPU that the tasks are organized for.
        version: of the mask, when the plan was chosen.
        select_ms: the host's time for choosing, milliseconds.
    """

    def __init__(
        self,
        request: Request,
        spec: PlanSpec,
        config: KernelConfig,
        model: DeviceModel,
        choice: PlanChoice,
        version: int = 0,
        counted: tuple[MaskState, int] | None = None,
        select_ms: float = 0.0,
        sizes_on: dict[int, TileBuild | None] | None = None,
    ) -> None:
        """``counted`` is the mask's state, for the first run, and its number of active blocks.

        ``sizes_on`` is how GPUs make the plan, as far as that is known.
        """
        self.request = request
        self.spec = spec
        self.config = config
        self.model = model
        self.choice = choice
        self.version = version
        self.select_ms = select_ms
        self._lock = threading.RLock()
        self._holds = version
        self._counted = counted
        self._tiles: Tiles | None = None
        self._tasks: Tasks | None = None
        self._sizes_on = {} if sizes_on is None else sizes_on
        self._on_device: dict[int, DevicePlan] = {}
        self._captured: list[tuple[int, DevicePlan]] = []

    def tiles(self, mask: BlockMask) -> Tiles:
        """The physical tiles; mapped on the first call."""
        with self._lock:
            self._follow(mask)
            if self._tiles is None:
                spec = self.spec
                self._tiles = map_mask(mask, spec.mapping, spec.tile_q, spec.tile_kv)
            return self._tiles

    def tasks(self, mask: BlockMask) -> Tasks:
        """The tasks in launch order; organized on the first call."""
        with self._lock:
            self._follow(mask)
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

    def on_device(self, mask: BlockMask, device: int) -> DevicePlan:
        """The arrays on a GPU, which is the current device, ready for the current stream.

        The GPU makes them where it can (:func:`tessera_cupy.device_plan.tile_build`), else the host
        does and they are copied; both once, except that each capture has its own made within it.

        Raises:
            ValueError: a capture before the first run.
        """
        with self._lock:
            self._follow(mask)
            source = mask.source
            sizes = None if source is None else self._sizes(mask, device)
            if source is None or sizes is None:
                return self._uploaded(mask, device)
            return self._made(mask, source, sizes, device)

    def _uploaded(self, mask: BlockMask, device: int) -> DevicePlan:
        if device not in self._on_device:
            if mask.source is not None:
                launch.refuse_capture()  # before the host waits for the mask
            self._on_device[device] = launch.upload(
                self.tiles(mask),
                self.tasks(mask),
                bits=self.config.bits,
                twins=twin_of(self.config) is not None,
            )
        return self._on_device[device]

    def _made(
        self, mask: BlockMask, source: DeviceSource, sizes: TileBuild, device: int
    ) -> DevicePlan:
        import cupy

        stream = cupy.cuda.get_current_stream()
        if stream.is_capturing():
            kernels = [self.config, merge_for(self.config)]
            kernels += device_build.kernels(source, self.request.arch.name)
            if not all(launch.is_loaded(kernel, device) for kernel in kernels):
                launch.refuse_capture()
            plan = self._make(source, sizes, stream, capturing=True)
            # The plan may be chosen anew, or end, before the mask's last replay.
            keep_while(mask, plan)
            self._captured.append((device, plan))
            return plan
        found = self._on_device.get(device)
        # Not one that is known to be of no use.
        if found is not None and (found.need is None or not overflowed(sizes, found.need)):
            kept.used(found, device)
            found.uses.wait(stream)
            return found
        plan = self._on_device[device] = self._make(source, sizes, stream)
        kept.keep(plan, device, self)
        return plan

    def make(self, mask: BlockMask, device: int, mark: Mark) -> DevicePlan:
        """Let the GPU make the arrays, on the current stream; they are not kept here."""
        import cupy

        source, sizes = mask.source, self._sizes(mask, device)
        assert source is not None
        assert sizes is not None
        return self._make(source, sizes, cupy.cuda.get_current_stream(), mark=mark)

    def _make(
        self,
        source: DeviceSource,
        sizes: TileBuild,
        stream: Any,
        *,
        capturing: bool = False,
        mark: Mark = launch.unmarked,
    ) -> DevicePlan:
        counted, self._counted = self._counted, None
        if counted and (capturing or not counted[0].on(stream)):
            counted = None
        return device_build.build(
            source,
            sizes,
            self.request.arch.name,
            stream,
            counted=counted,
            capturing=capturing,
            mark=mark,
        )

    def makes(self, mask: BlockMask, device: int) -> bool:
        """Whether the GPU makes the arrays, rather than the host."""
        return mask.source is not None and self._sizes(mask, device) is not None

    def host_ms(self, mask: BlockMask) -> dict[str, float]:
        """The host's time for making the arrays and copying them, by part; nothing is kept."""
        again = Prepared(self.request, self.spec, self.config, self.model, self.choice)
        again._holds = mask.version
        times = [perf_counter()]
        tiles = again.tiles(mask)
        times.append(perf_counter())
        twins = twin_of(self.config) is not None
        launch.upload(tiles, again.tasks(mask), bits=self.config.bits, twins=twins)
        times.append(perf_counter())
        return {"tiles": 1e3 * (times[1] - times[0]), "tasks": 1e3 * (times[2] - times[1])}

    def check(self, mask: BlockMask) -> None:
        """Wait for what GPUs made, and raise what is wrong with it; else check the mask."""
        with self._lock:
            self._follow(mask)
            plans = [*self._on_device.items(), *self._captured]
            made = [(device, plan) for device, plan in plans if plan.counts is not None]
            for device, plan in made:
                sizes = self._sizes(mask, device)
                assert sizes is not None
                try:
                    device_build.check(plan, sizes, device)
                except PlanOverflowError:
                    if self._on_device.get(device) is plan:
                        del self._on_device[device]
                    raise
        if not made:
            mask.check()

    def _sizes(self, mask: BlockMask, device: int) -> TileBuild | None:
        """How the GPU makes the plan, or None; a plan has one mask, whatever its version."""
        if device not in self._sizes_on:
            self._sizes_on[device] = tile_build(mask, self.request, self.spec, self.model, device)
        return self._sizes_on[device]

    def _follow(self, mask: BlockMask) -> None:
        """Drop what belongs to an older version of the mask; graphs may still replay theirs."""
        if self._holds != mask.version:
            self._holds = mask.version
            self._counted = self._tiles = self._tasks = None
            self._on_device.clear()

    def forget(self, device: int) -> None:
        """Drop the arrays on a GPU; they are made again when they are needed."""
        self._on_device.pop(device, None)


def prepare(
    mask: BlockMask, request: Request, regime: str | PlanSpec | Table, device: int | None
) -> Prepared:
    """Choose the plan of a request; nothing is mapped yet.

    Where the choice depends on the contents of a mask that is over arrays of ``device``, that GPU
    counts them, on the current stream, and the host waits for the few numbers.

    Args:
        mask: what to compute.
        request: sizes, dtype, layout and architecture.
        regime: as in :func:`tessera_cupy.make_plan`.
        device: ordinal of the GPU that will run it; None plans for its generation.

    Raises:
        PlanNotEligibleError, TypeError, ValueError: as :func:`tessera_cupy.choice.choose`; a mask
            over GPU arrays that is no mask; a capture before the plan was chosen.
    """
    begin = perf_counter()
    regime = checked_regime(regime)
    source = mask.source
    there = source is not None and source.layout.device == device
    if there and isinstance(regime, PlanSpec):
        return _pinned(mask, request, regime, device, begin)
    version, counted = mask.version, None
    summary = None
    if source is not None and there:
        launch.refuse_capture()
        sms = gpus.multiprocessors(device)
        state = device_build.mask_state(source, request.arch.name, sms)
        summary = state.summary()
        counted = (state, summary.nnz)
        begin = perf_counter()
    spec, config, choice = choose(mask, request, regime, summary)
    select_ms = 1e3 * (perf_counter() - begin)
    model = gpus.model_of(config, request.arch, device)
    return Prepared(request, spec, config, model, choice, version, counted, select_ms)


def _pinned(
    mask: BlockMask, request: Request, spec: PlanSpec, device: int | None, begin: float
) -> Prepared:
    """The given plan for a mask over arrays of a GPU, chosen once for masks of one geometry."""
    # By identity, which is quicker than hashes: what is known keeps both.
    layout = None if mask.source is None else mask.source.layout
    kind = None if layout is None else (layout.ragged, layout.keys)
    key = (id(request), id(spec), device, mask.block_size, kind, mask.batch, mask.heads)
    known = _known.get(key)
    if known is None:
        _, config, choice = choose(mask, request, spec)
        model = gpus.model_of(config, request.arch, device)
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        known = _known[key] = _Known(request, spec, config, model, choice, {})
    select_ms = 1e3 * (perf_counter() - begin)
    return Prepared(
        request,
        spec,
        known.config,
        known.model,
        known.choice,
        mask.version,
        None,
        select_ms,
        known.sizes_on,
    )


class _Known(NamedTuple):
    """What a given plan is for a request, whatever the mask holds; and how each GPU makes it."""

    request: Request
    spec: PlanSpec
    config: KernelConfig
    model: DeviceModel
    choice: PlanChoice
    sizes_on: dict[int, TileBuild | None]


_known: dict[tuple[object, ...], _Known] = {}
_MOST_KNOWN = 256
