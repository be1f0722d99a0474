"""Who takes part, and what becomes of a peer that fails or is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tessera_cupy import reference
from tessera_cupy.bench import contest, gpu
from tessera_cupy.bench.check import Expected, expect_rows
from tessera_cupy.bench.peers import PEERS
from tessera_cupy.masks import BlockMask

RNG = np.random.default_rng(0)
MASK = BlockMask.from_dense(RNG.random((1, 2, 4, 4)) < 0.7, (16, 16))
Q, K, V = RNG.standard_normal((3, 1, 2, 64, 16)).astype(np.float32)
CUDNN, FA2, FLEX = PEERS


@pytest.fixture
def expected() -> Expected:
    return expect_rows(MASK, Q, K, V, rows=64, dtype=np.float32, on_head=lambda: None)


def contest_of(monkeypatch: pytest.MonkeyPatch, outputs: dict[str, Any]) -> contest.Contest:
    """A contest whose peers return these outputs, or raise them."""

    def calls_of(peer: Any, arrays: Any) -> Any:
        def call() -> Any:
            output = outputs[peer.name]
            if isinstance(output, Exception):
                raise output
            return output

        return lambda mask: call

    monkeypatch.setattr(contest, "_calls_of", calls_of)
    monkeypatch.setattr(contest, "_host", lambda tensor: tensor)
    peers = [peer for peer in PEERS if peer.name in outputs]
    return contest.Contest(peers, (Q, K, V))


@pytest.mark.parametrize(
    ("there", "names", "chosen"),
    [
        (True, None, PEERS),
        (False, None, ()),
        (True, ["flex", "cudnn"], (CUDNN, FLEX)),
        (True, [], ()),
        (False, [], ()),
    ],
)
def test_who_takes_part(
    there: bool, names: Any, chosen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "has_torch", lambda: there)
    assert contest.choose(names) == chosen


def test_a_peer_that_is_asked_for_and_is_not_there_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu, "has_torch", lambda: False)
    with pytest.raises(ValueError, match=r"`peers`: .*got fa2 without torch on a GPU"):
        contest.choose(["fa2"])


def test_right_peers_get_a_call(monkeypatch: pytest.MonkeyPatch, expected: Expected) -> None:
    right = reference.attention(Q, K, V, MASK).astype(np.float32)
    # A dense peer computes something else, which is no fault of its own.
    calls, reasons = contest_of(monkeypatch, {"cudnn": 0 * right, "flex": right}).calls(
        MASK, expected
    )
    assert reasons == {}
    assert list(calls) == ["cudnn", "flex"]
    assert calls["flex"]() is right


def test_a_wrong_output_is_no_contestant(
    monkeypatch: pytest.MonkeyPatch, expected: Expected
) -> None:
    dense = reference.attention(Q, K, V, None).astype(np.float32)
    calls, reasons = contest_of(monkeypatch, {"flex": dense}).calls(MASK, expected)
    assert calls == {}
    assert reasons["flex"].startswith("wrong output: error ")


def test_a_failure_is_told_in_one_line_and_stops_nobody_else(
    monkeypatch: pytest.MonkeyPatch, expected: Expected
) -> None:
    error = RuntimeError(
        "backend='inductor' raised:\n\nLoweringException: ValueError: Q and KV block size must be "
        "divisible by BLOCK_M and BLOCK_N.\n  target: flex_attention\n"
    )
    outputs = {"cudnn": Q, "fa2": error, "flex": ValueError()}
    calls, reasons = contest_of(monkeypatch, outputs).calls(MASK, expected)
    assert list(calls) == ["cudnn"]
    assert reasons["fa2"] == (
        "RuntimeError: LoweringException: ValueError: Q and KV block size must be divisible by "
        "BLOCK_M and BLOCK_N."
    )
    assert reasons["flex"] == "ValueError: no message"


def test_only_flex_is_told_options() -> None:
    assert contest.options(FLEX, (64, 64)) == {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4}
    assert contest.options(CUDNN, (64, 64)) == contest.options(FA2, (16, 16)) == {}
