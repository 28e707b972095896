"""An eviction order that runs may also enter out of turn.

Almost every run enters when its last lease ends, as the youngest of its rank: a frontier takes it
in O(1). A run may also enter while nobody holds it, because a copy of it has arrived in the tier
or because eviction has cut it in two; it is as old as it was. Those few are kept sorted beside the
frontier, so the order is by age whatever way a run came in.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from typing import TYPE_CHECKING

from kvtiers.core.policies.frontier import Frontier

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtiers.core.tree import Run


class EvictionOrder:
    """Unleased runs of one tier, oldest first."""

    def __init__(self, frontier: Frontier) -> None:
        self.counts_uses = frontier.counts_uses
        self.add = frontier.add
        self.age = frontier.age
        self._discard_released = frontier.discard
        self._oldest_released = frontier.oldest
        self._released = frontier
        self._entered: list[Run] = []

    def enter(self, run: Run) -> None:
        """Take in a run that nobody has just released: it takes its place by age."""
        insort(self._entered, run, key=self.age)

    def discard(self, run: Run) -> None:
        """The run is leased or gone; no matter whether it was in here."""
        self._discard_released(run)
        if self._entered:
            place = self._find(run)
            if place is not None:
                del self._entered[place]

    def oldest(self) -> Run | None:
        released = self._oldest_released()
        if not self._entered:
            return released
        entered = self._entered[0]
        if released is None or self.age(entered) < self.age(released):
            return entered
        return released

    def _find(self, run: Run) -> int | None:
        place = bisect_left(self._entered, self.age(run), key=self.age)
        here = place < len(self._entered) and self._entered[place] is run
        return place if here else None

    def __iter__(self) -> Iterator[Run]:
        if not self._entered:
            return iter(self._released)
        return heapq.merge(self._released, self._entered, key=self.age)

    def __reversed__(self) -> Iterator[Run]:
        if not self._entered:
            return reversed(self._released)
        return heapq.merge(
            reversed(self._released), reversed(self._entered), key=self.age, reverse=True
        )

    def __contains__(self, run: Run) -> bool:
        return run in self._released or (bool(self._entered) and self._find(run) is not None)

    def __len__(self) -> int:
        return len(self._released) + len(self._entered)
