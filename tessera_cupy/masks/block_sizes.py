"""Sizes of ragged blocks of masks over GPU arrays: what the host knows, or an operand of calls."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera_cupy import interop
from tessera_cupy.errors import wrong
from tessera_cupy.masks.formats import as_integers, to_host, with_heads

#: Names of the arguments, query side first.
SIDES = ("q_block_sizes", "kv_block_sizes")


@dataclass(frozen=True, eq=False)
class KnownSizes:
    """Sizes that the host knows; those with equal contents are one object as long as it is kept.

    Attributes:
        sizes: (batch or 1, heads or 1, n), integers, read-only.
        copies: what holds them in GPU memory, by device; for whoever puts them there.
    """

    sizes: NDArray[Any]
    copies: dict[int, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class UnreadSizes:
    """Sizes in GPU memory, which are read by each request; arrays alike have one object.

    Attributes:
        operand: the array, with three axes; neither its address nor its owner.
    """

    operand: interop.Operand

    @property
    def axes(self) -> tuple[int, int]:
        """(batch, heads) of the array."""
        return self.operand.shape[0], self.operand.shape[1]


class SizesOperand(NamedTuple):
    """An array of sizes in GPU memory: what it looks like, itself, and its address."""

    unread: UnreadSizes
    array: Any
    pointer: int


def of_array(sizes: Any, name: str, device: int) -> KnownSizes | SizesOperand | None:
    """Sizes as given by a caller.

    Args:
        sizes: (n,), (H, n) or (B, H, n) integers, on the host or in GPU memory.
        name: of the argument.
        device: where the mask is.

    Returns:
        What the host knows; an operand; or None, for the host to read and judge.
    """
    alike = interop.alike(sizes)
    unread = _alike.get((alike, device)) if alike else None
    if unread is not None:
        return SizesOperand(unread, sizes, interop.address(sizes) or 0)
    try:
        there = not isinstance(sizes, (np.ndarray, list, tuple)) and not interop.on_host(sizes)
    except TypeError:  # no array that has a device
        there = False
    if there:
        found = _in_gpu_memory(sizes, name, device)
        if found is not None and alike:
            if len(_alike) >= _MOST_ALIKE:
                _alike.clear()
            _alike[alike, device] = found.unread
        return found
    array = with_heads(as_integers(to_host(sizes, name)[0], name), 1, name, "n")
    key = array.shape, array.dtype.str, array.tobytes()
    known = _known.get(key)
    if known is None:
        array = array.copy()
        array.setflags(write=False)
        known = _known[key] = KnownSizes(array)
        if len(_known) > _MOST_KNOWN:
            _known.popitem(last=False)
    return known


# A video's tiles have the same sizes for all masks; by their contents, the oldest first.
_known: OrderedDict[Any, KnownSizes] = OrderedDict()
_MOST_KNOWN = 16
_alike: dict[Any, UnreadSizes] = {}
_MOST_ALIKE = 256


def _in_gpu_memory(sizes: Any, name: str, device: int) -> SizesOperand | None:
    try:
        found = interop.device_operand(sizes, name)
    except (BufferError, RuntimeError, TypeError, ValueError):
        return None
    missing = 3 - len(found.shape)
    if found.dtype not in ("int32", "int64") or found.device != device or not 0 <= missing <= 2:
        return None
    shape, strides = (1,) * missing + found.shape, (0,) * missing + found.strides
    if 0 in shape[:2]:
        return None
    # Nothing that is remembered may keep a caller's memory.
    bare = replace(found, pointer=0, owner=None, shape=shape, strides=strides)
    return SizesOperand(_unread(bare), found.owner, found.pointer)


@lru_cache(maxsize=256)
def _unread(operand: interop.Operand) -> UnreadSizes:
    return UnreadSizes(operand)


def stand_in(axes: tuple[int, int], count: int, most: int, tokens: int) -> NDArray[np.int64] | None:
    """Sizes of at most ``most`` tokens that sum to ``tokens``; None where there are none."""
    sizes = np.clip(tokens - np.arange(count, dtype=np.int64) * most, 0, most)
    if sizes.sum() != tokens:
        return None
    return np.broadcast_to(sizes, (*axes, count))


def read(sizes: Any, name: str, most: int) -> NDArray[Any]:
    """Sizes that a GPU reads, on the host, with the check that those of the host do not need.

    Raises:
        ValueError: one is above the nominal block.
    """
    array, _ = to_host(sizes, name)
    if array.size and array.max() > most:
        raise ValueError(
            wrong(
                name,
                f"sizes of at most {most}, the nominal block, as they are in GPU memory",
                f"a size of {array.max()}",
                "give the largest block's size as block_size",
            )
        )
    return array
