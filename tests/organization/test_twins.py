from __future__ import annotations

import numpy as np
import pytest

from tessera_cupy.mapping import Mapping, Tiles, map_mask
from tessera_cupy.masks import BlockMask
from tessera_cupy.organization import DeviceModel, Organization, Tasks, find_twins, organize

GPU = DeviceModel(sms=4, ctas_per_sm=1, l2_bytes=1 << 20)


def twins_of(
    blocks: np.ndarray, shape: tuple[int, int], mapping: str = "retain-pack", how: str = "rows"
) -> tuple[np.ndarray, Tasks]:
    mask = BlockMask.from_dense(blocks, (64, 64), shape)
    tiles = map_mask(mask, Mapping.parse(mapping), 64, 128)
    tasks = tasks_of(mask, tiles, how)
    return find_twins(tiles, tasks), tasks


def tasks_of(mask: BlockMask, tiles: Tiles, how: str) -> Tasks:
    return organize(
        tiles,
        Organization.parse(how),
        batch=1,
        q_heads=mask.heads,
        kv_heads=mask.heads,
        mask_batch=1,
        mask_heads=mask.heads,
        kv_bytes_per_head=1,
        device=GPU,
    )


def test_a_dense_mask_has_twins_but_for_its_last_rows() -> None:
    twins, _ = twins_of(np.ones((1, 6, 5), bool), (6 * 64 - 1, 300))
    assert twins.tolist() == [True] * 4 + [False] * 2


def test_pairs_are_of_an_even_place_and_the_next() -> None:
    blocks = np.array([[1, 0, 0], [0, 1, 1], [0, 1, 1], [1, 1, 1]], bool)[None]
    assert not twins_of(blocks, (256, 192))[0].any()
    assert twins_of(blocks[:, [1, 2, 0, 3]], (256, 192))[0].tolist() == [True, True, False, False]


@pytest.mark.parametrize("column", [0, 1, 2, 3])
def test_lists_that_differ_anywhere_are_no_twins(column: int) -> None:
    blocks = np.ones((1, 2, 4), bool)
    blocks[0, 1, column] = False
    blocks[0, 0, (column + 1) % 4] = False  # as long as each other
    assert not twins_of(blocks, (128, 256))[0].any()


def test_heads_directions_and_parts_keep_tasks_apart() -> None:
    dense = np.ones((2, 1, 3), bool)
    assert not twins_of(dense, (64, 192))[0].any()  # one tile a head
    assert not twins_of(np.ones((1, 2, 3), bool), (128, 192), how="alternate")[0].any()
    twins, tasks = twins_of(np.ones((1, 2, 200), bool), (128, 12800), how="split")
    assert len(tasks) > 2
    for a, b in zip(range(0, len(tasks) - 1, 2), range(1, len(tasks), 2), strict=True):
        same = tasks.task_begin[a] == tasks.task_begin[b] and tasks.task_end[a] == tasks.task_end[b]
        assert twins[a] == twins[b] == same


@pytest.mark.parametrize("largest", [32, 31])
def test_halves_are_twins_where_all_are_full(largest: int) -> None:
    sizes = np.minimum([32, 32, 32, 32, 32, 31, 32, 32], largest)
    mask = BlockMask.from_dense(np.ones((8, 3), bool), (32, 64), q_block_sizes=sizes)
    tiles = map_mask(mask, Mapping("share", "pack"), 64, 128)
    assert tiles.tile_halves is not None
    twins = find_twins(tiles, tasks_of(mask, tiles, "rows"))
    assert twins.tolist() == [largest == 32] * 2 + [False] * 2


def test_rows_without_keys_and_no_rows_are_no_twins() -> None:
    assert not twins_of(np.zeros((1, 2, 3), bool), (128, 192))[0].any()
    assert twins_of(np.zeros((1, 0, 3), bool), (0, 192))[0].tolist() == []
