"""The few array operations of a rank's program, on torch tensors and on NumPy arrays alike."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tessera_cupy import interop


def namespace(array: Any) -> Any:
    """Torch of a tensor, else NumPy."""
    return sys.modules["torch"] if interop.framework(array) == "torch" else np


def empty(like: Any, *shape: int) -> Any:
    """An uninitialised array of this dtype and on this device."""
    if interop.framework(like) == "torch":
        return like.new_empty(shape)
    return np.empty(shape, like.dtype)


def heads_first(array: Any, layout: str) -> Any:
    """A view with axes (batch, heads, tokens, head dim); its own inverse."""
    if layout == "BHSD":
        return array
    return array.swapaxes(1, 2)


def pieces(array: Any, heads: Sequence[int]) -> list[Any]:
    """Views (tokens, dim) of some heads of a (batch, heads, tokens, dim) array, batch by batch.

    Views rather than one array that a list of heads picks: torch would copy that list to a GPU, for
    which the host waits.
    """
    return [array[batch, head] for batch in range(array.shape[0]) for head in heads]


def is_contiguous(array: Any) -> bool:
    """Whether its elements follow each other in the order of its axes."""
    if interop.framework(array) == "torch":
        return bool(array.is_contiguous())
    return bool(array.flags.c_contiguous)


def contiguous(array: Any) -> Any:
    """The array, or a copy of it whose elements follow each other."""
    if interop.framework(array) == "torch":
        return array.contiguous()
    return np.ascontiguousarray(array)


def rows(parts: Sequence[Any], like: Any) -> Any:
    """Arrays of (rows, dim) one after the other, in one copy; none are an empty one of its kind."""
    return namespace(like).concatenate(parts) if parts else empty(like, 0, like.shape[-1])


def copy_all(pairs: Sequence[tuple[Any, Any]]) -> None:
    """Copy each second array to the first one; with torch in as few kernels as it can."""
    if not pairs:
        return
    if interop.framework(pairs[0][0]) == "torch":
        targets, sources = map(list, zip(*pairs, strict=True))
        sys.modules["torch"]._foreach_copy_(targets, sources)
        return
    for target, source in pairs:
        target[...] = source


def copy_heads(target: Any, source: Any, heads: Sequence[int]) -> None:
    """Copy some heads of an array, (batch, heads, tokens, dim), to all heads of another one."""
    for here, there in _runs(heads):
        target[:, here] = source[:, there]


def place_heads(target: Any, source: Any, heads: Sequence[int]) -> None:
    """Copy all heads of an array to these heads of another one."""
    for here, there in _runs(heads):
        target[:, there] = source[:, here]


def _runs(heads: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Where neighbouring heads are in the list, and which they are; one copy serves them all."""
    begin = 0
    for end in range(1, len(heads) + 1):
        if end == len(heads) or heads[end] != heads[end - 1] + 1:
            yield slice(begin, end), slice(heads[begin], heads[end - 1] + 1)
            begin = end


def of_heads(array: Any, heads: Sequence[int]) -> Any:
    """Some heads of a (batch, heads, tokens, dim) array: itself where they are all of its own."""
    if list(heads) == list(range(array.shape[1])):
        return array
    picked = empty(array, array.shape[0], len(heads), *array.shape[2:])
    copy_heads(picked, array, heads)
    return picked


def float32(array: Any) -> Any:
    """The array in float32."""
    if interop.framework(array) == "torch":
        return array.float()
    return array.astype(np.float32)


def weighted(array: Any, factor: Any, more: Any, other: Any) -> Any:
    """``array * factor + more * other`` in float32, which the factors are.

    With torch in two kernels, which read bfloat16 as it is.
    """
    if interop.framework(array) == "torch":
        return namespace(array).addcmul(array * factor, more, other)
    return float32(array) * factor + float32(more) * other


def cast(array: Any, like: Any) -> Any:
    """The array in the dtype of ``like``."""
    if interop.framework(array) == "torch":
        return array.to(like.dtype)
    return array.astype(like.dtype)
