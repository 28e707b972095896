"""A whole cache under seeded traffic and faults: real core and ledger, everything else simulated.

Owns the run: what is called next, and what must hold after every call. The same seed gives the same
run. A step is one call that may change the cache. After each:

    every identity of the ledger holds; nothing contradicts the facts before
    free and quarantined slots, leases and copies are as many in the books as in the core

and at intervals, also after every late write (`full_check_every` steps; checking changes nothing):

    every invariant of the structure; the ledger equals a full recount
    every resident slot, and every slot a request has written, holds its own page

At the end everything pending has ended, nothing is locked or held, and both tiers can be emptied.
"""

from __future__ import annotations

import random
from collections import deque
from itertools import accumulate
from typing import cast

from kvtiers.core.audit import check_structure
from kvtiers.core.cache import UnifiedRadixCache
from kvtiers.core.interface import Blocked, LeaseView, PrefixCache, Refused
from kvtiers.errors import InvariantViolation, KvtiersError
from kvtiers.events import Cancel, Copy, HiCacheAck, Lookup
from kvtiers.metrics.ledger import Ledger
from kvtiers.testing.simulation.carrier import NO_FAULTS
from kvtiers.testing.simulation.checks import (
    check_books,
    check_content,
    check_empty,
    check_nothing_pending,
)
from kvtiers.testing.simulation.clock import SimClock
from kvtiers.testing.simulation.content import ShadowMemory
from kvtiers.testing.simulation.misuse import misuses
from kvtiers.testing.simulation.probes import Probes
from kvtiers.testing.simulation.requests import Prompts, SimRequest
from kvtiers.testing.simulation.scenario import draw
from kvtiers.testing.simulation.storage import SimStorage
from kvtiers.testing.simulation.transfer import SimTransfer
from kvtiers.types import (
    TOKEN_BYTES,
    Attempt,
    BlockedOn,
    FailReason,
    Namespace,
    Purpose,
    Tier,
)

_TRACE_CALLS = 30
_VOIDED_MAX = 2
_ADMIT_TRIES_MAX = 1000


class Simulation:
    """One seeded run; `run` raises `InvariantViolation` for anything that must not be."""

    def __init__(self, seed: int, *, full_check_every: int = 1) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.scenario = scenario = draw(rng)
        self.config = config = scenario.config
        self.full_check_every = full_check_every
        self.core = UnifiedRadixCache(config)
        self.cache = cast(PrefixCache, self.core)  # it knows its own leases only
        self.ledger = Ledger(
            config.page_tokens, config.pools, config.device_pages, config.host_pages
        )
        self.clock = SimClock()
        self.probes = Probes()
        self.memory = {
            Tier.DEVICE: ShadowMemory(Tier.DEVICE, config.device_pages),
            Tier.HOST: ShadowMemory(Tier.HOST, config.host_pages),
        }
        self.transfer = SimTransfer(
            config, self.clock, rng, scenario.faults, self._ack, self.memory
        )
        self.storage = SimStorage(
            config,
            self.clock,
            rng,
            scenario.faults,
            self._ack,
            self.memory[Tier.HOST],
            self._found,
            scenario.quota_pages,
        )
        self.prompts = Prompts(rng, scenario, self.probes)
        self.waiting: list[SimRequest] = []
        self.running: list[SimRequest] = []
        self.steps = 0
        self._request_id = 0
        self._pins: list[int] = []
        self._ended_lease: LeaseView | None = None
        self._is_full = False  # an attempt found no room, and nothing has ended since
        self._issued_runs: dict[int, int] = {}  # by copy: over how many runs it was ordered
        self._order_of_issue: dict[Purpose, deque[int]] = {each: deque() for each in Purpose}
        self._trace: deque[str] = deque(maxlen=_TRACE_CALLS)
        actions = (
            (0.17, self._arrive),
            (0.25, self._admit_one),
            (0.25, self._compute_one),
            (0.16, self._end_one),
            (0.02, self._fork_one),
            (0.02, self._give_up_waiting),
            (0.03, self._tick),
            (scenario.evict_weight, self._evict),
            (0.006, self._flush),
            (0.01, self._pin),
            (0.01, self._unpin),
            (0.01, self._change_storage),
            (0.01, self._misuse),
        )
        self._actions = [action for _, action in actions]
        self._weights = list(accumulate(weight for weight, _ in actions))

    # ------------------------------------------------------------------ running

    def run(self, steps: int) -> None:
        """Make at least `steps` calls, then let everything end."""
        while self.steps < steps:
            self.act()
        self._end_everything()

    @property
    def trace(self) -> list[str]:
        """The last calls, oldest first."""
        return list(self._trace)

    def act(self) -> None:
        """Whatever comes next: a copy ends, or somebody calls. At most a few calls."""
        rng, clock = self.rng, self.clock
        clock.now += 2 * rng.random()
        self.storage.misplace()
        if clock.due and rng.random() < self.scenario.busy_rate:
            clock.happen()
            return
        (action,) = rng.choices(self._actions, cum_weights=self._weights)
        action()

    def _stepped(self, *call: object) -> None:
        """A call was made: hand out what it left, and check."""
        self.steps += 1
        self._trace.append(f"{self.clock.now:10.2f}  {' '.join(map(str, call))}")
        asked = call[0] == "prefetch"
        facts = self.cache.take_facts()
        self.probes.see(facts)
        self.ledger.fold(facts)
        for order in self.cache.take_orders():
            if isinstance(order, Copy):
                self._issued_runs[order.op_id] = len(self.core.state.operations[order.op_id].runs())
                self._order_of_issue[order.purpose].append(order.op_id)
                stored = Tier.STORAGE in (order.purpose.source, order.purpose.target)
                (self.storage if stored else self.transfer).submit(order)
            elif isinstance(order, Lookup):
                if not asked:
                    self.probes.hit("follower asked for its own rest")
                asked = False
                self.storage.look_up(order)
            else:
                self._cancel(order)
        if asked and call[-1] is not None:
            self.probes.hit("prefetch followed by another request")
        self.check()
        if self.steps % self.full_check_every == 0:
            self.check_fully()

    # ------------------------------------------------------------------ checks

    def check(self) -> None:
        """What is cheap enough for every step."""
        check_books(self.core, self.ledger, len(self.running))
        for book in (self.ledger.device, self.ledger.host):
            if book.quarantined and book.quarantined == book.capacity_pages:
                self.probes.hit(f"{book.tier} quarantined to the last free slot")

    def check_fully(self) -> None:
        """Structure, recount and content: walks the whole tree."""
        check_structure(self.core.state)
        differences = self.ledger.audit(self.cache.recount())
        if differences:
            raise InvariantViolation(f"booked minus counted: {differences}")
        check_content(self.core.state, self.memory, self.running)

    # ------------------------------------------------------------------ copies

    def _ack(self, ack: HiCacheAck) -> None:
        operation = self.core.state.operations[ack.op_id]
        purpose = operation.purpose
        first = operation.pages_ok is None
        if first:
            runs = len(operation.runs())
            if runs > self._issued_runs.pop(ack.op_id):
                self.probes.hit(f"run split while its {_SHORT[purpose]} is in flight")
            queue = self._order_of_issue[purpose]
            if queue[0] != ack.op_id:
                self.probes.hit("acknowledged out of order")
            queue.remove(ack.op_id)
            if len(operation.waiters) > 2:
                self.probes.hit("load wanted by a third request")
        elif not operation.applied:
            self.probes.hit("late copy ended before an earlier one was acknowledged")
        self._is_full = False
        voided = sum(self._is_voided(request) for request in self.running)
        self.cache.ack(ack, self.clock.now)
        if sum(self._is_voided(request) for request in self.running) > voided + 1:
            self.probes.hit("several requests voided by one load")
        self._stepped("ack", purpose, ack.op_id, ack.pages_ok, ack.failure, "ended", ack.ended)
        if not first:
            self.probes.hit("late write after the deadline")
            self.check_fully()

    def _found(self, lookup: Lookup, pages: int) -> None:
        self.cache.found(lookup.ticket_id, pages, self.clock.now)
        self._stepped("found", lookup.ticket_id, pages)

    def _cancel(self, order: Cancel) -> None:
        self.probes.hit("prefetch revoked")
        self.storage.cancel(order.op_id, FailReason.CANCELLED)

    @staticmethod
    def _is_voided(request: SimRequest) -> bool:
        return request.lease is not None and request.lease.voided

    # ------------------------------------------------------------------ requests

    def _arrive(self) -> None:
        if len(self.waiting) >= self.scenario.waiting_max:
            self._admit_one()
            return
        prompts = self.prompts.next()
        at_once = len(prompts) > 1 and self.rng.random() < 0.5
        for key, namespace in prompts:
            self._ask(key, namespace)
            if at_once:
                self._admit_one(self.waiting[-1])

    def _ask(self, key: bytes, namespace: Namespace) -> None:
        """A new request, which may want what storage holds."""
        self._request_id += 1
        request = SimRequest(self._request_id, key, namespace)
        self.waiting.append(request)
        if self.config.storage and self.rng.random() < 0.6:
            request.ticket_id = self.cache.prefetch(
                request.request_id, key, namespace, self.clock.now
            )
            self._stepped("prefetch", request.request_id, len(key), request.ticket_id)

    def _admit_one(self, request: SimRequest | None = None) -> None:
        """One attempt: of a request that waits, or of any."""
        if not self.waiting or len(self.running) >= self.scenario.live_max:
            return
        if self._is_full and self.rng.random() < 0.8:
            return
        if request is None:
            request = self.rng.choice(self.waiting)
        self.waiting.remove(request)
        reserve = self.rng.choice((0, 1, self.config.page_tokens))
        room = self.config.device_pages * self.config.page_tokens - len(request.key) // TOKEN_BYTES
        if self.rng.random() < 0.95:  # else it may be refused for it
            reserve = max(0, min(reserve, room))
        if not self._admit(request, reserve) and request.lease is None:
            self._give_up(request) if self.rng.random() < 0.1 else self.waiting.append(request)

    def _admit(self, request: SimRequest, reserve_tokens: int) -> bool:
        """One attempt of a request that waits nowhere; False: blocked, and it holds nothing."""
        quarantined = self.ledger.device.quarantined
        result = self.cache.admit(
            request.request_id,
            request.key,
            request.namespace,
            self.clock.now,
            reserve_tokens=reserve_tokens,
            ticket_id=request.ticket_id,
            attempt=request.attempt,
        )
        if isinstance(result, Blocked):
            self._stepped("admit", request.request_id, "blocked on", result.on)
            self._check_blocked(result.on, request)
            self._is_full = True
            if quarantined and result.on is not BlockedOn.PREFETCH:
                self.probes.hit("slots wanted while some are quarantined")
            return False
        if isinstance(result, Refused):
            self._stepped("admit", request.request_id, "refused")
            if result.needs_pages <= self.config.device_pages:
                raise InvariantViolation(f"{result} although the device is large enough")
            self._give_up(request)
            return True
        request.ticket_id = None
        request.begin(result, self.config.page_tokens)
        self.running.append(request)
        split = result.split
        self._stepped("admit", request.request_id, "lease", result.lease_id, split)
        prompt_tokens = len(request.key) // TOKEN_BYTES
        explained = sum(each.tokens for each in split.missed)
        if split.prompt != prompt_tokens or explained != split.computed or min(split[:4]) < 0:
            raise InvariantViolation(f"{split} does not explain a prompt of {prompt_tokens} tokens")
        return True

    def _check_blocked(self, on: BlockedOn, request: SimRequest) -> None:
        """Whatever an attempt waits for, something is there that will end.

        A prefetch counts, the request's own too: it locks whole runs, also what the request itself
        does not need of them. So does a look-up of one that was given up: it locks them until its
        answer, for who may follow it.
        """
        state = self.core.state
        copying = bool(state.operations)
        if on in (BlockedOn.LOADING, BlockedOn.EVICTION):
            ends = copying
        elif on is BlockedOn.PREFETCH:
            ends = copying or self.storage.lookups > 0 or len(self.clock) > 0
        else:
            held = self.ledger.open_ends()
            tickets = [each.ticket_id for each in (*self.waiting, request)]
            ends = copying or any(held.values()) or any(tickets) or self.storage.lookups > 0
        if not ends:
            raise InvariantViolation(f"blocked on {on}, and nothing is there that could end")

    def _give_up(self, request: SimRequest) -> None:
        """A request that waits nowhere and runs nowhere is gone."""
        if request.ticket_id is not None:
            self.cache.cancel_prefetch(request.ticket_id, self.clock.now)
            request.ticket_id = None
            self._stepped("cancel_prefetch of", request.request_id)

    def _give_up_waiting(self) -> None:
        if self.waiting:
            self._give_up(self.waiting.pop(self.rng.randrange(len(self.waiting))))

    def _any_running(self) -> SimRequest | None:
        return self.rng.choice(self.running) if self.running else None

    def _compute_one(self) -> None:
        request = self._any_running()
        if request is None:
            return
        lease = request.lease
        assert lease is not None
        if lease.voided:
            self._void(request)
        elif not lease.load_ops:
            self._compute(request, self._chunk_end(request))

    def _void(self, request: SimRequest) -> None:
        request.times_voided += 1
        self._leave(request, "abort")
        if request.times_voided == _VOIDED_MAX:
            self.probes.hit("voided twice")
        elif request.times_voided > _VOIDED_MAX:
            raise InvariantViolation(
                f"request {request.request_id} was voided {request.times_voided} times"
            )
        self.waiting.append(request)
        if self.rng.random() < 0.5:
            # What did arrive may have left again when it comes back, and is loaded once more.
            freed = self.cache.evict(Tier.DEVICE, self.config.device_pages, self.clock.now)
            self._stepped("evict", "device", "freed", freed)
            self._admit_one(request)

    def _chunk_end(self, request: SimRequest) -> int:
        """How far the next chunk goes: within the prompt, to its end, or some decoding."""
        lease, rng = request.lease, self.rng
        assert lease is not None
        computed, prompt = lease.computed_tokens, lease.split.prompt
        if computed < prompt:
            return prompt if rng.random() < 0.6 else rng.randrange(computed, prompt) + 1
        if computed >= lease.capacity_tokens:
            wanted = computed + rng.randrange(1, 2 * self.config.page_tokens + 1)
            self.cache.extend(lease, wanted, self.clock.now)
            self._stepped("extend", lease.lease_id, wanted)
        return min(computed + rng.randrange(1, 4), lease.capacity_tokens)

    def _compute(self, request: SimRequest, end_tokens: int) -> None:
        lease, page_tokens = request.lease, self.config.page_tokens
        assert lease is not None
        have = len(request.key) // TOKEN_BYTES
        if end_tokens > have:
            request.extend_key(request.key + self.prompts.tokens(end_tokens - have), page_tokens)
        request.compute(self.memory[Tier.DEVICE], end_tokens, page_tokens)
        self.cache.commit(lease, request.key, end_tokens, self.clock.now)
        self._stepped("commit", lease.lease_id, end_tokens)
        if self.core.leases[lease.lease_id].published_pages < end_tokens // page_tokens:
            self.probes.hit("committed a page that is being loaded")

    def _end_one(self) -> None:
        request = self._any_running()
        if request is None:
            return
        lease, rng = request.lease, self.rng
        assert lease is not None
        whole = not lease.load_ops and lease.computed_tokens >= lease.split.prompt
        if lease.voided:
            self._void(request)
        elif whole and request.slot_tags.size and rng.random() < 0.9 and self._is_booked(lease):
            if rng.random() < 0.2:
                self._leave(request, "retract")
                request.attempt = Attempt.REPLAY
                request.times_voided = 0
                if len(request.key) <= self.config.device_pages * self.config.page_tokens * 4:
                    self.waiting.append(request)
            else:
                self._leave(request, "finish")
                self.prompts.remember(request.key, request.namespace)
        elif rng.random() < 0.2:
            if lease.load_ops:
                self.probes.hit("aborted while loading")
            self._leave(request, "abort")

    def _is_booked(self, lease: LeaseView) -> bool:
        return self.core.leases[lease.lease_id].booked

    def _leave(self, request: SimRequest, how: str) -> None:
        """End a request's lease: `finish`, `retract` or `abort`."""
        lease = request.lease
        assert lease is not None
        self._is_full = False
        self.running.remove(request)
        request.lease = None
        getattr(self.cache, how)(lease, self.clock.now)
        self._ended_lease = lease
        self._stepped(how, lease.lease_id)

    def _fork_one(self) -> None:
        request = self._any_running()
        if request is None or len(self.running) >= self.scenario.live_max:
            return
        lease = request.lease
        assert lease is not None
        if not self._is_booked(lease) or lease.voided:
            return
        self._request_id += 1
        result = self.cache.fork(lease, self._request_id, self.clock.now)
        if isinstance(result, Blocked):
            self._stepped("fork", lease.lease_id, "blocked on", result.on)
            self._check_blocked(result.on, request)
            return
        self.probes.hit("forked")
        key = request.key[: lease.split.prompt * TOKEN_BYTES]
        fork = SimRequest(self._request_id, key, request.namespace)
        fork.attempt = Attempt.FORK
        fork.begin(result, self.config.page_tokens)
        self.running.append(fork)
        self._stepped("fork", lease.lease_id, "lease", result.lease_id, result.split)

    # ------------------------------------------------------------------ commands

    def _tick(self) -> None:
        self.cache.tick(self.clock.now)
        self._stepped("tick")

    def _evict(self) -> None:
        tier = Tier.HOST if self.rng.random() < 0.1 else Tier.DEVICE
        pages = self.rng.choice((0, 1, self.config.device_pages, self.config.device_pages))
        freed = self.cache.evict(tier, pages, self.clock.now)
        self._stepped("evict", tier, pages, "freed", freed)

    def _flush(self) -> None:
        """One tier; or both, after which everything comes from storage."""
        both = (Tier.HOST, Tier.DEVICE)
        for tier in self.rng.choice(((Tier.DEVICE,), (Tier.HOST,), both, both)):
            removed = self.cache.flush(tier, self.clock.now)
            self._stepped("flush", tier, "removed", removed)

    def _pin(self) -> None:
        known = self.prompts.known()
        if known is None:
            return
        seconds = 10 * self.rng.random()
        pin_id = self.cache.pin(*known, self.clock.now, seconds)
        self._stepped("pin", pin_id)
        if pin_id is not None:
            self._pins.append(pin_id)

    def _unpin(self) -> None:
        if not self._pins:
            return
        pin_id = self._pins.pop(self.rng.randrange(len(self._pins)))
        if pin_id in self.ledger.pinned_tokens_by_pin:  # else it has expired
            self.cache.unpin(pin_id, self.clock.now)
            self._stepped("unpin", pin_id)

    def _change_storage(self) -> None:
        if not self.config.storage:
            return
        if self.storage.attached:
            if self.rng.random() < 0.7:
                return
            if self.storage.flights:
                self.probes.hit("storage detached with copies in flight")
            self.storage.detach()
            self.cache.detach_storage(self.clock.now)
            self._stepped("detach_storage")
        else:
            another = self.rng.random() < 0.5
            self.storage.attach(another=another)
            if another:
                self.probes.hit("another storage attached")
            self.cache.attach_storage(self.clock.now)
            self._stepped("attach_storage", "another" if another else "again")

    def _misuse(self) -> None:
        """A call that must be refused, and must change nothing."""
        running = self._any_running()
        calls = misuses(
            self.cache,
            self.clock.now,
            self._ended_lease,
            None if running is None else running.lease,
        )
        before = self.cache.recount()
        try:
            self.rng.choice(calls)()
        except KvtiersError as error:
            self.probes.hit("refused misuse")
            if self.cache.recount() != before or self.core.state.facts or self.core.state.orders:
                raise InvariantViolation(f"a refused call changed something: {error}") from error
        else:
            raise InvariantViolation("a call that makes no sense was not refused")
        self._stepped("misuse")

    # ------------------------------------------------------------------ the end

    def _end_everything(self) -> None:
        """Requests that run end, those that wait are served one by one, every copy ends."""
        self.transfer.faults = self.storage.faults = NO_FAULTS
        while self.running:
            self._leave(self.running[-1], "abort")
        while len(self.clock):
            self.clock.happen()
        self.clock.now += 1000.0
        self._tick()  # every pin has expired
        while self.waiting:
            self._serve(self.waiting.pop())
        while len(self.clock):
            self.clock.happen()
        self.check_fully()
        check_nothing_pending(self.core, self.ledger)
        for tier in (Tier.DEVICE, Tier.HOST):
            self.cache.flush(tier, self.clock.now)
            self._stepped("flush", tier, "at the end")
        check_empty(self.core)

    def _serve(self, request: SimRequest) -> None:
        """Nobody else runs, so it must be admitted, after as many copies as that takes.

        The prefetch of a request that waits locks what its pages continue, so where nothing else
        helps those behind lose theirs, and in the end it its own, as in the scheduler.
        """
        for _ in range(_ADMIT_TRIES_MAX):
            if self._admit(request, 0):
                break
            if len(self.clock):
                self.clock.happen()
                continue
            queue = (*self.waiting, request)
            holding = [each for each in queue if each.ticket_id is not None]
            if not holding:
                raise InvariantViolation(
                    f"request {request.request_id} is alone and blocked, and nothing is in flight"
                )
            self._give_up(holding[0])
            self.probes.hit("prefetch given up for another request")
        else:
            raise InvariantViolation(
                f"request {request.request_id} is alone and was not admitted in "
                f"{_ADMIT_TRIES_MAX} attempts"
            )
        lease = request.lease
        if lease is None:
            return  # refused: it is larger than the device
        while lease.load_ops:
            self.clock.happen()
        self._compute(request, lease.split.prompt)
        self._leave(request, "finish")


_SHORT = {
    Purpose.BACKUP: "backup",
    Purpose.LOAD_BACK: "load",
    Purpose.PREFETCH: "prefetch",
    Purpose.STORE: "store",
}
