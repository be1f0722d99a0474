"""Drives a rank's program with the collectives and the sends of torch.distributed."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tessera_cupy.kernels.launch import Mark, unmarked
from tessera_cupy.parallel.exchange import Move, Wait
from tessera_cupy.parallel.status import Clock, distributed


class TransferError(Exception):
    """A transfer failed, for the cause that is given; who is to blame is not known here."""


def drive(
    program: Generator[Move | Wait, Any, Any],
    group: Any,
    clock: Clock,
    mark: Mark = unmarked,
) -> Any:
    """Run a rank's program to its end.

    Tensors in host memory are waited for, as long as the call has time. On a GPU the current stream
    waits in place of the host, and the group's own time-out counts.

    Args:
        program: of :func:`tessera_cupy.parallel.program.attend`.
        group: the process group.
        clock: the time that the call has.
        mark: told what the work was that the current stream was given since it was last told:
            ``"copies"`` or ``"exchange"``.

    Returns:
        What the program returns.

    Raises:
        TransferError: a transfer failed.
    """
    answer: Any = None
    while True:
        try:
            request = program.send(answer)
        except StopIteration as end:
            mark("copies")
            return end.value
        mark("copies")
        try:
            answer = _serve(request, group, clock)
            mark("exchange")
        except RuntimeError as error:
            program.close()
            raise TransferError(str(error)) from error


def _serve(request: Move | Wait, group: Any, clock: Clock) -> Any:
    if isinstance(request, Move):
        return _begin(request, group)
    tensors, works = request.begun
    for work in works:
        _wait(work, tensors[0], clock)
    return None


def _begin(request: Move, group: Any) -> tuple[list[Any], list[Any]]:
    dist = distributed()
    moves = [
        dist.P2POp(move, array, group=group, group_peer=rank)
        for move, arrays in ((dist.isend, request.sends), (dist.irecv, request.receives))
        for rank, of_rank in arrays.items()
        for array in of_rank
    ]
    tensors = [move.tensor for move in moves]
    if not moves:
        return tensors, []
    with current_device(tensors[0]):
        return tensors, dist.batch_isend_irecv(moves)


def _wait(work: Any, tensor: Any, clock: Clock) -> None:
    if tensor.device.type == "cpu":
        work.wait(clock.left)
    else:
        work.wait()


def current_device(tensor: Any) -> AbstractContextManager[Any]:
    """Makes a tensor's GPU current: groups of NCCL's calls are the current device's."""
    if tensor.device.type == "cpu":
        return nullcontext()
    import torch

    device: AbstractContextManager[Any] = torch.cuda.device(tensor.device)
    return device


def meet(group: Any, tensor: Any) -> None:
    """A first collective on the GPUs: sends of some ranks alone may not be NCCL's first of all.

    Raises:
        TransferError: the GPUs cannot reach each other.
    """
    try:
        distributed().all_reduce(tensor.new_zeros(1), group=group)
    except RuntimeError as error:
        raise TransferError(f"the ranks' GPUs cannot reach each other: {error}") from error
