"""Recording a live server: requests end in any order, a trace is in order of arrival.

Owns which requests have begun and which ended ones wait for an earlier arrival to end. Must not
know the server; its calls may come from any thread.

Invariant: what has been written is a whole trace in order of arrival at every moment.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from kvtiers.errors import ProtocolError
from kvtiers.workload.recorded import RecordedTraceWriter
from kvtiers.workload.request import Measured

HELD_MAX = 10_000
"""Ended requests that may wait for an earlier one; beyond that the earlier one is given up."""


class TraceRecorder:
    """Writes each request once it and all that arrived before it have ended.

    `begin` must be called in order of arrival. A request that fails, or that holds up more than
    `held_max` others, is left out and counted in `left_out`; the others count in `written`, once
    they are.
    """

    def __init__(self, writer: RecordedTraceWriter, held_max: int = HELD_MAX) -> None:
        self.left_out = 0
        self.written = 0
        self._writer = writer
        self._held_max = held_max
        self._lock = threading.Lock()
        self._open: OrderedDict[int, float] = OrderedDict()
        self._ready: dict[int, Callable[[], None]] = {}
        self._closed = False

    def begin(self, request_id: int, arrival_seconds: float) -> None:
        """A request has arrived, so many seconds after recording began."""
        with self._lock:
            if request_id in self._open:
                raise ProtocolError(f"request {request_id} is being recorded already")
            if not self._closed:
                self._open[request_id] = arrival_seconds

    def end(
        self,
        request_id: int,
        prompt_key: bytes,
        output_key: bytes,
        *,
        namespace: bytes = b"",
        chat_id: str | None = None,
        parent_chat_id: str | None = None,
        turn: int | None = None,
        measured: Measured | None = None,
        output_tokens_max: int | None = None,
    ) -> None:
        """A request has been answered; prompt and output as int32 bytes. Unknown ids are ignored:
        they began before the recording, or were given up."""
        with self._lock:
            arrival_seconds = self._open.get(request_id)
            if arrival_seconds is None:
                return

            def write() -> None:
                self._writer.append(
                    arrival_seconds,
                    prompt_key,
                    output_key,
                    namespace=namespace,
                    chat_id=chat_id,
                    parent_chat_id=parent_chat_id,
                    turn=turn,
                    measured=measured,
                    output_tokens_max=output_tokens_max,
                )

            self._ready[request_id] = write
            self._write_ready()
            if len(self._ready) > self._held_max:
                self._leave_out(next(iter(self._open)))

    def leave_out(self, request_id: int) -> None:
        """A request ended without an answer worth replaying."""
        with self._lock:
            if request_id in self._open:
                self._leave_out(request_id)

    def close(self) -> None:
        """Write what has ended, leave out what has not, and close the file."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for request_id in [i for i in self._open if i not in self._ready]:
                self._leave_out(request_id)
            self._write_ready()
            self._writer.close()

    def _leave_out(self, request_id: int) -> None:
        del self._open[request_id]
        self._ready.pop(request_id, None)
        self.left_out += 1
        self._write_ready()

    def _write_ready(self) -> None:
        while self._open:
            first = next(iter(self._open))
            write = self._ready.pop(first, None)
            if write is None:
                return
            write()
            self.written += 1
            del self._open[first]
