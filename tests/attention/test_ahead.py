"""Plans that the GPU makes while the host waits for what chooses them: kernels on the emulator."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tessera_cupy import BlockMask, KeySlices, ahead, block_sparse_attention, make_plan
from tessera_cupy.kernels import device_build, fetch, launch
from tessera_cupy.regimes import Table, load_for
from tests.attention.test_request_path import BUILDERS
from tests.emulator.emulator import compiler, drawn_seed
from tests.emulator.gpu import EmulatedGpu, Stream

pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++ to build the emulator with")

SPARSE, DENSE = 0.3, 0.95
#: Another plan for dense masks, which the GPU makes too.
TABLE = (
    load_for("sm90")
    .with_rule("attend_wgmma/q128k192/share-pack/longest+split")
    .with_rule("attend_wgmma/q128k192/retain-pack/longest+split", density=(0.8, None))
)


@dataclass
class Requests:
    """Requests of one geometry, each with a new mask, and what the GPU had when the host waited.

    Attributes:
        builders: those of one plan.
        ran: kernels of the last request, and of those how many were launched before the wait.
    """

    gpu: EmulatedGpu
    case: Any
    regime: Table | str = "auto"
    blocks: tuple[int, ...] = (1, 2, 5, 37)
    builders: list[str] = field(default_factory=lambda: BUILDERS)
    ran: tuple[list[str], int] = ([], 0)
    _waiting: int = 0

    def mask(self, kept: NDArray[np.bool_]) -> tuple[Any, BlockMask]:
        """In GPU memory, as it is passed; and on the host."""
        array = self.gpu.array(kept)
        return BlockMask.from_dense(array, (64, 64)), BlockMask.from_dense(kept, (64, 64))

    def ask(self, density: float, **given: Any) -> bool:
        """Run a request, and compare; whether its plan was made ahead, and no other."""
        rng = np.random.default_rng([int(100 * density), len(self.gpu.launched)])
        there, host = self.mask(rng.random(self.blocks) < density)
        made = self.case(host, dtype="float16", dim=64, rng=rng)
        arrays = [self.gpu.array(x) for x in made.arrays]
        before = len(self.gpu.launched)
        out, lse = block_sparse_attention(
            *arrays, there, regime=self.regime, return_lse=True, **given
        )
        made.check_kernel(out.get(), lse.get(), f"{density}")
        self.ran = self.gpu.launched[before:], self._waiting - before
        self.plan = make_plan(there, *arrays, regime=self.regime).spec.name
        kernels, waiting = self.ran
        assert kernels[0].startswith("mask_state")
        once = kernels[1:4] == self.builders and kernels[4].startswith("attend")
        assert once or kernels[1:7] == 2 * self.builders, kernels
        assert waiting in (1, 4)
        return once and waiting == 4

    @property
    def missed(self) -> bool:
        """Whether the last request made two plans."""
        return self.ran[0].count(self.builders[0]) == 2


@pytest.fixture
def gpu(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedGpu]:
    monkeypatch.setattr(ahead, "_guesses", {})
    made = EmulatedGpu(kernel_cache.parent / "emulated-kernels", drawn_seed())
    with made.here():
        yield made


@pytest.fixture
def requests(gpu: EmulatedGpu, case: Any, monkeypatch: pytest.MonkeyPatch) -> Requests:
    made = Requests(gpu, case)
    wait = fetch.Fetched.wait

    def watched(self: Any) -> Any:
        made._waiting = len(gpu.launched)
        return wait(self)

    monkeypatch.setattr(fetch.Fetched, "wait", watched)
    return made


def test_what_was_chosen_before_is_made_before_the_wait(requests: Requests) -> None:
    assert not requests.ask(SPARSE)
    waits = EmulatedGpu.waits
    for turn in range(1, 4):
        assert requests.ask(SPARSE)
        assert EmulatedGpu.waits == waits + 2 * turn  # the other is make_plan's
    with Stream(48):
        assert requests.ask(SPARSE)
    with Stream(2):  # one for each thread
        assert requests.ask(SPARSE)


def test_slices_are_made_before_the_wait(requests: Requests) -> None:
    def mask(kept: NDArray[np.bool_]) -> tuple[Any, BlockMask]:
        shape = (5 * 128 - 7, 370)
        keys = np.repeat(kept, 10, axis=-1)
        made = KeySlices.from_groups(requests.gpu.array(keys), 128, shape)
        return made, KeySlices.from_groups(keys, 128, shape).to_block_mask()

    requests.mask = mask  # type: ignore[method-assign]
    requests.builders = ["slice_counts", "tile_scan", "slice_fragments"]
    assert [requests.ask(density) for density in (0.3, 0.3, 0.1, 0.5)] == [False, True, True, True]


def test_a_wrong_guess_is_dropped_and_then_not_trusted(requests: Requests) -> None:
    requests.regime = TABLE
    told, plans = [], []
    for density in (SPARSE, SPARSE, DENSE, DENSE, DENSE, SPARSE, DENSE, SPARSE, SPARSE, SPARSE):
        told.append("ahead" if requests.ask(density) else "missed" if requests.missed else "after")
        plans.append(requests.plan)
    assert told == [
        *("after", "ahead"),
        *("missed", "after", "ahead"),
        *("missed", "after", "after", "after", "ahead"),
    ]
    assert len({plan for plan in plans if "retain" in plan}) == 1
    assert [("retain" in plan) for plan in plans] == [
        *(False, False, True, True, True, False, True, False, False, False)
    ]


def test_lists_without_room_are_made_again(
    requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "LEAST_BYTES", 0)
    requests.regime = TABLE  # one plan for all of these
    requests.blocks = (1, 2, 5, 150)
    assert not requests.ask(SPARSE)
    assert requests.ask(SPARSE / 2)  # needs less
    assert not requests.ask(2 * SPARSE)
    assert requests.missed
    for density in (2 * SPARSE, SPARSE, 2 * SPARSE):
        assert requests.ask(density)
    (large,) = ahead._guesses.values()
    assert requests.ask(SPARSE / 10)
    (small,) = ahead._guesses.values()
    assert small.room < large.room / 4
    assert not requests.ask(SPARSE)


def test_a_guess_that_memory_does_not_suffice_for_is_left_out(
    requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = device_build.build

    def scarce(*given: Any, room: int | None = None, **others: Any) -> Any:
        if room is not None:
            raise MemoryError
        return build(*given, **others)

    requests.ask(SPARSE)
    monkeypatch.setattr(device_build, "build", scarce)
    assert not requests.ask(SPARSE)
    assert not requests.missed


def test_a_bad_mask_is_reported_as_ever(requests: Requests) -> None:
    requests.ask(SPARSE)
    gpu = requests.gpu
    columns, counts = np.full((1, 2, 5, 3), 99, np.int32), np.full((1, 2, 5), 3, np.int32)
    mask = BlockMask.from_lists(gpu.array(columns), gpu.array(counts), 37, (64, 64))
    arrays = [gpu.empty((1, 2, tokens, 64), np.float16) for tokens in (320, 2368, 2368)]
    before = len(gpu.launched)
    with pytest.raises(ValueError, match="column out of range"):
        block_sparse_attention(*arrays, mask)
    assert gpu.launched[before:] == ["mask_state_lists", *BUILDERS]
    assert requests.ask(SPARSE)


def test_a_plan_that_is_looked_at_is_not_made(requests: Requests) -> None:
    requests.ask(SPARSE)
    mask, _ = requests.mask(np.ones(requests.blocks, np.bool_))
    arrays = [requests.gpu.empty((1, 2, tokens, 64), np.float16) for tokens in (320, 2368, 2368)]
    before = len(requests.gpu.launched)
    make_plan(mask, *arrays)
    assert requests.gpu.launched[before:] == ["mask_state_dense"]


def test_a_host_made_plan_ends_the_guess(requests: Requests) -> None:
    requests.ask(SPARSE)
    regime = load_for("sm90").with_rule("attend_mma/q64k64/retain-pack/rows")
    there, host = requests.mask(np.ones(requests.blocks, np.bool_))
    made = requests.case(host, dtype="float16", dim=64)
    arrays = [requests.gpu.array(x) for x in made.arrays]
    made.check_kernel(block_sparse_attention(*arrays, there, regime=regime).get())
    assert not ahead._guesses
    assert not requests.ask(SPARSE)
    assert requests.ask(SPARSE)


def test_geometries_have_guesses_of_their_own(requests: Requests) -> None:
    for blocks in ((1, 2, 5, 37), (1, 1, 5, 37), (1, 2, 4, 37)):
        requests.blocks = blocks
        assert not requests.ask(SPARSE)
        assert requests.ask(SPARSE)


def test_a_request_that_chooses_is_few_calls_on_the_host(
    requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few more are no harm; behind the wait, where the GPU may have nothing to do, they are."""
    gpu, blocks = requests.gpu, requests.gpu.array(np.eye(37, dtype=bool)[None])
    made = requests.case(BlockMask.from_dense(np.eye(37, dtype=bool), (64, 64)), dtype="float16")
    arrays = [gpu.array(x) for x in made.arrays]
    out = gpu.empty(made.q.shape, np.float16)
    cupy = sys.modules["cupy"]
    for module in (launch, device_build):  # the emulator calls the package too
        monkeypatch.setattr(module, "load", lambda config, device: lambda *_, **__: None)
    monkeypatch.setattr(cupy, "empty", cache(gpu.empty))
    counted = cupy.cuda.runtime
    monkeypatch.setattr(counted, "memcpyAsync", lambda target, *_: ctypes.memset(target, 0, 64))
    for _ in range(3):
        mask = BlockMask.from_dense(blocks, (64, 64))
        run = partial(block_sparse_attention, *arrays, mask, out=out)
        names = calls_of(run)
    assert 40 < len(names) <= 100
    assert 10 < len(names) - names.index("wait") <= 50


def calls_of(work: Callable[[], Any]) -> list[str]:
    """The package's own functions, each time that one is called."""
    names: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_globals["__name__"].startswith("tessera_cupy"):
            names.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return names
