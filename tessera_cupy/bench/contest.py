"""What the peers run: torch's attention on the same q, k, v and mask, on the same stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy import interop
from tessera_cupy.bench import gpu
from tessera_cupy.bench.check import Expected
from tessera_cupy.bench.flex import make_flex, tile_options
from tessera_cupy.bench.peers import PEERS, Peer
from tessera_cupy.errors import wrong
from tessera_cupy.masks import BlockMask


def choose(names: Sequence[str] | None) -> tuple[Peer, ...]:
    """The peers of these names, in the order of the table; None means all that can run here.

    Raises:
        ValueError: peers are named, and torch is not installed or has no GPU.
    """
    there = gpu.has_torch()
    if names is None:
        return PEERS if there else ()
    if names and not there:
        raise ValueError(
            wrong(
                "peers",
                "peers that can run here; all of them are torch's",
                f"{' '.join(names)} without torch on a GPU",
                "install torch with CUDA, or give --peers no name",
            )
        )
    return tuple(peer for peer in PEERS if peer.name in names)


class Contest:
    """The peers' calls over one q, k and v.

    Args:
        peers: who takes part.
        arrays: q, k and v, CuPy bfloat16 (1, heads, tokens, d).
    """

    def __init__(self, peers: Sequence[Peer], arrays: tuple[Any, Any, Any]) -> None:
        self._calls = {peer: _calls_of(peer, arrays) for peer in peers}

    def calls(
        self, mask: BlockMask, expected: Expected
    ) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
        """What each peer runs for a mask, compiled and, where it takes the mask, checked.

        Args:
            mask: the mask.
            expected: rows of the right output.

        Returns:
            The calls by the peers' names, and for those that cannot run, why not.
        """
        calls: dict[str, Callable[[], Any]] = {}
        reasons: dict[str, str] = {}
        for peer, make in self._calls.items():
            try:
                call = make(mask)
                result = call()
                # Dense attention knows no mask.
                problem = problem_of(result, expected) if peer.backend is None else None
            except Exception as error:  # a peer's own failure, of whatever type, is a result here
                problem = one_line(error)
            if problem is None:
                calls[peer.name] = call
            else:
                reasons[peer.name] = problem
        return calls, reasons


def options(peer: Peer, block_size: tuple[int, int]) -> dict[str, int]:
    """What a peer was told beyond its defaults."""
    return tile_options(block_size) if peer.backend is None else {}


def _calls_of(peer: Peer, arrays: tuple[Any, Any, Any]) -> Callable[[BlockMask], Callable[[], Any]]:
    if peer.backend is None:
        return make_flex(*arrays).call
    dense = gpu.dense_call(*arrays, peer.backend)
    return lambda mask: dense


def problem_of(result: Any, expected: Expected) -> str | None:
    """What is wrong with a peer's output under a mask; None for a right one."""
    check = expected.check(_host(result))
    if check.passed:
        return None
    return f"wrong output: error {check.error:.1e}, {check.allowed:.1e} allowed"


def _host(tensor: Any) -> NDArray[Any]:
    import torch

    bits: NDArray[np.int16] = tensor.view(torch.int16).cpu().numpy()
    return bits.view(interop.numpy_dtype("bfloat16"))


def one_line(error: Exception) -> str:
    """Type and first line that says something; torch's errors go on for pages."""
    lines = [line.strip() for line in str(error).splitlines()]
    telling = [line for line in lines if line and not line.endswith("raised:")]
    return f"{type(error).__name__}: {telling[0][:200] if telling else 'no message'}"
