"""What ranks compare before a call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tessera_cupy import ArraySpec, BlockMask
from tessera_cupy.parallel.facts import GPU, HOST, agree, facts


def told(*places: str | None) -> list[dict[str, Any]]:
    """Facts of ranks that agree in all but where their tensors are."""
    spec = ArraySpec((1, 2, 16, 8))
    mask = BlockMask.from_dense(np.ones((2, 2), bool), (16, 16))
    known = {"layout": "BHSD", "scheme": "ring", "text": 0, "text_first": False, "most_heads": None}
    mine = facts(mask, spec, spec, spec, **known)  # type: ignore[arg-type]
    return [{**mine, "place": place} for place in places]


def test_some_ranks_on_gpus_and_some_not_are_refused() -> None:
    with pytest.raises(ValueError, match=r"host memory on rank 0 and a GPU on rank 2\. Fix: move"):
        agree(told(HOST, None, GPU), "rank {}".format)


@pytest.mark.parametrize("places", [(GPU, GPU), (HOST, HOST), (None, GPU), (None, None)])
def test_ranks_that_plan_without_tensors_fit_to_any(places: tuple[str | None, ...]) -> None:
    q, kv = agree(told(*places), str)
    assert q.lengths == kv.lengths == (16, 16)
