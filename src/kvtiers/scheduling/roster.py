"""Every live request and the one place where it stands.

Owns the queues, the moves between them and the facts that only the scheduler knows. It must not
know budgets or batches: `admission`, `growth` and `settlement` decide, the roster carries out.

Invariants: a live request is in exactly one of `waiting`, `prefilling`, `decoding` or (as a
follower) in `groups`; `prefilling` and `decoding` hold a lease, the others do not; a request that
ends says so once, by one REQUEST_ENDED fact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from kvtiers.core.interface import LeaseView, PrefixCache
from kvtiers.events import Fact, FactTuple
from kvtiers.scheduling.config import SchedulerConfig
from kvtiers.scheduling.executor import TokenResult
from kvtiers.scheduling.forks import ForkGroups
from kvtiers.scheduling.policies import make_policy
from kvtiers.scheduling.request import Request, RequestState
from kvtiers.scheduling.sharing import PrefixesInCompute
from kvtiers.scheduling.waiting_queue import WaitingQueue
from kvtiers.types import Attempt, RequestOutcome


class StepOutput(NamedTuple):
    """What one step did for one request: a token, its end, or both.

    `earlier` are tokens that the same step made before `token` (`Batch.repeat`); never an end.
    """

    request: Request
    token: TokenResult | None = None
    outcome: RequestOutcome | None = None
    message: str = ""
    earlier: Sequence[int] = ()


_KEEPS_PAGES = frozenset({RequestOutcome.STOP, RequestOutcome.LENGTH, RequestOutcome.DEADLINE})

_STORAGE_ASKS_MAX = 3
"""How often a waiting request asks storage: where pages leave as fast as they come, it must end."""


class Roster:
    """Where every live request stands."""

    def __init__(self, cache: PrefixCache, config: SchedulerConfig) -> None:
        self._cache = cache
        self._page_tokens = cache.config.page_tokens
        self._prefetches_max = config.prefetches_max
        self._prefetches = 0
        self._to_prefetch: deque[Request] = deque()
        self.policy = make_policy(config)
        self.waiting = WaitingQueue(self.policy, self.matched_tokens)
        self.groups = ForkGroups()
        self.live: dict[int, Request] = {}
        self.prefilling: dict[int, Request] = {}
        self.decoding: dict[int, Request] = {}
        self.in_compute = PrefixesInCompute(self._page_tokens)
        self.facts: list[FactTuple] = []
        self.outputs: list[StepOutput] = []
        self.releases = 0
        """How often something was given back: a blocked attempt is worth repeating after that."""

    @property
    def prefetches(self) -> int:
        """Waiting requests that hold a prefetch, ready or not."""
        return self._prefetches

    @property
    def running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    def matched_tokens(self, request: Request) -> int:
        """How much of a request's key is on device or host."""
        lengths = self._cache.match(request.key, request.namespace)
        return lengths.usable_pages * self._page_tokens

    # ------------------------------------------------------------------ coming

    def enlist(self, request: Request, now: float) -> None:
        """A new request; it is queued, or waits for the leader of its group."""
        leads = self.groups.join(request)
        self.live[request.request_id] = request
        if leads:
            self._queue_first(request, now)

    def _queue_first(self, request: Request, now: float) -> None:
        self.waiting.add(request)
        self._to_prefetch.append(request)
        self.start_prefetches(now)

    def granted(self, request: Request, lease: LeaseView, now: float) -> None:
        """An admission attempt from the queue was granted; it closed the request's prefetch."""
        if request.ticket_id is not None:
            self._prefetches -= 1
        self.waiting.remove(request)
        self._prefills(request, lease, now)

    def forked(self, request: Request, lease: LeaseView, now: float) -> None:
        """A follower got its lease from its leader's; it computes what is left of the prompt."""
        self._prefills(request, lease, now)

    def _prefills(self, request: Request, lease: LeaseView, now: float) -> None:
        request.granted(lease, now)
        self.prefilling[request.request_id] = request
        self.in_compute.update(request)

    def queue_fork(self, request: Request) -> None:
        """A follower that could not be forked is admitted like any other, as a fork."""
        self.waiting.add(request)

    def decodes(self, request: Request) -> None:
        """The prompt is computed."""
        request.enter(RequestState.DECODING)
        del self.prefilling[request.request_id]
        self.in_compute.discard(request)
        self.decoding[request.request_id] = request

    # ------------------------------------------------------------------ prefetches

    def start_prefetches(self, now: float) -> None:
        """Begin the prefetch of waiting requests, as many as may run at a time."""
        while self._to_prefetch and self._prefetches < self._prefetches_max:
            request = self._to_prefetch.popleft()
            if request not in self.waiting:
                continue  # it was admitted, or has ended, before its turn came
            self._ask_storage(request, now)

    def asks_again(self, request: Request, now: float) -> bool:
        """Whether a waiting request that is about to be admitted waits for storage once more.

        Storage is asked when a request is queued. What it had on device or host then may have left
        while it waited, and computing what storage holds would make the queue longer still.
        """
        holds_one = request.ticket_id is not None  # of which nothing came, if pages are missing now
        if (
            not self._cache.config.storage
            or request.state is RequestState.PREFETCHING
            or not 0 < request.storage_asks < _STORAGE_ASKS_MAX
            or self._prefetches - holds_one >= self._prefetches_max
        ):
            return False
        lost_tokens = request.asked_with_tokens - self.matched_tokens(request)
        if lost_tokens < max(1, self._cache.config.prefetch_threshold_tokens):
            return False
        if holds_one:
            self.give_up_prefetch(request, now)
        self._ask_storage(request, now)
        return request.ticket_id is not None

    def _ask_storage(self, request: Request, now: float) -> None:
        request.storage_asks += 1
        if self._cache.config.storage:
            request.asked_with_tokens = self.matched_tokens(request)
        request.ticket_id = self._cache.prefetch(
            request.request_id, request.key, request.namespace, now
        )
        if request.ticket_id is not None:
            self._prefetches += 1
            request.enter(RequestState.PREFETCHING)

    def give_up_prefetch(self, request: Request, now: float) -> None:
        """End a waiting request's prefetch; it is admitted without what storage holds."""
        assert request.ticket_id is not None
        self._cache.cancel_prefetch(request.ticket_id, now)
        request.ticket_id = None
        self._prefetches -= 1
        self.releases += 1
        if request.state is RequestState.PREFETCHING:
            request.enter(RequestState.WAITING)

    # ------------------------------------------------------------------ going back

    def retract(self, request: Request, now: float) -> None:
        """Out of pages: a decoding request gives its lease back and queues again.

        Its full pages are published (settlement commits at each page boundary), so what is not
        evicted meanwhile is found again.
        """
        del self.decoding[request.request_id]
        # Its newest token has not been through a forward pass: no KV of it is lost.
        self.facts.append((Fact.RETRACTED, request.request_id, request.tokens - 1))
        self._cache.retract(request.released(), now)
        self._requeue(request)

    def void(self, request: Request, now: float) -> None:
        """A load that the attempt relied on failed: nothing of it counts; queue again."""
        del self.prefilling[request.request_id]
        self.in_compute.discard(request)
        request.voided_attempts += 1
        self._cache.abort(request.released(), now)
        self._requeue(request)

    def _requeue(self, request: Request) -> None:
        if request.split is not None:
            request.attempt = Attempt.REPLAY
        request.enter(RequestState.WAITING)
        self.releases += 1
        self.waiting.add(request)

    # ------------------------------------------------------------------ leaving

    def end(
        self,
        request: Request,
        outcome: RequestOutcome,
        now: float,
        *,
        message: str = "",
        token: TokenResult | None = None,
        earlier: Sequence[int] = (),
    ) -> None:
        """A request leaves, whatever its state; its lease or its prefetch is given back."""
        if request.lease is not None:
            self._give_back(request, outcome, now)
        elif request in self.waiting:
            self.waiting.remove(request)
        if request.ticket_id is not None:
            self.give_up_prefetch(request, now)
        request.end(outcome, message, now)
        self.waiting.forget(request)
        del self.live[request.request_id]
        self._tell_end(request, outcome, now)
        self.outputs.append(StepOutput(request, token, outcome, message, earlier))
        heir = self.groups.leave(request)
        if heir is not None:
            self._queue_first(heir, now)

    def refuse(self, request: Request, needs_pages: int, message: str, now: float) -> None:
        """A request that can never fit leaves before it was ever enlisted."""
        request.end(RequestOutcome.REFUSED, message, now)
        capacity_pages = self._cache.config.device_pages
        self.facts.append((Fact.REFUSED, request.request_id, needs_pages, capacity_pages))
        self._tell_end(request, RequestOutcome.REFUSED, now)
        self.outputs.append(StepOutput(request, None, RequestOutcome.REFUSED, message))

    def _give_back(self, request: Request, outcome: RequestOutcome, now: float) -> None:
        decoding = request.state is RequestState.DECODING
        if decoding:
            del self.decoding[request.request_id]
        else:
            del self.prefilling[request.request_id]
            self.in_compute.discard(request)
        lease = request.released()
        if decoding and outcome in _KEEPS_PAGES:
            self._cache.finish(lease, now)
        else:
            self._cache.abort(lease, now)
        self.releases += 1

    def _tell_end(self, request: Request, outcome: RequestOutcome, now: float) -> None:
        self.facts.append(
            (
                Fact.REQUEST_ENDED,
                request.request_id,
                outcome,
                request.prompt_tokens,
                len(request.output),
                request.split,
                now - request.arrival,
            )
        )
