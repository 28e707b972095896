"""Who leaves a tier, in which order, with what outcome, under every write policy and retention."""

from random import Random

import pytest

from kvtiers.core.interface import Blocked
from kvtiers.core.policies import FRONTIERS, new_order
from kvtiers.core.tree import Run
from kvtiers.events import Fact
from kvtiers.testing.cache_driver import CacheDriver, missed, prompt
from kvtiers.types import (
    TOKEN_BYTES,
    BlockedOn,
    CacheConfig,
    DeclineReason,
    FailReason,
    LeaveOutcome,
    LeaveReason,
    MissReason,
    Namespace,
    Purpose,
    Retention,
    SlotState,
    Tier,
    WritePolicy,
)

PAGE = 4
PAGE_BYTES = PAGE * TOKEN_BYTES


def driver(**settings: object) -> CacheDriver:
    return CacheDriver(CacheConfig(**{"device_pages": 8, "page_tokens": PAGE} | settings))


def left(cache: CacheDriver) -> list[tuple[object, ...]]:
    """What left, as (tier, outcome, reason, pages)."""
    return [fact[1:] for fact in cache.facts_of(Fact.LEFT)]


def here(cache: CacheDriver, *names: int, pages: int = 2) -> dict[int, int]:
    """Pages of each text that device or host has."""
    return {name: cache.match([*prompt(name, pages * PAGE), 0])[2] for name in names}


# ---- device


def test_eviction_frees_exactly_what_is_asked_and_takes_tails_first() -> None:
    cache = driver()
    cache.serve(prompt(1, 4 * PAGE))
    assert cache.evict(Tier.DEVICE, 1) == 1
    assert here(cache, 1, pages=4) == {1: 3}
    assert cache.evict(Tier.DEVICE, 2) == 2
    assert here(cache, 1, pages=4) == {1: 1}
    assert cache.evict(Tier.DEVICE, 5) == 1, "there was only one left"
    assert left(cache)[-1] == (Tier.DEVICE, LeaveOutcome.DROPPED, LeaveReason.CAPACITY, 1)


def test_an_admission_evicts_exactly_what_it_lacks() -> None:
    cache = driver()
    for name in (1, 2, 3, 4):
        cache.serve(prompt(name, 2 * PAGE))
    cache.serve(prompt(5, 3 * PAGE))
    assert here(cache, 1, 2, 3, 4) == {1: 0, 2: 1, 3: 2, 4: 2}


def test_least_recently_used_means_least_recently_released() -> None:
    cache = driver()
    early, late = cache.lease(prompt(1, 2 * PAGE)), cache.lease(prompt(2, 2 * PAGE))
    cache.commit(early, prompt(1, 2 * PAGE))
    cache.commit(late, prompt(2, 2 * PAGE))
    cache.finish(late)
    cache.finish(early)
    cache.serve(prompt(3, 5 * PAGE))
    assert here(cache, 1, 2) == {1: 2, 2: 1}, "admitted first, released last"


def test_a_leased_page_never_leaves() -> None:
    cache = driver()
    cache.serve(prompt(1, 4 * PAGE))
    cache.serve(prompt(2, 2 * PAGE))
    running = cache.lease(prompt(1, 2 * PAGE + 1))
    assert cache.evict(Tier.DEVICE, 8) == 4, "the tail of 1, and 2"
    assert here(cache, 1, 2) == {1: 2, 2: 0}
    cache.abort(running)


def test_a_branch_leaves_before_the_head_it_shares() -> None:
    cache = driver()
    head = prompt(1, 2 * PAGE)
    cache.serve([*head, *prompt(2, 2 * PAGE)])
    cache.serve([*head, *prompt(3, 2 * PAGE)])
    assert cache.evict(Tier.DEVICE, 4) == 4
    assert here(cache, 1) == {1: 2}


def test_lfu_keeps_what_was_used_more_often_although_longer_ago() -> None:
    for policy, kept in (("lru", {1: 0, 2: 2}), ("lfu", {1: 2, 2: 0})):
        cache = driver(eviction=policy, device_pages=4)
        for _ in range(4):
            cache.serve(prompt(1, 2 * PAGE))
        cache.serve(prompt(2, 2 * PAGE))
        cache.serve(prompt(3, 2 * PAGE))
        assert here(cache, 1, 2) == kept, policy


@pytest.mark.parametrize("name", sorted(FRONTIERS))
def test_an_order_gives_its_oldest_first_whatever_way_a_run_came_in(name: str) -> None:
    order = new_order(name)
    runs = [Run(b"", 0, 4, None, 0, 1) for _ in range(6)]
    for stamp, run in enumerate(runs):
        run.stamp = stamp
    for stamp in (0, 2, 4):
        order.add(runs[stamp])
    for stamp in (5, 1, 3):
        order.enter(runs[stamp])
    assert list(order) == runs
    assert list(reversed(order)) == runs[::-1]
    assert len(order) == 6
    for index, run in enumerate(runs):
        assert order.oldest() is run
        assert run in order
        order.discard(run)
        order.discard(run)
        assert run not in order
        assert list(order) == runs[index + 1 :]
    assert order.oldest() is None


def test_of_runs_released_together_the_deeper_is_the_older() -> None:
    order = new_order("lru")
    upper, lower = Run(b"", 0, 4, None, 0, 2), Run(b"", 0, 4, None, 2, 2)
    order.add(lower)
    order.enter(upper)
    assert list(order) == [lower, upper]


# ---- device over host


def test_a_page_with_a_host_copy_is_demoted_at_once() -> None:
    cache = driver(host_pages=8)
    cache.serve(prompt(1, 2 * PAGE))
    assert cache.evict(Tier.DEVICE, 2) == 2
    assert left(cache) == [(Tier.DEVICE, LeaveOutcome.DEMOTED, LeaveReason.CAPACITY, 2)]
    assert cache.match([*prompt(1, 2 * PAGE), 0]) == (0, 2, 2)


def test_under_write_back_a_page_is_copied_before_its_slot_is_free() -> None:
    cache = driver(host_pages=8, write_policy=WritePolicy.WRITE_BACK)
    tokens = prompt(1, 8 * PAGE)
    cache.serve(tokens, acks=False)
    assert not cache.copies
    assert cache.admit(prompt(2, 3 * PAGE)) == Blocked(BlockedOn.EVICTION)
    (backup,) = cache.pending(Purpose.BACKUP)
    assert (backup.first_page, backup.pages) == (5, 3), "tail first, exactly as many"
    assert cache.slots(Tier.DEVICE)[SlotState.FREE] == 0
    cache.ack(backup)
    lease = cache.lease(prompt(2, 3 * PAGE))
    assert cache.match([*tokens, 0]) == (5, 8, 8)
    cache.abort(lease)


@pytest.mark.parametrize("retention", list(Retention))
def test_what_an_eviction_has_saved_does_not_go_for_the_store_of_its_head(
    retention: Retention,
) -> None:
    # Otherwise the head does not fit either, and the eviction saves the same tail for ever.
    cache = driver(
        device_pages=8,
        host_pages=2,
        storage=True,
        write_policy=WritePolicy.WRITE_BACK,
        retention=retention,
    )
    cache.serve(prompt(1, 7 * PAGE))
    assert cache.evict(Tier.DEVICE, 2) == 0
    cache.ack_all()
    assert cache.resident(Tier.HOST) == 2
    assert cache.evict(Tier.DEVICE, 2) == 2


def test_a_victim_that_could_not_be_saved_is_dropped_and_not_tried_for_ever() -> None:
    cache = driver(host_pages=8, write_policy=WritePolicy.WRITE_BACK)
    cache.serve(prompt(1, 8 * PAGE), acks=False)
    assert cache.admit(prompt(2, 3 * PAGE)) == Blocked(BlockedOn.EVICTION)
    cache.fail(cache.pending(Purpose.BACKUP)[0])
    cache.abort(cache.lease(prompt(2, 3 * PAGE)))
    assert left(cache) == [(Tier.DEVICE, LeaveOutcome.DROPPED, LeaveReason.COPY_FAILED, 3)]


def test_the_selective_policy_drops_what_was_used_once() -> None:
    cache = driver(host_pages=8, write_policy=WritePolicy.WRITE_THROUGH_SELECTIVE)
    cache.serve(prompt(1, 2 * PAGE))
    cache.serve(prompt(2, 2 * PAGE))
    cache.serve(prompt(2, 2 * PAGE))
    assert cache.evict(Tier.DEVICE, 4) == 4
    assert here(cache, 1, 2) == {1: 0, 2: 2}
    assert (Tier.DEVICE, LeaveOutcome.DROPPED, LeaveReason.SELECTIVE_COLD, 2) in left(cache)


def test_half_a_host_under_write_through_is_never_worse_than_no_host() -> None:
    """Backups and prefetches go on; what both tiers hold is at least what device alone holds."""
    with_host = driver(device_pages=8, host_pages=4, storage=True, prefetch_threshold_tokens=PAGE)
    alone = driver(device_pages=8)
    backed_up = 0
    for number in range(40):
        text = (number * 7 + number // 3) % 6
        tokens = prompt(text, (2 + text % 3) * PAGE + 1)
        with_two, with_one = with_host.serve(tokens), alone.serve(tokens)
        hits = with_two.device_hit + with_two.host_hit
        assert hits >= with_one.device_hit
        backed_up_now = with_host.ledger.backup.ok_pages
        if with_two.computed > PAGE:
            assert backed_up_now > backed_up, "mirrors made room for new backups"
        backed_up = backed_up_now
        with_host.ack_all()
    ticket = with_host.prefetched(prompt(9, 3 * PAGE), 2)
    split = with_host.serve(prompt(9, 3 * PAGE), ticket_id=ticket)
    assert split.storage_hit == 2 * PAGE


def test_with_host_no_larger_than_device_a_lost_mirror_is_backed_up_again_or_dropped() -> None:
    cache = driver(device_pages=8, host_pages=2)
    cache.serve(prompt(1, 2 * PAGE))
    cache.serve(prompt(2, 2 * PAGE))
    assert cache.resident(Tier.HOST) == 2
    assert left(cache)[-1] == (Tier.HOST, LeaveOutcome.COVERED, LeaveReason.CAPACITY, 2)
    assert cache.evict(Tier.DEVICE, 2) == 2
    assert here(cache, 1, 2) == {1: 0, 2: 2}, "the older one has no room below what outlives it"
    assert (
        Tier.DEVICE,
        LeaveOutcome.DROPPED,
        LeaveReason.WRITE_THROUGH_UNBACKED_EVICTION,
        2,
    ) in left(cache)


def test_a_drop_takes_what_only_host_has_below_with_it_and_counts_it() -> None:
    cache = driver(device_pages=4, host_pages=3, write_policy=WritePolicy.WRITE_BACK)
    cache.serve(prompt(1, 4 * PAGE))
    for _ in range(2):
        cache.evict(Tier.DEVICE, 2)
        cache.ack_all()
    assert cache.match([*prompt(1, 4 * PAGE), 0]) == (2, 4, 4), "2 and 3 are on host only"
    cache.evict(Tier.DEVICE, 1)
    cache.fail(cache.pending(Purpose.BACKUP)[0])
    assert cache.evict(Tier.DEVICE, 1) == 1
    assert here(cache, 1, pages=4) == {1: 1}
    assert left(cache)[-2:] == [
        (Tier.HOST, LeaveOutcome.DROPPED, LeaveReason.COPY_FAILED, 2),
        (Tier.DEVICE, LeaveOutcome.DROPPED, LeaveReason.COPY_FAILED, 1),
    ]


def test_write_back_of_a_prompt_longer_than_the_host_tier() -> None:
    """Storage never holds a tail without its head, and its stored prefix is found again."""
    cache = driver(
        device_pages=12,
        host_pages=4,
        storage=True,
        write_policy=WritePolicy.WRITE_BACK,
        prefetch_threshold_tokens=PAGE,
    )
    tokens = prompt(1, 10 * PAGE)
    stored: set[bytes] = set()

    def carry_out() -> None:
        while cache.copies:
            copy = next(iter(cache.copies.values()))
            if copy.purpose is Purpose.STORE:
                for end in range(copy.first_page + 1, copy.first_page + copy.pages + 1):
                    page = copy.path_key[: end * PAGE_BYTES]
                    assert end == 1 or page[:-PAGE_BYTES] in stored, "a tail without its head"
                    stored.add(page)
            cache.ack(copy)

    lease = cache.lease(tokens)
    cache.commit(lease, tokens)
    cache.finish(lease)
    for name in range(2, 8):
        while isinstance(result := cache.admit(prompt(name, 6 * PAGE)), Blocked):
            carry_out()
        carry_out()
        cache.commit(result, prompt(name, 6 * PAGE))
        cache.finish(result)
        carry_out()
    prefix = 0
    while cache.page_key(tokens, prefix + 1) in stored and prefix < 10:
        prefix += 1
    assert prefix > 0
    assert here(cache, 1, pages=10)[1] == 0, "gone from device and host"
    ticket = cache.prefetch(tokens)
    assert ticket is not None
    cache.found(ticket, prefix)
    carry_out()
    split = cache.serve(tokens, ticket_id=ticket)
    assert split.storage_hit == min(prefix, 2) * PAGE, "as much as half of host has room for"


# ---- host


def test_host_gives_up_the_oldest_and_what_leaves_its_last_tier_is_dropped() -> None:
    cache = driver(host_pages=6)
    for name in (1, 2, 3):
        cache.serve(prompt(name, 2 * PAGE))
    cache.evict(Tier.DEVICE, 4)
    assert cache.evict(Tier.HOST, 3) == 3
    assert here(cache, 1, 2, 3) == {1: 0, 2: 1, 3: 2}
    assert left(cache)[-1] == (Tier.HOST, LeaveOutcome.DROPPED, LeaveReason.CAPACITY, 3)
    assert cache.evict(Tier.HOST, 3) == 3
    assert left(cache)[-2:] == [
        (Tier.HOST, LeaveOutcome.COVERED, LeaveReason.CAPACITY, 2),
        (Tier.HOST, LeaveOutcome.DROPPED, LeaveReason.CAPACITY, 1),
    ]
    assert here(cache, 3) == {3: 2}, "the device still has it"


def test_a_device_hit_refreshes_the_mirror() -> None:
    cache = driver(device_pages=12, host_pages=6)
    for name in (1, 2, 3):
        cache.serve(prompt(name, 2 * PAGE))
    cache.serve(prompt(1, 2 * PAGE))
    cache.serve(prompt(4, 2 * PAGE))
    cache.flush(Tier.DEVICE)
    assert here(cache, 1, 2, 3, 4) == {1: 2, 2: 0, 3: 2, 4: 2}


def test_stored_pages_that_leave_host_are_demoted_not_dropped() -> None:
    cache = driver(host_pages=4, storage=True)
    cache.serve(prompt(1, 2 * PAGE))
    cache.evict(Tier.DEVICE, 2)
    cache.evict(Tier.HOST, 2)
    assert left(cache)[-1] == (Tier.HOST, LeaveOutcome.DEMOTED, LeaveReason.CAPACITY, 2)


def test_exclusive_host_gives_up_mirrors_before_sole_copies_so_the_tiers_hold_distinct_data() -> (
    None
):
    held = {}
    for retention in Retention:
        cache = driver(
            device_pages=4,
            host_pages=4,
            write_policy=WritePolicy.WRITE_BACK,
            retention=retention,
            last_token_rule=False,
        )
        for name in (1, 2, 3, 4):
            cache.serve(prompt(name, 2 * PAGE))
        assert here(cache, 1, 2, 3, 4) == {1: 2, 2: 2, 3: 2, 4: 2}
        assert cache.serve(prompt(1, 2 * PAGE)).host_hit == 2 * PAGE, "mirrors are made"
        cache.serve(prompt(2, 2 * PAGE))
        held[retention] = here(cache, 1, 2, 3, 4)
    assert held[Retention.EXCLUSIVE] == {1: 2, 2: 2, 3: 2, 4: 2}
    assert held[Retention.INCLUSIVE] == {1: 2, 2: 2, 3: 0, 4: 2}


def test_the_cleaner_copies_ahead_of_eviction_and_then_eviction_does_not_wait() -> None:
    cache = driver(
        device_pages=10,
        host_pages=20,
        write_policy=WritePolicy.WRITE_BACK,
        cleaner_low=0.2,
        cleaner_high=0.4,
    )
    cache.serve(prompt(1, 4 * PAGE))
    cache.tick()
    assert not cache.copies, "enough is free"
    cache.serve(prompt(2, 5 * PAGE))
    cache.tick()
    backups = cache.pending(Purpose.BACKUP)
    assert sum(copy.pages for copy in backups) >= 3
    assert {copy.first_page for copy in backups} == {0}, "the older text, from its root"
    cache.ack_all()
    lease = cache.lease(prompt(3, 4 * PAGE))
    assert not cache.pending(Purpose.BACKUP)
    cache.abort(lease)


@pytest.mark.parametrize("retention", Retention)
def test_what_the_cleaner_has_saved_is_not_given_up_to_save_more(retention: Retention) -> None:
    cache = driver(
        device_pages=10,
        host_pages=3,
        write_policy=WritePolicy.WRITE_BACK,
        retention=retention,
        cleaner_low=0.5,
        cleaner_high=1.0,
    )
    for name in range(5):
        cache.serve(prompt(name, 2 * PAGE))
    copied = 0
    for _ in range(10):
        cache.tick()
        copied += sum(copy.pages for copy in cache.pending(Purpose.BACKUP))
        cache.ack_all()
    assert copied == 3, "as many as host has room for, once"


def test_the_cleaner_rests_under_the_other_policies() -> None:
    cache = driver(host_pages=20, cleaner_low=1.0, cleaner_high=1.0)
    lease = cache.lease(prompt(1, 2 * PAGE))
    cache.commit(lease, prompt(1, 2 * PAGE))
    cache.fail(cache.pending(Purpose.BACKUP)[0], 0, FailReason.TRANSFER)
    cache.finish(lease)
    cache.tick()
    assert not cache.copies


def test_a_backup_that_host_has_no_room_for_is_declined() -> None:
    cache = driver(device_pages=8, host_pages=2)
    running = cache.lease(prompt(1, 2 * PAGE))
    cache.commit(running, prompt(1, 2 * PAGE))
    cache.ack_all()
    cache.serve(prompt(2, 2 * PAGE))
    assert cache.ledger.backup.declined_pages[DeclineReason.HOST_CAPACITY] == 2
    cache.finish(running)


# ---- ghosts


def test_a_page_asked_for_again_after_it_left_is_a_miss_with_a_reason_and_a_regret() -> None:
    cache = driver(device_pages=4, host_pages=4)
    cache.serve(prompt(1, 2 * PAGE + 1))
    cache.evict(Tier.DEVICE, 2)
    cache.evict(Tier.HOST, 2)
    split = cache.serve(prompt(1, 2 * PAGE + 1))
    assert missed(split) == {MissReason.EVICTED: 2 * PAGE, MissReason.SUB_PAGE_TAIL: 1}
    assert cache.ledger.regret_tokens[Tier.HOST, LeaveReason.CAPACITY] == 2 * PAGE


def test_a_loss_is_told_from_ordinary_eviction() -> None:
    cache = driver(device_pages=4, host_pages=4, write_policy=WritePolicy.WRITE_THROUGH_SELECTIVE)
    cache.serve(prompt(1, 2 * PAGE + 1))
    cache.evict(Tier.DEVICE, 2)
    split = cache.serve(prompt(1, 2 * PAGE + 1))
    assert missed(split)[MissReason.DROPPED] == 2 * PAGE
    assert cache.ledger.regret_tokens[Tier.DEVICE, LeaveReason.SELECTIVE_COLD] == 2 * PAGE


def test_ghosts_are_looked_up_past_the_match_only_and_stop_at_the_first_unknown_page() -> None:
    cache = driver()
    cache.serve(prompt(1, 4 * PAGE))
    cache.evict(Tier.DEVICE, 2)
    tokens = [*prompt(1, 3 * PAGE), *prompt(2, PAGE), 0]
    split = cache.serve(tokens)
    assert split.device_hit == 2 * PAGE
    assert missed(split) == {
        MissReason.EVICTED: PAGE,
        MissReason.UNKNOWN: PAGE,
        MissReason.SUB_PAGE_TAIL: 1,
    }


def test_ghosts_are_forgotten_when_they_are_recalled_when_there_are_too_many_and_by_a_flush() -> (
    None
):
    cache = driver(ghost_pages=3)
    tokens = prompt(1, 4 * PAGE + 1)
    cache.serve(tokens)
    cache.evict(Tier.DEVICE, 4)
    assert len(cache.cache.state.ghosts) == 3  # type: ignore[attr-defined]
    assert missed(cache.serve(tokens))[MissReason.EVICTED] == 3 * PAGE, "the deepest went first"
    assert len(cache.cache.state.ghosts) == 0  # type: ignore[attr-defined]
    cache.evict(Tier.DEVICE, 4)
    cache.flush(Tier.DEVICE)
    assert missed(cache.serve(tokens))[MissReason.UNKNOWN] == 4 * PAGE


def test_without_ghosts_every_miss_is_unknown() -> None:
    cache = driver(ghost_pages=0)
    cache.serve(prompt(1, 2 * PAGE + 1))
    cache.evict(Tier.DEVICE, 2)
    assert missed(cache.serve(prompt(1, 2 * PAGE + 1)))[MissReason.UNKNOWN] == 2 * PAGE


def test_ghosts_of_two_namespaces_are_two() -> None:
    cache = driver()
    cache.serve(prompt(1, 2 * PAGE + 1), Namespace("m", salt="a"))
    cache.evict(Tier.DEVICE, 2)
    split = cache.serve(prompt(1, 2 * PAGE + 1), Namespace("m", salt="b"))
    assert missed(split)[MissReason.UNKNOWN] == 2 * PAGE


@pytest.mark.parametrize("seed", range(60))
def test_making_room_that_cannot_be_enough_comes_to_an_end(seed: int) -> None:
    """A request larger than what is not leased: copies end, and then it is told so.

    Victims that took each other's host copies would order copies for ever.
    """
    chance = Random(seed)
    cache = driver(
        device_pages=chance.randint(8, 14),
        host_pages=chance.randint(1, 6),
        write_policy=WritePolicy.WRITE_BACK,
        retention=chance.choice(list(Retention)),
        cleaner_low=chance.choice((0.0, 0.3)),
        cleaner_high=chance.choice((0.3, 0.9)),
    )
    held = cache.lease(prompt(99, 2 * PAGE))
    for _ in range(12):
        cache.serve(prompt(chance.randrange(6), chance.randint(1, 3) * PAGE))
    large = prompt(98, cache.config.device_pages * PAGE - PAGE)
    for _ in range(100):
        answer = cache.admit(large)
        assert isinstance(answer, Blocked)
        if answer.on is BlockedOn.DEVICE_CAPACITY:
            break
        cache.ack_all()
        cache.tick()
    assert answer.on is BlockedOn.DEVICE_CAPACITY
    cache.ack_all()
    cache.abort(held)


@pytest.mark.parametrize("retention", Retention)
def test_victims_above_what_tickets_hold_do_not_take_each_others_copies(
    retention: Retention,
) -> None:
    """Two texts on device continue on host, held by prefetches; host has one page besides."""
    cache = driver(
        device_pages=8,
        host_pages=5,
        storage=True,
        prefetch_threshold_tokens=1,
        prefetch_in_flight_share=1.0,
        write_policy=WritePolicy.WRITE_BACK,
        retention=retention,
        cleaner_low=0.0,
        cleaner_high=0.0,
    )
    texts = [[*prompt(name, 4 * PAGE), 0] for name in (1, 2)]
    for text in texts:
        cache.serve(text[: 2 * PAGE])
    tickets = [cache.prefetched(text) for text in texts]
    copies = 0
    for _ in range(30):
        answer = cache.admit(prompt(3, 7 * PAGE))
        assert isinstance(answer, Blocked)
        if answer.on is BlockedOn.DEVICE_CAPACITY:
            break
        copies += len(cache.pending(Purpose.BACKUP))
        cache.ack_all()
    assert answer.on is BlockedOn.DEVICE_CAPACITY, f"{copies} copies, and no end"
    for ticket in tickets:
        cache.cancel_prefetch(ticket)
    for _ in range(30):
        answer = cache.admit(prompt(3, 7 * PAGE))
        if not isinstance(answer, Blocked):
            break
        cache.ack_all()
    assert not isinstance(answer, Blocked)
    cache.abort(answer)
