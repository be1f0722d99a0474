"""The tile-by-tile executor: a plan's tiles and tasks in NumPy, as a kernel runs them.

For each task, in launch order:

    m = -inf, l = 0, O = 0                            for each row of the tile
    for each step of the task, forwards or backwards:
        K', V' = rows of the step's fragments, side by side in their slots
        S  = scale * Q K'^T; -inf where length, members or token bits say so
        m' = max(m, rowmax S)
        P  = exp(S - m'),  a = exp(m - m')            with 0 for m' where m' = -inf
        l  = a l + rowsum P,  O = a O + P V',  m = m'
    whole tile:    O / l,  LSE = m + ln l             or 0 and -inf where l = 0
    split-K part:  (m, l, O) to the task's slot

and then, for each split tile, its slots are merged in their order. Where the kernels scale
S by log2 e and take powers of two, this takes NumPy's exp: the values are the same up to
rounding, and NumPy's float32 exp2 is not vectorised everywhere.

The matrices here are transposed, (KV rows, query rows) and (dim of O, query rows), because
NumPy reduces and broadcasts fastest along the last axis. Steps that need no masking skip
it, as in the kernels. Inputs are finite, except that KV rows which no step loads may hold
anything. Outputs and workspace start as NaN, so that what no task writes is seen in the
result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tessera_cupy.errors import wrong
from tessera_cupy.mapping.tiles import GROUP_ROWS, Tiles
from tessera_cupy.organization.tasks import Tasks
from tessera_cupy.reference.inputs import default_scale, heads_first, request_layout

#: Multiplications up to which OpenBLAS keeps a matrix product to the calling thread.
_ONE_THREAD = 1 << 18

_Progress = Callable[[int, int], None]


class _Request(Protocol):
    @property
    def q_heads(self) -> int: ...
    @property
    def layout(self) -> str: ...


class _MaskAxes(Protocol):
    @property
    def batch(self) -> int: ...
    @property
    def heads(self) -> int: ...


class Executable(Protocol):
    """What :func:`execute` needs of a plan."""

    @property
    def request(self) -> _Request:
        """The request: query heads and layout."""
        ...

    @property
    def mask(self) -> _MaskAxes:
        """The mask that was mapped: its batch and head axes."""
        ...

    def tiles(self) -> Tiles:
        """The mapped tiles."""
        ...

    def tasks(self) -> Tasks:
        """The organized tasks."""
        ...


def execute(
    plan: Executable,
    q: Any,
    k: Any,
    v: Any,
    *,
    sm_scale: float | None = None,
    return_lse: bool = False,
    on_task: _Progress | None = None,
) -> Any:
    """Run a plan in NumPy; arguments and result as in :func:`execute_tiles`.

    Example:
        >>> out = execute(plan, q, k, v)  # doctest: +SKIP
    """
    return execute_tiles(
        plan.tiles(),
        plan.tasks(),
        q,
        k,
        v,
        q_heads=plan.request.q_heads,
        mask_batch=plan.mask.batch,
        mask_heads=plan.mask.heads,
        sm_scale=sm_scale,
        return_lse=return_lse,
        layout=plan.request.layout,
        on_task=on_task,
    )


def execute_tiles(
    tiles: Tiles,
    tasks: Tasks,
    q: Any,
    k: Any,
    v: Any,
    *,
    q_heads: int,
    mask_batch: int,
    mask_heads: int,
    sm_scale: float | None = None,
    return_lse: bool = False,
    layout: str = "BHSD",
    dtype: DTypeLike = np.float32,
    on_task: _Progress | None = None,
) -> Any:
    """Run tasks over tiles in NumPy.

    Args:
        tiles: the mapped tiles.
        tasks: the tasks that organize these tiles for this request.
        q: (batch, ``q_heads``, sq, dim) in ``layout``, any float type that converts to NumPy.
        k: (batch, kv heads, skv, dim).
        v: (batch, kv heads, skv, dim of O).
        q_heads: query heads that ``tasks`` counts.
        mask_batch: batch entries of the mask that ``tiles`` count, 1 or batch.
        mask_heads: heads of the mask that ``tiles`` count, 1 or ``q_heads``.
        sm_scale: factor on the scores; None means 1 / sqrt(dim).
        return_lse: also return the log-sum-exp.
        layout: ``"BHSD"`` or ``"BSHD"``.
        dtype: float type to compute in; the kernels accumulate in float32.
        on_task: called with (tasks done, all tasks) after each one.

    Returns:
        O, ``dtype`` in ``layout``; with ``return_lse`` the pair of O and the natural LSE,
        (batch, q heads, sq). What no task wrote is NaN.

    Raises:
        ValueError: inputs do not fit each other, or the tiles and tasks do not fit them.

    Example:
        >>> out, lse = execute_tiles(
        ...     tiles, tasks, q, k, v, q_heads=8, mask_batch=1, mask_heads=8, return_lse=True
        ... )  # doctest: +SKIP
    """
    q, k, v = heads_first(q, k, v, layout, dtype)
    _check(tiles, tasks, q, k, q_heads, mask_batch, mask_heads)
    batch, _, sq, dim = q.shape
    q = q * default_scale(sm_scale, dim)
    shared, skv = q_heads // k.shape[1], k.shape[2]
    # One more row of zeros, for the columns of a step that no fragment fills.
    zero_row = ((0, 0), (0, 0), (0, 1), (0, 0))
    k, v = np.pad(k, zero_row), np.pad(v, zero_row)

    out = np.full((batch, q_heads, sq, v.shape[3]), np.nan, dtype)
    lse = np.full((batch, q_heads, sq), np.nan, dtype)
    partials = _Partials(tasks.slots, tiles.shape.q, v.shape[3], dtype)
    steps = _Steps(tiles, dtype)
    for task in range(len(tasks)):
        b, h = divmod(int(tasks.task_head[task]), q_heads)
        tile = int(tasks.task_tile[task])
        mine = tiles.query_rows(tile, tiles.tile_rows(tile))
        softmax = _Softmax(q[b, h, mine], tiles.shape.kv, v.shape[3])
        keys, values = k[b, h // shared], v[b, h // shared]
        begin, end = int(tasks.task_begin[task]), int(tasks.task_end[task])
        for loaded, bias in steps.walk(tile, begin, end, bool(tasks.task_reverse[task]), skv):
            softmax.step(keys[loaded], values[loaded], bias)
        if tasks.task_slot[task] < 0:
            out[b, h, mine], lse[b, h, mine] = softmax.result()
        else:
            partials.write(int(tasks.task_slot[task]), softmax)
        if on_task is not None:
            on_task(task + 1, len(tasks))

    for i, (head, tile) in enumerate(zip(tasks.merge_head, tasks.merge_tile, strict=True)):
        b, h = divmod(int(head), q_heads)
        mine = tiles.query_rows(tile, tiles.tile_rows(tile))
        slots = range(tasks.merge_offsets[i], tasks.merge_offsets[i + 1])
        out[b, h, mine], lse[b, h, mine] = partials.merge(slots, len(mine))
    out = request_layout(out, layout)
    return (out, lse) if return_lse else out


def _check(
    tiles: Tiles,
    tasks: Tasks,
    q: NDArray[Any],
    k: NDArray[Any],
    q_heads: int,
    mask_batch: int,
    mask_heads: int,
) -> None:
    """Refuse tiles and tasks of another request: a kernel would read and write out of bounds."""
    fix = "plan for these arrays"
    if q.shape[1] != q_heads:
        raise ValueError(wrong("q", f"{q_heads} heads", q.shape[1], fix))
    tile, row = np.arange(len(tiles))[:, None], np.arange(tiles.shape.q)
    mine = np.where(tiles.exists(tile, row), tiles.query_rows(tile, row), -1)
    rows = int(mine.max(initial=-1)) + 1
    if rows > q.shape[2]:
        raise ValueError(wrong("q", f"at least the tiles' {rows} rows", q.shape[2], fix))
    rows = tiles.keys_end()
    if rows > k.shape[2]:
        raise ValueError(wrong("k", f"at least the tiles' {rows} rows", k.shape[2], fix))
    heads = int(tasks.task_head.max(initial=-1)) + 1
    if heads > q.shape[0] * q_heads:
        expected = f"heads below batch x q heads = {q.shape[0] * q_heads}"
        raise ValueError(wrong("tasks", expected, heads - 1, fix))
    of_batch = tasks.task_head // q_heads if mask_batch > 1 else 0
    of_head = tasks.task_head % q_heads if mask_heads > 1 else 0
    astray = np.flatnonzero(tiles.tile_head[tasks.task_tile] != of_batch * mask_heads + of_head)
    if len(astray):
        task = int(astray[0])
        expected = f"a tile of query head {tasks.task_head[task]}'s mask head in task {task}"
        got = f"one of mask head {tiles.tile_head[tasks.task_tile[task]]}"
        raise ValueError(wrong("tasks", expected, got, fix))


class _Steps:
    """The steps of all tiles: which KV rows each one loads and what it masks."""

    def __init__(self, tiles: Tiles, dtype: DTypeLike) -> None:
        """Find the steps that nobody loads, that need no masking and that need no gather."""
        shape = tiles.shape
        self._tiles, self._dtype = tiles, np.dtype(dtype)
        counts = tiles.steps.astype(np.int64)
        self._first_step = np.cumsum(counts) - counts
        owner = np.repeat(np.arange(len(tiles)), counts)
        within = np.arange(len(owner)) - self._first_step[owner]
        begin = tiles.frag_offsets[owner] + within * shape.fragments
        self._begin = begin
        self._end = np.minimum(begin + shape.fragments, tiles.frag_offsets[owner + 1])

        group = np.arange(shape.groups, dtype=np.uint32)
        exist = tiles.exists(np.arange(len(tiles))[:, None], group.astype(np.int64) * GROUP_ROWS)
        every = np.bitwise_or.reduce(exist.astype(np.uint32) << group, axis=1)
        every_of = np.repeat(every, np.diff(tiles.frag_offsets))
        idle = (tiles.frag_members == 0) | (tiles.frag_len == 0)
        exact = (tiles.frag_len == shape.slot) & (tiles.frag_bits < 0)
        exact &= tiles.frag_members == every_of
        follows: NDArray[np.bool_] = np.ones(len(exact), np.bool_)
        follows[1:] = tiles.frag_start[1:] == tiles.frag_start[:-1] + shape.slot
        follows[begin] = True
        if tiles.frag_gathered is not None:
            follows &= ~tiles.frag_gathered
        if len(begin):
            idle, exact, follows = (
                np.logical_and.reduceat(of_fragment, begin)
                for of_fragment in (idle, exact, follows)
            )
        self._idle, self._exact, self._neighbours = idle, exact, exact & follows

    def walk(
        self, tile: int, begin: int, end: int, reverse: bool, zero_row: int
    ) -> Iterator[tuple[slice | NDArray[np.int64], NDArray[Any] | None]]:
        """Each step's KV rows, and what to add to its scores, or None for nothing.

        Columns that no fragment fills load ``zero_row``, as do those of fragments without
        members. Steps that nobody loads are left out.
        """
        if begin == end:
            return
        mine = slice(self._first_step[tile] + begin, self._first_step[tile] + end)
        fragments = slice(int(self._begin[mine.start]), int(self._end[mine.stop - 1]))
        width = self._tiles.shape.slot
        column = np.arange(width)
        # For the whole task at once: NumPy calls on single steps would cost more than the steps.
        loaded = np.where(self._tiles.frag_members[fragments], self._tiles.frag_len[fragments], 0)
        inside = column < loaded[:, None]
        index = np.arange(fragments.start, fragments.stop)[:, None]
        rows = np.where(inside, self._tiles.key_rows(index, column), zero_row).ravel()
        exact, neighbours = self._exact[mine].tolist(), self._neighbours[mine].tolist()
        bias = None if all(exact) else self._bias(fragments, inside, tile)
        idle = self._idle[mine].tolist()
        low = ((self._begin[mine] - fragments.start) * width).tolist()
        high = ((self._end[mine] - fragments.start) * width).tolist()
        for i in range(end - begin - 1, -1, -1) if reverse else range(end - begin):
            if idle[i]:
                continue
            columns = slice(low[i], high[i])
            if neighbours[i]:
                first = int(rows[low[i]])
                yield slice(first, first + high[i] - low[i]), None
            else:
                yield rows[columns], None if exact[i] or bias is None else bias[columns]

    def _bias(self, fragments: slice, inside: NDArray[np.bool_], tile: int) -> NDArray[Any]:
        """(KV columns, query rows) of some fragments: 0 where active, else -inf.

        Adding it is several times faster than storing -inf where a boolean array says.
        """
        tiles, rows = self._tiles, self._tiles.tile_rows(tile)
        zero, off = np.array([0, -np.inf], self._dtype)
        members = tiles.frag_members[fragments, None] >> np.arange(tiles.shape.groups)
        absent = np.repeat(np.where(members & 1, zero, off), GROUP_ROWS, axis=1)[:, rows]
        bias = absent[:, None, :] + np.where(inside, zero, off)[:, :, None]
        index = tiles.frag_bits[fragments]
        partial = np.flatnonzero(index >= 0)
        if len(partial):
            words = tiles.bits[index[partial]][:, rows].astype("<u4")
            bits = np.unpackbits(words.view(np.uint8), axis=2, bitorder="little")
            bits = bits[:, :, : tiles.shape.slot].transpose(0, 2, 1)
            bias[partial] += np.where(bits, zero, off)
        flat: NDArray[Any] = bias.reshape(-1, len(rows))
        return flat


class _Softmax:
    """Running (m, l, O) of one task's rows."""

    def __init__(self, q: NDArray[Any], columns: int, dim: int) -> None:
        """Start with no key seen; ``q`` is scaled already, ``columns`` bounds a step's."""
        self.rows = len(q)
        self._q = np.ascontiguousarray(q.T)
        self._scores = np.empty((columns + 1, self.rows), q.dtype)
        self._product = np.empty((dim, self.rows), q.dtype)
        self._ones = np.ones(columns, q.dtype)
        self.m = np.full(self.rows, -np.inf, q.dtype)
        self.l = np.zeros(self.rows, q.dtype)
        self.o = np.zeros((dim, self.rows), q.dtype)

    def step(self, k: NDArray[Any], v: NDArray[Any], bias: NDArray[Any] | None) -> None:
        """Take in one step's keys and values; ``bias`` None means every pair is active."""
        # The old maximum rides along as one more row of the scores: their common maximum is
        # the new one, and its exponential is the factor of what was summed before.
        columns = len(k)
        both = self._scores[: columns + 1]
        scores, old = both[:-1], both[-1]
        _multiply(k, self._q, scores)
        old[:] = self.m
        if bias is not None:
            scores += bias
        self.m = np.maximum.reduce(both, axis=0)
        both -= self.m if bias is None else np.where(self.m == -np.inf, 0, self.m)
        np.exp(both, out=both)
        self.l *= old
        self.l += np.dot(self._ones[:columns], scores)
        self.o *= old
        _multiply(v.T, scores, self._product)
        self.o += self._product

    def result(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """O, (rows, dim), and the natural LSE, (rows,)."""
        return _finish(self.m, self.l, self.o.T)


def _multiply(a: NDArray[Any], b: NDArray[Any], out: NDArray[Any]) -> None:
    """``out = a @ b``, in bands of rows that one thread takes.

    A step's products are so small that other threads hardly help, and on a machine that is
    busy, waiting for them takes many times longer than the product.
    """
    band = max(8, _ONE_THREAD // max(1, b.size))
    for first in range(0, len(a), band):
        np.dot(a[first : first + band], b, out=out[first : first + band])


class _Partials:
    """The split-K workspace: (m, l, O) of each slot."""

    def __init__(self, slots: int, rows: int, dim: int, dtype: DTypeLike) -> None:
        """Fill it with NaN."""
        self._m = np.full((slots, rows), np.nan, dtype)
        self._l = np.full((slots, rows), np.nan, dtype)
        self._o = np.full((slots, rows, dim), np.nan, dtype)

    def write(self, slot: int, softmax: _Softmax) -> None:
        """Keep a task's state in its slot."""
        self._m[slot, : softmax.rows] = softmax.m
        self._l[slot, : softmax.rows] = softmax.l
        self._o[slot, : softmax.rows] = softmax.o.T

    def merge(self, slots: range, rows: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Combine slots in their order: O, (rows, dim), and the natural LSE, (rows,)."""
        highest = self._m[slots.start : slots.stop, :rows].max(axis=0)
        base = np.where(highest == -np.inf, 0, highest)
        total = np.zeros_like(base)
        o = np.zeros_like(self._o[0, :rows])
        for slot in slots:
            weight = np.exp(self._m[slot, :rows] - base)
            total += weight * self._l[slot, :rows]
            o += weight[:, None] * self._o[slot, :rows]
        return _finish(highest, total, o)


def _finish(
    m: NDArray[Any], total: NDArray[Any], o: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """O and the natural LSE of finished rows; 0 and -inf where no key was active."""
    empty = total == 0
    total = np.where(empty, 1, total)
    lse = np.where(empty, -np.inf, m + np.log(total))
    return o / total[:, None], lse
