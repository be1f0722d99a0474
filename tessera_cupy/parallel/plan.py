"""A plan of attention over the ranks of a group: agreed on once, run any number of times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tessera_cupy import interop
from tessera_cupy.call import HOST_ARCH
from tessera_cupy.cost import Gpu, typical_gpu
from tessera_cupy.errors import wrong
from tessera_cupy.kernels.arch import get_arch
from tessera_cupy.kernels.launch import Mark, unmarked
from tessera_cupy.masks import BlockMask, KeySlices
from tessera_cupy.masks.key_slices import block_mask
from tessera_cupy.parallel.degrees import Degrees, checked_scheme
from tessera_cupy.parallel.facts import GPU, agree, facts
from tessera_cupy.parallel.heads import Deal
from tessera_cupy.parallel.local import Local
from tessera_cupy.parallel.network import usual_network
from tessera_cupy.parallel.overlap import Pace, usual_pace, with_turns
from tessera_cupy.parallel.program import attend
from tessera_cupy.parallel.schedule import Schedule, group_pairs, make_schedule
from tessera_cupy.parallel.status import (
    TIMEOUT,
    Board,
    Clock,
    board_of,
    checked_group,
    checked_timeout,
)
from tessera_cupy.parallel.transfers import TransferError, drive, meet
from tessera_cupy.parallel.turns import most_turns
from tessera_cupy.regimes import PlanSpec, Table
from tessera_cupy.request import ArraySpec, make_request


@dataclass(frozen=True)
class Options:
    """What a caller chose, besides mask and arrays.

    Attributes:
        group: the process group.
        scheme: as given; see :func:`tessera_cupy.parallel.degrees.checked_scheme`.
        layout, text, text_first, regime, most_heads: as of :func:`make_plan`.
        timeout: as given.
    """

    group: Any
    scheme: Any
    layout: str
    text: int
    text_first: bool
    timeout: Any
    regime: str | PlanSpec | Table
    most_heads: int | None


class ParallelPlan:
    """How a group of ranks computes one request; made by :func:`make_plan`.

    Attributes:
        schedule: who computes and sends what; equal on all ranks.
        rank: this process's rank in the group.
        shapes: of this rank's q and of its k and v.
        dtype: of all of them.
        layout: their axes.
        timeout: seconds that a run may take.
    """

    def __init__(
        self,
        schedule: Schedule,
        board: Board,
        shapes: tuple[tuple[int, ...], tuple[int, ...]],
        dtype: str,
        options: Options,
    ) -> None:
        """Use :func:`make_plan`."""
        self.schedule = schedule
        self.rank = board.rank
        self.shapes = shapes
        self.dtype = dtype
        self.layout = options.layout
        self.timeout = checked_timeout(options.timeout)
        self._board = board
        self._options = replace(options, group=None)  # the board's, which does not keep it alive
        self._local = Local(schedule, board.rank)

    def __repr__(self) -> str:
        degrees = self.schedule.degrees
        return f"ParallelPlan({degrees.name}, rank {self.rank} of {degrees.ranks})"

    def run(self, q: Any, k: Any, v: Any, *, sm_scale: float | None = None) -> Any:
        """Compute the attention of this rank's shard; every rank of the group must call it.

        Ranks exchange tensors alone, so that a rank which fails is noticed by the others when they
        wait for it, within the plan's time-out.

        Args:
            q: this rank's shard, as the plan was made for.
            k: the same.
            v: the same.
            sm_scale: factor on the scores; None means ``1 / sqrt(head_dim)``.

        Returns:
            The attention of the shard's query tokens over all keys, like q.

        Raises:
            RankError: a rank failed, this one included, or did not answer in time.
        """
        return self.run_marked(q, k, v, unmarked, sm_scale=sm_scale)

    def run_marked(
        self, q: Any, k: Any, v: Any, mark: Mark, *, sm_scale: float | None = None
    ) -> Any:
        """:meth:`run`, with a mark after each of its parts.

        Args:
            q: as for :meth:`run`, as are the others.
            k: the same.
            v: the same.
            mark: told what the work was that the current stream was given since it was last told:
                ``"attention"``, ``"exchange"``, or ``"copies"``, which are those before and after
                exchanges, and merging.
            sm_scale: as for :meth:`run`.
        """
        clock = Clock(self.timeout)
        self._board.begin()
        try:
            self._check(q, k, v)
        except (TypeError, ValueError) as error:
            raise self._board.failed(error) from error
        return self.run_checked(q, k, v, sm_scale, clock, mark)

    def run_checked(
        self,
        q: Any,
        k: Any,
        v: Any,
        sm_scale: float | None,
        clock: Clock,
        mark: Mark = unmarked,
    ) -> Any:
        """:meth:`run_marked` within a round that has begun."""
        board = self._board
        attention = partial(self._local.compute, sm_scale=sm_scale, regime=self._options.regime)

        def compute(*given: Any) -> Any:
            mark("copies")
            found = attention(*given)
            mark("attention")
            return found

        program = attend(self.schedule, self.rank, q, k, v, self.layout, compute)
        _meet(board, q)
        try:
            result = drive(program, board.group, clock, mark)
        except TransferError as lost:
            raise board.verdict(lost, clock) from lost.__cause__
        except Exception as error:
            raise board.failed(error) from error
        except BaseException as error:  # the process is to end; the others need not wait
            board.failed(error)
            raise
        board.end()
        return result

    def update(self, mask: BlockMask | KeySlices) -> ParallelPlan:
        """The same plan for a mask with new contents; every rank of the group must call it.

        The heads stay where they are as long as that is even enough
        (:func:`tessera_cupy.parallel.heads.deal_again`). The scheme stays.

        Raises:
            RankError, TypeError, ValueError: as of :func:`make_plan`.
        """
        q, kv = (ArraySpec(shape, self.dtype) for shape in self.shapes)
        options = replace(self._options, group=self._board.group)
        return agreed(block_mask(mask), q, kv, kv, options, Clock(self.timeout), self)

    def with_deal(self, deal: Deal) -> ParallelPlan:
        """The same plan with heads dealt otherwise; every rank must take the same deal.

        Args:
            deal: of all heads, to as many ranks as a Ulysses group has.
        """
        old = self.schedule
        pairs = group_pairs(old.mask, old.degrees, old.q, old.kv, deal)
        schedule = Schedule(old.mask, old.degrees, old.q, old.kv, deal, pairs)
        if old.turn_count > 1:
            schedule = schedule.in_turns(old.turn_count)
        return ParallelPlan(schedule, self._board, self.shapes, self.dtype, self._options)

    def with_turns(self, turns: int) -> ParallelPlan:
        """The same plan with so many turns of Ulysses; every rank must take the same number.

        Results are equal to the bit, except of ragged blocks and of tiles that are cut in parts.

        Args:
            turns: in how many parts heads are exchanged, one while another is computed.

        Raises:
            ValueError: none, or several where a ring takes part.
        """
        degrees = self.schedule.degrees
        pure = degrees.ulysses_degree > 1 and degrees.ring_degree == 1
        several = most_turns(self.schedule.deal) if pure else 1
        if isinstance(turns, bool) or not isinstance(turns, int) or not 1 <= turns <= several:
            fix = "pass fewer, and 1 where a ring takes part"
            raise ValueError(wrong("turns", f"1 to {several}", repr(turns), fix))
        schedule = self.schedule.in_turns(turns)
        return ParallelPlan(schedule, self._board, self.shapes, self.dtype, self._options)

    def _check(self, q: Any, k: Any, v: Any) -> None:
        for name, array, shape in (
            ("q", q, self.shapes[0]),
            ("k", k, self.shapes[1]),
            ("v", v, self.shapes[1]),
        ):
            if interop.framework(array) != "torch":
                got, fix = type(array).__name__, "pass torch tensors"
                raise TypeError(wrong(name, "a torch tensor", got, fix))
            interop.check_no_gradient(name, array)
            found = (tuple(array.shape), interop.dtype_name(array))
            if found != (shape, self.dtype):
                expected = f"the plan's shape {shape} and dtype {self.dtype}"
                got = f"{found[0]} and {found[1]}"
                raise ValueError(wrong(name, expected, got, "make a new plan on all ranks"))
            if array.device != q.device:
                expected, got = f"q's device {q.device}", f"device {array.device}"
                raise ValueError(wrong(name, expected, got, "move it there"))


def make_plan(
    mask: BlockMask | KeySlices,
    q: Any,
    k: Any = None,
    v: Any = None,
    *,
    group: Any = None,
    scheme: Any = "auto",
    layout: str = "BHSD",
    text: int = 0,
    text_first: bool = False,
    timeout: Any = TIMEOUT,
    regime: str | PlanSpec | Table = "auto",
    most_heads: int | None = None,
) -> ParallelPlan:
    """Agree on a plan; every rank of the group must call it with the same mask.

    Args:
        mask: over the whole sequence, the same on every rank; one on a GPU is read to the host.
        q: this rank's shard, (batch, q_heads, tokens, head_dim) in ``layout``: a torch tensor, or
            an :class:`tessera_cupy.ArraySpec` to plan without data. Shards follow each other in
            the order of the ranks, and may have any number of tokens, none included.
        k: (batch, kv_heads, tokens, head_dim), the same; None means as q.
        v: as k; None means as k.
        group: a process group of torch.distributed, or a device mesh of one dimension; None means
            all processes.
        scheme: ``"ulysses"``, ``"ring"``, degrees ``(ulysses_degree, ring_degree)``, or ``"auto"``
            for what :func:`tessera_cupy.parallel.predict` expects to be fastest.
        layout: ``"BHSD"`` or ``"BSHD"``.
        text: tokens of q and k that every rank holds complete, besides its shard: behind it, as
            in the sequence of the mask.
        text_first: the text is before the shards instead.
        timeout: seconds, or a ``timedelta``, that a call waits for other ranks.
        regime: of each rank's own attention, as of :func:`tessera_cupy.make_plan`.
        most_heads: query heads that a rank may hold under Ulysses; None means
            ``ceil(q_heads / ulysses_degree)``, with which no rank has more memory than another.

    Raises:
        RankError: a rank has wrong arguments, or does not answer in time; on all ranks.
        TypeError, ValueError: arguments that are wrong on all ranks alike, or do not fit together.
        MissingExtraError: torch is not installed.

    Example:
        >>> plan = make_plan(mask, q, k, v, scheme="ulysses")  # doctest: +SKIP
        >>> out = plan.run(q, k, v)  # doctest: +SKIP
    """
    options = Options(group, scheme, layout, text, text_first, timeout, regime, most_heads)
    k = q if k is None else k
    v = k if v is None else v
    return agreed(mask, q, k, v, options, Clock(checked_timeout(timeout)), None)


def agreed(
    mask: Any,
    q: Any,
    k: Any,
    v: Any,
    options: Options,
    clock: Clock,
    before: ParallelPlan | None,
) -> ParallelPlan:
    """Exchange facts in a round of its own, and make the plan or raise what is wrong."""
    group = checked_group(options.group)
    board = board_of(group)
    board.begin()
    told = exchanged(board, mask, q, k, v, options, clock)
    plan = plan_of(board, told, mask, q, k, v, options, before)
    board.end()
    return plan


def exchanged(
    board: Board, mask: Any, q: Any, k: Any, v: Any, options: Options, clock: Clock
) -> list[dict[str, Any]]:
    """Every rank's facts, in a round that has begun."""
    mine, failed = None, None
    try:
        scheme = checked_scheme(options.scheme, board.size)
        mine = facts(
            block_mask(mask) if isinstance(mask, KeySlices) else mask,
            q,
            k,
            v,
            layout=options.layout,
            scheme="auto" if scheme is None else scheme.name,
            text=options.text,
            text_first=options.text_first,
            most_heads=options.most_heads,
        )
        mine["arch"] = _arch(q)
    except Exception as error:
        failed = error
    return board.exchange(mine, failed, clock)


def plan_of(
    board: Board,
    told: Sequence[dict[str, Any]],
    mask: Any,
    q: Any,
    k: Any,
    v: Any,
    options: Options,
    before: ParallelPlan | None,
) -> ParallelPlan:
    """The plan that follows from all ranks' facts; on every rank the same, or the same error."""
    try:
        return _plan_of(board, told, mask, q, k, v, options, before)
    except Exception as error:
        board.failed(error)  # where the others have no such error, as without memory
        raise


def _plan_of(
    board: Board,
    told: Sequence[dict[str, Any]],
    mask: Any,
    q: Any,
    k: Any,
    v: Any,
    options: Options,
    before: ParallelPlan | None,
) -> ParallelPlan:
    shards = agree(told, board.name)
    # Before what one rank alone may fail in: the others would wait for it here.
    if all(its["place"] == GPU for its in told):
        _meet(board, q)
    mask = block_mask(mask).on_host()
    mine = told[board.rank]
    q_heads, kv_heads = mine["q_heads"], mine["kv_heads"]
    whole = [
        ArraySpec((mine["batch"], heads, of.total, mine["head_dim"]), mine["dtype"])
        for heads, of in zip((q_heads, kv_heads), shards, strict=True)
    ]
    arch = get_arch(mine["arch"] or HOST_ARCH)
    on_gpu = not isinstance(q, ArraySpec) and not interop.on_host(q)
    make_request(mask, whole[0], whole[1], None, layout="BHSD", arch=arch, on_gpu=on_gpu)
    degrees = checked_scheme(options.scheme, board.size)
    old: Deal | None = None
    if before is not None:
        old, degrees = before.schedule.deal, before.schedule.degrees
    if degrees is None:
        degrees = _fastest(mask, whole, shards, told)
    schedule = make_schedule(
        mask,
        degrees,
        *shards,
        q_heads=q_heads,
        kv_heads=kv_heads,
        old=old,
        most_heads=options.most_heads,
    )
    schedule = with_turns(schedule, _pace(mask, whole[0], degrees, told))
    shapes = (tuple(q.shape), tuple(k.shape))
    return ParallelPlan(schedule, board, shapes, mine["dtype"], options)


def _fastest(
    mask: BlockMask, whole: list[ArraySpec], shards: Any, told: Sequence[dict[str, Any]]
) -> Degrees:
    from tessera_cupy.parallel.predict import predict

    gpu, per_host = _machines(told)
    found = predict(mask, *whole, shards=shards, gpu=gpu.name, per_host=per_host)
    return found.best.degrees


def _pace(mask: BlockMask, q: ArraySpec, degrees: Degrees, told: Sequence[dict[str, Any]]) -> Pace:
    gpu, per_host = _machines(told)
    link = usual_network(gpu.name, per_host).link(degrees.ranks)
    batch, _, _, dim = q.shape
    return usual_pace(gpu, link, batch=batch, mask_batch=mask.batch, head_dim=dim, dtype=q.dtype)


def _machines(told: Sequence[dict[str, Any]]) -> tuple[Gpu, int]:
    """What all ranks take for their GPU, and the fewest ranks on a host."""
    per_host = min(Counter(its["host"] for its in told).values())
    return typical_gpu(told[0]["arch"] or HOST_ARCH), per_host


def _arch(q: Any) -> str | None:
    """Architecture of q's GPU; None for host memory."""
    if isinstance(q, ArraySpec) or interop.on_host(q):
        return None
    from tessera_cupy import gpus

    return gpus.arch_of(interop.device_of(q, "q")).name


def _meet(board: Board, q: Any) -> None:
    """Let NCCL connect all ranks' GPUs, once, before some of them send to each other."""
    where = str(q.device)
    if q.device.type == "cpu" or where in board.met:
        return
    try:
        meet(board.group, q)
    except TransferError as error:
        raise board.failed(error) from error.__cause__
    board.met.add(where)
