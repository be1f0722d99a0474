"""What a sparsifier returns, and what all of them ask of their queries and keys."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.errors import wrong
from tessera_cupy.kernels.lifetime import pool_may_grow
from tessera_cupy.masks import BlockMask, KeySlices
from tessera_cupy.masks.key_slices import block_mask
from tessera_cupy.video import VideoGrid

if TYPE_CHECKING:
    from tessera_cupy.permute import TokenOrders

#: Element types of queries and keys.
DTYPES = ("float16", "bfloat16", "float32", "float64")


def namespace(array: Any, argument: str) -> Any:
    """The array module, ``numpy`` or ``cupy``, that ``array`` belongs to.

    Raises:
        TypeError: neither a NumPy nor a CuPy array.
    """
    if isinstance(array, np.ndarray):
        return np
    library = type(array).__module__.split(".")[0]
    if library == "cupy":
        import cupy

        return cupy
    fix = "convert with numpy.asarray or cupy.from_dlpack"
    if library == "torch":  # NumPy has no bfloat16 of torch
        fix = f"pass cupy.from_dlpack({argument}) on a GPU, {argument}.float().numpy() on the host"
    raise TypeError(wrong(argument, "a NumPy or CuPy array", type(array).__name__, fix))


@dataclass(eq=False)
class _Watch:
    """Flags of a GPU that kernels raise where q or k holds what is no number.

    Attributes:
        addresses: of q and k; none where a selection is made of neither.
        flags: int32 on the GPU, one for each of :data:`_WATCHED`; 0 until something is found.
        memory: what a CUDA graph that captured the rule uses again at each replay.
    """

    addresses: tuple[int, ...]
    flags: Any
    memory: list[Any] = field(default_factory=list)


class _Watched(threading.local):
    """The watch over the inputs that a thread checked last."""

    watch: _Watch | None = None


_watched = _Watched()
_NAMES = ("q", "k")
_WATCHED = (*_NAMES, "centroids", "lse", "sums")


def flag_of(x: Any, given: str | None = None) -> int:
    """Address of the int32 that a kernel sets where it meets NaN or an infinity in ``x``.

    Args:
        x: q or k.
        given: in the ``"centroids"`` or the ``"lse"`` that are given with it, rather.

    Returns:
        0 where nobody asked: ``x`` is none of the arrays that :func:`checked_inputs` saw last.
    """
    watch = _watched.watch
    if watch is None or x.data.ptr not in watch.addresses:
        return 0
    of = _WATCHED.index(given) if given else watch.addresses.index(x.data.ptr)
    return int(watch.flags.data.ptr) + 4 * of


def memory() -> list[Any]:
    """Where kernels put what must live as long as the selection that is being made.

    Those are their arrays, if a CUDA graph captures them: a replay uses them again.
    """
    return [] if _watched.watch is None else _watched.watch.memory


@dataclass(frozen=True, eq=False, repr=False)
class Selection:
    """A mask over tokens that each head first puts in an order of its own.

    A CUDA graph that captured how it was made may be replayed for as long as it lives.

    Attributes:
        mask: what to compute, over tokens in the heads' orders.
        orders: the orders, and which of them each head takes.
        notes: what else a rule tells, by name.
        kv_orders: the orders of keys and values where they are others; None for those of queries.

    Example:
        ::

            chosen = spade.select(q, k, grid)
            out = block_sparse_attention(
                chosen.permute(q), chosen.permute_kv(k), chosen.permute_kv(v), chosen.mask
            )
            out = chosen.restore(out)
    """

    mask: BlockMask | KeySlices
    orders: TokenOrders
    notes: Mapping[str, Any] = field(default_factory=dict)
    kv_orders: TokenOrders | None = None
    # Of the inputs that this thread checked last, which are those that the mask was made from.
    _watch: _Watch | None = field(default_factory=lambda: _watched.watch, init=False, repr=False)

    def __repr__(self) -> str:
        """The number of orders, and the mask drawn; waits for the GPU where the mask is there."""
        count = len(self.orders.orders)
        orders = "1 order" if count == 1 else f"{count} orders"
        return f"Selection in {orders} of {self.orders.tokens:,} tokens\n{self.mask!r}"

    @property
    def blocks(self) -> BlockMask:
        """The mask as blocks, which slices are made into once."""
        return block_mask(self.mask)

    def permute(self, x: Any) -> Any:
        """Put ``x`` of shape (batch, heads, tokens, d), in raster order, in the heads' orders."""
        return self.orders.permute(x)

    def permute_kv(self, x: Any) -> Any:
        """The same for keys and values."""
        return (self.kv_orders or self.orders).permute(x)

    def restore(self, x: Any) -> Any:
        """Undo :meth:`permute`: back to raster order; also of an LSE, (batch, heads, tokens)."""
        if len(x.shape) == 3:
            return self.orders.restore(x[..., None])[..., 0]
        return self.orders.restore(x)

    def check(self) -> None:
        """Wait for the GPU, and look whether q, k and what was given with them held numbers alone.

        NumPy arrays were looked at when the selection was made.

        Raises:
            ValueError: there was NaN or an infinity in them, so that the mask says nothing.
        """
        if self._watch is not None:
            import cupy

            with cupy.cuda.Device(self._watch.flags.device.id) as device:
                device.synchronize()
                flags = self._watch.flags.get()
            for name, flag in zip(_WATCHED, flags, strict=True):
                if flag:
                    raise _not_finite(name)


def check_grid(grid: Any) -> None:
    """Refuse what is no grid.

    Raises:
        TypeError: it is no VideoGrid.
    """
    if not isinstance(grid, VideoGrid):
        raise TypeError(
            wrong(
                "grid",
                "a VideoGrid",
                repr(grid),
                "pass tessera_cupy.video.VideoGrid(frames, rows, columns), or a model's .grid",
            )
        )


def checked_inputs(q: Any, k: Any, grid: VideoGrid, *, watch: bool = True) -> Any:
    """Check what every rule takes, and give the array module of ``q`` and ``k``.

    Args:
        q: (batch, heads, tokens, d) queries in raster order, any float dtype, NumPy or CuPy.
        k: (batch, heads, tokens, d) keys, likewise.
        grid: the video grid that the tokens lie on; ``grid.tokens`` is ``tokens``.
        watch: whether kernels shall flag NaN and infinities on a GPU.

    Returns:
        ``numpy`` or ``cupy``. Arrays on a GPU are read later, by the kernels of the rule;
        :meth:`Selection.check` tells what they found.

    Raises:
        TypeError: ``q`` or ``k`` is neither a NumPy nor a CuPy array of floats, or ``grid`` no
            VideoGrid.
        ValueError: shapes that do not fit each other or the grid; NaN or an infinity in NumPy
            arrays.

    >>> x = np.zeros((1, 2, 64, 16), np.float32)
    >>> checked_inputs(x, x, VideoGrid(1, 8, 8)).__name__
    'numpy'
    """
    xp = namespace(q, "q")
    if namespace(k, "k") is not xp:
        raise TypeError(
            wrong("k", f"a {xp.__name__} array, as q", type(k).__name__, "keep q and k together")
        )
    check_grid(grid)
    for name, x in zip(_NAMES, (q, k), strict=True):
        if x.dtype.name not in DTYPES:
            raise TypeError(
                wrong(name, f"one of {', '.join(DTYPES)}", x.dtype.name, "convert with astype")
            )
    if len(q.shape) != 4 or q.shape[2] != grid.tokens or 0 in q.shape:
        fix = "pass the grid of all tokens; VideoGrid's text_tokens says how many are text"
        if len(q.shape) == 4 and q.shape[1] == grid.tokens:
            fix = "pass q.transpose(0, 2, 1, 3), a view: rules take heads before tokens"
        elif len(q.shape) == 3:
            fix = "pass q[None], with a batch axis"
        raise ValueError(
            wrong(
                "q",
                f"shape (batch, heads, {grid.tokens}, d) for a grid of {grid}",
                f"shape {tuple(q.shape)}",
                fix,
            )
        )
    if tuple(k.shape) != tuple(q.shape):
        raise ValueError(
            wrong(
                "k",
                f"q's shape {tuple(q.shape)}",
                f"shape {tuple(k.shape)}",
                "pass keys of the same tokens; repeat those of grouped heads first",
            )
        )
    if xp is not np and q.device.id != k.device.id:
        got = f"device {k.device.id}"
        raise ValueError(wrong("k", f"q's device {q.device.id}", got, "move it there"))
    _watched.watch = None
    if xp is np:
        for name, x in zip(_NAMES, (q, k), strict=True):
            check_finite(name, x)
    elif watch:
        _watched.watch = _Watch((q.data.ptr, k.data.ptr), _new_flags(xp, q))
    return xp


def watch_sums(sums: Any) -> int:
    """Watch over given sums, and over no q and k; NumPy's are looked at now.

    Args:
        sums: (batch, heads, groups, tokens), NumPy or CuPy.

    Returns:
        Address of the int32 that a kernel sets where it meets NaN or an infinity in them; 0 for
        NumPy.

    Raises:
        ValueError: there is one in NumPy's.
    """
    _watched.watch = None
    xp = namespace(sums, "sums")
    if xp is np:
        check_finite("sums", sums)
        return 0
    flags = _new_flags(xp, sums)
    _watched.watch = _Watch((), flags)
    return int(flags.data.ptr) + 4 * _WATCHED.index("sums")


def _new_flags(xp: Any, x: Any) -> Any:
    """Flags where ``x`` is, all 0."""
    with xp.cuda.Device(x.device.id):
        stream = xp.cuda.get_current_stream()
        with pool_may_grow() if stream.is_capturing() else nullcontext():
            flags = xp.empty(len(_WATCHED), np.int32)
        xp.cuda.runtime.memsetAsync(flags.data.ptr, 0, flags.nbytes, stream.ptr)
    return flags


def check_finite(name: str, x: NDArray[Any]) -> None:
    """Refuse NaN and infinities in a NumPy array (batch, heads, ...).

    Raises:
        ValueError: there is one.
    """
    # A head at a time: the answers for all would take as much memory as bytes there are.
    if not all(np.isfinite(x[b, h]).all() for b, h in np.ndindex(*x.shape[:2])):
        raise _not_finite(name)


def _not_finite(name: str) -> ValueError:
    fix = f"look for what made them before {name}; a mask of such values says nothing"
    return ValueError(wrong(name, "finite numbers", "NaN or infinities", fix))
