"""The real cache with copies in flight that are late, reordered or fail in part.

There is no model of when copies end, so this says what must hold whatever they do. The driver
checks books, slots and structure after each call. The machine checks that storage never holds a
tail without its head, that a page which hits holds what its name says, and that everything ends.

What a slot holds is followed by name: a copy that arrives names its targets, a commit names what it
computed, a late copy spoils its targets until it has ended, and hits must bear the right names.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvtiers.core.interface import Blocked, LeaseView, Refused
from kvtiers.core.policies import FRONTIERS
from kvtiers.events import Copy
from kvtiers.testing.cache_driver import CacheDriver
from kvtiers.types import (
    TOKEN_BYTES,
    CacheConfig,
    FailReason,
    Namespace,
    PrefetchPolicy,
    Purpose,
    Retention,
    StoreOn,
    Tier,
    WritePolicy,
    token_key,
)

NAMESPACES = (Namespace("m"), Namespace("m", salt="other"))
SPOILED = b"a late copy may have written this"


@st.composite
def configs(draw: st.DrawFn) -> CacheConfig:
    device = draw(st.integers(2, 24))
    host = draw(st.sampled_from((0, 1, max(1, device // 2), device, 3 * device)))
    write_policy = draw(st.sampled_from(WritePolicy))
    retention = Retention.INCLUSIVE
    if write_policy is WritePolicy.WRITE_BACK:
        retention = draw(st.sampled_from(Retention))
    page_tokens = draw(st.sampled_from((1, 4)))
    return CacheConfig(
        device_pages=device,
        host_pages=host,
        page_tokens=page_tokens,
        storage=host > 0 and draw(st.booleans()),
        write_policy=write_policy,
        retention=retention,
        store_on=draw(st.sampled_from(StoreOn)),
        eviction=draw(st.sampled_from(sorted(FRONTIERS))),
        prefetch_policy=draw(st.sampled_from(PrefetchPolicy)),
        prefetch_threshold_tokens=draw(st.sampled_from((1, 2 * page_tokens))),
        prefetch_batch_pages=draw(st.sampled_from((1, 2, 64))),
        load_back_threshold_tokens=draw(st.sampled_from((1, 1, 3 * page_tokens))),
        backup_in_flight_pages=draw(st.sampled_from((2, 1 << 30))),
        store_in_flight_pages=draw(st.sampled_from((2, 4096))),
        ghost_pages=draw(st.sampled_from((None, 0, 3))),
        cleaner_low=draw(st.sampled_from((0.0, 0.5))),
        cleaner_high=0.8,
    )


class Request:
    """A request on its way: waiting, or with a lease; `tokens` is its sequence so far."""

    def __init__(self, tokens: list[int], namespace: Namespace, request_id: int) -> None:
        self.tokens = tokens
        self.namespace = namespace
        self.request_id = request_id
        self.ticket: int | None = None
        self.lease: LeaseView | None = None
        self.has_result = False


class InFlight(RuleBasedStateMachine):
    @initialize(config=configs())
    def begin(self, config: CacheConfig) -> None:
        self.driver = CacheDriver(config)
        self.page_bytes = config.page_tokens * TOKEN_BYTES
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.texts: list[list[int]] = [[]]
        self.stored: set[bytes] = set()
        self.device: dict[int, bytes] = {}  # slot -> name of the page it holds
        self.host: dict[int, bytes] = {}
        self.in_time: dict[int, int] = {}  # late copy -> pages that had arrived before

    # ---- names

    def _name(self, namespace: Namespace, tokens: list[int], pages: int) -> bytes:
        return namespace.digest + token_key(tokens)[: pages * self.page_bytes]

    def _reads(self, copy: Copy) -> list[bytes]:
        """What a copy that reads its source at the last moment finds there."""
        if copy.purpose is Purpose.PREFETCH:
            assert copy.namespace is not None
            ends = range(copy.first_page + 1, copy.first_page + copy.pages + 1)
            return [copy.namespace.digest + copy.path_key[: end * self.page_bytes] for end in ends]
        held = self.device if copy.purpose is Purpose.BACKUP else self.host
        assert copy.source_slots is not None
        return [held[slot] for slot in copy.source_slots.tolist()]

    def _arrive(self, copy: Copy, pages: int) -> None:
        names = self._reads(copy)[:pages]
        if copy.purpose is Purpose.STORE:
            assert copy.namespace is not None
            for end, name in enumerate(names, copy.first_page + 1):
                page = copy.namespace.digest + copy.path_key[: end * self.page_bytes]
                assert name == page, "stored under another page's name"
                parent = page[: -self.page_bytes]
                assert end == 1 or parent in self.stored, "a tail without its head"
                self.stored.add(page)
            return
        held = self.device if copy.purpose is Purpose.LOAD_BACK else self.host
        assert copy.target_slots is not None
        held.update(zip(copy.target_slots.tolist()[:pages], names, strict=True))

    def _check_hits(self, request: Request) -> None:
        lease = request.lease
        assert lease is not None
        table = lease.block_table().tolist()
        for page in range(lease.computed_tokens // self.driver.config.page_tokens):
            name = self._name(request.namespace, request.tokens, page + 1)
            assert self.device.get(table[page]) == name, f"page {page} is not what it should be"

    # ---- requests

    @rule(
        base=st.integers(0, 9),
        keep=st.integers(0, 9),
        text=st.lists(st.integers(0, 1), max_size=6),
        tail=st.integers(0, 3),
        namespace=st.sampled_from(NAMESPACES),
        prefetch=st.booleans(),
    )
    def arrive(
        self,
        base: int,
        keep: int,
        text: list[int],
        tail: int,
        namespace: Namespace,
        prefetch: bool,
    ) -> None:
        page = self.driver.config.page_tokens
        text = [*self.texts[base % len(self.texts)][:keep], *text][
            : self.driver.config.device_pages
        ]
        self.texts.append(text)
        tokens = [symbol for symbol in text for _ in range(page)] + [3] * (tail % page)
        request = Request(tokens or [3], namespace, self.driver.next_request())
        self.waiting.append(request)
        if prefetch:
            request.ticket = self.driver.prefetch(
                request.tokens, namespace, request_id=request.request_id
            )

    @precondition(lambda self: self.waiting)
    @rule(index=st.integers(0, 9), reserve=st.integers(0, 5), gives_up=st.booleans())
    def admit(self, index: int, reserve: int, gives_up: bool) -> None:
        request = self.waiting.pop(index % len(self.waiting))
        result = self.driver.admit(
            request.tokens,
            request.namespace,
            request_id=request.request_id,
            reserve_tokens=reserve,
            ticket_id=request.ticket,
        )
        if isinstance(result, Refused) or (isinstance(result, Blocked) and gives_up):
            if request.ticket is not None:
                self.driver.cancel_prefetch(request.ticket)
        elif isinstance(result, Blocked):
            self.waiting.append(request)
        else:
            request.ticket = None
            request.lease = result
            self.running.append(request)

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 9), share=st.sampled_from((0.4, 1.0, 1.0)), grow=st.integers(0, 6))
    def compute(self, index: int, share: float, grow: int) -> None:
        """A chunk of prefill, or decode, and its result."""
        request = self.running[index % len(self.running)]
        lease = request.lease
        assert lease is not None
        if lease.voided or lease.load_ops:
            return
        self._check_hits(request)
        begin = lease.computed_tokens
        if begin >= len(request.tokens) and self.driver.extend(lease, begin + grow):
            request.tokens += [grow % 2] * grow
        count = begin + round((len(request.tokens) - begin) * share)
        table = lease.block_table().tolist()
        page = self.driver.config.page_tokens
        for written in range(max(begin, lease.shared_tokens) // page, count // page):
            self.device[table[written]] = self._name(request.namespace, request.tokens, written + 1)
        self.driver.commit(lease, request.tokens, count)
        request.has_result = True

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 9), how=st.sampled_from(("finish", "finish", "retract", "abort")))
    def end(self, index: int, how: str) -> None:
        request = self.running.pop(index % len(self.running))
        lease = request.lease
        assert lease is not None
        prompt = lease.split.prompt
        if lease.voided:
            self.driver.abort(lease)
            request.lease = None
            request.has_result = False
            request.tokens = request.tokens[:prompt]
            self.waiting.append(request)
        elif request.has_result and lease.computed_tokens >= prompt:
            getattr(self.driver, how)(lease)
        else:
            self.driver.abort(lease)

    @rule(
        base=st.integers(0, 9),
        keep=st.integers(0, 9),
        text=st.lists(st.integers(0, 1), max_size=6),
        namespace=st.sampled_from(NAMESPACES),
    )
    def whole_request(self, base: int, keep: int, text: list[int], namespace: Namespace) -> None:
        """From arrival to end, as far as it gets without waiting for a copy."""
        self.arrive(base, keep, text, 1, namespace, prefetch=False)
        running = len(self.running)
        self.admit(len(self.waiting) - 1, 0, gives_up=True)
        if len(self.running) > running:
            self.compute(running, 1.0, 0)
            self.end(running, "finish")

    # ---- copies

    @precondition(lambda self: self.driver.copies)
    @rule(
        index=st.integers(0, 30),
        how=st.sampled_from(("ok", "ok", "ok", "ok", "failed", "late")),
        share=st.floats(0, 0.99),
        reason=st.sampled_from(FailReason),
    )
    def copy_ends(self, index: int, how: str, share: float, reason: FailReason) -> None:
        copies = list(self.driver.copies.values())
        copy = copies[index % len(copies)]
        if how == "ok":
            self._arrive(copy, copy.pages)
            self.driver.ack(copy)
        else:
            pages = int(copy.pages * share)
            self._arrive(copy, pages)
            if how == "late":
                self.in_time[copy.op_id] = pages
                self.driver.be_late(copy, pages)
            else:
                self.driver.fail(copy, pages, reason)

    @precondition(lambda self: self.driver.late)
    @rule(index=st.integers(0, 9))
    def late_copy_ends(self, index: int) -> None:
        """It writes the rest of its targets at the very last moment."""
        copies = list(self.driver.late.values())
        copy = copies[index % len(copies)]
        names = self._reads(copy)
        late = slice(self.in_time.pop(copy.op_id), None)
        if copy.purpose is Purpose.STORE:
            ends = range(copy.first_page + 1, copy.first_page + copy.pages + 1)
            assert copy.namespace is not None
            for end, name in zip(ends, names, strict=True):
                page = copy.namespace.digest + copy.path_key[: end * self.page_bytes]
                assert name == page, "a late store reads another page's bytes"
        elif copy.target_slots is not None:
            held = self.device if copy.purpose is Purpose.LOAD_BACK else self.host
            for slot, name in zip(copy.target_slots.tolist()[late], names[late], strict=True):
                if held.get(slot) != name:
                    held[slot] = SPOILED
        self.driver.ack(copy)

    @precondition(lambda self: self.driver.lookups)
    @rule(index=st.integers(0, 9), forgets=st.integers(0, 3))
    def storage_answers(self, index: int, forgets: int) -> None:
        tickets = list(self.driver.lookups)
        ticket = tickets[index % len(tickets)]
        question = self.driver.lookups[ticket]
        found = 0
        while found < question.pages and (
            question.namespace.digest
            + question.path_key[: (question.first_page + found + 1) * self.page_bytes]
            in self.stored
        ):
            found += 1
        self.driver.found(ticket, max(0, found - forgets))

    # ---- commands

    @rule(tier=st.sampled_from((Tier.DEVICE, Tier.HOST)), pages=st.integers(0, 5))
    def evict(self, tier: Tier, pages: int) -> None:
        assert self.driver.evict(tier, pages) <= pages

    @rule(tier=st.sampled_from((Tier.DEVICE, Tier.HOST)))
    def flush(self, tier: Tier) -> None:
        self.driver.flush(tier)

    @rule(base=st.integers(0, 9), namespace=st.sampled_from(NAMESPACES), ttl=st.integers(0, 5))
    def pin(self, base: int, namespace: Namespace, ttl: int) -> None:
        text = self.texts[base % len(self.texts)]
        tokens = [symbol for symbol in text for _ in range(self.driver.config.page_tokens)]
        self.driver.pin(tokens or [3], float(ttl), namespace)

    @rule(seconds=st.floats(0.01, 2.0))
    def time_passes(self, seconds: float) -> None:
        self.driver.tick(seconds)

    # ---- everything ends

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        driver = self.driver
        for request in self.running:
            assert request.lease is not None
            driver.abort(request.lease)
        for request in self.waiting:
            if request.ticket is not None:
                driver.cancel_prefetch(request.ticket)
        for ticket in list(driver.lookups):
            driver.found(ticket, 0)
        for _ in range(1_000):
            if not driver.copies:
                break
            driver.ack_all()
        for copy in list(driver.late.values()):
            driver.ack(copy)
        driver.tick(1e6)
        driver.ack_all()
        assert not driver.copies
        open_ends = {what: left for what, left in driver.ledger.open_ends().items() if left}
        assert not open_ends
        for run in driver.cache.state.tree.walk():  # type: ignore[attr-defined]
            assert not run.locks, "a leaked lock"


def _text(rng: random.Random) -> list[int]:
    return [rng.randrange(2) for _ in range(rng.choice((0, 1, 2, 2, 3, 5)))]


def _end_a_copy(machine: InFlight, rng: random.Random) -> None:
    if machine.driver.copies:
        how = rng.choices(("ok", "failed", "late"), (16, 2, 2))[0]
        machine.copy_ends(rng.randrange(30), how, rng.random() * 0.99, rng.choice(list(FailReason)))


_ACTS: dict[Callable[[InFlight, random.Random], object], float] = {
    lambda m, r: m.whole_request(
        r.randrange(10), r.randrange(10), _text(r), r.choices(NAMESPACES, (5, 1))[0]
    ): 12,
    lambda m, r: m.arrive(
        r.randrange(10),
        r.randrange(10),
        _text(r),
        r.randrange(4),
        r.choices(NAMESPACES, (5, 1))[0],
        r.random() < 0.7,
    ): 6,
    lambda m, r: m.waiting and m.admit(r.randrange(10), r.choice((0, 0, 5)), r.random() < 0.3): 9,
    lambda m, r: m.running and m.compute(r.randrange(10), r.choice((0.5, 1.0)), r.randrange(6)): 10,
    lambda m, r: (
        m.running and m.end(r.randrange(10), r.choice(("finish", "finish", "retract", "abort")))
    ): 7,
    _end_a_copy: 24,
    lambda m, r: m.driver.late and m.late_copy_ends(r.randrange(10)): 3,
    lambda m, r: m.driver.lookups and m.storage_answers(r.randrange(10), r.choice((0, 0, 1))): 5,
    lambda m, r: m.evict(r.choice((Tier.DEVICE, Tier.HOST)), r.randrange(5)): 2,
    lambda m, r: m.pin(r.randrange(10), r.choice(NAMESPACES), r.randrange(5)): 0.5,
    lambda m, r: m.time_passes(r.random()): 2,
    lambda m, r: m.flush(r.choice((Tier.DEVICE, Tier.HOST))): 0.1,
}
"""What happens, and how often."""


def _config(rng: random.Random) -> CacheConfig:
    device = rng.choice((4, 8, 12, 24))
    host = rng.choice((0, 1, device // 2, device, 3 * device))
    write_policy = rng.choice(list(WritePolicy))
    exclusive = write_policy is WritePolicy.WRITE_BACK and rng.random() < 0.5
    page_tokens = rng.choice((1, 1, 4))
    return CacheConfig(
        device_pages=device,
        host_pages=host,
        page_tokens=page_tokens,
        storage=host > 0 and rng.random() < 0.7,
        write_policy=write_policy,
        retention=Retention.EXCLUSIVE if exclusive else Retention.INCLUSIVE,
        store_on=rng.choice(list(StoreOn)),
        eviction=rng.choice(sorted(FRONTIERS)),
        prefetch_policy=rng.choice(list(PrefetchPolicy)),
        prefetch_threshold_tokens=rng.choice((1, 2 * page_tokens)),
        prefetch_batch_pages=rng.choice((1, 2, 64)),
        load_back_threshold_tokens=rng.choice((1, 1, 3 * page_tokens)),
        backup_in_flight_pages=rng.choice((2, 1 << 30)),
        store_in_flight_pages=rng.choice((2, 4096)),
        ghost_pages=rng.choice((None, 0, 3)),
        cleaner_low=rng.choice((0.0, 0.5)),
        cleaner_high=0.8,
    )


def a_day(seed: int, acts: int) -> InFlight:
    """An ordinary day, in which what happens often happens often."""
    rng = random.Random(seed)
    machine = InFlight()
    machine.begin(config=_config(rng))
    for act in rng.choices(list(_ACTS), _ACTS.values(), k=acts):
        act(machine, rng)
    machine.teardown()
    return machine


@pytest.mark.parametrize("seed", range(40))
def test_days_end_with_balanced_books(seed: int) -> None:
    a_day(seed, acts=800)


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("first", range(1_000, 6_000, 500))
def test_many_days_end_with_balanced_books(first: int) -> None:
    for seed in range(first, first + 500):
        try:
            a_day(seed, acts=1_000)
        except BaseException as error:
            error.add_note(f"a_day({seed}, acts=1_000)")
            raise


def _settings(examples: int, steps: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def test_whatever_copies_do_the_books_balance_and_everything_ends() -> None:
    run_state_machine_as_test(InFlight, settings=_settings(50, 50))


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_whatever_copies_do_the_books_balance_and_everything_ends_at_length() -> None:
    run_state_machine_as_test(InFlight, settings=_settings(2_000, 120))
