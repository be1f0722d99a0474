"""The few array operations of a rank's program, on torch tensors and on NumPy arrays alike."""

from __future__ import annotations

import sys
from collections.abc import Sequence
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


def rows(parts: Sequence[Any], like: Any) -> Any:
    """Arrays of (rows, dim) one after the other, in one copy; none are an empty one of its kind."""
    return namespace(like).concatenate(parts) if parts else empty(like, 0, like.shape[-1])


def copy_heads(target: Any, source: Any, heads: Sequence[int]) -> None:
    """Copy some heads of an array, (batch, heads, tokens, dim), to all heads of another one."""
    for place, head in enumerate(heads):
        target[:, place] = source[:, head]


def place_heads(target: Any, source: Any, heads: Sequence[int]) -> None:
    """Copy all heads of an array to these heads of another one."""
    for place, head in enumerate(heads):
        target[:, head] = source[:, place]


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


def cast(array: Any, like: Any) -> Any:
    """The array in the dtype of ``like``."""
    if interop.framework(array) == "torch":
        return array.to(like.dtype)
    return array.astype(like.dtype)
