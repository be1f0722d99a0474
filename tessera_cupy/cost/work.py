"""What each task has a kernel do, counted from tiles and tasks: steps, rows, masking."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.kernels.catalog import KernelConfig, twin_of
from tessera_cupy.mapping.stats import computed_parts
from tessera_cupy.mapping.tiles import GROUP_ROWS, Tiles
from tessera_cupy.organization import Tasks
from tessera_cupy.organization.twins import find_twins


@dataclass(frozen=True, eq=False)
class Work:
    """Counts of N tasks, in launch order.

    A *part* is the rows of a tile that a kernel multiplies together: a warp's or a warpgroup's.

    Attributes:
        head: (N,) query head of each task, as in ``Tasks``.
        steps: (N,) steps of each task, those that no part has rows in included.
        parts: (N, parts of a tile) steps that each part computes.
        masked: (N, parts of a tile) of these, the steps with a column to mask.
        rows: (N,) KV rows that are loaded, of K; of V there are as many.
        gathered: (N,) of these, rows that are copied one by one.
        is_part: (N,) bool, split-K parts, which write to the workspace.
        twins: (N,) bool, tasks that share their loads with a neighbour.
    """

    head: NDArray[np.int64]
    steps: NDArray[np.int64]
    parts: NDArray[np.int64]
    masked: NDArray[np.int64]
    rows: NDArray[np.int64]
    gathered: NDArray[np.int64]
    is_part: NDArray[np.bool_]
    twins: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.steps)


def count_work(tiles: Tiles, tasks: Tasks, config: KernelConfig) -> Work:
    """Count what each task has the kernel do.

    Args:
        tiles: what mapping made.
        tasks: what organization made of them.
        config: the kernel.

    Example:
        >>> from tessera_cupy import ArraySpec, BlockMask, make_plan
        >>> mask = BlockMask.from_dense([[1, 1], [0, 1]], (64, 64))
        >>> regime = "attend_mma/q64k64/retain-pack/rows"
        >>> plan = make_plan(mask, ArraySpec((1, 1, 128, 64)), regime=regime)
        >>> work = count_work(plan.tiles(), plan.tasks(), plan.config)
        >>> work.steps.tolist(), work.parts[0].tolist(), work.rows.tolist()
        ([2, 1], [2, 2, 2, 2], [128, 64])
    """
    part = config.rows_together
    loaded = (tiles.frag_members != 0) & (tiles.frag_len > 0)
    if config.kernel == "attend_wgmma":
        # A box of the copy engine is a whole fragment, but of gathered ones.
        rows = np.where(loaded, tiles.shape.slot, 0)
    else:
        rows = np.where(loaded, tiles.frag_len, 0)
    gathered = np.zeros_like(rows)
    if tiles.frag_gathered is not None:
        gathered = np.where(loaded & tiles.frag_gathered, tiles.frag_len, 0)
        rows = np.where(tiles.frag_gathered, gathered, rows)
    first = _first_fragments(tiles)
    computed = list(np.ascontiguousarray(computed_parts(tiles, part).T))
    complete = _complete(tiles, first, part)
    steps = tiles.steps.astype(np.int64)
    begin = (np.cumsum(steps) - steps)[tasks.task_tile] + tasks.task_begin
    end = begin + (tasks.task_end - tasks.task_begin)

    def of_tasks(of_steps: NDArray[Any]) -> NDArray[np.int64]:
        totals = np.zeros(len(first) + 1, np.int64)
        np.cumsum(of_steps, out=totals[1:])
        counts: NDArray[np.int64] = totals[end] - totals[begin]
        return counts

    masked = [by_part & ~on for by_part, on in zip(computed, complete, strict=True)]
    twins = np.zeros(len(tasks), np.bool_)
    if twin_of(config) is not None:
        twins = find_twins(tiles, tasks)
    return Work(
        head=tasks.task_head.astype(np.int64),
        steps=(tasks.task_end - tasks.task_begin).astype(np.int64),
        parts=np.stack([of_tasks(counts) for counts in computed], axis=1),
        masked=np.stack([of_tasks(counts) for counts in masked], axis=1),
        rows=of_tasks(_sums(rows, first)),
        gathered=of_tasks(_sums(gathered, first)),
        is_part=tasks.task_slot >= 0,
        twins=twins,
    )


def _first_fragments(tiles: Tiles) -> NDArray[np.int64]:
    """(S,) first fragment of every step of all tiles."""
    steps = tiles.steps
    place = np.arange(steps.sum(dtype="int64")) - np.repeat(np.cumsum(steps) - steps, steps)
    first: NDArray[np.int64] = np.repeat(tiles.frag_offsets[:-1], steps)
    first += place * tiles.shape.fragments
    return first


def _sums(of_fragments: NDArray[Any], first: NDArray[np.int64]) -> NDArray[np.int64]:
    if not len(first):
        return np.zeros(0, np.int64)
    sums: NDArray[np.int64] = np.add.reduceat(of_fragments, first, dtype=np.int64)
    return sums


def _complete(tiles: Tiles, first: NDArray[np.int64], part: int) -> list[NDArray[np.bool_]]:
    """By part, (S,): whether all rows that it has take part in every column of a step."""
    groups = part // GROUP_ROWS
    all_on = np.zeros(0, np.uint32)
    if len(first):
        lacking = ~np.repeat(_existing_groups(tiles), np.diff(tiles.frag_offsets))
        full = (tiles.frag_len == tiles.shape.slot) & (tiles.frag_bits < 0)
        words = np.where(full, tiles.frag_members | lacking, np.uint32(0))
        all_on = np.bitwise_and.reduceat(words, first)
        all_on[np.diff(first, append=len(words)) < tiles.shape.fragments] = 0
    own = np.uint32((1 << groups) - 1)
    shifts = np.arange(0, tiles.shape.groups, groups, dtype=np.uint32)
    return [(all_on >> shift & own) == own for shift in shifts]


def _existing_groups(tiles: Tiles) -> NDArray[np.uint32]:
    """(T,) uint32, membership bits of the rows that each tile has."""
    rows = tiles.tile_q[:, 1]
    if tiles.tile_halves is None:
        return _ones(rows)
    half = np.uint32(tiles.shape.groups // 2)
    return _ones(tiles.tile_halves) | _ones(rows - tiles.tile_halves) << half


def _ones(rows: NDArray[Any]) -> NDArray[np.uint32]:
    groups = (rows + GROUP_ROWS - 1) // GROUP_ROWS
    return ((np.uint64(1) << groups.astype(np.uint64)) - np.uint64(1)).astype(np.uint32)
