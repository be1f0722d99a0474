"""Sparse VideoGen's rule: each head is spatial or temporal, by the error on sampled query rows.

With frame ``f`` and place ``p`` (row and column) of a token, query ``i`` keeps key ``j`` where

    spatial    |f(i) - f(j)| <= frames   or  f(j) = 0
    temporal   |p(i) - p(j)| <= places   or  f(j) = 0

The first frame is a sink of both; text attends to all and all attend to it. The coordinates are
exact: masks carry token bits where a window's end crosses a block. In temporal-major order, frame
0 first and then place by place, a temporal head's keys are the sink and one band.

Of each head some query rows are drawn, in short runs; their attention under either pattern is
compared with their dense attention, and the pattern with the smaller sum of squared errors is the
head's.

Source: Sparse VideoGen (arXiv 2502.01776), with windows for its published kept fractions of 0.25 to
0.30; the masks are exact in coordinates, as Splash attention's, not rounded to blocks.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera_cupy import gpus
from tessera_cupy.attention import block_sparse_attention
from tessera_cupy.errors import wrong
from tessera_cupy.kernels.copies import DeviceCopies
from tessera_cupy.kernels.lifetime import keep_while, pool_may_grow
from tessera_cupy.kernels.route import choose_routes
from tessera_cupy.masks import BlockMask, interval_mask
from tessera_cupy.permute import TokenOrders
from tessera_cupy.sparsifiers.parameters import whole
from tessera_cupy.sparsifiers.selection import Selection, check_grid, checked_inputs
from tessera_cupy.video import VideoGrid

#: The two routes, as :func:`route` numbers them.
SPATIAL, TEMPORAL = 0, 1
#: Blocks of the masks: query rows of one tile, and keys of one fragment.
BLOCK = (128, 64)
#: Share of the video's query rows by which heads are routed. With 1%, routes and orders take 6.6%
#: of the attention of 40 heads at 21x45x80 on an H200.
SAMPLE = 0.0075
#: Blocks of the mask of temporal heads in raster order: query rows that are gathered together.
UNIT_BLOCK = (16, 16)
#: Neighbouring query rows that are drawn together: the lists of a whole tile are then nearly one.
RUN = BLOCK[0]

_Int = NDArray[np.int64]


class Windows(NamedTuple):
    """Reach of the patterns: in frames of a spatial head, in places of a temporal one."""

    frames: int
    places: int


def windows(grid: VideoGrid, keep: float = 0.3) -> Windows:
    """The widest windows whose masks keep at most a fraction of all pairs.

    A window of 0 keeps the sink and the query's own frame or place, which can be more.

    Args:
        grid: the grid of the tokens.
        keep: kept fraction, above 0 and up to 1; 0.25 to 0.30 were published.

    Raises:
        ValueError: ``keep`` is no such fraction.

    >>> windows(VideoGrid(21, 45, 80), 0.3)
    Windows(frames=2, places=513)
    """
    check_grid(grid)
    _check_fraction("keep", keep, "pass 0.3 for 30%")
    return _widest_windows(grid, float(keep))


@lru_cache(maxsize=64)
def _widest_windows(grid: VideoGrid, keep: float) -> Windows:
    most = keep * grid.tokens**2
    frames = _widest(grid.t, lambda reach: spatial_pairs(grid, reach) <= most)
    places = _widest(grid.frame_tokens, lambda reach: temporal_pairs(grid, reach) <= most)
    return Windows(frames, places)


def _widest(count: int, fits: Any) -> int:
    """The largest reach below ``count`` that fits, by bisection; 0 if none does."""
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def spatial_pairs(grid: VideoGrid, frames: int) -> int:
    """Pairs of tokens that a spatial head keeps."""
    kept = sum(_reached(t, frames, grid.t) + (t > frames) for t in range(grid.t))
    return kept * grid.frame_tokens**2 + _text_pairs(grid)


def temporal_pairs(grid: VideoGrid, places: int) -> int:
    """Pairs of tokens that a temporal head keeps."""
    place = np.arange(grid.frame_tokens)
    band = np.minimum(place + places + 1, len(place)) - np.maximum(place - places, 0)
    kept = int(band.sum()) * (grid.t - 1) + len(place) ** 2
    return kept * grid.t + _text_pairs(grid)


def _reached(at: int, reach: int, count: int) -> int:
    return min(at + reach + 1, count) - max(at - reach, 0)


def _text_pairs(grid: VideoGrid) -> int:
    return grid.tokens**2 - grid.video_tokens**2


def spatial_mask(grid: VideoGrid, frames: int) -> BlockMask:
    """The mask of a spatial head, over tokens in raster order; the same object for the same grid.

    Raises:
        ValueError: ``frames`` is no reach within the grid.

    >>> mask = spatial_mask(VideoGrid(4, 4, 8), 1)
    >>> mask.active_pairs() == (3 + 3 + 4 + 3) * 32**2 - 32**2
    True
    """
    check_grid(grid)
    return _spatial_mask(grid, _checked_reach("frames", frames, grid.t))


@lru_cache(maxsize=8)
def _spatial_mask(grid: VideoGrid, frames: int) -> BlockMask:
    token = np.arange(grid.tokens) - grid.video_start
    return interval_mask(*_spatial(grid, token, frames), BLOCK, grid.tokens)


def temporal_mask(grid: VideoGrid, places: int) -> BlockMask:
    """The mask of a temporal head, over tokens in :meth:`VideoGrid.temporal_order`.

    Raises:
        ValueError: ``places`` is no reach within a frame.
    """
    check_grid(grid)
    return _temporal_mask(grid, _checked_reach("places", places, grid.frame_tokens))


@lru_cache(maxsize=8)
def _temporal_mask(grid: VideoGrid, places: int) -> BlockMask:
    token = grid.temporal_order() - grid.video_start
    place, start = token % grid.frame_tokens, grid.video_start
    behind = start + grid.frame_tokens  # where frame 0 ends
    further = grid.t - 1
    first = behind + np.maximum(place - places, 0) * further
    last = behind + np.minimum(place + places + 1, grid.frame_tokens) * further
    begin = np.stack([np.full_like(token, start), first], axis=1)
    end = np.stack([np.full_like(token, behind), last], axis=1)
    return interval_mask(*_with_text(grid, token, begin, end), BLOCK, grid.tokens)


def raster_temporal_mask(grid: VideoGrid, places: int) -> BlockMask:
    """The same over tokens in raster order, in which a temporal head keeps a run of each frame.

    Its query blocks are 16 neighbouring places of a frame, the unit that tiles gather: regrouped,
    a tile takes the blocks of the same places in several frames, which keep the same keys.

    Raises:
        ValueError: ``places`` is no reach within a frame.
    """
    check_grid(grid)
    return _raster_temporal_mask(grid, _checked_reach("places", places, grid.frame_tokens))


@lru_cache(maxsize=8)
def _raster_temporal_mask(grid: VideoGrid, places: int) -> BlockMask:
    token, size = np.arange(grid.tokens) - grid.video_start, grid.frame_tokens
    place, frame = token % size, np.arange(1, grid.t)
    begin = frame * size + np.maximum(place - places, 0)[:, None]
    end = frame * size + np.minimum(place + places + 1, size)[:, None]
    sink = np.zeros((grid.tokens, 1), np.int64)
    begin = grid.video_start + np.concatenate([sink, begin], axis=1)
    end = grid.video_start + np.concatenate([sink + size, end], axis=1)
    return interval_mask(*_with_text(grid, token, begin, end), UNIT_BLOCK, grid.tokens)


@lru_cache(maxsize=8)
def orders(grid: VideoGrid) -> TokenOrders:
    """The orders of spatial and temporal heads: raster, and temporal-major."""
    return TokenOrders(np.stack([np.arange(grid.tokens), grid.temporal_order()]))


class Samples(NamedTuple):
    """The query rows by which heads are routed, the same for all heads.

    Keys are in classes: of both patterns, of the spatial alone, of the temporal alone, of neither
    in even frames and in odd ones, which are so many. Attention over each class and its LSE give
    dense attention and that of the patterns, and each product of a query and a key is computed
    once.

    Attributes:
        tokens: (n,) int32, ascending: runs of :data:`RUN` neighbours, so that the rows of a tile
            keep nearly the same keys.
        mask: (n, tokens) of five heads, the classes.
    """

    tokens: NDArray[np.int32]
    mask: BlockMask


def samples(grid: VideoGrid, reach: Windows, fraction: float, seed: int) -> Samples:
    """Draw query rows: whole runs, without replacement.

    Args:
        grid: the grid of the tokens.
        reach: the windows of the patterns.
        fraction: of the video's tokens that are drawn at most; one run at least is, if there is.
        seed: draws other rows.

    Raises:
        TypeError: windows that are no pair of integers.
        ValueError: ``fraction`` is not above 0 and up to 1, a seed that is none, or a window beyond
            the grid.
    """
    _check_fraction("sample", fraction, "pass 0.01 for 1%")
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise ValueError(wrong("seed", "an int from 0", repr(seed), "pass 0, or another number"))
    if not isinstance(reach, tuple) or len(reach) != 2:
        expected, fix = "a pair, (frames, places)", "pass what windows(grid, keep) gives"
        raise TypeError(wrong("reach", expected, repr(reach), fix))
    frames = _checked_reach("frames", reach[0], grid.t)
    places = _checked_reach("places", reach[1], grid.frame_tokens)
    return _samples(grid, Windows(frames, places), float(fraction), int(seed))


@lru_cache(maxsize=8)
def _samples(grid: VideoGrid, reach: Windows, fraction: float, seed: int) -> Samples:
    runs = grid.video_tokens // RUN
    drawn = max(1, int(fraction * grid.video_tokens) // RUN)
    token = np.arange(grid.video_tokens)
    if drawn <= runs and drawn * RUN < grid.video_tokens:
        first = np.sort(np.random.default_rng(seed).choice(runs, drawn, replace=False))
        token = (first[:, None] * RUN + np.arange(RUN)).ravel()
    mask = interval_mask(*_classes(grid, token, reach), BLOCK, grid.tokens)
    tokens = (grid.video_start + token).astype(np.int32)
    tokens.setflags(write=False)
    return Samples(tokens, mask)


def _classes(grid: VideoGrid, token: _Int, reach: Windows) -> tuple[_Int, _Int]:
    """Key intervals of the classes, (5, n, intervals), for video tokens in raster order."""
    size, frames = grid.frame_tokens, np.arange(grid.t)
    frame, place = np.divmod(token, size)
    # Each frame is cut in three: before, within and behind the places of the temporal pattern.
    cuts = np.zeros((len(token), grid.t, 4), np.int64)
    cuts[..., 1] = np.maximum(place - reach.places, 0)[:, None]
    cuts[..., 2] = np.minimum(place + reach.places + 1, size)[:, None]
    cuts[..., 3] = size
    cuts += grid.video_start + size * frames[:, None]
    near = (abs(frame[:, None] - frames) <= reach.frames)[..., None] | np.zeros(3, bool)
    temporal = np.array([False, True, False]) | np.zeros_like(near)
    near[:, 0] = temporal[:, 0] = True  # the sink
    begin, end = cuts[..., :3], cuts[..., 1:]
    even = (frames % 2 == 0)[:, None]
    neither = ~near & ~temporal
    of_class = (
        near & temporal,
        near & ~temporal,
        ~near & temporal,
        neither & even,
        neither & ~even,
    )
    sides = []
    for kept in of_class:
        lists = np.where(kept, begin, 0), np.where(kept, end, 0)
        sides.append([x.reshape(len(token), -1) for x in lists])
    first, last = (np.stack(side) for side in zip(*sides, strict=True))
    text = 0 if grid.text_first else grid.video_tokens
    pad = ((0, 0), (0, 0), (0, 1))
    first, last = np.pad(first, pad), np.pad(last, pad)
    first[0, :, -1], last[0, :, -1] = text, text + grid.text_tokens
    return first, last


def route(
    q: Any,
    k: Any,
    v: Any,
    grid: VideoGrid,
    *,
    reach: Windows | None = None,
    keep: float = 0.3,
    sample: float = SAMPLE,
    seed: int = 0,
    sm_scale: float | None = None,
) -> Any:
    """The route of each head; on a GPU nothing waits for it.

    Args:
        q: (batch, heads, tokens, d) in raster order, NumPy or CuPy; on a GPU float16 or bfloat16.
        k: likewise.
        v: likewise.
        grid: the grid of the tokens.
        reach: the windows of the patterns; None takes the widest that ``keep`` allows.
        keep: kept fraction of the patterns.
        sample: fraction of the video's query rows that are drawn.
        seed: draws other rows.
        sm_scale: as in :func:`tessera_cupy.block_sparse_attention`.

    Returns:
        (batch, heads) int32, NumPy or CuPy as q: :data:`SPATIAL` or :data:`TEMPORAL`. A head for
        which both patterns are as close is spatial.

    Raises:
        TypeError, ValueError: as :func:`select`.
    """
    kept: list[Any] = []
    xp = checked_inputs(q, k, grid, watch=False)
    capturing = xp is not np and xp.cuda.get_current_stream().is_capturing()
    reach = windows(grid, keep) if reach is None else reach
    with pool_may_grow() if capturing else nullcontext():
        routes = route_checked(q, k, v, grid, reach, sample, seed, sm_scale, kept)
    if capturing:
        keep_while(routes, kept)
    return routes


def route_checked(
    q: Any,
    k: Any,
    v: Any,
    grid: VideoGrid,
    reach: Windows,
    sample: float,
    seed: int,
    sm_scale: float | None,
    kept: list[Any],
) -> Any:
    """:func:`route` of inputs that were checked.

    What must live while a graph that captured the call may be replayed is put into ``kept``.
    """
    _check_values(q, v)
    drawn = samples(grid, reach, sample, seed)
    kept.append(drawn)
    entries = [_Entry(q[b], k[b], v[b], drawn, sm_scale) for b in range(len(q))]
    if isinstance(q, np.ndarray):
        return np.stack([_route_on_host(entry) for entry in entries])
    import cupy

    routes = cupy.empty(q.shape[:2], np.int32)
    for b, entry in enumerate(entries):
        _route_on_gpu(entry, routes[b], kept)
    return routes


class _Entry(NamedTuple):
    """A batch entry: (heads, tokens, d) arrays, and how it is routed."""

    q: Any
    k: Any
    v: Any
    drawn: Samples
    sm_scale: float | None

    def attend(self, taken: Any) -> tuple[Any, Any]:
        """O and LSE of the drawn rows, (heads, classes, rows, ..), from their queries."""
        heads, _, d = self.q.shape
        mask = self.drawn.mask
        taken = taken.reshape(heads, mask.heads, len(self.drawn.tokens), d)
        k, v = self.k[:, None], self.v[:, None]
        o, lse = block_sparse_attention(taken, k, v, mask, sm_scale=self.sm_scale, return_lse=True)
        return o, lse

    def rows(self) -> NDArray[np.int32]:
        """The drawn tokens, once for each class."""
        return np.tile(self.drawn.tokens, self.drawn.mask.heads)


def _route_on_host(entry: _Entry) -> NDArray[np.int32]:
    o, lse = entry.attend(entry.q[:, entry.rows()])
    values = o.astype(np.float32)

    def of(classes: list[int]) -> NDArray[np.float32]:
        # By their own largest LSE: keys far below those of all others count in theirs.
        among = lse[:, classes]
        weight = np.exp(among - among.max(axis=1, keepdims=True))[..., None]
        mean: NDArray[np.float32] = (weight * values[:, classes]).sum(axis=1) / weight.sum(axis=1)
        return mean

    dense = of([0, 1, 2, 3, 4])
    errors = [((of([0, alone]) - dense) ** 2).sum(axis=(1, 2)) for alone in (1, 2)]
    closer: NDArray[np.int32] = (errors[TEMPORAL] < errors[SPATIAL]).astype(np.int32)
    return closer


def _route_on_gpu(entry: _Entry, out: Any, kept: list[Any]) -> None:
    """Write the routes of a batch entry."""
    import cupy

    copies = _copies(entry.rows().tobytes())
    rows, uses = copies.here()
    # As bits, which CuPy can gather of every dtype.
    taken = entry.q.view(np.uint16)[:, rows].view(entry.q.dtype)
    stream = cupy.cuda.get_current_stream()
    if not stream.is_capturing():
        uses.record(stream)
    o, lse = entry.attend(taken)
    errors = choose_routes(o, lse, gpus.arch_of(out.device.id).name, out)
    kept += [copies, taken, o, lse, errors]


def select(
    q: Any,
    k: Any,
    grid: VideoGrid,
    *,
    v: Any = None,
    keep: float = 0.3,
    sample: float = SAMPLE,
    seed: int = 0,
) -> Selection:
    """Route the heads, and give each the mask and the order of its route.

    The mask is made on the host, which waits for the routes;
    :func:`tessera_cupy.sparsifiers.svg_attention.svg_attention` does neither.

    Args:
        q: (batch, heads, tokens, d) queries in raster order, NumPy or CuPy.
        k: likewise.
        grid: the grid of the tokens.
        v: the values, by whose attention heads are routed; to be given, unlike for other rules.
        keep: kept fraction of the patterns; 0.25 to 0.30 were published.
        sample: fraction of the video's query rows that are drawn.
        seed: draws other rows.

    Returns:
        A selection with notes ``"routes"``, (batch, heads) int32, and ``"windows"``.

    Raises:
        TypeError: arrays of other kinds, no values, or a grid that is none.
        ValueError: shapes that do not fit, NaN in NumPy arrays, fractions that are none.

    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 2, 480, 16), np.float32)
    >>> chosen = select(q, k, VideoGrid(6, 8, 10), v=v)
    >>> chosen.notes["windows"]
    Windows(frames=0, places=6)
    """
    checked_inputs(q, k, grid)
    if v is None:
        expected = "the values, by whose attention heads are routed"
        raise TypeError(wrong("v", expected, "none", "pass v=v, in raster order as q and k"))
    reach = windows(grid, keep)
    routes = route(q, k, v, grid, reach=reach, sample=sample, seed=seed)
    routes = routes if isinstance(routes, np.ndarray) else routes.get()
    return selection_of(grid, reach, routes)


def selection_of(grid: VideoGrid, reach: Windows, routes: NDArray[np.int32]) -> Selection:
    """The masks and orders of heads whose routes the host knows, (batch, heads)."""
    masks = (spatial_mask(grid, reach.frames), temporal_mask(grid, reach.places))
    notes = {"routes": routes, "windows": reach}
    return Selection(_of_routes(masks, routes), orders(grid).choosing(routes), notes)


def _of_routes(masks: tuple[BlockMask, BlockMask], routes: NDArray[np.int32]) -> BlockMask:
    """The mask in which each head has that of its route."""
    first = masks[0]
    pair = [
        first.partial,
        np.where(masks[1].partial < 0, -1, masks[1].partial + len(first.token_bits)),
    ]
    taken = routes.ravel()
    counts = [np.diff(mask.indptr) for mask in masks]
    batch, heads = routes.shape
    bits = np.concatenate([mask.token_bits for mask in masks])
    return BlockMask.from_csr(
        np.concatenate([[0], np.cumsum(np.concatenate([counts[i] for i in taken]))]),
        np.concatenate([masks[i].indices for i in taken]),
        first.num_blocks,
        first.block_size,
        first.shape,
        batch=batch,
        heads=heads,
        partial=np.concatenate([pair[i] for i in taken]) if len(bits) else None,
        token_bits=bits if len(bits) else None,
    )


def _spatial(grid: VideoGrid, token: _Int, frames: int) -> tuple[_Int, _Int]:
    """Key intervals of video tokens, numbered within the video, in raster order."""
    frame, size, start = token // grid.frame_tokens, grid.frame_tokens, grid.video_start
    begin = np.stack([np.zeros_like(frame), np.maximum(frame - frames, 0)], axis=1)
    end = np.stack([np.ones_like(frame), np.minimum(frame + frames + 1, grid.t)], axis=1)
    return _with_text(grid, token, start + begin * size, start + end * size)


def _with_text(grid: VideoGrid, token: _Int, begin: _Int, end: _Int) -> tuple[_Int, _Int]:
    """Text is kept by all and keeps all; tokens outside of the video are text."""
    if not grid.text_tokens:
        return begin, end
    first = 0 if grid.text_first else grid.video_tokens
    text = np.full((len(token), 1), first)
    begin = np.concatenate([begin, text], axis=1)
    end = np.concatenate([end, text + grid.text_tokens], axis=1)
    own = (token < 0) | (token >= grid.video_tokens)
    begin[own], end[own] = 0, grid.tokens
    return begin, end


def _check_fraction(name: str, value: Any, fix: str) -> None:
    real = isinstance(value, int | float | np.floating | np.integer)
    number = real and not isinstance(value, bool)
    if not (number and 0 < value <= 1):
        raise ValueError(wrong(name, "a fraction above 0, up to 1", repr(value), fix))


def _checked_reach(name: str, reach: Any, count: int) -> int:
    expected = f"a reach from 0 to {count - 1}"
    return whole(name, reach, 0, count - 1, "pass one within the grid", expected)


def _check_values(q: Any, v: Any) -> None:
    if type(v) is not type(q) or v.shape != q.shape or v.dtype != q.dtype:
        got = f"{type(v).__name__} of {getattr(v, 'dtype', None)}, {getattr(v, 'shape', None)}"
        raise ValueError(
            wrong("v", f"an array like q, {q.dtype}, {q.shape}", got, "repeat grouped heads first")
        )


@lru_cache(maxsize=16)
def _copies(indices: bytes) -> DeviceCopies:
    """Copies on GPUs of int32 indices."""
    return DeviceCopies(np.frombuffer(indices, np.int32))
