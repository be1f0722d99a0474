"""One head's mask by a published rule, on the small grid of a model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.bench import clips
from tessera_cupy.bench.rules import find
from tessera_cupy.errors import wrong
from tessera_cupy.explore.choices import BlockSize, block_parameter, model_of, small_grid
from tessera_cupy.explore.features import read_features
from tessera_cupy.masks import BlockMask, KeySlices
from tessera_cupy.permute import TokenOrders
from tessera_cupy.sparsifiers.parameters import whole
from tessera_cupy.video import VideoGrid


@dataclass(frozen=True, eq=False)
class Scene:
    """A mask of one head, and what it is a mask of.

    Attributes:
        model: name in :data:`tessera_cupy.video.MODELS`.
        grid: the grid of its tokens, cut down from the model's.
        rule: name in :data:`tessera_cupy.bench.rules.RULES`.
        head: number of the head.
        source: what q and k were made from, in words.
        mask: the mask, with one batch and head.
        order: (tokens,) the raster index of the query at each place of the sequence.
        kv_order: the same for keys.
    """

    model: str
    grid: VideoGrid
    rule: str
    head: int
    source: str
    mask: BlockMask | KeySlices
    order: NDArray[Any]
    kv_order: NDArray[Any]


def make_scene(
    model: str,
    rule: str,
    head: int = 0,
    block_size: BlockSize | None = None,
    grid: VideoGrid | None = None,
) -> Scene:
    """Have a rule choose one head's mask; the same arguments give the same object.

    Args:
        model: name in :data:`tessera_cupy.video.MODELS`.
        rule: name in :data:`tessera_cupy.bench.rules.RULES`; its parameters are the published ones,
            fitted to the grid.
        head: one of the model's heads.
        block_size: of :func:`~tessera_cupy.explore.choices.block_sizes`; None for the rule's own.
        grid: another grid than :func:`~tessera_cupy.explore.choices.small_grid`.

    Raises:
        TypeError: a head that is no int.
        ValueError: a model, rule, head or block size that there is not, or a grid with text.
        MissingExtraError: a package that the rule needs is not installed.
    """
    last = model_of(model).heads - 1
    # An int of Python's: equal ones of other types would find each other's scenes.
    head = whole("head", head, 0, last, f"pick one of {model}'s", f"from 0 to {last}")
    block_parameter(rule, block_size)
    if grid is not None and grid.text_tokens:
        got = f"{grid} with {grid.text_tokens} text tokens"
        raise ValueError(wrong("grid", "a grid without text", got, "leave its text out"))
    return _scene(model, rule, head, block_size, grid or small_grid(model))


@lru_cache(maxsize=64)
def _scene(
    model: str, rule: str, head: int, block_size: BlockSize | None, grid: VideoGrid
) -> Scene:
    chooser = find(rule)
    features, source = _features(grid)
    made = clips.project(
        features, grid, head, head_dim=model_of(model).head_dim, sharpen=chooser.sharpen
    )
    q, k, v = (x[None, None] for x in made)
    given = {**chooser.parameters(grid, [head]), **block_parameter(rule, block_size)}
    if chooser.by_values:
        given["v"] = v
    chosen = chooser.module.select(q, k, grid, **given)
    order = _order(chosen.orders)
    kv_order = order if chosen.kv_orders is None else _order(chosen.kv_orders)
    return Scene(model, grid, rule, head, source, chosen.mask, order, kv_order)


@lru_cache(maxsize=8)
def _features(grid: VideoGrid) -> tuple[NDArray[Any], str]:
    return read_features(grid)


def _order(orders: TokenOrders) -> NDArray[Any]:
    """The order of the one head that there is."""
    which = 0 if orders.choice is None else int(orders.choice[0, 0])
    order: NDArray[np.int32] = orders.orders[which]
    return order
