"""The catalog: every kernel that exists, as frozen configurations with one line of why."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from tessera_cupy.errors import wrong
from tessera_cupy.kernels.arch import SMEM_RESERVED, Arch, get_arch

#: Element types, and how kernel names abbreviate them.
DTYPES = {"float16": "fp16", "bfloat16": "bf16"}
#: Largest head dim of any kernel.
MAX_HEAD_DIM = 256
#: Entry function of each kernel.
ENTRIES = {"attend_mma": "attend", "attend_wgmma": "attend", "merge_splits": "merge_splits"}
#: Kernels that build tiles on the GPU, in launch order.
TILE_KERNELS = ("tile_counts", "tile_scan", "tile_fragments")
#: The same where the columns of the mask are single keys, which are gathered.
SLICE_KERNELS = ("slice_counts", "tile_scan", "slice_fragments")
#: Element types of kernels over tokens that are no attention, as their names and features say them.
ELEMENTS = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
#: How ``mask_state`` may find a mask in GPU memory; the first feature of an entry.
MASK_FORMATS = ("dense", "packed", "lists", "csr")


@dataclass(frozen=True)
class KernelConfig:
    """One specialisation of a kernel for one architecture.

    Attributes:
        arch: architecture name, such as ``"sm_90a"``.
        kernel: the source file's name: ``"attend_mma"``, ``"attend_wgmma"``, ``"merge_splits"``,
            ``"mask_state"``, ``"csr_columns"``, ``"ragged_blocks"``, one of
            :data:`TILE_KERNELS`, :data:`SLICE_KERNELS` or :data:`TOKEN_KERNELS`.
        head_dim: largest head dim that it serves; the rest of a shorter row is zero-filled. 0 for
            kernels that read no Q, K or V.
        dtype: ``"float16"`` or ``"bfloat16"``; empty for kernels that read no Q, K or V.
        tile_q, tile_kv: query rows and KV columns of a physical tile; 0 where none is computed.
        warps: warps of one CTA.
        stages: K and V stages in shared memory.
        min_ctas: CTAs that fit on one multiprocessor together; bounds the registers.
        features: ``("bits",)`` when it reads token bits; ``("twins",)`` when pairs of CTAs share
            the loads of equal lists; ``("gather",)`` when rows of a fragment may lie anywhere;
            ``"timed"`` last, when it keeps time of its tasks (:func:`timed`); for
            ``mask_state`` one of :data:`MASK_FORMATS`, and ``"long"`` where rows are built 65,536
            columns at a time; for a kernel over tokens one of :data:`ELEMENTS`, if it reads any;
            else empty.
        why: the reason for this shape.
    """

    arch: str
    kernel: str
    head_dim: int
    dtype: str
    tile_q: int
    tile_kv: int
    warps: int
    stages: int
    min_ctas: int
    features: tuple[str, ...]
    why: str

    @property
    def name(self) -> str:
        """Readable name, unique within the architecture.

        >>> find("sm_90a", "attend_mma", "bfloat16", 80, 64, 64, bits=True).name
        'attend_mma_bf16_d96_q64k64w4_bits'
        """
        if not self.dtype:
            return "_".join((self.kernel, *self.features))
        if self.kernel == "merge_splits":
            return f"{self.kernel}_{DTYPES[self.dtype]}"
        stages = f"s{self.stages}" if self.stages > 1 else ""
        parts = (
            self.kernel,
            DTYPES[self.dtype],
            f"d{self.head_dim}",
            f"q{self.tile_q}k{self.tile_kv}w{self.warps}{stages}",
            *self.features,
        )
        return "_".join(parts)

    @property
    def entry(self) -> str:
        """Name of the entry function in the cubin."""
        return ENTRIES.get(self.kernel, self.kernel)

    @property
    def attends(self) -> bool:
        """Whether it computes attention, and is no helper of such a kernel."""
        return self.kernel.startswith("attend")

    @property
    def bits(self) -> bool:
        """Whether the kernel reads token bits of partial blocks."""
        return "bits" in self.features

    @property
    def gather(self) -> bool:
        """Whether the rows of a fragment may lie anywhere."""
        return "gather" in self.features

    @property
    def twins(self) -> bool:
        """Whether pairs of CTAs load the steps of equal lists for each other."""
        return "twins" in self.features

    @property
    def timed(self) -> bool:
        """Whether it writes down when and where its tasks run."""
        return "timed" in self.features

    @property
    def time_parts(self) -> int:
        """Parts of a CTA whose times a timed entry keeps: warpgroups that go at their own pace."""
        return self.tile_q // 64 if self.kernel == "attend_wgmma" else 1

    @property
    def rows_together(self) -> int:
        """Rows of a tile that are multiplied together: a warpgroup's or a warp's.

        >>> find("sm_80", "attend_mma", "bfloat16", 128, 128, 64, bits=False).rows_together
        32
        """
        return 64 if self.kernel == "attend_wgmma" else self.tile_q // self.warps

    @property
    def q_in_registers(self) -> bool:
        """Whether a warp of attend_mma keeps its Q beside O and S, and reads it once."""
        return _q_in_registers(self.head_dim, self.tile_q, self.warps)

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of one CTA, bytes."""
        if self.kernel in _TILE_SMEM:
            return _TILE_SMEM[self.kernel](self.warps)
        if self.kernel == "mask_state":
            return _mask_state_smem(self.warps, self.features)
        if self.kernel == "keep_keys":
            return get_arch(self.arch).smem_block  # a row of any length that there is room for
        if not self.attends:
            return 0
        if self.kernel == "attend_wgmma":
            return _wgmma_smem(self.head_dim, self.tile_q, self.tile_kv, self.stages)
        return _attend_smem(
            self.head_dim, self.tile_q, self.tile_kv, self.warps, self.stages, self.bits
        )

    @property
    def needs_carveout(self) -> bool:
        """Whether several CTAs fit only if a multiprocessor gives all that it can to shared memory.

        >>> builder("sm_90a", "keep_keys").needs_carveout
        True
        """
        return self.kernel in ("keep_keys", "column_sums")

    def serves(self, head_dim: int) -> bool:
        """Whether requests of this head dim can use it."""
        if self.kernel == "attend_wgmma":
            return self.head_dim - 64 < head_dim <= self.head_dim
        return head_dim <= self.head_dim

    def ctas_per_sm(self, arch: Arch) -> int:
        """CTAs that run on one multiprocessor of ``arch`` at a time."""
        return min(self.min_ctas, arch.smem_sm // (self.smem_bytes + SMEM_RESERVED))


def _q_in_registers(head_dim: int, tile_q: int, warps: int) -> bool:
    return tile_q == 16 * warps and head_dim <= 128


def _attend_smem(
    head_dim: int, tile_q: int, tile_kv: int, warps: int, stages: int, bits: bool
) -> int:
    """Size of ``SharedStorage`` in attend_mma.cu; each specialisation asserts that it is."""
    q = tile_q * head_dim * 2
    kv = tile_kv * head_dim * 2
    q_shares_v = _q_in_registers(head_dim, tile_q, warps) and stages == 1 and q <= kv
    groups = tile_kv // 8
    table = 4 * tile_kv + 4 * groups + 2 * 4 * (groups if bits else 1)
    size = 2 * kv * stages + (0 if q_shares_v else q)
    size += 2 * stages * _align(table, 16)
    size += 2 * 8 * groups + 2 * 4 * (groups if bits else 1)  # fragments and their bits
    size = _align(size, 8) + 64 + 4 * warps  # TaskState and members
    return _align(size, 1024)


def _wgmma_smem(head_dim: int, tile_q: int, tile_kv: int, stages: int) -> int:
    """Size of ``WgmmaStorage`` in attend_wgmma.cu; each specialisation asserts that it is."""
    tiles = (tile_q + 2 * stages * tile_kv) * head_dim * 2
    warpgroups = tile_q // 64
    sets = 2**warpgroups - 1
    barriers = 2 * warpgroups + 2 * (sets + warpgroups + 1) * stages
    return _align(tiles + 8 * barriers + 4, 1024)


def _mask_state_smem(warps: int, features: tuple[str, ...]) -> int:
    """Size of ``MaskStateStorage`` in mask_state.cu; each specialisation asserts that it is."""
    listed = 8192 if "long" in features else 1024
    row = listed if features[0] in ("lists", "csr") else 0
    return (row + 24) * warps


def _align(size: int, to: int) -> int:
    return -(-size // to) * to


_TILE_SMEM: dict[str, Callable[[int], int]] = {
    # TileScanStorage: 256 buckets a warp, in whose place 4096 turns fit; the buckets of 2048
    # lengths; two sums and seven numbers a warp; ten numbers.
    "tile_scan": lambda warps: max(4 * 256 * warps, 8 * 4096) + 2048 + 44 * warps + 40,
    # 1024 entries of 16 bits a warp.
    "tile_fragments": lambda warps: 2048 * warps,
    "slice_fragments": lambda warps: 2048 * warps,
    # NearestStorage: two stages of 192 rows of 256 bytes, three of 128, a float each of these; ten
    # barriers, and what aligns the whole.
    "kmeans_assign_wgmma": lambda _: _align((2 * 192 + 3 * 128) * 256 + 3 * 512 + 80, 1024),
    # KeyBoundsStorage: 192 rows of 256 bytes, four stages of 128 and a float each of these; ten
    # barriers, and what aligns the whole.
    "key_bounds_wgmma": lambda _: _align((192 + 4 * 128) * 256 + 4 * 512 + 80, 1024),
    # ColumnSumsStorage: two stages of 16 KB, sums of four warps and places for two of 64 keys, a
    # flag; 48 KB of queries.
    "column_sums": lambda _: _align(2 * 16384 + 2 * 5 * 256 + 16 + 48 * 1024, 1024),
    # RaggedStorage: a sum a warp, and four numbers.
    "ragged_blocks": lambda warps: 8 * warps + 32,
}


_LARGE = ("sm_90a", "sm_100a")  # 227 KB of shared memory a CTA
_SMALL = ("sm_86", "sm_89", "sm_120a")  # 99 KB
_ALL = ("sm_80", *_LARGE, *_SMALL)


class _Row(NamedTuple):
    """A shape of attend_mma for some architectures, both dtypes, of each of :data:`_FEATURES`.

    ``ctas`` is what the registers allow, without and with token bits; shared memory may lower
    it on an architecture.
    """

    archs: tuple[str, ...]
    head_dim: int
    tile_q: int
    tile_kv: int
    warps: int
    stages: int
    ctas: tuple[int, int]
    why: str


#: Features of attend_mma's entries, and what they add to the reason for the shape.
_FEATURES: dict[tuple[str, ...], str] = {
    (): "",
    ("bits",): "",
    ("gather",): "; single rows are looked up a step ahead, beside the copies",
}
_WHY_64 = "blocks of 64 rows and less; Q, S and O in registers, Q's place goes to V"
_WHY_128 = "32 rows a warp: each K and V fragment read feeds two products"
_ROWS = (
    _Row(_ALL, 64, 64, 64, 4, 1, (3, 3), _WHY_64),
    _Row(_ALL, 64, 128, 64, 4, 1, (2, 2), _WHY_128),
    _Row(
        ("sm_80", "sm_90a"),
        64,
        128,
        128,
        4,
        1,
        (2, 2),
        f"{_WHY_128}; half the barriers of 64 columns",
    ),
    _Row(_ALL, 96, 64, 64, 4, 1, (3, 3), _WHY_64),
    _Row(_ALL, 96, 128, 64, 4, 1, (2, 2), _WHY_128),
    _Row(("sm_80", "sm_90a"), 128, 64, 64, 4, 1, (3, 2), _WHY_64),
    _Row(("sm_100a", *_SMALL), 128, 64, 64, 4, 1, (2, 2), f"{_WHY_64}; a third CTA would spill"),
    _Row(("sm_80",), 128, 128, 64, 4, 1, (2, 2), _WHY_128),
    _Row(_LARGE, 128, 128, 64, 4, 2, (2, 2), f"{_WHY_128}; one barrier a step"),
    _Row(_SMALL, 128, 128, 32, 4, 1, (2, 2), f"{_WHY_128}; 32 columns let two CTAs fit"),
    _Row(_ALL, 256, 64, 32, 4, 1, (2, 2), "O takes half of the registers, so S has 32 columns"),
)
_WGMMA_WHY = (
    "two warpgroups of 64 rows at the full matrix rate; as many columns as registers and shared "
    "memory hold, so that the fixed cost of a step is spread over the most work"
)
_WGMMA_WHY_DEEP = (
    "two warpgroups of 64 rows; steps that are shorter leave room for a third stage and registers "
    "for eight warps that gather"
)
_WGMMA_WHY_3 = "three warpgroups of 64 rows, which a short head dim leaves registers for"
#: Head dim, tile rows, tile columns, stages, the features that there are.
_WGMMA_ROWS = (
    (64, 128, 192, 2, ("", "twins", "bits", "gather"), _WGMMA_WHY),
    (128, 128, 192, 2, ("", "twins", "bits", "gather"), _WGMMA_WHY),
    (64, 128, 128, 3, ("gather",), _WGMMA_WHY_DEEP),
    (128, 128, 128, 3, ("gather",), _WGMMA_WHY_DEEP),
    (64, 192, 128, 2, ("", "twins"), _WGMMA_WHY_3),
)
_WGMMA_FEATURE_WHY = {
    "twins": "; two CTAs with equal lists load each half for both",
    "bits": "; token bits cost registers, so they have an entry of their own",
    "gather": "; copying single rows takes registers and arrivals of all lanes",
}
_TILE_WARPS = {"tile_counts": 8, "tile_scan": 32, "tile_fragments": 4}
_TILE_WHY = {
    "tile_counts": "a warp a tile: a lane counts the bits of one word of the bitmap at a time",
    "tile_scan": "one CTA with all warps that it may have: the sums and the order of all tiles",
    "tile_fragments": "a warp a tile, few warps a CTA, as lists differ in length",
}
_SLICE_WARPS = {"slice_counts": 8, "slice_fragments": 4}
_SLICE_WHY = {
    "slice_counts": "a warp a tile: a lane counts the keys of one word of the bitmap at a time",
    "slice_fragments": "a warp a tile, few warps a CTA: neighbouring lanes write neighbouring keys",
}
_MASK_STATE_WARPS = 16
_LONG_ROW_WARPS = 8
_LONG_ROW_WHY = "; rows of 65,536 columns in one pass, eight columns of a lane in flight"
_MASK_STATE_WHY = {
    "dense": "a warp a row, and as many warps as a multiprocessor has: the mask is read once",
    "packed": "a warp a row; a word of the mask is a word of the bitmap, shifted",
    "lists": "a warp a row, built in shared memory from columns in any order",
    "csr": "as for padded lists; rows begin at offsets",
}
_RAGGED_BLOCKS_WARPS = 8
_RAGGED_BLOCKS_WHY = (
    "a warp eight rows, so that few read the sizes again; a CTA the starts of a head"
)
_CSR_COLUMNS_WHY = "a warp a row, a lane a word: neighbouring lanes write neighbouring columns"


class TokenKernel(NamedTuple):
    """A kernel that moves, pools or scores tokens: the same shape for every architecture it has.

    Attributes:
        elements: of :data:`ELEMENTS`, those that it reads; none if it reads no tokens.
        warps: warps of one CTA.
        min_ctas: CTAs that fit on one multiprocessor together.
        why: the reason for this shape.
        archs: those that it is for.
    """

    elements: tuple[str, ...]
    warps: int
    min_ctas: int
    why: str
    archs: tuple[str, ...] = _ALL


#: Kernels around the attention, by the name of their source: orders, and the rules of sparsifiers.
TOKEN_KERNELS: dict[str, TokenKernel] = {
    "alike_rows": TokenKernel((), 8, 4, "a warp a row, which goes over it twice"),
    "alike_weights": TokenKernel((), 8, 1, "a thread a block: there is little to do"),
    "antidiagonal_scores": TokenKernel(
        ("fp16", "bf16"), 8, 2, "64 x 32 of a product a warp; the other CTA computes at a barrier"
    ),
    "antidiagonal_sums": TokenKernel((), 8, 4, "a warp a row of logarithms, of 8 or 16 rows"),
    "centre_tokens": TokenKernel(("fp16", "bf16"), 8, 4, "16 bytes a thread, as far as they go"),
    "cluster_pieces": TokenKernel((), 8, 1, "a CTA a head, as its sums run over all clusters"),
    "expand_pieces": TokenKernel((), 8, 4, "a CTA a row of the mask; four bytes a thread"),
    "directions": TokenKernel((), 16, 1, "a CTA a head, as its keys are summed: little to read"),
    "head_mean": TokenKernel((), 16, 1, "a CTA a head, with many warps that each read few blocks"),
    "kmeans_assign": TokenKernel(
        ("fp16", "bf16"), 8, 2, "64 x 32 of a product a warp, and the bests of its rows beside it"
    ),
    "kmeans_line": TokenKernel(
        (), 16, 1, "a CTA a head, as its sums run over all centroids: once a selection"
    ),
    "kmeans_assign_wgmma": TokenKernel(
        ("fp16", "bf16"),
        13,
        1,
        "three warpgroups of 64 tokens, which take turns at comparing, and a warp that copies",
        ("sm_90a",),
    ),
    "kmeans_means": TokenKernel(
        ("fp16", "bf16"), 8, 4, "a CTA a cluster, as clusters differ in size"
    ),
    "kmeans_counts": TokenKernel(
        (), 16, 2, "a CTA a part of a head, as many as multiprocessors at the usual lengths"
    ),
    "kmeans_order": TokenKernel(
        (), 16, 2, "as kmeans_counts; the labels' counts of 16 warps fill its shared memory"
    ),
    "permute_tokens": TokenKernel(
        (), 8, 4, "rows as bytes, of any dtype; four CTAs have twice as much in flight as HBM needs"
    ),
    "pool_blocks": TokenKernel(
        ("fp16", "bf16", "fp32"),
        8,
        3,
        "a warp a block: eight rows in flight, and as many warps as their registers allow",
    ),
    "choose_order": TokenKernel((), 8, 1, "a CTA a head, a warp a candidate: little to read"),
    "block_scores": TokenKernel(
        (), 4, 3, "8 x 8 products a thread: 64 multiply-adds for four reads of shared memory"
    ),
    "block_products": TokenKernel((), 8, 2, "64 x 32 of a product a warp, as three of tf32 parts"),
    "extreme_scores": TokenKernel(
        ("fp16", "bf16"), 8, 2, "128 x 128 products of 16-bit extremes, two of them a score"
    ),
    "keep_top": TokenKernel((), 8, 3, "a warp a row, or a CTA a long one; keys in registers"),
    "query_balls": TokenKernel(
        ("fp16", "bf16"), 4, 8, "a CTA a ball, whose queries it reads again from L1"
    ),
    "key_bounds": TokenKernel(
        ("fp16", "bf16"), 8, 2, "64 x 32 of a product a warp; bounds leave in whole lines"
    ),
    "key_bounds_wgmma": TokenKernel(
        ("fp16", "bf16"),
        13,
        1,
        "three warpgroups of 64 parts, past which keys go; one writes as the others multiply",
        ("sm_90a",),
    ),
    "column_sums": TokenKernel(
        ("fp16", "bf16"),
        4,
        1,
        "48 queries a warp, in registers: a fragment of keys feeds three products; two CTAs "
        "fit where rows have at most 128 channels",
    ),
    "keep_keys": TokenKernel(
        (), 8, 1, "a CTA a row, in shared memory; two of 57,600 keys fit where there are 228 KB"
    ),
    "keep_mass": TokenKernel((), 8, 3, "as keep_top; each step sums instead of counting"),
    "route_heads": TokenKernel(
        ("fp16", "bf16"), 16, 1, "a CTA a head: as many warps as have registers for all classes"
    ),
    "route_tasks": TokenKernel((), 8, 4, "a CTA a head, a thread a task; the lists are short"),
}
_MERGE_WARPS = 8
_MERGE_WHY = "one warp a row, any head dim; the work is a few reads of the workspace"


def _builder(
    arch: str, kernel: str, warps: int, ctas: int, features: tuple[str, ...], why: str
) -> KernelConfig:
    """An entry of a kernel that reads no Q, K or V."""
    return KernelConfig(arch, kernel, 0, "", 0, 0, warps, 1, ctas, features, why)


@cache
def catalog(arch: str) -> tuple[KernelConfig, ...]:
    """Every kernel of an architecture, in a fixed order.

    Raises:
        ValueError: an unknown architecture.
    """
    target = get_arch(arch)
    configs = []
    for row in _ROWS:
        if target.name not in row.archs:
            continue
        for dtype in DTYPES:
            for features, more in _FEATURES.items():
                bits = "bits" in features
                shape = (row.head_dim, row.tile_q, row.tile_kv, row.warps, row.stages)
                smem = _attend_smem(*shape, bits)
                configs.append(
                    KernelConfig(
                        arch=target.name,
                        kernel="attend_mma",
                        head_dim=row.head_dim,
                        dtype=dtype,
                        tile_q=row.tile_q,
                        tile_kv=row.tile_kv,
                        warps=row.warps,
                        stages=row.stages,
                        min_ctas=min(row.ctas[bits], target.smem_sm // (smem + SMEM_RESERVED)),
                        features=features,
                        why=row.why + more,
                    )
                )
    wgmma_rows = _WGMMA_ROWS if target.name == "sm_90a" else ()
    for head_dim, tile_q, tile_kv, stages, features, why in wgmma_rows:
        for dtype in DTYPES:
            configs += [
                KernelConfig(
                    target.name,
                    "attend_wgmma",
                    head_dim,
                    dtype,
                    tile_q=tile_q,
                    tile_kv=tile_kv,
                    warps=(8 if stages == 3 else 4) + tile_q // 16,
                    stages=stages,
                    min_ctas=1,
                    features=(feature,) if feature else (),
                    why=why + _WGMMA_FEATURE_WHY.get(feature, ""),
                )
                for feature in features
            ]
    configs += [
        _builder(target.name, kernel, _TILE_WARPS[kernel], 1, features, why + _TILE_WHY[kernel])
        for features, why in (((), ""), (("ragged",), "blocks with sizes of their own; "))
        for kernel in TILE_KERNELS
    ]
    ctas = 3 if target.name in _SMALL else 4  # 48 or 64 warps
    for form in MASK_FORMATS:
        # Columns and offsets of either width would spill with 32 registers.
        form_ctas = 3 if form in ("lists", "csr") else ctas
        why = _MASK_STATE_WHY[form]
        configs.append(
            _builder(target.name, "mask_state", _MASK_STATE_WARPS, form_ctas, (form,), why)
        )
        if form in ("lists", "csr"):
            # Shared memory for rows of 8 KB.
            smem = _mask_state_smem(_LONG_ROW_WARPS, (form, "long"))
            long_ctas = target.smem_sm // (smem + SMEM_RESERVED)
            configs.append(
                _builder(
                    target.name,
                    "mask_state",
                    _LONG_ROW_WARPS,
                    long_ctas,
                    (form, "long"),
                    why + _LONG_ROW_WHY,
                )
            )
    configs += [
        _builder(target.name, kernel, warps, 1, (), _SLICE_WHY[kernel])
        for kernel, warps in _SLICE_WARPS.items()
    ]
    configs.append(
        _builder(target.name, "csr_columns", _MASK_STATE_WARPS, ctas, (), _CSR_COLUMNS_WHY)
    )
    why = _RAGGED_BLOCKS_WHY
    configs.append(_builder(target.name, "ragged_blocks", _RAGGED_BLOCKS_WARPS, 1, (), why))
    for kernel, of in TOKEN_KERNELS.items():
        if target.name not in of.archs:
            continue
        for element in of.elements or ("",):
            read = (element,) if element else ()
            configs.append(_builder(target.name, kernel, of.warps, of.min_ctas, read, of.why))
    for dtype in DTYPES:
        configs.append(
            KernelConfig(
                target.name,
                "merge_splits",
                MAX_HEAD_DIM,
                dtype,
                tile_q=0,
                tile_kv=0,
                warps=_MERGE_WARPS,
                stages=1,
                min_ctas=1,
                features=(),
                why=_MERGE_WHY,
            )
        )
    return tuple(configs)


def find(
    arch: str,
    kernel: str,
    dtype: str,
    head_dim: int,
    tile_q: int,
    tile_kv: int,
    bits: bool,
    gather: bool = False,
) -> KernelConfig | None:
    """The entry that serves these sizes: the one of the smallest head dim that suffices.

    Args:
        arch: architecture name.
        kernel: kernel name.
        dtype: ``"float16"`` or ``"bfloat16"``.
        head_dim: head dim of the request.
        tile_q: query rows of the physical tile, exact.
        tile_kv: its KV columns, exact.
        bits: whether token bits must be read.
        gather: whether single rows must be gathered.

    Returns:
        None when the catalog has no such entry.
    """
    fitting = [
        config
        for config in catalog(arch)
        if (config.kernel, config.dtype, config.bits) == (kernel, dtype, bits)
        and config.gather == gather
        and not config.twins
        and (config.tile_q, config.tile_kv) == (tile_q, tile_kv)
        and config.serves(head_dim)
    ]
    return min(fitting, key=lambda config: config.head_dim, default=None)


@cache
def merge_for(config: KernelConfig) -> KernelConfig:
    """The ``merge_splits`` entry that combines an attention kernel's split parts."""
    for other in catalog(config.arch):
        if (other.kernel, other.dtype) == ("merge_splits", config.dtype):
            return other
    known = ", ".join(DTYPES)
    raise ValueError(wrong("config.dtype", f"one of {known}", config.dtype, "use a catalog entry"))


@cache
def twin_of(config: KernelConfig) -> KernelConfig | None:
    """The entry of the same shape for plans in which tasks are twins, if there is one.

    There is none for an entry with features: it would lack them.
    """
    if config.features:
        return None
    twins = replace(config, features=("twins",), why="")
    for other in catalog(config.arch):
        if replace(other, why="") == twins:
            return other
    return None


@cache
def timed(config: KernelConfig) -> KernelConfig:
    """The entry that also keeps time of its tasks, which no catalog lists: it is built on demand.

    >>> timed(find("sm_80", "attend_mma", "float16", 64, 64, 64, bits=True)).name
    'attend_mma_fp16_d64_q64k64w4_bits_timed'
    """
    assert config.attends
    why = f"{config.why}; when and where tasks run, for Plan.timeline()"
    return replace(config, features=(*config.features, "timed"), why=why)


@cache
def builder(arch: str, name: str) -> KernelConfig:
    """The entry with this name of a kernel that is no attention and merges none.

    >>> builder("sm_90", "mask_state_csr").features
    ('csr',)
    """
    return next(config for config in catalog(arch) if not config.dtype and config.name == name)


def why_not(config: KernelConfig, smem_block: int) -> str | None:
    """Why a kernel cannot run where a CTA may use this much shared memory, or None.

    Args:
        config: the entry.
        smem_block: bytes that the device allows one CTA (:attr:`Arch.smem_block`).

    >>> why_not(catalog("sm_90a")[0], 16 * 1024)
    '17408 bytes of shared memory a CTA are needed, the device allows 16384'
    """
    if config.smem_bytes > smem_block:
        return (
            f"{config.smem_bytes} bytes of shared memory a CTA are needed, "
            f"the device allows {smem_block}"
        )
    return None


def fingerprint(arch: str) -> str:
    """Short digest of an architecture's attention kernels; changes when any one's shape does.

    A profile table carries it, so that one measured on other kernels is noticed.
    """
    attending = (config for config in catalog(arch) if config.dtype)
    shapes = sorted((config.name, config.min_ctas, config.smem_bytes) for config in attending)
    return hashlib.sha256(repr(shapes).encode()).hexdigest()[:12]
