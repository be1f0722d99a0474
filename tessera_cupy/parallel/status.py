"""What ranks tell each other beside their tensors: that they are there, what failed, who is lost.

Messages are short texts in the store of the process group, which torch.distributed has for its own
rendezvous. A call is a round; every rank counts its rounds. Below the prefix ``tessera_cupy``:

===================  ==========================================================================
``ROUND/said/RANK``  what a rank says at the start of a round: facts of its arguments, or an error
``ROUND/down/RANK``  that a rank ended a round with an error: its own, or that it lost others
``at/RANK``          the round that a rank is in, and ``done`` once it is through
===================  ==========================================================================

A rank whose transfer fails looks there for the cause. It waits for reports until its time is up:
a rank that has neither reported nor gone on by then did not answer, and is named.
"""

from __future__ import annotations

import json
import math
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from tessera_cupy.errors import MissingExtraError, RankError, wrong

#: Seconds that a call may take unless the caller says otherwise.
TIMEOUT = 60.0

# How long ranks whose time is up wait for the reports of others, whose time is up soon after.
_AGREEMENT = 1.0
_POLL, _LINGER = 0.02, 0.2
_MOST_TEXT = 2000
_MOST_NAMED = 4


class Clock:
    """The time that a call has."""

    def __init__(self, timeout: float) -> None:
        """Start it."""
        self.timeout = timeout
        self._end = time.monotonic() + timeout

    @property
    def left(self) -> timedelta:
        """What is left of it; a millisecond at least, which waits take for a little."""
        return timedelta(seconds=max(0.001, self._end - time.monotonic()))


def checked_timeout(timeout: Any) -> float:
    """A time-out in seconds.

    Args:
        timeout: a number of seconds or a ``timedelta``.

    Raises:
        TypeError: neither.
        ValueError: not positive, or not finite.

    >>> checked_timeout(timedelta(minutes=1))
    60.0
    """
    fix = "pass seconds, such as timeout=30"
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        got = type(timeout).__name__
        raise TypeError(wrong("timeout", "seconds or a timedelta", got, fix))
    if not (math.isfinite(timeout) and timeout > 0):
        raise ValueError(wrong("timeout", "a finite positive time", timeout, fix))
    return float(timeout)


def distributed() -> Any:
    """``torch.distributed``.

    Raises:
        MissingExtraError: torch is not installed.
    """
    try:
        import torch.distributed as dist
    except ImportError as error:
        raise MissingExtraError(
            "Attention over several ranks runs in torch.distributed, and torch is not installed. "
            "Fix: pip install torch (the extra `parallel`)."
        ) from error
    return dist


def checked_group(group: Any) -> Any:
    """A process group that this process is in; None means that of all processes.

    Raises:
        MissingExtraError: torch is not installed.
        TypeError: no process group.
        ValueError: torch.distributed is not set up, or this process is not in the group.
    """
    dist = distributed()
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            wrong(
                "group",
                "a process group of torch.distributed",
                "no process group in this process",
                'start the program with torchrun, and call init_process_group("nccl") first',
            )
        )
    if group is None:
        group = dist.group.WORLD
    elif hasattr(group, "get_group") and hasattr(group, "mesh_dim_names"):
        group = group.get_group()  # a device mesh of one dimension
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        expected, got = "a group that this process is in", "one that it is not in"
        raise ValueError(wrong("group", expected, got, "call it on the group's ranks alone"))
    if not isinstance(group, dist.ProcessGroup):
        expected = "a process group of torch.distributed, or None for all processes"
        fix = "pass what torch.distributed.new_group returned"
        raise TypeError(wrong("group", expected, type(group).__name__, fix))
    return group


class Board:
    """The messages of one process group, which it does not keep alive.

    A group that ``destroy_process_group`` has ended must be free to go: else the threads of gloo go
    on until Python ends, and one that then drops a tensor aborts the process.

    Attributes:
        rank: this process's rank in the group.
        size: ranks of the group.
        met: this process's GPUs that NCCL has connected with those of the other ranks.
    """

    def __init__(self, group: Any) -> None:
        """Use :func:`board_of`."""
        dist = distributed()
        if not hasattr(group, "get_group_store"):
            raise MissingExtraError(
                "Ranks tell each other of errors through ProcessGroup.get_group_store, which this "
                "torch lacks. Fix: pip install -U torch (the extra `parallel`)."
            )
        self._group = weakref.ref(group)
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        self.met: set[str] = set()
        self._global = dist.get_process_group_ranks(group)
        self._store = dist.PrefixStore("tessera_cupy", group.get_group_store())
        self._round = 0

    @property
    def group(self) -> Any:
        """The process group.

        Raises:
            ValueError: it was destroyed.
        """
        return self._alive()

    def _alive(self) -> Any:
        group = self._group()
        if group is None:
            fix = "make a plan for a group that lives"
            raise ValueError(wrong("group", "a process group", "one that was destroyed", fix))
        return group

    def is_of(self, group: Any) -> bool:
        """Whether these are the messages of this very group, not of an older one of its name."""
        return self._group() is group

    def name(self, rank: int) -> str:
        """The rank in words, with its global number where that is another."""
        everywhere = self._global[rank]
        return f"rank {rank}" if everywhere == rank else f"rank {rank} (global {everywhere})"

    def names(self, ranks: Sequence[int]) -> str:
        """Several ranks in words, the first few by name."""
        named = ", ".join(self.name(rank) for rank in ranks[:_MOST_NAMED])
        more = len(ranks) - _MOST_NAMED
        return f"{named} and {more} more" if more > 0 else named

    def begin(self) -> None:
        """Begin a round; what this rank said two rounds ago has been read by all.

        Raises:
            ValueError: the group was destroyed.
            RankError: its store cannot be reached.
        """
        self._alive()
        self._round += 1
        try:
            self._store.set(f"at/{self.rank}", str(self._round))
            self._store.delete_key(f"{self._round - 2}/said/{self.rank}")
        except RuntimeError as error:
            raise self._unreachable(error) from error

    def end(self) -> None:
        """End a round that went well."""
        try:
            self._store.set(f"at/{self.rank}", f"{self._round} done")
        except RuntimeError as error:
            raise self._unreachable(error) from error

    def exchange(
        self, facts: dict[str, Any] | None, error: BaseException | None, clock: Clock
    ) -> list[dict[str, Any]]:
        """Tell all ranks this one's facts, or its error, and hear theirs.

        Returns:
            The facts of each rank.

        Raises:
            RankError: a rank has an error, or says nothing in time; on all ranks that hear it.
            Exception: the rank's own error, where all ranks have the same.
        """
        said = {"facts": facts} if error is None else {"error": _text(error)}
        keys = [f"{self._round}/said/{rank}" for rank in range(self.size)]
        try:
            self._store.set(keys[self.rank], json.dumps(said))
        except RuntimeError as lost:
            raise self._unreachable(lost) from lost
        try:
            self._store.wait(keys, clock.left)
            heard = [json.loads(text) for text in self._store.multi_get(keys)]
        except RuntimeError as lost:
            raise self._unheard(keys, clock) from lost
        errors = {rank: said["error"] for rank, said in enumerate(heard) if "error" in said}
        if error is not None and len(errors) == self.size and len(set(errors.values())) == 1:
            raise error
        if errors:
            named = list(errors.items())[:_MOST_NAMED]
            text = "; ".join(f"{self.name(rank)} failed: {what}" for rank, what in named)
            more = len(errors) - len(named)
            raise RankError(text + (f"; and {more} more ranks failed" if more else "")) from error
        return [said["facts"] for said in heard]

    def failed(self, error: BaseException) -> RankError:
        """Tell all ranks that this one failed; the error to raise here."""
        self._report({"failed": _text(error)})
        return RankError(f"{self.name(self.rank)} failed: {_text(error)}")

    def verdict(self, error: BaseException, clock: Clock) -> RankError:
        """Why a transfer failed: who failed or was lost, as soon as that is known.

        Waits for reports until the call's time is up, and a second more.
        """
        self._report({"lost": []})
        answered = {self.rank}
        end = time.monotonic() + clock.left.total_seconds() + _AGREEMENT
        try:
            while len(answered) < self.size and time.monotonic() < end:
                for rank in sorted(set(range(self.size)) - answered):
                    report = self._read(rank)
                    if report and "failed" in report:
                        return RankError(f"{self.name(rank)} failed: {report['failed']}")
                    if report and report["lost"]:
                        return self._lost(report["lost"], clock, "go on")
                    # A rank that waits for others itself may yet find out whom.
                    if report or self._is_past(rank):
                        answered.add(rank)
                time.sleep(_POLL)
            for rank in range(self.size):
                report = self._read(rank)
                if report and "failed" in report:
                    return RankError(f"{self.name(rank)} failed: {report['failed']}")
        except RuntimeError as gone:
            if 0 not in answered:
                return self._unreachable(gone)
        silent = sorted(set(range(self.size)) - answered)
        if silent:
            return self._lost(silent, clock, "go on")
        return RankError(
            f"a transfer between ranks failed, though all of them answer: {_text(error)}"
        )

    def _unheard(self, keys: list[str], clock: Clock) -> RankError:
        """Who said nothing, when the time is up."""
        try:
            silent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        except RuntimeError as gone:
            return self._unreachable(gone)
        return self._lost(silent, clock, "begin the call")

    def _lost(self, ranks: list[int], clock: Clock, doing: str) -> RankError:
        self._report({"lost": ranks})
        time.sleep(_LINGER)  # this process may hold the store, and end
        return RankError(
            f"{self.names(ranks)} did not {doing} within {clock.timeout:g} s: killed, hanging, or "
            "in other code than the rest of the group. Every rank of the group must make the same "
            "calls in the same order; timeout= is how long they wait for each other"
        )

    def _unreachable(self, error: BaseException) -> RankError:
        return RankError(
            f"{self.name(0)} is gone, most likely: the store of the process group, which it or "
            f"torchrun holds, cannot be reached: {_text(error)}"
        )

    def _report(self, report: dict[str, Any]) -> None:
        try:
            self._store.set(f"{self._round}/down/{self.rank}", json.dumps(report))
        except RuntimeError:
            return  # nobody is there to read it

    def _read(self, rank: int) -> dict[str, Any] | None:
        key = f"{self._round}/down/{rank}"
        if not self._store.check([key]):
            return None
        report: dict[str, Any] = json.loads(self._store.get(key))
        return report

    def _is_past(self, rank: int) -> bool:
        """Whether a rank is through this round."""
        key = f"at/{rank}"
        if not self._store.check([key]):
            return False
        number, _, done = self._store.get(key).decode().partition(" ")
        return int(number) > self._round or (int(number) == self._round and bool(done))


_boards: dict[str, Board] = {}


def board_of(group: Any) -> Board:
    """The messages of a group; one object for each, since ranks count their rounds together."""
    board = _boards.get(group.group_name)
    if board is None or not board.is_of(group):
        board = _boards[group.group_name] = Board(group)
    return board


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_MOST_TEXT]
