"""Sparse VideoGen: masks against their definition token by token, routes, and the one call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tessera_cupy import reference
from tessera_cupy.mapping import Mapping, map_mask
from tessera_cupy.masks import BlockMask
from tessera_cupy.sparsifiers import svg
from tessera_cupy.sparsifiers.svg_attention import svg_attention
from tessera_cupy.video import MODELS, VideoGrid

GRIDS = [
    VideoGrid(5, 6, 7),
    VideoGrid(3, 8, 8, text_tokens=20),
    VideoGrid(4, 5, 9, text_tokens=33, text_first=True),
    VideoGrid(1, 6, 7),
]


def kept(grid: VideoGrid, route: int, reach: int, rows: Any = slice(None)) -> np.ndarray:
    """The definition: which pairs of tokens, both in raster order, a head keeps."""
    token = np.arange(grid.tokens) - grid.video_start
    text = (token < 0) | (token >= grid.video_tokens)
    frame, place = np.divmod(token, grid.frame_tokens)
    at = frame if route == svg.SPATIAL else place
    near = abs(at[rows, None] - at) <= reach
    result: np.ndarray = near | (frame == 0) | text | text[rows, None]
    return result


def tokens_of(mask: BlockMask, rows: slice) -> np.ndarray:
    """(rows, keys) of a mask's first head, whose rows are whole blocks."""
    bq, bkv = mask.block_size
    found = np.zeros((rows.stop - rows.start, mask.num_blocks[1] * bkv), bool)
    for block in range(rows.start // bq, -(-rows.stop // bq)):
        for entry in range(mask.indptr[block], mask.indptr[block + 1]):
            words = np.full((bq, -(-bkv // 32)), 0xFFFFFFFF, np.uint32)
            if mask.partial[entry] >= 0:
                words = mask.token_bits[mask.partial[entry]]
            bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :bkv]
            low = block * bq - rows.start
            part = found[low : low + bq, mask.indices[entry] * bkv :][:, :bkv]
            part[:] = bits[: len(part)]
    return found[:, : mask.shape[1]]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("reach", [0, 1, 3])
def test_masks_keep_what_the_definition_keeps(grid: VideoGrid, reach: int) -> None:
    everything = slice(0, grid.tokens)
    if reach < grid.t:
        mask = svg.spatial_mask(grid, reach)
        assert (tokens_of(mask, everything) == kept(grid, svg.SPATIAL, reach)).all()
        assert mask.active_pairs() == svg.spatial_pairs(grid, reach)
    order = grid.temporal_order()
    mask = svg.temporal_mask(grid, reach)
    expected = kept(grid, svg.TEMPORAL, reach)[order][:, order]
    assert (tokens_of(mask, everything) == expected).all()
    assert mask.active_pairs() == svg.temporal_pairs(grid, reach)
    mask = svg.raster_temporal_mask(grid, reach)
    assert (tokens_of(mask, everything) == kept(grid, svg.TEMPORAL, reach)).all()


def test_masks_are_exact_at_a_model_s_size() -> None:
    """32,760 tokens, frames of 1,560: neither is a multiple of a block."""
    grid = MODELS["wan-14b-81f-480p"].grid
    reach = svg.windows(grid, 0.3)
    order = grid.temporal_order()
    for low in (0, 1536, 8192, 16384, 31232, 32640):
        rows = slice(low, min(low + 256, grid.tokens))
        spatial = tokens_of(svg.spatial_mask(grid, reach.frames), rows)
        assert (spatial == kept(grid, svg.SPATIAL, reach.frames, rows)).all()
        temporal = tokens_of(svg.temporal_mask(grid, reach.places), rows)
        assert (temporal == kept(grid, svg.TEMPORAL, reach.places, order[rows])[:, order]).all()


@pytest.mark.parametrize("name", ["wan-14b-81f-480p", "wan-14b-81f-720p", "hunyuan-129f-720p"])
def test_densities_are_the_published_ones(name: str) -> None:
    grid = MODELS[name].grid
    reach = svg.windows(grid, 0.3)
    for pairs in (svg.spatial_pairs(grid, reach.frames), svg.temporal_pairs(grid, reach.places)):
        assert 0.25 - 0.02 <= pairs / grid.tokens**2 <= 0.30


def test_regrouped_tiles_take_the_same_places_of_several_frames() -> None:
    grid = VideoGrid(8, 8, 16)  # eight units of 16 rows make a tile
    mask = svg.raster_temporal_mask(grid, 20)
    tiles = map_mask(mask, Mapping("regroup", "pack"), 128, 64)
    merged = map_mask(mask, Mapping("share", "pack"), 128, 64)
    assert tiles.tile_units is not None
    spread = np.ptp(tiles.tile_units % grid.frame_tokens, axis=1)
    assert (spread == 0).all()
    assert tiles.steps.sum() < 0.8 * merged.steps.sum()


def test_windows_are_the_widest_that_fit() -> None:
    grid = VideoGrid(9, 6, 8)
    for keep in (0.25, 0.3, 0.6, 1.0):
        frames, places = svg.windows(grid, keep)
        most = keep * grid.tokens**2
        assert svg.spatial_pairs(grid, frames) <= most
        assert frames == grid.t - 1 or svg.spatial_pairs(grid, frames + 1) > most
        assert svg.temporal_pairs(grid, places) <= most
        assert places == grid.frame_tokens - 1 or svg.temporal_pairs(grid, places + 1) > most


def test_full_windows_keep_everything() -> None:
    grid = VideoGrid(3, 4, 8)
    assert svg.windows(grid, 1.0) == (2, 31)
    assert svg.spatial_mask(grid, 2).active_pairs() == grid.tokens**2
    assert svg.temporal_mask(grid, 31).active_pairs() == grid.tokens**2


def of_two_kinds(grid: VideoGrid, text: float = 0.0) -> tuple[np.ndarray, ...]:
    """Head 0 attends to its own frame, head 1 to its own place."""
    rng = np.random.default_rng(1)
    token = np.clip(np.arange(grid.tokens) - grid.video_start, 0, grid.video_tokens - 1)
    frame, place = np.divmod(token, grid.frame_tokens)
    of_frame = rng.standard_normal((grid.t, 32)).astype(np.float32)
    of_place = rng.standard_normal((grid.frame_tokens, 32)).astype(np.float32)
    q = 2 * np.stack([of_frame[frame], of_place[place]])[None]
    v = rng.standard_normal(q.shape).astype(np.float32)
    return q, q.copy(), v


@pytest.mark.parametrize("grid", GRIDS[:3], ids=str)
def test_heads_take_the_route_that_they_follow(grid: VideoGrid) -> None:
    q, k, v = of_two_kinds(grid)
    routes = svg.route(q, k, v, grid, reach=svg.Windows(0, 2), sample=0.2)
    assert routes.tolist() == [[svg.SPATIAL, svg.TEMPORAL]]
    assert routes.dtype == np.int32
    turned = svg.route(q[:, ::-1], k[:, ::-1], v, grid, reach=svg.Windows(0, 2), sample=0.2)
    assert turned.tolist() == [[svg.TEMPORAL, svg.SPATIAL]]


def test_the_route_is_that_of_the_smaller_error_on_the_sampled_rows() -> None:
    grid = VideoGrid(6, 5, 8)
    rng = np.random.default_rng(5)
    q, k, v = rng.standard_normal((3, 2, 8, grid.tokens, 16)).astype(np.float32)
    frame, place = np.divmod(np.arange(grid.tokens), grid.frame_tokens)
    alike = rng.standard_normal((40, 16)).astype(np.float32)
    q[:, ::2], k[:, ::2] = (x[:, ::2] + alike[frame] for x in (q, k))
    q[:, 1::2], k[:, 1::2] = (x[:, 1::2] + alike[place] for x in (q, k))
    reach = svg.Windows(1, 11)
    drawn = svg.samples(grid, reach, 0.5, 3)
    assert len(drawn.tokens) == 128 < grid.tokens
    routes = svg.route(q, k, v, grid, reach=reach, sample=0.5, seed=3)
    scores = np.einsum("bhid,bhjd->bhij", q[:, :, drawn.tokens], k).astype(float) / 4
    outs = []
    for mask in (
        np.ones((len(drawn.tokens), grid.tokens), bool),
        kept(grid, svg.SPATIAL, 1, drawn.tokens),
        kept(grid, svg.TEMPORAL, 11, drawn.tokens),
    ):
        p = np.where(mask, np.exp(scores), 0)
        outs.append(p @ v / p.sum(axis=-1, keepdims=True))
    errors = [((out - outs[0]) ** 2).sum(axis=(2, 3)) for out in outs[1:]]
    assert (routes == (errors[1] < errors[0])).all()
    assert 0 < routes.sum() < routes.size


@pytest.mark.parametrize("grid", GRIDS[:3], ids=str)
def test_the_call_is_attention_under_each_head_s_mask(grid: VideoGrid) -> None:
    q, k, v = of_two_kinds(grid)
    reach = svg.windows(grid, 0.4)
    out = svg_attention(q, k, v, grid, keep=0.4, sample=0.3)
    routes = svg.route(q, k, v, grid, keep=0.4, sample=0.3)
    tokens = np.stack([kept(grid, r, reach[r]) for r in routes[0]])[None]
    expected = reference.attention(q, k, v, BlockMask.from_tokens(tokens, (64, 64)))
    np.testing.assert_allclose(out, expected, atol=2e-5)
    again = svg_attention(q, k, v, grid, keep=0.4, routes=routes)
    np.testing.assert_array_equal(out, again)
    chosen = svg.select(q, k, grid, v=v, keep=0.4, sample=0.3)
    assert (chosen.notes["routes"] == routes).all()
    pairs = [svg.spatial_pairs(grid, reach.frames), svg.temporal_pairs(grid, reach.places)]
    assert chosen.mask.active_pairs() == sum(pairs[r] for r in routes[0])


def test_logits_that_lie_far_apart_still_have_a_route() -> None:
    """Each query matches the key of its place two frames on, by hundreds in logits."""
    grid = VideoGrid(6, 5, 8)
    rng = np.random.default_rng(2)
    frame, place = np.divmod(np.arange(grid.tokens), grid.frame_tokens)
    of = rng.standard_normal((grid.t + 2, grid.frame_tokens, 64)).astype(np.float32)
    of /= np.linalg.norm(of, axis=2, keepdims=True)
    q = 4000 * of[frame + 2, place][None, None]
    k = of[frame, place][None, None]
    v = rng.standard_normal(k.shape).astype(np.float32)
    routes = svg.route(q, k, v, grid, reach=svg.Windows(1, 6), sample=1.0)
    assert routes.tolist() == [[svg.TEMPORAL]]


def test_what_is_drawn_cannot_be_written() -> None:
    drawn = svg.samples(GRIDS[0], svg.Windows(0, 1), 1.0, 0)
    with pytest.raises(ValueError, match="read-only"):
        drawn.tokens[:] = 0


def test_the_first_steps_are_dense() -> None:
    grid = GRIDS[0]
    q, k, v = of_two_kinds(grid)
    full = BlockMask.from_tokens(np.ones((1, 1, grid.tokens, grid.tokens), bool), (64, 64))
    dense = reference.attention(q, k, v, full)
    for step, warm_up, is_dense in (
        (9, 10, True),
        (10, 10, False),
        (0, 0, False),
        (None, 10, False),
    ):
        out = svg_attention(q, k, v, grid, step=step, warm_up_steps=warm_up)
        assert (abs(out - dense).max() < 2e-5) == is_dense, step


def test_bad_input() -> None:
    grid = GRIDS[0]
    q, k, v = of_two_kinds(grid)
    wrong: list[tuple[str, Any]] = [
        ("`keep`: expected a fraction above 0", lambda: svg_attention(q, k, v, grid, keep=0)),
        ("`sample`: expected a fraction", lambda: svg_attention(q, k, v, grid, sample=2.0)),
        ("`step`: expected an int from 0", lambda: svg_attention(q, k, v, grid, step=-1)),
        ("`step`: expected an int from 0", lambda: svg_attention(q, k, v, grid, step=1.5)),
        ("`warm_up_steps`: expected", lambda: svg_attention(q, k, v, grid, warm_up_steps=-5)),
        ("`seed`: expected an int from 0", lambda: svg_attention(q, k, v, grid, seed=None)),
        ("`keep`: expected a fraction", lambda: svg_attention(q, k, v, grid, keep="0.3")),
        ("`q`: expected shape", lambda: svg_attention(q, k, v, VideoGrid(5, 6, 8))),
        ("`v`: expected an array like q", lambda: svg_attention(q, k, v[:, :1], grid)),
        ("`k`: expected finite numbers", lambda: svg_attention(q, k * np.nan, v, grid)),
        ("`frames`: expected a reach from 0 to 4", lambda: svg.spatial_mask(grid, 5)),
        ("`places`: expected a reach from 0 to 41", lambda: svg.temporal_mask(grid, 42)),
        (
            r"`routes`: expected int32 of shape \(1, 2\)",
            lambda: svg_attention(q, k, v, grid, routes=np.zeros((1, 2))),
        ),
    ]
    wrong.append(
        (
            "`routes`: expected 0 or 1",
            lambda: svg_attention(q, k, v, grid, routes=np.full((1, 2), 5, np.int32)),
        )
    )
    for message, call in wrong:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="`grid`: expected a VideoGrid"):
        svg_attention(q, k, v, (5, 6, 7))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`q, k, v, out`: expected CuPy"):
        svg_attention(q.tolist(), k, v, grid)


def test_select_asks_for_the_values() -> None:
    x = np.zeros((1, 2, 210, 16), np.float32)
    with pytest.raises(TypeError, match=r"`v`: expected the values, .*got none\. Fix: pass v=v"):
        svg.select(x, x, VideoGrid(5, 6, 7))
    with pytest.raises(TypeError, match="unexpected keyword argument 'sparsity'"):
        svg.select(x, x, VideoGrid(5, 6, 7), v=x, sparsity=0.5)  # type: ignore[call-arg]
