"""FG-Attn's rule, against loops over groups and keys and a tiny grid worked out by hand."""

from __future__ import annotations

import math
import warnings
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
from tests.emulator.gpu import EmulatedGpu, Stream

GRIDS = [
    VideoGrid(2, 10, 14),
    VideoGrid(2, 8, 12, text_tokens=21),
    VideoGrid(2, 8, 12, text_tokens=21, text_first=True),
]


SHARE = "attend_wgmma/q128k192/share-gather/longest+split"
CHOICES: list[dict[str, Any]] = [
    {},
    {"threshold": 26.0},
    {"group": 16, "budget": 0.9},
    {"group": 128, "parts": 4},
    {"bound": "extremes"},
    {"bound": "extremes", "parts": 2, "threshold": 30.0},
]


def text_of(grid: VideoGrid) -> set[int]:
    video = range(grid.video_start, grid.video_start + grid.video_tokens)
    return set(range(grid.tokens)) - set(video)


def of_ball(queries: Any, key: Any, dtype: str) -> float:
    """By the norms of the distance from the mean, and of the key."""
    mean = queries.mean(axis=0).astype(np.float32)
    if dtype != "float32":
        mean = mean.astype(numpy_dtype(dtype))
    mean = mean.astype(float)
    radius = max(
        math.sqrt(sum((x - m) ** 2 for x, m in zip(q, mean, strict=True))) for q in queries
    )
    along = sum(m * x for m, x in zip(mean, key, strict=True))
    return (along + radius * math.sqrt(sum(x * x for x in key))) / math.sqrt(len(key))


def of_box(queries: Any, key: Any, dtype: str) -> float:
    """By the extremes of channels."""
    high, low = queries.max(axis=0), queries.min(axis=0)
    return sum(max(h * x, w * x) for h, w, x in zip(high, low, key, strict=True)) / math.sqrt(
        len(key)
    )


OF = {"norms": of_ball, "extremes": of_box}


def bounds_by_the_formula(q: Any, k: Any, group: int, bound: str, parts: int, dtype: str) -> Any:
    """(groups, keys) of one head."""
    made = np.empty((-(-len(q) // group), len(k)))
    for g, row in enumerate(made):
        size = group // parts
        first = range(g * group, min((g + 1) * group, len(q)), size)
        balls = [q[at : min(at + size, (g + 1) * group)].astype(float) for at in first]
        for j in range(len(k)):
            highest = max(OF[bound](ball, k[j].astype(float), dtype) for ball in balls)
            row[j] = np.float16(np.float32(highest))
    return made


def by_the_formula(
    bounds: Any, grid: VideoGrid, group: int, count: int | None, threshold: float | None
) -> Any:
    """(groups, tokens) bool of one head."""
    text = text_of(grid)
    kept = np.zeros(bounds.shape, bool)
    for g in range(len(kept)):
        bound = {j: bounds[g, j] for j in range(bounds.shape[1]) if j not in text}
        if count is None:
            best = [j for j in bound if bound[j] >= threshold]
        else:
            best = sorted(bound, key=lambda j: (-bound[j], j))[:count]
        kept[g, best] = True
        kept[g, list(text)] = True
        rows = range(g * group, min((g + 1) * group, grid.tokens))
        kept[g] |= any(row in text for row in rows)
    return kept


def drawn(grid: VideoGrid, dtype: str = "float32") -> Any:
    # Small integers: sums are exact, whatever their order, and some are equal.
    rng = np.random.default_rng(grid.tokens)
    return rng.integers(-4, 5, (2, 2, 2, grid.tokens, 16)).astype(numpy_dtype(dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bound", ["norms", "extremes"])
@pytest.mark.parametrize(("group", "parts"), [(16, 1), (64, 4), (64, 1), (192, 1), (192, 2)])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_the_formula(grid: VideoGrid, group: int, parts: int, bound: str, dtype: str) -> None:
    q, k = (x[:1, :1] for x in drawn(grid, dtype))
    bounds = bounds_by_the_formula(q[0, 0], k[0, 0], group, bound, parts, dtype)
    made = fg_attn.bounds(q, k, group, bound=bound, parts=parts)
    assert made.dtype == np.float16
    # Sums that no float32 holds may be rounded to the next float16.
    off = made[0, 0].view(np.int16) - bounds.astype(np.float16).view(np.int16)
    assert abs(off).max() <= 1
    assert (off != 0).mean() < 0.002
    bounds = made[0, 0].astype(float)
    for options, count in (
        ({}, int(0.3 * grid.video_tokens)),
        ({"budget": 0.1}, int(0.1 * grid.video_tokens)),
        ({"budget": 1e-6}, 1),
        ({"budget": 1.0}, grid.video_tokens),
        ({"threshold": 26.0}, None),
    ):
        chosen = fg_attn.select(q, k, grid, group=group, bound=bound, parts=parts, **options)
        assert isinstance(chosen.mask, KeySlices)
        assert (chosen.mask.group, chosen.mask.shape) == (group, (grid.tokens,) * 2)
        assert chosen.permute(q) is q
        dense = chosen.mask.to_dense()
        expected = by_the_formula(bounds, grid, group, count, options.get("threshold"))
        np.testing.assert_array_equal(dense[0, 0], expected)
        if options.get("threshold"):
            assert 0 < dense.mean() < 1


def test_the_default_is_norms_of_whole_groups() -> None:
    q, k = drawn(GRIDS[0])
    chosen = fg_attn.select(q, k, GRIDS[0]).mask.to_dense()
    same = fg_attn.select(q, k, GRIDS[0], bound="norms", parts=1).mask.to_dense()
    other = fg_attn.select(q, k, GRIDS[0], bound="extremes").mask.to_dense()
    np.testing.assert_array_equal(chosen, same)
    assert (chosen != other).any()


def test_each_head_has_its_own_bounds() -> None:
    q, k = drawn(GRIDS[0])
    every = fg_attn.bounds(q, k, 64)
    for b, h in np.ndindex(2, 2):
        one = fg_attn.bounds(q[b : b + 1, h : h + 1], k[b : b + 1, h : h + 1], 64)
        np.testing.assert_array_equal(one[0, 0], every[b, h])


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
        chosen = fg_attn.select(q, k, grid, group=16, threshold=threshold, bound="extremes")
        made = chosen.mask.to_dense()[0, 0]
        assert [np.flatnonzero(row).tolist() for row in made] == kept


def test_norms_by_hand() -> None:
    """Two groups of 16: queries are (0, 0) or (0, 2), half of them each; then all are (3, 0)."""
    grid = VideoGrid(1, 4, 8)
    q, k = np.zeros((2, 1, 1, 32, 4), np.float32)
    q[0, 0, :16:2, 1], q[0, 0, 16:, 0] = 2, 3
    k[0, 0, 5, :2] = 3, 4  # (4 + 1 * 5) / 2 = 4.5; 3 * 3 / 2 = 4.5
    k[0, 0, 6, :2] = 0, -2  # (-2 + 2) / 2 = 0; 0
    k[0, 0, 7, :2] = -3, 0  # (0 + 3) / 2 = 1.5; -4.5
    k[0, 0, 8, :2] = 4, 0  # (0 + 4) / 2 = 2; 6
    made = fg_attn.bounds(q, k, 16)[0, 0, :, 5:9]
    assert made.tolist() == [[4.5, 0, 1.5, 2], [4.5, 0, -4.5, 6]]
    for threshold, kept in ((1.5, [[5, 7, 8], [5, 8]]), (4.5, [[5], [5, 8]]), (5, [[], [8]])):
        chosen = fg_attn.select(q, k, grid, group=16, threshold=threshold).mask.to_dense()[0, 0]
        assert [np.flatnonzero(row).tolist() for row in chosen] == kept
    # Each of the 16 in halves: the first eight are as all, so nothing changes; quarters likewise.
    np.testing.assert_array_equal(fg_attn.bounds(q, k, 16, parts=2)[0, 0, :, 5:9], made)
    # Parts of queries that are alike have no radius.
    q[0, 0, :16, 1] = np.repeat([0, 2], 8)
    assert fg_attn.bounds(q, k, 16, parts=2)[0, 0, 0, 5:9].tolist() == [4, 0, 0, 0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("bound", ["norms", "extremes"])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_no_score_is_above_its_bound(bound: str, parts: int, dtype: str) -> None:
    """What a threshold drops has no larger score with any query of the group."""
    grid = VideoGrid(1, 8, 15)
    q, k = np.random.default_rng(3).standard_normal((2, 1, 1, 120, 32))
    q = q[:, :, ::16].repeat(16, axis=2)[:, :, :120] + q / 16  # alike within a group
    q, k = (x.astype(numpy_dtype(dtype)) for x in (q, k))
    scores = q[0, 0].astype(float) @ k[0, 0].astype(float).T / math.sqrt(32)
    highest = np.maximum.reduceat(scores, np.arange(0, 120, 16), axis=0)
    made = fg_attn.bounds(q, k, 16, bound=bound, parts=parts)[0, 0]
    assert (highest.astype(np.float16) <= made).all()
    assert (made - highest).mean() < 1
    chosen = fg_attn.select(q, k, grid, group=16, threshold=1.0, bound=bound, parts=parts)
    kept = chosen.mask.to_dense()[0, 0]
    assert 0.2 < kept.mean() < 0.9
    assert highest[~kept].max() < 1.0 < scores.max()


def test_bounds_and_thresholds_are_rounded() -> None:
    """Halves from 32,768 on are 32 apart; what is above the last, 65,504, is infinity."""
    grid = VideoGrid(1, 4, 4)
    q = np.full((1, 1, 16, 1), 300, np.float32)
    k = np.ones_like(q)
    k[0, 0, :4, 0] = 218, 219, -218, 1
    for bound in fg_attn.BOUNDS:
        made = fg_attn.bounds(q, k, 16, bound=bound)
        assert made[..., :4].ravel().tolist() == [65408, np.inf, -65408, 300]
        # 65,400 is no half, but the bound of the first key is no less.
        for threshold, kept in ((65400, [0, 1]), (65450, [1]), (1e9, [1])):
            chosen = fg_attn.select(q, k, grid, group=16, threshold=threshold, bound=bound)
            assert chosen.mask.indices.tolist() == kept


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

    @pytest.mark.parametrize("options", [{"budget": "0.3"}, {"threshold": [1.0]}])
    def test_what_is_no_number(self, options: Any) -> None:
        (name,) = options
        with pytest.raises(TypeError, match=f"`{name}`: expected a number or None"):
            self.select(**options)

    def test_a_threshold_beyond_floats_of_32_bits(self) -> None:
        for threshold, kept in ((1e300, 0), (-1e300, 2 * 128)):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert self.select(threshold=threshold).mask.nnz == kept

    def test_both(self) -> None:
        with pytest.raises(ValueError, match=r"both, 0\.3 and 1"):
            self.select(budget=0.3, threshold=1)

    def test_another_bound(self) -> None:
        with pytest.raises(ValueError, match="'norms' or 'extremes', got 'means'"):
            self.select(bound="means")
        for parts in (3, 2.0):
            with pytest.raises(ValueError, match=f"1, 2 or 4, got {parts}"):
                self.select(parts=parts)
        with pytest.raises(ValueError, match=r"query rows, got 64\.0"):
            self.select(group=64.0)

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
        for options in CHOICES:
            host = fg_attn.select(q, k, grid, **options)
            copied, waits = gpu.copied, EmulatedGpu.waits
            there = fg_attn.select(gpu.array(q), gpu.array(k), grid, **options)
            assert (gpu.copied, EmulatedGpu.waits) == (copied, waits)
            np.testing.assert_array_equal(there.mask.to_dense(), host.mask.to_dense())
            there.check()

    def test_what_is_no_number_is_told(self, gpu: EmulatedGpu) -> None:
        grid = GRIDS[0]
        for bound in fg_attn.BOUNDS:
            for name, bad in (("q", np.nan), ("k", np.inf)):
                arrays = dict(zip("qk", drawn(grid, "float16"), strict=True))
                arrays[name][1, 0, 5, 3] = bad
                chosen = fg_attn.select(*map(gpu.array, arrays.values()), grid, bound=bound)
                with pytest.raises(ValueError, match=f"`{name}`: expected finite numbers"):
                    chosen.check()

    def test_a_captured_selection_follows_its_input(self, gpu: EmulatedGpu) -> None:
        grid = GRIDS[1]
        q, k = drawn(grid, "bfloat16")
        there = gpu.array(k, writable=True), gpu.array(q)
        fg_attn.select(*there, grid)
        stream = Stream(64)
        with stream:
            stream.begin_capture()
            chosen = fg_attn.select(*there, grid)
            replay = stream.end_capture()
        there[0].set(q)
        replay()
        expected = fg_attn.select(q, q, grid).mask.to_dense()
        np.testing.assert_array_equal(chosen.mask.to_dense(), expected)

    @pytest.mark.parametrize("grid", GRIDS[:2], ids=str)
    def test_from_q_k_and_v_to_the_output_in_one_graph(
        self, gpu: EmulatedGpu, grid: VideoGrid
    ) -> None:
        from tessera_cupy import block_sparse_attention

        rng = np.random.default_rng(5)
        before, after, k, v = rng.standard_normal((4, 1, 2, grid.tokens, 64)).astype(np.float16)
        q = gpu.array(before, writable=True)
        given = q, gpu.array(k), gpu.array(v)
        out = gpu.empty(before.shape, np.float16)

        def request() -> Any:
            chosen = fg_attn.select(*given[:2], grid)
            block_sparse_attention(*given, chosen.mask, regime=SHARE, out=out)
            return chosen

        with Stream(64) as stream:
            request()
            stream.begin_capture()
            held = request()
            replay = stream.end_capture()
        # What is kept, and the need of the plan's lists, come to the host when they are asked for.
        assert EmulatedGpu.waits == 0
        assert gpu.copied <= 64
        for values in (before, after):
            q.set(values)
            out.set(np.nan)
            replay()
            held.mask.refresh()
            kept = held.mask.to_dense()
            close = fg_attn.select(values, k, grid).mask.to_dense()
            assert (kept != close).mean() < 2e-3
            tokens = np.repeat(kept, 64, axis=2)[:, :, : grid.tokens]
            exact = reference.attention(values, k, v, tokens)
            assert abs(out.get().astype(np.float64) - exact).max() < 4e-3

    def test_other_dtypes_and_too_many_channels(self, gpu: EmulatedGpu) -> None:
        q, k = drawn(GRIDS[0], "float16")
        with pytest.raises(ValueError, match="`k`: expected q's dtype float16, got bfloat16"):
            fg_attn.select(gpu.array(q), gpu.array(k.astype(numpy_dtype("bfloat16"))), GRIDS[0])
        wide = gpu.array(np.zeros((1, 1, GRIDS[0].tokens, 264), np.float16))
        with pytest.raises(ValueError, match="at most 256 channels"):
            fg_attn.select(wide, wide, GRIDS[0])


@pytest.mark.gpu
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_on_a_gpu(grid: VideoGrid) -> None:
    import cupy

    q, k = drawn(grid, "float16")
    for options in CHOICES:
        host = fg_attn.select(q, k, grid, **options)
        there = fg_attn.select(cupy.asarray(q), cupy.asarray(k), grid, **options)
        there.check()
        np.testing.assert_array_equal(there.mask.to_dense(), host.mask.to_dense())
