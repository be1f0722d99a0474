"""Every rule that makes masks: its grid, its parameters, its published density, how it is called.

What runs rules takes them from here: the demo, the benches and the corpus. A rule's parameters are
the published ones on the grid of its model. On smaller grids extents shrink with the grid, so that
every rule runs on any grid; ``small`` is one on which the NumPy code takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Any

from tessera_cupy.errors import wrong
from tessera_cupy.sparsifiers import (
    Selection,
    chipmunk,
    fg_attn,
    longcat,
    nabla,
    radial,
    spade,
    spargeattn,
    ssta,
    sta,
    static,
    svg,
    svg2,
    vsa,
    xattention,
)
from tessera_cupy.video import MODELS, VideoGrid

#: Parameters of a rule, for a grid and the numbers of the heads.
Parameters = Callable[[VideoGrid, Sequence[int]], dict[str, Any]]

# Tiles of STA and SSTA on their models' grids, and on grids of fewer than three of those an axis.
_TILE, _SMALL_TILE = (6, 8, 8), (2, 4, 4)
# A grid of so few tokens has as many tokens a cluster as Wan's 75,600 have.
_TOKENS_A_CLUSTER = (75_600 // 300, 75_600 // 1000)


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        name: as on the command line.
        title: as in text.
        module: the module of :mod:`tessera_cupy.sparsifiers` whose ``select`` it is.
        model: name in :data:`tessera_cupy.video.MODELS`, whose grid without text it is run on.
        density: least and largest published kept fraction of the pairs; None where none is known.
        small: a grid on which every part of the rule has work to do, for machines without a GPU.
        parameters: what ``select`` is told beyond q, k, v and the grid.
        fixed: whether one mask, and its plan, serve many calls: it depends on the grid alone, or
            the model keeps it for several steps.
        by_values: whether ``select`` takes v.
        carries: notes of a selection that the next one begins from, as parameters.
        sharpen: factor on the clips' q at which a rule whose density hangs on q and k comes near
            the published one; models attend more sharply than the clips' tokens do.
    """

    name: str
    title: str
    module: ModuleType
    model: str
    density: tuple[float, float] | None
    small: VideoGrid
    parameters: Parameters = lambda grid, heads: {}
    fixed: bool = False
    by_values: bool = False
    carries: tuple[str, ...] = ()
    sharpen: float = 1.0

    @property
    def grid(self) -> VideoGrid:
        """The model's grid, without text."""
        known = MODELS[self.model].grid
        return VideoGrid(known.t, known.h, known.w)

    @property
    def head_dim(self) -> int:
        """Elements of a row of q in the model."""
        return MODELS[self.model].head_dim

    def select(
        self,
        q: Any,
        k: Any,
        v: Any,
        grid: VideoGrid,
        *,
        first_head: int = 0,
        before: Selection | None = None,
    ) -> Selection:
        """The rule's selection with its published parameters.

        Args:
            q: (batch, heads, tokens, d) in raster order, NumPy or CuPy.
            k: likewise.
            v: likewise.
            grid: the grid of the tokens.
            first_head: number of q's first head, for rules that give heads parameters of their own.
            before: a selection of the step before, for rules that begin from it.

        Raises:
            TypeError, ValueError: as the rule's own ``select``.
            MissingExtraError: a package that the rule needs is not installed.
        """
        given = self.parameters(grid, range(first_head, first_head + q.shape[1]))
        if self.by_values:
            given["v"] = v
        if before is not None:
            given.update({name: before.notes[name] for name in self.carries})
        chosen: Selection = self.module.select(q, k, grid, **given)
        return chosen


def find(name: str) -> Rule:
    """The rule of a name.

    Raises:
        ValueError: there is none.

    >>> find("vsa").grid.tokens
    75600
    """
    if name not in RULES:
        raise ValueError(wrong("rule", f"one of {', '.join(RULES)}", repr(name), "pick one"))
    return RULES[name]


def _tile(grid: VideoGrid) -> tuple[int, int, int]:
    """The published tile where at least three lie along each axis, else a small one."""
    axes = zip((grid.t, grid.h, grid.w), _TILE, strict=True)
    return _TILE if all(-(-n // extent) >= 3 for n, extent in axes) else _SMALL_TILE


def _fitted(window: tuple[int, ...], grid: VideoGrid) -> tuple[int, ...]:
    """A window no larger than the grid; an even extent is that of the whole axis."""
    axes = zip(window, (grid.t, grid.h, grid.w), _tile(grid), strict=True)
    across = [(extent, -(-n // tile)) for extent, n, tile in axes]
    return tuple(n if extent % 2 == 0 else min(extent, n) for extent, n in across)


def _sta(grid: VideoGrid, heads: Sequence[int]) -> dict[str, Any]:
    known = sta.HUNYUAN_WINDOWS
    windows = [_fitted(known[head % len(known)], grid) for head in heads]
    return {"windows": windows, "tile": _tile(grid)}


def _ssta(grid: VideoGrid, heads: Sequence[int]) -> dict[str, Any]:
    return {"window": _fitted((3, 3, 3), grid), "tile": _tile(grid)}


def _radial(grid: VideoGrid, heads: Sequence[int]) -> dict[str, Any]:
    # At least eight to a frame; the model's frame has thirty of 128.
    return {"block": max((n for n in (128, 64, 32) if 8 * n <= grid.frame_tokens), default=16)}


def _svg2(grid: VideoGrid, heads: Sequence[int]) -> dict[str, Any]:
    queries, keys = (max(1, grid.video_tokens // tokens) for tokens in _TOKENS_A_CLUSTER)
    return {"q_clusters": min(300, queries), "k_clusters": min(1000, keys)}


def _window(grid: VideoGrid, dilation: int = 1) -> dict[str, Any]:
    return {"reach": min(256, (grid.tokens - 1) // dilation), "dilation": dilation}


_RULES = (
    Rule(
        "spade",
        "SPADE",
        spade,
        "wan-14b-61f-720p",
        (0.17, 0.19),  # top-k keeps 0.17, and sinks and diagonal add at most 15 of 900 blocks
        VideoGrid(13, 20, 30),
    ),
    Rule("vsa", "VSA", vsa, "wan-14b-81f-720p", (0.10, 0.10), VideoGrid(13, 20, 30)),
    Rule(
        "sta",
        "STA",
        sta,
        "hunyuan-117f-768p",
        (0.165, 0.168),
        VideoGrid(10, 24, 40),
        _sta,
        fixed=True,
    ),
    Rule(
        "ssta",
        "SSTA",
        ssta,
        "hunyuan1.5-121f-720p",
        (0.089, 0.164),
        VideoGrid(11, 23, 40),
        _ssta,
    ),
    Rule("longcat", "LongCat", longcat, "longcat-93f-480p", (0.125, 0.125), VideoGrid(12, 20, 32)),
    Rule(
        "radial",
        "Radial",
        radial,
        "hunyuan-117f-768p",
        (0.275, 0.275),
        VideoGrid(16, 16, 24),
        _radial,
        fixed=True,
    ),
    Rule(
        "svg",
        "SVG",
        svg,
        "hunyuan-129f-720p",
        (0.25, 0.30),
        VideoGrid(13, 16, 24),
        by_values=True,
    ),
    Rule(
        "svg2",
        "SVG2",
        svg2,
        "wan-14b-81f-720p",
        (0.16, 0.18),
        VideoGrid(9, 20, 24),
        _svg2,
        carries=("centroids",),
        sharpen=2.6,
    ),
    Rule(
        "spargeattn",
        "SpargeAttn",
        spargeattn,
        "wan-1.3b-81f-480p",
        (0.37, 0.53),
        VideoGrid(13, 20, 30),
        # Of the two published settings that one whose density does not hang on the data's likeness.
        lambda grid, heads: {"top_k": 0.5, "similarity": -0.1},
    ),
    Rule(
        "xattention",
        "XAttention",
        xattention,
        "hunyuan-129f-720p",
        (0.48, 0.48),
        VideoGrid(13, 20, 30),
        sharpen=1.95,
    ),
    Rule(
        "fg-attn",
        "FG-Attn",
        fg_attn,
        "wan-1.3b-81f-480p",
        None,
        VideoGrid(13, 20, 30),
    ),
    Rule(
        "chipmunk",
        "Chipmunk",
        chipmunk,
        "wan-1.3b-81f-480p",
        (0.05, 0.06),  # the top, and one in a hundred of the others
        VideoGrid(13, 20, 30),
        fixed=True,
    ),
    Rule("nabla", "NABLA", nabla, "wan-14b-81f-720p", None, VideoGrid(13, 20, 30)),
    Rule(
        "window",
        "Sliding window",
        static,
        "wan-1.3b-81f-480p",
        None,
        VideoGrid(13, 20, 30),
        lambda grid, heads: _window(grid),
        fixed=True,
    ),
    Rule(
        "dilated",
        "Dilated window",
        static,
        "wan-1.3b-81f-480p",
        None,
        VideoGrid(13, 20, 30),
        lambda grid, heads: _window(grid, 2),
        fixed=True,
    ),
    Rule(
        "global-local",
        "Global and local",
        static,
        "wan-1.3b-81f-480p",
        None,
        VideoGrid(13, 20, 30),
        lambda grid, heads: {**_window(grid), "anchors": grid.frame_tokens},
        fixed=True,
    ),
)

#: The rules by name.
RULES: Mapping[str, Rule] = MappingProxyType({rule.name: rule for rule in _RULES})
