"""The adapter for diffusers, with a registry that has the methods of diffusers 0.42.1."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tessera_cupy import BlockMask
from tessera_cupy.errors import MissingExtraError
from tessera_cupy.parallel import call, diffusers

MASK = BlockMask.from_dense(np.ones((2, 2), bool), (16, 16))


class Registry:
    """What the adapter uses of ``_AttentionBackendRegistry``."""

    def __init__(self) -> None:
        self.functions: dict[Any, Callable[..., Any]] = {"native": self.native}
        self.active: Any = "native"
        self.parallel: set[str] = set()
        self.asked: list[dict[str, Any]] = []

    def native(self, **given: Any) -> str:
        self.asked.append(given)
        return "native"

    def register(self, backend: Any, *, supports_context_parallel: bool) -> Any:
        assert supports_context_parallel
        self.parallel.add(backend.value)

        def decorator(function: Callable[..., Any]) -> Callable[..., Any]:
            self.functions[backend] = function
            return function

        return decorator

    def get_active_backend(self) -> Any:
        return self.active, self.functions[self.active]

    def set_active_backend(self, backend: Any) -> None:
        self.active = backend

    def list_backends(self) -> list[Any]:
        return list(self.functions)

    def dispatch(self, config: Any = None, **given: Any) -> Any:
        """As ``dispatch_attention_fn``: only arguments that the backend takes."""
        function = self.functions[self.active]
        every = {
            "query": "q",
            "key": "k",
            "value": "v",
            "attn_mask": None,
            "dropout_p": 0.0,
            "is_causal": False,
            "scale": 0.5,
            "enable_gqa": False,
            "_parallel_config": config,
            **given,
        }
        if function == self.native:
            return function(**every)
        names = inspect.signature(function).parameters
        return function(**{name: value for name, value in every.items() if name in names})


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    made = Registry()
    dispatch = ModuleType("diffusers.models.attention_dispatch")
    dispatch._AttentionBackendRegistry = made  # type: ignore[attr-defined]
    models = ModuleType("diffusers.models")
    models.attention_dispatch = dispatch  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "diffusers", ModuleType("diffusers"))
    monkeypatch.setitem(sys.modules, "diffusers.models", models)
    monkeypatch.setitem(sys.modules, "diffusers.models.attention_dispatch", dispatch)
    return made


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    made: list[tuple[Any, ...]] = []

    def attention(*arrays: Any, **options: Any) -> str:
        made.append((arrays, options))
        return "sparse"

    monkeypatch.setattr(call, "attention", attention)
    return made


def config(ulysses: int | None, ring: int | None) -> Any:
    mesh = SimpleNamespace(get_group=lambda: "the group")
    context = SimpleNamespace(ulysses_degree=ulysses, ring_degree=ring, _flattened_mesh=mesh)
    return SimpleNamespace(context_parallel_config=context)


def test_sharded_attention_comes_here(registry: Registry, calls: list[Any]) -> None:
    with diffusers.sparse_attention(MASK, timeout=7):
        assert registry.active.value == "tessera_cupy"
        assert registry.dispatch(config(2, 4)) == "sparse"
    assert registry.active == "native"
    assert registry.parallel == {"tessera_cupy"}
    (arrays, options) = calls[0]
    assert arrays == ("q", "k", "v", MASK)
    assert options == {
        "group": "the group",
        "scheme": (2, 4),
        "layout": "BSHD",
        "sm_scale": 0.5,
        "timeout": 7,
    }


def test_other_attention_stays_where_it_was(registry: Registry, calls: list[Any]) -> None:
    with diffusers.sparse_attention(MASK):
        assert registry.dispatch(None, attn_mask="padding") == "native"
        tensor_parallel = SimpleNamespace(context_parallel_config=None)
        assert registry.dispatch(tensor_parallel) == "native"
    with diffusers.sparse_attention(lambda q, k: None):
        assert registry.dispatch(config(2, None)) == "native"
    assert not calls
    assert registry.asked[0]["attn_mask"] == "padding"


def test_a_function_gives_each_layer_its_mask(registry: Registry, calls: list[Any]) -> None:
    seen = []

    def mask_of(query: Any, key: Any) -> BlockMask:
        seen.append((query, key))
        return MASK

    with diffusers.sparse_attention(mask_of):
        registry.dispatch(config(None, 2))
    assert seen == [("q", "k")]
    assert calls[0][0][3] is MASK
    assert calls[0][1]["scheme"] == (1, 2)


@pytest.mark.parametrize("given", [{"attn_mask": "m"}, {"is_causal": True}, {"dropout_p": 0.1}])
def test_what_the_mask_must_say_is_refused(registry: Registry, given: dict[str, Any]) -> None:
    name = next(iter(given))
    with (
        diffusers.sparse_attention(MASK),
        pytest.raises(ValueError, match=f"`{name}`: expected nothing, as the mask"),
    ):
        registry.dispatch(config(2, 1), **given)
    assert registry.active == "native"


def test_calls_outside_are_refused(registry: Registry) -> None:
    with pytest.raises(ValueError, match=r"`backend`: expected a call within sparse_attention"):
        diffusers.dispatched("q", "k", "v")


def test_without_diffusers_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    monkeypatch.setitem(sys.modules, "diffusers.models", None)
    with (
        pytest.raises(MissingExtraError, match=r"pip install diffusers==0.42.1"),
        diffusers.sparse_attention(MASK),
    ):
        pass
