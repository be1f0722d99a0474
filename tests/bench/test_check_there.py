import ml_dtypes
import numpy as np
import pytest

from tessera_cupy.bench.check import expect
from tessera_cupy.bench.check_there import _rounded, as_float32, expect_there

TOKENS, HEADS, DIM = 257, 2, 64


class Here:
    """NumPy with CuPy's way to the host."""

    asnumpy = staticmethod(np.asarray)

    def __getattr__(self, name):
        return getattr(np, name)


@pytest.fixture
def bits():
    rng = np.random.default_rng(0)
    numbers = 2 * rng.standard_normal((3, 1, HEADS, TOKENS, DIM)).astype(ml_dtypes.bfloat16)
    return numbers.view(np.uint16)


def kept(head, rows):
    keep = np.random.default_rng(5).random((TOKENS, TOKENS)) < 0.3
    return keep[rows]


def test_rows_are_those_of_the_host_s_float64(bits):
    there = expect_there(Here(), kept, *bits, heads=HEADS, rows=6)
    wide = bits.view(ml_dtypes.bfloat16).astype(np.float32)
    here = expect(kept, *wide, rows=6, dtype=ml_dtypes.bfloat16, on_head=lambda: None)
    assert np.array_equal(there.rows, here.rows)
    assert np.allclose(there.exact, here.exact, rtol=1e-12, atol=1e-12)
    assert there.allowed == pytest.approx(here.allowed, rel=0.05)


def test_a_row_without_keys_is_zero(bits):
    def none_first(head, rows):
        keep = kept(head, rows)
        keep[0] = False
        return keep

    there = expect_there(Here(), none_first, *bits, heads=1, rows=3)
    assert (there.exact[0, 0] == 0).all()
    assert np.abs(there.exact[0, 1:]).max(axis=1).min() > 0


def test_float32_is_rounded_as_to_bfloat16():
    numbers = np.random.default_rng(1).standard_normal(10_000).astype(np.float32)
    ties = np.arange(0x3F800000, 0x3F800000 + (8 << 15), 1 << 15, dtype=np.uint32).view(np.float32)
    for x in (numbers, ties):
        wanted = x.astype(ml_dtypes.bfloat16)
        assert np.array_equal(_rounded(np, x), wanted.astype(np.float32))
        assert np.array_equal(as_float32(np, wanted.view(np.uint16)), wanted.astype(np.float32))
