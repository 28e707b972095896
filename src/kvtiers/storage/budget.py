"""A cap on how much is written, against wear of the medium.

Owns a token bucket; knows nothing of pages. A store that is over its cap declines (`QUOTA`) instead
of waiting: the worker thread that would sleep is the one that reads for the next request.
"""

from __future__ import annotations

from collections.abc import Callable

from kvtiers.errors import ConfigError


class WriteBudget:
    """Grants `bytes_per_second` on average, and what `burst_seconds` of it amount to at once.

    Not safe between threads: the store that owns it locks.
    """

    def __init__(
        self,
        bytes_per_second: float,
        burst_seconds: float,
        smallest_write_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        if bytes_per_second <= 0 or burst_seconds <= 0:
            raise ConfigError(
                f"the write cap is {bytes_per_second} bytes/s with bursts of {burst_seconds} s; "
                "both must be positive (leave the cap out for none)"
            )
        self._rate = bytes_per_second
        # A burst smaller than one page would never let any page through.
        self._capacity_bytes = max(bytes_per_second * burst_seconds, float(smallest_write_bytes))
        self._available_bytes = self._capacity_bytes
        self._clock = clock
        self._filled_at = clock()

    def take(self, write_bytes: int) -> bool:
        """Whether `write_bytes` may be written now; they are spent if so."""
        now = self._clock()
        self._available_bytes = min(
            self._capacity_bytes, self._available_bytes + (now - self._filled_at) * self._rate
        )
        self._filled_at = now
        if write_bytes > self._available_bytes:
            return False
        self._available_bytes -= write_bytes
        return True
