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


def rows(parts: Sequence[Any], like: Any) -> Any:
    """Arrays one after the other, each as (rows, head dim)."""
    dim = like.shape[-1]
    flat = [part.reshape(-1, dim) for part in parts]
    return namespace(like).concatenate([empty(like, 0, dim), *flat])


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
