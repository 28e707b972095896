"""A whole serving system in simulated time: real cache, scheduler and ledger; seeded copies.

Owns a clock that moves only in here, and a shell that carries out the cache's orders with delays,
reordering, failures, late writes and a storage that forgets, all drawn from one seed. Everything
else is the code that serves. The same seed and the same requests give the same facts.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from kvtiers.core.audit import check_structure
from kvtiers.core.cache import UnifiedRadixCache
from kvtiers.core.interface import PrefixCache
from kvtiers.errors import InvariantViolation
from kvtiers.events import Cancel, Copy, FactTuple, HiCacheAck, Lookup, moved
from kvtiers.metrics.ledger import Ledger
from kvtiers.runtime.decision_log import RecordedCache
from kvtiers.scheduling.config import SchedulerConfig
from kvtiers.scheduling.executor import Batch, SamplingParams
from kvtiers.scheduling.prefill_stats import PrefillStats
from kvtiers.scheduling.request import Request
from kvtiers.scheduling.roster import StepOutput
from kvtiers.scheduling.scheduler import Scheduler
from kvtiers.testing.fake_executor import FakeExecutor, fake_answer
from kvtiers.types import (
    TOKEN_BYTES,
    CacheConfig,
    FailReason,
    Namespace,
    Purpose,
    RequestOutcome,
    SlotState,
    token_key,
)

WORLD_NAMESPACE = Namespace("world")

_FAILURES = {
    Purpose.BACKUP: (FailReason.TRANSFER,),
    Purpose.LOAD_BACK: (FailReason.TRANSFER,),
    Purpose.PREFETCH: (FailReason.STORAGE, FailReason.INTEGRITY, FailReason.MISSING),
    Purpose.STORE: (FailReason.STORAGE, FailReason.QUOTA),
}


@dataclass(frozen=True, slots=True)
class Faults:
    """How likely what goes wrong, per copy or per chunk, and how long copies take (seconds)."""

    copy_fails: float = 0.0
    copy_is_late: float = 0.0
    chunk_fails: float = 0.0
    copy_seconds_max: float = 0.0
    """0: every copy ends at the next pump."""


@dataclass(order=True, slots=True)
class _Event:
    at: float
    number: int
    happen: Callable[[float], None] = field(compare=False)


class SeededShell:
    """Carries out orders in simulated time and remembers what storage holds."""

    def __init__(
        self,
        cache: PrefixCache,
        sink: Callable[[list[FactTuple]], None],
        faults: Faults,
        rng: random.Random,
    ) -> None:
        self._cache = cache
        self._sink = sink
        self._faults = faults
        self._rng = rng
        self._events: list[_Event] = []
        self._numbers = 0
        self._cancelled: set[int] = set()
        self._stored: set[tuple[bytes, bytes]] = set()
        self.late_copies = 0
        self.failed_copies = 0

    def pump(self, now: float) -> bool:
        """Carry out new orders and deliver what is due; True when anything was acknowledged."""
        self._take(now)
        happened = False
        while self._events and self._events[0].at <= now:
            heapq.heappop(self._events).happen(now)
            self._take(now)
            happened = True
        return happened

    @property
    def next_event(self) -> float | None:
        """When something is due next."""
        return self._events[0].at if self._events else None

    def _take(self, now: float) -> None:
        for order in self._cache.take_orders():
            if isinstance(order, Copy):
                self._copy(order, now)
            elif isinstance(order, Lookup):
                self._look_up(order, now)
            else:
                self._cancel(order)
        facts = self._cache.take_facts()
        if facts:
            self._sink(facts)

    def _at(self, when: float, happen: Callable[[float], None]) -> None:
        self._numbers += 1
        heapq.heappush(self._events, _Event(when, self._numbers, happen))

    def _delay(self) -> float:
        return self._rng.random() * self._faults.copy_seconds_max

    def _look_up(self, order: Lookup, now: float) -> None:
        page_bytes = self._cache.config.page_tokens * TOKEN_BYTES

        def answer(later: float) -> None:
            found = 0
            while found < order.pages and self._holds(
                order.namespace, order.path_key[: (order.first_page + found + 1) * page_bytes]
            ):
                found += 1
            self._cache.found(order.ticket_id, found, later)

        self._at(now + self._delay(), answer)

    def _holds(self, namespace: Namespace | None, path: bytes) -> bool:
        assert namespace is not None
        return (namespace.digest, path) in self._stored

    def _cancel(self, order: Cancel) -> None:
        self._cancelled.add(order.op_id)

    def _copy(self, copy: Copy, now: float) -> None:
        rng, faults = self._rng, self._faults
        due = now + self._delay()
        pages_ok, failure = copy.pages, None
        if rng.random() < faults.copy_fails:
            pages_ok, failure = rng.randrange(copy.pages), rng.choice(_FAILURES[copy.purpose])
            self.failed_copies += 1
        if rng.random() < faults.copy_is_late:
            self.late_copies += 1
            self._at(due, lambda at: self._ack(copy, 0, FailReason.DEADLINE, at, ended=False))
            self._at(due + self._delay(), lambda at: self._ack(copy, 0, None, at, ended=True))
        else:
            self._at(due, lambda at: self._end(copy, pages_ok, failure, at))

    def _end(self, copy: Copy, pages_ok: int, failure: FailReason | None, now: float) -> None:
        if copy.op_id in self._cancelled:
            pages_ok, failure = 0, FailReason.CANCELLED
        page_bytes = self._cache.config.page_tokens * TOKEN_BYTES
        paths = [
            copy.path_key[: (copy.first_page + page + 1) * page_bytes] for page in range(pages_ok)
        ]
        if copy.purpose is Purpose.STORE:
            assert copy.namespace is not None
            self._stored.update((copy.namespace.digest, path) for path in paths)
        elif copy.purpose is Purpose.PREFETCH and not all(
            self._holds(copy.namespace, path) for path in paths
        ):
            raise InvariantViolation(f"prefetch {copy.op_id} reads a page that storage never held")
        self._ack(copy, pages_ok, failure, now, ended=True)

    def _ack(
        self, copy: Copy, pages_ok: int, failure: FailReason | None, now: float, *, ended: bool
    ) -> None:
        config = self._cache.config
        tokens, num_bytes = moved(pages_ok, config.page_tokens, config.pools)
        self._cache.ack(
            HiCacheAck(
                copy.op_id,
                pages_ok,
                failure,
                ended,
                acked=now,
                num_tokens_by_pool=tokens,
                num_bytes=num_bytes,
            ),
            now,
        )


class SchedulerWorld:
    """One seeded world. `facts` is everything in the order it was folded.

    `record` is given the lines of a decision log; call `recorded.end()` when all is done.
    """

    def __init__(
        self,
        cache_config: CacheConfig,
        config: SchedulerConfig,
        *,
        seed: int = 0,
        faults: Faults = Faults(),
        seconds_per_step: float = 0.01,
        seconds_per_token: float = 0.0001,
        keep_facts: bool = False,
        record: Callable[[str], None] | None = None,
    ) -> None:
        self.now = 0.0
        self.rng = random.Random(seed)
        self.facts: list[FactTuple] = []
        self._keep_facts = keep_facts
        self._faults = faults
        self.cache = UnifiedRadixCache(cache_config)
        shared = cast(PrefixCache, self.cache)  # it knows its own leases only
        self.recorded = None if record is None else RecordedCache(shared, record)
        shared = self.recorded or shared
        self.ledger = Ledger(
            cache_config.page_tokens,
            cache_config.pools,
            cache_config.device_pages,
            cache_config.host_pages,
        )
        self.shell = SeededShell(shared, self._fold, faults, self.rng)
        self.executor = FakeExecutor(
            seconds_per_step=seconds_per_step,
            seconds_per_token=seconds_per_token,
            advance=self._advance,
            fail=self._fail,
        )
        self.reports: list[PrefillStats] = []
        self.requests: list[Request] = []
        self.scheduler = Scheduler(
            shared,
            self.executor,
            config=config,
            sink=self._fold,
            pump=lambda: self.shell.pump(self.now),
            clock=lambda: self.now,
            report=self.reports.append,
        )

    def ask(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int = 1,
        namespace: Namespace = WORLD_NAMESPACE,
        priority: int = 0,
        deadline_seconds: float | None = None,
        group: int | None = None,
    ) -> Request:
        """A new request, added now."""
        request = Request(
            len(self.requests),
            token_key(tokens),
            SamplingParams(max_tokens=max_tokens),
            namespace,
            self.now,
            priority=priority,
            deadline_seconds=deadline_seconds,
            group=group,
        )
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def step(self) -> list[StepOutput]:
        """One step; where nothing could run, time goes on to the next event."""
        batches = self.executor.batches
        outputs = self.scheduler.step()
        if self.executor.batches == batches:
            times = [
                time
                for time in (self.shell.next_event, self.scheduler.idle_until())
                if time is not None
            ]
            self.now = max(self.now, min(times, default=self.now))
        return outputs

    def run(self, steps_max: int = 1_000_000) -> None:
        """Step until every request has ended and every copy with it."""
        for _ in range(steps_max):
            if self.scheduler.has_work:
                self.step()
                continue
            self.shell.pump(self.now)
            if self.shell.next_event is None:
                self.check_at_rest()
                return
            self.now = max(self.now, self.shell.next_event)
        raise InvariantViolation(
            f"after {steps_max} steps {self.scheduler.running} requests run and "
            f"{self.scheduler.waiting} wait"
        )

    def check_at_rest(self) -> None:
        """Nobody is served: all is answered, the books balance, and nothing is held.

        Raises `InvariantViolation` otherwise.
        """
        self.ledger.check()
        check_structure(self.cache.state)
        counts = self.cache.recount()
        wrong = self.ledger.audit(counts)
        if wrong:
            raise InvariantViolation(f"booked minus counted slots: {wrong}")
        held = {
            f"{tier}/{state}": pages
            for (tier, state), pages in counts.items()
            if state not in (SlotState.FREE, SlotState.RESIDENT) and pages
        }
        if held:
            raise InvariantViolation(f"at rest these slots are still held: {held}")
        for request in self.requests:
            self._check_answer(request)
        self._check_sums()

    def _check_answer(self, request: Request) -> None:
        answer = fake_answer(request.prompt, len(request.output))
        split = request.split
        if (
            not request.ended
            or request.output != answer
            or (
                request.outcome is RequestOutcome.LENGTH and len(answer) < request.params.max_tokens
            )
            or (split is not None and split.prompt != request.prompt_tokens)
            or (split is None and request.output)
        ):
            raise InvariantViolation(f"{request} was not answered as its prompt demands")

    def _check_sums(self) -> None:
        """What requests and prefill reports say, summed, is what the ledger booked."""
        splits = [request.split for request in self.requests if request.split is not None]
        first, fork, replay = self.ledger.first, self.ledger.fork, self.ledger.replay
        reports = self.reports
        sums = {
            "device hits": (
                sum(split.device_hit for split in splits),
                first.device_hit_tokens + fork.device_hit_tokens,
            ),
            "host hits": (
                sum(split.host_hit for split in splits),
                first.host_hit_tokens + fork.host_hit_tokens,
            ),
            "storage hits": (
                sum(split.storage_hit for split in splits),
                first.storage_hit_tokens + fork.storage_hit_tokens,
            ),
            "reported device hits": (
                sum(report.device_hit_tokens for report in reports),
                first.device_hit_tokens,
            ),
            "reported host hits": (
                sum(report.host_hit_tokens for report in reports),
                first.host_hit_tokens,
            ),
            "reported storage hits": (
                sum(report.storage_hit_tokens for report in reports),
                first.storage_hit_tokens,
            ),
            "reported input": (
                sum(report.input_tokens for report in reports),
                first.input_tokens,
            ),
            "reported replay": (
                sum(report.replay_tokens for report in reports),
                fork.input_tokens + replay.input_tokens,
            ),
            "output": (
                sum(len(request.output) for request in self.requests),
                self.ledger.requests.output_tokens,
            ),
        }
        differ = {name: pair for name, pair in sums.items() if pair[0] != pair[1]}
        if differ:
            raise InvariantViolation(f"sums differ (requests or reports, ledger): {differ}")

    def ended_by(self, outcome: RequestOutcome) -> list[Request]:
        return [request for request in self.requests if request.outcome is outcome]

    def _fold(self, facts: list[FactTuple]) -> None:
        if self._keep_facts:
            self.facts += facts
        self.ledger.fold(facts)

    def _advance(self, seconds: float) -> None:
        self.now += seconds

    def _fail(self, batch: Batch) -> dict[int, str]:
        likely = self._faults.chunk_fails
        if not likely:
            return {}
        return {
            index: "injected" for index in range(len(batch.chunks)) if self.rng.random() < likely
        }
