"""A mask as a map of blocks: kinds, sizes, token bits, and large ones as an image."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tessera_cupy import viz
from tessera_cupy.masks import BlockMask
from tessera_cupy.viz import area

pytest.importorskip("matplotlib")

MASK = BlockMask.from_dense([[1, 0, 1, 1], [0, 0, 1, 0]], (16, 16))


@pytest.fixture
def ax() -> Iterator[Any]:
    from matplotlib.figure import Figure

    return Figure(figsize=(8, 4)).subplots()


def test_mask_kinds_and_ragged_edges(ax: Any) -> None:
    token = np.zeros((32, 32), dtype=bool)
    token[:16, :16] = True
    token[16:, 16:] = np.eye(16, dtype=bool)
    viz.draw_mask(ax, BlockMask.from_tokens(token, (16, 16)))
    mesh = ax.collections[0]
    assert mesh.get_array().reshape(2, 2).tolist() == [[1, 0], [0, 2]]
    words = [text.get_text() for text in ax.get_legend().get_texts()]
    assert words == ["kept block", "partly kept block (token bits)", "skipped block"]


def test_ragged_blocks_keep_their_sizes(ax: Any) -> None:
    mask = BlockMask.from_dense(
        [[1, 0], [0, 1]], (16, 16), q_block_sizes=[5, 27], kv_block_sizes=[24, 8]
    )
    viz.draw_mask(ax, mask)
    corners = ax.collections[0].get_coordinates()
    assert corners[0, :, 0].tolist() == [0, 24, 32]
    assert corners[:, 0, 1].tolist() == [0, 5, 32]


def test_tokens_that_bits_switch_off_are_whitened(ax: Any) -> None:
    token = np.zeros((20, 32), dtype=bool)
    token[:16, :16] = True
    token[16:, 20:] = True
    viz.draw_mask(ax, BlockMask.from_tokens(token, (16, 16)))
    (over,) = ax.images
    white = np.asarray(over.get_array())[:, :, 3] > 0
    # Of the short last block of 4 x 16 tokens the first 4 keys are off.
    assert white.sum() == 16
    assert white[16:, 16:20].all()


def test_a_large_mask_is_an_image_of_mixed_colours(ax: Any) -> None:
    kept = np.zeros((300, 2), bool)
    kept[::2, 1] = True
    viz.draw_mask(ax, BlockMask.from_dense(kept, (16, 16)))
    (image,) = ax.images
    pixels = np.asarray(image.get_array())
    # 1,024 cells for 4,800 queries; a key each, drawn 16 times.
    assert pixels.shape == (1024, 32 * 16, 3)
    pixels = pixels[:, ::16]
    from matplotlib.colors import to_rgb

    skipped, blue = np.array(to_rgb("#F2F2F2")), np.array(to_rgb("#0072B2"))
    assert pixels[:, :16] == pytest.approx(np.broadcast_to(skipped, (1024, 16, 3)), abs=1e-5)
    assert pixels[0, 16] == pytest.approx(blue, abs=1e-5)
    # Cell 3 has queries 14.06 to 18.75: the first 1.94 of them are kept.
    share = (16 - 3 * 4.6875) / 4.6875
    assert pixels[3, 16] == pytest.approx(skipped + share * (blue - skipped), abs=1e-4)
    assert pixels[:, 16:].mean(axis=(0, 1)) == pytest.approx((skipped + blue) / 2, abs=1e-4)


def test_blocks_of_no_token_take_no_room() -> None:
    means = area.cell_means(
        np.array([[1.0], [0.0], [1.0]]), np.array([0, 2, 2, 4]), np.array([0.0, 3.0, 4.0])
    )
    assert means.tolist() == [[1.0], [1.0]]


def test_the_title_says_which_head_and_blocks(ax: Any) -> None:
    both = BlockMask.from_dense(np.ones((2, 3, 2, 2), bool), (16, 32))
    viz.draw_mask(ax, both, batch=1, head=2)
    assert ax.get_title() == "mask of batch 1, head 2: 2 x 2 blocks of 16 x 32 tokens"
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("key (tokens)", "query (tokens)")


@pytest.mark.parametrize("wrong", [{"head": 2}, {"batch": 1}, {"head": -1}])
def test_a_head_that_is_not_there_is_refused(wrong: dict[str, int], ax: Any) -> None:
    name = next(iter(wrong))
    with pytest.raises(ValueError, match=f"`{name}`: expected from 0 to"):
        viz.draw_mask(ax, MASK, **wrong)


def test_a_window_beyond_the_mask_is_refused(ax: Any) -> None:
    with pytest.raises(ValueError, match="`window`: expected a part of 32 queries by 64 keys"):
        viz.draw_mask(ax, MASK, window=viz.Window(0, 33, 0, 64))
