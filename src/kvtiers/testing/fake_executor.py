"""An executor without a model: tokens follow from the key alone, so every run gives the same.

Owns nothing but its counters. A request's answer depends only on its own key, never on the batch,
on the tier its prefix came from or on how often it was retracted: two runs that disagree show a
scheduler (or cache) that handed over the wrong key.
"""

from __future__ import annotations

from collections.abc import Callable
from zlib import crc32

from kvtiers.errors import InvariantViolation
from kvtiers.scheduling.executor import Batch, BatchResult, TokenResult
from kvtiers.types import TOKEN_BYTES

_CONTEXT_BYTES = 16 * TOKEN_BYTES


def fake_token(key: bytes, vocab_tokens: int = 1000) -> int:
    """The token that follows `key` (int32 bytes)."""
    return crc32(key[-_CONTEXT_BYTES:], len(key)) % vocab_tokens


class FakeExecutor:
    """Runs batches at once, and checks what an executor may rely on.

    `fail` names the chunks of a batch whose result must not be used, as `BatchResult.failed`;
    `advance`, if given, is told the seconds that the batch took (`seconds_per_step` and
    `seconds_per_token`), to move a simulated clock.
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
        tokens = batch.tokens
        self.batches += 1
        self.tokens += tokens
        self.tokens_max = max(self.tokens_max, tokens)
        self.chunks_max = max(self.chunks_max, len(batch.chunks))
        results: list[TokenResult | None] = []
        for chunk in batch.chunks:
            end = chunk.start + chunk.tokens
            lease = chunk.lease
            if lease.ended or lease.voided or end > lease.capacity_tokens or chunk.tokens < 1:
                raise InvariantViolation(
                    f"chunk [{chunk.start}, {end}) of request {chunk.request_id} cannot run: "
                    f"lease ended={lease.ended} voided={lease.voided}, "
                    f"{lease.capacity_tokens} positions have a slot"
                )
            key = chunk.key[: end * TOKEN_BYTES]
            results.append(
                TokenResult(fake_token(key, self._vocab_tokens)) if chunk.sample else None
            )
        seconds = self._seconds_per_step + tokens * self._seconds_per_token
        if self._advance is not None:
            self._advance(seconds)
        failed = self._fail(batch) if self._fail is not None else {}
        return BatchResult(results, failed, 0.0, seconds)
