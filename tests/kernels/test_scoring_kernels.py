"""The kernels of sparsifiers on the CPU, through the package's own launches, against NumPy.

Whole numbers have exact sums in any order, so results on them are equal to the last bit.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from tessera_cupy.permute import TokenOrders
from tessera_cupy.sparsifiers import scoring, spade
from tessera_cupy.sparsifiers.selection import checked_inputs
from tessera_cupy.video import VideoGrid
from tests.emulator.emulator import compiler
from tests.emulator.gpu import EmulatedGpu, Stream

pytestmark = pytest.mark.skipif(
    compiler() is None, reason="the emulator needs g++, which is not on the PATH"
)

DTYPES = (np.float16, ml_dtypes.bfloat16, np.float32)
SIZES = np.array([5, 1, 16, 11, 3], np.int32)


def whole(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> NDArray[Any]:
    return rng.integers(-8, 9, shape).astype(dtype)


def equal(made: Any, expected: NDArray[Any]) -> None:
    found = made.get()
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert (found == expected).all()


def draw_orders(rng: np.random.Generator, count: int, tokens: int) -> NDArray[np.int32]:
    return np.stack([rng.permutation(tokens) for _ in range(count)]).astype(np.int32)


class TestPool:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("blocks", [16, 5, SIZES], ids=["16", "5", "ragged"])
    @pytest.mark.parametrize("head_dim", [16, 37, 128, 200])
    def test_kinds(
        self, gpu: EmulatedGpu, rng: np.random.Generator, dtype: Any, blocks: Any, head_dim: int
    ) -> None:
        x = whole(rng, 2, 3, 36, head_dim, dtype=dtype)
        orders = TokenOrders(draw_orders(rng, 2, 36), rng.integers(0, 2, (2, 3), np.int32))
        kinds = ("max", "mean", "min")
        made = scoring.pool_kinds(gpu.array(x), blocks, kinds, orders=orders)
        for one, kind in zip(made, kinds, strict=True):
            equal(one, scoring.pool(x, blocks, kind, orders=orders))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_strided_input(self, gpu: EmulatedGpu, rng: np.random.Generator, dtype: Any) -> None:
        """(batch, tokens, heads, d) in memory, from an address that only single elements have."""
        x = whole(rng, 2, 20, 3, 13, dtype=dtype)
        view = gpu.array(x)[:, 1:, :, 1:].transpose(0, 2, 1, 3)
        expected = x[:, 1:, :, 1:].transpose(0, 2, 1, 3)
        equal(scoring.pool(view, 4, "max"), scoring.pool(expected, 4, "max"))
        equal(
            scoring.pool(view.transpose(0, 1, 3, 2), 4, "min"),
            scoring.pool(expected.transpose(0, 1, 3, 2), 4, "min"),
        )

    def test_random_values(self, gpu: EmulatedGpu, rng: np.random.Generator) -> None:
        x = rng.standard_normal((1, 2, 70, 24)).astype(np.float16)
        made = scoring.pool(gpu.array(x), 64, "mean").get()
        assert np.allclose(made, scoring.pool(x, 64, "mean"), rtol=1e-5, atol=1e-6)

    def test_too_many_channels(self, gpu: EmulatedGpu) -> None:
        with pytest.raises(ValueError, match="`x`: expected at most 256 channels"):
            scoring.pool(gpu.array(np.zeros((1, 1, 4, 264), np.float32)), 4, "max")


class TestLikeness:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("blocks", [16, SIZES], ids=["16", "ragged"])
    @pytest.mark.parametrize("head_dim", [37, 128, 200])
    def test_likeness(
        self, gpu: EmulatedGpu, rng: np.random.Generator, dtype: Any, blocks: Any, head_dim: int
    ) -> None:
        x = rng.standard_normal((1, 2, 36, head_dim)).astype(dtype)
        x[0, 1, 3] = 0
        orders = TokenOrders(draw_orders(rng, 2, 36), np.array([[1, 0]], np.int32))
        made = scoring.likeness(gpu.array(x), blocks, orders=orders).get()
        expected = scoring.likeness(x, blocks, orders=orders)
        assert np.allclose(made, expected, rtol=1e-4, atol=1e-6)

    # Rows of 16 tokens let tiles move runs of 4; rows of 15 move single tokens.
    @pytest.mark.parametrize("grid", [VideoGrid(16, 4, 16), VideoGrid(16, 4, 15)])
    def test_the_most_alike_order(
        self, gpu: EmulatedGpu, rng: np.random.Generator, grid: VideoGrid
    ) -> None:
        orders = spade.candidates(grid, spade.WAN_TILES[1:])
        places = rng.permutation(len(orders.orders))[:2]
        x = np.empty((1, 2, grid.tokens, 16), np.float32)
        for head, order in enumerate(orders.orders[places]):
            # Blocks of 64 in this order point to one side each.
            towards = rng.standard_normal((-(-grid.tokens // 64), 16))
            x[0, head, order] = towards[np.arange(grid.tokens) // 64]
        x *= rng.uniform(0.5, 2, x.shape[:3])[..., None]
        x += 0.1 * rng.standard_normal(x.shape)
        made = scoring.most_alike(gpu.array(x.astype(ml_dtypes.bfloat16)), 64, orders)
        equal(made.choice, places[None].astype(np.int32))
        assert len(gpu.launched) == (3 if grid.w == 16 else 2)

    def test_more_orders_than_warps(self, gpu: EmulatedGpu, rng: np.random.Generator) -> None:
        orders = TokenOrders(draw_orders(rng, 11, 33))
        x = rng.standard_normal((2, 3, 33, 8)).astype(np.float32)
        made = scoring.most_alike(gpu.array(x), 4, orders)
        equal(made.choice, scoring.most_alike(x, 4, orders).choice)

    def test_ties_fall_to_the_first(self, gpu: EmulatedGpu, rng: np.random.Generator) -> None:
        orders = TokenOrders(np.repeat(draw_orders(rng, 1, 33), 10, axis=0))
        x = rng.standard_normal((1, 2, 33, 8)).astype(np.float32)
        for values in (x, x * np.nan):
            made = scoring.most_alike(gpu.array(values), 4, orders)
            equal(made.choice, np.zeros((1, 2), np.int32))


class TestScores:
    @pytest.mark.parametrize(
        ("n", "m", "head_dim"),
        [(5, 7, 16), (64, 128, 32), (65, 129, 37), (130, 260, 128), (3, 66, 3)],
    )
    def test_products(
        self, gpu: EmulatedGpu, rng: np.random.Generator, n: int, m: int, head_dim: int
    ) -> None:
        a, b = whole(rng, 2, 2, n, head_dim), whole(rng, 2, 2, m, head_dim)
        equal(
            scoring.scores(gpu.array(a), gpu.array(b), scale=0.25), scoring.scores(a, b, scale=0.25)
        )

    @pytest.mark.parametrize(
        ("head_dim", "kernel"), [(128, "block_products"), (37, "block_scores")]
    )
    def test_errors_of_float32(
        self, gpu: EmulatedGpu, rng: np.random.Generator, head_dim: int, kernel: str
    ) -> None:
        """Against float64. Parts of tf32 alone, or two products of three, would fail."""
        a, b = rng.standard_normal((2, 1, 2, 150, head_dim)).astype(np.float32)
        a *= np.float32(2.0) ** rng.integers(-20, 20, (150, 1))
        made = scoring.scores(gpu.array(a), gpu.array(b), scale=0.25).get()
        assert gpu.launched[-1] == kernel
        wide = a.astype(np.float64), b.astype(np.float64)
        expected = 0.25 * np.einsum("bhid,bhjd->bhij", *wide)
        sizes = 0.25 * np.einsum("bhid,bhjd->bhij", *map(np.abs, wide))
        assert (np.abs(made - expected) < 2.0**-21 * sizes).all()

    def test_strided_input(self, gpu: EmulatedGpu, rng: np.random.Generator) -> None:
        a, b = whole(rng, 1, 9, 2, 20), whole(rng, 1, 2, 11, 21)
        made = scoring.scores(gpu.array(a).transpose(0, 2, 1, 3), gpu.array(b)[..., 1:])
        equal(made, scoring.scores(a.transpose(0, 2, 1, 3), b[..., 1:]))


class TestExtremeScores:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("head_dim", [8, 37, 40, 128, 200])
    @pytest.mark.parametrize(("tokens", "blocks"), [(40, (2, 3)), (135, (1, 1)), (36, (5, SIZES))])
    def test_scores(
        self,
        gpu: EmulatedGpu,
        rng: np.random.Generator,
        dtype: Any,
        head_dim: int,
        tokens: int,
        blocks: Any,
    ) -> None:
        q, k = whole(rng, 2, 1, 2, tokens, head_dim, dtype=dtype)
        orders = TokenOrders(draw_orders(rng, 2, tokens), np.array([[1, 0]], np.int32))
        made = scoring.extreme_scores(gpu.array(q), gpu.array(k), blocks, orders=orders)
        equal(made, scoring.extreme_scores(q, k, blocks, orders=orders))
        on_tensor_cores = np.dtype(dtype).itemsize == 2 and head_dim % 8 == 0
        assert (gpu.launched[-1] == "block_scores") != on_tensor_cores

    def test_random_values(self, gpu: EmulatedGpu, rng: np.random.Generator) -> None:
        q, k = rng.standard_normal((2, 1, 2, 200, 64)).astype(ml_dtypes.bfloat16)
        made = scoring.extreme_scores(gpu.array(q), gpu.array(k), (8, 4)).get()
        assert np.allclose(made, scoring.extreme_scores(q, k, (8, 4)), rtol=1e-4, atol=1e-4)


SHAPES = [
    (3, 5, 7),
    (2, 4, 32),
    (2, 3, 900),
    (1, 2, 1024),
    (1, 2, 1025),
    (1, 2, 1536),
    (1, 2, 1537),
    (1, 2, 2100),
    (1, 2, 8300),
]


class TestKeepTop:
    @pytest.mark.parametrize("shape", SHAPES)
    def test_ties(
        self, gpu: EmulatedGpu, rng: np.random.Generator, shape: tuple[int, int, int]
    ) -> None:
        score = rng.integers(-3, 4, (1, *shape)).astype(np.float32)
        there = gpu.array(score)
        for count in sorted({0, 1, shape[2] // 3, shape[2] - 1, shape[2]}):
            equal(scoring.keep_top(there, count), scoring.keep_top(score, count))

    @pytest.mark.parametrize("shape", SHAPES)
    def test_any_numbers(
        self, gpu: EmulatedGpu, rng: np.random.Generator, shape: tuple[int, int, int]
    ) -> None:
        score = rng.standard_normal((1, *shape)).astype(np.float32)
        score *= 10.0 ** rng.integers(-30, 30, score.shape)
        strange = rng.choice([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0], score.shape)
        score = np.where(rng.random(score.shape) < 0.3, strange, score).astype(np.float32)
        for always_shape in (shape[1:], (1, *shape)):
            always = rng.random(always_shape) < 0.1
            count = int(rng.integers(1, shape[2]))
            made = scoring.keep_top(gpu.array(score), count, always=gpu.array(always))
            equal(made, scoring.keep_top(score, count, always=always))

    def test_rows_without_numbers_keep_as_many(self, gpu: EmulatedGpu) -> None:
        score = np.full((1, 1, 3, 40), np.nan, np.float32)
        assert (scoring.keep_top(gpu.array(score), 7).get().sum(axis=-1) == 7).all()


class TestKeepMass:
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("weighted", [False, True])
    def test_ties(
        self,
        gpu: EmulatedGpu,
        rng: np.random.Generator,
        shape: tuple[int, int, int],
        weighted: bool,
    ) -> None:
        """Powers of two: sums are exact, and parts of them that no number of columns meets."""
        score = rng.integers(-4, 1, (2, *shape)) * np.log(2)
        score = score.astype(np.float32)
        weights = 2.0 ** rng.integers(-2, 3, (2, 1, shape[2])) if weighted else None
        weights = None if weights is None else weights.astype(np.float32)
        there = None if weights is None else gpu.array(weights)
        always = rng.random(shape[1:]) < 0.1
        for mass, least in ((0.0, 0), (0.31, 0), (0.9, 0), (0.31, shape[2] // 2), (1.0, 1)):
            made = scoring.keep_mass(
                gpu.array(score), mass, weights=there, least=least, always=gpu.array(always)
            )
            expected = scoring.keep_mass(score, mass, weights=weights, least=least, always=always)
            differ = (made.get() != expected).any(axis=-1)
            # Where the sum of some columns is within rounding of the mass, one more or less.
            assert differ.sum() <= (made.get() != expected).sum() <= 0.01 * differ.size

    @pytest.mark.parametrize("shape", SHAPES)
    def test_random_scores(
        self, gpu: EmulatedGpu, rng: np.random.Generator, shape: tuple[int, int, int]
    ) -> None:
        score = (3 * rng.standard_normal((1, *shape))).astype(np.float32)
        made = scoring.keep_mass(gpu.array(score), 0.8).get()
        p = np.exp(score.astype(np.float64))
        p /= p.sum(axis=-1, keepdims=True)
        kept = np.where(made, p, 0).sum(axis=-1)
        least = np.where(made, p, np.inf).min(axis=-1)
        assert (kept > 0.8 - 1e-5).all()
        assert (kept - least < 0.8 + 1e-5).all()
        assert (least >= np.where(made, 0, p).max(axis=-1) * (1 - 1e-5)).all()

    def test_large_scores_and_none(self, gpu: EmulatedGpu) -> None:
        rows = [[1e30, 0, -1e30, 1e30], [np.inf, 0, np.inf, 1], [-np.inf] * 4, [np.nan, 1, 0, 1]]
        score = np.array(rows, np.float32)[None, None]
        for least in (0, 3):
            equal(
                scoring.keep_mass(gpu.array(score), 0.9, least=least),
                scoring.keep_mass(score, 0.9, least=least),
            )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "grid", [VideoGrid(4, 9, 20), VideoGrid(3, 7, 13, text_tokens=11, text_first=True)]
)
def test_spade(gpu: EmulatedGpu, rng: np.random.Generator, dtype: Any, grid: VideoGrid) -> None:
    q, k = whole(rng, 2, 1, 2, grid.tokens, 16, dtype=dtype)
    host = spade.select(q, k, grid, keep=0.3, sinks=1, diagonal=0)
    waits = EmulatedGpu.waits
    there = spade.select(gpu.array(q), gpu.array(k), grid, keep=0.3, sinks=1, diagonal=0)
    assert there.mask.source is not None
    assert EmulatedGpu.waits == waits
    equal(there.orders.choice, host.orders.choice)
    equal(there.mask.source.arrays[0], host.mask.to_dense())
    there.check()


def test_a_captured_selection_follows_its_input(gpu: EmulatedGpu, rng: np.random.Generator) -> None:
    grid = VideoGrid(4, 9, 20)
    before, after, k = whole(rng, 3, 1, 2, grid.tokens, 16)
    q, there = gpu.array(before, writable=True), gpu.array(k)
    spade.select(q, there, grid, sinks=0, diagonal=0)
    stream = Stream(64)
    with stream:
        stream.begin_capture()
        chosen = spade.select(q, there, grid, sinks=0, diagonal=0)
        replay = stream.end_capture()
    q.set(after)
    replay()
    expected = spade.select(after, k, grid, sinks=0, diagonal=0)
    equal(chosen.orders.choice, expected.orders.choice)
    equal(chosen.mask.source.arrays[0], expected.mask.to_dense())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["q", "k"])
def test_what_is_no_number_is_noticed(
    gpu: EmulatedGpu, rng: np.random.Generator, dtype: Any, bad: float, name: str
) -> None:
    grid = VideoGrid(2, 5, 12)
    arrays = {side: whole(rng, 1, 2, grid.tokens, 136, dtype=dtype) for side in "qk"}
    place = (0, int(rng.integers(2)), int(rng.integers(grid.tokens)), int(rng.integers(136)))
    arrays[name][place] = bad
    chosen = spade.select(*(gpu.array(arrays[side]) for side in "qk"), grid, keep=0.5)
    with pytest.raises(ValueError, match=f"`{name}`: expected finite numbers"):
        chosen.check()


def test_large_numbers_are_numbers(gpu: EmulatedGpu) -> None:
    """Their sum is none."""
    x = gpu.array(np.full((1, 1, 64, 8), 3e38, np.float32))
    checked_inputs(x, x, VideoGrid(1, 8, 8))
    scoring.pool(x, 16, "max")
    spade.select(x, x, VideoGrid(1, 8, 8)).check()
