from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tessera_cupy.kernels.arch import ARCHS
from tessera_cupy.kernels.catalog import (
    DTYPES,
    KernelConfig,
    catalog,
    find,
    fingerprint,
    merge_for,
    twin_of,
    why_not,
)
from tessera_cupy.kernels.specialise import read_sources, source

EVERY = [config for arch in ARCHS for config in catalog(arch)]
ATTENTION = [config for config in EVERY if config.kernel == "attend_mma"]


@pytest.mark.parametrize("arch", ARCHS)
def test_every_tile_has_both_dtypes_and_all_features(arch: str) -> None:
    shapes = {(c.head_dim, c.tile_q, c.tile_kv) for c in catalog(arch) if c.kernel == "attend_mma"}
    for head_dim in (64, 96, 128):
        assert (head_dim, 64, 64) in shapes
        assert any((head_dim, 128, tile_kv) in shapes for tile_kv in (32, 64, 128))
    for head_dim, tile_q, tile_kv in shapes:
        for dtype in DTYPES:
            for bits in (False, True):
                found = find(arch, "attend_mma", dtype, head_dim, tile_q, tile_kv, bits)
                assert found is not None
                assert (found.arch, found.head_dim) == (arch, head_dim)
                assert (found.tile_q, found.tile_kv) == (tile_q, tile_kv)
                assert (found.dtype, found.bits) == (dtype, bits)
                assert not found.gather
            found = find(arch, "attend_mma", dtype, head_dim, tile_q, tile_kv, False, gather=True)
            assert found is not None
            assert (found.head_dim, found.features) == (head_dim, ("gather",))


@pytest.mark.parametrize("arch", ARCHS)
def test_head_dim_256_has_narrow_tiles(arch: str) -> None:
    for dtype in DTYPES:
        assert find(arch, "attend_mma", dtype, 256, 64, 32, bits=True) is not None


@pytest.mark.parametrize(
    ("head_dim", "served_by"), [(31, 64), (64, 64), (65, 96), (80, 96), (97, 128), (128, 128)]
)
def test_smallest_head_dim_that_suffices_is_taken(head_dim: int, served_by: int) -> None:
    found = find("sm_89", "attend_mma", "float16", head_dim, 64, 64, bits=False)
    assert found is not None
    assert found.head_dim == served_by


@pytest.mark.parametrize(
    "sizes",
    [
        ("attend_mma", "float16", 257, 64, 32),
        ("attend_mma", "float32", 64, 64, 64),
        ("attend_mma", "float16", 64, 64, 48),
        ("attend_mma", "float16", 64, 192, 64),
        ("attend_wgmma", "float16", 64, 64, 64),
        ("attend_wgmma", "float16", 136, 128, 192),
    ],
)
def test_what_does_not_exist_is_none(sizes: tuple[str, str, int, int, int]) -> None:
    assert find("sm_90a", *sizes, bits=False) is None


@pytest.mark.parametrize(("head_dim", "served_by"), [(8, 64), (64, 64), (72, 128), (128, 128)])
def test_hopper_s_kernel_fills_rows_to_the_next_64(head_dim: int, served_by: int) -> None:
    found = find("sm_90a", "attend_wgmma", "bfloat16", head_dim, 128, 192, bits=False)
    assert found is not None
    assert found.head_dim == served_by


def test_an_entry_with_features_has_no_twin_that_lacks_them() -> None:
    pairs = [(c, twin_of(c)) for c in EVERY]
    assert [c for c, twin in pairs if twin and (c.features or c.kernel != "attend_wgmma")] == []
    found = [(c, twin) for c, twin in pairs if twin]
    assert len(found) == len([c for c in EVERY if c.twins])
    for config, twin in found:
        assert twin.twins
        assert (twin.dtype, twin.head_dim, twin.tile_q, twin.tile_kv, twin.smem_bytes) == (
            *(config.dtype, config.head_dim, config.tile_q, config.tile_kv, config.smem_bytes),
        )


def test_unknown_architecture_is_an_error() -> None:
    with pytest.raises(ValueError, match="arch"):
        catalog("sm_75")


def test_suffix_of_the_architecture_may_be_left_out() -> None:
    assert catalog("sm_90") == catalog("sm_90a")


@pytest.mark.parametrize("arch", ARCHS)
def test_names_are_unique_readable_and_safe_as_folders(arch: str) -> None:
    names = [config.name for config in catalog(arch)]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"[a-z0-9_]+", name) for name in names)


@pytest.mark.parametrize("arch", ARCHS)
def test_no_two_entries_answer_the_same_question(arch: str) -> None:
    for config in catalog(arch):
        if config.kernel == "attend_mma":
            sizes = (config.dtype, config.head_dim, config.tile_q, config.tile_kv, config.bits)
            found = find(arch, config.kernel, *sizes, gather=config.gather)
            assert found is config, config.name


def test_name_tells_the_shape() -> None:
    config = KernelConfig(
        "sm_90a", "attend_mma", 128, "bfloat16", 64, 32, 4, 1, 2, ("bits",), why="an example"
    )
    assert config.name == "attend_mma_bf16_d128_q64k32w4_bits"
    assert replace(config, stages=2).name == "attend_mma_bf16_d128_q64k32w4s2_bits"
    assert replace(config, features=(), dtype="float16").name == "attend_mma_fp16_d128_q64k32w4"
    assert replace(config, kernel="merge_splits").name == "merge_splits_bf16"


def test_every_entry_says_why_in_one_line() -> None:
    for config in EVERY:
        assert len(config.why) > 20, config.name
        assert "\n" not in config.why


@pytest.mark.parametrize("arch", ARCHS)
def test_promised_ctas_fit_together(arch: str) -> None:
    limits = ARCHS[arch]
    for config in catalog(arch):
        assert config.smem_bytes <= limits.smem_block, config.name
        assert config.min_ctas * (config.smem_bytes + 1024) <= limits.smem_sm, config.name
        assert config.min_ctas >= 1
        assert config.ctas_per_sm(limits) == config.min_ctas


def test_ctas_per_multiprocessor_follow_the_shared_memory_of_the_device() -> None:
    config = find("sm_90a", "attend_mma", "float16", 128, 64, 64, bits=False)
    assert config is not None
    config = replace(config, min_ctas=3)
    per_cta = config.smem_bytes + 1024
    for count in (1, 2, 3):
        enough = replace(ARCHS["sm_90a"], smem_sm=count * per_cta)
        assert config.ctas_per_sm(enough) == count
        assert config.ctas_per_sm(replace(enough, smem_sm=enough.smem_sm + per_cta - 1)) == count
    assert config.ctas_per_sm(replace(ARCHS["sm_90a"], smem_sm=9 * per_cta)) == 3


def test_merge_has_the_dtype_and_architecture_of_the_attention() -> None:
    for config in ATTENTION:
        merge = merge_for(config)
        assert (merge.kernel, merge.arch, merge.dtype) == (
            "merge_splits",
            config.arch,
            config.dtype,
        )
        assert merge.smem_bytes == 0
        assert merge.head_dim >= config.head_dim


def test_a_device_with_less_shared_memory_takes_a_smaller_tile() -> None:
    wide = find("sm_90a", "attend_mma", "bfloat16", 64, 128, 64, bits=False)
    narrow = find("sm_90a", "attend_mma", "bfloat16", 64, 64, 64, bits=False)
    assert wide is not None
    assert narrow is not None
    deep = replace(wide, tile_kv=192, stages=2)  # fits only where there are 227 KB

    def first_that_runs(smem_block: int) -> KernelConfig | None:
        fitting = (c for c in (deep, wide, narrow) if why_not(c, smem_block) is None)
        return next(fitting, None)

    assert first_that_runs(227 * 1024) is deep
    assert first_that_runs(99 * 1024) is wide
    assert first_that_runs(wide.smem_bytes - 1) is narrow
    assert first_that_runs(narrow.smem_bytes - 1) is None


def test_reason_names_what_is_needed_and_what_there_is() -> None:
    config = ATTENTION[0]
    assert why_not(config, config.smem_bytes) is None
    reason = why_not(config, config.smem_bytes - 1)
    assert reason is not None
    assert str(config.smem_bytes) in reason
    assert str(config.smem_bytes - 1) in reason


def test_fingerprint_tells_catalogs_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(fingerprint("sm_90a")) == 12
    assert fingerprint("sm_90") == fingerprint("sm_90a")
    assert fingerprint("sm_80") == fingerprint("sm_80")
    entries = catalog("sm_80")
    before = fingerprint("sm_80")
    for changed, same in [
        ((replace(entries[0], why="another reason altogether"), *entries[1:]), True),
        ((replace(entries[0], min_ctas=1), *entries[1:]), False),
        ((replace(entries[0], stages=2), *entries[1:]), False),
        (entries[1:], False),
        (tuple(entry for entry in entries if entry.dtype), True),
    ]:
        monkeypatch.setattr("tessera_cupy.kernels.catalog.catalog", lambda arch, c=changed: c)
        assert (fingerprint("sm_80") == before) is same


def test_source_instantiates_the_entry_and_checks_its_shared_memory() -> None:
    config = KernelConfig(
        "sm_90a", "attend_mma", 96, "bfloat16", 64, 32, 4, 2, 3, ("bits",), why="an example"
    )
    text = source(config)
    assert text.startswith("// attend_mma_bf16_d96_q64k32w4s2_bits for sm_90a\n")
    assert '#include "attend_mma.cu"\n' in text
    assert "TESSERA_ATTEND_MMA(bf16_t, 96, 64, 32, 4, 2, true, false, 3)\n" in text
    assert "tessera::AttendConfig<tessera::bf16_t, 96, 64, 32, 4, 2, true, false>;" in text
    assert f"== {config.smem_bytes}," in text
    assert "2, false, false, 3)" in source(replace(config, features=()))
    assert "2, false, true, 3)" in source(replace(config, features=("gather",)))


def test_source_differs_where_the_code_does() -> None:
    shapes = {
        (c.kernel, c.dtype, c.head_dim, c.tile_q, c.tile_kv, c.features, c.min_ctas, c.arch)
        for c in EVERY
    }
    assert len({source(config) for config in EVERY}) == len(shapes)


def test_sources_of_the_package_are_read_by_include_name() -> None:
    found = read_sources()
    assert {"attend_mma.cu", "merge_splits.cu", "common/ptx.cuh"} <= set(found)
    assert list(found) == sorted(found)
    for name, content in found.items():
        for included in re.findall(rb'#include "(.*)"', content):
            assert included.decode() in found, name
