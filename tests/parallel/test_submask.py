"""Parts of a mask say of each pair of tokens what the whole mask says."""

from __future__ import annotations

import numpy as np
import pytest

from tessera_cupy import BlockMask, KeySlices
from tessera_cupy.masks.key_slices import block_mask
from tessera_cupy.parallel.shards import Span, Spans
from tessera_cupy.parallel.submask import cut
from tests.parallel.cases import ragged

SPANS: tuple[Spans, ...] = (
    (Span(0, 32),),
    (Span(16, 48),),
    (Span(5, 40),),
    (Span(70, 90),),
    (Span(17, 19),),
    (Span(0, 10), Span(20, 57)),
    (Span(16, 32), Span(64, 90)),
    (Span(3, 20), Span(25, 26), Span(60, 75)),
)


def masks() -> dict[str, BlockMask]:
    rng = np.random.default_rng(0)
    sizes = [ragged(rng, tokens, (2, 3)) for tokens in (90, 77)]
    keep = rng.random((2, 3, *(size.shape[2] for size in sizes))) < 0.5
    tokens = rng.random((1, 3, 90, 77)) < 0.4
    tokens[:, :, 32:64, 24:48] = True
    return {
        "uniform": BlockMask.from_dense(rng.random((2, 3, 6, 4)) < 0.5, (16, 24), (90, 77)),
        "tokens": BlockMask.from_tokens(tokens, (16, 24)),
        "ragged": BlockMask.from_dense(
            keep, (16, 24), (90, 77), q_block_sizes=sizes[0], kv_block_sizes=sizes[1]
        ),
        "slices": block_mask(KeySlices.from_groups(rng.random((3, 6, 77)) < 0.3, 16, (90, 77))),
    }


MASKS = masks()


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("rows", [None, *SPANS])
@pytest.mark.parametrize("heads", [None, [2], [2, 0]])
def test_a_part_says_what_the_whole_says(
    name: str, rows: Spans | None, heads: list[int] | None
) -> None:
    mask = MASKS[name]
    tokens = mask.to_tokens()
    for columns in (None, *SPANS[:3], *SPANS[5:]):
        if columns is not None:
            columns = tuple(Span(a, min(b, 77)) for a, b in columns if a < 77)
        right = tokens
        if heads is not None:
            right = right[:, heads]
        for axis, spans in ((2, rows), (3, columns)):
            if spans is not None:
                right = np.take(right, np.concatenate([np.arange(*span) for span in spans]), axis)
        part = cut(mask, heads=heads, rows=rows, columns=columns)
        assert part.shape == right.shape[2:]
        np.testing.assert_array_equal(part.to_tokens(), right)


def test_what_is_whole_stays_as_it_is() -> None:
    mask = MASKS["uniform"]
    assert cut(mask, heads=[0, 1, 2], rows=(Span(0, 90),), columns=(Span(0, 77),)) is mask
    aligned = cut(mask, rows=(Span(16, 48),))
    assert not aligned.ragged
    assert cut(mask, rows=(Span(17, 48),)).ragged_sides == (True, False)


def test_heads_of_key_slices_remain_key_slices() -> None:
    part = cut(MASKS["slices"], heads=[2, 0])
    assert part.slices is not None
    assert cut(MASKS["slices"], heads=[2, 0], rows=(Span(0, 16),)).slices is None
