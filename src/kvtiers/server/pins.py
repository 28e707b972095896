"""The book of pins: which prefixes the operator keeps, until when, and within which budget.

The cache holds the pins and ends them when their time is over; the ledger says which are held and
how many tokens each has. This book adds what neither tells: when a pin will end, and what is held,
to whom cannot wait for the engine's thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeldPin:
    """A pin that is held: `tokens` of a prefix, for `seconds_left` more."""

    pin_id: int
    tokens: int
    seconds_left: float


class PinBook:
    """When each pin ends (monotonic seconds), and how many tokens all pins together may hold."""

    def __init__(self, budget_tokens: int) -> None:
        self.budget_tokens = budget_tokens
        self._pins: dict[int, tuple[float, int]] = {}  # when it ends, and its tokens

    def add(self, pin_id: int, ends_at: float, tokens_by_pin: Mapping[int, int]) -> None:
        """A pin was made; forgets all that the ledger no longer says are held."""
        self._pins = {p: pin for p, pin in self._pins.items() if p in tokens_by_pin}
        self._pins[pin_id] = (ends_at, tokens_by_pin[pin_id])

    def remove(self, pin_id: int) -> None:
        """A pin was let go."""
        self._pins.pop(pin_id, None)

    def held_tokens(self, now: float) -> int:
        """What pins hold, without asking the engine's thread: a little too much where pins share a
        prefix, or have just ended."""
        pins = list(self._pins.values())
        return sum(tokens for ends_at, tokens in pins if ends_at > now)

    def held(self, tokens_by_pin: Mapping[int, int], now: float) -> list[HeldPin]:
        """The pins that the ledger says are held."""
        return [
            HeldPin(pin_id, tokens, max(0.0, self._pins.get(pin_id, (now, 0))[0] - now))
            for pin_id, tokens in tokens_by_pin.items()
        ]
