"""Names, slots, eligibility and argument errors of the mapping."""

from __future__ import annotations

import doctest
import re

import numpy as np
import pytest

from tessera_cupy.errors import PlanNotEligibleError
from tessera_cupy.mapping import Mapping, choose_slot, map_mask, planner, why_not
from tessera_cupy.masks import BlockMask


def uniform(bq: int, bkv: int) -> BlockMask:
    return BlockMask.from_dense(np.ones((3, 3), bool), (bq, bkv))


def ragged(q_sizes=None, kv_sizes=None) -> BlockMask:
    nq = 3 if q_sizes is None else len(q_sizes)
    nk = 3 if kv_sizes is None else len(kv_sizes)
    return BlockMask.from_dense(
        np.ones((nq, nk), bool), (64, 64), q_block_sizes=q_sizes, kv_block_sizes=kv_sizes
    )


def test_names_round_trip():
    for q in ("retain", "merge", "share", "regroup", "split"):
        for kv in ("retain", "merge", "split", "pack"):
            mapping = Mapping(q, kv)
            assert mapping.name == f"{q}-{kv}"
            assert Mapping.parse(mapping.name) == mapping


@pytest.mark.parametrize("name", ["", "retain", "retain-", "pack-pack", "retain-pack-pack", "x-y"])
def test_unknown_names(name):
    with pytest.raises(ValueError, match="expected"):
        Mapping.parse(name)


def test_unknown_side_says_what_is_known():
    with pytest.raises(
        ValueError, match="`q`: expected one of retain, merge, split, share, regroup, got"
    ):
        Mapping("pack", "pack")


@pytest.mark.parametrize(
    ("block", "kv", "slot"),
    [
        (64, 64, 64),
        (64, 128, 64),
        (128, 64, 64),
        (384, 128, 128),
        (48, 64, 16),
        (24, 64, 8),
        (40, 128, 8),
        (96, 128, 32),
        (64, 96, 32),
        (64, 24, 8),
    ],
)
def test_slot_of_uniform_blocks(block, kv, slot):
    assert choose_slot(uniform(64, block), kv) == slot


@pytest.mark.parametrize(
    ("sizes", "slot"),
    [
        ([64, 128, 64], 64),
        ([48, 16, 0, 32], 16),
        ([7, 9, 3], 8),  # 8 + 16 + 8 columns, but 48 in fragments of 16
        ([640, 640, 640, 640, 4], 64),  # one odd block: 2624 columns, and 2568 in eights
        ([640, 640, 4], 32),  # 1312 and 1288; fragments of 64 would make it 1344
        ([64, 64, 4], 8),  # 144 or more, and 136
        ([0], 64),
    ],
)
def test_slot_of_ragged_blocks(sizes, slot):
    assert choose_slot(ragged(kv_sizes=sizes), 64) == slot


@pytest.mark.parametrize("kv", [0, -8, 4, 20])
def test_illegal_tile_kv(kv):
    with pytest.raises(ValueError, match=r"`tile_kv`: expected a positive multiple of 8"):
        choose_slot(uniform(64, 64), kv)


BITS = BlockMask.from_csr(
    *([0, 1, 2], [0, 0], (2, 1), (32, 32)),
    q_block_sizes=[18, 32],
    partial=[0, -1],
    token_bits=np.full((1, 32, 1), 5, np.uint32),
)

CASES = [
    ("retain-pack", uniform(64, 64), 64, 64, None),
    ("retain-pack", uniform(64, 384), 64, 64, None),
    ("retain-pack", uniform(72, 64), 64, 64, "at most 64 rows (the tile), got 72"),
    ("retain-pack", ragged(q_sizes=[64, 3, 65]), 64, 64, "at most 64 rows (the tile), got 65"),
    ("retain-pack", ragged(q_sizes=[5, 3, 64]), 64, 64, None),
    ("split-pack", uniform(72, 64), 64, 64, None),
    ("split-pack", uniform(64, 64), 64, 64, "more than 64 rows (the tile), got 64"),
    ("split-pack", ragged(q_sizes=[64, 3, 65]), 64, 64, None),
    ("split-pack", ragged(q_sizes=[64, 3]), 64, 64, "more than 64 rows (the tile), got 64"),
    ("merge-pack", uniform(32, 64), 64, 64, None),
    ("merge-pack", uniform(40, 64), 64, 64, "two query blocks in a tile of 64 rows"),
    ("merge-pack", ragged(q_sizes=[32, 8, 16]), 64, 64, None),
    ("merge-pack", ragged(q_sizes=[32, 8, 33]), 64, 64, "two query blocks in a tile of 64 rows"),
    ("merge-pack", ragged(q_sizes=[32, 4, 16]), 64, 64, "begin at multiples of 8 rows"),
    ("merge-pack", ragged(q_sizes=[32, 8, 5]), 64, 64, None),
    ("merge-pack", ragged(q_sizes=[32, 8, 5, 0, 0]), 64, 64, None),
    ("merge-pack", ragged(q_sizes=[[32, 8], [20, 20]]), 64, 64, "begin at multiples of 8 rows"),
    ("share-pack", ragged(q_sizes=[32, 4, 17]), 64, 64, None),
    ("share-pack", ragged(q_sizes=[17, 4, 1]), 64, 64, None),
    ("share-pack", ragged(q_sizes=[32, 4, 33]), 64, 64, "two query blocks in a tile of 64 rows"),
    ("share-pack", ragged(q_sizes=[16, 4, 16]), 64, 64, "begin at multiples of 8 rows"),
    ("share-pack", ragged(q_sizes=[16, 8, 16]), 64, 64, None),
    ("share-pack", BITS, 64, 64, "needs a mask without token bits"),
    ("share-retain", ragged(q_sizes=[32, 4, 17]), 64, 64, "share Q needs pack KV"),
    ("regroup-pack", uniform(16, 16), 128, 64, None),
    ("regroup-pack", uniform(48, 64), 96, 64, None),
    ("regroup-pack", uniform(64, 24), 128, 64, None),
    ("regroup-pack", ragged(kv_sizes=[3, 65]), 128, 64, None),
    ("regroup-pack", uniform(64, 64), 64, 64, "fill a tile of 64 rows, got blocks of 64"),
    ("regroup-pack", uniform(24, 64), 48, 64, "a multiple of 16 rows"),
    ("regroup-pack", uniform(32, 64), 96, 64, "2, 4, 8 or another power of two"),
    ("regroup-pack", uniform(48, 64), 128, 64, "fill a tile of 128 rows, got blocks of 48"),
    ("regroup-pack", ragged(q_sizes=[16, 16]), 64, 64, "got ragged blocks"),
    ("regroup-retain", uniform(32, 32), 64, 64, "regroup Q needs pack KV"),
    ("retain-retain", uniform(64, 64), 64, 64, None),
    ("retain-retain", uniform(64, 72), 64, 64, "at most 64 rows (the tile), got 72"),
    ("retain-retain", ragged(kv_sizes=[3, 65]), 64, 64, "at most 64 rows (the tile), got 65"),
    ("retain-split", uniform(64, 72), 64, 64, None),
    ("retain-split", uniform(64, 64), 64, 64, "more than 64 rows (the tile), got 64"),
    ("retain-split", ragged(kv_sizes=[3, 65]), 64, 64, None),
    ("retain-merge", uniform(64, 32), 64, 64, None),
    ("retain-merge", uniform(64, 40), 64, 64, "two KV blocks in a tile of 64 columns"),
    ("retain-merge", ragged(kv_sizes=[16, 16]), 64, 64, "KV blocks of one size"),
]


@pytest.mark.parametrize(("name", "mask", "q", "kv", "reason"), CASES)
def test_eligibility(name, mask, q, kv, reason):
    mapping = Mapping.parse(name)
    got = why_not(mapping, mask, q, kv)
    if reason is None:
        assert got is None
        assert map_mask(mask, mapping, q, kv).shape.q == q
    else:
        assert reason in got
        with pytest.raises(PlanNotEligibleError, match=re.escape(f"{name}: {got}")):
            map_mask(mask, mapping, q, kv)


@pytest.mark.parametrize("q", [0, 4, 12, 264, 512])
def test_illegal_tile_q(q):
    with pytest.raises(ValueError, match=r"`q`: expected a multiple of 8 from 8 to 256"):
        map_mask(uniform(16, 16), Mapping("merge", "pack"), q, 64)


@pytest.mark.parametrize("kv", [12, 0, -64])
def test_illegal_tile_kv_of_a_map(kv):
    with pytest.raises(ValueError, match="`kv`: expected a positive multiple of 8"):
        map_mask(uniform(16, 16), Mapping("retain", "pack"), 64, kv)


@pytest.mark.parametrize("slot", [0, 4, 24, 48, 128, -8])
def test_illegal_slot(slot):
    with pytest.raises(ValueError, match=r"`slot`: expected one of \[8, 16, 32, 64\]"):
        map_mask(uniform(16, 16), Mapping("retain", "pack"), 64, 64, slot)


def test_every_membership_bit_of_the_largest_tile():
    mask = BlockMask.from_dense(np.eye(16, dtype=bool), (16, 16))
    tiles = map_mask(mask, Mapping("merge", "pack"), 256, 64)
    assert tiles.frag_members.tolist() == [3 << 2 * i for i in range(16)]
    full = map_mask(BlockMask.from_dense([[1]], (256, 16)), Mapping("retain", "pack"), 256, 64)
    assert full.frag_members.tolist() == [0xFFFFFFFF]


def test_examples_in_docstrings():
    finder = doctest.DocTestFinder(recurse=False)
    runner = doctest.DocTestRunner()
    for thing in (planner.Mapping, planner.choose_slot, planner.map_mask):
        for example in finder.find(thing, globs=vars(planner).copy()):
            runner.run(example)
    assert runner.tries >= 6
    assert runner.failures == 0
