"""What the peers run: their attention on the same q, k, v and mask, on the same stream.

A peer that does not import, refuses a mask, fails or is wrong is a result, told by name in one
line, and the run goes on. One that breaks the CUDA context takes the run with it: nothing in this
process can help that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy import interop
from tessera_cupy.bench import gpu
from tessera_cupy.bench.check import Expected
from tessera_cupy.bench.fa4_peer import dense_fa4, make_fa4_sparse
from tessera_cupy.bench.flashinfer_peer import make_flashinfer
from tessera_cupy.bench.flex import make_flex, tile_options
from tessera_cupy.bench.gpu import Timing
from tessera_cupy.bench.peers import PACKAGES, PEERS, Peer, Rival, UnsupportedError
from tessera_cupy.bench.vsa_peer import make_vsa
from tessera_cupy.errors import wrong
from tessera_cupy.masks import BlockMask

_RIVALS: dict[str, Callable[..., Rival]] = {
    "flex": make_flex,
    "fa4-sparse": make_fa4_sparse,
    "flashinfer": make_flashinfer,
    "flashinfer-cake": partial(make_flashinfer, backend="cake"),
    "vsa": make_vsa,
}


def choose(
    names: Sequence[str] | None, among: Sequence[Peer] = PEERS
) -> tuple[tuple[Peer, ...], dict[str, str]]:
    """The peers of these names, in the order of the table; None means all that can run here.

    Args:
        names: of ``among``, or None.
        among: who may take part.

    Returns:
        The peers, and by name why others are left out, which None alone does.

    Raises:
        ValueError: a peer is named that is not installed, or torch has no GPU.
    """
    asked = [peer for peer in among if names is None or peer.name in names]
    absent = {peer.name: reason for peer in asked if (reason := _absence(peer))}
    if names is not None and absent:
        raise ValueError(
            wrong(
                "peers",
                "peers that can run here",
                "; ".join(f"{name}, which {reason}" for name, reason in absent.items()),
                "install what they need, or leave them out (--peers with no name leaves out all)",
            )
        )
    return tuple(peer for peer in asked if peer.name not in absent), absent


def _absence(peer: Peer) -> str | None:
    """Why a peer cannot take part; None where it can."""
    if not gpu.has_torch():
        return "needs torch with a GPU"
    try:
        there = any(find_spec(module) is not None for module in peer.modules)
    except Exception as error:  # finding a submodule imports its parent, which may fail in any way
        return f"does not load: {one_line(error)}"
    packages = " or ".join(PACKAGES[module] for module in peer.modules)
    return None if there else f"needs {packages}, which is not installed"


def rivals(
    peers: Iterable[Peer], arrays: tuple[Any, Any, Any]
) -> tuple[dict[str, Rival], dict[str, str]]:
    """Peers that compute masks, over q, k and v; and by name why others cannot.

    Args:
        peers: who takes part, of :data:`tessera_cupy.bench.peers.SPARSE`.
        arrays: q, k and v, CuPy bfloat16 (1, heads, tokens, d).
    """
    made: dict[str, Rival] = {}
    reasons: dict[str, str] = {}
    for peer in peers:
        try:
            made[peer.name] = _RIVALS[peer.name](*arrays)
        except Exception as error:  # a peer's own failure, of whatever type, is a result here
            reasons[peer.name] = reason_of(error)
    return made, reasons


class Contest:
    """The peers' calls over one q, k and v.

    Args:
        peers: who takes part.
        arrays: q, k and v, CuPy bfloat16 (1, heads, tokens, d).
    """

    def __init__(self, peers: Sequence[Peer], arrays: tuple[Any, Any, Any]) -> None:
        self._peers = tuple(peers)
        self._makers: dict[str, Callable[[BlockMask], Callable[[], Any]]] = {}
        self._reasons: dict[str, str] = {}
        for peer in peers:
            try:
                self._makers[peer.name] = _calls_of(peer, arrays)
            except Exception as error:  # a peer's own failure, of whatever type, is a result here
                self._reasons[peer.name] = reason_of(error)

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
        reasons = dict(self._reasons)
        for peer in self._peers:
            if peer.name in reasons:
                continue
            try:
                call = self._makers[peer.name](mask)
                result = call()
                # Dense attention knows no mask.
                problem = None if peer.dense else problem_of(result, expected)
            except Exception as error:  # as above
                problem = reason_of(error)
            if problem is None:
                calls[peer.name] = call
            else:
                reasons[peer.name] = problem
        return calls, reasons


class _FailedError(Exception):
    """A peer's call failed while it was timed."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(reason)
        self.peer, self.reason = peer, reason


def timings(
    ours: Mapping[str, Callable[[], object]],
    theirs: Mapping[str, Mapping[str, Callable[[], object]]],
    *,
    warm_up: int,
    runs: int,
    cold: bool,
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Times of all calls in turns; a peer that fails at one of its calls is left out of all turns.

    Args:
        ours: this package's calls, by name.
        theirs: by peer, its calls by name.
        warm_up: as of :func:`tessera_cupy.bench.gpu.timings`.
        runs: the same.
        cold: the same.

    Returns:
        Times by the calls' names, and by peer why it has none.
    """
    left, reasons = dict(theirs), dict[str, str]()
    while True:
        calls = dict(ours)
        for peer, own in left.items():
            calls |= {name: partial(_guarded, peer, call) for name, call in own.items()}
        try:
            times = gpu.timings(calls, lambda: None, warm_up=warm_up, runs=runs, cold=cold)
        except _FailedError as error:
            reasons[error.peer] = error.reason
            del left[error.peer]
        else:
            return times, reasons


def _guarded(peer: str, call: Callable[[], object]) -> None:
    try:
        call()
    except Exception as error:  # as above
        raise _FailedError(peer, reason_of(error)) from error


def options(peer: Peer, block_size: tuple[int, int]) -> dict[str, int]:
    """What a peer was told beyond its defaults."""
    return tile_options(block_size) if peer.name == "flex" else {}


def _calls_of(peer: Peer, arrays: tuple[Any, Any, Any]) -> Callable[[BlockMask], Callable[[], Any]]:
    if not peer.dense:
        return _RIVALS[peer.name](*arrays).call
    dense = dense_fa4(*arrays) if peer.name == "fa4" else gpu.dense_call(*arrays, peer.backend)
    return lambda mask: dense


def cudnn(arrays: tuple[Any, Any, Any], name: str) -> dict[str, dict[str, Callable[[], object]]]:
    """Torch's dense attention by cuDNN, for :func:`timings`, under a name; none without torch."""
    if not gpu.has_torch():
        return {}
    return {name: {name: gpu.dense_call(*arrays, "CUDNN_ATTENTION")}}


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


def reason_of(error: Exception) -> str:
    """Why a peer has no figure, in one line."""
    return str(error) if isinstance(error, UnsupportedError) else one_line(error)


def one_line(error: Exception) -> str:
    """Type and first line that says something; torch's errors go on for pages."""
    lines = [line.strip() for line in str(error).splitlines()]
    telling = [line for line in lines if line and not line.endswith("raised:")]
    return f"{type(error).__name__}: {telling[0][:200] if telling else 'no message'}"
