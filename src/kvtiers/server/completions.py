"""POST /v1/completions: plain prompts, as text or as token ids."""

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
from kvtiers.server.generation import Generation
from kvtiers.server.guard import body_bytes
from kvtiers.server.json_body import JsonRoute
from kvtiers.server.logprobs import by_spelling, spelled
from kvtiers.server.prompts import completion_prompts
from kvtiers.server.requests import CompletionRequest
from kvtiers.server.responses import Completion, Usage

KIND = "text_completion"
MAX_TOKENS_DEFAULT = 16
NAMES = Names("prompt")


def completions_router(context: ServerContext, dependencies: Sequence[Any]) -> APIRouter:
    """The route, for one server."""
    router = APIRouter(route_class=JsonRoute, dependencies=list(dependencies), tags=["generation"])

    @router.post(
        "/v1/completions",
        summary="Continue a prompt",
        response_class=JSONResponse,
        responses={
            200: {
                "model": Completion,
                "content": STREAM_CONTENT,
                "description": "The completion; a stream of chunks when `stream` is true",
            },
            **GENERATION_ERRORS,
        },
    )
    async def create_completion(body: CompletionRequest, http: Request) -> Response:
        check_model(context, body.model)
        prompts = await context.tokenizing.run(
            body_bytes(http), lambda: completion_prompts(context.engine, body.prompt)
        )
        requests = []
        for prompt in prompts:
            room = room_for_answer(context, int(prompt.size))
            max_tokens = body.max_tokens or min(MAX_TOKENS_DEFAULT, room)
            params = sampling(context, body, NAMES, max_tokens, body.logprobs)
            requests.append(engine_request(context, http, body, NAMES, prompt, params))
        api = _CompletionApi(
            Envelope.of(context, http, body, "cmpl"),
            context.engine.codec,
            body.logprobs,
            sum(request.n for request in requests),
        )
        return await respond(
            context, http, requests, stream=bool(body.stream), chunks=api, whole=api.whole
        )

    return router


class _CompletionApi:
    """How this API writes an answer, in chunks and whole."""

    def __init__(
        self, envelope: Envelope, codec: TextCodec, logprobs: int | None, choices: int
    ) -> None:
        self._envelope = envelope
        self._codec = codec
        self._logprobs = logprobs
        self._sent_characters = [0] * choices

    def head(self, choice: int) -> dict[str, Any] | None:
        return None

    def token(self, choice: int, event: TokenEvent) -> dict[str, Any] | None:
        if not event.text and self._logprobs is None:
            return None
        logprobs = self._logprobs_of([event], self._sent_characters[choice])
        self._sent_characters[choice] += len(event.text)
        return self._chunk(choice, event.text, logprobs, None)

    def finish(self, choice: int, event: FinishEvent) -> dict[str, Any]:
        return self._chunk(choice, event.text, None, wire_reason(event.reason))

    def tail(self, generation: Generation, output_tokens: int) -> dict[str, Any] | None:
        return self._envelope.tail(KIND, usage_of_generation(generation, output_tokens))

    def whole(self, answers: Sequence[Answer], usage: Usage) -> Response:
        return self._envelope.whole(
            KIND,
            [
                _choice(i, answer.text, self._logprobs_of(answer.tokens, 0), answer.finish_reason)
                for i, answer in enumerate(answers)
            ],
            usage,
        )

    def _chunk(
        self, choice: int, text: str, logprobs: dict[str, Any] | None, reason: str | None
    ) -> dict[str, Any]:
        return self._envelope.chunk(KIND, [_choice(choice, text, logprobs, reason)])

    def _logprobs_of(self, events: Sequence[TokenEvent], offset: int) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        offsets = []
        for event in events:
            offsets.append(offset)
            offset += len(event.text)
        return {
            "tokens": [spelled(self._codec, event.token) for event in events],
            "token_logprobs": [event.logprob for event in events],
            "top_logprobs": [by_spelling(self._codec, event.top_logprobs) for event in events],
            "text_offset": offsets,
        }


def _choice(
    index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
