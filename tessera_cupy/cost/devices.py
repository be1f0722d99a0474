"""GPUs by their public figures: what the cost model needs to know of one that is not here.

Limits that all GPUs of an architecture share are those of :mod:`tessera_cupy.kernels.arch`.

Sources. Multiprocessors, clocks, matrix rates, L2 size and memory bandwidth: NVIDIA's white papers
and data sheets of the A100 (2020), GA102 (RTX 3090, A40), Ada (RTX 4090, L40S), H100 and H200,
RTX Blackwell (RTX 5090, RTX PRO 6000) and HGX B200. Matrix operations a clock are the published
dense rate of bfloat16 with sums in float32, divided by multiprocessors and boost clock:

=================  =====  ===================  ====================
GPU                SMs    GHz                  TFLOP/s, dense
=================  =====  ===================  ====================
A100-SXM4-80GB     108    1.41                 312
RTX 3090           82     1.695                71 (half rate)
A40                84     1.74                 149.7
RTX 4090           128    2.52                 165.2 (half rate)
L40S               142    2.52                 362
H100 SXM, H200     132    1.83                 989
B200               148    1.85                 2,250
RTX 5090           170    2.407                209.5 (half rate)
RTX PRO 6000       188    2.617                503.8
=================  =====  ===================  ====================

Powers of two of ``ex2`` a clock: CUDA C++ Programming Guide, "Arithmetic Instructions": 16 on all.
"""

from __future__ import annotations

from dataclasses import dataclass

from tessera_cupy.errors import wrong
from tessera_cupy.gpus import model_for
from tessera_cupy.kernels.arch import ARCHS, Arch, get_arch
from tessera_cupy.kernels.catalog import KernelConfig
from tessera_cupy.organization import DeviceModel

_MIB = 1 << 20
_EX2 = 16


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        name: what the maker calls it.
        arch: name of the architecture whose kernels run on it.
        sms: multiprocessors.
        clock_ghz: clock under the load of attention; the boost clock where that is not known.
        matrix: bfloat16 operations (two a multiply-add, sums in float32) of one multiprocessor a
            clock.
        mma_share: part of ``matrix`` that ``mma.sync`` reaches.
        ex2: exponentials of one multiprocessor a clock.
        l2_bytes: L2 cache, bytes.
        l2_per_clock: bytes that L2 gives all multiprocessors together, a clock.
        dram_gbs: memory bandwidth, GB/s.
    """

    name: str
    arch: str
    sms: int
    clock_ghz: float
    matrix: int
    mma_share: float
    ex2: int
    l2_bytes: int
    l2_per_clock: int
    dram_gbs: float

    @property
    def limits(self) -> Arch:
        """Shared memory of a CTA and of a multiprocessor, and what else its architecture says."""
        return ARCHS[self.arch]

    def matrix_rate(self, kernel: str) -> float:
        """Operations of one multiprocessor a clock by the instructions of a kernel.

        >>> find_gpu("H200").matrix_rate("attend_wgmma")
        4096
        """
        return self.matrix if kernel == "attend_wgmma" else self.mma_share * self.matrix

    def model(self, config: KernelConfig) -> DeviceModel:
        """What organization needs to know of this GPU and a kernel."""
        return model_for(config, self.limits, self.sms, self.l2_bytes)


def _typical(
    name: str,
    arch: str,
    clock_ghz: float,
    matrix: int,
    l2_per_clock: int,
    dram_gbs: float,
    mma_share: float = 1.0,
) -> Gpu:
    """The GPU whose multiprocessors and L2 the table of architectures has."""
    of = ARCHS[arch]
    return Gpu(
        name,
        arch,
        of.sms,
        clock_ghz,
        matrix,
        mma_share,
        _EX2,
        of.l2_bytes,
        l2_per_clock,
        dram_gbs,
    )


# L2 of the A100: 5,120 bytes a clock (white paper). Of the H200: what a copy at 5.9 TB/s is 57% of
# (Nsight Compute, kernels_cu/NOTES.md). NVIDIA gives no figure for the others: those of B200 are
# the H200's for each multiprocessor; GDDR ones are assumed to have half of the A100's.
_GDDR_L2 = 24  # bytes a clock for each multiprocessor

# mma.sync on Hopper: 62% of the peak (Luo et al., "Benchmarking and Dissecting the Nvidia Hopper
# GPU Architecture", 2024). On B200 the rate of the A100, a quarter, from the published rates of
# FlashAttention-2 there: 361 TFLOP/s at head dim 128 and 380 at 64.
_HOPPER_MMA, _B200_MMA = 0.62, 0.25

#: Clock of an H200 that multiplies all the time: it falls to between 1.57 and 1.77 GHz, as power
#: allows (README).
_HOPPER_GHZ = 1.70

#: Every GPU by name; the first one of an architecture stands for it.
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _typical("A100-SXM4-80GB", "sm_80", 1.41, 2048, 5120, 2039),
        _typical("RTX 3090", "sm_86", 1.695, 512, 82 * _GDDR_L2, 936),
        Gpu("A40", "sm_86", 84, 1.74, 1024, 1.0, _EX2, 6 * _MIB, 84 * _GDDR_L2, 696),
        _typical("RTX 4090", "sm_89", 2.52, 512, 128 * _GDDR_L2, 1008),
        Gpu("L40S", "sm_89", 142, 2.52, 1024, 1.0, _EX2, 96 * _MIB, 142 * _GDDR_L2, 864),
        _typical("H200", "sm_90a", _HOPPER_GHZ, 4096, 6144, 4800, _HOPPER_MMA),
        _typical("H100 SXM", "sm_90a", _HOPPER_GHZ, 4096, 6144, 3350, _HOPPER_MMA),
        _typical("B200", "sm_100a", 1.85, 8192, 148 * 6144 // 132, 8000, _B200_MMA),
        _typical("RTX 5090", "sm_120a", 2.407, 512, 170 * _GDDR_L2, 1792),
        Gpu(
            "RTX PRO 6000", "sm_120a", 188, 2.617, 1024, 1.0, _EX2, 128 * _MIB, 188 * _GDDR_L2, 1792
        ),
    )
}


def find_gpu(name: str) -> Gpu:
    """The GPU of a name.

    Raises:
        ValueError: there is none; the message lists those that there are.

    >>> find_gpu("RTX 4090").sms
    128
    """
    if name not in GPUS:
        known = ", ".join(GPUS)
        raise ValueError(wrong("gpu", f"one of {known}", repr(name), "name one of them"))
    return GPUS[name]


def typical_gpu(arch: str | Arch) -> Gpu:
    """The GPU that stands for an architecture: the one that plans made without a GPU are for.

    Raises:
        ValueError: an unknown architecture.

    >>> typical_gpu("sm_90").name, typical_gpu("sm_120a").name
    ('H200', 'RTX 5090')
    """
    name = get_arch(arch).name if isinstance(arch, str) else arch.name
    return next(gpu for gpu in GPUS.values() if gpu.arch == name)
