"""The shapes that clients send, as strict models: what is not here is refused by name.

A parameter of the OpenAI API, or one that clients of other servers send, which this server cannot
honour is accepted at its neutral value only (`frequency_penalty: 0`, or null), so that clients that
always send it work, and nobody believes that a setting was applied that was not. What cannot change
an answer (`user`, `metadata`) is accepted and not used. docs/api.md lists both. Semantic limits
(context length, known model) are checked later.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    ValidationError,
    ValidatorFunctionWrapHandler,
)
from pydantic.functional_validators import BeforeValidator, WrapValidator
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import ValidationInfo

CHOICES_MAX = 16
TOP_LOGPROBS_MAX = 20
STOP_MAX = 16
PROMPTS_MAX = 64
NOT_USED = "Accepted and not used"


class Strict(BaseModel):
    """A JSON object with exactly the declared members."""

    model_config = ConfigDict(extra="forbid")


def _only_neutral(value: Any, check: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
    try:
        return check(value)
    except ValidationError:
        raise PydanticCustomError(
            "unsupported_parameter",
            "'{name}' is not supported by this server; leave it out",
            {"name": info.field_name},
        ) from None


_NEUTRAL = WrapValidator(_only_neutral)
ZeroOnly: TypeAlias = Annotated[Annotated[float, Field(ge=0, le=0)] | None, _NEUTRAL]
OneOnly: TypeAlias = Annotated[Annotated[float, Field(ge=1, le=1)] | None, _NEUTRAL]
TrueOnly: TypeAlias = Annotated[Literal[True] | None, _NEUTRAL]
FalseOnly: TypeAlias = Annotated[Literal[False] | None, _NEUTRAL]
NullOnly: TypeAlias = Annotated[None, _NEUTRAL]
EmptyObjectOnly: TypeAlias = Annotated[
    Annotated[dict[str, float], Field(max_length=0)] | None, _NEUTRAL
]
EmptyListOnly: TypeAlias = Annotated[Annotated[list[Any], Field(max_length=0)] | None, _NEUTRAL]
EmptyTextOnly: TypeAlias = Annotated[Literal[""] | None, _NEUTRAL]
NoneWordOnly: TypeAlias = Annotated[Literal["none"] | None, _NEUTRAL]
NoToolChoice: TypeAlias = Annotated[Literal["none", "auto"] | None, _NEUTRAL]
UsualTierOnly: TypeAlias = Annotated[Literal["auto", "default"] | None, _NEUTRAL]

TokenId: TypeAlias = Annotated[int, Field(strict=True, ge=0, lt=1 << 31)]
# The first wrong id is told, not each of a million.
TokenIds: TypeAlias = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
PromptText: TypeAlias = Annotated[str, Field(min_length=1)]
StopText: TypeAlias = Annotated[str, Field(max_length=256)]


class StreamOptions(Strict):
    """What else a stream carries."""

    include_usage: StrictBool | None = Field(None, description="Send the usage in a last chunk")
    continuous_usage_stats: FalseOnly = None
    include_obfuscation: FalseOnly = None


class Generation(Strict):
    """What completions and chat have in common."""

    model: str = Field(description="A name from /v1/models")
    temperature: StrictFloat | None = Field(None, ge=0, le=2, description="0 is greedy; default 1")
    top_p: StrictFloat | None = Field(None, gt=0, le=1)
    top_k: StrictInt | None = Field(None, ge=-1, le=1 << 20, description="0 or -1: no limit")
    seed: StrictInt | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    n: StrictInt | None = Field(
        None, ge=1, le=CHOICES_MAX, description="Choices per prompt; default 1"
    )
    stop: StopText | Annotated[list[StopText], Field(max_length=STOP_MAX)] | None = Field(
        None, description="Empty texts end nothing"
    )
    stop_token_ids: list[TokenId] | None = Field(None, max_length=STOP_MAX)
    ignore_eos: StrictBool | None = Field(None, description="Go on past the end-of-text token")
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(
        None,
        max_length=256,
        description="Requests share cached prefixes only with requests of the same salt",
    )
    priority: StrictInt | None = Field(
        None,
        ge=-1000,
        le=1000,
        description="Higher is admitted first; other than 0 with --schedule-policy priority only",
    )
    return_cached_tokens_details: StrictBool | None = Field(
        None, description="Add `sglext.cached_tokens_details` to the response"
    )
    user: str | None = Field(None, description=NOT_USED)
    safety_identifier: str | None = Field(None, description=NOT_USED)
    prompt_cache_key: str | None = Field(None, description=NOT_USED)
    metadata: dict[str, Any] | None = Field(None, description=NOT_USED)
    service_tier: UsualTierOnly = None
    frequency_penalty: ZeroOnly = None
    presence_penalty: ZeroOnly = None
    repetition_penalty: OneOnly = None
    min_p: ZeroOnly = None
    skip_special_tokens: TrueOnly = None
    logit_bias: EmptyObjectOnly = None


class CompletionRequest(Generation):
    """POST /v1/completions."""

    prompt: (
        PromptText
        | TokenIds
        | Annotated[list[PromptText], Field(fail_fast=True, min_length=1, max_length=PROMPTS_MAX)]
        | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=PROMPTS_MAX)]
    ) = Field(description="Text, token ids, or a list of either")
    max_tokens: StrictInt | None = Field(
        None, ge=1, description="Default 16, or less where there is no room for as many"
    )
    logprobs: StrictInt | None = Field(None, ge=0, le=TOP_LOGPROBS_MAX)
    echo: FalseOnly = None
    suffix: EmptyTextOnly = None
    best_of: Annotated[Literal[1] | None, _NEUTRAL] = None


def _text_part_only(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "text":
        raise PydanticCustomError(
            "unsupported_content",
            "content of type '{kind}' is not supported: this server takes text only, since other "
            "input has no identity in the cache; send parts of type 'text'",
            {"kind": kind[:40]},
        )
    return value


class TextPart(Strict):
    """A piece of text in a message."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: (
        str
        | Annotated[
            list[Annotated[TextPart, BeforeValidator(_text_part_only)]], Field(min_length=1)
        ]
    )
    name: str | None = Field(None, description=NOT_USED)
    # What clients write when they send an answer back as they got it.
    refusal: NullOnly = None
    annotations: EmptyListOnly = None
    audio: NullOnly = None
    tool_calls: EmptyListOnly = None
    tool_call_id: NullOnly = None
    function_call: NullOnly = None
    reasoning_content: NullOnly = None

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class TextFormat(Strict):
    """The only response format: plain text."""

    type: Literal["text"]


class ChatRequest(Generation):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: StrictInt | None = Field(
        None, ge=1, description="Default: what the context, the device tier and the limit leave"
    )
    max_completion_tokens: StrictInt | None = Field(
        None, ge=1, description="The newer name of max_tokens, which it overrides"
    )
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = Field(None, ge=0, le=TOP_LOGPROBS_MAX)
    response_format: Annotated[TextFormat | None, _NEUTRAL] = None
    tools: EmptyListOnly = None
    tool_choice: NoToolChoice = None
    functions: EmptyListOnly = None
    function_call: NoneWordOnly = None
    parallel_tool_calls: StrictBool | None = Field(None, description=NOT_USED)
    modalities: Annotated[
        Annotated[list[Literal["text"]], Field(max_length=1)] | None, _NEUTRAL
    ] = None
    audio: NullOnly = None
    prediction: NullOnly = None
    reasoning_effort: NullOnly = None
    verbosity: NullOnly = None
    web_search_options: NullOnly = None
    store: FalseOnly = None


class PinRequest(Strict):
    """POST /cache/pins: keep a prefix until it is unpinned or its time is over."""

    prompt: PromptText | TokenIds | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    cache_salt: str | None = Field(None, max_length=256)
    ttl_seconds: StrictFloat = Field(600, gt=0, le=86_400)


class FlushRequest(Strict):
    """POST /cache/flush: remove what no request uses from one tier."""

    tier: Literal["device", "host", "storage"]
