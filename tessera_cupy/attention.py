"""The front door: from a mask and q, k, v to attention.

``block_sparse_attention`` is the one call; ``make_plan`` gives the plan behind it, to look
at, to keep, or to make for a GPU that is not here.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

from tessera_cupy import gpus, interop
from tessera_cupy.call import HOST_ARCH as HOST_ARCH
from tessera_cupy.call import checked, interned
from tessera_cupy.choice import checked_regime
from tessera_cupy.kernels.arch import get_arch
from tessera_cupy.masks import BlockMask, KeySlices
from tessera_cupy.masks.key_slices import block_mask
from tessera_cupy.plan import Plan
from tessera_cupy.prepared import Prepared, prepare
from tessera_cupy.regimes import PlanSpec, Table
from tessera_cupy.request import ArraySpec, Request, make_request


def make_plan(
    mask: BlockMask | KeySlices,
    q: Any,
    k: Any = None,
    v: Any = None,
    *,
    layout: str = "BHSD",
    regime: str | PlanSpec | Table = "auto",
    arch: str | None = None,
) -> Plan:
    """Choose a plan for a mask and arrays of these shapes; nothing is computed yet.

    Where the choice depends on a mask in GPU memory, its GPU counts it on q's current stream, and
    the host waits for a few numbers.

    Args:
        mask: what to compute; keys of slices are gathered, or slices run as blocks with token bits.
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
        4
    """
    mask = block_mask(mask)
    gpu = not isinstance(q, ArraySpec) and not interop.on_host(q)
    if arch is not None:
        target = get_arch(arch)
    elif gpu:
        target = gpus.arch_of(interop.device_of(q, "q"))
    else:
        target = get_arch(HOST_ARCH)
    device = interop.device_of(q, "q") if gpu else None
    request = interned(make_request(mask, q, k, v, layout=layout, arch=target, on_gpu=gpu))
    if arch is not None:
        device = None
    return Plan(mask, _prepared(mask, request, checked_regime(regime), device, q, None))


def block_sparse_attention(
    q: Any,
    k: Any,
    v: Any,
    mask: BlockMask | KeySlices,
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
        mask: keep where true; its batch and head axes are 1 or q's. A mask over arrays in GPU
            memory is an operand, read on the call's stream, once until ``mask.refresh()``; any
            other is a snapshot. After a call that a CUDA graph captured, keep the mask until the
            last replay is complete. All this holds for key slices, too.
        sm_scale: factor on the scores; None means ``1 / sqrt(head_dim)``.
        layout: ``"BHSD"`` or ``"BSHD"``.
        out: array to write, with q's shape, dtype and device: q itself, or memory apart from
            q, k and v, in which each element has its own place.
        return_lse: also return the log-sum-exp.
        regime: as in :func:`make_plan`. With a plan's name, a call whose mask is over GPU arrays
            never waits for the GPU where the GPU makes the plan, and can be captured in a CUDA
            graph together with the planning: each replay then follows the mask's contents. With
            ``"auto"`` the first call of a mask, and of each refresh, waits for a few numbers.
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
    mask = block_mask(mask)
    call = checked(mask, q, k, v, out, layout=layout)
    request, device = call.request, call.device
    if not isinstance(regime, str):
        regime = checked_regime(regime)
    plans = _plans_of(mask)
    # The request by its identity, which is quicker than its hash: what is prepared keeps it.
    key = (id(request), regime.name if isinstance(regime, PlanSpec) else regime, device)
    with plans.lock:
        prepared = plans.prepared.get(key)
        if prepared is None or prepared.version != mask.version:
            if prepared is not None:
                plans.prepared.clear()  # all are of the same version
            prepared = _prepared(mask, request, checked_regime(regime), device, q, stream, run=True)
            plans.prepared[key] = prepared
    plan = Plan(mask, prepared)
    return plan.run_checked(call, q, k, v, sm_scale, out, return_lse, stream)


class _Plans:
    """What the requests of one mask have had prepared."""

    def __init__(self, ref: _Ref) -> None:
        self.ref = ref
        self.lock = threading.Lock()
        self.prepared: dict[Any, Prepared] = {}


class _Ref(weakref.ref[BlockMask]):
    """A reference to a mask, and its key, which outlives it."""

    __slots__ = ("key",)
    key: int


# Of each living mask, by its identity.
_plans: dict[int, _Plans] = {}
_plans_lock = threading.Lock()


def _plans_of(mask: BlockMask) -> _Plans:
    found = _plans.get(id(mask))
    if found is None:
        with _plans_lock:
            found = _plans.get(id(mask))
            if found is None:
                ref = _Ref(mask, _forget)
                ref.key = id(mask)
                found = _plans[ref.key] = _Plans(ref)
    return found


def _forget(ref: _Ref) -> None:
    # May run at any moment: no locks. The identity is nobody else's before this has run.
    del _plans[ref.key]


def _prepared(
    mask: BlockMask,
    request: Request,
    regime: str | PlanSpec | Table,
    device: int | None,
    q: Any,
    stream: Any,
    *,
    run: bool = False,
) -> Prepared:
    """Choose a plan: on the call's stream, if a GPU has to count the mask."""
    if device is None or isinstance(regime, PlanSpec) or mask.source is None:
        return prepare(mask, request, regime, device)
    with interop.on_stream(stream, (q,), device):
        return prepare(mask, request, regime, device, run=run)
