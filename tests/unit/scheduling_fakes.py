"""A cache whose answers a test can script, and a scheduler around it.

`ScriptedCache` has one tier of `device_pages` pages: what was committed and is not leased is
evicted on demand, all of it at once. A test can put other answers before that: what `admit` says
next, which copies a lease waits for, whether prefetches are over.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvtiers.core.interface import Blocked, MatchLengths, Refused
from kvtiers.events import Fact
from kvtiers.scheduling.config import SchedulerConfig
from kvtiers.scheduling.executor import SamplingParams
from kvtiers.scheduling.request import Request
from kvtiers.scheduling.scheduler import Scheduler
from kvtiers.testing.fake_executor import FakeExecutor
from kvtiers.types import TOKEN_BYTES, Attempt, CacheConfig, HitSplit, Namespace, token_key

NAMESPACE = Namespace("test-model")


@dataclass(eq=False)
class FakeLease:
    lease_id: int
    request_id: int
    attempt: Attempt
    split: HitSplit
    shared_tokens: int
    computed_tokens: int
    capacity_tokens: int
    private_pages: int
    load_ops: tuple[int, ...] = ()
    voided: bool = False
    ended: bool = False
    ended_by: str = ""
    committed: list[int] = field(default_factory=list)

    def block_table(self) -> np.ndarray:
        return np.zeros(0, np.int32)


class ScriptedCache:
    def __init__(self, device_pages: int = 1000, page_tokens: int = 4) -> None:
        self.config = CacheConfig(device_pages=device_pages, page_tokens=page_tokens)
        self.answers: dict[int, list[Blocked | Refused]] = {}
        self.splits: dict[int, HitSplit] = {}
        self.loads: dict[int, list[tuple[int, ...]]] = {}
        self.prefetching: set[int] = set()
        self.cancelled: list[int] = []
        self.attempts: list[int] = []
        self.leases: list[FakeLease] = []
        self.published: set[tuple[bytes, bytes]] = set()
        self.matches = 0
        self.used_pages = 0
        self.extend_refusals = 0
        self.facts: list[tuple] = []
        self.ticks = 0

    # ---- time and draining
    def tick(self, now: float) -> None:
        self.ticks += 1

    def take_facts(self) -> list[tuple]:
        facts, self.facts = self.facts, []
        return facts

    # ---- looking
    def match(self, key: bytes, namespace: Namespace) -> MatchLengths:
        self.matches += 1
        page_bytes = self.config.page_tokens * TOKEN_BYTES
        limit = (len(key) // TOKEN_BYTES - 1) // self.config.page_tokens
        pages = 0
        while pages < limit and (namespace.digest, key[: (pages + 1) * page_bytes]) in (
            self.published
        ):
            pages += 1
        return MatchLengths(pages, pages, pages)

    # ---- life
    def prefetch(self, request_id, key, namespace, now):
        return request_id if request_id in self.prefetching else None

    def prefetch_ready(self, ticket_id, now):
        return ticket_id not in self.prefetching

    def cancel_prefetch(self, ticket_id, now):
        self.cancelled.append(ticket_id)

    def admit(
        self,
        request_id,
        key,
        namespace,
        now,
        *,
        reserve_tokens=0,
        ticket_id=None,
        attempt=Attempt.FIRST,
    ):
        self.attempts.append(request_id)
        if self.answers.get(request_id):
            return self.answers[request_id].pop(0)
        page = self.config.page_tokens
        tokens = len(key) // TOKEN_BYTES
        hit = self.match(key, namespace).usable_pages * page
        pages = -(-(tokens + reserve_tokens) // page)
        private = pages - hit // page
        if self.used_pages + private > self.config.device_pages:
            from kvtiers.types import BlockedOn

            return Blocked(BlockedOn.DEVICE_CAPACITY)
        self.used_pages += private
        split = self.splits.pop(request_id, HitSplit(hit, 0, 0, tokens - hit))
        lease = FakeLease(
            len(self.leases),
            request_id,
            attempt,
            split,
            hit,
            tokens - split.computed,
            pages * page,
            private,
        )
        loads = self.loads.get(request_id)
        if loads:
            lease.load_ops = loads.pop(0)
        self.leases.append(lease)
        return lease

    def extend(self, lease, tokens, now):
        assert not lease.ended
        if self.extend_refusals:
            self.extend_refusals -= 1
            return False
        pages = -(-tokens // self.config.page_tokens)
        more = pages - lease.capacity_tokens // self.config.page_tokens
        if more <= 0:
            return True
        if self.used_pages + more > self.config.device_pages:
            return False
        self.used_pages += more
        lease.private_pages += more
        lease.capacity_tokens = pages * self.config.page_tokens
        return True

    def commit(self, lease, key, computed_tokens, now):
        assert not lease.ended
        assert not lease.voided
        assert not lease.load_ops
        assert len(key) // TOKEN_BYTES >= computed_tokens > lease.computed_tokens
        assert computed_tokens <= lease.capacity_tokens
        lease.computed_tokens = computed_tokens
        lease.committed.append(computed_tokens)
        page_bytes = self.config.page_tokens * TOKEN_BYTES
        for page in range(computed_tokens // self.config.page_tokens):
            self.published.add((NAMESPACE.digest, key[: (page + 1) * page_bytes]))

    def fork(self, lease, request_id, now):
        page = self.config.page_tokens
        tokens = lease.split.prompt
        hit = (tokens - 1) // page * page
        self.used_pages += 1
        child = FakeLease(
            len(self.leases),
            request_id,
            Attempt.FORK,
            HitSplit(hit, 0, 0, tokens - hit),
            hit,
            hit,
            hit + page,
            1,
        )
        self.leases.append(child)
        return child

    def _end(self, lease, how):
        assert not lease.ended
        lease.ended = True
        lease.ended_by = how
        self.used_pages -= lease.private_pages

    def finish(self, lease, now):
        self._end(lease, "finished")

    def retract(self, lease, now):
        self._end(lease, "retracted")

    def abort(self, lease, now):
        self._end(lease, "voided" if lease.voided else "aborted")


class Bench:
    """A scheduler over a `ScriptedCache`, with a clock that moves only when told (or per step)."""

    def __init__(
        self, cache: ScriptedCache | None = None, *, step_seconds=0.0, fail=None, **config
    ):
        self.now = 0.0
        self.cache = cache or ScriptedCache()
        self.facts: list[tuple] = []
        self.reports: list = []
        self.pumped: list = []
        self.executor = FakeExecutor(seconds_per_step=step_seconds, advance=self.advance, fail=fail)
        config.setdefault("growth_tokens", 0)
        self.config = SchedulerConfig(**config)
        self.scheduler = Scheduler(
            self.cache,
            self.executor,
            config=self.config,
            sink=self.facts.extend,
            pump=self.pump,
            clock=lambda: self.now,
            report=self.reports.append,
        )
        self.ids = 0

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def pump(self) -> bool:
        """Runs the next scripted event, if any."""
        if not self.pumped:
            return False
        event = self.pumped.pop(0)
        if event is None:
            return False
        event()
        return True

    def request(self, tokens, max_tokens=1, **kwargs) -> Request:
        """A request over `tokens`: a list, or a count of tokens nobody else has."""
        self.ids += 1
        if isinstance(tokens, int):
            tokens = [self.ids * 10_000 + i for i in range(tokens)]
        request = Request(
            self.ids,
            token_key(tokens),
            SamplingParams(max_tokens=max_tokens),
            NAMESPACE,
            self.now,
            **kwargs,
        )
        self.scheduler.add(request)
        return request

    def step(self):
        """One step; where nothing can run, time passes until the scheduler wants to look again."""
        batches = self.executor.batches
        outputs = self.scheduler.step()
        if self.executor.batches == batches:
            self.now = self.scheduler.idle_until() or self.now
        return outputs

    def run(self, steps_max: int = 10_000):
        """Step until nothing is left; returns all outputs."""
        outputs = []
        for _ in range(steps_max):
            if not self.scheduler.has_work:
                return outputs
            outputs += self.step()
        raise AssertionError(f"requests are still live after {steps_max} steps")

    def of(self, kind: Fact) -> list[tuple]:
        return [fact for fact in self.facts if fact[0] is kind]
