"""Times of plans on one mask: measured on the GPU here, or predicted for a GPU that is not.

A measured output is right when sampled rows keep to the rule of :mod:`tessera_cupy.bench.check`,
and the rest is finite and within rounding of the first right plan's output; a plan whose output
is wrong has no time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from statistics import geometric_mean
from typing import Any, Protocol

import numpy as np

from tessera_cupy import interop
from tessera_cupy.attention import make_plan
from tessera_cupy.bench import gpu
from tessera_cupy.bench.check import Expected
from tessera_cupy.bench.check_there import as_float32, expect_there
from tessera_cupy.bench.race import race
from tessera_cupy.bench.rows_there import Counted, kept_rows
from tessera_cupy.cost import GPUS, predict
from tessera_cupy.errors import PlanNotEligibleError, PlanOverflowError, TesseraError
from tessera_cupy.gpus import arch_of
from tessera_cupy.kernels.arch import Arch, get_arch
from tessera_cupy.masks import BlockMask, KeySlices
from tessera_cupy.masks.key_slices import block_mask
from tessera_cupy.masks.summary import MaskSummary
from tessera_cupy.plan import Plan
from tessera_cupy.regimes import PlanSpec
from tessera_cupy.regimes.candidates import made_online
from tessera_cupy.regimes.measurements import Case, PlanTime
from tessera_cupy.request import ArraySpec

#: Turns of a profile's plans, and milliseconds of one; an even number, so that halves compare.
ROUNDS, RUN_MS = 6, 3.0

_DTYPE = "bfloat16"
_CHECKED_HEADS, _CHECKED_ROWS = 2, 6
# Two right outputs differ by less, relative to the largest element of a row: what rounding to
# bfloat16 (2^-8) of weights and output comes to.
_ROUNDING = 2.0**-5
_BFLOAT16_NAN = 0x7FC0
# Normal numbers that q, k and v are copied from; an odd number, so that heads differ.
_POOL = (1 << 25) + 1
# What keeps the GPU busy while the host queues calls that are over sooner than it makes them:
# writes of so many bytes, 60 us each on an H200, some for the first calls and one for each two of
# the others. Without the first ones a plan of 20 us seemed to take 100. Where the host is slower
# still, so that the GPU began before all was queued, the run is made again with twice as many.
_PLUG_BYTES = 1 << 28
_PLUGS_FIRST = 5
_MOST_PLUGS = 200
_PLUGGED_MS = 0.15


class GpuLostError(TesseraError, RuntimeError):
    """The GPU cannot be used by this process any more.

    Attributes:
        plan: what it failed at; None where several were under way.
        case: what is known of the mask: nothing, or that the plan failed.
    """

    def __init__(self, cause: Exception, plan: PlanSpec | None = None) -> None:
        """``cause`` is CUDA's error."""
        at = f" at {plan.name}" if plan else ""
        super().__init__(
            f"The GPU failed{at}: {one_line(cause)}. Nothing runs on it in this process any more. "
            "Fix: run the command again, which goes on without this mask, and report the plan."
        )
        self.plan = plan
        self.case: Case | None = None


class Clock(Protocol):
    """What gives plans their times."""

    @property
    def arch(self) -> Arch:
        """Architecture of the GPU."""

    @property
    def device(self) -> str:
        """Name of the GPU."""

    @property
    def most_active(self) -> float:
        """Entries of a mask that it is made for, over all heads."""

    @property
    def to_device(self) -> Any:
        """Takes a NumPy array to where masks shall be."""

    def summary(self, mask: BlockMask | KeySlices) -> MaskSummary | None:
        """A mask's figures as a request sees them; None where the host reads the mask."""

    def times(
        self, mask: BlockMask | KeySlices, heads: int, head_dim: int, plans: Sequence[PlanSpec]
    ) -> tuple[PlanTime, ...]:
        """Each plan's time on a mask, or why it has none."""

    def free(self) -> None:
        """Give memory back that nothing uses, after there was too little."""


class GpuClock:
    """Measures on the current GPU, in bfloat16.

    Args:
        rounds: turns of each plan, an even number.
        run_ms: least milliseconds of a turn.

    Raises:
        NoGpuError: there is none.
        UnsupportedGpuError: there are no kernels for it.
    """

    most_active = 3e6

    def __init__(self, rounds: int = ROUNDS, run_ms: float = RUN_MS) -> None:
        cupy = interop.import_cupy()
        self.arch = arch_of(cupy.cuda.Device().id)
        self.device = gpu.name()
        self.to_device = cupy.asarray
        self._rounds, self._run_ms = rounds, run_ms
        numbers = np.random.default_rng(0).standard_normal(_POOL, np.float32)
        # As bits: CuPy has no kernels of its own that copy, fill or index bfloat16.
        self._pool = cupy.asarray(numbers.astype(interop.numpy_dtype(_DTYPE)).view(np.uint16))
        self._plug = cupy.empty(_PLUG_BYTES, np.uint8)
        self._arrays = lru_cache(maxsize=1)(self._make_arrays)
        self._counted = lru_cache(maxsize=1)(self._count)

    def summary(self, mask: BlockMask | KeySlices) -> MaskSummary | None:
        """What the GPU counts in a mask that is over its arrays."""
        counted = self._counted(mask)
        return None if counted is None else counted.summary

    def arrays(self, heads: int, tokens: int, head_dim: int) -> tuple[Any, ...]:
        """q, k, v and an output, bfloat16 of (1, heads, tokens, head_dim); the last ones again."""
        made = self._arrays(heads, tokens, head_dim)
        dtype = interop.numpy_dtype(_DTYPE)
        return tuple(bits.view(dtype) for bits in made[:4])

    def times(
        self, mask: BlockMask | KeySlices, heads: int, head_dim: int, plans: Sequence[PlanSpec]
    ) -> tuple[PlanTime, ...]:
        """Check each plan's output, then time those that are right in turns.

        Raises:
            MemoryError: q, k, v and two outputs of this size do not fit.
            GpuLostError: CUDA failed in a way that leaves nothing to go on with.
        """
        cupy = interop.import_cupy()
        tokens = mask.shape[1]
        q, k, v, out = self.arrays(heads, tokens, head_dim)
        bits = self._arrays(heads, tokens, head_dim)
        expected = expect_there(
            cupy,
            kept_rows(mask, self._counted(mask)),
            *bits[:3],
            heads=min(heads, _CHECKED_HEADS),
            rows=_CHECKED_ROWS,
        )
        found: list[PlanTime] = []
        ready: dict[str, Plan] = {}
        for spec in plans:
            try:
                plan = make_plan(mask, q, k, v, regime=spec)
                bits[3].fill(_BFLOAT16_NAN)  # so that an element that is never written shows
                _run_whole(plan, partial(plan.run, q, k, v, out=out))
                problem = _problem(cupy, bits[3], expected, bits[4] if ready else None)
            except PlanNotEligibleError:
                found.append(PlanTime(spec, "not eligible"))
            except MemoryError as error:
                found.append(PlanTime(spec, "dropped", note=one_line(error)))
            except (TesseraError, ValueError) as error:
                found.append(PlanTime(spec, "failed", note=one_line(error)))
            except RuntimeError as error:  # CUDA's are of this kind
                raise GpuLostError(error, spec) from error
            else:
                if problem:
                    found.append(PlanTime(spec, "wrong output", note=problem))
                    continue
                if not ready:
                    bits[4][:] = bits[3]
                ready[spec.name] = plan
        try:
            return (*found, *self._timed(ready, q, k, v, out))
        except RuntimeError as error:
            raise GpuLostError(error) from error

    def free(self) -> None:
        """Forget q, k, v and the last mask, and give CuPy's free blocks back to the GPU."""
        self._arrays.cache_clear()
        self._counted.cache_clear()
        interop.import_cupy().get_default_memory_pool().free_all_blocks()

    def _timed(self, ready: dict[str, Plan], q: Any, k: Any, v: Any, out: Any) -> list[PlanTime]:
        calls = {name: partial(plan.run, q, k, v, out=out) for name, plan in ready.items()}
        known: dict[int, float] = {}
        raced = race(
            calls,
            lambda call, count: self._run(call, count, known),
            rounds=self._rounds,
            run_ms=self._run_ms,
        )
        timed = []
        for name, one in raced.items():
            runs = one.rounds or (one.ms,)
            note = "" if one.whole else f"{len(one.rounds) or 'no'} turns, as it was far behind"
            timed.append(
                PlanTime(ready[name].spec, "timed", one.ms, min(runs), max(runs), note, one.rounds)
            )
        return timed

    def _run(self, call: Callable[[], object], count: int, known: dict[int, float]) -> float:
        """Milliseconds of a call, of so many back to back."""
        cupy = interop.import_cupy()
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        stream = cupy.cuda.get_current_stream().ptr
        # A single call is how long it takes that is asked: what is known may be the host's pause.
        plug = count == 1 or known.get(id(call), 0.0) < _PLUGGED_MS
        plugs = _PLUGS_FIRST + count // 2 if plug else 0
        while True:
            for _ in range(plugs):
                cupy.cuda.runtime.memsetAsync(self._plug.data.ptr, 0, _PLUG_BYTES, stream)
            # What the first call finds in the L2 is of no account, nor is when it begins.
            call()
            begin.record()
            for _ in range(count):
                call()
            end.record()
            began = begin.done
            end.synchronize()
            if not (plugs and began) or 2 * plugs > _MOST_PLUGS:
                break
            plugs *= 2
        known[id(call)] = ms = float(cupy.cuda.get_elapsed_time(begin, end)) / count
        return ms

    def _count(self, mask: BlockMask | KeySlices) -> Counted | None:
        if block_mask(mask).source is None:
            return None
        return Counted(mask, self.arch.name)

    def _make_arrays(self, heads: int, tokens: int, head_dim: int) -> tuple[Any, ...]:
        """Bits of q, k, v and of two outputs, (1, heads, tokens, head_dim)."""
        cupy = interop.import_cupy()
        shape = (1, heads, tokens, head_dim)
        count = heads * tokens * head_dim
        made = []
        for third in range(3):
            flat = cupy.empty(count, np.uint16)
            # Each from another place of the pool, again and again.
            pool = cupy.concatenate(
                [self._pool[third * _POOL // 3 :], self._pool[: third * _POOL // 3]]
            )
            for begin in range(0, count, _POOL):
                part = flat[begin : begin + _POOL]
                part[:] = pool[: len(part)]
            made.append(flat.reshape(shape))
        return (*made, cupy.empty(shape, np.uint16), cupy.empty(shape, np.uint16))


class ModelClock:
    """Predicts for GPUs that are not here, from the cost model; masks are on the host.

    A time is the geometric mean over the GPUs of the architecture that the model knows, so that no
    plan wins by a hair on one and loses by far on another.

    Args:
        arch: architecture name, such as ``"sm_80"``.

    Raises:
        ValueError: an unknown architecture.
    """

    most_active = 2e5  # the host makes every plan

    def __init__(self, arch: str) -> None:
        self.arch = get_arch(arch)
        self.gpus = [gpu for gpu in GPUS.values() if gpu.arch == self.arch.name]
        self.device = ", ".join(gpu.name for gpu in self.gpus)
        self.to_device = np.asarray

    def summary(self, mask: BlockMask | KeySlices) -> MaskSummary | None:
        """None: the host reads the mask."""
        return None

    def times(
        self, mask: BlockMask | KeySlices, heads: int, head_dim: int, plans: Sequence[PlanSpec]
    ) -> tuple[PlanTime, ...]:
        """Plan each on the host, and predict its time."""
        spec = ArraySpec((1, heads, mask.shape[0], head_dim), _DTYPE)
        found = []
        for one in plans:
            try:
                plan = make_plan(mask, spec, regime=one, arch=self.arch.name)
                ms = geometric_mean(predict(plan, gpu).ms for gpu in self.gpus)
            except PlanNotEligibleError:
                found.append(PlanTime(one, "not eligible"))
                continue
            found.append(PlanTime(one, "timed", ms, ms, ms))
        return tuple(found)

    def free(self) -> None:
        """Nothing is held."""


def _run_whole(plan: Plan, call: Callable[[], object]) -> None:
    """Run once with room for all lists, of which a GPU that plans by itself may not know."""
    call()
    mask = plan.mask
    if mask.source is None or not made_online(plan.spec, slices=mask.slices is not None):
        return
    try:
        plan.check()
    except PlanOverflowError:
        call()
        plan.check()


def _problem(xp: Any, bits: Any, expected: Expected, first: Any | None) -> str | None:
    """What is wrong with an output's bits, beside float64 and another plan's, if anything is."""
    sampled = np.stack(
        [
            [xp.asnumpy(bits[0, h, row]) for row in rows.tolist()]
            for h, rows in enumerate(expected.rows)
        ]
    )
    check = expected.check_sampled(sampled.view(interop.numpy_dtype(_DTYPE)))
    if not check.passed:
        return f"error {check.error:.3g} where {check.allowed:.3g} is allowed"
    if first is None:
        return None
    wrong = 0
    for h in range(bits.shape[1]):  # head by head, so that large outputs need little memory
        a, b = as_float32(xp, bits[0, h]), as_float32(xp, first[0, h])
        limit = _ROUNDING * xp.abs(b).max(axis=-1, keepdims=True) + np.float32(1e-6)
        wrong += (~(xp.abs(a - b) <= limit)).sum()  # also of NaN
    return f"{int(wrong):,} elements differ from those of another plan" if int(wrong) else None


def one_line(error: Exception) -> str:
    """The first line of an error, cut to what a file keeps."""
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
