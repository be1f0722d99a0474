"""Requests: sizes by layout, planning without data, and what tells two requests apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tessera_cupy import ArraySpec, BlockMask
from tessera_cupy.kernels.arch import ARCHS
from tessera_cupy.request import Request, make_request, sizes

MASK = BlockMask.from_dense(np.ones((2, 3), bool), (64, 64), (100, 150))
ARCH = ARCHS["sm_80"]


def request(*arrays: Any, layout: str = "BHSD", on_gpu: bool = False) -> Request:
    q, k, v = (*arrays, None, None)[:3]
    return make_request(MASK, q, k, v, layout=layout, arch=ARCH, on_gpu=on_gpu)


def test_sizes_follow_the_layout() -> None:
    assert sizes((2, 3, 4, 5), "BHSD", "q") == (2, 3, 4, 5)
    assert sizes((2, 4, 3, 5), "BSHD", "q") == (2, 3, 4, 5)
    assert all(type(size) is int for size in sizes((np.int64(2), 3, 4, 5), "BHSD", "q"))


@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
def test_shapes_are_given_back_in_the_layout(layout: str) -> None:
    shapes = [(2, 6, 100, 64), (2, 3, 150, 64)]
    if layout == "BSHD":
        shapes = [(b, s, h, d) for b, h, s, d in shapes]
    made = request(*(np.zeros(shape, np.float16) for shape in shapes), layout=layout)
    assert (made.q_shape, made.kv_shape) == tuple(shapes)
    assert (made.batch, made.q_heads, made.kv_heads) == (2, 6, 3)
    assert (made.sq, made.skv, made.head_dim) == (100, 150, 64)
    assert (made.dtype, made.layout, made.arch) == ("float16", layout, ARCH)


def test_a_spec_stands_for_an_array() -> None:
    arrays = [np.zeros((2, 6, 100, 64), np.float16), np.zeros((2, 3, 150, 64), np.float16)]
    specs = [ArraySpec(array.shape, "float16") for array in arrays]
    assert request(*specs) == request(*arrays)
    assert hash(request(*specs)) == hash(request(*arrays))
    assert ArraySpec((1, 2, 3, 4)).dtype == "bfloat16"


@pytest.mark.parametrize("length", [64.9, 64.0, True, "1", None, np.float32(1), np.True_])
def test_lengths_that_are_no_integers_are_refused(length: Any) -> None:
    with pytest.raises(TypeError, match=r"`shape`.*integers") as caught:
        ArraySpec((1, 2, 64, length))
    assert repr(length) in str(caught.value)


@pytest.mark.parametrize("axis", range(4))
def test_negative_lengths_are_refused(axis: int) -> None:
    shape = [1, 2, 64, 64]
    shape[axis] = -1
    with pytest.raises(ValueError, match=r"`shape`: expected no negative length.*-1"):
        ArraySpec(tuple(shape))


@pytest.mark.parametrize("shape", [64, None, "abcd"])
def test_what_is_no_shape_is_refused(shape: Any) -> None:
    with pytest.raises(TypeError, match=r"`shape`: expected a tuple of integers"):
        ArraySpec(shape)


@pytest.mark.parametrize("shape", [[1, 2, 64, 0], np.array([1, 2, 64, 0]), (1, 2, np.int64(64), 0)])
def test_a_shape_is_kept_as_a_tuple_of_ints(shape: Any) -> None:
    kept = ArraySpec(shape).shape
    assert kept == (1, 2, 64, 0)
    assert type(kept) is tuple
    assert {type(length) for length in kept} == {int}


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("bf16", 'write "bfloat16"'),
        ("fp16", 'write "float16"'),
        ("half", 'write "float16"'),
        ("fp32", 'write "float32"'),
        ("float64", "cast to it"),
        (np.int8, "cast to it"),
    ],
)
def test_dtypes_of_a_spec_that_no_kernel_takes(name: Any, fix: str) -> None:
    with pytest.raises(TypeError, match=r"`dtype`.*float16 or bfloat16 or float32") as caught:
        ArraySpec((1, 2, 64, 64), name)
    assert fix in str(caught.value).partition("Fix: ")[2]


@pytest.mark.parametrize("dtype", [np.float16, np.dtype("float16"), "torch.float16", "float16"])
def test_dtypes_of_every_library_are_taken_by_name(dtype: Any) -> None:
    assert ArraySpec((1, 2, 64, 64), dtype).dtype == "float16"


def test_what_is_left_out_follows_from_the_rest() -> None:
    q = ArraySpec((2, 6, 100, 64))
    alone = request(q)
    assert (alone.kv_heads, alone.skv) == (6, 150)
    only_v = request(q, None, ArraySpec((2, 3, 150, 64)))
    assert (only_v.kv_heads, only_v.skv) == (3, 150)
    with pytest.raises(ValueError, match="150"):
        request(q, None, ArraySpec((2, 6, 90, 64)))


def test_float32_is_for_the_executor() -> None:
    q = ArraySpec((1, 1, 100, 64), "float32")
    assert request(q).kernel_dtype == "float16"
    assert request(ArraySpec(q.shape, "bfloat16")).kernel_dtype == "bfloat16"
    with pytest.raises(TypeError, match=r"float16 or bfloat16.*float32"):
        request(q, on_gpu=True)


def test_every_size_tells_requests_apart() -> None:
    made = request(ArraySpec((2, 6, 100, 64)))
    changes: dict[str, Any] = {
        "arch": ARCHS["sm_90a"], "batch": 3, "q_heads": 12, "kv_heads": 2, "sq": 1, "skv": 1,
        "head_dim": 8, "dtype": "float16", "layout": "BSHD",
    }  # fmt: skip
    for name, value in changes.items():
        other = replace(made, **{name: value})
        assert other != made
        shown = getattr(value, "name", value)
        assert other.differences(made) == f"{name} {shown}"
        assert made.differences(other).startswith(f"{name} ")
    assert made.differences(made) == ""
    two = replace(made, batch=3, sq=7)
    assert two.differences(made) == "batch 3, sq 7"
