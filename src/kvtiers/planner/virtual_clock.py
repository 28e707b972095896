"""A clock that moves when somebody says so, and never back."""

from __future__ import annotations

from kvtiers.errors import ProtocolError


class VirtualClock:
    """Seconds since the start of a replay; call it to read the time."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        return self._now

    def advance_to(self, when: float) -> None:
        """Let time pass until `when`; raises `ProtocolError` when that lies in the past."""
        if when < self._now:
            raise ProtocolError(f"time cannot go back from {self._now} s to {when} s")
        self._now = when
