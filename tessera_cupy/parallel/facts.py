"""What ranks compare before a call: each one's arguments, and that they fit together."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from tessera_cupy import interop
from tessera_cupy.errors import wrong
from tessera_cupy.masks import BlockMask
from tessera_cupy.parallel.shards import Shards
from tessera_cupy.request import ArraySpec, sizes

#: By key of the facts, the argument, what it is, and what to do where ranks differ.
_SAME = {
    "batch": ("q", "batch", "give each rank a part of the same batch"),
    "q_heads": ("q", "number of heads", "give each rank all heads of its tokens"),
    "kv_heads": ("k", "number of heads", "give each rank all heads of its tokens"),
    "head_dim": ("q", "head dim", "give each rank the same model's tensors"),
    "dtype": ("q", "dtype", "cast to one dtype"),
    "mask": ("mask", "mask", "make the whole mask on one rank and send it to all"),
    "scheme": ("scheme", "scheme", "pass the same on all ranks"),
    "text": ("text", "number of text tokens", "pass the same on all ranks"),
    "text_first": ("text_first", "place of the text", "pass the same on all ranks"),
    "most_heads": ("most_heads", "bound", "pass the same on all ranks"),
}


#: Where a rank's tensors are; a rank that plans without tensors says None.
HOST, GPU = "host memory", "a GPU"


def facts(
    mask: Any,
    q: Any,
    k: Any,
    v: Any,
    *,
    layout: str,
    scheme: str,
    text: int,
    text_first: bool,
    most_heads: int | None,
) -> dict[str, Any]:
    """A rank's arguments as plain data.

    Raises:
        TypeError, ValueError: arguments that are wrong by themselves.
    """
    if not isinstance(mask, BlockMask):
        fix = "build one over the whole sequence, for example with BlockMask.from_dense"
        raise TypeError(wrong("mask", "a BlockMask or KeySlices", type(mask).__name__, fix))
    if isinstance(text, bool) or not isinstance(text, int) or text < 0:
        fix = "count the tokens that every rank holds complete"
        raise ValueError(wrong("text", "a number of tokens, 0 or more", repr(text), fix))
    batch, q_heads, q_tokens, head_dim = _sizes(q, "q", layout)
    kv_batch, kv_heads, kv_tokens, kv_dim = _sizes(k, "k", layout)
    _sizes(v, "v", layout)
    if tuple(v.shape) != tuple(k.shape):
        expected, got = f"k's shape {tuple(k.shape)}", f"shape {tuple(v.shape)}"
        raise ValueError(wrong("v", expected, got, "make them equal"))
    if (kv_batch, kv_dim) != (batch, head_dim):
        expected = f"q's batch of {batch} and head dim of {head_dim}"
        raise ValueError(wrong("k", expected, f"{kv_batch} and {kv_dim}", "make them equal"))
    for name, tokens in (("q", q_tokens), ("k", kv_tokens)):
        if tokens < text:
            expected = f"at least the {text} tokens of the text, which every rank holds"
            fix = "pass the text with each shard, or text=0 where ranks share it out"
            raise ValueError(wrong(name, expected, f"{tokens} tokens", fix))
    dtype = _same_kind(q, k, v)
    return {
        "batch": batch,
        "q_heads": q_heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "q_tokens": q_tokens - text,
        "kv_tokens": kv_tokens - text,
        "dtype": dtype,
        "mask": _digest(mask),
        "scheme": scheme,
        "text": text,
        "text_first": bool(text_first),
        "most_heads": most_heads,
        "place": None if isinstance(q, ArraySpec) else HOST if interop.on_host(q) else GPU,
        "host": socket.gethostname(),
    }


def agree(told: Sequence[dict[str, Any]], name: Callable[[int], str]) -> tuple[Shards, Shards]:
    """Check that all ranks ask for the same; every rank finds the same.

    Args:
        told: each rank's facts.
        name: a rank in words.

    Returns:
        The shards of the query and of the key tokens.

    Raises:
        ValueError: they differ; the message names two ranks.
    """
    for key, (argument, what, fix) in _SAME.items():
        for rank, its in enumerate(told):
            if its[key] != told[0][key]:
                got = f"{told[0][key]!r} on {name(0)} and {its[key]!r} on {name(rank)}"
                raise ValueError(wrong(argument, f"the same {what} on all ranks", got, fix))
    places = {its["place"]: rank for rank, its in enumerate(told) if its["place"]}
    if len(places) > 1:
        got = " and ".join(f"{place} on {name(rank)}" for place, rank in places.items())
        fix = "move each rank's tensors to its own GPU"
        raise ValueError(wrong("q", "tensors on a GPU on all ranks, or on none", got, fix))
    first = told[0]
    q, kv = (
        Shards(tuple(its[key] for its in told), first["text"], first["text_first"])
        for key in ("q_tokens", "kv_tokens")
    )
    return q, kv


def _sizes(array: Any, name: str, layout: str) -> tuple[int, int, int, int]:
    if not isinstance(array, ArraySpec) and interop.framework(array) != "torch":
        fix = "pass torch tensors, which torch.distributed moves"
        raise TypeError(wrong(name, "a torch tensor", type(array).__name__, fix))
    if not isinstance(array, ArraySpec):
        interop.check_no_gradient(name, array)
    return sizes(tuple(array.shape), layout, name)


def _same_kind(q: Any, k: Any, v: Any) -> str:
    """The dtype of all three, which are in one place."""
    names = []
    for name, array in (("q", q), ("k", k), ("v", v)):
        spec = isinstance(array, ArraySpec)
        names.append(str(array.dtype) if spec else interop.dtype_name(array))
        if names[-1] != names[0]:
            raise TypeError(wrong(name, f"q's dtype {names[0]}", names[-1], f"cast to {names[0]}"))
        if not spec and array.device != q.device:
            expected, got = f"q's device {q.device}", f"device {array.device}"
            raise ValueError(wrong(name, expected, got, "move it there"))
    return names[0]


_digests: WeakKeyDictionary[BlockMask, tuple[int, str]] = WeakKeyDictionary()


def _digest(mask: BlockMask) -> str:
    """A short name of a mask's contents; equal on all ranks if the masks are."""
    known = _digests.get(mask)
    if known is not None and known[0] == mask.version:
        return known[1]
    host = mask.on_host()
    made = hashlib.blake2b(digest_size=8)
    made.update(repr((host.block_size, host.shape, host.batch, host.heads)).encode())
    sizes_of = (host.q_block_sizes, host.kv_block_sizes)
    for array in (host.indptr, host.indices, host.partial, host.token_bits, *sizes_of):
        made.update(b"none" if array is None else np.ascontiguousarray(array).data)
    digest = f"{host.shape[0]} x {host.shape[1]} #{made.hexdigest()}"
    _digests[mask] = mask.version, digest
    return digest
