"""Predicts how long a GPU takes for a plan, from its tiles and tasks alone.

A task's time is that of three things which a multiprocessor does at the same time, in cycles of it
when its CTAs have all the work that they can have:

- matrix: products, of the parts of a tile that take part in a step, at the GPU's matrix rate for
  the kernel's instructions;
- softmax: exponentials at their rate, and the instructions that go with scores, with those that
  are masked, and with the 16-byte copies of a kernel that copies by instructions;
- L2: K and V rows, at the multiprocessor's share of L2's bandwidth.

They overlap, but not wholly: together they take ``(matrix^p + softmax^p + l2^p)^(1/p)``, where
``p`` is a constant of the kernel (1 would be one after the other, infinity the longest alone). A
part of a tile whose neighbours skip, or a CTA alone on its multiprocessor, has nothing to overlap
with: no task is faster than the products and the softmax of its busiest part one after the other,
and what a step waits for its copies. Each task costs a constant besides: its Q, its first K, its O.

Tasks go to slots for CTAs as on the GPU (:mod:`tessera_cupy.cost.timeline`). DRAM gives K and V of
a head once, if they fit L2, else once for each round of CTAs; a kernel that would be faster than
that takes as long. Launches and the merge of split tiles come before and after.

The constants are fitted to times measured on an H200; ``tests/cost/test_calibration.py`` has these,
and how far the model is off. Other GPUs get the same constants and figures of their own.

The model does not know: how a GPU's power limit changes its clock with the load (an H200's is
taken as it was in long runs, others run at their boost clock); how L2 is shared while tasks run,
latencies that few CTAs do not hide other than by a constant, DRAM's efficiency; what a compiler
makes of a kernel on another generation, spills included; bank conflicts; which CTAs the hardware
puts on which multiprocessor; whether neighbours take turns badly; the fallback of
``attend_wgmma`` that takes tasks twice. Token bits are taken for any other masking. A first call's
compilation and the plan's own making are not in it.
"""

from __future__ import annotations

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
        copy: instructions of a thread for each 16 bytes that it copies.
        cp_async: how many times as long as the copy engine's L2 gives rows to ``cp.async``.
        latency: cycles of a step that a CTA alone on its multiprocessor waits.
        task: cycles of a task besides its steps.
        persistent: whether CTAs take tasks in turn, or there is a CTA for each.
    """

    overlap: float
    score: float
    masked: float
    copy: float
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
        copy=0,
        cp_async=1.75,
        latency=0,
        task=5000,
        persistent=True,
    ),
    "attend_mma": KernelCosts(
        overlap=1.9,
        score=5.8,
        masked=6.8,
        copy=4,
        cp_async=1.75,
        latency=800,
        task=1300,
        persistent=False,
    ),
}

LAUNCH_MS = 0.003
MERGE_MS = 0.003
_LANES = 128  # threads of a multiprocessor that issue an instruction in a cycle
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
        bounds: milliseconds that matrix products, softmax, L2 and DRAM would each take if they were
            all there is, spread evenly: ``"matrix"``, ``"softmax"``, ``"L2"`` and ``"DRAM"``.
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
    parts = component_cycles(work, config, gpu)
    together = _together(parts, costs.overlap)
    ctas = 1 if costs.persistent else config.ctas_per_sm(gpu.limits)
    slots = gpu.sms * ctas
    # Fewer tasks than slots lie on all multiprocessors alike.
    residents = min(float(ctas), max(1.0, len(work) / gpu.sms))
    alone = _alone(work, config, gpu, parts["L2"])
    cycles = np.maximum(residents * together, alone) + costs.task
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


def component_cycles(work: Work, config: KernelConfig, gpu: Gpu) -> dict[str, NDArray[np.float64]]:
    """Cycles of each task's matrix products, softmax and L2 reads, as if each were all there is.

    Returns:
        (N,) for ``"matrix"``, ``"softmax"`` and ``"L2"``.
    """
    costs = COSTS[config.kernel]
    size = config.rows_together * config.tile_kv * (1.0 if costs.persistent else _lopsided(work))
    scores, masked = work.parts.sum(axis=1) * size, work.masked.sum(axis=1) * size
    row_bytes = 2 * 2 * config.head_dim  # of K and V
    copies = work.rows * (row_bytes / 16)
    softmax = scores * (1 / gpu.ex2 + costs.score / _LANES)
    softmax = softmax + (masked * costs.masked + copies * costs.copy) / _LANES
    slow = work.gathered if costs.persistent else work.rows
    rows = work.rows + slow * (costs.cp_async - 1)
    share = min(_PORT, gpu.l2_per_clock / max(1, min(gpu.sms, len(work))))
    return {
        "matrix": scores * (4 * config.head_dim / gpu.matrix_rate(config.kernel)),
        "softmax": softmax,
        "L2": rows * row_bytes * np.where(work.twins, 0.5, 1.0) / share,
    }


def _lopsided(work: Work) -> float:
    """How many times as long a multiprocessor takes as if its quarters had equal work.

    Each warp of a CTA is on a quarter of its own, which is the same in every CTA; so where all
    tiles leave the same warp without rows, its quarter has nothing to do. A warpgroup is on all.
    """
    of_parts = work.parts.sum(axis=0)
    return float(of_parts.max(initial=0) * len(of_parts) / max(1, of_parts.sum()))


def _together(parts: dict[str, NDArray[np.float64]], p: float) -> NDArray[np.float64]:
    total: Any = sum(cycles**p for cycles in parts.values())
    together: NDArray[np.float64] = total ** (1 / p)
    return together


def _alone(
    work: Work, config: KernelConfig, gpu: Gpu, l2: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Least cycles of each task: those of its busiest part, whose work does not overlap itself.

    A warp has a quarter of the multiprocessor to itself, a warpgroup all of it.
    """
    costs = COSTS[config.kernel]
    rows = config.rows_together * (1 if costs.persistent else config.warps)
    scores = work.parts.max(axis=1, initial=0) * float(rows * config.tile_kv)
    each = 4 * config.head_dim / gpu.matrix_rate(config.kernel)
    each += 1 / gpu.ex2 + costs.score / _LANES
    copying = 0.0 if costs.persistent else np.maximum(l2, costs.latency * work.steps)
    alone: NDArray[np.float64] = scores * each + copying
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
    """Milliseconds of merging: a launch, and the parts read from L2."""
    parts = int(work.is_part.sum())
    if not parts:
        return 0.0
    workspace = 4 * parts * config.tile_q * (config.head_dim + 2)
    return MERGE_MS + workspace / (gpu.l2_per_clock * gpu.clock_ghz * 1e6)
