"""The common way of both generation routes: parameters, submit, then stream or collect."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import orjson
from fastapi import Request
from starlette.responses import Response

from kvtiers.engine.messages import (
    FinishEvent,
    FinishReason,
    GenerationRequest,
    TokenArray,
    TokenEvent,
)
from kvtiers.scheduling.executor import SamplingParams
from kvtiers.server.context import ServerContext
from kvtiers.server.errors import ApiError, ErrorBody, documented
from kvtiers.server.generation import ChoiceEvent, ClientGoneError, Generation
from kvtiers.server.requests import Generation as GenerationFields
from kvtiers.server.responses import SglExt, Usage, usage_of
from kvtiers.server.streaming import ChunkRenderer, EventStream

GENERATION_ERRORS: dict[int | str, dict[str, Any]] = {
    **documented(400, 404, 413, 429, 500, 503),
    504: {"model": ErrorBody, "description": "The time of the request was over before a token"},
}
"""How a generation route can fail, for its `responses=`."""

STREAM_CONTENT: dict[str, Any] = {
    "text/event-stream": {
        "itemSchema": {
            "type": "object",
            "properties": {
                "data": {"type": "string", "description": "A chunk or an error as JSON, or [DONE]"}
            },
            "required": ["data"],
        }
    }
}
"""What a streamed answer is, for the `content` of a `responses=`: each event by itself."""

CAPTURE_HEADER = "x-kvtiers-capture-logits"
CLIENT_CLOSED_REQUEST = 499


@dataclass(slots=True)
class Answer:
    """One choice, complete."""

    finish: FinishEvent | None = None
    tokens: list[TokenEvent] = field(default_factory=list)

    @property
    def text(self) -> str:
        tail = self.finish.text if self.finish is not None else ""
        return "".join(event.text for event in self.tokens) + tail

    @property
    def finish_reason(self) -> str:
        assert self.finish is not None, "an answer is read after its end only"
        return wire_reason(self.finish.reason)


def wire_reason(reason: FinishReason) -> str:
    """The finish reason as the API spells it.

    An answer that its model did not end was cut: by its limit, or by its time (a deadline), and
    the API has one word for both. Ends that are no answer become error responses before.
    """
    return "stop" if reason is FinishReason.STOP else "length"


def check_model(context: ServerContext, name: str) -> None:
    """404 for a model this server does not have."""
    if name != context.engine.model_name:
        raise ApiError(
            404,
            f"model '{name}' is not served here; this server has '{context.engine.model_name}'",
            code="model_not_found",
            param="model",
        )


@dataclass(frozen=True, slots=True)
class Names:
    """What the client called its prompt and the limit of its answer: errors speak of these."""

    prompt: str
    max_tokens: str = "max_tokens"


def room_for_answer(context: ServerContext, prompt_tokens: int) -> int:
    """The longest answer to a prompt for which this server has room: what is left of the context
    and of the device tier beside what is pinned there, and no more than the limit. At least 1:
    where even that does not fit, the engine says why."""
    engine = context.engine
    device_tokens = engine.device_pages * engine.config.page_tokens
    device_tokens -= context.pins.held_tokens(time.monotonic())
    # The last token of an answer is never computed with, so it needs no room on the device.
    left_tokens = min(engine.context_tokens, device_tokens + 1) - prompt_tokens
    return max(1, min(left_tokens, context.settings.output_tokens_max))


def sampling(
    context: ServerContext,
    body: GenerationFields,
    names: Names,
    max_tokens: int,
    logprobs: int | None,
) -> SamplingParams:
    """The engine's parameters of a request."""
    limit = context.settings.output_tokens_max
    if max_tokens > limit:
        raise ApiError(
            400,
            f"{names.max_tokens} is {max_tokens}; this server makes at most {limit} tokens per "
            "answer; ask for no more, or start the server with a larger --output-tokens-max",
            code="max_tokens_too_large",
            param=names.max_tokens,
        )
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(body.top_k or 0, 0),
        seed=body.seed,
        max_tokens=max_tokens,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        stop=tuple(text for text in stop if text),
        logprobs=logprobs,
        ignore_eos=bool(body.ignore_eos),
    )


def _check_length(
    context: ServerContext, names: Names, prompt_tokens: int, max_tokens: int
) -> None:
    """400 for a prompt, or a prompt with its answer, beyond the context of the model."""
    limit = context.engine.context_tokens
    if prompt_tokens >= limit:
        raise ApiError(
            400,
            f"the prompt has {prompt_tokens} tokens, but the context of "
            f"'{context.engine.model_name}' is {limit} tokens and the answer needs at least one; "
            "shorten the prompt",
            code="context_length_exceeded",
            param=names.prompt,
        )
    if prompt_tokens + max_tokens > limit:
        raise ApiError(
            400,
            f"the prompt has {prompt_tokens} tokens and {names.max_tokens} is {max_tokens}; "
            f"together they exceed the context of {limit} tokens; {names.max_tokens} can be at "
            f"most {limit - prompt_tokens} here",
            code="context_length_exceeded",
            param=names.max_tokens,
        )


def _priority(context: ServerContext, body: GenerationFields) -> int:
    policy = context.engine.config.schedule_policy
    if body.priority and policy != "priority":
        raise ApiError(
            400,
            f"priority is {body.priority}, but this server admits requests by --schedule-policy "
            f"{policy}, which knows no priorities; leave it out, or start the server with "
            "--schedule-policy priority",
            code="unsupported_parameter",
            param="priority",
        )
    return body.priority or 0


def engine_request(
    context: ServerContext,
    http: Request,
    body: GenerationFields,
    names: Names,
    prompt: TokenArray,
    params: SamplingParams,
) -> GenerationRequest:
    """One prompt as the engine takes it."""
    if not prompt.size:
        raise ApiError(
            400,
            "the prompt has no tokens; send at least one",
            code="empty_prompt",
            param=names.prompt,
        )
    _check_length(context, names, int(prompt.size), params.max_tokens)
    return GenerationRequest(
        prompt=prompt,
        params=params,
        n=body.n or 1,
        cache_salt=body.cache_salt or "",
        priority=_priority(context, body),
        timeout_seconds=context.settings.request_timeout_seconds,
        capture_logits=context.settings.debug_hooks and CAPTURE_HEADER in http.headers,
    )


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every chunk and answer of one request carries."""

    id: str
    created: int
    model: str
    include_usage: bool
    include_sglext: bool

    @classmethod
    def of(
        cls, context: ServerContext, http: Request, body: GenerationFields, prefix: str
    ) -> Envelope:
        options = body.stream_options
        return cls(
            id=f"{prefix}-{http.state.request_id}",
            created=int(time.time()),
            model=context.engine.model_name,
            include_usage=options is not None and bool(options.include_usage),
            include_sglext=bool(body.return_cached_tokens_details),
        )

    def sglext(self, usage: Usage) -> SglExt | None:
        if not self.include_sglext:
            return None
        return SglExt(cached_tokens_details=usage.prompt_tokens_details.cached_tokens_details)

    def chunk(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A chunk of a stream; `usage` is null in all but the last, where it was asked for."""
        data: dict[str, Any] = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        if self.include_usage:
            data["usage"] = None
        return data

    def whole(self, kind: str, choices: list[dict[str, Any]], usage: Usage) -> Response:
        """The whole answer, of a request that is not streamed."""
        data = self.chunk(kind, choices)
        data["usage"] = usage.model_dump()
        ext = self.sglext(usage)
        if ext is not None:
            data["sglext"] = ext.model_dump()
        return Response(orjson.dumps(data), media_type="application/json")

    def tail(self, kind: str, usage: Usage) -> dict[str, Any] | None:
        """The last chunk: no choices, but what was asked for about the whole request."""
        if not self.include_usage and not self.include_sglext:
            return None
        data = self.chunk(kind, [])
        if self.include_usage:
            data["usage"] = usage.model_dump()
        ext = self.sglext(usage)
        if ext is not None:
            data["sglext"] = ext.model_dump()
        return data


def usage_of_generation(generation: Generation, output_tokens: int) -> Usage:
    """The usage of a request that has ended."""
    splits = [split for split in generation.splits if split is not None]
    return usage_of(splits, output_tokens)


WholeRenderer: TypeAlias = Callable[[Sequence[Answer], Usage], Response]


async def respond(
    context: ServerContext,
    http: Request,
    requests: Sequence[GenerationRequest],
    *,
    stream: bool,
    chunks: ChunkRenderer,
    whole: WholeRenderer,
) -> Response:
    """Run the request to its end, or hand it over to the stream that will."""
    generation = Generation(context.engine, requests, context.waiting, context.recording)
    try:
        await generation.open(http)
        if requests[0].capture_logits:
            context.captures.remember(http.state.request_id, generation)
        events = generation.events()
        first = await anext(events)
        if stream:
            return EventStream(generation, first, events, chunks)
        answers = await _collect(generation, first, events)
    except ClientGoneError:
        generation.close()
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    except BaseException:
        generation.close()
        raise
    generation.close()
    output_tokens = sum(a.finish.output_tokens for a in answers if a.finish is not None)
    return whole(answers, usage_of_generation(generation, output_tokens))


async def _collect(
    generation: Generation, first: ChoiceEvent, rest: AsyncGenerator[ChoiceEvent, None]
) -> list[Answer]:
    answers = [Answer() for _ in range(generation.choices)]

    def add(item: ChoiceEvent) -> None:
        if isinstance(item.event, TokenEvent):
            answers[item.choice].tokens.append(item.event)
        else:
            answers[item.choice].finish = item.event

    add(first)
    async with aclosing(rest):
        async for item in rest:
            add(item)
    return answers
