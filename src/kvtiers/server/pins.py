"""The book of pins: which prefixes the operator keeps, until when, and within which budget.

The cache holds the pins and ends them when their time is over; the ledger says which are held and
how many tokens each has. This book adds only what neither knows: when a pin will end.
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
        self._ends_at: dict[int, float] = {}

    def add(self, pin_id: int, ends_at: float, tokens_by_pin: Mapping[int, int]) -> None:
        """A pin was made; forgets the ends of all that the ledger no longer says are held."""
        self._ends_at = {p: end for p, end in self._ends_at.items() if p in tokens_by_pin}
        self._ends_at[pin_id] = ends_at

    def held(self, tokens_by_pin: Mapping[int, int], now: float) -> list[HeldPin]:
        """The pins that the ledger says are held."""
        return [
            HeldPin(pin_id, tokens, max(0.0, self._ends_at.get(pin_id, now) - now))
            for pin_id, tokens in tokens_by_pin.items()
        ]
