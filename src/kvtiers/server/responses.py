"""The shapes that clients get, and how a hit split becomes `usage`.

`prompt = device + host + storage + computed` holds in every usage object: `cached_tokens` is the
sum of the three tiers, `missed_tokens` explains the rest by reason.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from kvtiers.types import HitSplit, MissReason

FinishReason = Literal["stop", "length"]


class Wire(BaseModel):
    """A JSON object with exactly the declared members."""

    model_config = ConfigDict(extra="forbid")


class CachedTokensDetails(Wire):
    """Cached prompt tokens by the tier that held them when the request was admitted."""

    device: int
    host: int
    storage: int


class PromptTokensDetails(Wire):
    """Where the prompt came from."""

    cached_tokens: int
    cached_tokens_details: CachedTokensDetails
    missed_tokens: dict[str, int] = Field(
        description="Computed prompt tokens by reason; they sum to prompt - cached tokens"
    )


class Usage(Wire):
    """Tokens of one request, over all its prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class SglExt(Wire):
    """SGLang's place for the same details."""

    cached_tokens_details: CachedTokensDetails


def usage_of(splits: Iterable[HitSplit], completion_tokens: int) -> Usage:
    """The usage of a request whose prompts were admitted with these splits."""
    device = host = storage = prompt = 0
    missed = {reason.value: 0 for reason in MissReason}
    for split in splits:
        device += split.device_hit
        host += split.host_hit
        storage += split.storage_hit
        prompt += split.prompt
        for reason, tokens in split.missed:
            missed[reason.value] += tokens
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion_tokens,
        total_tokens=prompt + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=device + host + storage,
            cached_tokens_details=CachedTokensDetails(device=device, host=host, storage=storage),
            missed_tokens={reason: tokens for reason, tokens in missed.items() if tokens},
        ),
    )


# --------------------------------------------------------------------------- completions


class CompletionLogprobs(Wire):
    """Log probabilities of a completion, one entry per generated token in every list."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Wire):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class Completion(Wire):
    """The answer of /v1/completions, whole or (without usage, until the last) one chunk of it."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    sglext: SglExt | None = None


# --------------------------------------------------------------------------- chat


class TopLogprob(Wire):
    token: str = Field(description="Its text; `bytes:\\xf0\\x9f` where it is a part of a character")
    logprob: float
    bytes: list[int] | None = Field(
        description="Those of all tokens, joined, are the text; null: it is no text"
    )


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Wire):
    content: list[ChatLogprob]


class ChatMessage(Wire):
    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(Wire):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(Wire):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    sglext: SglExt | None = None


class ChatDelta(Wire):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(Wire):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletionChunk(Wire):
    """One `data:` line of a streamed chat answer."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    sglext: SglExt | None = None


# --------------------------------------------------------------------------- models, admin


class ModelCard(Wire):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int = Field(description="Longest prompt plus answer, in tokens")


class ModelList(Wire):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(Wire):
    status: Literal["ok", "draining"]


class TierState(Wire):
    """One tier now, in pages by state; device and host states sum to the capacity."""

    capacity_pages: int
    pages: dict[str, int]
    used_tokens: int
    used_bytes: int


class StorageState(Wire):
    """The storage tier as the store itself counts it; all 0 without one."""

    attached: bool
    backend: str | None
    pages: int
    used_bytes: int
    quota_bytes: int
    evicted_pages: int
    integrity_failures: int


class CopyState(Wire):
    """All copies of one purpose so far. `busy_seconds` is copy time where it could be measured."""

    ok_tokens: int
    ok_bytes: int
    failed_tokens: int
    in_flight_tokens: int
    busy_seconds: float


class RecordingState(Wire):
    """The trace that `serve --record` writes."""

    requests: dict[str, int] = Field(description="`recorded_requests_total`, by outcome")
    problem: str | None = Field(description="Why recording has ended before the server did")


class CacheState(Wire):
    """GET /cache/state. Counters are sums since the start; gauges are of this moment."""

    model: str
    namespace: str = Field(description="Alias of the namespace of requests without a salt")
    page_tokens: int
    kv_bytes_per_token: int
    context_tokens: int
    policies: dict[str, str]
    limits: dict[str, int] = Field(description="By the names of the options of `kvtiers serve`")
    device: TierState
    host: TierState
    storage: StorageState
    running_requests: int
    waiting_requests: int
    pinned_tokens: int
    pin_budget_tokens: int
    prefill_tokens: dict[str, int] = Field(
        description="`prefill_effective_tokens_total`: input, device_hit, host_hit, storage_hit"
    )
    missed_tokens: dict[str, int] = Field(description="Computed prompt tokens by reason")
    dropped_tokens: dict[str, int] = Field(description="Device tokens lost, by reason")
    copies: dict[str, CopyState]
    what_if: dict[str, dict[str, float]] = Field(
        description="`what_if_hit_ratio`: by tier and imagined size (x0.5, x1, x2, x4)"
    )
    recording: RecordingState | None = Field(description="null where nothing is recorded")
    uptime_seconds: float
    draining: bool
    balanced: bool


class Identity(Wire):
    """One identity of the books: it holds when both sides are equal."""

    name: str
    formula: str
    left: int
    right: int
    because: str = Field(description="What has happened when it does not hold")


class LedgerReport(Wire):
    """GET /cache/ledger."""

    balanced: bool
    identities: list[Identity]


class Flushed(Wire):
    tier: str
    removed_pages: int


class Pin(Wire):
    pin_id: int
    tokens: int
    expires_in_seconds: float


class PinList(Wire):
    pins: list[Pin]
    pinned_tokens: int
    budget_tokens: int


class StorageAttached(Wire):
    attached: bool
