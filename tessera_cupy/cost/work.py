"""What each task has a kernel do, counted from tiles and tasks: steps, fragments, rows, masking."""

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
        steps: (N,) steps of each task, those that no part has rows in included.
        parts: (N, parts of a tile) steps that each part computes.
        masked: (N, parts of a tile) of these, the steps with a column to mask.
        fragments: (N,) fragments that are loaded.
        rows: (N,) KV rows that are loaded, of K; of V there are as many.
        gathered: (N,) of these, rows that are copied one by one.
        is_part: (N,) bool, split-K parts, which write to the workspace.
        twins: (N,) bool, tasks that share their loads with a neighbour.
    """

    steps: NDArray[np.int64]
    parts: NDArray[np.int64]
    masked: NDArray[np.int64]
    fragments: NDArray[np.int64]
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
        >>> work = count_work(plan.tiles(), plan.tasks(), plan.config)  # doctest: +SKIP
        >>> int(work.parts.sum())  # doctest: +SKIP
        5400
    """
    part = config.rows_together
    computed = computed_parts(tiles, part)
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
    of_steps = [
        computed,
        computed & ~_complete(tiles, first, part),
        _sums(loaded, first)[:, None],
        _sums(rows, first)[:, None],
        _sums(gathered, first)[:, None],
    ]
    totals = np.zeros((len(first) + 1, sum(counts.shape[1] for counts in of_steps)), np.int64)
    np.cumsum(np.concatenate(of_steps, axis=1), axis=0, dtype=np.int64, out=totals[1:])
    steps = tiles.steps.astype(np.int64)
    tile_begin = (np.cumsum(steps) - steps)[tasks.task_tile]
    of_tasks = totals[tile_begin + tasks.task_end] - totals[tile_begin + tasks.task_begin]
    parts = computed.shape[1]
    twins = np.zeros(len(tasks), np.bool_)
    if twin_of(config) is not None:
        twins = find_twins(tiles, tasks)
    return Work(
        steps=(tasks.task_end - tasks.task_begin).astype(np.int64),
        parts=of_tasks[:, :parts],
        masked=of_tasks[:, parts : 2 * parts],
        fragments=of_tasks[:, -3],
        rows=of_tasks[:, -2],
        gathered=of_tasks[:, -1],
        is_part=tasks.task_slot >= 0,
        twins=twins,
    )


def _first_fragments(tiles: Tiles) -> NDArray[np.int64]:
    """(S,) first fragment of every step of all tiles."""
    steps = tiles.steps
    place = np.arange(steps.sum(dtype="int64")) - np.repeat(np.cumsum(steps) - steps, steps)
    return np.repeat(tiles.frag_offsets[:-1], steps) + place * tiles.shape.fragments


def _sums(of_fragments: NDArray[Any], first: NDArray[np.int64]) -> NDArray[np.int64]:
    if not len(first):
        return np.zeros(0, np.int64)
    sums: NDArray[np.int64] = np.add.reduceat(of_fragments, first, dtype=np.int64)
    return sums


def _complete(tiles: Tiles, first: NDArray[np.int64], part: int) -> NDArray[np.bool_]:
    """(S, parts) whether all rows that a part has take part in every column of a step."""
    groups = part // GROUP_ROWS
    shifts = np.arange(0, tiles.shape.groups, groups, dtype=np.uint32)
    ones = np.uint32((1 << groups) - 1)
    if not len(first):
        return np.zeros((0, len(shifts)), np.bool_)
    lacking = ~np.repeat(_existing_groups(tiles), np.diff(tiles.frag_offsets))
    full = (tiles.frag_len == tiles.shape.slot) & (tiles.frag_bits < 0)
    words = np.where(full, tiles.frag_members | lacking, np.uint32(0))
    all_on = np.bitwise_and.reduceat(words, first)
    all_on[np.diff(first, append=len(words)) < tiles.shape.fragments] = 0
    complete: NDArray[np.bool_] = (all_on[:, None] >> shifts & ones) == ones
    return complete


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
