"""From what clients write (text, messages, ids) to token ids, by the model's own tokenizer.

Tokenizing a long prompt takes a good part of a second. It is done on worker threads, a few at once:
so it holds up neither the loop, nor the threads that other routes wait for, nor a short prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from kvtiers.engine.messages import TokenArray
from kvtiers.engine.port import Engine
from kvtiers.errors import InvalidRequest, ModelError
from kvtiers.server.errors import ApiError
from kvtiers.server.requests import Message

T = TypeVar("T")

LONG_BODY_BYTES = 1 << 16
"""Of a request whose prompt is tokenized among the long ones: from some ten milliseconds on."""


class Tokenizing:
    """Runs what tokenizes on threads of its own: two for long prompts, two for short ones."""

    def __init__(self) -> None:
        self._long = ThreadPoolExecutor(2, "kvtiers-tokenize-long")
        self._short = ThreadPoolExecutor(2, "kvtiers-tokenize")

    async def run(self, body_bytes: int, work: Callable[[], T]) -> T:
        """What `work` returns or raises, for a request whose body has so many bytes."""
        threads = self._long if body_bytes >= LONG_BODY_BYTES else self._short
        return await asyncio.get_running_loop().run_in_executor(threads, work)


def completion_prompts(
    engine: Engine, prompt: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]
) -> list[TokenArray]:
    """One token array per prompt of a completion request."""
    if isinstance(prompt, str):
        return [engine.codec.encode(prompt)]
    if isinstance(prompt[0], int):
        return [_ids(engine, prompt)]
    return [
        engine.codec.encode(one) if isinstance(one, str) else _ids(engine, one) for one in prompt
    ]


def chat_prompt(engine: Engine, messages: Sequence[Message]) -> TokenArray:
    """The token array of a conversation, by the model's own template."""
    plain = [
        {"role": "system" if m.role == "developer" else m.role, "content": m.text} for m in messages
    ]
    try:
        return engine.codec.encode_chat(plain)
    except InvalidRequest as error:
        raise ApiError(400, str(error), code="invalid_messages", param="messages") from None
    except ModelError as error:
        raise ApiError(
            400, f"{error}; use /v1/completions", code="no_chat_template", param="messages"
        ) from None


def _ids(engine: Engine, ids: object) -> TokenArray:
    array = np.asarray(ids, dtype=np.int64)
    vocabulary = engine.codec.vocab_tokens
    if array.size and int(array.max()) >= vocabulary:
        raise ApiError(
            400,
            f"token id {int(array.max())} is outside the vocabulary of {vocabulary} tokens",
            code="unknown_token",
            param="prompt",
        )
    return array.astype(np.int32)
