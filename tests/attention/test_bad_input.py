"""What does not fit is refused, with a message that says what was expected and what came."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tessera_cupy import BlockMask, PlanNotEligibleError, block_sparse_attention, make_plan

MASK = BlockMask.from_dense(np.ones((4, 2, 2), bool), (64, 64))


def zeros(*shape: int, dtype: Any = np.float16) -> Any:
    return np.zeros(shape, dtype)


Q, K = zeros(1, 4, 128, 64), zeros(1, 2, 128, 64)


def refused(
    kind: type[Exception], *parts: str, q: Any = Q, k: Any = K, v: Any = None, **arguments: Any
) -> None:
    """The call raises ``kind``, and the message has every part."""
    arguments = {"mask": MASK} | arguments
    with pytest.raises(kind) as caught:
        block_sparse_attention(q, k, k if v is None else v, **arguments)
    for part in parts:
        assert part in str(caught.value)


def test_the_base_request_is_right() -> None:
    assert block_sparse_attention(Q, K, K, MASK).shape == Q.shape


@pytest.mark.parametrize(("tokens", "built_for"), [(1280, 1024), (1200, 512)])
def test_a_mask_for_another_length_names_both(tokens: int, built_for: int) -> None:
    mask = BlockMask.from_dense(np.ones((built_for // 64,) * 2, bool), (64, 64))
    q = zeros(1, 1, tokens, 64)
    refused(ValueError, "`mask`", str(tokens), str(built_for), q=q, k=q, mask=mask)
    # Only the keys differ.
    refused(ValueError, str(tokens), str(built_for), q=zeros(1, 1, built_for, 64), k=q, mask=mask)


def test_a_mask_of_whole_blocks_is_told_the_tokens() -> None:
    mask = BlockMask.from_dense(np.ones((2, 2), bool), (64, 64))
    q = zeros(1, 1, 100, 64)
    refused(ValueError, "build the mask with shape=(100, 100); where a rule made it, give the rule "
            "the grid of these tokens.", q=q, k=q, mask=mask)  # fmt: skip


def test_a_mask_declared_in_other_blocks() -> None:
    blocks = np.ones((20, 20), bool)
    with pytest.raises(ValueError, match=r"(?s)1280.*10 blocks"):
        BlockMask.from_dense(blocks, (128, 128), (1280, 1280))
    mask = BlockMask.from_dense(blocks, (128, 128))
    q = zeros(1, 1, 1280, 64)
    refused(ValueError, "1280", "2560", q=q, k=q, mask=mask)


@pytest.mark.parametrize("mask", [np.ones((4, 2, 2), bool), None, "causal"])
def test_only_block_masks(mask: Any) -> None:
    refused(TypeError, "`mask`", "BlockMask.from_dense", mask=mask)


def test_a_token_mask_is_sent_to_from_tokens() -> None:
    """In place of a mask, of a map of blocks, and with the shape that such a map has."""
    tokens = np.tri(1000, 600, dtype=bool)
    q, k = zeros(1, 4, 1000, 64), zeros(1, 2, 600, 64)
    advice = "one entry for each token: use BlockMask.from_tokens(mask, (64, 64))"
    for given in (tokens, tokens[None, None]):
        refused(TypeError, "`mask`", "got ndarray", advice, q=q, k=k, mask=given)
        swapped = {"q": q.swapaxes(1, 2), "k": k.swapaxes(1, 2), "layout": "BSHD"}
        refused(TypeError, advice, mask=given, **swapped)
        with pytest.raises(ValueError, match=r"`shape`.*got 1000 tokens.*one entry for each token"):
            BlockMask.from_dense(given, (64, 64), shape=(1000, 600))
        refused(ValueError, "`mask`", "64000", advice, q=q, k=k,
                mask=BlockMask.from_dense(given, (64, 64)))  # fmt: skip
    out = block_sparse_attention(q, k, k, BlockMask.from_tokens(tokens, (64, 64)))
    assert out.shape == q.shape
    # One entry for each block.
    with pytest.raises(TypeError, match=r"Fix: build one, for example with BlockMask.from_dense"):
        block_sparse_attention(q, k, k, np.ones((16, 10), bool))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"pass tokens, such as shape=\(1024, 640\)"):
        BlockMask.from_dense(np.ones((16, 10), bool), (64, 64), shape=(16, 600))


def test_no_mask_is_told_how_to_keep_everything() -> None:
    refused(TypeError, "got NoneType", "for dense attention", "np.ones((nq, nk), bool)", mask=None)


def test_heads_that_do_not_divide() -> None:
    mask = BlockMask.from_dense(np.ones((2, 2), bool), (64, 64))
    refused(ValueError, "`k`", "10", "4 heads", q=zeros(1, 10, 128, 64), k=zeros(1, 4, 128, 64),
            mask=mask)  # fmt: skip
    refused(ValueError, "`k`", "0 heads", k=zeros(1, 0, 128, 64))
    refused(ValueError, "`k`", "8 heads", k=zeros(1, 8, 128, 64))


def test_mask_heads_are_one_or_the_query_heads() -> None:
    # As many as the KV heads would be read as the first heads' masks, or spread over groups.
    for heads in (2, 3, 8):
        mask = BlockMask.from_dense(np.ones((heads, 2, 2), bool), (64, 64))
        refused(ValueError, "`mask`", "head axis of 1 or 4", f"got {heads}", mask=mask)
    batched = BlockMask.from_dense(np.ones((2, 1, 2, 2), bool), (64, 64))
    q, k = zeros(3, 4, 128, 64), zeros(3, 2, 128, 64)
    refused(ValueError, "`mask`", "batch axis of 1 or 3", "got 2", q=q, k=k, mask=batched)


@pytest.mark.parametrize("dim", [1, 4, 31, 100, 264, 512])
def test_head_dims_without_a_kernel(dim: int) -> None:
    refused(
        ValueError, "head dim", "multiple of 8", f"got {dim}", "pad" if dim < 256 else "smaller",
        q=zeros(1, 4, 128, dim), k=zeros(1, 2, 128, dim),
    )  # fmt: skip


@pytest.mark.parametrize("dim", [4, 31, 60, 100])
def test_the_advice_for_other_head_dims_gives_their_attention(dim: int) -> None:
    rng = np.random.default_rng(dim)
    q, k, v = (rng.standard_normal((1, 4, 128, dim), np.float32) for _ in range(3))
    refused(ValueError, "pad q, k and v with zeros", f"pass sm_scale=1/sqrt({dim})",
            "cut the result", q=q, k=k, v=v)  # fmt: skip
    padded = (np.pad(x, [(0, 0)] * 3 + [(0, -dim % 8)]) for x in (q, k, v))
    out = block_sparse_attention(*padded, MASK, sm_scale=1 / np.sqrt(dim))[..., :dim]
    weights = np.exp(q @ k.swapaxes(2, 3) / np.sqrt(dim))
    expected = weights @ v / weights.sum(axis=3, keepdims=True)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


def test_a_head_dim_of_nothing_is_not_padded() -> None:
    with pytest.raises(ValueError, match=r"head dim.*got 0\..*at least 8 elements") as caught:
        block_sparse_attention(zeros(1, 4, 128, 0), zeros(1, 2, 128, 0), zeros(1, 2, 128, 0), MASK)
    assert "pad" not in str(caught.value)


def test_arrays_that_fit_in_the_other_layout() -> None:
    mask = BlockMask.from_dense(np.ones((2, 3), bool), (64, 64), (100, 150))
    q, k = zeros(1, 100, 4, 64), zeros(1, 150, 2, 64)
    refused(ValueError, "`k`", "150 heads", 'Fix: pass layout="BSHD"', q=q, k=k, mask=mask)
    with pytest.raises(ValueError, match=r'`mask`.*Fix: pass layout="BSHD"'):
        make_plan(mask, q)
    q, k = q.swapaxes(1, 2), k.swapaxes(1, 2)
    refused(ValueError, 'Fix: pass layout="BHSD"', q=q, k=k, mask=mask, layout="BSHD")
    # They fit in neither.
    for tokens, heads in ((151, 2), (150, 3)):
        k = zeros(1, tokens, heads, 64)
        refused(ValueError, "`k`", "repeat KV heads", q=zeros(1, 100, 4, 64), k=k, mask=mask)


@pytest.mark.parametrize("shape", [Q.shape, list(Q.shape)])
def test_a_shape_in_place_of_an_array(shape: Any) -> None:
    for arrays in ((shape,), (Q, shape), (Q, K, shape)):
        with pytest.raises(TypeError, match=rf"got {type(shape).__name__}.*ArraySpec\(shape,"):
            make_plan(MASK, *arrays)


def test_sizes_that_disagree() -> None:
    refused(ValueError, "`k`", "head dim of 64", q=Q, k=zeros(1, 2, 128, 72))
    refused(ValueError, "`v`", "(1, 2, 128, 32)", v=zeros(1, 2, 128, 32))
    refused(ValueError, "`v`", "(1, 2, 64, 64)", v=zeros(1, 2, 64, 64))
    refused(ValueError, "`k`", "batch of 1", k=zeros(2, 2, 128, 64))
    refused(ValueError, "`q`", "four axes", q=zeros(4, 128, 64))
    refused(ValueError, "`k`", "four axes", k=zeros(2, 128, 64))
    refused(ValueError, "`layout`", "'BHSD' or 'BSHD'", "'SBHD'", layout="SBHD")
    refused(ValueError, "`mask`", "4 query", layout="BSHD")


@pytest.mark.parametrize("dtype", [np.float64, np.int8, np.complex64, ml_dtypes.float8_e4m3fn])
def test_dtypes_without_a_kernel(dtype: Any) -> None:
    refused(
        TypeError, "`q`", "float16", "bfloat16", np.dtype(dtype).name,
        q=Q.astype(dtype), k=K.astype(dtype),
    )  # fmt: skip


def test_dtypes_are_not_mixed() -> None:
    refused(TypeError, "`k`", "float16", "bfloat16", k=K.astype(ml_dtypes.bfloat16))
    refused(TypeError, "`v`", "float16", "float32", v=K.astype(np.float32))
    refused(TypeError, "`q`", q=Q.astype(Q.dtype.newbyteorder()))


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("value", [[[1.0]], 3.0, "q", object()])
def test_what_is_no_array(name: str, value: Any) -> None:
    refused(TypeError, "DLPack", type(value).__name__, **{name: value})


@pytest.mark.parametrize(
    "scale", [np.nan, np.inf, -np.inf, "0.5", 1e39, None.__class__, [0.5, 0.5], 1j]
)
def test_scales_that_are_no_finite_number(scale: Any) -> None:
    refused(ValueError, "`sm_scale`", "finite", repr(scale), sm_scale=scale)


def test_unknown_keywords() -> None:
    refused(TypeError, "scale", scale=0.1)
    refused(TypeError, "dropout_p", dropout_p=0.0)
    plan = make_plan(MASK, Q, K, K)
    with pytest.raises(TypeError, match="is_causal"):
        plan.run(Q, K, K, is_causal=True)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("fastest", "'fastest'"),
        ("attend_mma", "'attend_mma'"),
        ("attend_mma/q64k64/retain-pack/shortest", "'shortest'"),
        ("attend_mma/q64k64/pack-retain/rows", "'pack'"),
        ("attend_tma/q64k64/retain-pack/rows", "'attend_tma'"),
    ],
)
def test_names_of_no_plan(name: str, part: str) -> None:
    refused(ValueError, part, regime=name)


@pytest.mark.parametrize("regime", [None, 3, [], {"plan": 1}, True])
def test_regimes_of_another_type(regime: Any) -> None:
    refused(TypeError, "`regime`", type(regime).__name__, regime=regime)
    with pytest.raises(TypeError, match="`regime`"):
        make_plan(MASK, Q, K, K, regime=regime)


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ("attend_mma/q64k64/merge-pack/rows", "two query blocks in a tile of 64"),
        ("attend_mma/q64k64/split-pack/rows", "more than 64 rows"),
        ("attend_mma/q64k64/retain-merge/rows", "two KV blocks in a tile of 64"),
        ("attend_mma/q192k192/retain-pack/rows", "no attend_mma kernel"),
    ],
)
def test_a_pinned_plan_that_cannot_serve_says_why(plan: str, reason: str) -> None:
    refused(PlanNotEligibleError, "`regime`", plan, reason, '"auto"', regime=plan)


def test_out_of_another_shape_or_dtype() -> None:
    for out in (
        zeros(1, 4, 128, 56),
        zeros(1, 128, 4, 64),
        zeros(4, 128, 64),
        zeros(*Q.shape, dtype=np.float32),
        zeros(*Q.shape, dtype=ml_dtypes.bfloat16),
    ):
        before = out.copy()
        refused(ValueError, "`out`", str(Q.shape), "float16", out.dtype.name, out=out)
        np.testing.assert_array_equal(out, before)
    turned = zeros(1, 128, 4, 64)
    q, k = Q.swapaxes(1, 2), K.swapaxes(1, 2)
    assert block_sparse_attention(q, k, k, MASK, layout="BSHD", out=turned) is turned


def jax_array(shape: tuple[int, ...] = Q.shape) -> Any:
    """Something that looks like a float16 array of JAX on the host."""
    kind = type("ArrayImpl", (), {"__module__": "jaxlib._jax"})
    made = kind()
    made.shape, made.dtype, made.__dlpack_device__ = shape, np.dtype(np.float16), lambda: (1, 0)
    return made


def test_out_that_can_only_be_read() -> None:
    out = zeros(*Q.shape)
    out.flags.writeable = False
    for given in (out, np.broadcast_to(zeros(1, 1, 128, 64), Q.shape)):
        refused(ValueError, "`out`", "can be written", "read-only NumPy array",
                "Fix: allocate it like q", "numpy.empty_like(q)", out=given)  # fmt: skip
    assert not out.any()
    immutable = ("`out`", "can be written", "JAX array, which never changes",
                 "Fix: leave it out and use the result")  # fmt: skip
    refused(TypeError, *immutable, out=jax_array())
    refused(TypeError, *immutable, q=jax_array(), k=jax_array(K.shape), out=jax_array())


def tensor(device: str, shape: tuple[int, ...] = Q.shape) -> Any:
    """Something that looks like a float16 tensor of torch."""
    kind = type("Tensor", (), {"__module__": "torch"})
    made = kind()
    made.shape, made.dtype = shape, "torch.float16"
    made.device = SimpleNamespace(type=device, index=0)
    made.requires_grad = False
    return made


def test_out_in_the_memory_of_the_inputs() -> None:
    buffer = np.random.default_rng(0).standard_normal((3, 1, 4, 130, 64)).astype(np.float16)
    q, k, v = buffer[:, :, :, 1:129]
    before = buffer.copy()
    for out, name in (
        (k, "k"),
        (v, "v"),
        (buffer[1, :, :, :128], "k"),
        (buffer[2, :, :, 2:], "v"),
        (buffer[0, :, :, 2:], "q"),
    ):
        refused(ValueError, "`out`", "memory of its own", f"memory that {name} uses",
                q=q, k=k, v=v, out=out)  # fmt: skip
        np.testing.assert_array_equal(buffer, before)
    assert block_sparse_attention(q, k, v, MASK, out=q) is q


def test_out_whose_elements_share_memory() -> None:
    buffer = zeros(1 << 16)
    size = buffer.itemsize
    for strides in (
        (0, 0, 64, 1),  # one head for all
        (0, 64 * 128, 0, 1),  # one row for all
        (0, 64 * 64, 64, 1),  # heads that overlap by half
        (0, 64 * 128, 56, 1),  # rows that overlap by an eighth
    ):
        out = np.lib.stride_tricks.as_strided(buffer, Q.shape, [size * s for s in strides])
        refused(ValueError, "`out`", "elements that share it", "allocate it like q", out=out)
    nested = np.lib.stride_tricks.as_strided(buffer, Q.shape, [size * s for s in (0, 64, 384, 1)])
    assert block_sparse_attention(Q, K, K, MASK, out=nested) is nested


def test_out_of_another_library() -> None:
    refused(TypeError, "`out`", "numpy", "torch", out=tensor("cpu"))
    refused(TypeError, "DLPack", "list", out=[[0.0]])


def test_out_on_a_gpu_for_host_arrays() -> None:
    q, k = tensor("cpu"), tensor("cpu", K.shape)
    refused(ValueError, "`out`", "host memory", q=q, k=k, out=tensor("cuda"))


def test_arrays_in_two_places() -> None:
    refused(ValueError, "`k`", "host memory", k=tensor("cuda", K.shape), v=K)
    refused(ValueError, "`v`", "host memory", v=tensor("cuda", K.shape))


@pytest.mark.parametrize("where", ["meta", "mps", "xla"])
def test_arrays_on_other_devices(where: str) -> None:
    refused(TypeError, "CUDA", where, q=tensor(where))
    refused(TypeError, "CUDA", where, v=tensor(where, K.shape))
