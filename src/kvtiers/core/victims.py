"""Walking an eviction order while it changes: oldest first, around what a copy in flight holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtiers.core.policies import EvictionOrder
    from kvtiers.core.retention import HostOrder
    from kvtiers.core.tree import Run

_BATCH = 64


def held_on_device(run: Run) -> bool:
    """A copy reads this run's device pages."""
    return run.backup is not None


def held_on_host(run: Run) -> bool:
    """A copy reads or extends this run's host pages."""
    return run.store is not None or run.backup is not None or run.load is not None


def victims(order: EvictionOrder | HostOrder, is_held: Callable[[Run], bool]) -> Iterator[Run]:
    """Runs of `order`, oldest first, never one that is held nor an ancestor of a held one.

    The consumer takes pages from each run it is given. A run that it leaves in the order is not
    given again; what is above that one is, and the consumer knows not to take it first. Almost
    always nothing is held at the old end, and this is `order.oldest()`.
    """
    previous = None
    while True:
        run = order.oldest()
        if run is None:
            return
        if run is previous or is_held(run):
            break
        yield run
        previous = run
    yield from _around(order, is_held, previous)


def _around(
    order: EvictionOrder | HostOrder, is_held: Callable[[Run], bool], previous: Run | None
) -> Iterator[Run]:
    given: set[Run] = set()
    passed_by: set[Run] = set()
    if previous is not None:
        given.add(previous)
    size = _BATCH
    while True:
        rest = (run for run in order if run not in given and run not in passed_by)
        batch = list(islice(rest, size))
        if not batch:
            return
        size *= 2  # each batch begins at the old end again and skips what was seen before
        for run in batch:
            if run not in order or run in passed_by:
                continue
            if is_held(run):
                _pass_by(run, passed_by)
                continue
            given.add(run)
            yield run


def _pass_by(run: Run, passed_by: set[Run]) -> None:
    """Leave a run and everything above it where it is: a parent never leaves before its child."""
    while run.parent is not None and run not in passed_by:
        passed_by.add(run)
        run = run.parent
