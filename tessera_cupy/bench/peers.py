"""What the families are measured against, in the same run on the same GPU.

Two are torch's; the others are packages that a machine may have or lack. No one of them is a
dependency: whoever is not installed, or cannot take a block size, a head dim or a GPU, is left out,
and the report says why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from tessera_cupy.masks import BlockMask


@dataclass(frozen=True)
class Peer:
    """A contestant.

    Attributes:
        name: as on the command line.
        title: as in the table.
        dense: whether it computes every pair, or the mask.
        modules: any of these must be importable beside torch.
        backend: name in ``torch.nn.attention.SDPBackend``; None where it is none of torch's.
    """

    name: str
    title: str
    dense: bool
    modules: tuple[str, ...]
    backend: str | None = None


_FA4 = "flash_attn.cute"

PEERS = (
    Peer("cudnn", "cuDNN", True, ("torch",), "CUDNN_ATTENTION"),
    Peer("fa2", "FA2", True, ("torch",), "FLASH_ATTENTION"),
    Peer("fa4", "FA4", True, (_FA4,)),
    Peer("flex", "Flex", False, ("torch",)),
    Peer("fa4-sparse", "FA4 sparse", False, (_FA4,)),
    Peer("flashinfer", "FlashInfer", False, ("flashinfer",)),
    Peer("flashinfer-cake", "FI cake", False, ("flashinfer",)),
    Peer("vsa", "VSA", False, ("fastvideo_kernel", "vsa")),
)

#: Those that compute the mask.
SPARSE = tuple(peer for peer in PEERS if not peer.dense)

#: The package of each module of a peer.
PACKAGES = {
    "torch": "torch",
    _FA4: "flash-attn-4",
    "flashinfer": "flashinfer-python",
    "fastvideo_kernel": "fastvideo-kernel",
    "vsa": "vsa",
}


class UnsupportedError(Exception):
    """A peer cannot take a mask, a head dim or this GPU; the text says which."""


class Rival(Protocol):
    """A peer that computes masks, over one q, k and v."""

    def call(self, mask: BlockMask) -> Callable[[], Any]:
        """The attention alone under a mask: what it needs of the mask is made now.

        Args:
            mask: uniform blocks kept whole, batch 1, a mask for each head of q or one for all.

        Returns:
            A call whose result is O, a torch tensor (1, heads, tokens, d).

        Raises:
            UnsupportedError: it cannot take the mask.
        """
        ...

    def request(self, mask: BlockMask, dense: Any) -> Callable[[], Any]:
        """The same attention, with what it needs of the mask made in each call.

        Args:
            mask: the mask, of which :meth:`call` was asked last.
            dense: (1, heads, nq, nk) bool CuPy array of its blocks.
        """
        ...
