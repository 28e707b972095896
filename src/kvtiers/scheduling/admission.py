"""Which waiting requests join this step's batch.

Owns the walk through the queue and what is remembered about requests that could not go yet. It
must not know how a batch is packed (`prefill_adder`) or how results are booked (`settlement`).

A request that is *blocked* (no slots, or copies that free them are in flight) lets later ones
pass, so that one long prompt does not idle the machine; after `overtakes_max` of them or
`overtake_seconds` the line is held until it has gone, so that it is not starved either. One that
had no room although nothing ran waits for something else (a pin): holding the line would idle the
machine and bring it no nearer, so others pass it for `let_pass_seconds`, until it is tried alone
again. A request that waits for its own prefetch, or for a prefix that another one computes, waits
by choice: it never holds the line.
"""

from __future__ import annotations

from collections.abc import Callable

from kvtiers.core.interface import Blocked, LeaseView, PrefixCache, Refused
from kvtiers.events import Fact, FactTuple
from kvtiers.scheduling.config import SchedulerConfig
from kvtiers.scheduling.prefill_adder import PrefillAdder
from kvtiers.scheduling.request import Request, RequestState
from kvtiers.scheduling.roster import Roster
from kvtiers.scheduling.sharing import tokens_ahead, waiting_is_cheaper
from kvtiers.types import BlockedOn, RequestOutcome, Tier


class _Wait:
    """What is remembered about one request while it is blocked or waits for a leader."""

    __slots__ = (
        "blocked_since",
        "evicting_since",
        "leaders",
        "lets_pass_until",
        "overtaken",
        "releases",
        "tried_at",
    )

    def __init__(self) -> None:
        self.blocked_since: float | None = None
        self.evicting_since: float | None = None
        self.lets_pass_until = 0.0
        self.overtaken = 0
        self.releases = -1
        self.tried_at = 0.0
        self.leaders: set[int] = set()


class Admission:
    """Walks the waiting queue and admits what fits."""

    def __init__(
        self,
        cache: PrefixCache,
        config: SchedulerConfig,
        roster: Roster,
        sink: Callable[[list[FactTuple]], None],
        clock: Callable[[], float],
    ) -> None:
        self._cache = cache
        self._config = config
        self._roster = roster
        self._sink = sink
        self._clock = clock
        self._waits: dict[int, _Wait] = {}

    def forget(self, request: Request) -> None:
        """The request is no longer waiting."""
        self._waits.pop(request.request_id, None)

    def fill(self, adder: PrefillAdder, now: float) -> None:
        """Admit waiting requests in order until the step, the seats or the tries are used up."""
        roster = self._roster
        roster.start_prefetches(now)
        if not adder.can_admit:
            return
        roster.waiting.rematch(self._config.rematch_per_step)
        self._hand_on_facts()  # what other calls evicted is not this step's admissions' doing
        tries_left = self._config.blocked_tries_per_step
        passed: list[_Wait] = []
        # Who waits for storage is no reason not to look at who is behind it.
        for request in roster.waiting.first(self._config.looks_per_step + roster.prefetches):
            if not adder.can_admit or tries_left == 0:
                return
            wait = self._waits.get(request.request_id)
            if wait is not None and wait.blocked_since is not None:
                if not self._worth_trying(wait, now):
                    if self._holds_line(wait, now):
                        return
                    passed.append(wait)
                    continue
            elif not self._prefetch_over(request, now) or self._waits_for_leader(request, adder):
                continue
            if roster.asks_again(request, now):
                continue
            answer = self._attempt(request, adder, now)
            if isinstance(answer, Refused):
                self._refused(request, answer, now)
            elif not isinstance(answer, Blocked):
                for overtaken in passed:
                    overtaken.overtaken += 1
                if any(self._holds_line(overtaken, now) for overtaken in passed):
                    return
            elif answer.on is not BlockedOn.PREFETCH:
                tries_left -= 1
                wait = self._blocked(request, answer.on, now)
                if self._holds_line(wait, now):
                    return
                passed.append(wait)

    def _attempt(
        self, request: Request, adder: PrefillAdder, now: float
    ) -> LeaseView | Blocked | Refused:
        """One attempt, and all that follows from a grant.

        Prefetches of waiting requests hold pages. Where nothing runs and there is no room all the
        same, they are given up, last in line first and its own in the end: otherwise nothing
        would ever end. Where room is being made without ever being enough (victims may have to keep
        clear of what prefetches hold), one is given up at each attempt after a while.
        """
        began = self._clock()
        answer = adder.admit(request, now)
        if isinstance(answer, Blocked) and not self._roster.running:
            wait = self._waits.get(request.request_id)
            since = now if wait is None or wait.blocked_since is None else wait.blocked_since
            stalled = now - since >= self._config.stall_seconds
            others = [other for other in self._roster.waiting if other is not request]
            for holder in (*reversed(others), request):
                if not isinstance(answer, Blocked):
                    break
                if answer.on is not BlockedOn.DEVICE_CAPACITY and not stalled:
                    break
                if holder.ticket_id is not None:
                    self._roster.give_up_prefetch(holder, now)
                    answer = adder.admit(request, now)
                    stalled = False
        evicted = self._hand_on_facts()
        if not isinstance(answer, Blocked | Refused):
            self._time_eviction(request, began if evicted else None)
            self._roster.granted(request, answer, now)
            adder.add_admitted(request)
        return answer

    def _prefetch_over(self, request: Request, now: float) -> bool:
        if request.ticket_id is None or request.state is not RequestState.PREFETCHING:
            return True
        if not self._cache.prefetch_ready(request.ticket_id, now):
            return False
        request.enter(RequestState.WAITING)
        return True

    def _waits_for_leader(self, request: Request, adder: PrefillAdder) -> bool:
        """Whether the request had better wait for a prefix that is being computed."""
        roster = self._roster
        if not roster.in_compute:
            return False
        matched_tokens = roster.matched_tokens(request)
        found = roster.in_compute.leader(request, matched_tokens)
        if found is None:
            return False
        leader, shared_tokens = found
        prefilling = roster.prefilling.values()
        if not waiting_is_cheaper(
            shared_tokens=shared_tokens,
            matched_tokens=matched_tokens,
            ahead_tokens=tokens_ahead(prefilling, leader, shared_tokens),
            backlog_tokens=sum(r.tokens - r.computed_tokens for r in prefilling),
            budget_tokens=adder.prefill_tokens_per_step,
            step_cost_tokens=self._config.share_step_cost_tokens,
        ):
            return False
        leaders = self._waits.setdefault(request.request_id, _Wait()).leaders
        if leader.request_id not in leaders and len(leaders) >= self._config.share_leaders_max:
            return False
        leaders.add(leader.request_id)
        return True

    def _worth_trying(self, wait: _Wait, now: float) -> bool:
        return (
            wait.releases != self._roster.releases
            or now - wait.tried_at >= self._config.retry_seconds
        )

    def _holds_line(self, wait: _Wait, now: float) -> bool:
        assert wait.blocked_since is not None
        if now < wait.lets_pass_until:
            return False
        return (
            wait.overtaken >= self._config.overtakes_max
            or now - wait.blocked_since >= self._config.overtake_seconds
        )

    def _blocked(self, request: Request, on: BlockedOn, now: float) -> _Wait:
        wait = self._waits.setdefault(request.request_id, _Wait())
        if wait.blocked_since is None:
            wait.blocked_since = now
        if wait.evicting_since is None and on is BlockedOn.EVICTION:
            wait.evicting_since = now
        if on is BlockedOn.DEVICE_CAPACITY and not self._roster.running:
            wait.lets_pass_until = now + self._config.let_pass_seconds
        wait.releases = self._roster.releases
        wait.tried_at = now
        return wait

    def _hand_on_facts(self) -> bool:
        """Give the cache's facts to the sink; returns whether pages left the device."""
        facts = self._cache.take_facts()
        if not facts:
            return False
        self._sink(facts)
        return any(fact[0] is Fact.LEFT and fact[1] is Tier.DEVICE for fact in facts)

    def _time_eviction(self, request: Request, evicting_since: float | None) -> None:
        wait = self._waits.pop(request.request_id, None)
        if wait is not None and wait.evicting_since is not None:
            evicting_since = wait.evicting_since
        if evicting_since is not None:
            self._roster.facts.append((Fact.EVICTION_TIMED, self._clock() - evicting_since))

    def _refused(self, request: Request, answer: Refused, now: float) -> None:
        self._waits.pop(request.request_id, None)
        self._roster.end(
            request,
            RequestOutcome.REFUSED,
            now,
            message=f"request {request.request_id} needs {answer.needs_pages} pages of device "
            f"memory and there are {answer.capacity_pages}; shorten the prompt or raise the "
            "device tier",
        )
