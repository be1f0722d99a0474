"""FG-Attn's rule, against loops over groups and keys and a tiny grid worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera_cupy import KeySlices, reference
from tessera_cupy.interop import numpy_dtype
from tessera_cupy.sparsifiers import fg_attn
from tessera_cupy.video import VideoGrid
from tests.emulator.emulator import compiler
from tests.emulator.gpu import EmulatedGpu

GRIDS = [
    VideoGrid(2, 10, 14),
    VideoGrid(2, 8, 12, text_tokens=21),
    VideoGrid(2, 8, 12, text_tokens=21, text_first=True),
]


def text_of(grid: VideoGrid) -> set[int]:
    video = range(grid.video_start, grid.video_start + grid.video_tokens)
    return set(range(grid.tokens)) - set(video)


def by_the_formula(
    q: Any, k: Any, grid: VideoGrid, group: int, count: int | None, threshold: float | None
) -> Any:
    """(groups, tokens) bool of one head."""
    text = text_of(grid)
    kept = np.zeros((-(-len(q) // group), len(k)), bool)
    for g in range(len(kept)):
        rows = range(g * group, min((g + 1) * group, len(q)))
        high, low = q[list(rows)].max(axis=0), q[list(rows)].min(axis=0)
        bound = {
            j: sum(max(high[c] * k[j, c], low[c] * k[j, c]) for c in range(q.shape[1]))
            / math.sqrt(q.shape[1])
            for j in range(len(k))
            if j not in text
        }
        if count is None:
            best = [j for j in bound if bound[j] >= threshold]
        else:
            best = sorted(bound, key=lambda j: (-bound[j], j))[:count]
        kept[g, best] = True
        kept[g, list(text)] = True
        kept[g] |= any(row in text for row in rows)
    return kept


def drawn(grid: VideoGrid, dtype: str = "float32") -> Any:
    # Small integers: sums are exact, whatever their order, and some are equal.
    rng = np.random.default_rng(grid.tokens)
    return rng.integers(-4, 5, (2, 2, 2, grid.tokens, 16)).astype(numpy_dtype(dtype))


@pytest.mark.parametrize("group", [16, 64, 192])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_the_formula(grid: VideoGrid, group: int) -> None:
    q, k = drawn(grid)
    for options, count in (
        ({}, int(0.3 * grid.video_tokens)),
        ({"budget": 0.1}, int(0.1 * grid.video_tokens)),
        ({"budget": 1e-6}, 1),
        ({"budget": 1.0}, grid.video_tokens),
        ({"threshold": 26.0}, None),
    ):
        chosen = fg_attn.select(q, k, grid, group=group, **options)
        assert isinstance(chosen.mask, KeySlices)
        assert (chosen.mask.group, chosen.mask.shape) == (group, (grid.tokens,) * 2)
        assert chosen.permute(q) is q
        dense = chosen.mask.to_dense()
        for b, h in np.ndindex(2, 2):
            expected = by_the_formula(
                q[b, h].astype(float), k[b, h].astype(float), grid, group, count,
                options.get("threshold"),
            )  # fmt: skip
            np.testing.assert_array_equal(dense[b, h], expected)
        if options.get("threshold"):
            assert 0 < dense.mean() < 1


def test_by_hand() -> None:
    """Two groups of 16. In one channel queries are 1 to 2, in the second -1 to 3 or 0."""
    grid = VideoGrid(1, 4, 8)
    q, k = np.zeros((2, 1, 1, 32, 4), np.float32)
    q[..., 0] = 2
    q[0, 0, ::2, 0] = 1
    q[0, 0, 0, 1], q[0, 0, 1, 1] = -1, 3
    k[0, 0, 5, :2] = 2, 0  # 2 * 2 / 2 = 2 for both
    k[0, 0, 6, :2] = -2, 4  # (-2 * 1 + 4 * 3) / 2 = 5; -1 without the second channel
    k[0, 0, 7, :2] = 0, -6  # (-1 * -6) / 2 = 3; 0
    for threshold, kept in ((2.0, [[5, 6, 7], [5]]), (2.5, [[6, 7], []]), (5.0, [[6], []])):
        made = fg_attn.select(q, k, grid, group=16, threshold=threshold).mask.to_dense()[0, 0]
        assert [np.flatnonzero(row).tolist() for row in made] == kept


def test_no_score_is_above_its_bound() -> None:
    """What a threshold drops has no larger score with any query of the group."""
    grid = VideoGrid(1, 8, 16)
    q, k = np.random.default_rng(3).standard_normal((2, 1, 1, 128, 32)).astype(np.float32)
    q = q[:, :, ::16].repeat(16, axis=2) + q / 16  # alike within a group
    kept = fg_attn.select(q, k, grid, group=16, threshold=1.0).mask.to_dense()[0, 0]
    scores = (q[0, 0] @ k[0, 0].T / math.sqrt(32)).reshape(8, 16, 128)
    assert 0.2 < kept.mean() < 0.9
    assert scores.max(axis=1)[~kept].max() < 1.0 < scores.max()


def test_attention_over_what_is_kept() -> None:
    from tessera_cupy import block_sparse_attention

    grid = GRIDS[0]
    q, k = drawn(grid)
    chosen = fg_attn.select(q, k, grid)
    out = block_sparse_attention(q, k, k, chosen.mask)
    tokens = np.repeat(chosen.mask.to_dense(), 64, axis=2)[:, :, : grid.tokens]
    np.testing.assert_allclose(out, reference.attention(q, k, k, tokens), atol=1e-4)


class TestBadInput:
    GRID = VideoGrid(2, 8, 8)

    def select(self, grid: VideoGrid = GRID, **options: Any) -> Any:
        x = options.pop("x", np.ones((1, 1, 128, 8), np.float32))
        return fg_attn.select(x, x, grid, **options)

    def test_another_group(self) -> None:
        with pytest.raises(ValueError, match="16, 64, 128 or 192 query rows, got 32"):
            self.select(group=32)

    @pytest.mark.parametrize("budget", [0, -0.1, 1.5, 32])
    def test_a_budget_that_is_no_share(self, budget: float) -> None:
        with pytest.raises(ValueError, match="above 0 and up to 1"):
            self.select(budget=budget)

    def test_both(self) -> None:
        with pytest.raises(ValueError, match=r"both, 0\.3 and 1"):
            self.select(budget=0.3, threshold=1)

    def test_another_grid(self) -> None:
        with pytest.raises(ValueError, match="129"):
            self.select(VideoGrid(2, 8, 8, text_tokens=1))

    def test_nan(self) -> None:
        x = np.ones((1, 1, 128, 8), np.float32)
        x[0, 0, 5, 1] = np.nan
        with pytest.raises(ValueError, match="finite"):
            self.select(x=x)


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
        q, k = drawn(grid, dtype)
        for options in ({}, {"threshold": 26.0}):
            host = fg_attn.select(q, k, grid, **options)
            there = fg_attn.select(gpu.array(q), gpu.array(k), grid, **options)
            there.check()
            np.testing.assert_array_equal(there.mask.to_dense(), host.mask.to_dense())

    def test_what_is_no_number_is_told(self, gpu: EmulatedGpu) -> None:
        grid = GRIDS[0]
        q, k = drawn(grid)
        k[1, 0, 5, 3] = np.inf
        with pytest.raises(ValueError, match="`k`: expected finite numbers"):
            fg_attn.select(gpu.array(q), gpu.array(k), grid)
        q[0, 1, 7, 0], k[1, 0, 5, 3] = np.nan, 0
        chosen = fg_attn.select(gpu.array(q), gpu.array(k), grid)
        with pytest.raises(ValueError, match="`q`: expected finite numbers"):
            chosen.check()


@pytest.mark.gpu
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_on_a_gpu(grid: VideoGrid) -> None:
    import cupy

    q, k = drawn(grid, "float16")
    for options in ({}, {"threshold": 26.0}):
        host = fg_attn.select(q, k, grid, **options)
        there = fg_attn.select(cupy.asarray(q), cupy.asarray(k), grid, **options)
        there.check()
        np.testing.assert_array_equal(there.mask.to_dense(), host.mask.to_dense())
