"""The masks that a profile is measured on: block families, rules and slices, of many sizes.

A request for a mask is a :class:`Recipe`; all are drawn by seed, and dealt out kind by kind, so
that a profile that ends early has some of every kind. Masks that read q and k are regenerated from
video frames; a third of the others are random, whose rows have nothing in common.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from tessera_cupy.bench import clips
from tessera_cupy.bench.families import FAMILIES, Family
from tessera_cupy.bench.rules import RULES
from tessera_cupy.errors import wrong
from tessera_cupy.masks import BlockMask, KeySlices
from tessera_cupy.sparsifiers import fg_attn, spade, vsa
from tessera_cupy.sparsifiers.selection import namespace
from tessera_cupy.video import VideoGrid

#: Kinds of masks: families of blocks, rules whose blocks are of other shapes, slices of keys, and
#: smaller blocks of which every one is kept, as rules do in a sampler's first steps.
KINDS = (
    *(family.name for family in FAMILIES),
    "vsa",
    "sta",
    "svg2",
    "slices-64",
    "slices-128",
    "dense-64",
    "dense-32",
)
#: Clip and layers (seeds) that profiles are made from; the rest is kept for judging them.
PROFILE_CLIP, PROFILE_LAYERS = "bikes", range(8)
HELD_OUT_CLIP, HELD_OUT_LAYERS = "carphone_pristine", range(100, 104)

#: Grids of the tokens, from few to many.
GRIDS = (
    VideoGrid(8, 16, 32),  # 4,096 tokens
    VideoGrid(9, 30, 30),  # 8,100
    VideoGrid(13, 30, 45),  # CogVideoX 5B
    VideoGrid(31, 22, 40),  # Wan 2.2 5B
    VideoGrid(21, 30, 52),  # Wan 480p
    VideoGrid(11, 48, 85),  # CogVideoX 1.5
    VideoGrid(16, 45, 80),  # Wan 61 frames 720p
    VideoGrid(21, 45, 80),  # Wan 720p
    VideoGrid(30, 48, 80),  # HunyuanVideo 768p
)
#: That of the published evaluation of block families: 57,600 tokens.
ABLATION_GRID = VideoGrid(16, 45, 80)
_HEADS = (1, 2, 4, 8, 16, 24, 40)
# Kinds get as many recipes as this says of each head dim, relative to one another.
_WEIGHTS = {128: 2, 64: 1}
# The longest attention of a case, in operations: some 10 ms where dense attention is fastest.
_MOST_OPERATIONS = 6e12
#: The longest attention of a small case, in operations: some 0.2 ms.
SMALL_OPERATIONS = 1e11
# Factors on the published density, and the most that a mask that is not dense keeps.
_DENSITY_FACTORS = (0.25, 0.5, 1.0, 1.0, 2.0, 4.0, 7.0)
_MOST_KEPT = 0.9
_RANDOM_SHARE = 1 / 3
# What rules keep whose parameters say something else than how much.
_RULE_KEEPS = {"sta": 0.16, "svg2": 0.17}
# The most entries of a mask, over all heads: bytes where it is made.
_MOST_ENTRIES = 4e8


@dataclass(frozen=True)
class Recipe:
    """How to make one mask.

    Attributes:
        kind: of :data:`KINDS`.
        clip, layer: what q and k are made from; a random mask takes its seed from both.
        grid: of the tokens.
        heads: of the request, each with a mask of its own.
        head_dim: elements of a row of q.
        keep: share of the key blocks (or keys, of slices) that a row keeps.
        random: whether blocks are drawn, whatever q and k are.
    """

    kind: str
    clip: str
    layer: int
    grid: VideoGrid
    heads: int
    head_dim: int
    keep: float
    random: bool = False

    @property
    def source(self) -> str:
        """What cross-validation keeps together."""
        return f"{self.clip} layer {self.layer}"

    @property
    def name(self) -> str:
        """What tells the recipe from others of its source, for people."""
        drawn = " random" if self.random else ""
        return f"{self.kind}{drawn} {self.keep:g} {self.grid} {self.heads}x{self.head_dim}"


def recipes(
    clip: str = PROFILE_CLIP,
    layers: Sequence[int] = PROFILE_LAYERS,
    kinds: Sequence[str] = KINDS,
    *,
    seed: int = 0,
    most_tokens: int | None = None,
    most_active: float = 3e6,
    small_too: bool = False,
) -> Iterator[Recipe]:
    """Recipes without end, dealt out kind by kind; the same arguments give the same ones.

    Args:
        clip: of :data:`tessera_cupy.bench.clips.CLIPS`.
        layers: seeds of the projections.
        kinds: of :data:`KINDS`.
        seed: of the sizes and densities.
        most_tokens: of a grid; None means all grids.
        most_active: entries that a mask may keep over all heads, about: what plans that the host
            makes of it cost grows with these. Slices may keep ten times as many, and blocks that
            are all kept.
        small_too: after all kinds, all again with requests that are soon over. Which plan is best
            for those hangs on how many tiles and multiprocessors there are, so that it takes more
            of them to tell.

    Raises:
        ValueError: an unknown clip or kind, or no grid with so few tokens.

    >>> first = next(recipes(kinds=["Q64K64"]))
    >>> first.kind, first.clip
    ('Q64K64', 'bikes')
    """
    if clip not in clips.CLIPS:
        raise ValueError(wrong("clip", f"one of {', '.join(clips.CLIPS)}", repr(clip), "pick one"))
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(wrong("kinds", f"of {', '.join(KINDS)}", repr(kind), "pick of them"))
    grids = [grid for grid in GRIDS if most_tokens is None or grid.tokens <= most_tokens]
    if not grids:
        least = min(grid.tokens for grid in GRIDS)
        raise ValueError(wrong("most_tokens", f"at least {least}", most_tokens, "allow more"))
    return _recipes(clip, list(layers), list(kinds), seed, grids, most_active, small_too)


def _recipes(
    clip: str,
    layers: list[int],
    kinds: list[str],
    seed: int,
    grids: list[VideoGrid],
    most_active: float,
    small_too: bool,
) -> Iterator[Recipe]:
    rng = np.random.default_rng([seed, *clip.encode(), *layers])
    of_dense, of_small = rng.spawn(2)  # so that the others are the same without them
    dims = [dim for dim, weight in _WEIGHTS.items() for _ in range(weight)]
    sizes = (_MOST_OPERATIONS, SMALL_OPERATIONS) if small_too else (_MOST_OPERATIONS,)
    round_ = 0
    while True:
        for small, operations in enumerate(sizes):
            head_dim = dims[round_ % len(dims)]
            # Small requests of another layer: so the first rounds are of more sources.
            layer = layers[(round_ + small) % len(layers)]
            for kind in kinds:
                dense = kind.startswith("dense-")
                active = most_active * (10 if dense or kind.startswith("slices") else 1)
                source = of_small if small else of_dense if dense else rng
                yield _draw(kind, clip, layer, head_dim, grids, (active, operations), source)
        round_ += 1


def _draw(
    kind: str,
    clip: str,
    layer: int,
    head_dim: int,
    grids: list[VideoGrid],
    most: tuple[float, float],
    rng: np.random.Generator,
) -> Recipe:
    """A recipe; ``most`` are the entries that its mask may keep, and the operations under it."""
    most_active, most_operations = most
    keep = 1.0
    random = False
    if kind in _RULE_KEEPS:
        keep = _RULE_KEEPS[kind]
    elif not kind.startswith("dense"):
        factor = _DENSITY_FACTORS[rng.integers(len(_DENSITY_FACTORS))]
        keep = round(min(_MOST_KEPT, _published(kind) * factor * rng.uniform(0.8, 1.25)), 4)
        random = _family(kind) is not None and bool(rng.random() < _RANDOM_SHARE)
        random |= kind.startswith("slices") and bool(rng.random() < _RANDOM_SHARE)
    entries = {grid: math.prod(_blocks(grid, _block(kind))) for grid in grids}
    operations = {grid: 4 * head_dim * keep * float(grid.tokens) ** 2 for grid in grids}
    fit = [grid for grid in grids if keep * entries[grid] <= most_active]
    if most_operations < _MOST_OPERATIONS:  # a large request may be of any grid, with few heads
        fit = [grid for grid in fit if operations[grid] <= most_operations]
    fit = fit or grids[:1]
    grid = fit[rng.integers(len(fit))]
    most_heads = min(
        most_operations / operations[grid],
        _MOST_ENTRIES / entries[grid],
        most_active / (keep * entries[grid]),
    )
    fitting = [heads for heads in _HEADS if heads <= most_heads] or [1]
    if kind.startswith("dense-"):  # many heads: a small request is soon over, whatever the plan
        fitting = fitting[len(fitting) // 2 :]
    heads = fitting[rng.integers(len(fitting))]
    return Recipe(kind, clip, layer, grid, heads, head_dim, keep, random)


def _published(kind: str) -> float:
    """Share of the key blocks that the kind keeps at its published density."""
    family = _family(kind)
    if family is not None:
        return family.keep
    return 0.1 if kind == "vsa" else 0.2


def _block(kind: str) -> tuple[int, int]:
    """(Query rows, keys) of one entry of the kind's masks."""
    if kind.startswith("slices"):
        return int(kind.removeprefix("slices-")), 1
    if kind.startswith("dense-"):
        size = int(kind.removeprefix("dense-"))
        return size, size
    return next((f.block_size for f in FAMILIES if f.name == kind), (64, 64))


def _family(kind: str) -> Family | None:
    return next((f for f in FAMILIES if f.name == kind and f.keep < 1), None)


class MaskMaker:
    """Makes the masks of recipes; keeps the features of the grids that it has seen.

    Args:
        to_device: takes a NumPy array to where rules shall run, as ``cupy.asarray`` does; masks
            are then over arrays there.

    Example:
        ::

            make = MaskMaker(cupy.asarray)
            mask = make(next(recipes()))
    """

    def __init__(self, to_device: Callable[[Any], Any] = lambda array: array) -> None:
        self._to_device = to_device
        self._features = lru_cache(maxsize=None)(self._read)

    def _read(self, clip: str, grid: VideoGrid) -> Any:
        return self._to_device(clips.read_features(clip, grid))

    def __call__(self, recipe: Recipe) -> BlockMask | KeySlices:
        """The mask of a recipe.

        Raises:
            MissingExtraError: a package that makes the frames is not installed.
        """
        r = recipe
        if r.kind.startswith("dense"):
            block = _block(r.kind)
            every = np.ones((r.heads, *_blocks(r.grid, block)), bool)
            return self._over(self._to_device(every), block, r)
        if r.random:
            return self._random(r)
        q, k, v = self._arrays(r)
        family = _family(r.kind)
        if family is not None:
            tiles = spade.tiles_of(spade.select(q, k, r.grid))
            chosen = spade.select(
                q, k, r.grid, block_size=family.block_size, keep=r.keep, tiles=tiles
            )
            return chosen.mask
        if r.kind.startswith("slices"):
            return fg_attn.select(q, k, r.grid, group=_block(r.kind)[0], budget=r.keep).mask
        if r.kind == "vsa":
            return vsa.select(q, k, r.grid, sparsity=1 - r.keep).mask
        rule = RULES[r.kind]
        return rule.select(q * np.float32(rule.sharpen), k, v, r.grid).mask

    def _arrays(self, r: Recipe) -> list[Any]:
        features = self._features(r.clip, r.grid)
        made = [
            clips.project(features, r.grid, head, head_dim=r.head_dim, seed=r.layer)
            for head in range(r.heads)
        ]
        if isinstance(features, np.ndarray):
            return [np.stack(part)[None] for part in zip(*made, strict=True)]
        import cupy

        return [cupy.stack(part)[None] for part in zip(*made, strict=True)]

    def _random(self, r: Recipe) -> BlockMask | KeySlices:
        rng = np.random.default_rng([*r.source.encode(), r.grid.tokens, r.heads])
        block = _block(r.kind)
        kept = _drawn(_blocks(r.grid, block), r.keep, r.heads, rng, self._to_device)
        if r.kind.startswith("slices"):
            return KeySlices.from_groups(kept, block[0], (r.grid.tokens,) * 2)
        return self._over(kept, block, r)

    def _over(self, kept: Any, block: tuple[int, int], r: Recipe) -> BlockMask:
        return BlockMask.from_dense(kept, block, (r.grid.tokens,) * 2)


def _blocks(grid: VideoGrid, block: tuple[int, int]) -> tuple[int, int]:
    return -(-grid.tokens // block[0]), -(-grid.tokens // block[1])


def _drawn(
    blocks: tuple[int, int],
    keep: float,
    heads: int,
    rng: np.random.Generator,
    to_device: Callable[[Any], Any],
) -> Any:
    """Each entry of (heads, *blocks) kept or not by itself, and one of each row for certain.

    Made of the entries' numbers, with arithmetic alone, so that a GPU makes it where it shall be:
    the host would take seconds for masks of single keys.
    """
    rows, columns = (to_device(np.arange(size, dtype=np.uint32)) for size in blocks)
    places = rows[:, None] * blocks[1] + columns
    kept = namespace(places, "places").empty((heads, *blocks), np.bool_)
    for head in range(heads):
        seeds = [int(seed) for seed in rng.integers(1 << 32, size=2)]
        kept[head] = _mixed(places ^ seeds[0]) < int(keep * 0xFFFFFFFF)
        kept[head] |= (_mixed(rows ^ seeds[1]) % blocks[1])[:, None] == columns
    return kept


def _mixed(numbers: Any) -> Any:
    """Unsigned 32-bit numbers that look drawn, of ones that count up: Wellons' ``lowbias32``."""
    mixed = numbers ^ (numbers >> 16)
    mixed *= 0x7FEB352D
    mixed ^= mixed >> 15
    mixed *= 0x846CA68B
    mixed ^= mixed >> 16
    return mixed
