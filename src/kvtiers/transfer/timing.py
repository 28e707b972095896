"""Timing of a copy alone, by a pair of events that belong to this copy and nothing else.

Owns: the choice between timed and untimed events and the cached answer to "can this device time?".
Must not know: what is copied, or what is done with the seconds.

An event class looks like the ones of device runtimes: built with `enable_timing=True` or without,
`record()`, and `elapsed_time(later)` in milliseconds. A class that raises `TypeError` or
`NotImplementedError` when asked to time cannot; it is asked once per process. A copy on such a
device has no duration sample, which is not the same as a duration of 0.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any, Protocol

log = logging.getLogger(__name__)


class TimingEvent(Protocol):
    """A point on the time line of a device."""

    def record(self) -> None: ...
    def elapsed_time(self, later: Any, /) -> float:
        """Milliseconds from this event to `later`, both recorded and reached."""
        ...


class EventClass(Protocol):
    """Builds events; raises `TypeError` or `NotImplementedError` if it cannot time."""

    def __call__(self, *, enable_timing: bool = ...) -> TimingEvent: ...


class ClockEvent:
    """The event of a device without a time line of its own: the monotonic clock, read in place."""

    __slots__ = ("at",)

    def __init__(self, *, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.monotonic()

    def elapsed_time(self, later: ClockEvent, /) -> float:
        return (later.at - self.at) * 1e3


@dataclass(frozen=True, slots=True)
class TimingPair:
    """Two distinct events around one copy."""

    start: TimingEvent
    finish: TimingEvent
    timing_enabled: bool

    def seconds(self) -> float | None:
        """Time between the two, once both were reached; None where the device cannot time."""
        return self.start.elapsed_time(self.finish) / 1e3 if self.timing_enabled else None


_can_time: dict[EventClass, bool] = {}


def reset_timing_probe() -> None:
    """Forget which event classes can time (a test's set-up, or a changed device)."""
    _can_time.clear()


def make_timing_event_pair(event_class: EventClass = ClockEvent) -> TimingPair:
    """Two fresh events for one copy: timed where the device can, else untimed (one warning)."""
    if _can_time.get(event_class, True):
        try:
            pair = TimingPair(
                event_class(enable_timing=True), event_class(enable_timing=True), True
            )
        except (TypeError, NotImplementedError) as error:
            log.warning(
                "%s cannot time copies (%s): tokens and bytes count, durations have no sample",
                getattr(event_class, "__name__", event_class),
                error,
            )
            _can_time[event_class] = False
        else:
            _can_time[event_class] = True
            return pair
    return TimingPair(event_class(), event_class(), False)
