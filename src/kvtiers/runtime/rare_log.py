"""Errors that repeat, told once a minute: a broken store must not bury the log.

Every one of them is counted where it happened, as an outcome with its reason; the log is for the
first look.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable

EVERY_SECONDS = 60.0


class RareLog:
    """Tracebacks by key, each at most once in `every_seconds`; the next one says how many more."""

    def __init__(
        self,
        log: logging.Logger,
        every_seconds: float = EVERY_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._every_seconds = every_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._told: dict[Hashable, tuple[float, int]] = {}  # when, and how many since

    def exception(self, key: Hashable, message: str, *args: object) -> None:
        """Log the exception being handled, unless one with this key was logged just now."""
        now = self._clock()
        with self._lock:
            told_at, left_out = self._told.get(key, (-float("inf"), 0))
            if now - told_at < self._every_seconds:
                self._told[key] = told_at, left_out + 1
                return
            self._told[key] = now, 0
        if left_out:
            message += f" (and {left_out} times more since this was last told)"
        self._log.exception(message, *args)
