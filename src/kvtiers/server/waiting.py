"""Places in the queue for requests of several prompts: all at once, or none.

The engine counts what waits and refuses a prompt beyond its limit. Prompt by prompt that lets a
request fill the queue with a part of itself, be refused for the rest, and have shut others out for
nothing. So the places of all its prompts are taken here before the first is submitted.

A prompt has its place until the engine's first word about it. That is a little longer than it
waits there (its prefill is counted too), so this is never laxer than the engine. Requests of one
prompt are the engine's to refuse; their places are counted, not checked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvtiers.engine.messages import GenerationRequest
from kvtiers.server.errors import ApiError


class WaitingRoom:
    """`limit` answers may wait. Any thread may give places back."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        self._lock = threading.Lock()

    @property
    def taken(self) -> int:
        """Answers of which the engine has not said anything yet."""
        return self._taken

    def check(self, requests: Sequence[GenerationRequest]) -> None:
        """`ApiError` unless all of `requests` can wait at once: 400 never, 429 not now."""
        if len(requests) == 1:
            return
        # The engine looks when a prompt comes: the answers of all before it wait by then.
        needed = sum(request.n for request in requests[:-1]) + 1
        what = f"{len(requests)} prompts"
        if requests[0].n > 1:
            what += f" with {requests[0].n} answers each"
        if needed > self._limit:
            raise ApiError(
                400,
                f"the request has {what}, but at most {self._limit} may wait on this server, so "
                "they never fit in its queue together; send fewer prompts in one request, or "
                "start the server with a larger --max-waiting-requests",
                code="too_many_prompts",
                param="prompt",
            )
        if self._taken + needed > self._limit:
            raise ApiError(
                429,
                f"the request has {what} and {self._taken} wait already, of {self._limit} that may "
                "(--max-waiting-requests); try again later, or send fewer prompts in one request",
                code="queue_full",
            )

    def full(self) -> ApiError:
        """What a prompt is told that the engine has no place for."""
        return ApiError(
            429,
            f"as many requests are waiting as may ({self._limit}); try again later (the limit is "
            "the server's --max-waiting-requests)",
            code="queue_full",
        )

    def take(self, answers: int) -> Callable[[], None]:
        """Take places; what is returned gives them back, once, however often it is called."""
        with self._lock:
            self._taken += answers
        held = answers

        def give_back() -> None:
            nonlocal held
            if held:  # asked with every token: the lock is for the first
                with self._lock:
                    self._taken -= held
                    held = 0

        return give_back
