"""A progress bar with the time left, on stderr, so that stdout holds the answer alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def plan_progress() -> Iterator[Report]:
    """Yields what a plan is to call after each replay; one bar per phase."""
    bars: dict[str, TaskID] = {}
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    ) as progress:

        def report(phase: str, done: int, of: int) -> None:
            if phase not in bars:
                bars[phase] = progress.add_task(phase, total=of)
            progress.update(bars[phase], completed=done)

        yield report
