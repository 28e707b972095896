"""A plain log of OpenAI chat requests as a trace.

JSON lines, one request each, as an application or a gateway may have logged them:

    {"timestamp": 1700000000.5, "messages": [{"role": "user", "content": ".."}, ..],
     "usage": {"completion_tokens": 34}}

`created` serves as `timestamp`; a batch line (`{"body": {"messages": ..}}`) is understood; the
output's length is `usage.completion_tokens`, else what `max_tokens` allowed, else 0. The text is
turned into tokens by the callable given, and into block ids at once: nothing else keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy.typing as npt

from kvtiers.errors import ConfigError, InvalidTokens
from kvtiers.types import TOKEN_BYTES, token_key
from kvtiers.workload.paths import PathHasher
from kvtiers.workload.request import (
    RecordError,
    TraceProblem,
    TraceRequest,
    as_count,
    as_time,
    required,
)

Message: TypeAlias = Mapping[str, Any]
TokenizeMessages: TypeAlias = Callable[[Sequence[Message]], npt.ArrayLike]
"""Messages to the token ids of the whole prompt, chat template and generation prompt included."""


class ChatLogFormat:
    """Reads a chat log. Times are seconds; only differences count, so epoch seconds are fine.

    `interval_seconds` spaces the requests evenly where the log has no times; where it has, that is
    a `ConfigError`.
    """

    name = "chat"
    time_unit_given = True

    def __init__(
        self,
        tokenize: TokenizeMessages,
        block_tokens: int = 16,
        interval_seconds: float | None = None,
    ) -> None:
        self.block_tokens = block_tokens
        self._tokenize = tokenize
        self._interval_seconds = interval_seconds
        self._hasher = PathHasher(block_tokens)
        self._origin_seconds: float | None = None
        self._requests = 0

    def header(self, record: Mapping[str, Any]) -> bool:
        """A chat log has no header; a new pass over the file begins."""
        self._origin_seconds = None
        self._requests = 0
        return False

    def parse(self, record: Mapping[str, Any]) -> TraceRequest:
        """A record as a request; raises `RecordError`."""
        body = record.get("body", record)
        if not isinstance(body, dict):
            raise RecordError(TraceProblem.BAD_VALUE, "body must be an object")
        messages = required(body, "messages")
        if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
            raise RecordError(TraceProblem.BAD_VALUE, "messages must be a list of objects")
        arrival_seconds = self._arrival(record, body)
        try:
            key = token_key(self._tokenize(messages))
        except (InvalidTokens, ValueError, TypeError, KeyError) as error:
            raise RecordError(
                TraceProblem.BAD_VALUE, f"messages cannot be tokenised: {error}"
            ) from error
        input_tokens = as_count(len(key) // TOKEN_BYTES, "the tokenised prompt", at_least=1)
        self._requests += 1
        return TraceRequest(
            arrival_seconds=arrival_seconds,
            input_tokens=input_tokens,
            output_tokens=_output_tokens(record, body),
            block_ids=self._hasher.ids(key),
            block_tokens=self.block_tokens,
        )

    def _arrival(self, record: Mapping[str, Any], body: Mapping[str, Any]) -> float:
        for source in (record, body):
            for field in ("timestamp", "created"):
                if field in source:
                    if self._interval_seconds is not None:
                        raise ConfigError(
                            f"--interval is for a log without times, and this one has '{field}'; "
                            "leave --interval out"
                        )
                    seconds = as_time(source[field], field)
                    if self._origin_seconds is None:
                        self._origin_seconds = seconds
                    if seconds < self._origin_seconds:
                        raise RecordError(
                            TraceProblem.TIME_GOES_BACK,
                            f"{field} {seconds} lies before the first request's "
                            f"{self._origin_seconds}; sort the file by time",
                        )
                    return seconds - self._origin_seconds
        if self._interval_seconds is None:
            raise RecordError(
                TraceProblem.MISSING_FIELD,
                "neither 'timestamp' nor 'created' is there; give a spacing (--interval SECONDS)",
            )
        return self._requests * self._interval_seconds


def _output_tokens(record: Mapping[str, Any], body: Mapping[str, Any]) -> int:
    for source in (record, body):
        usage = source.get("usage")
        if isinstance(usage, dict) and "completion_tokens" in usage:
            return as_count(usage["completion_tokens"], "usage.completion_tokens", at_least=0)
    for field in ("max_completion_tokens", "max_tokens"):
        if body.get(field) is not None:
            return as_count(body[field], field, at_least=0)
    return 0
