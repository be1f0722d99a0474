"""Loading cubins and launching them: the only module that hands memory to a kernel.

The structs below mirror ``kernels_cu/common/types.cuh``; they travel by value.
"""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.errors import wrong
from tessera_cupy.kernels.cache import default_cache
from tessera_cupy.kernels.catalog import KernelConfig, merge_for, timed, twin_of
from tessera_cupy.kernels.lifetime import Uses, collect, pool_may_grow, release_with
from tessera_cupy.kernels.task_times import timed_params
from tessera_cupy.kernels.tensor_maps import TENSOR_MAP, fragment_map, rows_map
from tessera_cupy.mapping.tiles import UNIT_ROWS
from tessera_cupy.organization.twins import find_twins

if TYPE_CHECKING:
    from tessera_cupy.kernels.fetch import Fetched
    from tessera_cupy.mapping.tiles import Tiles
    from tessera_cupy.organization.tasks import Tasks

_POINTER = np.uint64
_STRIDES = np.dtype([("batch", np.int64), ("head", np.int64), ("row", np.int64)])

TASK = np.dtype(
    [
        *[(name, np.int32) for name in ("head", "begin", "end", "slot", "flags")],
        *[(name, np.int32) for name in ("first_row", "rows", "frag_count")],
        *[(name, np.int64) for name in ("frag_begin", "units")],
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
        ("counts", _POINTER),
        ("rows", _POINTER),
    ],
    align=True,
)

MERGE_PARAMS = np.dtype(
    [
        ("o", _POINTER),
        ("lse", _POINTER),
        ("o_stride", _STRIDES),
        *[(name, _POINTER) for name in ("merge_head", "merge_tile", "merge_offsets", "tile_q")],
        *[(name, _POINTER) for name in ("units", "partial_o", "partial_ml")],
        *[(name, np.int32) for name in ("q_heads", "head_dim", "sq", "tile_rows", "row_width")],
        ("counts", _POINTER),
    ],
    align=True,
)

WGMMA_PARAMS = np.dtype(
    {
        "names": [
            *("q", "k_rows", "v_rows", "k_fragment", "v_fragment"),
            *("o", "lse", "o_stride", "tasks", "frags", "units", "partial_o", "partial_ml"),
            *("task_count", "q_heads", "q_per_kv", "head_dim", "sq", "slot_log2", "whole_rows"),
            *("scale_log2", "negate", "counts", "frag_bits", "bits"),
            *("k", "v", "k_stride", "v_stride", "rows"),
        ],
        "formats": [
            *[TENSOR_MAP] * 5,
            *(_POINTER, _POINTER, _STRIDES, *[_POINTER] * 5),
            *[np.int32] * 7,
            *(np.float32, np.int32, *[_POINTER] * 3),
            *(_POINTER, _POINTER, _STRIDES, _STRIDES, _POINTER),
        ],
        "offsets": [
            *range(0, 640, 128),
            *(640, 648, 656, *range(680, 720, 8)),
            *range(720, 720 + 4 * 9, 4),
            *range(760, 784, 8),
            *(784, 792, 800, 824, 848),
        ],
        "itemsize": 896,
    }
)

#: Told the name of a stage once it is launched.
Mark = Callable[[str], None]


def unmarked(stage: str) -> None:
    """The mark that notes nothing."""


_shared: ContextVar[bool] = ContextVar("shared", default=False)
# Tasks of a CTA that shares the GPU. With more, CTAs that come late end later; with one, starting
# is a larger part of a CTA's time.
_TASKS_WHEN_SHARED = 2


@contextmanager
def sharing() -> Iterator[None]:
    """Launch attention for a GPU of which other kernels, as NCCL's, hold some multiprocessors.

    Tasks are dealt to CTAs before the launch. Where as many CTAs as the GPU holds share all of
    them, those that find no multiprocessor at first end last, by as much as they came late. Here
    CTAs are more, of few tasks each, so that a multiprocessor that is free takes the next one.
    """
    before = _shared.set(True)
    try:
        yield
    finally:
        _shared.reset(before)


def persistent_ctas(tasks: int, capacity: int, *, twins: bool, shared: bool) -> int:
    """CTAs of a kernel whose CTAs take several tasks each.

    Args:
        tasks: how many there are, or the most there can be.
        capacity: CTAs that the GPU holds at a time.
        twins: whether CTAs come in clusters of two.
        shared: whether other kernels run at the same time; see :func:`sharing`.

    >>> [persistent_ctas(1000, 132, twins=False, shared=shared) for shared in (False, True)]
    [132, 500]
    """
    most = max(capacity, -(-tasks // _TASKS_WHEN_SHARED)) if shared else capacity
    grid = min(most, tasks)
    return min(grid + 1, most // 2 * 2) // 2 * 2 if twins else grid


# Bits of a task's flags, ``TaskFlag`` in types.cuh; 1 is the direction of the steps.
_TWIN = 2
# Bit of a fragment's word, ``kGathered`` in types.cuh.
_GATHERED = np.uint32(1 << 23)

_MOST_STRUCTS = 64
# Percent, ``CU_SHAREDMEM_CARVEOUT_MAX_SHARED``.
_ALL_SHARED = 100
_MERGE_ARRAYS = ("merge_head", "merge_tile", "merge_offsets", "tile_q", "units")
#: Warps of one merge CTA; one warp merges one row.
MERGE_WARPS = 8
_MERGE_THREADS = (MERGE_WARPS * 32,)

# By the entry's identity, which is quicker than its name: the entry, and its function.
_loaded: dict[tuple[int, int], tuple[KernelConfig, Any]] = {}
_loading = threading.Lock()


def load(config: KernelConfig, device: int) -> Any:
    """The entry function of a kernel on a device; loaded once a process.

    Errors are those of :meth:`tessera_cupy.kernels.cache.KernelCache.get`.
    """
    key = (id(config), device)
    found = _loaded.get(key)
    if found is None:
        with _loading:
            found = _loaded.get(key)
            if found is None:
                import cupy

                path = default_cache().get(config)
                function = cupy.RawModule(path=str(path)).get_function(config.entry)
                if config.smem_bytes > 48 * 1024:
                    function.max_dynamic_shared_size_bytes = config.smem_bytes
                if config.needs_carveout:
                    function.preferred_shared_memory_carveout = _ALL_SHARED
                found = _loaded[key] = (config, function)
    return found[1]


def is_loaded(config: KernelConfig, device: int) -> bool:
    """Whether :func:`load` has an entry already."""
    return (id(config), device) in _loaded


def packed_fragments(tiles: Tiles) -> NDArray[np.uint32]:
    """(F, 2) uint32: first row; length in the top 8 bits and members in the low 24.

    Of a gathered fragment the index of its first row, and a bit beside the members.
    """
    packed = np.empty((len(tiles.frag_start), 2), np.uint32)
    packed[:, 0] = tiles.frag_start.view(np.uint32)
    packed[:, 1] = (tiles.frag_len.astype(np.uint32) << np.uint32(24)) | tiles.frag_members
    if tiles.frag_gathered is not None:
        packed[:, 1] |= np.where(tiles.frag_gathered, _GATHERED, np.uint32(0))
    return packed


def tile_words(tiles: Tiles) -> NDArray[np.int32]:
    """(T, 2): first query row and word of rows (types.cuh) of each tile."""
    if tiles.tile_halves is None:
        return tiles.tile_q
    words = tiles.tile_q.copy()
    words[:, 1] |= (1 + tiles.tile_halves) << 16
    return words


def packed_tasks(tiles: Tiles, tasks: Tasks) -> NDArray[Any]:
    """(N,) records of :data:`TASK`: the tasks, with their tiles' own numbers copied in."""
    packed = np.zeros(len(tasks), TASK)
    tile = tasks.task_tile
    for name in ("head", "begin", "end", "slot"):
        packed[name] = getattr(tasks, f"task_{name}")
    packed["flags"] = tasks.task_reverse
    packed["first_row"], packed["rows"] = tile_words(tiles)[tile].T
    packed["frag_begin"] = tiles.frag_offsets[tile]
    packed["frag_count"] = tiles.frag_offsets[tile + 1] - tiles.frag_offsets[tile]
    packed["units"] = -1 if tiles.tile_units is None else tile * tiles.tile_units.shape[1]
    return packed


@dataclass(eq=False)  # frozen ones take three times as long to make, which a request does
class DevicePlan:
    """A plan's arrays in the memory of one GPU, in the form that the kernels read.

    Attributes:
        fragments, tasks: packed as :func:`packed_fragments` and :func:`packed_tasks`.
        tile_q: packed as :func:`tile_words`.
        frag_bits, bits: as in ``Tiles``.
        units: ``Tiles.tile_units``, or None.
        merge_head, merge_tile, merge_offsets: as in ``Tasks``.
        slots: workspace slots of the split-K parts.
        uses: which streams and graphs read the arrays.
        counts: of a plan that the GPU made, how many of the tasks, merges and slots there are;
            ``task_count`` and ``slots`` are then the most there can be, and ``merge_count`` as many
            as are merged at the same time.
        scalars: of such a plan, what ``mask_state`` counted.
        stamp: what ``counts`` ends with once they are this plan's.
        may_overflow: whether its lists may need more room than they have, or its tasks may leave
            rows out; the output is filled with NaN before.
        need: of such a plan that no graph captured, the counts on their way to the host.
        twins: whether some tasks are marked as twins, for the kernel that makes use of it.
        structs: params of its launches, for operands and arrays at some addresses; plans of the
            same sizes may share them.
        rows: ``Tiles.rows``, or None.
    """

    task_count: int
    slot_log2: int
    merge_count: int
    slots: int
    tasks: Any
    tile_q: Any
    units: Any
    fragments: Any
    frag_bits: Any
    bits: Any
    merge_head: Any
    merge_tile: Any
    merge_offsets: Any
    uses: Uses
    counts: Any = None
    scalars: Any = None
    stamp: int = 0
    may_overflow: bool = False
    need: Fetched | None = None
    twins: bool = False
    structs: dict[Any, tuple[NDArray[Any], NDArray[Any]]] = field(default_factory=dict)
    rows: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory that the arrays take."""
        return sum(getattr(v, "nbytes", 0) for v in vars(self).values())


def refuse_capture() -> None:
    """Refuse what the host must do first while the current stream is capturing.

    Raises:
        ValueError: it is.
    """
    import cupy

    if cupy.cuda.get_current_stream().is_capturing():
        raise ValueError(
            wrong(
                "stream",
                "a stream that is not capturing, for the first run of a plan on a GPU",
                "one that a CUDA graph captures",
                "run the plan once before capturing, or make the same call once",
            )
        )


def upload(tiles: Tiles, tasks: Tasks, *, bits: bool, twins: bool = False) -> DevicePlan:
    """Copy a plan to the current device; returns once the copies are complete.

    Args:
        tiles: the tiles.
        tasks: their tasks.
        bits: whether the kernel reads token bits, which it also does where no fragment has any.
        twins: whether there is a kernel for twins, so that they are looked for.

    Raises:
        ValueError: the current stream is capturing; nothing was done on it.
    """
    import cupy

    stream = cupy.cuda.get_current_stream()
    refuse_capture()
    collect()
    packed = packed_tasks(tiles, tasks)
    found = find_twins(tiles, tasks) if twins else np.zeros(len(tasks), np.bool_)
    packed["flags"] += _TWIN * found
    plan = DevicePlan(
        task_count=len(tasks),
        slot_log2=int(math.log2(tiles.shape.slot)),
        merge_count=len(tasks.merge_tile),
        slots=tasks.slots,
        tasks=cupy.asarray(packed.view(np.uint8)),
        tile_q=cupy.asarray(tile_words(tiles)),
        units=None if tiles.tile_units is None else cupy.asarray(tiles.tile_units),
        fragments=cupy.asarray(packed_fragments(tiles)),
        frag_bits=cupy.asarray(tiles.frag_bits) if bits else None,
        bits=cupy.asarray(tiles.bits) if bits else None,
        merge_head=cupy.asarray(tasks.merge_head),
        merge_tile=cupy.asarray(tasks.merge_tile),
        merge_offsets=cupy.asarray(tasks.merge_offsets),
        uses=Uses(stream),
        rows=None if tiles.rows is None else cupy.asarray(tiles.rows),
        twins=bool(found.any()),
    )
    release_with(plan, plan.uses, [x for x in vars(plan).values() if hasattr(x, "nbytes")])
    # Later runs may use other streams.
    stream.synchronize()
    return plan


@dataclass(frozen=True)
class Tensor:
    """Address and (batch, head, row) element strides of one operand."""

    pointer: int
    strides: tuple[int, int, int]


@dataclass(frozen=True)
class Geometry:
    """Sizes of a request, and what its kernel is launched with.

    Attributes:
        batch, q_heads, kv_heads, sq, skv, head_dim: as in the request.
        dtype: ``"float16"`` or ``"bfloat16"``.
        sm_scale: any finite float.
        capacity: CTAs that the GPU holds at a time, for kernels that take several tasks each.
        device: CUDA device ordinal.
    """

    batch: int
    q_heads: int
    kv_heads: int
    sq: int
    skv: int
    head_dim: int
    dtype: str
    sm_scale: float
    capacity: int
    device: int


@dataclass(frozen=True, eq=False)
class Packed:
    """A launch on operands at fixed addresses, for any plan of its geometry.

    Attributes:
        config: the attention kernel.
        merge: the ``merge_splits`` entry of the same dtype.
        o, geometry: the result, and the sizes of the request.
        params, merge_params: their structs, without what a plan and a run add.
        smem_bytes: of the attention kernel.
        threads: of a CTA of the attention kernel.
        merge_rows: CTAs of the merge for each tile.
        persistent: whether a CTA takes several tasks.
    """

    config: KernelConfig
    merge: KernelConfig
    o: Tensor
    geometry: Geometry
    params: bytes
    merge_params: bytes
    smem_bytes: int
    threads: tuple[int]
    merge_rows: int
    persistent: bool


def pack(
    config: KernelConfig,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    geometry: Geometry,
    slot_log2: int,
) -> Packed:
    """Pack the structs of an attention kernel and of its merge.

    Args:
        config: the attention kernel.
        q: operand; head dim contiguous, address and strides multiples of 16 bytes.
        k: the same, of the KV heads.
        v: as k.
        o: result, of q's shape.
        geometry: sizes of the request.
        slot_log2: columns of a fragment of the plans to be run, as a power of two.
    """
    g = geometry
    common = {
        "o": o.pointer,
        "o_stride": o.strides,
        "q_heads": g.q_heads,
        "q_per_kv": g.q_heads // g.kv_heads,
        "head_dim": g.head_dim,
        "sq": g.sq,
        "slot_log2": slot_log2,
        # The kernels take |scale| and a sign; a zero would turn masked scores into 0 * -inf.
        "scale_log2": max(abs(g.sm_scale) * math.log2(math.e), 1e-30),
        "negate": g.sm_scale < 0,
    }
    if config.kernel == "attend_wgmma":
        operands = {
            **{name: t.pointer for name, t in (("k", k), ("v", v))},
            **{f"{name}_stride": t.strides for name, t in (("k", k), ("v", v))},
        }
        params = packed_struct(WGMMA_PARAMS, common | operands | _maps(slot_log2, q, k, v, g))
    else:
        operands = {
            **{name: t.pointer for name, t in (("q", q), ("k", k), ("v", v))},
            **{f"{name}_stride": t.strides for name, t in (("q", q), ("k", k), ("v", v))},
        }
        params = packed_struct(ATTEND_PARAMS, common | operands)
    merge_params = packed_struct(
        MERGE_PARAMS,
        {
            **{name: common[name] for name in ("o", "o_stride", "q_heads", "head_dim", "sq")},
            "tile_rows": config.tile_q,
            "row_width": config.head_dim,
        },
    )
    return Packed(
        config,
        merge_for(config),
        o,
        g,
        params.tobytes(),
        merge_params.tobytes(),
        config.smem_bytes,
        (config.warps * 32,),
        -(-config.tile_q // MERGE_WARPS),
        config.kernel == "attend_wgmma",
    )


def attend(
    packed: Packed,
    plan: DevicePlan,
    lse: int,
    temporaries: Sequence[Any] = (),
    mark: Mark = unmarked,
    times: int = 0,
) -> None:
    """Launch the attention of a plan, and the merge of its split parts, on the current stream.

    Args:
        packed: the operands, for plans with the fragments of this one.
        plan: the plan's arrays on the current device.
        lse: address of a (batch, q_heads, sq) float32 array, or 0.
        temporaries: operands that end with the call; in a capture they are kept with the plan.
        mark: told when each kernel is launched.
        times: address of :data:`~tessera_cupy.kernels.task_times.TASK_TIME` records, a row a task,
            which the kernel that keeps time then writes; 0 for the usual one.
    """
    import cupy

    if plan.task_count == 0:
        return
    config, g = packed.config, packed.geometry
    stream = cupy.cuda.get_current_stream()
    capturing = stream.is_capturing()
    workspace, at = None, 0
    if plan.slots:
        # O of each slot's rows, then their M and L.
        floats = plan.slots * config.tile_q * (config.head_dim + 2)
        if capturing:
            with pool_may_grow():
                workspace = cupy.empty(floats, np.float32)
        else:
            workspace = cupy.empty(floats, np.float32)
        at = workspace.data.ptr
    if plan.may_overflow:
        poison(packed.o, lse, g, stream.ptr)
    # All arrays of the plans that share structs follow from where the tasks are.
    key = (packed, lse, at, plan.tasks.data.ptr)
    structs = plan.structs.get(key)
    if structs is None:
        structs = _structs(packed, plan, lse, at)
        if len(plan.structs) >= _MOST_STRUCTS:
            plan.structs.clear()
        plan.structs[key] = structs
    params, merge_params = structs
    twins = twin_of(config) if plan.twins and g.capacity > 1 else None
    attending = twins or config
    if times:
        attending, params = timed(attending), timed_params(params, config.kernel, times)
    kernel = load(attending, g.device)
    merge_kernel = load(packed.merge, g.device) if plan.merge_count else None
    grid = plan.task_count
    if packed.persistent:
        with_twins, shared = twins is not None, _shared.get()
        grid = persistent_ctas(grid, g.capacity, twins=with_twins, shared=shared)
    kernel((grid,), packed.threads, (params,), shared_mem=packed.smem_bytes)
    mark("attention")
    if merge_kernel is not None:
        merge_kernel((plan.merge_count, packed.merge_rows), _MERGE_THREADS, (merge_params,))
        mark("merge")
    if capturing:
        plan.uses.keep(workspace, *temporaries)
    else:
        plan.uses.record(stream)


def _structs(
    packed: Packed, plan: DevicePlan, lse: int, workspace: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """The packed structs with a plan's arrays and a workspace."""
    config = packed.config
    sums = workspace + 4 * plan.slots * config.tile_q * config.head_dim if workspace else 0
    counts, units = _pointer(plan.counts), _pointer(plan.units)
    lists = lse, _pointer(plan.tasks), _pointer(plan.fragments)
    bits = _pointer(plan.frag_bits), _pointer(plan.bits)
    rows = _pointer(plan.rows)
    if config.kernel == "attend_wgmma":
        numbers = (*lists, units, workspace, sums, plan.task_count, counts, *bits, rows)
        params = _WGMMA_PATCH(packed.params, *numbers)
    else:
        params = _ATTEND_PATCH(packed.params, *lists, *bits, workspace, sums, counts, rows)
    merges = [_pointer(getattr(plan, name)) for name in _MERGE_ARRAYS]
    return params, _MERGE_PATCH(packed.merge_params, lse, *merges, workspace, sums, counts)


def poison(o: Tensor, lse: int, geometry: Geometry, stream: int) -> None:
    """Make all of O and the LSE NaN, so that what no task writes cannot be taken for a result."""
    from cuda.bindings import driver

    g = geometry
    batch, head, row = o.strides
    # As few rectangles as the strides allow: rows of all heads, or of one at a time.
    starts, rows = [o.pointer], g.sq
    for length, stride in ((g.q_heads, head), (g.batch, batch)):
        if len(starts) == 1 and (length == 1 or stride == rows * row):
            rows *= length
        else:
            starts = [start + 2 * i * stride for start in starts for i in range(length)]
    for start in starts:
        _checked(driver.cuMemsetD2D8Async(start, 2 * row, 0xFF, 2 * g.head_dim, rows, stream))
    if lse:
        _checked(driver.cuMemsetD8Async(lse, 0xFF, 4 * g.batch * g.q_heads * g.sq, stream))


def _checked(result: tuple[Any]) -> None:
    if int(result[0]):
        raise RuntimeError(f"cuMemset: {result[0]}")


def _maps(slot_log2: int, q: Tensor, k: Tensor, v: Tensor, g: Geometry) -> dict[str, Any]:
    """The tensor maps of ``attend_wgmma``."""
    kv_shape = (g.batch, g.kv_heads, g.skv, g.head_dim)
    slot = 1 << slot_log2
    k_fragment = fragment_map(k.pointer, g.dtype, kv_shape, k.strides, slot)
    v_fragment = fragment_map(v.pointer, g.dtype, kv_shape, v.strides, slot)
    q_shape = (g.batch, g.q_heads, g.sq, g.head_dim)
    maps = {
        "q": rows_map(q.pointer, g.dtype, q_shape, q.strides, UNIT_ROWS),
        "k_rows": rows_map(k.pointer, g.dtype, kv_shape, k.strides, 8),
        "v_rows": rows_map(v.pointer, g.dtype, kv_shape, v.strides, 8),
    }
    if k_fragment is not None and v_fragment is not None:
        whole = {"k_fragment": k_fragment, "v_fragment": v_fragment}
        maps |= whole | {"whole_rows": g.skv // 8 * 8}
    return maps


class Patch:
    """Sets the same few pointers or numbers in many copies of a struct.

    Args:
        dtype: the struct.
        names: fields that are neither strides nor tensor maps.

    >>> patch = Patch(MERGE_PARAMS, "o", "lse")
    >>> patch(bytes(MERGE_PARAMS.itemsize), 1, 2).view(MERGE_PARAMS)["lse"].item()
    2
    """

    def __init__(self, dtype: np.dtype[Any], *names: str) -> None:
        self._whole, places = _places(dtype)
        # Fields that follow each other are packed together.
        self._runs: list[tuple[struct.Struct, int, int, int]] = []
        for i, name in enumerate(names):
            offset, packer = places[name]
            assert packer is not None
            if self._runs and self._runs[-1][1] + self._runs[-1][0].size == offset:
                before, start, first, _ = self._runs.pop()
                packer = struct.Struct(before.format + packer.format[1:])
                offset, i_first = start, first
            else:
                i_first = i
            self._runs.append((packer, offset, i_first, i + 1))

    def __call__(self, packed: bytes, *values: int) -> NDArray[Any]:
        """A copy of a packed struct with these values, in the order of the names."""
        params = bytearray(packed)
        for packer, offset, first, end in self._runs:
            packer.pack_into(params, offset, *values[first:end])
        return np.frombuffer(params, self._whole)


def packed_struct(dtype: np.dtype[Any], values: dict[str, Any]) -> NDArray[Any]:
    """One struct, ready to pass by value; what is not given is zero.

    Packed by ``struct``, in a fraction of the time that assigning to NumPy's fields takes.
    """
    whole, places = _places(dtype)
    params = bytearray(dtype.itemsize)
    for name, value in values.items():
        offset, packer = places[name]
        if packer is None:
            params[offset : offset + value.nbytes] = value.tobytes()
        elif isinstance(value, tuple):
            packer.pack_into(params, offset, *value)
        else:
            packer.pack_into(params, offset, value)
    return np.frombuffer(params, whole)


@cache
def _places(
    dtype: np.dtype[Any],
) -> tuple[np.dtype[Any], dict[str, tuple[int, struct.Struct | None]]]:
    """A struct as bytes; offset and packer of each field, None for a tensor map, which is bytes."""
    formats: dict[Any, str] = {
        _POINTER: "Q",
        _STRIDES: "3q",
        np.int64: "q",
        np.int32: "i",
        np.float32: "f",
    }
    packers = {np.dtype(field): struct.Struct(f"={code}") for field, code in formats.items()}
    assert dtype.fields is not None
    places = {
        name: (field[1], None if field[0] == TENSOR_MAP else packers[field[0]])
        for name, field in dtype.fields.items()
    }
    return np.dtype(f"V{dtype.itemsize}"), places


def _pointer(array: Any) -> int:
    return 0 if array is None else int(array.data.ptr)


_RUN = ("partial_o", "partial_ml")
_ATTEND_PATCH = Patch(
    ATTEND_PARAMS,
    *("lse", "tasks", "frags", "frag_bits", "bits", *_RUN, "counts", "rows"),
)
_WGMMA_PATCH = Patch(
    WGMMA_PARAMS,
    *("lse", "tasks", "frags", "units", *_RUN, "task_count", "counts", "frag_bits", "bits", "rows"),
)
_MERGE_PATCH = Patch(MERGE_PARAMS, "lse", *_MERGE_ARRAYS, *_RUN, "counts")
