"""What tasks do, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tessera_cupy import ArraySpec, BlockMask, KeySlices, make_plan
from tessera_cupy.cost import Work, count_work
from tessera_cupy.mapping import issued_pairs
from tessera_cupy.plan import Plan

ROWS = [
    [1, 0, 1, 1, 0, 0, 1, 0],
    [0, 0, 1, 0, 1, 0, 0, 1],
]


def planned(mask: BlockMask | KeySlices, regime: str, arch: str, heads: int = 1) -> Plan:
    spec = ArraySpec((1, heads, mask.shape[0], 128), "bfloat16")
    return make_plan(mask, spec, regime=regime, arch=arch)


def work_of(plan: Plan) -> Work:
    return count_work(plan.tiles(), plan.tasks(), plan.config)


def test_halves_that_skip_steps() -> None:
    mask = BlockMask.from_dense(ROWS, (64, 64))
    plan = planned(mask, "attend_wgmma/q128k192/share-pack/rows", "sm_90a", heads=2)
    work = work_of(plan)
    # 2 is both rows' and fills its step with 4 and 7 of the second row; then 0 3 6 of the first.
    # The first row masks what the second one added, and nothing in its own step.
    assert work.head.tolist() == [0, 1]
    assert work.steps.tolist() == [2, 2]
    assert work.parts.tolist() == [[2, 1]] * 2
    assert work.masked.tolist() == [[1, 0]] * 2
    assert work.rows.tolist() == [6 * 64] * 2
    assert not work.gathered.any()
    assert not work.is_part.any()


def test_warps_that_skip_steps_and_columns_that_are_not_there() -> None:
    # Blocks of 16 rows: a warp each. Row 0 has 0 to 3, row 1 has 0, row 2 nothing, row 3 4.
    keep = np.zeros((4, 8), bool)
    keep[0, :4] = keep[1, 0] = keep[3, 4] = True
    work = work_of(
        planned(BlockMask.from_dense(keep, (16, 16)), "attend_mma/q64k64/merge-pack/rows", "sm_80")
    )
    assert work.steps.tolist() == [2]
    assert work.parts.tolist() == [[1, 1, 0, 1]]
    assert work.masked.tolist() == [[0, 1, 0, 1]]
    assert work.rows.tolist() == [5 * 16]


def test_rows_that_a_tile_lacks_are_not_masked() -> None:
    # 40 rows: warps of 32 and of 8 that exist, both with a whole step of 64 columns.
    mask = BlockMask.from_dense(np.ones((1, 1), bool), (128, 64), (40, 64))
    work = work_of(planned(mask, "attend_mma/q128k64/retain-pack/rows", "sm_80"))
    assert work.parts.tolist() == [[1, 1, 0, 0]]
    assert not work.masked.any()


def test_a_step_that_is_not_full_is_masked() -> None:
    mask = BlockMask.from_dense(np.ones((1, 1), bool), (64, 64), (64, 56))
    work = work_of(planned(mask, "attend_mma/q64k64/retain-pack/rows", "sm_80"))
    assert work.masked.tolist() == [[1, 1, 1, 1]]
    assert work.rows.tolist() == [56]
    boxes = work_of(planned(mask, "attend_wgmma/q128k192/retain-pack/rows", "sm_90a"))
    assert boxes.rows.tolist() == [64]  # the copy engine's box is a whole fragment


def test_token_bits_are_masked() -> None:
    tokens = np.ones((64, 64), bool)
    tokens[3, 5] = False
    mask = BlockMask.from_tokens(tokens, (64, 64))
    work = work_of(planned(mask, "attend_mma/q64k64/retain-pack/rows", "sm_80"))
    assert work.masked.tolist() == [[1, 1, 1, 1]]


def test_gathered_rows() -> None:
    # Four neighbours, and three single keys.
    keys = np.array([0, 1, 2, 3, 10, 20, 30], np.int32)
    counts = np.array([[[7]]], np.int32)
    slices = KeySlices.from_lists(keys[None, None, None], counts, 128, (128, 128))
    work = work_of(planned(slices, "attend_wgmma/q128k192/retain-gather/rows", "sm_90a"))
    assert work.rows.tolist() == work.gathered.tolist() == [7]


def test_parts_of_split_tiles_share_the_steps() -> None:
    keep = np.zeros((64, 64), bool)
    keep[:, 0] = keep[0] = True
    mask = BlockMask.from_dense(keep, (64, 64))
    plan = planned(mask, "attend_mma/q64k64/retain-pack/split", "sm_80")
    work = work_of(plan)
    assert work.is_part.sum() == 8  # 64 steps, 8 at least a part
    assert work.steps[work.is_part].tolist() == [8] * 8
    assert work.parts.sum() == 4 * (64 + 63)


@pytest.mark.parametrize(
    "regime", ["attend_wgmma/q128k192/share-pack", "attend_mma/q64k64/merge-pack"]
)
def test_all_parts_are_the_pairs_that_are_issued(regime: str) -> None:
    rng = np.random.default_rng(0)
    mask = BlockMask.from_dense(rng.random((3, 20, 20)) < 0.3, (32, 32))
    plan = planned(mask, f"{regime}/longest+split", "sm_90a", heads=3)
    part = plan.config.rows_together
    pairs = int(work_of(plan).parts.sum()) * part * plan.config.tile_kv
    assert pairs == issued_pairs(plan.tiles(), part)


def test_an_empty_mask_does_nothing() -> None:
    mask = BlockMask.from_dense(np.zeros((2, 2), bool), (64, 64))
    work = work_of(planned(mask, "attend_mma/q64k64/retain-pack/rows", "sm_80"))
    assert len(work) == 2
    assert work.parts.shape == work.masked.shape == (2, 4)
    assert not any(a.any() for a in (work.steps, work.parts, work.masked, work.rows))


def test_a_fragment_without_members_is_loaded_by_nobody() -> None:
    mask = BlockMask.from_dense(np.ones((1, 2), bool), (64, 64))
    plan = planned(mask, "attend_mma/q64k64/retain-pack/rows", "sm_80")
    tiles = plan.tiles()
    members = tiles.frag_members.copy()
    members[1] = 0
    work = count_work(replace(tiles, frag_members=members), plan.tasks(), plan.config)
    assert work.steps.tolist() == [2]
    assert work.parts.tolist() == [[1, 1, 1, 1]]
    assert work.rows.tolist() == [64]


def test_equal_lists_are_twins() -> None:
    mask = BlockMask.from_dense(np.ones((4, 4), bool), (128, 128))
    work = work_of(planned(mask, "attend_wgmma/q128k192/retain-pack/rows", "sm_90a"))
    assert work.twins.all()
    other = work_of(planned(mask, "attend_mma/q128k64/retain-pack/rows", "sm_90a"))
    assert not other.twins.any()  # a kernel without twins
