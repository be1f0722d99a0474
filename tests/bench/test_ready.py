import pytest

from tessera_cupy.bench import ready
from tessera_cupy.errors import KernelCompileError
from tessera_cupy.kernels.batch import Outcome


@pytest.fixture
def building(monkeypatch):
    """What building gives: by name of a kernel, an error; the first one was there already."""
    asked, errors = [], {}

    def build_all(configs):
        asked.extend(configs)
        names = [config.name for config in asked]
        return [
            Outcome(config, None, i > 0, 0.0, error=errors.get(name))
            for i, (config, name) in enumerate(zip(asked, names, strict=True))
        ]

    monkeypatch.setattr(ready, "build_all", build_all)
    return asked, errors


def test_what_a_profile_runs_is_compiled_before(building):
    asked, _ = building
    assert ready.build_kernels("sm_90a", "bfloat16") == len(asked) - 1
    assert {config.dtype for config in asked} == {"bfloat16", ""}
    kernels = {config.kernel for config in asked}
    assert {"attend_mma", "attend_wgmma", "mask_state", "tile_scan"} <= kernels


def test_a_kernel_that_cannot_be_compiled_ends_it(building):
    _, errors = building
    errors["tile_scan"] = "line 3: no"
    with pytest.raises(KernelCompileError, match="tile_scan cannot be compiled: line 3: no"):
        ready.build_kernels("sm_90a", "bfloat16")
