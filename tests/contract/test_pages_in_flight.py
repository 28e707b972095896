"""The table of pages in flight (docs/architecture.md), row by row: any implementation passes it.

Written against `PrefixCache` alone. Another implementation is added to `CACHES`.
"""

from collections.abc import Callable

import pytest

from kvtiers.core.interface import PrefixCache
from kvtiers.events import Copy, Fact
from kvtiers.testing.cache_driver import CacheDriver, missed, prompt, serving_cache
from kvtiers.types import (
    CacheConfig,
    FailReason,
    LeaveOutcome,
    MissReason,
    PrefetchPolicy,
    Purpose,
    SlotState,
    Tier,
)

CACHES: dict[str, Callable[[CacheConfig], PrefixCache]] = {"UnifiedRadixCache": serving_cache}

PAGE = 4
PAGES = 3
TOKENS = [*prompt(1, PAGES * PAGE), 0]
"""Three whole pages and one token more, so that all three can be hits."""

DEVICE_PAGES = HOST_PAGES = 16


@pytest.fixture(params=sorted(CACHES))
def cache(request: pytest.FixtureRequest) -> CacheDriver:
    config = CacheConfig(
        device_pages=DEVICE_PAGES,
        host_pages=HOST_PAGES,
        page_tokens=PAGE,
        storage=True,
        prefetch_policy=PrefetchPolicy.WAIT_COMPLETE,
        prefetch_threshold_tokens=PAGE,
    )
    return CacheDriver(config, CACHES[request.param])


def free(cache: CacheDriver, tier: Tier) -> int:
    return cache.slots(tier)[SlotState.FREE]


def nothing_is_left_open(cache: CacheDriver) -> None:
    cache.ack_all()
    for copy in list(cache.late.values()):
        cache.ack(copy)
    assert not any(cache.ledger.open_ends().values()), cache.ledger.open_ends()


# ---- loading host -> device


@pytest.fixture
def loading(cache: CacheDriver) -> tuple[CacheDriver, Copy]:
    """TOKENS are on host only, and request 901 has begun to load them."""
    cache.serve(TOKENS)
    assert cache.evict(Tier.DEVICE, PAGES) == PAGES
    cache.lease(TOKENS, request_id=901)
    (copy,) = cache.pending(Purpose.LOAD_BACK)
    return cache, copy


def owner(cache: CacheDriver) -> object:
    return next(iter(cache.cache.leases.values()))  # type: ignore[attr-defined]


def test_loading_match_counts_it_as_host(loading: tuple[CacheDriver, Copy]) -> None:
    cache, _ = loading
    assert cache.match(TOKENS) == (0, PAGES, PAGES)


def test_loading_another_admit_joins_allocates_nothing_and_is_a_host_hit(
    loading: tuple[CacheDriver, Copy],
) -> None:
    cache, copy = loading
    before = free(cache, Tier.DEVICE)
    other = cache.lease(TOKENS)
    assert other.split.host_hit == PAGES * PAGE
    assert other.load_ops == (copy.op_id,)
    assert free(cache, Tier.DEVICE) == before - 1, "its own last page only"
    assert len(cache.copies) == 1
    cache.abort(other)


def test_loading_commit_of_the_same_page_keeps_its_own_slot_until_it_ends(
    loading: tuple[CacheDriver, Copy],
) -> None:
    cache, copy = loading
    # 902 does not rely on a load: an earlier one failed it, so it computes the pages.
    first = cache.lease(TOKENS, request_id=902)
    cache.fail(copy)
    cache.abort(first)
    computes = cache.lease(TOKENS, request_id=902)
    assert computes.split.host_hit == 0
    again = cache.lease(TOKENS, request_id=903)
    (second_copy,) = cache.pending(Purpose.LOAD_BACK)
    cache.commit(computes, TOKENS)
    table = computes.block_table().tolist()
    assert not set(table) & set(second_copy.target_slots.tolist())  # type: ignore[union-attr]
    assert cache.match(TOKENS)[0] == 0, "the load will tell"
    cache.ack(second_copy)
    cache.commit(computes, TOKENS)
    assert computes.block_table().tolist() == table
    cache.finish(computes)
    cache.commit(again, TOKENS)
    cache.finish(again)
    assert cache.resident(Tier.DEVICE) == PAGES


def test_loading_it_does_not_leave_either_tier(loading: tuple[CacheDriver, Copy]) -> None:
    cache, _ = loading
    assert cache.evict(Tier.DEVICE, DEVICE_PAGES) == 0
    assert cache.evict(Tier.HOST, HOST_PAGES) == 0


def test_loading_acknowledged_it_is_resident_on_device(loading: tuple[CacheDriver, Copy]) -> None:
    cache, copy = loading
    cache.ack(copy)
    assert cache.match(TOKENS) == (PAGES, PAGES, PAGES)
    assert cache.resident(Tier.DEVICE) == PAGES


def test_loading_failed_joiners_are_voided_and_slots_forfeited(
    loading: tuple[CacheDriver, Copy],
) -> None:
    cache, copy = loading
    joiner = cache.lease(TOKENS)
    before = free(cache, Tier.DEVICE)
    cache.fail(copy)
    assert joiner.voided
    assert owner(cache).voided  # type: ignore[attr-defined]
    assert free(cache, Tier.DEVICE) == before + PAGES


def test_loading_late_joiners_are_voided_and_slots_quarantined_until_it_has_ended(
    loading: tuple[CacheDriver, Copy],
) -> None:
    cache, copy = loading
    joiner = cache.lease(TOKENS)
    before = free(cache, Tier.DEVICE)
    cache.be_late(copy)
    assert joiner.voided
    assert cache.slots(Tier.DEVICE)[SlotState.QUARANTINED] == PAGES
    assert free(cache, Tier.DEVICE) == before
    cache.ack(copy)
    assert cache.slots(Tier.DEVICE)[SlotState.QUARANTINED] == 0
    assert free(cache, Tier.DEVICE) == before + PAGES


def test_loading_after_the_owners_abort_the_copy_goes_on_for_joiners(
    loading: tuple[CacheDriver, Copy],
) -> None:
    cache, copy = loading
    joiner = cache.lease(TOKENS)
    cache.abort(owner(cache))  # type: ignore[arg-type]
    assert not cache.cancelled
    cache.ack(copy)
    assert not joiner.voided
    assert joiner.load_ops == ()
    cache.commit(joiner, TOKENS)
    cache.finish(joiner)
    nothing_is_left_open(cache)


def test_loading_after_the_owners_abort_and_without_joiners_it_is_resident_and_evictable(
    loading: tuple[CacheDriver, Copy],
) -> None:
    cache, copy = loading
    cache.abort(owner(cache))  # type: ignore[arg-type]
    cache.ack(copy)
    assert cache.match(TOKENS)[0] == PAGES
    assert cache.evict(Tier.DEVICE, PAGES) == PAGES
    nothing_is_left_open(cache)


# ---- backing up device -> host


@pytest.fixture
def backing_up(cache: CacheDriver) -> tuple[CacheDriver, Copy]:
    """TOKENS are on device, nobody uses them, and their backup is in flight."""
    cache.serve(TOKENS, acks=False)
    (copy,) = cache.pending(Purpose.BACKUP)
    assert copy.pages == PAGES
    return cache, copy


def test_backing_up_match_and_admit_see_it_on_device(
    backing_up: tuple[CacheDriver, Copy],
) -> None:
    cache, _ = backing_up
    assert cache.match(TOKENS) == (PAGES, PAGES, PAGES)
    lease = cache.lease(TOKENS)
    assert lease.split.device_hit == PAGES * PAGE
    cache.abort(lease)


def test_backing_up_commit_of_the_same_page_is_a_duplicate(cache: CacheDriver) -> None:
    one, two = cache.lease(TOKENS), cache.lease(TOKENS)
    cache.commit(one, TOKENS)
    (copy,) = cache.pending(Purpose.BACKUP)
    cache.commit(two, TOKENS)
    assert cache.pending(Purpose.BACKUP) == [copy], "and is not backed up twice"
    cache.finish(two)
    assert cache.facts_of(Fact.ENDED)[-1][7] == PAGES
    cache.finish(one)


def test_backing_up_its_device_slot_is_pinned_until_the_ack(
    backing_up: tuple[CacheDriver, Copy],
) -> None:
    cache, copy = backing_up
    assert cache.evict(Tier.DEVICE, DEVICE_PAGES) == 0
    cache.ack(copy)
    assert cache.evict(Tier.DEVICE, DEVICE_PAGES) == PAGES


def test_backing_up_acknowledged_it_is_resident_on_host(
    backing_up: tuple[CacheDriver, Copy],
) -> None:
    cache, copy = backing_up
    cache.ack(copy)
    assert cache.resident(Tier.HOST) == PAGES


def test_backing_up_failed_its_host_slot_is_forfeited_and_it_stays_unbacked(
    backing_up: tuple[CacheDriver, Copy],
) -> None:
    cache, copy = backing_up
    cache.fail(copy, 1)
    assert cache.resident(Tier.HOST) == 1
    assert free(cache, Tier.HOST) == HOST_PAGES - 1
    assert cache.match(TOKENS)[0] == PAGES
    assert cache.ledger.backup.failed_by_reason[FailReason.TRANSFER] == PAGES - 1


def test_backing_up_late_its_host_slot_is_quarantined(
    backing_up: tuple[CacheDriver, Copy],
) -> None:
    cache, copy = backing_up
    cache.be_late(copy)
    assert cache.slots(Tier.HOST)[SlotState.QUARANTINED] == PAGES
    assert cache.ledger.backup.failed_by_reason[FailReason.DEADLINE] == PAGES
    cache.ack(copy)
    assert free(cache, Tier.HOST) == HOST_PAGES


def test_backing_up_the_owners_abort_is_nothing_to_it(cache: CacheDriver) -> None:
    lease = cache.lease(TOKENS)
    cache.commit(lease, TOKENS)
    (copy,) = cache.pending(Purpose.BACKUP)
    cache.abort(lease)
    assert not cache.cancelled
    cache.ack(copy)
    assert cache.resident(Tier.HOST) == PAGES


# ---- prefetching storage -> host


@pytest.fixture
def prefetching(cache: CacheDriver) -> tuple[CacheDriver, Copy, int]:
    """Storage holds TOKENS, and they are on their way to host for a waiting request."""
    ticket = cache.prefetch(TOKENS, request_id=901)
    assert ticket is not None
    cache.found(ticket, PAGES)
    (copy,) = cache.pending(Purpose.PREFETCH)
    return cache, copy, ticket


Prefetching = tuple[CacheDriver, Copy, int]


def test_prefetching_it_is_not_matched(prefetching: Prefetching) -> None:
    cache, _, _ = prefetching
    assert cache.match(TOKENS) == (0, 0, 0)


def test_prefetching_another_request_may_wait_for_it_by_its_own_policy(
    prefetching: Prefetching,
) -> None:
    cache, copy, _ = prefetching
    second = cache.prefetch(TOKENS)
    assert second is not None
    assert len(cache.copies) == 1, "it is not read twice"
    assert not cache.ready(second)
    cache.ack(copy)
    assert cache.ready(second)
    assert cache.serve(TOKENS, ticket_id=second).host_hit == PAGES * PAGE
    unwaiting = cache.lease(prompt(2, PAGE))
    assert unwaiting.split.computed == PAGE
    cache.abort(unwaiting)


def test_prefetching_a_commit_of_the_same_page_takes_the_new_device_slot(
    prefetching: Prefetching,
) -> None:
    cache, copy, ticket = prefetching
    cache.serve(TOKENS, acks=False)
    assert cache.match(TOKENS)[0] == PAGES
    cache.ack(copy)
    assert cache.match(TOKENS)[0] == PAGES
    cache.ack_all()
    assert cache.resident(Tier.HOST) == PAGES, "one host copy of each, whoever brought it"
    cache.cancel_prefetch(ticket)


def test_prefetching_it_does_not_leave(prefetching: Prefetching) -> None:
    cache, _, _ = prefetching
    assert cache.evict(Tier.HOST, HOST_PAGES) == 0
    assert cache.flush(Tier.HOST) == 0
    assert cache.slots(Tier.HOST)[SlotState.RESERVED] == PAGES


def test_prefetching_acknowledged_it_is_resident_on_host(prefetching: Prefetching) -> None:
    cache, copy, ticket = prefetching
    cache.ack(copy)
    assert cache.resident(Tier.HOST) == PAGES
    assert cache.serve(TOKENS, ticket_id=ticket).storage_hit == PAGES * PAGE


@pytest.mark.parametrize("late", [False, True])
def test_prefetching_failed_or_late_is_a_miss_with_a_reason(
    prefetching: Prefetching, late: bool
) -> None:
    cache, copy, ticket = prefetching
    if late:
        cache.be_late(copy)
        assert cache.slots(Tier.HOST)[SlotState.QUARANTINED] == PAGES
    else:
        cache.fail(copy)
        assert free(cache, Tier.HOST) == HOST_PAGES
    split = cache.serve(TOKENS, acks=False, ticket_id=ticket)
    reason = MissReason.DEADLINE if late else MissReason.LOAD_FAILED
    assert missed(split)[reason] == PAGES * PAGE
    nothing_is_left_open(cache)


def test_prefetching_the_owners_abort_revokes_it_where_nobody_else_waits(
    prefetching: Prefetching,
) -> None:
    cache, copy, ticket = prefetching
    cache.cancel_prefetch(ticket)
    assert cache.cancelled == {copy.op_id}
    cache.ack(copy)  # it had been too late to stop it
    assert cache.match(TOKENS) == (0, 0, 0)
    assert free(cache, Tier.HOST) == HOST_PAGES
    nothing_is_left_open(cache)


# ---- being stored host -> storage


@pytest.fixture
def storing(cache: CacheDriver) -> tuple[CacheDriver, Copy]:
    """TOKENS are on device and host, nobody uses them, and they are on their way to storage."""
    cache.serve(TOKENS, acks=False)
    cache.ack_all([Purpose.BACKUP])
    (copy,) = cache.pending(Purpose.STORE)
    assert copy.pages == PAGES
    return cache, copy


def test_storing_match_admit_and_commit_see_it_as_host(
    storing: tuple[CacheDriver, Copy],
) -> None:
    cache, _ = storing
    cache.evict(Tier.DEVICE, PAGES)
    assert cache.match(TOKENS) == (0, PAGES, PAGES)
    split = cache.lease(TOKENS)
    assert split.split.host_hit == PAGES * PAGE
    cache.ack_all([Purpose.LOAD_BACK])
    cache.commit(split, TOKENS)
    cache.finish(split)
    assert cache.match(TOKENS)[0] == PAGES


def test_storing_its_host_slot_is_pinned_until_the_ack(storing: tuple[CacheDriver, Copy]) -> None:
    cache, copy = storing
    assert cache.evict(Tier.DEVICE, DEVICE_PAGES) == PAGES, "the device slot is not"
    assert cache.evict(Tier.HOST, HOST_PAGES) == 0
    cache.ack(copy)
    assert cache.evict(Tier.HOST, HOST_PAGES) == PAGES


def test_storing_acknowledged_it_is_stored_and_leaves_host_demoted(
    storing: tuple[CacheDriver, Copy],
) -> None:
    cache, copy = storing
    cache.ack(copy)
    cache.evict(Tier.DEVICE, PAGES)
    cache.evict(Tier.HOST, PAGES)
    assert cache.facts_of(Fact.LEFT)[-1][1:3] == (Tier.HOST, LeaveOutcome.DEMOTED)


@pytest.mark.parametrize("late", [False, True])
def test_storing_failed_or_late_it_stays_unstored_and_is_counted(
    storing: tuple[CacheDriver, Copy], late: bool
) -> None:
    cache, copy = storing
    if late:
        cache.be_late(copy)
        assert cache.evict(Tier.HOST, HOST_PAGES) == 0, "the store may still be reading it"
        cache.ack(copy)
    else:
        cache.fail(copy, 0, FailReason.STORAGE)
    assert cache.ledger.store.failed_pages == PAGES
    cache.evict(Tier.DEVICE, PAGES)
    cache.evict(Tier.HOST, PAGES)
    assert cache.facts_of(Fact.LEFT)[-1][1:3] == (Tier.HOST, LeaveOutcome.DROPPED)


def test_storing_the_owners_abort_is_nothing_to_it(cache: CacheDriver) -> None:
    lease = cache.lease(TOKENS)
    cache.commit(lease, TOKENS)
    cache.ack_all([Purpose.BACKUP])
    (copy,) = cache.pending(Purpose.STORE)
    cache.abort(lease)
    assert not cache.cancelled
    cache.ack(copy)
    nothing_is_left_open(cache)
