"""An engine of one page of code: the shape of `engine.port.Engine`, no model, no torch.

It answers every prompt with the prompt's own tokens, one event each, from a thread of its own, so
that the server's tests see the same crossing of threads as with a real engine.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvtiers.engine.config import EngineConfig
from kvtiers.engine.messages import (
    Event,
    FinishEvent,
    FinishReason,
    GenerationRequest,
    TokenEvent,
)
from kvtiers.errors import EngineBusy, InvalidRequest
from kvtiers.metrics.ledger import Ledger
from kvtiers.types import HitSplit, Missed, MissReason, Namespace, PoolSpec, Tier


class ByteCodec:
    """A token is a byte."""

    vocab_tokens = 256
    eos_token_ids = (0,)
    has_chat_template = True

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> np.ndarray:
        text = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return self.encode(text)

    def token_text(self, token: int) -> str:
        return bytes([token]).decode("latin-1")

    def token_bytes(self, token: int) -> bytes | None:
        return bytes([token]) if token else None


class FakeEngine:
    """`fail` makes every request end so, `fail_after` after as many tokens; `busy_after` requests
    the queue is full; the time of a request is over after `deadline_after` tokens of its answers.
    """

    def __init__(self, context_tokens: int = 512) -> None:
        self.config = EngineConfig()
        self.model_name = "fake"
        self.codec = ByteCodec()
        self.context_tokens = context_tokens
        self.kv_bytes_per_token = 64
        self.device_pages = 64
        self.host_pages = 256
        self.ready = True
        self.busy = False
        self.busy_after = 1 << 30
        self.fail: tuple[FinishReason, str] | None = None
        self.fail_after = 1 << 30
        self.deadline_after = 1 << 30
        self.cancelled: set[int] = set()
        self.requests: dict[int, GenerationRequest] = {}
        self.ledger_books = Ledger(16, (PoolSpec("kv", 64),), 64, 256)
        self._ids = itertools.count(1)
        self._pins = itertools.count(1)

    def namespace(self, cache_salt: str = "") -> Namespace:
        return Namespace("fake", salt=cache_salt)

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def submit(
        self, request: GenerationRequest, on_event: Callable[[Event], None]
    ) -> SimpleNamespace:
        if self.busy or not self.ready or len(self.requests) >= self.busy_after:
            raise EngineBusy("the queue holds 1024 requests, which is its limit")
        if not request.prompt.size:
            raise InvalidRequest("the prompt has no tokens")
        request_id = next(self._ids)
        self.requests[request_id] = request
        threading.Thread(target=self._run, args=(request_id, request, on_event)).start()
        return SimpleNamespace(request_id=request_id)

    def _run(self, request_id: int, request: GenerationRequest, on_event: Any) -> None:
        split = HitSplit(1, 2, 3, len(request.prompt) - 6, (Missed(MissReason.UNKNOWN, 4),))
        made_in_all = 0
        for index in range(request.n):
            if self.fail is not None:
                on_event(FinishEvent(index, self.fail[0], 0, message=self.fail[1]))
                continue
            made = 0
            for token in itertools.islice(itertools.cycle(request.prompt), 1 << 20):
                if made == request.params.max_tokens or request_id in self.cancelled:
                    break
                if made_in_all == self.deadline_after:
                    break
                if made == self.fail_after:
                    on_event(FinishEvent(index, FinishReason.FAILED, made, message="NaN"))
                    return
                token = int(token)
                top = ((token, -0.5),) * (request.params.logprobs or 0)
                on_event(TokenEvent(index, token, self.codec.token_text(token), -0.5, top))
                made += 1
                made_in_all += 1
                time.sleep(0.001)
            reason = FinishReason.LENGTH
            if request_id in self.cancelled:
                reason = FinishReason.CANCELLED
            elif made < request.params.max_tokens:
                reason = FinishReason.DEADLINE
            on_event(FinishEvent(index, reason, made, split=split if made else None))

    def cancel(self, request_id: int) -> None:
        self.cancelled.add(request_id)

    def call_in_loop(self, fn: Callable[[Any], Any]) -> Future[Any]:
        done: Future[Any] = Future()
        cache = SimpleNamespace(
            recount=lambda: {
                (tier, state): pages
                for tier, book in self.ledger_books.tiers.items()
                for state, pages in book.states().items()
            }
        )
        done.set_result(fn(SimpleNamespace(ledger=self.ledger_books, cache=cache)))
        return done

    def flush(self, tier: Tier) -> int:
        return 5

    def pin(self, prompt: np.ndarray, cache_salt: str, ttl_seconds: float) -> int | None:
        if prompt[0] == ord("?"):
            return None
        pin_id = next(self._pins)
        self.ledger_books.pinned_tokens_by_pin[pin_id] = len(prompt) // 16 * 16
        return pin_id

    def unpin(self, pin_id: int) -> None:
        del self.ledger_books.pinned_tokens_by_pin[pin_id]
