"""Token orders of heads, and moving rows of q, k, v and the output into them and back.

Place ``i`` of head (b, h) in its order holds the token ``orders[choice[b, h]][i]`` of the raster
sequence.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tessera_cupy import gpus, interop
from tessera_cupy.errors import wrong
from tessera_cupy.kernels.copies import DeviceCopies, Given
from tessera_cupy.kernels.permute import Permutation, Rows, permute_rows
from tessera_cupy.output import check_elements


@dataclass(frozen=True, eq=False)
class TokenOrders:
    """The orders that there are, and which of them each head takes.

    Attributes:
        orders: (n, tokens) int32 on the host, C-contiguous and read-only, each a permutation of
            ``0 .. tokens - 1``: a copy of the integers that were given, (n, tokens) or (tokens,).
            Of :meth:`of_heads` they may be a CuPy array, that of the caller.
        choice: (batch, heads) int32, NumPy or CuPy: the order of each head; None where all heads
            take order 0. Integers of NumPy are copied, and to each GPU once, for which the host
            waits. CuPy's int32 are taken as they are and not read by the host: where one is out of
            range the nearest order is taken.

    Raises:
        TypeError: orders or a choice of another type.
        ValueError: an order that is no permutation; a choice of another shape, or, on the host,
            of an order that there is not.

    Example:
        >>> orders = TokenOrders([[0, 1, 2], [2, 0, 1]], np.array([[1, 0]]))
        >>> x = np.array([[[[10], [11], [12]], [[20], [21], [22]]]], np.float32)
        >>> orders.permute(x)[0, :, :, 0].tolist()
        [[12.0, 10.0, 11.0], [20.0, 21.0, 22.0]]
    """

    orders: Any
    choice: Any = None
    _raster: bool = field(init=False, repr=False)
    _orders: DeviceCopies | Given = field(init=False, repr=False)
    _choice: DeviceCopies | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        orders = _checked_orders(self.orders)
        object.__setattr__(self, "orders", orders)
        object.__setattr__(self, "_raster", bool((orders == np.arange(orders.shape[1])).all()))
        object.__setattr__(self, "_orders", DeviceCopies(orders))
        self._choose(self.choice)

    def _choose(self, choice: Any) -> None:
        if choice is not None:
            choice = _checked_choice(choice, len(self.orders))
        object.__setattr__(self, "choice", choice)
        copies = DeviceCopies(choice) if isinstance(choice, np.ndarray) else None
        object.__setattr__(self, "_choice", copies)

    @classmethod
    def raster(cls, tokens: int) -> TokenOrders:
        """The order that moves nothing: :meth:`permute` and :meth:`restore` return x itself."""
        if tokens != int(tokens) or tokens < 0:
            raise ValueError(wrong("tokens", "an int from 0", tokens, "pass the sequence's length"))
        return cls(np.arange(tokens, dtype=np.int32))

    @classmethod
    def of_heads(cls, orders: Any, heads: tuple[int, int]) -> TokenOrders:
        """An order of its own for each head.

        Args:
            orders: (batch * heads, tokens), integers of NumPy, which are checked and copied; or
                CuPy's int32, C-contiguous, which are neither, nor waited for.
            heads: (batch, heads).

        Raises:
            TypeError, ValueError: as the class, for integers of NumPy; another number of orders.

        >>> TokenOrders.of_heads([[0, 1], [1, 0]], (1, 2)).of(0, 1).tolist()
        [1, 0]
        """
        count = heads[0] * heads[1]
        orders = orders if hasattr(orders, "shape") else np.asarray(orders)
        if not orders.shape or orders.shape[0] != count:
            got = f"shape {tuple(orders.shape)}"
            raise ValueError(
                wrong("orders", f"{count} orders, one a head", got, "pass one for each")
            )
        if _is_cupy(orders):
            made = object.__new__(cls)
            object.__setattr__(made, "orders", orders)
            object.__setattr__(made, "_raster", False)
            object.__setattr__(made, "_orders", Given(orders))
        else:
            made = cls(orders)
        choice, copies = _each(*heads)
        object.__setattr__(made, "choice", choice)
        object.__setattr__(made, "_choice", copies)
        return made

    @property
    def tokens(self) -> int:
        """Tokens of the sequence."""
        return int(self.orders.shape[1])

    def choosing(self, choice: Any) -> TokenOrders:
        """The same orders, unchecked and with their copies on GPUs, and another choice.

        Args:
            choice: as the attribute.

        Raises:
            TypeError, ValueError: as the class, for the choice.
        """
        made = object.__new__(TokenOrders)
        for name in ("orders", "_raster", "_orders"):
            object.__setattr__(made, name, getattr(self, name))
        made._choose(choice)
        return made

    def of(self, b: int, h: int) -> NDArray[np.int64]:
        """(tokens,) the order of one head; waits for the GPU where orders or choice lie there."""
        chosen = 0 if self.choice is None else self._chosen()[b, h]
        order: NDArray[np.int64] = self._on_host()[chosen].astype(np.int64)
        return order

    def host(self) -> NDArray[np.int64]:
        """(batch, heads, tokens) the order of each head, (1, 1, tokens) without a choice.

        Waits for the GPU where orders or choice lie there.
        """
        chosen = np.zeros((1, 1), np.int32) if self.choice is None else self._chosen()
        return self._on_host().astype(np.int64)[chosen]

    def permute(self, x: Any) -> Any:
        """Put ``x``, in raster order, in the heads' orders; see :func:`permute_tokens`."""
        return permute_tokens(x, self)

    def restore(self, x: Any) -> Any:
        """Undo :meth:`permute`: back to raster order."""
        return permute_tokens(x, self, inverse=True)

    def device_orders(self) -> Any:
        """``orders`` on the current GPU, as a CuPy array that is complete and must not be written.

        The first call on a GPU makes the copy, which all with the same orders share. It ends with
        the last of them: keep one until what reads the copy is complete.

        Raises:
            ValueError: the copy is to be made while the current stream is capturing.
        """
        return self._orders.here()[0]

    def _on_host(self) -> NDArray[np.int32]:
        orders: NDArray[np.int32] = self.orders if self._kept_here() else self.orders.get()
        return orders

    def _kept_here(self) -> bool:
        """Whether the orders are the host's."""
        return isinstance(self.orders, np.ndarray)

    def _chosen(self) -> NDArray[np.int32]:
        if isinstance(self.choice, np.ndarray):
            return self.choice
        chosen: NDArray[np.int32] = np.clip(self.choice.get(), 0, len(self.orders) - 1)
        return chosen


def permute_tokens(
    x: Any,
    orders: TokenOrders | ArrayLike,
    choice: Any = None,
    *,
    inverse: bool = False,
    out: Any = None,
    stream: Any = None,
) -> Any:
    """Put each head's tokens in its order, or back; on a GPU in one launch for three arrays.

    ``y[b, h, i] = x[b, h, order[i]]`` with ``order = orders[choice[b, h]]``; with ``inverse``
    ``y[b, h, order[i]] = x[b, h, i]``.

    Args:
        x: (batch, heads, tokens, d): NumPy, CuPy, torch, JAX, or any array with DLPack. On a GPU
            elements of 2, 4 or 8 bytes; the last axis is best contiguous, and then read in place.
            Or a tuple of such arrays of one kind, shape and dtype, as (q, k, v).
        orders: a :class:`TokenOrders`, which checks its orders once and keeps them on the GPU; or
            its orders, for a single call.
        choice: in place of the orders' own, as in :class:`TokenOrders`. On a GPU it must be
            complete on the stream of the call.
        inverse: whether to go back to raster order.
        out: array to write, like x and apart from it, its last axis contiguous; a tuple for a
            tuple.
        stream: stream to run on; None means the current one of x's framework.

    Returns:
        An array like x, or a tuple; ``out`` if that is given. Where no head has another order than
        raster and there is no ``out``, x itself.

    Raises:
        TypeError: types of arrays or elements that cannot be moved or written.
        ValueError: shapes, devices or memory that do not fit; on a GPU also the first call with
            these orders while its stream is capturing.
        NoGpuError, UnsupportedGpuError, KernelMissingError, KernelCompileError: see
            :mod:`tessera_cupy.errors`.

    Example:
        >>> from tessera_cupy.video import VideoGrid
        >>> order = VideoGrid(1, 2, 4).tile_order((1, 2, 2))
        >>> x = np.arange(8, dtype=np.float32).reshape(1, 1, 8, 1)
        >>> y = permute_tokens(x, order)
        >>> y.ravel().tolist()
        [0.0, 1.0, 4.0, 5.0, 2.0, 3.0, 6.0, 7.0]
        >>> bool((permute_tokens(y, order, inverse=True) == x).all())
        True
    """
    if not isinstance(orders, TokenOrders):
        orders = TokenOrders(np.asarray(orders))
    if choice is not None:
        orders = orders.choosing(choice)
    several = isinstance(x, tuple)
    arrays = x if several else (x,)
    outs = None if out is None else out if several else (out,)
    host = _check(arrays, orders)
    if outs is not None:
        _check_outs(outs, arrays, host)
    if orders._raster and outs is None:
        return x
    if host:
        moved = tuple(
            _move_on_host(array, orders, inverse, None if outs is None else outs[i])
            for i, array in enumerate(arrays)
        )
    else:
        moved = _move_on_gpu(arrays, orders, inverse, outs, stream)
    return moved if several else moved[0]


def move_chosen(
    sources: tuple[Any, ...],
    targets: tuple[Any, ...],
    orders: TokenOrders,
    *,
    only: int,
    inverse: bool = False,
) -> None:
    """Move the rows of the heads that chose one order, on CuPy's current stream.

    Rows of other heads are neither read nor written.

    Args:
        sources: CuPy arrays of one shape and dtype, the last axis contiguous, that were checked.
        targets: arrays to write, likewise, apart from the sources.
        orders: orders and a choice on the GPU.
        only: the order whose heads are moved.
        inverse: whether to go back to raster order.
    """
    x = sources[0]
    size, device = x.dtype.itemsize, x.device.id
    operands = [[interop.device_operand(a, "x") for a in arrays] for arrays in (sources, targets)]
    moves = [(_rows(s, size), _rows(t, size)) for s, t in zip(*operands, strict=True)]
    _launch(moves, (*x.shape[:3], x.shape[3] * size), orders, inverse, device, only)


@lru_cache(maxsize=64)
def _each(batch: int, heads: int) -> tuple[NDArray[np.int32], DeviceCopies]:
    """The choice where each head has an order of its own, and its copies on GPUs."""
    choice = np.arange(batch * heads, dtype=np.int32).reshape(batch, heads)
    choice.flags.writeable = False
    return choice, DeviceCopies(choice)


def _is_cupy(orders: Any) -> bool:
    return type(orders).__module__.partition(".")[0] == "cupy"


def _checked_orders(orders: Any) -> NDArray[np.int32]:
    given = np.asarray(orders)
    if given.ndim == 1:
        given = given[None]
    if not np.issubdtype(given.dtype, np.integer):
        raise TypeError(wrong("orders", "integers", given.dtype, "pass permutations of the tokens"))
    if given.ndim != 2 or not len(given) or given.shape[1] > np.iinfo(np.int32).max:
        raise ValueError(
            wrong(
                "orders",
                "shape (n, tokens), of one order or more, with less than 2^31 tokens",
                f"shape {given.shape}",
                "stack the orders along the first axis",
            )
        )
    count, tokens = given.shape
    inside = (given >= 0) & (given < tokens)
    found = np.zeros((count, tokens), np.bool_)
    np.put_along_axis(found, np.where(inside, given, 0).astype(np.int64), inside, axis=1)
    if tokens and not (inside.all() and found.all()):
        row = int(np.argmin(inside.all(axis=1) & found.all(axis=1)))
        raise ValueError(
            wrong(
                "orders",
                f"permutations of 0 to {tokens - 1}",
                f"another order {row}, with {int(given[row].min())} to {int(given[row].max())} "
                f"and {len(np.unique(given[row]))} different ones",
                "name each token once in each order",
            )
        )
    copy = np.array(given, np.int32, order="C")
    copy.flags.writeable = False
    return copy


def _checked_choice(choice: Any, count: int) -> Any:
    kind = interop.framework(choice)
    if kind not in ("numpy", "cupy"):
        raise TypeError(
            wrong(
                "choice",
                "a NumPy or CuPy array",
                f"one of {kind}",
                "convert it, for example with cupy.from_dlpack",
            )
        )
    integers = np.issubdtype(choice.dtype, np.integer) if kind == "numpy" else False
    if not integers and choice.dtype != np.int32:
        fix = "convert it with .astype('int32')"
        raise TypeError(wrong("choice", "int32 numbers of orders", choice.dtype, fix))
    if len(choice.shape) != 2:
        raise ValueError(
            wrong("choice", "shape (batch, heads)", f"shape {choice.shape}", "pass one a head")
        )
    if kind == "cupy":
        whole = (choice.shape[1] * 4, 4)
        return choice if choice.strides == whole else choice.copy(order="C")
    if choice.size and not (choice.min() >= 0 and choice.max() < count):
        raise ValueError(
            wrong(
                "choice",
                f"numbers of the {count} orders, from 0",
                f"{choice.min()} to {choice.max()}",
                "pass the place of each head's order",
            )
        )
    copy = np.array(choice, np.int32, order="C")
    copy.flags.writeable = False
    return copy


def _check(arrays: tuple[Any, ...], orders: TokenOrders) -> bool:
    """Check what is to be moved; whether it lies in host memory."""
    if not arrays:
        raise ValueError(wrong("x", "an array, or a tuple of them", "()", "pass one at least"))
    kind = interop.framework(arrays[0])
    shape = tuple(arrays[0].shape)
    dtype, host = interop.dtype_name(arrays[0]), interop.on_host(arrays[0])
    for array in arrays:
        interop.check_no_gradient("x", array)
        got = (interop.framework(array), tuple(array.shape), interop.dtype_name(array))
        if got != (kind, shape, dtype) or interop.on_host(array) != host:
            raise ValueError(
                wrong(
                    "x",
                    f"arrays alike: {kind}, shape {shape}, {dtype}",
                    f"also {got[0]}, shape {got[1]}, {got[2]}",
                    "make a call for each kind and shape",
                )
            )
    if len(shape) != 4 or shape[2] != orders.tokens:
        raise ValueError(
            wrong(
                "x",
                f"shape (batch, heads, {orders.tokens}, d)",
                f"shape {shape}",
                "pass x.transpose(0, 2, 1, 3), a view"
                if len(shape) == 4 and shape[1] == orders.tokens
                else "pass arrays of the tokens that the orders are for",
            )
        )
    if orders.choice is not None and shape[:2] != tuple(orders.choice.shape):
        raise ValueError(
            wrong(
                "x",
                f"(batch, heads) = {tuple(orders.choice.shape)}, as the choice has",
                f"{shape[:2]}",
                "choose an order for each of its heads, or repeat the keys of grouped heads",
            )
        )
    if not host and _itemsize(dtype) not in (2, 4, 8):
        raise TypeError(
            wrong("x", "elements of 2, 4 or 8 bytes", dtype, "view it as elements of such a size")
        )
    return host


def _check_outs(outs: Any, arrays: tuple[Any, ...], host: bool) -> None:
    if not isinstance(outs, tuple) or len(outs) != len(arrays):
        raise ValueError(
            wrong("out", f"a tuple of {len(arrays)} arrays", type(outs).__name__, "pass one each")
        )
    x, kind = arrays[0], interop.framework(arrays[0])
    memories: list[NDArray[Any]] = []
    for out in outs:
        if kind not in ("numpy", "cupy", "torch") or interop.framework(out) != kind:
            fix = "allocate it like x, or leave it out"
            expected = "an array of x's library, which must be NumPy, CuPy or torch"
            raise TypeError(wrong("out", expected, type(out).__name__, fix))
        got = (tuple(out.shape), interop.dtype_name(out))
        wanted = (tuple(x.shape), interop.dtype_name(x))
        if got != wanted:
            raise ValueError(wrong("out", f"shape and dtype {wanted}", got, "allocate it like x"))
        if interop.on_host(out) != host:
            raise ValueError(wrong("out", "an array where x is", "another place", "move it there"))
        if kind == "numpy" and not out.flags.writeable:
            raise ValueError(
                wrong("out", "an array that can be written", "a read-only one", "copy it first")
            )
        memory = _memory(out, host)
        check_elements(memory)
        others = [*memories, *(_memory(array, host) for array in arrays)]
        if any(np.shares_memory(memory, other) for other in others):
            used = "memory that x or another out uses"
            raise ValueError(wrong("out", "memory of its own", used, "allocate it like x"))
        memories.append(memory)


def _memory(array: Any, host: bool) -> NDArray[Any]:
    """Where an array lies, to compare with others; not to be read."""
    if host:
        return interop.host_memory(array)
    operand = interop.device_operand(array, "x")
    return interop.device_memory(operand)


def _move_on_host(array: Any, orders: TokenOrders, inverse: bool, out: Any) -> Any:
    source = interop.host_memory(array)
    target = np.empty(source.shape, source.dtype) if out is None else interop.host_memory(out)
    chosen = np.zeros(source.shape[:2], np.int32) if orders.choice is None else orders._chosen()
    rows = orders._on_host()
    for b, h in np.ndindex(*source.shape[:2]):
        order = rows[chosen[b, h]]
        if inverse:
            target[b, h][order] = source[b, h]
        else:
            target[b, h] = source[b, h][order]
    if out is not None:
        return out
    kind = interop.framework(array)
    if kind == "torch":
        torch = sys.modules["torch"]
        return torch.from_numpy(target).view(array.dtype)
    if kind == "jax":
        return sys.modules["jax"].device_put(target, array.sharding)
    return interop.returned(target, array)


def _move_on_gpu(
    arrays: tuple[Any, ...], orders: TokenOrders, inverse: bool, outs: Any, stream: Any
) -> tuple[Any, ...]:
    device = interop.device_of(arrays[0], "x")
    on_it = [("x", array) for array in arrays] + [("out", out) for out in outs or ()]
    if orders.choice is not None and orders._choice is None:
        on_it.append(("choice", orders.choice))
    if not orders._kept_here():
        on_it.append(("orders", orders.orders))
    for name, array in on_it:
        if (other := interop.device_of(array, name)) != device:
            raise ValueError(
                wrong(name, f"x's device {device}", f"device {other}", "move it there")
            )
    shape, dtype = tuple(arrays[0].shape), interop.dtype_name(arrays[0])
    itemsize = _itemsize(dtype)
    with interop.on_stream(stream, arrays, device):
        operands = [interop.device_operand(array, "x") for array in arrays]
        sources = [
            operand if _whole_rows(operand) else interop.contiguous(operand) for operand in operands
        ]
        results = outs or tuple(interop.empty(array, shape, dtype) for array in arrays)
        targets = [interop.device_operand(result, "out") for result in results]
        for target in targets:
            if not _whole_rows(target):
                fix = "allocate it like x"
                got = f"strides {target.strides}"
                raise ValueError(wrong("out", "a contiguous last axis", got, fix))
        if 0 not in shape:
            _launch(
                [
                    (_rows(s, itemsize), _rows(t, itemsize))
                    for s, t in zip(sources, targets, strict=True)
                ],
                (shape[0], shape[1], shape[2], shape[3] * itemsize),
                orders,
                inverse,
                device,
            )
        return outs or tuple(interop.returned(r, x) for r, x in zip(results, arrays, strict=True))


def _launch(
    moves: list[tuple[Rows, Rows]],
    sizes: tuple[int, int, int, int],
    orders: TokenOrders,
    inverse: bool,
    device: int,
    only: int | None = None,
) -> None:
    """Launch on the current stream, and note that it reads the copies."""
    import cupy

    stream = cupy.cuda.get_current_stream()
    copies = [orders._orders.here()]
    choice = 0
    if orders._choice is not None:
        copies.append(orders._choice.here())
        choice = copies[1][0].data.ptr
    elif orders.choice is not None:
        choice = orders.choice.data.ptr
    permutation = Permutation(
        *sizes,
        orders=copies[0][0].data.ptr,
        order_count=orders.orders.shape[0],
        choice=choice,
        inverse=inverse,
        only=only,
    )
    permute_rows(
        permutation,
        moves,
        arch=gpus.arch_of(device).name,
        sms=gpus.multiprocessors(device),
        device=device,
    )
    if not stream.is_capturing():
        for _, uses in copies:
            uses.record(stream)


def _whole_rows(operand: interop.Operand) -> bool:
    """Whether the elements of each row are neighbours."""
    return operand.strides[-1] == 1 or operand.shape[-1] <= 1


def _rows(operand: interop.Operand, itemsize: int) -> Rows:
    # An axis of one element may have any stride, which must not decide how wide accesses are.
    axes = zip(operand.shape[:3], operand.strides[:3], strict=True)
    batch, head, row = (stride * itemsize if length > 1 else 0 for length, stride in axes)
    return Rows(operand.pointer, (batch, head, row))


def _itemsize(dtype: str) -> int:
    """Bytes of an element; 0 for types that NumPy has no name for."""
    try:
        return interop.numpy_dtype(dtype).itemsize
    except TypeError:
        return 0
