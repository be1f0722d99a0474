"""A plan's text: units that suit the size, whose reasons they are, and what runs it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tessera_cupy import ArraySpec, BlockMask, make_plan
from tessera_cupy.cost import predict
from tessera_cupy.explain import brief
from tessera_cupy.plan import Plan
from tessera_cupy.regimes import Features, Table, load_table
from tessera_cupy.regimes.naming import bucketed_axes

MASK = BlockMask.from_dense(np.tri(5, dtype=bool), (64, 64))
# One key with a reason for every density, and one with a single bucket.
TABLE = """
schema: 1
arch: toy
provenance: default
device: null
catalog: null
raw_data: null
reasons: for tests
base: [attend_mma/q64k64/retain-pack/longest, attend_mma/q64k64/split-pack/longest]
keys:
  - match: {block_q: 64}
    why: blocks share a tile until their lists are alike
    edges: {density: [0.75]}
    regimes:
      - {when: {density: {below: 0.75}}, plans: [attend_wgmma/q128k192/share-pack/longest]}
      - {when: {density: {from: 0.75}}, plans: [attend_wgmma/q128k192/merge-pack/longest]}
  - match: {block_q: 128}
    why: a block fills 128 rows
    regimes:
      - {when: {}, plans: [attend_wgmma/q128k192/retain-pack/longest]}
"""


@pytest.fixture
def table(tmp_path: Path) -> Table:
    path = tmp_path / "toy.yaml"
    path.write_text(TABLE)
    return load_table(path)


def plan(
    mask: BlockMask = MASK,
    dim: int = 128,
    dtype: str = "bfloat16",
    heads: int = 1,
    regime: str | Table = "auto",
) -> Plan:
    spec = ArraySpec((1, heads, mask.shape[0], dim), dtype)
    return make_plan(mask, spec, regime=regime, arch="sm_90a")


def line(text: str, title: str) -> str:
    """What a text says under a title."""
    (found,) = [part for part in text.splitlines() if part.startswith(f"{title} ")]
    return found.removeprefix(title).strip()


@pytest.mark.parametrize(
    ("rows", "heads", "dim", "active"),
    [
        (1, 1, 8, "131.1 kFLOP"),
        (1, 1, 64, "1.0 MFLOP"),
        (8, 40, 128, "5.4 GFLOP"),
        (512, 8, 128, "4.4 TFLOP"),
    ],
)
def test_work_has_a_unit_that_suits_it(rows: int, heads: int, dim: int, active: str) -> None:
    mask = BlockMask.from_dense(np.ones((rows, rows), bool), (64, 64))
    work = line(plan(mask, dim, heads=heads).explain(), "work")
    assert work.startswith(f"{active} active, ")
    assert " 0.0" not in work


def test_no_work_is_zero() -> None:
    mask = BlockMask.from_dense(np.zeros((2, 2), bool), (64, 64))
    work = line(plan(mask).explain(), "work")
    assert work == "0 FLOP active, 0 FLOP issued; 0 B of K and V loaded"


def test_a_reason_for_several_buckets_says_so(table: Table) -> None:
    split = plan(regime=table)
    assert line(split.explain(), "regime").endswith(" density<0.75")
    assert line(split.explain(), "why") == f"(one reason for every density) {split.choice.why}"
    whole = plan(BlockMask.from_dense(np.tri(3, dtype=bool), (128, 128)), regime=table)
    assert "density" not in whole.choice.regime
    assert line(whole.explain(), "why") == whole.choice.why


def test_every_axis_of_a_regimes_name_is_found(table: Table) -> None:
    found = bucketed_axes("sm90 q64k64 d<=128 heads<4 tokens>=32768 0.1<=density<0.3")
    assert found == ["heads", "tokens", "density"]
    assert bucketed_axes("sm90 base (no key for q8k8 d64 float16 BHSD)") == []
    assert bucketed_axes("given by the caller") == []
    features = Features.of(MASK, batch=1, q_heads=1, dtype="float16", head_dim=64, layout="BHSD")
    assert bucketed_axes(table.lookup(features).regime) == ["density"]


def test_it_says_what_runs_the_plan() -> None:
    on_cpu = plan(dtype="float32").explain()
    assert line(on_cpu, "runs on").startswith("the CPU, since no kernel takes float32: the NumPy")
    either = line(plan().explain(), "runs on")
    assert either.startswith("a GPU of sm_90a with that kernel; arrays in host memory: the NumPy")
    assert " on sm_90a" not in on_cpu


def test_the_predicted_time_names_its_gpu_and_that_it_is_no_measurement() -> None:
    made = plan()
    predicted = made.summary()["predicted"]
    found = predict(made)
    assert predicted == {"gpu": "H200", "ms": found.ms, "bound": found.bound}
    said = line(made.explain(), "predicted")
    assert said.startswith(f"{found.ms:.3g} ms on H200, bound by {found.bound}; ")
    assert said.endswith("not measured")
    on_cpu = plan(dtype="float32")
    assert line(on_cpu.explain(), "predicted").split(" on ")[1].startswith("H200")


def test_brief_is_three_lines() -> None:
    made = plan()
    text = brief(made)
    assert len(text.splitlines()) == 3
    assert line(text, "plan") == f"{made.spec.name} for sm_90a"
    assert line(text, "mapping") == f"Q {made.spec.mapping.q}, KV {made.spec.mapping.kv}"
    assert line(text, "tiles") == line(made.explain(), "tiles")
    assert f"{len(made.tiles())} of {made.spec.tile_q} rows" in text
    assert f"useful fraction {made.summary()['useful_fraction']:.2f}" in text


ROWS = [
    [1, 0, 1, 1, 0, 0, 1, 0],
    [0, 0, 1, 0, 1, 0, 0, 1],
    [1, 0, 1, 1, 0, 0, 1, 1],
    [0, 1, 1, 0, 1, 0, 0, 1],
]


@pytest.mark.parametrize(
    ("mapping", "fragments", "halves"),
    [
        # Tiles of rows 0 and 1, and 2 and 3. Their unions have 6 and 7 blocks, in steps of three:
        # 0 2 3, 4 6 7 and 0 1 2, 3 4 6, 7. Each half has a row in every step.
        ("merge", 6 + 7, 2 * 2 + 3 * 2),
        # 2 alone is for both rows, and 4 and 7 of row 1 fill its step; 0 3 6 are row 0's. Then
        # 2 and 7 for both, 0 3 6 for row 2, and 1 4 for row 3.
        ("share", 6 + 7, 3 + 4),
        # Rows 0 and 2 have 0 2 3 and 6 in common and 7 of row 2 in the second step; rows 1 and 3
        # 2 4 7, and row 3 alone has 1.
        ("regroup", 5 + 4, 4 + 3),
    ],
)
def test_work_and_loads_by_hand_where_halves_skip_steps(
    mapping: str, fragments: int, halves: int
) -> None:
    mask = BlockMask.from_dense(ROWS, (64, 64))
    made = make_plan(
        mask,
        ArraySpec((1, 4, 256, 128), "bfloat16"),
        ArraySpec((1, 2, 512, 128), "bfloat16"),
        regime=f"attend_wgmma/q128k192/{mapping}-pack/rows",
        arch="sm_90a",
    )
    s = made.summary()
    issued = halves * 64 * 192
    assert s["useful_fraction"] == 16 * 64 * 64 / issued
    assert s["issued_flops"] == 4 * 128 * issued * 4
    assert s["flops"] == 4 * 128 * 16 * 64 * 64 * 4
    assert s["bytes"]["kv_loaded"] == 4 * fragments * 64 * 2 * (128 * 2)
    assert f"useful fraction {16 * 64 * 64 / issued:.2f}" in made.explain()


@pytest.mark.parametrize(("tile", "part", "parts"), [("q64k64", 16, 6), ("q128k64", 32, 4)])
def test_work_by_hand_where_warps_skip_steps(tile: str, part: int, parts: int) -> None:
    # Steps hold 0 1 2 3 and 4 6 7; row 1 has nothing in the second and row 2 in the first.
    rows = np.array(ROWS)
    rows[1], rows[2] = [0, 0, 1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 1]
    mask = BlockMask.from_dense(rows, (16, 16))
    made = make_plan(
        mask,
        ArraySpec((1, 1, 64, 64), "float16"),
        ArraySpec((1, 1, 128, 64), "float16"),
        regime=f"attend_mma/{tile}/merge-pack/rows",
        arch="sm_80",
    )
    s = made.summary()
    assert s["useful_fraction"] == 10 * 16 * 16 / (parts * part * 64)
    assert s["bytes"]["kv_loaded"] == 7 * 16 * 2 * (64 * 2)
