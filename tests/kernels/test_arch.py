from __future__ import annotations

import pytest

from tessera_cupy.errors import UnsupportedGpuError
from tessera_cupy.kernels import toolchain
from tessera_cupy.kernels.arch import ARCHS, arch_for, get_arch


@pytest.mark.parametrize(
    ("capability", "name", "table"),
    [
        ((8, 0), "sm_80", "sm80"),
        ((8, 7), "sm_80", "sm80"),
        ((8, 6), "sm_86", "sm89"),
        ((8, 9), "sm_89", "sm89"),
        ((9, 0), "sm_90a", "sm90"),
        ((10, 0), "sm_100a", "sm100"),
        ((12, 0), "sm_120a", "sm120"),
    ],
)
def test_capability_has_its_architecture(
    capability: tuple[int, int], name: str, table: str
) -> None:
    arch = arch_for(capability)
    assert (arch.name, arch.table) == (name, table)


def test_each_capability_is_served_once() -> None:
    served = [pair for arch in ARCHS.values() for pair in arch.capabilities]
    assert len(served) == len(set(served))


@pytest.mark.parametrize("capability", [(6, 1), (7, 5), (13, 0), (9, 9), (10, 3)])
def test_unknown_capability_names_gpu_capability_nvrtc_and_what_is_supported(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "expected_version", lambda: "12.9.86")
    with pytest.raises(UnsupportedGpuError) as error:
        arch_for(capability, "Quadro P4000")
    message = str(error.value)
    assert "'Quadro P4000'" in message
    assert f"compute capability {capability[0]}.{capability[1]}" in message
    assert "NVRTC here: 12.9.86" in message
    for arch in ARCHS.values():
        assert arch.name in message
    assert ("newer tessera-cupy" in message) == (capability > (8, 0))


def test_unknown_capability_without_a_name_or_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "expected_version", lambda: None)
    with pytest.raises(UnsupportedGpuError, match=r"^The GPU has .*NVRTC here: version unknown"):
        arch_for((6, 1))


@pytest.mark.parametrize("name", ["sm_90", "sm_90a", "sm90", "sm90a"])
def test_suffix_and_underscore_may_be_left_out(name: str) -> None:
    assert get_arch(name) is ARCHS["sm_90a"]


def test_names_of_tables_are_names_of_their_newest_architecture() -> None:
    found = {name: get_arch(name).name for name in ("sm80", "sm89", "sm90", "sm100", "sm120")}
    assert found == {
        "sm80": "sm_80", "sm89": "sm_89", "sm90": "sm_90a", "sm100": "sm_100a", "sm120": "sm_120a",
    }  # fmt: skip
    assert {arch.table for arch in ARCHS.values()} == set(found)


def test_every_capability_is_a_name_of_the_architecture_that_serves_it() -> None:
    for arch in ARCHS.values():
        for major, minor in arch.capabilities:
            assert get_arch(f"sm_{major}{minor}") is arch_for((major, minor))
    assert get_arch("sm_87").name == "sm_80"


@pytest.mark.parametrize("name", ["sm_80a", "sm_70", "90", "", "SM_90", "h100", "sm70", "sm-90"])
def test_wrong_name_lists_the_right_ones(name: str) -> None:
    with pytest.raises(ValueError, match=r"`arch`: expected one of sm_80, .*sm_120a, got"):
        get_arch(name)


def test_limits_of_one_cta_leave_what_the_driver_reserves() -> None:
    for arch in ARCHS.values():
        assert arch.smem_sm - arch.smem_block == 1024, arch.name
