"""Times that were measured on an H200, and what their plans had it do.

The times are those of README.md ("Measured") and kernels_cu/NOTES.md; bfloat16, 2026-11-29 and
-30. What the tasks of each plan do, as ``count_work`` counts it, is kept in ``calibration.npz``:
masks from video take a minute to make, and the package ``av``. Make it anew, where mapping or
organization change, with::

    python -m tests.cost.calibration
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy import ArraySpec, make_plan
from tessera_cupy.bench.corpus import Source, mask_of_bits, random_mask, spade_bits
from tessera_cupy.bench.families import FAMILIES
from tessera_cupy.bench.slices_cases import random_blocks, random_slices
from tessera_cupy.cost import GPUS, Prediction, Work
from tessera_cupy.cost.model import predict_work
from tessera_cupy.cost.work import count_work
from tessera_cupy.kernels import catalog
from tessera_cupy.masks import BlockMask, KeySlices
from tessera_cupy.plan import Plan
from tessera_cupy.regimes import PlanSpec
from tessera_cupy.request import Request
from tessera_cupy.video import VideoGrid

FILE = Path(__file__).with_suffix(".npz")


@dataclass(frozen=True)
class Point:
    """One measured time.

    Attributes:
        mask: SPADE's family (``"Q64K64"``), or ``"<blocks> <size> <density> <mask heads>"``.
        plan: mapping, for attend_wgmma at 128x192; else kernel, tile and mapping.
        tflops: measured, of active pairs.
        head_dim, heads, tokens: of the request.
    """

    mask: str
    plan: str
    tflops: float
    head_dim: int = 128
    heads: int = 8
    tokens: int = 57_600

    @property
    def name(self) -> str:
        return f"{self.mask} d{self.head_dim} {self.plan}"

    @property
    def kept(self) -> str:
        """Its name in the file; the head dim changes nothing."""
        return f"{self.mask} {self.plan}"

    @property
    def regime(self) -> str:
        kernel = "" if "/" in self.plan else "attend_wgmma/q128k192/"
        return f"{kernel}{self.plan}/longest+split"


def _families() -> Iterator[Point]:
    """``bench families --clip bikes``; regroup in a run of its own."""
    yield Point("blocks 128 1.0 8", "retain-pack", 682)
    yield Point("Q128K128", "retain-pack", 636)
    yield Point("Q128K64", "retain-pack", 635)
    for name, share, regroup in (
        ("Q64K64-HD", 577, 565),
        ("Q64K64", 585, 615),
        ("Q64K64-DD", 614, 635),
        ("Q64K32", 580, 605),
        ("Q32K32", 389, 462),
        ("Q32K16", 376, 449),
        ("Q16K16", 307, 375),
    ):
        yield Point(name, "share-pack", share)
        yield Point(name, "regroup-pack", regroup)


def _random() -> Iterator[Point]:
    """``bench attention``: attend_mma, and an earlier build of attend_wgmma."""
    for mask, rate, of_64, wgmma in (
        ("blocks 128 1.0 12", 383, 348, 656),
        ("blocks 128 0.1 12", 365, 331, 583),
        ("blocks 64 0.1 12", 310, 266, 489),
        ("blocks 32 0.1 12", 180, 140, 276),
        ("blocks 16 0.1 12", 97, 73, 164),
    ):
        wide = "128" in mask
        how = "retain-pack" if wide or "64" in mask else "merge-pack"
        tile = "q128k64" if wide else "q64k64"
        yield Point(mask, f"attend_mma/{tile}/{how}", rate, 128, 12, 32_768)
        tile = "q128k128" if wide else "q64k64"
        yield Point(mask, f"attend_mma/{tile}/{how}", of_64, 64, 12, 32_768)
        how = "retain-pack" if wide else "share-pack"
        yield Point(mask, how, wgmma, 128, 12, 32_768)


def _short_head_dim() -> Iterator[Point]:
    """``bench families --masks random --heads 24 --head-dim 64``; the second by CUDA events."""
    yield Point("blocks 128 1.0 24", "retain-pack", 485, 64, 24, 32_768)
    plan = "attend_wgmma/q192k128/merge-pack"
    yield Point("blocks 64 1.0 24", plan, 522, 64, 24, 32_768)
    yield Point("blocks 128 0.0991 24", "retain-pack", 422, 64, 24, 32_768)
    yield Point("blocks 64 0.1195 24", "share-pack", 395, 64, 24, 32_768)


def _slices() -> Iterator[Point]:
    """``bench slices``, random: one mask for all heads."""
    yield Point("blocks 128 0.1 1", "retain-pack", 601)
    yield Point("blocks 64 0.1 1", "share-pack", 513)
    yield Point("slices 128 0.1 1", "retain-gather", 545)
    yield Point("slices 64 0.1 1", "share-gather", 350)
    yield Point("slices 192 0.1 1", "split-gather", 411)


# attend_mma alone by CUDA events, random masks, 83 of 271 times: size, density and heads of a mask,
# tile and mapping, rates at head dims 128 and 64. 16,384 tokens, or 8,192 where heads are 4.
_MMA = """
128 0.1 8  q64k64/split-pack       305.9  246.1
128 0.1 8  q128k64/retain-pack     349.9  270.2
128 0.1 8  q128k128/retain-pack        -  304.4
128 0.1 8  q64k32/split-pack       118.9      -
64 0.1 8   q64k64/retain-pack      307.7  247.5
64 0.1 8   q128k64/retain-pack     188.6  146.9
64 0.1 8   q128k64/merge-pack      211.4  164.4
64 0.1 8   q128k64/share-pack      221.4  170.1
64 0.1 8   q128k128/merge-pack         -  150.8
64 0.1 8   q128k128/share-pack         -  181.8
32 0.1 8   q64k64/retain-pack      201.7  152.0
32 0.1 8   q64k64/merge-pack       174.0  132.8
32 0.1 8   q64k64/share-pack       209.9  162.3
32 0.1 8   q128k64/merge-pack      111.9   80.3
32 0.1 8   q128k64/share-pack      122.8   87.7
32 0.1 8   q128k128/retain-pack        -  113.1
32 0.1 8   q64k32/retain-pack       82.4      -
16 0.1 8   q64k64/retain-pack      126.9   89.2
16 0.1 8   q64k64/merge-pack        94.3   70.2
16 0.1 8   q64k64/share-pack       108.2   79.9
16 0.1 8   q128k64/retain-pack      68.2   48.6
16 0.1 8   q128k64/share-pack       67.5   45.6
16 0.1 8   q128k128/merge-pack         -   46.6
128 1.0 8  q64k64/split-pack       330.8  273.5
128 1.0 8  q128k64/retain-pack     384.4  295.9
128 1.0 8  q128k128/retain-pack        -  334.5
64 1.0 8   q64k64/retain-pack      328.3  273.7
64 1.0 8   q128k128/share-pack         -  335.2
32 1.0 8   q64k64/retain-pack      220.9  169.1
32 1.0 8   q64k64/merge-pack       328.1  273.2
64 0.3 8   q64k64/retain-pack      321.2  265.9
64 0.3 8   q128k64/share-pack      249.7  193.5
32 0.3 8   q64k64/share-pack       236.5  187.8
16 0.3 8   q64k64/share-pack       139.5  103.3
16 0.3 8   q128k64/merge-pack      107.3   76.8
128 0.03 8 q64k64/split-pack       259.0  198.1
128 0.03 8 q128k64/retain-pack     285.4  219.3
64 0.03 8  q64k64/retain-pack      258.2  199.4
64 0.03 8  q128k64/merge-pack      184.7  139.5
32 0.03 8  q64k64/share-pack       172.0  127.7
32 0.03 8  q128k128/share-pack         -   69.3
16 0.03 8  q128k64/share-pack       52.7   35.6
128 0.1 4  q64k64/split-split      217.7  174.2
128 0.1 4  q128k64/retain-split    323.3  245.7
32 0.1 4   q128k64/retain-merge     62.5   43.9
32 0.1 4   q64k32/retain-retain     76.3      -
16 0.1 4   q64k64/retain-merge      34.4   24.9
"""


def _mma() -> Iterator[Point]:
    for line in _MMA.split("\n")[1:-1]:
        size, density, heads, plan, *rates = line.split()
        mask = f"blocks {size} {density} {heads}"
        for head_dim, rate in zip((128, 64), rates, strict=True):
            if rate != "-":
                tokens = 2048 * int(heads)
                yield Point(mask, f"attend_mma/{plan}", float(rate), head_dim, int(heads), tokens)


POINTS = {p.name: p for p in (*_families(), *_random(), *_short_head_dim(), *_slices(), *_mma())}


@cache
def _kept() -> dict[str, Any]:
    with np.load(FILE) as file:
        return dict(file)


def measured_ms(point: Point) -> float:
    """The measured time, from the rate."""
    return 4 * point.head_dim * float(_kept()[f"{point.kept} pairs"]) / point.tflops / 1e9


def kept_work(point: Point) -> Work:
    """What each task of the plan does."""
    columns = _kept()[point.kept].astype(np.int64)
    parts = (len(columns) - 6) // 2
    head, steps, rows, gathered, is_part, twins = columns[:6]
    return Work(
        head=head,
        steps=steps,
        parts=columns[6 : 6 + parts].T,
        masked=columns[6 + parts :].T,
        rows=rows,
        gathered=gathered,
        is_part=is_part.astype(bool),
        twins=twins.astype(bool),
    )


def packed(work: Work) -> NDArray[np.uint16]:
    """(6 + twice the parts, N): what :func:`kept_work` reads."""
    of_tasks = (work.head, work.steps, work.rows, work.gathered, work.is_part, work.twins)
    columns = np.concatenate([np.stack(of_tasks), work.parts.T, work.masked.T])
    assert columns.max() < 2**16
    return columns.astype(np.uint16)


def prediction(point: Point) -> Prediction:
    """What the model says of it."""
    gpu, spec = GPUS["H200"], PlanSpec.parse(point.regime)
    config = catalog.find(
        gpu.arch,
        spec.kernel,
        "bfloat16",
        point.head_dim,
        spec.tile_q,
        spec.tile_kv,
        bits=False,
        gather="gather" in point.plan,
    )
    assert config is not None
    sizes = (1, point.heads, point.heads, point.tokens, point.tokens, point.head_dim)
    request = Request(gpu.limits, *sizes, "bfloat16", "BHSD")
    return predict_work(kept_work(point), config, request, gpu)


def planned(point: Point, mask: BlockMask | KeySlices) -> Plan:
    """The plan of a point."""
    shape = (1, point.heads, point.tokens, point.head_dim)
    return make_plan(mask, ArraySpec(shape, "bfloat16"), regime=point.regime, arch="sm_90a")


def drawn(point: Point) -> BlockMask | KeySlices:
    """The mask of a point whose mask is random."""
    kind, size, density, heads = point.mask.split()
    rng = np.random.default_rng(0)
    if heads != "1":
        block = (int(size), int(size))
        return random_mask(block, float(density), int(heads), point.tokens, rng)
    draw = random_slices if kind == "slices" else random_blocks
    return draw(point.tokens, int(size), float(density), rng)


def _make() -> None:
    source = Source("bikes", VideoGrid(16, 45, 80), heads=8, head_dim=128)
    families = {family.name: family for family in FAMILIES}
    wanted = [families[mask] for mask in {p.mask for p in POINTS.values()} if mask in families]
    bits = spade_bits(source, wanted, lambda: None)
    arrays: dict[str, Any] = {}
    for point in POINTS.values():
        family = families.get(point.mask)
        if family is None:
            mask = drawn(point)
        else:
            mask = mask_of_bits(family, bits[family.name], point.tokens)
        plan = planned(point, mask)
        shared = point.heads // (plan.mask.batch * plan.mask.heads)
        arrays[f"{point.kept} pairs"] = np.int64(plan.mask.active_pairs() * shared)
        arrays[point.kept] = packed(count_work(plan.tiles(), plan.tasks(), plan.config))
    np.savez_compressed(FILE, **arrays)


if __name__ == "__main__":
    _make()
