"""An executor without a model: tokens follow from the key alone, so every run gives the same.

Owns nothing but its counters. A request's answer depends only on its own key, never on the batch,
on the tier its prefix came from or on how often it was retracted: two runs that disagree show a
scheduler (or cache) that handed over the wrong key.
"""

from __future__ import annotations

from collections.abc import Callable
from zlib import crc32

from kvtiers.errors import InvariantViolation
from kvtiers.scheduling.executor import Batch, BatchResult, Chunk, TokenResult
from kvtiers.types import TOKEN_BYTES

_CONTEXT_BYTES = 16 * TOKEN_BYTES


def fake_token(key: bytes, vocab_tokens: int = 1000) -> int:
    """The token that follows `key` (int32 bytes)."""
    return crc32(key[-_CONTEXT_BYTES:], len(key)) % vocab_tokens


def fake_answer(prompt: bytes, max_tokens: int, vocab_tokens: int = 1000) -> list[int]:
    """The whole answer to `prompt`, made without any scheduler."""
    key = prompt
    answer: list[int] = []
    for _ in range(max_tokens):
        answer.append(fake_token(key, vocab_tokens))
        key += answer[-1].to_bytes(TOKEN_BYTES, "little")
    return answer


class FakeExecutor:
    """Runs batches at once, and checks what an executor may rely on.

    `fail` names the chunks of a batch whose result must not be used, as `BatchResult.failed`;
    `advance`, if given, is told the seconds that the batch took (`seconds_per_step` and
    `seconds_per_token`), to move a simulated clock. It repeats decode as often as it is allowed.
    """

    def __init__(
        self,
        *,
        vocab_tokens: int = 1000,
        seconds_per_step: float = 0.0,
        seconds_per_token: float = 0.0,
        advance: Callable[[float], None] | None = None,
        fail: Callable[[Batch], dict[int, str]] | None = None,
    ) -> None:
        self._vocab_tokens = vocab_tokens
        self._seconds_per_step = seconds_per_step
        self._seconds_per_token = seconds_per_token
        self._advance = advance
        self._fail = fail
        self.batches = 0
        self.tokens = 0
        self.tokens_max = 0
        self.chunks_max = 0

    def run(self, batch: Batch) -> BatchResult:
        """One token per sampling chunk; raises `InvariantViolation` for a chunk nobody may run."""
        tokens = batch.tokens
        self.batches += 1
        self.tokens += tokens * batch.repeat
        self.tokens_max = max(self.tokens_max, tokens)
        self.chunks_max = max(self.chunks_max, len(batch.chunks))
        results: list[TokenResult | None] = []
        earlier: list[list[int]] = []
        for chunk in batch.chunks:
            self._check(chunk, batch.repeat)
            key = chunk.key[: (chunk.start + chunk.tokens) * TOKEN_BYTES]
            answer = fake_answer(key, batch.repeat, self._vocab_tokens)
            results.append(TokenResult(answer.pop()) if chunk.sample else None)
            earlier.append(answer)
        seconds = (self._seconds_per_step + tokens * self._seconds_per_token) * batch.repeat
        if self._advance is not None:
            self._advance(seconds)
        failed = self._fail(batch) if self._fail is not None else {}
        return BatchResult(results, failed, 0.0, seconds, batch.repeat, earlier)

    def _check(self, chunk: Chunk, repeat: int) -> None:
        lease = chunk.lease
        end = chunk.start + chunk.tokens + repeat - 1
        if lease.ended or lease.voided or end > lease.capacity_tokens or chunk.tokens < 1:
            raise InvariantViolation(
                f"chunk [{chunk.start}, {end}) of request {chunk.request_id} cannot run: "
                f"lease ended={lease.ended} voided={lease.voided}, "
                f"{lease.capacity_tokens} positions have a slot"
            )
