"""One HTTP request as sequences of the engine: submit, follow, and cancel when the client goes.

The engine calls back on its own thread; events cross to the server's loop through one queue per
request. A client that disconnects ends its sequences at once, streaming or not: one watcher per
request waits for the disconnect and cancels.

Invariant: a `Generation` that was opened is closed; after `close` none of its sequences runs on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from starlette.requests import Request

from kvtiers.engine.messages import (
    Event,
    FinishEvent,
    FinishReason,
    GenerationRequest,
    TokenEvent,
)
from kvtiers.engine.port import Engine
from kvtiers.errors import EngineBusy, InvalidRequest
from kvtiers.server.errors import ApiError
from kvtiers.server.recording import RecordedRequest, Recording
from kvtiers.server.waiting import WaitingRoom
from kvtiers.types import HitSplit


class ClientGoneError(Exception):
    """The client has disconnected; nobody reads the answer."""


class ChoiceEvent(NamedTuple):
    """An event of one choice; `choice` counts over all prompts of the request."""

    choice: int
    event: TokenEvent | FinishEvent


class Generation:
    """The sequences of one HTTP request: `prompts x n` choices, as one stream of events."""

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[GenerationRequest],
        waiting: WaitingRoom,
        recording: Recording | None = None,
    ) -> None:
        self._engine = engine
        self._waiting = waiting
        self._recording = recording
        self._requests = requests
        self._queue: asyncio.Queue[ChoiceEvent | None] = asyncio.Queue()
        self._watcher: asyncio.Task[None] | None = None
        self._running: dict[int, int] = {}  # engine request id -> answers still to come
        self.request_ids: list[int] = []
        self.output_ids: list[list[int]] = [[] for r in requests for _ in range(r.n)]
        self.splits: list[HitSplit | None] = [None] * len(requests)

    @property
    def choices(self) -> int:
        return sum(request.n for request in self._requests)

    async def open(self, http: Request) -> None:
        """Submit everything; `ApiError` when the engine does not take it. Nothing runs then."""
        self._waiting.check(self._requests)
        loop = asyncio.get_running_loop()
        first_choice = 0
        try:
            for position, request in enumerate(self._requests):
                recorded = self._recorded(request)
                admitted = self._waiting.take(request.n)
                forward = _Forwarder(loop, self._queue, first_choice, recorded, admitted)
                try:
                    handle = self._engine.submit(request, forward)
                except BaseException:
                    admitted()
                    if recorded is not None:
                        recorded.not_taken()
                    raise
                self.request_ids.append(handle.request_id)
                self._running[position] = request.n
                first_choice += request.n
        except InvalidRequest as error:
            self.close()
            raise ApiError(400, str(error), code="invalid_request") from None
        except EngineBusy as error:
            self.close()
            if self._engine.ready:
                raise self._waiting.full() from None
            raise ApiError(503, str(error), code="not_ready") from None
        self._watcher = asyncio.create_task(self._watch(http))

    def _recorded(self, request: GenerationRequest) -> RecordedRequest | None:
        if self._recording is None:
            return None
        return self._recording.begin(request, self._engine.namespace(request.cache_salt))

    async def events(self) -> AsyncGenerator[ChoiceEvent, None]:
        """Events in order of arrival until every choice has finished.

        Raises `ApiError` when a sequence was refused (400), failed (500) or had no token when its
        time was over (504), `ClientGoneError` when the client has disconnected. A sequence that
        had tokens by then has ended: they are its answer.
        """
        owner = [p for p, request in enumerate(self._requests) for _ in range(request.n)]
        while self._running:
            item = await self._queue.get()
            if item is None:
                raise ClientGoneError
            event = item.event
            if isinstance(event, FinishEvent):
                position = owner[item.choice]
                # The other answers of a prompt are forks: the prompt is counted once.
                if event.index == 0:
                    self.splits[position] = event.split
                self._running[position] -= 1
                if not self._running[position]:
                    del self._running[position]
                _raise_if_failed(event, self._requests[position])
            elif self._requests[0].capture_logits:
                self.output_ids[item.choice].append(event.token)
            yield item

    async def _watch(self, http: Request) -> None:
        while True:
            message = await http.receive()
            if message["type"] == "http.disconnect":
                self._queue.put_nowait(None)
                return

    def close(self) -> None:
        """Cancel what still runs. Safe to call at any time, and more than once."""
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None
        for position in self._running:
            self._engine.cancel(self.request_ids[position])
        self._running.clear()


class _Forwarder:
    """Carries one engine request's events from the engine's thread to the server's loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        queue: asyncio.Queue[ChoiceEvent | None],
        first_choice: int,
        recorded: RecordedRequest | None,
        admitted: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._queue = queue
        self._first_choice = first_choice
        self._recorded = recorded
        self._admitted = admitted

    def __call__(self, event: Event) -> None:
        self._admitted()
        if self._recorded is not None:
            self._recorded.observe(event)
        item = ChoiceEvent(self._first_choice + event.index, event)
        # The loop is closed when the server has already exited: nobody waits for the event.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)


def _raise_if_failed(event: FinishEvent, request: GenerationRequest) -> None:
    if event.reason is FinishReason.REFUSED:
        raise ApiError(400, event.message, code="does_not_fit")
    if event.reason is FinishReason.FAILED:
        raise ApiError(500, event.message, code="generation_failed")
    if event.reason is FinishReason.CANCELLED:
        message = event.message or "the server is shutting down; the answer was not finished"
        raise ApiError(503, message, code="cancelled")
    if event.reason is FinishReason.DEADLINE and not event.output_tokens:
        raise ApiError(
            504,
            f"the answer had no token yet after {request.timeout_seconds or 0:g} seconds, "
            "the longest that a request may take here; send it again when the server is less "
            "busy, send less, or start the server with a larger --request-timeout-seconds",
            code="timeout",
        )
