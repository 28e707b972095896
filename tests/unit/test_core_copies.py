"""Copies in flight: splits under them, joiners, acknowledgements out of order, late writes."""

import numpy as np
import pytest

from kvtiers.core.interface import Blocked
from kvtiers.events import Fact
from kvtiers.testing.cache_driver import CacheDriver, missed, prompt
from kvtiers.types import (
    BlockedOn,
    CacheConfig,
    CopyCosts,
    DeclineReason,
    EndedBy,
    FailReason,
    MissReason,
    Purpose,
    SlotState,
    StoreOn,
    Tier,
    WritePolicy,
)

PAGE = 4


def driver(**settings: object) -> CacheDriver:
    defaults = {"device_pages": 16, "host_pages": 32, "page_tokens": PAGE}
    return CacheDriver(CacheConfig(**defaults | settings))


def on_host_only(cache: CacheDriver, tokens: list[int]) -> None:
    """Serve a prompt and send all of it down to host."""
    cache.serve(tokens)
    pages = len(tokens) // PAGE
    assert cache.evict(Tier.DEVICE, pages) == pages
    assert cache.match([*tokens, 0])[:2] == (0, pages)


# ---- splits under a copy


@pytest.mark.parametrize("arriving", [0, 1, 2, 3, 4])
def test_a_run_is_split_while_its_backup_is_in_flight(arriving: int) -> None:
    cache = driver()
    tokens = prompt(1, 4 * PAGE)
    lease = cache.lease(tokens)
    cache.commit(lease, tokens)
    (backup,) = cache.pending(Purpose.BACKUP)
    cache.finish(lease)
    branch = cache.lease([*tokens[: 2 * PAGE], *prompt(2, PAGE)])  # cuts the run in the middle
    assert branch.split.device_hit == 2 * PAGE
    cache.ack(backup, arriving, None if arriving == 4 else FailReason.TRANSFER)
    assert cache.resident(Tier.HOST) == arriving
    cache.abort(branch)
    cache.evict(Tier.DEVICE, 4)
    cache.ack_all()
    cache.evict(Tier.DEVICE, 4)
    assert cache.match([*tokens, 0])[2] >= arriving


def test_a_run_is_split_while_its_load_is_in_flight() -> None:
    cache = driver()
    tokens = prompt(1, 4 * PAGE)
    on_host_only(cache, tokens)
    first = cache.lease([*tokens, 0])
    (load,) = cache.pending(Purpose.LOAD_BACK)
    second = cache.lease([*tokens[: 2 * PAGE], *prompt(2, PAGE)])
    assert second.load_ops == (load.op_id,)
    assert second.split.host_hit == 2 * PAGE
    cache.ack(load)
    np.testing.assert_array_equal(first.block_table()[:2], second.block_table()[:2])
    cache.commit(second, [*tokens[: 2 * PAGE], *prompt(2, PAGE)])
    cache.commit(first, [*tokens, 0])
    cache.finish(first)
    cache.finish(second)
    assert cache.match([*tokens, 0])[0] == 4


def test_a_run_is_split_while_it_is_being_stored() -> None:
    cache = driver(storage=True)
    tokens = prompt(1, 4 * PAGE)
    lease = cache.lease(tokens)
    cache.commit(lease, tokens)
    cache.ack_all([Purpose.BACKUP])
    (store,) = cache.pending(Purpose.STORE)
    cache.finish(lease)
    branch = [*tokens[: 2 * PAGE], *prompt(2, PAGE)]
    other = cache.lease(branch)
    cache.commit(other, branch)
    cache.ack_all([Purpose.BACKUP])
    assert cache.pending(Purpose.STORE) == [store], "its head is being stored: it waits"
    cache.ack(store)
    (second,) = cache.pending(Purpose.STORE)
    assert (second.first_page, second.pages) == (2, 1)
    cache.ack(second)
    cache.finish(other)


# ---- wanted by others


def test_an_in_flight_page_is_wanted_by_a_second_and_a_third_request() -> None:
    cache = driver()
    tokens = [*prompt(1, 3 * PAGE), 0]
    on_host_only(cache, tokens[:-1])
    leases = [cache.lease(tokens) for _ in range(3)]
    (load,) = cache.pending(Purpose.LOAD_BACK)
    assert load.pages == 3, "one copy for all three"
    assert {lease.load_ops for lease in leases} == {(load.op_id,)}
    assert [lease.split.host_hit for lease in leases] == [3 * PAGE] * 3
    assert cache.ledger.first.joined_tokens == 6 * PAGE
    cache.ack(load)
    for lease in leases:
        assert lease.load_ops == ()
        cache.commit(lease, tokens)
        cache.finish(lease)
    booked = cache.ledger.first
    assert booked.host_hit_tokens == load.pages * PAGE + booked.joined_tokens
    assert cache.serve(tokens).device_hit == 3 * PAGE


def test_a_second_request_loads_only_what_the_first_copy_does_not_bring() -> None:
    cache = driver()
    tokens = prompt(1, 4 * PAGE)
    on_host_only(cache, tokens)
    first = cache.lease(tokens[: 2 * PAGE + 1])
    second = cache.lease([*tokens, 0])
    loads = cache.pending(Purpose.LOAD_BACK)
    assert [(load.first_page, load.pages) for load in loads] == [(0, 2), (2, 2)]
    assert second.load_ops == (loads[0].op_id, loads[1].op_id)
    cache.ack(loads[1])
    assert cache.match([*tokens, 0])[0] == 0, "a tail does not arrive before its head"
    assert second.load_ops == (loads[0].op_id, loads[1].op_id)
    cache.ack(loads[0])
    assert cache.match([*tokens, 0])[0] == 4
    cache.abort(first)
    cache.abort(second)


def test_joiners_share_the_fate_of_the_copy_they_joined() -> None:
    cache = driver()
    tokens = [*prompt(1, 3 * PAGE), 0]
    on_host_only(cache, tokens[:-1])
    one, two = cache.lease(tokens, request_id=901), cache.lease(tokens, request_id=902)
    (load,) = cache.pending(Purpose.LOAD_BACK)
    cache.fail(load, 1)
    assert one.voided
    assert two.voided
    cache.abort(one)
    cache.abort(two)
    assert [fact[3] for fact in cache.facts_of(Fact.ENDED)[-2:]] == [EndedBy.VOIDED] * 2
    assert cache.ledger.first.voided == 2
    assert cache.match(tokens) == (1, 3, 3), "the first page did arrive"


def test_the_next_attempt_of_a_voided_request_computes_what_could_not_be_loaded() -> None:
    cache = driver()
    tokens = [*prompt(1, 3 * PAGE), 0]
    on_host_only(cache, tokens[:-1])
    lease = cache.lease(tokens, request_id=901)
    cache.fail(cache.pending(Purpose.LOAD_BACK)[0], 1)
    cache.abort(lease)
    again = cache.lease(tokens, request_id=901)
    assert again.split[:4] == (PAGE, 0, 0, 2 * PAGE + 1)
    assert missed(again.split)[MissReason.LOAD_FAILED] == 2 * PAGE
    assert not cache.copies
    other = cache.lease(tokens, request_id=902)
    assert other.split.host_hit == 2 * PAGE, "another request may try"
    cache.abort(other)
    cache.ack_all()
    cache.commit(again, tokens)
    cache.finish(again)


def test_a_load_whose_head_failed_fails_with_it() -> None:
    cache = driver()
    tokens = prompt(1, 4 * PAGE)
    on_host_only(cache, tokens)
    first = cache.lease(tokens[: 2 * PAGE + 1])
    second = cache.lease([*tokens, 0])
    head, tail = cache.pending(Purpose.LOAD_BACK)
    cache.ack(tail)
    cache.fail(head)
    assert first.voided
    assert second.voided
    assert cache.match([*tokens, 0])[0] == 0
    assert cache.facts_of(Fact.ACKED)[-1][6] is FailReason.ORPHANED
    assert cache.slots(Tier.DEVICE)[SlotState.RESERVED] == 0
    cache.abort(first)
    cache.abort(second)


def test_nobody_joins_a_load_whose_head_is_gone_until_it_is_over() -> None:
    cache = driver()
    tokens = prompt(1, 4 * PAGE)
    on_host_only(cache, tokens)
    first = cache.lease(tokens[: 2 * PAGE + 1])
    second = cache.lease([*tokens, 0])
    head, tail = cache.pending(Purpose.LOAD_BACK)
    cache.fail(head)
    assert cache.admit([*tokens, 0]) == Blocked(BlockedOn.LOADING)
    cache.ack(tail)
    assert cache.lease([*tokens, 0]).split.host_hit == 4 * PAGE
    cache.abort(first)
    cache.abort(second)


# ---- backups


def test_backups_are_ordered_parents_first_and_applied_in_order_of_issue() -> None:
    cache = driver()
    tokens = prompt(1, 4 * PAGE)
    lease = cache.lease(tokens)
    cache.commit(lease, tokens, 2 * PAGE)
    cache.commit(lease, tokens)
    head, tail = cache.pending(Purpose.BACKUP)
    assert (head.first_page, head.pages, tail.first_page, tail.pages) == (0, 2, 2, 2)
    cache.ack(tail)
    assert cache.resident(Tier.HOST) == 0
    cache.ack(head)
    assert cache.resident(Tier.HOST) == 4
    cache.finish(lease)


def test_a_backup_without_its_head_is_no_backup() -> None:
    cache = driver()
    tokens = prompt(1, 4 * PAGE)
    lease = cache.lease(tokens)
    cache.commit(lease, tokens, 2 * PAGE)
    cache.commit(lease, tokens)
    head, tail = cache.pending(Purpose.BACKUP)
    cache.fail(head, 1)
    cache.ack(tail)
    assert cache.resident(Tier.HOST) == 1
    assert cache.slots(Tier.HOST)[SlotState.FREE] == 31
    cache.finish(lease)
    cache.ledger.check()


def test_what_a_failed_backup_left_unsaved_is_saved_by_the_next_commit_on_its_path() -> None:
    cache = driver()
    tokens = prompt(1, 2 * PAGE)
    lease = cache.lease(tokens)
    cache.commit(lease, tokens)
    cache.fail(cache.pending(Purpose.BACKUP)[0])
    cache.finish(lease)
    longer = [*tokens, *prompt(2, PAGE)]
    cache.serve(longer)
    assert cache.resident(Tier.HOST) == 3


def test_the_selective_policy_backs_up_from_the_second_distinct_request() -> None:
    cache = driver(write_policy=WritePolicy.WRITE_THROUGH_SELECTIVE)
    tokens = prompt(1, 4 * PAGE)
    lease = cache.lease(tokens)
    for computed in range(PAGE, 5 * PAGE, PAGE):  # a chunked request counts once
        cache.commit(lease, tokens, computed)
    assert not cache.copies
    cache.finish(lease)
    second = cache.lease([*tokens[: 2 * PAGE], *prompt(2, 2 * PAGE)])
    (backup,) = cache.pending(Purpose.BACKUP)
    assert (backup.first_page, backup.pages) == (0, 2), "only what both requests used"
    cache.ack(backup)
    cache.commit(second, [*tokens[: 2 * PAGE], *prompt(2, 2 * PAGE)])
    cache.finish(second)
    assert cache.resident(Tier.HOST) == 2


def test_the_bound_on_backups_in_flight_holds_and_the_rest_is_declined() -> None:
    cache = driver(backup_in_flight_pages=3)
    tokens = prompt(1, 5 * PAGE)
    lease = cache.lease(tokens)
    cache.commit(lease, tokens)
    assert [copy.pages for copy in cache.pending(Purpose.BACKUP)] == [3]
    assert cache.ledger.backup.declined_pages[DeclineReason.IN_FLIGHT_BOUND] == 2
    cache.ack_all()
    cache.finish(lease)


# ---- late


def test_a_late_load_never_touches_the_next_owner_of_its_slots() -> None:
    cache = driver(device_pages=4)
    tokens = [*prompt(1, 2 * PAGE), 0]
    on_host_only(cache, tokens[:-1])
    lease = cache.lease(tokens)
    (load,) = cache.pending(Purpose.LOAD_BACK)
    cache.be_late(load)
    assert lease.voided
    cache.abort(lease)
    assert cache.slots(Tier.DEVICE)[SlotState.QUARANTINED] == 2
    other = cache.lease(prompt(2, 2 * PAGE))
    assert not set(other.block_table()) & set(load.target_slots)
    assert cache.admit(prompt(3, PAGE)) == Blocked(BlockedOn.DEVICE_CAPACITY), (
        "a slot that a late copy can still write is nobody's"
    )
    cache.ack(load)  # it has ended, whatever it wrote
    assert cache.slots(Tier.DEVICE)[SlotState.QUARANTINED] == 0
    third = cache.lease(prompt(3, PAGE))
    assert set(third.block_table()) <= set(load.target_slots)
    assert cache.facts_of(Fact.SETTLED) == [(Fact.SETTLED, load.op_id, Purpose.LOAD_BACK, 2)]


def test_a_late_backup_keeps_its_host_slots_until_it_has_ended() -> None:
    cache = driver(host_pages=2)
    tokens = prompt(1, 2 * PAGE)
    lease = cache.lease(tokens)
    cache.commit(lease, tokens)
    (backup,) = cache.pending(Purpose.BACKUP)
    cache.be_late(backup)
    cache.finish(lease)
    assert cache.slots(Tier.HOST)[SlotState.QUARANTINED] == 2
    other = cache.lease(prompt(2, 2 * PAGE))
    cache.commit(other, prompt(2, 2 * PAGE))
    assert not cache.copies
    assert cache.ledger.backup.declined_pages[DeclineReason.HOST_CAPACITY] == 2
    cache.finish(other)
    cache.ack(backup)
    assert cache.slots(Tier.HOST)[SlotState.FREE] == 2


def test_the_pages_of_a_late_copy_that_arrived_count_and_only_the_rest_is_quarantined() -> None:
    cache = driver()
    tokens = [*prompt(1, 3 * PAGE), 0]
    on_host_only(cache, tokens[:-1])
    lease = cache.lease(tokens)
    (load,) = cache.pending(Purpose.LOAD_BACK)
    cache.be_late(load, pages_ok=1)
    assert cache.match(tokens)[0] == 1
    assert cache.slots(Tier.DEVICE)[SlotState.QUARANTINED] == 2
    cache.abort(lease)
    cache.ack(load)
    assert cache.slots(Tier.DEVICE)[SlotState.QUARANTINED] == 0


def test_a_late_copy_may_end_before_the_copies_ahead_of_it() -> None:
    cache = driver()
    tokens = prompt(1, 4 * PAGE)
    lease = cache.lease(tokens)
    cache.commit(lease, tokens, 2 * PAGE)
    cache.commit(lease, tokens)
    head, tail = cache.pending(Purpose.BACKUP)
    cache.be_late(tail)
    cache.ack(tail)
    assert cache.slots(Tier.HOST)[SlotState.RESERVED] == 4, "not applied before its head"
    cache.ack(head)
    assert cache.resident(Tier.HOST) == 2
    assert cache.slots(Tier.HOST)[SlotState.FREE] == 30
    assert not any(
        v for k, v in cache.ledger.open_ends().items() if k != "leases" and "priv" not in k
    )
    cache.finish(lease)


def test_a_late_store_keeps_the_bytes_it_reads() -> None:
    cache = driver(host_pages=2, device_pages=8, storage=True)
    tokens = prompt(1, 2 * PAGE)
    lease = cache.lease(tokens)
    cache.commit(lease, tokens)
    cache.ack_all([Purpose.BACKUP])
    (store,) = cache.pending(Purpose.STORE)
    cache.finish(lease)
    cache.be_late(store)
    cache.evict(Tier.DEVICE, 2)
    assert cache.evict(Tier.HOST, 2) == 0
    cache.ack(store)
    assert cache.evict(Tier.HOST, 2) == 2


# ---- storing


def test_stores_are_ordered_parents_first() -> None:
    cache = driver(storage=True)
    tokens = prompt(1, 4 * PAGE)
    lease = cache.lease(tokens)
    cache.commit(lease, tokens, 2 * PAGE)
    cache.ack_all([Purpose.BACKUP])
    cache.commit(lease, tokens)
    cache.ack_all([Purpose.BACKUP])
    (head,) = cache.pending(Purpose.STORE)
    assert (head.first_page, head.pages) == (0, 2)
    assert head.path_key == cache.page_key(tokens, 2)
    cache.ack(head)
    (tail,) = cache.pending(Purpose.STORE)
    assert (tail.first_page, tail.pages) == (2, 2)
    assert tail.path_key == cache.page_key(tokens, 4)
    cache.ack(tail)
    cache.finish(lease)


def test_a_store_that_failed_stores_nothing_below_it() -> None:
    cache = driver(storage=True)
    tokens = prompt(1, 4 * PAGE)
    lease = cache.lease(tokens)
    cache.commit(lease, tokens, 2 * PAGE)
    cache.ack_all([Purpose.BACKUP])
    cache.commit(lease, tokens)
    cache.ack_all([Purpose.BACKUP])
    cache.fail(cache.pending(Purpose.STORE)[0], 1, FailReason.STORAGE)
    assert not cache.pending(Purpose.STORE)
    cache.finish(lease)


def test_storing_on_eviction_stores_what_host_is_about_to_lose() -> None:
    cache = driver(storage=True, store_on=StoreOn.EVICT, host_pages=4, device_pages=4)
    tokens = prompt(1, 2 * PAGE)
    cache.serve(tokens)
    assert not cache.facts_of(Fact.ISSUED)[1:], "a backup and nothing else"
    cache.evict(Tier.DEVICE, 2)
    assert cache.evict(Tier.HOST, 2) == 0
    (store,) = cache.pending(Purpose.STORE)
    cache.ack(store)
    assert cache.evict(Tier.HOST, 2) == 2
    assert cache.facts_of(Fact.LEFT)[-1][2] == "demoted", "storage still has them"


# ---- declines


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"load_back_threshold_tokens": 3 * PAGE}, DeclineReason.BELOW_THRESHOLD),
        (
            {
                "copy_costs": CopyCosts(
                    copy_fixed_seconds=1.0, compute_seconds_per_token=0.9 / (2 * PAGE)
                )
            },
            DeclineReason.BREAK_EVEN,
        ),
    ],
)
def test_a_load_that_is_not_worth_it_is_declined_and_its_pages_are_computed(
    settings: dict[str, object], reason: DeclineReason
) -> None:
    cache = driver(**settings)
    tokens = [*prompt(1, 2 * PAGE), 0]
    on_host_only(cache, tokens[:-1])
    lease = cache.lease(tokens)
    assert lease.split[:4] == (0, 0, 0, 2 * PAGE + 1)
    assert missed(lease.split)[MissReason.LOAD_DECLINED] == 2 * PAGE
    assert cache.ledger.load_back.declined_pages[reason] == 2
    cache.abort(lease)


def test_a_load_that_breaks_even_is_made() -> None:
    costs = CopyCosts(copy_fixed_seconds=1.0, compute_seconds_per_token=1.0 / (2 * PAGE))
    cache = driver(copy_costs=costs)
    tokens = [*prompt(1, 2 * PAGE), 0]
    on_host_only(cache, tokens[:-1])
    assert cache.lease(tokens).split.host_hit == 2 * PAGE


def test_the_last_page_of_a_prompt_that_is_on_host_only_is_not_loaded() -> None:
    cache = driver()
    tokens = prompt(1, 3 * PAGE)
    on_host_only(cache, tokens)
    lease = cache.lease(tokens)
    (load,) = cache.pending(Purpose.LOAD_BACK)
    assert load.pages == 2
    assert lease.split[:4] == (0, 2 * PAGE, 0, PAGE)
    cache.ack(load)
    cache.commit(lease, tokens)
    assert cache.facts_of(Fact.PUBLISHED)[-1][2:] == (0, 1), "it is donated at commit"
    cache.finish(lease)
