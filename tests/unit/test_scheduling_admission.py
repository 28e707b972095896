"""Who is admitted, who is passed, who holds the line; and what admission books (9.3)."""

from dataclasses import replace

import pytest
from scheduling_fakes import NAMESPACE, Bench, ScriptedCache

from kvtiers.core.hits import split_cached_prefix_by_tier
from kvtiers.core.interface import Blocked, Refused
from kvtiers.events import Fact
from kvtiers.scheduling.request import RequestState
from kvtiers.types import BlockedOn, HitSplit, LeaveOutcome, LeaveReason, RequestOutcome, Tier

CAPACITY = Blocked(BlockedOn.DEVICE_CAPACITY)
EVICTION = Blocked(BlockedOn.EVICTION)


def outcomes(outputs):
    return {o.request.request_id: o.outcome for o in outputs if o.outcome is not None}


# --------------------------------------------------------------------- never fits


def test_a_request_that_can_never_fit_is_refused_at_once_and_counts_nothing():
    bench = Bench(ScriptedCache(device_pages=4))
    request = bench.request(10, max_tokens=8)
    assert request.ended
    assert request.outcome is RequestOutcome.REFUSED
    assert "needs 5 pages" in request.message
    assert "holds 4 pages of 4 tokens" in request.message
    assert bench.scheduler.has_work
    assert outcomes(bench.scheduler.step()) == {1: RequestOutcome.REFUSED}
    assert not bench.scheduler.has_work
    assert bench.cache.attempts == []
    assert bench.of(Fact.REQUEST_ENDED) == [
        (Fact.REQUEST_ENDED, 1, RequestOutcome.REFUSED, 10, 0, None, 0.0)
    ]
    assert bench.of(Fact.REFUSED) == [(Fact.REFUSED, 1, 5, 4)]


def test_a_request_that_just_fits_is_served():
    bench = Bench(ScriptedCache(device_pages=4))
    request = bench.request(10, max_tokens=7)
    bench.run()
    assert request.outcome is RequestOutcome.LENGTH


def test_a_refusal_by_the_cache_ends_the_request_with_its_numbers():
    bench = Bench()
    request = bench.request(10)
    bench.cache.answers[1] = [Refused(7, 6)]
    bench.run()
    assert request.outcome is RequestOutcome.REFUSED
    assert "needs 7 pages" in request.message


# --------------------------------------------------------------------- blocked


def test_a_blocked_request_lets_smaller_ones_pass_for_a_bounded_number():
    bench = Bench(overtakes_max=3, overtake_seconds=1e9)
    head = bench.request(20)
    bench.cache.answers[1] = [EVICTION] * 100
    small = [bench.request(4) for _ in range(6)]
    for _ in range(5):
        bench.scheduler.step()
    assert [r.ended for r in small] == [True] * 3 + [False] * 3
    bench.cache.answers[1] = []
    bench.now += 1
    bench.run()
    assert head.outcome is RequestOutcome.LENGTH
    assert all(r.ended for r in small)


def test_a_blocked_request_lets_smaller_ones_pass_for_a_bounded_time():
    bench = Bench(overtakes_max=10**6, overtake_seconds=2.0)
    bench.request(4, max_tokens=100)  # its end may bring room
    bench.request(20)
    bench.cache.answers[2] = [CAPACITY] * 100
    bench.scheduler.step()
    bench.now = 1.9
    early = bench.request(4)
    bench.scheduler.step()
    bench.now = 2.0
    late = bench.request(4)
    bench.scheduler.step()
    assert early.ended
    assert not late.ended


def test_a_request_that_has_no_room_although_nothing_runs_lets_others_pass():
    """Pins hold the rest: no end of another request brings it any nearer."""
    bench = Bench(let_pass_seconds=5.0, overtake_seconds=1.0, overtakes_max=2)
    head = bench.request(20)
    bench.cache.answers[1] = [CAPACITY] * 10**6
    passed = []
    for second in range(20):
        bench.now = float(second)
        passed.append(bench.request(4, max_tokens=1))
        bench.scheduler.step()
    assert all(request.ended for request in passed)
    bench.cache.answers[1] = []
    bench.run()
    assert head.outcome is RequestOutcome.LENGTH


def test_it_holds_the_line_again_after_a_while_to_be_tried_alone():
    bench = Bench(let_pass_seconds=5.0, overtake_seconds=1.0, retry_seconds=0.1)
    bench.request(20)
    bench.cache.answers[1] = [CAPACITY] * 10**6
    bench.scheduler.step()
    long = bench.request(4, max_tokens=100)
    bench.now = 1.0
    bench.scheduler.step()
    assert long.lease is not None
    bench.now = 6.0
    late = bench.request(4)
    bench.scheduler.step()
    assert late.lease is None
    assert not late.ended
    bench.scheduler.cancel(long.request_id)
    bench.scheduler.step()  # tried alone, in vain
    bench.scheduler.step()
    assert late.ended


def test_a_blocked_attempt_is_repeated_when_something_was_freed_or_after_a_while():
    bench = Bench(retry_seconds=0.5)
    bench.request(20)
    bench.cache.answers[1] = [CAPACITY] * 100
    bench.scheduler.step()
    bench.scheduler.step()
    assert bench.cache.attempts == [1]
    bench.pumped = [lambda: None]
    bench.scheduler.step()
    assert bench.cache.attempts == [1, 1]
    bench.now = 0.5
    bench.scheduler.step()
    assert bench.cache.attempts == [1, 1, 1]
    bench.scheduler.step()
    assert bench.cache.attempts == [1, 1, 1]


def test_a_step_makes_only_so_many_attempts_that_end_blocked():
    bench = Bench(blocked_tries_per_step=2)
    for i in range(1, 6):
        bench.request(4)
        bench.cache.answers[i] = [CAPACITY] * 10
    bench.scheduler.step()
    assert bench.cache.attempts == [1, 2]


def test_the_time_from_the_first_block_on_eviction_to_the_grant_is_told_once():
    bench = Bench(retry_seconds=0.1)
    bench.request(20)
    bench.cache.answers[1] = [CAPACITY, EVICTION, EVICTION]
    for now in (0.0, 1.0, 2.0, 3.5):
        bench.now = now
        bench.scheduler.step()
    assert bench.of(Fact.EVICTION_TIMED) == [(Fact.EVICTION_TIMED, 2.5)]


def test_an_admission_that_evicts_at_once_tells_the_time_of_the_call():
    bench = Bench()
    admit = bench.cache.admit

    def evicting(*args, **kwargs):
        bench.now += 0.125
        reason = (LeaveOutcome.DEMOTED, LeaveReason.CAPACITY)
        bench.cache.facts.append((Fact.LEFT, Tier.DEVICE, *reason, 3))
        return admit(*args, **kwargs)

    bench.cache.admit = evicting
    bench.request(20)
    bench.run()
    assert bench.of(Fact.EVICTION_TIMED) == [(Fact.EVICTION_TIMED, 0.125)]
    assert len(bench.of(Fact.LEFT)) == 1


def test_a_request_blocked_on_capacity_alone_gives_no_eviction_time():
    bench = Bench(retry_seconds=0.1)
    bench.request(20)
    bench.cache.answers[1] = [CAPACITY]
    bench.scheduler.step()
    bench.now = 1.0
    bench.run()
    assert bench.of(Fact.EVICTION_TIMED) == []


def test_a_retracted_or_ended_request_is_not_remembered_as_blocked():
    bench = Bench()
    request = bench.request(20)
    bench.cache.answers[1] = [CAPACITY] * 10
    bench.scheduler.step()
    bench.scheduler.cancel(request.request_id)
    assert bench.scheduler.step() == []
    assert bench.cache.attempts == [1]


# --------------------------------------------------------------------- prefetch


def test_a_request_waits_for_its_prefetch_and_others_pass_without_bound():
    bench = Bench(overtakes_max=0, overtake_seconds=0.0)
    bench.cache.prefetching = {1}
    first = bench.request(8)
    assert first.state is RequestState.PREFETCHING
    others = [bench.request(4) for _ in range(20)]
    bench.scheduler.step()
    assert all(r.ended for r in others)
    assert first.state is RequestState.PREFETCHING
    bench.cache.prefetching = set()
    bench.run()
    assert first.ended
    assert first.ticket_id is None
    assert bench.cache.cancelled == []


def test_a_cancelled_request_revokes_its_prefetch():
    bench = Bench()
    bench.cache.prefetching = {1}
    bench.request(8)
    assert bench.scheduler.cancel(1)
    assert bench.cache.cancelled == [1]
    assert not bench.scheduler.has_work
    assert not bench.scheduler.cancel(1)


def test_where_nothing_runs_and_prefetches_hold_the_room_they_are_given_up_last_in_line_first():
    bench = Bench()
    bench.cache.prefetching = {2, 3, 4}
    first = bench.request(8)
    for _ in range(3):
        bench.request(8)
    bench.cache.answers[1] = [CAPACITY] * 2
    bench.scheduler.step()
    assert first.ended
    assert bench.cache.cancelled == [4, 3]


def test_a_request_gives_up_its_own_prefetch_before_it_would_wait_for_ever():
    bench = Bench()
    bench.cache.prefetching = {1}
    request = bench.request(8)
    bench.cache.prefetching = set()
    bench.cache.answers[1] = [CAPACITY]
    bench.scheduler.step()
    assert bench.cache.cancelled == [1]
    assert request.outcome is RequestOutcome.LENGTH


def with_storage(**config) -> Bench:
    cache = ScriptedCache()
    cache.config = replace(cache.config, host_pages=100, storage=True, prefetch_threshold_tokens=8)
    return Bench(cache, **config)


def test_a_request_whose_prefetch_brought_nothing_asks_again_for_what_it_lost_since():
    bench = with_storage(max_running=1)
    tokens = list(range(13))
    bench.request(tokens)
    bench.run()  # its three pages are on device now
    runs = bench.request(4, max_tokens=5)
    bench.step()
    bench.cache.prefetching = {3}
    waits = bench.request(tokens)
    assert waits.ticket_id == 3
    bench.cache.prefetching = set()  # answered: nothing more there
    bench.step()
    bench.cache.published.clear()
    bench.cache.prefetching = {3}
    waits.enter(RequestState.WAITING)  # as the step would that looked at it
    while not runs.ended:
        bench.step()
    bench.step()
    assert bench.cache.cancelled == [3], "the ticket that brought nothing was given up"
    assert waits.state is RequestState.PREFETCHING
    bench.cache.prefetching = set()
    bench.run()
    assert waits.outcome is RequestOutcome.LENGTH


def test_a_request_that_lost_its_pages_while_it_waited_asks_storage_again():
    bench = with_storage(max_running=1)
    tokens = list(range(13))
    bench.request(tokens)
    bench.run()  # its three pages are on device now
    runs = bench.request(4, max_tokens=5)
    bench.step()
    waits = bench.request(tokens)
    assert waits.state is RequestState.WAITING, "all of it is on device: nothing to ask for"
    bench.cache.published.clear()
    bench.cache.prefetching = {waits.request_id}
    while not runs.ended:
        bench.step()
    bench.step()
    assert waits.state is RequestState.PREFETCHING
    bench.cache.prefetching = set()
    bench.run()
    assert waits.ended


@pytest.mark.parametrize("lost_pages", [1, 2])
def test_a_loss_below_the_prefetch_threshold_is_computed(lost_pages):
    bench = with_storage(max_running=1)
    tokens = list(range(13))
    bench.request(tokens)
    bench.run()
    runs = bench.request(4, max_tokens=5)
    bench.step()
    waits = bench.request(tokens)
    for pages in range(4 - lost_pages, 4):  # of the three, from its end
        bench.cache.published.discard((NAMESPACE.digest, waits.key[: pages * 16]))
    bench.cache.prefetching = {waits.request_id}
    while not runs.ended:
        bench.step()
    bench.step()
    assert (waits.state is RequestState.PREFETCHING) is (lost_pages == 2)


def test_a_request_whose_pages_leave_again_and_again_ends_all_the_same():
    bench = with_storage(max_running=1)
    tokens = list(range(13))
    bench.request(tokens)
    bench.run()
    published = set(bench.cache.published)
    request = bench.request(tokens)
    asks = 0
    for _ in range(20):
        bench.cache.published.clear()  # lost ...
        bench.cache.prefetching = {request.request_id}
        bench.step()
        if request.state is not RequestState.PREFETCHING:
            break
        asks += 1
        bench.cache.published |= published  # ... found, and given up before it was used
        bench.scheduler._roster.give_up_prefetch(request, bench.now)
        request.asked_with_tokens = 12
    assert asks == 2, "after the first time, when nothing was missing"
    assert request.ended


def test_only_so_many_waiting_requests_prefetch_at_a_time():
    bench = Bench(prefetches_max=2)
    bench.cache.prefetching = {1, 2, 3, 4}
    requests = [bench.request(8) for _ in range(4)]
    assert [r.ticket_id for r in requests] == [1, 2, None, None]
    bench.scheduler.cancel(1)
    bench.scheduler.step()
    assert [r.ticket_id for r in requests] == [None, 2, 3, None]
    bench.cache.prefetching = set()
    bench.run()
    assert all(r.ended for r in requests)


def test_a_step_looks_at_a_bounded_number_of_waiting_requests():
    bench = Bench(looks_per_step=5, blocked_tries_per_step=100)
    for request_id in range(1, 6):
        bench.request(8)
        bench.cache.answers[request_id] = [EVICTION] * 2
    last = bench.request(8)
    bench.scheduler.step()
    assert not last.ended
    bench.now = 0.5
    bench.run()
    assert last.ended


def test_who_waits_for_storage_hides_nobody_behind():
    bench = Bench(looks_per_step=5)
    bench.cache.prefetching = set(range(1, 21))
    for _ in range(20):
        bench.request(8)
    last = bench.request(8)
    bench.scheduler.step()
    assert last.ended


# --------------------------------------------------------------------- counting (9.3)


def admitted(split: HitSplit, chunks: int = 1) -> Bench:
    tokens = split.prompt
    bench = Bench(max_prefill_tokens=-(-split.computed // chunks))
    bench.cache.splits[1] = split
    bench.request(tokens)
    bench.run()
    return bench


@pytest.mark.parametrize(
    ("prefix", "host_hit", "loaded", "start", "length", "device", "host", "storage"),
    [
        (12, 12, 4, 4, 8, 4, 0, 8),
        (12, 12, 12, 4, 8, 0, 4, 8),
        (8, 0, 0, 8, 8, 8, 0, 0),
    ],
)
def test_the_split_of_an_admission_is_booked_once_with_its_first_result(
    prefix, host_hit, loaded, start, length, device, host, storage
):
    tiers = split_cached_prefix_by_tier(prefix, min(host_hit, loaded), length, start)
    split = HitSplit(tiers.device, tiers.host, tiers.storage, 16 - prefix)
    bench = admitted(split)
    (stats,) = bench.reports
    assert (stats.device_hit_tokens, stats.host_hit_tokens, stats.storage_hit_tokens) == (
        device,
        host,
        storage,
    )
    assert stats.input_tokens == 16 - prefix
    assert stats.hit_tokens + stats.input_tokens == 16
    (ended,) = bench.of(Fact.REQUEST_ENDED)
    assert ended[5] == split


def test_a_chunk_continuation_adds_input_but_no_hits():
    bench = admitted(HitSplit(4, 2, 6, 12), chunks=3)
    assert [s.input_tokens for s in bench.reports] == [4, 4, 4]
    assert [s.hit_tokens for s in bench.reports] == [12, 0, 0]
    assert [s.new_requests for s in bench.reports] == [1, 0, 0]


def test_a_rejected_attempt_counts_nothing_until_it_is_granted():
    bench = Bench(retry_seconds=0.1)
    bench.request(12)
    bench.cache.answers[1] = [CAPACITY]
    bench.scheduler.step()
    assert bench.reports == []
    bench.now = 1.0
    bench.run()
    assert [s.input_tokens for s in bench.reports] == [12]


def test_a_batch_that_was_aborted_reports_nothing():
    bench = Bench(fail=lambda batch: {0: "NaN in layer 3"})
    request = bench.request(12)
    outputs = bench.run()
    assert bench.reports == []
    assert outcomes(outputs) == {1: RequestOutcome.FAILED}
    assert request.message == "NaN in layer 3"
    assert bench.cache.leases[0].ended_by == "aborted"
    assert bench.cache.leases[0].committed == []
