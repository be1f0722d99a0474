"""What is asked for: the shapes, dtype and layout of a call, checked once at the edge."""

from __future__ import annotations

import operator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from tessera_cupy import interop
from tessera_cupy.errors import wrong
from tessera_cupy.masks import BlockMask
from tessera_cupy.masks.geometry import TOKEN_MASK

if TYPE_CHECKING:
    from tessera_cupy.kernels.arch import Arch

#: Axes of q, k, v and o: batch, heads, sequence, head dim.
LAYOUTS = ("BHSD", "BSHD")
MAX_HEAD_DIM = 256

_SHORT_NAMES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of an array that need not exist, to plan without data.

    Attributes:
        shape: integers that are not negative; kept as a tuple of ints.
        dtype: ``"float16"``, ``"bfloat16"`` or, for the executor, ``"float32"``; also a dtype of
            NumPy, torch or JAX.

    Raises:
        TypeError: a shape that is not of integers, or another dtype.
        ValueError: a negative length.

    >>> ArraySpec((1, 12, 32760, 128), "bfloat16").shape[2]
    32760
    """

    shape: tuple[int, ...]
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        """Check both, and take a dtype of NumPy, torch or JAX by its name."""
        object.__setattr__(self, "shape", _lengths(self.shape))
        name = getattr(self.dtype, "__name__", str(self.dtype)).rpartition(".")[2]
        if name not in interop.HOST_DTYPES:
            meant = _SHORT_NAMES.get(name)
            raise TypeError(
                wrong(
                    "dtype",
                    " or ".join(interop.HOST_DTYPES),
                    repr(name),
                    f'write "{meant}"' if meant else "plan for one of these, and cast to it",
                )
            )
        object.__setattr__(self, "dtype", name)


def _lengths(shape: Any) -> tuple[int, ...]:
    try:
        lengths = tuple(operator.index(length) for length in shape)
        if any(isinstance(length, bool) for length in shape):
            raise TypeError
    except TypeError:
        raise TypeError(
            wrong("shape", "a tuple of integers", repr(shape), "pass whole numbers of elements")
        ) from None
    if min(lengths, default=0) < 0:
        raise ValueError(
            wrong("shape", "no negative length", lengths, "give each axis its full length")
        )
    return lengths


@dataclass(frozen=True)
class Request:
    """One call, without its data.

    Attributes:
        arch: architecture that the plan is for.
        batch, q_heads, kv_heads, sq, skv, head_dim: sizes; ``q_heads`` is a multiple of
            ``kv_heads``.
        dtype: element type of q, k, v and o.
        layout: ``"BHSD"`` or ``"BSHD"``.
    """

    arch: Arch
    batch: int
    q_heads: int
    kv_heads: int
    sq: int
    skv: int
    head_dim: int
    dtype: str
    layout: str

    def differences(self, other: Request) -> str:
        """This request's values of the fields in which another one differs, as text."""
        mine = {f.name: getattr(self, f.name) for f in fields(self)}
        mine["arch"] = self.arch.name
        theirs = {f.name: getattr(other, f.name) for f in fields(other)}
        theirs["arch"] = other.arch.name
        return ", ".join(f"{name} {value}" for name, value in mine.items() if value != theirs[name])

    @property
    def kernel_dtype(self) -> str:
        """The dtype of the kernel; the executor's float32 is planned like float16."""
        return self.dtype if self.dtype in interop.GPU_DTYPES else "float16"

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        """Shape of q and o in the request's layout."""
        return _in_layout(self.batch, self.q_heads, self.sq, self.head_dim, self.layout)

    @property
    def kv_shape(self) -> tuple[int, int, int, int]:
        """Shape of k and v in the request's layout."""
        return _in_layout(self.batch, self.kv_heads, self.skv, self.head_dim, self.layout)


def _in_layout(
    batch: int, heads: int, sequence: int, dim: int, layout: str
) -> tuple[int, int, int, int]:
    if layout == "BHSD":
        return (batch, heads, sequence, dim)
    return (batch, sequence, heads, dim)


def sizes(shape: tuple[int, ...], layout: str, name: str) -> tuple[int, int, int, int]:
    """(batch, heads, sequence, head dim) of a shape.

    Raises:
        ValueError: the shape does not have four axes, or the layout is unknown.
    """
    if layout not in LAYOUTS:
        raise ValueError(
            wrong("layout", " or ".join(map(repr, LAYOUTS)), repr(layout), "name the axes so")
        )
    if len(shape) != 4:
        raise ValueError(
            wrong(
                name,
                f"four axes in layout {layout}",
                f"shape {tuple(shape)}",
                "add batch and head axes",
            )
        )
    if layout == "BHSD":
        batch, heads, sequence, dim = shape
    else:
        batch, sequence, heads, dim = shape
    return int(batch), int(heads), int(sequence), int(dim)


def make_request(
    mask: BlockMask, q: Any, k: Any, v: Any, *, layout: str, arch: Arch, on_gpu: bool
) -> Request:
    """Check a call's shapes against each other and the mask.

    Args:
        mask: the mask that the call applies.
        q: an array or :class:`ArraySpec`.
        k: the same, or None for v's sizes.
        v: as k; where both are None, they have q's own sizes with the mask's KV length.
        layout: axes of all of them.
        arch: architecture to plan for.
        on_gpu: whether kernels will run it, or the NumPy executor.

    Raises:
        ValueError: shapes that do not fit; TypeError: dtypes that no kernel takes.
    """
    if not isinstance(mask, BlockMask):
        fix = _no_mask_fix(mask, q, k, layout)
        raise TypeError(wrong("mask", "a BlockMask or KeySlices", type(mask).__name__, fix))
    for array in (q, k, v):
        if array is not None and not isinstance(array, ArraySpec):
            interop.framework(array)  # refuses what is no array
    if k is None:
        k = v
    batch, q_heads, sq, head_dim = sizes(tuple(q.shape), layout, "q")
    kv_batch, kv_heads, skv, k_dim = batch, q_heads, mask.shape[1], head_dim
    if k is not None:
        kv_batch, kv_heads, skv, k_dim = sizes(tuple(k.shape), layout, "k")
    dtype = _checked_dtype(q, k, v, interop.GPU_DTYPES if on_gpu else interop.HOST_DTYPES)

    if kv_batch != batch:
        raise ValueError(wrong("k", f"q's batch of {batch}", kv_batch, "repeat the smaller one"))
    if k_dim != head_dim:
        raise ValueError(
            wrong("k", f"q's head dim of {head_dim}", k_dim, "pad the smaller with zeros")
        )
    if v is not None and tuple(v.shape) != tuple(k.shape):
        raise ValueError(
            wrong("v", f"k's shape {tuple(k.shape)}", f"shape {tuple(v.shape)}", "make them equal")
        )
    if kv_heads < 1 or q_heads % kv_heads:
        raise ValueError(
            wrong(
                "k",
                f"a number of heads that divides q's {q_heads}",
                f"{kv_heads} heads",
                _other_layout(mask, q, k, layout) or "repeat KV heads until it does",
            )
        )
    if head_dim < 8 or head_dim % 8 or head_dim > MAX_HEAD_DIM:
        raise ValueError(
            wrong(
                "q",
                f"a head dim that is a multiple of 8, from 8 to {MAX_HEAD_DIM}",
                head_dim,
                _head_dim_fix(head_dim),
            )
        )
    if mask.shape != (sq, skv):
        raise ValueError(
            wrong(
                "mask",
                f"{sq} query and {skv} key tokens, as in q and k",
                f"a mask of {mask.shape[0]} query and {mask.shape[1]} key tokens",
                _other_layout(mask, q, k, layout) or _length_fix(mask, (sq, skv)),
            )
        )
    for axis, got, full in (("batch", mask.batch, batch), ("head", mask.heads, q_heads)):
        if got not in (1, full):
            raise ValueError(
                wrong(
                    "mask",
                    f"a {axis} axis of 1" + (f" or {full}, as q's" if full > 1 else ", as q's"),
                    got,
                    "give one mask to each, or one to all",
                )
            )
    return Request(arch, batch, q_heads, kv_heads, sq, skv, head_dim, dtype, layout)


def _no_mask_fix(mask: Any, q: Any, k: Any, layout: str) -> str:
    """What to do with something else than a mask, by what it looks like."""
    if mask is None:
        return (
            "for dense attention, BlockMask.from_dense(np.ones((nq, nk), bool), (64, 64), "
            "shape=(sq, skv)) with as many blocks as the tokens need"
        )
    if hasattr(mask, "mask"):  # what a rule returns
        return "pass its .mask, and q, k and v in its orders"
    have = tuple(getattr(mask, "shape", ()))[-2:]
    shapes = [tuple(getattr(array, "shape", ())) for array in (q, q if k is None else k)]
    if layout in LAYOUTS and all(len(shape) == 4 for shape in shapes):
        axis = layout.index("S")
        if have == tuple(shape[axis] for shape in shapes):
            return f"{TOKEN_MASK}(mask, (64, 64))"
    return "build one, for example with BlockMask.from_dense(mask, (64, 64))"


def _head_dim_fix(head_dim: int) -> str:
    if head_dim < 1:
        return "give each token at least 8 elements; the last axis is the head dim"
    if head_dim > MAX_HEAD_DIM:
        return "use a smaller head dim"
    # The default scale would be that of the padded head dim.
    return (
        f"pad q, k and v with zeros, pass sm_scale=1/sqrt({head_dim}) or your own, and cut the "
        "result"
    )


def _other_layout(mask: BlockMask, q: Any, k: Any, layout: str) -> str | None:
    """The advice to pass the other layout, where the arrays would fit in it."""
    other = LAYOUTS[1 - LAYOUTS.index(layout)]
    _, q_heads, sq, _ = sizes(tuple(q.shape), other, "q")
    kv_heads, skv = q_heads, mask.shape[1]
    if k is not None:
        _, kv_heads, skv, _ = sizes(tuple(k.shape), other, "k")
    fits = (sq, skv) == mask.shape and kv_heads > 0 and q_heads % kv_heads == 0
    return f'pass layout="{other}"' if fits else None


def _length_fix(mask: BlockMask, lengths: tuple[int, int]) -> str:
    if all(
        0 < have - want < b
        for have, want, b in zip(mask.shape, lengths, mask.block_size, strict=True)
    ):
        grid = "where a rule made it, give the rule the grid of these tokens"
        return f"build the mask with shape={lengths}; {grid}"
    if mask.num_blocks == lengths:
        rows, columns = mask.block_size
        return f"{TOKEN_MASK}(mask, ({rows}, {columns}))"
    return "build the mask for these lengths"


def _checked_dtype(q: Any, k: Any, v: Any, accepted: tuple[str, ...]) -> str:
    dtype = interop.dtype_name(q) if not isinstance(q, ArraySpec) else q.dtype
    if dtype not in accepted:
        raise TypeError(wrong("q", " or ".join(accepted), dtype, f"cast it to {accepted[-1]}"))
    for name, array in (("k", k), ("v", v)):
        if array is None:
            continue
        other = array.dtype if isinstance(array, ArraySpec) else interop.dtype_name(array)
        if other != dtype:
            raise TypeError(wrong(name, f"q's dtype {dtype}", other, f"cast it to {dtype}"))
    return dtype
