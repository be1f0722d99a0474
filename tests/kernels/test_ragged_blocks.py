"""``ragged_blocks.cu`` on the CPU: starts, present blocks and scalars, by NumPy; and bad sizes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tessera_cupy.kernels.arch import ARCHS
from tessera_cupy.kernels.builders import (
    MASK_ERRORS,
    MASK_SCALARS,
    RAGGED_BLOCKS_PARAMS,
    ragged_blocks_grid,
)
from tessera_cupy.kernels.catalog import builder
from tests.emulator.emulator import Array, build, call, compiler

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no g++ to build the emulator with")
BAD_SIZE, BAD_TOTAL = 16, 32
ERRORS = MASK_SCALARS.index("errors")

Sizes = NDArray[Any]


@dataclass
class Made:
    """What the kernel made."""

    blocks: NDArray[np.bool_]
    starts: dict[str, NDArray[np.int32]]
    nnz: int
    in_runs: int
    present: int
    errors: int


@dataclass
class Runner:
    """Launches the entry."""

    folder: Path
    seed: int = 0

    def __call__(
        self,
        blocks: NDArray[np.bool_],
        sizes: dict[str, Sizes],
        most: int,
        tokens: tuple[int, int],
        *,
        errors: int = 0,
    ) -> Made:
        """``blocks`` are (B, H, nq, nk); ``sizes`` (B, H, n) of a side, in any strides."""
        self.seed += 1
        config = builder("sm_90a", "ragged_blocks")
        batch, heads = (
            max(blocks.shape[axis], *[s.shape[axis] for s in sizes.values()]) for axis in (0, 1)
        )
        nq, nk = blocks.shape[2:]
        words = -(-nk // 32)
        octets = np.zeros((*blocks.shape[:3], 4 * words), np.uint8)
        octets[..., : -(-nk // 8)] = np.packbits(blocks, axis=-1, bitorder="little")
        scalars = np.zeros(len(MASK_SCALARS), np.int64)
        scalars[0], scalars[ERRORS] = 77, errors
        arrays = {
            "mask_bitmap": self._input("mask_bitmap", octets),
            "mask_scalars": self._input("mask_scalars", scalars),
            "bitmap": self._array("bitmap", 4 * batch * heads * nq * words),
            "scalars": self._array("scalars", scalars.nbytes),
        }
        arrays["scalars"].bytes[:] = 0
        params = np.zeros(1, RAGGED_BLOCKS_PARAMS)
        for side, n, end in zip(("q", "kv"), (nq, nk), tokens, strict=True):
            values = {"blocks": n, "most": most, "tokens": end}
            if side in sizes:
                of = sizes[side]
                base = of if of.base is None else of.base
                arrays[f"{side}_sizes"] = self._input("sizes", base)
                arrays[f"{side}_starts"] = self._array("starts", 4 * batch * heads * (n + 1))
                strides = [
                    step // of.itemsize if length > 1 else 0
                    for step, length in zip(of.strides, of.shape, strict=True)
                ]
                values |= {"wide": of.dtype == np.int64, "stride": strides[2]}
                values |= {"batch_stride": strides[0], "head_stride": strides[1]}
            for name, value in values.items():
                params[f"{side}_{name}"] = value
        for name, array in arrays.items():
            params[name] = array.data.ptr
        params["batch"], params["heads"] = batch, heads
        params["mask_batch"], params["mask_heads"] = blocks.shape[:2]
        grid = ragged_blocks_grid(config, batch * heads, nq)
        library, threads = build(config, self.folder), 32 * config.warps
        error = call(library, params, (grid,), threads, config.smem_bytes, self.seed)
        assert error is None, f"seed {self.seed}: {error}"
        assert [array.name for array in arrays.values() if not array.clean()] == []
        bits = arrays["bitmap"].bytes.reshape(batch, heads, nq, 4 * words)
        found = np.unpackbits(bits, axis=-1, bitorder="little").view(np.bool_)
        assert not found[..., nk:].any()
        counted = arrays["scalars"].bytes.view(np.int64)
        assert not counted[[3, 5, 6, 7]].any()
        return Made(
            found[..., :nk],
            {
                side: arrays[f"{side}_starts"].bytes.view(np.int32).reshape(batch, heads, -1)
                for side in sizes
            },
            *counted[[0, 1, 2, ERRORS]].tolist(),
        )

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


def in_runs(blocks: NDArray[np.bool_]) -> int:
    beside = np.pad(blocks, [(0, 0)] * 3 + [(1, 1)])
    return int((blocks & (beside[..., :-2] | beside[..., 2:])).sum())


@needs_compiler
@pytest.mark.parametrize(
    ("mask_axes", "size_axes"), [((1, 1), (1, 1)), ((1, 2), (2, 1)), ((2, 2), (1, 2))]
)
@pytest.mark.parametrize(
    ("nq", "nk"), [(1, 1), (9, 31), (13, 32), (8, 1025), (1030, 65), (5, 4100)]
)
@pytest.mark.parametrize("sides", [("q",), ("kv",), ("q", "kv")])
def test_starts_and_present_blocks(
    run: Runner, sides: tuple[str, ...], nq: int, nk: int, mask_axes: Any, size_axes: Any
) -> None:
    rng = np.random.default_rng(nq + nk)
    blocks = rng.random((*mask_axes, nq, nk)) < rng.choice([0.2, 0.9], (*mask_axes, nq, 1))
    sizes: dict[str, Sizes] = {}
    tokens = [64 * nq, 64 * nk]
    for side, n in zip(("q", "kv"), (nq, nk), strict=True):
        if side in sides:
            one = rng.integers(0, 65, n) * (rng.random(n) < 0.8)
            all_heads = np.stack([rng.permutation(one) for _ in range(np.prod(size_axes))])
            sizes[side] = all_heads.reshape(*size_axes, n).astype(rng.choice([np.int32, np.int64]))
            tokens[side == "kv"] = int(one.sum())
    made = run(blocks, sizes, 64, (tokens[0], tokens[1]), errors=6)
    axes = made.blocks.shape[:2]
    present = np.ones(made.blocks.shape, np.bool_)
    for side, of in sizes.items():
        full = np.broadcast_to(of, (*axes, of.shape[2]))
        present &= (full > 0)[..., :, None] if side == "q" else (full > 0)[..., None, :]
        np.testing.assert_array_equal(made.starts[side][..., 0], 0)
        np.testing.assert_array_equal(made.starts[side][..., 1:], np.cumsum(full, axis=-1))
    want = present & blocks
    np.testing.assert_array_equal(made.blocks, want)
    assert made.present == present.sum()
    assert (made.nnz, made.in_runs, made.errors) == (want.sum(), in_runs(want), 6)


@needs_compiler
def test_sizes_of_any_strides(run: Runner) -> None:
    rng = np.random.default_rng(1)
    one = rng.permutation(np.arange(40) % 9)
    base = np.zeros((40, 3, 2), np.int32)
    base[:] = one[:, None, None]
    blocks = np.ones((2, 3, 4, 40), np.bool_)
    made = run(blocks, {"kv": base.transpose(2, 1, 0)}, 8, (256, int(one.sum())))
    np.testing.assert_array_equal(made.starts["kv"][..., 1:], np.cumsum(one) + 0 * base.T)
    assert (made.nnz, made.errors) == (2 * 3 * 4 * np.count_nonzero(one), 0)


@needs_compiler
@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_bad_sizes_lie_inside_and_are_flagged(run: Runner, kind: Any) -> None:
    blocks = np.ones((1, 1, 3, 5), np.bool_)
    limit = np.iinfo(kind)
    for sizes, starts, errors in (
        ([3, 8, 0, 1, 8], [0, 3, 11, 11, 12, 20], 0),
        ([3, 9, 0, 1, 7], [0, 3, 11, 11, 12, 19], BAD_SIZE | BAD_TOTAL),
        ([3, 9, 0, 0, 9], [0, 3, 11, 11, 11, 19], BAD_SIZE | BAD_TOTAL),
        ([-1, 8, 8, 4, 0], [0, 0, 8, 16, 20, 20], BAD_SIZE),
        ([8, 8, 8, 8, 8], [0, 8, 16, 20, 20, 20], BAD_TOTAL),
        ([0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 1], BAD_TOTAL),
        ([limit.max, limit.min, limit.max, 0, 4], [0, 8, 8, 16, 16, 20], BAD_SIZE),
    ):
        made = run(blocks, {"kv": np.array([[sizes]], kind)}, 8, (24, 20))
        assert made.starts["kv"].ravel().tolist() == starts
        assert made.errors == errors
        assert made.nnz == 3 * sum(size > 0 for size in sizes)


@needs_compiler
def test_sums_beyond_32_bits(run: Runner) -> None:
    """Only where sizes are wrong, as tokens have 31 bits."""
    most = 2**31 - 1
    sizes = np.full((1, 1, 1500), most, np.int32)
    made = run(np.ones((1, 1, 2, 1500), np.bool_), {"kv": sizes}, most, (128, most))
    assert made.starts["kv"].ravel().tolist() == [0, *[most] * 1500]
    assert made.errors == BAD_TOTAL


def test_errors_have_words() -> None:
    assert MASK_ERRORS[BAD_SIZE.bit_length() - 1] == "block size out of range"
    assert MASK_ERRORS[BAD_TOTAL.bit_length() - 1].startswith("block sizes that do not sum")


@needs_compiler
def test_grid_covers_all_rows() -> None:
    config = builder("sm_90a", "ragged_blocks")
    assert ragged_blocks_grid(config, 8, 900) == 16 + 113
    assert ragged_blocks_grid(config, 1, 1) == 3
    assert {builder(arch, "ragged_blocks").warps for arch in ARCHS} == {8}
