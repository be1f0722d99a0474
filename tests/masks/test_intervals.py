"""Masks of intervals, against token masks made key by key; and bad input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tessera_cupy.masks import BlockMask, interval_mask


def by_the_key(start: Any, end: Any, keys: int) -> np.ndarray:
    kept = np.zeros((*start.shape[:2], keys), bool)
    for head, query, i in np.ndindex(*start.shape):
        kept[head, query, max(start[head, query, i], 0) : max(end[head, query, i], 0)] = True
    return kept


@pytest.mark.parametrize("block", [(16, 16), (32, 24), (64, 64), (128, 64), (16, 40)])
@pytest.mark.parametrize("lengths", [(100, 130), (64, 64), (1, 200), (77, 1)])
def test_the_mask_is_that_of_its_tokens(block: tuple[int, int], lengths: tuple[int, int]) -> None:
    rng = np.random.default_rng([*block, *lengths])
    queries, keys = lengths
    start = rng.integers(-20, keys + 20, (2, queries, 3))
    end = start + rng.integers(-5, 60, start.shape)
    start[:, queries // 2 :] = start[:, queries // 2, None]  # many queries alike
    end[:, queries // 2 :] = end[:, queries // 2, None]
    mask = interval_mask(start, end, block, keys)
    expected = BlockMask.from_tokens(by_the_key(start, end, keys), block)
    for name in ("indptr", "indices"):
        np.testing.assert_array_equal(getattr(mask, name), getattr(expected, name), name)
    assert ((mask.partial < 0) == (expected.partial < 0)).all()
    np.testing.assert_array_equal(
        mask.token_bits[mask.partial[mask.partial >= 0]],
        expected.token_bits[expected.partial[expected.partial >= 0]],
    )
    assert mask.active_pairs() == expected.active_pairs()


def test_intervals_that_end_with_blocks_need_no_token_bits() -> None:
    start = np.repeat([[0], [64]], 64, axis=0)
    mask = interval_mask(start, start + 64, (64, 64), 128)
    assert mask.to_dense()[0, 0].tolist() == [[True, False], [False, True]]
    assert not len(mask.token_bits)


def test_bad_input() -> None:
    one = np.zeros((4, 1), int)
    with pytest.raises(TypeError, match=r"`start`: expected integers, got `?float64`?"):
        interval_mask(one.astype(float), one, (64, 64), 8)
    with pytest.raises(ValueError, match=r"`end`: expected start's shape \(4, 1\), got \(3, 1\)"):
        interval_mask(one, one[:3], (64, 64), 8)
    with pytest.raises(ValueError, match=r"`start`: expected shape .*, got shape \(4, 0\)"):
        interval_mask(one[:, :0], one, (64, 64), 8)
    for block in ((0, 16), (16, 0), (-16, 16), (16, 20)):
        with pytest.raises(ValueError, match="`block_size`"):
            interval_mask(one, one + 1, block, 8)
    with pytest.raises(TypeError, match="`block_size`: expected two integers"):
        interval_mask(one, one + 1, 16, 8)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`keys`: expected an int"):
        interval_mask(one, one + 1, (16, 16), 8.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`keys`: expected at least 1, got 0"):
        interval_mask(one, one + 1, (64, 64), 0)
