"""The one call: attention of each rank's shard over the keys of all ranks."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from tessera_cupy.masks import BlockMask, KeySlices
from tessera_cupy.masks.key_slices import block_mask
from tessera_cupy.parallel.facts import agree
from tessera_cupy.parallel.plan import Options, ParallelPlan, exchanged, plan_of
from tessera_cupy.parallel.status import (
    TIMEOUT,
    Board,
    Clock,
    board_of,
    checked_group,
    checked_timeout,
)
from tessera_cupy.regimes import PlanSpec, Table


def attention(
    q: Any,
    k: Any,
    v: Any,
    mask: BlockMask | KeySlices,
    *,
    group: Any = None,
    scheme: Any = "auto",
    layout: str = "BHSD",
    text: int = 0,
    text_first: bool = False,
    sm_scale: float | None = None,
    timeout: Any = TIMEOUT,
    regime: str | PlanSpec | Table = "auto",
    most_heads: int | None = None,
) -> Any:
    """Sparse attention over a sequence that the ranks of a group share; every rank calls it.

    Exactly :func:`tessera_cupy.block_sparse_attention` of the whole sequence, of which each rank
    has a shard. Ranks first compare their arguments through the store of the group, so that a
    fault on one is an error on all; then they exchange tensors by torch.distributed.

    Args:
        q: this rank's shard, (batch, q_heads, tokens, head_dim) in ``layout``, a torch tensor.
        k: (batch, kv_heads, tokens, head_dim), the same.
        v: as k.
        mask: over the whole sequence, equal on every rank.
        group: as of :func:`make_plan`, as are the other arguments.
        scheme: see there.
        layout: see there.
        text: see there.
        text_first: see there.
        sm_scale: factor on the scores; None means ``1 / sqrt(head_dim)``.
        timeout: seconds that ranks wait for each other.
        regime: see there.
        most_heads: see there.

    Returns:
        The attention of the shard's query tokens, like q; of text on every rank all of it.

    Raises:
        RankError: a rank failed, or did not answer in time; on every rank, naming it. What was
            under way in the group is then in pieces: end the program, or make a new group.
        TypeError, ValueError: arguments that are wrong on all ranks alike, or do not fit together.
        MissingExtraError: torch is not installed.

    Example:
        >>> out = attention(q, k, v, mask, scheme="ulysses")  # doctest: +SKIP
    """
    clock = Clock(checked_timeout(timeout))
    options = Options(group, scheme, layout, text, text_first, timeout, regime, most_heads)
    board = board_of(checked_group(group))
    board.begin()
    told = exchanged(board, mask, q, k, v, options, clock)
    agree(told, board.name)  # also where this rank has a plan: another one may have changed
    key = _key(board, told, options)
    given = block_mask(mask)
    known = _plans.get(key)
    if known is not None and known.mask() is given and known.version == given.version:
        plan = known.plan
    else:
        before = None if known is None else known.plan
        plan = plan_of(board, told, mask, q, k, v, options, before)
        if known is None and len(_plans) >= _MOST_PLANS:
            _plans.clear()
        _plans[key] = _Known(board, weakref.ref(given), given.version, plan)
    return plan.run_checked(q, k, v, sm_scale, clock)


class _Known(NamedTuple):
    """The last plan of a kind of call; the board is kept, so that its identity is nobody else's."""

    board: Board
    mask: weakref.ref[BlockMask]
    version: int
    plan: ParallelPlan


_plans: dict[Any, _Known] = {}
_MOST_PLANS = 64


def _key(board: Board, told: list[dict[str, Any]], options: Options) -> Any:
    """What calls have in common for which heads may stay where they are: all but the mask."""
    of_ranks = tuple((its["q_tokens"], its["kv_tokens"]) for its in told)
    same = tuple(str(fact) for key, fact in sorted(told[0].items()) if key != "mask")
    return id(board), of_ranks, same, options.layout, repr(options.regime)
