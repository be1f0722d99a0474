"""Who takes part, and what becomes of a peer that fails or is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tessera_cupy import reference
from tessera_cupy.bench import contest, gpu
from tessera_cupy.bench.check import Expected, expect_rows
from tessera_cupy.bench.peers import PACKAGES, PEERS, UnsupportedError
from tessera_cupy.masks import BlockMask

RNG = np.random.default_rng(0)
MASK = BlockMask.from_dense(RNG.random((1, 2, 4, 4)) < 0.7, (16, 16))
Q, K, V = RNG.standard_normal((3, 1, 2, 64, 16)).astype(np.float32)
BY_NAME = {peer.name: peer for peer in PEERS}
CUDNN, FA2, FLEX = (BY_NAME[name] for name in ("cudnn", "fa2", "flex"))


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


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Modules that are there, of those of peers."""
    there = {"torch", "flashinfer"}
    monkeypatch.setattr(gpu, "has_torch", lambda: "torch" in there)
    monkeypatch.setattr(contest, "find_spec", lambda name: object() if name in there else None)
    return there


def test_all_that_are_installed_take_part_and_the_others_have_a_reason(installed: Any) -> None:
    peers, left_out = contest.choose(None)
    assert [peer.name for peer in peers] == [
        *("cudnn", "fa2", "flex", "flashinfer", "flashinfer-cake"),
    ]
    assert left_out == {
        "fa4": "needs flash-attn-4, which is not installed",
        "fa4-sparse": "needs flash-attn-4, which is not installed",
        "vsa": "needs fastvideo-kernel or vsa, which is not installed",
    }
    installed.add("vsa")
    assert "vsa" in [peer.name for peer in contest.choose(None)[0]]


def test_peers_that_are_named_come_in_the_order_of_the_table(installed: Any) -> None:
    assert contest.choose(["flex", "cudnn"]) == ((CUDNN, FLEX), {})
    assert contest.choose([]) == ((), {})
    assert contest.choose(None, [FLEX]) == ((FLEX,), {})


def test_without_torch_nobody_takes_part(installed: Any) -> None:
    installed.remove("torch")
    peers, left_out = contest.choose(None)
    assert peers == ()
    assert left_out == {peer.name: "needs torch with a GPU" for peer in PEERS}
    assert contest.choose([]) == ((), {})


@pytest.mark.parametrize(
    ("lacking", "name", "message"),
    [
        ("torch", "fa2", "got fa2, which needs torch with a GPU"),
        ("flashinfer", "flashinfer", "flashinfer, which needs flashinfer-python, which is not"),
    ],
)
def test_a_peer_that_is_asked_for_and_is_not_there_is_an_error(
    lacking: str, name: str, message: str, installed: Any
) -> None:
    installed.remove(lacking)
    with pytest.raises(ValueError, match=f"`peers`: expected peers that can run here, .*{message}"):
        contest.choose([name])


def test_a_package_whose_parent_does_not_load_is_left_out_with_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def find(name: str) -> Any:
        if name == "flash_attn.cute":
            raise ImportError("undefined symbol: _ZN3c10\nmore")
        return object()

    monkeypatch.setattr(gpu, "has_torch", lambda: True)
    monkeypatch.setattr(contest, "find_spec", find)
    reason = "does not load: ImportError: undefined symbol: _ZN3c10"
    assert contest.choose(None)[1] == {"fa4": reason, "fa4-sparse": reason}


def test_a_peer_that_fails_at_import_is_told_for_every_mask(
    monkeypatch: pytest.MonkeyPatch, expected: Expected
) -> None:
    def fails(*_: Any) -> Any:
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setitem(contest._RIVALS, "vsa", fails)
    reason = "OSError: libcudart.so.13: cannot open shared object file"
    entrants = contest.Contest([BY_NAME["vsa"]], (Q, K, V))
    for _ in range(2):
        assert entrants.calls(MASK, expected) == ({}, {"vsa": reason})
    assert contest.rivals([BY_NAME["vsa"]], (Q, K, V)) == ({}, {"vsa": reason})


def test_a_refusal_is_told_in_its_own_words(
    monkeypatch: pytest.MonkeyPatch, expected: Expected
) -> None:
    outputs = {"vsa": UnsupportedError("VSA takes blocks of 64 x 64 only")}
    assert contest_of(monkeypatch, outputs).calls(MASK, expected) == (
        {},
        {"vsa": "VSA takes blocks of 64 x 64 only"},
    )


def test_every_peer_has_a_way_to_run_and_a_package() -> None:
    for peer in PEERS:
        assert (peer.name in contest._RIVALS) is not peer.dense
        assert all(module in PACKAGES for module in peer.modules)


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


def test_a_peer_that_fails_while_it_is_timed_leaves_all_turns(queue: Any) -> None:
    calls_left = iter(range(4))

    def tires() -> None:
        if next(calls_left, None) is None:
            raise RuntimeError("out of memory\nand more")
        queue.launch("tires", host=0.01, work=5.0)

    def works(name: str, work: float) -> Any:
        return lambda: queue.launch(name, host=0.01, work=work)

    times, reasons = contest.timings(
        {"ours": works("ours", 2.0)},
        {"a": {"a_kernel": works("a", 3.0), "a": tires}, "b": {"b": works("b", 4.0)}},
        warm_up=1,
        runs=2,
        cold=False,
    )
    assert reasons == {"a": "RuntimeError: out of memory"}
    assert {name: time.median for name, time in times.items()} == pytest.approx(
        {"ours": 2.0, "b": 4.0}
    )


def test_our_own_failure_ends_the_run(queue: Any) -> None:
    def fails() -> None:
        raise RuntimeError("ours")

    with pytest.raises(RuntimeError, match="ours"):
        contest.timings({"ours": fails}, {}, warm_up=1, runs=1, cold=False)
