"""Figures of GPUs: rates that the makers publish, and no second copy of a limit."""

from __future__ import annotations

import pytest

from tessera_cupy.cost import GPUS, find_gpu, typical_gpu
from tessera_cupy.gpus import model_of
from tessera_cupy.kernels import catalog
from tessera_cupy.kernels.arch import ARCHS


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("A100-SXM4-80GB", 312),
        ("RTX 3090", 71),
        ("A40", 149.7),
        ("RTX 4090", 165.2),
        ("L40S", 362),
        ("B200", 2250),
        ("RTX 5090", 209.5),
        ("RTX PRO 6000", 503.8),
    ],
)
def test_the_dense_matrix_rate_is_the_published_one(name: str, tflops: float) -> None:
    gpu = find_gpu(name)
    assert gpu.sms * gpu.matrix * gpu.clock_ghz / 1e3 == pytest.approx(tflops, rel=0.02)


def test_hopper_has_its_published_rate_at_its_boost_clock_and_runs_slower() -> None:
    for name in ("H100 SXM", "H200"):
        gpu = find_gpu(name)
        assert gpu.sms * gpu.matrix * 1.83 / 1e3 == pytest.approx(989, rel=0.01)
        assert 1.57 <= gpu.clock_ghz <= 1.77  # README


def test_every_architecture_has_a_gpu_that_stands_for_it() -> None:
    assert {gpu.arch for gpu in GPUS.values()} == set(ARCHS)
    for name, arch in ARCHS.items():
        gpu = typical_gpu(name)
        assert (gpu.arch, gpu.sms, gpu.l2_bytes) == (name, arch.sms, arch.l2_bytes)
        assert typical_gpu(arch) is gpu
        assert gpu.limits is arch
    assert typical_gpu("sm_87").name == "A100-SXM4-80GB"


def test_a_plan_without_a_gpu_is_organized_for_the_one_that_stands_for_it() -> None:
    for name, arch in ARCHS.items():
        config = catalog.find(name, "attend_mma", "bfloat16", 128, 64, 64, bits=False)
        assert config is not None
        assert typical_gpu(name).model(config) == model_of(config, arch, None)


def test_mma_sync_is_slower_where_there_are_newer_instructions() -> None:
    for name, share in (("A100-SXM4-80GB", 1), ("H200", 0.62), ("B200", 0.25)):
        gpu = find_gpu(name)
        assert gpu.matrix_rate("attend_mma") == share * gpu.matrix
    assert find_gpu("H200").matrix_rate("attend_wgmma") == 4096


def test_an_unknown_gpu_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match=r"gpu.*A100-SXM4-80GB.*'V100'.*name one of them"):
        find_gpu("V100")
    with pytest.raises(ValueError, match="arch"):
        typical_gpu("sm_70")
