"""What a plan has worked out: its kernel, tiles and tasks, and their arrays on each GPU."""

from __future__ import annotations

import threading
from time import perf_counter
from typing import Any

from tessera_cupy import ahead, gpus
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
from tessera_cupy.known import Key, Known, key_of, known_of
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
            sizes = None if source is None else self.sizes(mask, device)
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
        plan = self._make(source, sizes, stream)
        self.adopt(plan, device)
        return plan

    def adopt(self, plan: DevicePlan, device: int) -> None:
        """Keep the arrays that a GPU made of the mask's version that was chosen for."""
        self._counted = None
        self._on_device[device] = plan
        kept.keep(plan, device, self)

    def make(self, mask: BlockMask, device: int, mark: Mark) -> DevicePlan:
        """Let the GPU make the arrays, on the current stream; they are not kept here."""
        import cupy

        source, sizes = mask.source, self.sizes(mask, device)
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
        state, nnz = self._counted or (None, None)
        self._counted = None
        if state is not None and (capturing or not state.on(stream)):
            state = nnz = None
        return device_build.build(
            source,
            sizes,
            self.request.arch.name,
            stream,
            state=state,
            nnz=nnz,
            capturing=capturing,
            mark=mark,
        )

    def makes(self, mask: BlockMask, device: int) -> bool:
        """Whether the GPU makes the arrays, rather than the host."""
        return mask.source is not None and self.sizes(mask, device) is not None

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
                sizes = self.sizes(mask, device)
                assert sizes is not None
                try:
                    device_build.check(plan, sizes, device)
                except PlanOverflowError:
                    if self._on_device.get(device) is plan:
                        del self._on_device[device]
                    raise
        if not made:
            mask.check()

    def sizes(self, mask: BlockMask, device: int) -> TileBuild | None:
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
    mask: BlockMask,
    request: Request,
    regime: str | PlanSpec | Table,
    device: int | None,
    *,
    run: bool = False,
) -> Prepared:
    """Choose the plan of a request.

    Where the choice depends on the contents of a mask that is over arrays of ``device``, that GPU
    counts them, on the current stream, and the host waits for the few numbers.

    Args:
        mask: what to compute.
        request: sizes, dtype, layout and architecture.
        regime: as in :func:`tessera_cupy.make_plan`.
        device: ordinal of the GPU that will run it; None plans for its generation.
        run: whether the plan will run at once, on the current stream, so that what makes it may
            be launched before it is known (:mod:`tessera_cupy.ahead`). Nothing is mapped otherwise.

    Raises:
        PlanNotEligibleError, TypeError, ValueError: as :func:`tessera_cupy.choice.choose`; a mask
            over GPU arrays that is no mask; a capture before the plan was chosen.
    """
    begin = perf_counter()
    regime = checked_regime(regime)
    source = mask.source
    if source is not None and source.layout.device == device:
        key = key_of(mask, source, request, device)
        if not isinstance(regime, PlanSpec):
            return _counted(mask, source, request, regime, key, device, run)
        known = known_of(mask, request, regime, key)
        return _with(known, known.choice, mask.version, None, begin)
    spec, config, choice = choose(mask, request, regime)
    select_ms = 1e3 * (perf_counter() - begin)
    model = gpus.model_of(config, request.arch, device)
    return Prepared(request, spec, config, model, choice, mask.version, None, select_ms)


def _counted(
    mask: BlockMask,
    source: DeviceSource,
    request: Request,
    regime: str | Table,
    key: Key,
    device: int,
    run: bool,
) -> Prepared:
    """A plan for a mask over arrays of the GPU, chosen by what it counts in them."""
    import cupy

    launch.refuse_capture()
    version = mask.version
    state = device_build.mask_state(source, request.arch.name, gpus.multiprocessors(device))
    coming = state.fetch()
    made = ahead.make(key, state, cupy.cuda.get_current_stream()) if run else None
    summary = state.summary(coming)
    begin = perf_counter()
    spec, _, choice = choose(mask, request, regime, summary)
    known = known_of(mask, request, spec, key)
    prepared = _with(known, choice, version, (state, summary.nnz), begin)
    if run:
        sizes = prepared.sizes(mask, device)
        plan = ahead.settle(key, made, known, sizes, summary.nnz)
        if plan is not None:
            prepared.adopt(plan, device)
    return prepared


def _with(
    known: Known,
    choice: PlanChoice,
    version: int,
    counted: tuple[MaskState, int] | None,
    begin: float,
) -> Prepared:
    select_ms = 1e3 * (perf_counter() - begin)
    return Prepared(
        known.request,
        known.spec,
        known.config,
        known.model,
        choice,
        version,
        counted,
        select_ms,
        known.sizes_on,
    )
