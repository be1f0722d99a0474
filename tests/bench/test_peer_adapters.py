"""Adapters of FlashInfer, FA4 and VSA against stand-ins that compute what those document.

None of the packages is installed here. The stand-ins take exactly the documented arguments and
compute attention from them in float64, so that a conversion of the mask that is wrong, transposed
or misses a tail gives another output than the oracle.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager, nullcontext
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from tessera_cupy import reference
from tessera_cupy.bench import fa4_peer, gpu, vsa_peer
from tessera_cupy.bench.fa4_peer import Fa4Sparse, refusal
from tessera_cupy.bench.flashinfer_peer import FlashInfer
from tessera_cupy.bench.peers import UnsupportedError
from tessera_cupy.bench.vsa_peer import Vsa
from tessera_cupy.masks import BlockMask

HEADS, TOKENS = 2, 200  # the last block of 64 has 8 tokens
HOPPER = (9, 0)


class Tensor(np.ndarray[Any, Any]):
    """NumPy's array with as much of torch's interface as the adapters touch."""

    device = "gpu"

    def to(self, where: Any) -> Tensor:
        return self if isinstance(where, str) else self.astype(where)

    def transpose(self, first: int, second: int) -> Tensor:  # type: ignore[override]
        return np.swapaxes(self, first, second)

    def expand(self, *shape: int) -> Tensor:
        own = (1,) * (len(shape) - self.ndim) + self.shape
        sizes = [old if new < 0 else new for new, old in zip(shape, own, strict=True)]
        return np.broadcast_to(self, sizes, subok=True)

    def contiguous(self) -> Tensor:
        return self.copy()

    def sum(self, dim: int, dtype: Any) -> Tensor:  # type: ignore[override]
        return np.add.reduce(self, axis=dim, dtype=dtype)


def tensor(array: Any) -> Tensor:
    return np.asarray(array).view(Tensor)


@pytest.fixture(autouse=True)
def torch(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("torch")

    def argsort(x: Any, dim: int, descending: bool, stable: bool) -> Tensor:
        assert (descending, stable) == (True, True)
        return tensor(np.argsort(-x.astype(int), axis=dim, kind="stable"))

    def pad(x: Any, widths: tuple[int, ...]) -> Tensor:
        assert widths[:3] == (0, 0, 0)
        return tensor(np.pad(x, [(0, 0), (0, 0), (0, widths[3]), (0, 0)]))

    module.__dict__.update(
        uint8=np.uint8,
        int8=np.int8,
        int32=np.int32,
        bool=np.bool_,
        empty=lambda size, dtype, device: tensor(np.empty(size, dtype)),
        from_numpy=tensor,
        zeros_like=np.zeros_like,
        argsort=argsort,
        no_grad=nullcontext,
        nn=SimpleNamespace(functional=SimpleNamespace(pad=pad)),
    )
    monkeypatch.setitem(sys.modules, "torch", module)
    monkeypatch.setattr(gpu, "torch_blocks", tensor)
    return module


def attend(q: Any, k: Any, v: Any, kept: Any) -> Any:
    """Attention of one head under a (queries, keys) bool array."""
    scores = np.where(kept, q.astype(float) @ k.astype(float).T * q.shape[1] ** -0.5, -np.inf)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return tensor(weights / weights.sum(axis=1, keepdims=True) @ v.astype(float))


def drawn(head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    shape = (3, 1, HEADS, TOKENS, head_dim)
    q, k, v = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    return tensor(q), tensor(k), tensor(v)


def masked(block: tuple[int, int], heads: int = HEADS) -> BlockMask:
    blocks = [-(-TOKENS // size) for size in block]
    kept = np.random.default_rng(5).random((1, heads, *blocks)) < 0.5
    kept[..., 0] = True  # no row is empty
    kept[..., -1] |= np.arange(blocks[0]) % 2 == 0  # the short last block counts
    return BlockMask.from_dense(kept, block, (TOKENS, TOKENS))


class Stream:
    """The context that work shall be in; it counts how deep we are."""

    def __init__(self) -> None:
        self.inside = 0

    @contextmanager
    def __call__(self) -> Any:
        self.inside += 1
        yield
        self.inside -= 1


def agrees(result: Any, mask: BlockMask, arrays: Any) -> None:
    plain = [np.asarray(x) for x in arrays]
    expected = reference.attention(*plain, mask)
    assert result.shape == (1, HEADS, TOKENS, plain[0].shape[3])
    np.testing.assert_allclose(np.asarray(result), expected, atol=1e-6)


# FlashInfer


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The module; what was made of its wrapper, in order."""
    made: list[Any] = []

    class Wrapper:
        def __init__(self, float_workspace_buffer: Any, backend: str = "auto") -> None:
            assert float_workspace_buffer.nbytes >= 128 << 20
            self.backend, self.plans = backend, 0
            made.append(self)

        def plan(
            self,
            block_mask_map: Any,
            block_row_sz: Any,
            block_col_sz: Any,
            num_qo_heads: int,
            num_kv_heads: int,
            head_dim: int,
            q_data_type: Any = "float16",
        ) -> None:
            assert STREAM.inside
            assert block_mask_map.dtype == np.bool_
            assert block_row_sz.dtype == block_col_sz.dtype == np.int32
            assert num_qo_heads == num_kv_heads == len(block_mask_map)
            assert q_data_type == np.float32
            self.plans += 1
            self.kept = [
                np.repeat(np.repeat(head, rows, axis=0), columns, axis=1)
                for head, rows, columns in zip(
                    block_mask_map, block_row_sz, block_col_sz, strict=True
                )
            ]

        def run(self, q: Any, k: Any, v: Any) -> Any:
            assert STREAM.inside
            assert q.ndim == 3
            return tensor(np.stack([attend(*x) for x in zip(q, k, v, self.kept, strict=True)]))

    module = ModuleType("flashinfer")
    module.VariableBlockSparseAttentionWrapper = Wrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    return made


STREAM = Stream()


@pytest.mark.parametrize("block", [(64, 64), (64, 32), (32, 16), (128, 128)])
@pytest.mark.parametrize("heads", [1, HEADS])
def test_flashinfer_computes_the_mask(block: Any, heads: int, flashinfer: list[Any]) -> None:
    arrays, mask = drawn(16), masked(block, heads)
    peer = FlashInfer(arrays, STREAM, "auto", HOPPER)
    agrees(peer.call(mask)(), mask, arrays)


def test_flashinfer_plans_once_for_its_attention_and_anew_in_each_request(
    flashinfer: list[Any],
) -> None:
    arrays, mask = drawn(16), masked((64, 64))
    peer = FlashInfer(arrays, STREAM, "auto", HOPPER)
    alone, request = peer.call(mask), peer.request(mask, mask.to_dense())
    for _ in range(3):
        alone()
        agrees(request(), mask, arrays)
    assert [wrapper.plans for wrapper in flashinfer] == [1, 3]
    assert [wrapper.backend for wrapper in flashinfer] == ["auto", "auto"]


@pytest.mark.parametrize(
    ("capability", "head_dim", "block", "tokens", "kept", "message"),
    [
        ((8, 0), 128, 64, 128, 1, "for compute capability 9.0, this GPU has compute capability"),
        (HOPPER, 64, 64, 128, 1, "head dim 128 only, got 64"),
        (HOPPER, 128, 32, 128, 1, "blocks of 64 x 64 only"),
        (HOPPER, 128, 64, 120, 1, "whole blocks of 64 tokens only"),
        (HOPPER, 128, 64, 128, 0, "1 to 64 blocks in a row only"),
        (HOPPER, 128, 64, 65 * 64, 1, "1 to 64 blocks in a row only"),
    ],
)
def test_cake_refuses_what_its_documentation_excludes(
    capability: Any,
    head_dim: int,
    block: int,
    tokens: int,
    kept: int,
    message: str,
    flashinfer: list[Any],
) -> None:
    arrays = tuple(tensor(np.zeros((1, 1, tokens, head_dim), np.float32)) for _ in range(3))
    blocks = -(-tokens // block)
    mask = BlockMask.from_dense(
        np.full((1, 1, blocks, blocks), bool(kept)), (block, block), (tokens, tokens)
    )
    peer = FlashInfer(arrays, STREAM, "cake", capability)
    with pytest.raises(UnsupportedError, match=message):
        peer.call(mask)


def test_cake_is_asked_for_by_name(flashinfer: list[Any]) -> None:
    arrays = tuple(tensor(np.zeros((1, 1, 128, 128), np.float32)) for _ in range(3))
    mask = BlockMask.from_dense(np.eye(2, dtype=bool), (64, 64))
    FlashInfer(arrays, STREAM, "cake", HOPPER).call(mask)()
    assert [wrapper.backend for wrapper in flashinfer] == ["cake"]


# FA4


class Lists(NamedTuple):
    mask_block_cnt: Any
    mask_block_idx: Any
    full_block_cnt: Any = None
    full_block_idx: Any = None
    block_size: Any = None


@pytest.fixture
def fa4(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []

    def flash_attn_func(q: Any, k: Any, v: Any, *, block_sparse_tensors: Any = None) -> Any:
        assert STREAM.inside
        assert q.shape[1:3] == (TOKENS, HEADS)  # tokens before heads
        calls.append(block_sparse_tensors)
        out = np.empty(q.shape)
        for head in range(HEADS):
            kept = np.ones((TOKENS, TOKENS), bool)
            if block_sparse_tensors is not None:
                kept = dense_of(block_sparse_tensors, head)
            out[0, :, head] = attend(q[0, :, head], k[0, :, head], v[0, :, head], kept)
        return tensor(out), None

    def dense_of(lists: Lists, head: int) -> Any:
        counts, columns = lists.full_block_cnt, lists.full_block_idx
        assert counts.dtype == columns.dtype == lists.mask_block_idx.dtype == np.int32
        assert (lists.mask_block_cnt == 0).all()
        assert lists.mask_block_cnt.shape == counts.shape
        head %= counts.shape[1]  # one list may serve all heads
        rows, keys = lists.block_size
        blocks = np.zeros((counts.shape[2], -(-TOKENS // keys)), bool)
        for row, count in enumerate(counts[0, head]):
            blocks[row, columns[0, head, row, :count]] = True
        return np.repeat(np.repeat(blocks, rows, 0), keys, 1)[:TOKENS, :TOKENS]

    package, cute = ModuleType("flash_attn"), ModuleType("flash_attn.cute")
    sparsity = ModuleType("flash_attn.cute.block_sparsity")
    cute.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    sparsity.BlockSparseTensorsTorch = Lists  # type: ignore[attr-defined]
    for module in (package, cute, sparsity):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls


@pytest.mark.parametrize("block", [(64, 64), (64, 32), (128, 128), (64, 16)])
@pytest.mark.parametrize("heads", [1, HEADS])
def test_fa4_computes_the_mask(block: Any, heads: int, fa4: list[Any]) -> None:
    arrays, mask = drawn(16), masked(block, heads)
    peer = Fa4Sparse(arrays, STREAM, HOPPER)
    agrees(peer.call(mask)(), mask, arrays)
    agrees(peer.request(mask, mask.to_dense())(), mask, arrays)
    assert [lists.block_size for lists in fa4] == [block, block]


def test_dense_fa4(fa4: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = drawn(16)
    monkeypatch.setattr(gpu, "torch_tensors", lambda *x: x)
    monkeypatch.setattr(gpu, "torch_stream", lambda: STREAM)
    result = fa4_peer.dense_fa4(*arrays)()
    everything = BlockMask.from_dense(np.ones((1, 1), bool), (208, 208), (TOKENS, TOKENS))
    agrees(result, everything, arrays)
    assert fa4 == [None]


@pytest.mark.parametrize(
    ("block", "head_dim", "capability", "part"),
    [
        ((64, 64), 128, (9, 0), None),
        ((128, 128), 128, (9, 0), None),
        ((192, 128), 64, (9, 0), None),
        ((64, 16), 128, (9, 0), None),
        ((32, 32), 128, (9, 0), "multiple of 64 rows on this GPU, got 32"),
        ((64, 24), 128, (9, 0), "in steps of 16, on this GPU, got 24"),
        ((64, 256), 128, (9, 0), "128 keys, or of less in steps of 16, on this GPU, got 256"),
        ((64, 128), 256, (9, 0), "80 keys, or of less"),
        ((64, 80), 256, (9, 0), None),
        ((256, 256), 128, (10, 0), None),
        ((128, 128), 128, (10, 0), "multiple of 256 rows on this GPU, got 128"),
        ((256, 64), 128, (10, 0), "multiple of 128 keys on this GPU, got 64"),
        ((128, 128), 128, (8, 0), "compute capability 9, 10 and 11, this GPU has 8.0"),
        ((128, 128), 128, (12, 0), "this GPU has 12.0"),
    ],
)
def test_fa4_says_what_it_cannot_take(
    block: Any, head_dim: int, capability: Any, part: str | None
) -> None:
    reason = refusal(block, head_dim, capability)
    assert (reason is None) if part is None else (reason is not None and part in reason)


def test_a_refused_block_is_not_tried(fa4: list[Any]) -> None:
    with pytest.raises(UnsupportedError, match="multiple of 64 rows"):
        Fa4Sparse(drawn(16), STREAM, HOPPER).call(masked((32, 32)))
    assert fa4 == []


# VSA


def of_map(q: Any, k: Any, v: Any, block_map: Any, variable_block_sizes: Any) -> Any:
    """By the documentation: tokens in whole blocks of 64, of which the sizes say what is real."""
    assert STREAM.inside
    assert q.shape[2] == 64 * len(variable_block_sizes)
    assert variable_block_sizes.dtype == np.int32
    assert block_map.shape == (1, HEADS, *2 * [len(variable_block_sizes)])
    real = np.arange(q.shape[2]) % 64 < np.repeat(variable_block_sizes, 64)
    out = np.stack(
        [
            attend(
                *(x[0, head] for x in (q, k, v)),
                np.repeat(np.repeat(block_map[0, head], 64, 0), 64, 1) & real,
            )
            for head in range(HEADS)
        ]
    )
    return tensor(out)[None], "lse"


def of_lists(q: Any, k: Any, v: Any, q2k_idx: Any, q2k_num: Any, sizes: Any) -> Any:
    assert q2k_idx.dtype == q2k_num.dtype == np.int32
    blocks = np.zeros((1, HEADS, *2 * [len(sizes)]), bool)
    for at in np.ndindex(*q2k_num.shape):
        blocks[at][q2k_idx[at][: q2k_num[at]]] = True
    return of_map(q, k, v, blocks, sizes)


def there(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.block_sparse_attn = of_map  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.mark.parametrize("package", ["fastvideo_kernel", "vsa"])
@pytest.mark.parametrize("heads", [1, HEADS])
def test_vsa_computes_the_mask(package: str, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module = there(monkeypatch, package)
    if package == "fastvideo_kernel":
        module.block_sparse_attn_from_indices = of_lists  # type: ignore[attr-defined]
    else:
        monkeypatch.setattr(vsa_peer, "find_spec", lambda name: None)
    arrays, mask = drawn(64), masked((64, 64), heads)
    peer = Vsa(arrays, STREAM)
    agrees(peer.call(mask)(), mask, arrays)
    agrees(peer.request(mask, mask.to_dense())(), mask, arrays)


def test_vsa_refuses_other_blocks_and_head_dims(monkeypatch: pytest.MonkeyPatch) -> None:
    there(monkeypatch, "vsa")
    monkeypatch.setattr(vsa_peer, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="head dims 64 and 128 only, got 16"):
        Vsa(drawn(16), STREAM)
    with pytest.raises(UnsupportedError, match="blocks of 64 x 64 only"):
        Vsa(drawn(64), STREAM).call(masked((64, 32)))
