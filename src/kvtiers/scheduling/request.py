"""A request: what was asked, where it stands, and what it has produced.

Owns the state machine of one request and its growing key. It must not know queues, budgets or
metrics; `roster` moves requests between queues and tells the facts.

    WAITING <-> PREFETCHING ---> PREFILLING ---> DECODING
       ^                            |  |            |  |
       +------- voided -------------+  +---> ENDED <+  |
       +------- retracted -----------------------------+

Invariants: a lease is held exactly in PREFILLING and DECODING; `key` is the prompt followed by
`output`; positions below `computed_tokens` have KV, those below `capacity_tokens` a slot; ENDED
is final.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvtiers.core.interface import LeaseView
from kvtiers.errors import InvalidRequest, InvalidTokens, ProtocolError
from kvtiers.scheduling.executor import SamplingParams
from kvtiers.scheduling.growing_key import GrowingKey
from kvtiers.types import TOKEN_BYTES, Attempt, HitSplit, Namespace, RequestOutcome


class RequestState(StrEnum):
    """Where a request stands."""

    WAITING = "waiting"  # in the queue, or a fork waiting for its leader
    PREFETCHING = "prefetching"  # in the queue, and its own prefetch is not over
    PREFILLING = "prefilling"  # admitted; positions of its key are still to be computed
    DECODING = "decoding"  # one position per step
    ENDED = "ended"


_LEGAL: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset(
        {RequestState.PREFETCHING, RequestState.PREFILLING, RequestState.ENDED}
    ),
    RequestState.PREFETCHING: frozenset({RequestState.WAITING, RequestState.ENDED}),
    RequestState.PREFILLING: frozenset(
        {RequestState.DECODING, RequestState.WAITING, RequestState.ENDED}
    ),
    RequestState.DECODING: frozenset({RequestState.WAITING, RequestState.ENDED}),
    RequestState.ENDED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Request:
    """One sequence to be continued.

    `prompt` is int32 bytes of at least one token. A larger `priority` goes first under the policy
    of that name. `deadline_seconds` counts from `arrival`; what was produced by then is the
    answer. Requests with the same `group` have the same prompt and namespace (`n` answers to one
    prompt): the first one added prefills, the others fork from it. Times are monotonic seconds of
    the scheduler's clock; None where the request never got so far.
    """

    request_id: int
    prompt: bytes
    params: SamplingParams
    namespace: Namespace
    arrival: float
    priority: int = 0
    deadline_seconds: float | None = None
    group: int | None = None

    state: RequestState = field(default=RequestState.WAITING, init=False)
    output: list[int] = field(default_factory=list, init=False)
    sequence: GrowingKey = field(init=False, repr=False)
    tokens: int = field(init=False)
    """Prompt and output so far."""
    final_tokens: int = field(init=False)
    """Positions that need KV if `max_tokens` are produced; the last token never needs any."""
    computed_tokens: int = field(default=0, init=False)
    capacity_tokens: int = field(default=0, init=False)
    """Positions that have a slot; kept here because every step asks for it."""
    attempt: Attempt = field(default=Attempt.FIRST, init=False)
    lease: LeaseView | None = field(default=None, init=False)
    ticket_id: int | None = field(default=None, init=False)
    storage_asks: int = field(default=0, init=False)
    asked_with_tokens: int = field(default=0, init=False)
    """What of its key was on device or host when storage was asked last."""
    split: HitSplit | None = field(default=None, init=False)
    """Of the first attempt that was booked."""
    booked: bool = field(default=False, init=False)
    """Whether the current attempt has been booked (its first chunk committed)."""
    voided_attempts: int = field(default=0, init=False)
    outcome: RequestOutcome | None = field(default=None, init=False)
    message: str = field(default="", init=False)

    admitted_at: float | None = field(default=None, init=False)
    first_token_at: float | None = field(default=None, init=False)
    last_token_at: float | None = field(default=None, init=False)
    ended_at: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if not self.prompt or len(self.prompt) % TOKEN_BYTES:
            raise InvalidTokens(
                f"the prompt of request {self.request_id} has {len(self.prompt)} bytes; it needs "
                f"at least one token of {TOKEN_BYTES} bytes, and whole tokens (see token_key)"
            )
        if self.params.max_tokens < 1:
            raise InvalidRequest(
                f"request {self.request_id} asks for {self.params.max_tokens} tokens; the "
                "smallest answer has 1 token"
            )
        self.sequence = GrowingKey(self.prompt, self.output)
        self.tokens = self.prompt_tokens
        self.final_tokens = self.tokens + self.params.max_tokens - 1

    @property
    def key(self) -> bytes:
        """int32 bytes of the prompt and of the output so far."""
        return self.sequence.key

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // TOKEN_BYTES

    @property
    def deadline(self) -> float | None:
        return None if self.deadline_seconds is None else self.arrival + self.deadline_seconds

    @property
    def ended(self) -> bool:
        return self.state is RequestState.ENDED

    def enter(self, state: RequestState) -> None:
        """Move to `state`; raises `ProtocolError` where the state machine has no such step."""
        if state not in _LEGAL[self.state]:
            raise ProtocolError(
                f"request {self.request_id} cannot go from {self.state} to {state}; "
                f"from {self.state} it may go to: {', '.join(sorted(_LEGAL[self.state])) or 'none'}"
            )
        self.state = state

    def granted(self, lease: LeaseView, now: float) -> None:
        """An admission attempt was granted: the request computes from the end of its hits on."""
        if self.state is RequestState.PREFETCHING:
            self.enter(RequestState.WAITING)
        self.enter(RequestState.PREFILLING)
        self.lease = lease
        self.ticket_id = None
        self.computed_tokens = lease.computed_tokens
        self.capacity_tokens = lease.capacity_tokens
        self.booked = False
        if self.admitted_at is None:
            self.admitted_at = now

    def released(self) -> LeaseView:
        """The attempt is over; returns the lease, which the caller ends."""
        lease = self.lease
        if lease is None:
            raise ProtocolError(f"request {self.request_id} ({self.state}) holds no lease")
        self.lease = None
        self.computed_tokens = self.capacity_tokens = 0
        return lease

    def append(self, token: int, now: float) -> None:
        """One more token of the answer."""
        self.output.append(token)
        self.tokens += 1
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now

    def append_all(self, tokens: Sequence[int], now: float) -> None:
        """Further tokens of the answer."""
        self.output.extend(tokens)
        self.tokens += len(tokens)
        self.last_token_at = now

    def end(self, outcome: RequestOutcome, message: str, now: float) -> None:
        self.enter(RequestState.ENDED)
        self.outcome = outcome
        self.message = message
        self.ended_at = now
