"""The front door: from a mask and q, k, v to attention.

``block_sparse_attention`` is the one call; ``make_plan`` gives the plan behind it, to look
at, to keep, or to make for a GPU that is not here.
"""

from __future__ import annotations

import math
import struct
import threading
import weakref
from dataclasses import dataclass
from functools import cache
from typing import Any

from tessera_cupy import interop, reference
from tessera_cupy.errors import PlanNotEligibleError, wrong
from tessera_cupy.explain import explain, summary
from tessera_cupy.kernels import catalog
from tessera_cupy.kernels.arch import Arch, arch_for, get_arch
from tessera_cupy.mapping import Tiles, map_mask, why_not
from tessera_cupy.masks import BlockMask
from tessera_cupy.organization import DeviceModel, Tasks, organize
from tessera_cupy.regimes import Features, PlanSpec, Table, load_for
from tessera_cupy.request import ArraySpec, Request, make_request

#: Architecture that host arrays are planned for, unless ``arch`` says otherwise.
HOST_ARCH = "sm_90a"

#: Share of the L2 cache that one group of heads' K and V may fill; q, o and the plan need the rest.
_L2_SHARE = 0.6


class _Prepared:
    """What a plan has worked out, without the mask: a cache keyed by the mask ends with it."""

    def __init__(
        self,
        request: Request,
        spec: PlanSpec,
        config: catalog.KernelConfig,
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
        self._uploaded: dict[int, Any] = {}

    def tiles(self, mask: BlockMask) -> Tiles:
        with self._lock:
            if self._tiles is None:
                spec = self.spec
                self._tiles = map_mask(mask, spec.mapping, spec.tile_q, spec.tile_kv)
            return self._tiles

    def tasks(self, mask: BlockMask) -> Tasks:
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

    def uploaded(self, mask: BlockMask, device: int) -> Any:
        """The arrays on a GPU, which is the current device."""
        from tessera_cupy.kernels import launch

        with self._lock:
            if device not in self._uploaded:
                self._uploaded[device] = launch.upload(self.tiles(mask), self.tasks(mask))
            return self._uploaded[device]


@dataclass(frozen=True)
class PlanChoice:
    """Where a plan came from.

    Attributes:
        regime: name of the regime that ranked it.
        why: the profile table's reason.
        passed_over: (plan name, reason) of better-ranked plans that were not eligible.
    """

    regime: str
    why: str
    passed_over: tuple[tuple[str, str], ...]


class Plan:
    """How one request is computed: mapping, organization and kernel, and their arrays.

    A plan belongs to one mask (a snapshot), one geometry and one architecture; it may be run
    any number of times, from any thread, on any arrays of that geometry. Made by
    :func:`make_plan`.

    Attributes:
        request: sizes, dtype, layout and architecture.
        mask: the mask.
        spec: the plan's name, taken apart.
        config: the kernel of the catalog that runs it.
        choice: the regime that it came from, and what was passed over.
    """

    def __init__(self, mask: BlockMask, prepared: _Prepared) -> None:
        """Use :func:`make_plan`."""
        self.mask = mask
        self.request = prepared.request
        self.spec = prepared.spec
        self.config = prepared.config
        self.choice = prepared.choice
        self._prepared = prepared

    def __repr__(self) -> str:
        r = self.request
        sizes = f"{r.batch}x{r.q_heads}x{r.sq}x{r.skv}x{r.head_dim} {r.dtype}"
        return f"Plan({self.spec.name}, {sizes}, {r.arch.name})"

    def tiles(self) -> Tiles:
        """The physical tiles, as NumPy arrays; mapped on the first call."""
        return self._prepared.tiles(self.mask)

    def tasks(self) -> Tasks:
        """The tasks in launch order, as NumPy arrays; organized on the first call."""
        return self._prepared.tasks(self.mask)

    def explain(self) -> str:
        """What the plan does and why, in a few lines of text."""
        return explain(self)

    def summary(self) -> dict[str, Any]:
        """The facts of :meth:`explain` as plain data, ready for JSON."""
        return summary(self)

    def update(self, mask: BlockMask) -> Plan:
        """The same plan for a mask of the same geometry with new contents.

        Raises:
            ValueError: the mask has another shape, or the plan's mapping cannot serve it.
        """
        r = self.request
        full = ArraySpec(r.q_shape, r.dtype)
        keys = ArraySpec(r.kv_shape, r.dtype)
        make_request(mask, full, keys, None, layout=r.layout, arch=r.arch, on_gpu=False)
        config, reason = _eligible(self.spec, mask, r)
        if config is None:
            raise _not_eligible(self.spec.name, reason, r)
        return Plan(mask, _Prepared(r, self.spec, config, self._prepared.model, self.choice))

    def run(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        sm_scale: float | None = None,
        out: Any = None,
        return_lse: bool = False,
        stream: Any = None,
    ) -> Any:
        """Compute the attention; arguments and result as in :func:`block_sparse_attention`.

        Raises:
            ValueError: arrays of another geometry, device or architecture than the plan's.
        """
        scale = _scale(sm_scale, self.request.head_dim)
        for name, array in (("q", q), ("k", k), ("v", v)):
            interop.check_no_gradient(name, array)
        host = interop.on_host(q)
        for name, array in (("k", k), ("v", v)):
            if interop.on_host(array) != host:
                places = ("GPU", "host") if host else ("host", "GPU")
                raise ValueError(
                    wrong(
                        name,
                        f"an array in {places[1]} memory, like q",
                        f"one in {places[0]} memory",
                        "move both to one place",
                    )
                )
        made = make_request(
            self.mask,
            q,
            k,
            v,
            layout=self.request.layout,
            arch=self.request.arch,
            on_gpu=not host,
        )
        if made != self.request:
            raise ValueError(
                wrong(
                    "q, k, v",
                    f"the plan's {self.request.differences(made)}",
                    made.differences(self.request),
                    "make a new plan",
                )
            )
        if out is not None:
            _check_out(out, q, self.request, on_gpu=not host)
        if host:
            return self._run_on_host(q, k, v, scale, out, return_lse)
        return self._run_on_gpu(q, k, v, scale, out, return_lse, stream)

    def _run_on_host(self, q: Any, k: Any, v: Any, scale: float, out: Any, return_lse: bool) -> Any:
        arrays = [interop.host_array(x) for x in (q, k, v)]
        result, lse = reference.execute(self, *arrays, sm_scale=scale, return_lse=True)
        result = interop.host_result(result, q, self.request.dtype)
        if out is not None:
            out[...] = result
            result = out
        if not return_lse:
            return result
        return result, interop.host_result(lse, q, "float32")

    def _run_on_gpu(
        self, q: Any, k: Any, v: Any, scale: float, out: Any, return_lse: bool, stream: Any
    ) -> Any:
        from tessera_cupy.kernels import launch

        r = self.request
        device = interop.device_of(q, "q")
        for name, array in (("k", k), ("v", v)):
            other = interop.device_of(array, name)
            if other != device:
                raise ValueError(
                    wrong(name, f"q's device {device}", f"device {other}", "move it there")
                )
        if self.mask.device not in (None, device):
            raise ValueError(
                wrong(
                    "mask",
                    f"a mask from the host or from q's device {device}",
                    f"a mask from device {self.mask.device}",
                    "build it on one of these",
                )
            )
        if gpu_arch(device) != r.arch:
            raise PlanNotEligibleError(
                wrong(
                    "q",
                    f"an array on a GPU of {r.arch.name}, which the plan is for",
                    f"a GPU of {gpu_arch(device).name}",
                    "make a plan for that architecture",
                )
            )
        with interop.on_stream(stream, (q, k, v), device):
            operands = {
                name: interop.aligned(interop.device_operand(array, name))
                for name, array in (("q", q), ("k", k), ("v", v))
            }
            if out is not None:
                _check_apart(interop.device_operand(out, "out"), operands)
            result = interop.empty(q, r.q_shape, r.dtype) if out is None else out
            lse = interop.empty(q, (r.batch, r.q_heads, r.sq), "float32") if return_lse else None
            launch.attend(
                self.config,
                catalog.merge_for(self.config),
                self._prepared.uploaded(self.mask, device),
                _tensor(operands["q"], r.layout),
                _tensor(operands["k"], r.layout),
                _tensor(operands["v"], r.layout),
                _tensor(interop.device_operand(result, "out"), r.layout),
                0 if lse is None else interop.device_operand(lse, "out").pointer,
                launch.Geometry(
                    batch=r.batch,
                    q_heads=r.q_heads,
                    kv_heads=r.kv_heads,
                    sq=r.sq,
                    skv=r.skv,
                    head_dim=r.head_dim,
                    dtype=r.dtype,
                    sm_scale=scale,
                    capacity=self._prepared.model.capacity,
                    device=device,
                ),
            )
            if out is None:
                result = interop.returned(result, q)
            return (result, interop.returned(lse, q)) if return_lse else result


def make_plan(
    mask: BlockMask,
    q: Any,
    k: Any = None,
    v: Any = None,
    *,
    layout: str = "BHSD",
    regime: str | PlanSpec | Table = "auto",
    arch: str | None = None,
) -> Plan:
    """Choose a plan for a mask and arrays of these shapes; nothing is computed yet.

    Args:
        mask: what to compute.
        q: an array, or an :class:`ArraySpec` to plan without data.
        k: the same; None means q's sizes with the mask's number of keys.
        v: the same.
        layout: ``"BHSD"`` or ``"BSHD"``, the axes of q, k and v.
        regime: ``"auto"`` looks the plan up in the architecture's profile table; a
            :class:`Table` takes its place; a plan's name or :class:`PlanSpec` pins the plan.
        arch: architecture, such as ``"sm_90a"``, for a plan for a GPU that is not here. None
            means the GPU of q, and ``"sm_90a"`` for host arrays and specs.

    Raises:
        ValueError: shapes that do not fit, or a pinned plan that cannot serve the request.
        TypeError: a dtype that no kernel takes.
        UnsupportedGpuError: q's GPU has no kernels.

    Example:
        >>> import numpy as np
        >>> mask = BlockMask.from_dense(np.eye(8, dtype=bool), (64, 64))
        >>> plan = make_plan(mask, ArraySpec((1, 2, 512, 128), "bfloat16"), arch="sm_90a")
        >>> len(plan.tiles())
        8
    """
    gpu = not isinstance(q, ArraySpec) and not interop.on_host(q)
    if arch is not None:
        target = get_arch(arch)
    elif gpu:
        target = gpu_arch(interop.device_of(q, "q"))
    else:
        target = get_arch(HOST_ARCH)
    device = interop.device_of(q, "q") if gpu else None
    request = make_request(mask, q, k, v, layout=layout, arch=target, on_gpu=gpu)
    return Plan(mask, _choose(mask, request, regime, device if arch is None else None))


def block_sparse_attention(
    q: Any,
    k: Any,
    v: Any,
    mask: BlockMask,
    *,
    sm_scale: float | None = None,
    layout: str = "BHSD",
    out: Any = None,
    return_lse: bool = False,
    regime: str | PlanSpec | Table = "auto",
    stream: Any = None,
) -> Any:
    """Attention over the query and key tokens that a block mask keeps.

    ``O = softmax(sm_scale * Q K^T + log(mask)) V``, exactly: no block is dropped or widened.
    The plan of a mask object is made once and reused while the mask lives.

    Args:
        q: (batch, q_heads, sq, head_dim) in ``layout``; float16 or bfloat16 on a GPU, from
            CuPy, torch, JAX or any library with DLPack. Host arrays (also float32) run on
            the NumPy executor: right, and slow. Values must be finite.
        k: (batch, kv_heads, skv, head_dim); ``kv_heads`` divides ``q_heads``.
        v: as k.
        mask: keep where true; its batch and head axes are 1 or q's. It is a snapshot: to
            apply new contents, build a new mask.
        sm_scale: factor on the scores; None means ``1 / sqrt(head_dim)``.
        layout: ``"BHSD"`` or ``"BSHD"``.
        out: array to write, with q's shape, dtype and device; not in the memory of k or v.
        return_lse: also return the log-sum-exp.
        regime: as in :func:`make_plan`.
        stream: stream to run on; None means the current one of q's framework.

    Returns:
        An array like q; with ``return_lse`` also (batch, q_heads, sq) float32, the natural
        logarithm of the sum of exponentials. A query without keys gives 0 and -inf.

    Raises:
        ValueError: shapes, devices or a plan that do not fit; the message says which.
        TypeError: a dtype or a mask of another type.
        NoGpuError, UnsupportedGpuError, KernelMissingError, KernelCompileError: see
            :mod:`tessera_cupy.errors`.

    Example:
        >>> import numpy as np
        >>> q = k = v = np.ones((1, 2, 256, 64), np.float32)
        >>> mask = BlockMask.from_dense(np.tri(4, dtype=bool), (64, 64))
        >>> block_sparse_attention(q, k, v, mask).shape
        (1, 2, 256, 64)
    """
    host = interop.on_host(q)
    device = None if host else interop.device_of(q, "q")
    arch = get_arch(HOST_ARCH) if device is None else gpu_arch(device)
    request = make_request(mask, q, k, v, layout=layout, arch=arch, on_gpu=not host)
    plan = _reused(mask, request, regime, device)
    return plan.run(q, k, v, sm_scale=sm_scale, out=out, return_lse=return_lse, stream=stream)


# What each living mask's requests have had prepared; masks never change.
_cache: weakref.WeakKeyDictionary[BlockMask, dict[Any, _Prepared]] = weakref.WeakKeyDictionary()
_cache_lock = threading.Lock()


def _reused(
    mask: BlockMask, request: Request, regime: str | PlanSpec | Table, device: int | None
) -> Plan:
    regime = _checked_regime(regime)
    key = (request, regime, device)
    with _cache_lock:
        prepared = _cache.setdefault(mask, {}).get(key)
        if prepared is None:
            prepared = _cache[mask][key] = _choose(mask, request, regime, device)
    return Plan(mask, prepared)


def _choose(
    mask: BlockMask, request: Request, regime: str | PlanSpec | Table, device: int | None
) -> _Prepared:
    """The first plan of the ranking that can serve the request."""
    regime = _checked_regime(regime)
    if isinstance(regime, PlanSpec):
        ranking: tuple[PlanSpec, ...] = (regime,)
        name, why = "given by the caller", "pinned"
    else:
        table = regime if isinstance(regime, Table) else load_for(request.arch.table)
        choice = table.lookup(
            Features.of(
                mask,
                batch=request.batch,
                q_heads=request.q_heads,
                dtype=request.kernel_dtype,
                head_dim=request.head_dim,
                layout=request.layout,
            )
        )
        ranking, name, why = choice.ranking, choice.regime, choice.why
    passed_over: list[tuple[str, str]] = []
    for spec in ranking:
        config, reason = _eligible(spec, mask, request)
        if config is not None:
            model = device_model(config, request.arch, device)
            found = PlanChoice(name, why, tuple(passed_over))
            return _Prepared(request, spec, config, model, found)
        passed_over.append((spec.name, reason))
    reasons = "; ".join(f"{plan}: {reason}" for plan, reason in passed_over)
    raise _not_eligible(", ".join(plan for plan, _ in passed_over), reasons, request)


def _checked_regime(regime: Any) -> str | PlanSpec | Table:
    """``"auto"``, a table, or the plan that a name stands for."""
    if isinstance(regime, (PlanSpec, Table)):
        return regime
    if isinstance(regime, str):
        return "auto" if regime == "auto" else PlanSpec.parse(regime)
    raise TypeError(
        wrong(
            "regime",
            '"auto", a plan\'s name, a PlanSpec or a Table',
            type(regime).__name__,
            "leave it out",
        )
    )


def _eligible(
    spec: PlanSpec, mask: BlockMask, request: Request
) -> tuple[catalog.KernelConfig | None, str]:
    """The kernel that runs a plan for this request, or None and the reason."""
    bits = len(mask.token_bits) > 0
    config = catalog.find(
        request.arch.name,
        spec.kernel,
        request.kernel_dtype,
        request.head_dim,
        spec.tile_q,
        spec.tile_kv,
        bits,
    )
    if config is None:
        kind = "with token bits " if bits else ""
        return None, (
            f"the catalog of {request.arch.name} has no {spec.kernel} kernel {kind}with "
            f"{spec.tile_q}x{spec.tile_kv} tiles for head dim {request.head_dim}"
        )
    if config.kernel == "attend_wgmma" and min(request.sq, request.skv, request.batch) == 0:
        return None, "attend_wgmma needs at least one query and one key for its tensor maps"
    reason = catalog.why_not(config, request.arch.smem_block) or why_not(
        spec.mapping, mask, spec.tile_q, spec.tile_kv
    )
    return (None, reason) if reason else (config, "")


def _not_eligible(plan: str, reason: str, request: Request) -> PlanNotEligibleError:
    return PlanNotEligibleError(
        wrong(
            "regime",
            f"a plan that can serve {request.q_heads} heads of {request.head_dim} in "
            f"{request.dtype} on {request.arch.name}",
            f"{plan} ({reason})",
            'use "auto"',
        )
    )


@cache
def gpu_arch(device: int) -> Arch:
    """The architecture of a GPU.

    Raises:
        UnsupportedGpuError: there are no kernels for it.
    """
    cupy = interop.import_cupy()
    properties = cupy.cuda.runtime.getDeviceProperties(device)
    name = properties["name"].decode()
    return arch_for((properties["major"], properties["minor"]), name)


@cache
def device_model(config: catalog.KernelConfig, arch: Arch, device: int | None) -> DeviceModel:
    """What organization needs to know: of the GPU when there is one, else of its generation."""
    sms, l2_bytes = arch.sms, arch.l2_bytes
    if device is not None:
        properties = interop.import_cupy().cuda.runtime.getDeviceProperties(device)
        sms, l2_bytes = properties["multiProcessorCount"], properties["l2CacheSize"]
    return DeviceModel(
        sms=sms, ctas_per_sm=config.ctas_per_sm(arch), l2_bytes=int(_L2_SHARE * l2_bytes)
    )


def _scale(sm_scale: float | None, head_dim: int) -> float:
    if sm_scale is None:
        return 1.0 / math.sqrt(head_dim)
    try:
        # What the kernels compute in, so that float32 and float64 of a number do the same.
        scale = struct.unpack("f", struct.pack("f", sm_scale))[0]
    except (OverflowError, struct.error):
        scale = math.nan
    if not math.isfinite(scale):
        raise ValueError(
            wrong("sm_scale", "a finite float32 number", repr(sm_scale), "pass a float")
        )
    return float(scale)


def _check_out(out: Any, q: Any, request: Request, *, on_gpu: bool) -> None:
    kind, wanted = interop.framework(out), interop.framework(q)
    if kind != wanted or kind in ("jax", "dlpack"):
        raise TypeError(
            wrong(
                "out",
                f"a writable array of q's library, {wanted}",
                f"one of {kind}",
                "leave it out, or use CuPy or torch for both",
            )
        )
    got = (tuple(out.shape), interop.dtype_name(out))
    expected = (request.q_shape, request.dtype)
    if got != expected:
        raise ValueError(wrong("out", f"shape and dtype {expected}", got, "allocate it like q"))
    if not on_gpu:
        if not interop.on_host(out):
            raise ValueError(
                wrong("out", "an array in host memory, as q", "one on a GPU", "allocate it like q")
            )
        return
    target, source = interop.device_operand(out, "out"), interop.device_operand(q, "q")
    if target.device != source.device:
        raise ValueError(
            wrong("out", f"q's device {source.device}", f"device {target.device}", "move it there")
        )
    if not interop.is_aligned(target):
        raise ValueError(
            wrong(
                "out",
                "a contiguous head dim and 16-byte aligned rows",
                f"strides {target.strides} elements at address {target.pointer:#x}",
                "leave it out, or allocate it like q",
            )
        )


def _check_apart(target: interop.Operand, operands: dict[str, interop.Operand]) -> None:
    """Refuse to write where other tasks still read: K and V. Each task has read its own Q."""
    for name in ("k", "v"):
        if interop.overlaps(target, operands[name]):
            raise ValueError(
                wrong("out", "memory of its own", f"memory that {name} uses", "allocate another")
            )


def _tensor(operand: interop.Operand, layout: str) -> Any:
    from tessera_cupy.kernels.launch import Tensor

    batch, first, second, _ = operand.strides
    head, row = (first, second) if layout == "BHSD" else (second, first)
    return Tensor(operand.pointer, (batch, head, row))
