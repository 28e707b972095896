"""A copy from its order to its acknowledgement, with everything that can happen on the way.

Owns the fate of copies: how long they take, in which order they end, how much of them arrives, and
whether a deadline passes first. What is moved is the business of `transfer` and `storage`.

    submit --delay--> all or some pages arrived ........................ ack, ended
           --delay--> the deadline passes: ack, not ended --delay--> late write, ack, ended
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from kvtiers.events import Copy, HiCacheAck, moved
from kvtiers.testing.simulation.clock import SimClock
from kvtiers.testing.simulation.content import Tags
from kvtiers.types import CacheConfig, FailReason


@dataclass(frozen=True, slots=True)
class Faults:
    """How likely what goes wrong (per copy, unless it says otherwise), and how long copies take.

    A copy takes up to `delay_seconds_max`, or up to twenty times that if it is one of the slow
    ones. A late one ends after another delay; one that hangs, after a very long one.
    """

    delay_seconds_max: float = 1.0
    slow_rate: float = 0.0
    fail_rate: float = 0.0
    late_rate: float = 0.0
    hang_rate: float = 0.0
    """Share of the late copies that hang."""
    loss_rate: float = 0.0
    """Per step: the store loses a page, or evicts one."""
    corruption_rate: float = 0.0
    """Per page read from storage."""
    lookup_fail_rate: float = 0.0


NO_FAULTS = Faults()
SLOW_FACTOR = 20
HANG_SECONDS = 500.0


@dataclass(slots=True, eq=False)
class Flight:
    """A copy under way. `tags` is what its pages must hold."""

    copy: Copy
    tags: Tags
    pages_ok: int
    failure: FailReason | None
    late: bool
    acknowledged: bool = False
    """It has been acknowledged as late."""


class Carrier(ABC):
    """Carries copies. `ack` is called once per copy, twice for a late one."""

    def __init__(
        self,
        config: CacheConfig,
        clock: SimClock,
        rng: random.Random,
        faults: Faults,
        ack: Callable[[HiCacheAck], None],
    ) -> None:
        self.config = config
        self.clock = clock
        self.rng = rng
        self.faults = faults
        self._ack = ack
        self.flights: dict[int, Flight] = {}

    def cancel(self, op_id: int, reason: FailReason) -> None:
        """What has not arrived yet need not; a copy that has ended is left alone."""
        flight = self.flights.get(op_id)
        if flight is not None and not flight.acknowledged:
            flight.pages_ok = min(flight.pages_ok, self.rng.randrange(flight.copy.pages + 1))
            flight.failure = reason

    def delay(self) -> float:
        seconds = self.rng.random() * self.faults.delay_seconds_max
        if self.rng.random() < self.faults.slow_rate:
            seconds *= SLOW_FACTOR
        return seconds

    def launch(self, copy: Copy, tags: Tags, failures: tuple[FailReason, ...]) -> None:
        rng, faults = self.rng, self.faults
        pages_ok, failure = copy.pages, None
        late = rng.random() < faults.late_rate
        if late or rng.random() < faults.fail_rate:
            pages_ok = rng.randrange(copy.pages)
            failure = FailReason.DEADLINE if late else rng.choice(failures)
        flight = Flight(copy, tags, pages_ok, failure, late)
        self.flights[copy.op_id] = flight
        self.clock.after(self.delay(), lambda: self._arrive(flight))

    def _arrive(self, flight: Flight) -> None:
        flight.pages_ok = self.move(flight, flight.pages_ok)
        if flight.late:
            flight.acknowledged = True
            hangs = self.rng.random() < self.faults.hang_rate
            seconds = HANG_SECONDS * self.rng.random() if hangs else self.delay()
            self.clock.after(seconds, lambda: self._end_late(flight))
        else:
            del self.flights[flight.copy.op_id]
        self._acknowledge(flight, flight.pages_ok, ended=not flight.late)

    def _end_late(self, flight: Flight) -> None:
        self.write_late(flight)
        del self.flights[flight.copy.op_id]
        self._acknowledge(flight, 0, ended=True)

    def _acknowledge(self, flight: Flight, pages_ok: int, *, ended: bool) -> None:
        tokens, num_bytes = moved(pages_ok, self.config.page_tokens, self.config.pools)
        self._ack(
            HiCacheAck(
                flight.copy.op_id,
                pages_ok,
                flight.failure if pages_ok < flight.copy.pages else None,
                ended,
                acked=self.clock.now,
                num_tokens_by_pool=tokens,
                num_bytes=num_bytes,
            )
        )

    @abstractmethod
    def move(self, flight: Flight, pages: int) -> int:
        """Move the first `pages` pages; how many really arrived (`flight.failure` says why)."""

    @abstractmethod
    def write_late(self, flight: Flight) -> None:
        """What a copy does to pages past `pages_ok` after its deadline."""
