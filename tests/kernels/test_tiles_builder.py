"""The tile kernels on the CPU, against the planner: lists, tasks, merges, outputs too small."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tessera_cupy import BlockMask
from tessera_cupy.kernels import room
from tessera_cupy.kernels.builders import (
    STATE_POINTERS,
    TILE_COUNTS,
    TILE_POINTERS,
    TILES_PARAMS,
    TileBuild,
    divisor,
)
from tessera_cupy.kernels.cache import default_cache
from tessera_cupy.kernels.catalog import TILE_KERNELS, builder
from tessera_cupy.kernels.launch import packed_fragments, packed_tasks, tile_words
from tessera_cupy.mapping import Mapping, Tiles, TileShape, choose_slot, map_mask, why_not
from tessera_cupy.organization import DeviceModel, Organization, Tasks, organize
from tests.emulator.emulator import Array, build, call, compiler

BLOCKS = [(16, 16), (32, 32), (64, 64), (64, 32), (128, 128), (128, 64), (96, 24), (384, 128)]
TILES = [(64, 64), (128, 64), (128, 192)]
Q_SIDES = ("retain", "split", "merge", "share")
DEVICE = DeviceModel(sms=5, ctas_per_sm=2, l2_bytes=1 << 20)
ARCH = "sm_90a"
ERRORS = TILE_COUNTS.index("errors")
STAMP = 2**62 + 77

Blocks = NDArray[np.bool_]


@dataclass
class Request:
    """A mask, how its tiles are made, and who attends with it."""

    mask: BlockMask
    q_side: str
    tile: tuple[int, int]
    batch: int = 1
    q_heads: int | None = None
    kv_heads: int | None = None
    kv_bytes: int = 1 << 20
    device: DeviceModel = DEVICE
    slot: int | None = None

    @property
    def heads(self) -> dict[str, int]:
        q_heads = self.q_heads or self.mask.heads
        return {
            "batch": self.batch,
            "q_heads": q_heads,
            "kv_heads": self.kv_heads or q_heads,
            "mask_batch": self.mask.batch,
            "mask_heads": self.mask.heads,
            "kv_bytes_per_head": self.kv_bytes,
        }

    def build(self, frag_capacity: int | None = None) -> TileBuild:
        q, kv = self.tile
        made = TileBuild(
            self.q_side,
            TileShape(q, kv, self.slot or choose_slot(self.mask, kv)),
            self.mask.max_block,
            sq=self.mask.shape[0],
            skv=self.mask.shape[1],
            device=self.device,
            frag_capacity=0,
            ragged=tuple(
                blocks if own else None
                for blocks, own in zip(self.mask.num_blocks, self.mask.ragged_sides, strict=True)
            ),
            **self.heads,
        )
        room = made.most_fragments if frag_capacity is None else frag_capacity
        return replace(made, frag_capacity=room)

    def planned(self) -> tuple[Tiles, Tasks]:
        tiles = map_mask(self.mask, Mapping(self.q_side, "pack"), *self.tile, self.slot)
        organization = Organization(longest=True, split=True)
        return tiles, organize(tiles, organization, device=self.device, **self.heads)


@dataclass
class Runner:
    """Runs the three kernels; what they write comes back by name."""

    folder: Path
    seed: int = 1

    def __call__(
        self, made: TileBuild, blocks: Blocks, mask: BlockMask | None = None
    ) -> dict[str, NDArray[Any]]:
        """``mask`` says where the blocks of ragged sides begin."""
        self.seed += 1
        shapes = made.arrays()
        sizes = {n: int(np.prod(shape)) * dtype.itemsize for n, (shape, dtype) in shapes.items()}
        inputs: dict[str, NDArray[Any]] = {"bitmap": packed_bitmap(blocks)}
        if mask is not None:
            starts = (mask.q_starts(), mask.kv_starts())
            for name, own, of in zip(STATE_POINTERS[1:], mask.ragged_sides, starts, strict=True):
                if own:
                    inputs[name] = of.astype(np.int32)
        sizes |= {name: values.nbytes for name, values in inputs.items()}
        arrays = {
            name: Array(name, size, at_end=bool((self.seed + i) % 2) and size % 16 == 0)
            for i, (name, size) in enumerate(sizes.items())
        }
        for name, values in inputs.items():
            arrays[name].bytes[:] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
            arrays[name].seal()
        pointers = dict.fromkeys(STATE_POINTERS, 0)
        pointers |= {name: array.data.ptr for name, array in arrays.items()}
        params = made.params(pointers, STAMP)
        for name in TILE_KERNELS:
            config = builder(ARCH, f"{name}_ragged" if made.ragged != (None, None) else name)
            library = build(config, self.folder)
            grid, threads = (made.grid(config),), 32 * config.warps
            error = call(library, params, grid, threads, config.smem_bytes, self.seed)
            assert error is None, f"{name}, seed {self.seed}: {error}"
        assert [array.name for array in arrays.values() if not array.clean()] == []
        return {
            name: arrays[name].bytes.view(dtype).reshape(shape).copy()
            for name, (shape, dtype) in shapes.items()
        }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if compiler() is None:
        pytest.skip("no g++ to build the emulator with")
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture
def run(folder: Path) -> Runner:
    return Runner(folder)


def packed_bitmap(blocks: Blocks) -> NDArray[np.uint32]:
    """(heads, nq, words): bit c % 32 of word c // 32 is block column c."""
    heads, nq, nk = blocks.shape
    words = np.zeros((heads, nq, -(-nk // 32) * 4), np.uint8)
    packed = np.packbits(blocks, axis=-1, bitorder="little")
    words[..., : packed.shape[-1]] = packed
    return words.view(np.uint32)


def random_blocks(seed: int, heads: int, nq: int, nk: int) -> Blocks:
    """Rows from empty to full."""
    rng = np.random.default_rng(seed)
    density = rng.choice([0.0, 0.1, 0.3, 0.6, 0.95, 1.0], (heads, nq, 1))
    return rng.random((heads, nq, nk)) < density


def video_blocks(seed: int, heads: int, nq: int, nk: int) -> Blocks:
    """A band, its repeats a frame apart, a few columns for all, and scattered blocks."""
    rng = np.random.default_rng(seed)
    distance = np.abs(np.arange(nq)[:, None] * nk // nq - np.arange(nk))
    blocks = np.zeros((heads, nq, nk), np.bool_)
    for head in blocks:
        frame, width = rng.integers(5, 12), rng.integers(1, 3)
        head |= np.minimum(distance % frame, -distance % frame) < width - (distance > 3 * frame)
        head[:, rng.integers(0, nk, 2)] = True
        head |= rng.random((nq, nk)) < 0.05
    return blocks


def masked(
    blocks: Blocks, block_size: tuple[int, int], short: tuple[int, int] = (0, 0), batch: int = 1
) -> BlockMask:
    """The mask of (heads, nq, nk) blocks, of which the last are so many tokens short."""
    heads, *grid = blocks.shape
    shape = [n * size - cut for n, size, cut in zip(grid, block_size, short, strict=True)]
    return BlockMask.from_dense(
        blocks.reshape(batch, heads // batch, *grid), block_size, shape=shape
    )


def check_lists(got: dict[str, NDArray[Any]], tiles: Tiles) -> None:
    assert np.array_equal(got["frag_offsets"], tiles.frag_offsets)
    assert np.array_equal(got["tile_steps"], tiles.steps)
    assert np.array_equal(got["tile_q"], tile_words(tiles))
    assert np.array_equal(got["tile_frags"], np.diff(tiles.frag_offsets))
    want = packed_fragments(tiles)
    assert np.array_equal(got["frags"][: len(want)], want)
    assert (got["frags"][len(want) :] == 0xFFFFFFFF).all()


def check_tasks(got: dict[str, NDArray[Any]], tiles: Tiles, tasks: Tasks) -> None:
    counts = dict(zip(TILE_COUNTS, got["counts"].tolist(), strict=True))
    merges = len(tasks.merge_tile)
    assert counts == {
        **dict.fromkeys(TILE_COUNTS, 0),
        "fragments": len(tiles.frag_start),
        "tasks": len(tasks),
        "merges": merges,
        "slots": tasks.slots,
        "stamp": STAMP,
    }
    want = packed_tasks(tiles, tasks)
    assert got["tasks"][: len(tasks)].tolist() == want.tolist()
    for name in ("merge_head", "merge_tile"):
        assert np.array_equal(got[name][:merges], getattr(tasks, name))
    assert np.array_equal(got["merge_offsets"][: merges + 1], tasks.merge_offsets)


def with_rows(got: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """What was made, without the tiles that have no rows; those have no fragments and no task."""
    kept = got["tile_q"][:, 1] > 0
    assert not got["tile_frags"][~kept].any()
    assert not got["tile_steps"][~kept].any()
    merges = got["counts"][TILE_COUNTS.index("merges")]
    assert kept[got["merge_tile"][:merges]].all()
    number = np.cumsum(kept) - 1
    return got | {
        "frag_offsets": np.append(got["frag_offsets"][:-1][kept], got["frag_offsets"][-1]),
        "merge_tile": np.append(number[got["merge_tile"][:merges]], got["merge_tile"][merges:]),
        **{name: got[name][kept] for name in ("tile_q", "tile_frags", "tile_steps")},
    }


def check(run: Runner, request: Request, blocks: Blocks) -> Tasks:
    tiles, tasks = request.planned()
    mask = request.mask
    got = run(request.build(), blocks, mask)
    if mask.ragged_sides[0]:
        got = with_rows(got)
    check_lists(got, tiles)
    check_tasks(got, tiles, tasks)
    return tasks


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"q{tile[0]}k{tile[1]}")
@pytest.mark.parametrize("block_size", BLOCKS, ids=lambda size: f"{size[0]}x{size[1]}")
def test_lists_and_tasks_are_the_planner_s(
    run: Runner, block_size: tuple[int, int], tile: tuple[int, int]
) -> None:
    served = 0
    for number, kind in enumerate((random_blocks, video_blocks)):
        nq, nk = (7, 41) if block_size[0] > 64 else (21, 70)
        blocks = kind(number, 2, nq, nk)
        mask = masked(blocks, block_size, (11, 5) if number else (0, 0))
        for q_side in Q_SIDES:
            if why_not(Mapping(q_side, "pack"), mask, *tile) is None:
                check(run, Request(mask, q_side, tile), blocks)
                served += 1
    assert served >= 2


@pytest.mark.parametrize("q_side", Q_SIDES)
@pytest.mark.parametrize("kind", ["empty", "full", "one block", "last block", "first head"])
def test_masks_at_the_limits(run: Runner, q_side: str, kind: str) -> None:
    blocks = np.zeros((2, 5, 33), np.bool_)
    if kind == "full":
        blocks[:] = True
    elif kind == "first head":
        blocks[0] = True
    elif kind.endswith("block"):
        at = 0 if kind == "one block" else -1
        blocks[at, at, at] = True
    block_size = (80, 24) if q_side == "split" else (16, 24)
    mask = masked(blocks, block_size, (3, 17))
    check(run, Request(mask, q_side, (64, 64)), blocks)


@pytest.mark.parametrize("nk", [1, 31, 32, 33, 1023, 1024, 1025, 2100])
def test_rows_of_any_length(run: Runner, nk: int) -> None:
    """A warp takes 1024 columns at a time."""
    for number, kind in enumerate((random_blocks, video_blocks)):
        blocks = kind(number, 1, 6, nk)
        mask = masked(blocks, (32, 16), (0, 3))
        for q_side in ("retain", "merge", "share"):
            check(run, Request(mask, q_side, (128, 192)), blocks)


@pytest.mark.parametrize(("block", "slot"), [(48, 64), (96, 64), (80, 32), (384, 128)])
def test_slots_that_do_not_divide_the_block(run: Runner, block: int, slot: int) -> None:
    blocks = random_blocks(5, 2, 6, 40)
    mask = masked(blocks, (64, block), (0, block - 9))
    for q_side in ("retain", "share"):
        check(run, Request(mask, q_side, (128, 128), slot=slot), blocks)


def test_halves_with_a_block_in_common(run: Runner) -> None:
    """Of two blocks of 24 rows in a tile of 64, the second lies in both halves."""
    blocks = random_blocks(6, 1, 9, 50)
    mask = masked(blocks, (24, 32), (5, 0))
    check(run, Request(mask, "share", (64, 64)), blocks)


def test_more_tiles_than_one_round_of_the_scan(run: Runner) -> None:
    blocks = random_blocks(7, 1, 8200, 3)
    blocks[0, 8193] = True
    mask = masked(blocks, (16, 384))
    device = DeviceModel(sms=800, ctas_per_sm=1, l2_bytes=1 << 20)
    tasks = check(run, Request(mask, "retain", (64, 64), device=device), blocks)
    assert len(tasks) > 8192


def test_tiles_of_several_warps_of_the_scan(run: Runner) -> None:
    blocks = random_blocks(10, 4, 400, 9)
    for _ in range(8):
        check(run, Request(masked(blocks, (16, 16)), "retain", (64, 64)), blocks)


def test_lists_longer_than_the_table_of_buckets(run: Runner) -> None:
    rng = np.random.default_rng(11)
    blocks = np.zeros((1, 9, 5000), np.bool_)
    lengths = [2047, 2048, 2060, 2100, 2200, 2300, 3000, 4000, 5000]
    for row, length in zip(blocks[0], rng.permutation(lengths), strict=True):
        row[:length] = True
    device = DeviceModel(sms=1, ctas_per_sm=1, l2_bytes=0)
    request = Request(masked(blocks, (64, 64)), "retain", (64, 64), device=device)
    tasks = check(run, request, blocks)
    whole = tasks.task_slot < 0
    assert (tasks.task_end - tasks.task_begin)[whole].max() == 5000
    assert whole.all()


@pytest.mark.parametrize("groups", [1, 2, 3, 5, 16, 17, 32, 33])
def test_groups_of_any_number(run: Runner, groups: int) -> None:
    blocks = random_blocks(groups, groups, 37, 24)
    tasks = check(run, Request(masked(blocks, (64, 64)), "retain", (64, 64)), blocks)
    assert len(tasks) >= 37 * groups


def test_last_round_of_more_turns_than_threads(run: Runner) -> None:
    blocks = np.zeros((1, 9000, 18), np.bool_)
    lengths = np.repeat([14, 16, 18], [500, 5000, 3500])
    for row, length in zip(blocks[0], np.random.default_rng(12).permutation(lengths), strict=True):
        row[:length] = True
    device = DeviceModel(sms=2600, ctas_per_sm=1, l2_bytes=1 << 20)
    request = Request(masked(blocks, (64, 64)), "retain", (64, 64), device=device)
    tasks = check(run, request, blocks)
    # The last 1200 are those of 14 steps, which stay whole, and 700 of 16.
    assert len(tasks) == 9000 + 700
    assert (tasks.task_slot[-1400:] >= 0).all()


def test_divisors_are_exact() -> None:
    rng = np.random.default_rng(13)
    for number in (1, 2, 3, 5, 7, 12, 24, 132, 450, 641, 2**20 + 7, 2**30, 2**31 - 1):
        shift, multiplier = divmod(divisor(number), 2**32)
        assert shift < 32
        near = rng.integers(1, 2**31 // number + 1, 1000) * number
        for value in {0, 1, 2**31 - 1, *(near - 1).tolist(), *near.clip(max=2**31 - 1).tolist()}:
            assert (2 * value * multiplier >> 32) >> shift == value // number


def test_more_groups_of_heads_than_warps(run: Runner) -> None:
    blocks = video_blocks(8, 1, 12, 90)
    mask = masked(blocks, (64, 64))
    request = Request(mask, "retain", (64, 64), batch=3, q_heads=26, kv_heads=13)
    made = request.build()
    params = made.params(dict.fromkeys(TILE_POINTERS, 0)).view(TILES_PARAMS)
    assert -(-params["pairs"] // params["group_pairs"]) == 3 * 13
    check(run, request, blocks)


def last_round(neighbour: int) -> tuple[Request, Blocks]:
    """Eleven heads of one tile of 40 steps, each a group, on three CTAs; the last but one differs.

    The last round has that one and the last, which alone may be cut.
    """
    blocks = np.zeros((11, 1, 40), np.bool_)
    for head, count in zip(blocks, [40] * 9 + [neighbour, 40], strict=True):
        head[0, :count] = True
    device = DeviceModel(sms=3, ctas_per_sm=1, l2_bytes=1 << 20)
    return Request(masked(blocks, (64, 64)), "retain", (64, 64), device=device), blocks


@pytest.mark.parametrize(("neighbour", "parts"), [(18, 2), (36, 2), (37, 1), (40, 1)])
def test_last_round_is_cut_in_its_group_where_a_tenth_is_gained(
    run: Runner, neighbour: int, parts: int
) -> None:
    tasks = check(run, *last_round(neighbour))
    assert len(tasks) == 10 + parts


Sizes = NDArray[np.int64]


def random_sizes(rng: np.random.Generator, shape: tuple[int, ...], most: int, step: int) -> Sizes:
    """Multiples of ``step`` from 0 to ``most``, with the same sum in each head."""
    first = rng.integers(0, most // step + 1, shape[-1]) * step
    first[rng.random(shape[-1]) < 0.2] = 0
    first[rng.integers(shape[-1])] = most
    return np.stack([rng.permutation(first) for _ in range(shape[0])])


def edge_sizes(rng: np.random.Generator, shape: tuple[int, ...], most: int, step: int) -> Sizes:
    """Cubes of 4 x 4 x 4 in 5 x 6 x 7 tokens, and text."""
    cubes = [t * h * w for t in (4, 1) for h in (4, 2) for w in (4, 3)]
    return np.tile([*cubes, 64, 64, 13], (shape[0], 1))


def ragged(blocks: Blocks, rng: np.random.Generator, kind: Any, step: int, sides: str) -> BlockMask:
    sizes = {
        f"{side}_block_sizes": kind(rng, (len(blocks), blocks.shape[axis]), 64, step)
        for side, axis in (("q", 1), ("kv", 2))
        if side in sides
    }
    return BlockMask.from_dense(blocks, (64, 64), **sizes)


@pytest.mark.parametrize("sides", ["q", "kv", "q and kv"])
@pytest.mark.parametrize("kind", [random_sizes, edge_sizes])
def test_ragged_blocks(run: Runner, kind: Any, sides: str) -> None:
    rng = np.random.default_rng(sum(map(ord, sides)))
    served: set[str] = set()
    for step in (1, 8):
        nq, nk = (11, 11) if kind is edge_sizes else (17, 75)
        mask = ragged(random_blocks(step, 3, nq, nk), rng, kind, step, sides)
        blocks = mask.to_dense()[0]
        for q_side in Q_SIDES:
            for tile in ((32, 64), (64, 64), (128, 192)):
                for slot in (None, 8, 64):
                    if why_not(Mapping(q_side, "pack"), mask, *tile) is None:
                        check(run, Request(mask, q_side, tile, slot=slot), blocks)
                        served.add(q_side)
    # Cubes begin anywhere, so that they are joined as halves only.
    merged = {"merge"} if "q" not in sides or kind is random_sizes else set()
    assert served == {"retain", "split", "share", *merged}


def in_runs(rng: np.random.Generator, heads: int, nq: int, nk: int) -> Blocks:
    """Rows of runs of blocks; each second row is nearly the row before it."""
    blocks = np.repeat(rng.random((heads, -(-nq // 2), 1, nk)) < 0.15, 2, axis=2)
    blocks = np.logical_xor.accumulate(blocks, axis=-1)
    blocks ^= rng.random(blocks.shape) < 0.05
    return blocks.reshape(heads, -1, nk)[:, :nq]


@pytest.mark.parametrize("nk", [33, 1100])
@pytest.mark.parametrize("sides", ["kv", "q and kv"])
def test_runs_of_ragged_blocks(run: Runner, sides: str, nk: int) -> None:
    """More than 32 words of the bitmap; tiles of a part of a query block, of one and of two."""
    rng = np.random.default_rng(nk)
    mask = ragged(in_runs(rng, 2, 9, nk), rng, random_sizes, 1 if nk > 33 else 8, sides)
    blocks = mask.to_dense()[0]
    served: set[tuple[str, int]] = set()
    for q_side in Q_SIDES:
        for tile in ((32, 64), (64, 64), (128, 192)):
            for slot in (8, 16, 64):
                if why_not(Mapping(q_side, "pack"), mask, *tile) is None:
                    check(run, Request(mask, q_side, tile, slot=slot), blocks)
                    served.add((q_side, tile[0]))
    assert {("retain", 64), ("split", 32), ("share", 128)} <= served


@pytest.mark.parametrize("nominal", [64, 48, 36])
def test_halves_of_any_size(run: Runner, nominal: int) -> None:
    """Per head, absent ones among them, of an odd number; a tile has two, also where three fit."""
    rng = np.random.default_rng(nominal)
    for nq, tile, heads in ((1, (128, 192), 1), (2, (128, 192), 3), (13, (128, 192), 3)):
        sizes = random_sizes(rng, (heads, nq), nominal, 1)
        kv = random_sizes(rng, (heads, 40), 64, 1)
        blocks = random_blocks(nq, heads, nq, 40)
        mask = BlockMask.from_dense(blocks, (nominal, 64), q_block_sizes=sizes, kv_block_sizes=kv)
        request = Request(mask, "share", tile)
        assert request.build().joined == 2
        assert request.planned()[0].tile_halves is not None
        check(run, request, mask.to_dense()[0])
        device = DeviceModel(sms=2, ctas_per_sm=1, l2_bytes=1 << 30)
        check(run, replace(request, batch=2, device=device), mask.to_dense()[0])


def test_ragged_lists_are_split_and_merged(run: Runner) -> None:
    """Absent blocks count for nothing where tiles are cut, and where the last round is."""
    rng = np.random.default_rng(3)
    cut = set()
    for _ in range(6):
        blocks = rng.random((2, 30, 300)) < rng.choice([0.02, 0.9], (2, 30, 1))
        mask = ragged(blocks, rng, random_sizes, 1, "q and kv")
        device = DeviceModel(int(rng.integers(8, 160)), 1, int(rng.choice([0, 1 << 30])))
        for q_side, tile in (("retain", (64, 64)), ("split", (16, 64))):
            request = Request(mask, q_side, tile, batch=2, q_heads=2, device=device)
            tasks = check(run, request, mask.to_dense()[0])
            cut |= set(np.diff(tasks.merge_offsets).tolist())
    assert cut >= {2, 3}


def test_the_last_round_is_not_cut_where_few_blocks_are_present(run: Runner) -> None:
    """Six blocks, of which three are absent, on four CTAs: all present ones start at once."""
    blocks = np.zeros((1, 6, 200), np.bool_)
    for row, count in zip(blocks[0], [200, 30, 200, 20, 7, 9], strict=True):
        row[:count] = True
    sizes = np.array([64, 0, 30, 64, 0, 0])
    mask = BlockMask.from_dense(blocks, (64, 64), q_block_sizes=sizes)
    device = DeviceModel(sms=4, ctas_per_sm=1, l2_bytes=1 << 20)
    request = Request(mask, "retain", (64, 64), device=device)
    tasks = check(run, request, mask.to_dense()[0])
    assert len(tasks.merge_tile) == 2
    assert (tasks.task_slot == -1).sum() == 1


def test_room_for_ragged_blocks_is_enough() -> None:
    rng = np.random.default_rng(4)
    for step in (1, 8):
        mask = ragged(np.ones((2, 9, 70), np.bool_), rng, random_sizes, step, "q and kv")
        for slot in (8, 32, 64):
            for q_side, tile in (("retain", (64, 64)), ("split", (32, 64)), ("share", (128, 64))):
                if why_not(Mapping(q_side, "pack"), mask, *tile) is None:
                    request = Request(mask, q_side, tile, slot=slot)
                    made, (tiles, _) = request.build(), request.planned()
                    assert len(tiles) <= made.tiles
                    fragments = len(tiles.frag_start)
                    assert fragments <= made.most_fragments
                    assert fragments <= made.fragments_of(mask.nnz)


def random_request(seed: int) -> tuple[Request, Blocks]:
    rng = np.random.default_rng(seed)

    def one(*choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    batch, kv_heads, q_per_kv = one(1, 2), one(1, 2, 3), one(1, 2)
    q_heads = kv_heads * q_per_kv
    mask_batch, mask_heads = one(1, batch), one(1, q_heads)
    blocks = one(random_blocks, video_blocks)(
        seed, mask_batch * mask_heads, int(rng.integers(1, 20)), int(rng.integers(1, 500))
    )
    if one(True, False, False):
        blocks &= rng.random(blocks.shape[:2])[..., None] < 0.1  # a few rows with all the work
    mask = masked(blocks, (64, 32), (int(rng.integers(64)), int(rng.integers(32))), mask_batch)
    device = DeviceModel(one(1, 3, 8, 40), one(1, 2), one(0, 1 << 20, 3 << 20, 1 << 30))
    return Request(
        mask,
        one("retain", "merge", "share"),
        one((128, 64), (128, 64), (192, 192)),
        batch=batch,
        q_heads=q_heads,
        kv_heads=kv_heads,
        device=device,
    ), blocks


def test_tasks_of_any_request(run: Runner) -> None:
    """Groups, broadcast heads, split-K, last rounds that are cut and that are not."""
    split, last_cut, last_whole = 0, 0, 0
    for seed in range(80):
        request, blocks = random_request(seed)
        tasks = check(run, request, blocks)
        split += bool((np.diff(tasks.merge_offsets) > 4).any())
        # Parts of the last round come last, though those of a tile are no longer than its half.
        tile = tasks.task_tile[-1] if len(tasks) else -1
        cut = len(tasks) > 0 and tasks.task_slot[-1] >= 0
        last_cut += bool(cut and (tasks.task_tile[-2:] == tile).all())
        last_whole += not cut and len(tasks) % request.device.capacity != 0
    assert min(split, last_cut, last_whole) >= 5, (split, last_cut, last_whole)


def of_lengths(lengths: list[int], sms: int) -> tuple[Request, Blocks]:
    """Tiles of so many steps each, on so many CTAs."""
    blocks = np.arange(max(1, *lengths)) < np.array(lengths)[None, :, None]
    device = DeviceModel(sms=sms, ctas_per_sm=1, l2_bytes=1 << 20)
    return Request(masked(blocks, (64, 64)), "retain", (64, 64), device=device), blocks


@pytest.mark.parametrize(
    ("sms", "lengths", "added", "merges"),
    [
        # One tile has over all but a share, and three quarters of a round are cut in quarters.
        (4, [700] + [32] * 7, 3 + 9, 4),
        (8, [3200] + [32] * 14, 7 + 18, 7),
        # Few less than two thirds of the CTAs find tiles of over a share and a half.
        (4, [152] * 2 + [32] * 3, 2 + 9, 5),
        (8, [1160] * 5 + [32] * 12, 5 + 18, 11),
    ],
)
def test_room_is_enough_for_the_most_parts(
    run: Runner, sms: int, lengths: list[int], added: int, merges: int
) -> None:
    request, blocks = of_lengths(lengths, sms)
    tasks = check(run, request, blocks)
    assert (len(tasks) - len(lengths), len(tasks.merge_tile)) == (added, merges)
    made = request.build()
    assert added + made.merge_capacity <= made.slot_capacity


def test_tiles_that_have_a_cta_each(run: Runner) -> None:
    """Parts that all find one, that wait for a second round, and none."""
    one_round = two_rounds = whole = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        heads, count = rng.choice([1, 1, 3]), int(rng.integers(1, 70))
        long = rng.random(count) < rng.choice([0.03, 0.3, 1.0])
        lengths = np.where(long, rng.integers(0, 400, count), rng.integers(0, 40, count)).tolist()
        sms = int(heads * count * rng.choice([1.0, 1.1, 2.0, 4.0]))
        per_sm = int(rng.choice([1, 3]))
        device = DeviceModel(sms=-(-sms // per_sm), ctas_per_sm=per_sm, l2_bytes=1 << 20)
        request, blocks = of_lengths(lengths, sms)
        tasks = check(run, replace(request, q_heads=int(heads), device=device), blocks)
        one_round += tasks.slots > 0 and len(tasks) <= device.capacity
        two_rounds += tasks.slots > 0 and len(tasks) > device.capacity
        whole += tasks.slots == 0
    assert min(one_round, two_rounds, whole) >= 5, (one_round, two_rounds, whole)


@st.composite
def lengths_and_ctas(draw: st.DrawFn) -> tuple[list[int], int]:
    """Tiles of a few lengths, long and short, for up to five rounds."""
    sms = draw(st.integers(1, 12))
    length = st.one_of(st.integers(0, 48), st.integers(0, 600))
    count = st.integers(1, 2 * sms)
    runs = draw(st.lists(st.tuples(length, count), min_size=1, max_size=4))
    return [steps for steps, n in runs for _ in range(n)][: 5 * sms], sms


@given(lengths_and_ctas())
def test_room_is_enough_for_any_cuts(drawn: tuple[list[int], int]) -> None:
    lengths, sms = drawn
    request, _ = of_lengths(lengths, sms)
    _, tasks = request.planned()
    made, merges = request.build(), len(tasks.merge_tile)
    assert len(tasks) <= made.task_capacity
    assert merges <= made.merge_capacity
    assert tasks.slots == len(tasks) - len(lengths) + merges <= made.slot_capacity


def test_steps_beyond_32_bits_do_not_wrap(run: Runner) -> None:
    """One list that many heads share: a CTA's share is more steps than its tile may have."""
    blocks = np.ones((1, 1, 50_000), np.bool_)
    device = DeviceModel(sms=1, ctas_per_sm=1, l2_bytes=1 << 30)
    for heads in (14_400, 43_200, 86_400):
        mask = masked(blocks, (64, 64))
        request = Request(mask, "retain", (64, 64), q_heads=heads, device=device, kv_bytes=1)
        assert check(run, request, blocks).slots == 0


@pytest.mark.parametrize("share_of_room", [0.0, 0.3, 0.99])
@pytest.mark.parametrize("q_side", ["retain", "share"])
def test_lists_that_do_not_fit_are_cut_off_and_flagged(
    run: Runner, q_side: str, share_of_room: float
) -> None:
    blocks = random_blocks(9, 2, 9, 70)
    request = Request(masked(blocks, (32, 32)), q_side, (64, 64))
    tiles, _ = request.planned()
    room = int(len(tiles.frag_start) * share_of_room)
    got = run(request.build(room), blocks)
    assert np.array_equal(got["frag_offsets"], tiles.frag_offsets)
    assert np.array_equal(got["frags"], packed_fragments(tiles)[:room])
    assert got["counts"].tolist() == [len(tiles.frag_start), 0, 0, 0, 4, 0, 0, STAMP]
    assert (got["tasks"].view(np.uint8) == 0xFF).all()
    exact = run(request.build(len(tiles.frag_start)), blocks)
    assert exact["counts"][ERRORS] == 0
    check_lists(exact, tiles)


@dataclass(frozen=True)
class Tight(TileBuild):
    """A build whose outputs are smaller than they must be."""

    tasks: int = 1 << 20
    merges: int = 1 << 20

    @property
    def task_capacity(self) -> int:
        return min(self.tasks, super().task_capacity)

    @property
    def merge_capacity(self) -> int:
        return min(self.merges, super().merge_capacity)


def test_tasks_that_do_not_fit_are_flagged(run: Runner) -> None:
    blocks = random_blocks(3, 1, 14, 150)
    request = Request(masked(blocks, (64, 32)), "retain", (64, 64), kv_bytes=1)
    tiles, tasks = request.planned()
    merges, extra = len(tasks.merge_tile), len(tasks) - len(tiles)
    assert merges > 2
    assert extra > 2
    sizes = {name: getattr(request.build(), name) for name in TileBuild.__dataclass_fields__}
    for tight in (
        {"tasks": len(tasks) - 1},
        {"tasks": len(tiles)},
        {"tasks": 0},
        {"merges": merges - 1},
        {"merges": 0},
    ):
        got = run(Tight(**sizes, **tight), blocks)
        check_lists(got, tiles)
        assert got["counts"].tolist() == [len(tiles.frag_start), 0, 0, 0, 4, 0, 0, STAMP]
    check_tasks(run(Tight(**sizes, tasks=len(tasks), merges=merges), blocks), tiles, tasks)


def test_parts_of_the_last_round_that_do_not_fit_are_flagged(run: Runner) -> None:
    request, blocks = last_round(18)
    sizes = {name: getattr(request.build(), name) for name in TileBuild.__dataclass_fields__}
    got = run(Tight(**sizes, tasks=11), blocks)
    assert got["counts"].tolist() == [9 * 40 + 18 + 40, 0, 0, 0, 4, 0, 0, STAMP]
    check_tasks(run(Tight(**sizes, tasks=12), blocks), *request.planned())


@pytest.mark.parametrize("kernel", [*TILE_KERNELS, *[f"{name}_ragged" for name in TILE_KERNELS]])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_kernels_compile_without_spills(arch: str, kernel: str) -> None:
    path = default_cache().build(builder(arch, kernel))
    assert json.loads(path.with_name("meta.json").read_text())["problems"] == []


def test_no_result_depends_on_the_order_of_threads(run: Runner) -> None:
    request, blocks = random_request(4)
    first, *others = [run(request.build(), blocks) for _ in range(4)]
    for other in others:
        for name in set(first) - {"turns", "pair_slots"}:
            assert first[name].tobytes() == other[name].tobytes(), name


def test_room_for_every_mask_is_enough_and_not_too_much() -> None:
    full = np.ones((2, 9, 70), np.bool_)
    for q_side, block in (("retain", 64), ("split", 96), ("merge", 32), ("share", 32)):
        request = Request(masked(full, (block, 48), (7, 40)), q_side, (64, 64))
        tiles, _ = request.planned()
        padding = 9 * len(tiles) if q_side == "share" else 0
        assert request.build().most_fragments <= len(tiles.frag_start) + padding
        assert request.build().tiles == len(tiles)


def test_a_number_of_blocks_bounds_the_fragments() -> None:
    for seed in range(40):
        request, blocks = random_request(seed)
        tiles, _ = request.planned()
        bound = request.build().fragments_of(int(blocks.sum()))
        assert len(tiles.frag_start) <= bound <= request.build().most_fragments
    wide = Request(masked(blocks[:1], (96, 48)), "split", (64, 64), slot=16)
    tiles, _ = wide.planned()
    assert wide.build().fragments_of(int(blocks[:1].sum())) == len(tiles.frag_start)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_side": "regroup"}, "`q_side`"),
        ({"shape": TileShape(256, 64, 64)}, "`shape.q`"),
        ({"device": DeviceModel(sms=4097, ctas_per_sm=1, l2_bytes=0)}, "`device.capacity`"),
        ({"q_heads": 1 << 29, "sq": 1 << 10}, "tiles of all query heads"),
    ],
)
def test_sizes_beyond_the_kernels_are_an_error(change: dict[str, Any], message: str) -> None:
    made = Request(masked(np.ones((1, 4, 4), np.bool_), (64, 64)), "retain", (64, 64)).build()
    with pytest.raises(ValueError, match=message):
        replace(made, **change)


@pytest.mark.parametrize(
    ("sq", "heads", "block", "always"),
    [
        (49_152, 32, 128, True),
        (768 * 64, 48, 64, True),
        (57_600, 40, 64, True),
        (57_600, 8, 16, True),
        (115_200, 40, 64, False),
    ],
)
def test_lists_of_models_have_room_for_every_mask(
    sq: int, heads: int, block: int, always: bool
) -> None:
    made = TileBuild(
        "retain" if block == 128 else "share",
        TileShape(128, 192, min(64, block)),
        (block, block),
        batch=1,
        q_heads=heads,
        kv_heads=heads,
        sq=sq,
        skv=sq,
        mask_batch=1,
        mask_heads=heads,
        kv_bytes_per_head=4 * sq * 128,
        device=DeviceModel(sms=132, ctas_per_sm=1, l2_bytes=32 << 20),
        frag_capacity=0,
    )
    blocks = heads * made.nq * made.nk
    for counted in (blocks, blocks // 10, 0):
        assert made.fragments_of(counted) <= room.lists_room(made, counted) <= made.most_fragments
    given = room.lists_room(made, None)
    assert given == made.most_fragments if always else 8 * given == room.LIST_BYTES


@pytest.mark.parametrize("count", [1, 7, 8, 15, 16, 17, 1000, 2**20 + 1, 2**33 - 5])
def test_room_is_rounded_up_by_an_eighth_at_most(count: int) -> None:
    assert count <= room.rounded(count) <= count + count // 8
    assert room.rounded(room.rounded(count)) == room.rounded(count)
