"""One call does it: plans are made once a mask, whatever the thread; options mean one thing."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tessera_cupy
from tessera_cupy import BlockMask, PlanSpec, attention, block_sparse_attention, prepared
from tessera_cupy.regimes import load_for

BLOCKS = np.array([[1, 0, 1, 0], [0, 1, 1, 1], [1, 0, 0, 1]], bool)


def small_mask() -> BlockMask:
    return BlockMask.from_dense(BLOCKS, (64, 32), (170, 120))


class Counted:
    """A function that counts its calls, and keeps weak references to what it gave."""

    def __init__(self, function: Callable[..., Any], seconds: float = 0) -> None:
        self.function = function
        self.seconds = seconds
        self.given: list[weakref.ref[Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(self.seconds)
        result = self.function(*args, **kwargs)
        self.given.append(weakref.ref(result))
        return result


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> Counted:
    counted = Counted(prepared.map_mask)
    monkeypatch.setattr(prepared, "map_mask", counted)
    return counted


def test_the_package_shows_the_front_door() -> None:
    assert tessera_cupy.block_sparse_attention is block_sparse_attention
    assert {"make_plan", "Plan", "BlockMask", "ArraySpec"} <= set(tessera_cupy.__all__)


def test_a_mask_is_prepared_once_for_each_request(case: Any, mapped: Counted) -> None:
    case_ = case(small_mask(), kv_heads=2)
    for _ in range(3):
        case_.run()
    assert len(mapped.given) == 1
    for again in range(2):
        case_.run(regime="attend_mma/q64k64/retain-retain/rows")
        assert len(mapped.given) == 2, again
    case(case_.mask, kv_heads=2, dtype="float16").run()
    assert len(mapped.given) == 3
    case(case_.mask, kv_heads=2, layout="BSHD").run()
    assert len(mapped.given) == 4
    # Equal contents do not make two masks one.
    case(small_mask(), kv_heads=2).run()
    assert len(mapped.given) == 5


def test_what_was_prepared_ends_with_the_mask(case: Any, mapped: Counted) -> None:
    case_ = case(small_mask())
    case_.run()
    (tiles,) = mapped.given
    gc.collect()
    assert tiles() is not None
    del case_
    gc.collect()
    assert tiles() is None


def test_a_plan_keeps_what_it_needs(case: Any, mapped: Counted) -> None:
    case_ = case(small_mask())
    plan = attention.make_plan(case_.mask, *case_.arrays)
    assert not mapped.given
    plan.run(*case_.arrays)
    arrays, mask = case_.arrays, weakref.ref(case_.mask)
    del case_
    gc.collect()
    assert mask() is plan.mask
    plan.run(*arrays)
    assert len(mapped.given) == 1
    del plan
    gc.collect()
    assert mask() is None


def test_sixteen_threads_prepare_once(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = {}
    for module, name in ((attention, "prepare"), (prepared, "map_mask"), (prepared, "organize")):
        counted[name] = Counted(getattr(module, name), seconds=0.02)
        monkeypatch.setattr(module, name, counted[name])
    case_ = case(small_mask())
    barrier = threading.Barrier(16)
    results: list[Any] = []

    def call() -> None:
        barrier.wait()
        results.append(block_sparse_attention(*case_.arrays, case_.mask))

    threads = [threading.Thread(target=call) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {name: len(function.given) for name, function in counted.items()} == {
        "prepare": 1,
        "map_mask": 1,
        "organize": 1,
    }
    assert len(results) == 16
    case_.check(results[0], case_.run()[1])
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def test_two_masks_used_in_turn_keep_their_plans(case: Any, rng: np.random.Generator) -> None:
    first = case(small_mask())
    second = case(BlockMask.from_dense(~BLOCKS, (64, 32), (170, 120)))
    outputs = [first.run()[0], second.run()[0]]
    assert not np.allclose(*outputs)
    for _ in range(2):
        for case_, expected in zip((first, second), outputs, strict=True):
            np.testing.assert_array_equal(case_.run()[0], expected)


def test_a_mask_is_a_snapshot_of_its_source(case: Any) -> None:
    blocks = BLOCKS.copy()
    case_ = case(BlockMask.from_dense(blocks, (64, 32), (170, 120)))
    before = case_.run()[0]
    blocks[:] = ~blocks
    np.testing.assert_array_equal(case_.run()[0], before)
    new = case(BlockMask.from_dense(blocks, (64, 32), (170, 120)))
    assert not np.allclose(new.run()[0], before)


@pytest.mark.parametrize(
    "regime",
    [
        "auto",
        "attend_mma/q128k64/merge-pack/runs",
        PlanSpec.parse("attend_mma/q64k32/retain-retain/rows"),
        load_for("sm80"),
    ],
    ids=["auto", "name", "spec", "table"],
)
def test_every_kind_of_regime(case: Any, regime: Any) -> None:
    case(small_mask(), kv_heads=2).run(regime=regime)


def test_a_pinned_plan_is_the_one_that_runs(case: Any, mapped: Counted) -> None:
    case_ = case(small_mask())
    case_.run(regime="attend_mma/q128k64/merge-pack/runs")
    tiles = mapped.given[0]()
    assert (tiles.shape.q, tiles.shape.kv) == (128, 64)


@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_outputs_are_like_the_inputs(case: Any, dtype: str, layout: str) -> None:
    case_ = case(small_mask(), batch=2, kv_heads=2, shared=3, dtype=dtype, layout=layout)
    out, lse = case_.run()
    assert out.shape == case_.q.shape
    assert lse.shape == (2, 6, 170)
    only = block_sparse_attention(*case_.arrays, case_.mask, layout=layout)
    np.testing.assert_array_equal(only, out)


def test_both_layouts_give_the_same(case: Any) -> None:
    case_ = case(small_mask(), batch=2, kv_heads=2, shared=2, dtype="bfloat16")
    out, lse = case_.run()
    turned = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in case_.arrays]
    other, other_lse = block_sparse_attention(*turned, case_.mask, layout="BSHD", return_lse=True)
    np.testing.assert_array_equal(other.swapaxes(1, 2), out)
    np.testing.assert_array_equal(other_lse, lse)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
def test_out_is_filled_and_returned(case: Any, dtype: str, layout: str) -> None:
    case_ = case(small_mask(), kv_heads=2, dtype=dtype, layout=layout)
    # A view with strides of its own, prefilled.
    out = np.full((3, *case_.q.shape), np.nan, case_.q.dtype).transpose(1, 2, 3, 4, 0)[..., 1]
    result, _ = case_.run(out=out)
    assert result is out


def test_out_may_be_q(case: Any) -> None:
    case_ = case(small_mask())
    expected = case_.run()[0]
    q = case_.q.copy()
    block_sparse_attention(q, case_.k, case_.v, case_.mask, out=q)
    np.testing.assert_array_equal(q, expected)


def test_masks_of_every_dtype_give_the_same(case: Any) -> None:
    case_ = case(small_mask())
    expected = case_.run()[0]
    q, k, v = case_.arrays
    for dtype in (np.bool_, np.uint8, np.int32, np.int64):
        mask = BlockMask.from_dense(BLOCKS.astype(dtype), (64, 32), (170, 120))
        np.testing.assert_array_equal(block_sparse_attention(q, k, v, mask), expected)
    counts = BLOCKS.sum(axis=1)
    columns = np.array([np.pad(np.flatnonzero(row), (0, 4 - row.sum())) for row in BLOCKS])
    for dtype in (np.int32, np.int64, np.uint8):
        mask = BlockMask.from_lists(
            columns.astype(dtype), counts.astype(dtype), 4, (64, 32), (170, 120)
        )
        np.testing.assert_array_equal(block_sparse_attention(q, k, v, mask), expected)


def test_inputs_are_only_read(case: Any) -> None:
    case_ = case(small_mask(), dtype="bfloat16")
    before = [x.copy() for x in case_.arrays]
    for x in case_.arrays:
        x.flags.writeable = False
    case_.run()
    for x, old in zip(case_.arrays, before, strict=True):
        np.testing.assert_array_equal(x.view(np.uint16), old.view(np.uint16))
    assert ml_dtypes.bfloat16 == case_.q.dtype
