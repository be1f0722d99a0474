"""Launching the kernels of sparsifiers: pooling, scores, and which blocks of a row are kept.

All launches go to CuPy's current stream of the arrays' GPU, and nothing waits: what the host
decides follows from shapes alone. The NumPy code of :mod:`tessera_cupy.sparsifiers.scoring` says
what the results are.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy import gpus
from tessera_cupy.errors import wrong
from tessera_cupy.kernels import launch
from tessera_cupy.kernels.catalog import ELEMENTS, MAX_HEAD_DIM, builder
from tessera_cupy.kernels.lifetime import Uses, new, release_with
from tessera_cupy.kernels.token_rows import CHUNK, PRODUCT_SMEM, PRODUCT_TILE

_STRIDES = np.dtype([("batch", np.int64), ("head", np.int64), ("row", np.int64)])

#: ``PoolParams`` in pool_blocks.cu.
POOL_PARAMS = np.dtype(
    [
        ("x", np.uint64),
        ("stride", _STRIDES),
        *[(name, np.uint64) for name in ("orders", "choice", "starts")],
        *[(name, np.uint64) for name in ("mean", "high", "low", "alike", "extremes", "flag")],
        *[(name, np.int32) for name in ("planes", "heads", "tokens", "head_dim", "blocks")],
        *[(name, np.int32) for name in ("block", "candidates", "order_count", "normalise")],
        ("vectors", np.int32),
    ],
    align=True,
)
#: ``ChooseOrderParams`` in choose_order.cu.
CHOOSE_ORDER_PARAMS = np.dtype(
    [
        *[(name, np.uint64) for name in ("alike", "choice")],
        *[(name, np.int32) for name in ("candidates", "blocks")],
    ],
    align=True,
)
#: ``BlockScoresParams`` in block_scores.cu.
BLOCK_SCORES_PARAMS = np.dtype(
    [
        *[(name, np.uint64) for name in ("a0", "a1", "b0", "b1", "out")],
        *[(name, np.int32) for name in ("n", "m", "head_dim", "row_tiles", "column_tiles")],
        ("scale", np.float32),
        *[(name, np.int32) for name in ("vectors", "vector_out")],
    ],
    align=True,
)
#: ``BlockProductsParams`` in block_products.cu.
BLOCK_PRODUCTS_PARAMS = np.dtype(
    [
        *[(name, np.uint64) for name in ("a", "b", "out")],
        *[(name, np.int32) for name in ("n", "m", "chunks", "row_tiles", "column_tiles")],
        ("scale", np.float32),
    ],
    align=True,
)
#: ``ExtremeScoresParams`` in extreme_scores.cu.
EXTREME_SCORES_PARAMS = np.dtype(
    [
        *[(name, np.uint64) for name in ("a", "b", "out")],
        *[(name, np.int32) for name in ("n", "m", "chunks", "row_tiles", "column_tiles")],
    ],
    align=True,
)
#: ``KeepTopParams`` in keep_top.cu.
KEEP_TOP_PARAMS = np.dtype(
    [
        *[(name, np.uint64) for name in ("score", "kept", "always")],
        *[(name, np.int32) for name in ("rows", "always_rows", "columns", "count")],
    ],
    align=True,
)
#: ``KeepMassParams`` in keep_mass.cu.
KEEP_MASS_PARAMS = np.dtype(
    [
        *[(name, np.uint64) for name in ("score", "weights", "kept", "always")],
        *[(name, np.int32) for name in ("rows", "rows_of_head", "heads")],
        *[(name, np.int64) for name in ("weights_batch", "weights_head")],
        *[(name, np.int32) for name in ("always_rows", "columns", "least")],
        ("mass", np.float32),
    ],
    align=True,
)

# Rows and columns of what a CTA of block_scores makes; columns of one B.
_SCORE_TILE = (64, 128)
# Columns of a row that one warp takes, kWarpColumns in rows.cuh.
_WARP_COLUMNS = 1536
_SHORT = {name: feature for feature, name in ELEMENTS.items()}
_KINDS = {"mean": "mean", "max": "high", "min": "low"}

#: What launches leave behind that must outlive a graph which captures them.
Memory = list[Any]


def pool(
    x: Any, blocks: Any, kinds: tuple[str, ...], orders: Any, flag: int, memory: Memory
) -> tuple[Any, ...]:
    """``scoring.pool_kinds``.

    Args:
        x: (batch, heads, tokens, d).
        blocks: tokens of a block, or the sizes of all on the host.
        kinds: of ``"mean"``, ``"max"`` and ``"min"``.
        orders: a TokenOrders, or None.
        flag: address of the int32 that is set where x holds no numbers, or 0.
        memory: takes what a captured launch uses.

    Returns:
        (batch, heads, blocks, d) float32, one for each kind.

    Raises:
        ValueError: a head dim above 256.
    """
    with _on(x) as device:
        x = _readable(x, memory)
        count = _count(blocks, x.shape[2])
        made = {kind: new((*x.shape[:2], count, x.shape[3]), np.float32, memory) for kind in kinds}
        outs = {_KINDS[kind]: out for kind, out in made.items()}
        _pool(x, blocks, device, memory, orders=orders, flag=flag, **outs)
        return tuple(made[kind] for kind in kinds)


def likeness(x: Any, blocks: Any, orders: Any, flag: int, memory: Memory) -> Any:
    """``scoring.likeness``: (batch, heads, blocks) float32. Arguments as of :func:`pool`."""
    with _on(x) as device:
        x = _readable(x, memory)
        alike = new((*x.shape[:2], _count(blocks, x.shape[2])), np.float32, memory)
        _pool(x, blocks, device, memory, orders=orders, flag=flag, alike=alike, normalise=True)
        return alike


def choose_order(
    x: Any, blocks: Any, orders: Any, runs: NDArray[np.int32] | None, flag: int, memory: Memory
) -> Any:
    """The choice of ``scoring.most_alike``: (batch, heads) int32.

    Args:
        x: as of :func:`pool`.
        blocks: likewise.
        orders: the TokenOrders to choose from.
        runs: where all orders move neighbouring tokens together, the orders of those runs,
            (orders, runs) int32, and blocks are whole numbers of runs; each is then read once, and
            for each order its mean alone.
        flag: as of :func:`pool`.
        memory: likewise.
    """
    with _on(x) as device:
        x = _readable(x, memory)
        batch, heads, tokens, head_dim = x.shape
        count, candidates = _count(blocks, tokens), len(orders.orders)
        alike = new((batch, heads, candidates, count), np.float32, memory)
        if runs is None:
            _pool(
                x, blocks, device, memory, orders=orders, flag=flag, alike=alike,
                normalise=True, candidates=candidates,
            )  # fmt: skip
        else:
            length = tokens // runs.shape[1]
            means = new((batch, heads, runs.shape[1], head_dim), np.float32, memory)
            _pool(x, length, device, memory, flag=flag, mean=means, normalise=True)
            _pool(
                means, blocks // length, device, memory, orders=_Runs(runs, memory), alike=alike,
                candidates=candidates,
            )  # fmt: skip
        choice = new((batch, heads), np.int32, memory)
        params = {"alike": alike, "choice": choice, "candidates": candidates, "blocks": count}
        _launch("choose_order", CHOOSE_ORDER_PARAMS, params, batch * heads, device)
        return choice


def scores(a: tuple[Any, ...], b: tuple[Any, ...], scale: float, memory: Memory) -> Any:
    """``scale`` times the largest of the products of the sum of ``a`` with each of ``b``.

    On tensor cores, from parts of tf32, where there is one of each and rows are whole 16 bytes.

    Args:
        a: one or two (batch, heads, n, d) float32.
        b: one or two (batch, heads, m, d) float32.
        scale: factor.
        memory: takes what a captured launch uses.

    Returns:
        (batch, heads, n, m) float32.
    """
    with _on(a[0]) as device:
        a, b = (tuple(_contiguous(x, memory) for x in side) for side in (a, b))
        batch, heads, n, head_dim = a[0].shape
        m = b[0].shape[2]
        out = new((batch, heads, n, m), np.float32, memory)
        vectors = head_dim % 4 == 0 and all(x.data.ptr % 16 == 0 for x in (*a, *b))
        if vectors and len(a) == len(b) == 1:
            row_tiles, column_tiles = -(-n // PRODUCT_TILE), -(-m // PRODUCT_TILE)
            params: dict[str, Any] = {
                **{"a": a[0], "b": b[0], "out": out, "n": n, "m": m, "chunks": head_dim // 4},
                **{"row_tiles": row_tiles, "column_tiles": column_tiles, "scale": scale},
            }
            grid = batch * heads * row_tiles * column_tiles
            name, smem = "block_products", PRODUCT_SMEM
            _launch(name, BLOCK_PRODUCTS_PARAMS, params, grid, device, smem=smem)
            return out
        row_tiles = -(-n // _SCORE_TILE[0])
        column_tiles = -(-m // (_SCORE_TILE[1] // len(b)))
        params = {
            **{f"a{i}": x for i, x in enumerate(a)},
            **{f"b{i}": x for i, x in enumerate(b)},
            **{"out": out, "n": n, "m": m, "head_dim": head_dim, "scale": scale},
            **{"row_tiles": row_tiles, "column_tiles": column_tiles},
            **{"vectors": vectors, "vector_out": m % 4 == 0},
        }
        grid = batch * heads * row_tiles * column_tiles
        _launch("block_scores", BLOCK_SCORES_PARAMS, params, grid, device)
        return out


def extremes(x: Any, blocks: Any, flag: int, memory: Memory) -> Any:
    """The largest and the smallest value of each channel over the tokens of each block.

    Args:
        x: (batch, heads, tokens, d) of 16-bit elements, d a multiple of 8.
        blocks: as of :func:`pool`.
        flag: likewise.
        memory: likewise.

    Returns:
        (batch, heads, blocks, 2, d) in x's dtype, largest values first.
    """
    with _on(x) as device:
        batch, heads, tokens, head_dim = x.shape
        made = new((batch, heads, _count(blocks, tokens), 2, head_dim), x.dtype, memory)
        _pool(x, blocks, device, memory, flag=flag, extremes=made)
        return made


def extreme_scores(
    q: Any, k: Any, blocks: tuple[Any, Any], orders: Any, flags: tuple[int, int], memory: Memory
) -> Any:
    """``scoring.extreme_scores``; on tensor cores where elements have 16 bits.

    Args:
        q: (batch, heads, tokens, d).
        k: (batch, heads, tokens, d).
        blocks: those of q and of k.
        orders: a TokenOrders, or None.
        flags: of q and of k.
        memory: takes what a captured launch uses.

    Returns:
        (batch, heads, n, m) float32.
    """
    batch, heads, _, head_dim = q.shape
    if q.dtype != k.dtype or q.dtype.itemsize != 2 or head_dim % CHUNK:
        extremes = [
            pool(x, size, ("max", "min"), orders, flag, memory)
            for x, size, flag in zip((q, k), blocks, flags, strict=True)
        ]
        return scores(extremes[0], extremes[1], 1.0, memory)
    with _on(q) as device:
        sides = []
        for x, size, flag in zip((q, k), blocks, flags, strict=True):
            x = _readable(x, memory)
            count = _count(size, x.shape[2])
            side = new((batch, heads, count, 2, head_dim), x.dtype, memory)
            _pool(x, size, device, memory, orders=orders, flag=flag, extremes=side)
            sides.append(side)
        n, m = (side.shape[2] for side in sides)
        out = new((batch, heads, n, m), np.float32, memory)
        row_tiles, column_tiles = -(-n // PRODUCT_TILE), -(-m // (PRODUCT_TILE // 2))
        params = {
            **{"a": sides[0], "b": sides[1], "out": out, "n": n, "m": m},
            **{"chunks": head_dim // CHUNK, "row_tiles": row_tiles, "column_tiles": column_tiles},
        }
        name = f"extreme_scores_{_SHORT[q.dtype.name]}"
        grid = batch * heads * row_tiles * column_tiles
        _launch(name, EXTREME_SCORES_PARAMS, params, grid, device, smem=PRODUCT_SMEM)
        return out


def keep_top(score: Any, count: int, always: Any, memory: Memory) -> Any:
    """``scoring.keep_top``: (batch, heads, n, m) bool."""
    with _on(score) as device:
        score = _contiguous(score, memory)
        kept = new(score.shape, np.bool_, memory)
        params = {"score": score, "kept": kept, "count": count, **_rows(score, always, memory)}
        _launch_rows("keep_top", KEEP_TOP_PARAMS, params, device)
        return kept


def keep_mass(
    score: Any, mass: float, weights: Any, least: int, always: Any, memory: Memory
) -> Any:
    """``scoring.keep_mass``: (batch, heads, n, m) bool."""
    with _on(score) as device:
        score = _contiguous(score, memory)
        kept = new(score.shape, np.bool_, memory)
        params = {"score": score, "kept": kept, "mass": mass, "least": least}
        params |= {"rows_of_head": score.shape[2], "heads": score.shape[1]}
        params |= _rows(score, always, memory)
        if weights is not None:
            weights = _here(weights, np.float32, memory)
            batch, heads, columns = weights.shape
            params["weights"] = weights
            params["weights_batch"] = columns * heads * (batch > 1)
            params["weights_head"] = columns * (heads > 1)
        _launch_rows("keep_mass", KEEP_MASS_PARAMS, params, device)
        return kept


class _Runs:
    """Orders of runs of tokens, as :func:`_pool` takes orders."""

    choice = None

    def __init__(self, runs: NDArray[np.int32], memory: Memory) -> None:
        self.orders = runs
        self._memory = memory

    def device_orders(self) -> Any:
        return _here(self.orders, np.int32, self._memory)


def _pool(
    x: Any,
    blocks: Any,
    device: int,
    memory: Memory,
    *,
    orders: Any = None,
    flag: int = 0,
    normalise: bool = False,
    candidates: int = 1,
    **outs: Any,
) -> None:
    """Launch ``pool_blocks`` on an array that it can read."""
    batch, heads, tokens, head_dim = x.shape
    count, size = _count(blocks, tokens), x.dtype.itemsize
    strides = [step // size * (n > 1) for n, step in zip(x.shape, x.strides, strict=True)]
    params: dict[str, Any] = {
        **outs,
        "x": x,
        "stride": tuple(strides[:3]),
        "flag": flag,
        "planes": batch * heads,
        "heads": heads,
        "tokens": tokens,
        "head_dim": head_dim,
        "blocks": count,
        "candidates": candidates,
        "normalise": normalise,
        "vectors": not (head_dim | strides[0] | strides[1] | strides[2]) % 4
        and x.data.ptr % (4 * size) == 0,
    }
    if isinstance(blocks, int):
        params["block"] = blocks
    else:
        starts = np.append(0, np.cumsum(blocks)).astype(np.int32)
        params["starts"] = _here(starts, np.int32, memory)
    if orders is not None:
        params |= {"orders": orders.device_orders(), "order_count": len(orders.orders)}
        if candidates == 1 and orders.choice is not None:
            params["choice"] = _here(orders.choice, np.int32, memory)
    config = builder(gpus.arch_of(device).name, f"pool_blocks_{_SHORT[x.dtype.name]}")
    items = batch * heads * candidates * count
    _launch(config.name, POOL_PARAMS, params, -(-items // config.warps), device)


def _launch_rows(kernel: str, dtype: np.dtype[Any], params: dict[str, Any], device: int) -> None:
    """Launch a kernel in which a warp takes a row, or a CTA a long one."""
    config = builder(gpus.arch_of(device).name, kernel)
    at_once = config.warps if params["columns"] <= _WARP_COLUMNS else 1
    most = gpus.multiprocessors(device) * config.min_ctas
    _launch(kernel, dtype, params, min(most, -(-params["rows"] // at_once)), device)


def _launch(
    name: str,
    dtype: np.dtype[Any],
    params: dict[str, Any],
    grid: int,
    device: int,
    *,
    smem: int = 0,
) -> None:
    config = builder(gpus.arch_of(device).name, name)
    values = {
        key: value.data.ptr if hasattr(value, "data") else value for key, value in params.items()
    }
    kernel = launch.load(config, device)
    kernel((grid,), (32 * config.warps,), (launch.packed_struct(dtype, values),), shared_mem=smem)
    for value in params.values():
        if isinstance(value, _Constant):
            value.used()


def _rows(score: Any, always: Any, memory: Memory) -> dict[str, Any]:
    """What the kernels that keep blocks are told of rows, and of what is kept anyhow."""
    batch, heads, n, m = score.shape
    if always is None:
        return {"rows": batch * heads * n, "always_rows": 1, "columns": m}
    always = _here(always, np.bool_, memory)
    always_rows = always.size // m
    return {"rows": batch * heads * n, "always_rows": always_rows, "columns": m, "always": always}


def _count(blocks: Any, tokens: int) -> int:
    return -(-tokens // blocks) if isinstance(blocks, int) else len(blocks)


def _readable(x: Any, memory: Memory) -> Any:
    """The array itself, or a copy of it that ``pool_blocks`` reads."""
    if x.shape[3] > MAX_HEAD_DIM:
        fix = "pool NumPy arrays, or fewer channels at a time"
        raise ValueError(wrong("x", f"at most {MAX_HEAD_DIM} channels", x.shape[3], fix))
    if x.dtype.name not in _SHORT:
        x = _kept(x.astype(np.float32), memory)
    if x.shape[3] > 1 and x.strides[3] != x.dtype.itemsize:
        x = _kept(x.copy(order="C"), memory)
    return x


def _contiguous(x: Any, memory: Memory, dtype: Any = np.float32) -> Any:
    """The array itself, or a C-contiguous copy of a dtype."""
    if x.dtype != dtype:
        x = _kept(x.astype(dtype), memory)
    step = x.dtype.itemsize
    for length, stride in zip(reversed(x.shape), reversed(x.strides), strict=True):
        if length > 1 and stride != step:
            return _kept(x.copy(order="C"), memory)
        step *= length
    return x


def _kept(array: Any, memory: Memory) -> Any:
    """The array, which lives as long as ``memory`` where a graph captures what uses it."""
    import cupy

    if cupy.cuda.get_current_stream().is_capturing():
        memory.append(array)
    return array


@contextmanager
def _on(x: Any) -> Iterator[int]:
    """Make an array's GPU current, and give its ordinal."""
    import cupy

    with cupy.cuda.Device(x.device.id):
        yield int(x.device.id)


class _Constant:
    """An array of the host on a GPU, complete.

    Attributes:
        values: the array, whose identity may stand for its contents.
        data: as that of a CuPy array.
    """

    def __init__(self, values: NDArray[Any]) -> None:
        import cupy

        launch.refuse_capture()
        stream = cupy.cuda.get_current_stream()
        self.values = values
        copy, self._uses = cupy.asarray(values), Uses(stream)
        self.data, self.size = copy.data, values.size
        release_with(self, self._uses, copy)
        # Later calls may come on other streams.
        stream.synchronize()

    def used(self) -> None:
        """Note that work was launched on the current stream that reads it."""
        import cupy

        stream = cupy.cuda.get_current_stream()
        if not stream.is_capturing():
            self._uses.record(stream)


_constants: OrderedDict[Any, _Constant] = OrderedDict()
_constants_lock = threading.Lock()
_MOST_CONSTANTS = 64
# Bytes of an array that are quickly compared.
_FEW = 4096


def _here(array: Any, dtype: Any, memory: Memory) -> Any:
    """An array on the current GPU, contiguous; one of the host is copied once.

    Raises:
        ValueError: the copy is to be made while the current stream is capturing.
    """
    import cupy

    if not isinstance(array, np.ndarray):
        return _contiguous(array, memory, dtype)
    values = np.ascontiguousarray(array, dtype)
    # One that nobody can write is known by its identity.
    fixed = values.nbytes > _FEW and values.base is None and not values.flags.writeable
    contents: Any = id(values) if fixed else values.tobytes()
    key = (cupy.cuda.runtime.getDevice(), values.shape, values.dtype.str, contents)
    with _constants_lock:
        found = _constants.get(key)
        if found is None:
            found = _constants[key] = _Constant(values)
            if len(_constants) > _MOST_CONSTANTS:
                _constants.popitem(last=False)
        _constants.move_to_end(key)
    return _kept(found, memory)
