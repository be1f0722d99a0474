"""The error for plans that cannot serve a request: each is named once, with its reason."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tessera_cupy import ArraySpec, BlockMask, PlanNotEligibleError, PlanSpec, Table, make_plan
from tessera_cupy.regimes import load_for

MASK = BlockMask.from_dense(np.eye(2, dtype=bool), (64, 64))
SPEC = ArraySpec((1, 1, 128, 64))
NAMES = ("attend_mma/q64k64/merge-pack/rows", "attend_mma/q192k64/retain-pack/rows")
REASONS = ("two query blocks in a tile of 64 rows", "no attend_mma kernel with 192x64 tiles")


@pytest.mark.parametrize("count", [1, 2])
def test_each_plan_is_named_once(count: int) -> None:
    regime: str | Table = NAMES[0]
    if count == 2:
        base = tuple(PlanSpec.parse(name) for name in NAMES)
        regime = Table(replace(load_for("sm89").document, base=base, keys=()))
    with pytest.raises(PlanNotEligibleError) as caught:
        make_plan(MASK, SPEC, regime=regime, arch="sm_89")
    message = str(caught.value)
    for name, reason in list(zip(NAMES, REASONS, strict=True))[:count]:
        assert message.count(name) == 1
        after = message.split(f"{name} (")[1]
        assert reason in after.split(")")[0]


def test_an_update_names_the_plan_once() -> None:
    plan = make_plan(MASK, SPEC, regime="attend_mma/q64k64/retain-pack/rows", arch="sm_89")
    other = BlockMask.from_dense(np.eye(1, dtype=bool), (128, 128))
    with pytest.raises(PlanNotEligibleError) as caught:
        plan.update(other)
    assert str(caught.value).count(plan.spec.name) == 1
