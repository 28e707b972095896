"""Copies under way: what was ordered, since when, and until when somebody waits for it.

Owns: the table of flights, by purpose and in order of arrival, and which of them are overdue. Must
not know: how a copy is carried out, or the cache.

A flight is in exactly one place:

    waiting --launch--> running --deadline--> overdue --end--> gone
       \\-----deadline or cancel-----------------------------> gone

All flights of one purpose have the same time to live, so the first of a table is always the first
to expire, and looking for expired ones costs nothing when there are none.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields
from typing import NamedTuple

from kvtiers.errors import ConfigError
from kvtiers.events import Copy
from kvtiers.types import FailReason, Purpose

ALONE = frozenset({Purpose.PREFETCH, Purpose.STORE})
"""Not merged: each is calls of its own to the store, with an end of its own."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds from an order until nobody waits for it any more."""

    backup: float = 30.0
    load_back: float = 30.0
    prefetch: float = 30.0
    store: float = 60.0
    lookup: float = 5.0

    def __post_init__(self) -> None:
        wrong = {f.name: v for f in fields(self) if (v := getattr(self, f.name)) <= 0}
        if wrong:
            raise ConfigError(f"deadlines in seconds must be positive; got {wrong}")

    def of(self, purpose: Purpose) -> float:
        seconds: float = getattr(self, purpose.value)
        return seconds


@dataclass(frozen=True, slots=True)
class InFlightBounds:
    """Pages of one purpose that may be under way at a time, and that one operation may merge.

    A copy larger than a bound goes alone. Load-backs have no bound: a request already waits.
    """

    backup_pages: int = 1024
    prefetch_pages: int = 4096
    store_pages: int = 4096
    merge_pages: int = 256

    def __post_init__(self) -> None:
        wrong = {f.name: v for f in fields(self) if (v := getattr(self, f.name)) < 1}
        if wrong:
            raise ConfigError(f"bounds in pages must be at least 1; got {wrong}")

    def of(self, purpose: Purpose) -> float:
        if purpose is Purpose.LOAD_BACK:
            return float("inf")
        pages: int = getattr(self, f"{purpose.value}_pages")
        return pages


class Pending(NamedTuple):
    """How many copies of one purpose are under way, late ones included, and the oldest's age."""

    copies: int
    oldest_seconds: float


class End(NamedTuple):
    """How a copy ended, or that nobody waits for it any more. Times bracket the copy alone."""

    pages_ok: int
    failure: FailReason | None
    started: float | None = None
    finished: float | None = None


@dataclass(slots=True, eq=False)
class Merged:
    """Copies that were submitted as one operation."""

    queued: float  # the first of them
    launched: float
    remaining: int
    pages_ok: int = 0


@dataclass(slots=True, eq=False)
class Flight:
    """One ordered copy on its way."""

    copy: Copy
    queued: float
    deadline: float
    merged: Merged | None = None  # set at launch
    late: bool = False  # its wait was acknowledged as over

    @property
    def purpose(self) -> Purpose:
        return self.copy.purpose


class Flights:
    """The table of flights."""

    def __init__(self, deadlines: Deadlines, bounds: InFlightBounds) -> None:
        self._deadlines = deadlines
        self._bounds = bounds
        self.waiting: dict[Purpose, deque[Flight]] = {p: deque() for p in Purpose}
        """Ordered and not launched, oldest first; to look at, `launch` takes them."""
        self._in_time: dict[Purpose, dict[int, Flight]] = {p: {} for p in Purpose}
        self._overdue: dict[Purpose, dict[int, Flight]] = {p: {} for p in Purpose}
        self._running_pages = dict.fromkeys(Purpose, 0)

    def __len__(self) -> int:
        return sum(len(self._in_time[p]) + len(self._overdue[p]) for p in Purpose)

    def __contains__(self, flight: Flight) -> bool:
        return self.find(flight.copy.op_id) is flight

    def add(self, copy: Copy, now: float) -> None:
        """A copy was ordered."""
        flight = Flight(copy, now, now + self._deadlines.of(copy.purpose))
        self.waiting[copy.purpose].append(flight)
        self._in_time[copy.purpose][copy.op_id] = flight

    def find(self, op_id: int) -> Flight | None:
        for tables in (self._in_time, self._overdue):
            for table in tables.values():
                if op_id in table:
                    return table[op_id]
        return None

    def launch(self, purpose: Purpose, now: float) -> list[Flight]:
        """Take waiting copies for one operation, as far as the bounds allow; none: not now."""
        waiting = self.waiting[purpose]
        if not waiting:
            return []
        batch: list[Flight] = []
        batch_pages = 0
        room = self._bounds.of(purpose) - self._running_pages[purpose]
        alone = self._running_pages[purpose] == 0
        while waiting:
            pages = waiting[0].copy.pages
            if batch and (purpose in ALONE or batch_pages + pages > self._bounds.merge_pages):
                break
            if batch_pages + pages > room and not (alone and not batch):
                break
            batch.append(waiting.popleft())
            batch_pages += pages
        if batch:
            self._running_pages[purpose] += batch_pages
            merged = Merged(batch[0].queued, now, len(batch))
            for flight in batch:
                flight.merged = merged
        return batch

    def expired(self, now: float) -> list[Flight]:
        """Copies whose deadline has passed since the last call; now overdue.

        Purpose by purpose, oldest first.
        """
        passed: list[Flight] = []
        for purpose, in_time in self._in_time.items():
            while in_time:
                flight = next(iter(in_time.values()))
                if flight.deadline > now:
                    break
                del in_time[flight.copy.op_id]
                self._overdue[purpose][flight.copy.op_id] = flight
                passed.append(flight)
        return passed

    def remove(self, flight: Flight) -> None:
        """A copy has ended, or is not wanted and was never launched."""
        purpose, op_id = flight.purpose, flight.copy.op_id
        if self._in_time[purpose].pop(op_id, None) is None:
            del self._overdue[purpose][op_id]
        if flight.merged is None:
            self.waiting[purpose].remove(flight)
        else:
            self._running_pages[purpose] -= flight.copy.pages

    def next_deadline(self) -> float | None:
        """The time at which the next copy expires; None when none can."""
        firsts = [next(iter(t.values())).deadline for t in self._in_time.values() if t]
        return min(firsts, default=None)

    def pending(self, purpose: Purpose, now: float) -> Pending:
        tables = (self._in_time[purpose], self._overdue[purpose])
        oldest = min((next(iter(t.values())).queued for t in tables if t), default=now)
        return Pending(sum(map(len, tables)), now - oldest)
