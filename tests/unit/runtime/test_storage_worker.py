"""The framework around a store: what is promised about slots, deadlines, counting and hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvtiers.errors import ConfigError, ProtocolError
from kvtiers.events import Copy, Fact, FactTuple, Lookup, PoolSlots
from kvtiers.runtime import staging
from kvtiers.runtime.storage_port import StorageResult
from kvtiers.runtime.storage_worker import GRACE_SECONDS, StorageWorker
from kvtiers.storage.memory import MemoryStore
from kvtiers.storage.port import PageRef, PageStore
from kvtiers.testing.faulty_store import FaultyStore
from kvtiers.transfer.pools import HostPool
from kvtiers.types import FailReason, Namespace, PoolSpec, Purpose, StorageOp, token_key

PAGE_TOKENS = 4
KV = PoolSpec("kv", 96)
DRAFT = PoolSpec("draft", 40, follows="kv")
SPACE = Namespace("model-a")
PATH = token_key(np.arange(40 * PAGE_TOKENS))


@dataclass
class Rig:
    worker: StorageWorker
    stores: dict[str, FaultyStore]
    host: dict[str, HostPool]
    facts: list[FactTuple] = field(default_factory=list)

    def results(self, count: int, seconds: float = 10) -> list[StorageResult]:
        got: list[StorageResult] = []
        end = time.monotonic() + seconds
        while len(got) < count and time.monotonic() < end:
            got += self.worker.poll()
            time.sleep(0.0005)
        self.facts += self.worker.take_facts()
        assert len(got) == count
        return got

    def stored(self, pages: int, first_slot: int = 0) -> dict[str, bytes]:
        """Fill host slots with random bytes and store them as the first pages of the path."""
        rng = np.random.default_rng(pages)
        image = {}
        for name, pool in self.host.items():
            rows = rng.integers(0, 256, (pages, pool.spec.bytes_per_slot), np.uint8)
            pool.memory[first_slot : first_slot + pages] = rows
            image[name] = rows.tobytes()
        self.worker.store(store_of(1, 0, slots(first_slot, pages)))
        (result,) = self.results(1)
        assert (result.pages, result.failure) == (pages, None)
        return image

    def host_bytes(self, name: str, first_slot: int, pages: int) -> bytes:
        return self.host[name].memory[first_slot : first_slot + pages].tobytes()


def slots(first: int, count: int) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int32)


def store_of(op_id: int, first_page: int, source: np.ndarray) -> Copy:
    return _copy(op_id, Purpose.STORE, first_page, source, None)


def prefetch_of(op_id: int, first_page: int, target: np.ndarray) -> Copy:
    return _copy(op_id, Purpose.PREFETCH, first_page, None, target)


def _copy(
    op_id: int,
    purpose: Purpose,
    first_page: int,
    source: np.ndarray | None,
    target: np.ndarray | None,
) -> Copy:
    pages = len(source if target is None else target)  # type: ignore[arg-type]
    path = PATH[: (first_page + pages) * PAGE_TOKENS * 4]
    return Copy(op_id, purpose, first_page, pages, source, target, SPACE, path)


def build(
    specs: tuple[PoolSpec, ...] = (KV,), *, read_threads: int = 2, batch_pages: int = 4
) -> Rig:
    host = {spec.name: HostPool(spec, 64, (spec.bytes_per_slot,)) for spec in specs}
    stores = {spec.name: FaultyStore(MemoryStore(spec.bytes_per_slot)) for spec in specs}
    worker = StorageWorker(
        stores,
        list(host.values()),
        page_tokens=PAGE_TOKENS,
        layout="test",
        read_threads=read_threads,
        read_bytes=batch_pages * 4096 * len(specs),  # each page of staging starts aligned
        write_bytes=batch_pages * 4096 * len(specs),
    )
    return Rig(worker, stores, host)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = build()
    yield made
    for store in made.stores.values():
        store.release()
    assert made.worker.close(10)


@pytest.fixture
def rig_with_follower() -> Iterator[Rig]:
    made = build((KV, DRAFT))
    yield made
    assert made.worker.close(10)


def test_pages_come_back_from_storage_into_other_slots(rig_with_follower: Rig) -> None:
    rig = rig_with_follower
    image = rig.stored(10)
    rig.worker.lookup(Lookup(5, SPACE, PATH, 0, 40))
    (found,) = rig.results(1)
    assert (found.op, found.order_id, found.pages, found.failure) == (
        StorageOp.EXISTS,
        5,
        10,
        None,
    )
    rig.worker.prefetch(prefetch_of(6, 0, slots(30, 10)))
    (read,) = rig.results(1)
    assert (read.op, read.order_id, read.pages, read.failure) == (StorageOp.READ, 6, 10, None)
    assert read.started is not None
    assert read.finished is not None
    assert read.started <= read.finished
    for name, expected in image.items():
        assert rig.host_bytes(name, 30, 10) == expected


def test_a_lookup_starts_where_it_is_told_and_ends_at_the_first_gap(rig: Rig) -> None:
    rig.stored(10)
    rig.worker.lookup(Lookup(5, SPACE, PATH, 7, 33))
    rig.worker.lookup(Lookup(6, SPACE, PATH, 10, 30))
    rig.worker.lookup(Lookup(7, Namespace("model-b"), PATH, 0, 40))
    assert [(r.order_id, r.pages) for r in rig.results(3)] == [(5, 3), (6, 0), (7, 0)]


def test_a_page_is_there_only_if_all_its_pools_are(rig_with_follower: Rig) -> None:
    rig = rig_with_follower
    rig.stored(10)
    names = rig.worker._names.refs("draft", SPACE, PATH, 6, 4)
    assert rig.stores["draft"].inner.delete(names) == 4
    rig.worker.lookup(Lookup(5, SPACE, PATH, 0, 40))
    assert rig.results(1)[0].pages == 6
    rig.worker.prefetch(prefetch_of(6, 0, slots(30, 10)))
    (read,) = rig.results(1)
    assert (read.pages, read.failure) == (6, FailReason.MISSING)


def test_every_call_to_the_store_is_one_fact(rig: Rig) -> None:
    rig.stored(10)  # batches of 4, 4 and 2
    rig.worker.lookup(Lookup(5, SPACE, PATH, 0, 40))
    rig.results(1)
    rig.worker.prefetch(prefetch_of(6, 8, slots(30, 4)))  # pages 8 and 9 are there
    rig.results(1)
    rig.facts += rig.worker.take_facts()
    told = [(f[1], f[2], f[4], f[5], f[6]) for f in rig.facts]
    assert told == [
        ("memory", StorageOp.WRITE, 4, 384, None),
        ("memory", StorageOp.WRITE, 4, 384, None),
        ("memory", StorageOp.WRITE, 2, 192, None),
        ("memory", StorageOp.EXISTS, 10, 0, None),
        ("memory", StorageOp.READ, 2, 192, FailReason.MISSING),
    ]
    assert all(fact[0] is Fact.STORAGE_OP and fact[3] >= 0 for fact in rig.facts)


def test_a_store_that_raises_has_failed_and_the_worker_lives_on(rig: Rig) -> None:
    image = rig.stored(4)
    rig.stores["kv"]._error_rate = 1.0
    rig.worker.prefetch(prefetch_of(6, 0, slots(30, 4)))
    rig.worker.lookup(Lookup(7, SPACE, PATH, 0, 40))
    rig.worker.store(store_of(8, 4, slots(0, 2)))
    outcomes = {r.order_id: (r.pages, r.failure) for r in rig.results(3)}
    assert outcomes == dict.fromkeys((6, 7, 8), (0, FailReason.STORAGE))
    kinds = [f[6] for f in rig.facts[-3:]]
    assert kinds == [FailReason.STORAGE] * 3
    rig.stores["kv"]._error_rate = 0.0
    rig.worker.prefetch(prefetch_of(9, 0, slots(30, 4)))
    assert rig.results(1)[0].failure is None
    assert rig.host_bytes("kv", 30, 4) == image["kv"]


def test_nothing_of_a_corrupt_page_reaches_its_host_slot(rig: Rig) -> None:
    image = rig.stored(4)
    rig.host["kv"].memory[30:34] = 0x55
    rig.stores["kv"]._corruption_rate = 1.0
    rig.worker.prefetch(prefetch_of(6, 0, slots(30, 4)))
    (read,) = rig.results(1)
    assert (read.pages, read.failure) == (0, FailReason.INTEGRITY)
    assert set(rig.host_bytes("kv", 30, 4)) == {0x55}
    assert rig.host_bytes("kv", 0, 4) == image["kv"]


def test_a_read_that_hangs_is_given_up_at_once_and_harms_nobody(rig: Rig) -> None:
    rig.stored(4)
    rig.host["kv"].memory[30:34] = 0x55
    rig.stores["kv"].hang(StorageOp.READ)
    rig.worker.prefetch(prefetch_of(6, 0, slots(30, 4)))
    assert rig.stores["kv"].wait_for_hanging(1)
    rig.worker.abandon(StorageOp.READ, 6, FailReason.DEADLINE)
    (read,) = rig.worker.poll()
    assert (read.pages, read.failure) == (0, FailReason.DEADLINE)
    (fact,) = rig.worker.take_facts()[-1:]
    assert (fact[2], fact[4], fact[6]) == (StorageOp.READ, 0, FailReason.DEADLINE)
    assert rig.worker.stuck_threads == 1

    rig.stores["kv"].release()  # it returns after all, having scribbled on its buffers
    wait_until(lambda: rig.worker.stuck_threads == 0)
    assert set(rig.host_bytes("kv", 30, 4)) == {0x55}
    assert rig.worker.poll() == []
    assert rig.worker.take_facts() == [], "the call was counted when it was given up"


def test_when_all_threads_hang_further_orders_fail_at_once_until_one_returns(rig: Rig) -> None:
    image = rig.stored(4)
    rig.stores["kv"].hang(StorageOp.READ)
    for op_id in (6, 7):
        rig.worker.prefetch(prefetch_of(op_id, 0, slots(30, 4)))
    assert rig.stores["kv"].wait_for_hanging(2)
    rig.worker.prefetch(prefetch_of(8, 0, slots(40, 4)))  # waits for a thread
    for op_id in (6, 7):
        rig.worker.abandon(StorageOp.READ, op_id, FailReason.DEADLINE)
    rig.worker.prefetch(prefetch_of(9, 0, slots(44, 4)))
    results = {r.order_id: r.failure for r in rig.worker.poll()}
    assert results == dict.fromkeys((6, 7, 8, 9), FailReason.DEADLINE)

    rig.worker.lookup(Lookup(5, SPACE, PATH, 0, 40))
    assert rig.results(1)[0].pages == 4, "other lanes are not concerned"

    rig.stores["kv"].release()
    wait_until(lambda: rig.worker.stuck_threads == 0)
    rig.worker.prefetch(prefetch_of(10, 0, slots(40, 4)))
    assert rig.results(1)[0].failure is None
    assert rig.host_bytes("kv", 40, 4) == image["kv"]


def test_a_prefetch_given_up_between_batches_keeps_what_has_arrived() -> None:
    rig = build(batch_pages=2)
    image = rig.stored(6)
    inner = rig.stores["kv"].inner
    calls = 0

    class HangsInItsSecondRead:
        name = "memory"

        def __getattr__(self, attribute: str) -> object:
            return getattr(inner, attribute)

        def read_into(self, refs: list[PageRef], buffers: list[memoryview]) -> object:
            nonlocal calls
            calls += 1
            if calls == 2:
                second.set()
                may_go.wait(10)
            return inner.read_into(refs, buffers)

    second, may_go = threading.Event(), threading.Event()
    store: PageStore = HangsInItsSecondRead()  # type: ignore[assignment]
    rig.worker._stores["kv"] = store
    rig.worker.prefetch(prefetch_of(6, 0, slots(30, 6)))
    assert second.wait(10)
    rig.worker.abandon(StorageOp.READ, 6, FailReason.DEADLINE)
    (read,) = rig.worker.poll()
    assert (read.pages, read.failure) == (2, FailReason.DEADLINE)
    assert rig.host_bytes("kv", 30, 2) == image["kv"][: 2 * 96]
    may_go.set()
    assert rig.worker.close(10)
    assert not rig.host["kv"].memory[32:36].any()


def test_a_store_in_a_call_ends_only_when_the_call_returns(rig: Rig) -> None:
    rig.stores["kv"].hang(StorageOp.WRITE)
    rig.worker.store(store_of(6, 0, slots(0, 10)))
    assert rig.stores["kv"].wait_for_hanging(1)
    rig.worker.store(store_of(7, 0, slots(0, 1)))
    rig.worker.abandon(StorageOp.WRITE, 6, FailReason.DEADLINE)
    results = rig.worker.poll()
    assert [(r.order_id, r.failure) for r in results] == [(7, FailReason.DEADLINE)], (
        "the lane is hung, but the host pages of 6 may still be read"
    )
    rig.stores["kv"].release()
    (ended,) = rig.results(1)
    assert (ended.order_id, ended.pages, ended.failure) == (6, 4, FailReason.DEADLINE)
    assert rig.stores["kv"].stats().pages == 4, "no further batch was begun"
    assert rig.worker.stuck_threads == 0


def test_an_order_that_waits_is_dropped_without_a_call(rig: Rig) -> None:
    rig.stores["kv"].hang(StorageOp.WRITE)
    rig.worker.store(store_of(6, 0, slots(0, 1)))
    rig.worker.store(store_of(7, 1, slots(1, 1)))
    assert rig.stores["kv"].wait_for_hanging(1)
    rig.worker.abandon(StorageOp.WRITE, 7, FailReason.CANCELLED)
    (dropped,) = rig.worker.poll()
    assert (dropped.order_id, dropped.pages, dropped.failure, dropped.started) == (
        7,
        0,
        FailReason.CANCELLED,
        None,
    )


def test_abandoning_what_has_ended_or_never_was_changes_nothing(rig: Rig) -> None:
    rig.stored(1)
    rig.worker.abandon(StorageOp.WRITE, 1, FailReason.DEADLINE)
    rig.worker.abandon(StorageOp.READ, 99, FailReason.DEADLINE)
    assert rig.worker.poll() == []


def test_a_full_store_declines_the_rest_with_its_reason() -> None:
    spec = KV
    host = HostPool(spec, 64, (96,))
    worker = StorageWorker(
        {"kv": MemoryStore(96, quota_bytes=3 * 96)}, [host], page_tokens=PAGE_TOKENS, layout="t"
    )
    worker.store(store_of(1, 0, slots(0, 5)))
    rig = Rig(worker, {}, {"kv": host})
    (result,) = rig.results(1)
    assert (result.pages, result.failure) == (3, FailReason.QUOTA)
    assert worker.close(10)


def test_close_ends_everything_and_says_when_a_call_has_not_returned(rig: Rig) -> None:
    rig.stores["kv"].hang(StorageOp.READ, StorageOp.WRITE)
    rig.worker.prefetch(prefetch_of(6, 0, slots(30, 4)))
    rig.worker.store(store_of(7, 0, slots(0, 1)))
    assert rig.stores["kv"].wait_for_hanging(2)
    assert not rig.worker.close(0.01)
    assert [(r.order_id, r.failure) for r in rig.worker.poll()] == [(6, FailReason.SHUTDOWN)]
    rig.worker.lookup(Lookup(5, SPACE, PATH, 0, 40))
    assert [(r.order_id, r.failure) for r in rig.worker.poll()] == [(5, FailReason.SHUTDOWN)]
    rig.stores["kv"].release()
    assert rig.worker.close(10)
    assert [(r.order_id, r.pages, r.failure) for r in rig.worker.poll()] == [(7, 1, None)], (
        "its only call succeeded, so the page is stored"
    )


def test_results_are_announced(rig: Rig) -> None:
    news = threading.Event()
    rig.worker.on_result(news.set)
    rig.worker.lookup(Lookup(5, SPACE, PATH, 0, 40))
    assert news.wait(10)
    assert len(rig.worker.poll()) == 1


def test_a_path_that_grows_is_hashed_on_from_where_it_was(rig: Rig) -> None:
    names = rig.worker._names
    short = names.refs("kv", SPACE, PATH[: 10 * PAGE_TOKENS * 4], 0, 10)
    assert names.refs("kv", SPACE, PATH, 0, 20)[:10] == short
    assert names.refs("kv", SPACE, PATH[: 5 * PAGE_TOKENS * 4], 2, 3) == short[2:5]
    assert len(names._recent) == 1
    other = token_key(np.arange(1, 1 + 8 * PAGE_TOKENS))
    assert names.refs("kv", SPACE, other, 0, 1) != short[:1]
    assert len(names._recent) == 2


def test_stores_and_pools_must_match() -> None:
    host = HostPool(KV, 4, (96,))
    with pytest.raises(ConfigError, match="need one store each"):
        StorageWorker({}, [host], page_tokens=4, layout="t")
    with pytest.raises(ConfigError, match="need one store each"):
        StorageWorker(
            {"kv": MemoryStore(96), "draft": MemoryStore(40)}, [host], page_tokens=4, layout="t"
        )


def test_orders_that_name_no_slots_or_foreign_pools_are_refused(rig: Rig) -> None:
    with pytest.raises(ProtocolError, match="one host slot per page"):
        rig.worker.prefetch(_copy(1, Purpose.PREFETCH, 0, slots(0, 2), None))
    order = store_of(2, 0, slots(0, 1))
    order.extra = (PoolSlots("mamba", slots(0, 1), slots(0, 1), slots(0, 1)),)
    with pytest.raises(ProtocolError, match="pool 'mamba', which has slots of its own"):
        rig.worker.store(order)


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.0005)


def test_readers_take_their_memory_before_the_first_read(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def counted(num_bytes: int) -> np.ndarray:
        taken.append(num_bytes)
        return np.zeros(num_bytes, np.uint8)

    monkeypatch.setattr(staging, "allocate", counted)
    rig = build(read_threads=3, batch_pages=1000)
    at_start = list(taken)
    assert len(at_start) == 3
    assert max(at_start) <= 64 * 4096, "no more than the host tier has pages"
    rig.stored(6)
    for op_id in range(4):
        rig.worker.prefetch(prefetch_of(op_id, 0, slots(6 * op_id + 6, 6)))
    rig.results(4)
    assert taken == at_start
    assert rig.worker.close(10)


def test_asking_whether_the_last_call_has_returned_wakes_nobody(rig: Rig) -> None:
    rig.stores["kv"].hang(StorageOp.WRITE)
    rig.worker.store(store_of(1, 0, slots(0, 4)))
    rig.worker.store(store_of(2, 4, slots(4, 4)))
    assert rig.stores["kv"].wait_for_hanging(1)
    told = threading.Semaphore(0)
    rig.worker.on_result(told.release)
    assert not rig.worker.close(0)
    assert told.acquire(blocking=False)  # the second had not begun, and has its result
    assert [result.order_id for result in rig.worker.poll()] == [2]
    for _ in range(3):
        assert not rig.worker.close(0)
    assert not told.acquire(blocking=False)
    rig.stores["kv"].release()
    assert told.acquire(timeout=10)
    assert [result.order_id for result in rig.results(1)] == [1]


def test_calls_that_were_cancelled_are_no_sign_of_a_store_that_hangs() -> None:
    """Their threads are busy for a moment more; who asks meanwhile waits instead of failing."""
    rig = build(read_threads=2)
    rig.stored(6)
    rig.stores["kv"].hang(StorageOp.READ)
    for order in (10, 11):
        rig.worker.prefetch(prefetch_of(order, 0, slots(20 + order, 1)))
    assert rig.stores["kv"].wait_for_hanging(2)
    rig.worker.prefetch(prefetch_of(20, 0, slots(40, 1)))
    for order in (10, 11):
        rig.worker.abandon(StorageOp.READ, order, FailReason.CANCELLED)
    rig.worker.prefetch(prefetch_of(21, 0, slots(41, 1)))
    ended = {result.order_id: result.failure for result in rig.results(2)}
    assert ended == {10: FailReason.CANCELLED, 11: FailReason.CANCELLED}
    rig.stores["kv"].release()
    ended = {result.order_id: result.failure for result in rig.results(2)}
    assert ended == {20: None, 21: None}
    assert rig.worker.close(10)


def test_calls_that_go_on_long_after_they_were_cancelled_are_one() -> None:
    now = [0.0]
    host = HostPool(KV, 64, (KV.bytes_per_slot,))
    store = FaultyStore(MemoryStore(KV.bytes_per_slot))
    worker = StorageWorker(
        {"kv": store},
        [host],
        page_tokens=PAGE_TOKENS,
        layout="test",
        read_threads=1,
        clock=lambda: now[0],
    )
    rig = Rig(worker, {"kv": store}, {"kv": host})
    rig.stored(6)
    store.hang(StorageOp.READ)
    worker.prefetch(prefetch_of(10, 0, slots(20, 1)))
    assert store.wait_for_hanging(1)
    worker.abandon(StorageOp.READ, 10, FailReason.CANCELLED)
    assert worker.stuck_threads == 0
    now[0] = GRACE_SECONDS
    assert worker.stuck_threads == 1
    worker.prefetch(prefetch_of(21, 0, slots(41, 1)))
    ended = {result.order_id: result.failure for result in rig.results(2)}
    assert ended == {10: FailReason.CANCELLED, 21: FailReason.DEADLINE}
    store.release()
    assert worker.close(10)
