"""GPU architectures that have kernels, and which compute capability each one serves."""

from __future__ import annotations

from dataclasses import dataclass

from tessera_cupy.errors import UnsupportedGpuError, wrong
from tessera_cupy.kernels import toolchain

_KIB = 1024
_MIB = 1024 * 1024


@dataclass(frozen=True)
class Arch:
    """One compilation target and the limits that tiles are chosen by.

    Attributes:
        name: NVRTC's ``-arch``. An ``a`` gives access to instructions of that very
            generation, at the price that no other capability can run the result.
        capabilities: (major, minor) of the GPUs that run it.
        table: name of the profile table that plans come from.
        smem_block: shared memory that one CTA may use, bytes.
        smem_sm: shared memory of one multiprocessor, bytes, including what each
            resident CTA reserves (:data:`SMEM_RESERVED`).
        sms: multiprocessors of a typical GPU, for plans made without one.
        l2_bytes: L2 cache of a typical GPU, bytes.
    """

    name: str
    capabilities: tuple[tuple[int, int], ...]
    table: str
    smem_block: int
    smem_sm: int
    sms: int
    l2_bytes: int


#: Shared memory that the driver takes for itself from each resident CTA, bytes.
SMEM_RESERVED = _KIB

# Limits: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
# The typical GPUs are A100, RTX 3090, RTX 4090, H100 SXM, B200 and RTX 5090.
_TABLE = (
    Arch("sm_80", ((8, 0), (8, 7)), "sm80", 163 * _KIB, 164 * _KIB, 108, 40 * _MIB),
    Arch("sm_86", ((8, 6),), "sm89", 99 * _KIB, 100 * _KIB, 82, 6 * _MIB),
    Arch("sm_89", ((8, 9),), "sm89", 99 * _KIB, 100 * _KIB, 128, 72 * _MIB),
    Arch("sm_90a", ((9, 0),), "sm90", 227 * _KIB, 228 * _KIB, 132, 50 * _MIB),
    Arch("sm_100a", ((10, 0),), "sm100", 227 * _KIB, 228 * _KIB, 148, 126 * _MIB),
    Arch("sm_120a", ((12, 0),), "sm120", 99 * _KIB, 100 * _KIB, 170, 96 * _MIB),
)

#: Every architecture by name, oldest first.
ARCHS: dict[str, Arch] = {arch.name: arch for arch in _TABLE}


def get_arch(name: str) -> Arch:
    """Look an architecture up by its name, or by that of a capability that it serves.

    Both may lack the ``_``, so the name of a profile table is one, too.

    Raises:
        ValueError: no architecture of that name has kernels; the message lists those that have.

    >>> get_arch("sm_90").name, get_arch("sm_87").name, get_arch("sm90").name
    ('sm_90a', 'sm_80', 'sm_90a')
    """
    for arch in ARCHS.values():
        names = [arch.name, *(f"sm_{major}{minor}" for major, minor in arch.capabilities)]
        if name in names or name in [known.replace("_", "") for known in names]:
            return arch
    known = ", ".join(ARCHS)
    raise ValueError(wrong("arch", f"one of {known}", repr(name), "name one of them"))


def arch_for(capability: tuple[int, int], gpu_name: str = "") -> Arch:
    """Return the architecture whose kernels run on a GPU.

    Args:
        capability: compute capability, (major, minor).
        gpu_name: what the driver calls the GPU, for the message only.

    Raises:
        UnsupportedGpuError: there are no kernels for this capability. The message names the
            GPU, its capability, the installed NVRTC and what is supported.

    >>> arch_for((8, 7)).name
    'sm_80'
    """
    for arch in ARCHS.values():
        if tuple(capability) in arch.capabilities:
            return arch
    gpu = f"GPU {gpu_name!r}" if gpu_name else "The GPU"
    nvrtc = toolchain.expected_version()
    supported = ", ".join(
        f"{major}.{minor} ({arch.name})"
        for arch in ARCHS.values()
        for major, minor in arch.capabilities
    )
    if tuple(capability) < min(pair for arch in ARCHS.values() for pair in arch.capabilities):
        advice = "The kernels need the bfloat16 tensor cores and asynchronous copies of 8.0"
    else:
        advice = "See whether a newer tessera-cupy has kernels for it"
    raise UnsupportedGpuError(
        f"{gpu} has compute capability {capability[0]}.{capability[1]}, for which there are no "
        f"kernels (NVRTC here: {nvrtc or 'version unknown'}). Supported: {supported}. {advice}; "
        "NumPy arrays run on the CPU meanwhile."
    )
