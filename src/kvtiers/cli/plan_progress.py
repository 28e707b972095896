"""How far a plan is and how long it will take, on stderr, so that stdout holds the answer alone.

A bar per phase on a terminal; elsewhere (a log, a job) a line now and then.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from kvtiers.planner.plan import Progress as Report

LINE_SECONDS = 30.0


class Reached:
    """How far a plan has come, for what is said of one that is interrupted."""

    def __init__(self) -> None:
        self.lost = "no replay had ended"

    def noting(self, told: Report) -> Report:
        """What passes on what it is told, and notes it here."""

        def report(phase: str, done: int, of: int) -> None:
            if done:
                self.lost = f"{phase} lost after {done:,} of {of:,}"
            told(phase, done, of)

        return report


@contextmanager
def plan_progress() -> Iterator[Report]:
    """Yields what a plan is to call after each replay."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Lines(sys.stderr, time.monotonic)
        return
    bars: dict[str, TaskID] = {}
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    ) as progress:

        def report(phase: str, done: int, of: int) -> None:
            if phase not in bars:
                bars[phase] = progress.add_task(phase, total=of)
            progress.update(bars[phase], completed=done)

        yield report


class Lines:
    """A line when a phase begins, every `LINE_SECONDS` and when it ends."""

    def __init__(self, out: TextIO, clock: Callable[[], float]) -> None:
        self._out = out
        self._clock = clock
        self._phase = ""
        self._began = self._told = 0.0

    def __call__(self, phase: str, done: int, of: int) -> None:
        now = self._clock()
        if phase != self._phase:
            self._phase, self._began, self._told = phase, now, -LINE_SECONDS
        if done < of and now - self._told < LINE_SECONDS and done:
            return
        self._told = now
        passed = now - self._began
        left = f", about {passed / done * (of - done):,.0f} s left" if 0 < done < of else ""
        print(f"{phase}: {done:,} of {of:,} in {passed:,.0f} s{left}", file=self._out, flush=True)
