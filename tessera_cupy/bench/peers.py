"""What the families are measured against, in the same run on the same GPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Peer:
    """A contestant.

    Attributes:
        name: as on the command line.
        title: as in the table.
        backend: name in ``torch.nn.attention.SDPBackend`` of a dense one, which computes
            every pair; None for FlexAttention, which computes the mask.
    """

    name: str
    title: str
    backend: str | None


PEERS = (
    Peer("cudnn", "cuDNN", "CUDNN_ATTENTION"),
    Peer("fa2", "FA2", "FLASH_ATTENTION"),
    Peer("flex", "Flex", None),
)
