"""The clock of a GPU behind NumPy in CuPy's place: plans run on the executor."""

import types
from functools import partial

import ml_dtypes
import numpy as np
import pytest

from tessera_cupy import ArraySpec, BlockMask, interop, make_plan
from tessera_cupy.bench import gpu, profile_clock
from tessera_cupy.bench.profile_clock import GpuClock, GpuLostError, ModelClock
from tessera_cupy.cost import find_gpu, predict
from tessera_cupy.errors import PlanOverflowError
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
ROUNDS = 4


class Device(np.ndarray):
    """An array that, as CuPy's, meets no NumPy array, and computes nothing in bfloat16."""

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **kwargs):
        arrays = [x for x in (*inputs, *(out or ())) if isinstance(x, np.ndarray)]
        _refuse(arrays)
        given = {} if out is None else {"out": tuple(x.view(np.ndarray) for x in out)}
        bare = [x.view(np.ndarray) if isinstance(x, np.ndarray) else x for x in inputs]
        made = getattr(ufunc, method)(*bare, **given, **kwargs)
        return _there(made) if out is None else out[0]

    def __array_function__(self, func, types, args, kwargs):
        raise TypeError(f"numpy.{func.__name__} of an array on a GPU")

    def __setitem__(self, key, value):
        _refuse([self, *([value] if isinstance(value, np.ndarray) else [])])
        super().__setitem__(key, value)

    def fill(self, value):
        _refuse([self])
        super().fill(value)


def _refuse(arrays):
    if not all(isinstance(x, Device) for x in arrays):
        raise TypeError("Implicit conversion between NumPy and CuPy arrays")
    if any(x.dtype == ml_dtypes.bfloat16 for x in arrays):
        raise TypeError("no kernel for bfloat16")


def _there(x):
    return np.asarray(x).view(Device)


class NumPyAsCuPy(types.ModuleType):
    """NumPy under CuPy's name, on arrays of its own."""

    cuda = types.SimpleNamespace(Device=lambda: types.SimpleNamespace(id=0))
    asarray = staticmethod(lambda x: _there(np.array(x)))
    asnumpy = staticmethod(lambda x: np.array(x.view(np.ndarray)))

    def __getattr__(self, name):
        function = getattr(np, name)

        def called(*args, **kwargs):
            flat = [x for arg in args for x in (arg if isinstance(arg, list) else [arg])]
            _refuse([x for x in flat if isinstance(x, np.ndarray)])
            bare = [
                [x.view(np.ndarray) for x in arg]
                if isinstance(arg, list)
                else arg.view(np.ndarray)
                if isinstance(arg, np.ndarray)
                else arg
                for arg in args
            ]
            return _there(function(*bare, **kwargs))

        return called


@pytest.fixture
def clock(monkeypatch):
    cupy = NumPyAsCuPy("cupy")
    monkeypatch.setattr(interop, "import_cupy", lambda: cupy)
    monkeypatch.setattr(profile_clock, "arch_of", lambda device: get_arch("sm_90a"))
    monkeypatch.setattr(profile_clock, "_POOL", 40_001)
    monkeypatch.setattr(profile_clock, "_PLUG_BYTES", 16)
    monkeypatch.setattr(gpu, "name", lambda: "NumPy")
    run = Plan.run

    def on_the_host(self, q, k, v, *, out, **kwargs):
        run(self, *[x.view(np.ndarray) for x in (q, k, v)], out=out.view(np.ndarray), **kwargs)

    def timed(self, call, count, known):
        call()
        return MS[call.func.__self__.spec.name]

    monkeypatch.setattr(Plan, "run", on_the_host)
    monkeypatch.setattr(GpuClock, "_run", timed)
    return GpuClock(ROUNDS)


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
    assert (found[MERGE].ms, found[MERGE].low, found[MERGE].high) == (1.5, 1.5, 1.5)
    assert (found[SHARE].rounds, found[SHARE].note) == ((1.0,) * ROUNDS, "")
    # Half as slow again as the fastest: not for long.
    assert found[MERGE].rounds == (1.5, 1.5)
    assert found[MERGE].note == "2 turns, as it was far behind"
    # Four times as slow: one call.
    assert (found[RETAIN].ms, found[RETAIN].low, found[RETAIN].rounds) == (4.0, 4.0, ())
    assert found[RETAIN].note == "no turns, as it was far behind"


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
            how(out.view(np.ndarray))

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
        bits = out.view(np.uint16)
        before = bits[0, HEADS - 1, 100].copy()
        run(self, q, k, v, out=out, **kwargs)
        if self.spec == MERGE:
            bits[0, HEADS - 1, 100] = before

    monkeypatch.setattr(Plan, "run", forgetful)
    found = states(clock.times(mask, HEADS, DIM, [SHARE, MERGE]))
    assert found == {SHARE: "timed", MERGE: "wrong output"}


@pytest.mark.parametrize(("error", "state"), [(ValueError, "failed"), (MemoryError, "dropped")])
def test_a_plan_that_fails_is_told_and_the_others_go_on(clock, mask, monkeypatch, error, state):
    def fail(out):
        raise error("no room\nfor that")

    _spoil(monkeypatch, SHARE, fail)
    found = {t.plan: t for t in clock.times(mask, HEADS, DIM, [SHARE, MERGE])}
    assert states(found.values()) == {SHARE: state, MERGE: "timed"}
    assert found[SHARE].note == "no room"


def test_a_gpu_that_is_lost_ends_it(clock, mask, monkeypatch):
    def fail(out):
        raise RuntimeError("cudaErrorIllegalAddress")

    _spoil(monkeypatch, MERGE, fail)
    with pytest.raises(GpuLostError, match=r"merge-pack/longest\+split: cudaErrorIllegal") as lost:
        clock.times(mask, HEADS, DIM, [SHARE, MERGE])
    assert lost.value.plan == MERGE


def test_lists_that_had_no_room_are_made_again():
    runs = []

    def check():
        if len(runs) < 2:
            raise PlanOverflowError("no room")

    of_gpu = types.SimpleNamespace(source=object(), slices=None)
    for spec, expected in ((SHARE, 2), (PlanSpec.parse("attend_mma/q64k64/merge-merge/rows"), 1)):
        runs.clear()
        plan = types.SimpleNamespace(mask=of_gpu, spec=spec, check=check)
        profile_clock._run_whole(plan, lambda: runs.append(1))
        assert len(runs) == expected


def test_slices_are_checked_by_their_own_lists(clock):
    kept = np.random.default_rng(1).random((HEADS, 5, TOKENS)) < 0.3
    slices = KeySlices.from_groups(kept, 64, (TOKENS, TOKENS))
    gather = PlanSpec.parse("attend_wgmma/q128k192/share-gather/longest+split")
    MS[gather.name] = 2.0
    assert states(clock.times(slices, HEADS, DIM, [gather])) == {gather: "timed"}


def test_heads_have_numbers_of_their_own(clock):
    arrays = clock.arrays(HEADS, TOKENS, DIM)
    assert all(x.shape == (1, HEADS, TOKENS, DIM) for x in arrays)
    assert all(x.dtype == ml_dtypes.bfloat16 for x in arrays)
    bits = [x.view(np.uint16) for x in arrays[:3]]
    seen = {np.ascontiguousarray(x[0, h]).tobytes() for x in bits for h in range(HEADS)}
    assert len(seen) == 3 * HEADS


@pytest.mark.parametrize(
    ("work", "host", "plugs"),
    [
        (5.0, 0.04, [0]),
        (0.01, 0.04, [15]),
        (0.01, 0.06, [15, 30]),  # the host is slower than was thought: once more
    ],
)
def test_short_calls_wait_behind_work_until_all_are_queued(queue, work, host, plugs):
    """A call of 0.01 ms that the host needs 0.04 ms for is still timed as 0.01 ms."""
    clock = object.__new__(GpuClock)
    clock._plug = types.SimpleNamespace(data=types.SimpleNamespace(ptr=1))
    cupy = interop.import_cupy()
    cupy.cuda.get_current_stream = lambda: types.SimpleNamespace(ptr=0)
    cupy.cuda.runtime.memsetAsync = lambda *a: queue.launch("plug", host=0.002, work=0.06)
    call, known = partial(queue.launch, "call", host=host, work=work), {}
    assert clock._run(call, 1, {id(call): 0.2}) == pytest.approx(work)  # an interrupted first one
    assert clock._run(call, 1, known) == pytest.approx(work)
    queue.log.clear()
    assert clock._run(call, 20, known) == pytest.approx(work)
    one = ["call", "event", *["call"] * 20, "event"]
    assert queue.log == [name for n in plugs for name in ["plug"] * n + one]
    # Where no work is enough, it ends all the same.
    queue.log.clear()
    if work < host:
        assert clock._run(partial(queue.launch, "call", host=1.0, work=work), 20, {}) > work
        assert queue.log.count("plug") == 15 + 30 + 60 + 120


def test_a_model_s_times_are_those_of_the_plan_on_that_gpu(mask):
    clock = ModelClock("sm_80")
    found = {t.plan: t for t in clock.times(mask, HEADS, DIM, candidates("sm_80"))}
    timed = [t for t in found.values() if t.state == "timed"]
    assert len(timed) > 5
    assert all(t.ms == t.low == t.high > 0 for t in timed)
    assert {t.state for t in found.values()} == {"timed", "not eligible"}


def test_a_model_s_time_is_the_mean_of_the_gpus_of_the_architecture(mask):
    clock = ModelClock("sm_89")
    assert clock.device == "RTX 4090, L40S"
    plan = PlanSpec.parse("attend_mma/q64k64/retain-pack/longest+split")
    [time] = clock.times(mask, HEADS, DIM, [plan])
    made = make_plan(
        mask, ArraySpec((1, HEADS, TOKENS, DIM), "bfloat16"), regime=plan, arch="sm_89"
    )
    first, second = (predict(made, find_gpu(name)).ms for name in ("RTX 4090", "L40S"))
    assert first != second
    assert time.ms == pytest.approx((first * second) ** 0.5)
