"""What a plan tells organization of the request and of the GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tessera_cupy import ArraySpec, BlockMask, gpus, interop, make_plan, prepared
from tessera_cupy.kernels.arch import ARCHS
from tessera_cupy.kernels.catalog import catalog, find
from tessera_cupy.organization import DeviceModel

MASK = BlockMask.from_dense(np.ones((2, 1, 4, 8), bool), (64, 64), (250, 500))


def test_organization_is_told_of_heads_bytes_and_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}
    monkeypatch.setattr(prepared, "organize", lambda tiles, how, **given: told.update(given))
    q, k = ArraySpec((2, 6, 250, 96)), ArraySpec((2, 3, 500, 96))
    made = make_plan(MASK, q, k, arch="sm_80", regime="attend_mma/q64k64/retain-pack/longest")
    made.tasks()
    device = told.pop("device")
    assert told == {
        "batch": 2,
        "q_heads": 6,
        "kv_heads": 3,
        "mask_batch": 2,
        "mask_heads": 1,
        "kv_bytes_per_head": 2 * 2 * 500 * 96,  # K and V, two bytes each
    }
    assert device == gpus.model_of(made.config, ARCHS["sm_80"], None)


def test_longest_first_stays_within_the_heads_that_fit_l2() -> None:
    # K and V of a head are 16 MiB. 24 MiB, six tenths of 40, hold one head, so each head's tasks
    # come together though those of the second are longer; of 8 MiB heads two fit.
    dense = np.ones((1, 2, 4, 1024), bool)
    dense[0, 0, :, 512:] = False

    def heads(dim: int) -> list[int]:
        mask = BlockMask.from_dense(dense, (64, 64), (256, 65536))
        q, k = (ArraySpec((1, 2, tokens, dim)) for tokens in mask.shape)
        name = "attend_mma/q64k64/retain-pack/longest"
        made = make_plan(mask, q, k, arch="sm_80", regime=name)
        order: list[int] = made.tasks().task_head.tolist()
        return order

    assert heads(64) == [0] * 4 + [1] * 4
    assert heads(32) == [1] * 4 + [0] * 4


def test_without_a_gpu_the_model_is_that_of_the_generation() -> None:
    arch = ARCHS["sm_80"]
    config = find("sm_80", "attend_mma", "bfloat16", 64, 64, 64, bits=False)
    assert config is not None
    model = gpus.model_of(config, arch, None)
    assert model == DeviceModel(sms=108, ctas_per_sm=3, l2_bytes=int(0.6 * (40 << 20)))
    assert model.capacity == 324


def test_with_a_gpu_the_model_is_that_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def properties(device: int) -> dict[str, Any]:
        asked.append(device)
        return {"multiProcessorCount": 7, "l2CacheSize": 1000, "name": b"x", "major": 9, "minor": 0}

    runtime = SimpleNamespace(getDeviceProperties=properties)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(interop, "import_cupy", lambda: cupy)
    arch = ARCHS["sm_90a"]
    wgmma = find("sm_90a", "attend_wgmma", "bfloat16", 128, 128, 192, bits=False)
    assert wgmma is not None
    model = gpus.model_of.__wrapped__(wgmma, arch, 5)
    assert model == DeviceModel(sms=7, ctas_per_sm=1, l2_bytes=600)
    assert model.capacity == 7
    assert asked == [5]
    for config in catalog("sm_90a"):
        if config.attends:
            model = gpus.model_of.__wrapped__(config, arch, 5)
            assert model.ctas_per_sm == config.ctas_per_sm(arch)
            assert model.capacity == 7 * config.ctas_per_sm(arch)
