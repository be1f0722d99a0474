"""Keys that sampled rows keep, against the mask written out token by token."""

from __future__ import annotations

import numpy as np
import pytest

from tessera_cupy.bench.kept import kept_in_raster, kept_keys
from tessera_cupy.masks import BlockMask
from tessera_cupy.permute import TokenOrders
from tessera_cupy.sparsifiers import Selection, svg, svg2
from tessera_cupy.video import VideoGrid

RNG = np.random.default_rng(0)


def masks() -> dict[str, BlockMask]:
    blocks = RNG.random((1, 2, 4, 5)) < 0.5
    queries = np.array([[[16, 30, 0, 14]], [[20, 20, 20, 0]]], np.int32).reshape(1, 2, 4)
    keys = np.array([10, 16, 3, 16, 5], np.int32)
    ragged = {"q_block_sizes": queries, "kv_block_sizes": keys}
    return {
        "uniform": BlockMask.from_dense(blocks, (16, 16), (60, 70)),
        "ragged": BlockMask.from_dense(blocks, (32, 16), (60, 50), **ragged),
        "in part": BlockMask.from_tokens(RNG.random((1, 2, 60, 70)) < 0.5, (16, 16)),
        "one head": BlockMask.from_tokens(np.tri(60, 70, dtype=bool)[None, None], (16, 16)),
    }


@pytest.mark.parametrize("kind", masks())
def test_rows_of_each_head_keep_what_the_mask_says(kind: str) -> None:
    mask = masks()[kind]
    tokens = mask.to_tokens()[0]
    rows = np.array([0, 7, 19, 20, 45, 59])
    for head in range(2):
        kept = kept_keys(mask, head, rows)
        np.testing.assert_array_equal(kept, tokens[head % mask.heads, rows])


def test_a_selections_rows_are_in_raster_order() -> None:
    grid = VideoGrid(4, 8, 8)
    q, k = RNG.standard_normal((2, 1, 2, grid.tokens, 16)).astype(np.float32)
    routed = svg.selection_of(grid, svg.Windows(1, 9), np.array([[0, 1]], np.int32))
    clustered = svg2.select(q, k, grid, q_clusters=5, k_clusters=9, iterations=2)
    rows = np.array([0, 3, 100, 255])
    for chosen in (routed, clustered):
        tokens = chosen.mask.to_tokens()[0]
        for head in range(2):
            order = chosen.orders.of(0, head)
            keys = (chosen.kv_orders or chosen.orders).of(0, head)
            kept = kept_in_raster(chosen, chosen.mask, head, rows)
            for row, line in zip(rows, kept, strict=True):
                place = int(np.flatnonzero(order == row)[0])
                expected = {int(keys[j]) for j in np.flatnonzero(tokens[head, place])}
                assert set(np.flatnonzero(line)) == expected


def test_a_temporal_head_keeps_its_place_in_all_frames() -> None:
    grid = VideoGrid(3, 2, 4)
    mask = svg.temporal_mask(grid, 0)
    chosen = Selection(mask, TokenOrders(grid.temporal_order()))
    (kept,) = kept_in_raster(chosen, mask, 0, np.array([8 + 5]))
    assert np.flatnonzero(kept).tolist() == [*range(8), 13, 21]
