"""Simulated time: a number that moves only on command, and what is due at which number.

Owns the order of events. Two events at one time happen in the order in which they were planned, so
a run depends on its seed alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable


class SimClock:
    """`now` in seconds, from 0 on."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._planned = 0

    def __len__(self) -> int:
        """Events that have not happened."""
        return len(self._events)

    @property
    def due(self) -> bool:
        """Whether the next event's time has come."""
        return bool(self._events) and self._events[0][0] <= self.now

    def after(self, seconds: float, happen: Callable[[], None]) -> None:
        """Plan an event."""
        self._planned += 1
        heapq.heappush(self._events, (self.now + seconds, self._planned, happen))

    def happen(self) -> None:
        """Let the next event happen; time moves on to it where it is not due yet."""
        at, _, happen = heapq.heappop(self._events)
        self.now = max(self.now, at)
        happen()
