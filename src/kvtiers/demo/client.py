"""One question over HTTP, as any client of the API would ask it: streamed, timed, with usage."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import orjson

from kvtiers.errors import KvtiersError
from kvtiers.server.answers import CAPTURE_HEADER
from kvtiers.server.guard import REQUEST_ID_HEADER

ANSWER_TOKENS_MAX = 24


class DemoError(KvtiersError, RuntimeError):
    """The demo could not be carried out (which is not the same as a check that failed)."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back for one question. Times in seconds, as the client saw them."""

    text: str
    usage: dict[str, Any]
    first_token_seconds: float
    seconds: float
    output_ids: tuple[int, ...]
    logits: npt.NDArray[np.float32]
    """float32 (answer tokens, vocabulary): what the server chose each token by."""

    @property
    def prompt_tokens(self) -> int:
        return int(self.usage["prompt_tokens"])

    @property
    def hit_tokens(self) -> dict[str, int]:
        """Cached tokens by tier."""
        return dict(self.usage["prompt_tokens_details"]["cached_tokens_details"])

    @property
    def computed_tokens(self) -> int:
        return sum(self.usage["prompt_tokens_details"]["missed_tokens"].values())


async def ask(
    http: httpx.AsyncClient, model: str, messages: list[dict[str, str]], request_id: str
) -> Reply:
    """Ask and wait for the whole answer, greedily decoded. Raises `DemoError` for an error."""
    body = {
        "model": model,
        "messages": messages,
        "temperature": 0,
        "max_tokens": ANSWER_TOKENS_MAX,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {REQUEST_ID_HEADER: request_id, CAPTURE_HEADER: "1"}
    parts: list[str] = []
    usage: dict[str, Any] | None = None
    first_token_seconds: float | None = None
    begun = time.perf_counter()
    async with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        if response.status_code != 200:
            raise DemoError(f"the server refused a question: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = orjson.loads(line[len("data: ") :])
            if "error" in chunk:
                raise DemoError(f"the server failed: {chunk['error']['message']}")
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                if first_token_seconds is None:
                    first_token_seconds = time.perf_counter() - begun
                parts.append(choice["delta"].get("content") or "")
    seconds = time.perf_counter() - begun
    if usage is None or first_token_seconds is None:
        raise DemoError("the answer ended without its usage: the server must have been stopped")
    output_ids, logits = await _logits(http, request_id)
    return Reply("".join(parts), usage, first_token_seconds, seconds, output_ids, logits)


async def _logits(
    http: httpx.AsyncClient, request_id: str
) -> tuple[tuple[int, ...], npt.NDArray[np.float32]]:
    response = await http.get(f"/cache/debug/logits/{request_id}")
    if response.status_code != 200:
        raise DemoError(f"no logits of {request_id}: {response.text}")
    ids = tuple(int(word) for word in response.headers["x-output-ids"].split(","))
    logits = np.frombuffer(response.content, "<f4").reshape(len(ids), -1)
    return ids, logits
