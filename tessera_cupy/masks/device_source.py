"""Masks in GPU memory as the kernels read them: addresses and strides of the caller's own arrays.

Nothing is copied and nothing waits. What the kernels cannot read (another dtype, a device that
CuPy cannot take over) is None here, and the host reads it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from tessera_cupy import interop
from tessera_cupy.masks.block_sizes import KnownSizes, SizesOperand, UnreadSizes

_BYTES = ("bool", "uint8", "int8")
_COLUMNS = ("int32", "int64")
_MOST_LAYOUTS = 256


@dataclass(frozen=True, eq=False)
class RaggedLayout:
    """The blocks of a mask with sizes of their own; masks alike have one object.

    Attributes:
        sizes: of the query and of the key side; None where blocks are uniform.
        most: tokens of a block at most, of each side.
        shape: (sq, skv), tokens.
        axes: (batch, heads) of the mask and the sizes together.
    """

    sizes: tuple[KnownSizes | UnreadSizes | None, KnownSizes | UnreadSizes | None]
    most: tuple[int, int]
    shape: tuple[int, int]
    axes: tuple[int, int]

    @property
    def unread(self) -> tuple[bool, bool]:
        """Sides whose sizes only the GPU knows."""
        return isinstance(self.sizes[0], UnreadSizes), isinstance(self.sizes[1], UnreadSizes)


@dataclass(frozen=True, eq=False)
class SourceLayout:
    """All that matters of a mask's arrays but where they are; sources alike have one object.

    Attributes:
        form: ``"dense"``, ``"packed"``, ``"lists"`` or ``"csr"``.
        operands: shapes, strides and dtypes of the arrays, with all their leading axes; neither
            addresses nor owners.
        axes: (batch, heads) of the arrays.
        num_blocks: (nq, nk).
        rows: rows of blocks over all heads of the arrays.
        device: CUDA device ordinal.
        ragged: where blocks have sizes of their own.
        keys: whether the mask is of key slices: a row is a group of queries, a column one key.
        most: columns that a map keeps at most, over all rows, as whoever made it says; or None.
    """

    form: str
    operands: tuple[interop.Operand, ...]
    axes: tuple[int, int]
    num_blocks: tuple[int, int]
    rows: int
    device: int
    ragged: RaggedLayout | None = None
    keys: bool = False
    most: int | None = None

    @property
    def most_listed(self) -> int | None:
        """Columns that there can be over all rows, where that is known of a map or its lists."""
        if self.form == "csr":
            return self.operands[0].shape[0]
        return math.prod(self.operands[0].shape) if self.form == "lists" else self.most


@dataclass(eq=False, slots=True)
class DeviceSource:
    """A mask's arrays in the memory of one GPU.

    Attributes:
        layout: what they look like.
        arrays: dense: (B, H, nq, nk) bytes, of which those that are not 0 keep; packed:
            (B, H, nq, ceil(nk / 8)) bytes; lists: (B, H, nq, K) columns, and (B, H, nq) counts;
            csr: (nnz,) columns, and (rows + 1,) offsets. B and H may be missing.
        pointers: their addresses.
        sizes: arrays of sizes in GPU memory that are operands too, of the query and the key side;
            None where the host knows the sizes, or blocks are uniform.
        size_pointers: their addresses, or 0.
    """

    layout: SourceLayout
    arrays: tuple[Any, ...]
    pointers: tuple[int, ...]
    sizes: tuple[Any, Any] = (None, None)
    size_pointers: tuple[int, int] = (0, 0)

    @property
    def axes(self) -> tuple[int, int]:
        """(batch, heads) of the arrays."""
        return self.layout.axes

    @property
    def num_blocks(self) -> tuple[int, int]:
        """(nq, nk)."""
        return self.layout.num_blocks


def dense(mask: Any) -> DeviceSource | None:
    """A block map of bytes."""
    return _source(("dense",), (mask,), _read_dense)


def packed(bits: Any, num_blocks: tuple[int, int]) -> DeviceSource | None:
    """A block map of eight columns a byte."""
    return _source(("packed", num_blocks), (bits,), _read_packed)


def lists(indices: Any, counts: Any, num_kv_blocks: int) -> DeviceSource | None:
    """Padded lists of columns."""
    return _source(("lists", num_kv_blocks), (indices, counts), _read_lists)


def csr(
    indptr: Any, indices: Any, axes: tuple[int, int], num_blocks: tuple[int, int]
) -> DeviceSource | None:
    """A flat CSR over all rows."""
    return _source(("csr", axes, num_blocks), (indices, indptr), _read_csr)


def with_sizes(
    source: DeviceSource,
    given: tuple[KnownSizes | SizesOperand | None, KnownSizes | SizesOperand | None],
    most: tuple[int, int],
    shape: tuple[int, int],
    axes: tuple[int, int],
) -> DeviceSource:
    """The same mask with blocks of these sizes; arguments as of :class:`RaggedLayout`."""
    ragged = _ragged(bare_sizes(given[0]), bare_sizes(given[1]), most, shape, axes)
    layout = _with_ragged(source.layout, ragged)
    arrays, pointers = zip(
        *[(s.array, s.pointer) if isinstance(s, SizesOperand) else (None, 0) for s in given],
        strict=True,
    )
    return DeviceSource(layout, source.arrays, source.pointers, arrays, pointers)


def of_keys(source: DeviceSource) -> DeviceSource:
    """The same rows and columns as groups of queries and single keys."""
    return DeviceSource(_with_keys(source.layout), source.arrays, source.pointers)


def at_most(source: DeviceSource, most: int) -> DeviceSource:
    """The same map, which is said to keep so many columns at most over all rows."""
    return DeviceSource(_with_most(source.layout, most), source.arrays, source.pointers)


def bare_sizes(
    sizes: KnownSizes | SizesOperand | None,
) -> KnownSizes | UnreadSizes | None:
    """Sizes without the memory of the caller's array."""
    return sizes.unread if isinstance(sizes, SizesOperand) else sizes


@lru_cache(maxsize=_MOST_LAYOUTS)
def _ragged(
    q: KnownSizes | UnreadSizes | None,
    kv: KnownSizes | UnreadSizes | None,
    most: tuple[int, int],
    shape: tuple[int, int],
    axes: tuple[int, int],
) -> RaggedLayout:
    return RaggedLayout((q, kv), most, shape, axes)


@lru_cache(maxsize=_MOST_LAYOUTS)
def _with_ragged(layout: SourceLayout, ragged: RaggedLayout) -> SourceLayout:
    return replace(layout, ragged=ragged)


@lru_cache(maxsize=_MOST_LAYOUTS)
def _with_keys(layout: SourceLayout) -> SourceLayout:
    return replace(layout, keys=True)


@lru_cache(maxsize=_MOST_LAYOUTS)
def _with_most(layout: SourceLayout, most: int) -> SourceLayout:
    return replace(layout, most=most)


def _source(
    kind: tuple[Any, ...], arrays: tuple[Any, ...], read: Callable[..., DeviceSource | None]
) -> DeviceSource | None:
    """What ``read`` makes of arrays; those that are like earlier ones are not looked at again."""
    alike = tuple([interop.alike(array) for array in arrays])
    if None in alike:
        return read(*arrays, *kind[1:])
    key = kind, alike
    layout = _layouts.get(key)
    if layout is not None:
        pointers = tuple([interop.address(array) or 0 for array in arrays])
        return DeviceSource(layout, arrays, pointers)
    made = read(*arrays, *kind[1:])
    if made is not None:
        if len(_layouts) >= _MOST_LAYOUTS:
            _layouts.clear()
        _layouts[key] = made.layout
    return made


_layouts: dict[Any, SourceLayout] = {}


def _read_dense(mask: Any) -> DeviceSource | None:
    values = _array(mask, 2, _BYTES)
    if values is None:
        return None
    batch, heads, nq, nk = values.shape
    return _made("dense", (values,), (batch, heads), (nq, nk))


def _read_packed(bits: Any, num_blocks: tuple[int, int]) -> DeviceSource | None:
    values = _array(bits, 2, ("uint8",))
    if values is None or values.shape[2:] != (num_blocks[0], -(-num_blocks[1] // 8)):
        return None
    return _made("packed", (values,), (values.shape[0], values.shape[1]), num_blocks)


def _read_lists(indices: Any, counts: Any, num_kv_blocks: int) -> DeviceSource | None:
    values, bounds = _array(indices, 2, _COLUMNS), _array(counts, 1, _COLUMNS)
    if values is None or bounds is None or num_kv_blocks < 0:
        return None
    if values.device != bounds.device or bounds.shape != values.shape[:3]:
        return None
    batch, heads, nq, _ = values.shape
    return _made("lists", (values, bounds), (batch, heads), (nq, num_kv_blocks))


def _read_csr(
    indices: Any, indptr: Any, axes: tuple[int, int], num_blocks: tuple[int, int]
) -> DeviceSource | None:
    values, bounds = _array(indices, None, _COLUMNS), _array(indptr, None, _COLUMNS)
    if values is None or bounds is None or values.device != bounds.device:
        return None
    if len(values.shape) != 1 or bounds.shape != (axes[0] * axes[1] * num_blocks[0] + 1,):
        return None
    return _made("csr", (values, bounds), axes, num_blocks)


def _made(
    form: str,
    operands: tuple[interop.Operand, ...],
    axes: tuple[int, int],
    num_blocks: tuple[int, int],
) -> DeviceSource:
    # Nothing that is remembered may keep a caller's memory.
    bare = tuple(replace(operand, pointer=0, owner=None) for operand in operands)
    rows = axes[0] * axes[1] * num_blocks[0]
    layout = SourceLayout(form, bare, axes, num_blocks, rows, operands[0].device)
    owners = tuple(operand.owner for operand in operands)
    return DeviceSource(layout, owners, tuple(operand.pointer for operand in operands))


def _array(array: Any, rank: int | None, dtypes: Sequence[str]) -> interop.Operand | None:
    """An array whose ``rank`` trailing axes have two before them, or None for the host to judge."""
    if isinstance(array, (np.ndarray, list, tuple)):
        return None
    try:
        try:
            if interop.on_host(array):
                return None
        except TypeError:  # no array that anybody knows, or one with CUDA's array interface alone
            if not hasattr(array, "__cuda_array_interface__"):
                return None
            array = interop.import_cupy().asarray(array)
        found = interop.device_operand(array, "mask")
    except (BufferError, RuntimeError, TypeError, ValueError):
        return None  # such as a DLPack that exports no bool
    if found.dtype not in dtypes:
        return None
    missing = 0 if rank is None else rank + 2 - len(found.shape)
    if not 0 <= missing <= 2:
        return None
    if missing:
        shape, strides = (1,) * missing + found.shape, (0,) * missing + found.strides
        found = replace(found, shape=shape, strides=strides)
    return None if rank is not None and 0 in found.shape[:2] else found
