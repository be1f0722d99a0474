"""From a catalog entry to CUDA source: a few lines that instantiate one entry function."""

from __future__ import annotations

from pathlib import Path

from tessera_cupy._resources import kernels_dir
from tessera_cupy.kernels.catalog import TILE_KERNELS, KernelConfig

_TYPES = {"float16": "half_t", "bfloat16": "bf16_t"}


def source(config: KernelConfig) -> str:
    """The translation unit of one catalog entry.

    >>> from tessera_cupy.kernels.catalog import catalog
    >>> print(source(catalog("sm_80")[-1]))
    // merge_splits_bf16 for sm_80
    #include "merge_splits.cu"
    <BLANKLINE>
    TESSERA_MERGE_SPLITS(bf16_t, 8)
    <BLANKLINE>
    """
    file = "tiles" if config.kernel in TILE_KERNELS else config.kernel
    file = "mask_state" if config.kernel == "csr_columns" else file
    head = f'// {config.name} for {config.arch}\n#include "{file}.cu"\n\n'
    if config.kernel in TILE_KERNELS:
        entry = f"{head}TESSERA_{config.kernel.upper()}({config.warps})\n"
        if config.kernel != "tile_scan":
            return entry
        storage = f"TileScanStorage<{config.warps}>"
        return f"{entry}\n{_size_check(storage, config)}"
    if config.kernel == "csr_columns":
        return f"{head}TESSERA_CSR_COLUMNS({config.warps}, {config.min_ctas})\n"
    if config.kernel == "mask_state":
        form = f"k{config.features[0].capitalize()}"
        storage = f"MaskStateStorage<tessera::MaskFormat::{form}, {config.warps}>"
        return (
            f"{head}TESSERA_MASK_STATE({form}, {config.warps}, {config.min_ctas})\n\n"
            f"{_size_check(storage, config)}"
        )
    element = _TYPES[config.dtype]
    if config.kernel == "merge_splits":
        return f"{head}TESSERA_MERGE_SPLITS({element}, {config.warps})\n"
    if config.kernel == "attend_wgmma":
        shape = f"{config.head_dim}, {config.tile_q}, {config.tile_kv}"
        return (
            f"{head}TESSERA_ATTEND_WGMMA({element}, {shape})\n\n"
            f"using Config = tessera::WgmmaConfig<tessera::{element}, {shape}>;\n"
            f"{_size_check('WgmmaStorage<Config>', config)}"
        )
    sizes = (config.head_dim, config.tile_q, config.tile_kv, config.warps, config.stages)
    shape = ", ".join(map(str, sizes)) + (", true" if config.bits else ", false")
    return (
        f"{head}TESSERA_ATTEND_MMA({element}, {shape}, {config.min_ctas})\n\n"
        f"using Config = tessera::AttendConfig<tessera::{element}, {shape}>;\n"
        f"{_size_check('SharedStorage<Config>', config)}"
    )


def _size_check(storage: str, config: KernelConfig) -> str:
    return (
        f"static_assert(sizeof(tessera::{storage}) == {config.smem_bytes},\n"
        f'              "the catalog\'s smem_bytes is not the size of {storage}");\n'
    )


def read_sources(folder: Path | None = None) -> dict[str, bytes]:
    """Read the CUDA sources, by the name that they include each other with.

    Args:
        folder: None means the package's own.

    Returns:
        Contents by path relative to the folder, such as ``"common/ptx.cuh"``, sorted.
    """
    folder = folder or kernels_dir()
    paths = sorted(path for path in folder.rglob("*.cu*") if path.suffix in (".cu", ".cuh"))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
