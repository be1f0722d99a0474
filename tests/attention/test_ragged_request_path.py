"""Blocks with sizes of their own, from a mask in GPU memory to its attention, without the host.

Kernels run on the CPU's emulator, through the front door, and are held against float64.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tessera_cupy import BlockMask, block_sparse_attention, make_plan
from tessera_cupy.kernels import device_build, launch
from tessera_cupy.kernels.fetch import fetch
from tests.attention.test_request_path import BUILDERS, FORMS, RETAIN, package_calls
from tests.emulator.emulator import compiler, drawn_seed
from tests.emulator.gpu import EmulatedGpu, Stream

pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++ to build the emulator with")

SPLIT = "attend_mma/q64k64/split-pack/longest+split"
SHARE = "attend_mma/q128k128/share-pack/longest+split"
MERGE = "attend_mma/q128k64/merge-pack/longest+split"
WGMMA = "attend_wgmma/q128k192/retain-pack/longest+split"
WGMMA_SHARE = "attend_wgmma/q128k192/share-pack/longest+split"
RAGGED = ["ragged_blocks", *[f"{name}_ragged" for name in BUILDERS]]
#: Cubes of 4 x 4 x 4 in 5 x 6 x 7 tokens, in raster order.
CUBES = [t * h * w for t in (4, 1) for h in (4, 2) for w in (4, 3)]

Sizes = NDArray[Any]


@pytest.fixture
def gpu(kernel_cache: Path) -> Iterator[EmulatedGpu]:
    """A new emulated GPU in CuPy's place."""
    made = EmulatedGpu(kernel_cache.parent / "emulated-kernels", drawn_seed())
    with made.here():
        yield made


@dataclass
class Request:
    """A mask in GPU memory, the same on the host, and inputs."""

    gpu: EmulatedGpu
    mask: BlockMask
    host: BlockMask
    case: Any
    arrays: list[Any]
    operands: list[Any]

    def check(self, regime: str) -> list[str]:
        """Run the front door and compare; the kernels that ran."""
        before = len(self.gpu.launched)
        out, lse = block_sparse_attention(*self.arrays, self.mask, regime=regime, return_lse=True)
        self.case.check_kernel(out.get(), lse.get(), f"{regime} seed {self.gpu.seed}")
        return self.gpu.launched[before:]


@pytest.fixture
def request_of(gpu: EmulatedGpu, case: Any, rng: Any) -> Callable[..., Request]:
    """A request with a random mask; sizes of None are of blocks of 64."""

    def make(
        q: Any = None,
        kv: Any = None,
        *,
        form: str = "dense",
        where: str = "host",
        axes: tuple[int, int] = (1, 2),
        block: int = 64,
        blocks: Any = None,
        **given: Any,
    ) -> Request:
        host_sizes = [None if s is None else np.asarray(s) for s in (q, kv)]
        if blocks is None:
            nq, nk = (
                n if s is None else s.shape[-1] for s, n in zip(host_sizes, (4, 9), strict=True)
            )
            blocks = rng.random((*axes, nq, nk)) < rng.choice([0.1, 0.5, 0.9], (*axes, nq, 1))
            blocks[:, :, 1] = False  # a row without keys
        shape = [
            block * n - 5 if s is None else int(s.reshape(-1, n)[0].sum())
            for s, n in zip(host_sizes, blocks.shape[2:], strict=True)
        ]
        names = ("q_block_sizes", "kv_block_sizes")
        sizes = {n: s for n, s in zip(names, host_sizes, strict=True) if s is not None}
        build, arrays, then = FORMS[form](gpu, blocks, rng)
        operands = []
        passed = dict(sizes)
        if where == "gpu":
            for name, values in sizes.items():
                kind = rng.choice([np.int32, np.int64])
                passed[name] = gpu.array(values.astype(kind), writable=True)
                operands.append(passed[name])
        heads = dict(zip(("batch", "heads"), blocks.shape, strict=False)) if form == "csr" else {}
        mask = build(*arrays, *then, (block, block), shape, **heads, **passed)
        host = BlockMask.from_dense(blocks, (block, block), shape, **sizes)
        made = case(host, rng=rng, **({"dtype": "float16", "dim": 64} | given))
        return Request(gpu, mask, host, made, [gpu.array(x) for x in made.arrays], operands)

    return make


def random_sizes(rng: Any, shape: tuple[int, ...], step: int = 1) -> Sizes:
    """From 0 to 64, with the same sum in every head."""
    one = rng.integers(0, 64 // step + 1, shape[-1]) * step
    one[rng.permutation(shape[-1])[:2]] = 0, 64
    heads = [rng.permutation(one) for _ in range(int(np.prod(shape[:-1])))]
    return np.array(heads).reshape(shape)


@pytest.mark.parametrize("where", ["host", "gpu"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sides", ["q", "kv", "q and kv"])
def test_every_format_and_side(
    request_of: Any, rng: Any, form: str, where: str, sides: str
) -> None:
    q = random_sizes(rng, (6,)) if "q" in sides else None
    kv = random_sizes(rng, (37,)) if "kv" in sides else None
    made = request_of(q, kv, form=form, where=where)
    ran = made.check(RETAIN)
    family = "dense" if form == "bytes" else form
    assert ran[:5] == [f"mask_state_{family}", *RAGGED]
    assert (made.gpu.copied, EmulatedGpu.waits) == (0, 0)


@pytest.mark.parametrize("where", ["host", "gpu"])
@pytest.mark.parametrize("regime", [RETAIN, SPLIT, WGMMA])
def test_cubes_that_an_edge_cuts_and_text_behind(request_of: Any, regime: str, where: str) -> None:
    """Where tiles are to be split, cubes are twice as long."""
    scale = 2 if regime == SPLIT else 1
    sizes = scale * np.array([*CUBES, 64, 13])
    made = request_of(sizes, sizes, where=where, block=scale * 64)
    assert made.check(regime)[1:5] == RAGGED
    assert (made.gpu.copied, EmulatedGpu.waits) == (0, 0)


@pytest.mark.parametrize(
    ("regime", "q"),
    [
        *[(regime, None) for regime in (SHARE, MERGE, WGMMA_SHARE)],
        (MERGE, [64, 32, 0, 16, 64, 8, 0, 20]),
        (SHARE, [32, 32, 0, 16, 24, 8, 0, 20]),
        (WGMMA_SHARE, [32, 32, 0, 16, 24, 8, 0, 20]),
    ],
)
def test_joined_query_blocks(request_of: Any, rng: Any, regime: str, q: Any) -> None:
    """Query blocks have to begin at multiples of 8, which the host knows of its own sizes."""
    for where in ("host", "gpu") if q is None else ("host",):
        made = request_of(q, random_sizes(rng, (40,)), where=where)
        assert made.check(regime)[1:5] == RAGGED
        assert made.gpu.copied == 0


@pytest.mark.parametrize("where", ["host", "gpu"])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("nq", [2, 6, 9])
@pytest.mark.parametrize("dim", [64, 128])
def test_two_query_blocks_are_the_halves_of_a_tile(
    request_of: Any, rng: Any, where: str, heads: int, nq: int, dim: int
) -> None:
    """Blocks of any size, absent ones among them, begin anywhere."""
    q, kv = random_sizes(rng, (heads, nq)), random_sizes(rng, (heads, 40))
    made = request_of(q, kv, where=where, axes=(1, heads), dim=dim)
    ran = made.check(WGMMA_SHARE)
    assert ran[1:5] == RAGGED
    assert ran[5].startswith("attend_wgmma")
    assert (made.gpu.copied, EmulatedGpu.waits) == (0, 0)


@pytest.mark.parametrize("where", ["host", "gpu"])
def test_halves_of_long_lists_are_cut_and_merged(request_of: Any, rng: Any, where: str) -> None:
    blocks = np.ones((1, 2, 6, 200), bool)
    blocks[0, 0, 2] = False
    blocks[0, 1] = rng.random((6, 200)) < 0.5
    q = np.array([[30, 0, 64, 7, 13, 0], [0, 0, 7, 13, 30, 64]])
    made = request_of(q, random_sizes(rng, (2, 200)), blocks=blocks, where=where)
    plan = make_plan(made.mask, *made.arrays, regime=WGMMA_SHARE)
    assert plan.tiles().tile_halves.tolist() == [30, 64, 13, 7, 30]
    # On three CTAs the shortest two, of two halves each, are the last round.
    assert plan.tasks().merge_tile.tolist() == [3, 4]
    assert plan.tasks().slots == 6
    made.check(WGMMA_SHARE)


def test_halves_follow_the_nominal_block_where_sizes_are_smaller(request_of: Any, rng: Any) -> None:
    """The snapshot, in which four blocks would fit into a tile, is planned as the GPU does."""
    made = request_of([5, 30, 0, 17, 2], random_sizes(rng, (9,)), where="gpu", axes=(1, 1))
    plan = make_plan(made.mask, *made.arrays, regime=WGMMA_SHARE)
    assert plan.tiles().tile_halves.tolist() == [5, 0, 2]
    assert plan.tiles().tile_q.tolist() == [[0, 35], [35, 17], [52, 2]]
    made.check(WGMMA_SHARE)
    plan.run(*made.arrays)
    (on_gpu,) = plan._prepared._on_device.values()
    counts = fetch(on_gpu.counts, 8).wait()
    assert counts[:2].tolist() == [len(plan.tiles().frag_start), len(plan.tasks())]


@pytest.mark.parametrize("where", ["host", "gpu"])
@pytest.mark.parametrize(
    ("mask_axes", "size_axes"), [((2, 4), (2, 4)), ((1, 1), (4,)), ((2, 4), ()), ((1, 4), (2, 1))]
)
def test_sizes_per_head(
    request_of: Any, rng: Any, mask_axes: Any, size_axes: Any, where: str
) -> None:
    q, kv = random_sizes(rng, (*size_axes, 5)), random_sizes(rng, (*size_axes, 34))
    made = request_of(q, kv, axes=mask_axes, where=where, batch=2, kv_heads=2, shared=2)
    assert (made.mask.batch, made.mask.heads) == (made.host.batch, made.host.heads)
    assert made.check(RETAIN)[1:5] == RAGGED
    np.testing.assert_array_equal(made.mask.to_dense(), made.host.to_dense())


def test_long_lists_are_cut_and_merged(request_of: Any, rng: Any) -> None:
    blocks = rng.random((1, 2, 4, 200)) < 0.05
    blocks[0, :, 0] = rng.random((2, 200)) < 0.9
    blocks[0, 0, 2] = False
    made = request_of([30, 0, 64, 7], random_sizes(rng, (200,)), blocks=blocks)
    plan = make_plan(made.mask, *made.arrays, regime=RETAIN)
    assert plan.tasks().slots > 0
    made.check(RETAIN)


@pytest.mark.parametrize("where", ["host", "gpu"])
def test_auto_counts_present_blocks(request_of: Any, rng: Any, where: str) -> None:
    q, kv = random_sizes(rng, (5,)), random_sizes(rng, (40,))
    made = request_of(q, kv, where=where)
    ran = made.check("auto")
    assert ran[:2] == ["mask_state_dense", "ragged_blocks"]
    if ran[2] == "tile_counts_ragged":
        assert (made.gpu.copied, EmulatedGpu.waits) == (64, 1)
    found = device_build.mask_state(made.mask.source, "sm_90a", 3).summary()
    present = np.prod([np.count_nonzero(s, axis=-1) for s in (q, kv)], axis=0)
    assert (found.nnz, found.blocks) == (made.host.nnz, 2 * present)
    assert found.run_coverage == pytest.approx(made.host.run_coverage())


def test_what_the_host_asks_is_that_of_the_same_mask_on_the_host(request_of: Any, rng: Any) -> None:
    for where in ("host", "gpu"):
        made = request_of(random_sizes(rng, (5,)), random_sizes(rng, (2, 9)), where=where)
        mask, host = made.mask, made.host
        assert mask.source is not None
        assert (mask.num_blocks, mask.shape, mask.ragged) == (host.num_blocks, host.shape, True)
        before = made.gpu.copied
        assert (mask.max_block, mask.block_size) == ((64, 64), (64, 64))
        assert made.gpu.copied == before
        mask.check()
        assert (mask.nnz, mask.active_pairs()) == (host.nnz, host.active_pairs())
        assert mask.density() == host.density()
        assert repr(mask) == repr(host)
        np.testing.assert_array_equal(mask.q_block_sizes, host.q_block_sizes)
        np.testing.assert_array_equal(mask.kv_starts(), host.kv_starts())
        np.testing.assert_array_equal(mask.to_tokens(), host.to_tokens())
        copied = pickle.loads(pickle.dumps(mask))
        assert copied.source is None
        np.testing.assert_array_equal(copied.to_tokens(), host.to_tokens())


@pytest.mark.parametrize("where", ["host", "gpu"])
def test_a_plan_s_arrays_are_those_that_the_gpu_makes(
    request_of: Any, rng: Any, where: str
) -> None:
    made = request_of(random_sizes(rng, (5,)), random_sizes(rng, (30,)), where=where)
    plan = make_plan(made.mask, *made.arrays, regime=RETAIN)
    plan.run(*made.arrays)
    (on_gpu,) = plan._prepared._on_device.values()
    tiles, tasks = plan.tiles(), plan.tasks()
    assert 1 << on_gpu.slot_log2 == tiles.shape.slot
    counts = fetch(on_gpu.counts, 8).wait()
    assert counts[:2].tolist() == [len(tiles.frag_start), len(tasks)]
    plan.check()


@pytest.mark.parametrize(("where", "slot"), [("host", 32), ("gpu", 16)])
def test_known_sizes_choose_the_columns_of_a_fragment(
    request_of: Any, where: str, slot: int
) -> None:
    """Cubes of 64 of which an edge cuts every twelfth to 16: fragments of 32 pad a 45th."""
    sizes = [*[64] * 11, 16] * 2
    made = request_of(sizes, sizes, where=where, axes=(1, 1))
    plan = make_plan(made.mask, *made.arrays, regime=WGMMA_SHARE)
    plan.run(*made.arrays)
    (on_gpu,) = plan._prepared._on_device.values()
    assert 1 << on_gpu.slot_log2 == plan.tiles().shape.slot == slot
    made.check(WGMMA_SHARE)


def test_known_sizes_are_uploaded_once(request_of: Any, rng: Any) -> None:
    sizes = random_sizes(rng, (9,))
    made = request_of(None, sizes)
    (blocks,) = made.mask.source.arrays
    made.check(RETAIN)
    known = made.mask.source.layout.ragged.sizes[1]
    (before,) = known.copies.values()
    again = BlockMask.from_dense(
        blocks, (64, 64), made.mask.shape, kv_block_sizes=sizes.astype(np.int32).copy().tolist()
    )
    block_sparse_attention(*made.arrays, again, regime=RETAIN)
    other = BlockMask.from_dense(blocks, (64, 64), made.mask.shape, kv_block_sizes=sizes.copy())
    assert other.source.layout is again.source.layout
    assert list(known.copies.values()) == [before]
    sizes[:] = 0  # a snapshot
    made.check(RETAIN)


@pytest.mark.parametrize("regime", [RETAIN, SPLIT, WGMMA_SHARE, "auto"])
def test_replays_follow_the_sizes(request_of: Any, rng: Any, regime: str) -> None:
    scale = 2 if regime == SPLIT else 1
    q, kv = scale * random_sizes(rng, (5,)), random_sizes(rng, (30,))
    made = request_of(q, kv, where="gpu", block=scale * 64)
    gpu = made.gpu
    out = gpu.empty(made.case.q.shape, made.case.q.dtype)
    run = partial(block_sparse_attention, *made.arrays, made.mask, regime=regime, out=out)
    with Stream(32) as stream:
        run()
        if not set(RAGGED) <= set(gpu.launched):
            pytest.fail("the GPU did not make the plan")
        stream.begin_capture()
        run()
        replay = stream.end_capture()
    for _ in range(3):
        rng.shuffle(q)
        rng.shuffle(kv)
        for operand, values in zip(made.operands, (q, kv), strict=True):
            operand.set(values)
        (blocks,) = made.mask.source.arrays
        host = BlockMask.from_dense(
            blocks.get(), made.mask.block_size, made.mask.shape, q_block_sizes=q, kv_block_sizes=kv
        )
        expected = type(made.case)(host, *made.case.arrays, made.case.layout, made.case.sm_scale)
        out.set(np.nan)
        copied = gpu.copied
        replay()
        assert gpu.copied == copied
        expected.check_kernel(out.get())
        made.mask.refresh()
        made.case = expected
        made.check(regime)
        assert made.mask.nnz == host.nnz


def test_the_first_upload_is_refused_in_a_capture(request_of: Any) -> None:
    made = request_of(None, [64, 20, 11])
    block_sparse_attention(*made.arrays, made.mask, regime=RETAIN)
    (blocks,) = made.mask.source.arrays
    other = BlockMask.from_dense(blocks, (64, 64), made.mask.shape, kv_block_sizes=[11, 64, 20])
    with Stream(32) as stream:
        stream.begin_capture()
        with pytest.raises(ValueError, match=r"`stream`.*run the plan once before capturing"):
            block_sparse_attention(*made.arrays, other, regime=RETAIN)
        stream.end_capture()


# Sizes that are none


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ([0, -3, 10, 64], "block size out of range; block sizes that do not sum"),
        ([64, 65, 1, 0], "block size out of range"),
        ([1, 0, 0, 2], "block sizes that do not sum to the tokens"),
        ([64, 64, 64, 64], "block sizes that do not sum to the tokens"),
        ([-(2**31), 2**31 - 1, 64, 2**31 - 1], "block size out of range"),
    ],
)
def test_bad_sizes_are_reported_and_never_out_of_bounds(
    request_of: Any, side: int, change: list[int], words: str
) -> None:
    given = [64, 20, 0, 46]
    sides = [None, None]
    sides[side] = given
    made = request_of(*sides, where="gpu", blocks=np.ones((1, 2, 4, 4), bool))
    made.check(RETAIN)
    made.operands[0].set(np.array(change))
    made.mask.refresh()
    plan = make_plan(made.mask, *made.arrays, regime=RETAIN)
    out = plan.run(*made.arrays).get().astype(float)
    if side == 0:
        # Rows that the sizes reach are those of all keys; the others are NaN.
        covered = min(130, int(np.clip(change, 0, 64).sum()))
        assert np.isfinite(out[:, :, :covered]).all()
        assert np.isnan(out[:, :, covered:]).all()
    with pytest.raises(ValueError, match=f"`mask`.*{words}"):
        plan.check()
    with pytest.raises(ValueError, match=f"`mask`.*{words}"):
        block_sparse_attention(*made.arrays, made.mask)
    for ask in (made.mask.check, made.mask.density, plan.tiles):
        with pytest.raises(ValueError, match=r"`(q|kv)_block_sizes`.*Fix"):
            ask()


def test_geometries_that_cannot_be_are_refused_when_the_mask_is_built(
    gpu: EmulatedGpu, rng: Any
) -> None:
    blocks = gpu.array(np.ones((1, 2, 3, 4), bool))
    sizes = gpu.array(np.array([64, 20, 0, 46], np.int32))
    with pytest.raises(ValueError, match=r"`kv_block_sizes`.*sum"):
        BlockMask.from_dense(blocks, (64, 64), (192, 257), kv_block_sizes=sizes)
    with pytest.raises(ValueError, match=r"`kv_block_sizes`.*one size for each"):
        BlockMask.from_dense(blocks, (64, 64), (192, 130), kv_block_sizes=sizes[:3])
    three = gpu.array(np.tile([64, 20, 0, 46], (3, 1)).astype(np.int32))
    with pytest.raises(ValueError, match=r"`kv_block_sizes`.*1 or 2 along heads"):
        BlockMask.from_dense(blocks, (64, 64), (192, 130), kv_block_sizes=three)
    with pytest.raises(ValueError, match="`shape`"):
        BlockMask.from_dense(blocks, (64, 64), (300, 130), kv_block_sizes=sizes)


def test_sizes_that_the_host_has_to_read_make_a_snapshot(gpu: EmulatedGpu) -> None:
    blocks = gpu.array(np.ones((1, 2, 3, 4), bool))
    sizes = np.array([64, 20, 0, 46])
    for given, shape in (
        (gpu.array(sizes), None),
        (gpu.array(sizes.astype(np.int16)), (192, 130)),
        (np.array([65, 20, 0, 45]), (192, 130)),
    ):
        mask = BlockMask.from_dense(blocks, (64, 64), shape, kv_block_sizes=given)
        assert mask.source is None
        assert mask.shape == (192, 130)
    # What the host knows needs no shape.
    mask = BlockMask.from_dense(blocks, (64, 64), kv_block_sizes=sizes)
    assert mask.source is not None
    assert mask.shape == (192, 130)


@pytest.mark.parametrize(
    ("regime", "block", "words"),
    [
        (MERGE, 64, "merge Q needs sizes of query blocks that the host knows"),
        (WGMMA_SHARE, 32, "share Q needs sizes of query blocks that the host knows"),
        (SHARE, 64, "attend_wgmma with tiles of 128 rows .* got attend_mma with 128"),
    ],
)
def test_joined_query_blocks_that_cannot_be(
    request_of: Any, regime: str, block: int, words: str
) -> None:
    made = request_of([32, 20, 8], None, where="gpu", block=block)
    with pytest.raises(ValueError, match=words):
        make_plan(made.mask, *made.arrays, regime=regime)
    assert made.gpu.copied == 0


@pytest.mark.parametrize("where", ["host", "gpu"])
def test_other_plans_of_ragged_blocks_are_the_host_s(request_of: Any, rng: Any, where: str) -> None:
    made = request_of(random_sizes(rng, (5,)), random_sizes(rng, (9,)), where=where)
    for regime in (
        "attend_mma/q64k64/retain-retain/longest+split",
        "attend_mma/q64k64/retain-pack/longest",
    ):
        assert not set(made.check(regime)) & set(RAGGED)


@pytest.mark.parametrize("where", ["host", "gpu"])
def test_a_request_is_few_calls_on_the_host(
    request_of: Any, rng: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """As of uniform blocks; sizes that come again are neither copied nor checked again."""
    sizes = random_sizes(rng, (37,))
    made = request_of(None, sizes, where=where)
    monkeypatch.setattr(sys.modules["cupy"], "empty", cache(made.gpu.empty))
    for module in (launch, device_build):  # the emulator calls the package too
        monkeypatch.setattr(module, "load", lambda config, device: lambda *_, **__: None)
    (blocks,) = made.mask.source.arrays
    given = sizes if where == "host" else made.operands[0]
    out = made.gpu.empty(made.case.q.shape, made.case.q.dtype)
    built, cold, warm = 0, 0, 0
    for _ in range(2):
        masks: list[BlockMask] = []
        build = partial(
            BlockMask.from_dense, blocks, (64, 64), made.mask.shape, kv_block_sizes=given
        )
        built = package_calls(lambda build=build, masks=masks: masks.append(build()))
        run = partial(block_sparse_attention, *made.arrays, *masks, regime=WGMMA, out=out)
        cold = package_calls(run)
        warm = package_calls(run)
    assert 5 < built <= 60
    assert 20 < cold <= 90
    assert 10 < warm <= 40
