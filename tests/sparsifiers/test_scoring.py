"""Pooling, scores and what is kept, on NumPy arrays, against loops over blocks and columns."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tessera_cupy.permute import TokenOrders
from tessera_cupy.sparsifiers import scoring

SIZES = np.array([3, 1, 7, 5, 4], np.int32)


def arrays(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.fixture
def orders() -> TokenOrders:
    rng = np.random.default_rng(1)
    permutations = np.stack([rng.permutation(20) for _ in range(3)]).astype(np.int32)
    return TokenOrders(permutations, rng.integers(0, 3, (2, 3)).astype(np.int32))


@pytest.mark.parametrize("kind", ["mean", "max", "min"])
@pytest.mark.parametrize("blocks", [SIZES, 6, 20, 64, 1])
def test_pool(kind: str, blocks: Any, orders: TokenOrders) -> None:
    x = arrays(2, 3, 20, 5)
    sizes = SIZES if blocks is SIZES else [min(blocks, 20 - i) for i in range(0, 20, blocks)]
    made = scoring.pool(x, blocks, kind, orders=orders)
    assert made.dtype == np.float32
    assert made.shape == (2, 3, len(sizes), 5)
    for b, h in np.ndindex(2, 3):
        rows = x[b, h][orders.of(b, h)]
        for i, block in enumerate(np.split(rows, np.cumsum(sizes)[:-1])):
            assert np.allclose(made[b, h, i], getattr(block, kind)(axis=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_pool_of_other_dtypes(dtype: Any) -> None:
    x = arrays(1, 2, 20, 8).astype(dtype)
    for kind in scoring.KINDS:
        made = scoring.pool(x, 4, kind)
        assert made.dtype == np.float32
        assert (made == scoring.pool(x.astype(np.float32), 4, kind)).all()


@pytest.mark.parametrize(
    ("blocks", "words"),
    [(0, "at least one token"), (SIZES[:-1], "add up to 20"), (np.array([20, 0]), "add up to 20")],
)
def test_blocks_that_do_not_fit(blocks: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"`blocks`: expected .*{words}"):
        scoring.pool(arrays(1, 1, 20, 4), blocks, "max")


def test_a_kind_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="`kind`: expected one of mean, max, min"):
        scoring.pool(arrays(1, 1, 20, 4), 4, "median")


def test_likeness_is_the_mean_cosine_of_the_pairs_of_a_block() -> None:
    # Lengths differ and count for nothing. One token of the first block is at 60 degrees to its
    # neighbours; the second, short block is of two tokens at right angles.
    x = np.zeros((18, 2), dtype=np.float32)
    x[:, 0] = np.arange(1, 19)
    x[3] = [0.5, np.sqrt(0.75)]
    x[17] = [0, 2]
    first = (15 * 15 + 2 * 15 * 0.5 + 1) / 16**2
    second = (1 + 1 + 0 + 0) / 2**2
    assert scoring.likeness(x[None, None], 16).ravel() == pytest.approx([first, second], rel=1e-6)


def test_the_most_alike_order() -> None:
    # Tokens of a pair are alike one after the other in head 0, two apart in head 1.
    x = np.zeros((1, 2, 8, 4), np.float32)
    x[0, 0, range(8), np.arange(8) // 2] = 1
    x[0, 1, range(8), [0, 1, 0, 1, 2, 3, 2, 3]] = 1
    orders = TokenOrders(np.array([[0, 2, 1, 3, 4, 6, 5, 7], np.arange(8)], np.int32))
    assert scoring.most_alike(x, 2, orders).choice.tolist() == [[1, 0]]


def test_scores() -> None:
    a, b = arrays(2, 3, 4, 5), arrays(2, 3, 6, 5, seed=1)
    made = scoring.scores(a, b, scale=0.5)
    assert made.dtype == np.float32
    assert np.allclose(made, 0.5 * np.einsum("bhnd,bhmd->bhnm", a, b), rtol=1e-5, atol=1e-6)


def test_extreme_scores(orders: TokenOrders) -> None:
    q, k = arrays(2, 2, 3, 20, 5)
    made = scoring.extreme_scores(q, k, (6, SIZES), orders=orders)
    assert made.shape == (2, 3, 4, 5)
    for b, h, i, j in np.ndindex(*made.shape):
        order = orders.of(b, h)
        rows = np.split(q[b, h][order], [6, 12, 18])[i]
        columns = np.split(k[b, h][order], np.cumsum(SIZES)[:-1])[j]
        middle = rows.max(axis=0) + rows.min(axis=0)
        expected = max(middle @ columns.max(axis=0), middle @ columns.min(axis=0))
        assert made[b, h, i, j] == pytest.approx(expected, rel=1e-5, abs=1e-5)


class TestKeepTop:
    @pytest.mark.parametrize("count", [0, 1, 4, 9, 10])
    def test_against_a_sort(self, count: int) -> None:
        score = np.random.default_rng(2).integers(-3, 3, (2, 3, 4, 10)).astype(np.float32)
        made = scoring.keep_top(score, count)
        for row, kept in zip(score.reshape(-1, 10), made.reshape(-1, 10), strict=True):
            best = sorted(range(10), key=lambda j: (-row[j], j))[:count]
            assert np.flatnonzero(kept).tolist() == sorted(best)

    def test_what_is_no_number_comes_last(self) -> None:
        score = np.array([[[[np.nan, -np.inf, -5, np.inf, 0]]]], np.float32)
        assert np.flatnonzero(scoring.keep_top(score, 3)).tolist() == [2, 3, 4]
        assert np.flatnonzero(scoring.keep_top(score, 4)).tolist() == [0, 2, 3, 4]
        assert np.flatnonzero(scoring.keep_top(score * np.nan, 2)).tolist() == [0, 1]

    def test_zeros_of_both_signs_are_ties(self) -> None:
        score = np.array([[[[-0.0, 0.0, -1]]]], np.float32)
        assert np.flatnonzero(scoring.keep_top(score, 1)).tolist() == [0]

    def test_always(self) -> None:
        score = arrays(2, 3, 4, 10)
        rng = np.random.default_rng(3)
        for shape in ((4, 10), (2, 3, 4, 10)):
            always = rng.random(shape) < 0.3
            made = scoring.keep_top(score, 2, always=always)
            assert (made == (scoring.keep_top(score, 2) | always)).all()

    @pytest.mark.parametrize("count", [-1, 11])
    def test_a_count_that_does_not_fit(self, count: int) -> None:
        with pytest.raises(ValueError, match="`count`: expected 0 to 10 columns"):
            scoring.keep_top(arrays(1, 1, 4, 10), count)

    def test_always_of_another_shape(self) -> None:
        with pytest.raises(ValueError, match=r"`always`: expected shape \(4, 10\)"):
            scoring.keep_top(arrays(1, 2, 4, 10), 1, always=np.zeros((10, 4), bool))


class TestKeepMass:
    @pytest.mark.parametrize("mass", [0.0, 0.3, 0.9, 1.0])
    @pytest.mark.parametrize("least", [0, 3])
    @pytest.mark.parametrize("weighted", [False, True])
    def test_against_a_loop(self, mass: float, least: int, weighted: bool) -> None:
        rng = np.random.default_rng(4)
        score = rng.integers(-2, 3, (2, 2, 4, 9)).astype(np.float32)
        weights = rng.integers(1, 4, (1, 2, 9)).astype(np.float32) if weighted else None
        made = scoring.keep_mass(score, mass, weights=weights, least=least)
        for index in np.ndindex(2, 2, 4):
            p = np.exp(score[index].astype(np.float64))
            if weights is not None:
                p *= weights[0, index[1]]
            p = np.round(p / p.sum(), 7)  # ties are ties
            kept: list[int] = []
            for j in sorted(range(9), key=lambda j: (-p[j], j)):
                if len(kept) >= least and p[kept].sum() >= mass * p.sum():
                    break
                kept.append(j)
            assert np.flatnonzero(made[index]).tolist() == sorted(kept)

    def test_a_row_without_numbers_keeps_the_least(self) -> None:
        score = np.full((1, 1, 1, 4), np.nan, np.float32)
        assert scoring.keep_mass(score, 0.5, least=2).sum() >= 2

    def test_large_scores(self) -> None:
        score = np.array([[[[1e30, 0, -1e30, 1e30]]]], np.float32)
        assert np.flatnonzero(scoring.keep_mass(score, 0.9)).tolist() == [0, 3]

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"mass": 90}, "`mass`: expected a fraction"),
            ({"mass": 0.9, "least": 11}, "`least`: expected 0 to 10"),
            ({"mass": 0.9, "weights": np.ones(10, np.float32)}, "`weights`: expected shape"),
            ({"mass": 0.9, "weights": np.ones((3, 1, 10), np.float32)}, "`weights`: expected"),
        ],
    )
    def test_wrong_input(self, options: dict[str, Any], words: str) -> None:
        with pytest.raises(ValueError, match=words):
            scoring.keep_mass(arrays(1, 2, 4, 10), **options)
