"""``route_heads.cu`` and ``route_tasks.cu`` on the CPU, through the package's own launches."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tessera_cupy.kernels.launch import TASK, DevicePlan
from tessera_cupy.kernels.lifetime import Uses
from tessera_cupy.kernels.route import choose_routes, routed
from tests.emulator.emulator import compiler
from tests.emulator.gpu import ORDINAL, EmulatedGpu, Stream

pytestmark = pytest.mark.skipif(
    compiler() is None, reason="the emulator needs g++, which is not on the PATH"
)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("sizes", [(4, 128, 64), (1, 5, 8), (2, 40, 128)])
def test_the_closer_pattern_is_taken(gpu: EmulatedGpu, dtype: Any, sizes: tuple[int, ...]) -> None:
    heads, rows, head_dim = sizes
    rng = np.random.default_rng(rows)
    o = rng.standard_normal((heads, 5, rows, head_dim)).astype(dtype)
    lse = (3 * rng.standard_normal((heads, 5, rows)) - 40).astype(np.float32)
    for head in range(heads):  # one pattern of each head has nearly all of the weight
        lse[head, 1 + (head + 1) % 2] += 9
    lse[:, 0, ::3] = -np.inf  # keys of no row's both patterns, and of some rows' neither
    lse[:, 3, ::2] = -np.inf
    lse[:, 1, 1::4] -= 700  # one pattern alone lies far below all other keys
    route = gpu.empty((heads,), np.int32)
    errors = choose_routes(gpu.array(o), gpu.array(lse), "sm_90a", route)

    def of(classes: list[int]) -> Any:
        among = lse[:, classes].astype(np.float64)
        weight = np.exp(among - among.max(axis=1, keepdims=True))[..., None]
        return (weight * o[:, classes].astype(np.float64)).sum(axis=1) / weight.sum(axis=1)

    dense = of([0, 1, 2, 3, 4])
    expected = [((of([0, c]) - dense) ** 2).sum((1, 2)) for c in (1, 2)]
    np.testing.assert_allclose(errors.get(), np.stack(expected, axis=1), rtol=1e-3)
    assert route.get().tolist() == [(head + 1) % 2 for head in range(heads)]


def test_as_close_is_the_first_pattern(gpu: EmulatedGpu) -> None:
    o = np.ones((2, 5, 16, 8), np.float16)
    route = gpu.empty((2,), np.int32)
    lse = gpu.array(np.zeros((2, 5, 16), np.float32))
    errors = choose_routes(gpu.array(o), lse, "sm_90a", route)
    assert route.get().tolist() == [0, 0]
    assert errors.get().max() < 1e-10


@pytest.mark.parametrize("tasks", [1, 37, 300])
@pytest.mark.parametrize("routes", [[[0]], [[1]], [[0, 1, 1], [1, 0, 7]], [[1] * 70 + [0]]])
def test_tasks_of_the_heads_on_a_route(gpu: EmulatedGpu, tasks: int, routes: Any) -> None:
    rng = np.random.default_rng(tasks)
    base = rng.integers(1, 99, (tasks, TASK.itemsize // 4), np.int32).view(TASK)[:, 0]
    base["head"] = 0
    array = gpu.array(base.view(np.uint8).reshape(-1))
    nothing: Any = None
    plan = DevicePlan(
        task_count=tasks,
        slot_log2=6,
        merge_count=0,
        slots=0,
        tasks=array,
        tile_q=nothing,
        units=nothing,
        fragments=nothing,
        frag_bits=nothing,
        bits=nothing,
        merge_head=nothing,
        merge_tile=nothing,
        merge_offsets=nothing,
        uses=Uses(Stream.current),
    )
    chosen = np.asarray(routes, np.int32)
    for taken in (0, 1):
        listed = routed(plan, gpu.array(chosen), taken, "sm_90a", ORDINAL)
        heads = np.flatnonzero(chosen.ravel() == taken)
        count = len(heads) * tasks
        assert listed.task_count == chosen.size * tasks
        assert listed.counts.get().view(np.int64).tolist() == [0, count, 0, 0, 0, 0, 0, 0]
        found = listed.tasks.get().view(TASK)[:count]
        expected = np.tile(base, len(heads))
        expected["head"] = np.repeat(heads, tasks)
        assert (found == expected).all()
