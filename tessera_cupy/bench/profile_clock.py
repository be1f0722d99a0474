"""Times of plans on one mask: measured on the GPU here, or predicted for a GPU that is not.

A measured output is right when sampled rows keep to the rule of :mod:`tessera_cupy.bench.check`,
and the rest is finite and within rounding of the first right plan's output; a plan whose output
is wrong has no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tessera_cupy import interop
from tessera_cupy.attention import make_plan
from tessera_cupy.bench import gpu
from tessera_cupy.bench.check import Expected, expect
from tessera_cupy.bench.slices_mass import kept_of
from tessera_cupy.cost import predict, typical_gpu
from tessera_cupy.errors import PlanNotEligibleError, TesseraError
from tessera_cupy.gpus import arch_of
from tessera_cupy.kernels.arch import Arch, get_arch
from tessera_cupy.masks import BlockMask, KeySlices
from tessera_cupy.plan import Plan
from tessera_cupy.regimes import PlanSpec
from tessera_cupy.regimes.measurements import PlanTime
from tessera_cupy.request import ArraySpec

_DTYPE = "bfloat16"
_CHECKED_HEADS, _CHECKED_ROWS = 2, 6
_WARM_UP, _RUNS, _RUN_MS = 1, 5, 4.0
# A plan that takes so many times as long as the fastest in one run is not timed again.
_HOPELESS = 2.5
# Two right outputs differ by less, relative to the largest element of a row: what rounding to
# bfloat16 (2^-8) of weights and output comes to.
_ROUNDING = 2.0**-5
_BFLOAT16_NAN = 0x7FC0
# Normal numbers that q, k and v are copied from; an odd number, so that heads differ.
_POOL = (1 << 25) + 1


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

    def times(
        self, mask: BlockMask | KeySlices, heads: int, head_dim: int, plans: Sequence[PlanSpec]
    ) -> tuple[PlanTime, ...]:
        """Each plan's time on a mask, or why it has none."""


@dataclass(frozen=True)
class _Ready:
    spec: PlanSpec
    plan: Plan
    probe_ms: float


class GpuClock:
    """Measures on the current GPU, in bfloat16.

    Raises:
        NoGpuError: there is none.
        UnsupportedGpuError: there are no kernels for it.
    """

    most_active = 3e6

    def __init__(self) -> None:
        cupy = interop.import_cupy()
        self.arch = arch_of(cupy.cuda.Device().id)
        self.device = gpu.name()
        self.to_device = cupy.asarray
        numbers = np.random.default_rng(0).standard_normal(_POOL, np.float32)
        # As bits: CuPy has no kernels of its own that copy, fill or index bfloat16.
        self._pool = cupy.asarray(numbers.astype(interop.numpy_dtype(_DTYPE)).view(np.uint16))
        self._arrays = lru_cache(maxsize=2)(self._make_arrays)
        self._host = lru_cache(maxsize=4)(self._make_host)

    def times(
        self, mask: BlockMask | KeySlices, heads: int, head_dim: int, plans: Sequence[PlanSpec]
    ) -> tuple[PlanTime, ...]:
        """Check each plan's output, then time those that are right in turns."""
        cupy = interop.import_cupy()
        q, k, v, out, first = self._arrays(heads, mask.shape[1], head_dim)
        out_bits = out.view(cupy.uint16)
        checked = min(heads, _CHECKED_HEADS)
        expected = expect(
            partial(kept_of, _host_mask(mask)),
            *self._host(checked, mask.shape[1], head_dim),
            rows=_CHECKED_ROWS,
            dtype=out.dtype,
            on_head=lambda: None,
        )
        found: list[PlanTime] = []
        ready: list[_Ready] = []
        for spec in plans:
            try:
                plan = make_plan(mask, q, k, v, regime=spec)
                call = partial(plan.run, q, k, v, out=out)
                out_bits.fill(_BFLOAT16_NAN)  # so that an element that is never written shows
                call()
                problem = _problem(cupy, out_bits, expected, first if ready else None)
            except PlanNotEligibleError:
                found.append(PlanTime(spec, "not eligible"))
            except (TesseraError, ValueError, MemoryError) as error:
                found.append(PlanTime(spec, "failed", note=_one_line(error)))
            else:
                if problem:
                    found.append(PlanTime(spec, "wrong output", note=problem))
                    continue
                if not ready:
                    first[:] = out_bits
                ready.append(_Ready(spec, plan, gpu.once_ms(call)))
        return (*found, *self._timed(ready, q, k, v, out))

    def _timed(self, ready: Sequence[_Ready], q: Any, k: Any, v: Any, out: Any) -> list[PlanTime]:
        fastest = min((one.probe_ms for one in ready), default=0.0)
        slow = [one for one in ready if one.probe_ms > _HOPELESS * fastest]
        calls = {
            one.spec.name: partial(one.plan.run, q, k, v, out=out)
            for one in ready
            if one not in slow
        }
        timings = gpu.timings(calls, lambda: None, warm_up=_WARM_UP, runs=_RUNS, run_ms=_RUN_MS)
        timed = [
            PlanTime(one.spec, "timed", t.median, t.low, t.high)
            for one in ready
            if one not in slow
            for t in [timings[one.spec.name]]
        ]
        return timed + [
            PlanTime(one.spec, "timed", one.probe_ms, one.probe_ms, one.probe_ms, "one run")
            for one in slow
        ]

    def _make_arrays(self, heads: int, tokens: int, head_dim: int) -> tuple[Any, ...]:
        """q, k, v, an output, and the bits of another, (1, heads, tokens, head_dim)."""
        cupy = interop.import_cupy()
        shape = (1, heads, tokens, head_dim)
        count = heads * tokens * head_dim
        made = []
        for third in range(3):
            flat = cupy.empty(count, cupy.uint16)
            # Each from another place of the pool, again and again.
            pool = cupy.concatenate(
                [self._pool[third * _POOL // 3 :], self._pool[: third * _POOL // 3]]
            )
            for begin in range(0, count, _POOL):
                part = flat[begin : begin + _POOL]
                part[:] = pool[: len(part)]
            made.append(flat.reshape(shape))
        made.append(cupy.empty(shape, cupy.uint16))
        dtype = interop.numpy_dtype(_DTYPE)
        return (*[bits.view(dtype) for bits in made], cupy.empty(shape, cupy.uint16))

    def _make_host(self, heads: int, tokens: int, head_dim: int) -> tuple[NDArray[np.float32], ...]:
        """The first heads of q, k and v on the host; they are the same for any number of heads."""
        cupy = interop.import_cupy()
        arrays = self._arrays(heads, tokens, head_dim)[:3]
        return tuple(cupy.asnumpy(array).astype(np.float32) for array in arrays)


class ModelClock:
    """Predicts for a GPU that is not here, from the cost model; masks are on the host.

    Args:
        arch: architecture name, such as ``"sm_80"``.

    Raises:
        ValueError: an unknown architecture.
    """

    most_active = 2e5  # the host makes every plan

    def __init__(self, arch: str) -> None:
        self.arch = get_arch(arch)
        self.gpu = typical_gpu(self.arch)
        self.device = self.gpu.name
        self.to_device = np.asarray

    def times(
        self, mask: BlockMask | KeySlices, heads: int, head_dim: int, plans: Sequence[PlanSpec]
    ) -> tuple[PlanTime, ...]:
        """Plan each on the host, and predict its time."""
        spec = ArraySpec((1, heads, mask.shape[0], head_dim), _DTYPE)
        found = []
        for one in plans:
            try:
                plan = make_plan(mask, spec, regime=one, arch=self.arch.name)
                ms = predict(plan, self.gpu).ms
            except PlanNotEligibleError:
                found.append(PlanTime(one, "not eligible"))
                continue
            found.append(PlanTime(one, "timed", ms, ms, ms))
        return tuple(found)


def _host_mask(mask: BlockMask | KeySlices) -> BlockMask | KeySlices:
    return mask.on_host() if isinstance(mask, BlockMask) else mask


def _problem(xp: Any, bits: Any, expected: Expected, first: Any | None) -> str | None:
    """What is wrong with an output's bits, beside float64 and another plan's, if anything is."""
    sampled = np.stack([xp.asnumpy(bits[0, h, rows]) for h, rows in enumerate(expected.rows)])
    check = expected.check_sampled(sampled.view(interop.numpy_dtype(_DTYPE)))
    if not check.passed:
        return f"error {check.error:.3g} where {check.allowed:.3g} is allowed"
    if first is None:
        return None
    a, b = _float32(xp, bits), _float32(xp, first)
    limit = _ROUNDING * xp.abs(b).max(axis=-1, keepdims=True) + np.float32(1e-6)
    right = xp.abs(a - b) <= limit  # False for NaN
    wrong = int(right.size - right.sum())
    return f"{wrong:,} elements differ from those of another plan" if wrong else None


def _float32(xp: Any, bits: Any) -> Any:
    """Bfloat16 as float32, of which its bits are the upper half."""
    return (bits.astype(xp.uint32) << 16).view(xp.float32)


def _one_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
