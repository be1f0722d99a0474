"""Chipmunk's rule, against loops over rows and a tiny grid worked out by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera_cupy import KeySlices, reference
from tessera_cupy.interop import numpy_dtype
from tessera_cupy.sparsifiers import chipmunk, draws, fg_attn
from tessera_cupy.video import VideoGrid
from tests.emulator.emulator import compiler
from tests.emulator.gpu import EmulatedGpu, Stream

GRIDS = [
    VideoGrid(4, 6, 16),
    VideoGrid(5, 7, 9),  # a frame, a row and a column beyond the voxels
    VideoGrid(2, 8, 12, text_tokens=21),
    VideoGrid(4, 7, 8, text_tokens=21, text_first=True),
]

SPLIT = "attend_wgmma/q128k192/split-gather/longest+split"


def order_of(grid: VideoGrid) -> list[int]:
    """Voxels one by one, then the places that fill none: frames, rows, columns."""
    whole = (grid.t // 4 * 4, grid.h // 6 * 6, grid.w // 8 * 8)
    voxels: dict[Any, list[int]] = {}
    rest: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for t, y, x in np.ndindex(grid.t, grid.h, grid.w):
        token = grid.video_start + (t * grid.h + y) * grid.w + x
        past = [axis for axis, at in enumerate((t, y, x)) if at >= whole[axis]]
        if past:
            rest[past[0]].append(token)
        else:
            voxels.setdefault((t // 4, y // 6, x // 8), []).append(token)
    video = [token for _, tokens in sorted(voxels.items()) for token in tokens]
    video += rest[0] + rest[1] + rest[2]
    first = 0 if grid.text_first else grid.video_tokens
    text = list(range(first, first + grid.text_tokens))
    return text + video if grid.text_first else video + text


def drawn(grid: VideoGrid) -> Any:
    rng = np.random.default_rng(grid.tokens)
    return 2 * rng.standard_normal((2, 2, 2, grid.tokens, 16)).astype(np.float32)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("top", [0.05, 0.4])
def test_the_formula(grid: VideoGrid, top: float) -> None:
    q, k = drawn(grid)
    chosen = chipmunk.select(q, k, grid, top=top, random=0)
    assert isinstance(chosen.mask, KeySlices)
    order = order_of(grid)
    assert chosen.orders.host().tolist() == [[order]]
    np.testing.assert_array_equal(chosen.restore(chosen.permute(q)), q)
    text = {i for i, token in enumerate(order)
            if not 0 <= token - grid.video_start < grid.video_tokens}  # fmt: skip
    dense = chosen.mask.to_dense()
    for b, h in np.ndindex(2, 2):
        rows, keys = (x[b, h, order].astype(np.float64) for x in (q, k))
        for g in range(-(-grid.tokens // 192)):
            sums = np.zeros(grid.tokens)
            group = range(192 * g, min(192 * (g + 1), grid.tokens))
            for i in group:
                p = np.exp(keys @ rows[i] / 4)
                sums += p / p.sum()
            expected = np.zeros(grid.tokens, bool)
            sums = sums.astype(np.float16).astype(float)
            expected[np.argsort(-sums, kind="stable")[: round(top * grid.tokens)]] = True
            expected[list(text)] = True
            expected |= any(i in text for i in group)
            np.testing.assert_array_equal(dense[b, h, g], expected)


def test_by_hand() -> None:
    """One key that every row scores e times as high as the others, one that a third does more."""
    grid = VideoGrid(4, 6, 8)
    q, k = np.zeros((2, 1, 1, 192, 16), np.float32)
    q[..., 0] = 4
    q[0, 0, :64, 1] = 4
    k[0, 0, 9, 0] = 1
    k[0, 0, 100, 1] = 4  # exp(4) in 64 of 192 rows: a larger sum than exp(1) in all
    one, two = (
        chipmunk.select(q, k, grid, top=n / 192, random=0).mask.indices.tolist() for n in (1, 2)
    )
    assert (one, two) == ([100], [9, 100])


def test_random_keys() -> None:
    grid = VideoGrid(8, 12, 16)
    q, k = np.random.default_rng(0).standard_normal((2, 1, 3, grid.tokens, 8)).astype(np.float32)
    least = chipmunk.select(q, k, grid, random=0).mask.to_dense()
    first, again = (chipmunk.select(q, k, grid).mask.to_dense() for _ in range(2))
    np.testing.assert_array_equal(first, again)
    other = chipmunk.select(q, k, grid, seed=1).mask.to_dense()
    assert (first != other).any()
    for made in (first, other):
        assert made[least].all()
        more = made[~least].mean()
        assert 0.007 < more < 0.013  # 35,000 draws of 0.01: five standard deviations and more
        assert (made.any(axis=(0, 1, 2)) != least.any(axis=(0, 1, 2))).any()
    assert not np.array_equal(first[0, 0] & ~least[0, 0], first[0, 1] & ~least[0, 1])
    # The published density: 5% and one in a hundred of the others.
    assert first.mean() == pytest.approx(0.0595, abs=0.003)
    assert chipmunk.select(q, k, grid, top=0, random=1).mask.density() == 1
    assert chipmunk.select(q, k, grid, top=0, random=0).mask.nnz == 0


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_random_keys_are_those_of_head_group_and_key(grid: VideoGrid) -> None:
    q, k = drawn(grid)
    made = chipmunk.select(q, k, grid, random=0.2, seed=9).mask.to_dense()
    least = chipmunk.select(q, k, grid, random=0).mask.to_dense()
    for b, h in np.ndindex(2, 2):
        more = draws.drawn(2 * b + h, made.shape[2], grid.tokens, 0.2, 9)
        np.testing.assert_array_equal(made[b, h], least[b, h] | more)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_sums_that_are_given(grid: VideoGrid) -> None:
    q, k = drawn(grid)
    sums = chipmunk.column_sums(q, k, grid)
    assert (sums.dtype, sums.shape) == (np.float16, (2, 2, -(-grid.tokens // 192), grid.tokens))
    chosen = chipmunk.select(q, k, grid, top=0.3).mask.to_dense()
    for given in (sums, sums.astype(np.float64)):
        made = chipmunk.select_by(given, grid, top=0.3)
        np.testing.assert_array_equal(made.mask.to_dense(), chosen)
        np.testing.assert_array_equal(made.permute(q), chipmunk.select(q, k, grid).permute(q))
        made.check()


def test_sums_by_a_dense_steps_lse() -> None:
    from tessera_cupy import BlockMask, block_sparse_attention

    grid = GRIDS[3]
    q, k = drawn(grid)
    blocks = -(-grid.tokens // 64)
    mask = BlockMask.from_dense(
        np.ones((blocks, blocks), bool), (64, 64), (grid.tokens, grid.tokens)
    )
    _, lse = block_sparse_attention(q, k, k, mask, return_lse=True)
    own, given = chipmunk.column_sums(q, k, grid), chipmunk.column_sums(q, k, grid, lse=lse)
    np.testing.assert_allclose(given.astype(float), own.astype(float), rtol=2e-3, atol=1e-7)
    # Another step's: what all rows have twice of, all sums have twice of.
    half = chipmunk.column_sums(q, k, grid, lse=lse + np.log(np.float32(2)))
    np.testing.assert_allclose(2 * half.astype(float), own.astype(float), rtol=2e-3, atol=1e-6)
    assert chipmunk.column_sums(q, k, grid, lse=lse - 100).max() == 65504
    chosen = chipmunk.select(q, k, grid, lse=lse).mask.to_dense()
    np.testing.assert_array_equal(chosen, chipmunk.select_by(given, grid).mask.to_dense())


def test_attention_over_what_is_kept() -> None:
    from tessera_cupy import block_sparse_attention

    grid = GRIDS[1]
    q, k = drawn(grid)
    chosen = chipmunk.select(q, k, grid, top=0.2)
    out = chosen.restore(
        block_sparse_attention(chosen.permute(q), *[chosen.permute_kv(k)] * 2, chosen.mask)
    )
    order = order_of(grid)
    tokens = np.zeros((2, 2, grid.tokens, grid.tokens), bool)
    for i, token in enumerate(order):
        tokens[:, :, token, order] = chosen.mask.to_dense()[:, :, i // 192]
    np.testing.assert_allclose(out, reference.attention(q, k, k, tokens), atol=1e-4)


class TestBadInput:
    GRID = VideoGrid(2, 8, 8)

    def select(self, grid: VideoGrid = GRID, **options: Any) -> Any:
        x = options.pop("x", np.ones((1, 1, 128, 8), np.float32))
        return chipmunk.select(x, x, grid, **options)

    @pytest.mark.parametrize("name", ["top", "random"])
    @pytest.mark.parametrize("share", [-0.1, 1.1, 5])
    def test_shares(self, name: str, share: float) -> None:
        with pytest.raises(ValueError, match=f"`{name}`: expected a share from 0 to 1"):
            self.select(**{name: share})

    def test_another_grid(self) -> None:
        with pytest.raises(ValueError, match="129"):
            self.select(VideoGrid(2, 8, 8, text_tokens=1))

    def test_nan(self) -> None:
        x = np.ones((1, 1, 128, 8), np.float32)
        x[0, 0, 5, 1] = np.nan
        with pytest.raises(ValueError, match="finite"):
            self.select(x=x)

    @pytest.mark.parametrize("seed", [-1, 2**64])
    def test_seeds(self, seed: int) -> None:
        with pytest.raises(ValueError, match="`seed`: expected an int, from 0 to 18446744073709"):
            self.select(seed=seed)

    @pytest.mark.parametrize(
        ("lse", "error", "message"),
        [
            (np.zeros((1, 1, 127), np.float32), ValueError, r"shape \(1, 1, 128\), got shape"),
            (np.zeros((1, 1, 128), np.int32), TypeError, "`lse`: expected one of float16"),
            (np.full((1, 1, 128), -np.inf), ValueError, "`lse`: expected finite numbers"),
            ([0.0] * 128, TypeError, "`lse`: expected a NumPy or CuPy array, got list"),
        ],
    )
    def test_lse(self, lse: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            self.select(lse=lse)

    @pytest.mark.parametrize(
        ("sums", "error", "message"),
        [
            (np.zeros((1, 1, 2, 128), np.float32), ValueError, r"\(batch, heads, 1, 128\)"),
            (np.zeros((1, 1, 128), np.float32), ValueError, r"got shape \(1, 1, 128\)"),
            (np.zeros((1, 1, 1, 128), bool), TypeError, "`sums`: expected one of float16"),
            (np.full((1, 1, 1, 128), np.nan), ValueError, "`sums`: expected finite numbers"),
            (None, TypeError, "`sums`: expected a NumPy or CuPy array, got NoneType"),
        ],
    )
    def test_sums(self, sums: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            chipmunk.select_by(sums, self.GRID)

    def test_no_grid(self) -> None:
        with pytest.raises(TypeError, match="`grid`: expected a VideoGrid"):
            chipmunk.select_by(np.zeros((1, 1, 1, 128)), (2, 8, 8))


CHOICES: list[dict[str, Any]] = [
    {},
    {"top": 0.3, "random": 0.1, "seed": 2**63 + 1},
    {"top": 0, "random": 0.4},
    {"top": 1, "random": 0},
    {"top": 0.1, "random": 1},
]


def close(made: Any, expected: Any) -> None:
    """Sums in another order are other ones in the last place of a float16, at most."""
    off = made.view(np.int16).astype(int) - expected.view(np.int16)
    assert abs(off).max() <= 1
    assert (off != 0).mean() < 0.01


@pytest.mark.skipif(compiler() is None, reason="no g++ to build the emulator with")
class TestOnGpuArrays:
    @pytest.fixture
    def gpu(self, kernel_cache: Path) -> Iterator[EmulatedGpu]:
        made = EmulatedGpu(kernel_cache.parent / "emulated-kernels", 1)
        with made.here():
            yield made

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    @pytest.mark.parametrize("grid", GRIDS, ids=str)
    def test_the_same_as_numpy(self, gpu: EmulatedGpu, grid: VideoGrid, dtype: str) -> None:
        q, k = drawn(grid).astype(numpy_dtype(dtype))
        arrays = gpu.array(q), gpu.array(k)
        chipmunk.select(*arrays, grid)  # the first one waits for a copy of the order
        gpu.copied, EmulatedGpu.waits = 0, 0
        sums = chipmunk.column_sums(*arrays, grid)
        made = [
            (
                chipmunk.select(*arrays, grid, **options),
                chipmunk.select_by(sums, grid, **options),
            )
            for options in CHOICES
        ]
        assert (gpu.copied, EmulatedGpu.waits) == (0, 0)
        close(sums.get(), chipmunk.column_sums(q, k, grid))
        for (chosen, by_sums), options in zip(made, CHOICES, strict=True):
            host = chipmunk.select_by(sums.get(), grid, **options).mask.to_dense()
            np.testing.assert_array_equal(chosen.mask.to_dense(), host)
            np.testing.assert_array_equal(by_sums.mask.to_dense(), host)
            by_sums.check()
            chosen.check()
            apart = chosen.mask.to_dense() != chipmunk.select(q, k, grid, **options).mask.to_dense()
            assert apart.mean() < 2e-3

    def test_launches(self, gpu: EmulatedGpu) -> None:
        q, k = drawn(GRIDS[0]).astype(np.float16)
        chipmunk.select(gpu.array(q), gpu.array(k), GRIDS[0])
        assert gpu.launched == ["column_sums_fp16", "keep_keys"]

    def test_an_lse_that_is_given(self, gpu: EmulatedGpu) -> None:
        grid = GRIDS[3]
        q, k = drawn(grid).astype(np.float16)
        lse = np.random.default_rng(2).uniform(3, 8, q.shape[:3]).astype(np.float32)
        arrays = gpu.array(q), gpu.array(k)
        sums = chipmunk.column_sums(*arrays, grid, lse=gpu.array(lse))
        close(sums.get(), chipmunk.column_sums(q, k, grid, lse=lse))
        chosen = chipmunk.select(*arrays, grid, lse=gpu.array(lse)).mask.to_dense()
        np.testing.assert_array_equal(chosen, chipmunk.select_by(sums, grid).mask.to_dense())
        with pytest.raises(TypeError, match="`lse`: expected a CuPy array, as q, got ndarray"):
            chipmunk.column_sums(*arrays, grid, lse=lse)

    @pytest.mark.parametrize("name", ["q", "k", "lse"])
    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_what_is_no_number_is_told(self, gpu: EmulatedGpu, name: str, bad: float) -> None:
        grid = GRIDS[0]
        arrays = dict(zip("qk", drawn(grid).astype(np.float16), strict=True))
        arrays["lse"] = np.full(arrays["q"].shape[:3], 6, np.float32)
        arrays[name][(1, 0, 5) if name == "lse" else (1, 0, 5, 3)] = bad
        q, k, lse = map(gpu.array, arrays.values())
        with pytest.raises(ValueError, match=f"`{name}`: expected finite numbers"):
            chipmunk.select(q, k, grid, lse=lse).check()
        sums = chipmunk.column_sums(q, k, grid, lse=lse)
        with pytest.raises(ValueError, match="`sums`: expected finite numbers"):
            chipmunk.select_by(sums, grid).check()

    def test_another_rules_watch_is_not_of_the_sums(self, gpu: EmulatedGpu) -> None:
        grid = GRIDS[0]
        q, k = drawn(grid).astype(np.float16)
        sums = chipmunk.column_sums(gpu.array(q), gpu.array(k), grid)
        q[0, 0, 7, 3] = np.nan
        bad = fg_attn.select(gpu.array(q), gpu.array(k), grid)
        chipmunk.select_by(sums, grid).check()
        chipmunk.select_by(np.zeros(sums.shape, np.float16), grid).check()
        with pytest.raises(ValueError, match="`q`: expected finite"):
            bad.check()

    @pytest.mark.parametrize("by_sums", [False, True])
    def test_a_captured_selection_follows_its_input(self, gpu: EmulatedGpu, by_sums: bool) -> None:
        grid = GRIDS[1]
        q, k = drawn(grid).astype(np.float16)
        there = gpu.array(k, writable=True), gpu.array(q)

        def choose() -> Any:
            if not by_sums:
                return None, chipmunk.select(*there, grid)
            sums = chipmunk.column_sums(*there, grid)
            return sums, chipmunk.select_by(sums, grid)

        choose()
        EmulatedGpu.waits = 0
        stream = Stream(64)
        with stream:
            stream.begin_capture()
            _held, chosen = choose()
            replay = stream.end_capture()
        assert EmulatedGpu.waits == 0
        there[0].set(q)
        replay()
        expected = chipmunk.select(q, q, grid).mask.to_dense()
        assert (chosen.mask.to_dense() != expected).mean() < 2e-3

    def test_from_sums_to_the_output_in_one_graph(self, gpu: EmulatedGpu) -> None:
        from tessera_cupy import block_sparse_attention

        grid = GRIDS[1]
        rng = np.random.default_rng(5)
        before, after, k, v = rng.standard_normal((4, 1, 2, grid.tokens, 64)).astype(np.float16)
        q = gpu.array(before, writable=True)
        arrays = gpu.array(k), gpu.array(v)
        out = gpu.empty(before.shape, np.float16)

        def request() -> Any:
            chosen = chipmunk.select(q, arrays[0], grid, top=0.2)
            moved = chosen.permute(q), *map(chosen.permute_kv, arrays)
            block_sparse_attention(*moved, chosen.mask, regime=SPLIT, out=out)
            return chosen, moved

        with Stream(64) as stream:
            request()
            stream.begin_capture()
            chosen, _moved = request()
            replay = stream.end_capture()
        for values in (before, after):
            q.set(values)
            out.set(np.nan)
            replay()
            chosen.mask.refresh()
            kept = chosen.mask.to_dense()
            close_to = chipmunk.select(values, k, grid, top=0.2)
            assert (kept != close_to.mask.to_dense()).mean() < 2e-3
            tokens = np.repeat(kept, 192, axis=2)[:, :, : grid.tokens]
            exact = reference.attention(*map(close_to.permute, (values, k, v)), tokens)
            assert abs(out.get().astype(np.float64) - exact).max() < 4e-3

    def test_other_dtypes_and_too_many_channels(self, gpu: EmulatedGpu) -> None:
        q, k = drawn(GRIDS[0]).astype(np.float16)
        with pytest.raises(ValueError, match="`k`: expected q's dtype float16, got bfloat16"):
            chipmunk.select(gpu.array(q), gpu.array(k.astype(numpy_dtype("bfloat16"))), GRIDS[0])
        wide = gpu.array(np.zeros((1, 1, GRIDS[0].tokens, 264), np.float16))
        with pytest.raises(ValueError, match="at most 256 channels"):
            chipmunk.select(wide, wide, GRIDS[0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("grid", [*GRIDS, VideoGrid(13, 20, 30, text_tokens=77)], ids=str)
def test_on_a_gpu(grid: VideoGrid, dtype: str) -> None:
    import cupy

    q, k = (x.astype(numpy_dtype(dtype)) for x in drawn(grid))
    arrays = [cupy.asarray(x) for x in (q, k)]
    sums = chipmunk.column_sums(*arrays, grid)
    # Float32 is rounded to float16 there.
    rounded = [x.astype(np.float16) if dtype == "float32" else x for x in (q, k)]
    expected = chipmunk.column_sums(*rounded, grid)
    close(cupy.asnumpy(sums), expected)
    for options in CHOICES:
        host = chipmunk.select_by(cupy.asnumpy(sums), grid, **options).mask.to_dense()
        for chosen in (
            chipmunk.select(*arrays, grid, **options),
            chipmunk.select_by(sums, grid, **options),
            chipmunk.select_by(cupy.ascontiguousarray(sums).astype(np.float32), grid, **options),
        ):
            chosen.check()
            np.testing.assert_array_equal(chosen.mask.to_dense(), host)
        apart = host != chipmunk.select_by(expected, grid, **options).mask.to_dense()
        assert apart.mean() < 2e-3


@pytest.mark.gpu
def test_in_a_graph_by_a_dense_steps_lse_on_a_gpu() -> None:
    import cupy

    from tessera_cupy import BlockMask, block_sparse_attention

    grid = VideoGrid(8, 12, 16, text_tokens=21)
    rng = np.random.default_rng(3)
    q, k, v = (
        cupy.asarray(x) for x in rng.standard_normal((3, 1, 2, grid.tokens, 128), np.float32)
    )
    q, k, v = (x.astype(np.float16) for x in (q, k, v))
    blocks = -(-grid.tokens // 64)
    every = np.ones((blocks, blocks), bool)
    mask = BlockMask.from_dense(every, (64, 64), (grid.tokens, grid.tokens))
    _, lse = block_sparse_attention(q, k, v, mask, return_lse=True)
    own, given = chipmunk.column_sums(q, k, grid), chipmunk.column_sums(q, k, grid, lse=lse)
    np.testing.assert_allclose(cupy.asnumpy(given), cupy.asnumpy(own), rtol=4e-3, atol=1e-6)

    def request() -> Any:
        sums = chipmunk.column_sums(q, k, grid, lse=lse)
        return sums, chipmunk.select_by(sums, grid)

    request()
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        request()
        stream.synchronize()
        stream.begin_capture()
        sums, chosen = request()
        graph = stream.end_capture()
        q[...] = -q
        graph.launch(stream)
    stream.synchronize()
    host = chipmunk.select_by(cupy.asnumpy(sums), grid).mask.to_dense()
    np.testing.assert_array_equal(chosen.mask.to_dense(), host)
    assert (host != chipmunk.select_by(cupy.asnumpy(given), grid).mask.to_dense()).any()
