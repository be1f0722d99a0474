"""The GPU that a plan is for: its architecture, and what organization needs to know of it."""

from __future__ import annotations

from functools import cache

from tessera_cupy import interop
from tessera_cupy.kernels.arch import Arch, arch_for
from tessera_cupy.kernels.catalog import KernelConfig
from tessera_cupy.organization import DeviceModel

#: Share of the L2 cache that one group of heads' K and V may fill; q, o and the plan need the rest.
_L2_SHARE = 0.6


@cache
def arch_of(device: int) -> Arch:
    """The architecture of a GPU.

    Raises:
        UnsupportedGpuError: there are no kernels for it.
    """
    cupy = interop.import_cupy()
    properties = cupy.cuda.runtime.getDeviceProperties(device)
    name = properties["name"].decode()
    return arch_for((properties["major"], properties["minor"]), name)


@cache
def name_of(device: int) -> str:
    """What a GPU is called."""
    properties = interop.import_cupy().cuda.runtime.getDeviceProperties(device)
    return str(properties["name"].decode())


@cache
def multiprocessors(device: int) -> int:
    """Multiprocessors of a GPU."""
    properties = interop.import_cupy().cuda.runtime.getDeviceProperties(device)
    return int(properties["multiProcessorCount"])


@cache
def model_of(config: KernelConfig, arch: Arch, device: int | None) -> DeviceModel:
    """What organization needs to know: of the GPU when there is one, else of its generation."""
    sms, l2_bytes = arch.sms, arch.l2_bytes
    if device is not None:
        properties = interop.import_cupy().cuda.runtime.getDeviceProperties(device)
        sms, l2_bytes = properties["multiProcessorCount"], properties["l2CacheSize"]
    return model_for(config, arch, sms, l2_bytes)


def model_for(config: KernelConfig, arch: Arch, sms: int, l2_bytes: int) -> DeviceModel:
    """What organization needs to know of a GPU with so many multiprocessors and bytes of L2."""
    return DeviceModel(
        sms=sms, ctas_per_sm=config.ctas_per_sm(arch), l2_bytes=int(_L2_SHARE * l2_bytes)
    )
