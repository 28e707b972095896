"""The engine's public surface: what a server may use and what a fake must offer.

    client thread                       engine thread (one, owned by the engine)
    submit(request, on_event) ------->  validated, queued; taken up at the next step
                     <----------------  on_event(TokenEvent | FinishEvent), in order per answer
    cancel(request_id) -------------->  ends its answers with FinishReason.CANCELLED
    call_in_loop(fn) ---------------->  fn(parts) between two steps; its Future carries the result

Invariants: every submitted answer gets exactly one `FinishEvent`, whatever fails; `on_event` runs
on the engine's thread, must not block and must not call back into the engine except `cancel`; the
cache, the ledger and the scheduler are touched by the engine's thread alone, which is why every
command goes through `call_in_loop`.

How exactness is checked from outside: a request with `capture_logits` leaves the full logits of
each sampled position, `take_logits(request_id)` fetches them once as float32 (answer tokens,
vocabulary). `engine.reference.ReferenceModel.compare` then feeds prompt and answer through the
same weights without any cache, in one plain forward pass, and compares position by position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from kvtiers.engine.config import EngineConfig
from kvtiers.engine.messages import Event, FinishEvent, GenerationRequest, TokenArray
from kvtiers.types import Namespace, Tier

T = TypeVar("T")


class TextCodec(Protocol):
    """Text to tokens and back, for one model. Safe to call from any thread."""

    vocab_tokens: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool

    def encode(self, text: str) -> TokenArray:
        """Tokens of a plain prompt, with the special tokens the model puts around one."""
        ...

    def encode_chat(
        self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True
    ) -> TokenArray:
        """Tokens of a conversation by the model's own template. `ModelError` when it has none,
        `InvalidRequest` when the template refuses these messages."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, special tokens left out."""
        ...

    def token_text(self, token: int) -> str:
        """One token by itself, for logprobs; special tokens are spelled out."""
        ...

    def token_bytes(self, token: int) -> bytes | None:
        """The bytes of one token, which may be a part of a character; None: it is special, and
        no part of a text. The bytes of an answer's tokens, joined, are its text."""
        ...


class RequestHandle(Protocol):
    """A submitted request. Iterating yields its events until each of `n` answers has finished."""

    request_id: int

    def __iter__(self) -> Iterator[Event]:
        """Events as they come, blocking. Only for requests submitted without `on_event`."""
        ...

    def results(self, timeout_seconds: float | None = None) -> list[FinishEvent]:
        """Wait for all answers; `FinishEvent.text` is then the whole text of each.

        Raises `TimeoutError`. Only for requests submitted without `on_event`.
        """
        ...


class Engine(Protocol):
    """A model behind a hierarchical cache. `LLMEngine` is the one that serves."""

    config: EngineConfig
    model_name: str
    """The name clients use."""
    context_tokens: int
    """Prompt and output together never exceed this."""
    kv_bytes_per_token: int
    device_pages: int
    host_pages: int

    @property
    def codec(self) -> TextCodec: ...

    def namespace(self, cache_salt: str = "") -> Namespace:
        """The namespace of requests with this salt: model fingerprint and salt."""
        ...

    def start(self) -> None:
        """Start the engine's thread. Nothing is computed before."""
        ...

    @property
    def ready(self) -> bool:
        """Whether requests are taken: started, not draining, the loop alive."""
        ...

    def submit(
        self, request: GenerationRequest, on_event: Callable[[Event], None] | None = None
    ) -> RequestHandle:
        """Queue a request; returns at once.

        Raises `InvalidRequest` for one that can never be served (no tokens, too long, unknown
        token ids, `max_tokens` below 1), `EngineBusy` when the queue is full or the engine is
        draining or stopped. After a return exactly `n` `FinishEvent`s follow.
        """
        ...

    def cancel(self, request_id: int) -> None:
        """End a request's answers soon; a request that has ended is left alone."""
        ...

    def call_in_loop(self, fn: Callable[[Any], T]) -> Future[T]:
        """Run `fn(parts)` on the engine's thread between two steps.

        `parts` is `EngineParts` (cache, ledger, controller, scheduler, clock), and the ledger
        shows everything that has happened. What `fn` raises is raised by the future; an
        `InvariantViolation` ends the engine besides. Before `start` and after `stop` it runs on
        the caller's thread.
        """
        ...

    # ---- commands, each one a call_in_loop
    def flush(self, tier: Tier) -> int:
        """Remove every unleased page from a tier; pages removed. Storage: the store is cleared."""
        ...

    def pin(self, prompt: TokenArray, cache_salt: str, ttl_seconds: float) -> int | None:
        """Keep the cached part of a prompt until `unpin` or the TTL; None when nothing matched."""
        ...

    def unpin(self, pin_id: int) -> None: ...
    def attach_storage(self) -> None:
        """Open the configured storage directory and use it. `StorageError` when it cannot be."""
        ...

    def detach_storage(self) -> None:
        """Stop using storage and release its directory; the engine goes on without it."""
        ...

    def take_logits(self, request_id: int, index: int = 0) -> npt.NDArray[np.float32] | None:
        """Captured logits, shape (answer tokens, vocabulary), once; None when there are none."""
        ...

    # ---- the end
    def drain(self, timeout_seconds: float) -> bool:
        """Take no more requests and wait for those there are; False when some had to be cancelled.

        Backups and stores are waited for too, and what write_back or store_on=evict has put off is
        made up for, so that a restart on the same storage is warm.
        """
        ...

    def stop(self) -> None:
        """End the thread and release everything. Requests that still run end as cancelled."""
        ...
