"""Predicts each way to divide a request over ranks: balance, bytes, time, and which to take.

Needs no GPU and no torch. The time of a rank's own attention is its pairs of tokens at the rate of
the whole mask on one GPU, as :mod:`tessera_cupy.cost` predicts it from the plans of a few heads,
and a launch for each step; figures of links are those of :mod:`tessera_cupy.parallel.network`.

- Ulysses goes in turns, of which one is exchanged while another is computed
  (:mod:`tessera_cupy.parallel.overlap`); within a ring it has one turn, and nothing overlaps: the
  longest exchange, the longest attention, the longest exchange back.
- In a ring, each step takes the longer of its attention and of the shard that moves meanwhile; the
  slowest rank ends last. A step whose shard is not needed has no transfer.
- Partial outputs of a ring are merged at the rate of the GPU's memory: they are read and written in
  float32.

It does not know: that few rows or heads fill a GPU badly, packing and unpacking around transfers,
transfers that share a switch or compete with computing for memory, hosts that are busy. Nothing of
it was measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.attention import make_plan
from tessera_cupy.cost import Gpu, find_gpu
from tessera_cupy.cost import predict as predict_plan
from tessera_cupy.cost.model import LAUNCH_MS
from tessera_cupy.errors import wrong
from tessera_cupy.masks import BlockMask, KeySlices
from tessera_cupy.masks.key_slices import block_mask
from tessera_cupy.parallel.degrees import Degrees, checked_scheme, every
from tessera_cupy.parallel.heads import balance, deal, head_work
from tessera_cupy.parallel.network import LATENCY_MS, Network, usual_network
from tessera_cupy.parallel.overlap import Pace, through, usual_pace, with_turns
from tessera_cupy.parallel.schedule import Schedule, check_shards, pairs_of_places
from tessera_cupy.parallel.shards import Shards, even_lengths, tokens_of
from tessera_cupy.parallel.submask import cut
from tessera_cupy.parallel.work import pair_work
from tessera_cupy.request import ArraySpec, make_request

#: Most ranks that are looked at.
MOST_RANKS = 4096

# Heads whose plans the rate is from, spread over the heads by work.
_HEADS = 3

_Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Scheme:
    """What is predicted of one scheme.

    Attributes:
        schedule: who computes and sends what.
        loads: (N,) pairs of tokens that each rank computes, over the batch.
        sent: (N,) bytes that each rank sends.
        compute_ms: (N,) milliseconds that each rank computes, merging included, and what turns
            and exchanges at the same time add.
        wait_ms: (N,) milliseconds of these that a rank waits for keys of the ring.
        swap_ms: milliseconds of the exchanges of Ulysses that no attention hides, taken for half
            before and half after it.
        rank_ms: (N,) milliseconds until each rank's output is there; the exchange back begins
            when the last rank that takes part in it has computed.
        ms: milliseconds until all ranks are through.
    """

    schedule: Schedule = field(repr=False)
    loads: _Floats = field(repr=False)
    sent: _Floats = field(repr=False)
    compute_ms: _Floats = field(repr=False)
    wait_ms: _Floats = field(repr=False)
    swap_ms: float
    rank_ms: _Floats = field(repr=False)
    ms: float

    @property
    def degrees(self) -> Degrees:
        """Of the schedule."""
        return self.schedule.degrees

    @property
    def balance(self) -> float:
        """The work of the busiest rank over the mean; 1.0 is even."""
        return balance(self.loads)


@dataclass(frozen=True, eq=False)
class Forecast:
    """What is predicted of a request on so many ranks.

    Attributes:
        schemes: each scheme, the fastest first.
        gpu: of every rank.
        network: between the ranks.
        alone_ms: milliseconds on one GPU, all else equal.
    """

    schemes: tuple[Scheme, ...]
    gpu: Gpu
    network: Network
    alone_ms: float

    @property
    def best(self) -> Scheme:
        """The scheme to take."""
        return self.schemes[0]

    def summary(self) -> dict[str, Any]:
        """All of it as plain data, ready for JSON."""
        first = self.best.schedule
        return {
            "ranks": first.degrees.ranks,
            "tokens": list(first.mask.shape),
            "heads": sum(map(len, first.deal.q)),
            "density": first.mask.density(),
            "gpu": self.gpu.name,
            "links": {
                "within": self.network.within.name,
                "between": self.network.between.name,
                "ranks_per_host": self.network.per_host,
            },
            "alone_ms": self.alone_ms,
            "best": self.best.degrees.name,
            "schemes": [
                {
                    "scheme": one.degrees.name,
                    "ulysses_degree": one.degrees.ulysses_degree,
                    "ring_degree": one.degrees.ring_degree,
                    "turns": one.schedule.turn_count,
                    "ms": one.ms,
                    "balance": one.balance,
                    "compute_ms": {"max": one.compute_ms.max(), "mean": one.compute_ms.mean()},
                    "sent_bytes": {"max": one.sent.max(), "mean": one.sent.mean()},
                    "heads_of_places": [list(heads) for heads in one.schedule.deal.q],
                }
                for one in self.schemes
            ],
        }


def predict(
    mask: BlockMask | KeySlices,
    q: ArraySpec,
    k: ArraySpec | None = None,
    *,
    ranks: int | None = None,
    shards: tuple[Shards, Shards] | None = None,
    scheme: Any = "auto",
    gpu: str = "H200",
    network: Network | None = None,
    per_host: int = 8,
) -> Forecast:
    """Predict a request of the whole sequence on several ranks.

    Args:
        mask: over the whole sequence.
        q: (batch, q_heads, tokens, head_dim) of the whole sequence, heads first.
        k: the same of the keys; None means q's sizes with the mask's number of keys.
        ranks: how many ranks; needless with ``shards``.
        shards: of the query and of the key tokens; None means even ones, the last ones short.
        scheme: ``"auto"`` looks at every pair of degrees; else as of
            :func:`tessera_cupy.parallel.make_plan`.
        gpu: a name of :data:`tessera_cupy.cost.GPUS`.
        network: between the ranks; None means what the GPU is usually connected by.
        per_host: consecutive ranks on one host, for the usual network.

    Raises:
        TypeError, ValueError: sizes that do not fit, an unknown GPU or scheme, no ranks.

    Example:
        >>> mask = BlockMask.from_dense(np.ones((8, 16, 16), bool), (128, 128))
        >>> found = predict(mask, ArraySpec((1, 8, 2048, 128)), ranks=4)
        >>> found.best.degrees.name, found.best.balance
        ('ulysses', 1.0)
    """
    mask = block_mask(mask).on_host()
    count = shards[0].ranks if shards is not None else ranks
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_RANKS:
        fix = "count the processes of the group"
        raise ValueError(wrong("ranks", f"1 to {MOST_RANKS}", repr(count), fix))
    if shards is None:
        lengths = [even_lengths(tokens, count) for tokens in mask.shape]
        shards = Shards(lengths[0]), Shards(lengths[1])
    check_shards(mask, *shards)
    device = find_gpu(gpu)
    make_request(mask, q, k, None, layout="BHSD", arch=device.limits, on_gpu=False)
    net = usual_network(gpu, per_host) if network is None else network
    degrees = checked_scheme(scheme, count)
    q_heads = q.shape[1]
    kv_heads = q_heads if k is None else k.shape[1]
    work = head_work(mask, q_heads)
    rate = ms_per_pair(mask, q, k, work, device)
    copies = q.shape[0] // mask.batch
    schemes = [degrees] if degrees is not None else every(count)
    rings = any(one.ring_degree > 1 for one in schemes)
    of_ranks = pair_work(mask, *shards) if rings else None
    found = []
    for one in schemes:
        dealt = deal(work, one.ulysses_degree, shared=q_heads // kv_heads)
        if of_ranks is None or one.ring_degree == 1:
            pairs = dealt.loads(work).reshape(-1, 1, 1)
        else:
            pairs = pairs_of_places(of_ranks, one, dealt)
        batch, _, _, dim = q.shape
        pace = usual_pace(
            device,
            net.link(count),
            batch=batch,
            mask_batch=mask.batch,
            head_dim=dim,
            dtype=q.dtype,
        )
        schedule = with_turns(Schedule(mask, one, *shards, dealt, pairs), pace)
        found.append(_scheme(schedule, q, copies, rate, device, net))
    found.sort(key=lambda scheme: scheme.ms)  # of equals the one with the larger Ulysses degree
    alone = LAUNCH_MS + float(work.sum()) * copies * rate
    return Forecast(tuple(found), device, net, alone)


def ms_per_pair(
    mask: BlockMask, q: ArraySpec, k: ArraySpec | None, work: _Floats, gpu: Gpu
) -> float:
    """Milliseconds that a GPU takes for a pair of tokens in an active block, of one batch entry.

    From the predicted plans of the heads with the most, the middle and the least work.
    """
    if not work.any():
        return 0.0
    kept = np.flatnonzero(work)
    order = kept[np.argsort(-work[kept], kind="stable")]
    heads = sorted({int(order[i * (len(order) - 1) // (_HEADS - 1)]) for i in range(_HEADS)})
    if mask.heads == 1:
        heads = [0]
    some = cut(mask, heads=heads)
    spec = ArraySpec((mask.batch, len(heads), q.shape[2], q.shape[3]), _kernel_dtype(q.dtype))
    plan = make_plan(some, spec, arch=gpu.arch)
    pairs = float(head_work(some, len(heads)).sum())
    return (predict_plan(plan, gpu).ms - LAUNCH_MS) / pairs


def _kernel_dtype(dtype: str) -> str:
    return "bfloat16" if dtype == "float32" else dtype


def _scheme(
    schedule: Schedule, q: ArraySpec, copies: int, rate: float, gpu: Gpu, network: Network
) -> Scheme:
    u, r = schedule.degrees
    element = 4 if q.dtype == "float32" else 2
    row_bytes = q.shape[0] * q.shape[3] * element
    swapped, ringed = schedule.sent.T * row_bytes
    pairs = schedule.pairs * copies
    compute = pairs.sum(axis=2) * rate + LAUNCH_MS * (pairs > 0).sum(axis=2)
    swap_ms = 0.0
    if u > 1 or schedule.q.text:
        link = network.link(u if not schedule.q.text else u * r)
        swap_ms = 2 * LATENCY_MS + link.ms(float(swapped.max(initial=0)))
    wait = np.zeros((u, r))
    if schedule.turn_count > 1:
        pace = Pace(copies * rate, row_bytes, network.link(u))
        found = through(schedule, schedule.work, pace)
        compute = found.compute_ms[:, None]
        swap_ms = found.ms - float(compute.max())
    if r > 1:
        compute, wait = _ring_ms(schedule, pairs * rate, row_bytes, q, gpu, network)
    ready = compute + wait
    if schedule.q.text:
        ready[:] = ready.max()
    elif u > 1:
        ready[:] = ready.max(axis=0)
    rank_ms = (ready + swap_ms).T.ravel()
    return Scheme(
        schedule,
        schedule.loads() * copies,
        swapped + ringed,
        compute.T.ravel(),
        wait.T.ravel(),
        swap_ms,
        rank_ms,
        float(rank_ms.max()),
    )


def _ring_ms(
    schedule: Schedule,
    step_ms: _Floats,
    row_bytes: int,
    q: ArraySpec,
    gpu: Gpu,
    network: Network,
) -> tuple[_Floats, _Floats]:
    """(u, r) milliseconds that the ring's steps compute, and that they wait for keys to come."""
    u, r = schedule.degrees
    keys = np.array([tokens_of(schedule.keys(group, text=False)) for group in range(r)])
    rows = np.array([tokens_of(schedule.rows(group)) for group in range(r)])
    kv_heads = np.array([len(mine) for mine in schedule.deal.kv])
    q_heads = np.array([len(mine) for mine in schedule.deal.q])
    # Of each output O in float32 read and written, the new part read; LSE is little beside it.
    row = q.shape[0] * q.shape[3] * (4 + 4 + 2)
    merged = row * q_heads[:, None] * rows / (gpu.dram_gbs * 1e6)
    group, step = np.arange(r)[:, None], np.arange(r)
    source = (group - step) % r
    moved = np.zeros((u, r, r + 1))
    needed = schedule.needs[:, group, source]
    link = network.within if u * r <= network.per_host else network.between
    each = link.ms(1.0) * 2 * row_bytes * kv_heads[:, None, None] * keys[source]
    moved[:, :, :r] = np.where(needed & (step > 0), each + LATENCY_MS, 0)
    by_step = step_ms[:, group, source]
    computed = np.where(by_step > 0, by_step + LAUNCH_MS + merged[..., None], 0)
    waits = (moved[:, :, 1:] - computed).clip(0)
    return computed.sum(axis=2), waits.sum(axis=2)
