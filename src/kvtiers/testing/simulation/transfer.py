"""Copies between device and host, in simulated time, over shadow memory.

Checks what a real transfer relies on and cannot see: source slots hold written pages and stay as
they are until the acknowledgement; target slots belong to the copy until it has ended.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from kvtiers.events import Copy, HiCacheAck
from kvtiers.testing.simulation.carrier import Carrier, Faults, Flight
from kvtiers.testing.simulation.clock import SimClock
from kvtiers.testing.simulation.content import ShadowMemory
from kvtiers.types import CacheConfig, FailReason, Tier


class SimTransfer(Carrier):
    """Carries backups and load-backs between the two tiers of `memory`."""

    def __init__(
        self,
        config: CacheConfig,
        clock: SimClock,
        rng: random.Random,
        faults: Faults,
        ack: Callable[[HiCacheAck], None],
        memory: Mapping[Tier, ShadowMemory],
    ) -> None:
        super().__init__(config, clock, rng, faults, ack)
        self._memory = memory

    def submit(self, copy: Copy) -> None:
        assert copy.source_slots is not None
        assert copy.target_slots is not None
        who = f"{copy.purpose} {copy.op_id}"
        tags = self._memory[copy.purpose.source].read(copy.source_slots, who)
        # The copy may begin to write at any time from now on.
        self._memory[copy.purpose.target].scribble(copy.target_slots)
        self.launch(copy, tags, (FailReason.TRANSFER,))

    def move(self, flight: Flight, pages: int) -> int:
        copy = flight.copy
        assert copy.source_slots is not None
        assert copy.target_slots is not None
        who = f"{copy.purpose} {copy.op_id}, not acknowledged yet,"
        self._memory[copy.purpose.source].expect(copy.source_slots, flight.tags, who)
        self._memory[copy.purpose.target].write(copy.target_slots[:pages], flight.tags[:pages])
        return pages

    def write_late(self, flight: Flight) -> None:
        copy = flight.copy
        assert copy.target_slots is not None
        self._memory[copy.purpose.target].scribble(copy.target_slots[flight.pages_ok :])
