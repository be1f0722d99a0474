"""SpargeAttn's rule, against loops over blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tessera_cupy.sparsifiers import spargeattn
from tessera_cupy.video import VideoGrid


def alike(x: Any) -> float:
    """Mean cosine similarity of all pairs of rows, each with itself too."""
    unit = x / np.sqrt((x * x).sum(axis=1, keepdims=True))
    return float((unit @ unit.T).mean())


def by_the_formula(
    q: Any, k: Any, similarity: float, cdf: float | None, top_k: float | None
) -> np.ndarray:
    """Kept blocks for (tokens, d) arrays in the order of the mask."""
    queries = [q[i : i + 128] for i in range(0, len(q), 128)]
    keys = [k[i : i + 64] for i in range(0, len(k), 64)]
    good_q = [alike(block) > similarity for block in queries]
    good_k = [alike(block - k.mean(axis=0)) > similarity for block in keys]
    kept = np.zeros((len(queries), len(keys)), bool)
    for i, block in enumerate(queries):
        score = np.array([block.mean(axis=0) @ other.mean(axis=0) for other in keys])
        p = np.exp((score - score.max()) / np.sqrt(q.shape[1])) * good_k
        p /= max(p.sum(), 1e-300)
        order = sorted(range(len(keys)), key=lambda j: -p[j])
        if top_k is not None:
            kept[i, order[: int(top_k * len(keys))]] = True
        else:
            sums = np.cumsum(p[order])
            kept[i, order[: max(1, int((sums <= cdf).sum()))]] = True
        for j in range(len(keys)):
            kept[i, j] |= not good_q[i] or not good_k[j]
    return kept


def clustered(tokens: int, rng: np.random.Generator) -> np.ndarray:
    """(2, 2, tokens, 16), runs of tokens of which some are alike and some are not."""
    directions = rng.standard_normal((2, 2, -(-tokens // 64), 16))
    spread = rng.choice([0.3, 3.0], (2, 2, -(-tokens // 64), 1))
    x = np.repeat(3 * directions, 64, axis=2)[:, :, :tokens]
    noise = np.repeat(spread, 64, axis=2)[:, :, :tokens] * rng.standard_normal(x.shape)
    return (x + noise).astype(np.float32)


RULES: list[dict[str, Any]] = [
    {"cdf": 0.98, "similarity": 0.6},
    {"cdf": 0.5, "similarity": 0.3},
    {"top_k": 0.5, "similarity": -0.1},
    {"top_k": 0.3, "similarity": 0.6},
    {"cdf": 0.9, "similarity": 1.0},  # nothing is alike
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("grid", [VideoGrid(2, 16, 32), VideoGrid(3, 13, 23, text_tokens=7)])
def test_the_formula(grid: VideoGrid, rule: dict[str, Any]) -> None:
    rng = np.random.default_rng(grid.tokens)
    q, k = clustered(grid.tokens, rng), clustered(grid.tokens, rng)
    made = spargeattn.select(q, k, grid, **rule, order="raster").mask.to_dense()
    for b, h in np.ndindex(2, 2):
        wide_q, wide_k = q[b, h].astype(np.float64), k[b, h].astype(np.float64)
        expected = by_the_formula(
            wide_q, wide_k, rule["similarity"], rule.get("cdf"), rule.get("top_k")
        )
        assert (made[b, h] == expected).all()


def test_blocks_may_lie_along_a_curve() -> None:
    pytest.importorskip("hilbert")
    grid = VideoGrid(2, 16, 32)
    rng = np.random.default_rng(1)
    q, k = clustered(grid.tokens, rng), clustered(grid.tokens, rng)
    chosen = spargeattn.select(q, k, grid, order="hilbert")
    assert chosen.orders.host().tolist() == [[grid.curve_order("hilbert").tolist()]]
    same = spargeattn.select(chosen.permute(q), chosen.permute(k), grid, order="raster")
    assert (chosen.mask.to_dense() == same.mask.to_dense()).all()
    assert spargeattn.select(q, k, grid, order="raster").permute(q) is q
    default = spargeattn.select(q, k, grid)
    assert (default.orders.host() == chosen.orders.host()).all()


def test_a_block_past_the_cdf_stays_out_unless_it_is_the_only_one() -> None:
    """Scores ln 6, ln 3, 0 give 0.6, 0.3, 0.1; blocks are alike as q and k are constant in them."""
    q, k = np.zeros((2, 1, 1, 192, 16), np.float32)
    q[..., 0] = 4
    k[0, 0, :, 0] = np.repeat(np.log([6.0, 3, 1]), 64)
    for cdf, row in [
        (0.0, [1, 0, 0]),
        (0.5, [1, 0, 0]),
        (0.89, [1, 0, 0]),
        (0.91, [1, 1, 0]),
        (1.0, [1, 1, 1]),
    ]:
        mask = spargeattn.select(
            q, k, VideoGrid(1, 12, 16), cdf=cdf, similarity=0.1, order="raster"
        ).mask
        assert mask.to_dense().astype(int).tolist() == [[[row, row]]]


class TestBadInput:
    GRID = VideoGrid(3, 16, 16)
    X = np.ones((1, 1, 768, 8), np.float32)

    @pytest.mark.parametrize(
        "rule",
        [{"cdf": 1.2}, {"top_k": -0.5}, {"top_k": 1.5}, {"similarity": 2.0}, {"order": "peano"}],
    )
    def test_parameters(self, rule: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=next(iter(rule))):
            spargeattn.select(self.X, self.X, self.GRID, **rule)

    def test_another_grid(self) -> None:
        with pytest.raises(ValueError, match="512"):
            spargeattn.select(self.X, self.X, VideoGrid(2, 16, 16))

    def test_nan(self) -> None:
        x = self.X.copy()
        x[0, 0, 100, 0] = np.nan
        with pytest.raises(ValueError, match="finite"):
            spargeattn.select(x, self.X, self.GRID)
