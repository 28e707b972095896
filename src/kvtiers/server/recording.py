"""What a live server hands to its trace recorder, and when.

Owns which requests are worth a record, their clock, and the one thread that hashes and writes, so
that neither the engine's thread nor the server's loop waits for a disk. Must not know HTTP.

A record is a prompt that was taken by the engine and got at least one token of answer, also where
the client left before its end: what there was by then used the cache. Requests that were refused,
failed or ended without a token are left out. Of several answers to one prompt the first counts,
as in the books, where the prompt of the others is a fork of its own.

Invariants
    a recording that cannot be written ends by itself, with one log line; serving goes on
    what then is in the file are whole records, and can be read
    every request that came is recorded, left out, lost, or still under way
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvtiers.engine.messages import (
    Event,
    FinishReason,
    GenerationRequest,
    TokenEvent,
)
from kvtiers.errors import ConfigError
from kvtiers.metrics.gauges import RecordOutcome
from kvtiers.server.whole_file import WholeFile
from kvtiers.types import HitSplit, Namespace, token_key
from kvtiers.workload import Measured, RecordedTraceWriter, TraceRecorder

log = logging.getLogger("kvtiers.server")

_COMPRESSED = (".gz", ".zst", ".zstd")
"""What ends without its trailer when it cannot be written to its end."""
_WITHOUT_AN_ANSWER = (FinishReason.REFUSED, FinishReason.FAILED)


@dataclass(frozen=True, slots=True)
class RecordingState:
    """How a recording stands: requests by outcome, and why it has ended, if it has."""

    path: Path
    requests: dict[RecordOutcome, int]
    problem: str | None


class Recording:
    """A trace of what this server is asked, in a file. Seconds count from the first request.

    `begin` is called in order of arrival, from one thread.
    """

    def __init__(
        self,
        path: Path,
        writer: RecordedTraceWriter,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self._path = path
        self._writer = writer
        self._recorder = TraceRecorder(writer)
        self._file = WholeFile(path)
        self._first_arrival: float | None = None
        self._begun = 0
        self._problem: str | None = None
        self._worker = ThreadPoolExecutor(1, "kvtiers-recording")

    @classmethod
    def to_file(cls, path: Path, block_tokens: int, *, keep_tokens: bool = False) -> Recording:
        """Record into a file, which is replaced. `ConfigError` where it cannot be written."""
        try:
            return cls(path, RecordedTraceWriter(path, block_tokens, keep_tokens=keep_tokens))
        except OSError as error:
            raise ConfigError(
                f"cannot record to {path}: {error.strerror or error}; give --record a file in a "
                "directory that exists and can be written"
            ) from None

    @property
    def state(self) -> RecordingState:
        """How the recording stands now. Any thread may ask."""
        recorded, left_out = self._recorder.written, self._recorder.left_out
        lost = self._begun - recorded - left_out if self._problem else 0
        requests = {
            RecordOutcome.RECORDED: recorded,
            RecordOutcome.LEFT_OUT: left_out,
            RecordOutcome.LOST: lost,
        }
        return RecordingState(self._path, requests, self._problem)

    def begin(self, request: GenerationRequest, namespace: Namespace) -> RecordedRequest:
        """A request has arrived. Tell what is returned of its events, or that it was not taken."""
        now = self.clock()
        if self._first_arrival is None:
            self._first_arrival = now
        self._begun += 1
        number, arrival_seconds = self._begun, now - self._first_arrival
        self._post(lambda: self._recorder.begin(number, arrival_seconds))
        return RecordedRequest(self, number, request, namespace, now)

    def end(
        self,
        number: int,
        request: GenerationRequest,
        namespace: Namespace,
        output: list[int],
        measured: Measured,
    ) -> None:
        """Request `number` has its answer. Any thread may call."""
        self._post(
            lambda: self._recorder.end(
                number,
                token_key(request.prompt),
                token_key(output),
                namespace=namespace.digest,
                measured=measured,
                output_tokens_max=request.params.max_tokens,
            )
        )

    def leave_out(self, number: int) -> None:
        """Request `number` is not worth a record. Any thread may call."""
        self._post(lambda: self._recorder.leave_out(number))

    def close(self) -> None:
        """Write what is left and close the file. The engine has stopped: no events follow."""
        self._post(self._finish)
        self._worker.shutdown()
        self._file.close()
        if self._problem:
            log.error("recorded %s", _spelled(self.state))

    def _post(self, write: Callable[[], None]) -> None:
        if self._problem is None:
            self._worker.submit(self._guarded, write)

    def _guarded(self, write: Callable[[], None]) -> None:
        if self._problem is not None:
            return
        try:
            write()
            self._file.grown()
        except Exception as error:  # whatever it is, it must not take the server down
            self._end(error)

    def _end(self, error: Exception) -> None:
        self._problem = str(error) or type(error).__name__
        with suppress(Exception):  # it tries once more to write what it holds
            self._writer.close()
        self._file.cut()
        log.error(
            "recording to %s has ended: %s; %s, those from now on are lost to the trace "
            "(recorded_requests_total), serving goes on; to record again, make room and restart",
            self._path,
            self._problem,
            (
                "of the requests before, --on-error skip reads those that reached the disk"
                if self._path.suffix in _COMPRESSED
                else f"the {self._recorder.written} requests before can be read"
            ),
            exc_info=not isinstance(error, OSError),
        )

    def _finish(self) -> None:
        self._recorder.close()
        log.info("recorded %s", _spelled(self.state))


def _spelled(state: RecordingState) -> str:
    requests = state.requests
    text = (
        f"{requests[RecordOutcome.RECORDED]} requests in {state.path}, left out "
        f"{requests[RecordOutcome.LEFT_OUT]} without an answer"
    )
    if state.problem:
        text += f", lost {requests[RecordOutcome.LOST]}: {state.problem}"
    return text


class RecordedRequest:
    """Follows the first answer of one request until it has ended."""

    def __init__(
        self,
        recording: Recording,
        number: int,
        request: GenerationRequest,
        namespace: Namespace,
        arrived_at: float,
    ) -> None:
        self._recording = recording
        self._number = number
        self._request = request
        self._namespace = namespace
        self._arrived_at = arrived_at
        self._ttft_seconds: float | None = None
        self._output: list[int] = []

    def not_taken(self) -> None:
        """The engine has refused it at the door."""
        self._recording.leave_out(self._number)

    def observe(self, event: Event) -> None:
        """An event of any of its answers, in order, on the engine's thread."""
        if event.index:
            return
        if isinstance(event, TokenEvent):
            if self._ttft_seconds is None:
                self._ttft_seconds = self._seconds()
            self._output.append(event.token)
        elif event.split is None or not self._output or event.reason in _WITHOUT_AN_ANSWER:
            self._recording.leave_out(self._number)
        else:
            self._recording.end(
                self._number,
                self._request,
                self._namespace,
                self._output,
                self._measured(event.split),
            )

    def _measured(self, split: HitSplit) -> Measured:
        return Measured(
            split.device_hit,
            split.host_hit,
            split.storage_hit,
            split.computed,
            ttft_seconds=self._ttft_seconds,
            e2e_seconds=self._seconds(),
        )

    def _seconds(self) -> float:
        return self._recording.clock() - self._arrived_at
