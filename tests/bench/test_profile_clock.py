"""The clock of a GPU behind NumPy in CuPy's place: plans run on the executor."""

import types

import numpy as np
import pytest

from tessera_cupy import BlockMask, interop
from tessera_cupy.bench import gpu, profile_clock
from tessera_cupy.bench.gpu import Timing
from tessera_cupy.bench.profile_clock import GpuClock, ModelClock
from tessera_cupy.kernels.arch import get_arch
from tessera_cupy.masks import KeySlices
from tessera_cupy.plan import Plan
from tessera_cupy.regimes import PlanSpec
from tessera_cupy.regimes.candidates import candidates

SHARE, MERGE, RETAIN = (
    PlanSpec.parse(f"attend_wgmma/q128k192/{how}-pack/longest+split")
    for how in ("share", "merge", "retain")
)
TOKENS, HEADS, DIM = 300, 3, 64
MS = {SHARE.name: 1.0, MERGE.name: 1.5, RETAIN.name: 4.0}


class NumPyAsCuPy(types.ModuleType):
    """NumPy under CuPy's name."""

    cuda = types.SimpleNamespace(Device=lambda: types.SimpleNamespace(id=0))
    asnumpy = staticmethod(np.asarray)

    def __getattr__(self, name):
        return getattr(np, name)


@pytest.fixture
def clock(monkeypatch):
    cupy = NumPyAsCuPy("cupy")
    monkeypatch.setattr(interop, "import_cupy", lambda: cupy)
    monkeypatch.setattr(profile_clock, "arch_of", lambda device: get_arch("sm_90a"))
    monkeypatch.setattr(profile_clock, "_POOL", 40_001)
    monkeypatch.setattr(gpu, "name", lambda: "NumPy")
    probed = iter(())

    def once_ms(call):
        call()
        return MS[call.func.__self__.spec.name]

    def timings(calls, on_run, **kwargs):
        assert kwargs["warm_up"] >= 1
        for call in calls.values():
            call()
        return {name: Timing(MS[name], 0.75 * MS[name], 1.25 * MS[name]) for name in calls}

    monkeypatch.setattr(gpu, "once_ms", once_ms)
    monkeypatch.setattr(gpu, "timings", timings)
    assert list(probed) == []
    return GpuClock()


@pytest.fixture
def mask():
    kept = np.random.default_rng(0).random((HEADS, 5, 5)) < 0.5
    kept[:, :, 0] = True
    return BlockMask.from_dense(kept, (64, 64), (TOKENS, TOKENS))


def states(found):
    return {timing.plan: timing.state for timing in found}


def test_right_plans_are_timed_in_turns_and_slow_ones_once(clock, mask):
    found = {t.plan: t for t in clock.times(mask, HEADS, DIM, [SHARE, MERGE, RETAIN])}
    assert states(found.values()) == dict.fromkeys((SHARE, MERGE, RETAIN), "timed")
    assert (found[MERGE].ms, found[MERGE].low, found[MERGE].high) == (1.5, 1.125, 1.875)
    # Four times as slow as the fastest: one run, which says so.
    assert (found[RETAIN].ms, found[RETAIN].low) == (4.0, 4.0)
    assert found[RETAIN].note == "one run"


def test_plans_that_cannot_serve_are_told(clock, mask):
    split = PlanSpec.parse("attend_wgmma/q128k192/split-pack/longest+split")
    found = {t.plan: t for t in clock.times(mask, HEADS, DIM, [split, SHARE])}
    assert states(found.values()) == {split: "not eligible", SHARE: "timed"}
    assert found[split].ms is None


def _spoil(monkeypatch, plan, how):
    run = Plan.run

    def spoiled(self, q, k, v, *, out, **kwargs):
        run(self, q, k, v, out=out, **kwargs)
        if self.spec == plan:
            how(out)

    monkeypatch.setattr(Plan, "run", spoiled)


@pytest.mark.parametrize("order", [(SHARE, MERGE), (MERGE, SHARE)])
@pytest.mark.parametrize("row", [0, TOKENS - 1, 77])
def test_a_wrong_element_of_the_last_head_is_found(clock, mask, monkeypatch, order, row):
    """Heads and rows that float64 does not see are compared with another plan."""

    def how(out):
        out[0, HEADS - 1, row, 5] += np.abs(out[0, HEADS - 1, row]).max()

    _spoil(monkeypatch, order[1], how)
    found = states(clock.times(mask, HEADS, DIM, order))
    assert found == {order[0]: "timed", order[1]: "wrong output"}


def test_the_first_plan_is_compared_with_float64(clock, mask, monkeypatch):
    _spoil(monkeypatch, SHARE, lambda out: out.__imul__(out.dtype.type(1.25)))
    found = states(clock.times(mask, HEADS, DIM, [SHARE, MERGE]))
    assert found == {SHARE: "wrong output", MERGE: "timed"}


def test_rows_that_are_never_written_are_found(clock, mask, monkeypatch):
    run = Plan.run

    def forgetful(self, q, k, v, *, out, **kwargs):
        before = out[0, HEADS - 1, 100].copy()
        run(self, q, k, v, out=out, **kwargs)
        if self.spec == MERGE:
            out[0, HEADS - 1, 100] = before

    monkeypatch.setattr(Plan, "run", forgetful)
    found = states(clock.times(mask, HEADS, DIM, [SHARE, MERGE]))
    assert found == {SHARE: "timed", MERGE: "wrong output"}


def test_a_plan_that_fails_is_told_and_the_others_go_on(clock, mask, monkeypatch):
    def fail(out):
        raise MemoryError("no room\nfor that")

    _spoil(monkeypatch, SHARE, fail)
    found = {t.plan: t for t in clock.times(mask, HEADS, DIM, [SHARE, MERGE])}
    assert states(found.values()) == {SHARE: "failed", MERGE: "timed"}
    assert found[SHARE].note == "no room"


def test_slices_are_checked_by_their_own_lists(clock):
    kept = np.random.default_rng(1).random((HEADS, 5, TOKENS)) < 0.3
    slices = KeySlices.from_groups(kept, 64, (TOKENS, TOKENS))
    gather = PlanSpec.parse("attend_wgmma/q128k192/share-gather/longest+split")
    MS[gather.name] = 2.0
    assert states(clock.times(slices, HEADS, DIM, [gather])) == {gather: "timed"}


def test_heads_have_numbers_of_their_own(clock):
    q, k, v, out, first = clock._make_arrays(HEADS, TOKENS, DIM)
    assert q.shape == out.shape == first.shape == (1, HEADS, TOKENS, DIM)
    seen = {np.ascontiguousarray(x[0, h]).tobytes() for x in (q, k, v) for h in range(HEADS)}
    assert len(seen) == 3 * HEADS
    host = clock._make_host(2, TOKENS, DIM)
    assert all(
        (a[0] == b[0, :2].astype(np.float32)).all() for a, b in zip(host, (q, k, v), strict=True)
    )


def test_a_model_s_times_are_those_of_the_plan_on_that_gpu(mask):
    clock = ModelClock("sm_80")
    found = {t.plan: t for t in clock.times(mask, HEADS, DIM, candidates("sm_80"))}
    timed = [t for t in found.values() if t.state == "timed"]
    assert len(timed) > 5
    assert all(t.ms == t.low == t.high > 0 for t in timed)
    assert {t.state for t in found.values()} == {"timed", "not eligible"}
