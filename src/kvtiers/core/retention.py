"""The order in which the host tier gives up pages: inclusive or exclusive retention.

inclusive   one recency list. A mirror (a page that is on device too) ages with its device
            copy, because both lists are refreshed by the same release.
exclusive   mirrors leave first, head first, so that the host part of a run stays a suffix and
            its tail, which the device will give up next, is kept longest; then sole copies,
            tail first. The two tiers hold distinct data.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from kvtiers.core.policies import Frontier, new_frontier
from kvtiers.types import Retention

if TYPE_CHECKING:
    from kvtiers.core.tree import Run


class HostOrder(Protocol):
    """Unlocked runs with host pages, in the order in which those should leave."""

    mirrors_first: bool

    def add(self, run: Run) -> None:
        """The run has been released: it is the youngest of what it holds."""
        ...

    def update(self, run: Run) -> None:
        """The unlocked run's residency has changed: it keeps its place where it stays listed."""
        ...

    def discard(self, run: Run) -> None: ...
    def outlives(self, run: Run, other: Run) -> bool: ...
    def oldest(self) -> Run | None: ...
    def mirrors(self) -> Iterator[Run]:
        """Runs whose mirrored pages should leave before any sole copy, oldest first."""
        ...

    def __iter__(self) -> Iterator[Run]: ...
    def __contains__(self, run: object) -> bool: ...


class InclusiveOrder:
    mirrors_first = False

    def __init__(self, eviction: str) -> None:
        frontier: Frontier = new_frontier(eviction)
        self._frontier = frontier
        self.add = frontier.add
        self.discard = frontier.discard
        self.oldest = frontier.oldest
        self.outlives = frontier.outlives

    def update(self, run: Run) -> None:
        if run.host_end == run.host_start:
            self._frontier.discard(run)
        elif run not in self._frontier:
            self._frontier.add(run)

    def mirrors(self) -> Iterator[Run]:
        return iter(())

    def __iter__(self) -> Iterator[Run]:
        return iter(self._frontier)

    def __contains__(self, run: object) -> bool:
        return run in self._frontier


class ExclusiveOrder:
    mirrors_first = True

    def __init__(self, eviction: str) -> None:
        self._mirrors: OrderedDict[Run, None] = OrderedDict()
        self._soles: Frontier = new_frontier(eviction)

        self.outlives = self._soles.outlives

    def add(self, run: Run) -> None:
        if _has_mirrors(run):
            self._mirrors[run] = None
        if _has_soles(run):
            self._soles.add(run)

    def update(self, run: Run) -> None:
        if not _has_mirrors(run):
            self._mirrors.pop(run, None)
        elif run not in self._mirrors:
            self._mirrors[run] = None
        if not _has_soles(run):
            self._soles.discard(run)
        elif run not in self._soles:
            self._soles.add(run)

    def discard(self, run: Run) -> None:
        self._mirrors.pop(run, None)
        self._soles.discard(run)

    def oldest(self) -> Run | None:
        return self._soles.oldest()

    def mirrors(self) -> Iterator[Run]:
        return iter(self._mirrors)

    def __iter__(self) -> Iterator[Run]:
        return iter(self._soles)

    def __contains__(self, run: object) -> bool:
        return run in self._mirrors or run in self._soles


def _has_mirrors(run: Run) -> bool:
    return run.host_end > run.host_start and run.device_pages > run.host_start


def _has_soles(run: Run) -> bool:
    return run.host_end > run.host_start and run.host_end > run.device_pages


def new_host_order(retention: Retention, eviction: str) -> HostOrder:
    if retention is Retention.EXCLUSIVE:
        return ExclusiveOrder(eviction)
    return InclusiveOrder(eviction)
