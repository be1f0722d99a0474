"""Numbered steps on a console: a moving bar while one runs, one line when it has ended."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console


class Step:
    """A step under way."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self.line = ""
        self._progress = progress
        self._task = task

    def advance(self) -> None:
        """One of the step's units is done."""
        self._progress.advance(self._task)

    def done(self, line: str) -> None:
        """What the step did, to be printed at its end."""
        self.line = line


class Steps:
    """The steps of one job.

    Attributes:
        seconds: wall-clock seconds of the ended steps, by name.

    Example:
        ::

            steps = Steps(console, count=2)
            with steps.step("Check", units=len(heads)) as step:
                for head in heads:
                    check(head)
                    step.advance()
                step.done("all heads are right")
    """

    def __init__(self, console: Console, count: int) -> None:
        self.seconds: dict[str, float] = {}
        self._console = console
        self._count = count

    @contextmanager
    def step(self, name: str, units: int | None = None) -> Iterator[Step]:
        """Run one step; ``units`` of None gives a bar that only shows that work goes on."""
        title = f"{len(self.seconds) + 1}/{self._count} {name}"
        began = time.perf_counter()
        with Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            # Elsewhere than on a terminal a bar cannot move, and would leave empty lines.
            disable=not self._console.is_terminal,
        ) as progress:
            step = Step(progress, progress.add_task(title, total=units))
            yield step
        self.seconds[name] = took = time.perf_counter() - began
        line = Text(f"{title}: ", style="bold")
        line.append(step.line, style="not bold")
        line.append(f" ({took:.1f} s)", style="not bold dim")
        self._console.print(line)
