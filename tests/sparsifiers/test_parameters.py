"""Every rule's parameters: what is of another kind, or out of range, is refused by its name."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tessera_cupy import BlockMask, KeySlices
from tessera_cupy.sparsifiers import (
    chipmunk,
    fg_attn,
    longcat,
    nabla,
    parameters,
    radial,
    spade,
    spargeattn,
    ssta,
    sta,
    static,
    svg,
    svg2,
    svg_attention,
    vsa,
    xattention,
)
from tessera_cupy.video import VideoGrid

GRID = VideoGrid(4, 8, 8)
Q, K, V = np.random.default_rng(0).standard_normal((3, 1, 2, GRID.tokens, 8), np.float32)

#: Rules, and what they need to have a mask of so small a grid.
RULES: dict[Any, dict[str, Any]] = {
    spade: {},
    vsa: {},
    longcat: {},
    sta: {"windows": (1, 1, 1)},
    ssta: {"window": (1, 1, 1), "keep": 1},
    radial: {"block": 64},
    svg: {"v": V},
    svg2: {"q_clusters": 4, "k_clusters": 6, "iterations": 1},
    spargeattn: {"order": "raster"},
    xattention: {},
    nabla: {},
    fg_attn: {},
    chipmunk: {},
    static: {"reach": 8},
}
#: What is none of a number, a name, a tile, arrays, or a switch.
NEVER: list[Any] = [
    *("x", b"1", object(), 1j, np.complex64(1), {}, [], [1], [[1, 1], [2]], 1.5j),
    *((1.5, 1, 1), ("a", "b", "c"), (1, 2, 3, 4), (-1, 1, 1), (0, 0, 0)),
    *(math.nan, (math.nan, 1, 1), (10**400, 1, 1)),
]
#: What some take and others do not.
SOMETIMES: list[Any] = [
    *(True, np.bool_(True), 1.0, 1.5, 0, -1, 2**70, 10**400, math.inf, -math.inf, np.array(0.5)),
    *(np.float16(0.25), np.float32(0.5), np.float64(2), np.int64(1), np.int32(3), (1, 2), None),
    *((1, 2, 3), ((1, 1, 1),), ((1, 1, 1), (1, 1, 1)), (True, True), (1.0, 2.0)),
    *((None, None), np.array([1, 2])),
]
#: Of iterations, which are as many as they are said to be.
MOST = 100


def options(call: Callable[..., Any]) -> list[str]:
    found = inspect.signature(call).parameters.values()
    return [p.name for p in found if p.kind is p.KEYWORD_ONLY and p.name != "stream"]


def cases() -> list[Any]:
    made = [
        pytest.param(rule.select, (Q, K, GRID), rest, name, id=f"{rule.__name__}-{name}")
        for rule, rest in RULES.items()
        for name in options(rule.select)
    ]
    calls = (
        (svg_attention.svg_attention, (Q, K, V, GRID)),
        (svg.route, (Q, K, V, GRID)),
    )
    made += [
        pytest.param(call, arrays, {}, name, id=f"{call.__name__}-{name}")
        for call, arrays in calls
        for name in options(call)
    ]
    masks = ((svg.spatial_mask, "frames"), (svg.temporal_mask, "places"), (svg.windows, "keep"))
    made += [
        pytest.param(call, (GRID,), {}, name, id=f"{call.__name__}-{name}") for call, name in masks
    ]
    fixed = (radial.mask, sta.mask, static.mask, svg.windows)
    made += [pytest.param(call, (), {}, "grid", id=f"{call.__module__}-grid") for call in fixed]
    return made


def refused(call: Callable[[], Any], name: str, *, always: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            call()
        except (TypeError, ValueError) as error:
            # A radial block, and a window's frames and places, are checked by other names too.
            names = {"block": "block_size", "reach": "frames"}
            words = str(error)
            assert words.startswith((f"`{name}`: expected ", f"`{names.get(name)}`: expected "))
            assert ". Fix: " in words
        else:
            assert not always


@pytest.mark.parametrize(("call", "arrays", "rest", "name"), cases())
def test_what_no_rule_takes_is_refused_by_name(
    call: Callable[..., Any], arrays: Any, rest: dict[str, Any], name: str
) -> None:
    for value in NEVER:
        refused(lambda value=value: call(*arrays, **rest | {name: value}), name, always=True)
    for value in SOMETIMES:
        if name != "iterations" or not isinstance(value, int) or value < MOST:
            refused(lambda value=value: call(*arrays, **rest | {name: value}), name, always=False)


@pytest.mark.parametrize("name", ["heads", "batch"])
@pytest.mark.parametrize("axis", [1.0, True, None, "1", np.float32(1), np.array(1), [1]])
def test_axes_that_are_no_integers(name: str, axis: Any) -> None:
    for make in (
        lambda: KeySlices.from_csr([0, 1], [0], 64, (64, 8), **{name: axis}),
        lambda: BlockMask.from_csr([0, 1], [0], (1, 1), (64, 64), **{name: axis}),
    ):
        with pytest.raises(TypeError, match=f"`{name}`: expected an int"):
            make()
    assert KeySlices.from_csr([0, 1], [0], 64, (64, 8), **{name: np.int64(1)}).nnz == 1


@pytest.mark.parametrize("block_kv", [None, "16", 16.0, True, [16]])
def test_blocks_of_slices_that_are_no_integer(block_kv: Any) -> None:
    with pytest.raises(TypeError, match="`block_kv`: expected an int"):
        KeySlices.from_groups([[1]], 64).to_block_mask(block_kv)


def test_numbers_beyond_float64_are_infinite() -> None:
    assert parameters.real("x", 10**400, "", "") == math.inf
    assert parameters.real("x", -(10**400), "", "") == -math.inf
    # A threshold above all bounds keeps nothing, one below all of them everything.
    for threshold, kept in ((10**400, 0), (-(10**400), GRID.tokens)):
        counts = fg_attn.select(Q, K, GRID, threshold=threshold).mask.row_counts()
        assert (counts == kept).all()
    # As wide as the grid, and as many sinks as there are blocks.
    everything = [{"diagonal": 10**300}, {"sinks": 10**400}]
    for options in everything:
        assert spade.select(Q, K, GRID, **options).mask.density() == 1
    wide = VideoGrid(3, 16, 16)
    assert radial.mask(wide, decay=1e308, block=64).density() == 1
    assert radial.mask(wide, decay=0.1, block=64).density() < 1


def test_a_seed_draws_the_same_keys_again() -> None:
    def chosen(seed: Any) -> Any:
        return chipmunk.select(Q, K, GRID, top=0.0, random=0.3, seed=seed).mask.to_dense()

    assert (chosen(5) == chosen(np.int64(5))).all()
    assert (chosen(5) != chosen(6)).any()
