"""Errors name each plan once; what a choice costs; what is remembered is what a table says."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from tessera_cupy import (
    ArraySpec,
    BlockMask,
    KeySlices,
    PlanNotEligibleError,
    PlanSpec,
    Table,
    make_plan,
)
from tessera_cupy.choice import choose, eligible
from tessera_cupy.kernels.arch import ARCHS
from tessera_cupy.masks.summary import MaskSummary
from tessera_cupy.regimes import Features, load_for
from tessera_cupy.request import Request, make_request

MASK = BlockMask.from_dense(np.eye(2, dtype=bool), (64, 64))
SPEC = ArraySpec((1, 1, 128, 64))
NAMES = ("attend_mma/q64k64/merge-pack/rows", "attend_mma/q192k64/retain-pack/rows")
REASONS = ("two query blocks in a tile of 64 rows", "no attend_mma kernel with 192x64 tiles")


@pytest.mark.parametrize("count", [1, 2])
def test_each_plan_is_named_once(count: int) -> None:
    regime: str | Table = NAMES[0]
    if count == 2:
        base = tuple(PlanSpec.parse(name) for name in NAMES)
        regime = Table(replace(load_for("sm89").document, base=base, keys=(), reasoned=()))
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


TABLES = ["sm80", "sm89", "sm90", "sm100", "sm120"]


@pytest.mark.parametrize("name", TABLES)
def test_a_choice_takes_microseconds(name: str) -> None:
    """1.2 and 1.4 us where they were measured; the bounds are for slow machines."""
    table = load_for(name)
    request = request_of(MASK, name)
    features = Features.of(MASK, batch=1, q_heads=1, dtype="bfloat16", head_dim=64, layout="BHSD")
    assert best_of_many(lambda: table.lookup(features)) < 10e-6
    assert best_of_many(lambda: choose(MASK, request, "auto")) < 15e-6


def request_of(mask: BlockMask, name: str) -> Request:
    arch = next(arch for arch in ARCHS.values() if arch.table == name)
    spec = ArraySpec((1, 1, mask.shape[0], 64))
    return make_request(mask, spec, None, None, layout="BHSD", arch=arch, on_gpu=False)


def test_a_later_choice_asks_neither_the_table_nor_the_catalog(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = request_of(MASK, "sm90")
    first = choose(MASK, request, "auto")
    monkeypatch.setattr(Table, "lookup", None)
    monkeypatch.setattr("tessera_cupy.choice.eligible", None)
    other = BlockMask.from_dense(np.eye(2, dtype=bool)[::-1], (64, 64))
    assert choose(other, request, "auto") is first


RULED = load_for("sm90").with_rule(NAMES[0], density=(None, 0.3), run_coverage=(0.5, None))
RULED = RULED.with_rule("attend_mma/q64k64/retain-pack/rows", density=(0.2, 0.4))
RULED = RULED.with_rule("attend_mma/q64k64/split-pack/rows", tokens=(None, 100), density=(0.7, 1))
KINDS = {
    "blocks": MASK,
    "many blocks": BlockMask.from_dense(np.eye(128, dtype=bool), (64, 64)),
    "small blocks": BlockMask.from_dense(np.eye(8, dtype=bool), (16, 32)),
    "large blocks": BlockMask.from_dense(np.eye(1, dtype=bool), (128, 128)),
    "slices": KeySlices.from_groups(np.eye(2, 128, dtype=bool), 64).to_block_mask(),
    "token bits": BlockMask.from_tokens(np.tri(128, dtype=bool), (64, 64)),
    "ragged": BlockMask.from_dense(np.eye(2, dtype=bool), (64, 64), q_block_sizes=[60, 7]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*TABLES, "rules"])
def test_a_remembered_choice_is_that_of_the_table(name: str, kind: str) -> None:
    """At, below and above every edge of any key or rule, whatever was chosen before."""
    mask, table = KINDS[kind], RULED if name == "rules" else load_for(name)
    request = request_of(mask, "sm90" if name == "rules" else name)
    edges = [decider.edges for some in (table.document.all_keys, table.rules) for decider in some]
    axes = [
        {around for of_one in edges for edge in of_one[axis] for around in beside(edge)}
        for axis in (2, 3)
    ]
    kept = {edge for of_one in edges for edge in of_one[5]}
    shares = {(edge + more) / request.skv for edge in kept for more in (-0.51, -0.5, -0.49)}
    axes[0] |= {share for share in shares if 0 <= share <= 1}
    for _ in range(2):
        for density, run_coverage in product(*[sorted({0.0, 0.5, 1.0, *axis}) for axis in axes]):
            summary = Numbers(density, run_coverage)
            spec, config, choice = choose(mask, request, table, summary)
            features = Features.of(
                mask,
                batch=1,
                q_heads=1,
                dtype="bfloat16",
                head_dim=64,
                layout="BHSD",
                summary=summary,
            )
            assert choice.answer == table.lookup(features)
            served = [plan for plan in choice.answer.ranking if eligible(plan, mask, request)[0]]
            assert spec == served[0]
            assert config == eligible(spec, mask, request)[0]
            assert len(choice.passed_over) == choice.answer.ranking.index(spec)


class Numbers(MaskSummary):
    """Those of a mask, as they are given."""

    density: float = 0.0
    run_coverage: float = 0.0

    def __init__(self, density: float, run_coverage: float) -> None:
        vars(self).update(density=density, run_coverage=run_coverage)


def beside(edge: float) -> tuple[float, float, float]:
    return math.nextafter(edge, 0), edge, math.nextafter(edge, 2)
