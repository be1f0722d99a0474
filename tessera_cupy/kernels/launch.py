"""Loading cubins and launching them: the only module that hands memory to a kernel.

The structs below mirror ``kernels_cu/common/types.cuh``; they travel by value.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.kernels.cache import default_cache
from tessera_cupy.kernels.catalog import KernelConfig

if TYPE_CHECKING:
    from tessera_cupy.mapping.tiles import Tiles
    from tessera_cupy.organization.tasks import Tasks

_POINTER = np.uint64
_STRIDES = np.dtype([("batch", np.int64), ("head", np.int64), ("row", np.int64)])

TASK = np.dtype(
    [
        *[(name, np.int32) for name in ("head", "begin", "end", "slot", "reverse")],
        *[(name, np.int32) for name in ("first_row", "rows", "frag_count")],
        *[(name, np.int64) for name in ("frag_begin", "reserved")],
    ],
    align=True,
)

ATTEND_PARAMS = np.dtype(
    [
        *[(name, _POINTER) for name in ("q", "k", "v", "o", "lse")],
        *[(f"{name}_stride", _STRIDES) for name in ("q", "k", "v", "o")],
        *[(name, _POINTER) for name in ("tasks", "frags", "frag_bits", "bits")],
        *[(name, _POINTER) for name in ("partial_o", "partial_ml")],
        *[(name, np.int32) for name in ("q_heads", "q_per_kv", "head_dim", "sq", "slot_log2")],
        ("scale_log2", np.float32),
        ("negate", np.int32),
    ],
    align=True,
)

MERGE_PARAMS = np.dtype(
    [
        ("o", _POINTER),
        ("lse", _POINTER),
        ("o_stride", _STRIDES),
        *[(name, _POINTER) for name in ("merge_head", "merge_tile", "merge_offsets", "tile_q")],
        *[(name, _POINTER) for name in ("partial_o", "partial_ml")],
        *[(name, np.int32) for name in ("q_heads", "head_dim", "sq", "tile_rows", "row_width")],
    ],
    align=True,
)

#: Warps of one merge CTA; one warp merges one row.
MERGE_WARPS = 8

_loaded: dict[tuple[str, int], Any] = {}
_loading = threading.Lock()


def load(config: KernelConfig, device: int) -> Any:
    """The entry function of a kernel on a device; loaded once a process.

    Errors are those of :meth:`tessera_cupy.kernels.cache.KernelCache.get`.
    """
    key = (f"{config.arch}/{config.name}", device)
    function = _loaded.get(key)
    if function is None:
        with _loading:
            function = _loaded.get(key)
            if function is None:
                import cupy

                path = default_cache().get(config)
                function = cupy.RawModule(path=str(path)).get_function(config.entry)
                if config.smem_bytes > 48 * 1024:
                    function.max_dynamic_shared_size_bytes = config.smem_bytes
                _loaded[key] = function
    return function


def packed_fragments(tiles: Tiles) -> NDArray[np.uint32]:
    """(F, 2) uint32: first row; length in the top 8 bits and members in the low 24."""
    packed = np.empty((len(tiles.frag_start), 2), np.uint32)
    packed[:, 0] = tiles.frag_start.view(np.uint32)
    packed[:, 1] = (tiles.frag_len.astype(np.uint32) << np.uint32(24)) | tiles.frag_members
    return packed


def packed_tasks(tiles: Tiles, tasks: Tasks) -> NDArray[Any]:
    """(N,) records of :data:`TASK`: the tasks, with their tiles' own numbers copied in."""
    packed = np.zeros(len(tasks), TASK)
    tile = tasks.task_tile
    for name in ("head", "begin", "end", "slot", "reverse"):
        packed[name] = getattr(tasks, f"task_{name}")
    packed["first_row"], packed["rows"] = tiles.tile_q[tile].T
    packed["frag_begin"] = tiles.frag_offsets[tile]
    packed["frag_count"] = tiles.frag_offsets[tile + 1] - tiles.frag_offsets[tile]
    return packed


@dataclass(frozen=True, eq=False)
class DevicePlan:
    """A plan's arrays in the memory of one GPU, in the form that the kernels read.

    Attributes:
        fragments, tasks: packed as :func:`packed_fragments` and :func:`packed_tasks`.
        tile_q, frag_bits, bits: as in ``Tiles``.
        merge_head, merge_tile, merge_offsets: as in ``Tasks``.
        slots: workspace slots of the split-K parts.
    """

    task_count: int
    slot_log2: int
    merge_count: int
    slots: int
    tasks: Any
    tile_q: Any
    fragments: Any
    frag_bits: Any
    bits: Any
    merge_head: Any
    merge_tile: Any
    merge_offsets: Any

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory that the arrays take."""
        return sum(getattr(v, "nbytes", 0) for v in vars(self).values())


def upload(tiles: Tiles, tasks: Tasks) -> DevicePlan:
    """Copy a plan to the current device; returns once the copies are complete."""
    import cupy

    plan = DevicePlan(
        task_count=len(tasks),
        slot_log2=int(math.log2(tiles.shape.slot)),
        merge_count=len(tasks.merge_tile),
        slots=tasks.slots,
        tasks=cupy.asarray(packed_tasks(tiles, tasks).view(np.uint8)),
        tile_q=cupy.asarray(tiles.tile_q),
        fragments=cupy.asarray(packed_fragments(tiles)),
        frag_bits=cupy.asarray(tiles.frag_bits) if len(tiles.bits) else None,
        bits=cupy.asarray(tiles.bits) if len(tiles.bits) else None,
        merge_head=cupy.asarray(tasks.merge_head),
        merge_tile=cupy.asarray(tasks.merge_tile),
        merge_offsets=cupy.asarray(tasks.merge_offsets),
    )
    # Later runs may use other streams.
    cupy.cuda.get_current_stream().synchronize()
    return plan


def _by_value(params: NDArray[Any]) -> NDArray[Any]:
    return params.view(f"V{params.dtype.itemsize}")


def _pointer(array: Any) -> int:
    return 0 if array is None else int(array.data.ptr)


@dataclass(frozen=True)
class Tensor:
    """Address and (batch, head, row) element strides of one operand."""

    pointer: int
    strides: tuple[int, int, int]


def attend(
    config: KernelConfig,
    merge: KernelConfig,
    plan: DevicePlan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    *,
    lse: int,
    device: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    sq: int,
    sm_scale: float,
) -> None:
    """Launch the attention of a plan, and the merge of its split parts, on the current stream.

    Args:
        config: the ``attend_mma`` entry that the plan was made for.
        merge: the ``merge_splits`` entry of the same dtype.
        plan: the plan's arrays on ``device``, which is the current device.
        q: operand; head dim contiguous, address and strides multiples of 16 bytes.
        k: the same, of ``kv_heads`` heads.
        v: as k.
        o: result, of q's shape.
        lse: address of a (batch, q_heads, sq) float32 array, or 0.
        device: CUDA device ordinal.
        q_heads: query heads.
        kv_heads: KV heads; they divide the query heads.
        head_dim: elements of a row, at most the kernel's.
        sq: query rows of a head.
        sm_scale: any finite float.
    """
    import cupy

    if plan.task_count == 0:
        return
    partial_o = partial_ml = None
    if plan.slots:
        partial_o = cupy.empty((plan.slots, config.tile_q, config.head_dim), np.float32)
        partial_ml = cupy.empty((plan.slots, config.tile_q, 2), np.float32)

    params = np.zeros(1, ATTEND_PARAMS)
    record = params[0]
    for name, tensor in (("q", q), ("k", k), ("v", v), ("o", o)):
        record[name] = tensor.pointer
        record[f"{name}_stride"] = tensor.strides
    record["lse"] = lse
    record["tasks"] = _pointer(plan.tasks)
    record["frags"] = _pointer(plan.fragments)
    record["frag_bits"] = _pointer(plan.frag_bits)
    record["bits"] = _pointer(plan.bits)
    record["partial_o"] = _pointer(partial_o)
    record["partial_ml"] = _pointer(partial_ml)
    record["q_heads"] = q_heads
    record["q_per_kv"] = q_heads // kv_heads
    record["head_dim"] = head_dim
    record["sq"] = sq
    record["slot_log2"] = plan.slot_log2
    # The kernel takes |scale| and a sign; a zero would turn masked scores into 0 * -inf.
    record["scale_log2"] = max(abs(sm_scale) * math.log2(math.e), 1e-30)
    record["negate"] = sm_scale < 0
    load(config, device)(
        (plan.task_count,),
        (config.warps * 32,),
        (_by_value(params),),
        shared_mem=config.smem_bytes,
    )

    if plan.merge_count:
        params = np.zeros(1, MERGE_PARAMS)
        record = params[0]
        record["o"] = o.pointer
        record["lse"] = lse
        record["o_stride"] = o.strides
        record["merge_head"] = _pointer(plan.merge_head)
        record["merge_tile"] = _pointer(plan.merge_tile)
        record["merge_offsets"] = _pointer(plan.merge_offsets)
        record["tile_q"] = _pointer(plan.tile_q)
        record["partial_o"] = _pointer(partial_o)
        record["partial_ml"] = _pointer(partial_ml)
        record["q_heads"] = q_heads
        record["head_dim"] = head_dim
        record["sq"] = sq
        record["tile_rows"] = config.tile_q
        record["row_width"] = config.head_dim
        load(merge, device)(
            (plan.merge_count, -(-config.tile_q // MERGE_WARPS)),
            (MERGE_WARPS * 32,),
            (_by_value(params),),
        )
