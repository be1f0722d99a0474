"""Predictions: the choice and its figures by hand, links, large groups, bad input."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from tessera_cupy import ArraySpec, BlockMask, make_plan
from tessera_cupy.cost import predict as predict_plan
from tessera_cupy.parallel import Shards, predict
from tessera_cupy.parallel.network import LINKS, Network, find_link, usual_network

FULL = BlockMask.from_dense(np.ones((4, 16, 16), bool), (128, 128))
SPEC = ArraySpec((1, 4, 2048, 128))


def test_one_rank_takes_what_the_cost_model_says() -> None:
    # Long enough that each head fills the GPU.
    mask = BlockMask.from_dense(np.ones((4, 64, 64), bool), (128, 128))
    spec = ArraySpec((1, 4, 8192, 128))
    found = predict(mask, spec, ranks=1)
    alone = predict_plan(make_plan(mask, spec, arch="sm_90a")).ms
    # The rate is that of three heads of the four, of which it is no exact multiple.
    assert found.best.ms == pytest.approx(alone, rel=0.1)
    assert found.best.sent.tolist() == [0]
    assert found.alone_ms == pytest.approx(found.best.ms)


def test_bytes_and_exchanges_are_those_of_the_formula() -> None:
    one = predict(FULL, SPEC, ranks=2, scheme="ulysses").best
    # Two heads of q, K, V and o, 1,024 tokens of 256 bytes each.
    assert one.sent.tolist() == [2 * 4 * 1024 * 256] * 2
    assert one.swap_ms == pytest.approx(2 * 0.02 + 2 * 4 * 1024 * 256 / (0.8 * 450e9) * 1e3)
    assert one.balance == 1
    assert one.ms == pytest.approx(one.swap_ms + one.compute_ms.max())
    slow = predict(FULL, SPEC, ranks=2, scheme="ulysses", per_host=1).best
    assert slow.swap_ms == pytest.approx(2 * 0.02 + 2 * 4 * 1024 * 256 / (0.8 * 50e9) * 1e3)


def test_a_ring_hides_its_transfers_behind_computing() -> None:
    fast = Network(LINKS["NVLink 5"], LINKS["NVLink 5"], 8)
    slow = Network(LINKS["InfiniBand HDR"], LINKS["InfiniBand HDR"], 8)
    quick = predict(FULL, SPEC, ranks=2, scheme="ring", network=fast).best
    late = predict(FULL, SPEC, ranks=2, scheme="ring", network=slow).best
    assert quick.compute_ms.tolist() == late.compute_ms.tolist()
    # K and V of four heads and 1,024 tokens, less what is computed in the first of two steps.
    moved = 0.02 + 2 * 4 * 1024 * 256 / (0.8 * 25e9) * 1e3
    assert late.wait_ms == pytest.approx(moved - late.compute_ms / 2)
    assert quick.wait_ms.max() < late.wait_ms.max()
    assert quick.swap_ms == late.swap_ms == 0


def test_a_band_makes_the_ring_cheap() -> None:
    # Each rank needs its own keys alone: nothing moves in a ring.
    mask = BlockMask.from_dense(np.kron(np.eye(4, dtype=bool), np.ones((4, 4), bool)), (128, 128))
    found = predict(mask, SPEC, ranks=4)
    assert found.best.degrees.name == "ring"
    assert found.best.sent.tolist() == [0] * 4
    assert found.best.wait_ms.tolist() == [0] * 4


def test_uneven_heads_cost_ulysses_what_they_weigh() -> None:
    keep = np.ones((4, 16, 16), bool)
    keep[1:, :, 1:] = False  # one head of 256 blocks, three of 16
    mask = BlockMask.from_dense(keep, (128, 128))
    one = predict(mask, SPEC, ranks=2, scheme="ulysses").best
    assert one.balance == pytest.approx((256 + 16) / ((256 + 48) / 2))
    assert one.compute_ms[0] > one.compute_ms[1]
    assert one.rank_ms.tolist() == [one.ms] * 2  # the exchange back waits for the busiest
    assert predict(mask, SPEC, ranks=2, scheme="ring").best.balance == 1


def test_more_ranks_than_heads_leave_pure_ulysses_behind() -> None:
    found = predict(FULL, SPEC, ranks=16)
    by_name = {one.degrees.name: one for one in found.schemes}
    assert by_name["ulysses"].balance == 4
    assert by_name["ulysses 4 x ring 4"].balance == pytest.approx(1)
    assert found.best.ms == min(one.ms for one in found.schemes)


def test_a_thousand_ranks_take_seconds() -> None:
    rng = np.random.default_rng(0)
    keep = rng.random((24, 256, 256)) < 0.1
    begin = time.monotonic()
    mask = BlockMask.from_dense(keep, (128, 128))
    found = predict(mask, ArraySpec((1, 24, 32768, 128)), ranks=1024)
    assert len(found.schemes) == 11
    assert all(len(one.loads) == 1024 for one in found.schemes)
    totals = [one.loads.sum() for one in found.schemes]
    np.testing.assert_allclose(totals, keep.sum() * 128 * 128)
    assert time.monotonic() - begin < 60  # some seconds, on a machine that is not busy


def test_an_empty_mask_has_nothing_to_compute() -> None:
    mask = BlockMask.from_dense(np.zeros((4, 16, 16), bool), (128, 128))
    found = predict(mask, SPEC, ranks=2)
    assert found.best.compute_ms.tolist() == [0, 0]
    assert all(one.balance == 1 for one in found.schemes)


def test_batches_count() -> None:
    one = predict(FULL, SPEC, ranks=2, scheme="ulysses").best
    two = predict(FULL, ArraySpec((2, 4, 2048, 128)), ranks=2, scheme="ulysses").best
    assert two.loads.tolist() == (2 * one.loads).tolist()
    assert two.sent.tolist() == (2 * one.sent).tolist()


def test_the_summary_is_plain() -> None:
    data = predict(FULL, SPEC, ranks=4).summary()
    assert data["best"] == data["schemes"][0]["scheme"]
    assert data["links"]["within"] == "NVLink 4"
    assert [one["ms"] for one in data["schemes"]] == sorted(one["ms"] for one in data["schemes"])


def test_links_of_gpus() -> None:
    assert usual_network("A100-SXM4-80GB").within.gbs == 300
    assert usual_network("RTX 4090").within.name == "PCIe 4.0 x16"
    assert find_link("NVLink 5").ms(720e6) == pytest.approx(1)
    with pytest.raises(ValueError, match="`link`: expected one of NVLink 3"):
        find_link("string")


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"ranks": 0}, "`ranks`: expected 1 to 4096, got 0"),
        ({"ranks": None}, "`ranks`: expected 1 to 4096, got None"),
        ({"ranks": 5000}, "got 5000"),
        ({"gpu": "H999"}, "`gpu`: expected one of"),
        ({"scheme": "star"}, "`scheme`: expected"),
        ({"scheme": (3, 1)}, "degrees for a group of 2 ranks, got 3 x 1"),
        ({"q": ArraySpec((1, 4, 1024, 128))}, "`mask`: expected 1024 query and 2048 key tokens"),
        ({"q": ArraySpec((1, 3, 2048, 128))}, "`mask`: expected a head axis of 1 or 3"),
        ({"shards": (Shards((1024, 1024)), Shards((1024, 1000)))}, "`k`: expected shards with"),
    ],
)
def test_bad_input_is_refused(changed: dict[str, Any], text: str) -> None:
    given = {"mask": FULL, "q": SPEC, "ranks": 2, **changed}
    with pytest.raises(ValueError, match=text):
        predict(given.pop("mask"), given.pop("q"), **given)
