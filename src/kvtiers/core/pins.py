"""Pins: leases without a request, that end by command or by time."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvtiers.errors import ProtocolError
from kvtiers.events import Fact

if TYPE_CHECKING:
    from kvtiers.core.state import CacheState
    from kvtiers.core.tree import Run


class Pin(NamedTuple):
    run: Run
    tokens: int
    expires: float


class Pins:
    def __init__(self, state: CacheState) -> None:
        self._state = state
        self._pins: dict[int, Pin] = {}

    def add(self, locked_run: Run, tokens: int, expires: float) -> int:
        """Keep a path that has been locked for this pin."""
        pin_id = self._state.next_id()
        self._pins[pin_id] = Pin(locked_run, tokens, expires)
        self._state.facts.append((Fact.PINNED, pin_id, tokens))
        return pin_id

    def remove(self, pin_id: int) -> None:
        pin = self._pins.pop(pin_id, None)
        if pin is None:
            raise ProtocolError(f"pin {pin_id} is unknown: never set, expired, or removed before")
        self._state.unlock(pin.run)
        self._state.facts.append((Fact.UNPINNED, pin_id, pin.tokens))

    def expire(self, now: float) -> None:
        for pin_id in [pin_id for pin_id, pin in self._pins.items() if pin.expires <= now]:
            self.remove(pin_id)
