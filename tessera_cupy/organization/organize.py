"""Organization: physical tiles to tasks in launch order.

A task is one CTA's work. This module decides which tiles become several tasks
(split-K), and in which order the tasks start; it never changes what is computed.
Everything here is a pure function of its arguments: the order is fixed before
the launch, so no kernel needs an atomic counter and results are repeatable.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.errors import wrong
from tessera_cupy.mapping.tiles import Tiles
from tessera_cupy.organization.tasks import Tasks

#: Shortest part worth a workspace slot: a part writes O once in float32 and the merge
#: reads it back, which is small beside loads and arithmetic for so many KV columns,
#: or for so many steps where these are narrow.
_MIN_PART_COLUMNS, _MIN_PART_STEPS = 512, 8

#: Parts that a pair of the last round may be cut into, fewest first. More would hardly fill
#: the round better, and each part is one more thing to write and merge.
_LAST_ROUND_PARTS = (2, 3, 4)

#: Lengths of the longest part that are compared where there is one round, and the parts of such a
#: length that a second round may take.
_LENGTHS = 32
_SECOND = (8, 4, 2)


@dataclass(frozen=True)
class Organization:
    """Which orders and cuts :func:`organize` applies; all off is plain row order.

    Attributes:
        runs: within a group of heads, order tiles by the KV position of their longest run
            of neighbouring fragments, so that CTAs in flight read the same KV rows.
        longest: within a group of heads, start the longest tasks first. Lengths are compared
            in buckets of about 6 percent, so that near ties keep the order of rows or runs.
        alternate: every second task walks its steps from the last to the first, so that it
            begins where the task before it ended.
        split: cut long tiles in parts that run at the same time (split-K), and the tiles of
            a last round that would leave CTAs idle.

    Example:
        >>> Organization(longest=True, split=True).name
        'longest+split'
        >>> Organization.parse("rows") == Organization()
        True
    """

    runs: bool = False
    longest: bool = False
    alternate: bool = False
    split: bool = False

    @property
    def name(self) -> str:
        """The parts that are on, joined by ``+`` in the order of the class, or ``rows``."""
        return "+".join(f.name for f in fields(self) if getattr(self, f.name)) or "rows"

    @classmethod
    def parse(cls, name: str) -> Organization:
        """The organization with this :attr:`name`.

        Raises:
            ValueError: a part is unknown, repeated or out of order.
        """
        known = [f.name for f in fields(cls)]
        parts = [] if name == "rows" else name.split("+")
        made = cls(**{part: True for part in parts if part in known})
        if made.name != name:
            expected = f'"rows" or parts of {known} in this order joined by "+"'
            raise ValueError(wrong("organization", expected, repr(name), "correct the name"))
        return made


@dataclass(frozen=True)
class DeviceModel:
    """What organization needs to know of a GPU.

    Attributes:
        sms: streaming multiprocessors.
        ctas_per_sm: CTAs of the kernel that one of them holds at a time.
        l2_bytes: L2 cache that K and V may fill, in bytes.
    """

    sms: int
    ctas_per_sm: int
    l2_bytes: int

    def __post_init__(self) -> None:
        """Refuse numbers that no GPU has."""
        for name, least in (("sms", 1), ("ctas_per_sm", 1), ("l2_bytes", 0)):
            value = getattr(self, name)
            if value < least:
                raise ValueError(
                    wrong(name, f"at least {least}", value, "describe the GPU that will run this")
                )

    @property
    def capacity(self) -> int:
        """CTAs that run at the same time."""
        return self.sms * self.ctas_per_sm


def organize(
    tiles: Tiles,
    organization: Organization,
    *,
    batch: int,
    q_heads: int,
    kv_heads: int,
    mask_batch: int,
    mask_heads: int,
    kv_bytes_per_head: int,
    device: DeviceModel,
) -> Tasks:
    """Order and cut the tiles of a request.

    Tiles of a broadcast mask axis give tasks for every batch entry and query head that
    shares them. Tasks run group by group, a group being as many KV heads (over batch and
    heads, in memory order) as fit in L2 together, with all query heads that read them.

    Args:
        tiles: mapping's output, for ``mask_batch * mask_heads`` mask heads.
        organization: the orders and cuts to apply.
        batch: batch entries of the request.
        q_heads: query heads of one batch entry, a multiple of ``kv_heads``.
        kv_heads: KV heads of one batch entry.
        mask_batch: 1, or ``batch``.
        mask_heads: 1, or ``q_heads``.
        kv_bytes_per_head: bytes of K and V of one KV head together.
        device: the GPU to organize for.

    Returns:
        The tasks in launch order. Each (query head, tile) is in one task with slot -1, or in
        several that take its steps apart, with consecutive slots in the order of the steps.
        Parts of the last round's tiles come last.

    Raises:
        ValueError: heads or batch do not fit each other or the tiles.

    Example:
        >>> tasks = organize(
        ...     tiles,
        ...     Organization(longest=True),
        ...     batch=1,
        ...     q_heads=8,
        ...     kv_heads=8,
        ...     mask_batch=1,
        ...     mask_heads=8,
        ...     kv_bytes_per_head=2 * 57600 * 128 * 2,
        ...     device=DeviceModel(sms=132, ctas_per_sm=2, l2_bytes=32 << 20),
        ... )
        ... # doctest: +SKIP
    """
    _check_heads(tiles.heads, batch, q_heads, kv_heads, mask_batch, mask_heads)
    head, tile = _spread(tiles.tile_head, batch, q_heads, mask_batch, mask_heads)
    steps = tiles.steps.astype(np.int64)[tile]

    parts = np.ones_like(steps)
    least = min_part_steps(tiles.shape.kv)
    if organization.split:
        parts = _parts(steps, least, device)
    owner = np.repeat(np.arange(len(parts)), parts)
    part = np.arange(len(owner)) - np.repeat(np.cumsum(parts) - parts, parts)
    begin, end = _range(steps, parts, owner, part)

    # Last key first, as lexsort takes them; the sort is stable, so what no key tells apart
    # stays in the order of head, row and part.
    keys: list[NDArray[np.int64]] = []
    kv_head = head // (q_heads // kv_heads)
    group = kv_head // max(1, device.l2_bytes // max(1, kv_bytes_per_head))
    if organization.runs:
        keys += [_run_positions(tiles)[tile[owner]], kv_head[owner]]
    if organization.longest:
        keys += [-_length_bucket(end - begin)]
    if keys:
        order = np.lexsort([*keys, group[owner]])
        owner, part, begin, end = owner[order], part[order], begin[order], end[order]

    if organization.split and len(steps) > device.capacity:
        whole = parts[owner] == 1
        last, count = _last_round(end - begin, whole, group[owner], least, device.capacity)
        late = owner[last]
        parts[late] = count
        owner = np.concatenate([np.delete(owner, last), np.repeat(late, count)])
        part = np.concatenate([np.delete(part, last), np.tile(np.arange(count), len(late))])
        begin, end = _range(steps, parts, owner, part)

    # Slots follow the pairs, not the launch order: merging reads them from first to last.
    slots = np.where(parts > 1, parts, 0)
    first_slot = np.cumsum(slots) - slots
    slot = np.where(parts[owner] > 1, first_slot[owner] + part, -1)
    cut = parts > 1
    reverse = np.zeros(len(owner), np.bool_)
    if organization.alternate:
        reverse[1::2] = True
    return Tasks(
        task_head=head[owner].astype(np.int32),
        task_tile=tile[owner].astype(np.int32),
        task_begin=begin.astype(np.int32),
        task_end=end.astype(np.int32),
        task_reverse=reverse,
        task_slot=slot.astype(np.int32),
        merge_head=head[cut].astype(np.int32),
        merge_tile=tile[cut].astype(np.int32),
        merge_offsets=np.concatenate([[0], np.cumsum(parts[cut])]).astype(np.int32),
    )


def _check_heads(
    tiles_heads: int, batch: int, q_heads: int, kv_heads: int, mask_batch: int, mask_heads: int
) -> None:
    if kv_heads < 1 or q_heads % kv_heads:
        raise ValueError(
            wrong("q_heads", f"a multiple of kv_heads={kv_heads}", q_heads, "repeat or drop heads")
        )
    for name, got, full in (("mask_batch", mask_batch, batch), ("mask_heads", mask_heads, q_heads)):
        if got not in (1, full):
            raise ValueError(wrong(name, f"1 or {full}", got, "give the mask one entry for each"))
    if tiles_heads != mask_batch * mask_heads:
        expected = f"tiles of {mask_batch} x {mask_heads} mask heads"
        raise ValueError(wrong("tiles", expected, f"{tiles_heads} heads", "map this mask"))


def _spread(
    tile_head: NDArray[np.int32], batch: int, q_heads: int, mask_batch: int, mask_heads: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Query head and tile of every pair of the request, by head, then by row."""
    heads = np.arange(batch * q_heads, dtype=np.int64)
    of_batch = heads // q_heads if mask_batch > 1 else 0
    of_head = heads % q_heads if mask_heads > 1 else 0
    mask_head = of_batch * mask_heads + of_head + np.zeros_like(heads)
    low = np.searchsorted(tile_head, mask_head, side="left")
    count = np.searchsorted(tile_head, mask_head, side="right") - low
    start = np.cumsum(count) - count
    tile = np.arange(count.sum(), dtype=np.int64) + np.repeat(low - start, count)
    return np.repeat(heads, count), tile


def min_part_steps(tile_kv: int) -> int:
    """Steps of the shortest split-K part of tiles with so many KV columns a step.

    >>> min_part_steps(64), min_part_steps(192)
    (8, 3)
    """
    return min(_MIN_PART_STEPS, -(-_MIN_PART_COLUMNS // tile_kv))


def _parts(steps: NDArray[np.int64], least: int, device: DeviceModel) -> NDArray[np.int64]:
    """Split-K parts of each tile.

    Where there is a CTA for each tile, and so one round, :func:`_one_round` says the parts. Where
    it cuts nothing, but a multiprocessor holds several CTAs, parts of a share do: more CTAs keep it
    busier, although some wait (72 plans of attend_mma on an H200, of more tiles than
    multiprocessors, take 1.14 times as long whole).

    Elsewhere a tile is cut when it alone would keep one CTA busy for longer than a CTA's share of
    the whole request: then the others would wait for it. Tiles up to half above that stay whole,
    since halving them gains less than the merge costs, and so do those above it by less than
    two of the shortest parts: a merge takes as long as these. Shorter parts spread more evenly,
    but each is one more thing to write and merge: on an H200, 271 requests of 2,000 to 20,000
    tokens took 1.034 (attend_wgmma) and 1.038 (attend_mma) times as long as with the best rule
    for each, with half this limit 1.08 and 1.05, with a quarter 1.17 and 1.07. The two parts are
    from the same times, where whole tiles in place of cuts that save less give 1.024 and 1.033.
    """
    share = max(least, -(-int(steps.sum()) // device.capacity))
    if len(steps) <= device.capacity:
        parts = _one_round(steps, share, least, device.capacity)
        if device.ctas_per_sm == 1 or (parts > 1).any():
            return parts
    cut = (2 * steps > 3 * share) & (steps - share >= 2 * least)
    return np.where(cut, -(-steps // share), 1)


def _one_round(
    steps: NDArray[np.int64], share: int, least: int, capacity: int
) -> NDArray[np.int64]:
    """Parts of each tile where there is a CTA for each tile.

    Parts beyond the CTAs wait for a second round, so that parts which cut long tiles short can add
    as much as they save. Of a few lengths of the longest part, from a CTA's share on, this takes
    the one that ends soonest: after the longest of the first round and, if not all find a CTA, the
    longest of the second, which are the shortest of all. How long that is, is known to a power of
    two. Tiles that are above the longest part by less than one of the shortest stay whole, and all
    do where less than two of those are saved: a merge takes as long.
    """
    worth = int(steps.max(initial=0)) - 2 * least
    soonest, best = worth + 1, np.ones_like(steps)
    length = share
    for _ in range(_LENGTHS):
        if length > worth:
            break
        cut = steps - length >= least
        parts = np.where(cut, -(-steps // length), 1)
        whole = steps[~cut]
        second = 0
        if int(parts.sum()) > capacity:
            of_cut = int(parts[cut].sum())
            fits = (p for p in _SECOND if of_cut + int((p * whole > length).sum()) <= capacity)
            second = length // next(fits, 1)
        end = max(length, int(whole.max(initial=0))) + second
        if end < soonest:
            soonest, best = end, parts
        length = _next_edge(length)
    return best


def _range(
    steps: NDArray[np.int64],
    parts: NDArray[np.int64],
    owner: NDArray[np.int64],
    part: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First step of each part, and one past its last; parts of a pair differ by at most one."""
    of, count = steps[owner], parts[owner]
    return of * part // count, of * (part + 1) // count


def _last_round(
    length: NDArray[np.int64],
    whole: NDArray[np.bool_],
    group: NDArray[np.int64],
    least: int,
    capacity: int,
) -> tuple[NDArray[np.int64], int]:
    """Tasks of the last round to cut, and the parts to cut each of them into.

    Tasks that do not fill a last round keep some CTAs busy for its whole length while the
    others idle. Cut in parts that come last, they spread over all CTAs, whether these take
    tasks in turn or as they become free, and the round ends sooner.

    The count of parts is the one that ends the round first; it is the smaller one on ties,
    and none when less than a tenth of the round is gained, since merging costs too. Only
    the last group's tasks are cut: parts of another one would read its K and V once more,
    after the last group has taken their place in L2. Tasks that must stay whole start first,
    so that a CTA finds at most one of them. Parts of one task stay side by side: under
    ``longest`` the shortest then come last, to the CTAs that take one part more.

    Args:
        length: (N,) steps of each task, in launch order.
        whole: (N,) the task is a whole tile and no part.
        group: (N,) group of heads of each task, ascending.
        least: steps of the shortest part.
        capacity: CTAs that run at the same time.

    Returns:
        The tasks to cut, ascending, and the parts of each; no tasks and 1 if none is worth it.
    """
    last = np.arange(len(length) - len(length) % capacity, len(length))
    mine = whole[last] & (group[last] == group[-1])
    time = longest = int(length[last].max(initial=0))
    best, count = last[:0], 1
    for k in _LAST_ROUND_PARTS:
        long_enough = mine & (length[last] >= k * least)
        cut, left = last[long_enough], last[~long_enough]
        turns = -(-(len(left) + k * len(cut)) // capacity)
        one_part = -(-int(length[cut].max(initial=0)) // k)
        first_turn = max(one_part, int(length[left].max(initial=0)))
        this = first_turn + (turns - 1) * one_part
        if this < time and 10 * (longest - this) >= longest:
            best, count, time = cut, k, this
    return best, count


def _length_bucket(steps: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number of the 1/16-wide bucket of each length; a longer length never has a smaller one.

    The edges are integers, so that buckets do not hang on a machine's logarithm.
    """
    edges = [1]
    longest = int(steps.max(initial=0))
    while edges[-1] <= longest:
        edges.append(_next_edge(edges[-1]))
    return np.searchsorted(np.array(edges), steps, side="right")


def _next_edge(edge: int) -> int:
    return max(edge + 1, edge * 17 // 16)


def _run_positions(tiles: Tiles) -> NDArray[np.int64]:
    """First KV row of each tile's longest run of neighbouring fragments.

    The first of equally long runs counts. Fragments that nobody loads neither lengthen nor
    break a run of neighbours, and a tile with none that is loaded has position 0.
    """
    loaded = np.flatnonzero((tiles.frag_len > 0) & (tiles.frag_members != 0))
    position = np.zeros(len(tiles), np.int64)
    if not len(loaded):
        return position
    owner = np.searchsorted(tiles.frag_offsets, loaded, side="right") - 1
    start = tiles.frag_start[loaded].astype(np.int64)
    length = tiles.frag_len[loaded].astype(np.int64)
    opens = np.ones(len(loaded), np.bool_)
    opens[1:] = (owner[1:] != owner[:-1]) | (start[1:] != start[:-1] + length[:-1])
    opened = np.flatnonzero(opens)
    run_owner, run_start = owner[opened], start[opened]
    run_length = np.add.reduceat(length, opened)
    best_first = np.lexsort((-run_length, run_owner))
    is_best = np.ones(len(opened), np.bool_)
    is_best[1:] = run_owner[best_first][1:] != run_owner[best_first][:-1]
    best = best_first[is_best]
    position[run_owner[best]] = run_start[best]
    return position
