"""Requests: what clients feel, and what became of them."""

from __future__ import annotations

from kvtiers.metrics.gauges import RecordOutcome
from kvtiers.metrics.histogram import REQUEST_SECONDS, TOKEN_SECONDS
from kvtiers.metrics.series import Group, Kind, Series, closed
from kvtiers.types import RequestOutcome, Tier

SERIES: tuple[Series, ...] = (
    Series(
        "time_to_first_token_seconds",
        Kind.HISTOGRAM,
        Group.REQUESTS,
        "seconds",
        "From a request's arrival until its first token.",
        buckets=REQUEST_SECONDS,
    ),
    Series(
        "inter_token_latency_seconds",
        Kind.HISTOGRAM,
        Group.REQUESTS,
        "seconds",
        "From a sequence's previous token to its next, one sample per token after the first.",
        buckets=TOKEN_SECONDS,
    ),
    Series(
        "e2e_request_latency_seconds",
        Kind.HISTOGRAM,
        Group.REQUESTS,
        "seconds",
        "From a request's arrival until it left.",
        buckets=REQUEST_SECONDS,
    ),
    Series(
        "prompt_tokens_total",
        Kind.COUNTER,
        Group.REQUESTS,
        "tokens",
        "Prompts of requests, when they leave.",
        identities=("request_prompts",),
    ),
    Series(
        "generation_tokens_total",
        Kind.COUNTER,
        Group.REQUESTS,
        "tokens",
        "Output of requests, when they leave.",
    ),
    Series(
        "cached_tokens_total",
        Kind.COUNTER,
        Group.REQUESTS,
        "tokens",
        "Prompt tokens of requests that were not computed, by the tier that held them, when the "
        "request leaves; the same numbers as its usage reports. Of n answers to one prompt each "
        "counts as a request of its own here, in prompt_tokens_total and in requests_total, as the "
        "field counts them; prefill_effective_tokens_total counts the prompt once.",
        (closed("cache_source", Tier),),
        identities=("request_prompts",),
    ),
    Series(
        "requests_total",
        Kind.COUNTER,
        Group.REQUESTS,
        "requests",
        "Requests that left, by how.",
        (closed("outcome", RequestOutcome),),
    ),
    Series(
        "requests_too_large_total",
        Kind.COUNTER,
        Group.REQUESTS,
        "requests",
        "Admissions refused at once because the request can never fit into the device tier.",
    ),
    Series(
        "recorded_requests_total",
        Kind.COUNTER,
        Group.REQUESTS,
        "requests",
        "Requests for the trace of `serve --record`, by what became of them; all 0 where nothing "
        "is recorded. `left_out` had no answer; `lost` came although the file could no longer be "
        "written, or were under way then.",
        (closed("outcome", RecordOutcome),),
    ),
    Series(
        "num_retracted_requests_total",
        Kind.COUNTER,
        Group.REQUESTS,
        "requests",
        "Decoding requests that gave their slots back and went to the queue again.",
    ),
    Series(
        "num_retracted_tokens_total",
        Kind.COUNTER,
        Group.REQUESTS,
        "tokens",
        "Tokens whose KV those requests held when they were retracted.",
    ),
)
