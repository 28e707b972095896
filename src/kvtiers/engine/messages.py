"""What crosses the border of the engine: requests going in, events coming out.

Owns the vocabulary that a server, the demo and the tests share with the engine. Knows neither
torch nor threads nor HTTP; a value here is immutable, so it may cross threads freely.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvtiers.scheduling.executor import SamplingParams
from kvtiers.types import HitSplit, RequestOutcome

TokenArray: TypeAlias = npt.NDArray[np.int32]


FinishReason = RequestOutcome
"""How an answer ended; every answer ends with exactly one. `REFUSED` (can never fit) is the
client's error, `FAILED` (the forward pass, or its loads too often) the server's; after `DEADLINE`
what there is is the answer."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and how to continue it.

    `prompt` is int32 of shape (tokens,), at least one. `n` answers share one prefill; answer `i`
    samples with seed `params.seed + i` where a seed is given. `cache_salt` isolates tenants: two
    salts never share a page, in any tier. A larger `priority` goes first (policy `priority`).
    `capture_logits` keeps the logits of every sampled position until `Engine.take_logits` fetches
    them; it needs `EngineConfig.capture_logits_mib`.
    """

    prompt: TokenArray
    params: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    cache_salt: str = ""
    priority: int = 0
    timeout_seconds: float | None = None
    capture_logits: bool = False


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One more token of answer `index`.

    `text` is what became certain with it: often "" while bytes of a character are missing or a stop
    string may be beginning. The texts of an answer's events, `FinishEvent.text` included, join to
    the whole answer; a matched stop string and what follows it are not part of it.
    """

    index: int
    token: int
    text: str
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """Answer `index` has ended; no event for it follows.

    `split` says where the prompt came from; None where nothing was booked (a request that ended
    before its first chunk). `stop` is the stop string or token id that ended it, if one did.
    `message` explains `REFUSED` and `FAILED` in words for the client.
    """

    index: int
    reason: FinishReason
    output_tokens: int
    text: str = ""
    stop: str | int | None = None
    split: HitSplit | None = None
    message: str = ""


Event: TypeAlias = TokenEvent | FinishEvent
