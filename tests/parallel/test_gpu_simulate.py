"""All ranks in turn on one GPU: the kernels on parts of masks, and merging there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tessera_cupy import BlockMask, reference
from tessera_cupy.parallel import Degrees, Shards, make_schedule, simulate

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("degrees", "turns"), [((2, 1), 1), ((2, 1), 2), ((1, 2), 1), ((2, 2), 1), ((1, 4), 1)]
)
@pytest.mark.parametrize("text", [0, 77])
def test_ranks_in_turn_equal_the_whole(degrees: tuple[int, int], turns: int, text: int) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    ranks = degrees[0] * degrees[1]
    shards = Shards(tuple(300 + 64 * rank for rank in range(ranks)), text)
    tokens, blocks = shards.total, -(-shards.total // 64)
    keep = rng.random((6, blocks, blocks)) < np.linspace(0.1, 0.9, 6)[:, None, None]
    mask = BlockMask.from_dense(keep, (64, 64), (tokens, tokens))
    schedule = make_schedule(mask, Degrees(*degrees), shards, shards, q_heads=6, kv_heads=3)
    schedule = schedule.in_turns(turns)
    whole = [
        torch.from_numpy(rng.standard_normal((1, heads, tokens, 64), np.float32)).bfloat16()
        for heads in (6, 3, 3)
    ]

    def local(x: Any, rank: int) -> Any:
        spans = shards.keys(rank, rank + 1, text=True)
        return torch.cat([x[:, :, span.begin : span.end] for span in spans], dim=2)

    parts = [[local(x, rank).cuda() for rank in range(ranks)] for x in whole]
    found, _ = simulate(schedule, *parts)
    expected = torch.from_numpy(reference.attention(*(x.float().numpy() for x in whole), mask))
    for rank in range(ranks):
        difference = (found[rank].cpu().double() - local(expected, rank)).abs().max().item()
        assert difference < 2e-2
