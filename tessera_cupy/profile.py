"""Where the time of a request goes, by CUDA events between its launches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

# Marks of the launches, by the part of the request that they belong to.
_PARTS = {
    "mask state": "mask_state",
    "tile_counts": "tiles",
    "tile_scan": "tasks",
    "tile_fragments": "tiles",
    "slice_counts": "tiles",
    "slice_fragments": "tiles",
    "attention": "attention",
    "merge": "merge",
}


@dataclass(frozen=True)
class Profile:
    """Milliseconds of a request's parts, each the median of several runs.

    On a GPU that makes the plan itself every part but ``select`` is GPU time, from the end of one
    launch to the end of the next, so that kernels of a few microseconds include the gaps between
    launches. Where the host makes the plan, ``mask_state`` is 0, and ``tiles`` and ``tasks`` are
    the host's time, the copy to the GPU included in ``tasks``.

    Attributes:
        on_gpu: whether the GPU makes the plan.
        mask_state: the mask's array to bitmap and counts.
        tiles: lists of fragments.
        tasks: their order, split-K.
        select: the host's choice of the plan, once the counts are there.
        attention: the attention kernel.
        merge: the merge of split-K parts.
    """

    on_gpu: bool
    mask_state: float
    tiles: float
    tasks: float
    select: float
    attention: float
    merge: float

    @property
    def preparation(self) -> float:
        """All before the attention."""
        return self.mask_state + self.tiles + self.tasks + self.select

    @property
    def total(self) -> float:
        """The sum of the parts."""
        return self.preparation + self.attention + self.merge

    def __str__(self) -> str:
        parts = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "on_gpu"}
        return "\n".join(
            f"{name.replace('_', ' '):<12}{ms:10.4f} ms{ms / self.total:8.1%}"
            for name, ms in parts.items()
        )


class Stages:
    """Events between launches on one stream (CuPy's)."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._events: list[tuple[str, Any]] = []
        self.mark("")

    def mark(self, stage: str) -> None:
        """Note that a stage's launch was the last so far."""
        import cupy

        event = cupy.cuda.Event()
        event.record(self._stream)
        self._events.append((stage, event))

    def ms(self) -> dict[str, float]:
        """Milliseconds of each part, once all is done."""
        import cupy

        self._events[-1][1].synchronize()
        times = dict.fromkeys(_PARTS.values(), 0.0)
        pairs = zip(self._events[:-1], self._events[1:], strict=True)
        for (_, before), (stage, after) in pairs:
            times[_PARTS[stage]] += float(cupy.cuda.get_elapsed_time(before, after))
        return times


def median(runs: list[dict[str, float]], **others: Any) -> Profile:
    """The profile of several runs, given what is no time of theirs."""
    parts: Mapping[str, float] = {
        name: float(np.median([run[name] for run in runs])) for name in runs[0]
    }
    return Profile(**(dict(parts) | others))
