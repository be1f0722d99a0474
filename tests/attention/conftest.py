"""Random requests with what they must give; for GPU tests, a GPU whose kernels are built."""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from tessera_cupy import BlockMask, block_sparse_attention, plan, reference, timeline
from tessera_cupy.interop import numpy_dtype

#: Outputs with fewer elements say little of the largest error that luck allows.
_FEW = 4096


@dataclass(frozen=True)
class Case:
    """A mask and inputs for it: NumPy arrays in ``layout``."""

    mask: BlockMask
    q: NDArray[Any]
    k: NDArray[Any]
    v: NDArray[Any]
    layout: str = "BHSD"
    sm_scale: float | None = None

    @property
    def arrays(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        return self.q, self.k, self.v

    @cached_property
    def exact(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """O in the layout, and the LSE."""
        return reference.attention(
            *self.arrays, self.mask, sm_scale=self.sm_scale, layout=self.layout, return_lse=True
        )

    @property
    def eps(self) -> float:
        return float(ml_dtypes.finfo(self.q.dtype).eps)

    def run(self, **arguments: Any) -> tuple[NDArray[Any], NDArray[Any]]:
        """O and LSE of the front door on the host, checked."""
        given = {"layout": self.layout, "sm_scale": self.sm_scale, "return_lse": True} | arguments
        out, lse = block_sparse_attention(*self.arrays, self.mask, **given)
        self.check(out, lse)
        return out, lse

    def check(self, out: Any, lse: Any) -> None:
        """What the executor gives: float32 arithmetic, and the dtype's rounding once."""
        assert out.dtype == self.q.dtype
        assert lse.dtype == np.float32
        top = np.abs(self.exact[0]).max(initial=0)
        self._compare(out, lse, 2e-5 * max(1, top) + self.eps * top, "executor")

    def check_kernel(self, out: Any, lse: Any = None, label: str = "") -> None:
        """What a kernel gives: at most twice the error of textbook arithmetic in the dtype."""
        assert out.dtype == self.q.dtype, label
        exact = self.exact[0]
        if out.size < _FEW:
            allowed = self.eps * np.abs(self.v.astype(np.float64)).max(initial=0)
        else:
            textbook = np.abs(self._low_precision - exact).max()
            allowed = 2 * textbook + self.eps * np.abs(exact).max()
        self._compare(out, lse, allowed, label)

    def _compare(self, out: Any, lse: Any, allowed: float, label: str) -> None:
        exact, exact_lse = self.exact
        assert out.shape == exact.shape, label
        out = out.astype(np.float64)
        assert np.isfinite(out).all(), f"{label}: {np.count_nonzero(~np.isfinite(out))} not finite"
        error = np.abs(out - exact).max(initial=0)
        assert error <= allowed, f"{label}: error {error:.3g}, allowed {allowed:.3g}"
        empty = np.isneginf(exact_lse)
        heads_first = out if self.layout == "BHSD" else out.swapaxes(1, 2)
        assert (heads_first[empty] == 0).all(), f"{label}: empty rows are not exactly 0"
        if lse is not None:
            np.testing.assert_allclose(lse, exact_lse, rtol=2e-6, atol=1e-4, err_msg=label)

    @cached_property
    def _low_precision(self) -> NDArray[np.float64]:
        """Scores and sums in float32; weights and output rounded to the dtype."""
        swap = (0, 1, 2, 3) if self.layout == "BHSD" else (0, 2, 1, 3)
        q, k, v = (x.transpose(swap).astype(np.float32) for x in self.arrays)
        shared = q.shape[1] // k.shape[1]
        k, v = k.repeat(shared, 1), v.repeat(shared, 1)
        scale = q.shape[3] ** -0.5 if self.sm_scale is None else self.sm_scale
        scores = np.float32(scale) * (q @ k.swapaxes(2, 3))
        scores[np.broadcast_to(~self.mask.to_tokens(), scores.shape)] = -np.inf
        top = scores.max(axis=3, keepdims=True, initial=-np.inf)
        weights = np.exp(scores - np.where(np.isneginf(top), 0, top))
        total = weights.sum(axis=3, keepdims=True)
        dtype = self.q.dtype
        out = weights.astype(dtype).astype(np.float32) @ v / np.where(total == 0, 1, total)
        return out.astype(dtype).astype(np.float64).transpose(swap)


def draw(
    mask: BlockMask,
    *,
    batch: int | None = None,
    kv_heads: int | None = None,
    shared: int = 1,
    dim: int = 64,
    dtype: str = "float32",
    layout: str = "BHSD",
    sm_scale: float | None = None,
    rng: np.random.Generator | None = None,
) -> Case:
    """Normal inputs for a mask; batch and heads are the mask's unless given."""
    rng = rng or np.random.default_rng(mask.nnz)
    batch = batch or mask.batch
    kv_heads = kv_heads or max(1, mask.heads // shared)

    def normal(heads: int, tokens: int) -> NDArray[Any]:
        sizes = (heads, tokens) if layout == "BHSD" else (tokens, heads)
        values = rng.standard_normal((batch, *sizes, dim), np.float32)
        return values.astype(numpy_dtype(dtype))

    q = normal(kv_heads * shared, mask.shape[0])
    k, v = (normal(kv_heads, mask.shape[1]) for _ in range(2))
    return Case(mask, q, k, v, layout, sm_scale)


@pytest.fixture(scope="session")
def case() -> Callable[..., Case]:
    """:func:`draw`."""
    return draw


def _random_mask(
    rng: np.random.Generator,
    block_size: tuple[int, int],
    shape: tuple[int, int],
    *,
    axes: tuple[int, int] = (1, 1),
    density: float = 0.5,
) -> BlockMask:
    """Blocks at random, one at least in each row of blocks."""
    nq, nk = (-(-tokens // block) for tokens, block in zip(shape, block_size, strict=True))
    blocks = rng.random((*axes, nq, nk)) < density
    if nk:
        np.put_along_axis(blocks, rng.integers(0, nk, (*axes, nq, 1)), True, axis=-1)
    return BlockMask.from_dense(blocks, block_size, shape)


@pytest.fixture(scope="session")
def random_mask() -> Callable[..., BlockMask]:
    """:func:`_random_mask`."""
    return _random_mask


@pytest.fixture
def rng() -> np.random.Generator:
    """Fresh numbers each time; pytest shows the seed of a test that fails."""
    seed = int(os.environ.get("ATTENTION_TEST_SEED", secrets.randbits(32)))
    print(f"ATTENTION_TEST_SEED={seed}")
    return np.random.default_rng(seed)


class _Tensor(ctypes.Structure):
    """``DLManagedTensor`` of the DLPack standard."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _nothing_to_free(_: int) -> None: ...


class OffsetArray:
    """A float16 array that DLPack describes as so many bytes into an allocation."""

    dtype = np.dtype(np.float16)

    def __init__(
        self, owner: Any, pointer: int, byte_offset: int, shape: tuple[int, ...], device: int
    ) -> None:
        self.owner, self.shape, self.device = owner, shape, device
        self._sizes = (ctypes.c_int64 * len(shape))(*shape)
        self._tensor = _Tensor(
            data=pointer,
            device_type=device,
            ndim=len(shape),
            code=2,
            bits=16,
            lanes=1,
            shape=self._sizes,
            byte_offset=byte_offset,
            deleter=ctypes.cast(_nothing_to_free, ctypes.c_void_p),
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0

    def __dlpack__(self, **_: Any) -> Any:
        make = ctypes.pythonapi.PyCapsule_New
        make.restype = ctypes.py_object
        make.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return make(ctypes.addressof(self._tensor), b"dltensor", None)


@pytest.fixture(scope="session")
def offset_array() -> type[OffsetArray]:
    """:class:`OffsetArray`."""
    return OffsetArray


@pytest.fixture(scope="session")
def gpu(kernel_cache: Path) -> Any:
    """CuPy, with every kernel of this GPU built, and helpers that keep tests short.

    ``gpu.run`` computes a :class:`Case` on the GPU with poisoned memory and checks the result.
    """
    import cupy

    from tessera_cupy.gpus import arch_of
    from tessera_cupy.kernels.batch import build_all
    from tessera_cupy.kernels.catalog import catalog

    arch = arch_of(cupy.cuda.Device().id)
    errors = [outcome.error for outcome in build_all(catalog(arch.name)) if outcome.error]
    assert not errors, errors[0]
    pool = cupy.get_default_memory_pool()

    def poison(megabytes: int = 64) -> None:
        """What is allocated next lies in memory full of NaN."""
        pool.free_all_blocks()
        filled = cupy.full(megabytes << 18, np.nan, np.float32)
        del filled

    def poisoned(shape: tuple[int, ...], dtype: Any) -> Any:
        """An array of NaN, for ``out=``."""
        array = cupy.empty(shape, dtype)
        array.data.memset_async(0xFF, array.nbytes)
        return array

    spin = cupy.RawKernel(
        'extern "C" __global__ void spin(long long cycles) {'
        " const long long begin = clock64(); while (clock64() - begin < cycles) {} }",
        "spin",
    )

    def stall(milliseconds: int = 100) -> None:
        """Keep the current stream busy for about so long; the host goes on."""
        spin((1,), (1,), (np.int64(2_000_000 * milliseconds),))

    def run(case: Case, label: str = "", **arguments: Any) -> tuple[Any, Any]:
        """O and LSE as NumPy arrays; every element of both was NaN before."""
        arrays = [cupy.asarray(array) for array in case.arrays]
        out = poisoned(case.q.shape, case.q.dtype)
        heads = case.q.shape[1 if case.layout == "BHSD" else 2]
        stale = poisoned((len(case.q), heads, case.mask.shape[0]), np.float32)
        del stale  # the LSE takes its place
        given = {"layout": case.layout, "sm_scale": case.sm_scale, "out": out} | arguments
        result, lse = block_sparse_attention(*arrays, case.mask, return_lse=True, **given)
        assert result is out
        out, lse = cupy.asnumpy(out), cupy.asnumpy(lse)
        case.check_kernel(out, lse, label)
        return out, lse

    return SimpleNamespace(
        cupy=cupy,
        arch=arch,
        pool=pool,
        poison=poison,
        poisoned=poisoned,
        stall=stall,
        run=run,
    )


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arrays that plans make for what they compute."""
    made: list[Any] = []
    empty = plan.interop.empty

    def kept(*args: Any) -> Any:
        made.append(empty(*args))
        return made[-1]

    monkeypatch.setattr(plan.interop, "empty", kept)
    return made


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The records of each timeline, as kernels wrote them."""
    seen: list[Any] = []
    from_records = timeline.from_records

    def noted(records: Any, *args: Any, **given: Any) -> Any:
        seen.append(records)
        return from_records(records, *args, **given)

    monkeypatch.setattr(timeline, "from_records", noted)
    return seen
