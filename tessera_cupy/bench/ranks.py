"""The processes of a measurement that torchrun started: who is there, and waiting for each other.

Ranks wait and tell each other figures through the store of their process group, which has a
time-out, so that a rank that is gone ends the others. Where there are GPUs each rank has one, and
NCCL moves tensors; elsewhere gloo does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from tessera_cupy.errors import wrong
from tessera_cupy.parallel.status import Board, Clock, board_of, checked_timeout, distributed

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks.

    Attributes:
        rank: its number.
        size: how many there are.
        device: its ``torch.device``.
        timeout: seconds that ranks wait for each other.
        board: what they tell each other.
    """

    rank: int
    size: int
    device: Any
    timeout: float
    board: Board

    @property
    def on_gpu(self) -> bool:
        """Whether tensors are on GPUs."""
        return bool(self.device.type == "cuda")

    def tell(self, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Wait for all ranks; what each of them tells, in plain data.

        Raises:
            RankError: a rank does not come in time.
        """
        self.board.begin()
        told = self.board.exchange(dict(facts), None, Clock(self.timeout))
        self.board.end()
        return told

    def wait(self) -> None:
        """Wait for all ranks, and for what this one's GPU was given."""
        if self.on_gpu:
            import torch

            torch.cuda.synchronize(self.device)
        self.tell({})

    def from_first(self, tensor: Any) -> Any:
        """Rank 0's values of a tensor, which all ranks have in one shape, in place."""
        distributed().broadcast(tensor, 0)
        return tensor


@contextmanager
def joined(timeout: Any) -> Iterator[Ranks]:
    """Be one of torchrun's ranks for a while.

    Args:
        timeout: seconds that ranks wait for each other, and that a transfer may take.

    Raises:
        MissingExtraError: torch is not installed.
        ValueError: torchrun did not start this process, or there are too few GPUs.
    """
    seconds = checked_timeout(timeout)
    dist = distributed()
    import torch

    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        fix = "run `torchrun --nproc-per-node 2 -m tessera_cupy bench parallel`"
        expected, got = "processes that torchrun started", f"no {', '.join(missing)} here"
        raise ValueError(wrong("ranks", expected, got, fix))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    local = int(os.environ["LOCAL_RANK"])
    if gpus and local >= gpus:
        fix = f"pass --nproc-per-node {gpus} or less"
        raise ValueError(wrong("ranks", f"at most {gpus} to a host", f"rank {local} of it", fix))
    device = torch.device("cuda", local) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpus else "gloo", timeout=timedelta(seconds=seconds))
    board = board_of(dist.group.WORLD)
    yield Ranks(board.rank, board.size, device, seconds, board)
    # Not after an error: groups whose transfers are half done may take the time-out to end.
    dist.destroy_process_group()
