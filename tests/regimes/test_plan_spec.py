import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera_cupy.mapping import Mapping, why_not
from tessera_cupy.masks import BlockMask
from tessera_cupy.organization import Organization
from tessera_cupy.regimes import PlanSpec
from tessera_cupy.regimes.plan_spec import nearest

Q_SIDES = ("retain", "merge", "share", "regroup", "split")
KV_SIDES = ("retain", "merge", "split", "pack")


@given(
    tile_q=st.integers(1, 32).map(lambda n: 8 * n),
    tile_kv=st.integers(1, 32).map(lambda n: 8 * n),
    q=st.sampled_from(Q_SIDES),
    kv=st.sampled_from(KV_SIDES),
    flags=st.tuples(*[st.booleans()] * 4),
)
def test_names_round_trip_and_tell_plans_apart(tile_q, tile_kv, q, kv, flags):
    spec = PlanSpec("attend_mma", tile_q, tile_kv, Mapping(q, kv), Organization(*flags))
    assert PlanSpec.parse(spec.name) == spec
    # The name holds every field: swapping two of them changes it unless they are equal.
    swapped = PlanSpec("attend_mma", tile_kv, tile_q, spec.mapping, spec.organization)
    assert (swapped.name == spec.name) == (tile_q == tile_kv)


def test_the_name_is_readable():
    spec = PlanSpec.parse("attend_mma/q128k64/split-pack/runs+longest")
    assert (spec.kernel, spec.tile_q, spec.tile_kv) == ("attend_mma", 128, 64)
    assert spec.mapping == Mapping("split", "pack")
    assert spec.organization == Organization(runs=True, longest=True)
    assert spec.name == "attend_mma/q128k64/split-pack/runs+longest"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "kernel/q<rows>k<columns>"),
        ("attend_mma/q64k64/retain-pack", "kernel/q<rows>k<columns>"),
        ("attend_mma/q64k64/retain-pack/rows/rows", "kernel/q<rows>k<columns>"),
        ("attend_mma/64x64/retain-pack/rows", "kernel/q<rows>k<columns>"),
        ("attend_mma/q064k64/retain-pack/rows", "kernel/q<rows>k<columns>"),
        ("attend_mma/q64k64 /retain-pack/rows", "kernel/q<rows>k<columns>"),
        ("attend_mna/q64k64/retain-pack/rows", "attend_mma"),
        ("attend_mma/q60k64/retain-pack/rows", "tile_q"),
        ("attend_mma/q64k4/retain-pack/rows", "tile_kv"),
        ("attend_mma/q264k64/retain-pack/rows", "tile_q"),
        ("attend_mma/q64k64/pack-retain/rows", "'pack'"),
        ("attend_mma/q64k64/retain/rows", "'retain'"),
        ("attend_mma/q64k64/retain-pack/", "''"),
        ("attend_mma/q64k64/retain-pack/split+longest", "split+longest"),
        ("attend_mma/q64k64/retain-pack/longest+longest", "longest+longest"),
    ],
)
def test_other_names_are_refused_with_a_reason(name, said):
    with pytest.raises(ValueError, match="Fix: ") as caught:
        PlanSpec.parse(name)
    assert said in str(caught.value)


@pytest.mark.parametrize("ragged", [False, True])
def test_serves_agrees_with_the_planner_on_every_block_size(ragged):
    tiles = [(64, 64), (128, 64), (64, 32)]
    sizes = [16, 24, 32, 40, 64, 72, 128, 136, 384]
    for block_q, block_kv in itertools.product(sizes, sizes):
        # The second block is short, so that ragged blocks begin at odd rows.
        sizes_of = {"q_block_sizes": [block_q, 5, 8], "kv_block_sizes": [block_kv, 5, 8]}
        blocks = np.ones((3, 3), bool)
        mask = BlockMask.from_dense(blocks, (block_q, block_kv), **(sizes_of if ragged else {}))
        for (tile_q, tile_kv), q, kv in itertools.product(tiles, Q_SIDES, KV_SIDES):
            mapping = Mapping(q, kv)
            spec = PlanSpec("attend_mma", tile_q, tile_kv, mapping, Organization())
            reason = why_not(mapping, mask, tile_q, tile_kv)
            promised = reason is None and not (ragged and q == "share")
            assert spec.serves(block_q, block_kv, ragged=ragged) == promised, reason


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("attend_mma/q64k64/retian-pack/rows", "retian"),
        ("attend_mma/q64k64/retain-pack/longst", "longst"),
        ("attend_mmm/q64k64/retain-pack/rows", "attend_mmm"),
        ("attend_mma/q60k64/retain-pack/rows", "60"),
    ],
)
def test_a_wrong_part_is_an_error_of_the_argument_that_has_the_name(name: str, part: str) -> None:
    with pytest.raises(ValueError, match=r"^`regime`: expected a plan's name") as error:
        PlanSpec.parse(name, argument="regime")
    assert part in str(error.value)
    assert name in str(error.value)
    assert str(error.value).count("Fix: ") == 1
    assert ".." not in str(error.value)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("attend_mma/q64k64/retian-pack/rows", "attend_mma/q64k64/retain-pack/rows"),
        ("attend_wgma/q128k192/share-pakc/longst+split",
         "attend_wgmma/q128k192/share-pack/longest+split"),
        ("attend_mma/q64k64/retain-pack/longest+splitt",
         "attend_mma/q64k64/retain-pack/longest+split"),
        ("attend_mma/q60k64/retain-pack/rows", None),  # no kernel can have the tile
        ("attend_mma/q64k64/retain-pack", None),
        ("attend_mma/64x64/retain-pack/rows", None),
        ("attend_mma/q64k64/xyz/rows", None),
    ],
)  # fmt: skip
def test_a_mistyped_name_is_told_the_nearest(name: str, near: str | None) -> None:
    assert nearest(name) == near
    advice = f"did you mean {near}?" if near else "write it like attend_mma/q64k64/"
    with pytest.raises(ValueError, match="Fix: " + re.escape(advice)):
        PlanSpec.parse(name)
