"""All ranks in turn, in one process, give what one rank gives for the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tessera_cupy import reference
from tessera_cupy.masks.key_slices import block_mask
from tessera_cupy.parallel import Schedule, make_schedule, simulate
from tessera_cupy.parallel.degrees import checked_scheme
from tests.parallel.cases import DIM, FOUR, TWO, Case, local

ALL = [
    pytest.param(case, scheme, id=f"{case.name}, {scheme}, {len(case.lengths)} ranks")
    for case in (*TWO, *FOUR)
    for scheme in case.schemes
]


def schedule_of(case: Case, scheme: Any) -> Schedule:
    degrees = checked_scheme(scheme, len(case.lengths))
    assert degrees is not None
    return make_schedule(
        block_mask(case.mask()),
        degrees,
        case.q,
        case.kv,
        q_heads=case.heads,
        kv_heads=case.kv_heads,
    )


@pytest.mark.parametrize(("case", "scheme"), ALL)
def test_ranks_in_turn_equal_the_whole(case: Case, scheme: Any) -> None:
    q, k, v = case.arrays()
    schedule = schedule_of(case, scheme)
    expected = reference.attention(q, k, v, case.mask(), sm_scale=case.scale)
    ranks = range(len(case.lengths))
    parts = [
        [local(x, shards, rank, case.layout) for rank in ranks]
        for x, shards in ((q, case.q), (k, case.kv), (v, case.kv))
    ]
    found, traffic = simulate(schedule, *parts, layout=case.layout, sm_scale=case.scale)
    for rank in ranks:
        right = local(expected, case.q, rank, case.layout)
        assert found[rank].shape == right.shape
        np.testing.assert_allclose(found[rank], right, rtol=2e-5, atol=2e-5)
        rows = schedule.sent[rank].sum()
        assert traffic.sent(rank) == rows * case.batch * DIM
