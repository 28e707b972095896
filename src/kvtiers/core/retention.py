"""The order in which the host tier gives up pages: inclusive or exclusive retention.

inclusive   one order by age. A mirror (a page that is on device too) ages with its device copy,
            because both orders are refreshed by the same release.
exclusive   mirrors leave first, the youngest first and head first: what the device will keep
            longest needs a second copy least, and the host part of a path stays a suffix. Then
            sole copies, oldest first, tail first. The two tiers hold distinct data.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from kvtiers.core.policies import EvictionOrder, new_order
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
        """The unlocked run's residency has changed: it is listed by age where it belongs."""
        ...

    def discard(self, run: Run) -> None: ...
    def outlives(self, run: Run, other: Run) -> bool:
        """Whether `run`, wherever it is listed, should leave after `other`."""
        ...

    def oldest(self) -> Run | None: ...
    def mirrors(self) -> Iterator[Run]:
        """Runs whose mirrored pages should leave before any sole copy, in that order."""
        ...

    def __iter__(self) -> Iterator[Run]: ...
    def __contains__(self, run: Run) -> bool: ...


class InclusiveOrder:
    mirrors_first = False

    def __init__(self, eviction: str) -> None:
        order = new_order(eviction)
        self._order = order
        self.add = order.add
        self.discard = order.discard
        self.oldest = order.oldest

    def update(self, run: Run) -> None:
        if run.host_end == run.host_start:
            self._order.discard(run)
        elif run not in self._order:
            self._order.enter(run)

    def outlives(self, run: Run, other: Run) -> bool:
        return self._order.age(run) > self._order.age(other)

    def mirrors(self) -> Iterator[Run]:
        return iter(())

    def __iter__(self) -> Iterator[Run]:
        return iter(self._order)

    def __contains__(self, run: Run) -> bool:
        return run in self._order


class ExclusiveOrder:
    mirrors_first = True

    def __init__(self, eviction: str) -> None:
        self._mirrors = new_order(eviction)
        self._soles = new_order(eviction)
        self.oldest = self._soles.oldest

    def add(self, run: Run) -> None:
        if _has_mirrors(run):
            self._mirrors.add(run)
        if _has_soles(run):
            self._soles.add(run)

    def update(self, run: Run) -> None:
        _list_if(_has_mirrors(run), run, self._mirrors)
        _list_if(_has_soles(run), run, self._soles)

    def discard(self, run: Run) -> None:
        self._mirrors.discard(run)
        self._soles.discard(run)

    def outlives(self, run: Run, other: Run) -> bool:
        return self._soles.age(run) > self._soles.age(other)

    def mirrors(self) -> Iterator[Run]:
        return reversed(self._mirrors)

    def __iter__(self) -> Iterator[Run]:
        return iter(self._soles)

    def __contains__(self, run: Run) -> bool:
        return run in self._mirrors or run in self._soles


def _list_if(belongs: bool, run: Run, order: EvictionOrder) -> None:
    if not belongs:
        order.discard(run)
    elif run not in order:
        order.enter(run)


def _has_mirrors(run: Run) -> bool:
    return run.host_end > run.host_start and run.device_pages > run.host_start


def _has_soles(run: Run) -> bool:
    return run.host_end > run.host_start and run.host_end > run.device_pages


def new_host_order(retention: Retention, eviction: str) -> HostOrder:
    if retention is Retention.EXCLUSIVE:
        return ExclusiveOrder(eviction)
    return InclusiveOrder(eviction)
