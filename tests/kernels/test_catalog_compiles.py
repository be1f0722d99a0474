"""The package's own kernels compile without spills, local memory or compiler warnings.

A few entries, one or two an architecture, always; all of them with ``-m matrix``.
"""

from __future__ import annotations

import json

import pytest

from tessera_cupy.kernels.arch import ARCHS
from tessera_cupy.kernels.cache import default_cache
from tessera_cupy.kernels.catalog import TOKEN_KERNELS, KernelConfig, catalog, merge_for, timed

EVERY = [config for arch in ARCHS for config in catalog(arch)]
# Those that keep time in one dtype: they are made on demand, and differ by the same instructions.
EVERY += [timed(config) for config in EVERY if config.attends and config.dtype == "bfloat16"]


def _identity(config: KernelConfig) -> str:
    return f"{config.arch}-{config.name}"


def _some() -> list[KernelConfig]:
    """Entries near the register limit, and every dtype, head dim and feature at least once."""
    wanted = [
        ("sm_80", "float16", 64, 128, False),
        ("sm_86", "bfloat16", 128, 64, True),
        ("sm_90a", "bfloat16", 128, 128, False),
        ("sm_100a", "float16", 256, 64, True),
        ("sm_120a", "bfloat16", 96, 128, True),
    ]
    found = [
        next(c for c in catalog(arch) if (c.dtype, c.head_dim, c.tile_q, c.bits) == shape)
        for arch, *rest in wanted
        for shape in [tuple(rest)]
    ]
    hopper = next(c for c in catalog("sm_90a") if c.kernel == "attend_wgmma" and c.head_dim == 128)
    return [*found, merge_for(found[2]), timed(found[2]), timed(hopper)]


def _check(config: KernelConfig) -> None:
    path = default_cache().build(config)
    meta = json.loads(path.with_name("meta.json").read_text())
    assert meta["problems"] == []
    threads = config.warps * 32
    # Registers come in blocks of 8 a thread; a multiprocessor has 65,536.
    registers = -(-meta["resources"]["registers"] // 8) * 8
    assert registers * threads * config.min_ctas <= 65536
    # Shared memory is dynamic, and counted in smem_bytes; kernels over tokens may have static one,
    # of which CUDA allows this much.
    static = 48 * 1024 if config.kernel in TOKEN_KERNELS else 0
    assert meta["resources"]["smem"] <= static


@pytest.mark.parametrize("config", _some(), ids=_identity)
def test_representative_kernel(config: KernelConfig) -> None:
    _check(config)


@pytest.mark.matrix
@pytest.mark.parametrize("config", EVERY, ids=_identity)
def test_kernel(config: KernelConfig) -> None:
    _check(config)
