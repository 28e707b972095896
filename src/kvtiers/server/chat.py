"""POST /v1/chat/completions: conversations, by the model's own chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from kvtiers.engine.messages import FinishEvent, TokenEvent
from kvtiers.engine.port import TextCodec
from kvtiers.server.answers import (
    GENERATION_ERRORS,
    STREAM_CONTENT,
    Answer,
    Envelope,
    Names,
    check_model,
    engine_request,
    respond,
    room_for_answer,
    sampling,
    usage_of_generation,
    wire_reason,
)
from kvtiers.server.context import ServerContext
from kvtiers.server.errors import ApiError
from kvtiers.server.generation import Generation
from kvtiers.server.guard import body_bytes
from kvtiers.server.json_body import JsonRoute
from kvtiers.server.logprobs import entry
from kvtiers.server.prompts import chat_prompt
from kvtiers.server.requests import ChatRequest
from kvtiers.server.responses import ChatCompletion, Usage

KIND = "chat.completion"
CHUNK_KIND = "chat.completion.chunk"


def chat_router(context: ServerContext, dependencies: Sequence[Any]) -> APIRouter:
    """The route, for one server."""
    router = APIRouter(route_class=JsonRoute, dependencies=list(dependencies), tags=["generation"])

    @router.post(
        "/v1/chat/completions",
        summary="Answer a conversation",
        response_class=JSONResponse,
        responses={
            200: {
                "model": ChatCompletion,
                "content": STREAM_CONTENT,
                "description": "The answer; a stream of chunks when `stream` is true",
            },
            **GENERATION_ERRORS,
        },
    )
    async def create_chat_completion(body: ChatRequest, http: Request) -> Response:
        check_model(context, body.model)
        logprobs = _logprobs_asked(body)
        prompt = await context.tokenizing.run(
            body_bytes(http), lambda: chat_prompt(context.engine, body.messages)
        )
        names = Names("messages")
        max_tokens = body.max_tokens
        if body.max_completion_tokens is not None:
            names, max_tokens = (
                Names("messages", "max_completion_tokens"),
                body.max_completion_tokens,
            )
        if max_tokens is None:
            max_tokens = room_for_answer(context, int(prompt.size))
        params = sampling(context, body, names, max_tokens, logprobs)
        request = engine_request(context, http, body, names, prompt, params)
        api = _ChatApi(Envelope.of(context, http, body, "chatcmpl"), context.engine.codec, logprobs)
        return await respond(
            context, http, [request], stream=bool(body.stream), chunks=api, whole=api.whole
        )

    return router


def _logprobs_asked(body: ChatRequest) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise ApiError(
            400,
            f"top_logprobs is {body.top_logprobs} but logprobs is not true; set logprobs as well",
            code="invalid_value",
            param="top_logprobs",
        )
    return body.top_logprobs or 0 if body.logprobs else None


class _ChatApi:
    """How this API writes an answer, in chunks and whole."""

    def __init__(self, envelope: Envelope, codec: TextCodec, logprobs: int | None) -> None:
        self._envelope = envelope
        self._codec = codec
        self._logprobs = logprobs

    def head(self, choice: int) -> dict[str, Any] | None:
        return self._chunk(choice, {"role": "assistant", "content": ""}, None, None)

    def token(self, choice: int, event: TokenEvent) -> dict[str, Any] | None:
        if not event.text and self._logprobs is None:
            return None
        return self._chunk(choice, {"content": event.text}, self._logprobs_of([event]), None)

    def finish(self, choice: int, event: FinishEvent) -> dict[str, Any]:
        delta = {"content": event.text} if event.text else {}
        return self._chunk(choice, delta, None, wire_reason(event.reason))

    def tail(self, generation: Generation, output_tokens: int) -> dict[str, Any] | None:
        return self._envelope.tail(CHUNK_KIND, usage_of_generation(generation, output_tokens))

    def whole(self, answers: Sequence[Answer], usage: Usage) -> Response:
        return self._envelope.whole(
            KIND,
            [
                {
                    "index": i,
                    "message": {"role": "assistant", "content": answer.text},
                    "logprobs": self._logprobs_of(answer.tokens),
                    "finish_reason": answer.finish_reason,
                }
                for i, answer in enumerate(answers)
            ],
            usage,
        )

    def _chunk(
        self,
        choice: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None,
        reason: str | None,
    ) -> dict[str, Any]:
        return self._envelope.chunk(
            CHUNK_KIND,
            [{"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason}],
        )

    def _logprobs_of(self, events: Sequence[TokenEvent]) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        return {
            "content": [
                {
                    **entry(self._codec, event.token, event.logprob),
                    "top_logprobs": [entry(self._codec, t, p) for t, p in event.top_logprobs],
                }
                for event in events
            ]
        }
