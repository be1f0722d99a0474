"""How even ranks are in time: the attention of each rank's heads, one rank after another, on a GPU.

What Ulysses gives each rank, without the exchanges around it. Heads are dealt by their counted
work, as they are in a call, and in equal numbers of neighbours beside that. All masks are on one
grid, of as many tokens as a GPU needs to be full with a rank's share of the heads. Parts of one
deal, and the other deal's, are timed in turns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy import interop
from tessera_cupy.attention import make_plan
from tessera_cupy.bench import clips, gpu
from tessera_cupy.bench.balance import checked_numbers, columns_of
from tessera_cupy.bench.corpus import NAMES, Source, samples_of
from tessera_cupy.bench.machine import machine
from tessera_cupy.bench.rules_times import bfloat16_bits
from tessera_cupy.bench.sheet import NONE, Sheet
from tessera_cupy.errors import MissingExtraError
from tessera_cupy.masks import BlockMask, KeySlices
from tessera_cupy.parallel.heads import Deal, balance, deal, even_deal, head_work, slices_work
from tessera_cupy.plan import Plan
from tessera_cupy.video import VideoGrid

#: Name of the table's markers.
NAME = "parallel-balance-measured"
#: Wan's, 81 frames at 480p.
GRID = VideoGrid(21, 30, 52)

_HEAD_DIM = 128
_WARM_UP, _RUNS, _RUN_MS = 1, 5, 4.0

Mask = BlockMask | KeySlices


def measure_balance(
    *,
    heads: Sequence[int],
    ranks: Sequence[int],
    clip: str,
    names: Sequence[str] = NAMES,
    grid: VideoGrid = GRID,
    on_mask: Callable[[str], None] = lambda name: None,
) -> dict[str, Any]:
    """Time each rank's part of each mask on the GPU here.

    Args:
        heads: numbers of heads.
        ranks: numbers of ranks.
        clip: one of :data:`tessera_cupy.bench.clips.CLIPS`.
        names: of :data:`tessera_cupy.bench.corpus.NAMES`.
        grid: of the tokens.
        on_mask: called with each name that is done.

    Returns:
        JSON-able: the machine, what was asked for, and in ``rows`` for each mask its name, density
        and ``cases``: heads, ranks, and of the heads ``dealt`` by work and ``even`` by count the
        ``work``, largest over mean, each rank's ``ms``, and the ``time``, largest over mean; or the
        ``reason`` why not.

    Raises:
        NoGpuError: there is none.
        MissingExtraError: scikit-video or av is not installed.
        ValueError: no heads or ranks.
    """
    checked_numbers(heads=heads, ranks=ranks)
    cupy = interop.import_cupy()
    source = Source(clip, grid, max(heads), _HEAD_DIM)
    features = cupy.asarray(clips.read_features(clip, grid))
    operands = _operands(max(heads), grid.tokens)
    rows = []
    for name in names:
        rows.append(_row(name, source, features, operands, heads, ranks))
        on_mask(name)
    return {
        **machine(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "heads": list(heads),
        "ranks": list(ranks),
        "clip": clip,
        "grid": str(grid),
        "tokens": grid.tokens,
        "rows": rows,
    }


def _operands(heads: int, tokens: int) -> list[Any]:
    """q, k and v on the GPU, (1, heads, tokens, d) bfloat16: normal, and the same in each head."""
    cupy, rng = interop.import_cupy(), np.random.default_rng(0)
    made = []
    for _ in range(3):
        bits = bfloat16_bits(rng.standard_normal((1, 1, tokens, _HEAD_DIM), np.float32))
        of_heads = cupy.repeat(cupy.asarray(bits), heads, axis=1)
        made.append(of_heads.view(interop.numpy_dtype("bfloat16")))
    return made


def _row(
    name: str,
    source: Source,
    features: Any,
    operands: Sequence[Any],
    heads: Sequence[int],
    ranks: Sequence[int],
) -> dict[str, Any]:
    try:
        masks = [
            sample.selection.mask
            for head in range(source.heads)
            for sample in samples_of(source, [name], head, features)
        ]
    except MissingExtraError as error:
        return {"mask": name, "reason": str(error)}
    parts = Parts([of_host(mask) for mask in masks], operands)
    cases = []
    for count in heads:
        for size in ranks:
            deals = {
                "dealt": deal(parts.work[:count], size),
                "even": even_deal(count, size),
            }
            cases.append({"heads": count, "ranks": size, **_times(parts, deals)})
    density = float(parts.work.mean()) / source.grid.tokens**2
    return {"mask": name, "density": density, "cases": cases}


def _times(parts: Parts, deals: Mapping[str, Deal]) -> dict[str, Any]:
    """Of each deal its work, the time of each rank, and how even both are."""
    calls = {
        f"{name} {rank}": parts.call(mine)
        for name, dealt in deals.items()
        for rank, mine in enumerate(dealt.q)
    }
    took = gpu.timings(calls, lambda: None, warm_up=_WARM_UP, runs=_RUNS, run_ms=_RUN_MS)
    found = {}
    for name, dealt in deals.items():
        ms = [took[f"{name} {rank}"].median for rank in range(len(dealt.q))]
        count = sum(map(len, dealt.q))
        found[name] = {
            "work": dealt.balance(parts.work[:count]),
            "ms": ms,
            "time": balance(np.array(ms)),
        }
    return found


def of_host(mask: Mask) -> Mask:
    """A mask of one head on the host; slices remain slices."""
    if isinstance(mask, BlockMask):
        return mask.on_host()
    return KeySlices(mask.group, mask.shape, 1, 1, mask.indptr, mask.indices)


@dataclass
class Parts:
    """The masks of single heads, of which each rank's is put together.

    Attributes:
        masks: of the heads, on the host.
        operands: q, k and v of as many heads on the GPU.
        work: pairs of tokens of each head.
    """

    masks: Sequence[Mask]
    operands: Sequence[Any]

    def __post_init__(self) -> None:
        self.work: NDArray[np.float64] = np.array([_work(mask) for mask in self.masks])
        self._plans: dict[tuple[int, ...], Plan] = {}
        self._uploaded: dict[int, Any] = {}
        # Heads with equal masks, such as those of a window, are planned once.
        known: dict[bytes, int] = {}
        self._kinds = [known.setdefault(_contents(mask), len(known)) for mask in self.masks]

    def call(self, heads: Sequence[int]) -> Callable[[], object]:
        """Attention of some heads."""
        arrays = [x[:, : len(heads)] for x in self.operands]
        kinds = tuple(sorted(self._kinds[head] for head in heads))
        if kinds not in self._plans:
            mask = self._joined([self._kinds.index(kind) for kind in kinds])
            self._plans[kinds] = make_plan(mask, *arrays)
        out = interop.import_cupy().empty_like(arrays[0])
        return partial(self._plans[kinds].run, *arrays, out=out)

    def _joined(self, heads: Sequence[int]) -> Mask:
        """The masks of heads as one, over arrays on the GPU unless there are token bits."""
        masks = [self.masks[head] for head in heads]
        if any(isinstance(mask, BlockMask) and mask.has_token_bits for mask in masks):
            return joined(masks)
        cupy = interop.import_cupy()
        for head in heads:
            if head not in self._uploaded:
                self._uploaded[head] = cupy.asarray(self.masks[head].indices)
        return joined(masks, cupy.concatenate([self._uploaded[head] for head in heads]))


def _work(mask: Mask) -> float:
    return float(slices_work(mask)[0] if isinstance(mask, KeySlices) else head_work(mask, 1)[0])


def _contents(mask: Mask) -> bytes:
    arrays = [mask.indptr, mask.indices]
    if isinstance(mask, BlockMask):
        arrays += [mask.partial, mask.token_bits]
        arrays += [x for x in (mask.q_block_sizes, mask.kv_block_sizes) if x is not None]
    made = hashlib.blake2b(digest_size=16)
    for array in arrays:
        made.update(np.ascontiguousarray(array).data)
    return made.digest()


def joined(masks: Sequence[Mask], indices: Any = None) -> Mask:
    """One mask of many heads from masks of one head on the host.

    Args:
        masks: of one geometry.
        indices: theirs, one behind the other, in GPU memory; the mask is then over them, and the
            GPU makes its plan. None takes the host's.

    >>> one = BlockMask.from_dense([[1, 0]], (16, 16))
    >>> two = BlockMask.from_dense([[1, 1]], (16, 16))
    >>> joined([one, two, one]).to_dense()[0, :, 0].astype(int).tolist()
    [[1, 0], [1, 1], [1, 0]]
    """
    first = masks[0]
    ends = np.cumsum([0, *(len(mask.indices) for mask in masks)])
    indptr: Any = np.concatenate(
        [[0], *(mask.indptr[1:] + end for mask, end in zip(masks, ends, strict=False))]
    ).astype(np.int64)
    if indices is None:
        indices = np.concatenate([mask.indices for mask in masks])
    else:
        indptr = interop.import_cupy().asarray(indptr)
    blocks = [mask for mask in masks if isinstance(mask, BlockMask)]
    if isinstance(first, KeySlices):
        return KeySlices.from_csr(indptr, indices, first.group, first.shape, heads=len(masks))
    more: dict[str, Any] = {
        name: np.concatenate([getattr(mask, name) for mask in blocks], axis=1)
        for name in ("q_block_sizes", "kv_block_sizes")
        if getattr(first, name) is not None
    }
    if any(mask.has_token_bits for mask in blocks):
        before = np.cumsum([0, *(len(mask.token_bits) for mask in blocks)])
        moved = [
            np.where(mask.partial >= 0, mask.partial + place, -1)
            for mask, place in zip(blocks, before, strict=False)
        ]
        more["partial"] = np.concatenate(moved)
        more["token_bits"] = np.concatenate([mask.token_bits for mask in blocks])
    return BlockMask.from_csr(
        indptr,
        indices,
        first.num_blocks,
        first.block_size,
        first.shape,
        heads=len(masks),
        **more,
    )


def measured_sheet(found: Mapping[str, Any]) -> Sheet:
    """The table: for each number of heads and ranks dealt by work, and split by count."""
    cases, columns = columns_of(found)
    rows = []
    for row in found["rows"]:
        if "reason" in row:
            rows.append([row["mask"], *[NONE] * (len(columns) - 1)])
            continue
        by_case = {(case["heads"], case["ranks"]): case for case in row["cases"]}
        cells = [
            f"{by_case[case]['dealt']['time']:.3f} ({by_case[case]['even']['time']:.3f})"
            for case in cases
        ]
        rows.append([row["mask"], f"{row['density']:.3f}", *cells])
    return Sheet(
        NAME,
        f"{found['gpu']}, {found['date']}: time of the slowest rank's attention over the mean, "
        "heads dealt by their work (and in equal numbers of neighbours), ranks one after another "
        f"on one GPU, {found['tokens']:,} tokens ({found['grid']}), head dim {_HEAD_DIM}, bfloat16",
        columns,
        rows,
        [f"Masks regenerated from {found['clip']}.mp4", worst(found)],
        frozenset({"mask"}),
    )


def worst(found: Mapping[str, Any]) -> str:
    """The least even of all cases, in a sentence."""
    every = [
        (case["dealt"]["time"], case["even"]["time"], row["mask"], case["heads"], case["ranks"])
        for row in found["rows"]
        for case in row.get("cases", ())
    ]
    if not every:
        return "Nothing was measured"
    time, _, name, heads, ranks = max(every)
    even = max(one[1] for one in every)
    return (
        f"Least even: {time:.3f}, of {name}, {heads} heads on {ranks} ranks; split by count up to "
        f"{even:.3f}"
    )
