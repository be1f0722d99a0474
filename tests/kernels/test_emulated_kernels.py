"""The kernels' own sources, run on the CPU by the emulator, against the float64 oracle.

Setting ``EMULATOR_SEED`` as a failed test printed it repeats the failure; ``EMULATOR_KERNELS``
names a folder of kernels to run in place of the package's. ``tests/emulator/README.md`` has more.
"""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tessera_cupy import BlockMask, reference
from tessera_cupy.kernels import launch
from tessera_cupy.kernels.arch import ARCHS
from tessera_cupy.kernels.catalog import KernelConfig, catalog, merge_for
from tessera_cupy.mapping import Mapping, why_not

TESTS = Path(__file__).parents[1]


def _module(path: Path) -> ModuleType:
    """A module of another test folder, which is no package."""
    spec = importlib.util.spec_from_file_location(f"emulated_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


emulator = _module(TESTS / "emulator" / "emulator.py")
attention = _module(TESTS / "attention" / "conftest.py")

pytestmark = pytest.mark.skipif(
    emulator.compiler() is None, reason="the emulator needs g++, which is not on the PATH"
)


#: Shapes of attend_mma that run with token bits too: one a way to read and mask columns.
BITS = [(64, 64, 64, 1), (64, 128, 128, 1), (128, 128, 64, 2), (256, 64, 32, 1)]


def _entries() -> list[KernelConfig]:
    """Of attend_wgmma all without twins; of attend_mma each shape there is, in one dtype.

    None that gathers rows, which plans of block masks never take (attention/test_gather.py).
    """
    shapes: dict[Any, KernelConfig] = {}
    plain = [c for arch in ARCHS for c in catalog(arch) if not c.gather]
    for config in plain:
        sizes = (config.head_dim, config.tile_q, config.tile_kv, config.stages)
        if config.kernel == "attend_mma" and (not config.bits or sizes in BITS):
            # Dtypes take turns, so that both meet every head dim.
            turn = (config.tile_q // 64 + config.tile_kv // 32 + config.stages + config.bits) % 2
            if config.dtype == ("float16", "bfloat16")[turn]:
                shapes.setdefault((sizes, config.bits), config)
    hopper = [c for c in plain if c.kernel == "attend_wgmma" and not c.twins]
    return [*hopper, *shapes.values()]


ENTRIES = _entries()


def _entry(kernel: str, head_dim: int, dtype: str | None = None, tile_q: int = 128) -> KernelConfig:
    return next(
        c
        for c in ENTRIES
        if (c.kernel, c.head_dim, c.tile_q, c.bits) == (kernel, head_dim, tile_q, False)
        and dtype in (None, c.dtype)
    )


#: Block size, mask shape and mappings; the shapes have tails on both sides.
SITUATIONS = [
    ((64, 64), (157, 397), ("retain-pack", "share-pack", "regroup-pack", "retain-merge")),
    ((32, 24), (130, 230), ("merge-pack", "share-pack", "regroup-pack", "merge-merge")),
    ((16, 16), (93, 203), ("share-pack", "regroup-pack", "merge-retain")),
    ((192, 384), (230, 500), ("split-split", "split-pack")),
    ((128, 64), (161, 250), ("retain-pack", "split-retain")),
]
ORGANIZATIONS = ("rows", "longest", "runs+alternate", "alternate")
SCALES = (None, -0.2, None, 0.3)


@pytest.fixture(scope="session")
def built(kernel_cache: Path) -> Iterator[Path]:
    """Where compiled entries are kept: compiled when first used, by one worker ahead of it."""
    folder = kernel_cache.parent / "emulated-kernels"
    if "PYTEST_XDIST_WORKER" in os.environ:
        yield folder
        return
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        ahead = [pool.submit(emulator.build, config, folder) for config in ENTRIES]
        yield folder
        for one in ahead:
            one.cancel()


@pytest.fixture
def check(built: Path, rng: Any, seed: int) -> Callable[..., list[str]]:
    """Draws inputs for a mask, runs a plan on them and compares; names the kernels that ran."""
    runs = count(seed)

    def run(
        config: KernelConfig,
        mask: BlockMask,
        mapping: str,
        organization: str = "rows",
        *,
        capacity: int = 3,
        **arguments: Any,
    ) -> list[str]:
        given = {"dim": config.head_dim, "dtype": config.dtype} | arguments
        case = attention.draw(mask, rng=rng, **given)
        regime = f"{config.kernel}/q{config.tile_q}k{config.tile_kv}/{mapping}/{organization}"
        machine = emulator.Emulator(built, next(runs), capacity=capacity)
        out, lse = machine.run(
            mask,
            *case.arrays,
            regime=regime,
            arch=config.arch,
            layout=case.layout,
            sm_scale=case.sm_scale,
        )
        label = f"{config.arch} {config.name} {regime} {given} {mask} seed {machine.seed}"
        case.check_kernel(out, lse, label)
        return machine.launched

    return run


@pytest.mark.parametrize("config", ENTRIES, ids=lambda c: f"{c.arch}-{c.name}")
def test_entry(config: KernelConfig, check: Any, rng: Any) -> None:
    turn = ENTRIES.index(config)
    for i, (block, shape, names) in enumerate(SITUATIONS):
        mask = attention._random_mask(rng, block, shape, axes=(1, 2), density=0.5)
        if config.bits:
            tokens = mask.to_tokens() & (rng.random((1, 2, *shape)) < 0.7)
            tokens[..., :64, :128] = True  # whole blocks have no bits
            mask = BlockMask.from_tokens(tokens, block)
        sides = (config.tile_q, config.tile_kv)
        served = [n for n in names if why_not(Mapping.parse(n), mask, *sides) is None]
        # attend_mma takes neighbouring rows only.
        served = [n for n in served if config.kernel == "attend_wgmma" or "regroup" not in n]
        if config.kernel == "attend_mma":
            served = served[turn % len(served) :][:1] if served else []
        for name in served:
            check(
                config,
                mask,
                name,
                ORGANIZATIONS[(turn + i) % 4],
                shared=2,
                kv_heads=1,
                layout=("BHSD", "BSHD")[(turn + i) % 2],
                sm_scale=SCALES[(turn + i) % 4],
            )


@pytest.mark.parametrize(
    ("config", "mapping"),
    [
        (_entry("attend_wgmma", 64, "float16"), "regroup-pack"),
        (_entry("attend_wgmma", 128, "bfloat16"), "share-pack"),
        (_entry("attend_mma", 64, tile_q=64), "retain-pack"),
        (_entry("attend_mma", 96), "merge-pack"),
    ],
    ids=lambda x: x if isinstance(x, str) else x.name,
)
def test_split_parts_are_merged(config: KernelConfig, mapping: str, check: Any, rng: Any) -> None:
    blocks = rng.random((1, 1, 3, 110)) < 0.9
    blocks[0, 0, 2] = False  # rows without keys, in a tile that is split
    mask = BlockMask.from_dense(blocks, (32, 32), (91, 3500))
    for organization, layout in (("longest+split", "BHSD"), ("alternate+split", "BSHD")):
        ran = check(config, mask, mapping, organization, layout=layout, shared=2, kv_heads=1)
        assert [name.split("_")[0] for name in ran] == ["attend", "merge"]


@pytest.mark.parametrize("dim", [40, 80])
@pytest.mark.parametrize("kernel", ["attend_mma", "attend_wgmma"])
def test_head_dims_between_are_filled_with_zeros(
    kernel: str, dim: int, check: Any, rng: Any
) -> None:
    served = {"attend_mma": {40: 64, 80: 96}, "attend_wgmma": {40: 64, 80: 128}}[kernel][dim]
    mask = attention._random_mask(rng, (64, 64), (157, 230), axes=(1, 2))
    for layout in ("BHSD", "BSHD"):
        check(_entry(kernel, served), mask, "retain-pack", dim=dim, layout=layout)


@pytest.mark.parametrize("capacity", [1, 2, 5])
def test_ctas_that_take_several_tasks(capacity: int, check: Any, rng: Any) -> None:
    mask = attention._random_mask(rng, (64, 64), (330, 400), axes=(1, 3), density=0.4)
    for scale in (None, -0.2):  # a negative one changes Q in shared memory, under the next copy
        check(
            _entry("attend_wgmma", 64),
            mask,
            "share-pack",
            "longest",
            capacity=capacity,
            sm_scale=scale,
        )


@pytest.mark.parametrize("keys", [440, 232])
def test_a_tail_of_an_odd_number_of_column_groups(keys: int, check: Any, rng: Any) -> None:
    mask = attention._random_mask(rng, (64, 64), (157, keys), axes=(1, 2), density=0.9)
    for mapping in ("retain-pack", "share-pack"):
        check(_entry("attend_wgmma", 128), mask, mapping)


@pytest.mark.parametrize("scale", [0.7, -2.0, 30.0])
@pytest.mark.parametrize(("dim", "dtype"), [(64, "float16"), (128, "bfloat16")])
def test_scores_far_above_the_first_ones(
    dim: int, dtype: str, scale: float, check: Any, rng: Any
) -> None:
    """Scores of 30 and more standard deviations in log2 units move bounds, or are past any."""
    mask = attention._random_mask(rng, (64, 64), (190, 900), axes=(1, 2), density=0.7)
    for mapping, organization in (("share-pack", "longest"), ("regroup-pack", "longest+split")):
        check(_entry("attend_wgmma", dim, dtype), mask, mapping, organization, sm_scale=scale)


@pytest.mark.parametrize("power", [12.5, 100.0, 125.9, 126.1, 126.9, 127.5, 200.0])
@pytest.mark.parametrize("kernel", ["attend_mma", "attend_wgmma"])
def test_a_later_key_that_is_a_power_of_two_ahead(
    kernel: str, power: float, built: Path, seed: int
) -> None:
    """Up to where floats end, where scaling makes zeros, and beyond."""
    q = np.zeros((1, 1, 64, 64), np.float16)
    k, v = np.zeros((2, 1, 1, 256, 64), np.float16)
    q[..., 0] = k[..., 200, 0] = 1
    v[0, 0] = np.random.default_rng(seed).standard_normal((256, 64))
    mask = BlockMask.from_dense(np.ones((1, 4), bool), (64, 64), (64, 256))
    config = _entry(kernel, 64)
    out, lse = emulator.Emulator(built, seed, capacity=1).run(
        mask,
        *(q, k, v),
        regime=f"{kernel}/q{config.tile_q}k{config.tile_kv}/retain-pack/rows",
        arch=config.arch,
        layout="BHSD",
        sm_scale=power * math.log(2),
    )
    exact, exact_lse = reference.attention(
        q, k, v, mask, sm_scale=power * math.log(2), return_lse=True
    )
    np.testing.assert_allclose(out.astype(np.float64), exact, atol=4e-3)
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-5)


@pytest.mark.parametrize("kernel", ["attend_mma", "attend_wgmma"])
def test_batches_whose_heads_lie_apart(kernel: str, check: Any, rng: Any) -> None:
    mask = attention._random_mask(rng, (64, 32), (100, 170), axes=(1, 2), density=0.6)
    check(_entry(kernel, 64), mask, "retain-pack", batch=2, shared=2, kv_heads=1, layout="BSHD")


@pytest.mark.parametrize("kernel", ["attend_mma", "attend_wgmma"])
def test_tiles_without_keys_and_with_one_fragment(kernel: str, check: Any, rng: Any) -> None:
    blocks = np.zeros((1, 2, 8, 20), bool)
    blocks[0, 0, 1, 19] = blocks[0, 0, 2, 0] = True
    blocks[0, 1, 5] = True
    mask = BlockMask.from_dense(blocks, (64, 16), (500, 317))
    check(_entry(kernel, 64), mask, "retain-pack", capacity=2)


def _halves(rng: Any, heads: int, nq: int, nk: int, density: Any) -> BlockMask:
    """A mask of query blocks of 0 to 64 rows, that differ from head to head, in any order."""
    one = rng.integers(0, 65, nq)
    one[rng.integers(nq)] = 64
    one[rng.random(nq) < 0.2] = 0
    sizes = np.array([rng.permutation(one) for _ in range(heads)])
    if not one.any():
        sizes[:, 0] = 37
    keep = rng.random((1, heads, nq, nk)) < density
    kv = rng.integers(1, 65, nk)
    return BlockMask.from_dense(
        keep, (64, 64), q_block_sizes=sizes[None], kv_block_sizes=kv[None, None]
    )


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("nq", [1, 2, 5, 8])
def test_halves_of_ragged_blocks(dim: int, nq: int, check: Any, rng: Any) -> None:
    for turn, density in enumerate((0.15, 0.5, 0.95)):
        mask = _halves(rng, 2, nq, 9, density)
        while mask.max_block[0] <= 32:
            mask = _halves(rng, 2, nq, 9, density)
        check(
            _entry("attend_wgmma", dim),
            mask,
            "share-pack",
            ORGANIZATIONS[turn],
            capacity=1 + turn,
            layout=("BHSD", "BSHD")[turn % 2],
            sm_scale=SCALES[turn],
        )


@pytest.mark.parametrize("dim", [64, 128])
def test_split_halves_are_merged(dim: int, check: Any, rng: Any) -> None:
    blocks = rng.random((1, 2, 7, 110)) < 0.9
    blocks[0, 0, 2] = False  # rows without keys, in a tile that is split
    sizes = np.array([[3, 64, 41, 17, 0, 9, 64], [64, 0, 9, 64, 17, 41, 3]])
    mask = BlockMask.from_dense(blocks, (64, 32), q_block_sizes=sizes)
    for organization, layout in (("longest+split", "BHSD"), ("alternate+split", "BSHD")):
        ran = check(
            _entry("attend_wgmma", dim), mask, "share-pack", organization, layout=layout, shared=2
        )
        assert [name.split("_")[0] for name in ran] == ["attend", "merge"]


def test_rows_that_halves_lack_are_not_merged(built: Path, seed: int) -> None:
    """Halves of 9 and 20 rows, from query row 5 on: CTAs of the first one write 9 rows alone."""
    merge = merge_for(_entry("attend_wgmma", 64, "float16"))
    rows = [*range(9), *range(64, 84)]
    partial_o = np.full((2, 128, 64), 77, np.float32)
    partial_o[:, rows] = np.arange(29)[:, None] + 1
    partial_ml = np.full((2, 128, 2), [0, 2], np.float32)  # O is then a half of the parts' own
    inputs = {
        "merge_head": np.zeros(1, np.int32),
        "merge_tile": np.zeros(1, np.int32),
        "merge_offsets": np.array([0, 2], np.int32),
        "tile_q": np.array([[5, 29 | 10 << 16]], np.int32),
        "partial_o": partial_o,
        "partial_ml": partial_ml,
    }
    for row_groups, written in ((8, 9), (16, 29)):
        arrays = {name: emulator.Array(name, x.nbytes, at_end=True) for name, x in inputs.items()}
        for name, values in inputs.items():
            arrays[name].bytes[:] = values.reshape(-1).view(np.uint8)
            arrays[name].seal()
        out = emulator.Array("o", 40 * 64 * 2, at_end=True)
        numbers = {"o_stride": (0, 0, 64), "q_heads": 1, "head_dim": 64, "sq": 40}
        numbers |= {"tile_rows": 128, "row_width": 64, "o": out.data.ptr}
        params = launch.packed_struct(
            launch.MERGE_PARAMS, numbers | {name: a.data.ptr for name, a in arrays.items()}
        )
        library = emulator.build(merge, built)
        error = emulator.call(library, params, (1, row_groups), 32 * merge.warps, 0, seed)
        assert error is None
        o = out.bytes.view(np.float16).reshape(40, 64)
        np.testing.assert_array_equal(o[5 : 5 + written].T, [np.arange(1, written + 1) / 2] * 64)
        assert np.isnan(np.delete(o, np.s_[5 : 5 + written], axis=0)).all()


@pytest.mark.parametrize("scale", [0.7, -2.0, 30.0])
def test_halves_whose_scores_grow(scale: float, check: Any, rng: Any) -> None:
    """Rows that a tile lacks are those of other blocks, and may have bounds to move, too."""
    sizes = np.array([[3, 64, 41, 17, 1, 9, 64], [64, 1, 9, 64, 17, 41, 3]])
    mask = BlockMask.from_dense(rng.random((1, 2, 7, 16)) < 0.7, (64, 64), q_block_sizes=sizes)
    check(_entry("attend_wgmma", 64), mask, "share-pack", "longest", sm_scale=scale)


@pytest.mark.parametrize("kernel", ["attend_mma", "attend_wgmma"])
def test_ragged_blocks_start_anywhere(kernel: str, check: Any, rng: Any) -> None:
    sizes = np.array([1, 7, 33, 0, 129, 64, 5, 61])
    keep = rng.random((1, 2, 3, 8)) < 0.6
    mask = BlockMask.from_dense(keep, (64, 64), (190, 300), kv_block_sizes=sizes)
    check(_entry(kernel, 64), mask, "retain-pack")
