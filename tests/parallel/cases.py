"""Requests that the simulated ranks and those of torch.distributed must serve alike."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy import BlockMask, KeySlices
from tessera_cupy.parallel import Shards

DIM = 8


@dataclass(frozen=True)
class Case:
    """One request: sizes, the mask, and how many tokens each rank holds."""

    name: str
    lengths: tuple[int, ...]
    kv_lengths: tuple[int, ...] | None = None
    heads: int = 4
    kv_heads: int = 4
    batch: int = 1
    mask_heads: int | None = None
    mask_batch: int = 1
    block: tuple[int, int] = (16, 16)
    kind: str = "blocks"
    density: float = 0.5
    text: int = 0
    text_first: bool = False
    layout: str = "BHSD"
    dtype: str = "float32"
    scale: float | None = None
    seed: int = 0
    schemes: tuple[Any, ...] = field(default=("ulysses", "ring"))

    @property
    def q(self) -> Shards:
        return Shards(self.lengths, self.text, self.text_first)

    @property
    def kv(self) -> Shards:
        return Shards(self.kv_lengths or self.lengths, self.text, self.text_first)

    def mask(self) -> BlockMask | KeySlices:
        rng = np.random.default_rng(self.seed)
        sq, skv = self.q.total, self.kv.total
        axes = (self.mask_batch, self.mask_heads or self.heads)
        if self.kind == "tokens":
            keep = rng.random((*axes, sq, skv)) < self.density
            keep[:, :, sq // 3] = False  # a row that sees no key
            return BlockMask.from_tokens(keep, self.block)
        if self.kind == "slices":
            groups = -(-sq // 16)
            return KeySlices.from_groups(
                rng.random((*axes, groups, skv)) < self.density, 16, (sq, skv)
            )
        if self.kind == "ragged":
            sizes = [ragged(rng, sq, axes), ragged(rng, skv, axes)]
            keep = rng.random((*axes, sizes[0].shape[2], sizes[1].shape[2])) < self.density
            return BlockMask.from_dense(
                keep, (64, 64), (sq, skv), q_block_sizes=sizes[0], kv_block_sizes=sizes[1]
            )
        nq, nk = -(-sq // self.block[0]), -(-skv // self.block[1])
        keep = rng.random((*axes, nq, nk)) < self.density
        # Heads of unequal work, the last one of none.
        share = np.linspace(1, 0, axes[1])[:, None, None] if axes[1] > 1 else 1
        keep &= rng.random(keep.shape) < share
        if self.kind == "band":
            keep &= np.abs(np.arange(nq)[:, None] - np.arange(nk)) <= 1
        keep[..., nq // 2, :] = False
        return BlockMask.from_dense(keep, self.block, (sq, skv))

    def arrays(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Whole q, k and v, heads first, in float32 numbers that the dtype holds."""
        rng = np.random.default_rng(self.seed + 1)
        shapes = [
            (self.batch, heads, tokens, DIM)
            for heads, tokens in (
                (self.heads, self.q.total),
                (self.kv_heads, self.kv.total),
                (self.kv_heads, self.kv.total),
            )
        ]
        q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
        if self.dtype == "bfloat16":
            import ml_dtypes

            q, k, v = (x.astype(ml_dtypes.bfloat16).astype(np.float32) for x in (q, k, v))
        return q, k, v


def ragged(rng: np.random.Generator, tokens: int, axes: tuple[int, int]) -> NDArray[np.int64]:
    """Sizes of blocks that differ by head, some of them 0."""
    count = -(-tokens // 24) + 2
    sizes = np.zeros((*axes, count), np.int64)
    for place in np.ndindex(axes):
        edges = np.sort(rng.integers(0, tokens + 1, count - 1))
        sizes[place] = np.diff(np.concatenate([[0], edges, [tokens]]))
    return sizes


def local(whole: NDArray[Any], shards: Shards, rank: int, layout: str) -> NDArray[Any]:
    """What a rank holds of a whole array, in a layout."""
    spans = shards.keys(rank, rank + 1, text=True)
    pieces = [whole[:, :, :0], *(whole[:, :, span.begin : span.end] for span in spans)]
    mine = np.concatenate(pieces, axis=2)
    return mine if layout == "BHSD" else np.ascontiguousarray(mine.swapaxes(1, 2))


HYBRID = (("ulysses", "ring", (2, 2)),)

#: For two ranks.
TWO = (
    Case("even", (32, 32)),
    Case("ragged tail", (48, 21), block=(16, 32), layout="BSHD"),
    Case("edges within blocks", (37, 30), kind="blocks"),
    Case("empty shard", (0, 50), layout="BSHD"),
    Case("band", (40, 40), kind="band"),
    Case("uneven heads", (32, 17), heads=3, kv_heads=3),
    Case("one head", (32, 17), heads=1, kv_heads=1),
    Case("grouped", (33, 31), heads=6, kv_heads=2),
    Case("grouped, dealt one by one", (33, 31), heads=3, kv_heads=1),
    Case("text behind", (30, 33), text=11, layout="BSHD"),
    Case("text before", (30, 33), text=11, text_first=True, kind="tokens"),
    Case("tokens", (21, 35), kind="tokens", block=(16, 24)),
    Case("ragged blocks", (41, 20), kind="ragged"),
    Case("slices", (48, 16), kind="slices"),
    Case("one mask for all", (33, 33), batch=2, mask_heads=1),
    Case("a mask for each of a batch", (33, 20), batch=2, mask_batch=2),
    Case("other keys", (20, 12), kv_lengths=(8, 41)),
    Case("bfloat16", (40, 30), dtype="bfloat16"),
    Case("scale", (32, 16), scale=0.7),
    Case("nothing kept", (32, 16), density=0.0),
)

#: For four ranks, hybrids too.
FOUR = tuple(
    Case(**{**vars(case), "lengths": lengths, "schemes": ("ulysses", "ring", (2, 2))})
    for case, lengths in (
        (Case("even", ()), (16, 16, 16, 16)),
        (Case("ragged tail", (), layout="BSHD", block=(16, 32)), (20, 20, 20, 7)),
        (Case("empty shards", (), heads=5, kv_heads=5), (24, 0, 31, 0)),
        (Case("band", (), kind="band"), (32, 32, 32, 32)),
        (Case("fewer heads than ranks", (), heads=3, kv_heads=3), (16, 9, 16, 16)),
        (Case("grouped", (), heads=8, kv_heads=2, layout="BSHD"), (17, 16, 15, 9)),
        (Case("text behind", (), text=9, layout="BSHD"), (16, 16, 16, 13)),
        (Case("text before", (), text=9, text_first=True, heads=6, kv_heads=3), (16, 0, 16, 13)),
        (Case("tokens", (), kind="tokens", block=(16, 24)), (11, 18, 5, 20)),
        (Case("ragged blocks", (), kind="ragged", batch=2), (11, 18, 5, 20)),
        (Case("bfloat16", (), dtype="bfloat16", text=5), (20, 18, 7, 20)),
    )
)
