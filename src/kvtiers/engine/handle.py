"""A submitted request as its submitter sees it: an id, and its events where no callback took them.

Must not know the engine. Safe to read from any thread; one reader at a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from queue import Empty, SimpleQueue

from kvtiers.engine.messages import Event, FinishEvent


class QueuedHandle:
    """Collects the events of a request with `answers` answers."""

    def __init__(self, request_id: int, answers: int) -> None:
        self.request_id = request_id
        self._answers = answers
        self._queue: SimpleQueue[Event] = SimpleQueue()

    def put(self, event: Event) -> None:
        """Called by the engine's thread."""
        self._queue.put(event)

    def __iter__(self) -> Iterator[Event]:
        return self._events(None)

    def results(self, timeout_seconds: float | None = None) -> list[FinishEvent]:
        """All answers' ends, by index, each with the whole text. Raises `TimeoutError`."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        texts = [""] * self._answers
        ends: dict[int, FinishEvent] = {}
        for event in self._events(deadline):
            texts[event.index] += event.text
            if isinstance(event, FinishEvent):
                ends[event.index] = replace(event, text=texts[event.index])
        return [ends[index] for index in range(self._answers)]

    def _events(self, deadline: float | None) -> Iterator[Event]:
        running = self._answers
        while running:
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                event = self._queue.get(timeout=timeout)
            except Empty:
                raise TimeoutError(
                    f"request {self.request_id}: {running} of {self._answers} answers have not "
                    "ended in the time given"
                ) from None
            running -= isinstance(event, FinishEvent)
            yield event
