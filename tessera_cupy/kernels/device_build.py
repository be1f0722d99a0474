"""Plans made on the GPU: from a mask's own arrays to tiles and tasks, without the host.

    mask_state -> (ragged_blocks) -> tile_counts -> tile_scan -> tile_fragments

on the current stream, ragged_blocks where blocks have sizes of their own. Key slices are rows of
single keys, and go by

    mask_state -> slice_counts -> tile_scan -> slice_fragments

The launches, and the memory that they write, follow from the geometry alone; nothing waits. What
the host wants to know (the mask's scalars, the counts) it reads when it asks.

Memory comes from CuPy's pool, which gives what one request returns to the next of the same stream:
requests with ever new masks take the memory of one.
"""

from __future__ import annotations

import math
import secrets
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.errors import PlanOverflowError, wrong
from tessera_cupy.interop import Operand, contiguous, device_operand
from tessera_cupy.kernels.arena import Arena, BuildLayout, Part, ragged_arena, state_arena
from tessera_cupy.kernels.builders import (
    FRAGMENT_BYTES,
    MASK_ERRORS,
    MASK_SCALARS,
    MASK_STATE_PARAMS,
    RAGGED_BLOCKS_PARAMS,
    STATE_POINTERS,
    TILE_COUNTS,
    TileBuild,
    mask_state_grid,
    ragged_blocks_grid,
)
from tessera_cupy.kernels.catalog import SLICE_KERNELS, TILE_KERNELS, KernelConfig, builder
from tessera_cupy.kernels.fetch import Fetched, fetch
from tessera_cupy.kernels.launch import (
    DevicePlan,
    Mark,
    Patch,
    load,
    packed_struct,
    refuse_capture,
    unmarked,
)
from tessera_cupy.kernels.lifetime import PER_THREAD, Uses, collect, pool_may_grow, release_with
from tessera_cupy.kernels.room import lists_room, note, watch
from tessera_cupy.masks.block_sizes import KnownSizes, UnreadSizes
from tessera_cupy.masks.summary import MaskSummary

if TYPE_CHECKING:
    from tessera_cupy.masks.device_source import DeviceSource, RaggedLayout, SourceLayout

# Unlike whatever memory may hold.
_stamps = count(secrets.randbits(62))


@dataclass(eq=False, slots=True)
class MaskState:
    """A mask's bitmap and scalars in GPU memory, in the order of the stream that makes them.

    Attributes:
        source: the mask's arrays.
        pointers: :data:`STATE_POINTERS`: the bitmap, and where ragged blocks begin.
        scalars: (8,) int64, :data:`MASK_SCALARS`.
        stream: address of the stream.
        memory: what must live until the bitmap was read.
    """

    source: DeviceSource
    pointers: tuple[int, int, int]
    scalars: Part
    stream: int
    memory: tuple[Any, ...]

    def on(self, stream: Any) -> bool:
        """Whether work launched on a stream (CuPy's) comes after the state was made."""
        return bool(stream.ptr == self.stream != PER_THREAD)

    def fetch(self) -> Fetched:
        """Let the scalars come to the host; nothing else does, and nothing waits yet."""
        return fetch(self.scalars, len(MASK_SCALARS))

    def summary(self, coming: Fetched | None = None) -> MaskSummary:
        """What the scalars say, once they are there; nothing else waits or crosses to the host.

        Args:
            coming: what :meth:`fetch` gave; None has them come now.

        Raises:
            ValueError: the mask is none; the message says why.
        """
        found = (coming or self.fetch()).wait()
        refuse_bad_mask(found)
        layout = self.source.layout
        present = int(found[MASK_SCALARS.index("present")])
        return MaskSummary(
            blocks=layout.rows * layout.num_blocks[1] if layout.ragged is None else present,
            nnz=int(found[MASK_SCALARS.index("nnz")]),
            in_runs=int(found[MASK_SCALARS.index("in_runs")]),
        )


def refuse_bad_mask(scalars: NDArray[np.int64]) -> None:
    """Raise what ``mask_state`` found wrong.

    Raises:
        ValueError: a column out of range, one listed twice, counts or sizes that do not fit.
    """
    errors = int(scalars[MASK_SCALARS.index("errors")])
    if errors:
        found = [text for bit, text in enumerate(MASK_ERRORS) if errors >> bit & 1]
        raise ValueError(
            wrong(
                "mask",
                "block columns or keys in range, each once in a row, counts that lists hold, "
                "offsets that rise from 0 to the length of indices, and sizes of at most the "
                "nominal block that sum to the tokens",
                "; ".join(found),
                "call mask.check(), which says where",
            )
        )


def mask_state(source: DeviceSource, arch: str, sms: int, *, mark: Mark = unmarked) -> MaskState:
    """Launch ``mask_state`` on the current stream of the mask's device, which is not capturing.

    Args:
        source: the mask's arrays.
        arch: architecture of the device.
        sms: its multiprocessors.
        mark: told when it is launched.
    """
    import cupy

    launch = _state_launch(source.layout, arch, sms)
    memory = cupy.empty(launch.arena.nbytes, np.uint8)
    stream = cupy.cuda.get_current_stream()
    base = memory.data.ptr
    copies = _launch_state(launch, source, base, stream, mark)
    scalars = Part(base + launch.scalars, 8 * len(MASK_SCALARS))
    return MaskState(source, launch.pointers(base), scalars, stream.ptr, (memory, *copies))


def _launch_state(
    launch: _StateLaunch, source: DeviceSource, base: int, stream: Any, mark: Mark
) -> list[Any]:
    """Make the state of a mask in the memory at ``base``; returns copies that the kernels read."""
    import cupy

    pointers: tuple[int, ...] = source.pointers
    copies: list[Any] = []
    if launch.copied:
        copies = [contiguous(device_operand(array, "mask")) for array in source.arrays]
        pointers = tuple(copy.pointer for copy in copies)
    ragged = launch.ragged
    uploads: list[Uses] = []
    if ragged is not None:
        sizes, uploads = _sizes_of(source)
        copies.append(source.layout.ragged)
    cupy.cuda.runtime.memsetAsync(base + launch.scalars, 0, launch.zeroed, stream.ptr)
    key = (pointers, base)
    params = launch.placed.get(key)
    if params is None:
        if len(launch.placed) >= _MOST_ADDRESSES:
            launch.placed.clear()
        params = launch.placed[key] = (launch.place(pointers, base),)
    kernel = load(launch.config, source.layout.device)
    kernel(launch.grid, launch.threads, params, shared_mem=launch.smem_bytes)
    if ragged is not None:
        kernel = load(ragged.config, source.layout.device)
        params = (ragged.place(sizes, base),)
        kernel(ragged.grid, ragged.threads, params, shared_mem=ragged.smem_bytes)
    mark("mask state")
    if uploads and not stream.is_capturing():
        for uses in uploads:
            uses.record(stream)
    return copies


def _sizes_of(source: DeviceSource) -> tuple[tuple[int, ...], list[Uses]]:
    """Addresses of the sizes of both sides, 0 of a uniform one; and the uses of those copied here.

    What the host knows is copied to the GPU the first time, which waits for that copy alone.
    """
    ragged = source.layout.ragged
    assert ragged is not None
    pointers = list(source.size_pointers)
    uploads = []
    for side, sizes in enumerate(ragged.sizes):
        if isinstance(sizes, KnownSizes):
            if source.layout.device not in sizes.copies:
                _upload(sizes, source.layout.device)
            pointers[side], uses = sizes.copies[source.layout.device]
            uploads.append(uses)
    return tuple(pointers), uploads


def _upload(sizes: KnownSizes, device: int) -> None:
    import cupy

    refuse_capture()
    # On a stream of its own, so as not to wait for what the caller's has to do.
    with cupy.cuda.Stream(non_blocking=True) as stream:
        array = cupy.asarray(sizes.sizes.astype(np.int32))
        stream.synchronize()
    uses = Uses(stream)
    sizes.copies[device] = array.data.ptr, uses
    release_with(sizes, uses, (array, stream))  # no other stream has its address meanwhile


@dataclass(frozen=True, eq=False)
class _StateLaunch:
    """A launch of ``mask_state`` on arrays at any addresses.

    ``offsets`` are those of the bitmap, row_count and scalars of ``mask_state`` in the arena;
    ``state`` those of :data:`STATE_POINTERS`, None of a side with uniform blocks; ``scalars`` that
    of the scalars, of which ``zeroed`` bytes are zeroed before.
    """

    config: KernelConfig
    grid: tuple[int]
    threads: tuple[int]
    smem_bytes: int
    arena: Arena
    state: tuple[int, int | None, int | None]
    scalars: int
    zeroed: int
    offsets: tuple[int, ...]
    params: bytes
    copied: bool
    ragged: _RaggedLaunch | None
    placed: dict[Any, tuple[NDArray[Any]]] = field(default_factory=dict)

    def pointers(self, base: int) -> tuple[int, int, int]:
        """:data:`STATE_POINTERS` of an allocation at an address."""
        bitmap, q, kv = self.state
        return base + bitmap, 0 if q is None else base + q, 0 if kv is None else base + kv

    def place(self, pointers: tuple[int, ...], base: int) -> NDArray[Any]:
        """The params for arrays and an allocation at some addresses."""
        bounds = pointers[1] if len(pointers) > 1 else 0
        outputs = [base + offset for offset in self.offsets]
        return _STATE_PATCH(self.params, pointers[0], bounds, *outputs)


@dataclass(frozen=True, eq=False)
class _RaggedLaunch:
    """A launch of ``ragged_blocks``; ``offsets`` are those of its arrays in the arena."""

    config: KernelConfig
    grid: tuple[int]
    threads: tuple[int]
    smem_bytes: int
    offsets: tuple[int, ...]
    params: bytes

    def place(self, sizes: tuple[int, ...], base: int) -> NDArray[Any]:
        """The params for sizes and an allocation at some addresses."""
        return _RAGGED_PATCH(self.params, *sizes, *[base + offset for offset in self.offsets])


def _ragged_launch(
    layout: SourceLayout, ragged: RaggedLayout, offsets: dict[str, int], arch: str
) -> _RaggedLaunch:
    config = builder(arch, "ragged_blocks")
    numbers: dict[str, int] = {}
    for side, name in enumerate(("q", "kv")):
        sizes = ragged.sizes[side]
        if isinstance(sizes, UnreadSizes):
            shape, strides = sizes.operand.shape, sizes.operand.strides
            numbers[f"{name}_wide"] = sizes.operand.dtype == "int64"
        elif isinstance(sizes, KnownSizes):
            shape = sizes.sizes.shape
            strides = (shape[1] * shape[2], shape[2], 1)
        else:
            shape = strides = (1, 1, 1)
        numbers |= {
            f"{name}_batch_stride": strides[0] if shape[0] > 1 else 0,
            f"{name}_head_stride": strides[1] if shape[1] > 1 else 0,
            f"{name}_stride": strides[2],
            f"{name}_blocks": layout.num_blocks[side],
            f"{name}_most": ragged.most[side],
            f"{name}_tokens": ragged.shape[side],
        }
    numbers |= dict(zip(("batch", "heads"), ragged.axes, strict=True))
    numbers |= dict(zip(("mask_batch", "mask_heads"), layout.axes, strict=True))
    params = packed_struct(RAGGED_BLOCKS_PARAMS, numbers)
    grid = ragged_blocks_grid(config, math.prod(ragged.axes), layout.num_blocks[0])
    return _RaggedLaunch(
        config,
        (grid,),
        (config.warps * 32,),
        config.smem_bytes,
        tuple(offsets[name] for name in _RAGGED_ARRAYS),
        params.tobytes(),
    )


_RAGGED_ARRAYS = (*STATE_POINTERS, "mask_bitmap", "mask_scalars", "scalars")
_RAGGED_PATCH = Patch(RAGGED_BLOCKS_PARAMS, "q_sizes", "kv_sizes", *_RAGGED_ARRAYS)


@lru_cache(maxsize=256)
def _state_launch(layout: SourceLayout, arch: str, sms: int) -> _StateLaunch:
    """The launch for all masks of a layout."""
    values, bounds = layout.operands[0], layout.operands[1] if layout.operands[1:] else None
    config = builder(arch, _state_entry(layout))
    rows, nk = layout.rows, layout.num_blocks[1]
    grid = mask_state_grid(config, rows, sms)
    ragged = layout.ragged
    if ragged is None:
        arena = state_arena(rows, nk)
    else:
        starts = [
            0 if s is None else n + 1 for s, n in zip(ragged.sizes, layout.num_blocks, strict=True)
        ]
        heads = math.prod(ragged.axes), layout.num_blocks[0]
        arena = ragged_arena(rows, nk, heads, (starts[0], starts[1]))
    inner = 0 if layout.form == "csr" else 1
    stride = _stride(values, inner)
    fits = stride is not None and (bounds is None or _stride(bounds, 0) is not None)
    params = packed_struct(
        MASK_STATE_PARAMS,
        {
            "stride": stride if fits else values.shape[-1],
            "width": values.shape[-1],
            "rows": rows,
            "nk": nk,
            "wide_values": values.dtype == "int64",
            "wide_bounds": bounds is not None and bounds.dtype == "int64",
        },
    )
    offsets = {name: offset for name, (offset, _) in arena.places.items()}
    state: tuple[int, int | None, int | None] = (offsets["bitmap"], None, None)
    written = tuple(offsets[name] for name in _STATE_ARRAYS)
    after = None
    if ragged is not None:
        sides = [
            None if sizes is None else offsets[name]
            for sizes, name in zip(ragged.sizes, STATE_POINTERS[1:], strict=True)
        ]
        state = offsets["bitmap"], sides[0], sides[1]
        offsets["mask_scalars"] = offsets["scalars"] + 8 * len(MASK_SCALARS)
        written = offsets["mask_bitmap"], offsets["row_count"], offsets["mask_scalars"]
        after = _ragged_launch(layout, ragged, offsets, arch)
    return _StateLaunch(
        config,
        (grid,),
        (config.warps * 32,),
        config.smem_bytes,
        arena,
        state,
        offsets["scalars"],
        arena.places["scalars"][1],
        written,
        params.tobytes(),
        not fits,
        after,
    )


_STATE_ARRAYS = ("bitmap", "row_count", "scalars")
_STATE_PATCH = Patch(MASK_STATE_PARAMS, "values", "bounds", *_STATE_ARRAYS)


def build(
    source: DeviceSource,
    sizes: TileBuild,
    arch: str,
    stream: Any,
    *,
    state: MaskState | None = None,
    nnz: int | None = None,
    room: int | None = None,
    capturing: bool = False,
    mark: Mark = unmarked,
) -> DevicePlan:
    """Launch all that makes a plan, on the mask's device.

    Args:
        source: the mask's arrays.
        sizes: the build; the room for its lists is chosen here.
        arch: architecture of the device.
        stream: CuPy's current stream.
        state: the mask's, where it was made on this stream before.
        nnz: the number of its active blocks, and so what the lists need, where the host knows it.
        room: fragments that the lists get, where the caller uses the plan for a mask only that it
            knows to need no more.
        capturing: whether a CUDA graph captures the stream; its replays may see other masks.
        mark: told when each kernel is launched.

    Returns:
        The plan; its ``counts`` say how many tasks there are.
    """
    import cupy

    if not capturing:
        collect()
    layout = source.layout
    suffices = room is not None or nnz is not None
    if room is None:
        if nnz is None and sizes.gather:
            nnz = layout.most_listed
            # Rows of a CSR that is none may overlap, and list more than there is; what is said of
            # a map may be wrong.
            suffices = nnz is not None and layout.form == "lists"
        room = lists_room(sizes, nnz)
    launch = _build_launch(sizes, room, arch)
    nbytes = launch.layout.arena.nbytes
    held: tuple[Any, ...]
    # One allocation holds all: of its parts, the lists take nearly all.
    if state is None:
        of_state = _state_launch(source.layout, arch, sizes.device.sms)
        with pool_may_grow() if capturing else _NOTHING:
            memory = cupy.empty(nbytes + of_state.arena.nbytes, np.uint8)
            base = memory.data.ptr
            behind = base + nbytes
            copies = _launch_state(of_state, source, behind, stream, mark)
        pointers = of_state.pointers(behind)
        scalars = Part(behind + of_state.scalars, 8 * len(MASK_SCALARS))
        held = (memory, *copies) if capturing else (memory,)
    else:
        memory = cupy.empty(nbytes, np.uint8)
        base = memory.data.ptr
        pointers, scalars = state.pointers, state.scalars
        held = (memory, *state.memory)
    placed = launch.at(base, pointers)
    stamp, params = placed.stamp, placed.params
    if capturing:
        # Until it is replayed, the counts may be those of an earlier plan at this address.
        stamp = next(_stamps)
        params = (launch.layout.params(pointers, base, stamp),)
    for config, grid, threads, smem_bytes in launch.kernels:
        kernel = load(config, source.layout.device)
        kernel(grid, threads, params, shared_mem=smem_bytes)
        mark(config.kernel)
    may_overflow = not suffices and room < launch.most_fragments
    need = watch(sizes, placed.counts) if may_overflow and not capturing else None
    uses = Uses(stream)
    ragged = layout.ragged
    # Sizes that only the GPU knows may leave rows without a task.
    may_miss = may_overflow or (ragged is not None and ragged.unread[0])
    plan = DevicePlan(
        *placed.arrays,
        uses,
        placed.counts,
        scalars,
        stamp,
        may_miss,
        need,
        structs=launch.structs,
        rows=placed.rows,
    )
    release_with(plan, uses, held)
    if not capturing:
        uses.filled(stream)
    return plan


_NOTHING = nullcontext()


@dataclass(frozen=True, eq=False)
class _BuildLaunch:
    """The launches of the tile kernels for one build.

    What follows from addresses is kept, as the pool gives the plans the same few; so ``structs``
    are shared by all of them. ``numbers`` are those that a :class:`DevicePlan` begins with.
    """

    layout: BuildLayout
    kernels: list[tuple[KernelConfig, tuple[int], tuple[int], int]]
    numbers: tuple[int, int, int, int]
    most_fragments: int
    structs: dict[Any, Any] = field(default_factory=dict)
    _placed: dict[tuple[int, tuple[int, int, int]], _Placed] = field(default_factory=dict)

    def at(self, base: int, state: tuple[int, int, int]) -> _Placed:
        """What follows from the addresses of an allocation and of a mask's state."""
        key = (base, state)
        placed = self._placed.get(key)
        if placed is None:
            if len(self._placed) >= _MOST_ADDRESSES:
                self._placed.clear()
            placed = self._placed[key] = _place(self.layout, self.numbers, base, state)
        return placed


_MOST_ADDRESSES = 64


class _Placed(NamedTuple):
    """A build at some addresses.

    Attributes:
        params: of the tile kernels.
        stamp: in the params.
        counts: where the counts go.
        arrays: what a :class:`DevicePlan` begins with, up to ``merge_offsets``.
        rows: gathered keys, or None.
    """

    params: tuple[NDArray[Any]]
    stamp: int
    counts: Part
    arrays: _Arrays
    rows: Part | None


_Arrays = tuple[int, int, int, int, Part, Part, None, Part, None, None, Part, Part, Part]


def _place(
    layout: BuildLayout,
    numbers: tuple[int, int, int, int],
    base: int,
    state: tuple[int, int, int],
) -> _Placed:
    stamp = next(_stamps)
    parts = layout.parts(base)
    arrays = (
        *numbers,
        parts["tasks"],
        parts["tile_q"],
        None,
        parts["frags"],
        None,
        None,
        parts["merge_head"],
        parts["merge_tile"],
        parts["merge_offsets"],
    )
    params = (layout.params(state, base, stamp),)
    return _Placed(params, stamp, parts["counts"], arrays, parts.get("rows"))


def _build_launch(sizes: TileBuild, room: int, arch: str) -> _BuildLaunch:
    key = (id(sizes), room, arch)
    found = _builds.get(key)
    if found is None:
        made = replace(sizes, frag_capacity=room)
        configs = _tile_kernels(arch, made.ragged != (None, None), made.gather)
        launch = _BuildLaunch(
            BuildLayout(made),
            [(c, (made.grid(c),), (c.warps * 32,), c.smem_bytes) for c in configs],
            (
                made.task_capacity,
                int(math.log2(made.shape.slot)),
                made.merge_ctas,
                made.slot_capacity,
            ),
            made.most_fragments,
        )
        if len(_builds) >= _MOST_BUILDS:
            _builds.clear()
        found = _builds[key] = (sizes, launch)
    return found[1]


# By the identity of the sizes, which is quicker than their hash: the sizes, and the launches.
_builds: dict[tuple[int, int, str], tuple[TileBuild, _BuildLaunch]] = {}
_MOST_BUILDS = 256


def kernels(source: DeviceSource, arch: str) -> list[KernelConfig]:
    """The entries that make a plan of a mask."""
    layout = source.layout
    ragged = layout.ragged is not None
    state = [_state_entry(layout), *(["ragged_blocks"] if ragged else [])]
    return [builder(arch, name) for name in state] + _tile_kernels(arch, ragged, layout.keys)


def _state_entry(layout: SourceLayout) -> str:
    """Name of the entry of ``mask_state`` for a mask."""
    long = layout.form in ("lists", "csr") and layout.num_blocks[1] > _SHORT_ROW
    return f"mask_state_{layout.form}" + ("_long" if long else "")


# Columns of a list that mask_state takes in one pass, but for entries of long rows.
_SHORT_ROW = 8192


def _tile_kernels(arch: str, ragged: bool, gather: bool) -> list[KernelConfig]:
    if gather:
        return [builder(arch, name) for name in SLICE_KERNELS]
    suffix = "_ragged" if ragged else ""
    return [builder(arch, name + suffix) for name in TILE_KERNELS]


def check(plan: DevicePlan, sizes: TileBuild, device: int) -> None:
    """Wait for a plan that the GPU made of these sizes, and look for errors in it.

    Raises:
        ValueError: the mask is none.
        PlanOverflowError: its lists needed more room.
    """
    import cupy

    with cupy.cuda.Device(device) as current:
        current.synchronize()
        scalars = fetch(plan.scalars, len(MASK_SCALARS)).wait()
        counts = fetch(plan.counts, len(TILE_COUNTS)).wait()
    found = dict(zip(TILE_COUNTS, counts.tolist(), strict=True))
    if found["stamp"] != plan.stamp:
        return  # captured, and not replayed yet
    refuse_bad_mask(scalars)
    if found["errors"]:
        note(sizes, found["fragments"])
        room = plan.fragments.nbytes // FRAGMENT_BYTES
        raise PlanOverflowError(
            f"the plan needs {found['fragments']} fragments and had room for {room}, so its output "
            "is NaN. Run it again: there is room now. A captured graph must be captured again."
        )


def _stride(operand: Operand, inner: int) -> int | None:
    """Elements from each row to the next; None where a kernel cannot read the array as it is.

    Args:
        operand: an array of rows.
        inner: trailing axes that a row has, 1 or 0; a row's elements are neighbours, and rows of
            no axis are.
    """
    outer = len(operand.shape) - inner
    stride = _row_stride(operand.shape[:outer], operand.strides[:outer])
    if stride is None or stride < 0:
        return None
    if inner:
        return stride if operand.strides[-1] == 1 or operand.shape[-1] <= 1 else None
    return stride if stride == 1 or math.prod(operand.shape) <= 1 else None


def _row_stride(lengths: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """Elements from each row to the next, if that is one number."""
    stride, rows = None, 1
    for length, step in zip(reversed(lengths), reversed(strides), strict=True):
        if length != 1:
            if stride is None:
                stride = step
            elif step != stride * rows:
                return None
            rows *= length
    return stride or 0
