"""From a catalog entry to CUDA source: a few lines that instantiate one entry function."""

from __future__ import annotations

from pathlib import Path

from tessera_cupy._resources import kernels_dir
from tessera_cupy.kernels.catalog import ELEMENTS, TILE_KERNELS, TOKEN_KERNELS, KernelConfig

#: What the shared memory of a builder is.
_STORAGE = {
    "tile_scan": "TileScanStorage",
    "ragged_blocks": "RaggedStorage",
    "kmeans_assign_wgmma": "NearestStorage",
    "key_bounds_wgmma": "KeyBoundsStorage",
    "column_sums": "ColumnSumsStorage",
}
_TYPES = {"float16": "half_t", "bfloat16": "bf16_t", "float32": "float"}


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
    arguments, storage = _instance(config)
    text = f'// {config.name} for {config.arch}\n#include "{config.kernel}.cu"\n\n'
    text += f"TESSERA_{config.kernel.upper()}{'_TIMED' if config.timed else ''}({arguments})\n"
    if not storage:
        return text
    if storage.endswith("<Config>"):
        family = "WgmmaConfig" if config.kernel == "attend_wgmma" else "AttendConfig"
        shape = arguments if config.kernel == "attend_wgmma" else arguments.rpartition(", ")[0]
        text += f"\nusing Config = tessera::{family}<tessera::{shape}>;"
    return f"{text}\n{_size_check(storage, config)}"


def _instance(config: KernelConfig) -> tuple[str, str]:
    """Arguments of the entry's macro; the type whose size the catalog states, or nothing."""
    warps, ctas = config.warps, config.min_ctas
    if config.kernel == "mask_state":
        form = f"k{config.features[0].capitalize()}"
        long = "true" if "long" in config.features else "false"
        storage = f"MaskStateStorage<tessera::MaskFormat::{form}, {warps}, {long}>"
        return f"{form}, {warps}, {ctas}, {long}", storage
    if config.kernel == "csr_columns":
        return f"{warps}, {ctas}", ""
    if config.kernel in TOKEN_KERNELS:
        elements = [_TYPES[ELEMENTS[feature]] for feature in config.features]
        return ", ".join(map(str, (*elements, warps, ctas))), _STORAGE.get(config.kernel, "")
    if not config.dtype:
        shared = _STORAGE.get(config.kernel)
        arguments = str(warps)
        if config.kernel in TILE_KERNELS:
            arguments += ", true" if "ragged" in config.features else ", false"
        return arguments, f"{shared}<{warps}>" if shared else ""
    element = _TYPES[config.dtype]
    if config.kernel == "merge_splits":
        return f"{element}, {warps}", ""
    bits = "true" if config.bits else "false"
    gather = "true" if config.gather else "false"
    sizes: tuple[object, ...] = (config.head_dim, config.tile_q, config.tile_kv)
    if config.kernel == "attend_wgmma":
        twins = "true" if config.twins else "false"
        sizes = (element, *sizes, config.stages, twins, bits, gather)
        return ", ".join(map(str, sizes)), "WgmmaStorage<Config>"
    sizes = (element, *sizes, warps, config.stages, bits, gather, ctas)
    return ", ".join(map(str, sizes)), "SharedStorage<Config>"


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
