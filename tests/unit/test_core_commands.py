"""Commands and time: pins, flushes, evictions by hand, and what a call may not be given."""

import copy

import numpy as np
import pytest

from kvtiers.core.cache import UnifiedRadixCache
from kvtiers.errors import (
    ConfigError,
    InvalidTokens,
    LeaseEnded,
    ProtocolError,
    UnknownName,
    UnknownOperation,
)
from kvtiers.events import Fact, HiCacheAck
from kvtiers.testing.cache_driver import NAMESPACE, CacheDriver, prompt
from kvtiers.types import (
    CacheConfig,
    PoolSpec,
    Purpose,
    Retention,
    SlotState,
    Tier,
    WritePolicy,
    token_key,
)

PAGE = 4


def driver(**settings: object) -> CacheDriver:
    defaults = {"device_pages": 16, "host_pages": 16, "page_tokens": PAGE}
    return CacheDriver(CacheConfig(**defaults | settings))


# ---- pins


def test_a_pin_keeps_its_prefix_until_it_is_removed() -> None:
    cache = driver()
    cache.serve(prompt(1, 4 * PAGE))
    pin = cache.pin(prompt(1, 2 * PAGE), ttl_seconds=100)
    assert pin is not None
    assert cache.evict(Tier.DEVICE, 4) == 2
    assert cache.ledger.pinned_tokens == 2 * PAGE
    cache.unpin(pin)
    assert cache.ledger.pinned_tokens == 0
    assert cache.evict(Tier.DEVICE, 4) == 2


def test_a_pin_ends_by_time() -> None:
    cache = driver()
    cache.serve(prompt(1, 2 * PAGE))
    pin = cache.pin(prompt(1, 2 * PAGE), ttl_seconds=5)
    assert pin is not None
    cache.tick(4.9)
    assert cache.evict(Tier.DEVICE, 2) == 0
    cache.tick(0.1)
    assert cache.evict(Tier.DEVICE, 2) == 2
    with pytest.raises(ProtocolError, match="expired"):
        cache.unpin(pin)


def test_a_pin_of_what_is_not_here_is_none() -> None:
    cache = driver()
    assert cache.pin(prompt(1, 2 * PAGE), ttl_seconds=5) is None
    cache.serve(prompt(1, 2 * PAGE))
    assert cache.pin(prompt(2, 2 * PAGE), ttl_seconds=5) is None


def test_two_pins_of_one_prefix_end_one_by_one() -> None:
    cache = driver()
    cache.serve(prompt(1, 2 * PAGE))
    one, two = (cache.pin(prompt(1, 2 * PAGE), ttl_seconds=5) for _ in range(2))
    assert one is not None
    assert two is not None
    cache.unpin(one)
    assert cache.evict(Tier.DEVICE, 2) == 0
    cache.unpin(two)
    assert cache.evict(Tier.DEVICE, 2) == 2


# ---- flush


def test_a_flush_of_the_device_keeps_what_is_on_host_and_what_is_leased() -> None:
    cache = driver()
    cache.serve(prompt(1, 2 * PAGE))
    cache.serve(prompt(2, 2 * PAGE))
    running = cache.lease(prompt(1, 2 * PAGE + 1))
    assert cache.flush(Tier.DEVICE) == 2
    assert cache.match(prompt(2, 2 * PAGE + 1)) == (0, 2, 2)
    assert cache.match(prompt(1, 2 * PAGE + 1)) == (2, 2, 2)
    cache.abort(running)
    fact = cache.facts_of(Fact.LEFT)[-1]
    assert fact[1:] == (Tier.DEVICE, "removed", "command", 2)


def test_a_flush_of_both_tiers_leaves_nothing() -> None:
    cache = driver()
    for name in (1, 2, 3):
        cache.serve(prompt(name, 2 * PAGE))
    cache.evict(Tier.DEVICE, 2)
    assert cache.flush(Tier.DEVICE) == 4
    assert cache.flush(Tier.HOST) == 6
    assert cache.slots(Tier.DEVICE)[SlotState.FREE] == 16
    assert cache.slots(Tier.HOST)[SlotState.FREE] == 16
    assert cache.cache.state.tree.run_count == 0  # type: ignore[attr-defined]


def test_a_flush_of_the_device_removes_what_only_device_has_with_what_hangs_below() -> None:
    cache = driver(write_policy=WritePolicy.WRITE_BACK)
    cache.serve(prompt(1, 4 * PAGE))
    cache.evict(Tier.DEVICE, 2)
    cache.ack_all()
    cache.evict(Tier.DEVICE, 2)
    assert cache.match([*prompt(1, 4 * PAGE), 0]) == (2, 4, 4)
    assert cache.flush(Tier.DEVICE) == 2
    assert cache.resident(Tier.HOST) == 0, "unreachable without its head"


def test_a_flush_goes_around_what_a_copy_in_flight_uses() -> None:
    cache = driver()
    lease = cache.lease(prompt(1, 2 * PAGE))
    cache.commit(lease, prompt(1, 2 * PAGE))
    cache.finish(lease)
    (backup,) = cache.pending(Purpose.BACKUP)
    assert cache.flush(Tier.DEVICE) == 0
    cache.ack(backup)
    assert cache.flush(Tier.DEVICE) == 2


def test_a_flush_of_the_device_leaves_the_head_of_what_must_stay() -> None:
    # The branch is half on host, and that half is being stored: it cannot go, nor can its head.
    cache = driver(host_pages=3, storage=True)
    head = prompt(1, 2 * PAGE)
    cache.serve(head)
    longer = [*head, *prompt(2, 2 * PAGE)]
    lease = cache.lease(longer)
    cache.commit(lease, longer)
    cache.finish(lease)
    (backup,) = cache.pending(Purpose.BACKUP)
    cache.ack(backup)
    (store,) = cache.pending(Purpose.STORE)
    assert (store.first_page, store.pages) == (2, 1)
    assert cache.flush(Tier.DEVICE) == 0
    cache.ack(store)
    assert cache.flush(Tier.DEVICE) == 4


def test_a_namespace_that_holds_nothing_leaves_no_trace() -> None:
    cache = driver()
    cache.serve(prompt(1, 2 * PAGE))
    cache.flush(Tier.DEVICE)
    cache.flush(Tier.HOST)
    assert not cache.cache.state.tree.roots  # type: ignore[attr-defined]
    assert not cache.cache.state.tree.namespaces  # type: ignore[attr-defined]


@pytest.mark.parametrize("found", [0, 2])
def test_a_namespace_that_only_asked_storage_leaves_no_trace(found: int) -> None:
    cache = driver(storage=True, prefetch_threshold_tokens=PAGE)
    ticket = cache.prefetch(prompt(1, 3 * PAGE))
    assert ticket is not None
    cache.found(ticket, found)
    cache.cancel_prefetch(ticket)
    for read in cache.pending(Purpose.PREFETCH):
        cache.fail(read)
    assert not cache.cache.state.tree.roots  # type: ignore[attr-defined]
    assert not cache.cache.state.tree.namespaces  # type: ignore[attr-defined]


# ---- bad input: a clear error, and nothing changed


def _state(cache: CacheDriver) -> object:
    inner = cache.cache
    assert isinstance(inner, UnifiedRadixCache)
    assert not inner.state.facts
    assert not inner.state.orders
    runs = sorted(
        (run.start, run.key, run.pages, run.locks, run.stamp, tuple(run.device_slots))
        for run in inner.state.tree.walk()
    )
    return copy.deepcopy((runs, inner.recount(), sorted(inner.leases)))


@pytest.mark.parametrize(
    "tokens",
    [
        [1.5, 2.0],
        [-1],
        [1 << 31],
        [[1, 2], [3, 4]],
        ["a"],
        np.array([1, 2], dtype=np.float32),
        [True, None],
    ],
)
def test_a_prompt_that_is_not_tokens_is_refused(tokens: object) -> None:
    with pytest.raises(InvalidTokens, match="tokens"):
        token_key(tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", [b"", b"abc", b"12345"])
def test_a_key_that_is_not_whole_tokens_is_refused(key: bytes) -> None:
    cache = driver(storage=True)
    cache.serve(prompt(1, 2 * PAGE))
    before = _state(cache)
    inner = cache.cache
    for call in (
        lambda: inner.admit(1, key, NAMESPACE, 0.0),
        lambda: inner.prefetch(1, key, NAMESPACE, 0.0),
        lambda: inner.pin(key, NAMESPACE, 0.0, 1.0),
    ):
        with pytest.raises(InvalidTokens, match="int32"):
            call()
    assert _state(cache) == before


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"device_pages": 0}, "device_pages is 0"),
        ({"device_pages": -3}, "device_pages is -3"),
        ({"host_pages": -1}, "host_pages is -1"),
        ({"page_tokens": 0}, "page_tokens is 0"),
        ({"retention": Retention.EXCLUSIVE}, "use write_back or inclusive"),
        ({"storage": True, "host_pages": 0}, "storage needs a host tier"),
        ({"cleaner_low": 0.5, "cleaner_high": 0.2}, "low <= high"),
        ({"prefetch_in_flight_share": 0.0}, "prefetch_in_flight_share is 0.0"),
        ({"pools": (PoolSpec("swa", 1),)}, "must be 'kv'"),
        ({"pools": (PoolSpec("kv", 1), PoolSpec("draft", 1, follows="vk"))}, "follows 'vk'"),
        ({"pools": (PoolSpec("kv", 1), PoolSpec("kv", 1))}, "names repeat"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    settings: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        driver(**settings)


def test_all_problems_of_a_configuration_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        CacheConfig(device_pages=0, host_pages=-1, page_tokens=0)
    assert str(error.value).count(";") >= 3


def test_an_unknown_eviction_policy_lists_the_known_ones() -> None:
    with pytest.raises(UnknownName, match=r"'mru'; known: lfu, lru"):
        UnifiedRadixCache(CacheConfig(device_pages=4, eviction="mru"))


def test_a_lease_ends_once() -> None:
    cache = driver()
    lease = cache.lease(prompt(1, PAGE))
    cache.commit(lease, prompt(1, PAGE))
    cache.finish(lease)
    before = _state(cache)
    inner = cache.cache
    for call in (
        lambda: inner.finish(lease, 0.0),
        lambda: inner.abort(lease, 0.0),
        lambda: inner.retract(lease, 0.0),
        lambda: inner.commit(lease, token_key(prompt(1, PAGE)), PAGE, 0.0),
        lambda: inner.extend(lease, 9, 0.0),
        lambda: inner.fork(lease, 9, 0.0),
        lease.block_table,
    ):
        with pytest.raises(LeaseEnded, match="already ended"):
            call()
    assert _state(cache) == before


def test_a_request_that_has_no_result_cannot_be_finished_or_retracted() -> None:
    cache = driver()
    lease = cache.lease(prompt(1, 2 * PAGE))
    cache.commit(lease, prompt(1, 2 * PAGE), PAGE)
    before = _state(cache)
    for call in (cache.cache.finish, cache.cache.retract):
        with pytest.raises(ProtocolError, match="can be aborted"):
            call(lease, 0.0)
    assert _state(cache) == before
    cache.abort(lease)


@pytest.mark.parametrize(
    ("computed", "key_tokens", "says"),
    [
        (PAGE - 1, 2 * PAGE, "already committed"),
        (2 * PAGE + 1, 3 * PAGE, "extend it first"),
        (2 * PAGE, PAGE, "the key holds 4 tokens"),
    ],
)
def test_a_commit_that_cannot_be_true_is_refused(computed: int, key_tokens: int, says: str) -> None:
    cache = driver()
    lease = cache.lease(prompt(1, 2 * PAGE))
    cache.commit(lease, prompt(1, 2 * PAGE), PAGE)
    before = _state(cache)
    with pytest.raises(ProtocolError, match=says):
        cache.cache.commit(lease, token_key(prompt(1, key_tokens)), computed, 0.0)
    assert _state(cache) == before


def test_a_commit_before_its_loads_are_acknowledged_is_refused() -> None:
    cache = driver()
    tokens = [*prompt(1, 2 * PAGE), 0]
    cache.serve(tokens)
    cache.evict(Tier.DEVICE, 2)
    lease = cache.lease(tokens)
    with pytest.raises(ProtocolError, match="not acknowledged"):
        cache.commit(lease, tokens)
    cache.fail(cache.pending(Purpose.LOAD_BACK)[0])
    with pytest.raises(ProtocolError, match="admit the request anew"):
        cache.commit(lease, tokens)
    cache.abort(lease)


def test_an_ack_of_an_unknown_operation_is_refused() -> None:
    cache = driver()
    lease = cache.lease(prompt(1, 2 * PAGE))
    cache.commit(lease, prompt(1, 2 * PAGE))
    (backup,) = cache.pending(Purpose.BACKUP)
    before = _state(cache)
    for ack, says in (
        (HiCacheAck(999, 1), "never ordered"),
        (HiCacheAck(backup.op_id, 3), "3 cannot have arrived"),
        (HiCacheAck(backup.op_id, -1), "-1 cannot have arrived"),
    ):
        with pytest.raises(UnknownOperation, match=says):
            cache.cache.ack(ack, 0.0)
    assert _state(cache) == before
    cache.ack(backup)
    with pytest.raises(UnknownOperation, match="already ended"):
        cache.cache.ack(HiCacheAck(backup.op_id, 2), 0.0)


def test_a_late_copy_is_acknowledged_twice_and_not_thrice() -> None:
    cache = driver()
    lease = cache.lease(prompt(1, 2 * PAGE))
    cache.commit(lease, prompt(1, 2 * PAGE))
    (backup,) = cache.pending(Purpose.BACKUP)
    cache.be_late(backup)
    with pytest.raises(UnknownOperation, match="ended=True"):
        cache.cache.ack(HiCacheAck(backup.op_id, 0, ended=False), 0.0)
    cache.ack(backup)
    with pytest.raises(UnknownOperation):
        cache.cache.ack(HiCacheAck(backup.op_id, 0), 0.0)


def test_unknown_tickets_and_impossible_answers_are_refused() -> None:
    cache = driver(storage=True, prefetch_threshold_tokens=1)
    ticket = cache.prefetch(prompt(1, 3 * PAGE))
    assert ticket is not None
    before = _state(cache)
    inner = cache.cache
    for call in (
        lambda: inner.prefetch_ready(999, 0.0),
        lambda: inner.cancel_prefetch(999, 0.0),
        lambda: inner.admit(1, token_key(prompt(1, 3 * PAGE)), NAMESPACE, 0.0, ticket_id=999),
    ):
        with pytest.raises(UnknownOperation, match="999"):
            call()
    with pytest.raises(UnknownOperation, match="asked for 2 pages"):
        inner.found(ticket, 3, 0.0)
    assert _state(cache) == before
    cache.found(ticket, 2)
    assert cache.pending(Purpose.PREFETCH), "the true answer still counts"


def test_negative_numbers_and_commands_to_storage_are_refused() -> None:
    cache = driver()
    cache.serve(prompt(1, 2 * PAGE))
    before = _state(cache)
    inner = cache.cache
    for call in (
        lambda: inner.admit(1, token_key([1]), NAMESPACE, 0.0, reserve_tokens=-1),
        lambda: inner.evict(Tier.DEVICE, -1, 0.0),
        lambda: inner.evict(Tier.STORAGE, 1, 0.0),
        lambda: inner.flush(Tier.STORAGE, 0.0),
        lambda: inner.unpin(12345, 0.0),
    ):
        with pytest.raises(ProtocolError):
            call()
    assert _state(cache) == before


def test_storage_cannot_be_attached_without_a_host_tier() -> None:
    cache = driver(host_pages=0)
    with pytest.raises(ConfigError, match="host tier"):
        cache.cache.attach_storage(0.0)
