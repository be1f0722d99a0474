"""The error for plans that cannot serve a request names each once; and what a choice costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tessera_cupy import ArraySpec, BlockMask, PlanNotEligibleError, PlanSpec, Table, make_plan
from tessera_cupy.choice import choose
from tessera_cupy.kernels.arch import get_arch
from tessera_cupy.regimes import Features, load_for
from tessera_cupy.request import make_request

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


def best_of_many(call: Callable[[], object]) -> float:
    """Seconds of a call, as it goes where nothing else gets in between."""
    times = []
    for _ in range(200):
        begin = time.perf_counter()
        for _ in range(20):
            call()
        times.append((time.perf_counter() - begin) / 20)
    return min(times)


@pytest.mark.parametrize("name", ["sm80", "sm89", "sm90", "sm100", "sm120"])
def test_a_choice_takes_microseconds(name: str) -> None:
    """1.0 and 6.3 us where they were measured; the bounds are for slow machines."""
    table = load_for(name)
    arch = get_arch(f"sm_{name[2:]}")
    request = make_request(MASK, SPEC, None, None, layout="BHSD", arch=arch, on_gpu=False)
    features = Features.of(MASK, batch=1, q_heads=1, dtype="bfloat16", head_dim=64, layout="BHSD")
    assert best_of_many(lambda: table.lookup(features)) < 10e-6
    assert best_of_many(lambda: choose(MASK, request, "auto")) < 50e-6
