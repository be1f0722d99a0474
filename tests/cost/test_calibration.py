"""How far the model is from what was measured on an H200."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from tessera_cupy import make_plan
from tessera_cupy.cost import predict
from tests.cost import calibration
from tests.cost.calibration import POINTS, Point

WORST, MEDIAN = 0.2, 0.04


def error(point: Point) -> float:
    return calibration.prediction(point).ms / calibration.measured_ms(point) - 1


@pytest.mark.parametrize("name", POINTS)
def test_each_time_is_near_the_measured_one(name: str) -> None:
    assert abs(error(POINTS[name])) < WORST


def test_half_of_the_times_are_very_near() -> None:
    assert np.median([abs(error(point)) for point in POINTS.values()]) < MEDIAN


def test_plans_of_one_mask_rank_as_they_were_measured() -> None:
    """Where their times differ by a tenth or more."""
    compared = 0
    for a, b in combinations(POINTS.values(), 2):
        if (a.mask, a.head_dim, a.heads) != (b.mask, b.head_dim, b.heads):
            continue
        measured = calibration.measured_ms(a) / calibration.measured_ms(b)
        if max(measured, 1 / measured) < 1.1:
            continue
        said = calibration.prediction(a).ms / calibration.prediction(b).ms
        assert (said > 1) == (measured > 1), f"{a.name} and {b.name}"
        compared += 1
    assert compared >= 8


@pytest.mark.parametrize(
    "name",
    [
        "blocks 64 0.1 1 d128 share-pack",
        "blocks 128 0.1 12 d128 retain-pack",
        "blocks 128 0.1 12 d64 attend_mma/q128k128/retain-pack",
    ],
)
def test_what_is_kept_is_what_the_plan_does(name: str) -> None:
    point = POINTS[name]
    plan = calibration.planned(point, calibration.drawn(point))
    made, kept = predict(plan), calibration.prediction(point)
    assert made.ms == kept.ms
    assert made.bounds == kept.bounds
    assert np.array_equal(made.start_ms, kept.start_ms)
    assert np.array_equal(made.slot, kept.slot)


@pytest.mark.parametrize(
    ("regime", "split", "whole"),
    [
        ("attend_wgmma/q128k192/share-pack", 0.0180, 0.0519),
        ("attend_mma/q64k64/retain-pack", 0.0187, 0.0865),
    ],
)
def test_few_long_rows(regime: str, split: float, whole: float) -> None:
    """README: 4,096 tokens, 2 heads, 8 long rows; the other rows are taken to have a block each."""
    keep = np.zeros((2, 64, 64), bool)
    keep[:, ::8] = True
    keep[:, np.arange(64), np.arange(64)] = True
    mask = calibration.BlockMask.from_dense(keep, (64, 64))
    spec = calibration.ArraySpec((1, 2, 4096, 128), "bfloat16")
    for organization, measured in (("longest+split", split), ("longest", whole)):
        plan = make_plan(mask, spec, regime=f"{regime}/{organization}", arch="sm_90a")
        assert predict(plan).ms == pytest.approx(measured, rel=0.3)
