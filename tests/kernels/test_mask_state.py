"""``mask_state.cu`` and ``csr_columns.cu`` on the CPU, against ``BlockMask``; and bad input."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tessera_cupy import BlockMask
from tessera_cupy._resources import kernels_dir
from tessera_cupy.kernels.arch import ARCHS
from tessera_cupy.kernels.builders import (
    CSR_COLUMNS_PARAMS,
    MASK_ERRORS,
    MASK_SCALARS,
    MASK_STATE_PARAMS,
    mask_state_grid,
)
from tessera_cupy.kernels.catalog import MASK_FORMATS, KernelConfig, builder
from tessera_cupy.kernels.specialise import source as source_of
from tests.emulator.emulator import KERNELS_VARIABLE, Array, build_source, call, compiler

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no g++ to build the emulator with")
OUT_OF_RANGE, DUPLICATE, CAPACITY, BAD_COUNT, BAD_SIZE, BAD_TOTAL = (
    1 << bit for bit in range(len(MASK_ERRORS))
)

Blocks = NDArray[np.bool_]

# Aligned reads cannot reach another page, which would be a fault; so each is looked at.
WATCH = """
extern "C" {
unsigned long allowed[4];
}
template <typename T>
T watched(const T* address) {
  const auto at = reinterpret_cast<unsigned long>(address);
  for (int i = 0; i < 4; i += 2)
    if (allowed[i] <= at && at + sizeof(T) <= allowed[i + 1]) return *address;
  emulator::fail("a read outside of the mask");
}
#define __ldg watched
"""


@dataclass
class Source:
    """A mask in memory, in one format: what ``MASK_STATE_PARAMS`` says of it."""

    form: str
    values: NDArray[Any]
    rows: int
    nk: int
    bounds: NDArray[Any] | None = None
    stride: int = 0
    width: int = 0
    offset: int = 0  # bytes of the array before the first row


@dataclass
class State:
    """What the kernel made."""

    bitmap: NDArray[np.uint32]
    row_count: NDArray[np.int32]
    scalars: NDArray[np.int64]

    def __getitem__(self, scalar: str) -> int:
        return int(self.scalars[MASK_SCALARS.index(scalar)])

    def blocks(self, nk: int) -> Blocks:
        octets = self.bitmap.view(np.uint8).reshape(len(self.bitmap), -1)
        return np.unpackbits(octets, axis=1, bitorder="little").view(np.bool_)[:, :nk]


@dataclass
class Runner:
    """Launches entries."""

    folder: Path
    seed: int = 0

    def __call__(self, source: Source, ctas: int = 2) -> State:
        config = builder("sm_90a", f"mask_state_{source.form}")
        words = -(-source.nk // 32)
        self.seed += 1
        scalars = self._array("scalars", 8 * len(MASK_SCALARS))
        scalars.bytes[:] = 0
        values = self._input("values", source.values)
        bounds = None if source.bounds is None else self._input("bounds", source.bounds)
        bitmap = self._array("bitmap", 4 * source.rows * words)
        row_count = self._array("row_count", 4 * source.rows)
        params = np.zeros(1, MASK_STATE_PARAMS)
        for name, value in {
            "values": values.data.ptr + source.offset,
            "bounds": bounds.data.ptr if bounds else 0,
            "bitmap": bitmap.data.ptr,
            "row_count": row_count.data.ptr,
            "scalars": scalars.data.ptr,
            **{name: getattr(source, name) for name in ("stride", "width", "rows", "nk")},
            "wide_values": source.values.dtype == np.int64,
            "wide_bounds": source.bounds is not None and source.bounds.dtype == np.int64,
        }.items():
            params[name] = value
        self.launch(config, params, ctas, [values, bounds])
        assert all(array.clean() for array in (bitmap, row_count, scalars))
        return State(
            bitmap.bytes.view(np.uint32).reshape(source.rows, words).copy(),
            row_count.bytes.view(np.int32).copy(),
            scalars.bytes.view(np.int64).copy(),
        )

    def columns(self, state: State, nk: int, capacity: int, ctas: int = 2) -> NDArray[np.int32]:
        """What ``csr_columns`` makes of a bitmap; its errors go into ``state``."""
        self.seed += 1
        before = np.concatenate([[0], np.cumsum(state.row_count)]).astype(np.int64)
        bitmap, offsets = self._input("bitmap", state.bitmap), self._input("offsets", before)
        columns = self._array("columns", 4 * capacity)
        scalars = self._array("scalars", 8 * len(MASK_SCALARS))
        scalars.bytes[:] = state.scalars.view(np.uint8)
        params = np.zeros(1, CSR_COLUMNS_PARAMS)
        made = {"bitmap": bitmap, "offsets": offsets, "columns": columns, "scalars": scalars}
        for name, array in made.items():
            params[name] = array.data.ptr
        params["capacity"], params["rows"], params["nk"] = capacity, len(state.row_count), nk
        self.launch(builder("sm_90a", "csr_columns"), params, ctas, [bitmap, offsets])
        assert columns.clean()
        assert scalars.clean()
        state.scalars[:] = scalars.bytes.view(np.int64)
        return columns.bytes.view(np.int32).copy()

    def launch(
        self, config: KernelConfig, params: NDArray[Any], ctas: int, inputs: list[Array | None]
    ) -> None:
        """Run an entry, which may read of these arrays alone through ``__ldg``."""
        kernels = Path(os.environ.get(KERNELS_VARIABLE) or kernels_dir())
        target = self.folder / config.name
        library = build_source(WATCH + source_of(config), config.entry, target, kernels)
        allowed = (ctypes.c_ulong * 4).in_dll(ctypes.CDLL(str(library)), "allowed")
        for i, array in enumerate(inputs):
            allowed[2 * i] = array.data.ptr if array else 0
            allowed[2 * i + 1] = array.data.ptr + array.nbytes if array else 0
        threads = 32 * config.warps
        error = call(library, params, (ctas,), threads, config.smem_bytes, self.seed)
        assert error is None, f"{config.name}, seed {self.seed}: {error}"

    def _array(self, name: str, nbytes: int) -> Array:
        return Array(name, nbytes, at_end=self.seed % 2 == 1)

    def _input(self, name: str, x: NDArray[Any]) -> Array:
        array = self._array(name, x.nbytes)
        array.bytes[:] = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
        array.seal()
        return array


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture
def run(folder: Path) -> Runner:
    return Runner(folder)


def dense(blocks: Blocks, rng: np.random.Generator) -> Source:
    """Bytes that are not 0, rows apart by more than their length, from any byte on."""
    rows, nk = blocks.shape
    stride, offset = nk + int(rng.integers(0, 20)), int(rng.integers(0, 16))
    values = rng.integers(1, 256, offset + (rows - 1) * stride + nk).astype(np.uint8)
    view = np.lib.stride_tricks.as_strided(values[offset:], (rows, nk), (stride, 1))
    view *= blocks
    return Source("dense", values, rows, nk, stride=stride, offset=offset)


def packed(blocks: Blocks, rng: np.random.Generator) -> Source:
    rows, nk = blocks.shape
    octets = -(-nk // 8)
    stride, offset = octets + int(rng.integers(0, 6)), int(rng.integers(0, 5))
    values = rng.integers(0, 256, offset + (rows - 1) * stride + octets).astype(np.uint8)
    view = np.lib.stride_tricks.as_strided(values[offset:], (rows, octets), (stride, 1))
    view[:] = np.packbits(blocks, axis=1, bitorder="little")
    return Source("packed", values, rows, nk, stride=stride, offset=offset)


def integers(rng: np.random.Generator) -> type[np.signedinteger[Any]]:
    """One of the types of columns, counts and offsets."""
    return np.int64 if rng.random() < 0.5 else np.int32


def lists(blocks: Blocks, rng: np.random.Generator) -> Source:
    """Columns in any order, and after those that count what is no column."""
    rows, nk = blocks.shape
    counts = blocks.sum(axis=1).astype(integers(rng))
    width = int(counts.max(initial=0)) + int(rng.integers(0, 3))
    stride = width + int(rng.integers(0, 3))
    values = rng.integers(-9, nk + 9, (rows, stride)).astype(integers(rng))
    for row, kept in enumerate(blocks):
        values[row, : counts[row]] = rng.permutation(np.flatnonzero(kept))
    return Source("lists", values, rows, nk, counts, stride=stride, width=width)


def csr(blocks: Blocks, rng: np.random.Generator) -> Source:
    rows, nk = blocks.shape
    indptr = np.concatenate([[0], np.cumsum(blocks.sum(axis=1))]).astype(integers(rng))
    columns = [rng.permutation(np.flatnonzero(row)) for row in blocks]
    values = np.concatenate([*columns, np.zeros(0, np.int64)]).astype(integers(rng))
    return Source("csr", values, rows, nk, indptr, width=len(values))


MAKE: dict[str, Callable[[Blocks, np.random.Generator], Source]] = {
    "dense": dense,
    "packed": packed,
    "lists": lists,
    "csr": csr,
}
every_format = pytest.mark.parametrize("form", MASK_FORMATS)


def check(state: State, mask: BlockMask) -> None:
    """Compare with the definition, bit for bit."""
    nk = mask.num_blocks[1]
    made = state.blocks(nk)
    rows, columns = np.nonzero(made)
    assert np.array_equal(np.concatenate([[0], np.cumsum(made.sum(axis=1))]), mask.indptr)
    assert np.array_equal(columns, mask.indices)
    counts = mask.row_counts().reshape(-1)
    assert np.array_equal(state.row_count, counts)
    assert int(np.unpackbits(state.bitmap.view(np.uint8)).sum()) == len(columns), "bits past nk"
    assert state["nnz"] == mask.nnz
    assert state["in_runs"] == round(mask.run_coverage() * mask.nnz)
    assert not state.scalars[2:].any()
    if len(rows):  # blocks of 16 x 16 without a short one
        assert state["nnz"] / made.size == pytest.approx(mask.density())


def mask_of(blocks: Blocks, axes: tuple[int, int] = (1, 1)) -> BlockMask:
    shaped = blocks.reshape(*axes, -1, blocks.shape[1])
    return BlockMask.from_dense(shaped, (16, 16))


def structured(nk: int) -> Blocks:
    """A row of each kind: empty, full, its ends, every other, pairs, triples, halves, one on."""
    column = np.arange(nk)
    kinds = [
        np.zeros(nk, np.bool_),
        np.ones(nk, np.bool_),
        (column == 0) | (column == nk - 1),
        column % 2 == 0,
        column % 3 < 2,
        column % 4 < 3,
        column < nk // 2,
        column >= nk // 2,
        column % 32 == 31,
        (column % 32 == 31) | (column % 32 == 0),
        column == nk // 3,
        np.zeros(nk, np.bool_),
    ]
    return np.array(kinds)


@needs_compiler
@every_format
@pytest.mark.parametrize("nk", [1, 15, 32, 33, 100, 900, 1024, 1025, 2100])
def test_structured_rows(run: Runner, form: str, nk: int) -> None:
    blocks = structured(nk)
    check(run(MAKE[form](blocks, np.random.default_rng(nk))), mask_of(blocks))


@needs_compiler
@every_format
@pytest.mark.parametrize("density", [0.0, 0.03, 0.5, 0.97, 1.0])
def test_random_masks_at_any_alignment(run: Runner, form: str, density: float) -> None:
    rng = np.random.default_rng(int(100 * density))
    for _ in range(12):
        rows, nk = int(rng.integers(1, 50)), int(rng.integers(1, 150))
        blocks = rng.random((rows, nk)) < density
        check(run(MAKE[form](blocks, rng)), mask_of(blocks))


@needs_compiler
@pytest.mark.parametrize("form", ["lists", "csr"])
def test_rows_longer_than_shared_memory_are_built_in_passes(run: Runner, form: str) -> None:
    rng = np.random.default_rng(1)
    for nk in (8192, 8193, 20000):
        blocks = rng.random((3, nk)) < 0.02
        blocks[:, 8190:8194] = True  # a run across passes
        check(run(MAKE[form](blocks, rng), ctas=1), mask_of(blocks))


@needs_compiler
@every_format
@pytest.mark.parametrize("axes", [(1, 1), (1, 3), (2, 1), (2, 3)])
def test_heads_that_broadcast_are_not_expanded(
    run: Runner, form: str, axes: tuple[int, int]
) -> None:
    rng = np.random.default_rng(7)
    blocks = rng.random((axes[0] * axes[1] * 5, 70)) < 0.3
    state = run(MAKE[form](blocks, rng))
    check(state, mask_of(blocks, axes))
    assert len(state.row_count) == axes[0] * axes[1] * 5


@needs_compiler
@every_format
def test_any_number_of_ctas_gives_the_same(run: Runner, form: str) -> None:
    rng = np.random.default_rng(3)
    blocks = rng.random((70, 40)) < rng.random((70, 1))
    for ctas in (1, 3, 7):
        check(run(MAKE[form](blocks, rng), ctas), mask_of(blocks))


@needs_compiler
@every_format
def test_nothing_of_one_launch_is_left_to_the_next(run: Runner, form: str) -> None:
    rng = np.random.default_rng(5)
    for density in (1.0, 0.0, 0.4):
        blocks = rng.random((40, 90)) < density
        check(run(MAKE[form](blocks, rng), ctas=2), mask_of(blocks))


@needs_compiler
@every_format
@pytest.mark.parametrize("shape", [(0, 40), (3, 0), (0, 0)])
def test_masks_without_blocks(run: Runner, form: str, shape: tuple[int, int]) -> None:
    values = np.zeros(1, np.uint8 if form in ("dense", "packed") else np.int32)
    rows, nk = shape
    bounds = {"lists": np.zeros(rows, np.int32), "csr": np.zeros(rows + 1, np.int64)}
    width = 0 if form == "csr" else 1
    state = run(Source(form, values, rows, nk, bounds.get(form), stride=1, width=width))
    assert not state.row_count.any()
    assert not state.scalars.any()


@needs_compiler
@pytest.mark.parametrize("nk", [1, 32, 33, 900, 1025, 2100])
def test_columns_of_a_bitmap(run: Runner, nk: int) -> None:
    rng = np.random.default_rng(nk)
    for blocks in (structured(nk), rng.random((40, nk)) < 0.1):
        mask = mask_of(blocks)
        state = run(dense(blocks, rng))
        made = run.columns(state, nk, mask.nnz + 3)
        assert np.array_equal(made[: mask.nnz], mask.indices)
        assert (made[mask.nnz :] == -1).all(), "nothing is written past the last"
        assert state["errors"] == 0


@needs_compiler
@pytest.mark.parametrize("lacking", [0, 1, 30])
def test_columns_past_the_capacity_are_flagged(run: Runner, lacking: int) -> None:
    blocks = np.random.default_rng(2).random((20, 70)) < 0.3
    mask = mask_of(blocks)
    state = run(dense(blocks, np.random.default_rng(2)))
    made = run.columns(state, 70, mask.nnz - lacking)
    assert np.array_equal(made, mask.indices[: len(made)])
    assert state["errors"] == (CAPACITY if lacking else 0)
    assert state["nnz"] == mask.nnz


# What BlockMask refuses, the kernel flags, and goes on with the rest.


def errors_of(state: State, kept: list[tuple[int, int]]) -> int:
    """The error flags; what is no error must be there as usual."""
    assert sorted(zip(*map(list, np.nonzero(state.blocks(40))), strict=True)) == sorted(kept)
    assert state["nnz"] == len(kept)
    assert [int(n) for n in state.row_count] == [
        sum(row == at for row, _ in kept) for at in range(len(state.row_count))
    ]
    assert not np.delete(state.scalars[2:], 2).any()
    return state["errors"]


@needs_compiler
def test_a_bit_past_the_last_column_is_flagged(run: Runner) -> None:
    values = np.zeros((3, 5), np.uint8)
    values[1, 4] = 0b0101_0000  # columns 36 and 38 of 37
    with pytest.raises(ValueError, match="zeros past column 36"):
        BlockMask.from_packed_bits(values, (3, 37), (16, 16))
    state = run(Source("packed", values, 3, 37, stride=5))
    assert errors_of(state, [(1, 36)]) == OUT_OF_RANGE
    values[1, 4] = 0b0001_0000
    assert run(Source("packed", values, 3, 37, stride=5))["errors"] == 0


@needs_compiler
@pytest.mark.parametrize("form", ["lists", "csr"])
@pytest.mark.parametrize(
    ("columns", "kept", "errors"),
    [
        ([1, 40, 2], [1, 2], OUT_OF_RANGE),
        ([1, -1, 2], [1, 2], OUT_OF_RANGE),
        ([2**31 - 1, -(2**31), 39], [39], OUT_OF_RANGE),
        ([64, 63, 41], [], OUT_OF_RANGE),
        ([2**32 + 5, 7, -(2**63)], [7], OUT_OF_RANGE),
        ([5, 7, 5], [5, 7], DUPLICATE),
        ([5, 40, 5], [5], OUT_OF_RANGE | DUPLICATE),
        ([39, 0, 20], [39, 0, 20], 0),
    ],
)
def test_bad_columns_are_left_out_and_flagged(
    run: Runner, form: str, columns: list[int], kept: list[int], errors: int
) -> None:
    """The bad row is the second of three; the third shares a column with it."""
    wide = np.int64 if max(columns) >= 2**31 else np.int32
    values = np.array([3, *columns, 5], wide)
    indptr = np.array([0, 1, 4, 5], np.int64)
    listed = np.full((3, 3), 5, wide)
    listed[0, 0], listed[1] = 3, columns
    counts = np.array([1, 3, 1], np.int32)
    if errors:
        with pytest.raises(ValueError, match="indices"):
            BlockMask.from_csr(indptr, values, (3, 40), (16, 16))
    source = {
        "csr": Source("csr", values, 3, 40, indptr, width=5),
        "lists": Source("lists", listed, 3, 40, counts, stride=3, width=3),
    }[form]
    assert errors_of(run(source), [(0, 3), *((1, c) for c in kept), (2, 5)]) == errors


@needs_compiler
@pytest.mark.parametrize(
    ("counts", "kept"),
    [([-1, 2, 0], [(1, 2), (1, 3)]), ([1, 3, 1], [(0, 0), (1, 2), (1, 3), (2, 4)])],
)
def test_counts_out_of_range_are_flagged(
    run: Runner, counts: list[int], kept: list[tuple[int, int]]
) -> None:
    values = np.arange(6, dtype=np.int32).reshape(3, 2)
    bounds = np.array(counts, np.int32)
    with pytest.raises(ValueError, match="counts"):
        BlockMask.from_lists(values, bounds, 40, (16, 16))
    source = Source("lists", values, 3, 40, bounds, stride=2, width=2)
    assert errors_of(run(source), kept) == BAD_COUNT


@needs_compiler
@pytest.mark.parametrize(
    ("indptr", "kept"),
    [
        ([0, 2, 1, 4], [(0, 0), (0, 1), (2, 1), (2, 2), (2, 3)]),
        ([0, 2, 2, 5], [(0, 0), (0, 1), (2, 2), (2, 3)]),
        ([1, 2, 2, 4], [(0, 1), (2, 2), (2, 3)]),
        ([0, -3, 2, 4], [(1, 0), (1, 1), (2, 2), (2, 3)]),
        ([0, 9, 9, 9], [(0, 0), (0, 1), (0, 2), (0, 3)]),
        ([-(2**63), 2, 2**63 - 1, 4], [(0, 0), (0, 1), (1, 2), (1, 3)]),
        ([0, 1, 2, 3], [(0, 0), (1, 1), (2, 2)]),
        ([0, 4, 4, 2], [(0, 0), (0, 1), (0, 2), (0, 3)]),
        ([0, 0, 0, 0], []),
    ],
)
def test_offsets_out_of_range_are_flagged(
    run: Runner, indptr: list[int], kept: list[tuple[int, int]]
) -> None:
    values = np.arange(4, dtype=np.int32)
    bounds = np.array(indptr, np.int64)
    with pytest.raises(ValueError, match="indptr"):
        BlockMask.from_csr(bounds, values, (3, 40), (16, 16))
    assert errors_of(run(Source("csr", values, 3, 40, bounds, width=4)), kept) == BAD_COUNT


# Sizes


@pytest.mark.parametrize("arch", ARCHS)
@every_format
def test_entries_fill_the_multiprocessor(arch: str, form: str) -> None:
    config = builder(arch, f"mask_state_{form}")
    assert config.name == f"mask_state_{form}"
    full = 48 if arch in ("sm_86", "sm_89", "sm_120a") or form in ("lists", "csr") else 64
    assert config.warps * config.min_ctas == full


def test_grids_have_a_warp_a_row_as_far_as_they_fit() -> None:
    config = builder("sm_90a", "mask_state_dense")
    assert mask_state_grid(config, 8 * 900, 132) == 450
    assert mask_state_grid(config, 8 * 3600, 132) == 528
    assert mask_state_grid(config, 8 * 3600, 100) == 400
    assert mask_state_grid(config, 17, 132) == 2
    assert mask_state_grid(config, 0, 132) == 1
