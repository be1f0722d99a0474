"""Sizes of ragged blocks of masks over GPU arrays: what the host knows, or an operand of calls."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any

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


@dataclass(frozen=True)
class UnreadSizes:
    """Sizes in GPU memory, which are read by each request: all of them but their contents.

    Attributes:
        operand: the array, with three axes; neither its address nor its owner.
    """

    operand: interop.Operand

    @property
    def axes(self) -> tuple[int, int]:
        """(batch, heads) of the array."""
        return self.operand.shape[0], self.operand.shape[1]


def of_array(sizes: Any, name: str, device: int) -> KnownSizes | interop.Operand | None:
    """Sizes as given by a caller.

    Args:
        sizes: (n,), (H, n) or (B, H, n) integers, on the host or in GPU memory.
        name: of the argument.
        device: where the mask is.

    Returns:
        What the host knows; an operand of three axes; or None, for the host to read and judge.
    """
    try:
        there = not isinstance(sizes, (np.ndarray, list, tuple)) and not interop.on_host(sizes)
    except TypeError:  # no array that has a device
        there = False
    if there:
        return _in_gpu_memory(sizes, name, device)
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


def _in_gpu_memory(sizes: Any, name: str, device: int) -> interop.Operand | None:
    try:
        found = interop.device_operand(sizes, name)
    except (BufferError, RuntimeError, TypeError, ValueError):
        return None
    missing = 3 - len(found.shape)
    if found.dtype not in ("int32", "int64") or found.device != device or not 0 <= missing <= 2:
        return None
    shape, strides = (1,) * missing + found.shape, (0,) * missing + found.strides
    return None if 0 in shape[:2] else replace(found, shape=shape, strides=strides)


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
