"""Chipmunk's rule, against loops over rows and a tiny grid worked out by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera_cupy import KeySlices, reference
from tessera_cupy.sparsifiers import chipmunk
from tessera_cupy.video import VideoGrid
from tests.emulator.emulator import compiler
from tests.emulator.gpu import EmulatedGpu

GRIDS = [
    VideoGrid(4, 6, 16),
    VideoGrid(5, 7, 9),  # a frame, a row and a column beyond the voxels
    VideoGrid(2, 8, 12, text_tokens=21),
    VideoGrid(4, 7, 8, text_tokens=21, text_first=True),
]


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
            expected[np.argsort(-sums)[: round(top * grid.tokens)]] = True
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


@pytest.mark.skipif(compiler() is None, reason="no g++ to build the emulator with")
class TestOnGpuArrays:
    @pytest.fixture
    def gpu(self, kernel_cache: Path) -> Iterator[EmulatedGpu]:
        made = EmulatedGpu(kernel_cache.parent / "emulated-kernels", 1)
        with made.here():
            yield made

    def test_the_same_as_numpy(self, gpu: EmulatedGpu) -> None:
        q, k = drawn(GRIDS[3])
        host = chipmunk.select(q, k, GRIDS[3])
        there = chipmunk.select(gpu.array(q), gpu.array(k), GRIDS[3])
        there.check()
        np.testing.assert_array_equal(there.mask.to_dense(), host.mask.to_dense())

    @pytest.mark.parametrize("name", ["q", "k"])
    def test_what_is_no_number_is_told(self, gpu: EmulatedGpu, name: str) -> None:
        arrays = dict(zip("qk", drawn(GRIDS[0]), strict=True))
        arrays[name][1, 0, 5, 3] = np.inf
        with pytest.raises(ValueError, match=f"`{name}`: expected finite numbers"):
            chipmunk.select(*map(gpu.array, arrays.values()), GRIDS[0])


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    import cupy

    q, k = drawn(GRIDS[3])
    host = chipmunk.select(q, k, GRIDS[3])
    there = chipmunk.select(cupy.asarray(q), cupy.asarray(k), GRIDS[3])
    there.check()
    np.testing.assert_array_equal(there.mask.to_dense(), host.mask.to_dense())
