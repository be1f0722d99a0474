"""Memory that other streams or graphs read: kept until they are done, on a GPU that is played."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tessera_cupy import ArraySpec, BlockMask, make_plan
from tessera_cupy.kernels import launch, lifetime
from tessera_cupy.kernels.lifetime import Uses


class Stream:
    """A queue of work that runs when told to; an item may wait for something first."""

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr
        self.capturing = False
        self.queue: list[Callable[[], bool]] = []
        self.ran = 0

    def launch(self, waits_for: Callable[[], bool] = lambda: True) -> None:
        self.queue.append(waits_for)

    def progress(self) -> None:
        while self.ran < len(self.queue) and self.queue[self.ran]():
            self.ran += 1

    def is_capturing(self) -> bool:
        return self.capturing

    def wait_event(self, event: Event) -> None:
        assert not self.capturing
        stream, at = event.stream, event.at
        self.launch(lambda: stream.ran >= at)

    def synchronize(self) -> None:
        assert not self.capturing
        self.progress()


class Event:
    """What was queued on a stream at some time."""

    def __init__(self, *, disable_timing: bool) -> None:
        assert disable_timing  # events with a time cost more

    def record(self, stream: Stream) -> None:
        assert not stream.capturing
        self.stream, self.at = stream, len(stream.queue)

    @property
    def done(self) -> bool:
        return self.stream.ran >= self.at


class Array(np.ndarray[Any, Any]):
    """A NumPy array that stands for one in GPU memory, and can be watched."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)


def new(shape: Any, dtype: Any = np.uint8) -> Array:
    return np.zeros(shape, dtype).view(Array)


@pytest.fixture(autouse=True)
def _nothing_retired(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # plans of other tests, which would be retired in the middle of one here
    monkeypatch.setattr(lifetime, "_retired", type(lifetime._retired)())


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As much of CuPy as uploads and launches touch; ``cupy.stream`` is the current stream."""
    fake = SimpleNamespace(stream=Stream(10), empty=new)
    fake.asarray = lambda x: np.array(x).view(Array)
    fake.cuda = SimpleNamespace(Event=Event, get_current_stream=lambda: fake.stream)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return fake


class Owner:
    """What ends at some time."""


def owned(own: Stream) -> tuple[Owner, Uses, weakref.ref[Any]]:
    owner, uses, array = Owner(), Uses(own), new(4)
    lifetime.release_with(owner, uses, [array])
    return owner, uses, weakref.ref(array)


def test_memory_that_one_stream_used_ends_with_its_owner(cupy: Any) -> None:
    own = Stream(1)
    owner, uses, array = owned(own)
    for _ in range(3):
        own.launch()
        uses.record(own)
    assert not uses.events  # nothing is recorded on the stream that allocated
    assert array() is not None
    del owner
    assert array() is None


def test_memory_that_another_stream_reads_outlives_its_owner(cupy: Any) -> None:
    own, other = Stream(1), Stream(2)
    owner, uses, array = owned(own)
    for _ in range(3):
        other.launch()
        uses.record(other)
    assert len(uses.events) == 1
    other.progress()
    other.launch()
    uses.record(other)
    del owner
    lifetime.collect()
    assert array() is not None
    other.progress()
    lifetime.collect()
    assert array() is None


def test_every_other_stream_is_waited_for(cupy: Any) -> None:
    others = [Stream(ptr) for ptr in (2, 3, 4)]
    owner, uses, array = owned(Stream(1))
    for stream in others:
        stream.launch()
        uses.record(stream)
    del owner
    for stream in others:
        lifetime.collect()
        assert array() is not None
        stream.progress()
    lifetime.collect()
    assert array() is None


def test_a_new_stream_at_the_address_of_another_hides_nothing(cupy: Any) -> None:
    first, second = Stream(2), Stream(2)
    owner, uses, array = owned(Stream(1))
    for stream in (first, second):
        stream.launch()
        uses.record(stream)
    del owner
    second.progress()
    lifetime.collect()
    assert array() is not None
    first.progress()
    second.progress()
    lifetime.collect()
    assert array() is None


def test_the_default_stream_of_each_thread_is_another(cupy: Any) -> None:
    per_thread = 2
    owner, uses, array = owned(Stream(per_thread))
    elsewhere = Stream(per_thread)
    elsewhere.launch()
    uses.record(elsewhere)
    del owner
    lifetime.collect()
    assert array() is not None


def test_what_is_still_in_use_does_not_keep_the_rest(cupy: Any) -> None:
    busy, idle = Stream(2), Stream(3)
    owners, arrays = [], []
    for stream in (busy, idle, busy):
        owner, uses, array = owned(Stream(1))
        stream.launch()
        uses.record(stream)
        owners.append(owner)
        arrays.append(array)
    del owner
    owners.clear()
    idle.progress()
    lifetime.collect()
    assert [array() is None for array in arrays] == [False, True, False]


def test_what_a_capture_used_is_kept_with_the_owner(cupy: Any) -> None:
    owner, uses, array = owned(Stream(1))
    workspace = new(8)
    uses.keep(workspace, None)
    kept = weakref.ref(workspace)
    del workspace
    assert kept() is not None
    del owner, uses
    assert (array(), kept()) == (None, None)


@pytest.fixture
def split(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A plan with split tiles, uploaded; ``split.run()`` launches it on the current stream."""
    mask = BlockMask.from_dense(np.ones((1, 64), bool), (64, 64))
    made = make_plan(
        mask, ArraySpec((1, 1, 64, 64)), arch="sm_80", regime="attend_mma/q64k64/retain-pack/split"
    )
    launched: list[NDArray[Any]] = []

    def load(config: Any, device: int) -> Callable[..., None]:
        def kernel(grid: Any, block: Any, args: Any, shared_mem: int = 0) -> None:
            launched.append(args[0])
            cupy.stream.launch()

        return kernel

    monkeypatch.setattr(launch, "load", load)
    at = launch.Tensor(4096, (4096, 4096, 64))
    geometry = launch.Geometry(1, 1, 1, 64, 4096, 64, "bfloat16", 0.125, 1, 0)
    arrays = made.tiles(), made.tasks()
    state = SimpleNamespace(
        arrays=arrays, plan=launch.upload(*arrays, bits=False), launched=launched
    )

    def run(temporaries: Any = ()) -> list[weakref.ref[Any]]:
        """The workspace of the run, to be watched."""
        seen: list[weakref.ref[Any]] = []

        def empty(shape: Any, dtype: Any) -> Array:
            array = new(shape, dtype)
            seen.append(weakref.ref(array))
            return array

        cupy.empty = empty
        config = made.config
        packed = launch.pack(config, at, at, at, at, geometry, state.plan.slot_log2)
        launch.attend(packed, state.plan, 0, temporaries)
        return seen

    state.run = run
    return state


def test_a_workspace_ends_with_its_launch(split: Any, cupy: Any) -> None:
    temporary = new(8)
    copy = weakref.ref(temporary)
    workspace = split.run([temporary])
    del temporary
    assert len(split.launched) == 2  # attention and merge
    assert len(workspace) == 1
    assert [x() for x in (*workspace, copy)] == [None] * 2


@pytest.fixture
def grown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The moments at which the pool was allowed to grow."""
    moments: list[str] = []

    @contextmanager
    def pool_may_grow() -> Iterator[None]:
        moments.append("allowed")
        yield
        moments.append("as before")

    monkeypatch.setattr(launch, "pool_may_grow", pool_may_grow)
    return moments


def test_a_captured_workspace_is_kept_with_the_plan(
    split: Any, cupy: Any, grown: list[str]
) -> None:
    cupy.stream = Stream(20)
    cupy.stream.capturing = True
    temporary = new(8)
    kept = [weakref.ref(temporary), *split.run([temporary]), *split.run()]
    del temporary
    assert grown == ["allowed", "as before"] * 2
    cupy.stream.capturing = False
    ended = split.run()
    assert len(grown) == 4
    assert [x() is None for x in (*kept, *ended)] == [False] * 3 + [True]
    # Each capture has its own, as graphs may run at the same time.
    used = [x.view(launch.ATTEND_PARAMS)["partial_o"].item() for x in split.launched[:4:2]]
    assert used == [kept[1]().ctypes.data, kept[2]().ctypes.data]
    cupy.stream.progress()
    split.plan = None
    lifetime.collect()
    assert [x() for x in kept] == [None] * 3


def test_a_capture_records_no_event(split: Any, cupy: Any, grown: list[str]) -> None:
    cupy.stream = Stream(20)
    for capturing in (False, True, False):
        cupy.stream.capturing = capturing
        split.run()
        (event,) = split.plan.uses.events.values()
        assert (event.at == len(cupy.stream.queue)) is not capturing


def test_uploads_give_back_what_is_no_longer_read(split: Any, cupy: Any) -> None:
    own, cupy.stream = cupy.stream, Stream(20)
    split.run()
    tasks = weakref.ref(split.plan.tasks)
    other, cupy.stream = cupy.stream, own
    split.plan = launch.upload(*split.arrays, bits=False)
    assert tasks() is not None
    other.progress()
    split.plan = launch.upload(*split.arrays, bits=False)
    assert tasks() is None


def test_a_first_run_in_a_capture_is_refused_and_does_nothing(split: Any, cupy: Any) -> None:
    own = cupy.stream
    split.run()
    cupy.stream = Stream(20)
    split.run()
    split.plan = None  # retired: its event must not be asked for in a capture
    cupy.stream.capturing, cupy.asarray = True, None
    queued = len(cupy.stream.queue)
    with pytest.raises(
        ValueError, match=r"`stream`.*CUDA graph.*run the plan once before capturing"
    ):
        launch.upload(*split.arrays, bits=False)
    assert len(cupy.stream.queue) == queued
    assert len(lifetime._retired) == 1
    cupy.stream, cupy.asarray = own, lambda x: np.array(x).view(Array)
    launch.upload(*split.arrays, bits=False)


def test_the_mode_of_captures_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = ["global"]

    def exchange(mode: str) -> tuple[int, str]:
        modes.append(mode)
        return 0, modes[-2]

    relaxed = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED="relaxed")
    driver = SimpleNamespace(
        CUstreamCaptureMode=relaxed, cuThreadExchangeStreamCaptureMode=exchange
    )
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
    with lifetime.pool_may_grow():
        assert modes == ["global", "relaxed"]
    assert modes == ["global", "relaxed", "global"]
    with pytest.raises(ValueError, match="inside"), lifetime.pool_may_grow():
        raise ValueError("inside")
    assert modes[3:] == ["relaxed", "global"]


def test_a_kernel_that_reads_token_bits_is_given_them_also_where_no_fragment_has_any(
    split: Any, cupy: Any
) -> None:
    tiles, tasks = split.arrays
    assert len(tiles.bits) == 0
    plan = launch.upload(tiles, tasks, bits=True)
    assert plan.frag_bits is not None
    assert plan.frag_bits.nbytes == 4 * len(tiles.frag_start)
    assert launch.upload(tiles, tasks, bits=False).frag_bits is None
