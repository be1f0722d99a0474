"""query_balls, key_bounds and keep_keys on the CPU, through the package's own launches."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from tessera_cupy.kernels import key_bounds
from tessera_cupy.kernels.catalog import builder
from tessera_cupy.sparsifiers import draws, fg_attn
from tests.emulator.emulator import compiler
from tests.emulator.gpu import EmulatedGpu

pytestmark = pytest.mark.skipif(
    compiler() is None, reason="the emulator needs g++, which is not on the PATH"
)

NAN, INF = np.float16(np.nan), np.float16(np.inf)


def steps(x: NDArray[np.float16]) -> NDArray[np.int64]:
    """Float16 by rank: neighbours are 1 apart."""
    bits = x.view(np.int16).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFF), bits)


class TestBounds:
    @pytest.mark.parametrize("bound", fg_attn.BOUNDS)
    @pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
    @pytest.mark.parametrize(
        ("tokens", "d", "group", "parts"),
        [
            (40, 8, 16, 1),
            (300, 40, 64, 4),  # chunks that fill no slice; the last group has 3 of 4 parts
            (257, 128, 128, 1),  # a key, and a row of a group, alone in a tile
            (700, 16, 16, 4),  # more parts than a tile has
            (200, 200, 192, 2),
            (130, 256, 64, 1),
            (900, 72, 128, 4),  # a second slab that is not whole
            (390, 64, 16, 2),  # the last group has one of 2 parts
            (3200, 8, 16, 1),  # parts of two tiles, and many keys, so that CTAs begin in between
        ],
    )
    def test_as_numpy(
        self,
        gpu: EmulatedGpu,
        rng: np.random.Generator,
        bound: str,
        dtype: Any,
        tokens: int,
        d: int,
        group: int,
        parts: int,
    ) -> None:
        # Whole queries, whose sums do not depend on an order: so the rounded means are the same.
        q = rng.integers(-4, 5, (2, 2, tokens, d)).astype(dtype)
        k = rng.standard_normal((2, 2, tokens, d)).astype(dtype)
        expected = fg_attn.bounds(q, k, group, bound=bound, parts=parts)
        competing = tokens // 5, tokens - 3
        made = key_bounds.bounds(
            gpu.array(q), gpu.array(k), group, parts, competing, (0, 0), [],
            norms=bound == "norms",
        ).get()  # fmt: skip
        pitch = -(-tokens // 128) * 128
        assert made.shape == (2, 2, -(-tokens // group), pitch)
        inside = slice(*competing)
        off = abs(steps(made[..., inside]) - steps(expected[..., inside]))
        # Sums in another order are other ones in the last place of a float32.
        assert off.max() <= 1 or abs(made[..., inside] - expected[..., inside]).max() < 1e-4
        assert (off != 0).mean() < 0.02
        assert np.isnan(made[..., : competing[0]]).all()
        assert np.isnan(made[..., competing[1] :]).all()

    @pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
    @pytest.mark.parametrize("parts", [1, 2, 4])
    def test_wgmma_gives_the_bits_of_the_other_kernel(
        self,
        gpu: EmulatedGpu,
        rng: np.random.Generator,
        monkeypatch: pytest.MonkeyPatch,
        dtype: Any,
        parts: int,
    ) -> None:
        # Whole numbers, whose sums are exact in any order.
        q, k = (gpu.array(rng.integers(-4, 5, (1, 2, 840, 80)).astype(dtype)) for _ in range(2))

        def run() -> NDArray[np.uint16]:
            made = key_bounds.bounds(q, k, 16, parts, (7, 811), (0, 0), [], norms=True)
            return made.get().view(np.uint16)

        by_wgmma = run()
        monkeypatch.setattr(
            key_bounds,
            "_bounding",
            lambda arch, element, *_, **__: builder(arch, f"key_bounds_{element}"),
        )
        by_mma = run()
        ran = [name for name in gpu.launched if name.startswith("key_bounds")]
        assert [name.startswith("key_bounds_wgmma") for name in ran] == [True, False]
        numbers = slice(7, 811)  # of NaN the bits may differ
        np.testing.assert_array_equal(by_wgmma[..., numbers], by_mma[..., numbers])

    @pytest.mark.parametrize("shared", [(4, 2, 1), (5, 1, 1), (3, 2, 2), (2, 3, 2), (1, 5, 4)])
    def test_wgmma_shares_parts_among_ctas(
        self,
        gpu: EmulatedGpu,
        rng: np.random.Generator,
        monkeypatch: pytest.MonkeyPatch,
        shared: tuple[int, int, int],
    ) -> None:
        # Four tiles of parts, so that some CTAs of the last band may have none.
        monkeypatch.setattr(key_bounds, "_teams", lambda *_: key_bounds._Teams(*shared))
        q, k = (rng.integers(-4, 5, (1, 2, 2400, 8)).astype(np.float16) for _ in range(2))
        made = key_bounds.bounds(
            gpu.array(q), gpu.array(k), 16, 4, (0, 2400), (0, 0), [], norms=True
        ).get()
        assert gpu.launched[-1] == "key_bounds_wgmma_fp16"
        expected = fg_attn.bounds(q, k, 16, parts=4)
        assert abs(steps(made[..., :2400]) - steps(expected)).max() <= 1

    @pytest.mark.parametrize(
        ("row_tiles", "columns", "ctas", "shared"),
        [
            (5, 3600, 132, (5, 26, 1)),
            (10, 3600, 132, (10, 13, 1)),
            (3, 3600, 132, (3, 44, 1)),
            (1, 7, 132, (1, 7, 1)),
            (3, 4, 2, (1, 2, 3)),
            (2, 1, 1, (1, 1, 2)),
            (19, 3600, 132, (10, 13, 2)),
            (300, 450, 132, (60, 2, 5)),
        ],
    )
    def test_teams(
        self, row_tiles: int, columns: int, ctas: int, shared: tuple[int, int, int]
    ) -> None:
        made = key_bounds._teams(row_tiles, columns, ctas)
        assert made == shared
        assert made.team * made.teams <= ctas
        assert made.team * made.bands >= row_tiles

    def test_wgmma_serves_balls_of_rows_of_two_slabs(self) -> None:
        def kernel(arch: str, d: int, *, norms: bool) -> str:
            return key_bounds._bounding(arch, "bf16", d, norms=norms).kernel

        assert kernel("sm_90a", 128, norms=True) == "key_bounds_wgmma"
        assert kernel("sm_90a", 136, norms=True) == "key_bounds"
        assert kernel("sm_90a", 128, norms=False) == "key_bounds"
        assert kernel("sm_100a", 128, norms=True) == "key_bounds"

    def test_launches(self, gpu: EmulatedGpu) -> None:
        x = gpu.array(np.zeros((1, 1, 64, 16), np.float16))
        key_bounds.bounds(x, x, 64, 1, (0, 64), (0, 0), [], norms=True)
        assert gpu.launched == ["query_balls_fp16", "key_bounds_wgmma_fp16"]
        key_bounds.bounds(x, x, 64, 1, (0, 64), (0, 0), [], norms=False)
        assert gpu.launched[2:] == ["pool_blocks_fp16", "query_balls_fp16", "key_bounds_fp16"]


def kept_by_hand(
    row: NDArray[np.float16], begin: int, end: int, tokens: int, count: int, level: float
) -> NDArray[np.bool_]:
    kept = np.ones(tokens, bool)
    kept[begin:end] = False
    numbers = [j for j in range(begin, end) if not np.isnan(row[j])]
    if count:
        numbers = sorted(numbers, key=lambda j: (-float(row[j]), j))[:count]
    else:
        numbers = [j for j in numbers if row[j] >= level]
    kept[numbers] = True
    return kept


#: Pairs of a row of 17,152 that keep_keys looks at first: 512, 15 words apart.
SAMPLED = [15 * i for i in range(512)]


def drawn(kind: str, rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float16]:
    if kind == "ties":
        return rng.integers(-2, 3, shape).astype(np.float16)
    if kind == "equal":
        return np.full(shape, -1.5, np.float16)
    made = (3 * rng.standard_normal(shape)).astype(np.float16)
    if kind == "strange":
        with np.errstate(over="ignore"):
            made *= (10.0 ** rng.integers(-7, 5, shape)).astype(np.float16)
        strange = np.array([INF, -INF, 0.0, -0.0, NAN, 6e-8, -6e-8, 65504], np.float16)
        made = np.where(rng.random(shape) < 0.3, rng.choice(strange, shape), made)
    return made


class TestKeep:
    @pytest.mark.parametrize("kind", ["numbers", "ties", "equal", "strange"])
    @pytest.mark.parametrize(
        ("tokens", "begin", "end"),
        [(40, 0, 40), (128, 3, 128), (300, 21, 281), (1000, 0, 999), (17000, 5, 16995)],
    )
    def test_the_largest(
        self,
        gpu: EmulatedGpu,
        rng: np.random.Generator,
        kind: str,
        tokens: int,
        begin: int,
        end: int,
    ) -> None:
        pitch = -(-tokens // 128) * 128
        groups = 2 if tokens > 10000 else 3
        rows = drawn(kind, rng, (1, 2, groups, pitch))
        rows[..., :begin] = rows[..., end:] = NAN
        there = gpu.array(rows)
        competing = end - begin
        counts = {1, competing // 3, competing - 1, competing}
        for count in [0, *counts] if tokens < 10000 else [0, competing // 7]:
            level = np.float16(0.5)
            bits = key_bounds.keep(
                there, tokens, (begin, end), (1, 2), count=count, level=level, memory=[]
            ).get()
            assert bits.shape == (1, 2, groups, -(-tokens // 8))
            for head, group in np.ndindex(2, groups):
                kept = np.unpackbits(bits[0, head, group], bitorder="little")
                expected = np.ones(tokens, bool)
                if group != 1:
                    row = rows[0, head, group]
                    expected = kept_by_hand(row, begin, end, tokens, count, level)
                np.testing.assert_array_equal(kept[:tokens], expected)
                assert not kept[tokens:].any()

    @pytest.mark.parametrize("share", [0.001, 0.3, 0.7, 0.9995])
    @pytest.mark.parametrize("kind", ["numbers", "ties", "equal", "strange"])
    def test_long_rows(
        self, gpu: EmulatedGpu, rng: np.random.Generator, kind: str, share: float
    ) -> None:
        tokens, begin, end = 17_100, 9, 17_080
        rows = drawn(kind, rng, (1, 1, 1, 17_152))
        rows[..., :begin] = rows[..., end:] = NAN
        count = int(share * (end - begin))
        bits = key_bounds.keep(
            gpu.array(rows), tokens, (begin, end), (0, 0), count=count, level=NAN, memory=[]
        ).get()
        kept = np.unpackbits(bits, count=tokens, bitorder="little").astype(bool)
        expected = kept_by_hand(rows[0, 0, 0], begin, end, tokens, count, 0)
        np.testing.assert_array_equal(kept, expected)

    @pytest.mark.parametrize("shift", [-8, 8])
    @pytest.mark.parametrize("share", [0.05, 0.3])
    def test_a_sample_that_misleads(
        self, gpu: EmulatedGpu, rng: np.random.Generator, share: float, shift: int
    ) -> None:
        tokens = 17_152
        rows = drawn("numbers", rng, (1, 1, 1, tokens))
        rows.reshape(-1, 2)[SAMPLED] += np.float16(shift)
        count = int(share * tokens)
        bits = key_bounds.keep(
            gpu.array(rows), tokens, (0, tokens), (0, 0), count=count, level=NAN, memory=[]
        ).get()
        kept = np.unpackbits(bits, count=tokens, bitorder="little").astype(bool)
        expected = kept_by_hand(rows[0, 0, 0], 0, tokens, tokens, count, 0)
        np.testing.assert_array_equal(kept, expected)

    @pytest.mark.parametrize("level", [-np.inf, -1.0, 0.0, 2.5, np.inf])
    def test_from_a_level(self, gpu: EmulatedGpu, rng: np.random.Generator, level: float) -> None:
        rows = drawn("strange", rng, (1, 1, 2, 256))
        bits = key_bounds.keep(
            gpu.array(rows), 250, (0, 250), (0, 0), count=0, level=np.float16(level), memory=[]
        ).get()
        kept = np.unpackbits(bits, axis=-1, count=250, bitorder="little")
        np.testing.assert_array_equal(kept, rows[..., :250] >= level)

    @pytest.mark.parametrize("tokens", [40, 61, 300, 2047, 17_101, 117_003])
    def test_what_is_behind_the_tokens_is_not_looked_at(
        self, gpu: EmulatedGpu, rng: np.random.Generator, tokens: int
    ) -> None:
        # In rows that begin at whole 16 bytes; the last one of them would fill no more chunks.
        pitch = -(-tokens // 8) * 8
        rows = drawn("numbers", rng, (1, 2, 1, pitch))
        rows[..., tokens:] = INF
        flag = gpu.array(np.zeros(1, np.int32), writable=True)
        for count in (0, 1, tokens // 5):
            bits = key_bounds.keep(
                gpu.array(rows)[..., :tokens], tokens, (0, tokens), (0, 0), count=count,
                level=np.float16(1), memory=[], flag=flag.data.ptr,
            ).get()  # fmt: skip
            kept = np.unpackbits(bits, axis=-1, bitorder="little").astype(bool)
            for head in range(2):
                expected = kept_by_hand(rows[0, head, 0], 0, tokens, tokens, count, 1)
                np.testing.assert_array_equal(kept[0, head, 0, :tokens], expected)
            assert not kept[..., tokens:].any()
        assert flag.get() == 0

    @pytest.mark.parametrize("tokens", [61, 117_003])
    @pytest.mark.parametrize("bad", [NAN, INF, -INF])
    def test_what_is_no_number_is_told(
        self, gpu: EmulatedGpu, rng: np.random.Generator, tokens: int, bad: np.float16
    ) -> None:
        for place in (5, tokens - 1):
            rows = drawn("numbers", rng, (1, 1, 2, -(-tokens // 8) * 8))
            rows[0, 0, 1, place] = bad
            flag = gpu.array(np.zeros(1, np.int32), writable=True)
            key_bounds.keep(
                gpu.array(rows), tokens, (0, tokens), (0, 0), count=3, level=NAN, memory=[],
                flag=flag.data.ptr,
            )  # fmt: skip
            assert flag.get() == 1

    @pytest.mark.parametrize("text", [(0, 9), (250, 300), (40, 170)])
    def test_keys_that_compete_and_are_kept(
        self, gpu: EmulatedGpu, rng: np.random.Generator, text: tuple[int, int]
    ) -> None:
        rows = drawn("ties", rng, (1, 1, 3, 304))
        bits = key_bounds.keep(
            gpu.array(rows), 300, (0, 300), (1, 2), count=90, level=NAN, memory=[], text=text
        ).get()
        kept = np.unpackbits(bits, axis=-1, count=300, bitorder="little").astype(bool)
        for group in (0, 2):
            expected = kept_by_hand(rows[0, 0, group], 0, 300, 300, 90, 0)
            expected[slice(*text)] = True
            np.testing.assert_array_equal(kept[0, 0, group], expected)
        assert kept[0, 0, 1].all()

    @pytest.mark.parametrize("probability", [0.01, 0.6, 1 - 2.0**-32])
    def test_keys_at_random(
        self, gpu: EmulatedGpu, rng: np.random.Generator, probability: float
    ) -> None:
        tokens, seed = 1100, 2**63 + 11
        rows = drawn("numbers", rng, (2, 2, 3, -(-tokens // 8) * 8))
        bits = key_bounds.keep(
            gpu.array(rows), tokens, (0, tokens), (2, 3), count=50, level=NAN, memory=[],
            drawn=draws.threshold(probability), seed=seed,
        ).get()  # fmt: skip
        kept = np.unpackbits(bits, axis=-1, count=tokens, bitorder="little").astype(bool)
        for b, h in np.ndindex(2, 2):
            expected = draws.drawn(2 * b + h, 3, tokens, probability, seed)
            for group in range(2):
                expected[group] |= kept_by_hand(rows[b, h, group], 0, tokens, tokens, 50, 0)
            expected[2] = True
            np.testing.assert_array_equal(kept[b, h], expected)

    def test_how_far_rows_are_apart(self) -> None:
        x = np.zeros((2, 3, 4, 104), np.float16)
        pitch = key_bounds.row_pitch
        assert (pitch(x), pitch(x[..., :99]), pitch(x[:1, :1, :, 8:40])) == (104, 104, 104)
        assert (pitch(x[:1]), pitch(x[:1, :1]), pitch(x[:1, :1, :1, :9])) == (104, 104, 16)
        assert pitch(x[:, :, ::2]) == 208
        assert pitch(x[:, :2]) is pitch(x[:, :, :2]) is None
        assert pitch(x[..., ::2]) is pitch(x.astype(np.float32)) is None
        assert pitch(np.zeros((1, 1, 2, 99), np.float16)) is None

    def test_rows_that_cannot_be_counted(self, gpu: EmulatedGpu) -> None:
        rows = gpu.empty((1, 1, 1, 1 << 20), np.float16)
        with pytest.raises(ValueError, match=r"`k`: expected below 1,044,480 tokens, got 1,048,5"):
            key_bounds.keep(rows, 1_048_500, (0, 9), (0, 0), count=1, level=NAN, memory=[])

    def test_rows_that_shared_memory_does_not_hold(
        self, gpu: EmulatedGpu, rng: np.random.Generator
    ) -> None:
        tokens = 117_000
        pitch = -(-tokens // 128) * 128
        assert 2 * pitch > builder("sm_90a", "keep_keys").smem_bytes
        row = drawn("numbers", rng, (1, 1, 1, pitch))
        row[..., tokens:] = NAN
        bits = key_bounds.keep(
            gpu.array(row), tokens, (0, tokens), (0, 0), count=5000, level=NAN, memory=[]
        ).get()
        kept = np.unpackbits(bits, count=tokens, bitorder="little").astype(bool)
        expected = np.argsort(-row[0, 0, 0, :tokens].astype(float), kind="stable")[:5000]
        np.testing.assert_array_equal(np.flatnonzero(kept), np.sort(expected))
