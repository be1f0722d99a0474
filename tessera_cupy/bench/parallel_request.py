"""The request that ranks divide: a mask by SPADE's rule, and each rank's shard of q, k and v."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy import interop
from tessera_cupy.bench.corpus import Source, random_mask
from tessera_cupy.bench.families import Family
from tessera_cupy.bench.mask_file import cached_bits
from tessera_cupy.bench.ranks import Ranks
from tessera_cupy.errors import wrong
from tessera_cupy.masks import BlockMask
from tessera_cupy.parallel import Shards, even_lengths
from tessera_cupy.video import VideoGrid

#: SPADE's blocks on HunyuanVideo.
FAMILY = Family("spade", (64, 64), 0.10, 0.10)
_BLOCK = 64


@dataclass(frozen=True)
class Request:
    """One request, and this rank's part of it.

    Attributes:
        ranks: who divide it.
        mask: of the whole sequence.
        shards: the tokens of each rank.
        heads: of q, k and v.
        head_dim: elements of a row.
        dtype: of q, k and v.
    """

    ranks: Ranks
    mask: BlockMask
    shards: Shards
    heads: int
    head_dim: int
    dtype: str

    def shard(self, rank: int) -> tuple[Any, Any, Any]:
        """A rank's q, k and v, (1, heads, tokens, head_dim), normal; every rank can make them."""
        import torch

        device = self.ranks.device
        random = torch.Generator(device)
        random.manual_seed(rank)
        shape = (1, self.heads, self.shards.lengths[rank], self.head_dim)
        q, k, v = (
            torch.randn(shape, generator=random, device=device).to(getattr(torch, self.dtype))
            for _ in range(3)
        )
        return q, k, v

    def whole(self) -> tuple[Any, Any, Any]:
        """All ranks' q, k and v, one shard behind the other."""
        import torch

        shards = [self.shard(rank) for rank in range(self.ranks.size)]
        q, k, v = (torch.cat(parts, dim=2) for parts in zip(*shards, strict=True))
        return q, k, v


def make_request(
    ranks: Ranks,
    grid: VideoGrid,
    heads: int,
    head_dim: int,
    *,
    clip: str | None,
    mask_cache: Path | None,
    on_head: Callable[[], None],
) -> Request:
    """Make the request; rank 0 makes the mask and sends it to the others.

    Args:
        ranks: who divide it.
        grid: of the tokens, with text behind.
        heads: of q, k and v.
        head_dim: elements of a row.
        clip: whose frames the mask is made from; None for random blocks, of the rule's density.
        mask_cache: file to take the mask of the video's tokens from, and to add it to.
        on_head: called after each head of the mask, on rank 0.

    Raises:
        MissingExtraError: the mask has to be made, and scikit-video or av is not installed.
        ValueError: fewer tokens than ranks, or a file that is none.
    """
    if grid.tokens < ranks.size:
        fix = "pass a larger --grid, or fewer ranks"
        raise ValueError(wrong("grid", f"at least {ranks.size} tokens", grid.tokens, fix))
    bits: NDArray[np.uint8] | None = None
    if ranks.rank == 0:
        bits = _bits(ranks, grid, heads, head_dim, clip, mask_cache, on_head)
    mask = _sent(ranks, bits, grid, heads)
    shards = Shards(even_lengths(grid.tokens, ranks.size))
    dtype = "bfloat16" if ranks.on_gpu else "float32"
    return Request(ranks, mask, shards, heads, head_dim, dtype)


def _bits(
    ranks: Ranks,
    grid: VideoGrid,
    heads: int,
    head_dim: int,
    clip: str | None,
    mask_cache: Path | None,
    on_head: Callable[[], None],
) -> NDArray[np.uint8]:
    """Packed bits (heads, blocks, ceil(blocks / 8)) of the mask, text included."""
    video = VideoGrid(grid.t, grid.h, grid.w)
    if clip is None:
        rng = np.random.default_rng(0)
        mask = random_mask(FAMILY.block_size, FAMILY.density, heads, video.tokens, rng)
        bits = np.packbits(mask.to_dense()[0], axis=-1, bitorder="little")
    else:
        to_device = interop.import_cupy().asarray if ranks.on_gpu else np.asarray
        source = Source(clip, video, heads, head_dim)
        made = cached_bits(mask_cache, [source], [FAMILY], on_head, to_device)
        bits = made[clip, FAMILY.name]
    return with_text(bits, video.tokens, grid.text_tokens)


def with_text(bits: NDArray[np.uint8], tokens: int, text: int) -> NDArray[np.uint8]:
    """A mask of so many tokens with text behind them, whose blocks are kept in full.

    A block of tokens that text completes is text's.

    >>> with_text(np.array([[[1]]], np.uint8), 64, 10).tolist()
    [[[3], [3]]]
    """
    if not text:
        return bits
    whole, blocks = tokens // _BLOCK, -(-(tokens + text) // _BLOCK)
    kept = np.ones((len(bits), blocks, blocks), bool)
    dense = np.unpackbits(bits, axis=-1, count=-(-tokens // _BLOCK), bitorder="little")
    kept[:, :whole, :whole] = dense[:, :whole, :whole]
    packed: NDArray[np.uint8] = np.packbits(kept, axis=-1, bitorder="little")
    return packed


def _sent(ranks: Ranks, bits: NDArray[np.uint8] | None, grid: VideoGrid, heads: int) -> BlockMask:
    """Rank 0's mask on every rank."""
    import torch

    blocks = -(-grid.tokens // _BLOCK)
    shape = (heads, blocks, -(-blocks // 8))
    if bits is None:
        packed = torch.empty(shape, dtype=torch.uint8)
    else:
        packed = torch.from_numpy(np.ascontiguousarray(bits))
    ranks.wait()  # as long as it takes rank 0 to make it
    packed = ranks.from_first(packed.to(ranks.device)).cpu().numpy()
    tokens = (grid.tokens, grid.tokens)
    return BlockMask.from_packed_bits(packed, (blocks, blocks), FAMILY.block_size, tokens)
