"""For models of diffusers: sparse attention under its context parallelism.

Written against diffusers 0.42.1: ``model.enable_parallelism(config=ContextParallelConfig(...))``
shards the sequence, and the models' processors call ``dispatch_attention_fn``, which hands q, k and
v of a shard, (batch, tokens, heads, head dim), to the active backend together with that
configuration. Within :func:`sparse_attention` this package is that backend.

diffusers calls its context parallelism experimental, and the registry of backends has no public
name; another version may need another adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tessera_cupy.errors import MissingExtraError, wrong
from tessera_cupy.masks import BlockMask, KeySlices
from tessera_cupy.parallel import call
from tessera_cupy.parallel.degrees import Degrees
from tessera_cupy.parallel.status import TIMEOUT

#: What makes the mask of a layer: from q and k of this rank's shard; None means dense attention.
MaskOf = Callable[[Any, Any], "BlockMask | KeySlices | None"]


class Backend(str, Enum):
    """This package among diffusers' backends."""

    TESSERA = "tessera_cupy"


@dataclass(frozen=True)
class _Chosen:
    mask: BlockMask | KeySlices | MaskOf
    timeout: Any
    otherwise: Callable[..., Any]


_chosen: ContextVar[_Chosen | None] = ContextVar("tessera_cupy_diffusers", default=None)


@contextmanager
def sparse_attention(
    mask: BlockMask | KeySlices | MaskOf, *, timeout: Any = TIMEOUT
) -> Iterator[None]:
    """Let this package compute the sharded attention of diffusers' models.

    That is the self-attention of models on which ``enable_parallelism`` was called, in processors
    that have no backend of their own. Attention that diffusers does not shard, such as that to a
    prompt, stays with the backend that was active before.

    Args:
        mask: over the whole sequence, the same on every rank; or a function of q and k of this
            rank's shard, which must return the same on every rank, or None for dense attention
            by the backend that was active before.
        timeout: seconds that ranks wait for each other.

    Raises:
        MissingExtraError: diffusers is not installed, or has no such dispatch.

    Example:
        >>> with sparse_attention(mask):  # doctest: +SKIP
        ...     video = pipe(prompt)
    """
    registry = _registry()
    before, otherwise = registry.get_active_backend()
    if Backend.TESSERA not in registry.list_backends():
        registry.register(Backend.TESSERA, supports_context_parallel=True)(dispatched)
    token = _chosen.set(_Chosen(mask, timeout, otherwise))
    registry.set_active_backend(Backend.TESSERA)
    try:
        yield
    finally:
        registry.set_active_backend(before)
        _chosen.reset(token)


def dispatched(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    _parallel_config: Any = None,
) -> Any:
    """The backend: what diffusers calls, with the arguments that it has for all backends.

    Raises:
        ValueError: sharded attention with what only a block mask may say, or with dropout; or a
            call outside of :func:`sparse_attention`.
    """
    chosen = _chosen.get()
    if chosen is None:
        expected, fix = "a call within sparse_attention(mask)", "call the model within it"
        raise ValueError(wrong("backend", expected, "one outside", fix))
    config = getattr(_parallel_config, "context_parallel_config", None)
    mask = None if config is None else _mask_of(chosen.mask, query, key)
    if config is None or mask is None:
        return chosen.otherwise(
            query=query,
            key=key,
            value=value,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            _parallel_config=_parallel_config,
        )
    for name, given in (
        ("attn_mask", attn_mask),
        ("dropout_p", dropout_p),
        ("is_causal", is_causal),
    ):
        if given is not None and given is not False and given != 0.0:
            expected = "nothing, as the mask of sparse_attention says what is kept"
            fix = "put it into that mask, or run the model without it"
            raise ValueError(wrong(name, expected, type(given).__name__, fix))
    return call.attention(
        query,
        key,
        value,
        mask,
        group=config._flattened_mesh.get_group(),
        scheme=degrees_of(config),
        layout="BSHD",
        sm_scale=scale,
        timeout=chosen.timeout,
    )


def _mask_of(
    given: BlockMask | KeySlices | MaskOf, query: Any, key: Any
) -> BlockMask | KeySlices | None:
    return given if isinstance(given, (BlockMask, KeySlices)) else given(query, key)


def degrees_of(config: Any) -> Degrees:
    """The scheme of a ``ContextParallelConfig``.

    >>> from types import SimpleNamespace
    >>> degrees_of(SimpleNamespace(ulysses_degree=2, ring_degree=None)).name
    'ulysses'
    """
    return Degrees(config.ulysses_degree or 1, config.ring_degree or 1)


def _registry() -> Any:
    try:
        from diffusers.models import attention_dispatch

        return attention_dispatch._AttentionBackendRegistry
    except (ImportError, AttributeError) as error:
        raise MissingExtraError(
            "sparse_attention needs diffusers with models.attention_dispatch and context "
            f"parallelism, as version 0.42 has them: {error}. Fix: pip install diffusers==0.42.1."
        ) from error
