"""The life of a request: prompts of every length, publishing, duplicates, forks, retraction."""

import numpy as np
import pytest

from kvtiers.core.interface import Blocked, Refused
from kvtiers.events import Fact
from kvtiers.testing.cache_driver import NAMESPACE, CacheDriver, missed, prompt
from kvtiers.types import (
    Attempt,
    BlockedOn,
    CacheConfig,
    EndedBy,
    FailReason,
    HitSplit,
    MissReason,
    Namespace,
    Purpose,
    SlotState,
    Tier,
    UnfulfilledReason,
)

PAGE = 4


def driver(**settings: object) -> CacheDriver:
    return CacheDriver(CacheConfig(**{"device_pages": 16, "page_tokens": PAGE} | settings))


def split(device: int = 0, host: int = 0, storage: int = 0, computed: int = 0) -> HitSplit:
    return HitSplit(device, host, storage, computed)


# ---- prompts of every length


@pytest.mark.parametrize("tokens", [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 3 * PAGE + 2])
def test_a_repeated_prompt_hits_all_whole_pages_but_the_last_token(tokens: int) -> None:
    cache = driver()
    first = cache.serve(prompt(1, tokens))
    second = cache.serve(prompt(1, tokens))
    assert first[:4] == (0, 0, 0, tokens)
    hit = (tokens - 1) // PAGE * PAGE
    assert second[:4] == (hit, 0, 0, tokens - hit)


@pytest.mark.parametrize("tokens", [1, PAGE - 1, PAGE, PAGE + 1])
def test_every_computed_token_of_a_repeated_prompt_has_its_reason(tokens: int) -> None:
    cache = driver()
    cache.serve(prompt(1, tokens))
    reasons = missed(cache.serve(prompt(1, tokens)))
    if tokens % PAGE:
        assert reasons == {MissReason.SUB_PAGE_TAIL: tokens % PAGE}
    else:
        assert reasons == {MissReason.LAST_TOKEN: PAGE}


def test_an_empty_prompt_matches_nothing_and_is_refused_as_input() -> None:
    cache = driver()
    assert cache.match([]) == (0, 0, 0)
    cache.serve(prompt(1, PAGE))
    assert cache.match([]) == (0, 0, 0)
    with pytest.raises(ValueError, match="at least one"):
        cache.admit([])
    cache.check()


def test_a_prompt_wholly_on_device_shares_its_last_page_and_computes_it_again() -> None:
    cache = driver()
    cache.serve(prompt(1, 2 * PAGE))
    lease = cache.lease(prompt(1, 2 * PAGE))
    assert lease.split[:4] == (PAGE, 0, 0, PAGE)
    assert lease.shared_tokens == 2 * PAGE, "the tree's last page is shared, and not written"
    assert lease.computed_tokens == PAGE
    cache.commit(lease, prompt(1, 2 * PAGE))
    cache.finish(lease)
    assert cache.resident(Tier.DEVICE) == 2, "nothing was published twice"


def test_without_the_last_token_rule_a_whole_prompt_can_be_a_hit() -> None:
    cache = driver(last_token_rule=False)
    cache.serve(prompt(1, 2 * PAGE))
    assert cache.serve(prompt(1, 2 * PAGE))[:4] == (2 * PAGE, 0, 0, 0)


def test_a_prompt_that_is_a_strict_prefix_of_another_hits_it() -> None:
    cache = driver()
    long = prompt(1, 4 * PAGE)
    cache.serve(long)
    assert cache.serve(long[: 2 * PAGE + 1])[:4] == (2 * PAGE, 0, 0, 1)
    assert cache.serve(long[: 2 * PAGE])[:4] == (PAGE, 0, 0, PAGE)
    assert cache.serve([*long, 7])[:4] == (4 * PAGE, 0, 0, 1), "and it costs the long one nothing"


def test_a_prompt_that_branches_inside_a_page_shares_only_whole_pages() -> None:
    cache = driver()
    first = prompt(1, 3 * PAGE)
    cache.serve(first)
    other = [*first[: PAGE + 2], *prompt(2, 2 * PAGE)]
    assert cache.serve(other).device_hit == PAGE
    assert cache.match(first)[2] == 3
    assert cache.match(other)[2] == 3


def test_two_namespaces_with_the_same_tokens_never_match() -> None:
    cache = driver()
    mine, yours = Namespace("m", salt="mine"), Namespace("m", salt="yours")
    cache.serve(prompt(1, 3 * PAGE), mine)
    assert cache.match(prompt(1, 3 * PAGE), yours) == (0, 0, 0)
    assert cache.serve(prompt(1, 3 * PAGE), yours).device_hit == 0
    assert cache.serve(prompt(1, 3 * PAGE), mine).device_hit == 2 * PAGE


def test_matching_changes_nothing_not_even_recency() -> None:
    cache = driver(device_pages=4)
    cache.serve(prompt(1, 2 * PAGE))
    cache.serve(prompt(2, 2 * PAGE))
    facts = len(cache.facts)
    for _ in range(3):
        cache.match(prompt(1, 2 * PAGE))
    assert len(cache.facts) == facts
    cache.serve(prompt(3, 2 * PAGE))
    assert cache.match(prompt(1, 2 * PAGE))[2] == 0, "the older one left, although looked at last"
    assert cache.match(prompt(2, 2 * PAGE))[2] == 2


# ---- slots of a lease


def test_a_block_table_names_shared_slots_first_and_every_slot_once() -> None:
    cache = driver()
    cache.serve(prompt(1, 2 * PAGE))
    one = cache.lease(prompt(1, 5 * PAGE), reserve_tokens=PAGE)
    two = cache.lease([*prompt(1, 2 * PAGE), *prompt(2, PAGE)])
    assert one.shared_tokens == two.shared_tokens == 2 * PAGE
    table_one, table_two = one.block_table(), two.block_table()
    assert len(table_one) == 6
    assert one.capacity_tokens == 6 * PAGE
    np.testing.assert_array_equal(table_one[:2], table_two[:2])
    own = [*table_one[2:], *table_two[2:], *table_one[:2]]
    assert len(set(own)) == len(own)


def test_a_block_table_does_not_change_while_the_lease_publishes() -> None:
    cache = driver()
    tokens = prompt(1, 4 * PAGE)
    lease = cache.lease(tokens)
    before = lease.block_table().copy()
    for computed in (3, PAGE, 3 * PAGE, 4 * PAGE):
        cache.commit(lease, tokens, computed)
        np.testing.assert_array_equal(lease.block_table(), before)
    cache.finish(lease)


def test_growing_a_lease_takes_slots_and_says_so_when_there_are_none() -> None:
    cache = driver(device_pages=4)
    lease = cache.lease(prompt(1, 2 * PAGE))
    assert cache.extend(lease, 2 * PAGE), "it has them already"
    assert cache.extend(lease, 3 * PAGE + 1)
    assert lease.capacity_tokens == 4 * PAGE
    assert not cache.extend(lease, 4 * PAGE + 1)
    assert lease.capacity_tokens == 4 * PAGE
    cache.abort(lease)
    assert cache.slots(Tier.DEVICE)[SlotState.FREE] == 4


def test_a_request_larger_than_the_device_is_refused_and_counts_nothing() -> None:
    cache = driver(device_pages=4)
    result = cache.admit(prompt(1, 4 * PAGE), reserve_tokens=1)
    assert result == Refused(needs_pages=5, capacity_pages=4)
    assert [fact[0] for fact in cache.facts] == [Fact.REFUSED]
    assert cache.ledger.first.planned == 0


def test_a_request_that_finds_no_room_holds_nothing_and_is_admitted_when_there_is() -> None:
    cache = driver(device_pages=4)
    running = cache.lease(prompt(1, 3 * PAGE))
    assert cache.admit(prompt(2, 2 * PAGE)) == Blocked(BlockedOn.DEVICE_CAPACITY)
    assert cache.slots(Tier.DEVICE)[SlotState.PRIVATE] == 3
    cache.abort(running)
    assert cache.lease(prompt(2, 2 * PAGE)).capacity_tokens == 2 * PAGE


def test_a_blocked_request_makes_its_own_cached_prefix_the_youngest() -> None:
    cache = driver(device_pages=6)
    cache.serve(prompt(1, 2 * PAGE))
    cache.serve(prompt(2, 2 * PAGE))
    running = cache.lease(prompt(3, 2 * PAGE))
    blocked = cache.admit(prompt(1, 6 * PAGE))
    assert blocked == Blocked(BlockedOn.DEVICE_CAPACITY)
    cache.abort(running)
    cache.serve(prompt(4, 4 * PAGE))
    assert cache.match(prompt(1, 2 * PAGE))[2] == 2
    assert cache.match(prompt(2, 2 * PAGE))[2] == 0


# ---- publishing


def test_pages_are_published_as_they_become_complete() -> None:
    cache = driver()
    tokens = prompt(1, 3 * PAGE + 1)
    lease = cache.lease(tokens)
    for computed, pages in ((PAGE - 1, 0), (PAGE, 1), (2 * PAGE + 3, 2), (3 * PAGE + 1, 3)):
        cache.commit(lease, tokens, computed)
        assert cache.match(prompt(1, 4 * PAGE))[2] == pages
    cache.finish(lease)
    assert cache.slots(Tier.DEVICE)[SlotState.FREE] == 13


def test_a_running_request_publishes_its_output_too() -> None:
    cache = driver()
    tokens = prompt(1, PAGE)
    lease = cache.lease(tokens, reserve_tokens=PAGE)
    cache.commit(lease, tokens)
    cache.commit(lease, prompt(1, 2 * PAGE))
    cache.finish(lease)
    assert cache.match(prompt(1, 2 * PAGE + 1)) == (2, 2, 2)
    assert cache.ledger.first.input_tokens == PAGE, "output is no input"


def test_the_first_publisher_wins_and_the_other_copy_is_a_duplicate() -> None:
    cache = driver()
    tokens = prompt(1, 2 * PAGE + 1)
    one, two = cache.lease(tokens), cache.lease(tokens)
    cache.commit(one, tokens)
    before = two.block_table().copy()
    cache.commit(two, tokens)
    np.testing.assert_array_equal(two.block_table(), before)
    assert cache.slots(Tier.DEVICE)[SlotState.PRIVATE] == 4, "one tail each, and two duplicates"
    cache.finish(two)
    cache.finish(one)
    assert cache.facts_of(Fact.ENDED)[0][7] == 2
    assert cache.slots(Tier.DEVICE) | {SlotState.FREE: 0} == {
        SlotState.FREE: 0,
        SlotState.RESERVED: 0,
        SlotState.PRIVATE: 0,
        SlotState.RESIDENT: 2,
        SlotState.QUARANTINED: 0,
    }


def test_a_page_that_only_host_has_gets_the_publishers_slot_as_its_device_copy() -> None:
    cache = driver(host_pages=16, load_back_threshold_tokens=10 * PAGE)
    tokens = prompt(1, 2 * PAGE + 1)
    cache.serve(tokens)
    cache.evict(Tier.DEVICE, 2)
    lease = cache.lease(tokens)
    assert lease.split[:4] == (0, 0, 0, 2 * PAGE + 1), "too little to load"
    cache.commit(lease, tokens)
    assert cache.facts_of(Fact.PUBLISHED)[-1][2:] == (0, 2), "two donated pages"
    cache.finish(lease)
    assert cache.match(tokens) == (2, 2, 2)
    assert cache.ledger.backup.ok_pages == 2, "host still had them"


def test_n_forks_share_the_prompt_and_recompute_only_its_last_page() -> None:
    cache = driver(device_pages=32)
    tokens = prompt(1, 3 * PAGE + 2)
    lease = cache.lease(tokens)
    with pytest.raises(RuntimeError, match="after its first commit"):
        cache.fork(lease)
    cache.commit(lease, tokens)
    forks = [cache.fork(lease) for _ in range(3)]
    for fork in forks:
        assert not isinstance(fork, Blocked)
        assert fork.split[:4] == (3 * PAGE, 0, 0, 2)
        assert fork.shared_tokens == 3 * PAGE
        np.testing.assert_array_equal(fork.block_table()[:3], lease.block_table()[:3])
    assert cache.ledger.first.booked == 1, "one request's traffic"
    for number, fork in enumerate(forks):
        own = [*tokens, *prompt(10 + number, 2)]
        assert cache.extend(fork, len(own))
        cache.commit(fork, own)
        cache.finish(fork)
    cache.finish(lease)
    assert cache.match([*tokens, *prompt(10, 1)])[2] == 3
    assert cache.match([*tokens, *prompt(10, 2)])[2] == 4
    assert cache.ledger.fork.booked == 3
    assert not any(cache.ledger.open_ends().values())


def test_a_fork_that_finds_no_room_holds_nothing() -> None:
    cache = driver(device_pages=4)
    tokens = prompt(1, 3 * PAGE + 1)
    lease = cache.lease(tokens)
    cache.commit(lease, tokens)
    assert cache.fork(lease) == Blocked(BlockedOn.DEVICE_CAPACITY)
    cache.finish(lease)
    assert not any(cache.ledger.open_ends().values())


def test_a_retracted_request_keeps_its_pages_and_its_second_prefill_is_no_traffic() -> None:
    cache = driver()
    tokens = prompt(1, 2 * PAGE + 1)
    lease = cache.lease(tokens, reserve_tokens=PAGE)
    cache.commit(lease, tokens)
    grown = prompt(1, 3 * PAGE)
    cache.commit(lease, grown)
    cache.retract(lease)
    before = cache.ledger.first.input_tokens
    again = cache.lease(grown, attempt=Attempt.REPLAY)
    assert again.split[:4] == (2 * PAGE, 0, 0, PAGE)
    cache.commit(again, grown)
    cache.finish(again)
    assert cache.ledger.first.input_tokens == before
    assert cache.ledger.first.booked == 1
    assert cache.ledger.replay.booked == 1
    assert [fact[3] for fact in cache.facts_of(Fact.ENDED)] == [
        EndedBy.RETRACTED,
        EndedBy.FINISHED,
    ]


# ---- aborting at every stage


def test_an_abort_before_the_first_result_books_nothing() -> None:
    cache = driver()
    lease = cache.lease(prompt(1, 2 * PAGE))
    cache.abort(lease)
    assert cache.ledger.first.aborted == 1
    assert cache.ledger.first.booked == 0
    assert cache.match(prompt(1, 2 * PAGE))[2] == 0
    assert cache.slots(Tier.DEVICE)[SlotState.FREE] == 16


def test_an_abort_between_chunks_keeps_what_was_published() -> None:
    cache = driver()
    tokens = prompt(1, 3 * PAGE)
    lease = cache.lease(tokens)
    cache.commit(lease, tokens, 2 * PAGE)
    cache.abort(lease)
    assert cache.match(tokens)[2] == 2
    assert cache.slots(Tier.DEVICE)[SlotState.FREE] == 14
    assert cache.ledger.first.booked == 1


def test_an_abort_while_decoding_gives_back_every_slot_but_the_published() -> None:
    cache = driver()
    tokens = prompt(1, PAGE + 1)
    lease = cache.lease(tokens, reserve_tokens=3 * PAGE)
    cache.commit(lease, tokens)
    cache.commit(lease, prompt(1, 2 * PAGE + 1))
    cache.abort(lease)
    assert cache.slots(Tier.DEVICE)[SlotState.FREE] == 14


def test_an_abort_while_its_load_is_in_flight_leaves_the_load_to_finish() -> None:
    cache = driver(host_pages=16)
    tokens = prompt(1, 2 * PAGE + 1)
    cache.serve(tokens)
    cache.evict(Tier.DEVICE, 2)
    lease = cache.lease(tokens)
    (load,) = cache.pending(Purpose.LOAD_BACK)
    cache.abort(lease)
    assert cache.slots(Tier.DEVICE)[SlotState.RESERVED] == 2
    cache.ack(load)
    assert cache.match(tokens) == (2, 2, 2)
    assert cache.evict(Tier.DEVICE, 2) == 2, "it became resident and evictable"


def test_an_abort_while_a_backup_of_its_pages_is_in_flight_changes_nothing_for_it() -> None:
    cache = driver(host_pages=16)
    tokens = prompt(1, 2 * PAGE + 1)
    lease = cache.lease(tokens)
    cache.commit(lease, tokens)
    (backup,) = cache.pending(Purpose.BACKUP)
    cache.abort(lease)
    cache.ack(backup)
    assert cache.resident(Tier.HOST) == 2


def test_an_abort_before_storage_has_answered_forgets_the_question() -> None:
    cache = driver(host_pages=16, storage=True, prefetch_threshold_tokens=1)
    ticket = cache.prefetch(prompt(1, 4 * PAGE))
    assert ticket is not None
    cache.cancel_prefetch(ticket)
    cache.found(ticket, 3)
    assert not cache.copies, "nothing is read for a request that is gone"
    assert not any(cache.ledger.open_ends().values())


def test_an_abort_while_its_prefetch_is_in_flight_revokes_it() -> None:
    cache = driver(host_pages=16, storage=True, prefetch_threshold_tokens=1)
    ticket = cache.prefetch(prompt(1, 4 * PAGE))
    assert ticket is not None
    cache.found(ticket, 3)
    (read,) = cache.pending(Purpose.PREFETCH)
    cache.cancel_prefetch(ticket)
    assert cache.cancelled == {read.op_id}
    cache.fail(read, 0, FailReason.CANCELLED)
    assert cache.ledger.asked.unused_tokens[UnfulfilledReason.DROPPED] == 3 * PAGE
    assert cache.slots(Tier.HOST)[SlotState.FREE] == 16
    assert cache.match(prompt(1, 4 * PAGE), NAMESPACE) == (0, 0, 0)
