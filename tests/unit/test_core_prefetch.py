"""Prefetch: what a waiting request gets from storage, under each policy, and what it does not."""

import pytest

from kvtiers.core.interface import Blocked
from kvtiers.events import Fact
from kvtiers.testing.cache_driver import NAMESPACE, CacheDriver, missed, prompt
from kvtiers.types import (
    BlockedOn,
    CacheConfig,
    DeclineReason,
    FailReason,
    MissReason,
    PrefetchPolicy,
    Purpose,
    SlotState,
    Tier,
    UnfulfilledReason,
)

PAGE = 4
TOKENS = [*prompt(1, 4 * PAGE), 0]


def driver(**settings: object) -> CacheDriver:
    defaults = {
        "device_pages": 16,
        "host_pages": 32,
        "page_tokens": PAGE,
        "storage": True,
        "prefetch_threshold_tokens": PAGE,
    }
    return CacheDriver(CacheConfig(**defaults | settings))


def unused(cache: CacheDriver) -> dict[UnfulfilledReason, int]:
    return {why: tokens for why, tokens in cache.ledger.asked.unused_tokens.items() if tokens}


def test_prefetched_tokens_are_storage_hits_of_their_request_and_host_hits_of_the_next() -> None:
    cache = driver()
    ticket = cache.prefetched(TOKENS)
    assert cache.match(TOKENS) == (0, 4, 4)
    first = cache.lease(TOKENS, ticket_id=ticket)
    second = cache.lease(TOKENS)
    assert first.split[:4] == (0, 0, 4 * PAGE, 1)
    assert second.split[:4] == (0, 4 * PAGE, 0, 1)
    assert cache.ledger.asked.used_tokens == 4 * PAGE
    cache.abort(first)
    cache.abort(second)
    cache.ack_all()


def test_the_look_up_asks_for_what_lies_past_the_local_match() -> None:
    cache = driver()
    cache.serve(TOKENS[: 2 * PAGE])
    ticket = cache.prefetch(TOKENS)
    assert ticket is not None
    question = cache.lookups[ticket]
    assert (question.first_page, question.pages) == (2, 2)
    assert question.path_key == cache.page_key(TOKENS, 4)
    assert question.namespace == NAMESPACE
    cache.cancel_prefetch(ticket)


def test_while_storage_is_asked_what_the_answer_would_continue_stays() -> None:
    cache = driver()
    cache.serve(TOKENS[: 2 * PAGE])
    ticket = cache.prefetch(TOKENS)
    assert ticket is not None
    assert cache.evict(Tier.DEVICE, 2) == 0
    cache.cancel_prefetch(ticket)
    assert cache.evict(Tier.DEVICE, 2) == 2


def test_a_prefetch_of_which_nothing_comes_keeps_nothing_until_the_admission() -> None:
    """Its request may wait for long, and many of them would hold the device among them."""
    cache = driver()
    cache.serve(TOKENS[: 2 * PAGE])
    leader = cache.prefetch(TOKENS)
    follower = cache.prefetch(TOKENS)
    assert leader is not None
    assert follower is not None
    assert list(cache.lookups) == [leader]
    cache.found(leader, 0)
    assert cache.evict(Tier.DEVICE, 2) == 2
    for ticket in (leader, follower):
        cache.abort(cache.lease(TOKENS, ticket_id=ticket))
        cache.ack_all()


def test_the_last_page_of_a_prompt_is_not_asked_for_since_it_is_computed_anyway() -> None:
    cache = driver()
    ticket = cache.prefetch(TOKENS[: 4 * PAGE])
    assert ticket is not None
    assert cache.lookups[ticket].pages == 3
    cache.cancel_prefetch(ticket)


def test_its_own_span_counts_as_storage_hit_even_where_it_is_on_device_by_now() -> None:
    cache = driver()
    ticket = cache.prefetched(TOKENS)
    cache.serve(TOKENS)  # somebody else loads it meanwhile
    assert cache.match(TOKENS)[0] == 4
    split = cache.serve(TOKENS, ticket_id=ticket)
    assert split[:4] == (0, 0, 4 * PAGE, 1)


@pytest.mark.parametrize(
    ("settings", "tokens", "reason"),
    [
        ({"storage": False}, TOKENS, DeclineReason.NO_STORAGE),
        ({"prefetch_threshold_tokens": 5 * PAGE}, TOKENS, DeclineReason.BELOW_THRESHOLD),
        ({"prefetch_in_flight_share": 0.1}, TOKENS, DeclineReason.IN_FLIGHT_BOUND),
    ],
)
def test_a_prefetch_that_is_not_made_is_declined_with_a_reason(
    settings: dict[str, object], tokens: list[int], reason: DeclineReason
) -> None:
    cache = driver(**settings)
    if reason is DeclineReason.IN_FLIGHT_BOUND:
        busy = cache.prefetch(prompt(7, 5 * PAGE))
        assert busy is not None
        cache.found(busy, 4)
    assert cache.prefetch(tokens) is None
    assert cache.ledger.prefetch.declined_pages[reason] == 4


def test_nothing_is_asked_for_a_prompt_that_is_here() -> None:
    cache = driver()
    cache.serve(TOKENS)
    facts = len(cache.facts)
    assert cache.prefetch(TOKENS) is None
    assert len(cache.facts) == facts
    assert not cache.lookups


# ---- storage's answer


def test_what_storage_does_not_have_is_unknown_not_in_flight() -> None:
    cache = driver()
    ticket = cache.prefetch(TOKENS)
    assert ticket is not None
    cache.found(ticket, 0)
    assert cache.ready(ticket)
    split = cache.serve(TOKENS, ticket_id=ticket)
    assert missed(split) == {MissReason.UNKNOWN: 4 * PAGE, MissReason.SUB_PAGE_TAIL: 1}
    assert not unused(cache)


def test_too_little_found_is_not_fetched() -> None:
    cache = driver(prefetch_threshold_tokens=3 * PAGE)
    ticket = cache.prefetch(TOKENS)
    assert ticket is not None
    cache.found(ticket, 2)
    assert not cache.copies
    assert unused(cache) == {UnfulfilledReason.BELOW_THRESHOLD: 2 * PAGE}
    assert cache.ready(ticket)
    cache.serve(TOKENS, ticket_id=ticket)


def test_what_host_has_no_room_for_is_unused_because_of_that() -> None:
    cache = driver(host_pages=4)
    ticket = cache.prefetch(TOKENS)
    assert ticket is not None
    cache.found(ticket, 4)
    (read,) = cache.pending(Purpose.PREFETCH)
    assert read.pages == 2, "half of host may be in prefetch flight"
    assert unused(cache) == {UnfulfilledReason.HOST_CAPACITY: 2 * PAGE}
    cache.ack(read)
    assert cache.serve(TOKENS, ticket_id=ticket).storage_hit == 2 * PAGE


def test_reads_come_in_batches_and_are_applied_in_order() -> None:
    cache = driver(prefetch_batch_pages=2)
    ticket = cache.prefetch(TOKENS)
    assert ticket is not None
    cache.found(ticket, 4)
    head, tail = cache.pending(Purpose.PREFETCH)
    assert (head.first_page, head.pages, tail.first_page, tail.pages) == (0, 2, 2, 2)
    assert tail.path_key == cache.page_key(TOKENS, 4)
    cache.ack(tail)
    assert cache.match(TOKENS)[2] == 0
    cache.ack(head)
    assert cache.match(TOKENS)[2] == 4
    cache.cancel_prefetch(ticket)


# ---- policies


def test_best_effort_takes_what_is_there() -> None:
    cache = driver(prefetch_policy=PrefetchPolicy.BEST_EFFORT, prefetch_batch_pages=2)
    ticket = cache.prefetch(TOKENS)
    assert ticket is not None
    assert cache.ready(ticket)
    cache.found(ticket, 4)
    head, tail = cache.pending(Purpose.PREFETCH)
    cache.ack(head)
    lease = cache.lease(TOKENS, ticket_id=ticket)
    assert lease.split[:4] == (0, 0, 2 * PAGE, 2 * PAGE + 1)
    assert missed(lease.split)[MissReason.IN_FLIGHT] == 2 * PAGE
    assert cache.cancelled == {tail.op_id}
    cache.fail(tail, 0, FailReason.CANCELLED)
    cache.abort(lease)
    cache.ack_all()


def test_wait_complete_waits_however_long_it_takes() -> None:
    cache = driver(prefetch_policy=PrefetchPolicy.WAIT_COMPLETE)
    ticket = cache.prefetch(TOKENS)
    assert ticket is not None
    cache.found(ticket, 4)
    cache.now = 1e6
    assert not cache.ready(ticket)
    assert cache.admit(TOKENS, ticket_id=ticket) == Blocked(BlockedOn.PREFETCH)
    cache.ack_all()
    assert cache.ready(ticket)
    assert cache.serve(TOKENS, ticket_id=ticket).storage_hit == 4 * PAGE


def test_timeout_waits_until_its_time_is_over_counted_from_the_request() -> None:
    cache = driver(
        prefetch_policy=PrefetchPolicy.TIMEOUT,
        prefetch_timeout_base_seconds=1.0,
        prefetch_timeout_seconds_per_1k_tokens=1000 / (4 * PAGE),
    )
    cache.now = 10.0
    ticket = cache.prefetch(TOKENS)
    assert ticket is not None
    cache.now = 11.0
    cache.found(ticket, 4)
    cache.now = 11.9
    assert not cache.ready(ticket)
    cache.now = 12.0
    assert cache.ready(ticket), "one second, and one for its 16 tokens"
    lease = cache.lease(TOKENS, ticket_id=ticket)
    assert missed(lease.split)[MissReason.DEADLINE] == 4 * PAGE
    assert unused(cache) == {UnfulfilledReason.DEADLINE: 4 * PAGE}
    cache.fail(cache.pending(Purpose.PREFETCH)[0], 0, FailReason.CANCELLED)
    cache.abort(lease)


# ---- failures


@pytest.mark.parametrize(
    ("failure", "miss", "why_unused"),
    [
        (FailReason.STORAGE, MissReason.LOAD_FAILED, UnfulfilledReason.STORAGE_TRANSFER),
        (FailReason.MISSING, MissReason.LOAD_FAILED, UnfulfilledReason.STORAGE_TRANSFER),
        (FailReason.INTEGRITY, MissReason.INTEGRITY, UnfulfilledReason.INTEGRITY),
        (FailReason.DEADLINE, MissReason.DEADLINE, UnfulfilledReason.DEADLINE),
    ],
)
def test_a_read_that_fails_keeps_what_arrived_and_explains_the_rest(
    failure: FailReason, miss: MissReason, why_unused: UnfulfilledReason
) -> None:
    cache = driver()
    ticket = cache.prefetch(TOKENS)
    assert ticket is not None
    cache.found(ticket, 4)
    cache.fail(cache.pending(Purpose.PREFETCH)[0], 1, failure)
    assert cache.ready(ticket)
    split = cache.serve(TOKENS, ticket_id=ticket)
    assert split.storage_hit == PAGE
    assert missed(split) == {miss: 3 * PAGE, MissReason.SUB_PAGE_TAIL: 1}
    assert unused(cache) == {why_unused: 3 * PAGE}


def test_batches_behind_a_failed_one_count_as_failed() -> None:
    cache = driver(prefetch_batch_pages=1)
    ticket = cache.prefetch(TOKENS)
    assert ticket is not None
    cache.found(ticket, 4)
    reads = cache.pending(Purpose.PREFETCH)
    cache.ack(reads[0])
    cache.fail(reads[1])
    cache.ack(reads[2])
    cache.ack(reads[3])
    assert cache.match(TOKENS)[2] == 1
    assert cache.ledger.prefetch.failed_by_reason[FailReason.ORPHANED] == 2
    assert cache.slots(Tier.HOST)[SlotState.FREE] == 31
    cache.cancel_prefetch(ticket)


def test_a_late_read_quarantines_its_host_slots() -> None:
    cache = driver()
    ticket = cache.prefetch(TOKENS)
    assert ticket is not None
    cache.found(ticket, 4)
    (read,) = cache.pending(Purpose.PREFETCH)
    cache.be_late(read, 1)
    assert cache.slots(Tier.HOST)[SlotState.QUARANTINED] == 3
    assert cache.serve(TOKENS, ticket_id=ticket).storage_hit == PAGE
    cache.ack(read)
    assert cache.slots(Tier.HOST)[SlotState.QUARANTINED] == 0


# ---- sharing


def test_a_second_ticket_at_the_same_place_follows_the_first() -> None:
    cache = driver(prefetch_policy=PrefetchPolicy.WAIT_COMPLETE)
    first, second = cache.prefetch(TOKENS), cache.prefetch(TOKENS)
    assert first is not None
    assert second is not None
    assert set(cache.lookups) == {first}, "storage is asked once"
    cache.found(first, 4)
    assert not cache.ready(second)
    cache.ack_all()
    assert cache.ready(second)
    assert cache.serve(TOKENS, ticket_id=second)[:4] == (0, 4 * PAGE, 0, 1), "host hits for it"
    assert cache.serve(TOKENS, ticket_id=first)[:4] == (0, 0, 4 * PAGE, 1)


def test_a_prefetch_goes_on_for_those_who_follow_it() -> None:
    cache = driver(prefetch_policy=PrefetchPolicy.WAIT_COMPLETE)
    first, second = cache.prefetch(TOKENS), cache.prefetch(TOKENS)
    assert first is not None
    assert second is not None
    cache.found(first, 4)
    cache.cancel_prefetch(first)
    assert not cache.cancelled
    cache.ack_all()
    assert cache.serve(TOKENS, ticket_id=second).host_hit == 4 * PAGE


def test_two_prefetches_that_share_a_head_publish_it_once() -> None:
    cache = driver(prefetch_policy=PrefetchPolicy.WAIT_COMPLETE)
    other = [*prompt(1, 2 * PAGE), *prompt(2, 2 * PAGE), 0]
    one = cache.prefetch(TOKENS)
    cache.serve(prompt(1, PAGE), acks=False)  # so that they do not begin at the same place
    two = cache.prefetch(other)
    assert one is not None
    assert two is not None
    cache.found(one, 4)
    cache.found(two, 3)
    cache.ack_all()
    assert cache.match(TOKENS)[2] == cache.match(other)[2] == 4
    assert cache.resident(Tier.HOST) == 6, "two pages of head and two of each tail"
    cache.cancel_prefetch(one)
    cache.cancel_prefetch(two)


def test_pages_that_somebody_else_published_first_are_duplicates() -> None:
    cache = driver()
    ticket = cache.prefetch(TOKENS)
    assert ticket is not None
    cache.found(ticket, 4)
    cache.serve(TOKENS[: 2 * PAGE], acks=False)
    cache.ack_all()
    duplicates = [fact for fact in cache.facts_of(Fact.LEFT) if fact[2] == "duplicate"]
    assert [fact[1:2] + fact[4:] for fact in duplicates] == [(Tier.HOST, 2)]
    assert cache.match(TOKENS) == (2, 4, 4)
    cache.cancel_prefetch(ticket)


def test_what_a_ticket_continues_does_not_leave_before_it_is_used() -> None:
    cache = driver()
    cache.serve(TOKENS[: 2 * PAGE])
    ticket = cache.prefetched(TOKENS)
    assert cache.evict(Tier.DEVICE, 16) == 0
    assert cache.evict(Tier.HOST, 32) == 0
    assert cache.serve(TOKENS, ticket_id=ticket)[:4] == (2 * PAGE, 0, 2 * PAGE, 1)
    assert cache.evict(Tier.DEVICE, 16) == 4


def test_storage_that_is_detached_is_asked_no_more_and_forgotten() -> None:
    cache = driver()
    cache.serve(TOKENS)
    assert cache.ledger.store.ok_pages == 4
    cache.cache.detach_storage(cache.now)
    cache.settle()
    assert cache.prefetch(prompt(2, 3 * PAGE)) is None
    cache.evict(Tier.DEVICE, 4)
    cache.evict(Tier.HOST, 4)
    assert cache.facts_of(Fact.LEFT)[-1][2] == "dropped"
    cache.cache.attach_storage(cache.now)
    cache.settle()
    assert cache.prefetch(prompt(2, 3 * PAGE)) is not None


def test_a_follower_asks_for_its_own_rest_once_the_shared_head_has_arrived() -> None:
    cache = driver(prefetch_policy=PrefetchPolicy.WAIT_COMPLETE)
    head = prompt(1, 2 * PAGE)
    leader_tokens = [*head, *prompt(2, 2 * PAGE), 0]
    follower_tokens = [*head, *prompt(3, 2 * PAGE), 0]
    leader = cache.prefetch(leader_tokens)
    follower = cache.prefetch(follower_tokens)
    assert leader is not None
    assert follower is not None
    assert follower not in cache.lookups
    cache.found(leader, 4)
    cache.ack_all()
    question = cache.lookups[follower]
    assert (question.first_page, question.pages) == (2, 2)
    assert not cache.ready(follower)
    cache.found(follower, 2)
    cache.ack_all()
    assert cache.ready(follower)
    assert cache.serve(leader_tokens, ticket_id=leader)[:4] == (0, 0, 4 * PAGE, 1)
    split = cache.serve(follower_tokens, ticket_id=follower)
    assert split.storage_hit == 2 * PAGE
    assert split.computed == 1
    assert unused(cache) == {}
