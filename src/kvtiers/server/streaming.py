"""Server-sent events: an answer as it is made, and what happens when it fails or nobody listens.

The status line is sent only once the first event of the engine is there, so that a request that is
refused or fails before its first token still gets a proper 4xx or 5xx. A failure after that is an
`error` event followed by the end of the stream.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvtiers.engine.messages import FinishEvent, TokenEvent
from kvtiers.server.errors import ApiError, error_body
from kvtiers.server.generation import ChoiceEvent, ClientGoneError, Generation

log = logging.getLogger("kvtiers.server")

DONE = b"data: [DONE]\n\n"


def sse(data: Any) -> bytes:
    """One event of a stream."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


class ChunkRenderer(Protocol):
    """How one API writes the chunks of a stream, as plain data."""

    def head(self, choice: int) -> dict[str, Any] | None:
        """What comes before a choice's first token, if anything."""
        ...

    def token(self, choice: int, event: TokenEvent) -> dict[str, Any] | None:
        """None where this token makes nothing to send yet."""
        ...

    def finish(self, choice: int, event: FinishEvent) -> dict[str, Any]: ...

    def tail(self, generation: Generation, output_tokens: int) -> dict[str, Any] | None:
        """The last chunk, with the usage, where it was asked for."""
        ...


class EventStream(Response):
    """A stream of chunks. Whatever ends it, the generation behind it is closed."""

    media_type = "text/event-stream"

    def __init__(
        self,
        generation: Generation,
        first: ChoiceEvent,
        rest: AsyncGenerator[ChoiceEvent, None],
        renderer: ChunkRenderer,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._generation = generation
        self._first = first
        self._rest = rest
        self._renderer = renderer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def put(body: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        headers = [(k, v) for k, v in self.raw_headers if k != b"content-length"]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async with aclosing(self._chunks()) as chunks:
                async for chunk in chunks:
                    await put(chunk)
            await put(DONE, more=False)
        except ClientGoneError:
            pass  # nobody reads the rest
        finally:
            self._generation.close()

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        output_tokens = 0
        try:
            for choice in range(self._generation.choices):
                head = self._renderer.head(choice)
                if head is not None:
                    yield sse(head)
            async with aclosing(self._all_events()) as events:
                async for choice, event in events:
                    if isinstance(event, TokenEvent):
                        chunk = self._renderer.token(choice, event)
                    else:
                        output_tokens += event.output_tokens
                        chunk = self._renderer.finish(choice, event)
                    if chunk is not None:
                        yield sse(chunk)
            tail = self._renderer.tail(self._generation, output_tokens)
            if tail is not None:
                yield sse(tail)
        except ApiError as error:
            yield sse(error.body)
        except ClientGoneError:
            raise
        except Exception as error:  # a bug: the client must not take the cut for the end
            log.exception("unhandled error in a stream")
            message = f"internal error ({type(error).__name__}); the server log has the traceback"
            yield sse(error_body(500, message, code="internal_error"))

    async def _all_events(self) -> AsyncGenerator[ChoiceEvent, None]:
        yield self._first
        async with aclosing(self._rest) as rest:
            async for item in rest:
                yield item
