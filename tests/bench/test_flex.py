"""The block mask in FlexAttention's form, read back by the definition of that form."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tessera_cupy.bench import flex
from tessera_cupy.bench.families import FAMILIES
from tessera_cupy.masks import BlockMask


def dense_of_lists(counts: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """The first ``count`` columns of each row are kept."""
    dense = np.zeros(columns.shape, bool)
    for at in np.ndindex(*counts.shape):
        listed = columns[at][: counts[at]]
        assert len(set(listed.tolist())) == len(listed)
        dense[at][listed] = True
    return dense


@pytest.mark.parametrize("shape", [(1, 2, 5, 7), (2, 3, 4, 4), (1, 1, 1, 9)])
@pytest.mark.parametrize("density", [0.0, 0.4, 1.0])
def test_lists_are_the_mask(shape: tuple[int, ...], density: float) -> None:
    dense = np.random.default_rng(0).random(shape) < density
    mask = BlockMask.from_dense(dense, (32, 16))
    counts, columns = flex.padded_lists(mask)
    assert counts.dtype == columns.dtype == np.int32
    assert counts.flags.c_contiguous
    assert columns.flags.c_contiguous
    assert columns.shape == shape  # as wide as the mask: one compiled kernel for all densities
    assert (counts == dense.sum(axis=-1)).all()
    assert (dense_of_lists(counts, columns) == dense).all()
    # Padding must be a column that exists: Flex reads one entry past a row's list.
    assert columns.max(initial=0) < shape[3]


def test_a_short_last_block_is_listed_like_the_others() -> None:
    mask = BlockMask.from_dense(np.ones((2, 3), bool), (64, 32), (100, 70))
    counts, columns = flex.padded_lists(mask)
    assert counts.tolist() == [[[3, 3]]]
    assert columns.tolist() == [[[[0, 1, 2], [0, 1, 2]]]]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_tiles_divide_the_block(family: Any) -> None:
    options = flex.tile_options(family.block_size)
    bq, bkv = family.block_size
    if family.block_size == (128, 128):
        assert options == {}
        return
    assert bq % options["BLOCK_M"] == 0
    assert bkv % options["BLOCK_N"] == 0
    assert min(options["BLOCK_M"], options["BLOCK_N"]) >= 16
    assert options["num_warps"] * 16 == options["BLOCK_M"]


class Torch:
    """As much of torch as the adapter touches, over NumPy; it logs what is compiled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.resets = 0
        self.compiled: list[dict[str, Any]] = []
        self.calls: list[dict[str, Any]] = []
        module = ModuleType("torch.nn.attention.flex_attention")
        module.flex_attention = self.attention  # type: ignore[attr-defined]
        module.BlockMask = SimpleNamespace(  # type: ignore[attr-defined]
            from_kv_blocks=lambda *lists, **options: SimpleNamespace(lists=lists, options=options)
        )
        torch = ModuleType("torch")
        torch.from_numpy = lambda array: SimpleNamespace(to=lambda device: array)  # type: ignore[attr-defined]
        torch.zeros_like = np.zeros_like  # type: ignore[attr-defined]
        torch.no_grad = lambda: Context(self.log)  # type: ignore[attr-defined]
        torch.compile = self.compile  # type: ignore[attr-defined]
        torch.compiler = SimpleNamespace(reset=self.reset)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "torch", torch)
        for name in ("torch.nn", "torch.nn.attention"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def reset(self) -> None:
        self.resets += 1

    def compile(self, function: Any, **options: Any) -> Any:
        self.compiled.append(options)
        return function

    def attention(self, *tensors: Any, **options: Any) -> str:
        self.log.append("attend")
        self.calls.append({"tensors": tensors, **options})
        return "output"


class Context:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def __enter__(self) -> None:
        self.log.append("in")

    def __exit__(self, *_: object) -> None:
        self.log.append("out")


def test_flex_gets_full_blocks_its_block_size_and_the_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = Torch(monkeypatch)
    log = torch.log
    tensors = tuple(SimpleNamespace(device="gpu", name=name) for name in "qkv")
    dense = np.random.default_rng(0).random((1, 2, 4, 7)) < 0.5
    mask = BlockMask.from_dense(dense, (32, 16), (120, 100))
    call = flex.Flex(tensors, lambda: Context(log)).call(mask)
    assert torch.calls == []
    assert call() == "output"
    assert log == ["in", "in", "attend", "out", "out"]  # without gradients, on the stream
    (seen,) = torch.calls
    assert seen["tensors"] == tensors
    assert seen["kernel_options"] == {"BLOCK_M": 32, "BLOCK_N": 16, "num_warps": 2}
    given = seen["block_mask"]
    partial_counts, partial_columns, counts, columns = given.lists
    assert (partial_counts == 0).all()
    assert partial_counts.shape == counts.shape
    assert partial_columns.shape == columns.shape
    assert (dense_of_lists(counts, columns) == dense).all()
    assert given.options == {
        "BLOCK_SIZE": (32, 16),
        "seq_lengths": (120, 100),
        "compute_q_blocks": False,
    }


def test_flex_chooses_its_own_tile_where_it_divides_the_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = Torch(monkeypatch)
    mask = BlockMask.from_dense(np.ones((1, 1), bool), (128, 128))
    flex.Flex((SimpleNamespace(device="gpu"),) * 3, lambda: Context([])).call(mask)()
    assert torch.calls[0]["kernel_options"] is None


def test_it_compiles_once_for_each_block_size_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = Torch(monkeypatch)
    entrant = flex.Flex((SimpleNamespace(device="gpu"),) * 3, lambda: Context([]))
    for block_size in [(64, 64), (64, 64), (64, 64), (64, 32), (32, 32)]:
        entrant.call(BlockMask.from_dense(np.ones((2, 2), bool), block_size))
    assert torch.resets == 3
    assert torch.compiled == [{"dynamic": False, "fullgraph": True}] * 3
