"""Q, K and V as the reference computes with them: on the host, heads first."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tessera_cupy.errors import wrong

#: Axis order of the request for each layout: batch, heads, tokens.
LAYOUTS = {"BHSD": (0, 1, 2, 3), "BSHD": (0, 2, 1, 3)}


def heads_first(
    q: Any, k: Any, v: Any, layout: str, dtype: DTypeLike
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Q, K and V as C-contiguous (batch, heads, tokens, dim) arrays in ``dtype``.

    They may share memory with the arguments.

    Raises:
        ValueError: unknown layout, or shapes that do not fit each other.
    """
    q, k, v = (_one(x, name, layout, dtype) for x, name in ((q, "q"), (k, "k"), (v, "v")))
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        expected = f"batch {q.shape[0]} and head dim {q.shape[3]} as in q"
        raise ValueError(wrong("k", expected, f"{k.shape[0]} and {k.shape[3]}", "match q"))
    if v.shape[:3] != k.shape[:3]:
        expected = f"batch, heads and tokens {k.shape[:3]} as in k"
        raise ValueError(wrong("v", expected, v.shape[:3], "match k"))
    if k.shape[1] < 1 or q.shape[1] % k.shape[1]:
        expected = f"a multiple of the {k.shape[1]} heads of k"
        raise ValueError(wrong("q", expected, f"{q.shape[1]} heads", "repeat or drop heads"))
    return q, k, v


def request_layout(array: NDArray[Any], layout: str) -> NDArray[Any]:
    """A (batch, heads, tokens, dim) array in the request's layout, C-contiguous."""
    return np.ascontiguousarray(array.transpose(LAYOUTS[layout]))


def default_scale(sm_scale: float | None, head_dim: int) -> float:
    """``sm_scale`` as a float, or 1 / sqrt(head_dim)."""
    return 1.0 / math.sqrt(head_dim) if sm_scale is None else float(sm_scale)


def _one(array: Any, name: str, layout: str, dtype: DTypeLike) -> NDArray[Any]:
    if layout not in LAYOUTS:
        raise ValueError(wrong("layout", " or ".join(LAYOUTS), repr(layout), "choose one"))
    host = _on_host(array)
    if host.ndim != 4:
        raise ValueError(wrong(name, "4 axes", f"shape {host.shape}", f"arrange it as {layout}"))
    # Both layouts swap the same two axes, so the permutation is its own inverse.
    return np.ascontiguousarray(host.transpose(LAYOUTS[layout]), dtype=dtype)


def _on_host(array: Any) -> NDArray[Any]:
    """NumPy's view or copy of an array, whatever its float type; GPU arrays are waited for."""
    if hasattr(array, "detach"):  # torch, whose bfloat16 NumPy cannot take
        return np.asarray(array.detach().cpu().double().numpy())
    if hasattr(array, "__cuda_array_interface__"):
        return np.asarray(array.get())
    return np.asarray(array)
