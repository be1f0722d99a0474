"""The emulator runs right kernels rightly, and catches faults of the kinds that kernels have."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tessera_cupy._resources import kernels_dir

HERE = Path(__file__).parent
_spec = importlib.util.spec_from_file_location("emulator_under_test", HERE / "emulator.py")
assert _spec is not None
assert _spec.loader is not None
emulator = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(emulator)

pytestmark = pytest.mark.skipif(
    emulator.compiler() is None, reason="the emulator needs g++, which is not on the PATH"
)

#: In the order of faults.cu, as FAULTS.
SCENARIOS = ["exchange", "copy", "pipeline", "product"]
FAULTS = [
    "none",
    "no_barrier",
    "no_warp_barrier",
    "read_past_input",
    "write_input",
    "write_beside_output",
    "shared_overrun",
    "barrier_of_one_warp",
    "diverged_shuffle",
    "no_copy_wait",
    "no_copy_barrier",
    "wrong_parity",
    "no_release",
    "too_many_arrivals",
    "late_lane",
    "wrong_bytes",
    "no_load_wait",
    "early_read",
    "early_write",
    "early_overwrite",
    "no_fence",
    "scale_by_warp",
]
PARAMS = np.dtype(
    {
        "names": ["map", "in", "out", "scenario", "fault"],
        "formats": ["V128", np.uint64, np.uint64, np.int32, np.int32],
        "offsets": [0, 128, 136, 144, 148],
        "itemsize": 192,
    }
)
SHARED = 2 * 64 * 128 + 1024
SEEDS = range(12)

Run = Callable[..., tuple[str | None, NDArray[np.int32]]]


@pytest.fixture(scope="session")
def run(kernel_cache: Path) -> Run:
    """Runs a scenario with a fault: what the emulator says, and the output."""

    def go(scenario: str, fault: str, seed: int) -> tuple[str | None, NDArray[np.int32]]:
        library = emulator.build_source(
            (HERE / "faults.cu").read_text(),
            "faults",
            kernel_cache.parent / "emulator-faults",
            kernels_dir(),
        )
        given, out, rows = (
            emulator.Array(name, size, at_end=bool(seed % 2))
            for name, size in (("in", 512), ("out", 512), ("rows", 128 * 128))
        )
        given.bytes.view(np.int32)[:] = np.arange(1, 129)
        rows.bytes.view(np.float16)[:] = numbers().reshape(-1)
        given.seal()
        rows.seal()
        params = np.zeros(1, PARAMS)
        params["in"], params["out"] = given.data.ptr, out.data.ptr
        params["scenario"] = SCENARIOS.index(scenario)
        params["fault"] = FAULTS.index(fault)
        box = ((64, 128, 1, 1), (64, 8192, 8192), (64, 8, 1, 1))
        params["map"] = emulator.encode(rows.data.ptr, "float16", *box)
        error = emulator.call(library, params, (1,), 128, SHARED, seed)
        if error is None and not out.clean():
            error = "written beside out"
        return error, out.bytes.view(np.int32).copy()

    return go


def numbers() -> NDArray[np.float16]:
    """Rows whose products float16 holds exactly."""
    return np.random.default_rng(0).integers(-2, 3, (128, 64)).astype(np.float16) / np.float16(4)


def expected(scenario: str) -> NDArray[np.int32]:
    """What a scenario without a fault gives, by thread."""
    if scenario in ("exchange", "copy"):
        return np.arange(128, 0, -1, dtype=np.int32)
    if scenario == "pipeline":
        first = numbers()[:32:8, 0].view(np.uint16).astype(np.int32).sum()
        return np.where(np.arange(128) < 32, 0, first).astype(np.int32)
    q = numbers()[:64].astype(np.float32)
    s = q @ q.T
    result = s + s.astype(np.float16).astype(np.float32) @ q
    thread = np.arange(128)
    rows = (thread // 32 * 16 + thread % 32 // 4)[:, None]
    columns = (thread % 4 * 2)[:, None] + np.arange(0, 64, 8)
    own = sum(result[rows + down, columns + right] for down in (0, 8) for right in (0, 1))
    return own.sum(axis=1).astype(np.float32).view(np.int32)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_right_kernels_are_right_in_any_order(run: Run, scenario: str) -> None:
    for seed in SEEDS:
        error, out = run(scenario, "none", seed)
        assert error is None, f"seed {seed}"
        np.testing.assert_array_equal(out, expected(scenario), err_msg=f"seed {seed}")


@pytest.mark.parametrize(
    ("scenario", "fault", "message"),
    [
        ("exchange", "barrier_of_one_warp", "deadlock in block .*warp 0 lanes 0 to 31: barrier 0"),
        ("exchange", "diverged_shuffle", "while others of the same threads are at"),
        ("exchange", "write_input", "access to address"),
        ("copy", "shared_overrun", "shared bytes .* the CTA has 0x4400"),
        ("pipeline", "wrong_parity", "deadlock .* mbarrier at shared byte"),
        ("pipeline", "no_release", "deadlock .* mbarrier at shared byte"),
        ("pipeline", "wrong_bytes", "deadlock .* and 16 bytes"),
        ("product", "no_fence", "without a wgmma.fence"),
        ("product", "scale_by_warp", "scale-d differs between warps"),
    ],
)
def test_misuse_is_named(run: Run, scenario: str, fault: str, message: str) -> None:
    for seed in SEEDS:
        error, _ = run(scenario, fault, seed)
        assert error is not None, f"seed {seed}"
        assert re.search(message, error, re.DOTALL), error


@pytest.mark.parametrize(
    ("scenario", "fault"),
    [
        ("exchange", "no_barrier"),
        ("exchange", "no_warp_barrier"),
        ("exchange", "read_past_input"),
        ("exchange", "write_beside_output"),
        ("copy", "no_copy_wait"),
        ("copy", "no_copy_barrier"),
        ("pipeline", "no_load_wait"),
        ("pipeline", "too_many_arrivals"),
        ("pipeline", "late_lane"),
        ("product", "early_read"),
        ("product", "early_write"),
        ("product", "early_overwrite"),
    ],
)
def test_races_show_within_a_few_seeds(run: Run, scenario: str, fault: str) -> None:
    def wrong(seed: int) -> Any:
        error, out = run(scenario, fault, seed)
        return error is not None or (out != expected(scenario)).any()

    assert any(wrong(seed) for seed in SEEDS)
