"""The engine that serves: requests, commands and life cycle over one loop.

Owns what other threads may ask of an engine; the loop's thread does it (`loop`). What is computed
is the executor's business, what is decided the core's, what is counted the ledger's. The contract
is `port.Engine`.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kvtiers.engine.answers import Answers
from kvtiers.engine.codec import TokenizerCodec
from kvtiers.engine.config import EngineConfig
from kvtiers.engine.handle import QueuedHandle
from kvtiers.engine.loop import EngineLoop
from kvtiers.engine.messages import Event, FinishReason, GenerationRequest, TokenArray
from kvtiers.engine.models import model_directory, models_dir, public_name
from kvtiers.engine.parts import EngineParts, assemble
from kvtiers.engine.served_model import ServedModel, load_plain
from kvtiers.engine.storage_commands import StorageCommands
from kvtiers.errors import EngineBusy, InvalidRequest, InvariantViolation
from kvtiers.metrics.gauges import Gauges
from kvtiers.scheduling.executor import SamplingParams
from kvtiers.scheduling.request import Request
from kvtiers.types import Namespace, Tier, token_key

log = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_SECONDS = 10.0
"""How long `stop` waits for copies and calls to the store that are under way."""


class LLMEngine:
    """A model behind a hierarchical cache; implements `port.Engine`."""

    def __init__(
        self, config: EngineConfig, model_name: str, codec: TokenizerCodec, parts: EngineParts
    ) -> None:
        """An engine over `parts`; `load` makes everything from a configuration."""
        self.config = config
        self.model_name = model_name
        self.codec = codec
        self.parts = parts
        model = parts.model
        self.context_tokens = min(
            model.context_tokens, config.context_tokens or model.context_tokens
        )
        self.kv_bytes_per_token = model.layout.bytes_per_token
        self.device_pages = parts.cache.config.device_pages
        self.host_pages = parts.cache.config.host_pages
        self._answers = Answers(codec.decode, parts.scheduler.finish, self._remember)
        self._loop = EngineLoop(parts, self._answers)
        self._storage = StorageCommands(parts, self.call_in_loop)
        self._ids = count(1)
        self._lock = threading.Lock()
        self._draining = False
        self._posted = 0  # submitted and not yet taken up by the loop

    @classmethod
    def load(cls, config: EngineConfig) -> LLMEngine:
        """Find the model, load it, allocate the tiers, open storage.

        Raises `ModelError` and `UnknownName` for the model, `ConfigError` for sizes and policies,
        `StorageError` for the storage directory.
        """
        torch.set_num_threads(config.num_threads)
        directory = model_directory(config.model, models_dir(config.models_dir))
        plain = load_plain(directory, config.dtype)
        codec = TokenizerCodec(directory, plain.config.get_text_config().vocab_size)
        parts = assemble(config, ServedModel.of(plain), codec.eos_token_ids)
        return cls(config, public_name(config.model), codec, parts)

    def namespace(self, cache_salt: str = "") -> Namespace:
        """The namespace of requests with this salt."""
        return Namespace(self.parts.model.fingerprint, salt=cache_salt)

    def gauges(self) -> Gauges:
        """The loop's latest look at the live parts; never blocks."""
        return self._loop.gauges

    @property
    def step_seconds(self) -> float:
        """Time in steps that computed something; the rest beside `parts.executor.busy_seconds` is
        what deciding, copying orders, counting and detokenising cost."""
        return self._loop.step_seconds

    # ------------------------------------------------------------------ requests

    @property
    def ready(self) -> bool:
        return self._loop.alive and not self._draining

    def submit(
        self, request: GenerationRequest, on_event: Callable[[Event], None] | None = None
    ) -> QueuedHandle:
        """Queue a request; see `port.Engine.submit`."""
        key = self._check(request)
        with self._lock:
            self._check_room()
            ids = [next(self._ids) for _ in range(request.n)]
            self._posted += 1
        handle = QueuedHandle(ids[0], request.n)
        namespace, arrival = self.namespace(request.cache_salt), self.parts.clock()
        sequences = [
            Request(
                sequence_id,
                key,
                _seeded(request.params, index),
                namespace,
                arrival,
                priority=request.priority,
                deadline_seconds=request.timeout_seconds,
                group=ids[0] if request.n > 1 else None,
            )
            for index, sequence_id in enumerate(ids)
        ]

        def take_up() -> None:
            with self._lock:
                self._posted -= 1
            self._answers.begin(ids[0], request, sequences, on_event or handle.put)
            if not self._loop.alive:
                return  # it is ending, and ends every answer
            for sequence in sequences:
                if request.capture_logits and self.parts.capture is not None:
                    self.parts.capture.want(sequence.request_id)
                self.parts.scheduler.add(sequence)
            if not sequences[0].ended:  # once for all answers: they share what it finds
                self.parts.what_if.ask(sequences[0].prompt, namespace)

        if not self._loop.post(take_up):
            raise EngineBusy("the engine takes no requests: it has stopped")
        return handle

    def cancel(self, request_id: int) -> None:
        """End a request's answers soon; a request that has ended is left alone."""

        self._loop.post(lambda: self._cancel(self._answers.ids(request_id)))

    def _cancel(self, sequence_ids: list[int]) -> None:
        if not self._loop.alive:
            return  # it is ending, and ends every answer
        for sequence_id in sequence_ids:
            self.parts.scheduler.cancel(sequence_id)
            self._answers.end(sequence_id, FinishReason.CANCELLED)

    def take_logits(self, request_id: int, index: int = 0) -> npt.NDArray[np.float32] | None:
        """Captured logits of answer `index`, (tokens, vocabulary), once."""
        capture = self.parts.capture
        return None if capture is None else capture.take(request_id + index)

    def _remember(self, sequence: Request) -> None:
        if sequence.output:
            self.parts.what_if.use(sequence.key, sequence.namespace)

    def _check(self, request: GenerationRequest) -> bytes:
        """The request's prompt as a key; `InvalidRequest` for what can never be served."""
        params, prompt_tokens = request.params, len(request.prompt)
        if prompt_tokens == 0:
            raise InvalidRequest("the prompt is empty; it needs at least one token")
        if request.n < 1:
            raise InvalidRequest(f"n is {request.n}; it must be at least 1")
        if params.max_tokens < 1:
            raise InvalidRequest(f"max_tokens is {params.max_tokens}; it must be at least 1")
        if prompt_tokens + params.max_tokens > self.context_tokens:
            raise InvalidRequest(
                f"this model's context is {self.context_tokens} tokens; the prompt has "
                f"{prompt_tokens} and max_tokens asks for {params.max_tokens} more"
            )
        if params.temperature < 0 or not 0 < params.top_p <= 1 or params.top_k < 0:
            raise InvalidRequest(
                f"temperature is {params.temperature} (at least 0), top_p {params.top_p} (above 0, "
                f"at most 1), top_k {params.top_k} (at least 0)"
            )
        if request.capture_logits and self.parts.capture is None:
            raise InvalidRequest("logits are not kept here; start with capture_logits_mib above 0")
        key = token_key(request.prompt)
        largest = int(np.max(request.prompt))
        if largest >= self.codec.vocab_tokens:
            raise InvalidRequest(
                f"token id {largest} is outside this model's vocabulary of "
                f"{self.codec.vocab_tokens} tokens"
            )
        return key

    def _check_room(self) -> None:
        if not self.ready:
            state = "draining" if self._loop.alive else "not running"
            raise EngineBusy(f"the engine takes no requests: it is {state}")
        waiting = self._posted + self.parts.scheduler.waiting
        if waiting >= self.config.max_waiting_requests:
            raise EngineBusy(
                f"{waiting} requests are waiting already, and no more than "
                f"{self.config.max_waiting_requests} may (--max-waiting-requests); try again later"
            )

    # ------------------------------------------------------------------ commands

    def call_in_loop(self, fn: Callable[[EngineParts], T]) -> Future[T]:
        """Run `fn(parts)` on the loop's thread between two steps; see `port.Engine`.

        After the loop has failed, `fn` sees the parts as they were left.
        """
        future: Future[T] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                self._pump()  # the books show what the last step did ...
                try:
                    result = fn(self.parts)
                except InvariantViolation:
                    raise
                except Exception as error:
                    future.set_exception(error)  # the caller's: a refusal, which changed nothing
                    return
                self._pump()  # ... and what this did
            except BaseException as error:
                future.set_exception(error)
                raise  # a bug, wherever it is met first: the loop fails as it does in a step
            future.set_result(result)

        if not self._loop.post(call):
            with suppress(Exception):  # the future tells; there is no loop to fail
                call()
        return future

    def _pump(self) -> None:
        if self._loop.failure is not None:
            return  # what the parts say now is what they were left with, to be looked at
        self.parts.controller.pump()

    def flush(self, tier: Tier) -> int:
        """Remove every unleased page from a tier; pages removed. Storage: the store is cleared."""

        if tier is Tier.STORAGE:
            return self._storage.clear()
        return self.call_in_loop(lambda parts: parts.cache.flush(tier, parts.clock())).result()

    def pin(self, prompt: TokenArray, cache_salt: str, ttl_seconds: float) -> int | None:
        """Keep the cached part of a prompt until `unpin` or the TTL; None: nothing matched."""
        key, namespace = token_key(prompt), self.namespace(cache_salt)
        return self.call_in_loop(
            lambda parts: parts.cache.pin(key, namespace, parts.clock(), ttl_seconds)
        ).result()

    def unpin(self, pin_id: int) -> None:
        self.call_in_loop(lambda parts: parts.cache.unpin(pin_id, parts.clock())).result()

    def attach_storage(self) -> None:
        """Open the configured storage directory and use it."""
        self._storage.attach()

    def detach_storage(self) -> None:
        """Stop using storage and release its directory."""
        self._storage.detach()

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Start the loop's thread."""
        self._loop.start()

    def drain(self, timeout_seconds: float) -> bool:
        """Take no more requests, finish those there are, let copies end; see `port.Engine`."""
        self._draining = True
        deadline = self.parts.clock() + timeout_seconds
        finished = self._loop.wait_idle(timeout_seconds)
        if not finished:
            self._loop.post(lambda: self._cancel(self._answers.ids()))
        if self._loop.failure is not None:
            return False  # nothing is known about the parts any more
        left = max(0.0, deadline - self.parts.clock())
        try:
            saved = self.call_in_loop(lambda parts: parts.save(left)).result()
        except Exception:
            if self._loop.failure is None:
                raise
            return False  # it failed meanwhile, and has said so
        if not saved:
            log.warning(
                "copies were still under way after %g seconds of draining; pages that had not "
                "reached storage are lost at exit and computed again when asked for: give more "
                "time (--drain-seconds), or see whether the storage hangs",
                timeout_seconds,
            )
        return finished

    def stop(self) -> None:
        """End the thread and release everything. Requests that still run end as cancelled."""
        self._draining = True
        self._loop.end()
        try:
            self.parts.close(CLOSE_SECONDS)
        except Exception:
            if self._loop.failure is None:
                raise
            log.exception("what the engine's loop left when it failed does not close properly")


def _seeded(params: SamplingParams, index: int) -> SamplingParams:
    """Each answer has a seed of its own, so that what is computed twice is chosen alike."""
    if params.temperature == 0:
        return params
    seed = secrets.randbits(63) if params.seed is None else params.seed + index
    return replace(params, seed=seed)
