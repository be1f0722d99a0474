"""Arrays from elsewhere: DLPack, CUDA arrays, lists, frameworks' objects, wrong types."""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tessera_cupy.errors import NoGpuError
from tessera_cupy.masks import BlockMask
from tessera_cupy.masks.formats import as_bools, as_integers, to_host, with_heads


class Dlpack:
    """Only DLPack, as a foreign CPU framework exports it."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


class RefusesDlpack(Dlpack):
    """A tensor whose DLPack export knows no bool, but that copies itself to the host."""

    def __dlpack__(self, **kwargs: Any) -> Any:
        raise BufferError("bool is not supported")

    def detach(self) -> RefusesDlpack:
        return self

    def cpu(self) -> RefusesDlpack:
        return self

    def numpy(self) -> np.ndarray:
        return self.array


class OnGpu:
    """A CUDA array whose true contents are there only after the device was synchronised."""

    def __init__(self, final: np.ndarray, ordinal: int) -> None:
        self.final = final
        self.ordinal = ordinal
        self.contents = np.zeros_like(final)
        self.device = SimpleNamespace(id=ordinal)
        self.__cuda_array_interface__ = {"version": 3}


def fake_cupy(arrays: list[OnGpu]) -> SimpleNamespace:
    class Device:
        def __init__(self, ordinal: int) -> None:
            self.id = ordinal

        def __enter__(self) -> Device:
            return self

        def __exit__(self, *_: object) -> None: ...

        def synchronize(self) -> None:
            for array in arrays:
                if array.ordinal == self.id:
                    array.contents = array.final

    return SimpleNamespace(
        asarray=lambda array: array,
        asnumpy=lambda array: array.contents.copy(),
        cuda=SimpleNamespace(Device=Device, runtime=SimpleNamespace(getDeviceCount=lambda: 3)),
    )


BLOCKS = np.array([[1, 0, 1], [0, 1, 1]], bool)


@pytest.mark.parametrize("wrap", [np.asarray, Dlpack, RefusesDlpack, np.ndarray.tolist, tuple])
@pytest.mark.parametrize("dtype", [bool, np.uint8, np.int32])
def test_every_kind_of_host_array_is_read(wrap: Any, dtype: Any) -> None:
    array, device = to_host(wrap(BLOCKS.astype(dtype)), "mask")
    assert device is None
    np.testing.assert_array_equal(array, BLOCKS)
    mask = BlockMask.from_dense(wrap(BLOCKS.astype(dtype)), (64, 64))
    assert mask.device is None
    np.testing.assert_array_equal(mask.to_dense()[0, 0], BLOCKS)


def test_an_array_method_is_enough() -> None:
    class Array:
        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            return BLOCKS

    np.testing.assert_array_equal(to_host(Array(), "mask")[0], BLOCKS)


def test_host_arrays_are_not_copied() -> None:
    assert to_host(BLOCKS, "mask")[0] is BLOCKS
    assert np.shares_memory(to_host(Dlpack(BLOCKS.copy()), "mask")[0], BLOCKS) is False
    source = BLOCKS.astype(np.uint8)
    assert np.shares_memory(to_host(Dlpack(source), "mask")[0], source)
    assert np.shares_memory(as_bools(source, "mask"), source)


def test_gpu_arrays_are_copied_after_their_device_is_done(monkeypatch: Any) -> None:
    array = OnGpu(BLOCKS, ordinal=2)
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy([array]))
    mask = BlockMask.from_dense(array, (64, 64))
    assert mask.device == 2
    np.testing.assert_array_equal(mask.to_dense()[0, 0], BLOCKS)


def test_gpu_tensors_that_export_no_bool_copy_themselves(monkeypatch: Any) -> None:
    class Tensor(RefusesDlpack):
        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 1)

        def numpy(self) -> np.ndarray:
            return pending.contents

    pending = OnGpu(BLOCKS, ordinal=1)
    cupy = fake_cupy([pending])
    cupy.from_dlpack = lambda tensor: tensor.__dlpack__()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    host, device = to_host(Tensor(BLOCKS), "mask")
    assert device == 1
    np.testing.assert_array_equal(host, BLOCKS)


def test_a_gpu_array_without_cupy_is_one_clear_error(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(NoGpuError, match=r"`mask`: expected CuPy.*pip install '\.\[cuda12\]'"):
        to_host(OnGpu(BLOCKS, 0), "mask")


@pytest.mark.parametrize(
    ("array", "error", "words"),
    [
        (None, TypeError, "`mask`: expected an array of bools or integers .*, got dtype object"),
        ("abc", TypeError, "got dtype <U3"),
        ([[1, 0], [1]], ValueError, "`mask`: expected an even array"),
        (np.array([object()]), TypeError, "got dtype object"),
    ],
)
def test_what_is_no_array_is_refused(array: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        to_host(array, "mask")
    assert "Fix: " in str(caught.value)


def assert_additive_masks_are_told_apart(build: Any) -> None:
    with pytest.raises(TypeError, match="Fix: ") as caught:
        build()
    fix = str(caught.value).partition("Fix: ")[2]
    assert "mask > 0 for floats of 0 and 1" in fix
    assert "mask == 0 for an additive mask" in fix
    assert "mask != 0" not in fix


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.complex64])
def test_float_masks_and_indices_are_type_errors(dtype: Any) -> None:
    with pytest.raises(TypeError, match=f"`mask`: expected bool.*got dtype {np.dtype(dtype)}.*Fix"):
        BlockMask.from_dense(BLOCKS.astype(dtype), (64, 64))
    with pytest.raises(TypeError, match="`token_mask`: expected bool"):
        BlockMask.from_tokens(BLOCKS.astype(dtype), (64, 64))
    assert_additive_masks_are_told_apart(
        lambda: BlockMask.from_dense(BLOCKS.astype(dtype), (64, 64))
    )
    floats = np.zeros(1, dtype)
    for indptr, indices, name in (([0, 1], floats, "indices"), (np.arange(2.0), [0], "indptr")):
        with pytest.raises(TypeError, match=f"`{name}`: expected integers"):
            BlockMask.from_csr(indptr, indices, (1, 1), (64, 64))
    with pytest.raises(TypeError, match="`indices`: expected integers"):
        BlockMask.from_lists(floats[None], [1], 1, (64, 64))
    with pytest.raises(TypeError, match="`counts`: expected integers"):
        BlockMask.from_lists([[0]], np.ones(1), 1, (64, 64))
    with pytest.raises(TypeError, match="`kv_block_sizes`: expected integers"):
        BlockMask.from_dense([[1]], (64, 64), kv_block_sizes=np.ones(1, dtype))


@pytest.mark.parametrize("kind", [(1, 0), (2, 1)], ids=["host", "GPU"])
def test_bfloat16_tensors_of_torch_are_type_errors(kind: Any, monkeypatch: Any) -> None:
    class Tensor(RefusesDlpack):
        dtype = "torch.bfloat16"

        def __dlpack_device__(self) -> tuple[int, int]:
            return kind

        def numpy(self) -> np.ndarray:
            raise TypeError("Got unsupported ScalarType BFloat16")

    cupy = fake_cupy([])
    cupy.from_dlpack = lambda tensor: tensor.__dlpack__()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    for call, name in (
        (lambda x: BlockMask.from_dense(x, (64, 64)), "mask"),
        (lambda x: BlockMask.from_tokens(x, (64, 64)), "token_mask"),
        (lambda x: BlockMask.from_csr([0, 1], x, (1, 1), (64, 64)), "indices"),
    ):
        with pytest.raises(TypeError, match=f"`{name}`.*bools or integers.*torch.bfloat16.*Fix"):
            call(Tensor(BLOCKS))
        if "mask" in name:
            assert_additive_masks_are_told_apart(partial(call, Tensor(BLOCKS)))
        else:
            with pytest.raises(TypeError, match="Fix: convert it to integers"):
                call(Tensor(BLOCKS))


def test_bfloat16_arrays_are_type_errors() -> None:
    mask = BLOCKS.astype(ml_dtypes.bfloat16)
    with pytest.raises(TypeError, match=r"`mask`.*bools or integers.*dtype bfloat16"):
        BlockMask.from_dense(mask, (64, 64))
    assert_additive_masks_are_told_apart(lambda: BlockMask.from_dense(mask, (64, 64)))


def test_bool_indices_are_type_errors() -> None:
    with pytest.raises(TypeError, match="`indices`: expected integers, got dtype bool"):
        as_integers(np.ones(3, bool), "indices")


@pytest.mark.parametrize(
    ("value", "dtype", "fix"),
    [
        (2, np.uint8, "mask != 0"),
        (255, np.uint8, "mask != 0"),
        (-1, np.int64, "mask == 0"),
        (-10_000, np.int32, "mask == 0"),
    ],
)
def test_integers_other_than_0_and_1_are_refused(value: int, dtype: Any, fix: str) -> None:
    array = np.zeros((2, 2), dtype)
    array[1, 0] = value
    words = f"`mask`: expected only 0 and 1, got .*{value}.*Fix.*{fix}"
    with pytest.raises(ValueError, match=words):
        BlockMask.from_dense(array, (64, 64))


@pytest.mark.parametrize("shape", [(), (3,), (1, 1, 1, 2, 3)])
def test_wrong_ranks_name_the_axes(shape: tuple[int, ...]) -> None:
    words = (
        r"`mask`: expected shape \(nq, nk\), \(H, nq, nk\) or .*Fix: add axes, as in array\[None\]"
    )
    with pytest.raises(ValueError, match=words):
        BlockMask.from_dense(np.zeros(shape, bool), (64, 64))


@pytest.mark.parametrize("shape", [(0, 2, 2), (0, 1, 2, 2), (1, 0, 2, 2)])
def test_no_heads_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at least one batch and one head"):
        with_heads(np.zeros(shape, bool), 2, "mask", "nq, nk")


@pytest.mark.gpu
def test_a_mask_that_a_side_stream_still_writes_is_read_when_done() -> None:
    import cupy

    late = cupy.RawKernel(
        """extern "C" __global__ void late(bool* mask, long long cycles) {
            long long start = clock64();
            while (clock64() - start < cycles) {}
            mask[threadIdx.x] = true;
        }""",
        "late",
    )
    mask = cupy.zeros((20, 20), cupy.bool_)
    warm = cupy.zeros((20, 20), cupy.bool_)
    late((1,), (400,), (warm, np.int64(0)))
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True):
        late((1,), (400,), (mask, np.int64(500_000_000)))
    built = BlockMask.from_dense(mask, (64, 64))
    assert built.nnz == 400
    assert built.device == cupy.cuda.Device().id
