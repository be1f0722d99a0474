"""Predicts how long a GPU takes for a plan, from its tiles and tasks alone.

A task's time is made of what a multiprocessor does at the same time:

- matrix: products, of the parts of a tile that take part in a step, at the GPU's matrix rate for
  the kernel's instructions;
- softmax: exponentials at their rate, and the instructions that go with scores, and with those
  that are masked;
- L2: K and V rows, at the multiprocessor's share of L2's bandwidth;
- shared memory, of ``attend_mma``: each warp reads K and V of a step, and Q where it does not keep
  it in registers, and copies write them.

They overlap, but not wholly: together they take ``(matrix^p + softmax^p + L2^p)^(1/p)``, where
``p`` is a constant of the kernel (1 would be one after the other, infinity the longest alone). Work
of one part has nothing to overlap with: no task is faster than the products and the softmax of its
busiest part one after the other. Each task costs a constant besides: its Q, its first K, its O.

CTAs of ``attend_mma`` are several on a multiprocessor, and each goes through a step's products and
its softmax one after the other, and then waits, for its warps wait for one another: a step takes as
long, however few warps have a part in it. Where warps of several CTAs meet on a quarter of the
multiprocessor, they queue for products and for softmax, as mean value analysis has it of a closed
network of the two. That time takes the place of matrix and softmax in the sum above.

Tasks go to slots for CTAs as on the GPU (:mod:`tessera_cupy.cost.timeline`). DRAM gives K and V of
a head once, if they fit L2, else once for each round of CTAs; a kernel that would be faster than
that takes as long. Launches and the merge of split tiles come before and after.

The constants are fitted to times measured on an H200; ``tests/cost/test_calibration.py`` has these,
and how far the model is off. Other GPUs get the same constants and figures of their own.

The model does not know: how a GPU's power limit changes its clock with the load (an H200's is
taken as it was in long runs, others run at their boost clock); how L2 is shared while tasks run,
latencies that few CTAs do not hide other than by a constant, DRAM's efficiency; what a compiler
makes of a kernel on another generation, spills included; bank conflicts; which CTAs the hardware
puts on which multiprocessor, and which warps on which of its quarters; whether neighbours take
turns badly; the fallback of ``attend_wgmma`` that takes tasks twice. Token bits are taken for any
other masking. A first call's compilation and the plan's own making are not in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.cost.devices import GPUS, Gpu, typical_gpu
from tessera_cupy.cost.timeline import busiest_over_mean, first_free, in_turn
from tessera_cupy.cost.work import Work, count_work
from tessera_cupy.errors import wrong
from tessera_cupy.kernels.catalog import KernelConfig
from tessera_cupy.mapping import Tiles
from tessera_cupy.organization import Tasks
from tessera_cupy.request import Request

if TYPE_CHECKING:
    from tessera_cupy.plan import Plan


@dataclass(frozen=True)
class KernelCosts:
    """Constants of one kernel.

    Attributes:
        overlap: the exponent ``p``.
        score: instructions of a thread for each of its scores, besides the exponential.
        masked: more of them for a score in a step that masks.
        cp_async: how many times as long as others L2 takes to give single rows.
        latency: cycles that a step waits besides.
        task: cycles of a task besides its steps.
        persistent: whether CTAs take tasks in turn, or there is a CTA for each.
    """

    overlap: float
    score: float
    masked: float
    cp_async: float
    latency: float
    task: float
    persistent: bool


#: Of each kernel. ``cp_async``: L2 gives plain copies 57% of its peak (kernels_cu/NOTES.md).
COSTS = {
    "attend_wgmma": KernelCosts(
        overlap=2.3,
        score=4.9,
        masked=1.7,
        cp_async=1.75,
        latency=0,
        task=5000,
        persistent=True,
    ),
    "attend_mma": KernelCosts(
        overlap=2.9,
        score=4.0,
        masked=6.2,
        cp_async=1,
        latency=760,
        task=4300,
        persistent=False,
    ),
}

LAUNCH_MS = 0.003
MERGE_MS = 0.002
#: Part of L2's bandwidth that writing the parts of split tiles and merging them reach.
MERGE_L2 = 0.2
_LANES = 128  # threads of a multiprocessor that issue an instruction in a cycle
_SHARED = 128  # bytes that shared memory gives one multiprocessor a clock
_PORT = 64  # bytes that L2 gives one multiprocessor a clock (A100 white paper)


@dataclass(frozen=True, eq=False)
class Prediction:
    """What a plan is predicted to take on a GPU; nothing of it was measured.

    Attributes:
        gpu: the GPU.
        ms: the whole, milliseconds: launch, attention, merge of split tiles.
        attend_ms: the attention kernel alone, from its first task's start to its last one's end.
        merge_ms: the merge of split tiles; 0 without any.
        slots: CTAs that run at a time.
        cycles: (N,) float64, cycles of each task of the plan, in launch order.
        slot: (N,) int64, the slot for a CTA that each runs on; slot ``s`` is on multiprocessor
            ``s % gpu.sms``.
        start_ms: (N,) float64, when each starts, milliseconds after the first.
        end_ms: (N,) float64, when each ends.
        bounds: milliseconds that matrix products, softmax, L2, shared memory and DRAM would each
            take if they were all there is, spread evenly: ``"matrix"``, ``"softmax"``, ``"L2"``,
            ``"shared memory"`` and ``"DRAM"``.
    """

    gpu: Gpu
    ms: float
    attend_ms: float
    merge_ms: float
    slots: int
    cycles: NDArray[np.float64]
    slot: NDArray[np.int64]
    start_ms: NDArray[np.float64]
    end_ms: NDArray[np.float64]
    bounds: dict[str, float]

    @property
    def bound(self) -> str:
        """The longest of :attr:`bounds`."""
        return max(self.bounds, key=self.bounds.__getitem__)

    @property
    def busy(self) -> float:
        """Share of the slots' time in which tasks run; 1 without any."""
        whole = self.slots * self.attend_ms
        return float((self.end_ms - self.start_ms).sum() / whole) if whole else 1.0

    @property
    def balance(self) -> float:
        """The busiest multiprocessor's time over the mean of all; 1.0 is even, or no work."""
        sms, lengths = self.gpu.sms, self.end_ms - self.start_ms
        return busiest_over_mean(np.bincount(self.slot % sms, lengths, minlength=sms))


def predict(plan: Plan, gpu: Gpu | None = None) -> Prediction:
    """Predict the time of a plan.

    Its tasks are taken as they are, organized for the GPU that the plan is for.

    Args:
        plan: the plan; tiles and tasks are made if they were not yet.
        gpu: a GPU of the plan's architecture; None means the known one with as many
            multiprocessors as the plan is organized for, or the one that stands for the
            architecture.

    Raises:
        ValueError: a GPU of another architecture.

    Example:
        >>> import numpy as np
        >>> from tessera_cupy import ArraySpec, BlockMask, make_plan
        >>> mask = BlockMask.from_dense(np.ones((8, 8), bool), (128, 128))
        >>> plan = make_plan(mask, ArraySpec((1, 8, 1024, 128), "bfloat16"), arch="sm_80")
        >>> predict(plan).gpu.name
        'A100-SXM4-80GB'
    """
    gpu = gpu or _gpu_of(plan)
    return predict_tasks(plan.tiles(), plan.tasks(), plan.config, plan.request, gpu)


def _gpu_of(plan: Plan) -> Gpu:
    typical = typical_gpu(plan.request.arch)
    alike = (g for g in GPUS.values() if (g.arch, g.sms) == (typical.arch, plan.model.sms))
    return next(alike, typical)


def predict_tasks(
    tiles: Tiles, tasks: Tasks, config: KernelConfig, request: Request, gpu: Gpu
) -> Prediction:
    """As :func:`predict`, from a plan's parts.

    Args:
        tiles: mapping's output.
        tasks: what organization made of the tiles.
        config: the kernel.
        request: sizes; of the architecture only ``config`` is looked at.
        gpu: the GPU.

    Raises:
        ValueError: a GPU of another architecture than the kernel's.
    """
    if gpu.arch != config.arch:
        expected = f"a GPU of {config.arch}, which the kernel is for"
        raise ValueError(
            wrong("gpu", expected, f"{gpu.name} of {gpu.arch}", "plan for that architecture")
        )
    return predict_work(count_work(tiles, tasks, config), config, request, gpu)


def predict_work(work: Work, config: KernelConfig, request: Request, gpu: Gpu) -> Prediction:
    """As :func:`predict_tasks`, from counts of the tasks' work."""
    costs = COSTS[config.kernel]
    ctas = 1 if costs.persistent else config.ctas_per_sm(gpu.limits)
    slots = gpu.sms * ctas
    beside = _residents(len(work), ctas, gpu)
    parts = component_cycles(work, config, gpu)
    if costs.persistent:
        cycles = np.maximum(_together(parts, costs.overlap), _alone(work, config, gpu))
    else:
        memory = {name: beside * parts[name] for name in ("L2", "shared memory")}
        queued = {"products and softmax": _queued(work, config, gpu, beside)}
        cycles = _together(queued | memory, costs.overlap)
    cycles = cycles + costs.task
    place = in_turn if costs.persistent else first_free
    slot, start = place(cycles, slots)
    per_ms = gpu.clock_ghz * 1e6
    dram_ms = _dram_bytes(work, request, slots, gpu) / (gpu.dram_gbs * 1e6)
    last = float((start + cycles).max(initial=0)) / per_ms
    stretch = max(1.0, dram_ms / last) if last else 1.0
    merge_ms = _merge_ms(work, config, gpu)
    bounds = {name: float(of.sum()) / gpu.sms / per_ms for name, of in parts.items()}
    return Prediction(
        gpu=gpu,
        ms=LAUNCH_MS + last * stretch + merge_ms,
        attend_ms=last * stretch,
        merge_ms=merge_ms,
        slots=slots,
        cycles=cycles * stretch,
        slot=slot,
        start_ms=start / per_ms * stretch,
        end_ms=(start + cycles) / per_ms * stretch,
        bounds={**bounds, "DRAM": dram_ms},
    )


def _residents(tasks: int, ctas: int, gpu: Gpu) -> NDArray[np.float64]:
    """(N,) CTAs on a multiprocessor while each task runs.

    Tasks of a round that is not full lie on all multiprocessors alike.
    """
    slots = gpu.sms * ctas
    whole = tasks // slots * slots
    beside = np.full(tasks, float(ctas))
    beside[whole:] = max(1.0, (tasks - whole) / gpu.sms)
    return beside


def component_cycles(work: Work, config: KernelConfig, gpu: Gpu) -> dict[str, NDArray[np.float64]]:
    """Cycles of each task's components, as if each were all there is.

    Returns:
        (N,) for ``"matrix"``, ``"softmax"``, ``"L2"`` and ``"shared memory"``.
    """
    costs = COSTS[config.kernel]
    computed = work.parts.sum(axis=1)
    scores = computed * float(config.rows_together * config.tile_kv)
    row_bytes = 2 * 2 * config.head_dim  # of K and V
    rows = work.rows + work.gathered * (costs.cp_async - 1)
    share = min(_PORT, gpu.l2_per_clock / max(1, min(gpu.sms, len(work))))
    shared = np.zeros(len(work))
    if not costs.persistent:
        q_rows = 0 if config.q_in_registers else config.rows_together
        read = config.tile_kv * row_bytes + q_rows * (row_bytes // 2)
        shared = (computed * read + work.rows * row_bytes) / _SHARED
    return {
        "matrix": scores * (4 * config.head_dim / gpu.matrix_rate(config.kernel)),
        "softmax": scores * _softmax(work, config, gpu),
        "L2": rows * row_bytes * np.where(work.twins, 0.5, 1.0) / share,
        "shared memory": shared,
    }


def _softmax(work: Work, config: KernelConfig, gpu: Gpu) -> NDArray[np.float64]:
    """(N,) cycles of a score: its exponential and instructions, more where it may be masked."""
    costs = COSTS[config.kernel]
    masked = work.masked.sum(axis=1) / np.maximum(1, work.parts.sum(axis=1))
    cycles: NDArray[np.float64] = 1 / gpu.ex2 + (costs.score + masked * costs.masked) / _LANES
    return cycles


def _queued(
    work: Work, config: KernelConfig, gpu: Gpu, beside: NDArray[np.float64]
) -> NDArray[np.float64]:
    """(N,) cycles of tasks whose CTAs queue for products and softmax, a step each in turn.

    Each warp of a CTA is on a quarter of the multiprocessor. Warps that compute a step meet those
    of the CTAs beside it always where all warps compute, or half of them, and not where one of
    four does: CTAs begin at different quarters.
    """
    costs = COSTS[config.kernel]
    size = float(config.rows_together * config.warps * config.tile_kv)
    each = [
        np.full(len(work), size * 4 * config.head_dim / gpu.matrix_rate(config.kernel)),
        size * _softmax(work, config, gpu),
    ]
    computing = work.parts.sum(axis=1) / np.maximum(1, work.parts.shape[1] * work.steps)
    meet = np.clip(4 * computing - 1, 0, 1)
    waiting = [np.zeros(len(work)), np.zeros(len(work))]  # at each of the two, on average
    step = np.zeros(len(work))
    for ctas in range(1, math.ceil(beside.max(initial=0)) + 1):
        stays = [one * (1 + meet * n) for one, n in zip(each, waiting, strict=True)]
        with_one_more = stays[0] + stays[1] + costs.latency
        waiting = [ctas * stay / with_one_more for stay in stays]
        step += np.clip(beside - (ctas - 1), 0, 1) * (with_one_more - step)
    cycles: NDArray[np.float64] = work.steps * step
    return cycles


def _together(parts: dict[str, NDArray[np.float64]], p: float) -> NDArray[np.float64]:
    total: Any = sum(cycles**p for cycles in parts.values())
    together: NDArray[np.float64] = total ** (1 / p)
    return together


def _alone(work: Work, config: KernelConfig, gpu: Gpu) -> NDArray[np.float64]:
    """(N,) least cycles of tasks: those of the busiest part, whose work does not overlap itself."""
    each = 4 * config.head_dim / gpu.matrix_rate(config.kernel) + _softmax(work, config, gpu)
    size = float(config.rows_together * config.tile_kv)
    alone: NDArray[np.float64] = work.parts.max(axis=1, initial=0) * (size * each)
    return alone


def _dram_bytes(work: Work, request: Request, slots: int, gpu: Gpu) -> float:
    """Bytes that DRAM gives and takes: q and o, and K and V as the module's docstring says."""
    row_bytes = 2 * request.head_dim
    kv_head = work.head // max(1, request.q_heads // request.kv_heads)
    heads = request.batch * request.kv_heads
    loaded = np.bincount(kv_head, work.rows, minlength=heads)
    rounds = np.ones(heads)
    if 2 * row_bytes * request.skv > gpu.l2_bytes:
        rounds = np.ceil(np.bincount(kv_head, minlength=heads) / slots)
    rows = np.minimum(loaded, rounds * request.skv).sum()
    return float(
        2 * row_bytes * rows + 2 * row_bytes * request.batch * request.q_heads * request.sq
    )


def _merge_ms(work: Work, config: KernelConfig, gpu: Gpu) -> float:
    """Milliseconds of merging: a launch, and the parts through L2."""
    parts = int(work.is_part.sum())
    if not parts:
        return 0.0
    workspace = 4 * parts * config.tile_q * (config.head_dim + 2)
    return MERGE_MS + workspace / (MERGE_L2 * gpu.l2_per_clock * gpu.clock_ghz * 1e6)
