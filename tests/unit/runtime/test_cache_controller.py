"""The controller's promises to the core: one ack per copy, at the right moment, with the books."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from kvtiers.core.interface import PrefixCache
from kvtiers.errors import ConfigError, ProtocolError, UnknownOperation
from kvtiers.events import (
    Cancel,
    Copy,
    Fact,
    FactTuple,
    HiCacheAck,
    Lookup,
    PoolSlots,
    WorkOrder,
    describe,
)
from kvtiers.runtime.controller import CacheController
from kvtiers.runtime.flights import Deadlines, InFlightBounds
from kvtiers.runtime.storage_port import StorageResult
from kvtiers.testing.faulty_transfer import FaultyTransfer, GatedTransfer
from kvtiers.transfer.cpu import CpuTransfer
from kvtiers.transfer.pools import DevicePool, HostPool
from kvtiers.transfer.port import Completion
from kvtiers.types import (
    CacheConfig,
    FailReason,
    Namespace,
    PoolSpec,
    Purpose,
    SlotUnit,
    StorageOp,
)

KV = PoolSpec("kv", 64)
DRAFT = PoolSpec("draft", 16, follows="kv")
MAMBA = PoolSpec("mamba", 100, unit=SlotUnit.STATE)
SPACE = Namespace("model-a")


class FakeCache:
    """Hands out the orders a test gives it and remembers what it is told."""

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.orders: list[WorkOrder] = []
        self.facts: list[FactTuple] = []
        self.acks: list[HiCacheAck] = []
        self.answers: list[tuple[int, int]] = []
        self.storage_events: list[str] = []
        self.on_ack: Callable[[HiCacheAck], None] = lambda ack: None

    def take_orders(self) -> list[WorkOrder]:
        orders, self.orders = self.orders, []
        return orders

    def take_facts(self) -> list[FactTuple]:
        facts, self.facts = self.facts, []
        return facts

    def ack(self, ack: HiCacheAck, now: float) -> None:
        self.acks.append(ack)
        self.on_ack(ack)

    def found(self, ticket_id: int, pages: int, now: float) -> None:
        self.answers.append((ticket_id, pages))

    def attach_storage(self, now: float) -> None:
        self.storage_events.append("attach")

    def detach_storage(self, now: float) -> None:
        self.storage_events.append("detach")


class FakeTransfer:
    """Remembers what was submitted; a test says when and how it ends."""

    layers = 2

    def __init__(self) -> None:
        self.submitted: list[list[int]] = []
        self.completions: list[Completion] = []
        self.notify: Callable[[], None] = lambda: None

    def submit(self, copies: list[Copy]) -> None:
        self.submitted.append([copy.op_id for copy in copies])

    def poll(self) -> list[Completion]:
        completions, self.completions = self.completions, []
        return completions

    def end(self, *completions: Completion) -> None:
        self.completions += completions
        self.notify()

    def on_completion(self, callback: Callable[[], None]) -> None:
        self.notify = callback

    def wait_layer(self, op_ids: list[int], layer: int, timeout_seconds: float) -> bool:
        return True

    def probe(self) -> dict[str, float]:
        return {"device_to_host": 5e9, "host_to_device": 6e9}

    def close(self, timeout_seconds: float) -> bool:
        return True


class FakeStorage:
    """Like `FakeTransfer`, for the storage side."""

    def __init__(self) -> None:
        self.orders: list[tuple[StorageOp, int]] = []
        self.abandoned: list[tuple[StorageOp, int, FailReason]] = []
        self.end_when_abandoned = True
        self.results: list[StorageResult] = []
        self.facts: list[FactTuple] = []
        self.notify: Callable[[], None] = lambda: None

    def lookup(self, order: Lookup) -> None:
        self.orders.append((StorageOp.EXISTS, order.ticket_id))

    def prefetch(self, order: Copy) -> None:
        self.orders.append((StorageOp.READ, order.op_id))

    def store(self, order: Copy) -> None:
        self.orders.append((StorageOp.WRITE, order.op_id))

    def abandon(self, op: StorageOp, order_id: int, reason: FailReason) -> None:
        self.abandoned.append((op, order_id, reason))
        if self.end_when_abandoned:
            self.results.append(StorageResult(op, order_id, 0, reason, None, None))

    def poll(self) -> list[StorageResult]:
        results, self.results = self.results, []
        return results

    def take_facts(self) -> list[FactTuple]:
        facts, self.facts = self.facts, []
        return facts

    def on_result(self, callback: Callable[[], None]) -> None:
        self.notify = callback

    def close(self, timeout_seconds: float) -> bool:
        return True


class Rig:
    """A controller over fakes, on a clock that the test turns."""

    def __init__(self, pools: tuple[PoolSpec, ...] = (KV,), **controller: Any) -> None:
        self.now = 100.0
        self.cache = FakeCache(
            CacheConfig(device_pages=4096, host_pages=4096, page_tokens=10, pools=pools)
        )
        self.transfer = FakeTransfer()
        self.storage = FakeStorage()
        self.facts: list[FactTuple] = []
        self.controller = CacheController(
            cast(PrefixCache, self.cache),
            self.facts.extend,
            cast(Any, self.transfer),
            self.storage,
            clock=lambda: self.now,
            **controller,
        )

    def pump(self, *orders: WorkOrder, at: float | None = None) -> bool:
        if at is not None:
            self.now = at
        self.cache.orders += orders
        return self.controller.pump()

    def timed(self) -> list[FactTuple]:
        return [fact[1:] for fact in self.facts if fact[0] is Fact.COPY_TIMED]


def copy_of(op_id: int, purpose: Purpose, pages: int, extra: tuple[PoolSlots, ...] = ()) -> Copy:
    slots = np.arange(pages, dtype=np.int32)
    return Copy(
        op_id,
        purpose,
        0,
        pages,
        slots if purpose.source.value != "storage" else None,
        slots if purpose.target.value != "storage" else None,
        SPACE,
        extra=extra,
    )


def states(pool: str, *pages: int) -> PoolSlots:
    slots = np.arange(len(pages), dtype=np.int32)
    return PoolSlots(pool, slots, slots, np.array(pages, np.int32))


# ---------------------------------------------------------------------- acknowledgements


def test_an_ack_counts_tokens_by_pool_and_bytes_over_all_pools() -> None:
    rig = Rig((KV, DRAFT, MAMBA))
    rig.pump(copy_of(1, Purpose.BACKUP, 10, (states("mamba", 0, 1, 2, 3, 5, 7, 8, 9),)))
    rig.transfer.end(Completion(1, 10, None, 100.5, 101.0))
    rig.pump(at=102.0)
    (ack,) = rig.cache.acks
    assert ack.num_tokens_by_pool == {"kv": 100, "mamba": 8}
    assert ack.num_bytes == 10 * 64 + 10 * 16 + 8 * 100
    assert (ack.pages_ok, ack.failure, ack.ended) == (10, None, True)
    assert (ack.queued, ack.started, ack.finished, ack.acked) == (100.0, 100.5, 101.0, 102.0)
    assert ack.timing_enabled


def test_an_ack_of_a_partial_copy_counts_what_arrived() -> None:
    rig = Rig((KV, DRAFT, MAMBA))
    rig.pump(copy_of(1, Purpose.LOAD_BACK, 10, (states("mamba", 3, 9),)))
    rig.transfer.end(Completion(1, 4, FailReason.TRANSFER, 100.5, 101.0))
    rig.pump(at=102.0)
    (ack,) = rig.cache.acks
    assert (ack.pages_ok, ack.failure) == (4, FailReason.TRANSFER)
    assert ack.num_tokens_by_pool == {"kv": 40, "mamba": 1}
    assert ack.num_bytes == 4 * 64 + 4 * 16 + 100


def test_without_timing_tokens_and_bytes_count_and_the_duration_has_no_sample() -> None:
    rig = Rig()
    rig.pump(copy_of(1, Purpose.LOAD_BACK, 100))
    rig.transfer.end(Completion(1, 100, None, None, None))
    rig.pump(at=103.0)
    (ack,) = rig.cache.acks
    assert not ack.timing_enabled
    assert ack.num_tokens_by_pool == {"kv": 1000}
    assert rig.timed() == [(Purpose.LOAD_BACK, 100, 0.0, None, None)]


def test_the_first_load_of_a_backup_is_told_and_a_late_one_is_not() -> None:
    rig = Rig(deadlines=Deadlines(load_back=5.0))
    rig.pump(copy_of(1, Purpose.BACKUP, 10))
    rig.transfer.end(Completion(1, 10, None, 100.5, 101.0))
    rig.pump(copy_of(2, Purpose.LOAD_BACK, 8), at=102.0)
    rig.pump(at=108.0)  # its wait is over: nothing of it was of use
    rig.transfer.end(Completion(2, 8, None, 102.0, 108.5))
    rig.pump(copy_of(3, Purpose.LOAD_BACK, 4), at=109.0)
    rig.transfer.end(Completion(3, 4, None, 109.0, 109.5))
    rig.pump(at=110.0)
    reused = [describe(fact) for fact in rig.facts if fact[0] is Fact.BACKUP_REUSED]
    assert reused == [{"fact": "backup_reused", "pages": 4}]


def test_small_copies_of_one_purpose_become_one_operation_with_one_timing_fact() -> None:
    rig = Rig()
    rig.pump(
        copy_of(1, Purpose.BACKUP, 3),
        copy_of(2, Purpose.LOAD_BACK, 1),
        copy_of(3, Purpose.BACKUP, 4),
    )
    assert sorted(rig.transfer.submitted) == [[1, 3], [2]]
    rig.transfer.end(Completion(1, 3, None, 100.25, 101.0), Completion(3, 4, None, 100.25, 101.0))
    rig.pump(at=101.5)
    assert [ack.op_id for ack in rig.cache.acks] == [1, 3]
    assert rig.timed() == [(Purpose.BACKUP, 7, 0.25, 0.75, 0.5)]


def test_a_merged_operation_is_timed_when_its_last_copy_has_ended() -> None:
    rig = Rig()
    rig.pump(copy_of(1, Purpose.BACKUP, 3), copy_of(2, Purpose.BACKUP, 4))
    rig.transfer.end(Completion(1, 3, None, 100.25, 101.0))
    rig.pump(at=101.5)
    assert rig.timed() == []
    rig.transfer.end(Completion(2, 0, FailReason.TRANSFER, 100.25, 101.0))
    rig.pump(at=101.5)
    assert rig.timed() == [(Purpose.BACKUP, 3, 0.25, 0.75, 0.5)]


def test_a_copy_of_which_nothing_arrived_has_no_duration() -> None:
    rig = Rig()
    rig.pump(copy_of(1, Purpose.BACKUP, 3))
    rig.transfer.end(Completion(1, 0, FailReason.TRANSFER, None, None))
    rig.pump()
    assert rig.cache.acks[0].failure is FailReason.TRANSFER
    assert rig.timed() == []


def test_merging_and_what_is_in_flight_are_bounded() -> None:
    rig = Rig(bounds=InFlightBounds(backup_pages=10, merge_pages=6))
    rig.pump(*(copy_of(i, Purpose.BACKUP, 3) for i in range(5)), copy_of(9, Purpose.LOAD_BACK, 50))
    assert sorted(rig.transfer.submitted) == [[0, 1], [2], [9]]
    assert rig.controller.oldest_pending()[Purpose.BACKUP].copies == 5
    rig.transfer.end(Completion(0, 3, None, None, None), Completion(1, 3, None, None, None))
    rig.pump()
    assert rig.transfer.submitted[-1] == [3, 4]


def test_a_copy_larger_than_the_bound_goes_alone() -> None:
    rig = Rig(bounds=InFlightBounds(backup_pages=10))
    rig.pump(copy_of(1, Purpose.BACKUP, 30), copy_of(2, Purpose.BACKUP, 1))
    assert rig.transfer.submitted == [[1]]
    rig.transfer.end(Completion(1, 30, None, None, None))
    rig.pump()
    assert rig.transfer.submitted == [[1], [2]]


def test_what_an_ack_gives_rise_to_is_carried_out_in_the_same_step() -> None:
    rig = Rig()
    rig.cache.on_ack = lambda ack: (
        rig.cache.orders.append(copy_of(2, Purpose.STORE, 3)) if ack.op_id == 1 else None
    )
    rig.pump(copy_of(1, Purpose.BACKUP, 3))
    rig.transfer.end(Completion(1, 3, None, None, None))
    rig.pump()
    assert rig.storage.orders == [(StorageOp.WRITE, 2)]


def test_facts_of_the_cache_and_of_the_shells_reach_the_sink_in_one_call() -> None:
    calls: list[list[FactTuple]] = []
    rig = Rig()
    rig.controller._sink = calls.append
    assert not rig.pump()
    assert calls == [], "nothing to tell, nobody called"
    rig.cache.facts.append((Fact.ISSUED, 1, Purpose.BACKUP, 3))
    rig.storage.facts.append((Fact.STORAGE_OP, "memory", StorageOp.EXISTS, 0.1, 3, 0, None))
    rig.pump()
    assert [[describe(fact)["fact"] for fact in facts] for facts in calls] == [
        ["issued", "storage_op"]
    ]


def test_an_end_that_nobody_waits_for_is_a_bug_and_says_so() -> None:
    rig = Rig()
    rig.transfer.end(Completion(77, 1, None, None, None))
    with pytest.raises(UnknownOperation, match="copy 77"):
        rig.pump()


# ---------------------------------------------------------------------- deadlines


DEADLINES = Deadlines(backup=2, load_back=3, prefetch=4, store=5, lookup=1)


@pytest.mark.parametrize("purpose", [Purpose.BACKUP, Purpose.LOAD_BACK])
def test_a_copy_past_its_deadline_is_late_first_and_settled_when_it_ends(purpose: Purpose) -> None:
    rig = Rig(deadlines=DEADLINES)
    rig.pump(copy_of(1, purpose, 3))
    rig.pump(at=101.9)
    assert rig.cache.acks == []
    rig.pump(at=103.0)
    rig.pump(at=104.0)
    (late,) = rig.cache.acks
    assert (late.pages_ok, late.failure, late.ended) == (0, FailReason.DEADLINE, False)
    assert late.num_tokens_by_pool == {"kv": 0}
    assert rig.controller.oldest_pending()[purpose] == (1, 4.0), "it is still under way"
    rig.transfer.end(Completion(1, 3, None, 100.0, 104.5))
    rig.pump(at=105.0)
    settled = rig.cache.acks[-1]
    assert (settled.pages_ok, settled.ended, settled.num_bytes) == (0, True, 0)
    assert rig.timed() == [], "nothing that counts was copied"
    assert rig.controller.idle


def test_a_late_load_is_never_waited_for() -> None:
    rig = Rig(deadlines=DEADLINES)
    rig.pump(copy_of(1, Purpose.LOAD_BACK, 3))
    assert rig.controller.wait_layer([1], 0, timeout_seconds=0)
    rig.pump(at=103.0)
    assert not rig.controller.wait_layer([1], 0, timeout_seconds=0)


def test_waiting_for_an_order_that_was_not_carried_out_is_refused() -> None:
    rig = Rig()
    rig.cache.orders.append(copy_of(1, Purpose.LOAD_BACK, 3))
    with pytest.raises(ProtocolError, match=r"call pump\(\) between admit and the batch"):
        rig.controller.wait_layer([1], 0, timeout_seconds=0)
    rig.pump()
    assert rig.controller.wait_layer([1], 0, timeout_seconds=0)
    assert rig.controller.wait_layer([], 0, timeout_seconds=0)


def test_a_copy_that_was_never_begun_fails_at_its_deadline_for_good() -> None:
    rig = Rig(deadlines=DEADLINES, bounds=InFlightBounds(backup_pages=3))
    rig.pump(copy_of(1, Purpose.BACKUP, 3), copy_of(2, Purpose.BACKUP, 3))
    rig.pump(at=102.0)
    assert [(a.op_id, a.ended) for a in rig.cache.acks] == [(2, True), (1, False)]
    rig.transfer.end(Completion(1, 3, None, None, None))
    rig.pump()
    assert rig.transfer.submitted == [[1]]


def test_a_prefetch_past_its_deadline_fails_at_once_because_it_reads_into_staging() -> None:
    rig = Rig(deadlines=DEADLINES)
    rig.pump(copy_of(1, Purpose.PREFETCH, 3))
    rig.pump(at=104.0)
    assert rig.storage.abandoned == [(StorageOp.READ, 1, FailReason.DEADLINE)]
    (ack,) = rig.cache.acks
    assert (ack.pages_ok, ack.failure, ack.ended) == (0, FailReason.DEADLINE, True)


def test_a_store_past_its_deadline_is_late_until_the_store_reads_no_more() -> None:
    rig = Rig(deadlines=DEADLINES)
    rig.storage.end_when_abandoned = False
    rig.pump(copy_of(1, Purpose.STORE, 3))
    rig.pump(at=105.0)
    assert rig.storage.abandoned == [(StorageOp.WRITE, 1, FailReason.DEADLINE)]
    assert [(a.op_id, a.ended) for a in rig.cache.acks] == [(1, False)]
    rig.storage.results.append(StorageResult(StorageOp.WRITE, 1, 2, None, 100.0, 106.0))
    rig.pump(at=106.0)
    assert [(a.op_id, a.ended, a.pages_ok) for a in rig.cache.acks] == [
        (1, False, 0),
        (1, True, 0),
    ]


def test_a_store_that_was_not_begun_has_no_late_phase() -> None:
    rig = Rig(deadlines=DEADLINES)
    rig.pump(copy_of(1, Purpose.STORE, 3))
    rig.pump(at=105.0)
    assert [(a.op_id, a.ended, a.failure) for a in rig.cache.acks] == [
        (1, True, FailReason.DEADLINE)
    ]


def test_a_lookup_past_its_deadline_is_answered_with_nothing_once() -> None:
    rig = Rig(deadlines=DEADLINES)
    rig.storage.end_when_abandoned = False
    rig.pump(Lookup(8, SPACE, b"", 0, 40))
    rig.pump(at=101.0)
    rig.pump(at=102.0)
    assert rig.storage.abandoned == [(StorageOp.EXISTS, 8, FailReason.DEADLINE)]
    assert not rig.controller.idle
    rig.storage.results.append(
        StorageResult(StorageOp.EXISTS, 8, 12, FailReason.DEADLINE, None, None)
    )
    rig.pump()
    rig.pump(at=200.0)
    assert rig.cache.answers == [(8, 0)]
    assert rig.controller.idle


def test_a_lookup_is_answered_with_what_was_found() -> None:
    rig = Rig()
    rig.pump(Lookup(8, SPACE, b"", 0, 40))
    rig.storage.results.append(StorageResult(StorageOp.EXISTS, 8, 12, None, 100.0, 100.1))
    rig.pump()
    assert rig.cache.answers == [(8, 12)]


def test_the_next_deadline_is_the_nearest_of_copies_and_lookups() -> None:
    rig = Rig(deadlines=DEADLINES)
    assert rig.controller.next_deadline() is None
    rig.pump(copy_of(1, Purpose.STORE, 3))
    assert rig.controller.next_deadline() == 105.0
    rig.pump(copy_of(2, Purpose.BACKUP, 3), at=101.0)
    assert rig.controller.next_deadline() == 103.0
    rig.pump(Lookup(8, SPACE, b"", 0, 40))
    assert rig.controller.next_deadline() == 102.0


# ---------------------------------------------------------------------- cancelling


def test_a_cancelled_copy_that_was_not_begun_never_begins() -> None:
    rig = Rig(bounds=InFlightBounds(backup_pages=3))
    rig.pump(copy_of(1, Purpose.BACKUP, 3), copy_of(2, Purpose.BACKUP, 3))
    rig.pump(Cancel(2))
    assert [(a.op_id, a.failure, a.ended) for a in rig.cache.acks] == [
        (2, FailReason.CANCELLED, True)
    ]
    rig.transfer.end(Completion(1, 3, None, None, None))
    rig.pump()
    assert rig.transfer.submitted == [[1]]


def test_a_cancelled_copy_between_device_and_host_ends_by_itself() -> None:
    rig = Rig()
    rig.pump(copy_of(1, Purpose.LOAD_BACK, 3))
    rig.pump(Cancel(1))
    assert rig.cache.acks == []
    rig.transfer.end(Completion(1, 3, None, None, None))
    rig.pump(Cancel(1))
    rig.pump(Cancel(1))
    assert [(a.op_id, a.pages_ok) for a in rig.cache.acks] == [(1, 3)]


def test_a_cancelled_prefetch_is_abandoned() -> None:
    rig = Rig()
    rig.pump(copy_of(1, Purpose.PREFETCH, 3))
    rig.pump(Cancel(1))
    assert rig.storage.abandoned[0] == (StorageOp.READ, 1, FailReason.CANCELLED)
    assert [(a.op_id, a.failure, a.ended) for a in rig.cache.acks] == [
        (1, FailReason.CANCELLED, True)
    ]


# ---------------------------------------------------------------------- storage, shutdown, gauges


def test_storage_comes_and_goes() -> None:
    rig = Rig()
    assert rig.controller.detach()
    assert not rig.controller.storage_attached
    rig.pump(
        Lookup(8, SPACE, b"", 0, 40),
        copy_of(1, Purpose.STORE, 3),
        copy_of(2, Purpose.PREFETCH, 3),
    )
    assert rig.cache.answers == [(8, 0)]
    assert sorted((a.op_id, a.failure) for a in rig.cache.acks) == [
        (1, FailReason.SHUTDOWN),
        (2, FailReason.SHUTDOWN),
    ]
    assert rig.controller.detach()
    rig.controller.attach(rig.storage)
    assert rig.cache.storage_events == ["detach", "attach"]
    with pytest.raises(ProtocolError, match="detach it first"):
        rig.controller.attach(rig.storage)


def test_drain_waits_for_stores_that_backups_give_rise_to() -> None:
    rig = Rig()
    rig.cache.on_ack = lambda ack: (
        rig.cache.orders.append(copy_of(2, Purpose.STORE, 3)) if ack.op_id == 1 else None
    )
    rig.cache.orders.append(copy_of(1, Purpose.BACKUP, 3))
    assert not rig.controller.drain(0.0)
    rig.transfer.end(Completion(1, 3, None, None, None))
    assert not rig.controller.drain(0.0)
    rig.storage.results.append(StorageResult(StorageOp.WRITE, 2, 3, None, 100.0, 100.1))
    assert rig.controller.drain(5)
    assert [a.op_id for a in rig.cache.acks] == [1, 2]


def test_after_close_every_further_order_fails_at_once() -> None:
    rig = Rig()
    assert rig.controller.close()
    rig.pump(
        copy_of(1, Purpose.BACKUP, 3), copy_of(2, Purpose.STORE, 3), Lookup(8, SPACE, b"", 0, 4)
    )
    assert sorted((a.op_id, a.failure) for a in rig.cache.acks) == [
        (1, FailReason.SHUTDOWN),
        (2, FailReason.SHUTDOWN),
    ]
    assert rig.cache.answers == [(8, 0)]
    assert rig.transfer.submitted == []


def test_waiting_ends_with_news_or_a_deadline() -> None:
    rig = Rig(deadlines=DEADLINES)
    rig.pump(copy_of(1, Purpose.BACKUP, 3))
    rig.transfer.end(Completion(1, 3, None, None, None))
    begun = time.monotonic()
    rig.controller.wait(60)
    rig.pump()
    rig.pump(copy_of(2, Purpose.BACKUP, 3))
    rig.now = 200.0
    rig.controller.wait(60)
    assert time.monotonic() - begun < 30


def test_the_oldest_pending_copies_and_the_ceilings_are_there_for_gauges() -> None:
    rig = Rig()
    rig.pump(copy_of(1, Purpose.BACKUP, 3))
    rig.pump(copy_of(2, Purpose.BACKUP, 3), at=101.0)
    rig.now = 103.0
    pending = rig.controller.oldest_pending()
    assert pending[Purpose.BACKUP] == (2, 3.0)
    assert pending[Purpose.LOAD_BACK] == (0, 0.0)
    assert set(pending) == set(Purpose)
    assert rig.controller.link_ceilings == {"device_to_host": 5e9, "host_to_device": 6e9}


def test_a_host_tier_needs_a_transfer() -> None:
    cache = FakeCache(CacheConfig(device_pages=4, host_pages=4))
    with pytest.raises(ConfigError, match="no transfer was given"):
        CacheController(cast(PrefixCache, cache), lambda facts: None, None)
    alone = FakeCache(CacheConfig(device_pages=4))
    controller = CacheController(cast(PrefixCache, alone), lambda facts: None, None)
    assert not controller.pump()
    assert controller.close()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Deadlines(backup=0), "'backup': 0"),
        (lambda: InFlightBounds(merge_pages=0), "'merge_pages': 0"),
    ],
)
def test_impossible_settings_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


# ---------------------------------------------------------------------- over a real transfer


def real_rig(wrap: Callable[[CpuTransfer], Any]) -> tuple[Rig, Any]:
    rig = Rig(deadlines=DEADLINES)
    device = DevicePool(KV, [np.zeros((64, 32), np.uint8) for _ in range(2)], [0, 1])
    transfer = wrap(CpuTransfer([device], [HostPool.like(device, 64)], clock=lambda: rig.now))
    rig.controller = CacheController(
        cast(PrefixCache, rig.cache),
        rig.facts.extend,
        transfer,
        rig.storage,
        deadlines=DEADLINES,
        clock=lambda: rig.now,
    )
    return rig, transfer


def test_a_copy_that_really_runs_late_is_settled_after_it_has_written() -> None:
    rig, transfer = real_rig(GatedTransfer)
    transfer.shut()
    rig.pump(copy_of(1, Purpose.LOAD_BACK, 3))
    assert not transfer.wait_layer([1], 0, timeout_seconds=0)
    rig.pump(at=103.0)
    assert [(a.op_id, a.ended) for a in rig.cache.acks] == [(1, False)]
    assert not rig.controller.drain(0.01)
    transfer.release()
    assert rig.controller.drain(10)
    assert [(a.op_id, a.ended) for a in rig.cache.acks] == [(1, False), (1, True)]
    assert rig.controller.close()


def test_every_copy_is_acknowledged_once_whatever_fails_and_in_whatever_order() -> None:
    rig, _ = real_rig(lambda inner: FaultyTransfer(inner, 5, fail_rate=0.3, delay_polls_max=4))
    for op_id in range(0, 60, 2):
        rig.pump(copy_of(op_id, Purpose.BACKUP, 7), copy_of(op_id + 1, Purpose.LOAD_BACK, 5))
    assert rig.controller.drain(10)
    assert sorted(ack.op_id for ack in rig.cache.acks) == list(range(60))
    failed = [ack for ack in rig.cache.acks if ack.failure]
    assert 5 < len(failed) < 40
    assert any(ack.pages_ok for ack in failed), "some failed half-way"
    assert rig.controller.close()


def test_a_copy_that_ends_while_it_is_polled_is_not_acknowledged_before_its_end() -> None:
    """Else `transfer_stage_seconds` would shrink, which no counter may."""
    rig = Rig()
    rig.pump(copy_of(1, Purpose.BACKUP, 2), at=100.0)

    def poll() -> list[Completion]:
        rig.now = 103.0  # the copy's own thread was a little faster than this one
        return [Completion(1, 2, None, 101.0, 103.0)]

    rig.transfer.poll = poll  # type: ignore[method-assign]
    rig.pump(at=102.0)
    [ack] = rig.cache.acks
    assert ack.acked >= 103.0
    assert rig.timed() == [(Purpose.BACKUP, 2, 1.0, 2.0, 0.0)]
